import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exact import boolean, f32, i32, same

import lox
from lox import logify


def each(xs):
    """Log with every reduction, in a loop."""

    def body(carry, x):
        logify.log("last", x)
        logify.log("all", x, reduction="append")
        logify.log("mean", x, reduction="mean")
        logify.log("sum", x, reduction="sum")
        return carry + x, None

    return jax.lax.scan(body, jnp.zeros((), xs.dtype), xs)[0]


EXPECTED = {
    "last": {"replace": f32(4)},
    "all": {"append": f32([1, 1, 4])},
    "mean": {"mean": f32(2)},
    "sum": {"sum": f32(6)},
}


@pytest.mark.parametrize(
    "transformed",
    [
        logify.logify(each),
        jax.jit(logify.logify(each)),
        logify.logify(jax.jit(each)),
        logify.logify(jax.checkpoint(each)),
        jax.jit(logify.logify(jax.jit(each))),
    ],
    ids=["plain", "jit-outside", "jit-inside", "remat-inside", "jit-both"],
)
def test_reductions(transformed):
    for _ in range(2):
        out, logs = transformed(f32([1, 1, 4]))
        same(out, f32(6))
        assert type(logs.asdict()) is dict
        assert list(logs.asdict()) == list(EXPECTED)
        same(logs.asdict(), EXPECTED)


def test_vmap_on_either_side():
    xs = f32([[1, 1, 4], [0, 2, 4]])
    _, outside = jax.vmap(logify.logify(each))(xs)
    _, inside = logify.logify(jax.vmap(each))(xs)
    scalar = {
        "last": {"replace": f32([4, 4])},
        "mean": {"mean": f32([2, 2])},
        "sum": {"sum": f32([6, 6])},
    }
    same(outside.asdict(), {**scalar, "all": {"append": xs}})
    same(inside.asdict(), {**scalar, "all": {"append": xs.T}})


@pytest.mark.slow
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
def test_grad_on_either_side(wrap):
    xs = f32([1, 1, 4])
    grad, logs = wrap(jax.grad(logify.logify(each), has_aux=True))(xs)
    same(grad, f32([1, 1, 1]))
    same(logs.asdict(), EXPECTED)
    grad, logs = wrap(logify.logify(jax.grad(each)))(xs)
    same(grad, f32([1, 1, 1]))
    same(logs.asdict(), EXPECTED)


def test_outside_loops():
    @logify.logify
    def f(x):
        logify.log("a", x)
        logify.log("a", x + 1)
        logify.log("b", x, reduction="append")
        logify.log("b", x + 1, reduction="append")
        logify.log("c", x, reduction="sum")
        return x

    out, logs = f(1)
    assert out == 1
    same(
        logs.asdict(),
        {"a": {"replace": i32(2)}, "b": {"append": i32([1, 2])}, "c": {"sum": i32(1)}},
    )


def test_one_name_with_several_reductions():
    @logify.logify
    def f(x):
        logify.log("a", x)
        logify.log("a", x, reduction="sum")
        logify.log("a", x + 1, reduction="sum")
        logify.log("a", x + 2, reduction="append")
        logify.log("a", x + 3, reduction="append")
        return x

    _, logs = f(1.0)
    assert list(logs.asdict()["a"]) == ["replace", "sum", "append"]
    same(
        logs.asdict(),
        {"a": {"replace": f32(1), "sum": f32(3), "append": f32([3, 4])}},
    )


def test_names_with_colons_and_slashes():
    _, logs = logify.logify(lambda: logify.log("a:b/c:", 1, reduction="sum"))()
    same(logs.asdict(), {"a:b/c:": {"sum": i32(1)}})


def test_values_may_be_trees():
    @logify.logify
    def f(x):
        logify.log("t", {"a": x, "b": (x, 2 * x)}, reduction="mean")
        logify.log("t", {"a": x + 2, "b": (x, 2 * x)}, reduction="mean")
        return x

    _, logs = f(1.0)
    same(logs.asdict(), {"t": {"mean": {"a": f32(2), "b": (f32(1), f32(2))}}})


def test_inside_cond_and_while():
    @logify.logify
    def f(n):
        def body(i):
            logify.log("i", i)
            logify.log("total", i, reduction="sum")
            logify.log("mean", i, reduction="mean")
            return i + 1

        n = jax.lax.while_loop(lambda i: i < n, body, 0)
        return jax.lax.cond(n > 2, lambda: (logify.log("big", n), n)[1], lambda: n)

    expected = {
        "i": {"replace": i32(3)},
        "total": {"sum": i32(6)},
        "mean": {"mean": f32(1.5)},
        "big": {"replace": i32(4)},
    }
    for g in (f, jax.jit(f)):
        out, logs = g(4)
        same(out, i32(4))
        same(logs.asdict(), expected)


def test_append_in_a_while_loop_is_an_error():
    def f():
        def body(i):
            logify.log("i", i, reduction="append")
            return i + 1

        return jax.lax.while_loop(lambda i: i < 3, body, 0)

    with pytest.raises(lox.SpoolError, match=r"it is logged inside `while_loop`"):
        logify.logify(f)()


def test_only_logifys_logs_are_returned(capsys):
    @logify.logify
    def f(x):
        lox.log({"plain": x})
        logify.log("mine", x)
        return x

    _, logs = f(1)
    same(logs.asdict(), {"mine": {"replace": i32(1)}})
    assert capsys.readouterr().out == ""


def test_spool_and_tap_do_not_see_them_unless_asked():
    assert lox.spool(each)(f32([1, 2]))[1] == {}
    events = []
    lox.tap(each, events.append)(f32([1, 2]))
    assert events == []


def test_nested():
    @logify.logify
    def f(x):
        (_, inner) = logify.logify(lambda x: logify.log("in", x))(x)
        logify.log("out", x)
        return inner

    inner, outer = f(1)
    same(inner.asdict(), {"in": {"replace": i32(1)}})
    same(outer.asdict(), {"out": {"replace": i32(1)}})


def test_no_logs():
    out, logs = logify.logify(lambda x: x)(1)
    assert out == 1
    assert logs.asdict() == {}


def test_logs_are_a_pytree():
    _, logs = logify.logify(each)(f32([1, 1, 4]))
    doubled = jax.tree.map(lambda x: x * 2, logs)
    same(doubled.asdict()["all"], {"append": f32([2, 2, 8])})
    assert len(jax.tree.leaves(logs)) == 4
    same(jax.jit(lambda logs: logs)(logs).asdict(), EXPECTED)


def test_keeps_the_functions_name_and_arguments():
    def f(a, *, b=2):
        """What it does."""
        logify.log("b", b)
        return a + b

    g = logify.logify(f)
    assert (g.__name__, g.__doc__) == ("f", "What it does.")
    assert g(1, b=3)[0] == 4
    same(g(1)[1].asdict(), {"b": {"replace": i32(2)}})


def test_python_control_flow():
    @logify.logify
    def f(x, mode):
        if x > 0 and mode == "train":
            logify.log("x", x)
        return x

    same(f(1, "train")[1].asdict(), {"x": {"replace": i32(1)}})
    same(f(-1, "train")[1].asdict(), {})


def test_means_of_integers_and_bools():
    @logify.logify
    def f():
        logify.log("int", 1, reduction="mean")
        logify.log("int", 2, reduction="mean")
        logify.log("bool", True, reduction="mean")
        logify.log("bool", np.False_, reduction="mean")
        logify.log("flag", True)

    same(
        f()[1].asdict(),
        {"int": {"mean": f32(1.5)}, "bool": {"mean": f32(0.5)}, "flag": {"replace": boolean(True)}},
    )


def test_a_reduction_that_does_not_exist():
    with pytest.raises(ValueError) as info:
        logify.log("x", 1, reduction="max")
    assert type(info.value) is lox.OptionError
    assert str(info.value) == ("there is no reduction 'max'. Choose 'replace', 'append', 'mean' and 'sum'.")


def test_a_name_that_is_not_a_string():
    with pytest.raises(TypeError) as info:
        logify.log(3, 1)
    assert type(info.value) is lox.LogTypeError
    assert str(info.value) == "`logify.log` got the name 3: names are strings."


@pytest.mark.parametrize("value", ["text", None, object()])
def test_a_bad_value_is_reported_under_its_own_name(value):
    with pytest.raises(lox.LogTypeError, match=r"^[^:]* cannot log (the value of )?'loss'"):
        logify.log("loss", value)


def test_two_shapes_are_reported_under_their_own_name():
    def f():
        logify.log("loss", jnp.zeros(2), reduction="append")
        logify.log("loss", jnp.zeros(3), reduction="append")

    with pytest.raises(lox.MismatchError, match=r"^'loss' is logged with different shape"):
        logify.logify(f)()
