"""Reads the serving traces, and says what any prefix cache could reach on them at best.

Nothing here knows the library: these are the figures that a replay through it is compared with.
"""

import dataclasses
import gzip
import heapq
import itertools
import json
from collections.abc import Sequence
from pathlib import Path

FOLDER = Path(__file__).parent / "traces"
NAMES = ("mooncake_synthetic", "mooncake_conversation", "claude_code", "ragpulse")


@dataclasses.dataclass(frozen=True)
class Request:
    """One prompt as blocks. Equal ids are equal tokens, wherever they stand."""

    ids: tuple[int, ...]
    sizes: tuple[int, ...]  # tokens of each block
    length: int  # tokens of the prompt; those past the last block have no id and match nothing

    def tokens(self, blocks: int) -> int:
        """Tokens of the first `blocks` blocks."""
        return sum(self.sizes[:blocks])


def read(name: str) -> list[Request]:
    """The requests of one of `NAMES`, in the order of their arrival."""
    if name not in NAMES:
        raise ValueError(f"`name` is {name!r}; traces are {NAMES}")
    with gzip.open(FOLDER / f"{name}.jsonl.gz") as f:
        lines = [json.loads(line) for line in f]
    if name == "claude_code":
        return _sessions(lines)
    return [Request(tuple(x["hash_ids"]), tuple(x.get("block_tokens") or _blocks(x["input_length"],
            512)), x["input_length"]) for x in lines]  # fmt: skip


def _blocks(length: int, size: int) -> list[int]:
    """Tokens of each block of `size` tokens, the last one partial."""
    return [min(size, length - at) for at in range(0, length, size)]


def _sessions(lines: list[dict]) -> list[Request]:
    """Calls of all sessions by time, as if these had started together.

    Ids are local to a session, and what one model computed is of no use to another.
    """
    calls, names = [], {}
    for session, line in enumerate(lines):
        for call in line["requests"]:
            agent = call.get("requests", [call])  # a sub-agent counts time from its own start
            begin = call["t"] if "requests" in call else 0.0
            calls += [(begin + x["t"], session, x) for x in agent]
    out = []
    for _, session, x in sorted(calls, key=lambda c: c[0]):
        ids = tuple(names.setdefault((session, x["model"], h), len(names)) for h in x["hash_ids"])
        out.append(Request(ids, (64,) * len(ids), x["in"]))
    return out


def prefixes(requests: Sequence[Request]) -> list[list[int]]:
    """Per request a number for the prefix through each block: equal only for equal prefixes."""
    known: dict[tuple[int, int], int] = {}
    out = []
    for r in requests:
        at, chain = -1, []
        for block in r.ids:
            at = known.setdefault((at, block), len(known))
            chain.append(at)
        out.append(chain)
    return out


def infinite(requests: Sequence[Request]) -> list[int]:
    """Tokens per request that a cache which never forgets has seen before."""
    seen: set[int] = set()
    out = []
    for r, chain in zip(requests, prefixes(requests), strict=True):
        out.append(r.tokens(sum(1 for _ in itertools.takewhile(seen.__contains__, chain))))
        seen.update(chain)
    return out


def belady(requests: Sequence[Request], capacity: int) -> list[int]:
    """Tokens per request with MIN: of `capacity` equal blocks goes the one used furthest ahead.

    It knows the future, and keeps out what would be needed later than all that is there.
    """
    chains = prefixes(requests)
    never = sum(map(len, chains))
    ahead, after = [0] * never, {}  # for each use of a block, the time of its next
    uses = [k for chain in chains for k in chain]
    for i in range(never - 1, -1, -1):
        ahead[i] = after.get(uses[i], never)
        after[uses[i]] = i
    kept: dict[int, int] = {}  # block -> next use
    latest: list[tuple[int, int]] = []  # (-next use, block), also entries that no longer hold
    out, now = [], 0
    for r, chain in zip(requests, chains, strict=True):
        out.append(r.tokens(sum(1 for _ in itertools.takewhile(kept.__contains__, chain))))
        for k in chain:
            use, now = ahead[now], now + 1
            if k not in kept and len(kept) >= capacity:
                while kept.get(latest[0][1]) != -latest[0][0]:
                    heapq.heappop(latest)
                if -latest[0][0] <= use:
                    continue
                del kept[heapq.heappop(latest)[1]]
            kept[k] = use
            heapq.heappush(latest, (-use, k))
    return out


def last_half(values: Sequence[int]) -> int:
    """The sum over the last half of the requests: the first half fills the cache."""
    return sum(values[len(values) // 2 :])
