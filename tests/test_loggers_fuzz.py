"""Random vmapped programs with a logger: each run gets the events of the program in plain Python.

`LOX_FUZZ_N` and `LOX_FUZZ_SEED` choose other programs, as for `test_fuzz.py`.
"""

import os
from typing import Any

import jax
import jax.numpy as jnp
import programs
import pytest
from test_fuzz import MAX_EVENTS, SEED, assert_logs, program_for, thinned

import lox

pytestmark = pytest.mark.slow

N = int(os.environ.get("LOX_FUZZ_N", 8))
LANES = 3


class Keep(lox.Logger):
    """Keeps the logs of each run as they come."""

    def __init__(self) -> None:
        self.parts: dict[str, list[lox.logdict]] = {}

    def open(self, run: Any) -> None:
        self.parts[run.name] = []

    def write(self, run: Any, logs: lox.logdict) -> None:
        self.parts[run.name].append(logs)

    def of(self, run: int) -> lox.logdict:
        self.flush()
        return sum(self.parts[str(run)], lox.logdict())


@pytest.mark.sample(2)
@pytest.mark.parametrize("seed", range(SEED + 10_000, SEED + 10_000 + N))
def test_program(seed: int) -> None:
    program, x0 = program_for(seed)
    kinds = programs.kinds_in(program)
    if "shard_map" in kinds:
        pytest.skip("JAX does not map over a shard_map with callbacks inside")
    if "composite" in kinds:
        pytest.skip("JAX does not map over a composite")
    fun = programs.JaxRunner(program)
    fun.__name__ = "program"  # type: ignore[attr-defined]
    xs = x0 + jnp.arange(LANES, dtype=jnp.float32)
    plain = [programs.run_plain(program, x0 + n) for n in range(LANES)]
    capacity = MAX_EVENTS if "while" in kinds else None
    every, size = 2 + seed % 3, (1, 7, 100)[seed % 3]
    ways: dict[str, Any] = {
        "spool": lambda logger: lambda state, x: logger.spool(fun, state, capacity=capacity)(x),
        "tap": lambda logger: lambda state, x: logger.tap(fun, state)(x),
    }
    if "vmap" not in kinds:
        ways[f"tap(interval={every})"] = lambda logger: lambda state, x: logger.tap(fun, state, interval=every)(x)
        ways[f"tap(buffer={size})"] = lambda logger: lambda state, x: logger.tap(fun, state, buffer=size)(x)
    for what, act in ways.items():
        with Keep() as logger:
            states = jax.vmap(logger.init)(jax.vmap(jax.random.key)(jnp.arange(LANES)))
            outs = jax.jit(jax.vmap(act(logger)))(states, xs)
            for n, (result, events) in enumerate(plain):
                assert float(outs[n]) == result, what
                wanted = thinned(events, every) if "interval" in what else events
                assert_logs(logger.of(n), wanted, f"vmap({what}), lane {n}")
