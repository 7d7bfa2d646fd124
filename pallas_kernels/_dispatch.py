"""Choosing an implementation of an operation by name.

Every operation has a reference in plain XLA, so `None` always finds one. Holds no kernels.
"""

from collections.abc import Callable, Mapping
from typing import Any

# Names a caller may reasonably ask for although no operation has such a kernel in this build.
_NOT_BUILT = {
    "mosaic_gpu": "this build has no GPU kernel for this operation",
    "triton": "Pallas on Triton is deprecated in JAX and is not targeted",
}


def choose(
    operation: str, implementation: str | None, built: Mapping[str, Callable[..., Any]]
) -> Callable[..., Any]:
    """Returns the implementation of `operation` that `implementation` names.

    Args:
      operation: public name of the operation, for the message.
      implementation: a key of `built`, or None for the first one.
      built: implementations of this build, the preferred one first.

    Raises:
      ValueError: the name is not in `built`; the message says which are, and why this is not.
    """
    if implementation is None:
        return next(iter(built.values()))
    if implementation in built:
        return built[implementation]
    why = _NOT_BUILT.get(implementation, "no implementation has this name")
    names = ", ".join(repr(name) for name in built)
    raise ValueError(
        f"`implementation` of {operation} is {implementation!r}: {why}. "
        f"Available: {names}, or None for the preferred one."
    )
