"""Reads the tensors of a Hugging Face folder, checked by name, shape and dtype before any is read.

Takes one `model.safetensors`, or the shards listed in `model.safetensors.index.json`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors

from hkv.nn._weights import Request, widen

_FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_INTEGERS = {"I64", "I32", "I16", "U8"}
_SHOWN = 5  # names in an error message


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """A JSON object from a folder.

    Raises:
        FileNotFoundError: no folder, or no such file in it.
        ValueError: not a JSON object.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"`folder` is {str(folder)!r}, which is no folder; check the path")
    path = folder / name
    if not path.is_file():
        raise FileNotFoundError(f"`{name}` is missing from {str(folder)!r}; copy it there")
    try:
        value = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"`{name}` is not JSON ({error}); restore the file") from None
    if not isinstance(value, dict):
        raise ValueError(f"`{name}` holds a {type(value).__name__}; it must be a JSON object")
    return value


class Checkpoint:
    """The tensors of a folder under canonical names.

    Args:
        folder: where the safetensors files lie.
        canonical: maps a stored name to the one that layers ask for, or None to ignore it.

    Raises:
        FileNotFoundError: a missing folder, file or shard.
        ValueError: an unreadable file, two tensors of one name, or a shard that disagrees with
            its index.
    """

    def __init__(self, folder: Path, canonical: Callable[[str], str | None]):
        self._where: dict[str, tuple[Path, str]] = {}
        self._files: dict[Path, Any] = {}
        for path, listed in _shards(folder):
            try:
                file = safetensors.safe_open(path, framework="np")
            except (safetensors.SafetensorError, OSError) as error:
                raise ValueError(
                    f"`{path.name}` is not readable ({error}); fetch it again"
                ) from None
            self._files[path] = file
            held = set(file.keys())
            if listed is not None and listed - held:
                raise ValueError(
                    f"`{path.name}` lacks {_some(listed - held)}, which the index places there; "
                    "fetch the shards again"
                )
            for stored in sorted(held):
                name = canonical(stored)
                if name in self._where:
                    raise ValueError(
                        f"`{stored}` and `{self._where[name][1]}` are both {name!r}; keep one"
                    )
                if name is not None:
                    self._where[name] = (path, stored)

    def check(self, requests: Iterable[Request]) -> None:
        """Compares the folder with what the model will ask for.

        Raises:
            ValueError: missing or extra tensors, a wrong shape, a dtype of the wrong kind.
        """
        wanted = {request.name: request for request in requests}
        if missing := wanted.keys() - self._where.keys():
            raise ValueError(
                f"`{min(missing)}` is missing: the checkpoint lacks {_some(missing)}; check that "
                "config.json and weights belong together"
            )
        if extra := self._where.keys() - wanted.keys():
            raise ValueError(
                f"`{min(extra)}` is not part of the model: the checkpoint also holds "
                f"{_some(extra)}; check that config.json and weights belong together"
            )
        for name, request in wanted.items():
            path, stored = self._where[name]
            part = self._files[path].get_slice(stored)
            shape, dtype = tuple(part.get_shape()), part.get_dtype()
            if shape != request.shape:
                raise ValueError(
                    f"`{stored}` has shape {shape}; the config asks for {request.shape}: check "
                    "that config.json and weights belong together"
                )
            allowed = _INTEGERS if request.kind == "ids" else set(_FLOATS)
            if dtype not in allowed:
                raise ValueError(
                    f"`{stored}` has dtype {dtype}; convert it to one of {sorted(allowed)}"
                )

    def source(self, dtype: str) -> Callable[[Request], jax.Array]:
        """A source for `hkv.nn.Weights` that reads and casts, matrices to `dtype`."""

        def read(request: Request) -> jax.Array:
            path, stored = self._where[request.name]
            value = self._files[path].get_tensor(stored)
            if request.kind == "ids":
                if value.size and not 0 <= value.min() <= value.max() < request.high:
                    raise ValueError(
                        f"`{stored}` holds {value.min()} to {value.max()}; values must lie in "
                        f"[0, {request.high})"
                    )
                return jnp.asarray(value.astype(np.int32))
            to = jnp.dtype(dtype) if request.kind == "matrix" else widen(dtype)
            return jnp.asarray(value.astype(to))

        return read


def _shards(folder: Path) -> list[tuple[Path, set[str] | None]]:
    """The files to read, each with the names the index expects in it."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if index.is_file():
        listed: dict[str, set[str]] = {}
        names = read_json(folder, index.name).get("weight_map")
        if not isinstance(names, dict) or not names:
            raise ValueError(f"`weight_map` of {index.name} is {names!r}; restore the file")
        for name, file in names.items():
            if Path(file).name != file:
                raise ValueError(f"`weight_map` names {file!r}; shards must lie in the folder")
            listed.setdefault(file, set()).add(name)
        for file in listed:
            if not (folder / file).is_file():
                raise FileNotFoundError(
                    f"`{file}` is missing from {str(folder)!r}, but the index lists it; copy it"
                )
        return [(folder / file, held) for file, held in sorted(listed.items())]
    if single.is_file():
        return [(single, None)]
    raise FileNotFoundError(
        f"`{single.name}` and `{index.name}` are both missing from {str(folder)!r}; copy the "
        "weights there"
    )


def _some(names: Iterable[str]) -> str:
    names = sorted(names)
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
