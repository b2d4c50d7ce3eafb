import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exact import i32, same

import lox


@jax.jit
def compiled(x):
    lox.log({"x": x}, step=x)
    return x + 1


def texts(events):
    return [str(e) for e in events]


def test_eager(capsys):
    with lox.testing.capture() as events:
        lox.log({"x": 1}, step=3)
        lox.log({"y": jnp.arange(2)})
    assert texts(events) == ["{'x': 1}", "{'y': [0, 1]}"]
    assert all(type(e) is lox.logdict for e in events)
    same(events[0].step, {"x": i32(3)})
    assert all(isinstance(x, np.ndarray | np.generic) for x in jax.tree.leaves(events))
    assert capsys.readouterr().out == ""


def test_compiled_inside():
    with lox.testing.capture() as events:
        f = jax.jit(lambda x: lox.log({"z": x})["z"])
        f(1)
        f(2)
    assert texts(events) == ["{'z': 1}", "{'z': 2}"]


def test_compiled_before(capsys):
    compiled(0)
    with lox.testing.capture() as events:
        compiled(1)
        compiled(2)
    compiled(3)
    jax.effects_barrier()
    assert texts(events) == ["{'x': 1}", "{'x': 2}"]
    assert capsys.readouterr().out == "{'x': 0} step=0\n{'x': 3} step=3\n"


def test_compiled_inside_and_called_after(capsys):
    f = jax.jit(lambda x: lox.log({"z": x})["z"])
    with lox.testing.capture() as events:
        f(1)
    f(2)
    jax.effects_barrier()
    assert texts(events) == ["{'z': 1}"]
    assert capsys.readouterr().out == "{'z': 2}\n"


def test_a_loop_in_order():
    @jax.jit
    def f():
        def body(i, carry):
            lox.log({"i": i})
            return carry

        return jax.lax.fori_loop(0, 20, body, 0)

    with lox.testing.capture() as events:
        f()
    assert [int(e["i"]) for e in events] == list(range(20))


def test_nested(capsys):
    with lox.testing.capture() as outer:
        compiled(1)
        with lox.testing.capture() as inner:
            compiled(2)
        compiled(3)
    assert texts(inner) == ["{'x': 2}"]
    assert texts(outer) == ["{'x': 1}", "{'x': 3}"]
    assert lox.config.sink == "console"
    assert capsys.readouterr().out == ""


def test_restored_after_an_exception(capsys):
    with pytest.raises(ZeroDivisionError), lox.testing.capture() as events:
        compiled(1)
        raise ZeroDivisionError
    assert lox.config.sink == "console"
    compiled(2)
    jax.effects_barrier()
    assert capsys.readouterr().out == "{'x': 2} step=2\n"
    assert texts(events) == ["{'x': 1}"]


def test_the_previous_sink_is_restored():
    mine = []
    lox.config.sink = mine.append
    with lox.testing.capture() as events:
        lox.log({"x": 1})
    lox.log({"x": 2})
    assert texts(events) == ["{'x': 1}"]
    assert texts(mine) == ["{'x': 2}"]


def test_captures_while_the_sink_is_off():
    lox.config.sink = "off"
    with lox.testing.capture() as events:
        compiled(1)
    assert texts(events) == ["{'x': 1}"]
    assert lox.config.sink == "off"


@pytest.mark.parametrize(
    "consume",
    [lox.spool, lox.nolog, lambda f: lox.tap(f, lambda logs: None)],
    ids=["spool", "nolog", "tap"],
)
def test_what_a_transformation_has_claimed_is_not_captured(consume):
    with lox.testing.capture() as events:
        consume(compiled)(1)
        jax.jit(consume(compiled))(1)
    assert events == []


def test_all_lanes_in_one_event():
    with lox.testing.capture() as events:
        jax.vmap(compiled)(jnp.arange(3))
        jax.jit(jax.vmap(compiled))(jnp.arange(3))
    assert texts(events) == ["{'x': [0, 1, 2]}"] * 2


def test_says_when_it_cannot_see(monkeypatch):
    monkeypatch.setenv("LOX_SINK", "off")
    with pytest.raises(lox.LoxError) as info, lox.testing.capture():
        pass
    assert str(info.value) == (
        "`lox.testing.capture` cannot see compiled functions while the environment has LOX_SINK=off: unset it."
    )
    assert lox.config.sink == "console"
