# pyright: reportUnnecessaryTypeIgnoreComment=true
"""What a type checker knows about transformed functions. Checked and never executed: see test_typing.py.

A line that must be an error says which one; if it is not, the unnecessary comment is an error.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar, assert_type, overload

import jax

import lox

T = TypeVar("T")


def loss(x: jax.Array, scale: float, *, name: str = "loss") -> float:
    lox.log({name: x})
    return scale


class Model:
    def __call__(self, x: jax.Array) -> bool:
        return bool(x)

    def apply(self, x: jax.Array, deterministic: bool = True) -> str:
        return f"{x} {deterministic}"

    @lox.spool
    def spooled(self, x: float) -> float:
        return x

    @functools.partial(lox.tap, callback=lambda logs: print(logs.keys()), interval=10)
    def tapped(self, x: float) -> float:
        return x

    @staticmethod
    @lox.nolog
    def static(x: float) -> float:
        return x


@overload
def twice(x: int) -> int: ...
@overload
def twice(x: str) -> str: ...
def twice(x: Any) -> Any:
    return 2 * x


def first(x: list[T]) -> T:
    return x[0]


def spool(x: jax.Array, model: Model) -> None:
    assert_type(lox.spool(loss)(x, 1.0), tuple[float, lox.logdict])
    assert_type(lox.spool(loss)(x, scale=1.0, name="x"), tuple[float, lox.logdict])
    lox.spool(loss)("x", 1.0)  # pyright: ignore[reportArgumentType]
    lox.spool(loss)(x)  # pyright: ignore[reportCallIssue]
    lox.spool(loss)(x, 1.0, nam="x")  # pyright: ignore[reportCallIssue]
    lox.spool(loss)(x, 1.0)[1].no_such_step["loss"]
    lox.spool(3)  # pyright: ignore[reportArgumentType]
    lox.spool(loss, interval="2")  # pyright: ignore[reportArgumentType]

    assert_type(lox.spool(loss, "x", tags=["a"], keep_logs=True, reduce="mean")(x, 1.0), tuple[float, lox.logdict])
    assert_type(lox.spool(lox.spool(loss))(x, 1.0)[0], tuple[float, lox.logdict])

    assert_type(lox.spool(model)(x), tuple[bool, lox.logdict])
    lox.spool(model)(x, x)  # pyright: ignore[reportCallIssue]
    assert_type(lox.spool(model.apply)(x, deterministic=False), tuple[str, lox.logdict])
    lox.spool(model.apply)(x, deterministic="no")  # pyright: ignore[reportArgumentType]
    assert_type(lox.spool(Model.apply)(model, x), tuple[str, lox.logdict])
    assert_type(model.spooled(1.0), tuple[float, lox.logdict])
    model.spooled("1")  # pyright: ignore[reportArgumentType]
    assert_type(lox.spool(Model)(), tuple[Model, lox.logdict])

    assert_type(lox.spool(functools.partial(loss, x))(1.0), tuple[float, lox.logdict])
    assert_type(lox.spool(functools.partial(loss, scale=1.0))(x), tuple[float, lox.logdict])
    assert_type(lox.spool(functools.partial(loss, scale=1.0))(x, name="x"), tuple[float, lox.logdict])

    assert_type(lox.spool(twice)(1), tuple[int, lox.logdict])
    assert_type(lox.spool(twice)("1"), tuple[str, lox.logdict])
    assert_type(lox.spool(first)([1.0]), tuple[float, lox.logdict])
    assert_type(lox.spool(lambda: 1)(), tuple[int, lox.logdict])


def jax_transformations(x: jax.Array) -> None:
    # To type checkers, jax.jit returns a callable of anything: no error is found, and none is invented.
    jitted = lox.spool(jax.jit(loss))(x, 1.0)
    assert_type(jitted[1], lox.logdict)
    assert_type(lox.spool(jax.grad(loss))(x, 1.0)[1], lox.logdict)

    # vmap keeps the signature, and a jit inside a function with one does no harm.
    assert_type(lox.spool(jax.vmap(loss))(x, 1.0), tuple[float, lox.logdict])
    assert_type(jax.vmap(lox.spool(loss))(x, 1.0), tuple[float, lox.logdict])
    jax.vmap(lox.spool(loss))(x, "1")  # pyright: ignore[reportArgumentType]

    @lox.spool
    @jax.jit
    def outside(x: float) -> float:
        return x

    assert_type(outside(1.0)[1], lox.logdict)

    @jax.jit
    @lox.spool
    def inside(x: float) -> float:
        return x

    inside.lower(1.0)


def decorators() -> None:
    @lox.spool
    def plain(x: float) -> float:
        return x

    assert_type(plain(1.0), tuple[float, lox.logdict])
    plain("1")  # pyright: ignore[reportArgumentType]

    @functools.partial(lox.spool, reduce="mean")
    def with_options(x: float) -> float:
        return x

    assert_type(with_options(1.0), tuple[float, lox.logdict])
    with_options("1")  # pyright: ignore[reportArgumentType]

    @functools.partial(lox.nolog, argnames=["x"])
    @functools.partial(lox.tap, callback=print, buffer=10)
    @lox.watch
    def several(x: float) -> float:
        return x

    assert_type(several(1.0), float)
    several("1")  # pyright: ignore[reportArgumentType]


def others(x: jax.Array, model: Model) -> None:
    assert_type(lox.tap(loss)(x, 1.0), float)
    lox.tap(loss)(x)  # pyright: ignore[reportCallIssue]
    lox.tap(loss, lambda logs: logs.lane(0))
    lox.tap(loss, lambda logs, step: None)  # pyright: ignore[reportArgumentType]
    lox.tap(loss, callback=3)  # pyright: ignore[reportArgumentType]
    assert_type(lox.tap(model.apply, print, interval=2)(x), str)
    assert_type(model.tapped(1.0), float)
    model.tapped("1")  # pyright: ignore[reportArgumentType]

    assert_type(lox.nolog(loss)(x, 1.0), float)
    lox.nolog(loss, tags="a")(x, "1")  # pyright: ignore[reportArgumentType]
    assert_type(Model.static(1.0), float)
    assert_type(lox.keep(loss, "x")(x, 1.0), float)
    lox.keep(loss)(x, "1")  # pyright: ignore[reportArgumentType]

    assert_type(lox.watch(loss)(x, 1.0), float)
    lox.watch(loss, lambda error: print(error.key))(x, "1")  # pyright: ignore[reportArgumentType]

    out, logs = lox.logify.logify(loss)(x, 1.0)
    assert_type(out, float)
    assert_type(logs, lox.logify.Logs)
    lox.logify.logify(loss)(x)  # pyright: ignore[reportCallIssue]


def loggers(x: jax.Array, train: Callable[[int], jax.Array]) -> None:
    logger = lox.MultiLogger(lox.SaveLogger("runs"), lox.ConsoleLogger())
    state = logger.init(jax.random.key(0))
    assert_type(logger.spool(loss, state)(x, 1.0), float)
    logger.spool(loss, state, reduce="mean")(x, "1")  # pyright: ignore[reportArgumentType]
    assert_type(logger.tap(loss, state)(x, 1.0), float)
    logger.tap(loss, state, buffer=10)(x, "1")  # pyright: ignore[reportArgumentType]
    assert_type(logger.tap(train, state)(3), jax.Array)
    with lox.CsvLogger("runs") as csv:
        assert_type(csv.tap(train, csv.init(jax.random.key(0)))(3), jax.Array)
