"""`lox.plot` and `logs.plot`: what is drawn, and the files that come of it."""

import json
import re
import xml.etree.ElementTree as ElementTree

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from optional import package

import lox
from lox.view import _plot

matplotlib = package("matplotlib")
LANES, STEPS = 8, 40


def train(prng_key, rate):
    def step(x, i):
        x = x * (1 - rate) + 0.1 * jax.random.normal(jax.random.fold_in(prng_key, i))
        lox.log({"train/loss": x, "train/grad": x**2}, step=i)
        lox.log({"test/loss": x}, step=i, where=i % 10 == 9)
        return x, None

    return jax.lax.scan(step, 1.0, jnp.arange(STEPS))[0]


PRNG_KEYS = jax.random.split(jax.random.key(0), LANES)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs")
    with lox.SaveLogger(path) as logger:

        def run(prng_key, rate):
            logger.tap(train, logger.init(prng_key, config={"rate": rate}), buffer=10)(prng_key, rate)

        jax.jit(jax.vmap(jax.vmap(run, (0, None)), (None, 0)))(PRNG_KEYS, jnp.array([0.1, 0.2]))
    return path


@pytest.fixture(scope="module")
def logs():
    return lox.spool(jax.vmap(train, (0, None)))(PRNG_KEYS, 0.1)[1]


def names(plot):
    return [chart.name for chart in plot.charts]


def test_a_plot_of_a_directory_has_a_curve_per_config(directory):
    plot = lox.plot(directory)
    assert names(plot) == ["train/loss", "train/grad", "test/loss"]
    for chart in plot.charts:
        assert [drawn.group for drawn in chart.groups] == ["rate=0.1", "rate=0.2"]
    runs = lox.load(directory, where={"rate": 0.2})
    values = np.stack([runs[name]["train/loss"] for name in runs]).astype(float)
    drawn = plot.charts[0].groups[1]
    assert drawn.curve.lanes == tuple(runs)
    np.testing.assert_array_equal(drawn.band.center, values.mean(0))
    np.testing.assert_array_equal(drawn.band.x, np.arange(STEPS))
    assert repr(plot) == (
        "<plot of 'train/loss', 'train/grad' and 'test/loss' in 2 groups: .save('plot.html'), .save('plot.png')>"
    )


def test_the_same_plot_of_loaded_runs_and_of_chosen_ones(directory):
    whole = lox.plot(directory, "train/*")
    for other in (
        lox.plot(lox.load(directory), "train/*"),
        lox.plot(lox.load(directory, argnames="train/*")),
        lox.plot(str(directory), ["train/loss", "train/grad"], by="rate"),
    ):
        assert names(other) == names(whole) == ["train/loss", "train/grad"]
        for a, b in zip(whole.charts, other.charts, strict=True):
            for one, two in zip(a.groups, b.groups, strict=True):
                np.testing.assert_array_equal(one.band.high, two.band.high)
    chosen = lox.plot(directory, "train/loss", where={"rate": 0.1})
    np.testing.assert_array_equal(chosen.charts[0].groups[0].band.low, whole.charts[0].groups[0].band.low)
    assert len(chosen.charts[0].groups) == 1
    runs = lox.load(directory)
    assert len(lox.plot(runs, "train/loss", where={"rate": 0.1}).charts[0].groups) == 1


def test_one_run_is_a_line(directory):
    name = next(iter(lox.load(directory)))
    plot = lox.plot(directory, "train/loss", where=lambda run: run.name == name)
    (drawn,) = plot.charts[0].groups
    assert drawn.curve.lanes == (name,) and np.isnan(drawn.band.low).all()


def test_logs_plot_themselves(logs):
    plot = logs.plot("train/*", band="std")
    assert names(plot) == ["train/loss", "train/grad"] and plot.charts[0].groups[0].group == ""
    values = np.asarray(logs["train/loss"]).T.astype(float)
    np.testing.assert_allclose(plot.charts[0].groups[0].band.high, values.mean(0) + values.std(0, ddof=1))
    mapping = lox.plot({"a": logs, "b": logs.lane(0)}, "test/loss")
    assert [(drawn.group, len(drawn.curve.lanes)) for drawn in mapping.charts[0].groups] == [("a", LANES), ("b", 1)]


def drawn_lines(figure):
    return [line for axes in figure.axes for line in axes.lines]


def test_the_figure_has_the_numbers(directory):
    assert matplotlib.__version__
    plot = lox.plot(directory, "train/*", lanes=True)
    figure = plot.figure()
    assert [axes.get_title() for axes in figure.axes] == ["train/loss", "train/grad"]
    lines = figure.axes[0].lines
    assert len(lines) == 2 * (LANES + 1)
    mean = [line for line in lines if line.get_label() == "rate=0.1 (n=8)"]
    np.testing.assert_array_equal(mean[0].get_ydata(), plot.charts[0].groups[0].band.center)
    assert figure.get_supxlabel() == "mean, 95% confidence interval of the mean (Student's t)"


def test_smoothing_is_marked(directory):
    assert matplotlib.__version__
    figure = lox.plot(directory, "train/loss", smooth=0.6).figure()
    assert figure.get_supxlabel().endswith("(Student's t), smoothed by 0.6")


def test_lanes_that_stop_or_turn_nan_are_marked():
    values = np.ones((20, 4))
    values[15:, 2] = np.nan
    valid = np.ones((20, 4), bool)
    valid[10:, 1] = False
    logs = lox.logdict.from_arrays({"x": values}, steps={"step": np.arange(20)}, valid=valid, lanes=1)
    plot = logs.plot()
    curve = plot.charts[0].groups[0].curve
    assert _plot.ends_of_lanes(curve) == [("1", "stopped", 9.0, 1.0), ("2", "NaN", 14.0, 1.0)]
    assert matplotlib.__version__
    assert "×: a lane turns NaN; |: a lane stops" in plot.figure().get_supxlabel()


def test_logarithmic_axes_leave_out_what_they_cannot_show():
    assert matplotlib.__version__
    logs = lox.logdict.from_arrays({"x": np.array([[1.0, -3.0], [10.0, 12.0], [1e-3, 3e-3]])}, lanes=1)
    figure = logs.plot(log_y=True, log_x=True).figure()
    (axes,) = figure.axes
    assert axes.get_yscale() == axes.get_xscale() == "log"
    low, high = axes.get_ylim()
    assert 1e-3 < low < 2e-3 and 12 < high < 100
    assert np.isnan(axes.lines[0].get_ydata()[0])  # the mean is -1
    assert "what is not positive has no place" in figure.get_supxlabel()


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["png", "svg", "pdf", "html"])
def test_files(directory, tmp_path, suffix):
    if suffix != "html":
        assert matplotlib.__version__
    path = tmp_path / f"plot.{suffix}"
    lox.plot(directory, "train/*", title="two rates", save=path)
    data = path.read_bytes()
    assert data.startswith({"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF", "html": b"<!doctype html>"}[suffix])
    again = lox.plot(directory, "train/*", title="two rates").save(tmp_path / f"again.{suffix}")
    assert again.read_bytes() == data
    if suffix == "svg":
        texts = [element.text for element in ElementTree.fromstring(data).iter() if element.tag.endswith("}text")]
        assert {"train/loss", "two rates", "rate=0.1 (n=8)"} <= set(texts)


def panels_of(page):
    return json.loads(re.search(r'<script id="lox-panels" type="application/json">(.*?)</script>', page, re.S)[1])[
        "panels"
    ]


def test_the_page_has_the_numbers(directory):
    plot = lox.plot(directory, "train/loss", lanes=True)
    page = plot.to_html()
    (panel,) = panels_of(page)
    assert panel["key"] == "train/loss" and panel["x"] == "step"
    for group, drawn in zip(panel["groups"], plot.charts[0].groups, strict=True):
        assert group["name"] == drawn.group and group["n"] == [LANES, LANES]
        assert group["center"] == drawn.band.center.tolist() and group["low"] == drawn.band.low.tolist()
        assert len(group["single"]["values"]) == LANES
    assert "http://" not in re.sub(r"http://www.w3.org/\S*", "", page) and "src=" not in page
    frame = plot._repr_html_()
    assert frame.startswith("<iframe srcdoc=") and "&lt;!doctype html&gt;" in frame


def test_the_frame_in_notebooks_is_as_high_as_its_charts():
    def height(logs, **options):
        return int(re.search(r"height:(\d+)px", lox.plot(logs, **options)._repr_html_())[1])

    logs = lox.logdict.from_arrays({"a": np.ones((3, 2)), "b": np.ones((3, 2))}, lanes=1)
    stops = lox.logdict.from_arrays({"a": np.ones((3, 2))}, lanes=1, valid=np.array([[True] * 2] * 2 + [[True, False]]))
    assert height(logs) == height(logs, key="a")  # side by side
    assert height({"lr=1": logs, "lr=2": logs}, key="a") == height(logs) + 18  # another line in the legend
    assert height(stops) == height(logs) + 16  # and one that says which lane stops
    assert height({f"lr={n}": logs for n in range(100)}) < 500  # where legends scroll
    assert height(lox.logdict({str(n): np.ones(3) for n in range(50)})) == 900


def test_figures_are_shown_in_notebooks(logs):
    assert matplotlib.__version__
    assert lox.plot(logs).figure()._repr_png_().startswith(b"\x89PNG")


def test_hostile_names_are_only_text(tmp_path):
    key = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"
    logs = lox.logdict.from_arrays({key: np.ones((3, 2))}, lanes=1)
    page = lox.plot({"<b>": logs}, title="<i>").to_html()
    assert "<script>alert" not in page and "<img" not in page and "<b>" not in page and "<i>" not in page
    assert panels_of(page)[0]["key"] == key
    assert matplotlib.__version__
    lox.plot({"$\\frac{$": logs}).save(tmp_path / "plot.png")  # no mathematics either


ERRORS = {
    "key": (dict(key="loss"), lox.KeyNotFoundError, r"`key` names 'loss', but .* Did you mean 'train/loss'\?"),
    "band": (dict(band="ci"), lox.OptionError, "`band` is 'ci'; choose one of 'ci95', 'std'"),
    "x": (dict(x="epoch"), lox.StepError, "nothing was logged with the step 'epoch'. Choose one of 'step'"),
    "smooth": (dict(smooth=2), lox.OptionError, "`smooth` is 2; it must be from 0"),
    "by": (dict(by="lr"), lox.OptionError, "`by` names 'lr', which is not in the config of any run"),
    "where": (dict(where={"rate": 9}), lox.RunNotFoundError, r"no run in .* has {'rate': 9} in its config"),
    "save": (
        dict(save="plot.gif"),
        lox.OptionError,
        r"cannot plot to 'plot.gif': its name must end in .html, .png, .svg or",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(directory, name):
    options, error, text = ERRORS[name]
    with pytest.raises(error, match=text):
        lox.plot(directory, **options)


def test_errors_about_what_cannot_be_plotted(logs, tmp_path):
    with pytest.raises(lox.OptionError, match=r"`lox.plot` got int: give it a directory"):
        lox.plot(3)
    with pytest.raises(lox.OptionError, match="`by` is for runs with a config"):
        logs.plot(by="rate")
    with pytest.raises(lox.LoxError, match="there is nothing to plot"):
        lox.logdict({}).plot()
    with pytest.raises(lox.RunNotFoundError, match="there is no directory"):
        lox.plot(tmp_path / "nothing")
    with pytest.raises(lox.LogTypeError, match="these logs are being traced"):
        jax.jit(lambda x: lox.spool(lambda: lox.log({"x": x}))()[1].plot())(1.0)


def test_without_matplotlib_the_error_says_what_to_install(logs, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r'pip install "lox-jax\[plot\]". An .html file needs nothing more'):
        logs.plot().figure()


def test_time_is_since_the_run_began(directory):
    plot = lox.plot(directory, "train/loss", x="wall")
    x = plot.charts[0].groups[0].band.x
    assert plot.charts[0].step == "wall" and 0 <= x[0] <= x[-1] < 3600
    assert matplotlib.__version__
    assert plot.figure().axes[0].get_xlabel() == "seconds since the run began"
