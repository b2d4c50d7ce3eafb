"""Logs in plain Python, inside of transformed functions: every event as if it had been logged by one program.

`LOX_FUZZ_N` and `LOX_FUZZ_SEED` choose other random programs, as for `test_fuzz.py`.
"""

import contextlib
import functools
import os
import random
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from test_cache import count_compilations

import lox
from lox._engine import _interpret

N = int(os.environ.get("LOX_FUZZ_N", 8))
SEED = int(os.environ.get("LOX_FUZZ_SEED", 0))


class Received(lox.Logger):
    """Keeps what it gets."""

    def __init__(self, received: list[Any]):
        super().__init__()
        self.received = received

    def write(self, run: Any, logs: Any) -> None:
        del run
        self.received.append(logs)


MANY = 80  # more than are taken one by one before a program takes them

VALUES: dict[str, Any] = {
    "int": lambda i: i - 2,
    "float": lambda i: i / 4,
    "bool": lambda i: i % 3 == 0,
    "complex": lambda i: complex(i, 1),
    "float64 of NumPy": lambda i: np.float64(i / 4),
    "int8 of NumPy": lambda i: np.int8(i % 100),
    "array of NumPy": lambda i: np.arange(3) + i,
    "int64 of NumPy": lambda i: np.int64(i),
    "bfloat16": lambda i: jnp.asarray(i, jnp.bfloat16),
    "uint8": lambda i: jnp.uint8(i % 100),
    "weak": lambda i: jnp.asarray(1.0) * i,
    "array": lambda i: jnp.arange(3.0) + i,
    "tree": lambda i: {"a": i, "b": (jnp.float32(i), np.full(2, i, np.float32))},
}


def expected(kind: str, numbers: Any) -> Any:
    """The events stacked, each as what JAX makes of it."""
    events = [jax.tree.map(lambda x: np.asarray(jnp.asarray(x)), VALUES[kind](i)) for i in numbers]
    return jax.tree.map(lambda *xs: np.stack(xs), *events)


def same(got: Any, want: Any, rtol: float = 0) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert not getattr(jax.typeof(a), "weak_type", False)
        np.testing.assert_allclose(np.asarray(a, np.complex128), np.asarray(b, np.complex128), rtol=rtol)


def looped(kind: str, number: int) -> Any:
    def loop() -> None:
        for i in range(number):
            lox.log({"v": VALUES[kind](i)}, step=i, epoch=i / 2)

    return loop


@pytest.mark.slow
@pytest.mark.sample(10)
@pytest.mark.parametrize("kind", VALUES)
@pytest.mark.parametrize("options", [{}, {"keep_logs": True}, {"interval": 3}, {"prefix": "p/"}], ids=str)
def test_stacked(kind: str, options: Any) -> None:
    numbers = range(0, 20, options.get("interval", 1))
    _, logs = lox.spool(looped(kind, 20), **options)()
    key = options.get("prefix", "") + "v"
    assert list(logs) == [key]
    same(logs[key], expected(kind, numbers))
    same(logs.step[key], np.asarray(numbers, np.int32))
    same(logs.steps["epoch"][key], np.asarray(numbers, np.float32) / 2)


@pytest.mark.slow
@pytest.mark.sample(3)
@pytest.mark.parametrize("kind", [k for k in VALUES if k not in ("bool", "complex")])
@pytest.mark.parametrize("reduce", ["mean", "max", "last"])
def test_reduced(kind: str, reduce: str) -> None:
    """The first events are taken one by one, later ones by a program."""
    events = expected(kind, range(MANY))
    means = {
        "mean": lambda x: np.asarray(x, np.float64).mean(0),
        "max": lambda x: np.asarray(x, np.float64).max(0),
        "last": lambda x: x[-1],
    }
    _, logs = lox.spool(looped(kind, MANY), reduce=reduce)()
    for got, want in zip(jax.tree.leaves(logs["v"]), jax.tree.leaves(events), strict=True):
        tolerance = 1e-2 if want.dtype == jnp.bfloat16 else 1e-6
        np.testing.assert_allclose(
            np.asarray(got, np.float64), np.asarray(means[reduce](want), np.float64), rtol=tolerance
        )
    _, few = lox.spool(looped(kind, 3), reduce=reduce)()
    assert jax.tree.map(lambda x: x.dtype, dict(logs)) == jax.tree.map(lambda x: x.dtype, dict(few))
    assert logs.step["v"] == MANY - 1
    received: list[Any] = []
    lox.tap(looped(kind, MANY), received.append, reduce=reduce)()
    (at_once,) = received
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), at_once["v"], logs["v"])


@pytest.mark.parametrize("kind", VALUES)
@pytest.mark.parametrize("options", [{}, {"buffer": 7}, {"interval": 3}], ids=str)
def test_streamed(kind: str, options: Any) -> None:
    received: list[Any] = []
    lox.tap(looped(kind, 20), received.append, **options)()
    numbers = range(0, 20, options.get("interval", 1))
    if "buffer" in options:
        assert [logs.step["v"].size for logs in received] == [7, 7, 6]
        values = jax.tree.map(lambda *xs: np.concatenate(xs), *[logs["v"] for logs in received])
        steps = np.concatenate([logs.step["v"] for logs in received])
    else:
        values = jax.tree.map(lambda *xs: np.stack(xs), *[logs["v"] for logs in received])
        steps = np.stack([logs.step["v"] for logs in received])
    want = expected(kind, numbers)
    assert jax.tree.structure(values) == jax.tree.structure(want)
    jax.tree.map(np.testing.assert_array_equal, values, want)
    assert jax.tree.map(lambda x: x.dtype, values) == jax.tree.map(lambda x: x.dtype, want)
    np.testing.assert_array_equal(steps, np.asarray(numbers))


@pytest.mark.slow
def test_two_loggers_of_one_key_and_others_in_between() -> None:
    """Lines of one key, with other steps, shapes of their own and conditions, beside programs that log it too."""

    @jax.jit
    def program(x: Any) -> Any:
        return lax.fori_loop(0, 2, lambda i, x: (lox.log({"a": x, "e": i}, step=i), x + 1)[1], x)

    def loop(x: Any) -> Any:
        for i in range(5):
            lox.log({"a": x, "b": np.full(i % 2 + 1, i).sum()}, step=i)
            with lox.scope("inner"):
                lox.log({"a": i, "c": x}, tags="some")
            x = program(x)
            lox.log({"a": 0.5, "d": x}, step=i, where=i % 2 == 0)
            lox.log({"m": x}, reduce="mean", weight=i)
        return x

    for options in ({}, {"reduce": {"a": "sum"}}, {"argnames": ["a", "inner/*"]}, {"tags": "some"}, {"interval": 2}):
        out, logs = lox.spool(loop, **options)(jnp.float32(0))
        want, logs_of_one = jax.jit(lox.spool(loop, **options))(jnp.float32(0))
        assert float(out) == float(want)
        logs_of_one = logs_of_one.compact()
        assert list(logs) == list(logs_of_one)
        assert jax.tree.structure(logs) == jax.tree.structure(logs_of_one)
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), logs, logs_of_one)
        assert jax.tree.map(lambda x: x.dtype, logs) == jax.tree.map(lambda x: x.dtype, logs_of_one)


def test_a_loop_of_unknown_length_may_log_the_key_too() -> None:
    @jax.jit
    def program(x: Any) -> Any:
        body = lambda x: (lox.log({"a": x}, step=x.astype(int)), x + 1)[1]  # noqa: E731
        return lax.while_loop(lambda x: x < 4, body, x)

    def loop(x: Any) -> Any:
        for i in range(3):
            lox.log({"a": x}, step=i)
        x = program(x)
        for i in range(3, 6):
            lox.log({"a": x}, step=i)
        return x

    _, logs = lox.spool(loop, capacity=16)(jnp.float32(1))
    assert logs["a"].tolist() == [1, 1, 1, 1, 2, 3, 4, 4, 4]
    assert logs.step["a"].tolist() == [0, 1, 2, 1, 2, 3, 3, 4, 5]


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"reduce": "mean"}, {"reduce": "last"}], ids=str)
def test_what_is_donated_or_changed_after_it_was_logged(options: Any) -> None:
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    step(jnp.zeros(3))

    def loop(x: Any) -> Any:
        host = np.zeros(3, np.float32)
        for i in range(MANY):
            lox.log({"x": x, "host": host}, step=i)
            old, x = x, step(x)
            assert old.is_deleted()
            host += 1
        return x

    out, logs = lox.spool(loop, **options)(jnp.zeros(3))
    assert out.tolist() == [MANY] * 3
    want = {None: np.arange(MANY), "mean": (MANY - 1) / 2, "last": MANY - 1}[options.get("reduce")]
    for key in ("x", "host"):
        np.testing.assert_allclose(logs[key], np.broadcast_to(np.expand_dims(want, -1), logs[key].shape), rtol=1e-6)


def test_logs_that_are_removed_cost_no_computation_and_no_transfer() -> None:
    def loop(x: Any) -> Any:
        for i in range(5):
            lox.log({"a": i, "b": 0.5, "c": np.ones(3), "x": x}, step=i)
        return x

    x = jnp.float32(1)
    with count_compilations() as compiled, jax.transfer_guard("disallow_explicit"):
        for silent in (lox.nolog(loop), lox.keep(loop, [])):
            assert silent(x) is x
    assert compiled == []


@pytest.mark.sample(3)
@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"reduce": "mean"}, {"reduce": {"a": "last"}}, {"interval": 2}], ids=str)
def test_transfers_of_ours_are_none_of_the_users(options: Any) -> None:
    def loop(x: Any) -> Any:
        for i in range(MANY):
            lox.log({"a": i, "b": np.ones(3), "x": x}, step=i)
        return x

    x, received = jnp.float32(1), []
    with jax.transfer_guard("disallow"):
        _, logs = lox.spool(loop, **options)(x)
        lox.tap(loop, received.append, **options)(x)
        lox.watch(lox.nolog(loop))(x)
    assert logs["b"].shape[-1] == 3
    assert received


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"reduce": "mean"}], ids=str)
def test_a_second_call_compiles_nothing(options: Any) -> None:
    def loop(x: Any) -> Any:
        for i in range(MANY):
            lox.log({"a": i, "x": x}, step=i)
            lox.log({"y": x * 2})
        return x

    def logs_of() -> list[Any]:
        received: list[Any] = []
        logger = Received(received)
        lox.tap(loop, received.append, **options)(jnp.float32(1))
        logger.tap(loop, logger.init(jax.random.key(0)), **options)(jnp.float32(1))
        logger.flush()
        return [lox.spool(loop, **options)(jnp.float32(1))[1], *received]

    first = logs_of()
    with count_compilations() as compiled:
        second = logs_of()
    assert compiled == []
    assert len(first) == len(second) == 1 + 2 * (2 * MANY if not options else 3)
    for a, b in zip(first, second, strict=True):
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), dict(a), dict(b))


def test_messages_are_the_same_as_outside() -> None:
    def loop(value: Any, **steps: Any) -> None:
        lox.log({"v": value}, **steps)

    for transform in (lox.spool, lox.nolog, lambda f: lox.tap(f, print)):
        for value, steps, message in (
            (2**40, {}, "does not fit into int32"),
            (np.int64(2**40), {}, "does not fit into int32"),
            ("text", {}, "not an array but str"),
            (1, {"step": "text"}, "not an array but str"),
            (1, {"step": np.ones(3)}, "it must be a single number"),
            (1, {"step": 2**40}, "does not fit into int32"),
        ):
            with pytest.raises(lox.LogTypeError, match=message):
                transform(loop)(value, **steps)


def test_events_that_do_not_fit_together_are_an_error_at_once() -> None:
    reached: list[int] = []

    def loop(options: Any) -> None:
        for i in range(10):
            lox.log({"v": np.ones(3 if i < 5 else 4)})
            reached.append(i)

    with pytest.raises(lox.MismatchError):
        lox.spool(loop)({})
    assert reached == [*range(5)]


@pytest.mark.slow
def test_several_devices() -> None:
    devices = jax.devices()
    if len(devices) < 2:
        pytest.skip("one device")
    x, y = (jax.device_put(jnp.arange(3.0), device) for device in devices[:2])
    sharding = jax.sharding.NamedSharding(jax.make_mesh((2,), ("d",), devices=devices[:2]), jax.P("d"))
    z = jax.device_put(jnp.arange(4.0), sharding)

    def together() -> None:
        for i in range(MANY):
            lox.log({"x": x, "y": y, "z": z}, step=i)

    def apart() -> None:
        for i in range(MANY):
            for key, value in dict(x=x, y=y, z=z).items():
                lox.log({key: value}, step=i)

    for loop, options in ((together, {}), (apart, {}), (apart, {"reduce": "mean"})):
        _, logs = lox.spool(loop, **options)()
        for key, value in dict(x=x, y=y, z=z).items():
            np.testing.assert_allclose(logs[key], np.broadcast_to(value, logs[key].shape), rtol=1e-6)
            assert logs[key].shape == ((MANY,) if not options else ()) + value.shape
            assert options or logs[key].sharding.device_set == value.sharding.device_set


def test_64_bits() -> None:
    with jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64():  # up to 0.7

        def loop() -> None:
            for i in range(3):
                lox.log({"i": 2**40 + i, "f": 1 / 3, "n": np.float32(i)}, step=2**41 + i)

        _, logs = lox.spool(loop)()
        assert logs["i"].tolist() == [2**40, 2**40 + 1, 2**40 + 2]
        assert logs["f"].tolist() == [1 / 3] * 3
        assert logs["n"].dtype == np.float32
        assert logs.step["i"].tolist() == [2**41, 2**41 + 1, 2**41 + 2]


# --- random programs ---


class Random:
    """A random Python loop over log lines, jitted functions and loops, which share a few keys, and options of spool."""

    def __init__(self, seed: int):
        choice = random.Random(seed)
        keys = [f"k{n}" for n in range(choice.randint(1, 4))]
        self.kinds = {key: choice.choice(["scalar", "vector", "int", "tree"]) for key in keys}
        self.reductions = {key: choice.choice([None, None, "mean", "sum", "last", "max"]) for key in keys}
        self.parts = [
            Part(
                choice.choice(["log", "log", "log", "jit", "scan", "cond", "while"]),
                choice.sample(keys, choice.randint(1, len(keys))),
                choice.choice(["array", "number", "NumPy"]),
                choice.choice([{}, {"step"}, {"step", "where"}, {"where"}, {"step", "weight"}]),
                choice.choice(["", "", "inner"]),
                choice.choice(["", "", "outer"]),
            )
            for _ in range(choice.randint(1, 5))
        ]
        self.jitted = {id(part): jax.jit(functools.partial(self.log, part)) for part in self.parts}
        self.iterations = choice.choice([1, 3, 4, 17])
        ways = [{}, {}, {"interval": 2}, {"prefix": "p/"}, {"argnames": [keys[0], "*inner/*"]}, {"keep_logs": True}]
        self.options = choice.choice(ways)
        if any(part.what == "while" for part in self.parts):
            self.options = {**self.options, "capacity": 200}

    def value(self, key: str, x: Any, i: Any, given_as: str) -> Any:
        if self.kinds[key] == "scalar":
            return {"array": x, "number": i / 2, "NumPy": np.float32(i) if isinstance(i, int) else x}[given_as]
        if self.kinds[key] == "vector":
            is_numpy = given_as == "NumPy" and isinstance(i, int)
            return np.float32([i, i + 1]) if is_numpy else jnp.stack([x, x + 1])
        return i if self.kinds[key] == "int" else {"a": x, "b": i}

    def log(self, part: "Part", x: Any, i: Any) -> Any:
        given = {"step": i, "where": i % 2 == 0, "weight": i + 1}
        reduce = {key: self.reductions[key] for key in part.keys if self.reductions[key]}
        with lox.scope(part.scope) if part.scope else contextlib.nullcontext():
            values = {key: self.value(key, x, i, part.given_as) for key in part.keys}
            lox.log(values, reduce=reduce or None, **{name: given[name] for name in part.given})
        return x * 0.5 + 1

    def run(self, part: "Part", x: Any, i: int) -> Any:
        log = functools.partial(self.log, part)
        if part.what == "log":
            return log(x, i)
        if part.what == "jit":
            return self.jitted[id(part)](x, jnp.int32(i))
        if part.what == "scan":
            return lax.scan(lambda x, j: (log(x, j), None), x, jnp.arange(3))[0]
        if part.what == "cond":
            return lax.cond(i % 3 == 0, lambda: log(x, jnp.int32(i)), lambda: x)
        return lax.while_loop(lambda s: s[0] < 2, lambda s: (s[0] + 1, log(s[1], s[0])), (0, x))[1]

    def __call__(self, x: Any) -> Any:
        for i in range(self.iterations):
            for part in self.parts:
                with lox.scope(part.around) if part.around else contextlib.nullcontext():
                    x = self.run(part, x, i)
        return x


class Part(NamedTuple):
    """What an iteration does."""

    what: str
    keys: list[str]
    given_as: str
    given: set[str]
    scope: str
    around: str


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.filterwarnings("ignore:`argnames` names:lox.LoxWarning")
@pytest.mark.parametrize("seed", range(SEED, SEED + N))
def test_random_programs(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In Python, twice, and as one program."""
    monkeypatch.setattr(_interpret, "_OFTEN", 2)
    program = Random(seed)
    spooled, x = lox.spool(program, **program.options), jnp.float32(3)
    out, logs_of_one = jax.jit(spooled)(x)
    logs_of_one = logs_of_one.compact()
    for _ in range(2):
        got, logs = spooled(x)
        np.testing.assert_allclose(got, out, rtol=1e-5)
        assert list(logs) == list(logs_of_one)
        assert jax.tree.structure(logs) == jax.tree.structure(logs_of_one)
        assert jax.tree.map(lambda x: (x.dtype, x.shape), logs) == jax.tree.map(
            lambda x: (x.dtype, x.shape), logs_of_one
        )
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=1e-6), logs, logs_of_one)
