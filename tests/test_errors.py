"""The text of every error and warning, and their family."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lox


def line(fun, offset):
    """The source line of `fun` that is `offset` lines below its `def`, as messages show it."""
    code = fun.__code__
    name = code.co_qualname.replace(".<locals>", "")
    return f"test_errors.py:{code.co_firstlineno + offset} ({name})"


@pytest.mark.parametrize(
    ("error", "also"),
    [
        (lox.SpoolError, lox.LoxError),
        (lox.TransformError, lox.LoxError),
        (lox.MismatchError, ValueError),
        (lox.LogTypeError, TypeError),
        (lox.OptionError, ValueError),
        (lox.StepError, AttributeError),
        (lox.KeyNotFoundError, KeyError),
    ],
)
def test_family(error, also):
    assert issubclass(error, lox.LoxError)
    assert issubclass(error, also)
    assert error.__doc__
    assert issubclass(lox.LoxError, Exception)
    assert not issubclass(lox.LoxError, ValueError | TypeError | AttributeError)


def test_the_warning_is_a_user_warning():
    assert issubclass(lox.LoxWarning, UserWarning)
    assert not issubclass(lox.LoxWarning, lox.LoxError)


# --- logs that cannot be returned ---


def unbounded(n):
    def body(i):
        lox.log({"loss": i})
        return i + 1

    return jax.lax.while_loop(lambda i: i < n, body, 0)


@pytest.mark.parametrize(
    "call",
    [
        lambda: lox.spool(unbounded)(3),
        lambda: lox.spool(jax.jit(unbounded))(3),
        lambda: jax.jit(lox.spool(unbounded))(3),
        lambda: lox.spool(jax.vmap(unbounded))(jnp.arange(2)),
        lambda: jax.vmap(lox.spool(unbounded))(jnp.arange(2)),
        lambda: lox.spool(unbounded, capacity={"other": 3})(3),
        lambda: lox.spool(unbounded, reduce={"other": "mean"})(3),
    ],
    ids=["spool", "spool-jit", "jit-spool", "spool-vmap", "vmap-spool", "capacity", "reduce"],
)
def test_unbounded_loop(call):
    with pytest.raises(lox.SpoolError) as info:
        call()
    first = unbounded.__code__.co_firstlineno
    assert str(info.value) == (
        "`lox.spool` cannot return 'loss': it is logged inside `while_loop`, "
        "whose length is unknown.\n"
        f"  logged at test_errors.py:{first + 2} (unbounded.body)\n"
        "Either give the loop room:   lox.spool(f, capacity=1000)\n"
        'or reduce while it runs:     lox.spool(f, reduce="mean")\n'
        "or stream the events:        lox.tap(f, callback)"
    )


def in_reduce(x):
    def add(a, b):
        lox.log({"a": a})
        return a + b

    return jax.lax.reduce(x, jnp.float32(0), add, (0,))


@pytest.mark.parametrize("transform", [lox.spool, lox.tap, lox.nolog, lambda f: jax.jit(lox.spool(f))])
def test_a_primitive_without_a_rule(transform):
    with pytest.raises(lox.TransformError) as info:
        transform(in_reduce)(jnp.arange(3.0))
    first = in_reduce.__code__.co_firstlineno
    assert str(info.value) == (
        "cannot reach the log of 'a': it is inside `reduce`, "
        "whose body lox does not know how to rewrite.\n"
        f"  logged at test_errors.py:{first + 2} (in_reduce.add)\n"
        "Either log the value outside:   return it from the function and `lox.log` it there\n"
        "or remove the log:              delete the `lox.log` call inside the primitive's body"
    )


# --- events that do not fit together ---


def two_shapes():
    lox.log({"x": jnp.zeros(2)})
    lox.log({"x": jnp.zeros((3, 2))})


def two_structures():
    lox.log({"x": {"a": 1}})
    lox.log({"x": [1, 2]})


def two_reductions():
    lox.log({"x": 1}, reduce="mean")
    lox.log({"x": 1}, reduce="sum")


def one_reduction():
    lox.log({"x": 1})
    lox.log({"x": 1}, reduce="sum")


def one_reduction_first():
    lox.log({"x": 1}, reduce="sum")
    lox.log({"x": 1})


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["plain", "jit"])
@pytest.mark.parametrize(
    ("fun", "what", "first", "second"),
    [
        (two_shapes, "shape", "shape (2,)", "shape (3, 2)"),
        (two_structures, "structure", "{'a': *}", "[*, *]"),
        (two_reductions, "reductions", "reduce='mean'", "reduce='sum'"),
        (one_reduction, "reductions", "no reduction", "reduce='sum'"),
        (one_reduction_first, "reductions", "reduce='sum'", "no reduction"),
    ],
    ids=lambda x: getattr(x, "__name__", None),
)
def test_mismatch(wrap, fun, what, first, second):
    with pytest.raises(ValueError) as info:
        lox.spool(wrap(fun))()
    assert type(info.value) is lox.MismatchError
    assert str(info.value) == (
        f"'x' is logged with different {what}:\n"
        f"  {first} at {line(fun, 1)}\n"
        f"  {second} at {line(fun, 2)}\n"
        f"All events of a key are collected together. Use two keys, or make the {what} the same."
    )


def branches(x):
    def yes(x):
        lox.log({"x": x})
        return 0

    def no(x):
        lox.log({"x": jnp.stack([x, x])})
        return 0

    return jax.lax.cond(x > 0, yes, no, x)


def test_mismatch_between_branches():
    with pytest.raises(lox.MismatchError) as info:
        lox.spool(branches)(1.0)
    first = branches.__code__.co_firstlineno
    text = str(info.value)
    assert text.startswith("'x' is logged with different shape:\n")
    assert f"  shape () at test_errors.py:{first + 2} (branches.yes)\n" in text
    assert f"  shape (2,) at test_errors.py:{first + 6} (branches.no)\n" in text
    assert text.endswith("\nAll events of a key are collected together. Use two keys, or make the shape the same.")


def test_mismatch_between_lanes():
    def f():
        log = jax.vmap(lambda x: lox.log({"x": x})["x"])
        log(jnp.zeros(2))
        log(jnp.zeros(3))

        later.append(1)

    later: list[int] = []
    line = f"test_errors.py:{f.__code__.co_firstlineno + 1} (test_mismatch_between_lanes.f.<lambda>)"
    for options in ({}, {"reduce": "mean"}, {"reduce": "sum"}, {"interval": 2}, {"capacity": 3}):
        with pytest.raises(lox.MismatchError) as info:
            lox.spool(f, **options)()
        assert str(info.value) == (
            "'x' is logged under different vmaps, whose lanes do not fit together:\n"
            f"  2 lanes, and then 3 lanes, at {line}\n"
            'Either keep them apart:      `with lox.scope("eval"):` around one of them\n'
            "or stream them one by one:   lox.tap(f, callback)\n"
            "or leave the key out:        `argnames` with the other keys"
        )
        assert not later  # at once, and not when all has been computed
        with pytest.raises(lox.MismatchError, match="2 lanes, and then 3 lanes"):
            lox.spool(jax.jit(f), **options)()
        later.clear()


def test_mismatch_between_lanes_of_two_lines():
    def f(n):
        def step(carry, _):
            jax.vmap(jax.vmap(lambda x: lox.log({"x": x})["x"]))(jnp.zeros((2, 3)))
            jax.vmap(lambda x: lox.log({"x": x})["x"])(jnp.zeros(2))
            return carry, None

        return jax.lax.scan(step, 0, None, n)[0]

    first = f.__code__.co_firstlineno + 2
    for transform in (
        lox.spool,
        lambda f: lox.spool(f, reduce="max"),
        lambda f: lox.spool(f, interval=2),
        lambda f: lox.tap(f, buffer=10),
        lambda f: lox.tap(f, buffer=10, reduce="max"),
    ):
        with pytest.raises(lox.MismatchError) as info:
            transform(lambda: f(4))()
        assert f"  2 × 3 lanes at test_errors.py:{first} " in str(info.value)
        assert f"  2 lanes at test_errors.py:{first + 1} " in str(info.value)


def test_mismatch_with_reduce():
    for reduce in ("mean", "last", "count"):
        with pytest.raises(lox.MismatchError, match=r"^'x' is logged with different shape") as info:
            lox.spool(two_shapes, reduce=reduce)()
        assert line(two_shapes, 1) in str(info.value)
        assert line(two_shapes, 2) in str(info.value)


def test_mismatch_in_a_buffer():
    def f():
        def body(i):
            lox.log({"x": i})
            return i + 1

        lox.log({"x": jnp.zeros(2)})
        return jax.lax.while_loop(lambda i: i < 3, body, 0)

    with pytest.raises(lox.MismatchError, match=r"^'x' is logged with different shape:\n") as info:
        lox.spool(f, capacity=3)()
    first = f.__code__.co_firstlineno
    assert f"test_errors.py:{first + 2} " in str(info.value)
    assert f"test_errors.py:{first + 5} " in str(info.value)


# --- sites ---


def test_the_source_line_is_the_users():
    def body(carry, x):
        jax.tree.map(lambda x: lox.log({"x": x}), [x])
        return carry, None

    def f():
        lox.log({"x": jnp.zeros(7)})
        return jax.lax.scan(body, 0, jnp.arange(2))

    with pytest.raises(lox.MismatchError) as info:
        lox.spool(f)()
    sites = re.findall(r" at (\S+):(\d+) ", str(info.value))
    assert sites == [
        ("test_errors.py", str(f.__code__.co_firstlineno + 1)),
        ("test_errors.py", str(body.__code__.co_firstlineno + 1)),
    ]


# --- logdict ---


def test_axes_that_are_gone():
    def f(xs):
        jax.lax.scan(lambda c, x: (c, lox.log({"x": x})["x"]), 0, xs)

    logs = jax.tree.map(lambda x: x.sum(), lox.spool(f)(jnp.arange(3))[1])
    for act in (lambda: logs.slice[1:], lambda: logs.reduce("mean"), lambda: logs + logs):
        with pytest.raises(lox.LoxError) as info:
            act()
        assert str(info.value) == (
            "the arrays of 'x' have lost axes since they were logged: they cannot be taken for events."
        )


def test_no_lanes():
    with pytest.raises(lox.LoxError) as info:
        lox.logdict({"x": np.zeros(2)}).lane(0)
    assert str(info.value) == "these logs have no lanes: nothing was logged under `vmap`."


# --- reductions of one's own ---


def test_a_state_that_changes_its_type():
    wrong = lox.Reduction(lambda x: jnp.int32(0), lambda state, x: state.astype(x.dtype) + x, lambda state: state)

    def f():
        lox.log({"x": 1.5})

    with pytest.raises(ValueError) as info:
        lox.spool(f, reduce=wrong)()
    assert type(info.value) is lox.OptionError
    assert str(info.value) == (
        "a reduction's `update` must not change its state's type: it was int32[] and became float32[]."
    )


def test_a_function_whose_body_runs_later():
    def squares(n):
        for i in range(n):
            lox.log({"i": i})
            yield i * i

    for transform in (lox.spool, lambda f: lox.tap(f, print), lox.nolog, lox.watch):
        with pytest.raises(TypeError, match="cannot transform 'squares': it returns a generator"):
            transform(squares)(3)
    _, logs = lox.spool(lambda: sum(squares(3)))()
    assert logs["i"].tolist() == [0, 1, 2]
