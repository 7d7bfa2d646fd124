"""Times what the cache costs a request: query, route, admit, lease, publish, release.

    python benchmarks/manager.py            # the whole table of figures, some minutes
    python benchmarks/manager.py --quick    # 64k tokens, one request, 131,072 segments

Each request shares all but its last segment with one that is stored, writes that segment and
publishes it; at 100 % occupancy room is made by eviction each time. Times are medians of single
calls, each waited for. The model's own work is left out. `lease` pins the same prefix for reading
alone; it is not part of a request. Under "manager" the same requests go through `hkv.Manager`, one
after the other: admission, publication and release with its line, lock and host round trips.
Prints a table and writes benchmarks/manager.json.
"""

import argparse
import dataclasses
import functools
import json
import os
import platform
import statistics
import sys
import time
from datetime import date
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
import stored

import hkv
from hkv.testing import count_compiles

B = 128
LENGTHS = {"1k": 1 << 10, "8k": 1 << 13, "64k": 1 << 16, "512k": 1 << 19}
VERBS = ("query", "route", "admit", "publish", "release")  # of a request


@functools.partial(jax.jit, donate_argnames=("cache",))
def write(cache, lease, count):
    """Stores a segment of zeros for each request, in place of a model."""
    view = hkv.view(cache, lease, count)
    for g in cache.layout.groups:
        new = jnp.zeros((count.shape[0], B // g.rule.unit + 1, *g.row), g.dtype)
        view = view.write(g.name, g.layers[0], new)
    cache, lease, ok = hkv.append(view)
    return cache, lease, ok


def filled(segments: int, occupancy: float, longest: int, rng):
    """A cache of this many segments, so many of them taken by chains; and the chains."""
    layout = hkv.Layout(
        groups=stored.groups(), segment_tokens=B, segments=segments,
        buckets=tuple(n for n in LENGTHS.values() if n <= longest),
    )  # fmt: skip
    cache = hkv.init(layout)
    need, S = hkv.need(cache), longest // B
    rows = max(int(segments * occupancy), S)
    source = rng.integers(0, 129_000, (rows // S, longest), dtype=np.int32)
    cache = stored.store(cache, need, source)
    for n in (rows % S * B,):  # what is left, as one shorter chain
        if n:
            cache = stored.store(cache, need, rng.integers(0, 129_000, (1, n), dtype=np.int32))
    # Whole chains were used at different times; the later half is asked for, so that it stays.
    used = np.repeat(1 + np.arange(segments // S + 1), S)[:segments].astype(np.uint32)
    table = dataclasses.replace(
        cache.table, used=jnp.asarray(np.repeat(used[:, None], len(hkv.Form), axis=1))
    )
    return dataclasses.replace(cache, table=table, clock=jnp.uint32(segments)), source[
        len(source) // 2 :
    ]


def measure(cache, source, length: int, batch: int, repeats: int, rng):
    """Medians in milliseconds per verb and batch."""
    need = hkv.need(cache, requests=batch, bucket=length)
    n, times = jnp.full(batch, length, jnp.int32), {v: [] for v in (*VERBS, "lease", "-")}
    prices, strict = hkv.costs(), hkv.costs(replay=float("inf"))

    def timed(verb, fn, *args):
        start = time.perf_counter()
        out = jax.block_until_ready(fn(*args))
        times[verb].append(1e3 * (time.perf_counter() - start))
        return out

    for _ in range(repeats + 2):
        tokens = source[rng.integers(len(source), size=batch), :length].copy()
        tokens[:, -B:] = rng.integers(200_000, 300_000, (batch, B))
        tokens = jnp.asarray(tokens)
        found = timed("query", hkv.query, cache, tokens, n, need)
        plan = timed("route", hkv.route, found, prices)
        cache, lease, answer = timed("admit", hkv.admit, cache, plan, n)
        if (np.asarray(answer.verdict) != hkv.Verdict.ADMIT).any():
            raise RuntimeError(str(answer))
        if (np.asarray(plan.resume) < length - B).any():  # more where a last segment is shared too
            raise RuntimeError(f"resumes at {plan.resume}, not at {length - B}")
        cache, lease, ok = write(cache, lease, n - lease.length)
        cache, lease, listed = timed("publish", hkv.publish, cache, lease, tokens, n)
        if not np.asarray(ok).all() or (np.asarray(listed) != 1).any():
            raise RuntimeError(f"published {listed}")
        cache = timed("release", hkv.release, cache, lease)
        again = hkv.route(hkv.query(cache, tokens, n, need), strict)
        cache, reading, answer = timed("lease", hkv.lease, cache, again)
        if (np.asarray(answer.verdict) != hkv.Verdict.ADMIT).any():
            raise RuntimeError(str(answer))
        cache = timed("-", hkv.release, cache, reading)
    return {v: statistics.median(t[2:]) for v, t in times.items()}


def through_manager(cache, source, length: int, repeats: int, rng) -> float:
    """Median in milliseconds of all that a manager does for one request."""
    times = []
    with hkv.Manager(cache.layout) as manager:
        manager.update(lambda _: cache)
        for _ in range(repeats + 2):
            tokens = source[rng.integers(len(source)), :length].copy()
            tokens[-B:] = rng.integers(200_000, 300_000, B)
            request = manager.admit(tokens)
            start = time.perf_counter()
            request.__enter__()
            spent = time.perf_counter() - start
            (ok,) = request.step(write, jnp.full(1, length, jnp.int32) - request.lease.length)
            manager.settle()
            start = time.perf_counter()
            listed = request.publish()
            manager.release(request)
            manager.settle()
            times.append(1e3 * (spent + time.perf_counter() - start))
            if not np.asarray(ok).all() or np.asarray(listed)[0] != 1:
                raise RuntimeError(f"published {listed}")
    return statistics.median(times[2:])


def run(quick: bool) -> list[dict]:
    rng, out = np.random.default_rng(0), []
    for segments in (131_072,) if quick else (16_384, 131_072):
        longest = min(LENGTHS["512k"], segments * B // 4)
        for occupancy in (1.0,) if quick else (0.1, 0.9, 1.0):
            jax.clear_caches()  # each program takes memory maps, of which there are only so many
            cache, source = filled(segments, occupancy, longest, rng)
            for name, length in LENGTHS.items():
                for batch in (1, 64):
                    if length > longest or batch * length > 1 << 20:
                        continue
                    if quick and (name, batch) != ("64k", 1):
                        continue
                    repeats = 30 if batch * length < 1 << 19 else 10
                    with count_compiles() as compiles:
                        copy = jax.tree.map(jnp.copy, cache)
                        each = measure(copy, source, length, batch, repeats, rng)
                    total = sum(each[v] for v in VERBS) / batch
                    each.pop("-")
                    if batch == 1:
                        copy = jax.tree.map(jnp.copy, cache)
                        each["manager"] = through_manager(copy, source, length, repeats, rng)
                    out.append({
                        "segments": segments, "occupancy": occupancy, "prompt": name,
                        "batch": batch, "programs": len(compiles.names), **each,
                        "per request": total,
                    })  # fmt: skip
                    verbs = "  ".join(f"{v} {t:7.2f}" for v, t in each.items())
                    print(f"{segments:>7} segments {occupancy:>4.0%}  {name:>4} x {batch:>2}  "
                          f"{verbs}  per request {total:7.2f} ms", flush=True)  # fmt: skip
    return out


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    print(f"jax {jax.__version__}, {os.cpu_count()} cores, {platform.machine()}")
    rows = run(args.quick)
    out = {"date": str(date.today()), "jax": jax.__version__, "cores": os.cpu_count(),
           "results": rows}  # fmt: skip
    if not args.quick:
        (Path(__file__).parent / "manager.json").write_text(json.dumps(out, indent=1) + "\n")
