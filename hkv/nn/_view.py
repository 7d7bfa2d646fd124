"""What a layer expects of the cache: the protocol of a view, and safe reading through it.

The real view reads pages; a test may keep plain arrays. Nothing here allocates or evicts.
"""

from __future__ import annotations

from typing import Protocol, Self

import jax
import jax.numpy as jnp


class CacheView(Protocol):
    """A batch of requests at their places in the cache, for one chunk of `T` tokens each.

    A group stores one row per `unit` tokens: 1 for windows and tails, the compression ratio for
    history and indexer keys. Row `i` of a group stands for tokens `[i * unit, (i + 1) * unit)`.
    """

    @property
    def position(self) -> jax.Array:
        """Absolute position of the chunk's first token, `i32[Q]`."""
        ...

    @property
    def count(self) -> jax.Array:
        """How many of the chunk's T tokens are real, `i32[Q]`; the rest is padding."""
        ...

    @property
    def length(self) -> int:
        """Static bound on the tokens a request may hold, this chunk included."""
        ...

    def read(
        self, group: str, layer: int, index: jax.Array, new: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Rows `index` (`i32[Q, K]`) of a layer, as `([Q, K, *row], bool[Q, K])`.

        `new[q, i]` is row `position[q] // unit + i`, computed in this chunk. A row is valid if it
        exists and its last token `(index + 1) * unit - 1` lies before `position + count`.
        """
        ...

    def write(self, group: str, layer: int, new: jax.Array) -> Self:
        """A view that also stores the rows `new` (`[Q, E, *row]`, placed as in `read`)."""
        ...


def positions(view: CacheView, tokens: int) -> jax.Array:
    """Absolute positions of the chunk, `i32[Q, tokens]`."""
    return view.position[:, None] + jnp.arange(tokens, dtype=jnp.int32)[None]


def read_rows(
    view: CacheView, group: str, layer: int, index: jax.Array, new: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """`view.read` that takes negative row numbers as absent and zeroes what is not valid.

    Invalid rows may hold anything, NaN included, so they are selected away here, once, and no
    caller needs to think of it again. A negative number becomes `view.length`, which no row can
    have, because an array index of -1 would mean the last row.

    Args:
        index: `i32[Q, K]`, row numbers, may be negative.
        new: `[Q, E, *row]`, the rows of this chunk.

    Returns:
        Rows `[Q, K, *row]` in the dtype of `new`, and `bool[Q, K]`.
    """
    rows, valid = view.read(group, layer, jnp.where(index < 0, view.length, index), new)
    valid = valid & (index >= 0)
    mask = valid.reshape(*valid.shape, *(1 for _ in rows.shape[2:]))
    return jnp.where(mask, rows.astype(new.dtype), jnp.zeros((), new.dtype)), valid
