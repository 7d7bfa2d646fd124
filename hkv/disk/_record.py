"""The record: some groups of one segment as one immutable, self-describing run of bytes.

A header of one page says everything that decides whether the payload may be used; sections follow
it, each at a multiple of 64 bytes:

    magic, format version, bytes of the description, bytes of the record
    the description in JSON: the fields of `Header`
    zeros, and in the last four bytes a CRC-32C of the rest of the page
    token ids, then the groups' rows

The digest of a group is the one that the device computed when the segment was published; it is
checked there again when the rows are back. The checksums find what went wrong before that.
"""

import dataclasses
import enum
import json
import struct
from collections.abc import Mapping

import google_crc32c
import ml_dtypes  # noqa: F401  # registers bfloat16 and the float8 types with NumPy
import numpy as np

MAGIC, FORMAT = b"HKVSEG\r\n", 1
PAGE, ALIGN = 4096, 64
_FIXED = struct.Struct("<8sIIQ")  # magic, format, bytes of JSON, bytes in all
_CRC = struct.Struct("<I")
TOKENS = "tokens"  # the first section, of no group


class Problem(enum.Enum):
    """Why a record was not used, or not stored. The value tells a person."""

    MISSING = "there is no such record"
    FORMAT = "it is no record"
    VERSION = "it is in a format that this build does not read"
    HEADER = "its header is damaged"
    TRUNCATED = "it is not as long as it says"
    PAYLOAD = "its payload is damaged"
    KEY = "it is of another segment than its name says"
    EPOCH = "it was computed with other weights"
    SHARDS = "it is a part for another number of shards"
    PROVENANCE = "it was made by an approximation that is not accepted"
    SEGMENT = "its segments have another length"
    INDEXER = "the indexer changed since"
    ABI = "it was written for another kernel ABI"
    DTYPE = "its rows have another dtype"
    SHAPE = "its rows have another shape"
    PARENT = "the segment before it was not stored"
    FULL = "there is no space for it"
    READ_ONLY = "the directory cannot be written"
    GONE = "the directory is gone"
    IO = "the file system reported an error"


class Rejected(Exception):
    """A record that is not used. `problem` is why, `name` which it is."""

    def __init__(self, problem: Problem, name: str, detail: str = ""):
        super().__init__(f"{name}: {problem.value}{detail and ': '}{detail}")
        self.problem, self.name = problem, name


@dataclasses.dataclass(frozen=True)
class Section:
    """The rows of one group in a record."""

    name: str  # of the group
    abi: int
    dtype: str
    shape: tuple[int, ...]
    held: tuple[int, int]  # tokens [lo, hi) of the segment whose rows are there
    digest: tuple[int, int]  # from the device
    offset: int = 0
    nbytes: int = 0
    crc: int = 0


@dataclasses.dataclass(frozen=True)
class Header:
    """What a record says of itself."""

    key: bytes  # 32, of the whole prefix through this segment
    parent: bytes  # 32, of the prefix before it; zeros at the start
    part: str  # which of the segment's groups lie together
    start: int  # absolute position of the first token
    length: int  # tokens
    segment_tokens: int
    epoch: int
    indexer_version: int
    provenance: int
    shard: int = 0
    shards: int = 1
    sections: tuple[Section, ...] = ()  # the token ids first
    nbytes: int = 0


@dataclasses.dataclass(frozen=True)
class Record:
    """A record to be stored: its header, and arrays by name in the order of its sections."""

    header: Header
    arrays: Mapping[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Wanted:
    """What a reader accepts."""

    segment_tokens: int
    epoch: int
    indexer_version: int
    provenance: int  # the worst
    groups: Mapping[str, tuple[int, str, tuple[int, ...]]]  # ABI, dtype, shape by name
    indexed: frozenset[str] = frozenset()  # groups that depend on the indexer
    shard: int = 0
    shards: int = 1

    def check(self, header: Header) -> dict[str, Problem]:
        """The sections that cannot be used, from the header alone; those not named can.

        Raises:
            Rejected: nothing of the record can.
        """
        for problem, want, got in (
            (Problem.SHARDS, (self.shard, self.shards), (header.shard, header.shards)),
            (Problem.SEGMENT, self.segment_tokens, header.segment_tokens),
            (Problem.EPOCH, self.epoch, header.epoch),
        ):
            if want != got:
                raise Rejected(problem, header.key.hex(), f"{got}, not {want}")
        if header.provenance > self.provenance:
            raise Rejected(Problem.PROVENANCE, header.key.hex())
        out = {}
        for s in header.sections[1:]:
            if s.name not in self.groups:
                out[s.name] = Problem.ABI
                continue
            abi, dtype, shape = self.groups[s.name]
            if s.abi != abi:
                out[s.name] = Problem.ABI
            elif s.dtype != dtype:
                out[s.name] = Problem.DTYPE
            elif s.shape != shape:
                out[s.name] = Problem.SHAPE
            elif s.name in self.indexed and header.indexer_version != self.indexer_version:
                out[s.name] = Problem.INDEXER
        return out


def pack(record: Record, tokens: np.ndarray) -> tuple[Header, list[np.ndarray | bytes]]:
    """The header with places and checksums filled in, and the buffers to write one after another.

    Args:
        record: the header and arrays of its sections.
        tokens: `i32[length]`.

    Raises:
        ValueError: more groups than a header has room for, or an array unlike its section.
    """
    ids = np.ascontiguousarray(tokens, "<i4")
    whole = (0, record.header.length)
    plain = Section(TOKENS, 0, "int32", ids.shape, whole, (0, 0))
    sections, at = [], PAGE
    buffers: list[np.ndarray | bytes] = []
    for s in (plain, *record.header.sections):
        a = np.ascontiguousarray(ids if s is plain else record.arrays[s.name])
        if a.shape != s.shape or str(a.dtype) != s.dtype:
            raise ValueError(
                f"`{s.name}` is {a.dtype}{a.shape}; its section says {s.dtype}{s.shape}"
            )
        data = a.reshape(-1).view(np.uint8)
        crc = google_crc32c.value(data)
        sections.append(dataclasses.replace(s, offset=at, nbytes=len(data), crc=crc))
        buffers.append(data)
        gap = -len(data) % ALIGN
        if gap:
            buffers.append(bytes(gap))
        at += len(data) + gap
    header = dataclasses.replace(record.header, sections=tuple(sections), nbytes=at)
    return header, [_page(header), *buffers]


def _page(header: Header) -> bytes:
    fields = dataclasses.asdict(header)
    fields["key"], fields["parent"] = header.key.hex(), header.parent.hex()
    fields["sections"] = [list(s.values()) for s in fields["sections"]]
    text = json.dumps(fields, separators=(",", ":")).encode()
    if _FIXED.size + len(text) + _CRC.size > PAGE:
        raise ValueError(f"a header of {len(text)} bytes does not fit a page; give fewer groups")
    page = (_FIXED.pack(MAGIC, FORMAT, len(text), header.nbytes) + text).ljust(PAGE - 4, b"\0")
    return page + _CRC.pack(google_crc32c.value(page))


def parse(page: bytes, size: int, name: str) -> Header:
    """The header of a record, verified.

    Args:
        page: its first page.
        size: bytes of the whole record as it lies there.
        name: for messages.

    Raises:
        Rejected: FORMAT, VERSION, HEADER or TRUNCATED.
    """
    if len(page) < PAGE:
        raise Rejected(Problem.TRUNCATED, name, f"{size} bytes")
    magic, version, n, total = _FIXED.unpack_from(page)
    if magic != MAGIC:
        raise Rejected(Problem.FORMAT, name)
    if google_crc32c.value(page[:-4]) != _CRC.unpack(page[-4:])[0]:
        raise Rejected(Problem.HEADER, name)
    if version != FORMAT:
        raise Rejected(Problem.VERSION, name, f"version {version}; this build reads {FORMAT}")
    if total != size:
        raise Rejected(Problem.TRUNCATED, name, f"{size} bytes of {total}")
    fields = json.loads(page[_FIXED.size : _FIXED.size + n])
    fields["key"], fields["parent"] = (bytes.fromhex(fields[k]) for k in ("key", "parent"))
    fields["sections"] = tuple(
        Section(s[0], s[1], s[2], tuple(s[3]), tuple(s[4]), tuple(s[5]), *s[6:])
        for s in fields["sections"]
    )
    return Header(**fields)


def unpack(header: Header, payload: np.ndarray, name: str) -> dict[str, np.ndarray]:
    """The arrays of a record by name, token ids among them, each verified by its checksum.

    Args:
        header: its header.
        payload: `u8[...]`, everything after the header's page, at a multiple of 64 bytes.
        name: for messages.

    Raises:
        Rejected: PAYLOAD, with the section.
    """
    out = {}
    for s in header.sections:
        data = payload[s.offset - PAGE : s.offset - PAGE + s.nbytes]
        if google_crc32c.value(data) != s.crc:
            raise Rejected(Problem.PAYLOAD, name, s.name)
        out[s.name] = data.view(np.dtype(s.dtype)).reshape(s.shape)
    return out


def aligned(nbytes: int) -> np.ndarray:
    """`u8[nbytes]` of new memory at a multiple of 64 bytes, so that JAX need not copy it again."""
    raw = np.empty(nbytes + ALIGN, np.uint8)
    at = -raw.ctypes.data % ALIGN
    return raw[at : at + nbytes]
