"""Replacing the indexer rows of stored segments: the one form that may change while serving."""

import dataclasses
import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from hkv._arguments import check_array, check_type
from hkv._cache import Cache, bumped, check_cache, rows_of
from hkv._layout import Form
from hkv._lifecycle import Life
from hkv._slots import first_of, put, take
from hkv._verify import payload_digest
from pallas_kernels import scatter_rows


def update_indexer(
    cache: Cache, rows: jax.Array, entries: dict[str, jax.Array], indexer_version: jax.Array
) -> tuple[Cache, jax.Array]:
    """Rewrites the INDEXER form of whole stored segments for another version of the indexer.

    Donates `cache`. Page stamps, digests and the segments' versions change with it, so a reader
    that holds a lease from before is told to route again.

    Args:
        cache: the cache.
        rows: `i32[K]` segments; N is skipped, and so are repeats.
        entries: for every INDEXER group by name, `[L, K, rows per segment, *row]`.
        indexer_version: `u32[]` the version that the new rows belong to: a higher one.

    Returns:
        The cache, and `bool[K]`: which segments were rewritten, namely stored whole ones whose
        INDEXER form is READY and of a lower version. What the DISK form has of it is forgotten.

    Raises:
        ValueError: a group is missing, or the layout has no INDEXER form.
        TypeError, ValueError: arrays of another dtype or shape.
    """
    check_cache(cache)
    check_type("entries", entries, Mapping)
    lay = cache.layout
    names = [lay.groups[g].name for g in lay.form_groups(Form.INDEXER)]
    if not names or set(entries) != set(names):
        raise ValueError(f"`entries` has groups {sorted(entries)}; give all of {names}")
    check_array("rows", rows, jnp.int32, None)
    check_array("indexer_version", indexer_version, jnp.uint32)
    for name in names:
        g = lay.groups[lay.group(name)]
        check_array(
            f"entries[{name!r}]", entries[name], g.dtype,
            len(g.layers), rows.shape[0], lay.segment_rows(g), *g.row,
        )  # fmt: skip
    return _update(cache, rows, entries, indexer_version)


@functools.partial(jax.jit, donate_argnames=("cache",))
def _update(cache: Cache, rows, entries, indexer_version):
    lay, t, N = cache.layout, cache.table, cache.layout.segments
    B, K = lay.segment_tokens, rows.shape[0]
    groups = lay.form_groups(Form.INDEXER)
    seg = rows_of(t, rows)
    there = jnp.stack([jnp.all(seg.pages[g] > 0, axis=-1) for g in groups])
    ready = seg.life[:, Form.INDEXER] == Life.READY
    done = first_of(rows, N) & (seg.length == B) & jnp.all(there, axis=0) & ready
    done &= indexer_version > seg.indexer_version
    clock = cache.clock + 1
    at = jnp.where(done, rows, N)
    pools, held, written = list(cache.pools), seg.held, seg.written
    copied = jnp.where((lay.forms == Form.INDEXER)[None, :, None], 0, seg.copied)
    for g in groups:
        spec, pool = lay.groups[g], pools[g]
        n = lay.segment_rows(spec)
        index = jnp.broadcast_to(jnp.arange(n, dtype=jnp.int32)[None], (K, n))
        words = jnp.stack([rows.astype(jnp.uint32), jnp.broadcast_to(clock, (K,))], -1)
        expect = jnp.repeat(words[:, None], lay.segment_pages(spec), axis=1)
        data, stamp = scatter_rows(
            pool.data, pool.stamp, seg.pages[g], index, entries[spec.name], expect,
            jnp.broadcast_to(done[:, None], (K, n)),
        )  # fmt: skip
        pools[g] = dataclasses.replace(pool, data=data, stamp=stamp)
        held = held.at[:, g].set(jnp.stack([seg.start, seg.start + B], -1))
        written = written.at[:, g].set(jnp.broadcast_to(clock, (K,)))
    cache = dataclasses.replace(
        cache, pools=tuple(pools), clock=clock,
        table=dataclasses.replace(
            t, held=put(t.held, at, held), written=put(t.written, at, written),
            copied=put(t.copied, at, copied),
            version=put(t.version, at, bumped(seg.version, readable=False)),
            indexer_version=put(
                t.indexer_version, at, jnp.broadcast_to(indexer_version, (K,))
            ),
        ),
    )  # fmt: skip
    new = rows_of(cache.table, at)
    fresh = jax.lax.map(lambda s: payload_digest(cache, s.pages, s), new)
    indexed = jnp.asarray([g in groups for g in range(len(lay.groups))])
    digest = jnp.where(indexed[None, :, None], fresh, take(cache.table.digest, at, 0))
    table = dataclasses.replace(cache.table, digest=put(cache.table.digest, at, digest))
    return dataclasses.replace(cache, table=table), done
