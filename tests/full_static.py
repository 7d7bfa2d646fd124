"""The checks of `test_static` and `test_memory` on the DeepSeek-V4 model; compiles for minutes.

Not collected by default: `python -m pytest tests/full_static.py`.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_static import Driver

import hkv
from hkv import _recover
from hkv.models.deepseek_v4 import DeepseekV4, groups, mini_config
from hkv.nn import bind
from hkv.testing import aliasing

CHUNK, BUCKET, Q = 8, 64, 2
WEIGHTS, BUILD = bind(DeepseekV4.random(mini_config(8), jax.random.key(0)))


def forward(weights, tokens, view):
    return BUILD(weights)(tokens, view)


def replay(weights, tokens, view):
    return forward(weights, tokens, view)[1]


@functools.partial(jax.jit, donate_argnames=("cache",))
def step(weights, cache, lease, tokens, count):
    spot = lease.length[:, None] + jnp.arange(CHUNK, dtype=jnp.int32)[None]
    piece = jnp.take_along_axis(tokens, jnp.minimum(spot, tokens.shape[1] - 1), axis=1)
    logits, view = forward(weights, piece, hkv.view(cache, lease, count))
    cache, lease, ok = hkv.append(view, after=logits)
    return cache, lease, logits, ok


def layout(**sizes):
    spec = tuple(dataclasses.replace(g, **sizes) for g in groups(mini_config(8)))
    return hkv.Layout(groups=spec, segment_tokens=16, segments=28, buckets=(BUCKET,), leases=12)


def test_100_random_operations_on_deepseek_compile_nothing():
    driver = Driver(layout(), replay, WEIGHTS, step, bucket=BUCKET, vocabulary=256)
    driver.warm_up()
    driver.random(100)


@pytest.mark.parametrize("name", ["step", "recover"])
def test_deepseek_runs_in_place(name):
    lay = layout(pages=4096)  # pools of 2 to 128 MiB
    cache = hkv.abstract(lay)
    tokens, length = hkv.pad_batch(lay, [np.arange(40), np.arange(40)])
    need = hkv.need(cache, requests=Q, codes=np.ones((len(lay.groups), 1), np.uint32))
    count = jnp.zeros(Q, jnp.int32)

    def start(cache):
        plan = hkv.route(hkv.query(cache, tokens, length, need), hkv.costs())
        return plan, hkv.admit(cache, plan, count)[1]

    plan, lease = jax.eval_shape(start, cache)
    if name == "step":
        memory = aliasing(step, WEIGHTS, cache, lease, tokens, count)
    else:
        memory = aliasing(_recover._recover, replay, WEIGHTS, cache, lease, plan, tokens, CHUNK)
    assert memory.alias >= sum(hkv.nbytes(lay).values())
    assert memory.temp < 1.5 * 2**20  # the smallest pool has 2 MiB
