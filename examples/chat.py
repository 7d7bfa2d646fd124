"""Several conversations at once on one cache: what each turn reuses, and that it is right.

    python examples/chat.py
    python examples/chat.py --drop window,tail

A small DeepSeek-V4, trained on bytes of Shakespeare, talks in scenes: the user says the lines of
one character, the model goes on as the other. It is a tiny model, so what it says is Shakespeare in
style only. All conversations share one system prompt, and one of them branches
before its first answer.

Every turn is also run cold, in a cache with nothing in it, and compared: the logits of every token
that the resumed run computed, and every token of the answers.
"""

import argparse
import statistics
import sys
import textwrap
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from serving import Server, Start, layout_of, progress, spent, table

import hkv
from hkv.models.deepseek_v4 import DeepseekV4

HERE = Path(__file__).parent
TOLERANCE = 1e-5  # of max|logits|
KINDS = "reused", "replayed", "refilled", "prefilled"
REPEATS = 3  # of each timed run
DROPPABLE = {f.name.lower(): f for f in hkv.Form if f is not hkv.Form.DISK}


def arguments():
    """The command line, checked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=HERE / "checkpoints" / "dsv4",
                        help="folder of a DeepSeek-V4 checkpoint over bytes")  # fmt: skip
    parser.add_argument("--conversations", type=int, default=3, help="and one branch")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=48, help="of each answer")
    parser.add_argument("--drop", default="", metavar="FORMS",
                        help=f"taken away between turns: {','.join(DROPPABLE)}")  # fmt: skip
    args = parser.parse_args()
    args.drop = [name for name in args.drop.split(",") if name]
    if unknown := set(args.drop) - set(DROPPABLE):
        parser.error(f"`--drop` names {sorted(unknown)}; forms are {', '.join(DROPPABLE)}")
    for name in ("conversations", "turns", "tokens"):
        if getattr(args, name) < 1:
            parser.error(f"`--{name}` is {getattr(args, name)}; give 1 or more")
    args.system, scenes = read_scenes(HERE / "data" / "shakespeare.txt")
    if args.conversations > len(scenes):
        parser.error(f"`--conversations` is {args.conversations}; there are {len(scenes)} scenes")
    args.scenes = scenes[: args.conversations]
    if args.turns > min(map(len, args.scenes)):
        parser.error(f"`--turns` is {args.turns}; give 1 to {min(map(len, args.scenes))}")
    try:
        args.model = DeepseekV4.load(args.model)
    except (OSError, ValueError) as error:
        parser.error(f"`--model`: {error}")
    if args.model.config.vocab_size != 256:
        parser.error(f"`--model` has {args.model.config.vocab_size} tokens; give one over bytes")
    return args


def read_scenes(path: Path) -> tuple[list[int], list[list[list[int]]]]:
    """The system prompt, and for each scene what the user adds in each turn, as bytes.

    Every second speech is the user's; of the others the model is given the speaker's name.
    """
    system, *scenes = path.read_text(encoding="ascii").split("\n\n=====\n\n")
    turns = []
    for scene in scenes:
        speeches = scene.rstrip().split("\n\n")
        pairs = zip(speeches[::2], speeches[1::2], strict=False)
        turns.append([list(f"\n\n{a}\n\n{b.splitlines()[0]}\n".encode()) for a, b in pairs])
    return list(system.encode()), turns


class Chat:
    """The conversations, a server that reuses, and one that always runs cold."""

    def __init__(self, args):
        self.args = args
        self.scenes = [*args.scenes, args.scenes[0]]  # the last place is for the branch
        self.texts = [list(args.system) for _ in args.scenes] + [[]]
        longest = max(sum(len(said) + args.tokens for said in s[: args.turns]) for s in self.scenes)
        layout = layout_of(args.model, len(args.system) + longest, len(self.texts))
        self.warm = Server(args.model, layout, len(self.texts))
        self.cold = self.warm.another()
        self.sum = dict.fromkeys([*KINDS, "tokens", "wrong"], 0)
        self.faster: list[float] = []

    def compile(self) -> None:
        """Runs every program once, on a cache that is thrown away, so that timing is fair."""
        prompts = [self.args.system[:9] for _ in self.texts[1:]] + [[]]
        with progress("compiling query, route, admit, recover and prefill"):
            lease = self.timed(self.warm, prompts).lease
        with progress("compiling fork and decode"):
            lease = self.warm.branch(lease, 0, len(prompts) - 1)
            lease, said, _ = self.warm.decode(lease, [0] * len(prompts), self.args.tokens)
        with progress("compiling publish, release and drop"):
            self.warm.finish(lease, [prompts[0] + s for s in said.tolist()])
            self.drop(list(DROPPABLE))
        self.warm.empty()

    def store_system(self) -> None:
        """Publishes the system prompt, which every conversation then shares."""
        only = [self.args.system] + [[] for _ in self.texts[1:]]
        run = self.warm.start(only, [len(p) for p in only])
        self.warm.finish(run.lease, only)

    def drop(self, names) -> None:
        """Takes forms away from all stored segments, as pressure on memory would."""
        forms = jnp.asarray([f in [DROPPABLE[n] for n in names] for f in hkv.Form])
        every = jnp.arange(self.warm.layout.segments, dtype=jnp.int32)
        self.warm.cache, _ = hkv.drop(self.warm.cache, every, forms)

    def timed(self, server: Server, prompts) -> Start:
        """`server.start`, repeated for its median time; the last run is the one that goes on."""
        top = server.layout.buckets[-1]
        reach = [min(len(p) + self.args.tokens, top) if p else 0 for p in prompts]
        seconds = []
        for i in range(REPEATS):
            run = server.start(prompts, reach)
            seconds.append(run.seconds)
            if i < REPEATS - 1:
                server.finish(run.lease)
        return run._replace(seconds=np.median(seconds, axis=0))

    def turn(self, number: int) -> None:
        """One turn of every conversation: resumed, run cold as well, compared and shown."""
        forking = number == 0
        prompts = [
            [*text, *scene[number]] if text else []
            for text, scene in zip(self.texts, self.scenes, strict=True)
        ]
        run = self.timed(self.warm, prompts)
        lease = run.lease
        if forking:  # in the middle of its turn, the first conversation becomes two
            lease = self.warm.branch(lease, 0, len(prompts) - 1)
            prompts[-1], run.logits[-1] = prompts[0], run.logits[0]
        begin = time.perf_counter()
        lease, said, more = self.answer(self.warm, lease, run.logits, forking)
        rate = said.size / (time.perf_counter() - begin)
        self.texts = [[*p, *s] for p, s in zip(prompts, said.tolist(), strict=True)]
        self.warm.finish(lease, self.texts)

        cold = self.timed(self.cold, prompts)
        lease, cold_said, cold_more = self.answer(self.cold, cold.lease, cold.logits, forking)
        self.cold.finish(lease)

        print(f"\nTurn {number + 1}: answers at {rate:.0f} tokens per second over the batch")
        for q in range(len(prompts)):
            if run.availability.length[q]:
                self.report(q, run, cold.seconds[q])
            else:
                print(f"  conversation {q} branches off conversation 0 before its answer")
            got = np.concatenate([run.logits[q], more[q]])
            want = np.concatenate([cold.logits[q], cold_more[q]])
            error = np.abs(got - want[-len(got) :]).max() / np.abs(want).max()
            equal = int((said[q] == cold_said[q]).sum())
            right = error <= TOLERANCE and equal == len(said[q])
            self.sum["wrong"] += not right
            print(f"    logits differ by {error:.1e} of the largest, {equal} of {len(said[q])} "
                  f"tokens equal: {'right' if right else 'WRONG'}")  # fmt: skip
            print(f"    answer: {bytes(said[q].tolist())[:72].decode('ascii', 'replace')!r}")

    def answer(self, server: Server, lease, logits, forking: bool):
        """Greedy answers; a new branch says the second best token and goes on from there."""
        best = [x[-1].argsort()[::-1] for x in logits]
        first = [b[0] for b in best]
        if forking:
            first[-1] = best[-1][1]
        return server.decode(lease, first, self.args.tokens)

    def report(self, q: int, run: Start, cold: float) -> None:
        """What was there for one conversation, what was done about it, and how long it took."""
        n, availability, seconds = spent(run.plan, q), run.availability, run.seconds[q]
        for key in KINDS:
            self.sum[key] += n[key]
        self.sum["tokens"] += int(availability.length[q])
        self.faster.append(cold / seconds)
        print(f"  conversation {q}: {int(availability.length[q])} tokens, "
              f"{int(availability.matched[q])} of them stored")  # fmt: skip
        print("\n".join(f"    {line}" for line in table(availability, q)))
        print("    plan: " + ", ".join(f"{value} {key}" for key, value in n.items()))
        for line in why(availability, q):
            print(textwrap.fill(line, 100, initial_indent="    why: ", subsequent_indent=" " * 9))
        print(f"    next token after {1e3 * seconds:.0f} ms, cold {1e3 * cold:.0f} ms "
              f"({cold / seconds:.1f} times)")  # fmt: skip

    def summary(self) -> str:
        """The last line."""
        n = self.sum
        return (
            f"summary: {n['tokens']} tokens, {n['reused'] / n['tokens']:.1%} reused, "
            f"{n['replayed']} replayed, {n['refilled']} refilled; "
            f"{statistics.median(self.faster):.1f} times sooner; {n['wrong']} wrong answers"
        )


def why(availability: hkv.Availability, q: int) -> list[str]:
    """What `hkv.explain` says about request `q`; forms with one fate share a line."""
    lines, mine, fates = hkv.explain(availability), False, {}
    for line in lines:
        if line.startswith("request "):
            mine = line.startswith(f"request {q}:")
        elif mine:
            form, fate = line.strip().split(": ", 1)
            fates.setdefault(fate, []).append(form)
    return [f"{', '.join(forms)}: {fate}" for fate, forms in fates.items()]


def main() -> int:
    """Runs the conversations; 1 if any answer was wrong."""
    args = arguments()
    chat = Chat(args)
    chat.compile()
    chat.store_system()
    print(f"{args.conversations} conversations and a branch share a system prompt of "
          f"{len(args.system)} tokens")  # fmt: skip
    for number in range(args.turns):
        chat.turn(number)
        if args.drop and number < args.turns - 1:
            chat.drop(args.drop)
            print(f"\nDropped {', '.join(args.drop)} from every stored segment")
    print(f"\n{chat.summary()}")
    return 1 if chat.sum["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
