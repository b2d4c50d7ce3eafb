"""Eight host devices and strict types, before anything imports jax.

`LOX_TEST_PLATFORM=cuda` runs the tests on a GPU. `optional` skips tests that need more than the machine has.
"""

import os

# The CPU too, because `jax.debug.callback` needs it.
os.environ["JAX_PLATFORMS"] = ",".join(dict.fromkeys([os.environ.get("LOX_TEST_PLATFORM", "cpu"), "cpu"]))
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # some tests start other processes on the same GPU
# Hundreds of small programs are compiled here and each runs for microseconds: optimising them is not worth it. Of flags
# given twice the last holds, so that the number of devices can be set from outside.
os.environ["XLA_FLAGS"] = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    " --xla_force_host_platform_device_count=8 " + os.environ.get("XLA_FLAGS", "")
).strip()
if os.environ["JAX_PLATFORMS"] != "cpu":
    # Where the one result of a program is also what a host call is computed from, XLA for GPUs ends the process (JAX
    # 0.11), for `jax.debug.callback` as for the default sink; not without this pass.
    os.environ["XLA_FLAGS"] += " --xla_disable_hlo_passes=multi_output_fusion"
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


def pytest_terminal_summary(terminalreporter):
    """Say it loudly where pages could not be looked at, so that nobody takes skipped tests for passed ones."""
    import browser

    asked = any("test_ui_browser" in report.nodeid for report in terminalreporter.stats.get("skipped", []))
    if asked and (problem := browser.package()):
        terminalreporter.section("NO BROWSER", sep="!", red=True)
        terminalreporter.line(f"The dashboard was not tested in a browser: {problem}.", red=True)
