"""The answer to a query: status, reason, place and cost, and how to tell a person about it."""

import dataclasses
import enum
import html
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from hkv._arguments import check_type
from hkv._layout import Form, Layout

if TYPE_CHECKING:
    from hkv._identity import Need


class Status(enum.IntEnum):
    """What can be done with one form of one segment."""

    NOT_NEEDED = 0
    REUSE = 1
    RECOVER = 2
    RECOMPUTE = 3


class Place(enum.IntEnum):
    """Where the bytes of a form lie."""

    NONE = 0
    DEVICE = 1
    HOST = 2
    LOCAL_DISK = 3
    REMOTE = 4


class Provenance(enum.IntEnum):
    """How a payload came to be; what is computed from it inherits the worst."""

    EXACT = 0
    REPLAYED = 1
    LOSSY = 2


class Reason(enum.IntEnum):
    """The first check that failed, in the order of the levels. `sentence` tells a person."""

    def __new__(cls, code: int, level: int = 0, sentence: str = ""):
        """A code with its level and its sentence."""
        self = int.__new__(cls, code)
        self._value_ = code
        self.level = level
        self.sentence = sentence
        return self

    level: int
    sentence: str

    OK = 0, 0, "verified"
    NOT_FOUND = 1, 1, "no stored segment has these tokens under this identity"
    IDENTITY = 2, 1, "stored under another salt, adapter, model or media"
    START = 3, 1, "stored at another absolute position"
    PARENT = 4, 1, "the segment before it is another one"
    TOKENS = 5, 1, "the stored token ids differ"
    LIFECYCLE = 6, 1, "the form is not READY: dropped, stale, or being written"
    PAGE_MISSING = 7, 1, "a page was dropped"
    STAMP = 8, 1, "a page was overwritten: its stamp is not the segment's"
    ROWS = 9, 1, "the rows do not add up to the tokens they stand for"
    DIGEST = 10, 1, "no digest was recorded, or the payload no longer has it"
    RANGE = 11, 1, "the rows kept do not cover what this position needs"
    ABI = 12, 2, "written for another kernel ABI"
    EPOCH = 13, 2, "computed with other weights"
    INDEXER_VERSION = 14, 2, "the indexer changed since"
    PROVENANCE = 15, 2, "made by an approximation that the query does not accept"
    GROUPS = 16, 3, "not a boundary of every group"
    SHARD = 17, 4, "a shard lacks its part of the page"
    BYTES = 18, 4, "the arrays lie in memory in another way"
    LENGTH = 19, 1, "the length given is negative or beyond the bucket"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Availability:
    """What a batch of prompts can reuse. Q requests, S segments, F forms, G groups, K boundaries.

    The vector describes a resume at `matched`, the furthest position whose tokens are stored.
    """

    status: jax.Array  # u8[Q, S, F], `Status`
    reason: jax.Array  # u8[Q, S, F], `Reason`
    place: jax.Array  # u8[Q, S, F], `Place`
    tokens: jax.Array  # i32[Q, S, F], tokens to compute to get the form back
    group_reason: jax.Array  # u8[Q, S, G], `Reason` per group, whether needed or not
    rows: jax.Array  # i32[Q, S], stored segments that match; N for none
    version: jax.Array  # u32[Q, S], their versions when verified
    mark: jax.Array  # u32[Q, S], digest of what they were then
    held: jax.Array  # i32[Q, S, G, 2], positions whose rows they hold
    copied: jax.Array  # i32[Q, S, G, 2], positions that can be fetched from the DISK form
    bytes: jax.Array  # i32[Q, S], what to fetch of it for a resume at `matched`
    matched: jax.Array  # i32[Q], tokens that stored segments share with the prompt, at most N - 1
    length: jax.Array  # i32[Q], tokens of the prompt
    furthest: jax.Array  # i32[Q, G], each group's own furthest boundary
    positions: jax.Array  # i32[Q, K], position of each boundary
    usable: jax.Array  # bool[Q, K], every group is there, nothing to recover
    recoverable: jax.Array  # bool[Q, K], a fetch or a bounded replay recovers what is missing
    boundary_reason: jax.Array  # u8[Q, K], OK, GROUPS, or NOT_FOUND past what is stored
    group_ok: jax.Array  # bool[Q, G, K], boundaries of each group alone
    runs: jax.Array  # i32[Q, G, K], how far back each group is held without a gap, in tokens
    need: "Need"  # what was asked with
    asked: jax.Array  # u32[Q], digest of prompt and need
    layout: Layout = jax.tree.static()

    @property
    def boundary(self) -> jax.Array:
        """`i32[Q]`: the furthest usable position; 0 where only a cold run is right."""
        return _furthest(self.usable, self.positions)

    def _repr_html_(self) -> str:
        return "".join(_html(self, q) for q in range(self.matched.shape[0]))

    def __repr__(self) -> str:
        if isinstance(self.matched, jax.core.Tracer) or not hasattr(self.matched, "shape"):
            return "Availability(traced)"
        return "\n".join(explain(self))


@jax.jit
def _furthest(valid: jax.Array, positions: jax.Array) -> jax.Array:
    return jnp.max(jnp.where(valid, positions, 0), axis=-1)


def table(availability: Availability, q: int = 0) -> list[list[str]]:
    """The availability of request `q` as rows of text: the header, then one row per segment."""
    a = jax.device_get(availability)
    B = a.layout.segment_tokens
    out = [["tokens", *(f.name for f in Form)]]
    for s in range(-(-int(a.length[q]) // B)):
        cells = []
        for f in Form:
            status, reason = Status(int(a.status[q, s, f])), Reason(int(a.reason[q, s, f]))
            text = "-" if status is Status.NOT_NEEDED else status.name
            if status in (Status.RECOVER, Status.RECOMPUTE) and reason is not Reason.OK:
                text += f" ({reason.name})"
            cells.append(text)
        out.append([f"{s * B}-{min((s + 1) * B, int(a.length[q])) - 1}", *cells])
    return out


def explain(availability: Availability) -> list[str]:
    """One sentence per reason with counts, per request of the batch.

    Args:
        availability: what `query` returned.

    Returns:
        For each request a summary line, then a line per (form, reason) that is not OK.
    """
    check_type("availability", availability, Availability)
    a = jax.device_get(availability)
    out = []
    for q in range(a.matched.shape[0]):
        at = int(np.max(np.where(a.usable[q], a.positions[q], 0)))
        back = int(np.max(np.where(a.recoverable[q], a.positions[q], 0)))
        out.append(
            f"request {q}: {int(a.length[q])} tokens, {int(a.matched[q])} stored, "
            f"usable to {at}, recoverable to {back}"
        )
        for f in Form:
            wanted = a.status[q, :, f] >= Status.RECOVER
            for code in np.unique(a.reason[q, wanted, f]):
                n = int(np.sum(wanted & (a.reason[q, :, f] == code)))
                kinds = np.unique(a.status[q, wanted & (a.reason[q, :, f] == code), f])
                verb = "/".join(Status(int(k)).name for k in kinds)
                reason = Reason(int(code))
                out.append(
                    f"  {f.name}: {n} segment{'s' * (n > 1)} {verb}, level {reason.level}: "
                    f"{reason.sentence}"
                )
    return out


def _html(availability: Availability, q: int) -> str:
    color = {"REUSE": "#c8e6c9", "RECOVER": "#fff3c4", "RECOMPUTE": "#ffcdd2"}
    head, *body = table(availability, q)
    cells = [
        "<tr>" + "".join(f"<th>{html.escape(c)}</th>" for c in head) + "</tr>",
        *(
            "<tr>"
            + "".join(
                f'<td style="background:{color.get(c.split(" ")[0], "none")}">{html.escape(c)}</td>'
                for c in row
            )
            + "</tr>"
            for row in body
        ),
    ]
    lines = _request_lines(availability, q)
    return f"<table>{''.join(cells)}</table><pre>{html.escape(chr(10).join(lines))}</pre>"


def _request_lines(availability: Availability, q: int) -> list[str]:
    lines = explain(availability)
    starts = [i for i, line in enumerate(lines) if line.startswith("request ")] + [len(lines)]
    return lines[starts[q] : starts[q + 1]]
