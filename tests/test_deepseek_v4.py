"""The whole model through a cache of plain arrays, against transformers' stored outputs."""

import dataclasses
import functools
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from dense import DenseView

from hkv._layout import Form, Layout
from hkv.models.deepseek_v4 import DeepseekV4, DeepseekV4Config, groups, mini_config
from hkv.nn import Rotary, Weights, Yarn, bind, random_weights

# Compiling takes longer than running here.
QUICK = {"xla_backend_optimization_level": 0}
FOLDER = Path(__file__).parents[1] / "examples" / "checkpoints" / "dsv4"


@functools.cache
def step(config):
    """One jitted step for every model of a config."""
    _, build = bind(DeepseekV4.random(config, jax.random.key(0)))
    return jax.jit(
        lambda weights, tokens, view, selection: build(weights)(
            tokens, view, selection=selection, aux=True
        ),
        compiler_options=QUICK,
    )


def _slice(at, count, pad, array):
    part = np.asarray(array)[:, at : at + count]
    pads = [(0, 0), (0, pad), *[(0, 0)] * (part.ndim - 2)]
    return jnp.asarray(np.pad(part, pads, constant_values=99), jnp.int32)


def run(model, tokens, view, chunk, pad=0, selection=None):
    """Logits `[Q, T, V]` and aux of `tokens`, in chunks, each padded by `pad` tokens."""
    weights, _ = bind(model)
    logits, notes = [], []
    for at in range(0, tokens.shape[1], chunk):
        count = min(chunk, tokens.shape[1] - at)
        part, force = jax.tree.map(
            functools.partial(_slice, at, count, chunk + pad - count), (tokens, selection)
        )
        y, view, aux = step(model.config)(weights, part, view.at(at, count), force)
        logits.append(np.asarray(y[:, :count]))
        notes.append(jax.tree.map(lambda a, count=count: np.asarray(a[:, :count]), aux))
    aux = jax.tree.map(lambda *a: np.concatenate(a, axis=1), *notes)
    return np.concatenate(logits, axis=1), aux


def empty(config, requests, length, poison=0.0):
    return DenseView.empty(groups(config), requests, length, poison)


@pytest.fixture(scope="module")
def trained():
    return DeepseekV4.load(FOLDER)


@pytest.fixture(scope="module")
def golden():
    return np.load(FOLDER / "golden.npz")


@pytest.mark.parametrize("chunk, pad", [(640, 0), (16, 0), (7, 9), (1, 0)])
def test_logits_agree_with_transformers_in_any_chunks(trained, golden, chunk, pad):
    ids = golden["ids"].astype(np.int32)[None]
    logits, _ = run(trained, ids, empty(trained.config, 1, 640), chunk, pad)
    np.testing.assert_allclose(logits[0, ::8], golden["logits_fp32"], atol=4e-5, rtol=0)


def test_greedy_text_equals_transformers(trained, golden):
    text = golden["greedy"].astype(np.int32)
    weights, _ = bind(trained)
    view, out = empty(trained.config, 1, 640), []
    for at in range(0, 64, 16):
        part = jnp.asarray(text[None, at : at + 16])
        logits, view, _ = step(trained.config)(weights, part, view.at(at, 16), None)
    for at in range(64, 304):
        out.append(int(np.argmax(logits[0, -1])))
        token = jnp.full((1, 1), out[-1], jnp.int32)
        logits, view, _ = step(trained.config)(weights, token, view.at(at, 1), None)
    np.testing.assert_array_equal(out, text[64:])


def few():
    """One layer of each kind: what compiles in a second or two."""
    layers = mini_config().layers[1:4]
    return dataclasses.replace(mini_config(16), layers=layers, hashed=(True, False, False))


TOKENS = np.random.default_rng(0).integers(0, 256, (2, 72)).astype(np.int32)


def test_chunks_padding_and_poison_change_nothing():
    config = few()
    model = DeepseekV4.random(config, jax.random.key(1))
    whole, _ = run(model, TOKENS, empty(config, 2, 72), 72)
    chunks, aux = run(model, TOKENS, empty(config, 2, 72, np.nan), 9, pad=4)
    assert aux["margin"].min() > 1e-4  # no choice is a matter of rounding
    np.testing.assert_allclose(chunks, whole, atol=1e-4, rtol=0)
    clean, _ = run(model, TOKENS, empty(config, 2, 72), 9, pad=4)
    np.testing.assert_array_equal(chunks, clean)


@pytest.mark.parametrize("bad", [256, 2**31 - 1, -1])
def test_an_unknown_token_gives_nan_to_its_request_alone(bad):
    config = few()
    model = DeepseekV4.random(config, jax.random.key(1))
    right, _ = run(model, TOKENS, empty(config, 2, 72), 72)
    wrong = TOKENS.copy()
    wrong[0, 20] = bad
    logits, _ = run(model, wrong, empty(config, 2, 72), 72)
    assert np.isnan(logits[0, 20]).all()
    np.testing.assert_array_equal(logits[0, :20], right[0, :20])
    np.testing.assert_array_equal(logits[1], right[1])


def test_aux_names_every_choice():
    config = mini_config()
    model = DeepseekV4.random(config, jax.random.key(1))
    view = empty(config, 2, 72).at(0, 9)
    _, _, aux = jax.eval_shape(lambda t: model(t, view, aux=True), jnp.asarray(TOKENS[:, :9]))
    assert aux["margin"].shape == (2, 9)
    assert {layer: a.shape for layer, a in aux["index"].items()} == {2: (2, 9, 4), 4: (2, 9, 4)}
    assert {layer: a.shape for layer, a in aux["expert"].items()} == {
        layer: (2, 9, 2) for layer in range(6)
    }


def test_requests_at_different_positions_share_a_step():
    config = few()
    model = DeepseekV4.random(config, jax.random.key(1))
    weights, _ = bind(model)
    whole, _ = run(model, TOKENS, empty(config, 2, 72), 72)
    view, at, count = empty(config, 2, 72), np.zeros(2, np.int32), np.array([13, 6])
    while (count > 0).any():
        index = np.minimum(at[:, None] + np.arange(13), 71)
        part = jnp.asarray(np.take_along_axis(TOKENS, index, axis=1))
        logits, view, _ = step(config)(weights, part, view.at(at, count), None)
        for q in range(2):
            np.testing.assert_allclose(
                logits[q, : count[q]], whole[q, at[q] : at[q] + count[q]], atol=1e-4
            )
        at = at + count
        count = np.minimum(np.array([13, 6]), 72 - at)


def test_forced_choices_are_used():
    config = few()
    model = DeepseekV4.random(config, jax.random.key(1))
    logits, aux = run(model, TOKENS, empty(config, 2, 72), 72)
    del aux["margin"]
    same, again = run(model, TOKENS, empty(config, 2, 72), 72, selection=aux)
    np.testing.assert_allclose(same, logits, atol=1e-5)
    np.testing.assert_array_equal(again["index"][1], aux["index"][1])
    none = np.full_like(aux["index"][1], 72 // 4)
    none[..., 0] = 0
    aux["index"] = {1: none}
    forced, _ = run(model, TOKENS, empty(config, 2, 72), 72, selection=aux)
    late = 7  # until here entry 0 is all there is to choose
    np.testing.assert_allclose(forced[:, :late], logits[:, :late], atol=1e-5)
    assert np.abs(forced - logits).max() > 1e-2


def test_misspelt_selection_is_refused():
    model = DeepseekV4.random(mini_config(), jax.random.key(1))
    with pytest.raises(ValueError, match="`selection`"):
        model(jnp.zeros((1, 1), jnp.int32), empty(model.config, 1, 8), selection={"experts": {}})


def test_runs_in_float64_and_bfloat16_and_as_argument_of_jit():
    call = jax.jit(lambda model, t, v: model(t, v), compiler_options=QUICK)
    results = {}
    for dtype in ("float32", "float64", "bfloat16"):
        with jax.enable_x64(dtype == "float64"):
            config = dataclasses.replace(
                mini_config(dtype=dtype), layers=mini_config().layers[2:3], hashed=(False,)
            )
            model = DeepseekV4.random(config, jax.random.key(1))
            view, tokens = empty(config, 2, 24).at(0, 24), jnp.asarray(TOKENS[:, :24])
            logits, view = call(model, tokens, view)
            held = {group.name: group.dtype for group in groups(config)}
            assert held["csa"] == dtype
            assert held["csa_tail"] == logits.dtype == ("float64" if "64" in dtype else "float32")
            results[dtype] = np.asarray(logits, np.float64)
    np.testing.assert_allclose(results["float32"], results["float64"], atol=1e-4)
    assert np.isfinite(results["bfloat16"]).all()


def test_groups_make_a_layout():
    layout = Layout(groups(mini_config(16)), segment_tokens=16, segments=8, buckets=(64,))
    found = {g.name: (g.form, str(g.rule), g.layers, g.row) for g in layout.groups}
    assert found == {
        "window": (Form.WINDOW, "window(8)", (0, 1), (64,)),
        "window_c": (Form.WINDOW, "window(8)", (2, 3, 4, 5), (64,)),
        "csa": (Form.COMPRESSED, "history(4)", (2, 4), (64,)),
        "csa_tail": (Form.TAIL, "tail(4, overlap)", (2, 4), (2, 128)),
        "csa_index": (Form.INDEXER, "indexer(4)", (2, 4), (16,)),
        "csa_index_tail": (Form.INDEXER, "tail(4, overlap)", (2, 4), (2, 32)),
        "hca": (Form.COMPRESSED, "history(16)", (3, 5), (64,)),
        "hca_tail": (Form.TAIL, "tail(16)", (3, 5), (2, 64)),
    }
    assert len(set(layout.abi.tolist())) == 8


@pytest.fixture
def folder(tmp_path):
    shutil.copytree(FOLDER, tmp_path / "model")
    return tmp_path / "model"


def edit(folder, **changes):
    path = folder / "config.json"
    raw = json.loads(path.read_text())
    raw.update(changes)
    path.write_text(json.dumps({k: v for k, v in raw.items() if v is not ...}))


def rewrite(folder, change):
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    change(tensors)
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")


def test_sharded_published_names_load_the_same(trained, folder):
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = {
        name: name.removeprefix("model.")
        .replace("embed_tokens", "embed")
        .replace("hc_head.hc_", "hc_head_")
        for name in tensors
    }
    where = {}
    for part in range(2):
        file = f"model-{part + 1:05}-of-00002.safetensors"
        shard = {names[n]: tensors[n] for n in sorted(tensors)[part::2]}
        if part:
            shard["mtp.0.norm.weight"] = np.ones(3, np.float32)
        safetensors.numpy.save_file(shard, folder / file)
        where |= dict.fromkeys(shard, file)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": where}))
    for a, b in zip(
        jax.tree.leaves(DeepseekV4.load(folder)), jax.tree.leaves(trained), strict=True
    ):
        np.testing.assert_array_equal(a, b)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="`model-00002-of-00002.safetensors`"):
        DeepseekV4.load(folder)


def test_published_style_of_config_means_the_same():
    raw = json.loads((FOLDER / "config.json").read_text())
    new = DeepseekV4Config.from_dict(raw)
    for name in ("layer_types", "compress_rates", "mlp_layer_types", "rope_parameters"):
        del raw[name]
    del raw["partial_rotary_factor"]
    raw |= {"compress_ratios": [0, 4, 16, 4, 0], "num_hash_layers": 1, "qk_rope_head_dim": 16}
    assert DeepseekV4Config.from_dict(raw) == new
    raw["rope_scaling"] = {
        "type": "yarn", "factor": 16, "original_max_position_embeddings": 65536,
        "beta_fast": 32, "beta_slow": 1,
    }  # fmt: skip
    old = DeepseekV4Config.from_dict(raw)
    assert old.rotary == new.rotary == Rotary(16, 10000.0)
    assert old.rotary_c == Rotary(16, 160000.0, Yarn(16.0, 65536))


@pytest.mark.parametrize(
    "changes, name",
    [
        ({"model_type": "llama"}, "model_type"),
        ({"hidden_size": ...}, "hidden_size"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"hidden_size": 96.5}, "hidden_size"),
        ({"rms_norm_eps": -1}, "rms_norm_eps"),
        ({"o_groups": 3}, "o_groups"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok"),
        ({"scoring_func": "tanh"}, "scoring_func"),
        ({"num_key_value_heads": 2}, "num_key_value_heads"),
        ({"layer_types": ["full_attention"] * 4}, "layers"),
        ({"num_hidden_layers": 3}, "layer_types"),
        ({"layer_types": ..., "compress_ratios": [0, 4, 16, 8]}, "compress_ratios"),
        ({"layer_types": ..., "compress_ratios": [0, 4]}, "compress_ratios"),
        ({"mlp_layer_types": ["dense"] * 4}, "mlp_layer_types"),
        ({"rope_parameters": ..., "partial_rotary_factor": 0.75}, "rotary_c"),
        ({"rope_parameters": {"main": {}, "compress": {}}}, "rope_theta"),
        ({"rope_scaling": {"type": "ntk"}, "rope_parameters": ...}, "rope_type"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"dtype": "int8"}, "dtype"),
        ({"dtype": "floaty"}, "dtype"),
        ({"dtype": 32}, "dtype"),
        ({"scoring_func": ["sigmoid"]}, "scoring_func"),
        ({"compress_rates": [4, 128]}, "compress_rates"),
        ({"rope_parameters": [1]}, "rope_parameters"),
    ],
)
def test_bad_config_is_refused_by_name(folder, changes, name):
    edit(folder, **changes)
    with pytest.raises((TypeError, ValueError), match=f"`{name}"):
        DeepseekV4.load(folder)


@pytest.mark.parametrize(
    "change, name",
    [
        (lambda t: t.pop("model.layers.1.attn.compressor.ape"), "layers.1.attn.compressor.ape"),
        (lambda t: t.update(extra=np.ones(2, np.float32)), "extra"),
        (
            lambda t: t.update({"embed.weight": t["model.embed_tokens.weight"]}),
            "model.embed_tokens",
        ),
        (lambda t: t.update({"head.weight": np.ones((3, 4), np.float32)}), "head.weight"),
        (lambda t: t.update({"head.weight": t["head.weight"].astype(np.int8)}), "head.weight"),
        (
            lambda t: t.update(
                {"model.layers.0.ffn.gate.tid2eid": t["model.layers.0.ffn.gate.tid2eid"] + 4}
            ),
            "model.layers.0.ffn.gate.tid2eid",
        ),
    ],
)
def test_bad_tensors_are_refused_by_name(folder, change, name):
    rewrite(folder, change)
    with pytest.raises(ValueError, match=f"`{name}"):
        DeepseekV4.load(folder)


def test_float64_without_x64_mode_is_refused():
    with pytest.raises(ValueError, match="`dtype` is 'float64'"):
        DeepseekV4.load(FOLDER, dtype="float64")


def test_missing_and_broken_files_are_named(folder):
    with pytest.raises(FileNotFoundError, match="`folder`"):
        DeepseekV4.load(folder / "nowhere")
    (folder / "model.safetensors").write_bytes(b"not tensors")
    with pytest.raises(ValueError, match="`model.safetensors`"):
        DeepseekV4.load(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="`model.safetensors`"):
        DeepseekV4.load(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match="`config.json`"):
        DeepseekV4.load(folder)
    (folder / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match="`config.json`"):
        DeepseekV4.load(folder)


def test_same_key_gives_the_same_model_in_every_dtype():
    names = []

    def source(request):
        names.append(request.name)
        return random_weights(jax.random.key(5)).source(request)

    one = DeepseekV4(mini_config(), Weights(source))
    two = DeepseekV4.random(mini_config(dtype="bfloat16"), jax.random.key(5))
    assert len(set(names)) == len(names)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True):
        np.testing.assert_array_equal(a.astype(b.dtype), b)
    table = one.blocks[0].ffn.table[...]
    assert set(np.unique(table)) == {0, 1, 2, 3}
