"""Times what checking the lease costs a decode step, against the same step without the check.

    python benchmarks/lease.py            # the whole table of figures, about 20 minutes
    python benchmarks/lease.py --quick    # the shortest context only

One token per request through attention layers at the shapes of DeepSeek-V4 Flash, one of each kind
(or `--layers`), with random weights and pools of `--gib`, all in float32. Embedding, experts,
hyper-connections, head and the other 40 layers are left out: each makes a step longer and the
check's share smaller, since most of the check is done once a step, not once a layer.

The check is what `hkv.view` verifies of lease, segments and page stamps, and the stamps that
`gather_rows` compares. Both programs are compiled ahead. A pair decodes the same token at the same
place with both, in turns first, and must give the same bits; ratios are medians over pairs. "View
alone" is the check before the first layer as a program of its own, call included. "Looked at" is
what a check reads of table, lease and stamps; the other bytes and the operations are XLA's own
count of the compiled programs, which takes an array of which some is read for the whole of it.
Prints a table and writes benchmarks/lease.json.
"""

import argparse
import contextlib
import dataclasses
import functools
import json
import os
import platform
import statistics
import time
from datetime import date
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import hkv
from hkv import _view, nn
from hkv.models import deepseek_v4 as v4
from pallas_kernels._index import take
from pallas_kernels.paged_rows import xla

B, CHUNK, ROOM = 128, 2048, 256  # tokens per segment, per filling step, left to decode
CONTEXTS = [1 << 13, 1 << 15, 1 << 17, 1 << 20]
PAIRS, SECONDS = 40, 120.0  # per context, at least
HISTORY = ("csa", "csa_index", "hca")  # what grows with the context
CHECKS = ("check_lease", "stamps_hold", "covers", "has_pages")


def flash(each: int) -> v4.DeepseekV4Config:
    """Attention of DeepSeek-V4 Flash, `each` layers of each kind; its experts are not built."""
    return v4.DeepseekV4Config(
        vocab_size=1, hidden_size=4096, moe_intermediate_size=1, num_attention_heads=64,
        head_dim=512, q_lora_rank=1024, o_groups=8, o_lora_rank=1024,
        layers=(v4.SLIDING,) * each + (v4.CSA, v4.HCA) * each, hashed=(False,) * 3 * each,
        csa_ratio=4, hca_ratio=128, sliding_window=128,
        index_n_heads=64, index_head_dim=128, index_topk=512,
        rotary=nn.Rotary(64, 10000.0), rotary_c=nn.Rotary(64, 160000.0, nn.Yarn(16.0, 65536)),
        n_routed_experts=1, num_experts_per_tok=1,
    )  # fmt: skip


class Layers(nnx.Module):
    """Attention layers, each behind a norm and beside a residual."""

    def __init__(self, weights: nn.Weights, config: v4.DeepseekV4Config):
        at = [weights.at(f"{i}") for i in range(len(config.layers))]
        self.norm = nnx.List([nn.RMSNorm(w, "n", config.hidden_size, 1e-6) for w in at])
        self.attn = nnx.List([v4._attention(w, config, i) for i, w in enumerate(at)])

    def __call__(self, x, view):
        for norm, attn in zip(self.norm, self.attn, strict=True):
            y, view = attn(norm(x), view)
            x = x + y
        return x, view


def layout_of(config: v4.DeepseekV4Config, requests: int, gib: float) -> hkv.Layout:
    """As many segments as fit; windows and tails recycle and so need few pages."""
    groups = list(v4.groups(config))
    for i, g in enumerate(groups):
        if g.name not in HISTORY:  # the index tail as a TAIL, because its own form does not recycle
            form = hkv.Form.TAIL if g.form is hkv.Form.INDEXER else g.form
            pages = requests * (CHUNK // B + 4) + 1
            groups[i] = dataclasses.replace(g, form=form, pages=pages)
    size = {g.name: g.row_bytes * len(g.layers) * B // g.rule.unit for g in groups}
    left = gib * 2**30 - sum(size[g.name] * g.pages for g in groups)
    return hkv.Layout(
        groups=tuple(groups), segment_tokens=B, buckets=tuple(CONTEXTS), ahead=CHUNK,
        segments=int(left // sum(size[name] for name in HISTORY)),
    )  # fmt: skip


@functools.partial(jax.jit, donate_argnames=("cache",))
def fill(noise, cache, lease, count):
    """Stores made-up rows for a chunk of tokens, in place of a prefill."""
    view = hkv.view(cache, lease, count)
    for g in cache.layout.groups:
        rows = jnp.arange(CHUNK // g.rule.unit, dtype=jnp.int32)[None]
        wave = jnp.cos(((view.position // g.rule.unit)[:, None] + rows).astype(jnp.float32))
        new = noise[g.name] * wave.reshape(*wave.shape, *(1 for _ in g.row))
        for layer in g.layers:
            view = view.write(g.name, layer, new)
    return hkv.append(view)


def running(cache, noise, requests: int, bucket: int, rng):
    """The cache with requests that have all but `ROOM` tokens of their bucket behind them."""
    tokens = jnp.asarray(rng.integers(0, 129_000, (requests, bucket), dtype=np.int32))
    length = jnp.full(requests, bucket, jnp.int32)
    need = hkv.need(cache, requests=requests, bucket=bucket)
    plan = hkv.route(hkv.query(cache, tokens, length, need), hkv.costs())
    cache, lease, answer = hkv.admit(cache, plan, length)
    for start in range(0, bucket - ROOM, CHUNK):
        count = min(CHUNK, bucket - ROOM - start)
        cache, lease, ok = fill(noise, cache, lease, jnp.full(requests, count, jnp.int32))
        cache, lease = hkv.trim(cache, lease)
    if not np.asarray(ok).all():
        raise RuntimeError(f"{ok}: {answer}")
    return cache, lease


def unchecked_gather(data, stamp, layer, pages, index, expect, keep):
    """`gather_rows` that believes the block table."""
    request, column, row = xla._locate(index, pages.shape[1], data.shape[2])
    page = jnp.where(keep, take(pages, (request, column), 0), 0)
    return take(data, (jnp.broadcast_to(layer, page.shape), page, row), 0), page > 0


@contextlib.contextmanager
def unchecked():
    """What is traced inside verifies nothing of a lease."""
    with contextlib.ExitStack() as stack:
        for name in CHECKS:
            true = lambda cache, lease, *_: jnp.ones(lease.length.shape, bool)  # noqa: E731
            stack.enter_context(mock.patch.object(_view, name, true))
        stack.enter_context(mock.patch.object(xla, "gather_rows", unchecked_gather))
        yield


def compiled(build, *args):
    """A decode step, compiled ahead; a new function each time, so that it is traced anew."""

    def step(weights, cache, lease, x, position):
        view = hkv.view(cache, lease, jnp.ones_like(position), position)
        y, view = build(weights)(x, view)
        cache, lease, ok = hkv.append(view, after=y)
        return cache, lease, y, ok

    return jax.jit(step, donate_argnums=1).lower(*args).compile()


def counted(program) -> dict[str, float]:
    cost, memory = program.cost_analysis(), program.memory_analysis()
    return {"bytes": cost["bytes accessed"], "operations": cost["flops"],
            "scratch": memory.temp_size_in_bytes}  # fmt: skip


def measure(build, weights, cache, lease):
    """Figures of one context, and the cache and lease as they are afterwards."""
    (Q, S), position = lease.rows.shape, lease.length
    x = jax.random.normal(jax.random.key(1), (Q, 1, 4096))
    programs = {"with": compiled(build, weights, cache, lease, x, position)}
    with unchecked():
        programs["without"] = compiled(build, weights, cache, lease, x, position)
    alone = jax.jit(lambda c, x: hkv.view(c, x, jnp.ones_like(x.length)).ok)
    count = {name: counted(p) for name, p in programs.items()}
    # Page, stamp and its two words of every page; row, version then and now of every segment.
    looked = sum(p.size * 20 for p in lease.pages) + Q * S * 12
    wall, work, checks, begin = [], [], [], time.perf_counter()
    while len(wall) < PAIRS + 2 or (
        time.perf_counter() - begin < SECONDS and len(wall) < ROOM - 8
    ):  # fmt: skip
        old, outs, w, c = lease, {}, {}, {}
        for name in list(programs)[:: 1 if len(wall) % 2 else -1]:
            clock = time.perf_counter(), time.process_time()
            out = jax.block_until_ready(programs[name](weights, cache, lease, x, position))
            w[name], c[name] = time.perf_counter() - clock[0], time.process_time() - clock[1]
            cache, lease, outs[name], ok = out
            if not np.asarray(ok).all():
                raise RuntimeError(f"step {name} the check: {ok}")
        if not np.array_equal(outs["with"], outs["without"]):
            raise RuntimeError("the two programs differ")
        clock = time.perf_counter()
        jax.block_until_ready(alone(cache, lease))
        checks.append(1e3 * (time.perf_counter() - clock))
        wall.append(w), work.append(c)
        position = position + 1
    for name, program in programs.items():  # an old lease tells them apart
        cache, kept, _, ok = program(weights, cache, old, x, position - 1)
        if np.asarray(ok).any() != (name == "without"):
            raise RuntimeError(f"an old lease {name} the check: {ok}")
    added = [[100 * (t["with"] / t["without"] - 1) for t in each[2:]] for each in (wall, work)]
    return {
        "pairs": len(wall) - 2, "ms": 1e3 * statistics.median(t["without"] for t in wall[2:]),
        "added %": statistics.median(added[0]), "quartiles": statistics.quantiles(added[0])[::2],
        "added %, processor": statistics.median(added[1]),
        "view alone ms": statistics.median(checks[2:]), "looked at": looked, **count,
    }, cache, kept  # fmt: skip


def run(args) -> dict:
    rng, config = np.random.default_rng(0), flash(args.layers)
    layout = layout_of(config, args.requests, args.gib)
    pages, size = sum(g.pages - 1 for g in layout.groups), sum(hkv.nbytes(layout).values())
    print(f"{args.requests} requests, {layout.segments:,} segments of {B} tokens, {pages:,} pages, "
          f"{size / 2**30:.1f} GiB, layers {config.layers}")  # fmt: skip
    print("\n  context pages/request pairs  step ms  check adds % (quartiles)  processor %  "
          "view alone ms  looked at   XLA: bytes, operations, scratch")  # fmt: skip
    weights, build = nn.bind(Layers(nn.random_weights(jax.random.key(0), 0.02), config))
    noise = {g.name: jnp.asarray(rng.normal(size=(1, CHUNK // g.rule.unit, *g.row)), jnp.float32)
             for g in layout.groups}  # fmt: skip
    cache, rows = hkv.init(layout), []
    for bucket in args.contexts:
        cache, lease = running(cache, noise, args.requests, bucket, rng)
        result, cache, lease = measure(build, weights, cache, lease)
        cache = hkv.release(cache, lease)
        columns = sum(p.shape[1] for p in lease.pages)
        rows.append({"context": bucket, "pages per request": columns, **result})
        print_row(rows[-1])
    return {"requests": args.requests, "segments": layout.segments, "pages": pages, "bytes": size,
            "layers": config.layers, "results": rows}  # fmt: skip


def print_row(r: dict) -> None:
    low, high = r["quartiles"]
    counts = ", ".join(f"{r['with'][k] - base:+,.0f} ({100 * (r['with'][k] / base - 1):+.3f} %)"
                       for k, base in r["without"].items())  # fmt: skip
    print(f"{r['context']:>9,} {r['pages per request']:>13,} {r['pairs']:>5} {r['ms']:>8.1f}  "
          f"{r['added %']:>+9.2f} ({low:+.2f} to {high:+.2f}) {r['added %, processor']:>+11.2f}  "
          f"{r['view alone ms']:>6.2f} ({100 * r['view alone ms'] / r['ms']:.2f} %) "
          f"{r['looked at']:>10,}   {counts}", flush=True)  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--contexts", type=int, nargs="+", choices=CONTEXTS, default=CONTEXTS)
    parser.add_argument("--requests", type=int, default=4)
    parser.add_argument("--layers", type=int, default=1, help="of each kind")
    parser.add_argument("--gib", type=float, default=3.5)
    args = parser.parse_args()
    args.contexts = args.contexts[: 1 if args.quick else None]
    print(f"jax {jax.__version__}, {os.cpu_count()} cores, {platform.machine()}")
    out = {"date": str(date.today()), "jax": jax.__version__, "cores": os.cpu_count(), **run(args)}
    if not args.quick:
        (Path(__file__).parent / "lease.json").write_text(json.dumps(out, indent=1) + "\n")
