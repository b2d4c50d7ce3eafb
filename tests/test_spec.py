"""The examples of the specification that need no logger."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exact import boolean, f32, i32, same
from spec_programs import with_steps

import lox
from lox import logify

# --- quick start ---


def accumulate(xs):
    lox.log({"xs": xs})

    def step(carry, x):
        carry += x
        lox.log({"carry": carry})
        return carry, x

    y, _ = jax.lax.scan(step, 0, xs)
    return y


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
def test_quick_start_tap(capsys, wrap):
    def callback(logs):
        print("Logging:", logs)

    y = lox.tap(wrap(accumulate), callback=callback)(jnp.arange(3))
    same(y, i32(3))
    assert capsys.readouterr().out == (
        "Logging: {'xs': [0, 1, 2]}\nLogging: {'carry': 0}\nLogging: {'carry': 1}\nLogging: {'carry': 3}\n"
    )


def test_quick_start_jit_of_tap(capsys):
    y = jax.jit(lox.tap(accumulate))(jnp.arange(3))
    jax.effects_barrier()
    same(y, i32(3))
    out = capsys.readouterr().out
    assert out == "{'xs': [0, 1, 2]}\n{'carry': 0}\n{'carry': 1}\n{'carry': 3}\n"


@pytest.mark.parametrize(
    "spooled",
    [
        lox.spool(accumulate),
        jax.jit(lox.spool(accumulate)),
        lox.spool(jax.jit(accumulate)),
    ],
    ids=["spool", "jit-spool", "spool-jit"],
)
def test_quick_start_spool(capsys, spooled):
    for _ in range(2):
        y, logs = spooled(jnp.arange(3))
        same(y, i32(3))
        same(logs, {"xs": i32([0, 1, 2]), "carry": i32([0, 1, 3])})
        assert isinstance(logs, lox.logdict)
        assert str(logs) == "{'xs': [0, 1, 2], 'carry': [0, 1, 3]}"
        assert logs.valid == {}
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
def test_quick_start_steps(wrap):
    y, logs = wrap(lox.spool(with_steps))(jnp.arange(3))
    same(y, i32(3))
    same(logs, {"carry": i32([0, 1, 3])})
    same(logs.step, {"carry": i32([0, 1, 2])})
    same(logs.episode, {"carry": i32([0, 0, 1])})
    same(logs["carry"], i32([0, 1, 3]))
    same(logs.step["carry"], i32([0, 1, 2]))


def test_quick_start_print_of_an_array(capsys):
    _, logs = lox.spool(with_steps)(jnp.arange(3))
    print("Collected Logs:", logs["carry"])
    assert capsys.readouterr().out == "Collected Logs: [0 1 3]\n"


def test_steps_reach_the_tap():
    events = []
    lox.tap(with_steps, events.append)(jnp.arange(3))
    assert [str(e) for e in events] == ["{'carry': 0}", "{'carry': 1}", "{'carry': 3}"]
    for i, event in enumerate(events):
        same(event.step, {"carry": i32(i)})
        same(event.episode, {"carry": i32(i // 2)})


# --- README ---


def readme(xs):
    lox.log({"xs": xs})

    def scan_step(carry, x):
        carry = carry + x
        lox.log({"xs": carry, "x": x})
        return carry, x

    lox.log({"xs": xs})
    ys, _ = jax.lax.scan(scan_step, xs, xs)
    return ys


def test_readme_one_key_outside_and_inside_a_scan():
    ys, logs = lox.spool(readme)(jnp.arange(3))
    same(ys, i32([3, 4, 5]))
    expected = {
        "xs": i32([[0, 1, 2], [0, 1, 2], [0, 1, 2], [1, 2, 3], [3, 4, 5]]),
        "x": i32([0, 1, 2]),
    }
    same(logs, expected)


def test_readme_events_of_one_key_must_have_one_shape():
    def f(xs):
        lox.log({"xs": xs})

        def scan_step(xs, x):
            xs = xs + x
            lox.log({"xs": xs, "x": x})
            return xs, x

        ys, _ = jax.lax.scan(scan_step, 0, xs)
        return ys

    with pytest.raises(lox.MismatchError, match="'xs' is logged with different shape"):
        lox.spool(f)(jnp.arange(3))


def test_readme_general_logging(capsys):
    def f(x):
        lox.log({"x": x})

        def step(carry, x):
            lox.log({"x": x})
            return carry + x, None

        return jax.lax.scan(step, x, jnp.arange(5))

    y, none = f(3)
    jax.effects_barrier()
    same(y, i32(13))
    assert none is None
    out = capsys.readouterr().out
    assert out == "{'x': 3}\n{'x': 0}\n{'x': 1}\n{'x': 2}\n{'x': 3}\n{'x': 4}\n"


def test_readme_logging_under_jit(capsys):
    @jax.jit
    def f(x):
        lox.log({"x": x})
        return x * x

    for x in (3, 4):
        assert f(x) == x * x
        jax.effects_barrier()
        assert capsys.readouterr().out == f"{{'x': {x}}}\n"


def test_readme_spool(capsys):
    def f(x, y):
        lox.log({"x": x, "y": y})
        return x * y

    z, logs = lox.spool(f)(3, 4)
    print("f(x, y)", z)
    print("Logs:", logs)
    assert capsys.readouterr().out == "f(x, y) 12\nLogs: {'x': 3, 'y': 4}\n"
    same(logs, {"x": i32(3), "y": i32(4)})


def test_readme_nolog(capsys):
    plain = lox.nolog(accumulate)
    for f in (plain, jax.jit(plain), lox.nolog(jax.jit(accumulate))):
        same(f(jnp.arange(3)), i32(3))
    jax.effects_barrier()
    assert capsys.readouterr().out == ""


# --- sharp bits ---


def test_branches_that_log_different_keys():
    def f(x):
        def yes(x):
            lox.log({"a": x})
            return x

        def no(x):
            return -x

        return jax.lax.cond(x > 0, yes, no, x)

    y, logs = lox.spool(f)(1.0)
    assert y == 1.0
    same(logs, {"a": f32([1.0])})
    assert logs.valid == {}

    y, logs = lox.spool(f)(-1.0)
    assert y == 1.0
    same(logs, {"a": f32([])})
    assert logs.valid == {}

    y, logs = jax.jit(lox.spool(f))(-1.0)
    same(logs, {"a": f32([np.nan])})
    same(logs.valid, {"a": boolean([False])})
    same(logs.compact(), {"a": f32([])})

    y, logs = jax.jit(lox.spool(f))(1.0)
    same(logs, {"a": f32([1.0])})
    same(logs.valid, {"a": boolean([True])})
    same(logs.compact(), {"a": f32([1.0])})
    assert logs.compact().valid == {}


def count_to(n):
    def body(i):
        lox.log({"i": i}, step=i)
        return i + 1

    return jax.lax.while_loop(lambda i: i < n, body, 0)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
def test_while_loop_cannot_be_spooled(wrap):
    with pytest.raises(lox.SpoolError) as info:
        lox.spool(wrap(count_to))(3)
    head, site, *ways = str(info.value).split("\n")
    assert head == ("`lox.spool` cannot return 'i': it is logged inside `while_loop`, whose length is unknown.")
    assert site.startswith("  logged at test_spec.py:")
    assert site.endswith(" (count_to.body)")
    assert ways == [
        "Either give the loop room:   lox.spool(f, capacity=1000)",
        'or reduce while it runs:     lox.spool(f, reduce="mean")',
        "or stream the events:        lox.tap(f, callback)",
    ]


def test_while_loop_three_ways_out(capsys):
    y, logs = lox.spool(count_to, capacity=1000)(3)
    same(y, i32(3))
    same(logs, {"i": i32([0, 1, 2])})
    same(logs.step, {"i": i32([0, 1, 2])})

    y, logs = lox.spool(count_to, reduce="mean")(3)
    same(logs, {"i": f32(1.0)})

    y = lox.tap(count_to)(3)
    assert capsys.readouterr().out == "{'i': 0} step=0\n{'i': 1} step=1\n{'i': 2} step=2\n"


def total(lower, upper):
    def body(i, carry):
        lox.log({"i": i})
        return carry + i

    return jax.lax.fori_loop(lower, upper, body, 0)


def test_fori_loop_with_static_bounds():
    y, logs = lox.spool(total)(1, 4)  # Python numbers stay Python numbers under spool
    same(y, i32(6))
    same(logs, {"i": i32([1, 2, 3])})


def test_fori_loop_with_dynamic_bounds(capsys):
    with pytest.raises(lox.SpoolError, match="'i': it is logged inside `while_loop`"):
        jax.jit(lox.spool(total))(1, 4)
    assert lox.tap(jax.jit(total))(1, 4) == 6
    assert capsys.readouterr().out == "{'i': 1}\n{'i': 2}\n{'i': 3}\n"


def test_spool_of_a_jitted_function():
    traces = []

    @jax.jit
    def f(x):
        traces.append(x)
        lox.log({"x": x})
        return x

    x = 1.0
    with lox.testing.capture() as events:
        assert f(x) == 1.0
        assert f(x) == 1.0
    assert len(traces) == 1
    assert [str(e) for e in events] == ["{'x': 1.0}"] * 2

    spooled = lox.spool(f)
    with lox.testing.capture() as events:
        for _ in range(3):
            y, logs = spooled(x)
            assert y == 1.0
            same(logs, {"x": f32(1.0)})
    assert events == []
    retraced = len(traces)
    assert retraced <= 2

    with lox.testing.capture() as events:
        assert f(x) == 1.0  # its own cache is intact, and so are its logs
    assert [str(e) for e in events] == ["{'x': 1.0}"]
    assert len(traces) == retraced


def selective(x):
    lox.log({"loss": x}, tags=["metric"])
    lox.log({"gradient_norm": 2 * x, "loss": 3 * x}, tags=["debug"])
    return x


def test_selective_tap(capsys):
    lox.tap(selective, tags=["metric"])(1)
    assert capsys.readouterr().out == "{'loss': 1}\n"
    lox.tap(selective, argnames=["gradient_norm"])(1)
    assert capsys.readouterr().out == "{'gradient_norm': 2}\n"
    lox.tap(selective, argnames=["loss"])(1)
    assert capsys.readouterr().out == "{'loss': 1}\n{'loss': 3}\n"


def test_selective_spool():
    same(lox.spool(selective, tags=["metric"])(1)[1], {"loss": i32(1)})
    same(lox.spool(selective, argnames=["gradient_norm"])(1)[1], {"gradient_norm": i32(2)})
    same(lox.spool(selective, argnames=["loss"])(1)[1], {"loss": i32([1, 3])})


# --- spool ---


def f(x):
    lox.log({"x": x})
    return x + 1.0


def test_spool_f():
    y, logs = lox.spool(f)(1.0)
    assert y == 2.0
    same(logs, {"x": f32(1.0)})
    assert str(logs) == "{'x': 1.0}"


def test_spool_g_scan():
    def g(xs):
        carry, ys = jax.lax.scan(lambda c, x: (f(c), x), 0.0, xs)
        lox.log({"carry": carry})
        return ys

    ys, logs = lox.spool(g)(jnp.arange(3))
    same(ys, i32([0, 1, 2]))
    same(logs, {"x": f32([0.0, 1.0, 2.0]), "carry": f32(3.0)})


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
def test_spool_h_cond_with_branches_that_log_alike(wrap):
    def h(x):
        return jax.lax.cond(x > 0, lambda x: f(x), lambda x: f(x + 1), x)

    for x, y, logged in ((3.0, 4.0, 3.0), (-3.0, -1.0, -2.0)):
        out, logs = wrap(lox.spool(h))(x)
        assert out == y
        same(logs, {"x": f32(logged)})  # no event axis and no `valid`
        assert logs.valid == {}


def test_spooling_twice():
    def j(x):
        y, _ = lox.spool(f)(x)
        return y

    out = lox.spool(j)(1.0)
    assert out == (2.0, {})
    assert isinstance(out[1], lox.logdict)


def test_spooling_twice_with_keep_logs(capsys):
    def j(x):
        y, logs = lox.spool(f, keep_logs=True)(x)
        return y, logs

    (y, inner), outer = lox.spool(j)(1.0)
    assert y == 2.0
    same(inner, {"x": f32(1.0)})
    same(outer, {"x": f32(1.0)})
    assert capsys.readouterr().out == ""


# --- logify ---


def logified(a, b):
    logify.log("b", b, reduction="mean")
    logify.log("b", b + 1, reduction="mean")
    logify.log("b", b + 1, reduction="mean")
    x = jnp.sum(a.astype(b.dtype) + b)
    logify.log("y", x**2 - 1)
    logify.log("y", x**2)
    return x


def test_logify_demo(capsys):
    f = jax.jit(logify.logify(logified))
    out, logs = f(jnp.arange(3), jnp.zeros(3))
    logs = logs.asdict()
    print(out)
    print(json.dumps(logs, indent=2, default=str))
    assert capsys.readouterr().out == (
        "3.0\n"
        "{\n"
        '  "b": {\n'
        '    "mean": "[0.6666667 0.6666667 0.6666667]"\n'
        "  },\n"
        '  "y": {\n'
        '    "replace": "9.0"\n'
        "  }\n"
        "}\n"
    )


def test_logify_effectively():
    @logify.logify
    def f(a, b):
        logify.log("b", b)
        return a + b

    out, logs = f(1, 2)
    assert out == 3
    same(logs.asdict(), {"b": {"replace": i32(2)}})


def test_logify_with_jit_grad_and_vmap():
    @logify.logify
    def f(x):
        logify.log("x", x)
        return x**2

    same(jax.jit(f)(3.0)[1].asdict(), {"x": {"replace": f32(3.0)}})
    grad, logs = jax.grad(f, has_aux=True)(3.0)
    assert grad == 6.0
    same(logs.asdict(), {"x": {"replace": f32(3.0)}})
    out, logs = jax.vmap(f)(jnp.arange(3.0))
    same(out, f32([0, 1, 4]))
    same(logs.asdict(), {"x": {"replace": f32([0, 1, 2])}})


@pytest.mark.parametrize("inner", [jax.jit, jax.checkpoint])
def test_logify_need_not_come_first(inner):
    out, logs = logify.logify(inner(logified))(jnp.arange(3), jnp.zeros(3))
    assert out == 3.0
    same(logs.asdict(), {"b": {"mean": f32([2 / 3] * 3)}, "y": {"replace": f32(9.0)}})


def test_logify_in_control_flow():
    def f(xs):
        def step(carry, x):
            logify.log("x", x, reduction="append")
            logify.log("total", x, reduction="sum")
            logify.log("last", x)
            return carry + x, None

        carry, _ = jax.lax.scan(step, 0.0, xs)
        jax.lax.cond(carry > 0, lambda: logify.log("sign", 1), lambda: logify.log("sign", -1))
        jax.lax.while_loop(lambda i: i < 3, lambda i: (logify.log("i", i), i + 1)[1], 0)
        return carry

    out, logs = logify.logify(f)(jnp.arange(3.0))
    assert out == 3.0
    expected = {
        "x": {"append": f32([0, 1, 2])},
        "total": {"sum": f32(3)},
        "last": {"replace": f32(2)},
        "sign": {"replace": i32(1)},
        "i": {"replace": i32(2)},
    }
    assert list(logs.asdict()) == list(expected)
    same(logs.asdict(), expected)


def test_logify_without_the_transformation_is_silent(capsys):
    assert logified(jnp.arange(3), jnp.zeros(3)) == 3.0
    assert jax.jit(logified)(jnp.arange(3), jnp.zeros(3)) == 3.0
    jax.effects_barrier()
    assert capsys.readouterr().out == ""
