"""`transition`: moves forms of segments through their lifecycle, and says what was refused."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from hkv._arguments import check_array
from hkv._cache import Cache, check_cache
from hkv._evict import _drop_pages, set_life
from hkv._layout import FORMS, Form
from hkv._lifecycle import Life, Refusal, Transition, legal, spoils
from hkv._slots import first_of, take


def transition(
    cache: Cache, rows: jax.Array, forms: jax.Array, life: Life | jax.Array
) -> tuple[Cache, Transition]:
    """Moves forms of segments to a state where that is a listed transition.

    Donates `cache`. What is refused stays bit for bit as it was. Pages go back where a form
    becomes EMPTY or ON_DISK, and a segment that a lease holds refuses that; STALE it accepts, and
    then its leases fail their next check.

    Args:
        cache: the cache.
        rows: `i32[K]` segments; N is skipped, and so are repeats.
        forms: `bool[F]`.
        life: the new state, or one as `u8[]`.

    Returns:
        The cache and the report: per segment and form whether it moved, both states, and why not.
    """
    check_cache(cache)
    check_array("rows", rows, jnp.int32, None)
    check_array("forms", forms, bool, FORMS)
    word = np.uint8(life) if isinstance(life, Life) else life
    check_array("life", word, jnp.uint8)
    return _transition(cache, rows, forms, word)


@functools.partial(jax.jit, donate_argnames=("cache",))
def _transition(cache: Cache, rows: jax.Array, forms: jax.Array, life: jax.Array):
    lay, N = cache.layout, cache.layout.segments
    asked = first_of(rows, N)[:, None] & forms[None]
    leased = (take(cache.table.pins, rows, 0) > 0)[:, None]
    stored = leased | (take(cache.table.length, rows, 0) > 0)[:, None]
    known = jnp.asarray([lay.has(f) for f in Form])[None]
    old = take(cache.table.life, rows, 0)
    new = jnp.where(asked, life, old)
    held = leased & spoils(old, new) & (new != Life.STALE)
    why = jnp.where(held, jnp.uint8(Refusal.LEASED), jnp.uint8(Refusal.NONE))
    why = jnp.where(legal(old, new), why, jnp.uint8(Refusal.ILLEGAL))
    why = jnp.where(stored & known, why, jnp.uint8(Refusal.ABSENT))
    why = jnp.where(asked, why, jnp.uint8(Refusal.NONE))
    go = asked & (why == Refusal.NONE)
    cache, moved = set_life(cache, rows, go, life, jnp.any(go, -1))
    cache = _drop_pages(cache, rows, moved & ((new == Life.EMPTY) | (new == Life.ON_DISK)))
    return cache, Transition(rows=rows, old=old, new=new, moved=moved, refusal=why)
