"""Fills a cache's table with stored prefixes from the host, for benchmarks of large tables.

What `publish` would have left behind, without running a model: keys, tokens, pages, stamps.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

import hkv
from hkv._cache import PROBE
from hkv._identity import block_keys


def groups(rows_per_page: int = 0) -> tuple[hkv.Group, ...]:
    """The groups of DeepSeek-V4 Flash, one byte a row: a query looks at no payload."""
    spec = [
        ("window", hkv.Form.WINDOW, hkv.window(128)),
        ("window_c", hkv.Form.WINDOW, hkv.window(128)),
        ("csa", hkv.Form.COMPRESSED, hkv.history(4)),
        ("csa_tail", hkv.Form.TAIL, hkv.tail(4, overlap=True)),
        ("csa_index", hkv.Form.INDEXER, hkv.indexer(4)),
        ("csa_index_tail", hkv.Form.INDEXER, hkv.tail(4, overlap=True)),
        ("hca", hkv.Form.COMPRESSED, hkv.history(64)),
        ("hca_tail", hkv.Form.TAIL, hkv.tail(64)),
    ]
    layers = {"window": range(2), "window_c": range(2, 43)}
    for name in ("csa", "csa_tail", "csa_index", "csa_index_tail"):
        layers[name] = range(2, 43, 2)
    for name in ("hca", "hca_tail"):
        layers[name] = range(3, 43, 2)
    # One layer's worth of storage stands for all: page counts and checks are the same.
    return tuple(
        hkv.Group(name, form, rule, (layers[name][0],), (1,), "uint8",
                  (("layers", len(layers[name])),))
        for name, form, rule in spec
    )  # fmt: skip


def store(cache: hkv.Cache, need: hkv.Need, prompts: np.ndarray) -> hkv.Cache:
    """A cache in which whole prompts `i32[n, T]` are stored, every boundary usable."""
    lay, t = cache.layout, cache.table
    B, N = lay.segment_tokens, lay.segments
    n, T = prompts.shape
    S = T // B
    keys = jax.jit(
        jax.vmap(lambda x: block_keys(
            x.reshape(S, B), need.identity[0], jnp.int32(0), jnp.zeros((S, 4), jnp.uint32)
        ))
    )(jnp.asarray(prompts))  # fmt: skip
    after, before = (np.asarray(k).reshape(-1, 2) for k in keys)
    rows = np.arange(n * S, dtype=np.int32)
    column = rows % S
    first = N - int(cache.n_free_rows)
    rows += first
    if rows[-1] >= N:
        raise ValueError(f"`prompts` needs {n * S} segments; only {N - first} are free")
    cols = {f.name: np.array(getattr(t, f.name)) for f in dataclasses.fields(t)
            if f.name != "pages"}  # fmt: skip
    cols["version"][rows] = 2
    cols["born"][rows] = 1
    cols["form"][rows] = 0b1111
    cols["life"][rows, :4] = hkv.Life.READY
    cols["key"][rows], cols["before"][rows] = after, before
    cols["parent"][rows] = np.where(column > 0, rows - 1, N)
    cols["parent_born"][rows] = column > 0
    cols["start"][rows] = column * B
    cols["length"][rows] = B
    cols["identity"][rows] = np.asarray(need.identity[0])
    cols["abi"][rows], cols["codes"][rows] = np.asarray(need.abi[0]), np.asarray(need.codes[0])
    cols["held"][rows] = np.stack([column * B, column * B + B], -1)[:, None]
    cols["digest"][rows] = 1
    cols["written"][rows] = 1
    cols["children"][rows] = column < S - 1
    cols["used"][rows] = 1
    pages, pools = [], []
    for g, pool in zip(lay.groups, cache.pools, strict=True):
        per = lay.segment_pages(g)
        ids = rows[:, None] * per + np.arange(per, dtype=np.int32) + 1
        mine = np.array(t.pages[len(pages)])
        mine[rows] = ids
        stamp, owner = np.array(pool.stamp), np.array(pool.owner)
        stamp[ids, 0], stamp[ids, 1] = rows[:, None], 1
        owner[ids] = rows[:, None]
        left = g.pages - 1 - ids.max()
        free = np.concatenate([np.arange(g.pages - 1, g.pages - 1 - left, -1), np.zeros(
            g.pages - left)]).astype(np.int32)  # fmt: skip
        pages.append(jnp.asarray(mine))
        pools.append(dataclasses.replace(
            pool, stamp=jnp.asarray(stamp), owner=jnp.asarray(owner), free=jnp.asarray(free),
            n_free=jnp.asarray(left, jnp.int32),
        ))  # fmt: skip
    index, tags = np.array(cache.index), np.array(cache.tags)
    base = after[:, 0] & np.uint32(len(index) - PROBE - 1)
    for row, at, tag in zip(rows, base.astype(np.int64), after[:, 1], strict=True):
        slot = at + int(np.argmax(index[at : at + PROBE] == N))
        index[slot], tags[slot] = row, tag
    tokens = np.array(cache.tokens)
    tokens[rows] = prompts.reshape(-1, B)
    table = hkv.Segment(pages=tuple(pages), **{k: jnp.asarray(v) for k, v in cols.items()})
    return dataclasses.replace(
        cache, table=table, pools=tuple(pools), index=jnp.asarray(index), tags=jnp.asarray(tags),
        tokens=jnp.asarray(tokens), n_free_rows=jnp.asarray(N - rows[-1] - 1, jnp.int32),
    )  # fmt: skip
