"""After warm-up nothing compiles and nothing changes shape, whatever happens in whatever order."""

import dataclasses
import subprocess
import sys

import jax
import numpy as np
import pytest
import tiny

import hkv
from hkv.testing import count_compiles, invariants, same_structure

Q, CHUNK = 2, tiny.CHUNK
OPERATIONS = (
    "ask", "admit", "admit", "admit", "read", "advance", "advance", "advance", "advance", "advance",
    "publish", "publish", "release", "release", "release", "finish", "finish", "finish", "fork",
    "trim", "evict", "drop", "invalidate", "update_indexer", "set_caps", "verify", "look",
)  # fmt: skip


class Driver:
    """Random operations on one cache; every array that goes in is put on the device explicitly."""

    def __init__(self, layout, model, weights, step, *, bucket, vocabulary, seed=0):
        self.layout, self.model, self.weights, self.step_fn = layout, model, weights, step
        self.bucket = bucket
        self.shortest = max([0, *(n for n in layout.buckets if n < bucket)]) + 1
        self.rng = np.random.default_rng(seed)
        self.streams = self.rng.integers(0, vocabulary, (3, bucket))
        self.cache = hkv.init(layout)
        self.leases = []  # [lease, tokens, need] of what runs, released ones included for a while
        self.seen = {}  # first value of each kind, for its structure
        self.done = dict.fromkeys(OPERATIONS, 0)

    def keep(self, kind, value):
        """Checks that a result has the structure that all results of its kind have."""
        same_structure(self.seen.setdefault(kind, value), value)
        return value

    def put(self, value, dtype=np.int32):
        return jax.device_put(np.asarray(value, dtype))

    def some(self):
        return self.leases[self.rng.integers(len(self.leases))]

    def prompts(self):
        """Prefixes of a few streams, some with an end of their own."""
        out = []
        for _ in range(Q):
            n = int(self.rng.integers(self.shortest, self.bucket + 1))
            prompt = self.streams[self.rng.integers(3)][:n].copy()
            if self.rng.random() < 0.4:
                prompt[self.rng.integers(n) :] += 1
            out.append(prompt)
        return out

    def need(self):
        salts = [("", "other")[self.rng.random() < 0.05] for _ in range(Q)]
        version = int(self.rng.random() < 0.05)
        return hkv.need(
            self.cache, requests=Q, salt=salts, bucket=self.bucket, indexer_version=version,
            epoch=int(self.rng.random() < 0.02), provenance=hkv.Provenance(self.rng.integers(3)),
        )  # fmt: skip

    def plan(self):
        tokens, length = hkv.pad_batch(self.layout, self.prompts())
        need = self.need()
        found = self.keep("availability", hkv.query(self.cache, tokens, length, need))
        costs = hkv.costs(1.0, float(self.rng.random()), float(self.rng.integers(3)))
        return self.keep("plan", hkv.route(found, costs)), found, tokens, length, need

    def ask(self):
        *_, found, _, _, _ = self.plan()
        self.keep("boundary", found.boundary)

    def admit(self):
        plan, _, tokens, length, need = self.plan()
        total = np.minimum(np.asarray(jax.device_get(length)) + self.rng.integers(0, 9, Q),
                           self.bucket)  # fmt: skip
        if self.rng.random() < 0.2:  # the cache changes between query and admission
            self.drop()
        self.cache, lease, answer = hkv.admit(self.cache, plan, self.put(total))
        self.keep("admission", answer)
        self.cache, lease, why = hkv.recover(
            self.model, self.weights, self.cache, lease, plan, tokens, chunk=CHUNK
        )
        self.keep("why", why)
        self.leases.append([self.keep("lease", lease), tokens, need])

    def read(self):
        plan, _, tokens, _, need = self.plan()
        self.cache, lease, _ = hkv.lease(self.cache, plan)
        self.leases.append([self.keep("lease", lease), tokens, need])

    def advance(self):
        entry = self.some()
        lease, tokens, _ = entry
        length, total = jax.device_get((lease.length, lease.total))
        count = np.clip(total - length, 0, self.rng.integers(1, CHUNK + 1, Q))
        self.cache, entry[0], out, ok = self.step_fn(
            self.weights, self.cache, lease, tokens, self.put(count)
        )
        self.keep("step", (out, ok))

    def publish(self):
        entry = self.some()
        lease, tokens, need = entry
        length = np.minimum(jax.device_get(lease.length), self.bucket)
        self.cache, entry[0], n = hkv.publish(
            self.cache, lease, tokens, self.put(length), partial=True
        )
        self.keep("published", n)

    def release(self):
        i = int(self.rng.integers(len(self.leases)))
        self.cache = hkv.release(self.cache, self.leases[i][0])
        if self.rng.random() < 0.7:  # else it is used after its release
            del self.leases[i]

    def finish(self):
        """One batch to its end: run, published, mostly released."""
        entry = self.some()
        for _ in range(self.bucket // CHUNK):
            lease, tokens, need = entry
            length, total = jax.device_get((lease.length, lease.total))
            self.cache, entry[0], _, _ = self.step_fn(
                self.weights, self.cache, lease, tokens, self.put(np.clip(total - length, 0, CHUNK))
            )
        self.cache, entry[0], n = hkv.publish(
            self.cache, entry[0], tokens, entry[0].length, partial=True
        )
        self.keep("published", n)
        if self.rng.random() < 0.8:
            self.cache = hkv.release(self.cache, entry[0])

    def fork(self):
        lease, tokens, need = self.some()
        total = np.minimum(jax.device_get(lease.total) + self.rng.integers(-3, 9, Q), self.bucket)
        self.cache, branch, answer = hkv.fork(self.cache, lease, self.put(total))
        self.keep("admission", answer)
        self.leases.append([self.keep("lease", branch), tokens, need])

    def trim(self):
        entry = self.some()
        self.cache, entry[0] = hkv.trim(self.cache, entry[0])

    def stored(self):
        """Rows in use, and at least Q numbers."""
        rows = np.flatnonzero(jax.device_get(self.cache.table.length))
        return rows if len(rows) > Q else np.arange(self.layout.segments + 1)

    def evict(self):
        pages = [g.pages - self.rng.integers(2 * self.layout.segments) for g in self.layout.groups]
        self.cache = hkv.evict(self.cache, self.put(pages))

    def drop(self):
        rows = self.rng.permutation(self.stored())[:Q]
        forms = self.put(self.rng.random(len(hkv.Form)) < 0.4, bool)
        self.cache, dropped = hkv.drop(self.cache, self.put(rows), forms)
        self.keep("dropped", dropped)

    def invalidate(self):
        rows = self.rng.random(self.layout.segments) < 0.04
        self.cache, n = hkv.invalidate(self.cache, self.put(rows, bool))
        self.keep("invalidated", n)

    def update_indexer(self):
        lay, K, rows = self.layout, Q, self.rng.permutation(self.stored())[:Q]
        entries = {}
        for g in (lay.groups[i] for i in lay.form_groups(hkv.Form.INDEXER)):
            shape = (len(g.layers), K, lay.segment_rows(g), *g.row)
            entries[g.name] = self.put(self.rng.random(shape, np.float32), g.dtype)
        version = self.put(self.rng.integers(2), np.uint32)
        self.cache, done = hkv.update_indexer(self.cache, self.put(rows), entries, version)
        self.keep("updated", done)

    def set_caps(self):
        pages = {}
        for form in (hkv.Form.COMPRESSED, hkv.Form.WINDOW):
            least = sum(lay.pages - 1 for lay in self.layout.groups if lay.form is form)
            pages[form] = int(self.rng.choice([least, self.layout.segments]))
        self.cache = hkv.set_caps(self.cache, pages)

    def verify(self):
        self.keep("digests", hkv.verify_payload(self.cache, self.put([0, self.layout.segments])))

    def look(self):
        self.cache.segment(int(self.rng.integers(self.layout.segments)))
        self.keep("occupancy", hkv.occupancy(self.cache))
        assert hkv.byte_codes(self.cache).all()

    def do(self, name):
        before = self.cache
        getattr(self, name)()
        self.done[name] += 1
        same_structure(before, self.cache)
        while len(self.leases) > 4:
            self.cache = hkv.release(self.cache, self.leases.pop(0)[0])

    def check(self):
        invariants(self.cache, [lease for lease, _, _ in self.leases])

    def warm_up(self):
        """Every program once, on a cache of its own."""
        for name in ("admit", "advance", *OPERATIONS):
            self.do(name)

    def random(self, steps):
        """That many random operations on a new cache, nothing compiled, nothing sent silently."""
        self.cache, self.leases = hkv.init(self.layout), []
        with jax.transfer_guard("disallow"), count_compiles() as compiles:
            for i in range(steps):
                name = OPERATIONS[self.rng.integers(len(OPERATIONS))]
                self.do(name if self.leases else "admit")
                if compiles.names:
                    raise AssertionError(f"operation {i}, {name}, compiled {compiles.names}")
                if i % 25 == 0:
                    self.check()
        self.check()


@pytest.fixture(scope="module")
def driver():
    driver = Driver(
        tiny.layout(), tiny.replay, jax.device_put(np.float32(1)), tiny.step, bucket=64,
        vocabulary=50,
    )  # fmt: skip
    driver.warm_up()
    return driver


def test_500_random_operations_compile_nothing_and_keep_every_structure(driver):
    driver.random(500)
    assert min(driver.done.values()) > 5, driver.done


def test_numbers_given_from_the_host_are_no_part_of_a_program(driver):
    lay, cache = driver.layout, driver.cache
    tokens, length = hkv.pad_batch(lay, [[1], [2] * 40])
    with jax.transfer_guard("disallow"), count_compiles() as compiles:
        for i in range(3):
            need = hkv.need(
                cache, requests=2, salt=["a", "b" * i], start=16 * i, epoch=i, indexer_version=i,
                provenance=hkv.Provenance(i), bucket=64,
            )  # fmt: skip
            found = hkv.query(cache, tokens, length, need)
            hkv.route(found, hkv.costs(1 + i, i, i / 2))
            cache.segment(i)
            hkv.set_caps(cache, {hkv.Form.WINDOW: i})
    assert not compiles.names


def test_a_second_bucket_costs_one_more_program_each(driver):
    short = Driver(
        driver.layout, driver.model, driver.weights, driver.step_fn, bucket=32, vocabulary=50
    )
    with count_compiles() as compiles:
        for name in ("ask", "evict", "drop", "invalidate", "update_indexer", "look", "verify"):
            short.do(name)
        _, _, tokens, length, need = short.plan()
        nobody = hkv.route(hkv.query(short.cache, tokens, length, need), hkv.costs())
        short.cache, lease, _ = hkv.admit(short.cache, nobody, short.put([32, 32]))
        short.leases.append([lease, tokens, need])
        for _ in range(2):
            short.do("advance")
        for _ in range(2):
            short.cache = hkv.release(short.cache, lease)
    wanted = ["_admit", "_furthest", "_query", "_release", "_route", "step"]
    assert sorted(compiles.names) == [f"jit({name})" for name in wanted]


def test_import_of_the_library_leaves_its_testing_module_out():
    code = "import sys, hkv; sys.exit('hkv.testing' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_compiles_are_counted_by_name_and_only_inside_the_block():
    double = jax.jit(lambda x: x * 2)
    x = jax.device_put(np.arange(3))
    with count_compiles() as outer:
        with count_compiles() as inner:
            double(x)
            double(x)
        jax.jit(jax.numpy.negative)(x)
    assert inner.names == ["jit(<lambda>)"] and inner.seconds > 0
    assert outer.names == ["jit(<lambda>)", "jit(negative)"]
    jax.jit(lambda x: x + 3)(x)
    assert len(inner) == 1 and len(outer) == 2


@pytest.mark.parametrize(
    "other, message",
    [
        ({"a": np.zeros(3, np.int32), "b": 1.0}, r"\['a'\]: shape \(2,\) against \(3,\)"),
        ({"a": np.zeros(2, np.uint32), "b": 1.0}, r"\['a'\]: dtype int32 against uint32"),
        ({"a": np.zeros(2, np.int32), "b": np.float32(1)}, r"\['b'\]: weak type True against"),
        ({"a": np.zeros(2, np.int32)}, r"only one of the trees has \['b'\]"),
    ],
)
def test_structures_that_differ_say_where(other, message):
    this = {"a": np.zeros(2, np.int32), "b": 1.0}
    same_structure(this, dict(this))
    with pytest.raises(AssertionError, match=message):
        same_structure(this, other)


def test_a_committed_array_is_not_the_same_as_one_that_may_move(driver):
    held = jax.device_put(driver.cache.caps.limit, jax.devices()[0])
    with pytest.raises(AssertionError, match=r"\.caps\.limit: committed"):
        same_structure(
            driver.cache,
            dataclasses.replace(
                driver.cache, caps=dataclasses.replace(driver.cache.caps, limit=held)
            ),
        )


def _table(name, row, value):
    def damage(c):
        a = np.array(getattr(c.table, name))
        a[row] = value
        return dataclasses.replace(c, table=dataclasses.replace(c.table, **{name: a}))

    return damage


def _pool(name, at, value):
    def damage(c):
        a = np.array(getattr(c.pools[0], name))
        a[at] = value
        return dataclasses.replace(
            c, pools=(dataclasses.replace(c.pools[0], **{name: a}), *c.pools[1:])
        )

    return damage


def _field(name, at, value):
    def damage(c):
        a = np.array(getattr(c, name))
        a[at] = value
        return dataclasses.replace(c, **{name: a})

    return damage


@pytest.mark.parametrize(
    "damage, message",
    [
        (_table("pins", 0, -1), "row 0 has negative pins"),
        (_table("pins", 0, 9), "another number of pins"),
        (_table("children", 0, 7), "wrong count of `children`"),
        (_table("form", 0, 0), "`form` bits"),
        (_pool("data", (0, 0, 0, 0), 1.0), "history: the null page is not zero"),
        (_pool("data", (0, 0, 0, 0), np.nan), "history: the null page is not zero"),
        (_pool("stamp", 0, 0), "history: the null page carries a stamp"),
        (_pool("free", 0, 0), "history: `free` is out of range at 0"),
        (_pool("free", 0, 2000), "is free more than once"),
        (_pool("n_free", (), 3), "free \\+ live \\+ pinned"),
        (_pool("owner", 2048, 1), "page 2048 belongs to a row that does not name it"),
        (_pool("owner", 1, 99), "history: the owner of page 1 is out of range"),
        (_pool("stamp", 1, 5), "carries another stamp"),
        (_field("free_rows", 0, 99), "`free_rows` is out of range at 0"),
        (_field("n_free_rows", (), 99), "`n_free_rows` is 99"),
        (_field("index", 0, -1), "`index` is out of range at 0"),
        (_field("index", 0, 0), "row 0 is in `index` more than once"),
        (_field("openings", (0, 0), 27), "`openings` has at 0,0 a row that is not stored"),
    ],
)
def test_damaged_bookkeeping_is_named(driver, damage, message):
    if not hasattr(driver, "sound"):
        driver.cache, driver.leases = hkv.init(driver.layout), []
        driver.do("admit")
        driver.leases[0][2] = hkv.need(driver.cache, requests=Q, bucket=64)
        driver.do("finish")
        driver.sound = jax.device_get(driver.cache)
        driver.held = [jax.device_get(driver.leases[0][0])]
    invariants(driver.sound, driver.held)
    with pytest.raises(AssertionError, match=message):
        invariants(damage(driver.sound), driver.held)
