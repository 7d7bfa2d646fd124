"""What publication passes on: the provenance of what was read, and rows that were restored."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
import tiny

import hkv


class Two:
    """Two requests at a time on one small cache, with a model that costs nothing."""

    def __init__(self):
        self.cache = hkv.init(tiny.layout(pages=(65, 65, 65, 65), row=4))

    def need(self, **identity):
        return hkv.need(self.cache, requests=2, bucket=64, **identity)

    def ask(self, prompts, need):
        tokens = np.zeros((2, 64), np.int32)
        for q, prompt in enumerate(prompts):
            tokens[q, : len(prompt)] = prompt
        tokens, length = jnp.asarray(tokens), jnp.asarray([len(p) for p in prompts], jnp.int32)
        return tokens, length, hkv.query(self.cache, tokens, length, need)

    def serve(self, prompts, need):
        tokens, length, available = self.ask(prompts, need)
        plan = hkv.route(available, hkv.costs())
        self.cache, lease, _ = hkv.admit(self.cache, plan, length)
        self.cache, lease, why = hkv.recover(
            tiny.replay, jnp.float32(1), self.cache, lease, plan, tokens, need, chunk=tiny.CHUNK
        )
        assert not np.asarray(why).any()
        while (np.asarray(lease.length) < np.asarray(length)).any():
            count = jnp.minimum(length - lease.length, tiny.CHUNK)
            self.cache, lease, _, ok = tiny.step(jnp.float32(1), self.cache, lease, tokens, count)
            assert np.asarray(ok).all()
        self.cache, lease, _ = hkv.publish(self.cache, lease, tokens, length, need, partial=True)
        self.cache = hkv.release(self.cache, lease)
        return available, plan


@pytest.fixture
def two():
    return Two()


OLD = np.random.default_rng(0).integers(0, 99, 40).tolist()


def test_what_continues_a_replayed_segment_is_replayed_itself_and_refused_by_default(two):
    exact, loose = two.need(), two.need(provenance=hkv.Provenance.REPLAYED)
    two.serve([OLD, []], exact)
    table = two.cache.table
    marked = jnp.where(table.length > 0, jnp.uint8(hkv.Provenance.REPLAYED), jnp.uint8(0))
    two.cache = dataclasses.replace(two.cache, table=dataclasses.replace(table, provenance=marked))
    # 37 tokens are shared: two whole segments and, copied, a part of the third.
    available, _ = two.serve([[*OLD[:37], *range(9)], []], loose)
    assert int(available.boundary[0]) == 37
    lengths, marks = np.asarray(two.cache.table.length), np.asarray(two.cache.table.provenance)
    assert (marks[lengths > 0] == hkv.Provenance.REPLAYED).all()
    _, _, available = two.ask([[*OLD[:37], *range(9)], []], exact)
    assert int(available.boundary[0]) == 0
    assert (available.group_reason[0, :2] == hkv.Reason.PROVENANCE).all()


def test_rows_restored_for_two_requests_at_once_serve_the_third_without_a_replay(two):
    need = two.need()
    two.serve([OLD[:32], []], need)
    rows = jnp.arange(two.cache.layout.segments, dtype=jnp.int32)
    gone = jnp.asarray([f is hkv.Form.WINDOW for f in hkv.Form])
    two.cache, _ = hkv.drop(two.cache, rows, gone)
    _, plan = two.serve([[*OLD[:32], 1, 2], [*OLD[:32], 3]], need)
    assert (np.asarray(plan.replay[:, 1] - plan.replay[:, 0]) > 0).all()
    _, _, available = two.ask([[*OLD[:32], 4], [*OLD[:32], 5, 6]], need)
    assert np.asarray(available.boundary).tolist() == [32, 32]
