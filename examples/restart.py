"""Conversations that outlive their process: put away on disk, resumed after a kill -9.

    python examples/restart.py

A first process holds the conversations with a store beside its cache, tells when everything lies
on the disk, and is killed. A second one starts with an empty cache, asks the next turn, and fetches
what it can reuse, verified on the way. Every answer is compared with a cold run: its tokens, and
the logits of every token that ran.
"""

import argparse
import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from chat import HERE, TOLERANCE, read_scenes
from serving import functions, layout_of, progress

import hkv
from hkv.disk import LocalStore
from hkv.models.deepseek_v4 import DeepseekV4
from hkv.serving import Engine, Stream


class Server:
    """An engine with a store beside its cache, or without one; keeps the logits of its answers."""

    def __init__(self, model, layout: hkv.Layout, store: LocalStore | None):
        weights, forward, replay = functions(model)
        self.logits: dict[Stream, list[np.ndarray]] = {}
        self.manager = hkv.Manager(
            layout, replay=replay, params=weights, store=store, vocabulary=model.config.vocab_size
        )
        self.engine = Engine(self.manager, forward, slots=4, on_logits=self.note)

    def note(self, stream: Stream, position: int, logits: np.ndarray) -> None:
        """Keeps the logits of every token that ran."""
        self.logits.setdefault(stream, []).append(logits)

    def answer(self, prompts, tokens: int) -> list[Stream]:
        """Answers to prompts that come together."""
        streams = [self.engine.submit(p, tokens) for p in prompts]
        for stream in streams:
            stream.result()
        return streams


def turns(args):
    """The prompts of the first turn, and what the user adds in the second."""
    system, scenes = read_scenes(HERE / "data" / "shakespeare.txt")
    scenes = scenes[: args.conversations]
    return [[*system, *s[0]] for s in scenes], [s[1] for s in scenes]


def server(args, store: LocalStore | None) -> Server:
    """A server for both turns."""
    model = DeepseekV4.load(args.model)
    first, more = turns(args)
    longest = max(len(a) + len(b) for a, b in zip(first, more, strict=True)) + 2 * args.tokens
    layout = dataclasses.replace(layout_of(model, longest, 4), disk=True)
    return Server(model, layout, store)


def fill(args) -> None:
    """The first process: one turn, put away; then it waits to be killed."""
    with_store = server(args, LocalStore(args.store))
    for stream in with_store.answer(turns(args)[0], args.tokens):
        text = [*stream.prompt.tolist(), *stream.tokens]
        n = with_store.manager.offload(text).result()
        print(n, *stream.tokens, flush=True)
    signal.pause()


def killed(args) -> list[list[int]]:
    """Runs the first process, kills it, and returns what it had answered."""
    command = [sys.executable, __file__, "--fill", "--store", str(args.store)]
    command += ["--model", str(args.model), "--tokens", str(args.tokens)]
    command += ["--conversations", str(args.conversations)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = [process.stdout.readline().split() for _ in range(args.conversations)]
        os.kill(process.pid, signal.SIGKILL)
    if not all(said):
        raise SystemExit("the first process ended before it had answered")
    for q, (n, *tokens) in enumerate(said):
        print(f"  conversation {q}: {len(tokens)} tokens answered, {n} segments on the disk")
    return [[int(t) for t in tokens] for _, *tokens in said]


def main() -> int:
    """Fills, kills, resumes and compares; 1 if any answer was wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=HERE / "checkpoints" / "dsv4",
                        help="folder of a DeepSeek-V4 checkpoint over bytes")  # fmt: skip
    parser.add_argument("--store", type=Path, help="directory; a temporary one by default")
    parser.add_argument("--tokens", type=int, default=24, help="of each answer")
    parser.add_argument("--conversations", type=int, default=3)
    parser.add_argument("--fill", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    with contextlib.ExitStack() as stack:
        if args.store is None:
            args.store = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if args.fill:
            fill(args)
        return compare(args)


def compare(args) -> int:
    """The second process: resumes what the first had put away, beside a cold run."""
    with progress("the first process holds the conversations, and is killed"):
        said = killed(args)
    first, more = turns(args)
    prompts = [[*a, *b, *c] for a, b, c in zip(first, said, more, strict=True)]
    store = LocalStore(args.store)
    with progress("the second process resumes them from the disk"):
        warm = server(args, store)
        resumed = warm.answer(prompts, args.tokens)
    with progress("a third server runs them cold"):
        cold = server(args, None)
        whole = cold.answer(prompts, args.tokens)
    wrong = reused = 0
    for q, (a, b) in enumerate(zip(resumed, whole, strict=True)):
        got, want = (np.concatenate(s.logits[x]) for s, x in ((warm, a), (cold, b)))
        error = np.abs(got - want[-len(got) :]).max() / np.abs(want).max()
        fine = error <= TOLERANCE and a.tokens == b.tokens
        wrong, reused = wrong + (not fine), reused + a.reused
        print(f"  conversation {q}: {a.reused} of {len(a.prompt)} tokens reused, logits differ by "
              f"{error:.1e} of the largest: {'right' if fine else 'WRONG'}")  # fmt: skip
    n, total = warm.manager.counters, sum(map(len, prompts))
    print(f"summary: {total} tokens, {reused / total:.1%} reused, {n.segments_fetched} segments "
          f"fetched, {sum(n.rejected.values())} records rejected; "
          f"{wrong} wrong answers")  # fmt: skip
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
