"""Neptune, MLflow and Trackio: their real clients, offline or on a local store, read back value by value."""

import errno
import importlib
import json
import math
import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import logger_cases
import numpy as np
import pytest
import wandb_file
from logger_cases import make_mlflow, make_neptune, make_trackio, read_mlflow, read_neptune, read_trackio
from optional import given, settings, st

import lox
import lox.neptune
from lox.loggers import MLflowLogger, NeptuneLogger, TrackioLogger
from lox.loggers._trackers._escape import escape, unescape
from lox.loggers._trackers._mlflow import metric_name
from lox.loggers._trackers._trackio import row_name

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parent.parent / "examples"
needs_neptune = pytest.mark.skipif(not logger_cases.HAS_NEPTUNE, reason="neptune is not installed")
needs_mlflow = pytest.mark.skipif(not logger_cases.HAS_MLFLOW, reason="mlflow-skinny is not installed")
needs_trackio = pytest.mark.skipif(not logger_cases.HAS_TRACKIO, reason="trackio is not installed")
trackers = pytest.mark.parametrize(
    "make, read",
    [
        pytest.param(make_neptune, read_neptune, marks=needs_neptune, id="neptune"),
        pytest.param(make_mlflow, read_mlflow, marks=needs_mlflow, id="mlflow"),
        pytest.param(make_trackio, read_trackio, marks=needs_trackio, id="trackio"),
    ],
)
PRNG_KEY = jax.random.key(7)
STRANGE = ["a[0]", "a%b", "../x", "", "..", ".", "/", "a//b", "/a", "a/", "é ü", "a\nb", "_x5b_", "pos_x", "x:y", "🙂"]
STRANGE += [
    "step",
    "time",
    "__a",
    "sys/name",
    "sys",
    "monitoring/a",
    "loss_xinf_",
    "loss",
    "loss/a",
    "deep/b/c",
    "deep",
    "half \ud800 a letter",
]


# --- names ---


@settings(max_examples=50)
@given(
    st.text() | st.from_regex("(_|x|5|b|\\[|inf|nonfinite)*", fullmatch=True), st.sampled_from(["", "/", r"^\w/.\- "])
)
def test_names_can_be_unescaped(name, bad):
    for mark in (False, True):
        assert unescape(escape(name, bad, mark)) == name
        assert unescape(escape(name, bad, mark) + "_x_") == name
    for logger, name_of in ((MLflowLogger, metric_name), (TrackioLogger, row_name), (NeptuneLogger, escape)):
        assert logger.key_of(name_of(name)) == name
    assert MLflowLogger.key_of(metric_name(name) + "_xinf_") == name
    assert NeptuneLogger.key_of(escape(name) + "_xnonfinite_") == name


def test_usual_names_stay():
    for name in ("loss", "train/loss", "grad_norm", "pos_y", "a.b", "a-b c", "max_xent_loss"):
        assert metric_name(name) == row_name(name) == escape(name) == name
    assert [metric_name(name) for name in ("a[0]", "a%b", "../x", "")] == [
        "a_x5b_0_x5d_",
        "a_x25_b",
        "_x2e__x2e__x2f_x",
        "_x_",
    ]


@needs_mlflow
@settings(max_examples=50)
@given(st.text(max_size=30))
def test_mlflow_accepts_every_name(name):
    from mlflow.utils.validation import _validate_metric_name

    _validate_metric_name(metric_name(name))


@pytest.mark.nightly
@trackers
def test_strange_names(make, read, tmp_path):
    with make(tmp_path) as logger:
        state = logger.init(PRNG_KEY, config={"deep": {"b": 1}, "a[0]": "text", "_private": [1, 2]})
        for number, name in enumerate(STRANGE):
            logger.log(state, {name: number}, step=number)
    actual = {logger.key_of(name): events for name, events in read(logger)["7"].items()}
    assert actual == {name: [({"step": number}, number)] for number, name in enumerate(STRANGE)}


@trackers
def test_text_that_is_not_unicode(make, read, tmp_path):
    """In a config, and in the names of what is stored in files; nothing else of the run is lost."""
    with make(tmp_path) as logger:
        state = logger.init(PRNG_KEY, {"half \ud800": "\ud800", "in": {"\ud800": ["\ud800"]}})
        media = {"h \ud800": lox.Histogram(np.arange(3.0)), "i \ud800": lox.Image(np.zeros((2, 2)))}
        logger.log(state, {**media, "ok": 1.0}, step=0)
    actual = {logger.key_of(name): events for name, events in read(logger)["7"].items()}
    assert actual["ok"] == [({"step": 0}, 1.0)]


# --- values and steps ---


@trackers
def test_values_are_exact(make, read, tmp_path):
    values = {
        "f32": np.float32([0.1, -1e-45, 3.4e38]),
        "f64": np.float64([0.1, 1e-300, 1e300]),
        "bf16": np.asarray(jnp.bfloat16([0.1, 2.5, -3.0])),
        "int": np.int32([1, -2, 2**31 - 1]),
        "bool": np.array([True, False, True]),
        "large": np.int64([2**53, -(2**53), 0]),
    }
    with make(tmp_path) as logger:
        state = logger.init(PRNG_KEY)
        for n in range(3):
            logger.log(state, {name: x[n] for name, x in values.items()}, step=10 * n)
    actual = read(logger)["7"]
    assert actual.keys() == values.keys()
    for name, x in values.items():
        assert actual[name] == [
            ({"step": 10 * n}, v) for n, v in enumerate(x.astype(x.dtype if x.dtype.kind == "i" else float).tolist())
        ]


@trackers
def test_nan_and_infinities(make, read, tmp_path):
    with make(tmp_path) as logger:
        state = logger.init(PRNG_KEY)
        for n, x in enumerate([1.0, math.nan, math.inf, -math.inf, 2.0]):
            logger.log(state, {"loss": x}, step=n)
    actual = {name: [(steps["step"], str(x)) for steps, x in events] for name, events in read(logger)["7"].items()}
    assert (
        actual
        == {
            make_neptune: {
                "loss": [(0, "1.0"), (4, "2.0")],
                "loss_xnonfinite_": [(1, "nan"), (2, "inf"), (3, "-inf")],
            },
            make_mlflow: {
                "loss": [(0, "1.0"), (1, "nan"), (2, "nan"), (3, "nan"), (4, "2.0")],
                "loss_xinf_": [(2, "1.0"), (3, "-1.0")],
            },
            make_trackio: {"loss": [(0, "1.0"), (1, "nan"), (2, "inf"), (3, "-inf"), (4, "2.0")]},
        }[make]
    )


@trackers
def test_steps(make, read, tmp_path):
    with make(tmp_path) as logger:
        state = logger.init(PRNG_KEY)
        for n in (5, 3, 3, 3, 9):  # neither sorted nor unique
            logger.log(state, {"a": 1.0}, step=n)
        for n in range(2):
            logger.log(state, {"first": n, "same": n}, epoch=3 * n, time=100)
            logger.log(state, {"fraction": n}, step=n + 0.5)
            logger.log(state, {"none": n})
    assert read(logger)["7"] == {
        "a": [({"step": n}, 1.0) for n in (5, 3, 3, 3, 9)],
        "first": [({"step": 0}, 0), ({"step": 3}, 1)],
        "same": [({"step": 0}, 0), ({"step": 3}, 1)],
        ("time_x_" if make is make_trackio else "time"): [({"step": 0}, 100), ({"step": 3}, 100)],
        "fraction": [({"step": 0}, 0), ({"step": 1}, 1)],
        ("step_x_" if make is make_trackio else "step"): [({"step": 0}, 0.5), ({"step": 1}, 1.5)],
        "none": [({"step": 0}, 0), ({"step": 1}, 1)],
    }


@trackers
def test_another_step_may_be_used(make, read, tmp_path):
    with make(tmp_path, step="epoch") as logger:
        logger.log(logger.init(PRNG_KEY), {"a": 1.0}, step=5, epoch=2)
    assert read(logger)["7"]["a"] == [({"step": 2}, 1.0)]


@pytest.mark.sample(2)
@trackers
def test_arrays_and_pytrees(make, read, tmp_path):
    def f(x):
        lox.log({"v": jnp.stack([x, 2 * x]), "tree": {"a": x, "b": (x, -x)}, "z": x + 1j}, step=0)
        jax.vmap(lambda y: lox.log({"inner": x * y}, step=y))(jnp.arange(3))

        jax.vmap(lambda y: lox.log({"both": x * y}, step=y, epoch=9))(jnp.arange(2))

    with jax.numpy_dtype_promotion("standard"), make(tmp_path) as logger:
        logger.spool(f, logger.init(PRNG_KEY))(3.0)
    at = {"step": 0}
    assert read(logger)["7"] == {
        "v/0": [(at, 3.0)],
        "v/1": [(at, 6.0)],
        "tree/a": [(at, 3.0)],
        "tree/b/0": [(at, 3.0)],
        "tree/b/1": [(at, -3.0)],
        "z/real": [(at, 3.0)],
        "z/imag": [(at, 1.0)],
        **{f"inner/{n}": [({"step": n}, 3.0 * n)] for n in range(3)},
        **{f"both/{n}": [({"step": n}, 3.0 * n)] for n in range(2)},
        "epoch": [({"step": n}, 9) for n in range(2)],
    }


@trackers
def test_large_arrays_are_refused_and_the_rest_is_written(make, read, tmp_path):
    logger = make(tmp_path)
    state = logger.init(PRNG_KEY)
    with pytest.warns(lox.LoxWarning, match=f"{type(logger).__name__} cannot show 'w'"):
        logger.log(state, {"w": np.zeros((10, 10)), "a": 1.0}, step=0)
        with pytest.raises(lox.LogTypeError, match=r"'w': it is an array of float64 with shape \(10, 10\)"):
            logger.flush()
    logger.close()
    assert read(logger)["7"] == {"a": [({"step": 0}, 1.0)]}
    with make(tmp_path / "b", max_elements=100) as logger:
        logger.log(logger.init(jax.random.key(8)), {"w": np.zeros((10, 10))}, step=0)
    actual = [run for name, run in read(logger).items() if name == "8"]
    assert len(actual[0]) == 100


@trackers
def test_steps_that_are_missing_or_not_integers(make, read, tmp_path):
    def at_time(t):
        return lox.spool(lambda: lox.log({"x": t}, t=t))()[1]

    joined = at_time(0.0) + at_time(0.5) + lox.spool(lambda: lox.log({"x": 7.0}))()[1] + at_time(1.0)
    with make(tmp_path) as logger:
        state = logger.init(PRNG_KEY)
        logger.log(state, joined)
        logger.log(state, {"x": 2.0}, t=2.0)  # once counted, always counted: a curve has one kind of steps
        logger.log(state, {"y": 1.0}, step=10.0)  # a float that is an integer
        logger.log(state, {"y": 2.0})
        logger.log(state, {"y": 3.0}, step=20)
    assert read(logger)["7"] == {
        "x": [({"step": n}, x) for n, x in enumerate([0.0, 0.5, 7.0, 1.0, 2.0])],
        "t": [({"step": n}, x) for n, x in [(1, 0.5), (3, 1.0), (4, 2.0)]],  # and 0 is 0
        "y": [({"step": 10}, 1.0), ({"step": 11}, 2.0), ({"step": 20}, 3.0)],
    }


@trackers
def test_the_same_step_name_twice_with_other_numbers(make, read, tmp_path):
    def f():
        lox.log({"a": 1.0}, step=0, epoch=5)
        lox.log({"b": 2.0}, step=0, epoch=6)

    with make(tmp_path) as logger:
        logger.spool(f, logger.init(PRNG_KEY))()
    actual = read(logger)["7"]
    assert [x for _, x in actual.pop("epoch")] == [5, 6]
    assert actual == {"a": [({"step": 0}, 1.0)], "b": [({"step": 0}, 2.0)]}


@trackers
@pytest.mark.parametrize("how", ["tap", "spool"])
def test_other_steps_are_sent_once(make, read, tmp_path, how):
    def f():
        def step(_, i):
            lox.log({"a": 1.0}, step=i, epoch=9)
            lox.log({"b": 2.0}, step=i, epoch=9)
            return None, None

        jax.lax.scan(step, None, jnp.arange(3))

    with make(tmp_path) as logger:
        getattr(logger, how)(f, logger.init(PRNG_KEY))()
    assert read(logger)["7"]["epoch"] == [({"step": n}, 9) for n in range(3)]


@trackers
def test_a_step_of_minus_one(make, read, tmp_path):
    """It is an evaluation before the training, not a missing step."""
    with make(tmp_path) as logger:
        state = logger.init(PRNG_KEY)
        for step in (-2, -1, 0):
            logger.log(state, {"x": step}, step=step)
    assert read(logger)["7"] == {"x": [({"step": step}, step) for step in (-2, -1, 0)]}


@trackers
def test_a_step_that_is_not_an_integer_affects_its_run_only(make, read, tmp_path):
    with make(tmp_path) as logger:
        one, two = (logger.init(jax.random.key(n)) for n in (7, 8))
        for step in (10.0, 20.0, 20.5, 30.0):
            logger.log(one, {"x": step}, step=step)
        logger.flush()
        logger.log(two, {"x": 1.0}, step=100)
    step = "step_x_" if make is make_trackio else "step"
    assert read(logger)["7"] == {
        "x": [({"step": n}, x) for n, x in [(10, 10), (20, 20), (21, 20.5), (22, 30)]],
        step: [({"step": n}, x) for n, x in [(21, 20.5), (22, 30)]],
    }
    assert read(logger)["8"] == {"x": [({"step": 100}, 1.0)]}


@pytest.mark.sample(1)
@trackers
def test_leaves_that_look_alike(make, read, tmp_path):
    with make(tmp_path) as logger:
        state = logger.init(PRNG_KEY)
        logger.log(state, {"a": {"b/c": 1.0, "b": {"c": 2.0}}, "g": {"x": np.array([5.0, 6.0]), "x/0": 7.0}}, step=3)
    actual = {logger.key_of(name): [x for _, x in name_events] for name, name_events in read(logger)["7"].items()}
    assert sorted(x for (x,) in actual.values()) == [1, 2, 5, 6, 7]
    assert len(actual) == 5


@pytest.mark.sample(1)
@trackers
@pytest.mark.parametrize("how", ["spool", "tap"])
def test_lanes_inside_a_run_have_steps_of_their_own(make, read, tmp_path, how):
    def f(happens, steps):
        def lane(happens, step):
            lox.log({"c": 1.0, "h": lox.Histogram(jnp.full(3, step), 8, (0, 8))}, step=step, where=happens)
            return step

        return jax.vmap(lane)(happens, steps)

    with make(tmp_path) as logger:
        getattr(logger, how)(f, logger.init(PRNG_KEY))(jnp.array([False, True, True]), jnp.array([3, 7, 5]))
    actual = read(logger)["7"]
    assert {name: name_events for name, name_events in actual.items() if name.startswith("c")} == {
        "c/1": [({"step": 7}, 1.0)],
        "c/2": [({"step": 5}, 1.0)],
    }
    assert sorted(
        {
            (name.split("/")[1], steps["step"])
            for name, name_events in actual.items()
            if name[0] == "h"
            for steps, _ in name_events
        }
    ) == [
        ("1", 7),
        ("2", 5),
    ]


@trackers
def test_a_bad_key_does_not_affect_others(make, read, tmp_path):
    with pytest.warns(lox.LoxWarning, match="cannot show 'empty'"):
        logger = make(tmp_path)
        logger.log(logger.init(PRNG_KEY), {"a": 1.0, "empty": np.zeros((0, 2)), "b": 2.0}, step=0)
        with pytest.raises(lox.LogTypeError, match=r"'empty': .* with shape \(0, 2\), which has no elements"):
            logger.close()
    assert read(logger)["7"] == {"a": [({"step": 0}, 1.0)], "b": [({"step": 0}, 2.0)]}


@trackers
def test_numbers_of_64_bits(make, read, tmp_path):
    with make(tmp_path) as logger:
        state = jax.jit(lambda prng_key: logger.init(prng_key, {"n": np.int64(2**40), "f": np.float64(0.1)}))(PRNG_KEY)
        assert [run.config for run in logger._pipeline.runs.values()] == [{"n": 2**40, "f": 0.1}]
        logger.log(state, {"x": 1.0}, step=np.int64(2**40))
        for log in (lambda x: logger.log(state, {"v": x}), lambda x: lox.spool(lambda: lox.log({"v": x}))()):
            with pytest.raises(
                lox.LogTypeError, match=r"the value of 'v': int64 1099511627777 does not fit into int32"
            ):
                jax.jit(lambda log=log: log(np.int64(2**40 + 1)))()
    assert read(logger)["7"] == {"x": [({"step": 2**40}, 1.0)]}


def test_a_float_in_a_config_stays_short():
    with logger_cases.Recorder() as logger:
        jax.jit(lambda lr: logger.init(PRNG_KEY, {"lr": lr}))(jnp.float32(0.01))
        assert [run.config for run in logger.runs] == [{"lr": 0.01}]


# --- histograms and pictures ---

PIXELS = np.random.default_rng(0).random((3, 4, 5, 3)).astype(np.float32)


def media(key):
    def step(_, i):
        x = jnp.asarray(PIXELS)[i]
        lox.log(
            {"h": lox.Histogram(x, 8, (0, 1)), "frame": lox.Image(x), "gray/one": lox.Image(x[..., 0])}, step=10 * i
        )
        return None, None

    jax.lax.scan(step, None, jnp.arange(3))
    return key


def as_bytes(x):
    return np.round(255 * x).astype(np.uint8)


def check_bins(text):
    lines = [json.loads(line) for line in text.splitlines()]
    assert [line["step"] for line in lines] == [0, 10, 20]
    for line, x in zip(lines, PIXELS, strict=True):
        counts = np.histogram(x, 8, (0, 1))[0]
        assert line["counts"] == counts.tolist() and line["edges"] == np.linspace(0, 1, 9).tolist()
        assert (line["nonfinite"], line["mean"]) == (0, pytest.approx(x.mean(), rel=1e-5))


def check_statistics(events):
    assert events.keys() == {"h/mean", "h/std"}
    for name, name_events in events.items():
        expected = getattr(PIXELS.reshape(3, -1).astype(float), name[2:])(1)
        np.testing.assert_allclose([x for _, x in name_events], expected, rtol=1e-4)
        assert [steps["step"] for steps, _ in name_events] == [0, 10, 20]


@needs_mlflow
def test_mlflow_media(tmp_path):
    import PIL.Image

    with make_mlflow(tmp_path) as logger:
        logger.spool(media, logger.init(PRNG_KEY))(0)
    check_statistics(read_mlflow(logger)["7"])
    (run,) = mlflow_runs(str(tmp_path))
    client = mlflow_client()
    (bins,) = client.list_artifacts(run.info.run_id, "histograms/h")
    check_bins(Path(client.download_artifacts(run.info.run_id, bins.path)).read_text())
    images = [file.path for file in client.list_artifacts(run.info.run_id, "images") if file.path.endswith(".png")]
    for name, pixels in {"frame": as_bytes(PIXELS), "gray~one": as_bytes(PIXELS[..., 0])}.items():
        for n, expected in enumerate(pixels):
            (path,) = [path for path in images if path.startswith(f"images/{name}+step+{10 * n}+")]
            with PIL.Image.open(client.download_artifacts(run.info.run_id, path)) as image:
                np.testing.assert_array_equal(np.asarray(image), expected)
    assert len(images) == 6


@needs_trackio
def test_trackio_media(tmp_path):
    import PIL.Image
    from trackio.utils import MEDIA_DIR

    with make_trackio(tmp_path) as logger:
        logger.spool(media, logger.init(PRNG_KEY))(0)
    actual = read_trackio(logger)["7"]
    assert actual.keys() == {"h", "frame", "gray/one"}
    for n, ((at, h), x) in enumerate(zip(actual["h"], PIXELS, strict=True)):
        assert (at, h["_type"]) == ({"step": 10 * n}, "trackio.histogram")
        assert (h["values"], h["bins"]) == (np.histogram(x, 8, (0, 1))[0].tolist(), np.linspace(0, 1, 9).tolist())
    for name, mode, pixels in (("frame", "RGB", as_bytes(PIXELS)), ("gray/one", "L", as_bytes(PIXELS[..., 0]))):
        for n, ((at, image), expected) in enumerate(zip(actual[name], pixels, strict=True)):
            assert (at, image["_type"]) == ({"step": 10 * n}, "trackio.image")
            with PIL.Image.open(MEDIA_DIR / image["file_path"]) as stored:  # RGBA, whatever it was
                np.testing.assert_array_equal(np.asarray(stored.convert(mode)), expected)


@needs_neptune
def test_neptune_media(tmp_path):
    import base64
    import io

    import PIL.Image

    with make_neptune(tmp_path) as logger:
        logger.spool(media, logger.init(PRNG_KEY))(0)
    check_statistics(read_neptune(logger)["7"])
    (folder,) = tmp_path.glob("offline/*")
    operations = [json.loads(line)["obj"] for line in (folder / "data-1.log").read_text().splitlines()]
    (upload,) = [o for o in operations if o["path"][:2] == ["h", "bins"]]
    check_bins((folder / "upload_path" / upload["tmp_file_name"]).read_text())
    for name, pixels in {"frame": as_bytes(PIXELS), "gray/one": as_bytes(PIXELS[..., 0])}.items():
        values = [
            x for o in operations if o["path"] == name.split("/") and o["type"] == "LogImages" for x in o["values"]
        ]
        assert [x["step"] for x in values] == [0, 10, 20]
        for x, expected in zip(values, pixels, strict=True):
            with PIL.Image.open(io.BytesIO(base64.b64decode(x["value"]["data"]))) as image:
                np.testing.assert_array_equal(np.asarray(image), expected)


@trackers
def test_options_are_checked(make, read, tmp_path):
    with pytest.raises(lox.LogTypeError, match="`step` is 3"):
        make(tmp_path, step=3)
    with pytest.raises(lox.OptionError, match="`max_elements` is 0"):
        make(tmp_path, max_elements=0)
    with pytest.raises(lox.OptionError, match="`arrays` is 'no'; choose 'elements' and 'histogram'"):
        make(tmp_path, arrays="no")


# --- MLflow ---


def mlflow_client():
    import mlflow

    return mlflow.MlflowClient(logger_cases.mlflow_uri())


def mlflow_runs(experiment):
    client = mlflow_client()
    return client.search_runs([client.get_experiment_by_name(experiment).experiment_id])


@needs_mlflow
def test_mlflow_batches_parameters_and_tags(tmp_path):
    config = {"lr": 0.1, "net": {"sizes": [3, 4], "name": "mlp"}, "net.name": None, **{f"p{n}": n for n in range(150)}}
    with make_mlflow(tmp_path, tags={"sweep": 3}) as logger:
        state = logger.init(PRNG_KEY, config)
        logger.spool(lambda: jax.lax.map(lambda i: lox.log({"x": i, "y": -i}, step=i), jnp.arange(1501)), state)()
        assert mlflow_runs(logger.experiment)[0].info.status == "RUNNING"
    (run,) = mlflow_runs(logger.experiment)
    assert run.info.status == "FINISHED"
    assert run.data.tags["sweep"] == "3"
    params = {"lr": "0.1", "net.sizes": "[3, 4]", "net.name": "mlp", "net.name_x_": "null"}
    assert run.data.params == {**params, **{f"p{n}": str(n) for n in range(150)}}
    actual = read_mlflow(logger)["7"]
    assert actual["x"] == [({"step": n}, n) for n in range(1501)]
    assert actual["y"] == [({"step": n}, -n) for n in range(1501)]


@needs_mlflow
def test_mlflow_names_continue_in_the_store(tmp_path):
    for _ in range(2):
        with make_mlflow(tmp_path) as logger:
            logger.init(PRNG_KEY)
    assert sorted(run.info.run_name for run in mlflow_runs(str(tmp_path))) == ["7", "7.1"]


@needs_mlflow
def test_mlflow_messages(tmp_path):
    with pytest.raises(lox.LogTypeError, match="`experiment` is ''"):
        MLflowLogger("")
    logger = make_mlflow(tmp_path)
    with pytest.raises(lox.LogTypeError, match=r"config 'a\.b' with 7000 characters: MLflow's parameters have at most"):
        logger.init(PRNG_KEY, {"a": {"b": "x" * 7000}})
    state = logger.init(PRNG_KEY)
    with pytest.warns(lox.LoxWarning):
        logger.log(state, {"k" * 300: 1.0, "i" * 200: lox.Image(np.zeros((2, 2))), "a": 2.0})
        with pytest.raises(
            lox.LogTypeError,
            match=r"'i+': .*at most 140 characters(.|\n)*'k+': .*at most 250 characters.*Give it a shorter key",
        ):
            logger.close()
    assert read_mlflow(logger)["7"] == {"a": [({"step": 0}, 2.0)]}


@needs_mlflow
@pytest.mark.parametrize("error, status", [(ValueError, "FAILED"), (KeyboardInterrupt, "KILLED")])
def test_mlflow_runs_that_fail(tmp_path, error, status):
    with pytest.raises(error), lox.MultiLogger(make_mlflow(tmp_path), logger_cases.Recorder()) as logger:
        logger.log(logger.init(PRNG_KEY), {"a": 1.0})
        raise error
    (run,) = mlflow_runs(str(tmp_path))
    assert run.info.status == status


# --- Trackio ---


@needs_trackio
def test_trackio_rows_config_and_live_runs(tmp_path):
    from trackio.sqlite_storage import SQLiteStorage

    with make_trackio(tmp_path, group="sweep") as logger:
        states = [logger.init(jax.random.key(n), {"lr": n, "_x": 1, "private": {"a": 2}}) for n in range(4)]
        for step in range(50):  # all of them at once
            for n, state in enumerate(states):
                logger.log(state, {"a": n, "b": step}, step=step)
    for n in range(4):
        rows = SQLiteStorage.get_logs(logger.project, str(n))
        assert [(row["step"], row["a"], row["b"]) for row in rows] == [(step, n, step) for step in range(50)]
        config = SQLiteStorage.get_run_config(logger.project, str(n))
        assert (config["lr"], config["private"], config["_Group"]) == (n, {"a": 2, "_x": 1}, "sweep")


@needs_trackio
def test_trackio_options(tmp_path):
    with pytest.raises(lox.LogTypeError, match="`project` is ''"):
        TrackioLogger("")
    with pytest.raises(lox.OptionError, match="got 'name', which belongs to a single run"):
        TrackioLogger("p", name="a")


@needs_trackio
def test_trackio_pictures_that_cannot_be_saved(tmp_path, monkeypatch):
    import PIL.Image

    def refuse(*_, **__):
        raise OSError("no space left")

    logger = make_trackio(tmp_path)
    state = logger.init(PRNG_KEY)
    monkeypatch.setattr(PIL.Image.Image, "save", refuse)
    for step in range(2):  # each time, and not only as a warning
        with pytest.warns(lox.LoxWarning, match="no space left"):
            logger.log(state, {"frame": lox.Image(np.zeros((2, 2)))}, step=step)
            with pytest.raises(OSError, match="no space left"):
                logger.flush()
    monkeypatch.undo()
    logger.log(state, {"a": 1.0}, step=2)
    logger.close()
    assert read_trackio(logger)["7"] == {"a": [({"step": 2}, 1.0)]}


@needs_trackio
def test_trackio_rows_that_cannot_be_written(tmp_path, monkeypatch):
    """Trackio itself warns once, and drops all of them."""

    def refuse(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    logger = make_trackio(tmp_path)
    state = logger.init(PRNG_KEY)
    logger.log(state, {"x": 1.0}, step=0)
    logger.flush()
    with monkeypatch.context() as patched, pytest.warns(lox.LoxWarning, match="No space left on device"):
        patched.setattr("trackio.sqlite_storage.SQLiteStorage.bulk_log", refuse)
        for _ in range(2):
            logger.log(state, {"x": 2.0}, step=1)
            with pytest.raises(lox.LoxError, match="No space left on device"):
                logger.flush()
    logger.log(state, {"x": 3.0}, step=2)
    logger.close()
    assert read_trackio(logger) == {"7": {"x": [({"step": 0}, 1.0), ({"step": 2}, 3.0)]}}


@needs_trackio
def test_trackio_names_of_two_loggers(tmp_path):
    with make_trackio(tmp_path) as one, TrackioLogger(one.project, **logger_cases.TRACKIO) as two:
        for logger in (one, two):
            logger.log(logger.init(PRNG_KEY), {"a": 1.0}, step=0)
    assert sorted(read_trackio(one)) == ["7", "7.1"]


# --- Neptune, also as functions ---


def neptune_fields(path):
    fields = {}
    for file in path.glob("offline/*/data-1.log"):
        operations = [json.loads(line)["obj"] for line in file.read_text().splitlines()]
        values = {"/".join(o["path"]): o.get("value", o.get("values")) for o in operations}
        fields[values["sys/name"]] = values
    return fields


@needs_neptune
def test_neptune_config_and_kwargs(tmp_path):
    config = {"lr": 0.5, "n": 3, "big": 2**40, "none": None, "net": {"sizes": np.arange(2), "on": True}, "x/y": "z"}
    with make_neptune(tmp_path, tags=["a"], description="d") as logger:
        logger.log(logger.init(PRNG_KEY, config), {"config/lr": 1.0, "config": 2.0}, step=0)
    fields = neptune_fields(tmp_path)["7"]
    assert {name: x for name, x in fields.items() if name.startswith("config/") or name.startswith("sys/")} == {
        **{name: x for name, x in fields.items() if name in ("sys/hostname", "sys/failed")},
        "sys/name": "7",
        "sys/tags": ["a"],
        "sys/description": "d",
        "config/lr": 0.5,
        "config/n": 3,
        "config/big": str(2**40),
        "config/none": "null",
        "config/net/sizes": "[0, 1]",
        "config/net/on": True,
        "config/x/y": "z",
    } | {"config/lr_x_": fields["config/lr_x_"]}
    assert read_neptune(logger)["7"].keys() == {"config/lr_x_", "config_x_"}


@pytest.fixture
def neptune_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("NEPTUNE_DATA_DIRECTORY", str(tmp_path))
    return tmp_path


@needs_neptune
@pytest.mark.parametrize("jit", [lambda f: f, jax.jit])
def test_neptune_functions_under_vmap(jit, neptune_folder):
    @jit
    @jax.vmap
    def train(prng_key, rate):
        run = lox.neptune.init(prng_key, config={"rate": rate}, tags=["ppo"])
        for step in range(3):
            lox.neptune.log(run, {"loss": rate * step}, prefix="train/", step=step)
        lox.neptune.finish(run)
        return run

    runs = train(jax.vmap(jax.random.key)(jnp.arange(3)), jnp.array([1.0, 2.0, 4.0]))
    lox.neptune.flush()
    names = sorted(read_neptune(neptune_folder))
    for name, rate in zip(names, [1.0, 2.0, 4.0], strict=True):
        series = read_neptune(neptune_folder)[name]
        assert series == {"train/loss": [({"step": n}, rate * n) for n in range(3)]}
        fields = neptune_fields(neptune_folder)[name]
        assert (fields["config/rate"], fields["sys/tags"]) == (rate, ["ppo"])
    with pytest.raises(lox.LoxError, match="is finished: `init` begins a new one"):
        lox.neptune.log(jax.tree.map(lambda x: x[0], runs), {"a": 1})


@needs_neptune
def test_neptune_functions_eagerly(neptune_folder):
    one = lox.neptune.init(jax.random.key(1), name="one")
    two = lox.neptune.init(jax.random.key(1), name="two", mode="offline")
    lox.neptune.log(one, {"a": 1.0})
    jax.jit(lambda run, x: lox.neptune.log(run, lox.spool(lambda x: lox.log({"a": x}, step=x))(x)[1]))(two, 5)
    lox.neptune.finish(one)
    lox.neptune.finish(two)
    assert read_neptune(neptune_folder) == {"one": {"a": [({"step": 0}, 1.0)]}, "two": {"a": [({"step": 5}, 5.0)]}}
    for use in (lambda: lox.neptune.finish(one), lambda: lox.neptune.log(one, {"a": 2})):
        with pytest.raises(lox.LoxError, match="is finished: `init` begins a new one"):
            use()


@needs_neptune
def test_neptune_finish_raises_what_went_wrong(neptune_folder):
    run = lox.neptune.init(jax.random.key(2))
    with pytest.warns(lox.LoxWarning, match="lox.neptune failed writing 'w'"):
        lox.neptune.log(run, {"w": np.zeros(100)})
        with pytest.raises(lox.LogTypeError, match=r"lox\.neptune cannot show 'w'"):
            lox.neptune.finish(run)
    with pytest.raises(lox.LoxError, match="is finished"):
        lox.neptune.finish(run)
    with pytest.raises(lox.LogTypeError, match="`config` is 3"):
        lox.neptune.init(PRNG_KEY, 3)


@needs_neptune
def test_neptune_runs_may_end_in_some_lanes_only(neptune_folder):
    runs = jax.jit(jax.vmap(lox.neptune.init))(jax.vmap(jax.random.key)(jnp.arange(100, 102)))

    @jax.jit
    @jax.vmap
    def train(run, number):
        lox.neptune.log(run, {"a": number})
        jax.lax.cond(number > 0, lambda: lox.neptune.finish(run), lambda: None)

    train(runs, jnp.arange(2))
    lox.neptune.flush()
    first, second = (jax.tree.map(lambda x, n=n: x[n], runs) for n in range(2))
    lox.neptune.log(first, {"a": 5})
    with pytest.raises(lox.LoxError, match="run '101' is finished"):
        lox.neptune.log(second, {"a": 5})
    lox.neptune.finish(first)
    events = {"100": {"a": [({"step": 0}, 0), ({"step": 1}, 5)]}, "101": {"a": [({"step": 0}, 1)]}}
    assert read_neptune(neptune_folder) == events


@needs_neptune
def test_neptune_runs_that_fail_and_names_that_are_too_long(tmp_path):
    warned = pytest.warns(lox.LoxWarning, match="most 150 bytes")
    with warned, pytest.raises(ValueError, match="boom") as caught, make_neptune(tmp_path) as logger:
        logger.log(logger.init(PRNG_KEY), {"a": 1.0, "k" * 200: lox.Histogram(np.ones(3)), "b": 2.0}, step=0)
        raise ValueError("boom")
    assert "did not write 'kkk" in caught.value.__notes__[0]
    assert neptune_fields(tmp_path)["7"]["sys/failed"] is True
    assert read_neptune(logger)["7"] == {"a": [({"step": 0}, 1.0)], "b": [({"step": 0}, 2.0)]}


# --- at the end of the process ---


@pytest.mark.skipif(
    not (logger_cases.HAS_NEPTUNE and logger_cases.HAS_MLFLOW and logger_cases.HAS_TRACKIO and logger_cases.HAS_WANDB),
    reason="not all clients are installed",
)
@pytest.mark.nightly
def test_open_runs_are_written_at_exit(tmp_path):
    """The clients end their runs at exit too, but lox must come first."""
    script = f"""
import jax, jax.numpy as jnp, lox, lox.neptune, lox.wandb, time
from lox.loggers import MLflowLogger, NeptuneLogger, TrackioLogger, WandbLogger

def slowly(logger):
    write = logger._write_batch
    logger._write_batch = lambda *args: (time.sleep(0.3), write(*args))
    return logger

runs = lox.neptune.init(jax.random.key(1)), lox.wandb.init(jax.random.key(1))
for logger in (
    NeptuneLogger(),
    MLflowLogger({str(tmp_path)!r}, {logger_cases.mlflow_uri()!r}),
    TrackioLogger("p", auto_log_cpu=False, auto_log_gpu=False),
    WandbLogger(),
):
    slowly(logger)
    logger.log(logger.init(jax.random.key(2)), {{"a": 3}}, step=4)
lox.neptune.log(runs[0], {{"a": 3}}, step=4)
slowly(lox.wandb._runs.logger())
lox.wandb.log(runs[1], {{"a": 3}}, step=4)
"""
    environment = {**os.environ, "NEPTUNE_DATA_DIRECTORY": str(tmp_path), "TRACKIO_DIR": str(tmp_path / "trackio")}
    environment |= {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "WANDB_SILENT": "true"}
    done = subprocess.run([sys.executable, "-c", script], check=True, env=environment, capture_output=True, text=True)
    assert "Error" not in done.stderr, done.stderr
    event = {"a": [({"step": 4}, 3.0)]}
    assert read_neptune(tmp_path) == {name: event for name in "12"}
    assert read_mlflow(MLflowLogger(str(tmp_path), logger_cases.mlflow_uri())) == {"2": event}
    assert {name: file.events("step") for name, file in wandb_file.read_all(tmp_path).items()} == {
        name: event for name in "12"
    }
    with sqlite3.connect(tmp_path / "trackio" / "p.db") as database:
        assert [(s, json.loads(m)) for s, m in database.execute("SELECT step, metrics FROM metrics")] == [(4, {"a": 3})]
    database.close()


# --- without the clients ---


def test_the_first_use_says_what_to_install():
    """In a process of its own, without any of the clients."""
    script = """
import sys
for name in ("neptune", "mlflow", "sqlalchemy", "trackio", "wandb"):
    sys.modules[name] = None
import jax, lox, lox.neptune, lox.wandb
for extra, use in {
    "neptune": lambda: lox.neptune.init(jax.random.key(0)),
    "neptune ": lambda: lox.loggers.NeptuneLogger(),
    "mlflow": lambda: lox.loggers.MLflowLogger(),
    "trackio": lambda: lox.loggers.TrackioLogger("p"),
    "wandb": lambda: lox.wandb.init(jax.random.key(0)),
    "wandb ": lambda: lox.loggers.WandbLogger(),
}.items():
    try:
        use()
    except ImportError as error:
        assert f"pip install 'lox-jax[{extra.strip()}]'" in str(error), error
    else:
        raise AssertionError(extra)
"""
    subprocess.run([sys.executable, "-c", script], check=True)


# --- the examples ---


@pytest.fixture
def example(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    with jax.numpy_dtype_promotion("standard"):
        yield importlib.import_module


def check_ppo(runs, prefix="", histograms=("gradients/mean", "gradients/std"), images=()):
    assert len(runs) == 8
    losses = {"loss/policy": 20, "loss/value": 20, "entropy": 20, **dict.fromkeys(histograms, 20)}
    lengths = {"episode_length": 10, "frames": 10, **dict.fromkeys(images, 10)}
    for run in runs.values():
        run = {name.removeprefix(prefix): events for name, events in run.items()}
        assert {name: len(events) for name, events in run.items()} == losses | lengths
        assert all([steps["step"] for steps, _ in run[name]] == list(range(20)) for name in losses)
        assert all([steps["step"] for steps, _ in run[name]] == list(range(0, 20, 2)) for name in lengths)
        assert [frames for _, frames in run["frames"]] == [512 * n for n in range(1, 11)]


@pytest.mark.nightly
@needs_neptune
def test_neptune_example(example, neptune_folder):
    example("neptune_ppo").main()
    runs = read_neptune(neptune_folder)
    for run in runs.values():
        run["train/frames"] = run.pop("frames")  # a step, so without the prefix
    check_ppo(runs, "train/")


@pytest.mark.nightly
@needs_mlflow
def test_mlflow_example(example):
    example("mlflow_ppo").main(logger_cases.mlflow_uri())
    logger = MLflowLogger("ppo", logger_cases.mlflow_uri())
    check_ppo(read_mlflow(logger))


@pytest.mark.nightly
@needs_trackio
def test_trackio_example(example, tmp_path):
    project = make_trackio(tmp_path).project
    example("trackio_ppo").main(project)
    check_ppo(read_trackio(TrackioLogger(project)), histograms=["gradients"], images=["visited"])


# --- runs that are resumed ---


PRNG_KEYS = jax.vmap(jax.random.key)(jnp.arange(2))


def some_steps(logger, begin, first, last, config=None, **options):
    """Begin or resume a run in each of two lanes, and log some steps."""
    lrs = jnp.array([0.5, 0.25])
    begin = getattr(logger, begin)
    states = jax.vmap(lambda key, lr: begin(key, {"lr": lr} if config is None else config, **options))(PRNG_KEYS, lrs)

    def f(lr):
        def step(w, i):
            lox.log({"loss": jnp.sin(w * lr), "h": lox.Histogram(w + jnp.arange(3.0), 4, (0, 32))}, step=i)
            return w + 1, None

        return jax.lax.scan(step, jnp.float32(first), jnp.arange(first, last))[0]

    with logger:
        jax.vmap(lambda state, lr: logger.tap(f, state)(lr))(states, lrs)


def newest(rows, firsts):
    """Return rows `(attempt, step, ...)` without those that a later attempt has computed again."""
    return [row[1:] for row in rows if all(row[0] >= number or row[1] < first for number, first in firsts.items())]


@needs_mlflow
def test_mlflow_goes_on_with_a_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path in ("whole", "runs"):
        Path(path).mkdir()
    some_steps(make_mlflow(tmp_path / "whole"), "init", 0, 12)
    some_steps(make_mlflow(tmp_path / "runs"), "init", 0, 8)
    some_steps(make_mlflow(tmp_path / "runs"), "resume", 5, 7, step=5)
    some_steps(make_mlflow(tmp_path / "runs"), "resume", 3, 12, config={"lr": 0.125, "clip": 1.0}, step=3)
    client = mlflow_client()
    whole, runs = ({run.info.run_name: run for run in mlflow_runs(f"{tmp_path / name}")} for name in ("whole", "runs"))
    assert runs.keys() == whole.keys() == {"0 lr=0.5", "1 lr=0.25"}
    for name, run in runs.items():
        tags = {name.removeprefix("lox."): tag for name, tag in run.data.tags.items() if name.startswith("lox.")}
        times = {n: int(tags.pop(f"attempt.{n}.time")) for n in (1, 2)}
        steps = {"attempt.1.step": "step=5", "attempt.2.step": "step=3"}
        assert tags == {"attempt": "2", "resumed_step": "step=3", **steps, "attempt.2.config.lr": "0.125"}
        assert run.data.params == {"lr": name.split("=")[1], "clip": "1.0"}
        assert run.info.status == "FINISHED"
        for key in ("loss", "h/mean", "h/std"):
            points = client.get_metric_history(run.info.run_id, key)
            # As the documentation of MLflowLogger says.
            attempts = [sum(time <= point.timestamp for time in times.values()) for point in points]
            rows = [(attempt, p.step, p.value) for attempt, p in zip(attempts, points, strict=True)]
            assert [attempts.count(n) for n in range(3)] == [8, 2, 9]
            expected = client.get_metric_history(whole[name].info.run_id, key)
            assert newest(rows, {1: 5, 2: 3}) == [(p.step, p.value) for p in expected]
        folder = Path(client.download_artifacts(run.info.run_id, "histograms/h"))
        parts = [sorted(folder.glob(f"{start}0*")) for start in ("", "attempt1-", "attempt2-")]
        lines = ["".join(part.read_text() for part in some).splitlines() for some in parts]
        steps = [[json.loads(line)["step"] for line in some] for some in lines]
        assert steps == [[*range(8)], [5, 6], [*range(3, 12)]]


@needs_mlflow
def test_mlflow_is_running_again(tmp_path):
    with make_mlflow(tmp_path) as logger:
        logger.init(PRNG_KEY)
    with make_mlflow(tmp_path) as logger:
        logger.resume(PRNG_KEY, step=1)
        assert [run.info.status for run in mlflow_runs(f"{tmp_path}")] == ["RUNNING"]


@needs_trackio
def test_trackio_goes_on_with_a_run(tmp_path):
    from trackio.sqlite_storage import SQLiteStorage

    first = make_trackio(tmp_path)
    again = lambda: TrackioLogger(first.project, **logger_cases.TRACKIO)  # noqa: E731
    some_steps(first, "init", 0, 8)
    some_steps(again(), "resume", 5, 7, step=5)
    some_steps(again(), "resume", 3, 12, config={"lr": 0.125, "clip": 1.0}, step=3)
    whole = make_trackio(tmp_path)
    some_steps(whole, "init", 0, 12)
    assert SQLiteStorage.get_runs(first.project) == ["0 lr=0.5", "1 lr=0.25"]
    for name in SQLiteStorage.get_runs(first.project):
        lr = float(name.split("=")[1])
        config = {k: x for k, x in SQLiteStorage.get_run_config(first.project, name).items() if not k.startswith("_")}
        assert config == {
            "lr": 0.125,
            "clip": 1.0,
            "lox.attempts": [
                {"attempt": 1, "resumed": {"step": 5}, "changes": {}},
                {"attempt": 2, "resumed": {"step": 3}, "changes": {"lr": [lr, 0.125], "clip": [None, 1.0]}},
            ],
        }
        logs = SQLiteStorage.get_logs(first.project, name)
        firsts = {a["attempt"]: a["resumed"]["step"] for a in config["lox.attempts"]}
        for key in ("loss", "h"):
            rows = [(row.get("attempt", 0), row["step"], row[key]) for row in logs if key in row]
            expected = SQLiteStorage.get_logs(whole.project, name)
            assert sorted(newest(rows, firsts), key=lambda row: row[0]) == [
                (row["step"], row[key]) for row in expected if key in row
            ]


@needs_trackio
def test_a_key_that_is_called_like_the_column_of_attempts(tmp_path):
    with make_trackio(tmp_path) as logger:
        logger.log(logger.init(PRNG_KEY), {"attempt": 5}, step=0)
    with TrackioLogger(logger.project, **logger_cases.TRACKIO) as logger:
        logger.log(logger.resume(PRNG_KEY, step=1), {"attempt": 6}, step=1)
    assert read_trackio(logger)["7"] == {
        "attempt_x_": [({"step": 0}, 5), ({"step": 1}, 6)],
        "attempt": [({"step": 1}, 1)],
    }
    assert logger.key_of("attempt_x_") == "attempt"


@needs_neptune
def test_neptune_begins_another_run_that_says_what_it_resumes(tmp_path):
    some_steps(make_neptune(tmp_path), "init", 0, 8)
    some_steps(make_neptune(tmp_path), "resume", 5, 12, config={"lr": 0.125}, step=5, name="{key}")
    fields = {}
    for file in tmp_path.glob("offline/*/data-1.log"):
        operations = [json.loads(line)["obj"] for line in file.read_text().splitlines()]
        values = {"/".join(o["path"]): o["value"] for o in operations if "value" in o}
        fields[values["sys/name"]] = {k: x for k, x in values.items() if k.split("/")[0] in ("resumes", "config")}
    assert fields["0.1"] == {"resumes/run": "0", "resumes/step": "step", "resumes/number": 5, "config/lr": 0.125}
    assert fields["0 lr=0.5"] == {"config/lr": 0.5}
    steps = [steps["step"] for steps, _ in read_neptune(tmp_path)["0.1"]["loss"]]
    assert steps == list(range(5, 12))


@pytest.mark.parametrize(
    "make, where",
    [
        pytest.param(make_mlflow, "experiment '.*' of 'sqlite:.*'", marks=needs_mlflow, id="mlflow"),
        pytest.param(make_trackio, "project '.*'", marks=needs_trackio, id="trackio"),
    ],
)
def test_a_run_that_does_not_exist(make, where, tmp_path):
    with make(tmp_path) as logger:
        name = type(logger).__name__
        with pytest.raises(lox.RunNotFoundError, match=f"{name} cannot resume '7' in {where}: it has no such run"):
            logger.resume(PRNG_KEY, step=1)
        logger.log(logger.init(jax.random.key(8)), {"x": 1.0}, step=0)
        logger.flush()
        with pytest.raises(lox.RunNotFoundError, match=f"cannot resume '7' in {where}: the last runs there are '8':"):
            logger.resume(PRNG_KEY, step=1)


@pytest.mark.parametrize(
    "make", [pytest.param(make_mlflow, marks=needs_mlflow), pytest.param(make_neptune, marks=needs_neptune)]
)
def test_events_without_a_step_are_counted_from_the_one_of_resume_on(make, tmp_path):
    read = {make_mlflow: read_mlflow, make_neptune: read_neptune}[make]
    with make(tmp_path) as logger:
        state = logger.init(PRNG_KEY)
        for n in range(4):
            logger.log(state, {"x": n})
    with make(tmp_path) as logger:
        state = logger.resume(PRNG_KEY, step=10)
        for n in range(2):
            logger.log(state, {"x": n})
    last = read(logger)["7.1" if make is make_neptune else "7"]["x"][-2:]
    assert last == [({"step": 10}, 0.0), ({"step": 11}, 1.0)]
