"""Eight host devices and strict types, before anything imports jax."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
# Hundreds of small programs are compiled here and each runs for microseconds: optimising them is not worth it.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    " --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
).strip()
os.environ.pop("LOX_SINK", None)
# An int that silently becomes a float somewhere in lox would change users' values.
os.environ.setdefault("JAX_NUMPY_DTYPE_PROMOTION", "strict")

import jax
import pytest

import lox

pytest.register_assert_rewrite("exact")


@pytest.fixture(autouse=True)
def default_sink():
    lox.config.sink = "console"
    yield
    jax.effects_barrier()
    lox.config.sink = "console"
