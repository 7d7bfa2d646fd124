"""`recover`: carries a batch of mixed plans out, then verifies again what attention will read."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from hkv._arguments import check_array, check_type
from hkv._availability import Reason
from hkv._cache import Cache, rows_of
from hkv._identity import asked
from hkv._lease import FOREVER, Lease, advance, check_fits, check_lease
from hkv._route import Plan
from hkv._rules import Kind, required
from hkv._verify import check_abi, check_bytes, first_reason
from hkv._view import View, append, covers, stamps_hold, view_of_replay


def recover(
    run: Callable,
    params,
    cache: Cache,
    lease: Lease,
    plan: Plan,
    tokens: jax.Array,
    *,
    chunk: int,
) -> tuple[Cache, Lease, jax.Array]:
    """Replays what the plans say and verifies the outcome, in one program.

    Donates `cache`. First the holes in history are made again, then windows and tails are
    replayed; both read the history that is there and write only what was lost.

    Args:
        run: `run(params, tokens i32[Q, chunk], view) -> view`: the model, as one static function.
        params: the model's arrays, whatever pytree `run` takes.
        cache: the cache.
        lease: from `admit` with this plan.
        plan: from `route`.
        tokens: `i32[Q, T]` the requests' token ids.
        chunk: tokens per step of the replay.

    Returns:
        The cache; the lease, ready for new tokens; and `u8[Q]`: OK, or the `Reason` why what
        attention would read is not verified. Such a request must be routed again.
    """
    check_fits(cache, lease)
    check_type("plan", plan, Plan)
    if plan.layout != cache.layout:
        raise ValueError("`plan` was made for another layout; route a query of this cache")
    Q, S = lease.rows.shape
    if plan.rows.shape != (Q, S):
        raise ValueError(f"`plan` has rows {plan.rows.shape}, the lease {(Q, S)}; give its own")
    check_array("tokens", tokens, jnp.int32, Q, S * cache.layout.segment_tokens)
    if not callable(run):
        raise TypeError(f"`run` is {run!r}; give a function (params, tokens, view) -> view")
    if isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 1:
        raise ValueError(f"`chunk` is {chunk!r}; give an int of 1 or more")
    return _recover(run, params, cache, lease, plan, tokens, chunk)


@functools.partial(jax.jit, static_argnames=("run", "chunk"), donate_argnames=("cache",))
def _recover(run, params, cache: Cache, lease: Lease, plan: Plan, tokens, chunk: int):
    lay = cache.layout
    T = tokens.shape[1]
    closed = lay.closed[None]
    # Another request's plan, or other tokens than the prompt's, are not carried out at all.
    held = check_lease(cache, lease)
    mine = plan.word == lease.serial[:, 1]
    prompt = jax.vmap(asked)(tokens, plan.prefill[:, 1], lease.need) == plan.asked
    right = mine & prompt
    zero = jnp.zeros_like(plan.fill)
    plan = dataclasses.replace(
        plan, fill=jnp.where(right[:, None], plan.fill, zero),
        replay=jnp.where(right[:, None], plan.replay, zero),
    )  # fmt: skip
    resume = plan.resume
    zero = jnp.zeros_like(resume)[:, None]
    history = jnp.stack([zero, resume[:, None]], -1)  # [Q, 1, 2]
    have = jnp.where(closed[..., None], history, plan.have)
    none = jnp.full_like(have, FOREVER)
    any_fill = (plan.fill[:, 0] < plan.fill[:, 1])[:, None]

    # Holes in history first; windows and tails on the way are scratch up to rows that are kept.
    lost = (closed & plan.fill_groups & any_fill)[..., None]
    scratch_end = jnp.minimum(plan.fill[:, 1, None], have[..., 0])
    scratch = jnp.stack(
        [jnp.broadcast_to(plan.fill_start[:, None], scratch_end.shape), scratch_end], -1
    )
    fill = jnp.where(closed[..., None], jnp.where(lost, plan.fill[:, None], none), scratch)

    # Then windows and tails, up to where the request resumes.
    seen = np.array([[g.rule.kind in (Kind.WINDOW, Kind.CHUNK) for g in lay.groups]])
    begin = jnp.broadcast_to(plan.replay[:, :1], have[..., 0].shape)
    again = jnp.stack([begin, jnp.maximum(begin, have[..., 0])], -1)
    touched = (seen | plan.replay_groups) & ~closed
    again = jnp.where(touched[..., None], again, none)

    def body(state):
        cache, at, filling = state
        end = jnp.where(filling, plan.fill[:, 1], plan.replay[:, 1])
        count = jnp.clip(end - at, 0, chunk)
        spot = jnp.clip(at[:, None] + jnp.arange(chunk, dtype=jnp.int32)[None], 0, T - 1)
        write = jnp.where(filling[:, None, None], fill, again)
        mine = dataclasses.replace(lease, have=have, write=write)
        now = view_of_replay(cache, mine, count, at)
        done: View = run(params, jnp.take_along_axis(tokens, spot, axis=1), now)
        cache, _, _ = append(done, advance=False)
        turn = filling & (at + count >= end)
        return cache, jnp.where(turn, plan.replay[:, 0], at + count), filling & ~turn

    def go_on(state):
        _, at, filling = state
        return jnp.any(filling | (at < plan.replay[:, 1]))

    filling = plan.fill[:, 0] < plan.fill[:, 1]
    at = jnp.where(filling, plan.fill_start, plan.replay[:, 0])
    cache, _, _ = jax.lax.while_loop(go_on, body, (cache, at, filling))

    # What is held now, exactly; from here on new tokens are written.
    lo = jnp.stack([required(g.rule, resume)[0] for g in lay.groups], 1)
    lo = jnp.where(closed, 0, jnp.minimum(lo, have[..., 0]))
    rows = jnp.stack([lo, jnp.broadcast_to(resume[:, None], lo.shape)], -1)
    ahead = jnp.stack([jnp.broadcast_to(resume[:, None], lo.shape), jnp.full_like(lo, FOREVER)], -1)
    lease = dataclasses.replace(
        lease,
        have=jnp.where(right[:, None, None], rows, 0),
        write=jnp.where(right[:, None, None], ahead, FOREVER),
    )
    cache, lease = advance(cache, lease, held)
    why = verify_lease(cache, lease)
    why = jnp.where(prompt, why, jnp.uint8(Reason.TOKENS))
    return cache, lease, jnp.where(mine, why, jnp.uint8(Reason.LIFECYCLE))


def verify_lease(cache: Cache, lease: Lease) -> jax.Array:
    """`u8[Q]`: OK, or the first reason why what a lease would read now is not verified.

    The levels of a query once more, on the lease: versions and stamps of everything it reads, and
    ABI, epoch, indexer version and byte layout of the shared segments that it reads from.
    """
    check_fits(cache, lease)
    lay = cache.layout
    B = lay.segment_tokens
    seg = rows_of(cache.table, lease.rows)
    begin = jnp.arange(lease.rows.shape[1], dtype=jnp.int32)[None] * B
    each = []
    for g, spec in enumerate(lay.groups):
        lo, hi = (x[:, None] * spec.rule.unit for x in required(spec.rule, lease.length))
        shared = (seg.length > 0) & ~lease.own & ~lease.private[:, g]
        each.append(shared & (lo < begin + B) & (hi > begin))
    reads = jnp.stack(each, -1)

    def judge(seg, need):
        return first_reason(check_abi(lay, seg, need), check_bytes(lay, seg, need))

    why = jax.vmap(jax.vmap(judge, in_axes=(0, None)))(seg, lease.need)
    why = jnp.where(reads, why, jnp.uint8(0))
    flat = why.reshape(why.shape[0], -1)
    first = jnp.take_along_axis(flat, jnp.argmax(flat != 0, axis=1)[:, None], axis=1)[:, 0]
    first = jnp.where(stamps_hold(cache, lease, lease.length), first, jnp.uint8(Reason.STAMP))
    first = jnp.where(covers(cache, lease, lease.length), first, jnp.uint8(Reason.RANGE))
    return jnp.where(check_lease(cache, lease), first, jnp.uint8(Reason.LIFECYCLE))
