"""`lox.compare` against SciPy, arch and rliable."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from optional import package

import lox
from lox.view import _compare

RATES, SEEDS = (0.1, 0.3), 8


def save_runs(path, scores, steps=3, prng_key=jax.random.key, **more):
    """Save runs with these scores as their last values, by learning rate."""
    for rate, values in scores.items():
        for seed, score in enumerate(values):
            loss = np.r_[np.linspace(5, 6, steps - 1), score]
            logs = lox.logdict.from_arrays({"loss": loss, "xs": np.ones((steps, 2))}, steps={"step": np.arange(steps)})
            config = {"lr": rate, "seed": seed, **{name: value(seed) for name, value in more.items()}}
            lox.save(logs, path, prng_key(seed), mode="new", config=config)


@pytest.fixture
def scores():
    generator = np.random.default_rng(0)
    return {rate: rate + generator.normal(size=SEEDS) for rate in RATES}


@pytest.fixture
def runs(tmp_path, scores):
    save_runs(tmp_path, scores)
    return lox.load(tmp_path)


def ends(estimate):
    return estimate.low, estimate.high


@pytest.mark.slow
def test_means_and_their_intervals_are_scipys(runs, scores):
    stats = pytest.importorskip("scipy.stats")
    found = lox.compare(runs, "loss", by="lr")
    assert [group.name for group in found.groups] == ["lr=0.1", "lr=0.3"]
    for group, values in zip(found.groups, scores.values(), strict=True):
        assert group.n == SEEDS and group.lost == () and list(group.scores.values()) == list(values)
        assert group.mean.value == values.mean() and group.median.value == np.median(values)
        assert group.iqm.value == pytest.approx(stats.trim_mean(values, 0.25), rel=1e-14)
        expected = stats.t.interval(0.95, SEEDS - 1, values.mean(), stats.sem(values))
        np.testing.assert_allclose(ends(group.mean), expected, rtol=1e-11)


def test_differences_are_scipys(runs, scores):
    stats = pytest.importorskip("scipy.stats")
    a, b = scores.values()
    (paired,), (apart,) = lox.compare(runs, "loss").pairs, lox.compare(runs, "loss", paired=False).pairs
    assert paired.paired == SEEDS and apart.paired == 0
    assert paired.wins == (a > b).sum()
    related = stats.ttest_rel(a, b).confidence_interval()
    np.testing.assert_allclose(ends(paired.difference), (related.low, related.high), rtol=1e-11)
    welch = stats.ttest_ind(a, b, equal_var=False).confidence_interval()
    np.testing.assert_allclose(ends(apart.difference), (welch.low, welch.high), rtol=1e-9)
    u = stats.mannwhitneyu(a, b).statistic / (SEEDS * SEEDS)
    assert paired.improvement.value == apart.improvement.value == pytest.approx(u)
    lower = lox.compare(runs, "loss", better="lower").pairs[0]
    assert lower.improvement.value == pytest.approx(1 - u) and lower.wins == (a < b).sum()


@pytest.mark.nightly
@pytest.mark.slow
def test_bootstrap_intervals_are_archs(runs, scores):
    bootstrap = package("arch.bootstrap")
    stats = pytest.importorskip("scipy.stats")
    found = lox.compare(runs, "loss", draws=20_000)
    iqm = lambda x: stats.trim_mean(x, 0.25)  # noqa: E731
    for group, values in zip(found.groups, scores.values(), strict=True):
        for estimate, statistic in ((group.iqm, iqm), (group.median, np.median)):
            drawn = bootstrap.IIDBootstrap(values, seed=1)
            low, high = drawn.conf_int(statistic, 20_000, method="percentile", size=0.95).ravel()
            # Both are random; the error of the ends is about a hundredth of the width.
            np.testing.assert_allclose(ends(estimate), (low, high), atol=0.04 * (high - low))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")  # of arch, which it uses
def test_strata_and_improvement_are_rliables(tmp_path):
    library = package("rliable.library")
    metrics = package("rliable.metrics")
    generator = np.random.default_rng(3)
    scores = {rate: generator.normal(size=(SEEDS, 2)) + np.array([rate, 5]) for rate in RATES}
    save_runs(
        tmp_path,
        {rate: values.ravel() for rate, values in scores.items()},
        prng_key=lambda n: jax.random.key(n // 2),
        env=lambda n: f"env{n % 2}",
    )
    found = lox.compare(tmp_path, "loss", strata="env", draws=5000)
    np.random.seed(0)  # rliable draws from the global generator, whatever its `random_state` is
    assert [(group.name, group.n) for group in found.groups] == [("lr=0.1", 16), ("lr=0.3", 16)]
    names = [group.name for group in found.groups]
    aggregated, intervals = library.get_interval_estimates(
        dict(zip(names, scores.values(), strict=True)),
        lambda x: np.array([metrics.aggregate_iqm(x), metrics.aggregate_median(x)]),
        reps=5000,
        random_state=np.random.RandomState(0),
    )
    pair_scores = {",".join(names): tuple(scores.values())}
    improvement, interval = library.get_interval_estimates(
        pair_scores, metrics.probability_of_improvement, reps=1000, random_state=np.random.RandomState(0)
    )
    for group in found.groups:
        assert group.iqm.value == pytest.approx(aggregated[group.name][0])
        low, high = intervals[group.name][:, 0]
        np.testing.assert_allclose(ends(group.iqm), (low, high), atol=0.06 * (high - low))
    (pair,) = found.pairs
    assert pair.paired == 16
    assert pair.improvement.value == pytest.approx(float(improvement[",".join(names)]))
    low, high = interval[",".join(names)].ravel()
    np.testing.assert_allclose(ends(pair.improvement), (low, high), atol=0.1 * (high - low))


def test_scores(runs, scores):
    of = lambda at, **more: list(lox.compare(runs, "loss", at=at, **more).groups[0].scores.values())  # noqa: E731
    curves = np.array([np.r_[np.linspace(5, 6, 2), score] for score in scores[0.1]])
    assert of("last") == of(2) == list(scores[0.1])
    assert of("best") == list(curves.max(1)) and of("best", better="lower") == list(curves.min(1))
    np.testing.assert_allclose(of("mean"), curves.mean(1))
    np.testing.assert_allclose(of(lambda values: values[0]), 5)
    assert of(1.0) == [6.0] * SEEDS
    assert lox.compare(runs, "xs/1").groups[0].mean.value == 1


def test_the_same_seed_gives_the_same_intervals(runs):
    first, second = lox.compare(runs, "loss"), lox.compare(runs, "loss")
    assert first.to_dict() == second.to_dict()
    assert first.to_dict() != lox.compare(runs, "loss", seed=1).to_dict()


def test_runs_without_a_finite_score_are_named(tmp_path):
    save_runs(tmp_path, {0.1: [1.0, np.nan, 3.0], 0.2: [2.0, 3.0, np.inf], 0.3: [np.nan, np.nan, np.nan]})
    found = lox.compare(tmp_path, "loss")
    assert [(g.n, g.lost) for g in found.groups] == [(2, ("1",)), (2, ("2.1",)), (0, ("0.2", "1.2", "2.2"))]
    assert found.pairs[0].paired == 1 and np.isnan(found.pairs[0].difference.low)
    assert np.isnan(found.groups[2].mean.value) and np.isnan(found.pairs[1].improvement.value)
    assert found.methods[-1] == (
        "left out, because their score is not finite: 1 of lr=0.1, 2.1 of lr=0.2, 0.2 of lr=0.3, 1.2 of lr=0.3, "
        "2.2 of lr=0.3"
    )
    assert json.loads(json.dumps(found.to_dict(), allow_nan=False))["groups"][2]["mean"]["value"] is None


def test_runs_that_failed_before_their_first_event_are_named(tmp_path):
    save_runs(tmp_path, {0.1: [1.0, 2.0, 3.0], 0.2: [2.0, 3.0]})
    for seed, rate in (2, 0.2), (0, 9.0):
        with pytest.raises(RuntimeError), lox.SaveLogger(tmp_path) as logger:
            logger.init(jax.random.key(seed), config={"lr": rate, "seed": seed})
            raise RuntimeError
    with pytest.warns(lox.LoxWarning, match=r"^left out, since no run has 'loss': 'lr=9'\.$"):
        found = lox.compare(tmp_path, "loss", by="lr")
    assert [(group.name, group.n, group.lost) for group in found.groups] == [("lr=0.1", 3, ()), ("lr=0.2", 2, ("2.1",))]
    assert found.groups[1].mean.value == 2.5
    assert found.pairs[0].paired == 2  # of the seeds that have both
    assert found.methods[-1] == "left out, because they have no 'loss': 2.1 of lr=0.2"


def test_runs_that_have_not_come_equally_far(tmp_path):
    save_runs(tmp_path, {0.1: [1.0, 2.0]})
    save_runs(tmp_path, {0.2: [3.0, 4.0]}, steps=9)
    far = "; not all runs have come equally far: the last step is from 2 to 8"
    assert lox.compare(tmp_path, "loss").methods[0] == f"score of a run: its last value{far}"
    assert lox.compare(tmp_path, "loss", at="best").methods[0] == f"score of a run: its best value{far}"
    assert lox.compare(tmp_path, "loss", at=2).methods[0] == "score of a run: its value at 2"


def test_one_run_per_group_has_no_intervals(tmp_path):
    save_runs(tmp_path, {0.1: [1.0], 0.2: [2.0]})
    found = lox.compare(tmp_path, "loss")
    assert str(found.groups[0].mean) == "1" and str(found.pairs[0].difference) == "-1"
    assert found.pairs[0].improvement.value == 0


def test_the_table(tmp_path):
    save_runs(tmp_path, {0.1: [1.0, 2.0, 3.0], 0.2: [2.0, 3.0, 4.0]})
    found = lox.compare(tmp_path, "loss", by="lr", better="lower")
    assert str(found) == repr(found) == TABLE
    frame = found.to_dataframe()
    assert frame["group"].tolist() == ["lr=0.1", "lr=0.2"] and frame["mean"].tolist() == [2.0, 3.0]
    assert "<td" in found._repr_html_() and "lr=0.1 &lt; lr=0.2" in found._repr_html_()


TABLE = """\
loss, lower is better

group   n  mean                median    IQM
lr=0.1  3  2 [-0.4841, 4.484]  2 [1, 3]  2 [1, 3]
lr=0.2  3  3 [0.5159, 5.484]   3 [2, 4]  3 [2, 4]

pair             P(better)           difference of means  better in pairs
lr=0.1 < lr=0.2  0.7778 [0.3333, 1]  -1 [-1, -1]          3 of 3

score of a run: its last value
mean: 95% interval by Student's t
median, IQM (mean of the middle half), P(better): 95% percentile bootstrap over runs, 2000 draws
difference, better in pairs: of runs with the same PRNG key, 95% interval by Student's t"""


def test_logs_by_group():
    def train(rate):
        def run(prng_key):
            lox.log({"score": rate + jax.random.normal(prng_key)})

        return jax.vmap(run)

    prng_keys = jax.random.split(jax.random.key(0), SEEDS)
    logs = {name: lox.spool(train(jnp.float32(rate)))(prng_keys)[1] for name, rate in (("small", 0.1), ("large", 0.2))}
    found = lox.compare(logs, "score")
    assert [(group.name, group.n) for group in found.groups] == [("small", SEEDS), ("large", SEEDS)]
    assert found.pairs[0].paired == 0  # nothing says that equal lanes have equal seeds
    found = lox.compare(logs, "score", paired=True)
    assert found.methods[-1].startswith("difference, better in pairs: of lanes with the same number")
    pair = found.pairs[0]
    assert pair.paired == SEEDS and pair.difference.value == pytest.approx(-0.1, rel=1e-5)


def test_efficiency_is_the_interquartile_mean_over_steps(runs):
    stats = pytest.importorskip("scipy.stats")
    found = lox.compare(runs, "loss")
    values = np.stack([runs[name]["loss"] for name in found.groups[1].scores])
    np.testing.assert_allclose(found.efficiency["lr=0.3"].center, stats.trim_mean(values, 0.25, axis=0))
    assert found.curves["lr=0.3"].step == "step"


def test_a_directory_with_one_run(tmp_path):
    save_runs(tmp_path, {0.1: [3.0]})
    found = lox.compare(tmp_path, "loss")
    assert [(group.name, group.n, group.mean.value) for group in found.groups] == [("0", 1, 3.0)] and found.pairs == ()


ERRORS = {
    "key": (
        dict(key="los"),
        lox.KeyNotFoundError,
        r"no run has 'los'. There is 'loss' and 'xs'. Did you mean 'loss'",
    ),
    "element": (dict(key="xs/7"), lox.KeyNotFoundError, r"no run has 'xs/7'. There is 'xs/0' and 'xs/1'"),
    "by": (dict(key="loss", by="rate"), lox.OptionError, "`by` names 'rate', which is not in the config of any run"),
    "at": (dict(key="loss", at="end"), lox.OptionError, "`at` is 'end'; choose one of 'last', 'best' and 'mean'"),
    "function": (
        dict(key="loss", at=lambda x: x),
        lox.OptionError,
        "`at` gives array.* for the run '0'; it must",
    ),
    "step": (dict(key="loss", at=7), lox.StepError, "the run '0' has no 'loss' at step=7; the nearest is 2"),
    "better": (dict(key="loss", better="more"), lox.OptionError, "`better` is 'more'; choose 'higher' and 'lower'"),
    "strata": (dict(key="loss", strata="env"), lox.OptionError, "`strata` names 'env', which is not in the config"),
    "where": (dict(key="loss", where={"lr": 9}), lox.RunNotFoundError, "no run has {'lr': 9} in its config"),
    "draws": (dict(key="loss", draws=0), lox.OptionError, "`draws` is 0; it must be a positive integer"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(runs, name):
    options, error, text = ERRORS[name]
    with pytest.raises(error, match=text):
        lox.compare(runs, **options)


def test_errors_about_what_cannot_be_compared(runs, tmp_path):
    with pytest.raises(lox.OptionError, match="got the logs of one run, or of one group: give it what `lox"):
        lox.compare(runs["0"], "loss")
    with pytest.raises(lox.OptionError, match="got int: give it a path"):
        lox.compare(3, "loss")
    with pytest.raises(lox.OptionError, match="`by` is for runs with a config: these logs have groups already"):
        lox.compare({"a": runs["0"]}, "loss", by="lr")
    save_runs(tmp_path / "b", {0.1: [1.0, 2.0], 0.2: [1.0]})
    with pytest.raises(lox.OptionError, match="cannot be paired: they must have the same PRNG keys"):
        lox.compare(tmp_path / "b", "loss", paired=True)


def test_hostile_names_do_not_reach_the_terminal(tmp_path):
    for name in ("a\x1b[31m\nb", "<script>alert(1)</script>"):
        lox.save({"x": 1.0}, tmp_path, jax.random.key(0), mode="new", config={"kind": name})
    found = lox.compare(tmp_path, "x")
    assert "\x1b" not in str(found) and "<script>" not in found._repr_html_()
    assert _compare.Estimate(1.0, 0.5, 2.0).__str__() == "1 [0.5, 2]"


@pytest.mark.slow
def test_the_picture_has_the_intervals(runs, tmp_path):
    matplotlib = package("matplotlib")
    assert matplotlib.__version__
    found = lox.compare(runs, "loss", better="lower")
    figure = found.plot(tmp_path / "compared.svg")
    assert [axes.get_title() for axes in figure.axes] == ["mean", "median", "IQM", "IQM over steps"]
    bar, _ = figure.axes[2].lines[:2]
    assert list(bar.get_xdata()) == [found.groups[0].iqm.low, found.groups[0].iqm.high]
    curve = figure.axes[3].lines[1]
    np.testing.assert_array_equal(curve.get_ydata(), found.efficiency["lr=0.3"].center)
    text = (tmp_path / "compared.svg").read_text()
    assert "lr=0.1 (n=8)" in text and "loss, lower is better" in text
    with pytest.raises(lox.OptionError, match=r"cannot draw a comparison to 'x.html': choose .png, .svg or .pdf"):
        found.plot("x.html")


def test_last_values_at_different_steps_are_said(tmp_path):
    for seed, steps in enumerate((10, 10, 3)):
        logs = lox.logdict.from_arrays({"loss": np.arange(float(steps))}, steps={"step": np.arange(steps)})
        lox.save(logs, tmp_path, jax.random.key(seed), config={"lr": seed % 2})
    runs = lox.load(tmp_path)
    assert "not all runs have come equally far: the last step is from 2 to 9" in str(lox.compare(runs, "loss"))
    assert "equally far" not in str(lox.compare(runs, "loss", at=np.int64(2)))
    assert [group.mean.value for group in lox.compare(runs, "loss", at=np.float32(1)).groups] == [1.0, 1.0]


def test_a_score_that_is_a_function_is_named():
    runs = {"a": lox.logdict.from_arrays({"loss": np.arange(12.0).reshape(3, 4)}, lanes=1)}

    def last_half(values):
        return values[len(values) // 2 :].mean()

    assert "score of a run: 'last_half' of its values\n" in str(lox.compare(runs, "loss", at=last_half))
    assert "score of a run: a function of its values\n" in str(lox.compare(runs, "loss", at=lambda x: x[-1]))


def test_a_program_that_was_started_twice_is_told(tmp_path):
    """The same computation again is no further evidence."""
    for _ in range(2):
        with lox.SaveLogger(tmp_path) as logger:
            for seed in range(3):
                state = logger.init(jax.random.key(seed), config={"lr": 0.1})
                logger.log(state, {"loss": 1.0 / (seed + 1)}, step=0)
    text = "counted more than once: 3 runs have the PRNG key and the score of another in the group, such as '0.1'"
    assert text in str(lox.compare(tmp_path, "loss")).splitlines()
    with lox.SaveLogger(tmp_path / "new") as logger:
        for seed in range(3):
            logger.log(logger.init(jax.random.key(seed)), {"loss": 1.0}, step=0)  # equal, but of other seeds
    assert "counted" not in str(lox.compare(tmp_path / "new", "loss"))
