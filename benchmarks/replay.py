"""Replays serving traces through the library's own state machine, and plots what was reused.

    python benchmarks/replay.py            # everything, some minutes
    python benchmarks/replay.py --quick    # the first 600 requests of each trace, fewer points

Each request is queried, routed, admitted, recovered, stepped, published and released, in one
jitted program per length bucket; only the model is missing: it writes zeros. One block of a trace
is one token of the layout, so a segment is a block. Prints tables and, of everything, writes
replay.json and replay.svg beside this file. Figures are over the last half of the requests.
"""

import argparse
import dataclasses
import functools
import json
import math
import os
import platform
import sys
import time
from collections.abc import Sequence
from datetime import date
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
import bounds
from bounds import Request, last_half

import hkv

HERE = Path(__file__).parent
ANSWER = 2**31 - 1  # the first token of the answer, so that a whole prompt can be a prefix
GB = 10**9
# Bytes of DeepSeek-V4 Flash per block of 512 tokens: 584 an entry, 132 an indexer key.
HISTORY_BYTES = 512 // 4 * 21 * (584 + 132) + 512 // 128 * 20 * 584
WINDOW_BYTES = 127 * 43 * 584
# A replay of lost windows takes 43 layers x 127 tokens: as many blocks as this stand-in has layers.
REPLAY_BLOCKS = -(-43 * 127 // 512)
# Its rows are as many bytes as keep the two in proportion, to a thousandth.
HISTORY_ROW, WINDOW_ROW = 34, 5
SCALE = HISTORY_BYTES / HISTORY_ROW


def history_alone() -> tuple[hkv.Group, ...]:
    """One history, as a model with full attention keeps it."""
    return (hkv.Group("history", hkv.Form.COMPRESSED, hkv.history(1), (0,), (1,), "uint8"),)


def hybrid() -> tuple[hkv.Group, ...]:
    """History and windows. A boundary needs the window rows of the block before it."""
    history, window = hkv.history(1), hkv.window(2)
    layers = tuple(range(REPLAY_BLOCKS))
    return (
        hkv.Group("history", hkv.Form.COMPRESSED, history, (0,), (HISTORY_ROW,), "uint8"),
        hkv.Group("window", hkv.Form.WINDOW, window, layers, (WINDOW_ROW,), "uint8"),
    )


def rolling(tokens: int = 128) -> tuple[hkv.Group, ...]:
    """History and a window in single tokens."""
    window = hkv.Group("window", hkv.Form.WINDOW, hkv.window(tokens), (0,), (1,), "uint8")
    return (*history_alone(), window)


def _zeros(_, tokens, view):
    """A model that costs nothing: every row is zero."""
    for g in view.cache.layout.groups:
        new = jnp.zeros((*tokens.shape, *g.row), g.dtype)
        for layer in g.layers:
            view = view.write(g.name, layer, new)
    return view


@functools.partial(jax.jit, donate_argnames=("cache",), static_argnames=("chunk", "partial"))
def serve(cache, tokens, length, whole, need, prices, retention, *, chunk, partial):
    """One request from query to release.

    Args:
        cache: the cache.
        tokens: `i32[1, T]` the prompt and the first token of its answer.
        length: `i32[1]` of both.
        whole: `i32[1]` tokens up to the end of the prompt's last whole block.
        need: of the query.
        prices: of the route.
        retention: of the publication.
        chunk: tokens per step of a replay; 0 where the layout never needs one.
        partial: whether the last, partly filled segment is stored as well.

    Returns:
        The cache, and `i32[6]`: tokens resumed from, where the replay before that starts, tokens
        that match, verdict, whether the step was served, segments listed.
    """
    prompt = length - 1
    answer = hkv.query(cache, tokens, length, need)
    plan = hkv.route(answer, prices)
    cache, lease, admission = hkv.admit(cache, plan, prompt)
    why = jnp.zeros(1, jnp.uint8)
    if chunk:
        cache, lease, why = hkv.recover(_zeros, None, cache, lease, plan, tokens, chunk=chunk)
    done = _zeros(None, tokens, hkv.view(cache, lease, prompt - lease.length))
    cache, lease, ok = hkv.append(done)
    cache, lease, listed = hkv.publish(
        cache, lease, tokens, prompt, prompt=whole, retention=retention, partial=partial
    )
    cache = hkv.release(cache, lease)
    start = jnp.where(plan.replay[:, 0] < plan.replay[:, 1], plan.replay[:, 0], plan.resume)
    out = (
        plan.resume,
        start,
        answer.matched,
        admission.verdict,
        ok & (why == 0),
        jnp.maximum(listed, 0),
    )
    return cache, jnp.concatenate([x.astype(jnp.int32) for x in out])


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of each request, in tokens of the trace."""

    saved: list[int]  # not run again: resumed from, less what was replayed to get there
    matched: list[int]  # whose history was there, whether or not windows were
    stored: list[int]  # segments listed
    refused: int
    used: list[int]  # pages of each group in use at the end
    seconds: float  # for all requests, without those that compiled


class Machine:
    """The state machine over one layout; capacities are caps, so that nothing compiles anew."""

    def __init__(
        self,
        groups: tuple[hkv.Group, ...],
        segments: int,
        buckets: tuple[int, ...],
        *,
        segment_tokens: int = 1,
        partial: bool = False,
        replay: bool = False,
    ):
        self.layout = hkv.Layout(
            groups=groups, segments=max(segments, buckets[-1]), segment_tokens=segment_tokens,
            buckets=buckets, leases=1,
        )  # fmt: skip
        self.options = {"chunk": REPLAY_BLOCKS if replay else 0, "partial": partial}

    def run(
        self, requests: Sequence[Request], *, every: int = 1, strict: bool = True, **caps
    ) -> Outcome:
        """Serves the requests one after the other from an empty cache.

        Args:
            requests: the trace.
            every: of the retention, in tokens of the layout, which here are blocks.
            strict: take only what is usable as it stands; else a replay where that is cheaper.
            **caps: as `hkv.set_caps` takes them.
        """
        cache = hkv.set_caps(hkv.init(self.layout), **caps)
        needs = {b: hkv.need(cache, bucket=b) for b in self.layout.buckets}
        prices = hkv.costs(replay=math.inf if strict else 1.0)
        retention = hkv.retention(every)
        rows, seconds, seen = [], 0.0, set()
        start = time.perf_counter()
        for i, r in enumerate(requests):
            ids, whole = self._ids(r)
            bucket = self.layout.bucket(len(ids))
            tokens = np.zeros((1, bucket), np.int32)
            tokens[0, : len(ids)] = ids
            first = bucket not in seen
            seen.add(bucket)
            if first or i % 64 == 0:  # the queue stays short, and what compiles is not counted
                jax.block_until_ready(cache.clock)
                seconds += time.perf_counter() - start
            cache, row = serve(
                cache, tokens, np.array([len(ids)], np.int32), np.array([whole], np.int32),
                needs[bucket], prices, retention, **self.options,
            )  # fmt: skip
            if first or i % 64 == 0:
                start = time.perf_counter()
            rows.append(row)
        resume, begin, matched, verdict, ok, listed = np.array(jax.device_get(rows)).T
        seconds += time.perf_counter() - start
        admitted = verdict == hkv.Verdict.ADMIT
        if (admitted & (ok == 0)).any():
            raise RuntimeError(f"request {np.flatnonzero(admitted & (ok == 0))[0]} was not served")
        pages = hkv.occupancy(cache)
        return Outcome(
            saved=[self._worth(r, n) for r, n in zip(requests, begin * admitted, strict=True)],
            matched=[self._worth(r, n) for r, n in zip(requests, matched, strict=True)],
            stored=listed.tolist(), refused=int((~admitted).sum()),
            used=np.asarray(pages["capacity"] - pages["free"]).tolist(), seconds=seconds,
        )  # fmt: skip

    def _ids(self, r: Request) -> tuple[np.ndarray, int]:
        """The prompt in tokens of the layout: one a block, or the block's own; and `whole`."""
        if self.layout.segment_tokens > 1:
            own = [512 * i + np.arange(n) for i, n in zip(r.ids, r.sizes, strict=True)]
            return np.concatenate([*own, [ANSWER]]).astype(np.int32), r.length
        partial = bool(r.sizes) and r.sizes[-1] < max(r.sizes[0], 1)
        return np.array([*r.ids, ANSWER], np.int32), len(r.ids) - partial

    def _worth(self, r: Request, position: int) -> int:
        """Tokens of the trace before a position of the layout."""
        return r.tokens(position) if self.layout.segment_tokens == 1 else int(position)


def buckets_for(requests: Sequence[Request]) -> tuple[int, ...]:
    """Two lengths: most requests are far shorter than the longest."""
    lengths = sorted(len(r.ids) + 1 for r in requests)
    most, longest = (-(-n // 32) * 32 for n in (lengths[len(lengths) * 3 // 4], lengths[-1]))
    return tuple(sorted({most, longest}))


# The library keeps ends of prompts longest under any policy, so that the first differs most.
POLICIES = {
    "all boundaries": 1, "every 4,096 tokens": 8, "prompt ends": 0,
}  # fmt: skip
WINDOW_SHARE = 8  # of so many blocks in the cache one has its window: what the policies decide on


def history_rows(name: str, requests: list[Request], capacities: Sequence[int]) -> list[dict]:
    """Hit tokens over capacity with history alone, beside Belady's and the infinite cache's."""
    ceiling = bounds.infinite(requests)
    machine = Machine(history_alone(), capacities[-1], buckets_for(requests))
    outside = json.loads((bounds.FOLDER / "kvcache_simulator.json").read_text())
    rows = []
    for capacity in capacities:
        got = machine.run(requests, pages={"history": capacity})
        if capacity == capacities[-1] and got.saved != ceiling:
            raise RuntimeError(f"{name}: with room for all the cache does not reach the ceiling")
        row = {
            "trace": name, "requests": len(requests), "capacity": capacity,
            "hkv": last_half(got.saved), "belady": last_half(bounds.belady(requests, capacity)),
            "ceiling": last_half(ceiling), "total": last_half([r.length for r in requests]),
            "refused": got.refused, "evicted": max(0, sum(got.stored) - capacity),
            "ms": 1e3 * got.seconds / len(requests),
        }  # fmt: skip
        if name == outside["trace"] and row["total"] == outside["total_tokens"]:
            row["simulator"] = outside["hit_tokens"].get(str(capacity))
        rows.append(row)
        print(f"{capacity:>8,} blocks  {_rates(row, 'hkv', 'belady', 'ceiling')}  "
              f"{row['ms']:6.2f} ms a request" + _compared(row), flush=True)  # fmt: skip
    return rows


def _rates(row: dict, *names: str) -> str:
    return "  ".join(f"{n} {row[n] / row['total']:6.2%}" for n in names)


def _compared(row: dict) -> str:
    if not row.get("simulator"):
        return ""
    same = row["simulator"]["lru"] == row["hkv"], row["simulator"]["optimal"] == row["belady"]
    return "  as the other simulator" if all(same) else f"  other simulator: {row['simulator']}"


def capacities_for(name: str, requests: list[Request]) -> list[int]:
    """From a small cache to one that holds every block; where known, those of the simulator."""
    blocks = len({k for chain in bounds.prefixes(requests) for k in chain})
    longest = max(len(r.ids) for r in requests)
    outside = json.loads((bounds.FOLDER / "kvcache_simulator.json").read_text())
    some = [blocks // n for n in (64, 32, 8, 2)]
    if name == outside["trace"]:
        some = [int(n) for n in outside["hit_tokens"]]
    return [n for n in some if longest <= n < blocks] + [blocks]


def hybrid_rows(name: str, requests: list[Request], parts: Sequence[int]) -> list[dict]:
    """Hit tokens of each retention policy over a budget in bytes that history and windows share."""
    blocks = len({k for chain in bounds.prefixes(requests) for k in chain})
    longest = max(len(r.ids) for r in requests)
    machine = Machine(hybrid(), blocks, buckets_for(requests), replay=True)
    total, ceiling = last_half([r.length for r in requests]), bounds.infinite(requests)
    if machine.run(requests).saved != ceiling:
        raise RuntimeError(f"{name}: with room for all the cache does not reach the ceiling")
    rows = []
    for part in parts:
        budget = blocks * (HISTORY_BYTES + WINDOW_BYTES) // part
        history = int(budget / (HISTORY_BYTES + WINDOW_BYTES / WINDOW_SHARE))
        windows = history // WINDOW_SHARE
        if windows < longest:  # a request reserves windows for all of its own blocks
            windows = longest
            history = (budget - windows * WINDOW_BYTES) // HISTORY_BYTES
        for policy, every in POLICIES.items():
            caps = {"every": every, "pages": {"history": history, "window": windows}}
            usable, replayed = (machine.run(requests, strict=x, **caps) for x in (True, False))
            rows.append({
                "trace": name, "requests": len(requests), "budget_gb": budget / GB,
                "history": history, "windows": windows, "policy": policy, "total": total,
                "usable": last_half(usable.saved), "replayed": last_half(replayed.saved),
                "matched": last_half(replayed.matched), "ceiling": last_half(ceiling),
                "refused": usable.refused + replayed.refused,
                "ms": 500 * (usable.seconds + replayed.seconds) / len(requests),
            })  # fmt: skip
            row = rows[-1]
            print(f"{row['budget_gb']:8.1f} GB  {policy:>18}  "
                  f"{_rates(row, 'usable', 'replayed', 'matched', 'ceiling')}  "
                  f"{row['ms']:6.2f} ms a request", flush=True)  # fmt: skip
    return rows


def token_row(requests: list[Request], segment_tokens: int = 128) -> dict:
    """RAGPulse in single tokens: prompts part, and end, in the middle of segments."""
    B, longest = segment_tokens, max(r.length for r in requests)
    bucket = -(-(longest + 1) // B) * B
    segments = sum(-(-r.length // B) for r in requests)
    machine = Machine(rolling(), segments, (bucket,), segment_tokens=B, partial=True)
    got, ceiling = machine.run(requests), bounds.infinite(requests)
    row = {
        "trace": "ragpulse", "requests": len(requests), "segment_tokens": B,
        "hkv": last_half(got.saved), "whole segments": last_half([n // B * B for n in ceiling]),
        "ceiling": last_half(ceiling), "total": last_half([r.length for r in requests]),
        "ms": 1e3 * got.seconds / len(requests),
    }  # fmt: skip
    print(f"{_rates(row, 'hkv', 'whole segments', 'ceiling')}  {row['ms']:6.2f} ms a request")
    return row


COLORS = ("#1f5fa8", "#c2571a", "#3a8a3f", "#7b4fa3", "#777777")


def plot(history: list[dict], hybrid: list[dict]) -> str:
    """Two panels as SVG: hit rate over blocks with history alone, and over bytes by policy."""
    lines = [
        (label, [(r["capacity"], r[key] / r["total"]) for r in history], dash)
        for label, key, dash in (
            ("hkv, least recently used", "hkv", ""), ("Belady's bound", "belady", ""),
            ("infinite cache", "ceiling", "6 4"),
        )
    ]  # fmt: skip
    left = _panel(60, "History alone", "blocks of 512 tokens", lines, (0, 1, 4))
    by_policy = {p: [r for r in hybrid if r["policy"] == p] for p in POLICIES}
    lines, colors = [], []
    for color, (policy, rows) in enumerate(by_policy.items()):
        for key, dash in (("usable", ""), ("replayed", "2 3")):
            label = policy if key == "usable" else f"{policy}, or a replay"
            lines.append((label, [(r["budget_gb"], r[key] / r["total"]) for r in rows], dash))
            colors.append(color)
    first = by_policy["all boundaries"]
    line = [(r["budget_gb"], r["ceiling"] / r["total"]) for r in first]
    lines.append(("infinite cache", line, "6 4"))
    right = _panel(520, "History and windows", "GB (DeepSeek-V4 Flash)", lines, (*colors, 4))
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 940 440" '
        'font-family="sans-serif" font-size="12"><rect width="940" height="440" fill="white"/>'
        f"{left}{right}</svg>\n"
    )


def _panel(left: int, title: str, unit: str, lines, colors) -> str:
    """One diagram, 380 by 280, with a logarithmic horizontal axis."""
    xs = sorted({x for _, points, _ in lines for x, _ in points})
    lo, hi = math.log(xs[0]), math.log(xs[-1])

    def at(x, y):
        right = (math.log(x) - lo) / (hi - lo) if hi > lo else 0.5
        return f"{left + 380 * right:.1f},{330 - 280 * y:.1f}"

    out = [f'<text x="{left}" y="30" font-size="14">{title}: tokens reused</text>']
    for tick in range(0, 101, 20):
        y = 330 - 2.8 * tick
        number = f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{tick} %</text>'
        out.append(f'<path d="M{left} {y:.1f}h380" stroke="#ddd"/>{number}')
    for x in xs[:: max(1, len(xs) // 5)]:
        spot = at(x, 0).split(",")[0]
        out.append(f'<text x="{spot}" y="348" text-anchor="middle">{x:,.0f}</text>')
    out.append(f'<text x="{left + 190}" y="366" text-anchor="middle">{unit}</text>')
    for i, ((label, points, dash), color) in enumerate(zip(lines, colors, strict=True)):
        style = f'stroke="{COLORS[color]}" stroke-width="2" stroke-dasharray="{dash}" fill="none"'
        path = " ".join(at(x, y) for x, y in points)
        x, y = left + 190 * (i % 2), 384 + 11 * (i // 2)
        out.append(f'<polyline points="{path}" {style}/><path d="M{x} {y}h22" {style}/>'
                   f'<text x="{x + 27}" y="{y + 4}" font-size="10">{label}</text>')  # fmt: skip
    return "".join(out)


def main(quick: bool) -> None:
    """Everything: tables to the terminal, figures to JSON, the plot to SVG."""
    traces = {n: bounds.read(n)[: 600 if quick else None] for n in bounds.NAMES}
    name = "mooncake_synthetic"
    history = []
    for n in (name,) if quick else bounds.NAMES:
        print(f"\n{n}, history alone, {len(traces[n]):,} requests")
        history += history_rows(n, traces[n], capacities_for(n, traces[n]))
    print(f"\n{name}, history and windows; one block in {WINDOW_SHARE} keeps its window")
    hybrid = hybrid_rows(name, traces[name], (8, 4) if quick else (16, 8, 4))
    print("\nragpulse in tokens, segments of 128, prompts end and part inside of them")
    tokens = token_row(traces["ragpulse"])
    out = {
        "date": str(date.today()), "jax": jax.__version__, "cores": os.cpu_count(),
        "machine": platform.machine(),
        "history": history, "hybrid": hybrid, "tokens": tokens,
    }  # fmt: skip
    svg = plot([r for r in history if r["trace"] == name], hybrid)
    if not quick:
        (HERE / "replay.json").write_text(json.dumps(out, indent=1) + "\n")
        (HERE / "replay.svg").write_text(svg)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    print(f"jax {jax.__version__}, {os.cpu_count()} cores, {platform.machine()}")
    main(args.quick)
