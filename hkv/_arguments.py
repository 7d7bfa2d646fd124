"""Checks of arguments at the boundary: the backticked name, what was got, what to give."""

from typing import Any

import jax.numpy as jnp
import numpy as np


def check_array(name: str, value, dtype, *shape: int | None) -> None:
    """Refuses what is not an array of this dtype and shape; None stands for any size.

    Raises:
        TypeError: another type, dtype or rank.
        ValueError: another size.
    """
    want = f"{jnp.dtype(dtype)}[{', '.join('any' if n is None else str(n) for n in shape)}]"
    if getattr(value, "dtype", None) != jnp.dtype(dtype) or value.ndim != len(shape):
        got = type(value).__name__
        if hasattr(value, "dtype"):
            got = f"{value.dtype}{list(value.shape)}"
        raise TypeError(f"`{name}` is {got}; give an array {want}")
    if any(n is not None and n != m for n, m in zip(shape, value.shape, strict=True)):
        raise ValueError(f"`{name}` is {value.dtype}{list(value.shape)}; give {want}")


def check_int(name: str, value, low: int, high: int = 2**31) -> None:
    """Refuses what is not an int in `[low, high)`.

    Raises:
        TypeError: another type.
        ValueError: out of range.
    """
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"`{name}` is {value!r}; give an int")
    if not low <= value < high:
        raise ValueError(f"`{name}` is {value}; give {low} to {high - 1}")


def check_callable(name: str, value) -> None:
    """Refuses what cannot be called.

    Raises:
        TypeError: with what it was.
    """
    if not callable(value):
        raise TypeError(f"`{name}` is {value!r}; give a function")


def token_ids(prompt: Any, name: str = "prompt", vocabulary: int | None = None) -> np.ndarray:
    """Token ids as an array, checked; `bytes` are ids of a byte-level model.

    Args:
        prompt: a sequence of token ids.
        name: of the argument, for errors.
        vocabulary: number of token ids; 2**31 by default.

    Raises:
        TypeError: ids that are not integers.
        ValueError: no sequence, or an id out of range.
    """
    try:
        ids = np.frombuffer(prompt, np.uint8) if isinstance(prompt, bytes) else np.asarray(prompt)
    except ValueError:
        raise ValueError(f"`{name}` is ragged; give a sequence of token ids") from None
    if ids.ndim != 1:
        raise ValueError(f"`{name}` has {ids.ndim} axes; give a sequence of token ids")
    if ids.size and ids.dtype.kind not in "iu":
        raise TypeError(f"`{name}` holds {ids.dtype}; give integer token ids")
    top = 2**31 if vocabulary is None else vocabulary
    bad = ids[(ids < 0) | (ids >= top)] if ids.size else ids
    if bad.size:
        raise ValueError(f"`{name}` holds token {bad[0]}; give ids of 0 to {top - 1}")
    return ids


def check_type(name: str, value, kind: type) -> None:
    """Refuses a value of another class.

    Raises:
        TypeError: with the class that was expected.
    """
    if not isinstance(value, kind):
        raise TypeError(f"`{name}` is a {type(value).__name__}; give a {kind.__name__}")
