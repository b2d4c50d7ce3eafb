"""watch: the first NaN or infinity."""

import pickle
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from optional import devices

import lox
from lox import _compat
from lox._data._lanes import Laned
from lox._transforms import _report, _watch


def squares(x: Any) -> Any:
    def step(x: Any, i: Any) -> Any:
        x = x * x
        lox.log({"x": x, "n": i}, step=i)
        return x, None

    return lax.scan(step, x, jnp.arange(100))[0]


FORMS = {
    "watch": lox.watch(squares),
    "watch(jit)": lox.watch(jax.jit(squares)),
    "watch(watch)": lox.watch(lox.watch(squares, argnames="n")),
    "watch(tap)": lox.watch(lox.tap(squares, lambda logs: None, buffer=8)),
    "grad": jax.grad(lox.watch(squares)),
    "watch(grad)": lox.watch(jax.grad(squares)),
}


@pytest.fixture(autouse=True)
def _quiet() -> Any:
    before, lox.config.sink = lox.config.sink, "off"
    yield
    lox.config.sink = before


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.parametrize("name", FORMS)
def test_it_stops_at_the_first_nan(name: str) -> None:
    for _ in range(2):
        with pytest.raises(lox.NonFiniteError) as info:
            FORMS[name](jnp.float32(9.0))
        error = info.value
        assert isinstance(error, FloatingPointError) and isinstance(error, lox.LoxError)
        assert (error.key, error.path, error.steps, error.lane) == ("x", "", {"step": 5}, ())
        assert np.isinf(error.value)
        first, second = str(error).splitlines()
        assert first == "'x' is inf at step=5."
        assert second.startswith("  logged at test_watch.py:") and second.endswith("(squares.step)")
    assert np.isfinite(FORMS[name](jnp.float32(0.5)))  # the process goes on


@pytest.mark.slow
def test_it_names_the_lane() -> None:
    xs = jnp.array([0.5, 2.0, 9.0])
    for f in (lox.watch(jax.vmap(squares)), jax.vmap(lox.watch(squares))):
        with pytest.raises(lox.NonFiniteError, match=r"^'x' is inf at step=5 in lane 2\."):
            f(xs)
    with pytest.raises(lox.NonFiniteError, match=r"^'x' is inf at step=5 in lane \(1, 0\)\."):
        lox.watch(jax.vmap(jax.vmap(squares)))(jnp.array([[0.5], [9.0]]))


@pytest.mark.slow
def test_a_callback_reports_once_and_the_function_goes_on() -> None:
    errors: list[lox.NonFiniteError] = []
    for f in (squares, jax.jit(squares)):
        out = lox.watch(f, callback=errors.append)(9.0)
        assert np.isinf(out)
    jax.jit(lox.watch(squares, callback=errors.append))(9.0)
    jax.effects_barrier()
    assert [str(e).splitlines()[0] for e in errors] == ["'x' is inf at step=5."] * 3


@pytest.mark.slow
def test_arrays_and_pytrees() -> None:
    def f(x: Any) -> None:
        lox.log({"tree": {"w": [jnp.ones(3), jnp.array([[1.0, x], [jnp.inf, x]])]}}, step=1, episode=2)

    with pytest.raises(lox.NonFiniteError) as info:
        lox.watch(f)(jnp.nan)
    assert str(info.value).splitlines()[0] == (
        "'tree'['w'][1] has 2 NaN and 1 infinite of 4 values, the first at [0, 1] at step=1 at episode=2."
    )
    assert info.value.value.shape == (2, 2)
    with pytest.raises(lox.NonFiniteError, match="'z' is NaN"):
        lox.watch(lambda: lox.log({"z": jnp.complex64(complex(0, np.nan))}))()
    with pytest.raises(lox.NonFiniteError, match="'b' is NaN"):
        lox.watch(lambda: lox.log({"b": jnp.bfloat16(np.nan)}))()
    lox.watch(lambda: lox.log({"i": 3, "k": jax.random.key(0)}))()


@pytest.mark.slow
def test_only_selected_and_valid_values() -> None:
    def f(x: Any) -> Any:
        lox.log({"a": x})
        lox.log({"b": x}, where=x > 0, tags="t")
        return lax.cond(x > 0, lambda: lox.log({"c": x}) and 1, lambda: 0)

    lox.watch(f, argnames="b")(jnp.nan)
    lox.watch(f, argnames=["b", "c"])(-jnp.inf)
    with pytest.raises(lox.NonFiniteError, match="'b' is inf"):
        lox.watch(f, tags="t")(jnp.inf)
    with pytest.raises(lox.NonFiniteError, match="'c' is inf"):
        lox.watch(f, argnames="c")(jnp.inf)
    # Lanes disagree, so only the one that took the branch reports.
    with pytest.raises(lox.NonFiniteError, match="'c' is inf in lane 1"):
        lox.watch(jax.vmap(f), argnames="c")(jnp.array([-jnp.inf, jnp.inf]))


def test_the_host_is_not_called_without_a_nan() -> None:
    text = jax.jit(lox.nolog(lox.watch(squares))).lower(1.0).as_text()
    before, _, inside = text.partition("stablehlo.case")
    assert "callback" not in before and "callback" in inside


def test_logs_flow_on_unchanged() -> None:
    _, logs = lox.spool(lox.watch(squares))(1.0)
    assert len(logs["x"]) == 100
    with lox.testing.capture() as events:
        lox.watch(lambda: lox.log({"x": 1.0}))()
    assert [str(e) for e in events] == ["{'x': 1.0}"]


def test_while_loops() -> None:
    def f(x: Any) -> Any:
        def body(c: Any) -> Any:
            lox.log({"c": c})
            return c * c

        return lax.while_loop(lambda c: c < 1e30, body, x) * jnp.nan

    lox.watch(f)(9.0)


@pytest.mark.slow
def test_several_devices() -> None:
    mesh = jax.sharding.Mesh(devices(8), ("d",))
    spec = jax.sharding.PartitionSpec("d")
    sharded = jax.shard_map(lambda x: squares(x[0])[None], mesh=mesh, in_specs=spec, out_specs=spec)
    xs = jnp.ones(8)
    assert lox.watch(jax.jit(sharded))(xs).tolist() == xs.tolist()
    errors: list[Any] = []
    jax.jit(lox.watch(sharded, callback=errors.append))(xs.at[3].set(9.0))
    jax.effects_barrier()
    assert [e.key for e in errors] == ["x"]


def test_a_callback_has_to_be_callable() -> None:
    with pytest.raises(lox.LogTypeError, match="`callback` is 3; it must be a function of an error"):
        lox.watch(squares, callback=3)  # type: ignore[arg-type]


def test_a_value_that_is_the_same_in_all_lanes() -> None:
    with pytest.raises(lox.NonFiniteError) as info:
        jax.vmap(lambda x: (lox.watch(lambda: lox.log({"nan": jnp.nan}))(), x)[1])(jnp.arange(3.0))
    assert info.value.lane == ()
    assert str(info.value).splitlines()[0] == "'nan' is NaN."


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_two_lines_with_the_same_key(wrap: Any) -> None:
    """The error names the line that failed, though both log the same key, of the same type."""

    def f(x: Any) -> None:
        lox.log({"x": x})
        lox.log({"x": jnp.log(-x)})

    for number in range(2):  # the first line fails, then the second
        with pytest.raises(lox.NonFiniteError) as info:
            lox.watch(wrap(f))(jnp.float32([jnp.inf, 1.0][number]))
        assert info.value.site.endswith(
            f":{f.__code__.co_firstlineno + 1 + number} (test_two_lines_with_the_same_key.f)"
        )


# --- against a plain simulation -------------------------------------------------------------------

Simulated = tuple[str, dict[str, Any], tuple[int, ...], Any, dict[Any, list[Any]]]


def simulate(events: list[Any], last: int | None, lanes: int | None) -> Simulated | None:
    """What `watch` has to say of events that came one by one, from nothing but their values."""
    kept: dict[Any, list[Any]] = {}
    for logs in events:
        views: dict[Any, Any] = {"": logs} if lanes is None else {lane: logs.lane(lane) for lane in range(lanes)}
        failed = None
        for lane, view in views.items():
            for key in view:
                values = [np.atleast_1d(x) for x in jax.tree.leaves(view[key])]
                if lanes is not None and key in logs.valid:
                    values = [x[0] if len(x) else None for x in values]  # a lane that may lack the event has an axis
                if any(x is None for x in values):
                    continue
                steps = {name: np.ravel(by_key[key]).tolist() for name, by_key in view.steps.items() if key in by_key}
                kept.setdefault((lane, key), []).append(([np.ravel(x).tolist() for x in values], steps))
                inexact = [x for x in values if np.issubdtype(np.asarray(x).dtype, np.inexact)]
                if failed is None and not all(np.isfinite(x).all() for x in inexact):
                    bad = next(x for x in inexact if not np.isfinite(x).all())
                    failed = key, {n: s[0] for n, s in steps.items()}, () if lanes is None else (lane,), np.ravel(bad)
        if failed is not None:
            names = {key for _, key in kept} if last else set(logs)
            return *failed, {place: found[-(last or 1) :] for place, found in sorted(kept.items()) if place[1] in names}
    return None


def described(error: lox.NonFiniteError, lanes: int | None) -> Simulated:
    recorded: dict[Any, list[Any]] = {}
    for lane in [""] if lanes is None else range(lanes):
        logs = error.logs if lanes is None else error.logs.lane(lane)
        for key in logs:
            for n in range(len(jax.tree.leaves(logs[key])[0])):
                values = [np.ravel(x[n]).tolist() for x in jax.tree.leaves(logs[key])]
                steps = {
                    name: np.ravel(by_key[key][n]).tolist() for name, by_key in logs.steps.items() if key in by_key
                }
                steps = {name: step for name, step in steps.items() if step != [-1]}  # of another line
                recorded.setdefault((lane, key), []).append((values, steps))
    return error.key, error.steps, error.lane, np.ravel(error.value), dict(sorted(recorded.items()))


def doubling(x: Any, i: Any) -> Any:
    x = x * 2
    lox.log({"x": x, "n": i}, step=i)
    return x, None


def scanned(length: int) -> Any:
    return lambda x: lax.scan(doubling, x, jnp.arange(length))[0]


def looped(x: Any) -> Any:
    def body(c: Any) -> Any:
        n, x = c
        lox.log({"x": x}, step=n)
        return n + 1, x * 2

    return lax.while_loop(lambda c: c[0] < 300, body, (0, x))[1]


def uneven(x: Any) -> Any:
    """A while loop that ends at another iteration in every lane."""

    def body(c: Any) -> Any:
        n, x = c
        lox.log({"x": x, "same": 3}, step=n)
        return n + 1, x * 8

    return lax.while_loop(lambda c: (c[1] < 1e30) | (c[1] > 1e36), body, (0, x))[1]


def nested(x: Any) -> Any:
    def outer(x: Any, i: Any) -> Any:
        lox.log({"outer": x}, step=i)
        x = lax.scan(doubling, x, jnp.arange(i.dtype.type(7)))[0]
        lox.log({"x": -x}, step=i + 1000)
        return x, None

    return lax.scan(outer, x, jnp.arange(40))[0]


def many_inside(x: Any) -> Any:
    """An iteration with so many events that the loop around it is not split."""

    def outer(x: Any, i: Any) -> Any:
        x = lax.scan(doubling, x, jnp.arange(130))[0]
        lox.log({"end": x}, step=i)
        return x / 2.0**125, None

    return lax.scan(outer, x, jnp.arange(3))[0]


def counted(x: Any) -> Any:
    return lax.fori_loop(0, 230, lambda i, x: doubling(x, i)[0], x)


def branched(x: Any) -> Any:
    def step(x: Any, i: Any) -> Any:
        def odd(x: Any) -> Any:
            lox.log({"odd": x, "i": i}, step=i)
            return x * 3

        def even(x: Any) -> Any:
            lox.log({"even": -x})
            return x * 2

        x = lax.cond(i % 3 == 1, odd, even, x)
        lox.log({"some": x}, where=i % 2 == 0, step=i)
        return x, None

    return lax.scan(step, x, jnp.arange(150))[0]


def several_lines(x: Any) -> Any:
    """One key from several lines, also with other steps and other types."""
    lox.log({"x": x, "first": 1})

    def step(x: Any, i: Any) -> Any:
        lox.log({"x": x}, step=i)
        x = jax.checkpoint(lambda x: x * 2)(x)
        lox.log({"y": {"a": x, "b": (i, jnp.stack([x, -x]))}})
        lox.log({"x": x * 1.5, "i": i}, epoch=i)
        return x, None

    return jax.jit(lambda x: lax.scan(step, x, jnp.arange(150), reverse=True)[0])(x)


def unrolled(x: Any) -> Any:
    x = x * 2.0**122
    for i in range(9):
        x, _ = doubling(x, i)
    return x


PROGRAMS: dict[str, Any] = {
    "scan": scanned(170),
    "scan in blocks": scanned(1000),
    "scan with a rest": scanned(1009),
    "while": looped,
    "nested": nested,
    "many inside": many_inside,
    "fori": counted,
    "branches": branched,
    "several lines": several_lines,
    "unrolled": unrolled,
    "remat": jax.checkpoint(lambda x: lax.scan(jax.checkpoint(doubling), x, jnp.arange(170))[0]),
    "value_and_grad": jax.value_and_grad(scanned(170)),
    "uneven": uneven,
}
LASTS = [None, 4]


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.parametrize("last", LASTS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_against_a_simulation(name: str, last: int | None) -> None:
    fun, x = PROGRAMS[name], jnp.float32(1.5)
    events: list[Any] = []
    lox.tap(fun, events.append)(x)
    want = simulate(events, last, None)
    errors: list[lox.NonFiniteError] = []
    assert (want is None) == (name == "uneven")
    watched = lox.watch(fun, errors.append, last=last)
    for form in (watched, jax.jit(watched), lox.watch(jax.jit(fun), errors.append, last=last)):
        errors.clear()
        form(x)
        jax.effects_barrier()
        assert [repr(described(e, None)) for e in errors] == ([] if want is None else [repr(want)])


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.parametrize("last", LASTS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_against_a_simulation_in_lanes(name: str, last: int | None) -> None:
    fun, xs = jax.vmap(PROGRAMS[name]), jnp.float32([2.0**-20, 3.0, 1.5])
    events: list[Any] = []
    lox.tap(fun, events.append)(xs)
    want = simulate(events, last, 3)
    errors: list[lox.NonFiniteError] = []
    jax.jit(lox.watch(fun, errors.append, last=last))(xs)
    jax.effects_barrier()
    assert [repr(described(e, 3)) for e in errors] == ([] if want is None else [repr(want)])
    # Outside of the vmap, the lanes that have not failed go on to the end of their block.
    errors.clear()
    jax.jit(jax.vmap(lox.watch(PROGRAMS[name], errors.append, last=last)))(xs)
    jax.effects_barrier()
    assert bool(errors) == (want is not None)  # once for each block in which lanes fail
    if want is not None:
        error, (lane,) = described(errors[0], 3), want[2]
        failed = {place: found for place, found in want[4].items() if place[0] == lane}
        assert repr(error[:4]) == repr(want[:4])
        assert repr({place: found for place, found in error[4].items() if place[0] == lane}) == repr(failed)


# --- the flight recorder --------------------------------------------------------------------------


def loops(jaxpr: Any) -> Iterator[Any]:
    """The bodies of all loops."""
    for eqn in _compat.split_jaxpr(jaxpr)[0].eqns:
        for inside in _compat.sub_jaxprs(eqn.params):
            yield from loops(inside)
        if eqn.primitive.name in ("scan", "while"):
            yield eqn.params["jaxpr" if eqn.primitive.name == "scan" else "body_jaxpr"]


def primitives(jaxpr: Any) -> Iterator[str]:
    for eqn in _compat.split_jaxpr(jaxpr)[0].eqns:
        yield eqn.primitive.name
        for inside in _compat.sub_jaxprs(eqn.params):
            yield from primitives(inside)


@pytest.mark.slow
@pytest.mark.parametrize("fun", [scanned(1000), scanned(1009), looped, nested])
def test_a_loop_has_neither_host_calls_nor_branches(fun: Any) -> None:
    """Nor more writes than lines, if it is a scan: on a GPU, each is a kernel."""
    for last in (None, 7):
        watched = lox.nolog(lox.watch(fun, last=last))
        bodies = [list(primitives(body)) for body in loops(jax.make_jaxpr(jax.jit(watched))(1.0))]
        assert not {"lox_emit", "cond"} & {*bodies[0]}  # the innermost comes first
        assert sum("lox_emit" in body for body in bodies) <= 1  # between blocks
        innermost = next(loops(jax.make_jaxpr(watched)(1.0)))
        sizes, written = [x.size for x in _compat.in_avals(innermost)], [*primitives(innermost)]
        if fun is looped:  # an array for each of the value, the step and the number of the event
            assert max(sizes) == (last or 1) and written.count("dynamic_update_slice") == 3
        else:  # a row of the values, the step, the number of the event and whether it fails
            assert max(sizes) == 256 * 5 and written.count("dynamic_update_slice") == 1
            assert "dynamic_slice" not in written and "eq" not in written  # nor a look at what was there, nor at a flag


@pytest.mark.nightly
@pytest.mark.slow
def test_large_events_are_kept_as_often_as_asked_for() -> None:
    def fun(x: Any) -> Any:
        def step(x: Any, i: Any) -> Any:
            lox.log({"x": x}, step=i)
            return x * 2, None

        return lax.scan(step, x, jnp.arange(300))[0]

    for last, size in ((None, 2000), (None, 1000), (3, 2000), (5000, 1000), (5000, 3)):
        watched = lox.nolog(lox.watch(fun, last=last))
        innermost = next(loops(jax.make_jaxpr(watched)(jnp.ones(size))))
        largest = max(x.size for x in _compat.in_avals(innermost))
        roomy = {(None, 1000): 256, (5000, 3): 8192}
        assert largest == size * roomy.get((last, size), last or 1)
        with pytest.raises(lox.NonFiniteError, match=r"the first at .* at step=128") as info:
            watched(jnp.zeros(size).at[size - 1].set(1.0))
        assert info.value.logs["x"].shape == (min(last or 1, 129), size)
        assert info.value.logs["x"][-1, -1] == np.inf and np.isfinite(info.value.logs["x"][:-1]).all()


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.parametrize("last", [None, 1, 30, 150, 2000])
def test_a_failure_at_any_place_of_a_block(last: int | None) -> None:
    """What comes after it in its block is not in `error.logs`, and what came before it is, as far back as asked."""
    errors: list[lox.NonFiniteError] = []

    def fun(bad: Any, length: int) -> None:
        def step(n: Any, i: Any) -> Any:
            x = jnp.where((i == bad) | (i == bad + 1), jnp.nan, i.astype(jnp.float32))
            lox.log({"x": x}, step=i)
            lox.log({"third": -x}, where=i % 3 == 0, step=i)
            return n + 1, None

        lax.scan(step, 0, jnp.arange(length))

    watched = jax.jit(lox.nolog(lox.watch(fun, errors.append, last=last)), static_argnums=1)
    for length in (1000, 1009, 150):
        for bad in (0, 1, 50, 149, 199, 200, 201, 399, 998, 999, 1000, 1008):
            if bad >= length:
                continue
            errors.clear()
            watched(bad, length)
            jax.effects_barrier()
            (error,) = errors
            assert (error.key, error.steps) == ("x", {"step": bad})
            assert error.logs.step["x"].tolist() == [*range(bad + 1)][-(last or 1) :]
            assert error.logs["x"].tolist()[:-1] == [*range(bad)][len(range(bad)) + 1 - len(error.logs["x"]) :]
            if last and bad:  # in the same iteration, "x" comes first
                assert error.logs.step["third"].tolist() == [*range(0, bad, 3)][-last:]
                assert (-error.logs["third"]).tolist() == error.logs.step["third"].tolist()
            else:
                assert "third" not in error.logs


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("last", LASTS)
def test_numbers_of_events_may_overflow(last: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    initial = _watch.Record.initial_state
    start = np.int32(2**31 - 301)

    def late(self: Any) -> dict[str, Any]:
        return {**initial(self), "number": Laned(jnp.asarray(start))}

    for name in ("scan", "scan in blocks", "while", "nested", "branches"):
        told = []
        for state in (initial, late):
            monkeypatch.setattr(_watch.Record, "initial_state", state)
            errors: list[lox.NonFiniteError] = []
            jax.jit(lox.nolog(lox.watch(PROGRAMS[name], errors.append, last=last)))(1.5)
            jax.effects_barrier()
            told.append([repr(described(error, None)) for error in errors])
        assert len(told[0]) == 1 and told[0] == told[1]


@pytest.mark.slow
def test_numbers_of_all_dtypes_are_recorded() -> None:
    """Exactly, though a row has them as words."""
    names = ["bool", "int8", "uint8", "int16", "uint16", "int32", "uint32"]
    names += ["float8_e4m3fn", "float16", "bfloat16", "float32", "complex64"]

    def values(i: Any) -> dict[str, Any]:
        return {name: (i % 11 - 5).astype(jnp.dtype(name)) for name in names} | {"array": jnp.stack([i, -i])}

    def fun(n: int) -> None:
        def step(_: Any, i: Any) -> Any:
            nan = jnp.where(i == n, jnp.float32(jnp.nan), -jnp.float32(0))
            lox.log({**values(i), "key": jax.random.key(i), "nan": nan}, step=i)
            return None, None

        lax.scan(step, None, jnp.arange(250))

    with pytest.raises(lox.NonFiniteError, match="'nan' is NaN at step=230") as info:
        lox.nolog(lox.watch(fun, last=9))(230)
    logs, steps = info.value.logs, jnp.arange(222, 231)
    assert logs.step["nan"].tolist() == steps.tolist()
    for name, x in jax.vmap(values)(steps).items():
        assert logs[name].dtype == x.dtype
        np.testing.assert_array_equal(np.asarray(logs[name]), np.asarray(x))
    words = jax.random.key_data(jax.vmap(jax.random.key)(steps))
    np.testing.assert_array_equal(jax.random.key_data(logs["key"]), words)
    assert np.signbit(logs["nan"][:-1]).all()


@pytest.mark.slow
def test_the_host_is_called_only_if_an_event_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if there are rings that are not full, or that nothing ever comes into."""
    calls: list[str | None] = []
    monkeypatch.setattr(_report.Report, "__call__", lambda self, packet, token=0: calls.append(packet.signal))

    def fun(x: Any) -> Any:
        def step(x: Any, i: Any) -> Any:
            lax.cond(i < 0, lambda: [lox.log({"never": x})][1:], lambda: [])
            lox.log({"x": x}, step=i)
            return x * 0.5, None

        return lax.scan(step, x, jnp.arange(40))[0]

    for last in (None, 1000):
        for f in (fun, looped, scanned(20)):
            jax.block_until_ready(jax.jit(lox.nolog(lox.watch(f, last=last)))(0.0))
            jax.effects_barrier()
            assert calls == []


@pytest.mark.slow
def test_long_loops_stop_soon() -> None:
    """The error comes after a block, not after the loop."""
    seen: list[int] = []

    def fun(x: Any) -> Any:
        def body(c: Any) -> Any:
            n, x = c
            lox.log({"x": x}, step=n)
            return n + 1, x * 2

        return lax.while_loop(lambda c: c[0] < 10**6, body, (0, x))

    for f in (fun, lambda x: lax.scan(doubling, x, jnp.arange(10**6))[0]):
        seen.clear()
        with pytest.raises(lox.NonFiniteError, match=r"'x' is inf at step=12[78]\."):
            lox.watch(lox.tap(f, lambda logs: seen.append(1), argnames="x", interval=10))(1.5)
        assert 13 <= len(seen) <= 40


@pytest.mark.slow
def test_a_key_that_is_logged_with_different_shapes() -> None:
    """`watch` is no stricter than the function; `error.logs` has the newest events, as many as fit together."""

    def f(x: Any) -> None:
        for value in (jnp.ones(3), jnp.ones(2), jnp.ones(3), jnp.stack([x, x])):
            lox.log({"x": value})

    for g in (f, jax.jit(f)):
        with pytest.raises(lox.NonFiniteError) as info:
            lox.watch(g, last=10)(jnp.nan)
        np.testing.assert_array_equal(info.value.logs["x"], [[1, 1], [np.nan, np.nan]])


@pytest.mark.slow
def test_prng_keys_and_keys_that_are_not_watched_are_recorded() -> None:
    def f(x: Any) -> None:
        def step(key: Any, i: Any) -> Any:
            lox.log({"key": key, "bad": jnp.nan}, step=i)
            lox.log({"x": x / (3 - i).astype(jnp.float32)}, step=i)
            return jax.random.split(key, 1)[0], None

        lax.scan(step, jax.random.key(0), jnp.arange(5))

    with pytest.raises(lox.NonFiniteError) as info:
        lox.watch(f, argnames="x", last=2)(1.0)
    logs = info.value.logs
    assert info.value.key == "x" and list(logs) == ["key", "bad", "x"]
    assert logs.step["key"].tolist() == logs.step["x"].tolist() == [2, 3]
    with pytest.raises(lox.NonFiniteError) as info:
        lox.watch(f, argnames="x")(1.0)
    assert {key: x.tolist() for key, x in info.value.logs.items()} == {"x": [np.inf]}


@pytest.mark.slow
def test_every_device_records_its_own() -> None:
    mesh = jax.sharding.Mesh(devices(8), ("d",))
    spec = jax.sharding.PartitionSpec("d")
    sharded = jax.shard_map(lambda x: squares(x[0])[None], mesh=mesh, in_specs=spec, out_specs=spec)
    for f in (lox.watch(sharded, last=3), lox.watch(jax.jit(sharded), last=3)):
        with pytest.raises(lox.NonFiniteError) as info:
            f(jnp.ones(8).at[3].set(9.0))
        assert (info.value.key, info.value.steps) == ("x", {"step": 5})
        assert np.ravel(info.value.logs["n"]).tolist() == [3, 4, 5]


@pytest.mark.nightly
@pytest.mark.slow
def test_a_loop_around_devices_records_up_to_the_failure_on_all_of_them() -> None:
    mesh = jax.sharding.Mesh(devices(8), ("d",))
    spec, everywhere = jax.sharding.PartitionSpec("d"), jax.sharding.PartitionSpec()

    def doubled(x: Any, i: Any) -> Any:
        lox.log({"x": x[0] * 2}, step=i)
        return x * 2

    def fun(x: Any) -> Any:
        step = jax.shard_map(doubled, mesh=mesh, in_specs=(spec, everywhere), out_specs=spec)
        return lax.scan(lambda x, i: (step(x, i), None), x, jnp.arange(300))[0]

    with pytest.raises(lox.NonFiniteError, match=r"'x' is inf at step=125 in lane 3\.") as info:
        lox.watch(fun, last=3)(jnp.ones(8).at[3].set(4.0))
    assert np.ravel(info.value.logs.step["x"]).tolist() == [123, 124, 125]
    want = 2.0 ** np.arange(124, 127)[:, None] * np.where(np.arange(8) == 3, 4.0, 1.0)
    want[-1, 3] = np.inf
    np.testing.assert_array_equal(info.value.logs["x"], want)


def test_last_has_to_be_a_positive_integer() -> None:
    for last in (0, -1, 1.5, True):
        with pytest.raises(lox.OptionError, match=f"`last` is {last}; it must be a positive integer"):
            lox.watch(squares, last=last)  # type: ignore[arg-type]


def test_an_error_can_be_pickled_with_its_logs() -> None:
    with pytest.raises(lox.NonFiniteError) as info:
        lox.watch(squares, last=2)(9.0)
    copy = pickle.loads(pickle.dumps(info.value))
    assert str(copy) == str(info.value) and copy.logs["n"].tolist() == [4, 5]


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_a_logger_writes_the_last_events(tmp_path: Any, wrap: Any) -> None:
    with lox.SaveLogger(tmp_path) as logger:
        state = logger.init(jax.random.key(0))
        with pytest.raises(lox.NonFiniteError, match="'x' is inf at step=5"):
            logger.watch(wrap(squares), state, last=3)(9.0)
        assert logger.watch(wrap(squares), state, last=3)(0.5) == 0
        logger.log(state, {"after": 1})  # the logger is still usable
        logger.flush()
        errors: list[Any] = []
        logger.watch(wrap(squares), state, errors.append, prefix="again/")(9.0)
        assert len(errors) == 1
    logs = lox.load(tmp_path, key=jax.random.key(0))
    assert logs["n"].tolist() == logs.step["x"].tolist() == [3, 4, 5]
    assert logs["after"].tolist() == [1] and logs["again/n"].tolist() == [5]


@pytest.mark.slow
def test_a_logger_writes_the_last_events_of_the_device_that_failed(tmp_path: Any) -> None:
    mesh = jax.sharding.Mesh(devices(8), ("d",))
    spec = jax.sharding.PartitionSpec("d")
    sharded = jax.shard_map(lambda x: squares(x[0])[None], mesh=mesh, in_specs=spec, out_specs=spec)
    with lox.SaveLogger(tmp_path) as logger:
        state = logger.init(jax.random.key(0))
        with pytest.raises(lox.NonFiniteError):
            logger.watch(jax.jit(sharded), state, last=3)(jnp.ones(8).at[3].set(9.0))
    assert np.ravel(lox.load(tmp_path, key=jax.random.key(0))["n"]).tolist() == [3, 4, 5]


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.parametrize("fun", [scanned(1000), looped], ids=["scan", "while"])
def test_a_lane_that_has_failed_is_written_once(tmp_path: Any, fun: Any) -> None:
    """Others that fail later do not bring its events again."""
    prng_keys = jax.random.split(jax.random.key(0), 3)
    errors: list[lox.NonFiniteError] = []
    with lox.SaveLogger(tmp_path) as logger:
        states = jax.vmap(logger.init)(prng_keys)
        watched = lambda state, x: lox.nolog(logger.watch(fun, state, errors.append, argnames="x", last=3))(x)  # noqa: E731
        jax.vmap(watched)(states, jnp.float32([1, 2.0**-110, 0]))
    assert [error.lane for error in errors] == [(0,), (1,)]
    first, second, _ = [lox.load(tmp_path, key=key).step["x"].tolist() for key in prng_keys]
    assert len(first) == 3 and len({*first}) == 3 and first[-1] == errors[0].steps["step"]
    assert second[-3:] == [errors[1].steps["step"] - n for n in (2, 1, 0)] and len({*second}) == len(second) == 6


@pytest.mark.slow
def test_every_run_gets_its_lanes(tmp_path: Any) -> None:
    prng_keys = jax.random.split(jax.random.key(0), 3)
    with lox.SaveLogger(tmp_path) as logger:
        states = jax.vmap(logger.init)(prng_keys)
        xs = jnp.array([0.5, 9.0, 20.0])
        with pytest.raises(lox.NonFiniteError, match="'x' is inf at step=4 in lane 2"):
            jax.vmap(lambda state, x: logger.watch(squares, state, last=3)(x))(states, xs)
    runs = [lox.load(tmp_path, key=key) for key in prng_keys]
    assert [logs.step["x"].tolist() for logs in runs] == [[97, 98, 99], [3, 4, 5], [2, 3, 4]]
    assert [np.isfinite(logs["x"]).tolist()[-1] for logs in runs] == [True, False, False]
