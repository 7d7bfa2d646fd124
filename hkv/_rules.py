"""What must be present to resume at a position: `required`, and how far back a replay must start.

Every rule's requirement is one interval of row numbers, so a single predicate serves the writer,
the reader, the pinner, the evictor and the tests. Nothing here knows pages or segments.
"""

import dataclasses
import enum

import jax
import jax.numpy as jnp
import numpy as np

from hkv._arguments import check_int, check_type


class Kind(enum.Enum):
    """The kinds of `Rule`, by what a layer's attention looks back at."""

    HISTORY = "history"
    WINDOW = "window"
    CHUNK = "chunk"
    TAIL = "tail"
    STATE = "state"
    INDEXER = "indexer"


@dataclasses.dataclass(frozen=True)
class Rule:
    """Which rows of a group must be present to resume. Build one with the functions below."""

    kind: Kind
    size: int  # ratio m, window W or chunk C in tokens; 1 for a state
    overlap: bool = False  # tails only: each entry also folds the m tokens before its own

    def __post_init__(self):
        check_type("kind", self.kind, Kind)
        check_int("size", self.size, 1)
        check_type("overlap", self.overlap, bool)
        object.__setattr__(self, "size", int(self.size))
        if self.kind is Kind.STATE and self.size != 1:
            raise ValueError(f"`size` is {self.size}; a state has 1")
        if self.overlap and self.kind is not Kind.TAIL:
            raise ValueError(f"`overlap` is True of {self.kind}; only tails overlap")

    @property
    def unit(self) -> int:
        """Tokens that one row stands for."""
        return self.size if self.prefix_closed else 1

    @property
    def prefix_closed(self) -> bool:
        """True where validity at p implies validity at every smaller position."""
        return self.kind in (Kind.HISTORY, Kind.INDEXER)

    @property
    def span(self) -> int | None:
        """Most tokens before any position that must be present there; None where it grows."""
        if self.kind is Kind.TAIL:
            return self.size - 1 + (self.size if self.overlap else 0)
        return self.size - 1 if self.kind in (Kind.WINDOW, Kind.CHUNK) else None

    def __str__(self) -> str:
        if self.kind is Kind.STATE:
            return "state"
        return f"{self.kind.value}({self.size}{', overlap' if self.overlap else ''})"


def _rule(kind: Kind, name: str, size: int, overlap: bool = False) -> Rule:
    check_int(name, size, 1)
    return Rule(kind, size, overlap)


def history(m: int = 1) -> Rule:
    """Entries `[0, floor(p / m))`; m = 1 is ordinary full KV or an MLA latent."""
    return _rule(Kind.HISTORY, "m", m)


def window(W: int) -> Rule:
    """Positions `[max(0, p - W + 1), p)`: the token itself counts as one of the W."""
    return _rule(Kind.WINDOW, "W", W)


def chunk(C: int) -> Rule:
    """Positions `[floor(p / C) * C, p)` of attention that never crosses a multiple of C."""
    return _rule(Kind.CHUNK, "C", C)


def tail(m: int, overlap: bool = False) -> Rule:
    """Open rows of a compressor of ratio m: `[p - p % m, p)`, with overlap m positions more."""
    return _rule(Kind.TAIL, "m", m, overlap)


def state() -> Rule:
    """A recurrent state: a snapshot taken at exactly p (none is needed at 0)."""
    return Rule(Kind.STATE, 1)


def indexer(m: int) -> Rule:
    """Indexer keys: entries as `history(m)`, and an equal indexer version."""
    return _rule(Kind.INDEXER, "m", m)


def required(rule: Rule, p: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Rows `[lo, hi)` of a group that must be present to resume at position `p`.

    Row numbers count from the start of the prefix in units of `rule.unit` tokens; a snapshot
    taken at position p has the number p.

    Args:
        rule: the group's rule.
        p: `i32[...]` positions, 0 or more.

    Returns:
        `lo`, `hi`: `i32[...]`, with `lo == hi` where nothing is required.
    """
    check_type("rule", rule, Rule)
    check_positions("p", p)
    p = jnp.asarray(p, jnp.int32)
    n = rule.size
    match rule.kind:
        case Kind.HISTORY | Kind.INDEXER:
            return jnp.zeros_like(p), p // n
        case Kind.WINDOW:
            return jnp.maximum(p - (n - 1), 0), p
        case Kind.CHUNK:
            return p // n * n, p
        case Kind.TAIL:
            return jnp.maximum(p // n * n - (n if rule.overlap else 0), 0), p
        case Kind.STATE:
            return p, p + (p > 0).astype(jnp.int32)


def check_positions(name: str, value) -> None:
    """Refuses what are no integers, and of values on the host those that are no positions."""
    if not isinstance(value, jax.Array | np.ndarray | np.generic | int):
        raise TypeError(f"`{name}` is {value!r}; give an array of positions")
    if not jnp.issubdtype(jnp.result_type(value), jnp.integer):
        raise TypeError(f"`{name}` is {jnp.result_type(value)}; give integer positions")
    if not isinstance(value, jax.Array):
        a = np.asarray(value)
        if a.size and (a.min() < 0 or a.max() >= 2**31):
            raise ValueError(f"`{name}` holds {a.tolist()}; give positions of 0 to 2**31 - 1")


def first_seen(rule: Rule, p: jax.Array) -> jax.Array:
    """First position whose row of this group the token at position `p` attends to, `i32[...]`.

    Rolling attention forms only; history is always read from pages and a tail by nobody.
    """
    if rule.kind in (Kind.WINDOW, Kind.CHUNK):
        return required(rule, p)[0]
    return p


def replay_start(
    layers: tuple[tuple[tuple[int, Rule], ...], ...],
    end: jax.Array,
    lost: jax.Array,
    have: jax.Array,
) -> jax.Array:
    """Where a replay that ends at `end` must start so that every row it makes is exact.

    Goes from the top layer down: a layer's input must be exact from the first row that it has to
    make anew, and from the first row that the layers above look back at, unless pages still hold
    those. A replay reads history and writes only what was lost. Through a recurrent layer nothing
    short of the whole prefix is exact.

    Args:
        layers: for each layer in order, its groups as (group number, rule).
        end: `i32[...]` position where the replay ends.
        lost: `i32[..., G]` first position whose rows of a group must be made anew; `end` where
            the group lacks nothing.
        have: `i32[..., G, 2]` positions `[lo, hi)` that pages still hold for a rolling group.

    Returns:
        `i32[...]`: the start; `end` where nothing is to be replayed.

    Raises:
        ValueError: `lost` or `have` of fewer groups than `layers` names, or no pairs in `have`.
    """
    for name, value in (("end", end), ("lost", lost), ("have", have)):
        check_positions(name, value)
    G = 1 + max((g for groups in layers for g, _ in groups), default=-1)
    if lost.shape[-1:] < (G,):
        raise ValueError(f"`lost` has shape {lost.shape}; give [..., {G} groups]")
    if have.ndim < 2 or have.shape[-2] < G or have.shape[-1] != 2:
        raise ValueError(f"`have` has shape {have.shape}; give [..., {G} groups, 2]")
    start = end
    for groups in reversed(layers):
        own, reach = end, start
        for g, rule in groups:
            own = jnp.minimum(own, lost[..., g])
            if rule.kind in (Kind.WINDOW, Kind.CHUNK):
                first = first_seen(rule, start)
                kept = (have[..., g, 0] <= first) & (have[..., g, 1] >= end)
                reach = jnp.where((start < end) & ~kept, jnp.minimum(reach, first), reach)
            elif rule.kind is Kind.STATE:
                runs = (start < end) | (lost[..., g] < end)
                reach = jnp.where(runs, jnp.zeros_like(reach), reach)
        start = jnp.minimum(own, reach)
    return start
