"""`trim`: what a running request has left behind goes back, or on to the tokens ahead of it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from hkv._cache import Cache
from hkv._caps import charged, usage, weighed
from hkv._evict import _drop_pages, set_life
from hkv._layout import FORMS, Form
from hkv._lease import FOREVER, Lease, advance, check_fits, check_lease
from hkv._lifecycle import Life
from hkv._pages import pop_pages, push_pages
from hkv._retain import Worth
from hkv._room import make_room
from hkv._rules import Kind, required
from hkv._slots import put, take


def trim(cache: Cache, lease: Lease) -> tuple[Cache, Lease]:
    """Gives back the window and tail pages that running requests no longer need.

    Donates `cache`. Pages go that hold nothing of `required(rule, length)` and that the request
    alone owns; positions before can then be resumed only after a replay. History stays.

    Where the layout says how far `ahead` a request runs, the pages of whole segments go on to the
    tokens that come next. Those of a segment that was published stay with it while there are
    others to be had: a free one or, if a retained boundary needs them, one of least worth.

    Args:
        cache: the cache.
        lease: the requests, at settled lengths.

    Returns:
        The cache and the leases.
    """
    check_fits(cache, lease)
    return _trim(cache, lease)


@functools.partial(jax.jit, donate_argnames=("cache",))
def _trim(cache: Cache, lease: Lease) -> tuple[Cache, Lease]:
    ok = check_lease(cache, lease)

    def one(c: Cache, x):
        x, ok = x
        c, x = _let_go(c, x, ok)
        if c.layout.ahead:
            for form in _rolling(c):
                c, x = _go_on(c, x, ok, form)
        return c, x

    cache, lease = jax.lax.scan(one, cache, (lease, ok))
    return advance(cache, lease, ok)


def _rolling(cache: Cache) -> list[Form]:
    """Forms whose pages recycle."""
    lay = cache.layout
    every = lay.max_segments + 1
    return [f for f in Form if lay.form_groups(f) and lay.reserved(f, every) < every]


def _passed(cache: Cache, form: Form, length: jax.Array) -> jax.Array:
    """`i32[]`: tokens before which no group of a form needs any at `length`."""
    lay = cache.layout
    rules = [lay.groups[g].rule for g in lay.form_groups(form)]
    return functools.reduce(jnp.minimum, [required(r, length)[0] for r in rules])


def _let_go(c: Cache, x: Lease, ok: jax.Array) -> tuple[Cache, Lease]:
    """Frees what one request alone has written, not published, and no longer needs."""
    lay, N = c.layout, c.layout.segments
    S = x.rows.shape[0]
    alone = take(c.table.pins, x.rows, 0) == 1
    writing = (take(c.table.length, x.rows, 1) == 0) & alone
    pools, table_pages, pages = list(c.pools), list(c.table.pages), list(x.pages)
    have, write = x.have, x.write
    for g, spec in enumerate(lay.groups):
        if spec.rule.prefix_closed or spec.rule.kind is Kind.STATE:
            continue
        per, size = lay.segment_pages(spec), spec.rows_per_page
        end = (jnp.arange(S * per, dtype=jnp.int32) + 1) * size
        lo, _ = required(spec.rule, x.length)
        if spec.form in _rolling(c):  # by whole segments: what goes is had again at once
            end = (end + lay.segment_tokens - 1) // lay.segment_tokens * lay.segment_tokens
            lo = _passed(c, spec.form, x.length)
        mine = (x.own & writing) | x.private[g]
        gone = (end <= lo) & jnp.repeat(mine, per) & ok & (pages[g] > 0)
        # A page counts as this request's only while its owner says so.
        owner = jnp.where(x.own, x.rows, N + 1 + x.slot)
        gone &= take(pools[g].owner, pages[g], N) == jnp.repeat(owner, per)
        pools[g] = push_pages(pools[g], pages[g], gone, N)
        pages[g] = jnp.where(gone, 0, pages[g])
        at = jnp.where(x.own & writing & ok, x.rows, N)
        table_pages[g] = put(table_pages[g], at, pages[g].reshape(S, per))
        first = jnp.max(jnp.where(gone, end, 0))
        old = jnp.where(have[g, 1] > have[g, 0], have[g, 0], write[g, 0])
        span = jnp.stack([jnp.minimum(jnp.maximum(old, first), x.length), x.length])
        have = have.at[g].set(jnp.where(ok, span, have[g]))
        write = write.at[g].set(jnp.where(ok, jnp.stack([x.length, jnp.int32(FOREVER)]), write[g]))
    table = dataclasses.replace(c.table, pages=tuple(table_pages))
    c = dataclasses.replace(c, table=table, pools=tuple(pools))
    return c, dataclasses.replace(x, pages=tuple(pages), have=have, write=write)


def _go_on(c: Cache, x: Lease, ok: jax.Array, form: Form) -> tuple[Cache, Lease]:
    """Gives the segments ahead of one request the pages of a form that they lack."""
    lay, N = c.layout, c.layout.segments
    B, S, groups = lay.segment_tokens, x.rows.shape[0], lay.form_groups(form)
    most = lay.reserved(form, S)
    column = jnp.arange(S, dtype=jnp.int32)
    pages = [x.pages[g].reshape(S, -1) for g in groups]
    there = pages[0][:, 0] > 0  # a form's pages come and go together
    first = _passed(c, form, x.length) // B
    listed = take(c.table.length, x.rows, 1) > 0
    mine = x.own & (x.rows < N) & ok
    lacks = mine & ~listed & ~there & (column >= first) & (column < first + most)
    n = jnp.sum(lacks, dtype=jnp.int32)
    left = mine & listed & there & (column < first) & (take(c.table.pins, x.rows, 0) == 1)
    left &= take(c.table.life, x.rows, 0)[:, form] == Life.READY
    worth = take(c.table.worth, x.rows, 0)
    per = [lay.segment_pages(lay.groups[g]) for g in groups]
    each = jnp.zeros(len(lay.groups), jnp.int32).at[jnp.asarray(groups)].set(jnp.asarray(per))

    # Retained windows stay if something of less worth can go in their place, or nothing need go.
    plain = jnp.sum(left & (worth == Worth.NONE), dtype=jnp.int32)
    wanted = jnp.clip(n - plain, 0, jnp.sum(left, dtype=jnp.int32) - plain)
    tenant = take(c.tenants, x.slot, 0)
    c = make_room(c, jnp.int32(0), wanted * each, tenant)
    k = jnp.arange(most + 1, dtype=jnp.int32)
    used, whose = usage(c)[None], charged(c, tenant)[None, :, None]
    more = weighed(c, k[:, None] * each[None])[:, None]  # [most + 1, 1, K]
    fits = jnp.all(~whose | (more == 0) | (used + more <= c.caps.limit[None]), axis=(1, 2))
    for g in groups:
        fits &= k * each[g] <= c.pools[g].n_free
    short = n - jnp.max(jnp.where(fits, k, 0))
    # Else they go on themselves, those of least worth first.
    order = jnp.where(left, worth.astype(jnp.int32) * S + column, jnp.int32(Worth.END + 1) * S)
    picks = jax.lax.top_k(-order, most)[1]
    goes = (jnp.arange(most, dtype=jnp.int32) < short) & left[picks]
    rows = jnp.where(goes, x.rows[picks], N)
    forms = jnp.arange(FORMS) == form
    c, moved = set_life(c, rows, forms, Life.EMPTY, goes)
    c = _drop_pages(c, rows, moved)
    gone = jnp.zeros(S, bool).at[picks].set(goes)
    version = jnp.where(gone, take(c.table.version, x.rows, 0), x.version)

    # And now they are to be had.
    give, nth = lacks, jnp.cumsum(lacks, dtype=jnp.int32)
    for g in groups:
        give &= nth * each[g] <= c.pools[g].n_free
    pools, table_pages, out = list(c.pools), list(c.table.pages), list(x.pages)
    have = x.have
    for g, old, p in zip(groups, pages, per, strict=True):
        pools[g], new = pop_pages(pools[g], jnp.repeat(give, p), jnp.repeat(x.rows, p))
        new = new.reshape(S, p)
        table_pages[g] = put(table_pages[g], jnp.where(give, x.rows, N), new)
        out[g] = jnp.where(give[:, None], new, jnp.where(gone[:, None], 0, old)).reshape(-1)
        end = jnp.max(jnp.where(gone, (column + 1) * B, 0))
        have = have.at[g, 0].set(jnp.maximum(have[g, 0], jnp.minimum(end, have[g, 1])))
    table = dataclasses.replace(c.table, pages=tuple(table_pages))
    c = dataclasses.replace(c, table=table, pools=tuple(pools))
    return c, dataclasses.replace(x, pages=tuple(out), have=have, version=version)
