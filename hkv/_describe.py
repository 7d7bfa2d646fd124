"""`describe`: what the cache holds of one prefix, per segment and layer, for a person."""

import dataclasses

import jax
import numpy as np

from hkv._availability import Place
from hkv._cache import Cache, check_cache
from hkv._identity import Need
from hkv._identity import need as default_need
from hkv._layout import Form
from hkv._lifecycle import Life
from hkv._query import pad_batch, query


@dataclasses.dataclass(frozen=True)
class Held:
    """What one layer keeps of one segment in one group. Positions are absolute, in tokens."""

    segment: int  # row of the table
    version: int
    tokens: tuple[int, int]  # of the segment, [lo, hi)
    layer: int
    group: str
    form: str
    precision: str  # "full" for one row per token, "1/m" for one entry per m tokens
    dtype: str
    held: tuple[int, int]  # positions whose rows are there, [lo, hi)
    indexer_version: int | None  # of the snapshot; None in other forms
    place: str  # where the device copy lies, and the disk copy's place if there is one
    life: str


class Description(list[Held]):
    """A list of `Held` that prints as a table."""

    def __repr__(self) -> str:
        head = [f.name for f in dataclasses.fields(Held)]
        rows = [head, *([str(getattr(x, n)) for n in head] for x in self)]
        wide = [max(len(r[i]) for r in rows) for i in range(len(head))]
        return "\n".join(
            "  ".join(c.ljust(w) for c, w in zip(r, wide, strict=True)).rstrip() for r in rows
        )


def describe(cache: Cache, prefix, need: Need | None = None) -> Description:
    """What is stored along a prefix: per segment and layer, form, precision, range and place.

    Args:
        cache: the cache.
        prefix: a sequence of token ids.
        need: for one request; identity and epoch decide which segments these are. Without one,
            what a plain `need(cache)` asks for.

    Returns:
        One entry per segment, layer and group, in the order of the prefix.

    Raises:
        ValueError: a prefix that fits no bucket, or ids out of range.
    """
    check_cache(cache)
    # A prompt reuses at most all but one token, so one more goes along where the bucket has room.
    room = cache.layout.bucket(len(prefix))
    tokens, length = pad_batch(cache.layout, [[*prefix, 0][:room]])
    need = need or default_need(cache, bucket=tokens.shape[1])
    rows = np.asarray(query(cache, tokens, length, need).rows[0])
    out = Description()
    for row in rows[rows < cache.layout.segments]:
        seg = jax.device_get(cache.segment(int(row)))
        start, disk = int(seg.start), Life(int(seg.life[Form.DISK]))
        for g, spec in enumerate(cache.layout.groups):
            place = "DEVICE" if seg.pages[g].any() else "NONE"
            if disk is Life.ON_DISK:
                place += f", {Place(int(seg.place)).name}"
            unit = spec.rule.unit
            for layer in spec.layers:
                out.append(
                    Held(
                        segment=int(row), version=int(seg.version),
                        tokens=(start, start + int(seg.length)), layer=layer, group=spec.name,
                        form=spec.form.name, precision="full" if unit == 1 else f"1/{unit}",
                        dtype=spec.dtype, held=(int(seg.held[g, 0]), int(seg.held[g, 1])),
                        indexer_version=(
                            int(seg.indexer_version) if spec.form is Form.INDEXER else None
                        ),
                        place=place, life=Life(int(seg.life[spec.form])).name,
                    )
                )  # fmt: skip
    return out
