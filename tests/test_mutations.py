"""A few of the mutations; `python tests/mutations.py` runs all of them."""

import pathlib
import subprocess
import sys

import mutations
import pytest

from hkv import _verify

FEW = (
    "BLOCK_CHECKS[4] PARENT off",
    "ABI_CHECKS[1] EPOCH off",
    "groups: minimum of maxima",
    "N tokens reused of N",
    "window one row short",
    "lease: version off",
    "lease: newest off",
    "lease: serial off",
    "lease: only word 1 of a stamp",
)


def test_a_mutated_check_is_noticed():
    script = pathlib.Path(mutations.__file__)
    run = subprocess.run(
        [sys.executable, str(script), *FEW], text=True, capture_output=True, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert f"{len(FEW)} of {len(FEW)} caught" in run.stdout


def test_every_single_check_has_a_mutation_and_every_mutation_a_case():
    every = mutations.mutations()
    names = [m.name for m in every]
    assert len(set(names)) == len(names) and all(m.cases for m in every)
    checks = (_verify.BLOCK_CHECKS, _verify.ABI_CHECKS, _verify.BYTE_CHECKS)
    assert sum(name.endswith(" off") and "CHECKS" in name for name in names) == sum(
        len(c) for c in checks
    )
    assert all(any(name == few for name in names) for few in FEW)


@pytest.mark.parametrize("case", mutations.LEASE_CASES, ids=mutations._name)
def test_a_lease_ends_when_what_it_read_changes(case):
    case()
