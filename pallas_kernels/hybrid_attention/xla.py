"""Attention over parts in plain XLA: the reference for every kernel of this operation."""

import jax
import jax.numpy as jnp

from pallas_kernels._check import accumulator

# Default precision may round float32 operands to 10-bit mantissas on a GPU.
_EXACT = jax.lax.Precision.HIGHEST


def attention(q, parts, sinks, scale, out_dtype):
    """See `contract.attention`; arguments are checked and complete."""
    acc = accumulator(q, sinks, *(array for part in parts for array in (part.k, part.v)))
    requests, tokens, heads, _ = q.shape
    logits, values, broken = [], [], jnp.zeros((requests, tokens, heads), bool)
    for part in parts:
        scores, v, bad = _scores(q.astype(acc) * scale, part, acc)
        logits.append(scores)
        values.append(v)
        broken = broken | bad

    highest = jnp.full((requests, tokens, heads), -jnp.inf, acc)
    if sinks is not None:
        sinks = jnp.broadcast_to(sinks.astype(acc)[None, None, :], highest.shape)
        highest = sinks
    for scores in logits:
        highest = jnp.maximum(highest, jnp.max(scores, axis=-1, initial=-jnp.inf))
    # A query that sees nothing has -inf everywhere: -inf - 0 is -inf, -inf - -inf would be NaN.
    base = jnp.where(highest == -jnp.inf, 0, highest)

    total = jnp.zeros_like(base) if sinks is None else jnp.exp(sinks - base)
    out = 0
    for scores, v in zip(logits, values, strict=True):
        weights = jnp.exp(scores - base[..., None])
        total = total + jnp.sum(weights, axis=-1)
        out = out + _weighted(weights, v)
    out = out / jnp.where(total == 0, 1, total)[..., None]
    lse = jnp.log(total) + base
    out = jnp.where(broken[..., None], jnp.nan, out)
    lse = jnp.where(broken, jnp.nan, lse)
    return out.astype(out_dtype), lse


def merge(outs, lses):
    """See `contract.merge`; arguments are checked."""
    acc = accumulator(*outs, *lses)
    lse = jnp.stack([each.astype(acc) for each in lses])
    highest = jnp.max(lse, axis=0)
    base = jnp.where(highest == -jnp.inf, 0, highest)
    weights = jnp.exp(lse - base[None])
    total = jnp.sum(weights, axis=0)
    out = jnp.zeros(outs[0].shape, acc)
    for number, each in enumerate(outs):
        weight = weights[number][..., None]
        seen = (lse[number] != -jnp.inf)[..., None]
        out = out + jnp.where(seen, weight * each.astype(acc), 0)
    out = out / jnp.where(total == 0, 1, total)[..., None]
    return out.astype(outs[0].dtype), jnp.log(total) + base


def _scores(q, part, acc):
    """Masked logits `[Q, T, H, K]`, values without non-finite rows, and who saw one of those."""
    requests, tokens, heads, size = q.shape
    groups = part.k.shape[-2]
    k, v = part.k.astype(acc), part.v.astype(acc)
    # A zero weight times NaN is NaN, so rows that are not finite leave the products. Deciding it
    # per row and not per query keeps v shared; the queries that do see one are marked instead.
    bad = ~(jnp.isfinite(k).all(axis=-1) & jnp.isfinite(v).all(axis=-1))
    k = jnp.where(bad[..., None], 0, k)
    v = jnp.where(bad[..., None], 0, v)
    grouped = q.reshape(requests, tokens, groups, heads // groups, size)
    rows = "qtkgd" if k.ndim == 5 else "qkgd"
    scores = jnp.einsum(f"qtghd,{rows}->qtghk", grouped, k, precision=_EXACT)
    scores = scores.reshape(requests, tokens, heads, -1 if scores.size else scores.shape[-1])
    scores = jnp.where(part.mask[:, :, None, :], scores, -jnp.inf)
    bad = bad if bad.ndim == 4 else bad[:, None]
    seen_bad = jnp.any(part.mask[..., None] & bad, axis=2)
    return scores, v, jnp.repeat(seen_bad, heads // groups, axis=-1)


def _weighted(weights, v):
    """Sum of the values by weights, `[Q, T, H, Dv]`."""
    requests, tokens, heads, count = weights.shape
    groups = v.shape[-2]
    grouped = weights.reshape(requests, tokens, groups, heads // groups, count)
    rows = "qtkgd" if v.ndim == 5 else "qkgd"
    out = jnp.einsum(f"qtghk,{rows}->qtghd", grouped, v, precision=_EXACT)
    return out.reshape(requests, tokens, heads, v.shape[-1])
