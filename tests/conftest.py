"""Settings for every test: strict promotion of dtypes and ranks, one cache of compiled programs."""

import os
import tempfile
from pathlib import Path

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import hypothesis
import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
# Test modules and worker processes meet the same programs; compiling them once is enough.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    jax.config.update(
        "jax_compilation_cache_dir", os.path.join(tempfile.gettempdir(), f"hkv-jax-{os.getuid()}")
    )
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
hypothesis.settings.register_profile("hkv", deadline=None, print_blob=True)
hypothesis.settings.load_profile("hkv")

# Each compiled program on a CPU takes several memory maps, of which Linux allows a process 65,530
# by default; past them XLA crashes.
MAPS = Path("/proc/self/maps")
MOST_MAPS = 10_000


@pytest.fixture(scope="module", autouse=True)
def programs_are_let_go():
    """Forgets compiled programs after a module once they have become many."""
    yield
    if MAPS.exists() and MAPS.read_bytes().count(b"\n") > MOST_MAPS:
        jax.clear_caches()
