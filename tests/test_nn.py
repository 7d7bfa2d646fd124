"""Each layer against an oracle of a few lines, and alone on a cache of plain arrays."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dense import DenseView

from hkv._layout import Form, Group
from hkv._rules import history, indexer, tail, window
from hkv.nn import (
    AttentionShape,
    CompressedSparseAttention,
    Compressor,
    HeavilyCompressedAttention,
    HyperConnection,
    MoE,
    MoEShape,
    RMSNorm,
    Rotary,
    SlidingAttention,
    Yarn,
    bind,
    positions,
    random_weights,
    read_rows,
    rms_norm,
    rotate,
)
from hkv.nn._indexer import choose

# Compiling takes longer than running here.
QUICK = {"xla_backend_optimization_level": 0}
ROTARY = Rotary(4, 100.0)
SHAPE = AttentionShape(
    hidden=12,
    heads=2,
    head_dim=8,
    q_rank=6,
    o_groups=2,
    o_rank=3,
    window=5,
    rotary=ROTARY,
    eps=1e-6,
)
LAYER = 3
GROUPS = (
    Group("window", Form.WINDOW, window(5), (LAYER,), (8,)),
    Group("window_c", Form.WINDOW, window(5), (LAYER,), (8,)),
    Group("csa", Form.COMPRESSED, history(4), (LAYER,), (8,)),
    Group("csa_tail", Form.TAIL, tail(4, overlap=True), (LAYER,), (2, 16)),
    Group("csa_index", Form.INDEXER, indexer(4), (LAYER,), (6,)),
    Group("csa_index_tail", Form.INDEXER, tail(4, overlap=True), (LAYER,), (2, 12)),
    Group("hca", Form.COMPRESSED, history(6), (LAYER,), (8,)),
    Group("hca_tail", Form.TAIL, tail(6), (LAYER,), (2, 8)),
)
RNG = np.random.default_rng(0)


def array(*shape):
    return jnp.asarray(RNG.normal(size=shape), jnp.float32)


def layer(kind, scale=0.4):
    weights = random_weights(jax.random.key(2), scale)
    if kind == "sliding":
        return SlidingAttention(weights, SHAPE, layer=LAYER)
    if kind == "hca":
        return HeavilyCompressedAttention(weights, SHAPE, layer=LAYER, ratio=6)
    return CompressedSparseAttention(
        weights, SHAPE, layer=LAYER, ratio=4, index_heads=16, index_dim=6, topk=2
    )


def run(module, x, chunk, poison=0.0, length=36):
    view = DenseView.empty(GROUPS, x.shape[0], length, poison)
    step = jax.jit(lambda x, view: module(x, view), compiler_options=QUICK)
    out = []
    for at in range(0, x.shape[1], chunk):
        part = x[:, at : at + chunk]
        count = part.shape[1]
        part = jnp.pad(part, [(0, 0), (0, chunk - count), (0, 0)])
        y, view = step(part, view.at(at, count))
        out.append(np.asarray(y[:, :count]))
    return np.concatenate(out, axis=1), view


def test_rotate_turns_pairs_as_complex_numbers():
    x, at = array(2, 3, 7), jnp.asarray([[0, 5, 9], [1, 2, 3]], jnp.int32)
    turned = np.asarray(rotate(x, at, ROTARY))
    angle = np.asarray(at)[..., None] * np.array([1.0, 100.0**-0.5])
    pairs = (np.asarray(x)[..., 3::2] + 1j * np.asarray(x)[..., 4::2]) * np.exp(1j * angle)
    np.testing.assert_array_equal(turned[..., :3], x[..., :3])
    np.testing.assert_allclose(turned[..., 3::2], pairs.real, atol=1e-5)
    np.testing.assert_allclose(turned[..., 4::2], pairs.imag, atol=1e-5)
    np.testing.assert_allclose(rotate(jnp.asarray(turned), at, ROTARY, inverse=True), x, atol=1e-5)


def test_yarn_keeps_fast_frequencies_and_divides_slow_ones():
    plain = Rotary(64, 160000.0).frequencies()
    scaled = Rotary(64, 160000.0, Yarn(16.0, 65536)).frequencies()
    turns = 65536 * plain / (2 * np.pi)
    np.testing.assert_allclose(scaled[turns > 40], plain[turns > 40])
    np.testing.assert_allclose(scaled[turns < 0.7], plain[turns < 0.7] / 16)
    assert (np.diff(scaled) < 0).all()


def test_yarn_attention_factor_scales_the_rotated_channels():
    x, at = array(1, 1, 8), jnp.full((1, 1), 3, jnp.int32)
    yarn = Rotary(4, 100.0, Yarn(1.0, 64, attention_factor=2.0))
    np.testing.assert_allclose(
        rotate(x, at, yarn)[..., 4:], 2 * rotate(x, at, ROTARY)[..., 4:], atol=1e-5
    )


def test_rms_norm_has_unit_mean_square_and_applies_its_gain():
    x = array(2, 3, 8)
    unit = np.asarray(rms_norm(x, 0.0))
    np.testing.assert_allclose((unit**2).mean(-1), 1.0, rtol=1e-5)
    norm = RMSNorm(random_weights(jax.random.key(0)), "norm", 8, 0.0)
    np.testing.assert_allclose(norm(x), unit * np.asarray(norm.weight[...]), rtol=1e-5)


@pytest.mark.parametrize("overlap", [False, True])
def test_compressor_folds_what_the_definition_says(overlap):
    m, size = (4, 8) if overlap else (6, 8)
    name = "csa_tail" if overlap else "hca_tail"
    module = Compressor(
        random_weights(jax.random.key(1), 0.5), hidden=12, size=size, ratio=m, overlap=overlap,
        rotary=ROTARY, eps=1e-6, tail=name, layer=LAYER,
    )  # fmt: skip
    x = array(1, 24, 12)
    value, gate = (np.asarray(x[0] @ w[...].T) for w in (module.wkv, module.wgate))
    gate = gate + np.tile(np.asarray(module.ape[...]), (24 // m, 1))
    expected = []
    for i in range(24 // m):
        own = slice(i * m, i * m + m)
        v, g = value[own, -size:], gate[own, -size:]
        if overlap and i:
            before = slice(i * m - m, i * m)
            v, g = np.vstack([value[before, :size], v]), np.vstack([gate[before, :size], g])
        e = (np.exp(g) * v).sum(0) / np.exp(g).sum(0)
        e = e / np.sqrt((e**2).mean() + 1e-6) * np.asarray(module.norm.weight[...])
        expected.append(np.asarray(rotate(jnp.asarray(e, jnp.float32), jnp.int32(i * m), ROTARY)))
    for chunk in (1, 5, 24):
        view, found = DenseView.empty(GROUPS, 1, 24, np.nan), []
        step = jax.jit(lambda x, view: module(x, view), compiler_options=QUICK)
        for at in range(0, 24, chunk):
            count = min(chunk, 24 - at)
            part = jnp.pad(x[:, at : at + count], [(0, 0), (0, chunk - count), (0, 0)])
            entries, view = step(part, view.at(at, count))
            found += list(np.asarray(entries[0, : (at + count) // m - at // m]))
        np.testing.assert_allclose(found, expected, atol=2e-5)


def test_choose_breaks_ties_by_the_lowest_number_and_tells_the_margin():
    low = -np.inf
    scores = jnp.asarray([[[1.0, 3, 3, 3, 2], [5, low, low, low, low], [1, 2, low, 4, low]]])
    best, margin = choose(scores, 2)
    np.testing.assert_array_equal(best, [[[1, 2], [0, 5], [3, 1]]])
    np.testing.assert_array_equal(margin, [[0, np.inf, 1]])
    best, margin = choose(scores, 7)
    np.testing.assert_array_equal(best[0, 1], [0, 5, 5, 5, 5])
    assert np.isinf(margin).all()


@pytest.mark.parametrize("kind", ["sliding", "csa", "hca"])
def test_attention_in_chunks_equals_attention_at_once(kind):
    module, x = layer(kind), array(2, 36, 12)
    whole, full = run(module, x, 36)
    parts, view = run(module, x, 7, np.nan)
    np.testing.assert_allclose(parts, whole, atol=2e-5)
    for key, rows in view.rows.items():
        if key[0] in ("window" if kind == "sliding" else "window_c", kind):
            np.testing.assert_allclose(rows, full.rows[key], atol=2e-5)


def reach(kind, position):
    """Which inputs the output at `position` depends on: request `i` has input `i` changed."""
    x = jnp.broadcast_to(array(1, 36, 12), (37, 36, 12))
    changed = x.at[jnp.arange(36), jnp.arange(36)].add(1.0)
    y, _ = run(layer(kind), changed, 36)
    return set(np.flatnonzero(np.abs(y[:36, position] - y[36, position]).max(-1) > 1e-6).tolist())


def test_sliding_attention_sees_its_window_only():
    assert reach("sliding", 20) == set(range(16, 21))


def test_an_entry_is_visible_from_the_token_that_closes_it():
    module, x = layer("hca"), array(1, 36, 12)
    y, view = run(module, x, 36)
    step = jax.jit(lambda x, view: module(x, view), compiler_options=QUICK)
    for entry, first in ((0, 5), (3, 23)):
        changed = view.rows["hca", LAYER].at[0, entry].add(1.0)
        rows = {**view.rows, ("hca", LAYER): changed}
        # The token that closes an entry makes it itself, so a stored one shows a token later.
        for position, sees in ((first - 1, False), (first, False), (first + 1, True)):
            at = dataclasses.replace(view, rows=rows).at(position, 1)
            again, _ = step(x[:, position : position + 1], at)
            assert np.allclose(again[0, 0], y[0, position], atol=1e-4) != sees


def test_read_rows_takes_negative_numbers_as_absent():
    view = DenseView.empty(GROUPS, 1, 36, np.nan).at(2, 3)
    new = array(1, 3, 8)
    rows, valid = read_rows(view, "window", LAYER, jnp.asarray([[-1, 2, 4, 5]], jnp.int32), new)
    np.testing.assert_array_equal(valid, [[False, True, True, False]])
    np.testing.assert_array_equal(rows[0, 1:3], new[0, [0, 2]])
    np.testing.assert_array_equal(rows[0, [0, 3]], 0)
    np.testing.assert_array_equal(positions(view, 3), [[2, 3, 4]])


def experts(**changes):
    sizes = dict(hidden=6, inner=5, experts=4, topk=2, score="sqrtsoftplus", scaling=1.5, limit=0.5)
    return MoE(random_weights(jax.random.key(4), 0.8), MoEShape(**(sizes | changes)))


@pytest.mark.parametrize("hashed", [0, 16])
def test_moe_equals_its_definition(hashed):
    moe, x = experts(hashed=hashed), array(2, 3, 6)
    tokens = jnp.asarray(RNG.integers(0, 16, (2, 3)), jnp.int32)
    y, chosen, margin = jax.jit(lambda x, t: moe(x, t), compiler_options=QUICK)(x, tokens)

    def expert(w1, w2, w3, v):
        gate, up = np.minimum(w1 @ v, 0.5), np.clip(w3 @ v, -0.5, 0.5)
        return w2 @ (gate / (1 + np.exp(-gate)) * up)

    w1, w2, w3 = (np.asarray(w[...]) for w in (moe.w1, moe.w2, moe.w3))
    shared = [np.asarray(w[...]) for w in (moe.s1, moe.s2, moe.s3)]
    for at in np.ndindex(2, 3):
        v = np.asarray(x[at])
        score = np.sqrt(np.log1p(np.exp(np.asarray(moe.gate[...]) @ v)))
        if hashed:
            best, gap = np.asarray(moe.table[...])[int(tokens[at])], np.inf
        else:
            biased = score + np.asarray(moe.bias[...])
            order = np.argsort(-biased, kind="stable")
            best, gap = order[:2], biased[order[1]] - biased[order[2]]
        weight = score[best] / score[best].sum() * 1.5
        routed = sum(w * expert(w1[e], w2[e], w3[e], v) for w, e in zip(weight, best, strict=True))
        np.testing.assert_allclose(y[at], routed + expert(*shared, v), atol=1e-5)
        np.testing.assert_array_equal(chosen[at], best)
        np.testing.assert_allclose(margin[at], gap, atol=1e-5)


def test_a_token_gets_the_same_experts_output_in_any_company():
    moe, x = experts(), array(1, 8, 6)
    tokens = jnp.zeros((1, 8), jnp.int32)
    whole, _, _ = moe(x, tokens)
    other, _, _ = moe(x.at[:, 1:].set(jnp.nan), tokens)
    np.testing.assert_allclose(other[:, 0], whole[:, 0], atol=1e-6)


def test_hyper_connection_mixes_nearly_doubly_stochastically():
    hyper = HyperConnection(
        random_weights(jax.random.key(0), 0.5), "hc", streams=3, hidden=4, iterations=12,
        floor=1e-6, eps=1e-6,
    )  # fmt: skip
    streams = array(2, 5, 3, 4)
    x, post, mix = hyper.enter(streams)
    np.testing.assert_allclose(mix.sum(-1), 1.0, atol=1e-3)
    np.testing.assert_allclose(mix.sum(-2), 1.0, atol=1e-3)
    y = array(2, 5, 4)
    out = hyper.leave(streams, y, post, mix)
    expected = np.einsum("qtn,qtd->qtnd", post, y) + np.einsum("qtfn,qtfd->qtnd", mix, streams)
    np.testing.assert_allclose(out, expected, atol=1e-5)
    assert x.shape == (2, 5, 4)


def test_bind_rebuilds_the_module():
    module, x = layer("sliding"), array(1, 4, 12)
    view = DenseView.empty(GROUPS, 1, 36).at(0, 4)
    leaves, build = bind(module)
    step = jax.jit(lambda leaves, x, view: build(leaves)(x, view)[0], compiler_options=QUICK)
    np.testing.assert_allclose(step(leaves, x, view), run(module, x, 4)[0], atol=1e-6)
