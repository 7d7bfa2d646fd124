"""What a model keeps in its cache, as one frozen and hashable description.

`Layout` is the only static thing in the library: every shape follows from it. It holds no array.
"""

import dataclasses
import enum
import hashlib
import json
import math
from collections.abc import Mapping, Sequence

import jax.numpy as jnp
import numpy as np

from hkv._arguments import check_int, check_type
from hkv._rules import Kind, Rule

ABI_FORMAT = 1  # raised when the meaning of any field of a fingerprint changes


class Form(enum.IntEnum):
    """The five forms in which a token segment can be kept."""

    COMPRESSED = 0
    TAIL = 1
    WINDOW = 2
    INDEXER = 3
    DISK = 4


FORMS = len(Form)
DEVICE_FORMS = tuple(f for f in Form if f is not Form.DISK)
_FORM_RULES = {
    Form.COMPRESSED: {Kind.HISTORY},
    Form.TAIL: {Kind.TAIL, Kind.STATE},
    Form.WINDOW: {Kind.WINDOW, Kind.CHUNK},
    Form.INDEXER: {Kind.INDEXER, Kind.TAIL, Kind.STATE},
}


@dataclasses.dataclass(frozen=True)
class Group:
    """Layers that share a form, a rule, a page geometry, a dtype and a kernel ABI.

    `abi` says what the bytes mean beyond their shape (entry byte layout, overlap half order, RoPE
    base, visibility rule ...): any sorted-by-name set of plain values. Two groups whose
    fingerprints differ are never read by each other's kernels.
    """

    name: str
    form: Form
    rule: Rule
    layers: tuple[int, ...]  # model layer numbers, in order
    row: tuple[int, ...]  # shape of one row
    dtype: str = "float32"
    abi: tuple[tuple[str, str | int | float | bool], ...] = ()
    rows_per_page: int = 0  # R; 0 lets the layout put a whole segment on a page
    pages: int = 0  # P, null page included; 0 lets the layout size the pool for all segments

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of one layer."""
        return math.prod(self.row) * jnp.dtype(self.dtype).itemsize

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all of the group's layers."""
        return self.row_bytes * self.rows_per_page * len(self.layers)

    def fingerprint(self) -> int:
        """The kernel ABI of this group as one `u32`: equal only where the bytes mean the same."""
        meaning = {
            "format": ABI_FORMAT,
            "form": self.form.name,
            "rule": [self.rule.kind.value, self.rule.size, self.rule.overlap],
            "layers": self.layers,
            "row": self.row,
            "dtype": self.dtype,
            "rows_per_page": self.rows_per_page,
            "abi": dict(self.abi),
        }
        text = json.dumps(meaning, sort_keys=True).encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "little")


@dataclasses.dataclass(frozen=True)
class Layout:
    """Everything static about a cache. Letters: N segments, B tokens per segment, G groups.

    Args:
        groups: the model's groups.
        segment_tokens: B, a multiple of every ratio.
        segments: N, rows of the segment table.
        buckets: lengths in tokens (multiples of B) to which inputs are padded; one compiled
            program each. The last is the longest request.
        leases: how many requests can hold a lease at once.
        shards: over how many devices each page is split.
        tenants: how many tenants can have caps of their own.
        ahead: tokens that a request runs at most between two calls of `trim`. Its windows and
            tails recycle then: it reserves the pages of so many tokens and of what its rules look
            back at, instead of those of all its tokens, which is what 0 means.
        disk: whether segments may have copies outside of device memory: the DISK form.

    Raises:
        ValueError: geometry that does not divide, or a pool too small for one longest request.
    """

    groups: tuple[Group, ...]
    segment_tokens: int
    segments: int
    buckets: tuple[int, ...]
    leases: int = 64
    shards: int = 1
    tenants: int = 0
    ahead: int = 0
    disk: bool = False

    def __post_init__(self):
        for name in ("groups", "buckets"):
            object.__setattr__(self, name, _tuple(name, getattr(self, name)))
        check_int("segment_tokens", self.segment_tokens, 1)
        check_int("segments", self.segments, 1, 2**28)  # a few times that many index an i32
        check_int("leases", self.leases, 1, 2**28)
        check_int("shards", self.shards, 1)
        check_int("tenants", self.tenants, 0, 2**28)
        check_int("ahead", self.ahead, 0)
        check_type("disk", self.disk, bool)
        for n in self.buckets:
            check_int("buckets", n, 1)
        for name in ("segment_tokens", "segments", "leases", "shards", "tenants", "ahead"):
            object.__setattr__(self, name, int(getattr(self, name)))
        object.__setattr__(self, "buckets", tuple(map(int, self.buckets)))
        B = self.segment_tokens
        if not self.buckets or list(self.buckets) != sorted(set(self.buckets)):
            raise ValueError(f"`buckets` must rise, got {self.buckets}; give lengths in tokens")
        for n in self.buckets:
            if n % B:
                raise ValueError(f"`buckets` holds {n}, not a multiple of segment_tokens {B}")
        if self.segments < self.buckets[-1] // B:
            raise ValueError(
                f"`segments` is {self.segments}, too small for one request of "
                f"{self.buckets[-1]} tokens: give {self.buckets[-1] // B} or more"
            )
        groups = tuple(self._sized(g) for g in self.groups)
        if not groups:
            raise ValueError("`groups` is empty; a model keeps at least one group")
        names = [g.name for g in groups]
        if len(set(names)) != len(names):
            raise ValueError(f"`groups` repeats a name: {names}; names must differ")
        object.__setattr__(self, "groups", groups)
        size = sum(self.segment_pages(g) * g.page_bytes for g in groups)
        if self.disk and size >= 2**31:
            raise ValueError(f"a segment has {size:,} bytes; give a smaller `segment_tokens`")
        for g in groups:
            least = self.reserved(g.form, self.max_segments) * self.segment_pages(g) + 1
            if g.pages < least:
                raise ValueError(
                    f"`pages` of group {g.name!r} is {g.pages}, too small for one request of "
                    f"{self.buckets[-1]} tokens: give {least} or more (null page included)"
                )

    def _sized(self, g: Group) -> Group:
        check_type("groups", g, Group)
        check_type("name", g.name, str)
        check_type("rule", g.rule, Rule)
        layers, row, abi = (_tuple(n, getattr(g, n)) for n in ("layers", "row", "abi"))
        for name, numbers in (("layers", layers), ("row", row)):
            for n in numbers:
                check_int(name, n, -(2**31))
        layers, row = tuple(map(int, layers)), tuple(map(int, row))
        for pair in abi:
            if not isinstance(pair, tuple) or [type(x) in _PLAIN for x in pair] != [True, True]:
                raise ValueError(
                    f"`abi` of group {g.name!r} holds {pair!r}; give (name, plain value) pairs"
                )
        for name in ("rows_per_page", "pages"):
            check_int(name, getattr(g, name), 0)
        g = dataclasses.replace(
            g, layers=layers, row=row, abi=abi, rows_per_page=int(g.rows_per_page),
            pages=int(g.pages),
        )  # fmt: skip
        if not isinstance(g.form, Form) or g.form not in _FORM_RULES:
            raise ValueError(f"`form` of group {g.name!r} is {g.form!r}; use a device form")
        if g.rule.kind not in _FORM_RULES[g.form]:
            raise ValueError(f"`rule` of group {g.name!r} is {g.rule}, which {g.form.name} lacks")
        if not g.layers or list(g.layers) != sorted(set(g.layers)) or g.layers[0] < 0:
            raise ValueError(f"`layers` of group {g.name!r} must rise from 0, got {g.layers}")
        if any(n < 1 for n in g.row):
            raise ValueError(f"`row` of group {g.name!r} is {g.row}; sizes must be 1 or more")
        try:
            dtype = jnp.dtype(g.dtype if g.dtype is not None else "None")
            whole = jnp.issubdtype(dtype, jnp.integer)
            real = whole or jnp.issubdtype(dtype, jnp.floating)
            bits = (jnp.iinfo if whole else jnp.finfo)(dtype).bits if real else 0
        except TypeError:
            bits = 0
        if bits < 8:
            raise ValueError(
                f"`dtype` of group {g.name!r} is {g.dtype!r}; name an integer or floating dtype of "
                "8 bits or more"
            )
        if len(dict(g.abi)) != len(g.abi):
            raise ValueError(f"`abi` of group {g.name!r} repeats a name: {g.abi}")
        if self.segment_tokens % (g.rule.size if g.rule.kind in _RATIO else 1):
            raise ValueError(
                f"`segment_tokens` is {self.segment_tokens}, not a multiple of the ratio "
                f"{g.rule.size} of group {g.name!r}; use the lcm of all ratios"
            )
        rows = self.segment_rows(g)
        R = g.rows_per_page or rows
        if R < 1 or rows % R:
            raise ValueError(
                f"`rows_per_page` of group {g.name!r} is {R}, which does not divide the "
                f"{rows} rows of a segment"
            )
        pages = g.pages or self.segments * (rows // R) + 1
        return dataclasses.replace(g, rows_per_page=R, pages=pages, dtype=str(dtype))

    def segment_rows(self, g: Group) -> int:
        """Rows of one whole segment in group `g`; a recurrent state keeps one snapshot."""
        return 1 if g.rule.kind is Kind.STATE else self.segment_tokens // g.rule.unit

    def segment_pages(self, g: Group) -> int:
        """Pages of one whole segment in group `g`."""
        return self.segment_rows(g) // g.rows_per_page

    def reserved(self, form: Form, segments: int) -> int:
        """Of how many segments a request of `segments` new ones reserves the pages of a form.

        A sum of what the form's rules look back at and `ahead`, in segments that this many tokens
        can touch; all of them where the form grows, or nothing recycles.
        """
        spans = [g.rule.span for g in self.groups if g.form is form]
        if not self.ahead or None in spans:
            return segments
        most = max(span for span in spans if span is not None) + self.ahead
        return min(segments, -(-most // self.segment_tokens) + 1)

    def group(self, name: str) -> int:
        """The number of the group called `name`."""
        for i, g in enumerate(self.groups):
            if g.name == name:
                return i
        raise ValueError(f"`name` is {name!r}; groups are {[g.name for g in self.groups]}")

    def form_groups(self, form: Form) -> tuple[int, ...]:
        """Numbers of the groups that keep `form`."""
        return tuple(i for i, g in enumerate(self.groups) if g.form is form)

    def has(self, form: Form) -> bool:
        """Whether segments can have this form."""
        return self.disk if form is Form.DISK else bool(self.form_groups(form))

    @property
    def max_segments(self) -> int:
        """S, segments of the longest request."""
        return self.buckets[-1] // self.segment_tokens

    @property
    def layers(self) -> tuple[tuple[tuple[int, Rule], ...], ...]:
        """For each model layer in order, its groups as (group number, rule)."""
        depth = 1 + max(g.layers[-1] for g in self.groups)
        return tuple(
            tuple((i, g.rule) for i, g in enumerate(self.groups) if layer in g.layers)
            for layer in range(depth)
        )

    @property
    def closed(self) -> np.ndarray:
        """`bool[G]`: groups whose rows up to a position are all required there: histories."""
        return np.array([g.rule.prefix_closed for g in self.groups])

    @property
    def units(self) -> np.ndarray:
        """`i32[G]`: tokens per row."""
        return np.array([g.rule.unit for g in self.groups], np.int32)

    @property
    def group_bytes(self) -> np.ndarray:
        """`i32[G]`: bytes of one segment's pages."""
        return np.array([self.segment_pages(g) * g.page_bytes for g in self.groups], np.int32)

    @property
    def forms(self) -> np.ndarray:
        """`i32[G]`: the form of each group."""
        return np.array([g.form for g in self.groups], np.int32)

    @property
    def abi(self) -> np.ndarray:
        """`u32[G]`: the kernel ABI code of each group."""
        return np.array([g.fingerprint() for g in self.groups], np.uint32)

    def bucket(self, tokens: int) -> int:
        """The smallest bucket that holds `tokens`; a longer input is refused."""
        check_int("tokens", tokens, 0)
        for n in self.buckets:
            if tokens <= n:
                return n
        raise ValueError(f"`tokens` is {tokens} long; the longest bucket is {self.buckets[-1]}")

    def with_abi(self, name: str, **meaning: str | int | float | bool) -> "Layout":
        """This layout with fields of one group's `abi` replaced."""
        i = self.group(name)
        g = self.groups[i]
        abi: Mapping = {**dict(g.abi), **meaning}
        g = dataclasses.replace(g, abi=tuple(sorted(abi.items())))
        return dataclasses.replace(self, groups=self.groups[:i] + (g,) + self.groups[i + 1 :])


_PLAIN = (str, int, float, bool)
_RATIO = (Kind.HISTORY, Kind.INDEXER, Kind.TAIL)


def _tuple(name: str, value) -> tuple:
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise TypeError(f"`{name}` is {value!r}; give a tuple")
    return tuple(value)
