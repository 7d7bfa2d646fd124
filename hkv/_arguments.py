"""Checks of arguments at the boundary: the backticked name, what was got, what to give."""

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


def check_type(name: str, value, kind: type) -> None:
    """Refuses a value of another class.

    Raises:
        TypeError: with the class that was expected.
    """
    if not isinstance(value, kind):
        raise TypeError(f"`{name}` is a {type(value).__name__}; give a {kind.__name__}")
