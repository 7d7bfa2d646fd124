"""The lifecycle of one segment's form: states, and the only transitions between them.

One table says it for the code, the tests and the README. Nothing here touches a cache; whatever
writes `life` asks `move` what comes of it.
"""

import dataclasses
import enum

import jax
import jax.numpy as jnp
import numpy as np

from hkv._layout import FORMS, Form
from hkv._slots import take


class Life(enum.IntEnum):
    """State of one form of one segment. `meaning` tells a person."""

    def __new__(cls, code: int, meaning: str = ""):
        """A code with its meaning."""
        self = int.__new__(cls, code)
        self._value_ = code
        self.meaning = meaning
        return self

    meaning: str

    EMPTY = 0, "nothing is kept"
    WRITING = 1, "being written: rows by a running request, or a record of the disk copy"
    READY = 2, "complete, immutable and on the device: the only state that is reused"
    OFFLOADING = 3, "being copied out; its pages can still be read under a lease"
    ON_DISK = 4, "only a copy outside of device memory"
    LOADING = 5, "being copied in"
    STALE = 6, "no longer right; never returned again"


# Of a device form, and of the DISK form, which never is on the device.
TRANSITIONS: dict[Life, tuple[Life, ...]] = {
    Life.EMPTY: (Life.WRITING, Life.LOADING),
    Life.WRITING: (Life.READY, Life.STALE, Life.EMPTY),
    Life.READY: (Life.OFFLOADING, Life.STALE, Life.EMPTY),
    Life.OFFLOADING: (Life.READY, Life.ON_DISK, Life.STALE, Life.EMPTY),
    Life.ON_DISK: (Life.LOADING, Life.STALE, Life.EMPTY),
    Life.LOADING: (Life.READY, Life.ON_DISK, Life.STALE, Life.EMPTY),
    Life.STALE: (Life.EMPTY,),
}
DISK_TRANSITIONS: dict[Life, tuple[Life, ...]] = {
    Life.EMPTY: (Life.WRITING,),
    Life.WRITING: (Life.ON_DISK, Life.STALE, Life.EMPTY),
    Life.READY: (),
    Life.OFFLOADING: (),
    Life.ON_DISK: (Life.LOADING, Life.STALE, Life.EMPTY),
    Life.LOADING: (Life.ON_DISK, Life.STALE, Life.EMPTY),
    Life.STALE: (Life.EMPTY,),
}
_TABLES = [DISK_TRANSITIONS if f is Form.DISK else TRANSITIONS for f in Form]
_LEGAL = np.array([[[b in table[a] for b in Life] for a in Life] for table in _TABLES])
_THERE = (Life.WRITING, Life.READY, Life.OFFLOADING, Life.STALE)  # on the device, maybe leased
_GONE = (Life.EMPTY, Life.ON_DISK, Life.STALE)
_SPOILS = np.array([
    [[f is not Form.DISK and a in _THERE and b in _GONE for b in Life] for a in Life] for f in Form
])  # fmt: skip


class Refusal(enum.IntEnum):
    """Why a form did not move, in the order in which it is looked at. `sentence` tells a person."""

    def __new__(cls, code: int, sentence: str = ""):
        """A code with its sentence."""
        self = int.__new__(cls, code)
        self._value_ = code
        self.sentence = sentence
        return self

    sentence: str

    NONE = 0, "moved, or not asked for"
    ABSENT = 1, "no segment stands in the row, or the layout has no such form"
    ILLEGAL = 2, "not a listed transition"
    LEASED = 3, "a lease holds the pages that would go"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Transition:
    """What became of a request to move forms. K rows, F forms; prints what was refused."""

    rows: jax.Array  # i32[K], as asked
    old: jax.Array  # u8[K, F], `Life` before
    new: jax.Array  # u8[K, F], `Life` that was asked for; `old` where none was
    moved: jax.Array  # bool[K, F]
    refusal: jax.Array  # u8[K, F], `Refusal`

    def __repr__(self) -> str:
        known = isinstance(self.moved, jax.Array | np.ndarray)
        if not known or isinstance(self.moved, jax.core.Tracer):
            return "Transition(traced)"
        t = jax.device_get(self)
        lines = [f"{int(t.moved.sum())} moved, {int((t.refusal > 0).sum())} refused"]
        for k, f in np.argwhere(t.refusal > 0):
            states = f"{life_name(t.old[k, f])} -> {life_name(t.new[k, f])}"
            why = Refusal(int(t.refusal[k, f])).sentence
            lines.append(f"  segment {t.rows[k]}, {Form(int(f)).name}: {states}: {why}")
        return "\n".join(lines)


def life_name(code) -> str:
    """The name of a state, or the number where that is none."""
    return Life(int(code)).name if int(code) < len(Life) else str(int(code))


def _look_up(facts: np.ndarray, old: jax.Array, new: jax.Array) -> jax.Array:
    form = jnp.broadcast_to(jnp.arange(FORMS, dtype=jnp.int32), old.shape)
    return take(jnp.asarray(facts), (form, old, new), False)


def legal(old: jax.Array, new: jax.Array) -> jax.Array:
    """`bool[..., F]`: whether `old -> new` (both `u8[..., F]`) is listed for each form."""
    return _look_up(_LEGAL, old, new)


def spoils(old: jax.Array, new: jax.Array) -> jax.Array:
    """`bool[..., F]`: whether rows that a reader may have verified go when a form moves so.

    Such a transition ends the segment's generation: leases on it fail, plans are out of date. The
    others add something or leave payloads readable where they are. What lies outside of device
    memory is verified when it is read, so its coming and going spoils nothing.
    """
    return _look_up(_SPOILS, old, new)


def move(life: jax.Array, forms: jax.Array, new: jax.Array | Life) -> jax.Array:
    """`u8[..., F]`: the states after the forms `bool[..., F]` were asked to move to `new`.

    Every state that is written comes from here: where the transition is not listed, the form
    stays what it was.
    """
    to = jnp.broadcast_to(jnp.asarray(new, jnp.uint8), life.shape)
    return jnp.where(forms & legal(life, to), to, life)
