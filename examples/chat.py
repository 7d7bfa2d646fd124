"""Several conversations at once on one cache: what each turn reuses, and that it is right.

    python examples/chat.py
    python examples/chat.py --drop window,tail

A small DeepSeek-V4, trained on bytes of Shakespeare, talks in scenes: the user says the lines of
one character, the model goes on as the other. It is a tiny model, so what it says is Shakespeare in
style only. All conversations share one system prompt and run in one batch, and one of them branches
before its first answer.

Every turn is also run cold, in a cache with nothing in it, and compared: the logits of every token
that the resumed run computed, and every token of the answers.
"""

import argparse
import statistics
import sys
import textwrap
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from serving import functions, layout_of, progress, spent, table

import hkv
from hkv.models.deepseek_v4 import DeepseekV4
from hkv.serving import Engine, Stream

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
    """The conversations, an engine that reuses, and one that keeps nothing and so runs cold."""

    def __init__(self, args):
        self.args = args
        self.scenes = [*args.scenes, args.scenes[0]]  # the last is the branch's
        self.texts = [list(args.system) for _ in args.scenes]
        longest = max(sum(len(said) + args.tokens for said in s[: args.turns]) for s in self.scenes)
        # The branch has one token more: the one that it begins with.
        self.layout = layout_of(args.model, len(args.system) + longest + 1, len(self.scenes))
        self.model = functions(args.model)
        self.logits: dict[Stream, list[np.ndarray]] = {}
        self.warm, self.cold = self.engine(), self.engine()
        self.sum = dict.fromkeys([*KINDS, "tokens", "wrong"], 0)
        self.faster: list[float] = []

    def engine(self) -> Engine:
        """Engines of one model and layout share their programs."""
        weights, forward, replay = self.model
        vocabulary = self.args.model.config.vocab_size
        manager = hkv.Manager(self.layout, replay=replay, params=weights, vocabulary=vocabulary)
        return Engine(manager, forward, slots=len(self.scenes), on_logits=self.note)

    def note(self, stream: Stream, position: int, logits: np.ndarray) -> None:
        """Keeps the logits of every token that ran."""
        self.logits.setdefault(stream, []).append(logits)

    def compile(self) -> None:
        """Runs every program once, so that timing is fair."""
        with progress("compiling query, route, admit, recover, publish and release"):
            self.warm.manager.warmup()
        with progress("compiling prefill, decode and drop"):
            self.warm.warmup()
            self.drop(list(DROPPABLE))

    def store_system(self) -> None:
        """Publishes the system prompt, which every conversation then shares."""
        self.warm.submit(self.args.system, 1).result()

    def drop(self, names) -> None:
        """Takes forms away from all stored segments, as pressure on memory would."""
        forms = jnp.asarray([f in [DROPPABLE[n] for n in names] for f in hkv.Form])
        every = jnp.arange(self.layout.segments, dtype=jnp.int32)
        self.warm.manager.update(hkv.drop, every, forms)

    def run(self, engine: Engine, prompts) -> tuple[list[Stream], np.ndarray]:
        """Answers to prompts that come together, and the median seconds to their first tokens."""
        seconds = []
        for i in range(REPEATS):  # the last run is the one that goes on
            last = i == REPEATS - 1
            many, keep = (self.args.tokens, engine is self.warm) if last else (1, False)
            self.logits.clear()
            streams = [engine.submit(p, many, keep=keep) for p in prompts]
            for stream in streams:
                stream.result()
            seconds.append([s.seconds for s in streams])
        return streams, np.median(seconds, axis=0)

    def turn(self, number: int) -> None:
        """One turn of every conversation."""
        print(f"\nTurn {number + 1}")
        prompts = [[*t, *s[number]] for t, s in zip(self.texts, self.scenes, strict=False)]
        logits = self.answer(range(len(prompts)), prompts)
        if number == 0:  # the first conversation becomes two, by its second best token
            q = len(prompts)
            print(f"  conversation {q} branches off conversation 0 before its answer")
            second = logits[0][len(prompts[0]) - 1].argsort()[-2]
            self.texts.append([])
            self.answer([q], [[*prompts[0], second]])

    def answer(self, which, prompts) -> list[np.ndarray]:
        """Answers resumed and cold, compared and shown; returns the logits of the cold run."""
        streams, warm_seconds = self.run(self.warm, prompts)
        resumed = [np.concatenate(self.logits[s]) for s in streams]
        cold, cold_seconds = self.run(self.cold, prompts)
        whole = [np.concatenate(self.logits[s]) for s in cold]
        for i, q in enumerate(which):
            said, right = streams[i].tokens, cold[i].tokens
            self.texts[q] = [*prompts[i], *said]
            self.report(q, streams[i], warm_seconds[i], cold_seconds[i])
            got, want = resumed[i], whole[i]
            error = np.abs(got - want[-len(got) :]).max() / np.abs(want).max()
            equal = sum(a == b for a, b in zip(said, right, strict=True))
            fine = error <= TOLERANCE and equal == len(said)
            self.sum["wrong"] += not fine
            print(f"    logits differ by {error:.1e} of the largest, {equal} of {len(said)} "
                  f"tokens equal: {'right' if fine else 'WRONG'}")  # fmt: skip
            print(f"    answer: {bytes(said)[:72].decode('ascii', 'replace')!r}")
        return whole

    def report(self, q: int, stream: Stream, seconds: float, cold: float) -> None:
        """What was there for one conversation, what was done about it, and how long it took."""
        n, availability = spent(stream.plan, 0), stream.availability
        for key in KINDS:
            self.sum[key] += n[key]
        self.sum["tokens"] += len(stream.prompt)
        self.faster.append(cold / seconds)
        print(f"  conversation {q}: {len(stream.prompt)} tokens, "
              f"{int(availability.matched[0])} of them stored")  # fmt: skip
        print("\n".join(f"    {line}" for line in table(availability, 0)))
        print("    plan: " + ", ".join(f"{value} {key}" for key, value in n.items()))
        for line in why(availability):
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


def why(availability: hkv.Availability) -> list[str]:
    """What `hkv.explain` says about one request; forms with one fate share a line."""
    fates: dict[str, list[str]] = {}
    for line in hkv.explain(availability)[1:]:
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
