"""What all operations share: names of implementations, contract versions, no dependencies."""

import ast
import pathlib
from functools import partial

import jax
import jax.numpy as jnp
import pytest

import pallas_kernels as pk

FOLDER = pathlib.Path(pk.__file__).parent


def calls():
    """Every operation with an `implementation`, on small arguments."""
    f32, zero = jnp.zeros((1, 1, 1, 1), jnp.float32), jnp.zeros((1, 1), jnp.int32)
    yes, stamp = jnp.ones((1, 1), bool), jnp.zeros((1, 2), jnp.uint32)
    part, one = pk.Part(f32, f32, yes[None]), zero[0]
    return {
        "attention": (pk.attention, (f32, [part])),
        "compress": (
            lambda *a, **k: pk.compress(*a, **k, ratio=1, overlap=False),
            (f32[0], f32[0], yes, None),
        ),
        "index_scores": (pk.index_scores, (f32, f32[0], f32[0], yes[None])),
        "index_topk": (pk.index_topk, (f32[0], 1)),
        "digest_pages": (pk.digest_pages, (f32, zero, one, one)),
        "copy_pages": (pk.copy_pages, (f32, stamp, one, one, stamp)),
        "gather_rows": (pk.gather_rows, (f32, stamp, 0, zero, zero, stamp[None], yes)),
        "scatter_rows": (pk.scatter_rows, (f32, stamp, zero, zero, f32, stamp[None], yes)),
    }


@pytest.mark.parametrize("operation", calls())
def test_the_reference_can_be_named_and_is_what_none_gives(operation):
    run, args = calls()[operation]
    static = [n for n, arg in enumerate(args) if isinstance(arg, int)]
    named, default = (
        str(jax.make_jaxpr(partial(run, implementation=name), static_argnums=static)(*args))
        for name in ("xla", None)
    )
    assert named == default


@pytest.mark.parametrize("operation", calls())
def test_an_implementation_that_is_not_there_says_why_and_what_is(operation):
    run, args = calls()[operation]
    for name, why in [
        ("mosaic_gpu", "no GPU kernel"),
        ("triton", "deprecated"),
        ("cuda", "no implementation has this name"),
    ]:
        message = f"`implementation` of {operation} is '{name}': .*{why}.* Available: 'xla'"
        with pytest.raises(ValueError, match=message):
            run(*args, implementation=name)


def test_every_operation_declares_its_contract_version():
    folders = {path.parent.name for path in FOLDER.glob("*/contract.py")}
    assert set(pk.ABI) == folders | {"masks"}
    assert all(type(version) is int and version >= 1 for version in pk.ABI.values())


def test_the_package_imports_only_jax_numpy_and_itself():
    roots = set()
    for path in FOLDER.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                roots |= {name.name.split(".")[0] for name in node.names}
            elif isinstance(node, ast.ImportFrom):
                roots.add(node.module.split(".")[0])
    assert roots <= {"jax", "numpy", "pallas_kernels", "typing", "collections"}
