"""Pools spread over four devices: shardings stay, and one shard that lacks its part is enough."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import tiny
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import hkv
from hkv.testing import count_compiles, invariants, same_structure

ROW, B, BUCKET = 8, 8, 32
AXIS = AxisType[os.environ.get("HKV_TEST_AXIS", "Explicit")]  # the default of `jax.make_mesh`
inside = pytest.mark.skipif(jax.device_count() < 4, reason="runs in a process with four devices")


def in_a_process_with_four_devices(*args, **env):
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *args],
        env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", **env},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]


@pytest.mark.skipif(jax.device_count() >= 4, reason="this is that process")
def test_all_of_this_module_with_four_devices():
    in_a_process_with_four_devices(__file__)


@pytest.mark.skipif(jax.device_count() >= 4, reason="this is that process")
def test_whatever_happens_under_a_lease_is_noticed_where_pools_are_spread_and_the_table_is_not():
    leases_with_four_devices(HKV_SHARDS="3")


@pytest.mark.skipif(
    jax.device_count() >= 4 or os.environ.get("HKV_FULL") != "1", reason="minutes; HKV_FULL=1"
)
def test_so_it_is_where_the_table_that_is_queried_is_on_one_device_and_the_pools_on_another():
    leases_with_four_devices(HKV_APART="1")


def leases_with_four_devices(**env):
    module = Path(__file__).parent / "test_leases.py"
    some = "step and (evict or invalidate or w5)"
    which = (
        "whatever_happens" if os.environ.get("HKV_FULL") == "1" else f"whatever_happens and {some}"
    )
    in_a_process_with_four_devices(str(module), "-k", which, **env)


def layout(**more):
    groups = tuple(dataclasses.replace(g, pages=16) for g in tiny.groups(row=ROW))
    more = {"shards": 4, **more}
    return hkv.Layout(groups=groups, segment_tokens=B, segments=12, buckets=(BUCKET,), leases=4,
                      **more)  # fmt: skip


def spread(*spec, devices=(0, 1, 2, 3)):
    mesh = Mesh(np.array(jax.devices())[list(devices)], "x", axis_types=(AXIS,))
    return NamedSharding(mesh, PartitionSpec(*spec))


CHANNELS = (None, None, None, "x")
WEIGHTS = np.float32(1)


class Served:
    """What one request saw on its way, and its outputs by position."""

    def __init__(self, cache, prompt, need=None, **store):
        need = need or hkv.need(cache)
        tokens, length = hkv.pad_batch(cache.layout, [prompt])
        self.found = hkv.query(cache, tokens, length, need)
        self.plan = hkv.route(self.found, hkv.costs(prefill=2.0))
        total = jax.device_put(np.array([len(prompt)], np.int32))
        steps = []
        cache, lease, self.answer = hkv.admit(cache, self.plan, total)
        steps.append(cache)
        cache, lease, self.why = hkv.recover(
            tiny.replay, WEIGHTS, cache, lease, self.plan, tokens, chunk=tiny.CHUNK
        )
        steps.append(cache)
        self.resume = at = int(lease.length[0])
        self.out = np.full(len(prompt), np.nan)
        while at < len(prompt):
            n = min(tiny.CHUNK, len(prompt) - at)
            count = jax.device_put(np.array([n], np.int32))
            cache, lease, out, ok = tiny.step(WEIGHTS, cache, lease, tokens, count)
            assert ok.all()
            self.out[at : at + n] = np.asarray(out)[0, :n]
            at += n
        steps.append(cache)
        cache, lease, _ = hkv.publish(cache, lease, tokens, length, partial=True)
        steps.append(cache)
        self.cache = hkv.release(cache, lease)
        self.steps = [*steps, self.cache]


def code(value):
    return int(np.asarray(value))


PROMPT = np.random.default_rng(0).integers(0, 50, 30)
LONGER = np.concatenate([PROMPT[:21], np.arange(9)])  # leaves it inside the third segment
EXACT = [tiny.dense(tokens, row=ROW) for tokens in (PROMPT, LONGER)]


@pytest.fixture
def stored():
    return Served(hkv.init(layout(), spread(*CHANNELS)), PROMPT)


@inside
def test_every_update_keeps_shardings_and_compiles_once(stored):
    cache = stored.cache
    for pool, g in zip(cache.pools, cache.layout.groups, strict=True):
        shapes = {s.data.shape for s in pool.data.addressable_shards}
        assert shapes == {(len(g.layers), 16, g.rows_per_page, ROW // 4)}
        assert pool.stamp.is_fully_replicated
    with count_compiles() as compiles:
        again = Served(cache, LONGER)
    assert not compiles.names
    fresh = hkv.init(layout(), spread(*CHANNELS))
    for state in (*stored.steps, *again.steps):
        same_structure(hkv.abstract(layout()), state)
        for a, b in zip(jax.tree.leaves(fresh), jax.tree.leaves(state), strict=True):
            assert a.sharding.is_equivalent_to(b.sharding, a.ndim)
    invariants(again.cache)


@inside
def test_a_resumed_run_equals_the_cold_one_and_the_oracle(stored):
    np.testing.assert_array_equal(stored.out, EXACT[0])
    resumed = Served(stored.cache, LONGER)
    assert resumed.resume >= 16
    np.testing.assert_array_equal(resumed.out[resumed.resume :], EXACT[1][resumed.resume :])
    cold = Served(hkv.init(layout(), spread(*CHANNELS)), LONGER)
    assert cold.resume == 0
    np.testing.assert_array_equal(cold.out, EXACT[1])


@inside
def test_byte_codes_have_a_column_per_shard_and_tell_shardings_apart():
    codes = hkv.byte_codes(hkv.init(layout(), spread(*CHANNELS)))
    assert codes.shape == (4, 4) and codes.all()
    assert all(len(set(row.tolist())) == 4 for row in codes)
    pages = hkv.byte_codes(hkv.init(layout(), spread(None, "x")))
    order = hkv.byte_codes(hkv.init(layout(), spread(*CHANNELS, devices=(1, 0, 2, 3))))
    assert (codes != pages).all()
    assert (codes == order).all()  # the same parts on other devices of one kind lie alike


@inside
def test_pools_in_another_sharding_of_the_same_shape_are_not_read(stored):
    other = hkv.init(layout(), spread(None, "x"))
    need = hkv.need(stored.cache, codes=hkv.byte_codes(other))
    run = Served(stored.cache, PROMPT, need)
    whole = run.found.status[0, : len(PROMPT) // B]
    assert not (np.asarray(whole) == hkv.Status.REUSE).any()
    assert (np.asarray(run.found.group_reason[0, : len(PROMPT) // B]) == hkv.Reason.BYTES).all()
    assert code(run.found.boundary[0]) == 0
    # All that is taken over is that these tokens are known; every row is made again.
    assert code(run.plan.fill_start[0]) == 0 and np.asarray(run.plan.fill_groups[0, [0, 3]]).all()
    assert code(run.why[0]) == hkv.Reason.OK
    np.testing.assert_array_equal(run.out[run.resume :], EXACT[0][run.resume :])


@inside
@pytest.mark.parametrize("name", ["history", "window", "tail", "index"])
def test_one_page_that_one_shard_lacks_moves_the_boundary_of_its_group_alone(stored, name):
    cache = stored.cache
    lay, g = cache.layout, cache.layout.group(name)
    tokens, length = hkv.pad_batch(lay, [PROMPT])
    before = hkv.query(cache, tokens, length, hkv.need(cache))
    last = code(before.rows[0, 3])  # the segment in which the prompt ends
    codes = np.array(cache.table.codes)
    codes[last, g, 2] = 0
    codes = jax.device_put(codes, cache.table.codes.sharding)
    cache = dataclasses.replace(cache, table=dataclasses.replace(cache.table, codes=codes))

    run = Served(cache, PROMPT)
    found, form = run.found, lay.groups[g].form
    assert code(found.group_reason[0, 3, g]) == hkv.Reason.SHARD
    closed = lay.groups[g].rule.prefix_closed
    status = hkv.Status.RECOMPUTE if closed else hkv.Status.RECOVER
    assert code(found.status[0, 3, form]) == status
    assert code(found.reason[0, 3, form]) == hkv.Reason.SHARD
    assert code(before.boundary[0]) == 29
    assert code(found.boundary[0]) < 29
    others = np.arange(len(lay.groups)) != g
    np.testing.assert_array_equal(found.group_ok[0, others], before.group_ok[0, others])
    np.testing.assert_array_equal(found.furthest[0, others], before.furthest[0, others])
    assert code(found.furthest[0, g]) < 29
    assert code(run.why[0]) == hkv.Reason.OK
    np.testing.assert_array_equal(run.out[run.resume :], EXACT[0][run.resume :])
    invariants(run.cache)


@inside
def test_the_number_of_devices_must_be_the_layouts_shards():
    with pytest.raises(ValueError, match="covers 1 devices"):
        hkv.init(layout())
    with pytest.raises(ValueError, match="covers 2 devices"):
        hkv.init(layout(), spread(*CHANNELS, devices=(0, 1)))
    with pytest.raises(ValueError, match="covers 4 devices"):
        hkv.init(layout(shards=1), spread(*CHANNELS))
