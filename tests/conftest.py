"""Eight host devices and strict types, before anything imports jax; and the choice of tests.

`LOX_TEST_PLATFORM=cuda` runs the tests on a GPU. `optional` skips tests that need more than the machine has.
`--nightly` runs all tests. Without it, tests marked `nightly` are left out, and n cases of each `sample(n)` run.
"""

import itertools
import os
import random
from pathlib import Path

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
# Workers share compiled programs, and so does the next run. Tests about compiling count the requests of JAX, which come
# before it looks into this cache.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parent.parent / ".nox" / "xla-cache"))
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
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


def pytest_addoption(parser):
    parser.addoption("--nightly", action="store_true", help="run all tests, and every case of every table")


def pytest_collection_modifyitems(config, items):
    if config.option.nightly or any("[" in argument for argument in config.args):  # a case is asked for by name
        return
    named = tuple(argument for argument in config.args if "::" in argument)
    kept = [item for item in items if item.nodeid.startswith(named) or not item.get_closest_marker("nightly")]
    tables = {}
    for item in kept:
        if marker := item.get_closest_marker("sample"):
            tables.setdefault((item.nodeid.partition("[")[0], marker.args[0]), []).append(item)
    left_out = {item for (_, number), cases in tables.items() for item in set(cases) - set(sample(cases, number))}
    kept = [item for item in kept if item not in left_out]
    config.hook.pytest_deselected(items=list(set(items) - set(kept)))
    items[:] = kept


def sample(cases, number):
    """Choose cases of a table: each next one adds the most values, and pairs of values, that no other has.

    All workers choose the same ones. Each JAX release of the matrix gets others.
    """
    order = random.Random(f"{cases[0].originalname} {jax.__version__}").sample(cases, len(cases))

    def combinations(case):
        values = sorted(case.callspec.indices.items())
        return {*values, *itertools.combinations(values, 2)}

    chosen, seen = [], set()
    while order and len(chosen) < number:
        best = max(order, key=lambda case: len(combinations(case) - seen))
        order.remove(best)
        chosen.append(best)
        seen |= combinations(best)
    return chosen


def pytest_terminal_summary(terminalreporter):
    """Say it loudly where pages could not be looked at, so that nobody takes skipped tests for passed ones."""
    import browser

    asked = any("test_ui_browser" in report.nodeid for report in terminalreporter.stats.get("skipped", []))
    if asked and (problem := browser.package()):
        terminalreporter.section("NO BROWSER", sep="!", red=True)
        terminalreporter.line(f"The dashboard was not tested in a browser: {problem}.", red=True)
