"""Times one query with all four levels over a large table, and what each level adds.

    python benchmarks/query.py            # the whole table of figures, some minutes
    python benchmarks/query.py --quick    # 64k and 512k at B = 128

Prints a table and writes benchmarks/query.json. Times are medians of single calls, from call to
result on the device; the machine's noise shows in the quartiles in the JSON file.
"""

import argparse
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
from hkv import _query, _verify
from hkv.testing import count_compiles

SEGMENTS = 131_072
LENGTHS = {"1k": 1 << 10, "8k": 1 << 13, "64k": 1 << 16, "512k": 1 << 19}
LEVELS = {"L1": "BLOCK_CHECKS", "L2": "ABI_CHECKS", "L4": "BYTE_CHECKS"}


def timed(call, repeats: int) -> dict[str, float]:
    """Median and quartiles of one call in milliseconds."""
    for _ in range(2):
        jax.block_until_ready(call())
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(call())
        times.append(1e3 * (time.perf_counter() - start))
    low, mid, high = statistics.quantiles(times, n=4)
    return {"ms": mid, "q1": low, "q3": high}


def prompts_for(source: np.ndarray, length: int, batch: int, hit: float, rng) -> np.ndarray:
    """`i32[batch, length]` of which the first `hit` is stored and the rest is not."""
    out = rng.integers(200_000, 300_000, (batch, length), dtype=np.int32)
    keep = int(length * hit)
    flat = source.reshape(-1, source.shape[1])
    for q in range(batch):
        out[q, :keep] = flat[q % len(flat), :keep]
    return out


def without(*names: str):
    """The query with some levels' own checks left out (links always stay), freshly jitted."""
    kept = {n: getattr(_verify, n) for n in LEVELS.values()}

    def call(cache, tokens, length, need):
        for n in names:
            setattr(_verify, n, kept[n][: _verify.LINK_CHECKS] if n == "BLOCK_CHECKS" else ())
        try:
            return _query._query.__wrapped__(cache, tokens, length, need)
        finally:
            for n in names:
                setattr(_verify, n, kept[n])

    return jax.jit(call)


def run(quick: bool) -> list[dict]:
    rng = np.random.default_rng(0)
    results = []
    for B in (128,) if quick else (64, 128, 256):
        longest = min(LENGTHS["512k"], SEGMENTS * B // 4)
        layout = hkv.Layout(
            groups=stored.groups(), segment_tokens=B, segments=SEGMENTS,
            buckets=tuple(n for n in LENGTHS.values() if n <= longest),
        )  # fmt: skip
        cache = hkv.init(layout)
        need = hkv.need(cache)
        count = SEGMENTS * B * 9 // 10 // longest
        source = rng.integers(0, 129_000, (count, longest), dtype=np.int32)
        cache = stored.store(cache, need, source)
        jax.block_until_ready(cache)
        with count_compiles() as compiles:
            for name, length in LENGTHS.items():
                for batch in (1, 64):
                    if quick and (name not in ("8k", "64k", "512k") or batch == 64 != 64 * (
                        name == "8k")):  # fmt: skip
                        continue
                    for hit in (0.0, 0.5, 1.0):
                        tokens = jnp.asarray(prompts_for(source, length, batch, hit, rng))
                        n = jnp.full(batch, length, jnp.int32)
                        ask = hkv.need(cache, requests=batch, bucket=length)
                        repeats = 50 if batch * length < 1 << 20 else 5
                        got = hkv.query(cache, tokens, n, ask)
                        expect = min(int(length * hit), length - 1)
                        if (np.asarray(got.boundary) != expect).any():
                            raise RuntimeError(f"boundary {got.boundary}, not {expect}")
                        result = timed(lambda: hkv.query(cache, tokens, n, ask), repeats)  # noqa: B023
                        results.append(
                            {"B": B, "prompt": name, "batch": batch, "hit": hit, **result}
                        )
                        print_row(results[-1])
                        if hit == batch == 1 and B == 128 and length >= LENGTHS["64k"]:
                            results[-1]["levels"] = level_costs(cache, tokens, n, ask, repeats)
        programs = [x for x in compiles.names if "_query" in x]
        print(f"B = {B}: {len(programs)} query programs for {len(layout.buckets)} buckets x 2 "
              "batch sizes")  # fmt: skip
    return results


def level_costs(cache, tokens, length, need, repeats) -> dict[str, float]:
    """Milliseconds that each level's checks add, by leaving them out one after the other."""
    whole = without()
    left_out, out = [], {}
    before = timed(lambda: whole(cache, tokens, length, need), repeats)["ms"]
    for level, name in reversed(LEVELS.items()):
        left_out.append(name)
        call = without(*left_out)
        now = timed(lambda: call(cache, tokens, length, need), repeats)["ms"]  # noqa: B023
        out[level] = max(before - now, 0.0)
        before = now
    out["candidates, chain and L3"] = before
    print("      " + ", ".join(f"{k} {v:.2f} ms" for k, v in out.items()))
    return out


def print_row(r: dict) -> None:
    print(f"B {r['B']:>3}  {r['prompt']:>4} tokens x {r['batch']:>2}  hit {r['hit']:>4.0%}  "
          f"{r['ms']:8.2f} ms  ({r['q1']:.2f} to {r['q3']:.2f})", flush=True)  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    print(f"jax {jax.__version__}, {os.cpu_count()} cores, {platform.machine()}, "
          f"{SEGMENTS:,} segments")  # fmt: skip
    rows = run(args.quick)
    out = {"date": str(date.today()), "jax": jax.__version__, "cores": os.cpu_count(),
           "segments": SEGMENTS, "results": rows}  # fmt: skip
    (Path(__file__).parent / "query.json").write_text(json.dumps(out, indent=1) + "\n")
