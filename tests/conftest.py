"""Settings for every test: strict promotion of dtypes and ranks, one cache of compiled programs."""

import os
import tempfile

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import hypothesis
import jax

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
