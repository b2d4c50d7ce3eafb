import contextlib
import re
import sys
import warnings
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exact import boolean, f32, i32, same

import lox


def tagged(x):
    lox.log({"train/loss": x, "train/acc": x + 1}, tags="metric")
    lox.log({"test/loss": x + 2}, tags=["metric", "slow"])
    lox.log({"norm": x + 3}, prefix="debug/", tags={"slow"})
    lox.log({"lr": x + 4})
    return x


def scanned(xs):
    def body(i, x):
        lox.log({"x": x}, step=i)
        return i + 1, None

    return jax.lax.scan(body, 0, xs)[0]


def count_to(n):
    def body(i):
        lox.log({"i": i}, step=10 * i)
        return i + 1

    return jax.lax.while_loop(lambda i: i < n, body, 0)


def spooled_keys(fun, **options):
    return list(lox.spool(fun, **options)(0)[1])


def tapped_keys(fun, **options):
    keys = []
    lox.tap(fun, lambda logs: keys.extend(logs), **options)(0)
    return keys


def kept_keys(fun, **options):
    return list(lox.spool(lox.keep(fun, **options))(0)[1])


def removed_keys(fun, **options):
    gone = list(lox.spool(lox.nolog(fun, **options))(0)[1])
    return [k for k in ALL if k not in gone]


ALL = ["train/loss", "train/acc", "test/loss", "debug/norm", "lr"]

# --- argnames and tags ---


@pytest.mark.slow
@pytest.mark.parametrize("keys_of", [spooled_keys, tapped_keys, kept_keys, removed_keys])
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["plain", "jit"])
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, ALL),
        ({"argnames": None, "tags": None}, ALL),
        ({"argnames": "lr"}, ["lr"]),
        ({"argnames": ["lr", "train/acc"]}, ["train/acc", "lr"]),
        ({"argnames": ("lr",)}, ["lr"]),
        ({"argnames": {"lr"}}, ["lr"]),
        ({"argnames": "train/*"}, ["train/loss", "train/acc"]),
        ({"argnames": ["*loss", "l?"]}, ["train/loss", "test/loss", "lr"]),
        ({"argnames": "t[er]*"}, ["train/loss", "train/acc", "test/loss"]),
        ({"argnames": "debug/norm"}, ["debug/norm"]),  # the log's own prefix is part of the key
        ({"argnames": "norm"}, []),
        ({"argnames": "loss"}, []),
        ({"argnames": []}, []),
        ({"argnames": "LR"}, []),
        ({"tags": "metric"}, ["train/loss", "train/acc", "test/loss"]),
        ({"tags": ["slow"]}, ["test/loss", "debug/norm"]),
        ({"tags": ["slow", "metric"]}, ["train/loss", "train/acc", "test/loss", "debug/norm"]),
        ({"tags": []}, []),
        ({"tags": "me"}, []),
        ({"argnames": "*loss", "tags": "slow"}, ["test/loss"]),
        ({"argnames": "lr", "tags": "slow"}, []),
        ({"argnames": [], "tags": "slow"}, []),
    ],
)
def test_selection(capsys, keys_of, wrap, options, expected):
    by_mistake = not expected and [] not in options.values()
    with pytest.warns(lox.LoxWarning, match="no such key|no log has") if by_mistake else contextlib.nullcontext():
        assert keys_of(wrap(tagged), **options) == expected
    assert capsys.readouterr().out == ""


def test_selection_of_some_keys_of_one_event():
    events = []
    lox.tap(tagged, events.append, argnames="*loss")(0)
    assert [list(e) for e in events] == [["train/loss"], ["test/loss"]]


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["plain", "jit"])
def test_nolog_leaves_the_rest_to_the_sink(capsys, wrap):
    def printed():
        jax.effects_barrier()
        return sorted(capsys.readouterr().out.splitlines())  # on a GPU, XLA may reorder them

    wrap(lox.nolog(tagged, tags="metric"))(0)
    assert printed() == ["{'debug/norm': 3}", "{'lr': 4}"]
    wrap(lox.keep(tagged, argnames="*loss"))(0)
    assert printed() == ["{'test/loss': 2}", "{'train/loss': 0}"]
    wrap(lox.nolog(tagged))(0)
    assert printed() == []


def test_keep_of_nothing_lowers_to_the_same_program():
    def without(x):
        return x

    def lowered(f):
        return jax.jit(f).lower(0).as_text().replace("tagged", "without")

    assert lowered(lox.nolog(tagged)) == lowered(without)
    assert lowered(lox.keep(tagged, [])) == lowered(without)


# --- prefix ---


def looping(log):
    def body(i):
        log({"i": i})
        return i + 1

    return lambda n: jax.lax.while_loop(lambda i: i < n, body, 0)


def looping_twice(log):
    def body(carry):
        i, total = carry
        log({"total": total})
        return i + 1, total + looping(log)(i)

    return lambda n: jax.lax.while_loop(lambda carry: carry[0] < n, body, (0, 0))[1]


def asking(log):
    def goes_on(i, n):
        log({"i": i})
        return i < n

    return lambda n: jax.lax.while_loop(lambda i: goes_on(i, n), lambda i: i + 1, 0)


def branching(log):
    def positive(n):
        log({"n": 2 * n})
        return jax.lax.cond(n > 1, lambda n: (log({"m": n}), n + 2)[1], lambda n: n, n)

    return lambda n: jax.lax.cond(n > 0, positive, lambda n: n, n)


def looping_over_branches(log):
    return lambda n: jax.lax.while_loop(lambda i: i < n, lambda i: branching(log)(i) + 1, 0)


MAPPED = {
    "vmap": jax.vmap,
    "jit(vmap)": lambda f: jax.jit(jax.vmap(f)),
    "jit(vmap(jit))": lambda f: jax.jit(jax.vmap(jax.jit(f))),
    "jit(vmap(vmap))": lambda f: jax.jit(lambda x: jax.vmap(lambda a: jax.vmap(lambda b: f(a + b))(x))(x)),
    "jit(scan(vmap))": lambda f: jax.jit(lambda x: jax.lax.scan(lambda c, _: (jax.vmap(f)(c), None), x, length=2)[0]),
}
SILENCING = {
    "nolog": lox.nolog,
    "keep nothing": lambda f: lox.keep(f, argnames=[]),
    "spool nothing": lambda f: lambda x: lox.spool(f, argnames=[])(x)[0],
}


@pytest.mark.sample(7)
@pytest.mark.slow
@pytest.mark.parametrize("program", [looping, looping_twice, asking, branching, looping_over_branches])
@pytest.mark.parametrize("mapped", MAPPED)
def test_no_masking_is_left_where_no_log_needs_it(mapped, program):
    x = jnp.arange(3)
    with_logs, without = MAPPED[mapped](program(lox.log)), MAPPED[mapped](program(lambda _: None))

    text = lambda f: jax.jit(lambda x: f(x)).lower(x).as_text()  # noqa: E731
    operations = lambda text: Counter(re.findall(r"(?:stablehlo|func)\.\w+", text))  # noqa: E731
    for silenced in map(text, [silence(with_logs) for silence in SILENCING.values()]):
        # lox leaves out what nothing needs, which JAX may keep.
        assert not operations(silenced) - operations(text(without))
        assert silenced == text(without) or program is looping_over_branches
    same(lox.nolog(with_logs)(x), np.asarray(without(x)))


def test_prefix():
    _, logs = lox.spool(scanned, prefix="run/", argnames="x")(jnp.arange(2))
    same(logs, {"run/x": i32([0, 1])})
    same(logs.step, {"run/x": i32([0, 1])})
    with pytest.warns(lox.LoxWarning, match="Did you mean 'x'"):
        assert lox.spool(scanned, prefix="run/", argnames="run/x")(jnp.arange(2))[1] == {}
    events = []
    lox.tap(scanned, events.append, prefix="run/")(jnp.arange(2))
    assert [str(e) for e in events] == ["{'run/x': 0}", "{'run/x': 1}"]
    same(events[1].step, {"run/x": i32(1)})


def test_prefix_of_a_tap_stays_inside():
    _, logs = lox.spool(lox.tap(scanned, lambda logs: None, prefix="run/"))(jnp.arange(2))
    same(logs, {"x": i32([0, 1])})


def test_prefix_with_other_options():
    _, logs = lox.spool(count_to, prefix="p/", capacity=2)(2)
    same(logs, {"p/i": i32([0, 1])})
    same(logs.dropped, {"p/i": i32(0)})
    _, logs = lox.spool(count_to, prefix="p/", reduce={"i": "sum"})(3)
    same(logs, {"p/i": i32(3)})


# --- interval ---


@pytest.mark.sample(16)
@pytest.mark.slow
@pytest.mark.parametrize("interval", [1, 2, 3, 5, 10, np.int64(2)])
@pytest.mark.parametrize(
    "transform",
    [
        lambda f, **o: lox.spool(f, **o),
        lambda f, **o: jax.jit(lox.spool(f, **o)),
        lambda f, **o: lox.spool(jax.jit(f), **o),
    ],
    ids=["spool", "jit-spool", "spool-jit"],
)
def test_interval(transform, interval):
    _, logs = transform(scanned, interval=interval)(jnp.arange(5))
    same(logs, {"x": i32(np.arange(5)[::interval])})
    same(logs.step, {"x": i32(np.arange(5)[::interval])})


@pytest.mark.slow
@pytest.mark.parametrize("interval", [1, 2, 3, 5, 10])
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["plain", "jit"])
def test_interval_of_tap(wrap, interval):
    events = []
    lox.tap(wrap(scanned), events.append, interval=interval)(jnp.arange(5))
    assert [int(e["x"]) for e in events] == list(range(0, 5, interval))


def test_interval_counts_each_key_across_call_sites():
    def f(xs):
        lox.log({"x": -2})
        lox.log({"x": -1, "y": 0})
        scanned(xs)
        lox.log({"x": 100, "y": 1})

    _, logs = lox.spool(f, interval=2)(jnp.arange(4))
    same(logs, {"x": i32([-2, 0, 2, 100]), "y": i32([0])})
    events = []
    lox.tap(f, events.append, interval=2)(jnp.arange(4))
    assert [str(e) for e in events] == [
        "{'x': -2}",
        "{'y': 0}",
        "{'x': 0}",
        "{'x': 2}",
        "{'x': 100}",
    ]


def test_interval_in_nested_loops():
    def f(xs):
        return jax.lax.scan(lambda c, row: (c, scanned(row)), 0, xs)[0]

    _, logs = lox.spool(f, interval=2)(jnp.arange(9).reshape(3, 3))
    same(logs, {"x": i32([0, 2, 4, 6, 8])})


def test_interval_of_a_single_event():
    _, logs = lox.spool(lambda: lox.log({"x": 1})["x"], interval=3)()
    same(logs, {"x": i32(1)})


def test_interval_counts_valid_events():
    def f(xs):
        def body(c, x):
            lox.log({"x": x}, where=x > 0)
            return c, None

        jax.lax.scan(body, 0, xs)

    same(lox.spool(f, interval=2)(i32([-1, 1, -1, -1, 2, 3]))[1], {"x": i32([1, 3])})


def test_interval_with_reduce():
    _, logs = lox.spool(scanned, interval=2, reduce="sum")(jnp.arange(5))
    same(logs, {"x": i32(6)})
    same(logs.step, {"x": i32(4)})
    same(lox.spool(count_to, interval=2, reduce="sum")(5)[1], {"i": i32(6)})


def test_interval_with_capacity():
    _, logs = lox.spool(count_to, interval=2, capacity=3)(6)
    same(logs, {"i": i32([0, 2, 4])})
    same(logs.step, {"i": i32([0, 20, 40])})
    same(logs.dropped, {"i": i32(0)})


# --- reduce ---


def with_reductions(xs):
    def body(c, x):
        lox.log({"a": x, "b": x}, reduce={"a": "max"})
        return c, None

    jax.lax.scan(body, 0, xs)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reduce", "a", "b"),
    [
        (None, f32(4), f32([1, 1, 4])),
        ("sum", f32(4), f32(6)),  # the log's own reduction wins over one for all
        ({"a": "min"}, f32(1), f32([1, 1, 4])),  # but loses against one for the key
        ({"b": "mean"}, f32(4), f32(2)),
        ({"a": "append", "b": "append"}, f32([1, 1, 4]), f32([1, 1, 4])),
        ("append", f32(4), f32([1, 1, 4])),
        ({}, f32(4), f32([1, 1, 4])),
    ],
)
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["plain", "jit"])
def test_reduce_precedence(wrap, reduce, a, b):
    same(lox.spool(wrap(with_reductions), reduce=reduce)(f32([1, 1, 4]))[1], {"a": a, "b": b})


def test_reduce_outside_loops():
    def f():
        lox.log({"x": 1.0}, step=3)
        lox.log({"x": 2.0}, step=5)
        lox.log({"y": 7.0})

    _, logs = lox.spool(f, reduce="mean")()
    same(logs, {"x": f32(1.5), "y": f32(7)})
    same(logs.step, {"x": i32(5)})


def test_reduce_of_trees():
    def f(xs):
        jax.lax.scan(lambda c, x: (c, lox.log({"t": {"a": x, "b": (2 * x,)}})["t"]), 0, xs)

    _, logs = lox.spool(f, reduce="sum")(f32([1, 2]))
    same(logs, {"t": {"a": f32(3), "b": (f32(6),)}})
    same(lox.spool(f, reduce="count")(f32([1, 2]))[1], {"t": i32(2)})


def test_reduce_across_loops_and_branches():
    def f(n):
        lox.log({"i": 100})
        count_to(n)
        jax.lax.cond(n > 2, lambda: lox.log({"i": n})["i"], lambda: n)
        return n

    same(lox.spool(f, reduce="sum")(3)[1], {"i": i32(106)})
    same(lox.spool(f, reduce="sum")(2)[1], {"i": i32(101)})
    same(lox.spool(f, reduce="count")(2)[1], {"i": i32(3)})


@pytest.mark.slow
def test_reduce_per_lane():
    xs = f32([[1, 2], [3, 5]])
    same(lox.spool(jax.vmap(scanned), reduce="mean")(xs)[1], {"x": f32([1.5, 4])})
    same(jax.vmap(lox.spool(scanned, reduce="mean"))(xs)[1], {"x": f32([1.5, 4])})
    ends = jnp.array([2, 4])
    same(lox.spool(jax.vmap(count_to), reduce="sum")(ends)[1], {"i": i32([1, 6])})
    same(jax.vmap(lox.spool(count_to, reduce="sum"))(ends)[1], {"i": i32([1, 6])})


def test_reduce_is_compensated():
    xs = np.full(100_000, 0.1, np.float32)
    _, logs = lox.spool(scanned, reduce="mean")(xs)
    np.testing.assert_allclose(logs["x"], np.float32(0.1), rtol=1e-7)
    _, logs = lox.spool(scanned, reduce="sum")(xs)
    np.testing.assert_allclose(logs["x"], xs.astype(np.float64).sum(), rtol=1e-7)


def test_a_custom_reduction():
    product = lox.Reduction(jnp.ones_like, lambda state, x: state * x, lambda state: -state)
    same(lox.spool(scanned, reduce=product)(f32([2, 3]))[1], {"x": f32(-6)})
    lanes = f32([[2, 3], [1, 1]])
    same(lox.spool(jax.vmap(scanned), reduce={"x": product})(lanes)[1], {"x": f32([-6, -1])})
    same(lox.spool(count_to, reduce=product)(1)[1], {"i": i32(0)})


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["plain", "jit"])
def test_reduce_of_tap_sends_one_event_per_key_at_the_end(wrap):
    events = []
    y = lox.tap(wrap(scanned), events.append, reduce="mean")(f32([1, 2, 6]))
    same(y, i32(3))
    assert len(events) == 1
    same(events[0], {"x": f32(3)})
    same(events[0].step, {"x": i32(2)})


def test_reduce_over_no_events():
    _, logs = lox.spool(count_to, reduce="mean")(0)
    same(logs, {"i": f32(np.nan)})
    same(logs.valid, {"i": boolean(False)})
    same(logs.step, {"i": i32(-1)})
    _, logs = lox.spool(count_to, reduce="last")(0)
    same(logs, {"i": i32(0)})
    same(logs.valid, {"i": boolean(False)})


# --- capacity ---


@pytest.mark.slow
@pytest.mark.parametrize("capacity", [3, 5, {"i": 4}, np.int64(3)])
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["plain", "jit"])
def test_capacity(wrap, capacity):
    y, logs = lox.spool(wrap(count_to), capacity=capacity)(3)
    same(y, i32(3))
    same(logs, {"i": i32([0, 1, 2])})
    same(logs.step, {"i": i32([0, 10, 20])})
    same(logs.dropped, {"i": i32(0)})
    assert logs.valid == {}


def test_capacity_under_jit_is_padded():
    _, logs = jax.jit(lox.spool(count_to, capacity=4))(2)
    same(logs, {"i": i32([0, 1, 0, 0])})
    same(logs.step, {"i": i32([0, 10, -1, -1])})
    same(logs.valid, {"i": boolean([1, 1, 0, 0])})
    same(logs.dropped, {"i": i32(0)})
    logs = logs.compact()
    same(logs, {"i": i32([0, 1])})
    same(logs.step, {"i": i32([0, 10])})


def test_capacity_for_no_events():
    _, logs = lox.spool(count_to, capacity=4)(0)
    same(logs, {"i": i32([])})
    same(logs.step, {"i": i32([])})


@pytest.mark.slow
def test_capacity_is_for_all_events_of_a_key():
    def f(n):
        lox.log({"i": -1, "once": 7})
        count_to(n)
        lox.log({"i": 100})
        count_to(n)

    same(lox.spool(f, capacity=6)(2)[1], {"i": i32([-1, 0, 1, 100, 0, 1]), "once": i32(7)})
    with pytest.warns(lox.LoxWarning, match="2 were dropped"):
        _, logs = lox.spool(f, capacity=4)(2)
    same(logs, {"i": i32([-1, 0, 1, 100]), "once": i32(7)})
    same(logs.dropped, {"i": i32(2)})


def test_capacity_leaves_other_keys_alone():
    def f(xs):
        scanned(xs)
        count_to(2)

    _, logs = lox.spool(f, capacity=2)(jnp.arange(5))
    same(logs, {"x": i32([0, 1, 2, 3, 4]), "i": i32([0, 1])})
    same(logs.dropped, {"i": i32(0)})


def test_capacity_for_another_key_is_none():
    with pytest.raises(lox.SpoolError, match="cannot return 'i': it is logged inside `while_loop`"):
        lox.spool(count_to, capacity={"x": 4})(3)


WARNING = "'i' had more events than its capacity: 3 were dropped. Raise `capacity`, or use `reduce` or `tap`."


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["plain", "jit"])
def test_overflow_warns_at_once_when_called_eagerly(wrap):
    with pytest.warns(lox.LoxWarning) as record:
        y, logs = lox.spool(wrap(count_to), capacity=2)(5)
    assert [str(w.message) for w in record] == [WARNING]
    assert record[0].filename == __file__
    same(y, i32(5))
    same(logs, {"i": i32([0, 1])})
    same(logs.dropped, {"i": i32(3)})


def test_overflow_warns_from_compact_under_jit():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, logs = jax.jit(lox.spool(count_to, capacity=2))(5)
        jax.block_until_ready(logs)
        str(logs)
    same(logs, {"i": i32([0, 1])})
    same(logs.dropped, {"i": i32(3)})
    with pytest.warns(lox.LoxWarning) as record:
        logs = logs.compact()
    assert [str(w.message) for w in record] == [WARNING]
    assert record[0].filename == __file__
    same(logs, {"i": i32([0, 1])})
    same(logs.dropped, {"i": i32(3)})


@pytest.mark.slow
def test_capacity_per_lane():
    ends = jnp.array([1, 3])
    _, logs = jax.vmap(lox.spool(count_to, capacity=4))(ends)
    same(logs, {"i": i32([[0, 0, 0, 0], [0, 1, 2, 0]])})
    same(logs.valid, {"i": boolean([[1, 0, 0, 0], [1, 1, 1, 0]])})
    same(logs.lane(0), {"i": i32([0])})
    same(logs.lane(1), {"i": i32([0, 1, 2])})
    _, logs = lox.spool(jax.vmap(count_to), capacity=4)(ends)
    same(logs.valid, {"i": boolean([[1, 1], [0, 1], [0, 1]])})
    same(logs.lane(0), {"i": i32([0])})
    same(logs.lane(1), {"i": i32([0, 1, 2])})
    same(logs.lane(1).step, {"i": i32([0, 10, 20])})


def test_append_in_a_while_loop_needs_capacity():
    with pytest.raises(lox.SpoolError, match="'i'"):
        lox.spool(count_to, reduce="append")(3)
    same(lox.spool(count_to, reduce="append", capacity=5)(3)[1], {"i": i32([0, 1, 2])})


# --- keep_logs, and logs that flow on ---


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["plain", "jit"])
def test_keep_logs(capsys, wrap):
    inner = wrap(lox.spool(wrap(scanned), keep_logs=True))
    (_, one), two = lox.spool(inner)(jnp.arange(3))
    same(one, {"x": i32([0, 1, 2])})
    same(two, {"x": i32([0, 1, 2])})
    same(two.step, {"x": i32([0, 1, 2])})

    events = []
    _, logs = lox.tap(inner, events.append)(jnp.arange(3))
    same(logs, {"x": i32([0, 1, 2])})
    assert [str(e) for e in events] == ["{'x': 0}", "{'x': 1}", "{'x': 2}"]

    inner(jnp.arange(3))
    jax.effects_barrier()
    assert capsys.readouterr().out == ""  # spool has taken it, so it is not printed


def test_keep_logs_keeps_what_was_not_selected():
    (_, one), two = lox.spool(lox.spool(tagged, argnames="lr", keep_logs=True))(0)
    same(one, {"lr": i32(4)})
    assert list(two) == ALL


def test_keep_logs_keeps_tags_and_reductions():
    (_, one), two = lox.spool(lox.spool(with_reductions, keep_logs=True))(f32([1, 1, 4]))
    same(one, {"a": f32(4), "b": f32([1, 1, 4])})
    same(two, one)
    (_, _), tags = lox.spool(lox.spool(tagged, keep_logs=True), tags="slow")(0)
    assert list(tags) == ["test/loss", "debug/norm"]


def test_spool_consumes_all_logs():
    def f(x):
        y, logs = lox.spool(tagged, argnames="lr")(x)
        lox.log({"after": y})
        return logs

    inner, outer = lox.spool(f)(0)
    same(inner, {"lr": i32(4)})
    same(outer, {"after": i32(0)})


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["plain", "jit"])
def test_tap_lets_logs_flow_on(capsys, wrap):
    inner, outer = [], []
    tapped = wrap(lox.tap(wrap(scanned), inner.append))
    _, logs = lox.spool(lox.tap(tapped, outer.append, argnames="x"))(jnp.arange(2))
    jax.effects_barrier()
    same(logs, {"x": i32([0, 1])})
    assert [str(e) for e in inner] == ["{'x': 0}", "{'x': 1}"]
    assert [str(e) for e in outer] == ["{'x': 0}", "{'x': 1}"]
    assert capsys.readouterr().out == ""


def test_tap_outside_spool_gets_no_events():
    events = []
    _, logs = lox.tap(lox.spool(scanned), events.append)(jnp.arange(2))
    assert events == []
    same(logs, {"x": i32([0, 1])})


@pytest.mark.parametrize("number", [2, 3])
def test_nolog_leaves_no_branches_that_only_logged(number):
    def f(x, logs=True):
        def branch(n):
            return lambda x: (logs and lox.log({"x": x * n}), x)[1]

        return jax.lax.switch(x.astype(int) % number, [branch(n) for n in range(number)], x)

    x = jnp.float32(3)
    assert "case" not in jax.jit(lox.nolog(f)).lower(x).as_text()
    assert lox.spool(lox.nolog(f))(x) == (3, {})


def test_nolog_wins_over_what_is_outside():
    assert lox.spool(lox.nolog(scanned))(jnp.arange(2))[1] == {}
    _, logs = lox.nolog(lox.spool(scanned))(jnp.arange(2))
    same(logs, {"x": i32([0, 1])})


# --- the functions that come out ---


@pytest.mark.parametrize("transform", [lox.spool, lox.tap, lox.nolog, lox.keep])
def test_name_and_docstring_are_kept(transform):
    def fun(x, /, y, *, z=1):
        """What it does."""
        return x

    new = transform(fun)
    assert (new.__name__, new.__doc__, new.__wrapped__) == ("fun", "What it does.", fun)


def test_never_stricter_than_the_function():
    class Config:
        __hash__ = None
        size = 2

    def f(x, mode, config, *, n, items):
        if mode == "train" and x > 0:
            for i in range(n):
                lox.log({"x": x * jnp.ones(config.size)}, step=i)
        return [mode, config, items["list"], jnp.zeros(n).shape]

    config, items = Config(), {"list": [1, "a"]}

    def spool(f):
        return lambda *args, **kwargs: lox.spool(f)(*args, **kwargs)[0]

    for transform in (lox.tap, lox.nolog, lox.keep, spool):
        with lox.testing.capture():
            out = transform(f)(1.5, "train", config, n=2, items=items)
        assert out[0] == "train"
        assert out[1] is config
        assert out[2] == [1, "a"]
        assert out[3] == (2,)
    _, logs = lox.spool(f)(1.5, "train", config, n=2, items=items)
    same(logs, {"x": f32([[1.5, 1.5], [1.5, 1.5]])})
    assert lox.spool(f)(-1.5, "train", config, n=2, items=items)[1] == {}


def test_events_of_other_types_are_promoted():
    def f():
        lox.log({"x": jnp.int32(1)}, step=0)
        lox.log({"x": jnp.float32(2.5)}, step=0.5)

    _, logs = lox.spool(f)()  # in JAX's strict mode too, like the function itself
    same(logs, {"x": f32([1, 2.5])})
    same(logs.step, {"x": f32([0, 0.5])})


def test_tap_needs_no_common_shape():
    def f():
        lox.log({"x": jnp.zeros(2)})
        lox.log({"x": 1})

    events = []
    lox.tap(f, events.append)()
    lox.tap(jax.jit(f), events.append)()
    assert [str(e) for e in events] == ["{'x': [0.0, 0.0]}", "{'x': 1}"] * 2


def test_callbacks_own_their_arrays():
    kept = []

    def callback(logs):
        kept.append(logs["x"])
        logs["x"].fill(7) if logs["x"].ndim else None

    def f(xs):
        jax.lax.scan(lambda c, x: (c, lox.log({"x": x})["x"]), 0, xs)
        return xs

    xs = jnp.arange(6).reshape(3, 2)
    out = lox.tap(f, callback)(xs)
    same(out, i32([[0, 1], [2, 3], [4, 5]]))
    assert [x.tolist() for x in kept] == [[7, 7]] * 3


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["plain", "jit"])
def test_an_exception_in_the_callback(wrap):
    error = KeyError("mine")

    def callback(logs):
        if logs["x"] == 1:
            raise error

    tapped = lox.tap(wrap(scanned), callback)
    for _ in range(2):
        with pytest.raises(KeyError) as info:
            tapped(jnp.arange(3))
        assert info.value is error
    same(tapped(jnp.zeros(2, int)), i32(2))  # and it can be called again


# --- bad options ---


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "2", [1]])
@pytest.mark.parametrize(
    ("transform", "name"), [(lox.spool, "interval"), (lox.spool, "capacity"), (lox.tap, "interval")]
)
def test_a_bad_count(transform, name, value):
    with pytest.raises((ValueError, TypeError)) as info:
        transform(scanned, **{name: value})
    assert isinstance(info.value, lox.LoxError)
    assert str(info.value) == f"`{name}` is {value!r}; it must be a positive integer."


def test_a_bad_capacity_in_a_mapping():
    with pytest.raises(lox.OptionError) as info:
        lox.spool(scanned, capacity={"x": 0})
    assert str(info.value) == "`capacity['x']` is 0; it must be a positive integer."


@pytest.mark.parametrize("reduce", ["median", 3, ["mean"], "Mean", {"x": "median"}])
@pytest.mark.parametrize("transform", [lox.spool, lox.tap])
def test_a_reduction_that_does_not_exist(transform, reduce):
    with pytest.raises((ValueError, TypeError)) as info:
        transform(scanned, reduce=reduce)
    assert isinstance(info.value, lox.LoxError)
    wrong = reduce["x"] if isinstance(reduce, dict) else reduce
    assert str(info.value).startswith(f"there is no reduction {wrong!r} (for ")
    assert str(info.value).endswith(
        "). Choose 'append', 'count', 'first', 'last', 'max', 'mean', 'min', 'replace', 'std', "
        "'sum' and 'var', or give a `lox.Reduction`."
    )


def test_a_reduction_of_a_log_that_does_not_exist():
    with pytest.raises(lox.OptionError, match=r"^there is no reduction 'median' \(for 'x'\)\. "):
        lox.log({"x": 1}, reduce="median")
    with pytest.raises(lox.OptionError) as info:
        lox.log({"x": 1}, reduce={"y": "mean"})
    assert str(info.value) == "`reduce` names 'y', but `lox.log` was given 'x'."


@pytest.mark.parametrize("value", [3, [1], [None], 2.5, ["a", 1]])
@pytest.mark.parametrize("name", ["argnames", "tags"])
@pytest.mark.parametrize("transform", [lox.spool, lox.tap, lox.nolog, lox.keep])
def test_bad_names(transform, name, value):
    with pytest.raises((ValueError, TypeError), match=rf"^`{name}` takes names, not ") as info:
        transform(scanned, **{name: value})
    assert isinstance(info.value, lox.LoxError)


@pytest.mark.parametrize("tags", [3, [1], [None]])
def test_bad_tags_of_a_log(tags):
    with pytest.raises((ValueError, TypeError), match="tags") as info:
        lox.log({"x": 1}, tags=tags)
    assert isinstance(info.value, lox.LoxError)


@pytest.mark.parametrize("transform", [lox.spool, lox.tap])
@pytest.mark.parametrize("prefix", [3, None, ["a"]])
def test_a_bad_prefix(transform, prefix):
    with pytest.raises((ValueError, TypeError), match="prefix") as info:
        transform(scanned, prefix=prefix)
    assert isinstance(info.value, lox.LoxError)


@pytest.mark.parametrize("prefix", [3, None, ["a"]])
def test_a_bad_prefix_of_a_log(prefix):
    with pytest.raises((ValueError, TypeError), match="prefix") as info:
        lox.log({"x": 1}, prefix=prefix)
    assert isinstance(info.value, lox.LoxError)


@pytest.mark.parametrize("callback", [None, "print", 3])
def test_a_bad_callback(callback):
    with pytest.raises(TypeError) as info:
        lox.tap(scanned, callback)
    assert isinstance(info.value, lox.LoxError)
    assert str(info.value) == f"`callback` is {callback!r}; it must be a function of a logdict."


@pytest.mark.slow
def test_count_respects_the_interval():
    _, logs = lox.spool(scanned, reduce="count", interval=2)(jnp.arange(5))
    stacked = lox.spool(scanned, interval=2)(jnp.arange(5))[1].reduce("count")
    assert {k: int(v) for k, v in logs.items()} == {k: int(v) for k, v in stacked.items()}


# --- other names ---


def test_strip_is_nolog():
    assert lox.strip is lox.nolog
    assert spooled_keys(lox.strip(tagged, tags="slow")) == ["train/loss", "train/acc", "lr"]


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
def test_unify_has_no_effect(wrap):
    def f(x):
        def positive(x):
            lox.log({"positive": x})
            return x

        return jax.lax.cond(x > 0, positive, lambda x: x, x)

    same(wrap(lox.spool(f, unify=True))(1)[1], {"positive": i32([1])})
    with pytest.raises(lox.OptionError, match="`unify` is False, but branches that log differently are always united"):
        lox.spool(f, unify=False)


# --- a selection that matches nothing ---


def varied(x):
    """Keys in a scope, in a loop that never runs, in a branch, under vmap."""
    with lox.scope("net"):
        lox.log({"loss": x, "acc": x}, tags="metric")

    def body(c, i):
        lox.log({"never": i}, tags="debug")
        return c, None

    jax.lax.scan(body, 0, jnp.zeros(0))
    jax.lax.cond(x > 0, lambda: lox.log({"up": x})["up"], lambda: x)
    jax.vmap(lambda y: lox.log({"lane": y})["lane"])(jnp.arange(2))
    return x


def silent(x):
    return x


def ignore(logs):
    """A callback."""


SELECTIVE = {
    "spool": lox.spool,
    "tap": lambda f, **options: lox.tap(f, ignore, **options),
    "nolog": lox.nolog,
    "keep": lox.keep,
    "watch": lambda f, **options: lox.watch(f, ignore, **options),
}
AROUND = {
    "plain": lambda t: lambda f, **o: t(f, **o),
    "jit outside": lambda t: lambda f, **o: jax.jit(t(f, **o)),
    "jit inside": lambda t: lambda f, **o: t(jax.jit(f), **o),
    "vmap outside": lambda t: lambda f, **o: lambda x: jax.vmap(t(f, **o))(jnp.stack([x, x])),
    "vmap inside": lambda t: lambda f, **o: lambda x: t(jax.vmap(f), **o)(jnp.stack([x, x])),
    "grad": lambda t: lambda f, **o: lambda x: jax.vjp(t(f, **o), x),
    "keep_logs": lambda t: lambda f, **o: t(lambda x: lox.spool(f, keep_logs=True)(x)[0], **o),
    "tap inside": lambda t: lambda f, **o: t(lox.tap(f, ignore), **o),
}
KEYS = "The keys are 'net/loss', 'net/acc', 'never', 'up' and 'lane'."


def warned(call, *args):
    """Return the warnings of a call, and whether they point to this file."""
    lox.config.sink = "off"
    with warnings.catch_warnings(record=True) as actual:
        warnings.simplefilter("always")
        call(*args)
        jax.effects_barrier()
    assert {(w.category, w.filename) for w in actual} <= {(lox.LoxWarning, __file__)}
    return [str(w.message) for w in actual]


@pytest.mark.sample(6)
@pytest.mark.slow
@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("transform", SELECTIVE)
def test_a_selection_that_matches_nothing_warns(transform, around):
    transform = AROUND[around](SELECTIVE[transform])
    x = jnp.float32(1)
    assert warned(transform(varied, argnames="los"), x) == [f"`argnames` names 'los', but there is no such key. {KEYS}"]
    tags = "no log has the tag 'metrc'. The tags are 'metric' and 'debug'. Did you mean 'metric'?"
    assert warned(transform(varied, tags="metrc"), x) == [tags]


@pytest.mark.sample(8)
@pytest.mark.slow
@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("transform", SELECTIVE)
def test_a_selection_that_matches_something_does_not_warn(transform, around):
    transform = AROUND[around](SELECTIVE[transform])
    for options in ({"argnames": ["never", "net/loss"]}, {"tags": "debug"}):
        assert warned(transform(varied, **options), jnp.float32(1)) == []


@pytest.mark.sample(12)
@pytest.mark.slow
@pytest.mark.parametrize("transform", SELECTIVE)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"argnames": []},
        {"tags": []},
        {"argnames": [], "tags": "metrc"},
        {"argnames": ["up", "lane"]},
        {"argnames": "net/*", "tags": "metric"},
        {"argnames": ["net/*", "nothing/*"]},
        {"tags": ["debug", "other"]},
    ],
)
def test_a_selection_that_matches_nothing_on_purpose_does_not_warn(transform, options):
    assert warned(SELECTIVE[transform](varied, **options), jnp.float32(1)) == []


def test_logs_in_derivative_rules_may_come_later():
    @jax.custom_vjp
    def double(x):
        return 2 * x

    double.defvjp(lambda x: (2 * x, None), lambda _, g: (lox.log({"g": g})["g"] * 2,))
    for transform in (lox.nolog, lox.keep):
        assert warned(jax.grad(transform(double, "g")), 1.0) == []
        assert warned(transform(jax.jit(double), "g"), 1.0) == []
        assert warned(jax.jit(transform(lambda x: lox.log_grad("g", x), "g")), 1.0) == []
    relu = lambda x: jax.nn.relu(lox.log({"x": x})["x"])  # noqa: E731
    assert len(warned(jax.grad(lox.nolog(relu, "y")), 1.0)) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "messages"),
    [
        ({"argnames": "loss"}, [f"`argnames` names 'loss', but there is no such key. {KEYS} Did you mean 'net/loss'?"]),
        ({"argnames": "nat/*"}, [f"`argnames` names 'nat/*', but there is no such key. {KEYS}"]),
        ({"argnames": ["lanes", "up"]}, [f"`argnames` names 'lanes', but there is no such key. {KEYS} "
                                          "Did you mean 'lane'?"]),
        ({"argnames": "net/loss", "tags": "debug"}, ["no log has both the key 'net/loss' and the tag 'debug'."]),
        ({"argnames": ["up", "never"], "tags": ["metric", "b"]},
         ["no log has both one of the keys 'up' and 'never' and one of the tags 'b' and 'metric'."]),
        ({"reduce": {"train/up": "mean", "lane": "max"}, "prefix": "train/"},
         [f"`reduce` names 'train/up', but there is no such key. {KEYS} Did you mean 'up'?"]),
        ({"reduce": {"net/*": "mean"}},
         [f"`reduce` names 'net/*', but there is no such key. {KEYS} Did you mean 'net/acc'?"]),
        ({"capacity": {"lan": 3}},
         [f"`capacity` names 'lan', but there is no such key. {KEYS} Did you mean 'lane'?"]),
    ],
)  # fmt: skip
def test_the_text_of_the_warning(options, messages):
    assert warned(lox.spool(varied, **options), jnp.float32(1)) == messages
    if "capacity" not in options:
        assert warned(lox.tap(varied, ignore, **options), jnp.float32(1)) == messages


def test_a_function_that_logs_nothing():
    nothing = ["`argnames` names 'x', but there is no such key. Nothing is logged."]
    for name, transform in SELECTIVE.items():
        # Removing logs where there are none is fine.
        assert warned(transform(silent, argnames="x"), 1.0) == ([] if name == "nolog" else nothing)
        assert warned(transform(silent), 1.0) == []
    assert warned(lox.spool(lambda x: lox.spool(varied)(x)[0], "up"), jnp.float32(1)) == [
        "`argnames` names 'up', but there is no such key. Nothing is logged."
    ]
    no_tag = "no log has the tag 'a'. No log has a tag."
    assert warned(lox.spool(lambda x: lox.log({"x": x}), tags="a"), 1) == [no_tag]
    assert warned(lox.spool(silent, tags="a"), 1) == ["no log has the tag 'a'. Nothing is logged."]
    assert warned(lox.logify.logify(silent), 1) == []


def test_warnings_come_per_trace_and_not_per_call():
    f = jax.jit(varied)
    for transformed in (lox.spool(f, "los"), jax.jit(lox.spool(f, "los")), lox.nolog(f, "los")):
        assert len(warned(transformed, jnp.float32(1))) == 1
        assert warned(transformed, jnp.float32(2)) == []
    assert warned(lox.spool(f, "los"), jnp.float32(3)) == []  # made again, but traced before


def test_a_few_of_many_keys_are_listed():
    def many(x):
        lox.log({f"k{n}": x for n in range(30)})

    (message,) = warned(lox.spool(many, "los"), 1)
    assert message.endswith("'k17', 'k18' and 'k19' and 10 more.")


@pytest.mark.parametrize("jit", [False, True])
def test_selections_of_loggers(tmp_path, jit):
    with lox.SaveLogger(tmp_path) as logger:
        state = logger.init(jax.random.key(0))
        for method in (logger.spool, logger.tap):
            fun = lambda x, method=method: method(varied, state, argnames="los")(x)  # noqa: E731
            assert warned(jax.jit(fun) if jit else fun, jnp.float32(1)) == [
                f"`argnames` names 'los', but there is no such key. {KEYS}"
            ]
            fun = lambda x, method=method: method(varied, state, argnames="never")(x)  # noqa: E731
            assert warned(jax.jit(fun) if jit else fun, jnp.float32(1)) == []


def test_selections_of_load(tmp_path):
    for n in range(2):
        lox.save({"loss": 1.0, "acc": 2.0}, tmp_path, jax.random.key(n))
    prng_keys = jax.vmap(jax.random.key)(jnp.arange(2))
    for key in (None, jax.random.key(0), prng_keys, "1"):
        message = (
            "`argnames` names 'los', but there is no such key. The keys are 'loss' and 'acc'. Did you mean 'loss'?"
        )
        assert warned(lambda key=key: lox.load(tmp_path, key, argnames="los")) == [message]
        for names in ("loss", ["l*", "x*"], [], None, iter(["loss"])):
            assert warned(lambda key=key, names=names: lox.load(tmp_path, key, argnames=names)) == []
    assert list(lox.load(tmp_path, "1", argnames=iter(["loss"]))) == ["loss"]


# --- warnings point to the user's line ---


@pytest.mark.slow
def test_the_warning_of_dropped_events_points_to_the_users_line():
    assert warned(lox.spool(count_to, capacity=2), 3) == [OVERFLOW]
    assert warned(lox.spool(jax.jit(count_to), capacity=2), 3) == [OVERFLOW]
    assert warned(jax.jit(lox.spool(count_to, capacity=2)), 3) == []
    _, logs = jax.jit(lox.spool(count_to, capacity=2))(3)
    assert warned(logs.compact) == [OVERFLOW]
    _, logs = jax.vmap(lox.spool(count_to, capacity=2))(jnp.array([3, 1]))
    assert warned(logs.lane, 0) == [OVERFLOW]


OVERFLOW = "'i' had more events than its capacity: 1 were dropped. Raise `capacity`, or use `reduce` or `tap`."


def test_warnings_of_loggers_point_to_the_line_that_made_the_logger(tmp_path):
    class Broken(lox.Logger):
        def write(self, run, logs):
            raise OSError("no space left")

    logger = Broken()
    line = sys._getframe().f_lineno - 1
    state = logger.init(jax.random.key(0))
    with warnings.catch_warnings(record=True) as actual:
        warnings.simplefilter("always")
        jax.jit(lambda: logger.spool(count_to, state, capacity=2)(3))()
        with pytest.raises(OSError, match="no space left"):
            logger.close()
    texts = [str(w.message).split(":")[0] for w in actual]
    assert texts == ["'i' had more events than its capacity", "Broken failed writing 'i' of run '0'"]
    assert {(w.filename, w.lineno) for w in actual} == {(__file__, line)}


# --- reductions and dtypes ---

DTYPES = ["bool", "int8", "uint32", "int32", "float16", "bfloat16", "float32", "complex64"]
VALUES = [3, 0, 100]
REDUCTIONS = ["mean", "sum", "min", "max", "first", "last", "std", "var", "count"]


def expected_of(how, dtypes):
    with jax.numpy_dtype_promotion("standard"):
        joint = jax.dtypes.canonicalize_dtype(jnp.promote_types(*dtypes[:2]))
    stacked = jnp.stack([jnp.asarray(x, d).astype(joint) for x, d in zip(VALUES, dtypes, strict=True)])
    special = {"first": lambda x: x[0], "last": lambda x: x[-1], "count": lambda x: jnp.int32(len(x))}
    return special.get(how, getattr(jnp, how, None))(stacked)


def in_a_row(logs):
    for log in logs:
        log(None)


def in_branches(logs):
    for k, log in enumerate(logs):
        jax.lax.cond(k >= 0, lambda: (log(None), 0)[1], lambda: (logs[k - 1](None), 0)[1])  # noqa: B023


def in_loops(logs):
    def body(i, _):  # the second iteration logs nothing
        for log in logs:
            log(i == 0)
        return i + 1, None

    jax.lax.scan(body, 0, length=2)


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Casting complex")
@pytest.mark.parametrize(
    ("place", "first"),
    [(in_a_row, d) for d in DTYPES] + [(place, d) for place in (in_branches, in_loops) for d in ("int8", "float32")],
)
def test_events_of_two_dtypes_reduce_to_what_jnp_makes_of_them_together(place, first):
    reductions = REDUCTIONS if place is in_a_row else ["sum", "min"]
    how_of = {f"{how}/{second}": how for how in reductions for second in DTYPES}
    dtypes_of = {second: [first, second, first] for second in DTYPES}

    def logger(n, x):
        def log(where):
            lox.log({k: x.astype(dtypes_of[k.split("/")[1]][n]) for k in how_of}, where=where)

        return log

    def f(values):
        place([logger(n, x) for n, x in enumerate(values)])

    def check(logs):
        for key, how in how_of.items():
            want = expected_of(how, dtypes_of[key.split("/")[1]])
            got = logs[key]
            assert (got.dtype, got.shape) == (want.dtype, want.shape), key
            wide = np.complex64 if want.dtype == np.complex64 else np.float32
            rtol = 1e-2 if want.dtype.itemsize == 2 else 1e-6
            np.testing.assert_allclose(np.asarray(got).astype(wide), np.asarray(want).astype(wide), rtol, err_msg=key)

    values = [jnp.asarray(x) for x in VALUES]
    check(lox.spool(f, reduce=how_of)(values)[1])
    if place is in_a_row:
        check(jax.tree.map(np.asarray, lox.spool(f)(values)[1]).reduce(how_of))


@pytest.mark.parametrize(
    ("wrap", "lanes"), [(lambda f: f, ()), (jax.jit, ()), (jax.vmap, (2,)), (lambda f: jax.jit(jax.vmap(f)), (2,))]
)
def test_the_sum_of_integers_and_floats(wrap, lanes):
    def f(n, x):
        lox.log({"a": n, "b": x})
        lox.log({"a": x, "b": n})

    _, logs = lox.spool(wrap(f), reduce="sum")(jnp.full(lanes, 7), jnp.full(lanes, 0.5))
    same(logs, {"a": np.full(lanes, 7.5, np.float32), "b": np.full(lanes, 7.5, np.float32)})


def test_a_sum_of_integers_keeps_its_digits_when_floats_follow():
    def f(n):
        for x in (n, 1, 0.5, -n):
            lox.log({"x": x})

    same(lox.spool(f, reduce="sum")(jnp.int32(2**24))[1], {"x": f32(1.5)})


def test_a_reduction_whose_state_depends_on_the_dtype():
    reduction = lox.Reduction(
        lambda x: (x,) * (1 + jnp.issubdtype(x.dtype, jnp.floating)), lambda state, x: (x, *state[1:]), lambda s: s[0]
    )

    def f():
        lox.log({"x": 1})
        lox.log({"x": 0.5})

    with pytest.raises(lox.MismatchError) as info:
        lox.spool(f, reduce=reduction)()
    assert str(info.value).startswith(
        "'x' is logged as int32 and as float32, for which the state of its reduction is not the same tree.\n"
        "  logged at test_options.py:"
    )


SMALL_FLOATS = [
    "bfloat16",
    "float16",
    "float8_e3m4",
    "float8_e4m3",
    "float8_e4m3b11fnuz",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "float4_e2m1fn",
]  # XLA cannot compile the six-bit ones for the CPU


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.parametrize("dtype", SMALL_FLOATS)
@pytest.mark.parametrize("how", ["min", "max"])
def test_extremes_of_small_floats(how, dtype):
    if dtype == "float4_e2m1fn" and jax.default_backend() != "cpu":
        pytest.skip("XLA has no loops over numbers of half a byte for GPUs")
    dtype = jnp.dtype(dtype)
    fun, largest = getattr(np, how), float(jnp.finfo(dtype).max)
    smallest = (
        0.25 if dtype.name == "float8_e8m0fnu" else float(jnp.finfo(dtype).min)
    )  # XLA takes the smallest float8_e8m0fnu for zero
    for values in ([1, 4, 2], [largest] * 2, [smallest] * 2):
        xs = np.asarray(values, np.float32).astype(dtype)
        want = np.asarray(fun(np.asarray(values, np.float32))).astype(dtype)
        for got in (
            lox.spool(scanned, reduce=how)(jnp.asarray(xs))[1]["x"],
            lox.spool(scanned)(jnp.asarray(xs))[1].reduce(how)["x"],
            jax.tree.map(np.asarray, lox.spool(scanned)(jnp.asarray(xs))[1]).reduce(how)["x"],
        ):
            assert np.asarray(got).dtype == dtype
            assert np.asarray(got).tobytes() == want.tobytes()


def test_extremes_of_complex_numbers_that_are_infinite():
    xs = np.asarray([complex(np.inf, 2), complex(np.inf, 1)], np.complex64)
    for how in ("min", "max"):
        for x in (xs, -xs):
            same(lox.spool(scanned, reduce=how)(x)[1], {"x": np.asarray(getattr(np, how)(x))})


@pytest.mark.sample(2)
@pytest.mark.slow
@pytest.mark.parametrize("how", ["var", "std"])
@pytest.mark.parametrize("mean", [0.0, 1e4, 1e6, 1e4 + 1e4j])
def test_the_spread_around_a_large_mean(how, mean):
    spread = np.random.default_rng(0).normal(size=(1000, 2))
    xs = (mean + (spread @ [1, 1j] if isinstance(mean, complex) else spread[:, 0])).astype(
        np.complex64 if isinstance(mean, complex) else np.float32
    )
    want = getattr(np, how)(xs.astype(np.complex128 if isinstance(mean, complex) else np.float64))
    _, logs = lox.spool(scanned, reduce=how)(jnp.asarray(xs))
    np.testing.assert_allclose(logs["x"], want, rtol=2e-7)
    outlier = np.concatenate([xs[:1] + 1000, xs])
    want = getattr(np, how)(outlier.astype(np.complex128 if isinstance(mean, complex) else np.float64))
    _, logs = lox.spool(scanned, reduce=how)(jnp.asarray(outlier))
    np.testing.assert_allclose(logs["x"], want, rtol=2e-7)
    logs = lox.spool(scanned)(jnp.asarray(outlier))[1].reduce(how)
    np.testing.assert_allclose(logs["x"], want, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("xs", [[np.inf], [np.nan, 1.0], [1.0, -np.inf], [np.inf, np.inf]])
@pytest.mark.parametrize("how", ["var", "std"])
def test_the_spread_of_what_is_not_finite(how, xs):
    same(lox.spool(scanned, reduce=how)(f32(xs))[1], {"x": f32(np.nan)})


@pytest.mark.slow
def test_an_interval_keeps_the_steps_of_events_before_a_while_loop_that_has_none():
    def f(x):
        def count(x, i):
            lox.log({"x": x}, step=i)
            return x + 1, None

        def halve(x):
            lox.log({"x": x})
            return x // 2

        return jax.lax.while_loop(lambda x: x > 1, halve, jax.lax.scan(count, x, jnp.arange(4))[0])

    for wrap in (lambda f: f, jax.jit):
        logs = wrap(lox.spool(f, interval=2, capacity=10))(4)[1].compact()
        same(logs, {"x": i32([4, 6, 8, 2])})
        same(logs.step, {"x": i32([0, 2, -1, -1])})
