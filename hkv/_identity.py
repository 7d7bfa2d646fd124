"""Who a prefix belongs to: identity digests, what a query needs, and the proposing hash.

The hash only proposes candidates. A hit is decided by exact comparison elsewhere.
"""

import dataclasses
import hashlib
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from hkv._arguments import check_int, check_type
from hkv._availability import Provenance
from hkv._cache import Cache, Segment, check_cache
from hkv._layout import Layout

_pytree = jax.tree_util.register_dataclass
# Odd constants of the two lanes; any change changes every key, so they are fixed by test vectors.
_LANES = ((0x9E3779B1, 0x85EBCA77), (0xC2B2AE3D, 0x27D4EB2F))


@_pytree
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Need:
    """What stored segments must equal to serve a batch of requests.

    It goes along from the answer of a query to the plan and the lease, so that a run is recovered
    and published under what was verified.
    """

    identity: jax.Array  # u32[Q, 4], of salt, adapter and model
    start: jax.Array  # i32[Q], absolute position of the first token
    media: jax.Array  # u32[Q, S, 4], of the images and such in each segment; 0 for none
    epoch: jax.Array  # u32[Q], version of the weights
    indexer_version: jax.Array  # u32[Q]
    provenance: jax.Array  # u8[Q], the worst that is accepted
    abi: jax.Array  # u32[Q, G], what the kernels of this build read
    codes: jax.Array  # u32[Q, G, shards], how the pools lie in memory
    tenant: jax.Array  # u32[Q], digest of the salt, for caps

    def request(self, q: int) -> "Need":
        """What request `q` needs, without the axis Q, as the functions on one segment take it."""
        return jax.tree.map(lambda a: a[q], self)


def digest128(*fields: bytes) -> np.ndarray:
    """`u32[4]`: a digest over length-prefixed fields, equal in every process.

    Args:
        fields: byte strings; their number and lengths are part of what is digested.
    """
    for f in fields:
        check_type("fields", f, bytes)
    h = hashlib.blake2b(digest_size=16, person=b"hkv-v1")
    h.update(len(fields).to_bytes(8, "little"))
    for f in fields:
        h.update(len(f).to_bytes(8, "little"))
        h.update(f)
    return np.frombuffer(h.digest(), "<u4")


def tenant_word(salt: str) -> int:
    """A tenant as one `u32`, never 0."""
    return int(digest128(b"tenant", salt.encode())[0]) or 1


def media_digests(layout: Layout, tokens: int, items: Sequence[tuple[int, int, bytes]]):
    """`u32[S, 4]`: per segment, a digest of the media that touch it, 0 where none does.

    Args:
        layout: gives B and the length bucket.
        tokens: length of the prompt.
        items: (first token, number of tokens, content digest) of each image or the like, in any
            order. One may end after the prompt, none begins there.

    Raises:
        TypeError: values of other types.
        ValueError: a prompt longer than the longest bucket, or an item that begins after it.
    """
    check_type("layout", layout, Layout)
    for item in items:
        if not isinstance(item, tuple) or len(item) != 3:
            raise TypeError(f"`items` holds {item!r}; give (first token, tokens, digest) triples")
        at, n, digest = item
        check_type("items", digest, bytes)
        check_int("items", n, 1)
        check_int("items", at, 0)
        if at >= tokens:
            raise ValueError(f"`items` has one from token {at} on; the prompt has {tokens} tokens")
    B = layout.segment_tokens
    out = np.zeros((layout.bucket(tokens) // B, 4), np.uint32)
    for i in range(len(out)):
        inside = [x for x in sorted(items) if x[0] < (i + 1) * B and x[0] + x[1] > i * B]
        if inside:
            fields = [b"%d:%d" % (at, n) for at, n, _ in inside] + [d for *_, d in inside]
            out[i] = digest128(*fields)
    return out


def byte_codes(cache: Cache) -> np.ndarray:
    """`u32[G, shards]`: how each group's pool really lies in memory on each device.

    Derived on the host from the arrays themselves: shard shape and index, dtype, device layout,
    memory kind, device kind and address modulo 64 bytes. Never 0.
    """
    check_cache(cache)
    out = np.zeros((len(cache.pools), cache.layout.shards), np.uint32)
    for g, pool in enumerate(cache.pools):
        for s, shard in enumerate(pool.data.addressable_shards):
            a = shard.data
            facts = (
                a.shape,
                str(a.dtype),
                str(getattr(a.format.layout, "major_to_minor", None)),
                str(getattr(a.format.layout, "tiling", None)),
                a.sharding.memory_kind,
                next(iter(a.devices())).device_kind,
                str(shard.index),
                a.unsafe_buffer_pointer() % 64,
            )
            word = digest128(repr(facts).encode())[0]
            out[g, s] = word if word else 1
    return out


def need(
    cache: Cache,
    *,
    requests: int = 1,
    salt: str | Sequence[str] = "",
    adapter: bytes | Sequence[bytes] = b"",
    model: bytes = b"",
    start: int | Sequence[int] = 0,
    media: np.ndarray | None = None,
    bucket: int | None = None,
    epoch: int = 0,
    indexer_version: int = 0,
    provenance: Provenance = Provenance.EXACT,
    abi: np.ndarray | None = None,
    codes: np.ndarray | None = None,
) -> Need:
    """What a batch of requests needs of stored segments. Host code; reads the pools' addresses.

    Args:
        cache: the cache that will be asked.
        requests: Q.
        salt: tenant, one or one per request.
        adapter: content digest of the adapter, one or one per request.
        model: content digest of the model.
        start: absolute position of the first token, one or one per request; the longest bucket
            must end before 2**31.
        media: `u32[Q, S, 4]` from `media_digests`, or None for text alone.
        bucket: length bucket in tokens when there is no media; the longest by default.
        epoch: version of the weights, 0 to 2**32 - 1.
        indexer_version: version of the indexer, 0 to 2**32 - 1.
        provenance: the worst that is accepted.
        abi: `u32[G]` of the kernels in use; the layout's own by default.
        codes: `u32[G, shards]`; the pools' own by default.

    Raises:
        TypeError: a value of another type.
        ValueError: a number out of range, a sequence of another length than `requests`, an
            unknown bucket, or arrays for another layout.
    """
    check_cache(cache)
    lay = cache.layout
    check_int("requests", requests, 1)
    check_type("model", model, bytes)
    salts = _each("salt", salt, str, requests)
    adapters = _each("adapter", adapter, bytes, requests)
    starts = _each("start", start, int, requests)
    for name, value, top in (
        ("epoch", epoch, 2**32), ("indexer_version", indexer_version, 2**32),
        ("provenance", provenance, len(Provenance)),
        *(("start", x, 2**31 - lay.buckets[-1]) for x in starts),
    ):  # fmt: skip
        check_int(name, value, 0, top)
    bucket = lay.buckets[-1] if bucket is None else bucket
    check_int("bucket", bucket, 1)
    if bucket not in lay.buckets:
        raise ValueError(f"`bucket` is {bucket!r}; give one of {lay.buckets}")
    S = bucket // lay.segment_tokens
    media = np.zeros((requests, S, 4), np.uint32) if media is None else np.asarray(media)
    if media.dtype != np.uint32:
        raise TypeError(f"`media` is {media.dtype}; give uint32 from media_digests")
    wide = [n // lay.segment_tokens for n in lay.buckets]
    if media.ndim != 3 or media.shape[::2] != (requests, 4) or media.shape[1] not in wide:
        raise ValueError(f"`media` has shape {media.shape}; give [{requests}, S, 4], S of {wide}")
    abi = lay.abi if abi is None else _words("abi", abi, len(lay.groups))
    codes = byte_codes(cache) if codes is None else codes
    codes = _words("codes", codes, len(lay.groups), lay.shards)
    if not codes.all():
        raise ValueError(f"`codes` holds 0, which no pool has: {codes.tolist()}; give byte_codes")
    ids = [digest128(t.encode(), a, model) for t, a in zip(salts, adapters, strict=True)]
    numbers = dict(
        identity=np.stack(ids),
        start=np.array(starts, np.int32),
        media=media.astype(np.uint32),
        epoch=np.full(requests, epoch, np.uint32),
        indexer_version=np.full(requests, indexer_version, np.uint32),
        provenance=np.full(requests, provenance, np.uint8),
        abi=np.repeat(abi[None], requests, axis=0),
        codes=np.repeat(codes[None], requests, axis=0),
        tenant=np.array([tenant_word(t) for t in salts], np.uint32),
    )
    # An explicit transfer, to where the cache lies: it compiles nothing and is not repeated.
    there = getattr(cache.clock, "committed", False)
    return Need(**jax.device_put(numbers, cache.clock.sharding if there else None))


def _words(name: str, value, *shape: int) -> np.ndarray:
    """`u32[shape]` of integers that fit."""
    a = np.asarray(value)
    if a.dtype.kind not in "iu":
        raise TypeError(f"`{name}` holds {a.dtype}; give uint32")
    if a.shape != shape:
        raise ValueError(f"`{name}` has shape {a.shape}; give {shape}")
    if ((a < 0) | (a >= 2**32)).any():
        raise ValueError(f"`{name}` holds {a.tolist()}; give words of 0 to 2**32 - 1")
    return a.astype(np.uint32)


def _each(name: str, value, kind: type, n: int) -> list:
    if isinstance(value, kind):
        return [value] * n
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise TypeError(f"`{name}` is {value!r}; give one {kind.__name__} or one per request")
    if len(value) != n or not all(isinstance(v, kind) for v in value):
        raise ValueError(f"`{name}` must hold {n} of {kind.__name__}, got {value!r}")
    return list(value)


def mix(x: jax.Array) -> jax.Array:
    """The 32-bit finaliser of MurmurHash3 (public domain, A. Appleby), `u32[...]`."""
    x = (x ^ (x >> 16)) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * np.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def _weigh(words: jax.Array, weights: tuple[int, ...]) -> jax.Array:
    """`u32[]`: four words as one, each with a weight of its own."""
    return jnp.sum(words * np.array(weights, np.uint32), dtype=jnp.uint32)


def _token_words(tokens: jax.Array, lane: int) -> jax.Array:
    """`u32[n]`: one word per token and its place."""
    a, b = _LANES[lane]
    at = np.arange(1, tokens.shape[0] + 1, dtype=np.uint64) * b & 0xFFFFFFFF
    return mix(tokens.astype(jnp.uint32) * np.uint32(a) + at.astype(np.uint32))


def fold(*arrays: jax.Array) -> jax.Array:
    """`u32[]`: the contents of integer arrays as one word, to tell mistaken ones apart.

    Zeros at an array's end make no difference.
    """
    word = jnp.uint32(0)
    for a in arrays:
        flat = a.reshape(-1)
        words = jnp.where(flat != 0, _token_words(flat, 0), jnp.uint32(0))
        word = mix(word ^ jnp.sum(words, dtype=jnp.uint32))
    return word


def asked(tokens: jax.Array, length: jax.Array, need: Need) -> jax.Array:
    """`u32[]`: one request, `i32[T]` tokens of which `length` count, as one word."""
    inside = jnp.arange(tokens.shape[0], dtype=jnp.int32) < length
    return fold(jnp.where(inside, tokens, 0), length, *jax.tree.leaves(need))


def segment_mark(seg: Segment) -> jax.Array:
    """`u32[]`: what a segment is, beside its version: another cache may have that one too."""
    facts = (seg.key, seg.epoch, seg.indexer_version, seg.provenance, seg.abi, seg.codes)
    return fold(*facts)


def block_keys(tokens: jax.Array, identity: jax.Array, start: jax.Array, media: jax.Array):
    """Keys of one request's prefix after each segment and before it.

    The key of block i is `k[i] = k[i-1] * A + h[i]` in each lane, computed for all blocks at once
    as a running sum over powers of A.

    Args:
        tokens: `i32[S, B]`.
        identity: `u32[4]`.
        start: `i32[]`.
        media: `u32[S, 4]`.

    Returns:
        `u32[S, 2]` keys after each block, and `u32[S, 2]` keys before it.
    """
    after, before = [], []
    for lane, (a, b) in enumerate(_LANES):
        root = mix(_weigh(identity, (a, b, a ^ b, a + 2)) + start.astype(jnp.uint32) * np.uint32(b))

        def content(block, seen, lane=lane, a=a, b=b):
            words = jnp.sum(_token_words(block, lane), dtype=jnp.uint32)
            return mix(words + mix(_weigh(seen, (b, a, a ^ b, b + 2))))

        h = jax.vmap(content)(tokens, media)
        power, inverse = _powers(a, tokens.shape[0])
        total = jnp.cumsum(h * inverse, dtype=jnp.uint32) * power
        k = total + root * (power * np.uint32(a))
        after.append(mix(k))
        before.append(mix(jnp.concatenate([root[None], k[:-1]])))
    return jnp.stack(after, -1), jnp.stack(before, -1)


def _powers(a: int, n: int) -> tuple[np.ndarray, np.ndarray]:
    """`u32[n]` powers of an odd `a`, and of its inverse modulo 2**32."""
    b = pow(a, -1, 2**32)
    out: tuple[list[int], list[int]] = ([], [])
    x = y = 1
    for _ in range(n):
        out[0].append(x)
        out[1].append(y)
        x, y = x * a % 2**32, y * b % 2**32
    return np.array(out[0], np.uint32), np.array(out[1], np.uint32)


def opening_slots(cache: Cache, before: jax.Array, tokens: jax.Array, lengths: tuple[int, ...]):
    """`i32[O]`: buckets of the index of openings, one per opening length.

    Args:
        cache: gives the size of the index.
        before: `u32[2]` key of the prefix before the segment.
        tokens: `i32[B]`.
        lengths: O opening lengths in tokens.
    """
    words = _token_words(tokens, 0)
    out = []
    for n in lengths:
        h = jnp.sum(words[:n], dtype=jnp.uint32) + np.uint32(n * _LANES[1][0] % 2**32)
        out.append(mix(before[0] + mix(h ^ before[1])))
    slots = jnp.stack(out) & np.uint32(cache.openings.shape[0] - 1)
    return slots.astype(jnp.int32)
