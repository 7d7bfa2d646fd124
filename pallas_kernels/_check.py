"""Checks of shapes and dtypes at trace time.

They look at static facts only, so they cost nothing in the compiled program. A failure is the
caller's and raises `ValueError` with the argument's name in backticks.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike


class Shapes:
    """Binds the letters of a signature to sizes and reports the argument that disagrees."""

    def __init__(self, operation: str):
        self._operation = operation
        self._sizes: dict[str, int] = {}
        self._row: tuple[int, ...] | None = None

    def __getitem__(self, letter: str) -> int:
        return self._sizes[letter]

    def bind(self, name: str, array: jax.Array, letters: str, dtype: DTypeLike | None = None):
        """Checks `array` against `letters`, e.g. "Q T H D"; a last "*row" stands for any rest."""
        wanted = letters.split()
        shape = tuple(np.shape(array))
        rest = bool(wanted) and wanted[-1] == "*row"
        head = wanted[:-1] if rest else wanted
        fits = len(shape) >= len(head) if rest else len(shape) == len(head)
        if fits:
            for letter, size in zip(head, shape, strict=False):
                known = int(letter) if letter.isdigit() else self._sizes.setdefault(letter, size)
                fits = fits and known == size
        if fits and rest:
            if self._row is None:
                self._row = shape[len(head) :]
            fits = self._row == shape[len(head) :]
        if not fits:
            bound = ", ".join(f"{key}={size}" for key, size in self._sizes.items() if key in head)
            if rest and self._row is not None:
                bound += f", row={self._row}"
            raise ValueError(
                f"`{name}` of {self._operation} has shape {shape}, "
                f"expected [{', '.join(wanted)}] with {bound or 'any sizes'}."
            )
        if dtype is not None and jnp.result_type(array) != jnp.dtype(dtype):
            raise ValueError(
                f"`{name}` of {self._operation} has dtype {jnp.result_type(array)}, "
                f"expected {jnp.dtype(dtype).name}: convert it before the call."
            )


def positive(operation: str, name: str, value: int) -> int:
    """Returns `value` as an int if it is an integer in `[1, 2**31)`."""
    try:
        number = value.__index__()
    except (AttributeError, TypeError):
        number = 0
    if not 1 <= number < 2**31 or isinstance(value, bool):
        raise ValueError(
            f"`{name}` of {operation} is {value!r}, expected an integer in [1, 2**31)."
        )
    return number


def accumulator(*arrays: jax.Array | None) -> np.dtype:
    """Dtype to accumulate in: float64 if an input has it, else float32."""
    dtypes = [jnp.result_type(array) for array in arrays if array is not None]
    return np.dtype(np.float64 if np.dtype(np.float64) in dtypes else np.float32)
