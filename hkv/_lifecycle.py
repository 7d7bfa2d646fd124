"""The lifecycle of one segment's form: states, and the only transitions between them."""

import enum

import jax
import jax.numpy as jnp
import numpy as np


class Life(enum.IntEnum):
    """State of one form of one segment."""

    EMPTY = 0
    WRITING = 1
    READY = 2
    OFFLOADING = 3
    ON_DISK = 4
    LOADING = 5
    STALE = 6


_L = Life
TRANSITIONS: dict[Life, tuple[Life, ...]] = {
    _L.EMPTY: (_L.WRITING, _L.LOADING),
    _L.WRITING: (_L.READY, _L.EMPTY, _L.STALE),
    _L.READY: (_L.OFFLOADING, _L.STALE, _L.EMPTY),
    _L.OFFLOADING: (_L.READY, _L.ON_DISK, _L.STALE, _L.EMPTY),
    _L.ON_DISK: (_L.LOADING, _L.STALE, _L.EMPTY),
    _L.LOADING: (_L.READY, _L.ON_DISK, _L.STALE, _L.EMPTY),
    _L.STALE: (_L.EMPTY,),
}
_LEGAL = np.array([[b in TRANSITIONS[a] for b in Life] for a in Life])


def legal(old: jax.Array, new: jax.Array) -> jax.Array:
    """`bool[...]`: whether `old -> new` (both `u8[...]` states) is a listed transition."""
    return jnp.asarray(_LEGAL)[old, jnp.broadcast_to(jnp.asarray(new), old.shape)]
