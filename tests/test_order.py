"""Host calls come in program order, wherever they are in the program."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from logger_cases import Recorder
from optional import devices

import lox

PRNG_KEY = jax.random.key(0)


def values(logger: Any, run: str = "0") -> list[float]:
    return [value for _, value in logger.events[run]["v"]]


def four(log: Any) -> Any:
    """Log four events in a loop."""

    def step(x: Any, _: Any) -> Any:
        log({"v": x})
        return x + 1, None

    return jax.lax.scan(step, 0.0, None, 4)[0]


def forever(log: Any) -> Any:
    """Do the same in a loop of unknown length."""

    def step(x: Any) -> Any:
        log({"v": x})
        return x + 1

    return jax.lax.while_loop(lambda x: x < 4, step, 0.0)


def branches(log: Any) -> Any:
    """Do the same in branches, one of which returns nothing that depends on it."""
    for n in range(4):
        jax.lax.cond(jnp.asarray(n) >= 0, lambda n=n: (log({"v": float(n)}), 0)[1], lambda: 0)


def calls(log: Any) -> Any:
    """Do the same in functions that return nothing."""
    helper = jax.jit(lambda x: (log({"v": x}), None)[1])
    for n in range(4):
        helper(float(n))


@pytest.mark.slow
@pytest.mark.parametrize("around", [lambda f: f, jax.jit, lambda f: jax.checkpoint(f), lambda f: _grad(f)])
@pytest.mark.parametrize("part", [four, forever, branches, calls])
def test_log(part: Any, around: Any) -> None:
    if part is forever and around.__code__.co_names == ("_grad",):
        pytest.skip("JAX has no reverse mode for while loops")
    with Recorder() as logger:

        @jax.jit
        def program(prng_key: Any) -> Any:
            state = logger.init(prng_key)
            log = lambda logs: logger.log(state, logs)  # noqa: E731
            log({"v": -1.0})
            around(lambda: (part(log), 0.0)[1])()
            log({"v": 100.0})
            around(lambda: (part(log), 0.0)[1])()
            log({"v": 101.0})

        program(PRNG_KEY)
    assert values(logger) == [-1, 0, 1, 2, 3, 100, 0, 1, 2, 3, 101]


def _grad(f: Any) -> Any:
    return lambda: jax.grad(lambda x: x * f())(2.0)


@pytest.mark.sample(9)
@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"buffer": 3}, {"buffer": 100}, {"interval": 1}])
@pytest.mark.parametrize("part", [four, forever, branches, calls])
def test_tap_and_spool(part: Any, options: Any) -> None:
    def logs_itself() -> None:
        part(lox.log)

    with Recorder() as logger:

        @jax.jit
        def program(prng_key: Any) -> None:
            state = logger.init(prng_key)
            logger.log(state, {"v": -1.0})
            logger.tap(logs_itself, state, **options)()
            logger.log(state, {"v": 100.0})
            logger.spool(logs_itself, state, capacity=4)()
            logger.log(state, {"v": 101.0})
            logger.tap(logs_itself, state, **options)()

        program(PRNG_KEY)
    assert values(logger) == [-1, 0, 1, 2, 3, 100, 0, 1, 2, 3, 101, 0, 1, 2, 3]


def test_two_taps() -> None:
    got: list[float] = []

    @jax.jit
    def program() -> None:
        for n in range(3):
            lox.tap(lambda n=n: four(lambda logs: lox.log({"v": 10.0 * n + logs["v"]})), lambda e: got.append(e["v"]))()

    program()
    jax.effects_barrier()
    assert [float(x) for x in got] == [10 * n + i for n in range(3) for i in range(4)]


def test_lanes_that_diverge() -> None:
    with Recorder() as logger:

        @jax.jit
        @jax.vmap
        def program(prng_key: Any, n: Any) -> None:
            state = logger.init(prng_key)
            logger.log(state, {"v": -1})
            jax.lax.while_loop(lambda x: x < n, lambda x: (logger.log(state, {"v": x}), x + 1)[1], 0)
            jax.lax.cond(n > 2, lambda: logger.log(state, {"v": 50}), lambda: None)
            logger.log(state, {"v": 100})

        program(jax.vmap(jax.random.key)(jnp.arange(3)), jnp.array([1, 4, 0]))
    assert values(logger, "0") == [-1, 0, 100]
    assert values(logger, "1") == [-1, 0, 1, 2, 3, 50, 100]
    assert values(logger, "2") == [-1, 100]


def test_one_program_after_the_other() -> None:
    with Recorder() as logger:
        state = logger.init(PRNG_KEY)
        programs = [jax.jit(lambda x, n=n: (logger.log(state, {"v": x + n}), None)[1]) for n in range(3)]
        for turn in range(20):
            for program in programs:
                program(10 * turn)
    assert values(logger) == [10 * turn + n for turn in range(20) for n in range(3)]


def test_on_several_devices() -> None:
    mesh = Mesh(devices(2), "d")
    with Recorder() as logger:

        @jax.jit
        def program(prng_key: Any, x: Any) -> Any:
            state = logger.init(prng_key)
            logger.log(state, {"v": x.sum()})
            four(lambda logs: logger.log(state, logs))
            x = logger.tap(lambda x: (four(lox.log), x)[1], state)(x)
            logger.log(state, {"v": 100.0})
            return x

        x = jnp.arange(4.0)
        sharded = jax.device_put(x, NamedSharding(mesh, P("d")))
        for seed, given in enumerate([x, sharded, x, sharded]):
            np.testing.assert_array_equal(program(jax.random.key(seed), given), x)
    for seed in range(4):
        assert values(logger, str(seed)) == [6, 0, 1, 2, 3, 0, 1, 2, 3, 100]


def test_inside_shard_map_nothing_is_lost() -> None:
    mesh = Mesh(devices(2), "d")
    with Recorder() as logger:
        state = logger.init(PRNG_KEY)

        @jax.jit
        @functools.partial(jax.shard_map, mesh=mesh, in_specs=P("d"), out_specs=P("d"))
        def program(x: Any) -> Any:
            logger.log(state, {"v": x[0]})
            return jax.lax.scan(lambda x, _: (logger.log(state, {"v": x[0]}), (x + 1, None))[1], x, None, 2)[0]

        program(jnp.array([0.0, 10.0]))
    assert sorted(values(logger)) == [0, 0, 1, 10, 10, 11]


def test_a_program_that_fails_does_not_stop_the_next_one() -> None:
    def fail(_: Any) -> None:
        raise ValueError("boom")

    with Recorder() as logger:
        state = logger.init(PRNG_KEY)
        log = lambda x: (logger.log(state, {"v": x}), x)[1]  # noqa: E731

        @jax.jit
        def failing(x: Any) -> Any:
            x = log(x)
            jax.debug.callback(fail, x)
            return log(x)

        good = jax.jit(log)
        for turn in range(3):
            with pytest.raises(Exception, match="boom"):
                jax.block_until_ready(failing(-1.0))
                jax.effects_barrier()
            assert float(good(float(turn))) == turn
    assert [x for x in values(logger) if x >= 0] == [0, 1, 2]


def test_the_end_of_a_run_comes_last() -> None:
    """For instance `lox.wandb.finish` after a loop of `lox.wandb.log`."""
    from lox.loggers._module_api import SingleRuns, SingleRunsPipeline

    class Runs(Recorder):
        def _make_pipeline(self) -> Any:
            return SingleRunsPipeline(self, "runs")

    runs = SingleRuns(Runs)
    logger = runs.logger()

    @jax.jit
    @jax.vmap
    def program(prng_key: Any) -> None:
        run = runs.init(prng_key, {}, None)
        four(lambda logs: logger.log(run, logs))
        runs.finish(run)

    program(jax.vmap(jax.random.key)(jnp.arange(2)))
    logger.flush()
    assert values(logger, "0") == values(logger, "1") == [0, 1, 2, 3]
    assert sorted(logger.finished) == ["0", "1"]
    logger.close()
