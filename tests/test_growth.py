"""What the cost of a program grows with: equations and carries for each `lox.log`, never times.

Also, that keys which share an accumulator have the results that they have alone, to the last bit.
"""

import pathlib
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lox

REDUCTIONS = ("mean", "sum", "min", "max", "first", "last", "count", "std", "var")


def logging(sites: int) -> Callable[[Any], Any]:
    """A loop whose body has that many `lox.log`, each with a key of its own."""

    def fun(x: Any) -> Any:
        def step(c: Any, i: Any) -> Any:
            for n in range(sites):
                c = c * 1.01
                lox.log({f"k{n}": c}, step=i)
            return c, None

        return jax.lax.scan(step, x, jnp.arange(100))[0]

    return fun


def jaxprs_in(params: Any) -> list[Any]:
    values = [v for value in params.values() for v in (value if isinstance(value, tuple | list) else [value])]
    return [getattr(value, "jaxpr", value) for value in values if hasattr(getattr(value, "jaxpr", value), "eqns")]


def equations(jaxpr: Any) -> list[Any]:
    """All equations, those of inner jaxprs included."""
    inner = [eqn for outer in jaxpr.eqns for sub in jaxprs_in(outer.params) for eqn in equations(sub)]
    return [*jaxpr.eqns, *inner]


TRANSFORMED = {
    "spool": lambda fun: lox.spool(fun),
    "mean": lambda fun: lox.spool(fun, reduce="mean"),
    "var": lambda fun: lox.spool(fun, reduce="var"),
    "buffer": lambda fun: lox.tap(fun, lambda logs: None, buffer=10),
    "tap mean": lambda fun: lox.tap(fun, lambda logs: None, reduce="mean"),
}


def traced(name: str, sites: int) -> Any:
    return jax.make_jaxpr(TRANSFORMED[name](logging(sites)))(1.0).jaxpr


# One for the multiplication; `buffer` and `tap` let the log flow on. A reduction puts the value beside the others, and
# takes the result of each key from that of all.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "most"), [("spool", 1), ("mean", 3), ("var", 3), ("buffer", 2), ("tap mean", 5)], ids=str
)
def test_equations_for_each_log(name: str, most: int) -> None:
    counts = [len(equations(traced(name, sites))) for sites in (48, 96, 144)]
    assert counts[2] - counts[1] <= most * 48 + 10, counts
    assert abs((counts[2] - counts[1]) - (counts[1] - counts[0])) <= 4, counts  # linear, up to where chunks end


def calls(trace: Callable[[], Any]) -> int:
    """How many functions of lox are called, comprehensions apart, which are calls up to Python 3.11."""
    source, count = str(pathlib.Path(lox.__file__).parent), 0

    def profile(frame: Any, event: str, arg: Any) -> None:
        nonlocal count
        code = frame.f_code
        count += event == "call" and code.co_filename.startswith(source) and code.co_name[0] != "<"

    sys.setprofile(profile)
    try:
        trace()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.sample(2)
@pytest.mark.slow
@pytest.mark.parametrize(("name", "most"), [("spool", 115), ("mean", 140), ("buffer", 140)], ids=str)
def test_calls_for_each_log(name: str, most: int) -> None:
    traced(name, 2)
    counts = [calls(lambda sites=sites: traced(name, sites)) for sites in (50, 100)]
    assert counts[1] - counts[0] <= most * 50, (counts[1] - counts[0]) / 50


@pytest.mark.parametrize("name", ["spool", "mean", "buffer"])
def test_plain_equations_are_not_evaluated_again(name: str, monkeypatch: Any) -> None:
    """They become part of the rebuilt loop as they are, with their names and lines."""
    binds: list[Any] = []
    bind = jax.lax.mul_p.bind
    monkeypatch.setattr(jax.lax.mul_p, "bind", lambda *args, **params: binds.append(1) or bind(*args, **params))

    def fun(x: Any) -> Any:
        def step(c: Any, i: Any) -> Any:
            for n in range(20):
                with jax.named_scope(f"scope{n}"):
                    c = c * 1.01
                lox.log({f"k{n}": c}, step=i)
            return c, None

        return jax.lax.scan(step, x, jnp.arange(100))[0]

    with jax.named_scope("around"):
        made = jax.make_jaxpr(TRANSFORMED[name](fun))(jnp.float32(1)).jaxpr
    assert len(binds) <= 2  # JAX evaluates the product once, too, and remembers it
    products = [eqn.source_info for eqn in equations(made) if "scope" in str(eqn.source_info.name_stack)]
    assert [str(info.name_stack).split("/")[-1] for info in products] == [f"scope{n}" for n in range(20)]
    lines = [{frame.line_num for frame in info.traceback.frames} for info in products]
    assert all(fun.__code__.co_firstlineno + 4 in numbers for numbers in lines)


@pytest.mark.parametrize("start", [1.0, jnp.float32(1.0)], ids=["weak", "strong"])
def test_logs_that_flow_on_are_not_bound_again(monkeypatch: pytest.MonkeyPatch, start: Any) -> None:
    """They become equations as they are, also if the carry they come from was weak; who is outside sees them once."""
    seen: list[list[float]] = []
    tapped = lox.tap(logging(3), lambda logs: seen.append(logs["k1"].tolist()), buffer=10)
    monkeypatch.setattr("lox._transforms._spool.bind", lambda *_, **__: pytest.fail("bound again"))
    jax.make_jaxpr(tapped)(start)
    monkeypatch.undo()
    _, logs = jax.jit(lox.spool(tapped))(start)
    _, expected = jax.jit(lox.spool(logging(3)))(start)
    jax.effects_barrier()
    assert [x for part in seen for x in part] == expected["k1"].tolist()
    for key in ("k0", "k1", "k2"):
        assert logs[key].dtype == jnp.float32 and not logs[key].weak_type
        np.testing.assert_array_equal(logs[key], expected[key])
        np.testing.assert_array_equal(logs.step[key], np.arange(100))


@pytest.mark.sample(2)
@pytest.mark.slow
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("stacks", [False, True])
def test_a_weak_carry_is_converted_once(stacks: bool, reverse: bool) -> None:
    """A value logged is not weak, whatever it comes from; the results are as weak as without the logs."""

    def fun(x: Any, n: Any, keys: str = "abcd") -> Any:
        def step(c: Any, i: Any) -> Any:
            x, n, strong = c
            for key in keys:
                x = x * 1.5
                n = n + 1
                lox.log({key: x, f"{key}n": n}, step=i)
            x = jax.lax.scan(lambda c, _: (lox.log({"inner": c}) and c + 1, None), x, None, length=2)[0]
            return (x, n, strong + x), (x if stacks else strong)

        return jax.lax.scan(step, (x, n, jnp.float32(0)), jnp.arange(5), reverse=reverse)

    def types(tree: Any) -> Any:
        return [(x.shape, x.dtype, x.weak_type) for x in jax.tree.leaves(tree)]

    out, logs = jax.jit(lox.spool(fun))(1.0, 2)
    assert types(out) == types(jax.jit(lox.nolog(fun))(1.0, 2))
    assert not any(weak for *_, weak in types(logs))
    eager, expected = lox.spool(fun)(1.0, 2)
    jax.tree.map(np.testing.assert_array_equal, (out, logs), (eager, expected))

    def conversions(keys: str) -> int:
        made = jax.make_jaxpr(lambda x, n: lox.spool(fun)(x, n, keys))(1.0, 2).jaxpr
        return sum(eqn.primitive.name == "convert_element_type" for eqn in equations(made))

    assert stacks or conversions("ab") == conversions("abcdefgh")


@pytest.mark.parametrize("name", ["mean", "var", "tap mean"])
def test_keys_that_are_alike_share_an_accumulator(name: str) -> None:
    def operands(sites: int) -> list[int]:
        return [len(eqn.invars) for eqn in equations(traced(name, sites)) if eqn.primitive.name == "scan"]

    assert operands(200) == operands(2)


def test_steps_are_stacked_once() -> None:
    _, logs = jax.eval_shape(lox.spool(logging(3)), 1.0)
    assert {key: x.shape for key, x in logs.step.items()} == {f"k{n}": (100,) for n in range(3)}
    outputs = [len(eqn.outvars) for eqn in equations(traced("spool", 50)) if eqn.primitive.name == "scan"]
    assert len(outputs) == 1 and outputs[0] <= 52  # the carry, the values and one step


def test_the_counter_of_a_loop_is_stacked_once() -> None:
    """It is weak; were it converted for each log, each would have a step of its own."""

    def fun(x: Any, sites: int) -> Any:
        def step(i: Any, c: Any) -> Any:
            for n in range(sites):
                lox.log({f"k{n}": c + n}, step=i)
            return c + i

        return jax.lax.fori_loop(0, 100, step, x)

    def shapes(sites: int) -> list[Any]:
        made = jax.make_jaxpr(lambda x: lox.spool(fun)(x, sites))(jnp.float32(1)).jaxpr
        (loop,) = [eqn for eqn in equations(made) if eqn.primitive.name == "scan"]
        return [v.aval.dtype.name for v in loop.outvars if v.aval.shape == (100,)]

    assert [shapes(n).count("int32") for n in (1, 2, 30)] == [1, 1, 1]
    assert shapes(30).count("float32") == 30


def test_a_loop_with_reductions_is_traced_once(monkeypatch: Any) -> None:
    """The type of its state is known from its logs."""
    from lox._engine import _rules

    bodies: list[Any] = []
    interpret = _rules.interpret
    monkeypatch.setattr(
        _rules, "interpret", lambda frame, jaxpr, args: bodies.append(1) or interpret(frame, jaxpr, args)
    )

    def nested(x: Any, depth: int) -> Any:
        if not depth:
            lox.log({"x": x}, reduce="mean")
            return jnp.sin(x)
        x = jax.lax.cond(x > 0, lambda x: (lox.log({"y": x}, reduce="max"), x)[1], lambda x: x, x)
        return jax.lax.scan(lambda c, _: (nested(c, depth - 1), None), x, None, length=2)[0]

    _, logs = lox.spool(jax.jit(lambda x: nested(x, 5)))(1.0)
    assert len(bodies) == 5 and set(logs) == {"x", "y"}


TABLE = np.random.default_rng(0).normal(size=(17, 3, 32)).astype(np.float32) * 10.0 ** (
    np.arange(32, dtype=np.float32) % 7
)


def values(row: Any) -> dict[str, Any]:
    """Values of which some are alike. They are not computed: what XLA fuses, it may round in another way."""
    return {
        **{f"float{n}": row[n] for n in range(11)},
        **{f"int{n}": jax.lax.bitcast_convert_type(row[11 + n], jnp.int32) // 64 for n in range(3)},
        **{f"vector{n}": row[14 + 3 * n : 17 + 3 * n] for n in range(3)},
        **{f"half{n}": row[23 + n].astype(jnp.bfloat16) for n in range(2)},
        **{f"tree{n}": {"a": row[25 + n], "b": row[27 + n] > 0} for n in range(2)},
        "complex": jax.lax.complex(row[29], row[30]),
    }


def same(found: Any, expected: Any, rtol: float) -> None:
    def compare(a: Any, b: Any) -> None:
        assert a.shape == b.shape and a.dtype == b.dtype
        wide = np.complex128 if np.issubdtype(a.dtype, np.complexfloating) else np.float64
        np.testing.assert_allclose(np.asarray(a).astype(wide), np.asarray(b).astype(wide), rtol=rtol, atol=0)

    jax.tree.map(compare, found, expected)


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("how", REDUCTIONS)
@pytest.mark.parametrize("option", ["plain", "where", "weight", "interval", "vmap", "while", "tap"])
def test_shared_accumulators_are_exact(how: str, option: str) -> None:
    if how in ("min", "max", "std", "var") and option == "weight":
        pytest.skip("only a mean has weights")
    keys = [key for key in values(jnp.zeros(32)) if not (key == "complex" and how in ("min", "max"))]
    keys = [key for key in keys if not (key.startswith("tree") and how in ("std", "var"))]

    def program(together: bool) -> Callable[[Any], Any]:
        def body(lane: Any, i: Any) -> Any:
            row = jnp.asarray(TABLE)[i, lane]
            given: dict[str, Any] = {"step": i}
            if option == "where":
                given["where"] = i % 3 == 1
            if option == "weight":
                given["weight"] = abs(row[31])
            logged = {key: value for key, value in values(row).items() if key in keys}
            for key, value in logged.items():  # alone, every key has a step of its own, which is another array
                lox.log({key: value}, **(given if together else {**given, "step": i + 0}))
            return lane

        def fun(x: Any) -> Any:
            if option == "while":
                return jax.lax.while_loop(lambda c: c[1] < 17, lambda c: (body(*c), c[1] + 1), (x, 0))[0]
            return jax.lax.fori_loop(0, 17, lambda i, x: body(x, i), x)

        return jax.vmap(fun) if option == "vmap" else fun

    x = jnp.arange(3) if option == "vmap" else 1
    interval = 4 if option == "interval" else None

    def logs_of(together: bool) -> Any:
        if option == "tap":
            received: list[Any] = []
            lox.tap(program(together), received.append, reduce=how)(x)
            return [(dict(logs), dict(logs.step)) for logs in received]
        _, logs = jax.jit(lox.spool(program(together), reduce=how, interval=interval))(x)
        assert list(logs) == keys
        return dict(logs), dict(logs.step), dict(logs.valid)

    # XLA may divide or multiply with the inverse, and round a product that is added or not.
    rtol = 1e-5 if how in ("std", "var") or option == "weight" else 2e-7 if how == "mean" else 0
    same(logs_of(True), logs_of(False), rtol)


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("how", ["mean", "max", "first"])
def test_keys_that_part(how: str) -> None:
    """Keys share a state only as long as they are logged together."""
    keys = [f"k{n}" for n in range(12)]

    def fun(x: Any) -> Any:
        def step(x: Any, i: Any) -> Any:
            for n, key in enumerate(keys):
                lox.log({key: x * n}, step=i)
            x = jax.lax.cond(
                i % 2 == 0,
                lambda x: (lox.log({"k2": x, "k7": -x}, step=-i), lox.log({"k3": 2 * x}), x + 1)[-1],
                lambda x: (lox.log({"k3": x, "new": x}), x)[1],
                x,
            )
            lox.log({"k5": x, "k2": x})
            return x, None

        x, _ = jax.lax.scan(step, x, jnp.arange(6))
        lox.log({"k0": x, "k11": x})
        return jax.lax.scan(lambda x, _: (lox.log({key: x for key in keys}) and x, None), x, None, length=3)[0]

    _, logs = jax.jit(lox.spool(fun, reduce=how))(1.5)
    _, plain = lox.spool(fun)(1.5)
    assert list(logs) == list(plain)
    for key in plain:
        events = np.asarray(plain[key])
        expected = {"mean": np.mean(events, dtype=np.float64), "max": events.max(), "first": events[0]}[how]
        np.testing.assert_allclose(logs[key], expected, rtol=1e-6, err_msg=key)
        assert key not in plain.step or logs.step[key] == plain.step[key][-1], key


@pytest.mark.parametrize("lanes", [False, True])
@pytest.mark.parametrize("options", [{"buffer": 10}, {"interval": 2}, {}])
def test_a_step_of_many_events_is_one_operand_of_the_host_call(options: Any, lanes: bool) -> None:
    def count(sites: int) -> list[int]:
        tapped = lox.tap(logging(sites), lambda logs: None, **options)
        jaxpr = jax.make_jaxpr(jax.vmap(tapped) if lanes else tapped)(jnp.ones(3) if lanes else 1.0).jaxpr
        return [len(eqn.invars) for eqn in equations(jaxpr) if eqn.primitive.name == "lox_emit"]

    if "buffer" in options:
        few, many = max(count(5)), max(count(25))
        assert many - few == 20 and few <= 5 + 4  # the values, a step, a token, and which events there are
    else:
        assert max(count(5)) == max(count(25)) <= 4


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("options", [{}, {"buffer": 4}, {"buffer": 3, "interval": 2}])
@pytest.mark.parametrize("lanes", [0, 2])
def test_events_that_share_their_steps_arrive_as_by_spool(options: Any, lanes: int) -> None:
    def fun(x: Any) -> Any:
        def step(c: Any, i: Any) -> Any:
            for n in range(4):
                c = c * 1.5
                lox.log({f"k{n}": c}, step=i, other=i * 2)
                lox.log({f"m{n}": c}, step=i, where=c > 5)
                lox.log({"same": i, "i": i}, step=i)
            return c, None

        return jax.lax.scan(step, x, jnp.arange(7))[0]

    fun, x = (jax.vmap(fun), jnp.arange(1.0, lanes + 1)) if lanes else (fun, 1.0)
    seen: list[lox.logdict] = []
    jax.block_until_ready(jax.jit(lox.tap(fun, seen.append, **options))(x))
    jax.effects_barrier()
    expected = lox.spool(fun, interval=options.get("interval"))(x)[1]
    streamed = sum(seen, lox.logdict())
    for key in expected:
        for lane in range(lanes) or [None]:
            a, b = (logs if lane is None else logs.lane(lane) for logs in (streamed, expected))
            np.testing.assert_array_equal(np.ravel(a[key]), np.ravel(b[key]))
            np.testing.assert_array_equal(np.ravel(a.step[key]), np.ravel(b.step[key]))


@pytest.mark.slow
def test_a_chain_of_reductions_compiles() -> None:
    """Without a loop, one reduction after the other; the XLA of JAX 0.7 did not come to an end with four of them."""

    def fun(x: Any) -> Any:
        def some(x: Any) -> Any:
            lox.log({"v": jnp.stack([x, 2 * x, 3 * x])})
            return x + 1

        def others(x: Any) -> Any:
            lox.log({"v": jnp.stack([x, 5 * x, 3 * x])})
            return x

        for _ in range(8):
            x = jax.lax.switch((x % 3).astype(int), [some, others, lambda x: x + 1], x)
        return x

    xs = jnp.arange(3.0)
    _, logs = jax.jit(lox.spool(jax.vmap(fun), reduce="mean"))(xs)
    for n, x in enumerate(xs):
        _, plain = lox.spool(fun)(x)
        np.testing.assert_allclose(logs.lane(n)["v"], plain["v"].mean(0), rtol=1e-6)
