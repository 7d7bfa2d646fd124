"""The compressor in plain XLA: the reference for every kernel of this operation."""

import jax.numpy as jnp

from pallas_kernels._check import accumulator


def compress(kv, gate, valid, bias, ratio, overlap):
    """See `contract.compress`; arguments are checked."""
    acc = accumulator(kv, gate, bias)
    requests, rows, channels = kv.shape
    windows = (requests, rows // ratio, ratio, channels)
    held = valid[:, :, None, None]
    # Selected before any arithmetic: a row that is not valid may hold NaN.
    kv = jnp.where(held, kv.astype(acc).reshape(windows), 0)
    gate = gate.astype(acc).reshape(windows)
    if bias is not None:
        gate = gate + bias.astype(acc)[None, None]
    gate = jnp.where(held, gate, -jnp.inf)
    if overlap:
        kv, gate = _with_previous(kv), _with_previous(gate)
        own = valid[:, 1:]
    else:
        own = valid
    highest = jnp.max(gate, axis=2, keepdims=True)
    base = jnp.where(highest == -jnp.inf, 0, highest)
    weights = jnp.exp(gate - base)
    total = jnp.sum(weights, axis=2)
    pooled = jnp.sum(weights * kv, axis=2) / jnp.where(total == 0, 1, total)
    return jnp.where(own[:, :, None], pooled, 0)


def _with_previous(rows):
    """`[Q, E + 1, m, 2 D]` to `[Q, E, 2 m, D]`: previous lower half, then own upper half."""
    half = rows.shape[-1] // 2
    return jnp.concatenate([rows[:, :-1, :, :half], rows[:, 1:, :, half:]], axis=2)
