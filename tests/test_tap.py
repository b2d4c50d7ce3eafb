"""tap: order, buffers, reductions, failing callbacks."""

import dataclasses
import threading
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from optional import devices

import lox
from lox._engine import _emit


def scanned(x: Any) -> Any:
    def body(c: Any, i: Any) -> Any:
        lox.log({"c": c, "d": c + 1}, step=i)
        return c + 1, None

    y = jax.lax.scan(body, x, jnp.arange(7))[0]
    lox.log({"end": y})
    return y


X = jnp.float32(1.0)


def received(transform: Any, x: Any = X) -> list[str]:
    lines: list[str] = []
    transform(lambda logs: lines.append(str(logs)))(x)
    jax.effects_barrier()
    return lines


FORMS = {
    "tap": lambda **options: lambda cb: lox.tap(scanned, cb, **options),
    "tap(jit)": lambda **options: lambda cb: lox.tap(jax.jit(scanned), cb, **options),
    "jit(tap)": lambda **options: lambda cb: jax.jit(lox.tap(scanned, cb, **options)),
}


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_a_buffer_has_up_to_k_events_and_the_rest_is_flushed(form: str) -> None:
    for _ in range(2):
        assert received(FORMS[form](buffer=3, argnames=["c", "end"])) == [
            "{'c': [1.0, 2.0, 3.0]}",
            "{'c': [4.0, 5.0, 6.0]}",
            "{'c': [7.0], 'end': [8.0]}",
        ]
    assert received(FORMS[form](buffer=100)) == [
        "{'c': [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0], 'd': [2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0], 'end': [8.0]}"
    ]
    assert received(FORMS[form](buffer=1, argnames="end")) == ["{'end': [8.0]}"]


def test_a_buffer_keeps_steps_and_lanes() -> None:
    blocks: list[lox.logdict] = []
    lox.tap(jax.vmap(scanned), blocks.append, argnames="c", buffer=4)(jnp.arange(2.0))
    assert [b["c"].shape for b in blocks] == [(4, 2), (3, 2)]
    assert [b.step["c"].tolist() for b in blocks] == [[0, 1, 2, 3], [4, 5, 6]]
    assert blocks[0].lane(1)["c"].tolist() == [1.0, 2.0, 3.0, 4.0]


@pytest.mark.sample(2)
@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_reduce_sends_one_event_at_the_end_or_one_per_buffer(form: str) -> None:
    assert received(FORMS[form](reduce="mean", argnames="c")) == ["{'c': 4.0}"]
    assert received(FORMS[form](reduce="mean", argnames="c", buffer=3)) == [
        "{'c': [2.0]}",
        "{'c': [5.0]}",
        "{'c': [7.0]}",
    ]
    assert received(FORMS[form](reduce={"c": "sum"}, buffer=4, prefix="p/", argnames=["c", "d"])) == [
        "{'p/c': [10.0], 'p/d': [2.0, 3.0, 4.0, 5.0]}",
        "{'p/d': [6.0, 7.0, 8.0], 'p/c': [18.0]}",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_interval_and_buffer(form: str) -> None:
    assert received(FORMS[form](interval=3, argnames="c")) == ["{'c': 1.0}", "{'c': 4.0}", "{'c': 7.0}"]
    assert received(FORMS[form](interval=3, argnames="c", buffer=2)) == ["{'c': [1.0, 4.0]}", "{'c': [7.0]}"]


def test_interval_counts_each_key_for_itself() -> None:
    def f(x: Any) -> Any:
        lox.log({"a": x})
        lox.log({"a": x + 1, "b": x})
        lox.log({"a": x + 2, "b": x + 1})
        return x

    assert received(lambda cb: lox.tap(f, cb, interval=2)) == ["{'a': 1.0}", "{'b': 1.0}", "{'a': 3.0}"]


@pytest.mark.slow
@pytest.mark.parametrize("jit", [False, True])
def test_a_logging_condition_is_not_emitted_twice(jit: bool) -> None:
    def f(x: Any) -> Any:
        return jax.lax.while_loop(lambda c: (lox.log({"t": c}), c < 3)[1], lambda c: c + 1, x)

    for options, expected in (
        ({}, ["{'t': 1.0}", "{'t': 2.0}", "{'t': 3.0}"]),
        ({"interval": 2}, ["{'t': 1.0}", "{'t': 3.0}"]),
        ({"reduce": "max"}, ["{'t': 3.0}"]),
    ):
        tap = lambda cb, options=options: lox.tap(f, cb, **options)  # noqa: E731
        assert received((lambda cb, tap=tap: jax.jit(tap(cb))) if jit else tap) == expected
    kept = lambda x: lox.spool(f, reduce="count", keep_logs=True)(x)[1]["t"]  # noqa: E731
    count, logs = (jax.jit(lox.spool(kept, capacity=9)) if jit else lox.spool(kept, capacity=9))(X)
    assert int(count) == 3 and logs.compact()["t"].tolist() == [1.0, 2.0, 3.0]


def raising(logs: lox.logdict) -> None:
    if np.max(logs.get("c", 0)) >= 3:
        raise KeyError("no room for", float(np.max(logs["c"])))


@pytest.mark.parametrize("jit", [False, True])
def test_an_exception_in_the_callback_reaches_the_user_as_it_was_raised(jit: bool) -> None:
    f = jax.jit(scanned) if jit else scanned
    for _ in range(3):  # tapped again each time, compiled once
        with pytest.raises(KeyError) as info:
            lox.tap(f, raising)(X)
        assert info.value.args == ("no room for", 3.0)
    assert float(lox.tap(f, raising, argnames="end")(X)) == 8.0  # the process stays usable
    assert float(lox.spool(f)(X)[0]) == 8.0


@jax.jit
def one_slowly() -> Any:
    return jax.lax.fori_loop(0, 8, lambda _, a: a @ a / 1000, jnp.ones((1000, 1000)))[0, 0]


@pytest.mark.slow
def test_an_exception_that_is_caught_leaves_nothing_that_failed() -> None:
    @jax.jit
    def inner(x: Any) -> Any:
        lox.log({"inner": x})
        return x

    def f() -> str:
        lox.log({"outer": 1.0, "inner": 5.0})
        try:  # dispatched before its argument is ready, so it fails later, as on a GPU
            lox.tap(inner, fail)(one_slowly())
        except KeyError:
            lox.log({"outer": 2.0})
            return "caught"
        return "not caught"

    def fail(logs: lox.logdict) -> None:
        raise KeyError("full")

    for options in {}, {"interval": 1}, {"reduce": "append"}:
        out, logs = lox.spool(f, **options)()
        assert (out, str(logs)) == ("caught", "{'outer': [1.0, 2.0], 'inner': 5.0}")
    out, logs = lox.spool(f, reduce="sum")()
    assert (out, str(logs)) == ("caught", "{'outer': 3.0, 'inner': 5.0}")
    assert received(lambda cb: lambda _: lox.tap(f, cb)()) == ["{'outer': 1.0, 'inner': 5.0}", "{'outer': 2.0}"]
    blocks = received(lambda cb: lambda _: lox.tap(f, cb, buffer=10)())
    assert blocks == ["{'outer': [1.0, 2.0], 'inner': [5.0]}"]


def test_an_exception_under_an_outer_jit_keeps_its_message() -> None:
    with pytest.raises(Exception, match="no room for"):
        jax.block_until_ready(jax.jit(lox.tap(scanned, raising))(X))
        jax.effects_barrier()
    lox._compat.forget_failed_effects("no room for")  # on a GPU, JAX tells everyone who waits
    assert float(lox.spool(scanned)(X)[0]) == 8.0


def test_a_failure_on_several_devices_is_reported_once() -> None:
    mesh = jax.sharding.Mesh(devices(8), ("d",))
    spec = jax.sharding.PartitionSpec("d")
    sharded = jax.jit(jax.shard_map(lambda x: scanned(x[0])[None], mesh=mesh, in_specs=spec, out_specs=spec))
    with pytest.raises(KeyError, match="no room for"):
        lox.tap(sharded, raising)(jnp.ones(8))
    jax.effects_barrier()


def test_an_aborted_call_leaves_nothing_in_the_buffer() -> None:
    blocks: list[str] = []
    fail = True

    def callback(logs: lox.logdict) -> None:
        if fail:
            raise RuntimeError("stop")
        blocks.append(str(logs))

    tapped = lox.tap(jax.jit(scanned), callback, argnames="c", buffer=4)
    with pytest.raises(RuntimeError, match="stop"):
        tapped(X)
    fail = False
    tapped(X)
    assert blocks == ["{'c': [1.0, 2.0, 3.0, 4.0]}", "{'c': [5.0, 6.0, 7.0]}"]


def test_calls_do_not_share_a_buffer() -> None:
    def loop(x: Any) -> Any:
        return jax.lax.fori_loop(0, 4, lambda i, c: (lox.log({"x": c}), c + 1)[1], x)

    means: list[list[float]] = []
    callback = lambda logs: means.append(logs["x"].tolist())  # noqa: E731
    tapped = lox.tap(loop, callback, buffer=8, reduce="mean")
    jax.block_until_ready(jax.jit(lambda x: tapped(x) + tapped(x + 100))(jnp.float32(0)))
    jax.effects_barrier()
    assert sorted(means) == [[1.5], [101.5]]
    means.clear()
    lox.tap(lox.tap(loop, callback, buffer=4, reduce="mean"), callback, buffer=4, reduce="mean")(jnp.float32(0))
    assert means == [[1.5], [1.5]]


def test_equal_callbacks_are_two_callbacks() -> None:
    @dataclasses.dataclass(frozen=True)
    class Sink:
        name: str
        events: list[Any] = dataclasses.field(default_factory=list, compare=False)

        def __call__(self, logs: lox.logdict) -> None:
            self.events.append(logs)

        def method(self, logs: lox.logdict) -> None:
            self.events.append(logs)

    f = jax.jit(lambda x: (lox.log({"x": x}), x)[1])
    a, b = Sink("run"), Sink("run")
    for tap in (lambda sink: lox.tap(f, sink), lambda sink: lox.tap(f, sink.method)):
        tap(a)(X)
        tap(b)(X)
    assert len(a.events) == len(b.events) == 2


@pytest.mark.parametrize("options", [{}, {"buffer": 3}], ids=str)
def test_calls_at_the_same_time_get_their_own_events(options: Any) -> None:
    f = jax.jit(lambda x: jax.lax.scan(lambda c, t: ((lox.log({"x": t}), c)[1], None), x, x + jnp.arange(7.0))[0])
    received: dict[int, list[float]] = {k: [] for k in range(4)}
    shared: list[float] = []

    def work(k: int) -> None:
        for n in range(20):
            x = jnp.float32(1000 * k + 10 * n)
            lox.tap(f, lambda logs: received[k].extend(np.ravel(logs["x"])), **options)(x)
            lox.tap(f, keep, **options)(x)

    def keep(logs: lox.logdict) -> None:
        shared.extend(np.ravel(logs["x"]))

    threads = [threading.Thread(target=work, args=(k,)) for k in received]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert received == {k: [1000 * k + 10 * n + i for n in range(20) for i in range(7)] for k in received}
    assert sorted(shared) == sorted(x for xs in received.values() for x in xs)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"buffer": 3}], ids=str)
def test_every_callback_has_returned_when_the_call_has(options: Any) -> None:
    mesh = jax.sharding.Mesh(devices(8), ("d",))
    spec = jax.sharding.PartitionSpec("d")
    sharded = jax.jit(jax.shard_map(lambda x: scanned(x[0])[None], mesh=mesh, in_specs=spec, out_specs=spec))
    for f, x in ((sharded, jnp.arange(8.0)), (jax.jit(scanned), X)):
        for _ in range(3):
            events: list[float] = []

            def slow(logs: lox.logdict, events: list[float] = events) -> None:
                time.sleep(0.002)
                events.extend(np.ravel(logs["c"]) if "c" in logs else [])

            lox.tap(f, slow, **options)(x)
            assert sorted(events) == sorted(v + i for v in np.ravel(x) for i in range(7))


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_a_tap_on_another_device(jit: bool) -> None:
    f = jax.jit(scanned) if jit else scanned
    for device in (None, *devices(2), None):
        with jax.default_device(device), jax.transfer_guard("disallow"):
            x = jax.device_put(np.float32(1.0), device)
            assert len(received(lambda cb: lox.tap(f, cb), x)) == 8


def test_callbacks_own_their_arrays() -> None:
    kept: list[np.ndarray] = []
    f = jax.jit(lambda x: jax.lax.scan(lambda c, _: ((lox.log({"c": c}), c + 1)[1], None), x, None, length=50)[0])
    lox.tap(f, lambda logs: kept.append(logs["c"]))(jnp.zeros(1000))
    assert all(type(a) is np.ndarray and a.flags.writeable for a in kept)
    assert [float(a[0]) for a in kept] == list(range(50))


def test_callbacks_of_several_threads_do_not_interleave() -> None:
    inside = 0
    worst = 0

    def callback(logs: lox.logdict) -> None:
        nonlocal inside, worst
        inside += 1
        worst = max(worst, inside)
        inside -= 1

    tapped = lox.tap(jax.jit(scanned), callback)
    threads = [threading.Thread(target=lambda: [tapped(X) for _ in range(5)]) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert worst == 1


# --- exceptions out of compiled programs ---


class Mine(Exception):
    pass


def test_reraise_raises_what_the_callback_has_raised() -> None:
    error = Mine("the reason\nand more", 3)

    def raising(logs: Any) -> None:
        raise error

    f = jax.jit(lox.tap(scanned, raising))
    for _ in range(2):
        with pytest.raises(Mine) as caught, lox.reraise():
            jax.block_until_ready(f(X))
        assert caught.value is error
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"Mine: .*the reason"):
        jax.block_until_ready(f(X))
    with pytest.raises(lox.NonFiniteError, match=r"^'c' is inf at step=0"), lox.reraise():
        jax.block_until_ready(jax.jit(lox.watch(lox.spool(scanned, keep_logs=True)))(X * jnp.inf))
    with pytest.raises(Mine), lox.reraise():
        lox.tap(scanned, raising)(X)  # raises it by itself


def test_reraise_leaves_everything_else_as_it_is() -> None:
    with lox.reraise():
        assert float(jax.jit(lox.tap(scanned, lambda logs: None))(X)) == 8.0
    for error in (ValueError("mine"), jax.errors.JaxRuntimeError("INTERNAL: something else")):
        with pytest.raises(type(error)) as caught, lox.reraise():
            raise error
        assert caught.value is error


def test_reraise_on_several_threads_and_nested() -> None:
    def caught_by(number: int) -> Any:
        error = Mine(f"number {number}")

        def raising(logs: Any) -> None:
            raise error

        f = jax.jit(lox.tap(scanned, raising))
        try:
            with lox.reraise(), lox.reraise():
                jax.block_until_ready(f(X))
        except Mine as caught:
            return caught is error
        return None

    caught: list[Any] = []
    threads = [threading.Thread(target=lambda n=n: caught.append(caught_by(n))) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert caught == [True] * 4


def test_errors_that_nobody_finds_do_not_fill_the_memory() -> None:
    def raising(logs: Any) -> None:
        raise Mine("gone")

    f = jax.jit(lox.tap(lambda x: lox.log({"x": x}) and x, raising))
    for _ in range(2 * _emit._KEPT):
        with pytest.raises(Exception, match="gone"):
            jax.block_until_ready(f(X))
            jax.effects_barrier()
    assert len(_emit._raised) == _emit._KEPT
    kept = set(_emit._raised)
    for _ in range(3):
        with pytest.raises(Mine), lox.reraise():
            jax.block_until_ready(f(X))
            jax.effects_barrier()
    assert set(_emit._raised) < kept  # each is released once it is found


@pytest.mark.parametrize("jit", [False, True])
def test_a_lane_without_an_event_does_not_have_its_key(jit: bool) -> None:
    def f(n: Any) -> Any:
        lox.log({"m": n})
        return jax.lax.cond(n > 0, lambda: (lox.log({"n": n}, step=10 * n), 0)[1], lambda: 0)

    events: list[lox.logdict] = []
    lox.tap(jax.jit(jax.vmap(f)) if jit else jax.vmap(f), events.append)(jnp.arange(3))
    always, sometimes = events
    assert [dict(always.lane(i)) for i in range(3)] == [{"m": 0}, {"m": 1}, {"m": 2}]
    assert [dict(sometimes.lane(i)) for i in range(3)] == [{}, {"n": 1}, {"n": 2}]
    assert [dict(sometimes.lane(i).steps.get("step", {})) for i in range(3)] == [{}, {"n": 10}, {"n": 20}]
    assert all(not sometimes.lane(i).valid for i in range(3))
    # A reduction has a value even over no events, as outside of vmap.
    _, logs = lox.spool(jax.vmap(f), argnames="n", reduce="sum")(jnp.arange(3))
    assert [dict(logs.lane(i)) for i in range(3)] == [{"n": 0}, {"n": 1}, {"n": 2}]
    assert [dict(logs.lane(i).valid) for i in range(3)] == [{"n": False}, {}, {}]
    # Several events have an axis, of length zero where none is valid.
    events.clear()
    lox.tap(jax.vmap(f), events.append, argnames="n", buffer=2)(jnp.arange(3))
    assert [events[0].lane(i)["n"].tolist() for i in range(3)] == [[], [1], [2]]


@pytest.mark.parametrize("jit", [False, True])
def test_a_loop_of_unknown_length_in_a_loop_without_iterations(jit: bool) -> None:
    """It has no events, but a program that has to be traced."""

    def never(x: Any, _: Any) -> Any:
        return jax.lax.while_loop(lambda c: (lox.log({"never": c}), c < 3)[1], lambda c: c + 1, x), None

    def step(x: Any, i: Any) -> Any:
        lox.log({"x": x}, step=i)
        return jax.lax.scan(never, x + 1, None, length=0)

    def f(x: Any) -> Any:
        return jax.lax.scan(lambda x, i: (step(x, i)[0], None), x, jnp.arange(6))[0]

    events: list[str] = []
    assert lox.tap(jax.jit(f) if jit else f, lambda logs: events.append(str(logs)), buffer=3)(1.0) == 7.0
    assert events == ["{'x': [1.0, 2.0, 3.0]}", "{'x': [4.0, 5.0, 6.0]}"]
