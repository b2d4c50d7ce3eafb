"""The text of every error and warning, and their class hierarchy."""

import functools
import re
from typing import Any

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
        lambda: lox.spool(unbounded, reduce={"other": "mean"})(3),
    ],
    ids=["spool", "spool-jit", "jit-spool", "spool-vmap", "vmap-spool", "reduce"],
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
        "or remove the log:              delete the `lox.log` call inside the primitive's body\n"
        'or teach lox the primitive:     by one function, see "Add a rule" in CONTRIBUTING.md'
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
        assert not later  # before anything is computed
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


NAMED = [
    ({"axis_name": "a"}, {"axis_name": "b"}, "axis_name='a'", "axis_name='b'"),
    ({"spmd_axis_name": "x"}, {"spmd_axis_name": ("x", "y")}, "spmd_axis_name='x'", "spmd_axis_name=('x', 'y')"),
    (
        {"axis_name": "a", "spmd_axis_name": "x"},
        {"axis_name": "a", "spmd_axis_name": "y"},
        "axis_name='a', spmd_axis_name='x'",
        "axis_name='a', spmd_axis_name='y'",
    ),
]


@pytest.mark.sample(2)
@pytest.mark.slow
@pytest.mark.parametrize(("one", "other", "first", "second"), NAMED)
def test_mismatch_between_lanes_of_one_size(one, other, first, second):
    def f():
        jax.vmap(lambda x: lox.log({"x": x})["x"], **one)(jnp.zeros(4))
        jax.vmap(lambda x: lox.log({"x": x})["x"], **other)(jnp.zeros(4))

        later.append(1)

    later: list[int] = []
    line = f.__code__.co_firstlineno + 1
    where = "(test_mismatch_between_lanes_of_one_size.f.<lambda>)"
    text = (
        "'x' is logged under different vmaps, whose lanes do not fit together:\n"
        f"  4 lanes ({first}) at test_errors.py:{line} {where}\n"
        f"  4 lanes ({second}) at test_errors.py:{line + 1} {where}\n"
        'Either keep them apart:      `with lox.scope("eval"):` around one of them\n'
        "or stream them one by one:   lox.tap(f, callback)\n"
        "or leave the key out:        `argnames` with the other keys"
    )
    for options in ({}, {"reduce": "mean"}, {"reduce": "count"}, {"interval": 2}, {"capacity": 3}):
        with pytest.raises(lox.MismatchError) as info:
            lox.spool(f, **options)()
        assert str(info.value) == text
        assert not later
        with pytest.raises(lox.MismatchError) as info:
            lox.spool(jax.jit(f), **options)()
        assert str(info.value) == text
        later.clear()


def logs_under(*vmaps: dict[str, Any] | None, n: int = 4) -> None:
    """One event under each of these vmaps, or under none."""
    for options in vmaps:
        jax.vmap(lambda x: lox.log({"x": x}), **options)(jnp.zeros(n)) if options is not None else lox.log({"x": 0.0})


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"reduce": "mean"}, {"interval": 2}, {"capacity": 9}])
@pytest.mark.parametrize("loop", ["none", "scan", "while", "while after"])
def test_lanes_whose_names_are_told_late(options, loop):
    def f(*vmaps):
        if loop == "none":
            logs_under(*vmaps)
        elif loop == "scan":
            jax.lax.scan(lambda c, _: (logs_under(*vmaps), None), None, None, 2)
        elif loop == "while":
            jax.lax.while_loop(lambda i: i < 2, lambda i: logs_under(*vmaps) or i + 1, 0)
        else:
            logs_under(*vmaps[:-1])
            jax.lax.while_loop(lambda i: i < 2, lambda i: logs_under(vmaps[-1]) or i + 1, 0)

    if loop.startswith("while") and not {"reduce", "capacity"} & set(options):
        options = {**options, "capacity": 9}
    a, b, plain = {"axis_name": "a"}, {"axis_name": "b"}, {}
    for vmaps in ([a, a], [a, plain], [plain, a], [None, a, plain, a]):
        logs = lox.spool(lambda: f(*vmaps), **options)()[1]  # noqa: B023
        assert logs["x"].shape[-1] == 4
        assert jax.tree.structure(logs) == jax.tree.structure(lox.spool(lambda: f(*[{}] * len(vmaps)), **options)()[1])  # noqa: B023
    for vmaps in ([a, b], [plain, a, b], [a, plain, b], [None, a, None, b], [a, plain, None, b]):
        with pytest.raises(lox.MismatchError) as info:
            lox.spool(lambda: f(*vmaps), **options)()  # noqa: B023
        assert "  4 lanes (axis_name='a'), and then 4 lanes (axis_name='b'), at test_errors.py:" in str(info.value)


@pytest.mark.slow
def test_lanes_of_nested_vmaps_with_names():
    def f(outer, inner):
        jax.vmap(jax.vmap(lambda x: lox.log({"x": x}), axis_name=inner), axis_name=outer)(jnp.zeros((2, 2)))

    def g(*names):
        for pair in names:
            f(*pair)

    assert lox.spool(lambda: g(("a", "b"), ("a", "b"), (None, "b"), ("a", None)))()[1]["x"].shape == (4, 2, 2)
    for names in ((("a", "b"), ("b", "a")), (("a", "b"), ("a", "c")), ((None, "b"), (None, "c"))):
        for options in ({}, {"reduce": "max"}):
            with pytest.raises(lox.MismatchError, match=r"  2 × 2 lanes \(.*\), and then 2 × 2 lanes \("):
                lox.spool(lambda: g(*names), **options)()  # noqa: B023
    # Outside of the transformation, names do not matter.
    for name in ("a", "b"):
        assert jax.vmap(lox.spool(lambda x: lox.log({"x": x})), axis_name=name)(jnp.zeros(3))[1]["x"].shape == (3,)


@pytest.mark.slow
def test_lanes_of_branches():
    def f(x, *vmaps):
        branches = [functools.partial(lambda options, _: logs_under(options), options) for options in vmaps]
        return jax.lax.switch(x, branches, 0)

    a, b, plain = {"axis_name": "a"}, {"axis_name": "b"}, {}
    for options in ({}, {"reduce": "last"}):
        for vmaps in ([a, a], [a, plain], [plain, None, a]):
            logs = lox.spool(functools.partial(f, 1), **options)(*vmaps)[1]
            assert logs["x"].shape[-1] == 4
        for vmaps in ([a, b], [None, a, b], [plain, a, b]):
            with pytest.raises(
                lox.MismatchError, match=r"4 lanes \(axis_name='a'\), and then 4 lanes \(axis_name='b'\)"
            ):
                lox.spool(lambda: f(1, *vmaps), **options)()  # noqa: B023
        for vmaps in ([a, b], [plain, a, b]):
            with pytest.raises(lox.MismatchError, match=r"2 × 4 lanes \(axis_name='a'\), and then 2 × 4 lanes \(axis_"):
                lox.spool(jax.vmap(lambda x: f(x, *vmaps)), **options)(jnp.arange(2))  # noqa: B023
        branches = [lambda _: logs_under(None), lambda _: logs_under({}), lambda _: logs_under({}, n=3)]
        with pytest.raises(lox.MismatchError, match="4 lanes, and then 3 lanes"):
            lox.spool(functools.partial(jax.lax.switch, 1, branches), **options)(0)


def test_lanes_of_gradients():
    def f(x):
        for name in ("a", "b"):
            x = jax.vmap(lambda x: lox.log_grad("x", x) ** 2, axis_name=name)(x)
        return x.sum()

    with pytest.raises(lox.MismatchError, match=r"4 lanes \(axis_name='b'\), and then 4 lanes \(axis_name='a'\)"):
        lox.spool(jax.grad(f))(jnp.ones(4))


@pytest.mark.slow
def test_lanes_that_tap_counts():
    """With an interval, tap counts the events of a branch in each lane separately."""

    def f(n, one, other):
        def branch(x):
            jax.lax.cond(x > 1, lambda x: lox.log({"x": x}) and None, lambda x: None, x)

        jax.vmap(branch, **one)(jnp.arange(4))
        lox.log({"x": 7})
        jax.vmap(branch, **other)(jnp.arange(n))

    line = f"test_errors.py:{f.__code__.co_firstlineno + 2} (test_lanes_that_tap_counts.f.branch.<lambda>)"
    a, b = {"axis_name": "a"}, {"axis_name": "b"}
    for n, one, other, first, second in (
        (6, {}, {}, "4 lanes", "6 lanes"),
        (4, a, b, "4 lanes (axis_name='a')", "4 lanes (axis_name='b')"),
    ):
        for jit in (lambda f: f, jax.jit):
            with pytest.raises(lox.MismatchError) as info:
                lox.tap(jit(functools.partial(f, n, one, other)), interval=2)()
            assert str(info.value) == (
                "'x' is logged under different vmaps, whose lanes do not fit together:\n"
                f"  {first}, and then {second}, at {line}\n"
                'Either keep them apart:      `with lox.scope("eval"):` around one of them\n'
                "or stream them one by one:   lox.tap(f, callback)\n"
                "or leave the key out:        `argnames` with the other keys"
            )


def test_lanes_of_one_iteration_in_a_buffer():
    def f(*vmaps):
        return jax.lax.scan(lambda c, _: (logs_under(*vmaps), None), None, None, 4)

    for options in ({}, {"reduce": "max"}, {"interval": 2}):
        received: list[Any] = []
        lox.tap(lambda: f({"axis_name": "a"}, {}), received.append, buffer=100, **options)()
        assert all(logs["x"].shape[-1] == 4 for logs in received) and received
        with pytest.raises(lox.MismatchError, match=r"4 lanes \(axis_name='a'\), and then 4 lanes \(axis_name='b'\)"):
            lox.tap(lambda: f({"axis_name": "a"}, {"axis_name": "b"}), buffer=100, **options)()


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


def test_axes_that_are_lost():
    def f(xs):
        jax.lax.scan(lambda c, x: (c, lox.log({"x": x})["x"]), 0, xs)

    logs = jax.tree.map(lambda x: x.sum(), lox.spool(f)(jnp.arange(3))[1])
    for act in (lambda: logs.slice[1:], lambda: logs.reduce("mean"), lambda: logs + logs):
        with pytest.raises(lox.LoxError) as info:
            act()
        assert str(info.value) == (
            "the arrays of 'x' have lost axes since they were logged, so they no longer hold its events."
        )


def test_no_lanes():
    with pytest.raises(lox.LoxError) as info:
        lox.logdict({"x": np.zeros(2)}).lane(0)
    assert str(info.value) == "these logs have no lanes: nothing was logged under `vmap`."


# --- custom reductions ---


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


def test_a_function_whose_body_is_called_later():
    def squares(n):
        for i in range(n):
            lox.log({"i": i})
            yield i * i

    for transform in (lox.spool, lambda f: lox.tap(f, print), lox.nolog, lox.watch):
        with pytest.raises(TypeError, match="cannot transform 'squares': it returns a generator"):
            transform(squares)(3)
    _, logs = lox.spool(lambda: sum(squares(3)))()
    assert logs["i"].tolist() == [0, 1, 2]


def test_a_state_that_never_settles_is_an_error_and_not_a_hang() -> None:
    from lox._engine._handler import Frame, Grown, Handler

    class Stubborn(Handler):
        def extend(self, frame: Frame, struct: Any) -> None:
            pass

    frame = Frame(Stubborn(), {"x": jnp.zeros(2)})

    def attempt(state: Any) -> Any:
        raise Grown(frame, state)

    text = "cannot trace a loop or branch that logs 'x': the state of its logs changes type every time"
    with pytest.raises(lox.TransformError, match=text):
        frame.settle(attempt)


@pytest.mark.parametrize("transform", [lox.spool, lox.tap, lox.nolog, lox.keep, lox.watch, lox.logify.logify])
def test_the_result_of_a_function_in_place_of_the_function(transform):
    with pytest.raises(lox.LogTypeError) as error:
        transform(jnp.ones(2))
    assert str(error.value).startswith("lox transforms functions, and got ")
    assert str(error.value).endswith("Impl: write `lox.spool(f)(x)`, not `lox.spool(f(x))`.")


def test_a_capacity_for_other_keys():
    def f(x):
        def body(x):
            lox.log({"solver/residual": x})
            return x - 1

        return jax.lax.while_loop(lambda x: x > 0, body, x)

    with pytest.raises(lox.SpoolError) as error:
        lox.spool(f, capacity={"residual": 5})(3)
    assert "\n`capacity` names 'residual' only.\nEither give the loop room:" in str(error.value)
