"""Curves, groups, bands and statistics, against plain loops, NumPy and SciPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from optional import given, settings, st

import lox
from lox._data import _statistics
from lox.view import _bands, _curves, _groups
from lox.view._curves import Curve
from lox.view._live import Live

LANES, STEPS = 8, 12


def value(prng_key, i):
    return jax.random.randint(jax.random.fold_in(prng_key, i), (), -500, 500).astype(jnp.float32) / 8  # exact anywhere


def train(prng_key):
    def step(carry, i):
        x = value(prng_key, i)
        lox.log(
            {"loss": x, "rate": 0.1 * i.astype(jnp.float32), "pair": jnp.stack([x, 2 * x])}, step=10 * i, epoch=i // 4
        )
        lox.log({"positive": x}, step=10 * i, where=x > 0)
        return carry, None

    return jax.lax.scan(step, 0, jnp.arange(STEPS))[0]


PRNG_KEYS = jax.random.split(jax.random.key(0), LANES)


def by_name(logs, *args, **kwargs):
    return {curve.name: curve for curve in _curves.curves(logs, *args, **kwargs)}


def assert_same_curves(a, b):
    assert [curve.name for curve in a] == [curve.name for curve in b]
    for one, other in zip(a, b, strict=True):
        assert (one.lanes, one.step) == (other.lanes, other.step)
        for field in ("x", "values", "there"):
            np.testing.assert_array_equal(getattr(one, field), getattr(other, field))


def expected_loss():
    return np.array([[float(value(PRNG_KEYS[n], i)) for i in range(STEPS)] for n in range(LANES)])


@pytest.fixture(scope="module")
def loss():
    return expected_loss()


def inside(prng_keys):
    return lox.spool(jax.vmap(train))(prng_keys)[1]


def outside(prng_keys):
    return jax.vmap(lox.spool(train))(prng_keys)[1]


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.parametrize("spooled", [inside, outside, jax.jit(inside), jax.jit(outside)])
def test_curves_of_both_vmap_orders(spooled, loss):
    curves = by_name(spooled(PRNG_KEYS))
    assert list(curves) == ["loss", "rate", "pair/0", "pair/1", "positive"]
    assert curves["loss"].lanes == tuple("01234567") and curves["loss"].step == "step"
    np.testing.assert_array_equal(curves["loss"].x, 10 * np.arange(STEPS))
    np.testing.assert_array_equal(curves["loss"].values, loss)
    np.testing.assert_array_equal(curves["pair/1"].values, 2 * loss)
    # The same in all lanes, and in each of them.
    np.testing.assert_allclose(curves["rate"].values, np.tile(0.1 * np.arange(STEPS), (LANES, 1)), rtol=1e-6)
    positive = curves["positive"]
    at = np.searchsorted(10 * np.arange(STEPS), positive.x)
    np.testing.assert_array_equal(positive.there, loss[:, at] > 0)
    np.testing.assert_array_equal(positive.values, np.where(loss[:, at] > 0, loss[:, at], np.nan))


@pytest.mark.slow
def test_curves_of_runs_are_those_of_the_logs(tmp_path):
    logs = inside(PRNG_KEYS)
    with lox.SaveLogger(tmp_path) as logger:
        jax.jit(jax.vmap(lambda prng_key: logger.tap(train, logger.init(prng_key))(prng_key)))(PRNG_KEYS)
    runs = lox.load(tmp_path)
    one_by_one = {name: runs[name] for name in runs}
    expected = _curves.curves(logs)
    renamed = [Curve(c.name, tuple(runs), c.x, c.values, c.there, c.step) for c in expected]
    assert_same_curves(_curves.curves(runs), renamed)
    assert_same_curves(_curves.curves(one_by_one), renamed)


def test_the_axis():
    logs = inside(PRNG_KEYS)
    assert by_name(logs, "loss", "event")["loss"].x.tolist() == list(range(STEPS))
    # Several events of one step are points of their own, in order.
    epochs = by_name(logs, "loss", "epoch")["loss"]
    assert epochs.x.tolist() == [i // 4 for i in range(STEPS)]
    np.testing.assert_array_equal(epochs.values, by_name(logs, "loss")["loss"].values)
    with pytest.raises(lox.StepError, match=r"nothing was logged with the step 'stepp'. .* Did you mean 'step'\?"):
        _curves.curves(logs, x="stepp")
    with pytest.raises(lox.StepError, match=r"Times are loaded by `lox.load\(path, wall=True\)`"):
        _curves.curves(logs, x="wall")
    with pytest.raises(lox.KeyNotFoundError, match=r"`key` names 'los', but there is no such key.*'loss'\?"):
        _curves.curves(logs, "los")


def test_over_time_lanes_are_aligned_by_their_step(tmp_path):
    with lox.SaveLogger(tmp_path) as logger:
        states = [logger.init(jax.random.key(n)) for n in range(2)]
        for i in range(3):
            for state in states:
                logger.log(state, {"x": np.float32(i)}, step=i)
    runs = lox.load(tmp_path, wall=True)
    curve = by_name(runs, x="wall")["x"]
    assert curve.values.tolist() == [[0, 1, 2], [0, 1, 2]] and curve.step == "wall"
    walls = np.stack([logs.step["x"] * 0 + logs.steps["wall"]["x"] for logs in runs.values()])
    np.testing.assert_allclose(curve.x, (walls - walls[:, :1]).mean(0), atol=1e-6)


def test_lanes_inside_of_lanes_have_names():
    logs = lox.spool(jax.vmap(jax.vmap(train)))(PRNG_KEYS.reshape(2, 4))[1]
    curves = by_name(logs, "loss")
    assert list(curves) == ["loss/0", "loss/1", "loss/2", "loss/3"] and curves["loss/0"].lanes == ("0", "1")
    flat = by_name(inside(PRNG_KEYS), "loss")["loss"].values
    np.testing.assert_array_equal(np.stack([c.values for c in curves.values()], 1).reshape(LANES, -1), flat)


def test_logs_without_lanes_or_events():
    assert _curves.curves(lox.logdict({})) == []
    one = _curves.curves(lox.logdict({"x": 3}))[0]
    assert (one.lanes, one.x.tolist(), one.values.tolist(), one.step) == (("0",), [0], [[3.0]], "event")


def test_prng_keys_are_shown_by_their_words(tmp_path):
    def f():
        lox.log({"key": jax.random.key(7), "p": {"key": jax.random.key(8), "x": 2.0}})

    logs = jax.vmap(lambda _: lox.spool(f)()[1])(jnp.arange(2))
    curves = {name: curve.values.tolist() for name, curve in by_name(logs).items()}
    assert curves == {
        "key/0": [[0]] * 2,
        "key/1": [[7]] * 2,
        "p/key/0": [[0]] * 2,
        "p/key/1": [[8]] * 2,
        "p/x": [[2]] * 2,
    }
    lox.save(logs, tmp_path, jax.random.split(jax.random.key(0)))
    live = Live(tmp_path)
    live.refresh()
    assert [*live.tracks("key").tracks, *live.tracks("p").tracks] == list(curves)


def test_large_arrays_are_left_out_with_a_warning():
    logs = lox.spool(lambda: lox.log({"big": jnp.zeros(100), "x": 1.0}))()[1]
    with pytest.warns(lox.LoxWarning, match="cannot show 'big': it is an array of float32 with shape \\(100,\\)"):
        assert [c.name for c in _curves.curves(logs)] == ["x"]


def test_events_without_the_step_are_left_out_with_a_warning():
    def f():
        lox.log({"x": 1.0}, step=3, epoch=0)
        lox.log({"x": 2.0}, epoch=1)

    logs = lox.spool(f)()[1]
    with pytest.warns(lox.LoxWarning, match="1 events of 'x' have no 'step', and are left out"):
        assert _curves.curves(logs)[0].values.tolist() == [[1.0]]


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(st.lists(st.lists(st.tuples(st.integers(0, 6), st.floats(-9, 9)), max_size=8), min_size=1, max_size=4))
def test_points_against_plain_loops(lanes):
    most = max(map(len, lanes))
    at, values = np.zeros((len(lanes), most), int), np.zeros((len(lanes), most))
    valid = np.zeros((len(lanes), most), bool)
    expected = {}
    for n, events in enumerate(lanes):
        seen = {}
        for m, (x, value) in enumerate(events):
            at[n, m], values[n, m], valid[n, m] = x, value, True
            nth = seen[x] = seen.get(x, -1) + 1
            expected.setdefault((x, nth), {})[n] = value
    x, out, there, (lane, point) = _curves._on_points(at, values, valid)
    keys = sorted(expected)
    assert x.tolist() == [key[0] for key in keys]
    for m, key in enumerate(keys):
        assert {n: out[n, m] for n in np.flatnonzero(there[:, m])} == expected[key]
    assert np.isnan(out[~there]).all()
    np.testing.assert_array_equal(out[lane, point], values[valid])


# --- groups ---


def names_and_sizes(groups):
    return {group.name: len(group.runs) for group in groups}


def test_groups(tmp_path):
    with lox.SaveLogger(tmp_path) as logger:

        def one(prng_key, lr, seed):
            logger.init(prng_key, config={"opt": {"lr": lr}, "depth": 2, "seed": seed})

        jax.vmap(jax.vmap(one, (0, None, 0)), (None, 0, None))(PRNG_KEYS, jnp.array([0.1, 0.01]), jnp.arange(LANES))
    runs = lox.runs(tmp_path)
    by_config = _groups.groups(runs)
    assert names_and_sizes(by_config) == {"opt.lr=0.1": 8, "opt.lr=0.01": 8}
    assert by_config[0].config == {"opt.lr": pytest.approx(0.1), "depth": 2}
    with pytest.warns(lox.LoxWarning, match="grouped by 'depth', runs of one group differ in 'opt.lr'"):
        assert names_and_sizes(_groups.groups(runs, "depth")) == {"depth=2": 16}
    assert len(_groups.groups(runs, ["opt.lr", "seed"])) == 16
    with pytest.raises(lox.OptionError, match=r"`by` names 'lr', which is not in the config .* 'opt.lr', 'depth'"):
        _groups.groups(runs, "lr")


def test_lanes_of_one_vmap_are_a_group_and_so_are_equal_single_runs(tmp_path):
    with lox.SaveLogger(tmp_path) as logger:
        for _ in range(2):
            jax.vmap(logger.init)(PRNG_KEYS)
        for seed in range(3):
            logger.init(jax.random.key(seed), config={"lr": 0.1, "seed": seed})
        logger.init(jax.random.key(9), config={"lr": 0.2})
    groups = _groups.groups(lox.runs(tmp_path))
    assert [len(group.runs) for group in groups] == [8, 8, 3, 1]
    assert [group.name for group in groups[2:]] == ["lr=0.1", "lr=0.2"]
    assert groups[0].name != groups[1].name


# --- bands ---


def curve_of(values, there=None):
    values = np.asarray(values, float)
    there = np.ones(values.shape, bool) if there is None else np.asarray(there)
    lanes = tuple(map(str, range(len(values))))
    return Curve("x", lanes, np.arange(values.shape[1]), np.where(there, values, np.nan), there, "step")


def edges(band):
    return [band.center, band.low, band.high]


def test_bands_are_those_of_numpy_and_scipy(loss):
    stats = pytest.importorskip("scipy.stats")
    mean, std = loss.mean(0), loss.std(0, ddof=1)
    found = {kind: _bands.band(curve_of(loss), kind) for kind in _bands.KINDS}
    low, high = stats.t.interval(0.95, LANES - 1, mean, stats.sem(loss, 0))
    np.testing.assert_array_equal(found["ci95"].center, mean)
    np.testing.assert_allclose([found["ci95"].low, found["ci95"].high], [low, high], rtol=1e-10)
    np.testing.assert_allclose([found["std"].low, found["std"].high], [mean - std, mean + std], rtol=1e-14)
    median, first, third = np.quantile(loss, [0.5, 0.25, 0.75], axis=0)
    assert_quantiles = np.testing.assert_array_equal
    assert_quantiles(
        [found["quantiles"].center, found["quantiles"].low, found["quantiles"].high], [median, first, third]
    )
    np.testing.assert_array_equal([found["minmax"].low, found["minmax"].high], [loss.min(0), loss.max(0)])
    np.testing.assert_allclose(found["iqm"].center, stats.trim_mean(loss, 0.25, axis=0), rtol=1e-14)
    assert found["ci95"].method == "mean, 95% confidence interval of the mean (Student's t), 8 lanes"


def test_the_interval_of_the_interquartile_mean_is_that_of_a_plain_bootstrap():
    stats = pytest.importorskip("scipy.stats")
    values = np.random.default_rng(1).normal(size=(10, 3))
    found = _bands.band(curve_of(values), "iqm")
    for n in range(3):
        samples = (values[:, n],)
        iqm = lambda x, axis=-1: stats.trim_mean(x, 0.25, axis=axis)  # noqa: E731
        result = stats.bootstrap(samples, iqm, n_resamples=20_000, method="percentile", rng=np.random.default_rng(0))
        interval = result.confidence_interval
        # Both are random: the errors of the ends of 2,000 draws are a few percent of the width.
        width = interval.high - interval.low
        assert abs(found.low[n] - interval.low) < 0.1 * width and abs(found.high[n] - interval.high) < 0.1 * width


def test_nan_and_absent_lanes_are_left_out_and_counted():
    values = [[1.0, np.nan, 3.0, 1.0], [3.0, 4.0, np.inf, 2.0], [5.0, 6.0, 7.0, 3.0]]
    there = [[True, True, True, True], [True, True, True, True], [True, True, False, False]]
    found = _bands.band(curve_of(values, there))
    assert found.center.tolist() == [3.0, 5.0, 3.0, 1.5]
    assert found.n.tolist() == [3, 2, 1, 2] and found.lost.tolist() == [0, 1, 1, 0]
    assert np.isnan([found.low[2], found.high[2]]).all() and not np.isnan(found.low[[0, 1, 3]]).any()
    assert found.method.endswith("1 to 3 lanes")
    nothing = _bands.band(curve_of([[np.nan], [np.nan]]))
    assert np.isnan(nothing.center).all() and nothing.n.tolist() == [0] and nothing.lost.tolist() == [2]


@pytest.mark.parametrize("kind", _bands.KINDS)
def test_lanes_with_holes_have_the_band_of_the_others(kind, loss):
    mask = np.random.default_rng(0).random(loss.shape) > 0.4
    found = _bands.band(curve_of(loss, mask), kind)
    for n in range(STEPS):
        alone = _bands.band(curve_of(loss[mask[:, n], n : n + 1]), kind)
        np.testing.assert_allclose(np.array(edges(found))[:, n], np.array(edges(alone))[:, 0], rtol=1e-12)


def test_smoothing_treats_center_and_band_alike_and_says_so():
    values = np.random.default_rng(0).normal(size=(5, 30))
    values[2, 7] = np.nan
    plain = _bands.band(curve_of(values))
    found = _bands.smoothed(plain, 0.9)
    assert found.method.endswith(", smoothed by 0.9")
    for field in ("center", "low", "high"):
        total = norm = 0.0
        for n, x in enumerate(getattr(plain, field)):
            total, norm = 0.9 * total + 0.1 * x, 0.9 * norm + 0.1
            assert getattr(found, field)[n] == pytest.approx(total / norm)
    holes = _bands.smooth(np.array([1.0, np.nan, 3.0]), 0.5)
    assert holes[0] == 1 and np.isnan(holes[1]) and holes[2] == pytest.approx((0.25 * 1 + 0.5 * 3) / 0.75)
    with pytest.raises(lox.OptionError, match="`smooth` is 1; it must be from 0"):
        _bands.smoothed(plain, 1)
    with pytest.raises(lox.OptionError, match=r"`band` is 'ci59'; choose one of 'ci95', .* Did you mean 'ci95'\?"):
        _bands.band(curve_of(values), "ci59")


# --- statistics ---


def test_students_t():
    stats = pytest.importorskip("scipy.stats")
    n = np.array([2, 3, 4, 5, 8, 31, 64, 257, 1000, 1001, 1002, 1003, 50_000])
    np.testing.assert_allclose(_statistics.t95(n), stats.t.ppf(0.975, n - 1), rtol=1e-11)
    assert np.isnan(_statistics.t95(np.array([0, 1]))).all()


@pytest.mark.parametrize("q", [0, 0.025, 0.25, 0.5, 0.9, 1])
def test_quantiles_without_nan(q):
    values = np.random.default_rng(0).normal(size=(9, 40))
    np.testing.assert_array_equal(_statistics.quantile(values, q), np.quantile(values, q, axis=0))
    values[np.random.default_rng(1).random(values.shape) < 0.3] = np.nan
    np.testing.assert_allclose(_statistics.quantile(values, q), np.nanquantile(values, q, axis=0), rtol=1e-14)


def test_steps_without_a_sign_are_sorted():
    """The difference of two of them is never negative."""
    logs = lox.logdict.from_arrays({"x": np.arange(4.0)}, steps={"step": np.array([5, 3, 4, 3], np.uint32)})
    (curve,) = _curves.curves(logs)
    assert curve.x.tolist() == [3, 3, 4, 5] and curve.values.tolist() == [[1, 3, 2, 0]]


@pytest.mark.parametrize(
    ("values", "count"),
    [
        ([1234567.0, 1234568.0], 2),
        ([0.12345678, 0.12345679], 2),
        ([1000000, 1000000.0], 1),
        ([0.1, np.float32(0.1)], 1),
        ([[0.1, 1], [np.float32(0.1), 1.0]], 1),
        ([1, True], 2),
        ([1, "1"], 2),
        ([None, 0], 2),
        ([1e300, 1.1e300], 2),
    ],
)
def test_values_are_the_same_if_they_are_equal(tmp_path, values, count):
    for n, value in enumerate(values):
        lox.save({"x": 1.0}, tmp_path, jax.random.key(n), config={"value": value})
    assert len(_groups.groups(lox.runs(tmp_path))) == count
    assert len(_groups.groups(lox.runs(tmp_path), "value")) == count


@pytest.mark.parametrize("names", [("step", "episode"), ("episode", "step")])
def test_the_order_of_steps_does_not_decide_which_events_have_one(names):
    """The second event has neither of them, or a step of -1: it is where it would be if there were no episodes."""
    steps = {"step": np.array([0, -1, 1]), "episode": np.array([0, -1, -1])}
    logs = lox.logdict.from_arrays({"x": np.arange(3.0)}, steps={name: steps[name] for name in names})
    (curve,) = _curves.curves(logs)
    assert curve.x.tolist() == [-1, 0, 1] and curve.values.tolist() == [[1, 0, 2]]


def test_the_numbers_of_a_run_do_not_depend_on_the_dtypes_of_others(tmp_path):
    values = {0: np.float64(0.1), 1: np.float32(0.1), 2: np.int32(16_777_217), 3: np.int64(2**40 + 1)}
    for seed, value in values.items():
        for step in (2**24 + 1, 2.5) if seed == 1 else (2**24 + 1,):
            logs = lox.logdict.from_arrays({"x": np.array([value])}, steps={"step": np.array([step])})
            lox.save(logs, tmp_path, jax.random.key(seed))
    curve = by_name(lox.load(tmp_path))["x"]
    assert curve.x.tolist() == [2.5, 2**24 + 1]
    assert curve.values[:, 1].tolist() == [0.1, float(np.float32(0.1)), 16_777_217, 2**40 + 1]
