"""The four levels of verification, each a function of its own on segments.

Levels 1, 2 and 4 take one segment and answer with a reason code per group; `jax.vmap` takes them
over rows. The first failing check in the order written here is the reason. Level 3 works on
boundaries, since only there the groups meet.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from hkv._arguments import check_array, check_type
from hkv._availability import Reason
from hkv._cache import Cache, Segment, check_cache, rows_of
from hkv._identity import Need
from hkv._layout import Form, Layout
from hkv._lifecycle import Life
from hkv._rules import Kind
from hkv._slots import take
from pallas_kernels import digest_pages


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Ask:
    """What a request says about the segment that should stand at one place of its prefix."""

    row: jax.Array  # i32[], the candidate's row
    identity: jax.Array  # u32[4]
    media: jax.Array  # u32[4]
    start: jax.Array  # i32[], absolute
    parent: jax.Array  # i32[], row of the verified segment before; N at the start
    parent_born: jax.Array  # u32[]
    matched: jax.Array  # i32[], leading tokens that are equal


def _held_rows(layout: Layout, seg: Segment, g: int) -> tuple[jax.Array, jax.Array]:
    """Rows `[lo, hi)` within the segment that `held` says group `g` has."""
    group = layout.groups[g]
    lo, hi = seg.held[g, 0] - seg.start, seg.held[g, 1] - seg.start
    if group.rule.kind is Kind.STATE:
        return jnp.zeros_like(lo), (hi > 0).astype(jnp.int32)
    return lo // group.rule.unit, hi // group.rule.unit


def page_facts(cache: Cache, seg: Segment, ask: Ask) -> tuple[jax.Array, jax.Array]:
    """`bool[G]` twice: the pages in use exist; they carry the stamps of this segment."""
    there, fit = [], []
    for g, group in enumerate(cache.layout.groups):
        lo, hi = _held_rows(cache.layout, seg, g)
        first = jnp.arange(seg.pages[g].shape[0], dtype=jnp.int32) * group.rows_per_page
        used = (first < hi) & (first + group.rows_per_page > lo)
        there.append(jnp.all((seg.pages[g] > 0) | ~used))
        stamps = take(cache.pools[g].stamp, seg.pages[g], 0)
        right = (stamps[:, 0] == ask.row.astype(jnp.uint32)) & (stamps[:, 1] == seg.written[g])
        fit.append(jnp.all(right | ~used))
    return jnp.stack(there), jnp.stack(fit)


def _rows_add_up(layout: Layout, seg: Segment) -> jax.Array:
    """`bool[G]`: entries x ratio + open rows = length; rolling rows lie in the segment."""
    out = []
    for g, group in enumerate(layout.groups):
        lo, hi = seg.held[g, 0] - seg.start, seg.held[g, 1] - seg.start
        if group.rule.prefix_closed:
            whole = seg.length // group.rule.unit * group.rule.unit
            out.append((lo == 0) & (hi == whole))
        else:
            out.append((lo >= 0) & (lo <= hi) & (hi <= seg.length))
    return jnp.stack(out)


def _form_ready(layout: Layout, seg: Segment) -> jax.Array:
    return seg.life[layout.forms] == Life.READY


# Each check: (reason, predicate). A predicate gives bool[G] or bool[], True where it passes.
BLOCK_CHECKS = (
    (Reason.IDENTITY, lambda lay, seg, ask, page: jnp.all(seg.identity == ask.identity)),
    (Reason.IDENTITY, lambda lay, seg, ask, page: jnp.all(seg.media == ask.media)),
    (Reason.START, lambda lay, seg, ask, page: seg.start == ask.start),
    (Reason.PARENT, lambda lay, seg, ask, page: seg.parent == ask.parent),
    (Reason.PARENT, lambda lay, seg, ask, page: seg.parent_born == ask.parent_born),
    (Reason.TOKENS, lambda lay, seg, ask, page: ask.matched > 0),
    (Reason.LIFECYCLE, lambda lay, seg, ask, page: _form_ready(lay, seg)),
    (Reason.ROWS, lambda lay, seg, ask, page: _rows_add_up(lay, seg)),
    (Reason.PAGE_MISSING, lambda lay, seg, ask, page: page[0]),
    (Reason.STAMP, lambda lay, seg, ask, page: page[1]),
    (Reason.DIGEST, lambda lay, seg, ask, page: jnp.any(seg.digest != 0, axis=-1)),
)
LINK_CHECKS = 6  # the first of them say whether this is the segment at all, not a form of it


def _indexer_fits(layout: Layout, seg: Segment, need: Need) -> jax.Array:
    not_indexer = jnp.asarray([g.form is not Form.INDEXER for g in layout.groups])
    return not_indexer | (seg.indexer_version == need.indexer_version)


ABI_CHECKS = (
    (Reason.ABI, lambda lay, seg, need: seg.abi == need.abi),
    (Reason.EPOCH, lambda lay, seg, need: seg.epoch == need.epoch),
    (Reason.INDEXER_VERSION, _indexer_fits),
    (Reason.PROVENANCE, lambda lay, seg, need: seg.provenance <= need.provenance),
)
BYTE_CHECKS = (
    (Reason.SHARD, lambda seg, need: jnp.all(seg.codes != 0, axis=-1)),
    (Reason.BYTES, lambda seg, need: jnp.all((seg.codes == need.codes) | (seg.codes == 0), -1)),
)


def _first_failure(checks, groups: int, *args) -> jax.Array:
    """`u8[G]`: the reason of the first check that fails, OK where all pass."""
    reason = jnp.zeros(groups, jnp.uint8)
    for code, passes in reversed(checks):
        reason = jnp.where(passes(*args), reason, jnp.uint8(code))
    return reason


def link_holds(layout: Layout, seg: Segment, ask: Ask) -> jax.Array:
    """`bool[]`: whether this is the segment that was asked for, whatever forms it still has."""
    links = BLOCK_CHECKS[:LINK_CHECKS]
    return jnp.all(_first_failure(links, 1, layout, seg, ask, None) == 0)


def check_block(cache: Cache, seg: Segment, ask: Ask) -> jax.Array:
    """Level 1: this is the segment, it is complete, and its pages are still its own.

    Args:
        cache: for the page stamps as they are now.
        seg: one segment.
        ask: what should stand there.

    Returns:
        `u8[G]` reasons; OK where level 1 holds.
    """
    check_cache(cache)
    check_type("seg", seg, Segment)
    check_type("ask", ask, Ask)
    lay = cache.layout
    page = page_facts(cache, seg, ask)
    return _first_failure(BLOCK_CHECKS, len(lay.groups), lay, seg, ask, page)


def _check_types(layout, seg, need) -> None:
    check_type("layout", layout, Layout)
    check_type("seg", seg, Segment)
    check_type("need", need, Need)
    if need.epoch.ndim:
        raise ValueError("`need` is of a batch; give need.request(q)")


def check_abi(layout: Layout, seg: Segment, need: Need) -> jax.Array:
    """Level 2: the bytes of one segment mean to this build's kernels what they meant to the writer.

    Args:
        layout: the static description.
        seg: one segment.
        need: of one request.

    Returns:
        `u8[G]` reasons; one group's mismatch touches that group alone.
    """
    _check_types(layout, seg, need)
    return _first_failure(ABI_CHECKS, len(layout.groups), layout, seg, need)


def check_groups(ok: jax.Array) -> jax.Array:
    """Level 3: the boundaries that are valid for all groups at once.

    Args:
        ok: `bool[G, K]` boundaries valid for each group alone.

    Returns:
        `u8[K]`: OK, or GROUPS where at least one group lacks the boundary. This is the
        intersection of sets; the minimum of each group's furthest boundary is not one of them.
    """
    check_array("ok", ok, bool, None, None)
    return jnp.where(jnp.all(ok, axis=0), jnp.uint8(0), jnp.uint8(Reason.GROUPS))


def check_bytes(layout: Layout, seg: Segment, need: Need) -> jax.Array:
    """Level 4: every shard has its part, in arrays that lie in memory as the pools do now.

    Arguments as `check_abi`.

    Returns:
        `u8[G]` reasons of one segment.
    """
    _check_types(layout, seg, need)
    return _first_failure(BYTE_CHECKS, len(layout.groups), seg, need)


def check_segment(cache: Cache, seg: Segment, ask: Ask, need: Need) -> jax.Array:
    """`u8[G]`: levels 1, 2 and 4 of one segment; the first failure is the reason."""
    return first_reason(
        check_block(cache, seg, ask),
        check_abi(cache.layout, seg, need),
        check_bytes(cache.layout, seg, need),
    )


def copy_holds(layout: Layout, seg: Segment, need: Need) -> jax.Array:
    """`bool[G]`: whether the DISK form of a segment has rows of a group that may be fetched.

    They mean to this build's kernels what they meant to the writer, and the device has none of its
    own there. Bytes are verified when they are read. The segment itself is the caller's to check.
    """
    lo, hi = seg.copied[:, 0] - seg.start, seg.copied[:, 1] - seg.start
    whole = seg.length // layout.units * layout.units
    right = jnp.where(layout.closed, (lo == 0) & (hi == whole), (lo >= 0) & (hi <= seg.length))
    life = seg.life[layout.forms]
    off = (life == Life.EMPTY) | (life == Life.ON_DISK)
    fits = check_abi(layout, seg, need) == 0
    right &= np.array([g.rule.kind is not Kind.STATE for g in layout.groups])
    return fits & off & right & (lo < hi) & (seg.life[Form.DISK] == Life.ON_DISK)


def first_reason(*reasons: jax.Array) -> jax.Array:
    """The first that is not OK, elementwise, in the order given."""
    out = reasons[-1]
    for r in reversed(reasons[:-1]):
        out = jnp.where(r != 0, r, out)
    return out


def payload_digest(cache: Cache, pages: tuple[jax.Array, ...], seg: Segment) -> jax.Array:
    """`u32[G, 2]` digest of the rows that one segment holds in `pages`; never 0."""
    out = []
    for g, pool in enumerate(cache.pools):
        lo, hi = _held_rows(cache.layout, seg, g)
        d = digest_pages(pool.data, pages[g][None], lo[None], hi[None])[0]
        out.append(jnp.where(jnp.all(d == 0), jnp.uint32(1), d))
    return jnp.stack(out)


def verify_payload(cache: Cache, rows: jax.Array) -> jax.Array:
    """Recomputes the digests of stored segments from their pages.

    Args:
        cache: the cache.
        rows: `i32[K]` segments.

    Returns:
        `u8[K, G]`: OK, DIGEST where the payload is no longer what was published, LIFECYCLE where a
        form is not there to be read, NOT_FOUND where no segment stands in the row.
    """
    check_cache(cache)
    check_array("rows", rows, jnp.int32, None)
    return _verify_payload(cache, rows)


@jax.jit
def _verify_payload(cache: Cache, rows: jax.Array) -> jax.Array:
    def one(row):
        seg = rows_of(cache.table, row)
        same = payload_digest(cache, seg.pages, seg) == seg.digest
        why = jnp.where(jnp.all(same, axis=-1), jnp.uint8(0), jnp.uint8(Reason.DIGEST))
        life = seg.life[np.asarray(cache.layout.forms)]
        there = (life == Life.READY) | (life == Life.OFFLOADING)
        why = jnp.where(there, why, jnp.uint8(Reason.LIFECYCLE))
        stands = (row >= 0) & (row < cache.layout.segments) & (seg.length > 0)
        return jnp.where(stands, why, jnp.uint8(Reason.NOT_FOUND))

    return jax.lax.map(one, rows)
