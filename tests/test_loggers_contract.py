"""What every logger promises. To test a new logger, add a case to `logger_cases.CASES`."""

import threading
import time
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from logger_cases import CASES, parts_of

import lox

pytestmark = pytest.mark.slow

case = pytest.mark.parametrize("case", CASES, ids=repr)
how = pytest.mark.parametrize("how", ["spool", "tap"])
PRNG_KEYS = [jax.random.key(seed) for seed in (7, 8, 9)]


def train(x):
    def step(x, i):
        x = x + 1.0
        lox.log({"x": x, "y": 2 * x}, step=i, tags="metric")
        lox.log({"norm": x * x}, tags="debug")
        return x, None

    return jax.lax.scan(step, x, jnp.arange(3))[0]


def expected(x, prefix=""):
    xs = [x + n + 1.0 for n in range(3)]
    return {
        f"{prefix}x": [({"step": n}, v) for n, v in enumerate(xs)],
        f"{prefix}y": [({"step": n}, 2 * v) for n, v in enumerate(xs)],
        f"{prefix}norm": [({}, v * v) for v in xs],
    }


def check(case, logger, events, closed=True):
    if case.read is not None and (closed or case.reads_while_open):
        assert case.read(logger) == case.stored(events)


@pytest.mark.sample(1)
@case
@how
def test_eagerly_and_jitted(case, how, tmp_path):
    with case.make(tmp_path) as logger:
        for seed, run in enumerate(
            [
                lambda state: getattr(logger, how)(train, state)(1.0),
                lambda state: getattr(logger, how)(jax.jit(train), state)(1.0),
                jax.jit(lambda state: getattr(logger, how)(train, state)(1.0)),
            ]
        ):
            assert float(run(logger.init(jax.random.key(seed)))) == 4.0
    check(case, logger, {name: expected(1.0) for name in "012"})


@pytest.mark.sample(3)
@case
@how
@pytest.mark.parametrize("jit", [lambda f: f, jax.jit])
def test_one_run_per_lane(case, how, jit, tmp_path):
    with case.make(tmp_path) as logger:
        states = jax.vmap(logger.init)(jnp.stack(PRNG_KEYS))
        run = jit(jax.vmap(lambda state, x: getattr(logger, how)(train, state)(x)))
        np.testing.assert_array_equal(run(states, jnp.array([0.0, 10.0, 20.0])), [3.0, 13.0, 23.0])
    check(case, logger, {"7": expected(0.0), "8": expected(10.0), "9": expected(20.0)})


@pytest.mark.parametrize("jit", [lambda f: f, jax.jit], ids=["eager", "jit"])
@how
def test_a_vmap_on_which_no_run_depends_makes_lanes_inside_the_runs(how, jit, tmp_path):
    """Neither the PRNG key nor the config is mapped by one of two vmaps, or by the only one."""

    def train(x):
        lox.log({"x": x}, step=0)
        return x

    with lox.SaveLogger(tmp_path) as logger:
        one = lambda prng_key, x: getattr(logger, how)(train, logger.init(prng_key))(x)  # noqa: E731
        every_seed = jax.vmap(one, in_axes=(0, None))
        jit(jax.vmap(every_seed, in_axes=(None, 0)))(jnp.stack(PRNG_KEYS[:2]), jnp.arange(3.0))
        alone = lambda x: getattr(logger, how)(train, logger.init(PRNG_KEYS[2], {"name": "adam"}))(x)  # noqa: E731
        jit(jax.vmap(alone))(jnp.arange(4.0))
    assert [run.name for run in lox.runs(tmp_path)] == ["7", "8", "9"]
    for name, lanes in ("7", 3), ("8", 3), ("9", 4):
        assert lox.load(tmp_path, name)["x"].tolist() == [list(range(lanes))]


@pytest.mark.sample(2)
@case
@how
def test_init_inside_every_transformation(case, how, tmp_path):
    with case.make(tmp_path) as logger:

        @jax.jit
        @jax.vmap
        def run(prng_key, x):
            return getattr(logger, how)(train, logger.init(prng_key))(x)

        run(jnp.stack(PRNG_KEYS[:2]), jnp.array([0.0, 10.0]))
        logger.flush()
        run(jnp.stack(PRNG_KEYS[2:]), jnp.array([20.0]))
    check(case, logger, {"7": expected(0.0), "8": expected(10.0), "9": expected(20.0)})


@pytest.mark.sample(6)
@case
@how
def test_inside_a_scan(case, how, tmp_path):
    with case.make(tmp_path) as logger:

        @jax.jit
        def run(state, x):
            return jax.lax.scan(lambda x, _: (getattr(logger, how)(train, state)(x), None), x, None, 2)[0]

        assert float(run(logger.init(PRNG_KEYS[0]), 0.0)) == 6.0
    both = {
        key: first + second for (key, first), second in zip(expected(0.0).items(), expected(3.0).values(), strict=True)
    }
    check(case, logger, {"7": both})


@pytest.mark.sample(8)
@case
def test_a_run_per_iteration(case, tmp_path):
    with case.make(tmp_path) as logger:

        def step(carry, prng_key):
            logger.log(logger.init(prng_key), {"a": 1.0})
            return carry, None

        jax.jit(lambda keys: jax.lax.scan(step, 0, keys))(jnp.stack(PRNG_KEYS))
    check(case, logger, {name: {"a": [({}, 1.0)]} for name in "789"})


@case
def test_log(case, tmp_path):
    with case.make(tmp_path) as logger:
        state = logger.init(PRNG_KEYS[0])
        logger.log(state, {"a": 1, "b": np.float32(0.5)}, prefix="p/", step=3)
        jax.jit(lambda state, a: [logger.log(state, {"p/a": a + n}, step=n) for n in range(5)] and None)(state, 2)
        logger.log(state, lox.spool(train, argnames="x")(0.0)[1], episode=1)
    events = {
        "p/a": [({"step": 3}, 1), *[({"step": n}, 2 + n) for n in range(5)]],
        "p/b": [({"step": 3}, 0.5)],
        "x": [({"step": n, "episode": 1}, n + 1.0) for n in range(3)],
    }
    check(case, logger, {"7": events})


@pytest.mark.sample(1)
@case
@how
def test_options(case, how, tmp_path):
    with case.make(tmp_path) as logger:
        act = lambda **options: getattr(logger, how)(train, state, **options)(0.0)  # noqa: E731
        state = logger.init(jax.random.key(0))
        act(argnames=["x"], prefix="a/")
        state = logger.init(jax.random.key(1))
        act(tags="debug")
        state = logger.init(jax.random.key(2))
        act(argnames="x", interval=2)
        state = logger.init(jax.random.key(3))
        act(argnames="x", reduce="mean")
        if how == "tap":
            state = logger.init(jax.random.key(4))
            act(argnames="x", buffer=2)
            state = logger.init(jax.random.key(5))
            act(argnames="x", buffer=2, reduce="max")
    full = expected(0.0)
    events = {
        "0": {"a/x": full["x"]},
        "1": {"norm": full["norm"]},
        "2": {"x": full["x"][::2]},
        "3": {"x": [({"step": 2}, 2.0)]},
    }
    if how == "tap":
        events |= {"4": {"x": full["x"]}, "5": {"x": [({"step": 1}, 2.0), ({"step": 2}, 3.0)]}}
    check(case, logger, events)


@pytest.mark.sample(4)
@case
def test_while_loops(case, tmp_path):
    def halve(x):
        def body(x):
            lox.log({"x": x})
            return x // 2

        return jax.lax.while_loop(lambda x: x > 1, body, x)

    with case.make(tmp_path) as logger:
        states = jax.vmap(logger.init)(jnp.stack(PRNG_KEYS[:2]))
        jax.jit(jax.vmap(lambda s, x: logger.tap(halve, s)(x)))(states, jnp.array([5, 16]))
        jax.jit(jax.vmap(lambda s, x: logger.spool(halve, s, capacity=9)(x)))(states, jnp.array([9, 3]))
    events = {"7": [5, 2, 9, 4, 2], "8": [16, 8, 4, 2, 3]}
    check(case, logger, {run: {"x": [({}, v) for v in values]} for run, values in events.items()})


@pytest.mark.sample(3)
@case
@how
def test_ragged_lanes(case, how, tmp_path):
    def f(xs):
        def step(carry, x):
            jax.lax.cond(x > 2, lambda: lox.log({"big": x}, step=x) and None, lambda: None)
            return carry, None

        jax.lax.scan(step, 0, xs)

    with case.make(tmp_path) as logger:
        states = jax.vmap(logger.init)(jnp.stack(PRNG_KEYS))
        jax.vmap(lambda s, xs: getattr(logger, how)(f, s)(xs))(states, jnp.array([[1, 2], [1, 5], [3, 4]]))
    actual = {"7": [], "8": [5], "9": [3, 4]}
    check(case, logger, {run: {"big": [({"step": v}, v) for v in vs]} if vs else {} for run, vs in actual.items()})


@case
def test_a_second_run_with_the_same_key(case, tmp_path):
    with case.make(tmp_path) as logger:
        for value in (1.0, 2.0):
            logger.log(logger.init(PRNG_KEYS[0]), {"a": value})
    check(case, logger, {"7": {"a": [({}, 1.0)]}, "7.1": {"a": [({}, 2.0)]}})


@case
def test_flush_makes_events_visible(case, tmp_path):
    with case.make(tmp_path) as logger:
        state = logger.init(PRNG_KEYS[0])
        for n in range(3):
            jax.jit(lambda state, n: logger.log(state, {"a": n}))(state, n)
            logger.flush()
            check(case, logger, {"7": {"a": [({}, m) for m in range(n + 1)]}}, closed=False)
    check(case, logger, {"7": {"a": [({}, m) for m in range(3)]}})


@pytest.mark.sample(9)
@case
def test_after_closing(case, tmp_path):
    logger = case.make(tmp_path)
    state = logger.init(PRNG_KEYS[0])
    later = jax.jit(lambda state, x: logger.tap(train, state)(x))
    later(state, 0.0)
    logger.close()
    logger.close()
    name = type(logger).__name__
    for use in (
        lambda: logger.init(PRNG_KEYS[0]),
        lambda: logger.log(state, {"a": 1}),
        lambda: logger.spool(train, state),
        lambda: logger.tap(train, state),
        lambda: logger.__enter__(),
    ):
        with pytest.raises(lox.LoxError, match=f"this {name} is closed. Make a new one"):
            use()
    with pytest.warns(lox.LoxWarning, match="events came after the logger was closed"):
        assert float(later(state, 0.0)) == 3.0  # compiled before: the program cannot know
        jax.effects_barrier()
    with pytest.raises(Exception, match="events came after the logger was closed") as caught:
        logger.close()
    assert len(getattr(caught.value, "exceptions", [caught.value])) == len(parts_of(logger))
    check(case, logger, {"7": expected(0.0)})


@pytest.mark.sample(5)
@case
@how
def test_a_compiled_function_writes_to_the_run_of_its_state_not_to_the_logger_it_was_traced_with(case, how, tmp_path):
    """The state of a new logger as an argument is enough: nothing is traced again, and no event goes to the old one."""
    traced = []

    @jax.jit
    def step(state, x):
        traced.append(x)
        return getattr(logger, how)(train, state)(x)

    for n, prng_key in enumerate(PRNG_KEYS):
        folder = tmp_path / str(n)
        folder.mkdir()
        with case.make(folder) as logger:
            assert float(step(logger.init(prng_key), float(n))) == 3.0 + n
        check(case, logger, {str(7 + n): expected(float(n))})
    assert len(traced) == 1


@pytest.mark.sample(6)
@case
@how
def test_errors_do_not_reach_the_program(case, how, tmp_path, monkeypatch):
    logger = case.make(tmp_path)
    state = logger.init(PRNG_KEYS[0])

    def broken(runs, batch):
        raise OSError("no space left")

    broken_one = parts_of(logger)[0]
    monkeypatch.setattr(broken_one, "_write_batch", broken)
    with pytest.warns(lox.LoxWarning, match=r"failed writing .*OSError: no space left") as caught:
        assert float(getattr(logger, how)(jax.jit(train), state)(1.0)) == 4.0
        assert float(getattr(logger, how)(train, state)(1.0)) == 4.0
        with pytest.raises(OSError, match="no space left"):
            logger.flush()
    assert len(caught) == 1
    logger.flush()  # raised once
    monkeypatch.undo()
    logger.log(state, {"a": 1})  # and it goes on
    logger.close()
    for other in parts_of(logger)[1:]:
        actual = {p.stem: p.read_text().count("\n") for p in other.path.glob("*.jsonl")}
        assert actual == {"7": 13}


@pytest.mark.sample(3)
@case
def test_nothing_is_lost_in_a_small_queue(case, tmp_path, monkeypatch):
    before = set(threading.enumerate())
    logger = case.make(tmp_path)
    for part in parts_of(logger):
        part.queue_size = 4
        slowly = part._write_batch
        waited = []

        def write(runs, batch, slowly=slowly, waited=waited):
            time.sleep(0.002)
            waited.append(len(runs))
            slowly(runs, batch)

        monkeypatch.setattr(part, "_write_batch", write)
    with logger:
        states = jax.vmap(logger.init)(jnp.stack(PRNG_KEYS))

        @jax.jit
        @jax.vmap
        def run(state, x):
            def step(x, i):
                lox.log({"x": x + i}, step=i)
                return x, None

            return logger.tap(lambda x: jax.lax.scan(step, x, jnp.arange(300))[0], state)(x)

        run(states, jnp.array([0, 1000, 2000]))
        logger.flush()
        threads = [t for t in set(threading.enumerate()) - before if t.name.startswith("lox-")]
        assert len(threads) <= len(parts_of(logger))
    check(case, logger, {n: {"x": [({"step": i}, 1000 * k + i) for i in range(300)]} for k, n in enumerate("789")})


@case
def test_no_warnings_and_no_retracing(case, tmp_path):
    traces = []

    @jax.jit
    def f(x):
        traces.append(1)
        lox.log({"x": x})
        return x

    with warnings.catch_warnings(), case.make(tmp_path) as logger:
        warnings.simplefilter("error")
        state = logger.init(PRNG_KEYS[0])
        for how in ("spool", "tap"):
            for n in range(4):
                getattr(logger, how)(f, state, argnames=["x"])(jnp.float32(n))
                if n == 0:
                    count = len(traces)
            assert len(traces) == count
    check(case, logger, {"7": {"x": [({}, float(n)) for n in [*range(4), *range(4)]]}})


def of_many_shapes(x):
    """Log two keys, each with two shapes: under vmaps of different size, and as arrays."""
    for n in (2, 3):
        jax.vmap(lambda y, n=n: lox.log({"h": x + y}, step=n - 2))(jnp.arange(n, dtype=jnp.float32))
    for n in (3, 2):
        lox.log({"v": x * jnp.arange(n, dtype=jnp.float32)}, step=5 - n)
    return x


def stored_shapes(case, events):
    """Return what is stored: files keep arrays, `load` separates shapes, trackers have a curve per element."""
    if case.name in ("tensorboard", "wandb", "neptune", "mlflow", "trackio"):
        curves = {}
        for key, key_events in events.items():
            for steps, value in key_events:
                for n, number in enumerate(value):
                    curves.setdefault(f"{key}/{n}", []).append((steps, number))
        return curves
    if case.name == "save":
        return {
            f"{key}@{len(value)}": [(steps, value)] for key, key_events in events.items() for steps, value in key_events
        }
    return events


@pytest.mark.sample(8)
@case
@pytest.mark.parametrize("options", [{}, {"buffer": 3}], ids=str)
@pytest.mark.filterwarnings("ignore:the events of '[hv]' do not fit into one array:lox.LoxWarning")
def test_one_key_of_many_shapes(case, options, tmp_path):
    with case.make(tmp_path) as logger:
        logger.tap(of_many_shapes, logger.init(jax.random.key(0)), **options)(1.0)
        states = jax.vmap(logger.init)(jnp.stack(PRNG_KEYS[:2]))
        run = jax.jit(jax.vmap(lambda state, x: logger.tap(of_many_shapes, state, **options)(x)))
        run(states, jnp.array([2.0, 3.0]))
    events = {}
    for name, x in (("0", 1.0), ("7", 2.0), ("8", 3.0)):
        h = [({"step": n - 2}, [x + m for m in range(n)]) for n in (2, 3)]
        v = [({"step": 5 - n}, [x * m for m in range(n)]) for n in (3, 2)]
        events[name] = stored_shapes(case, {"h": h, "v": v})
    if case.read is not None:
        assert case.read(logger) == events
