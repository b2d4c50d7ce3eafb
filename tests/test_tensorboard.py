"""`TensorBoardLogger` beyond the contract: its bytes, and what TensorBoard's own reader finds in them."""

import contextlib
import importlib.util
import io
import json
import os
import struct
import subprocess
import sys
import time
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from machine import HANG, Disk

import lox
from lox.loggers import TensorBoardLogger
from lox.loggers._trackers import _hparams, _tfevents

EXAMPLES = Path(__file__).parent.parent / "examples"
needs_tensorboard = pytest.mark.skipif(not importlib.util.find_spec("tensorboard"), reason="needs tensorboard")


def read(folder):
    """Read the folder of a run with TensorBoard."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    everything = {"scalars": 0, "histograms": 0, "images": 0, "tensors": 0}
    return EventAccumulator(str(folder), size_guidance=everything).Reload()


def scalars(actual, tag):
    return [(event.step, event.value) for event in actual.Scalars(tag)]


def texts(tags):
    return [tag for tag in tags["tensors"] if not tag.startswith("_hparams_/")]


# --- the format, with nothing but Python ---


def bit_by_bit(data):
    """Compute CRC-32C by its definition."""
    register = 0xFFFFFFFF
    for byte in data:
        register ^= byte
        for _ in range(8):
            register = register >> 1 ^ (0x82F63B78 if register & 1 else 0)
    return register ^ 0xFFFFFFFF


@pytest.mark.parametrize("length", [0, 1, 3, 4, 511, 512, 513, 1000, 4096, 4097, 20_001])
def test_checksum(length):
    assert _tfevents.crc32c(b"123456789") == 0xE3069283
    data = np.random.default_rng(length).integers(0, 256, length, np.uint8).tobytes()
    assert _tfevents.crc32c(data) == bit_by_bit(data)


def test_many_records_equal_single_ones():
    """Each row of an array of records is a valid record, whatever the sizes of steps and tags."""
    values = np.array([0.0, -1.5, np.nan, np.inf, 1e-45], np.float32)
    for tag in ("x", "ünïcode/" + 200 * "long"):
        for steps in ([0, 1, 2, 3, 4], [0, 127, 128, 2**31, 2**62], [-1, 0, 1, 2, 3]):
            for row in _tfevents.scalars(tag, np.array(steps), values, 12.5):
                record = row.tobytes()
                length, check = struct.unpack_from("<QI", record)
                assert len(record) == length + 16
                assert check == _tfevents._masked(bit_by_bit(record[:8]))
                assert struct.unpack("<I", record[-4:])[0] == _tfevents._masked(bit_by_bit(record[12:-4]))


def test_one_record_byte_by_byte():
    event = b"\x09" + struct.pack("<d", 2.0) + b"\x10\x05" + b"\x2a\x0a\x0a\x08\x0a\x01x\x15" + struct.pack("<f", 0.5)
    (row,) = _tfevents.scalars("x", np.array([5]), np.array([0.5], np.float32), 2.0)
    assert row.tobytes()[12:-4] == event
    assert _tfevents.scalars("x", np.array([5, 5]), np.float32([0.5, 0.5]), 2.0)[1].tobytes() == row.tobytes()


# --- what TensorBoard reads ---


@needs_tensorboard
def test_every_value_and_step(tmp_path):
    values = np.random.default_rng(0).normal(size=20_000).astype(np.float32)
    values[:4] = np.nan, np.inf, -np.inf, 1e-45
    steps = np.arange(20_000) ** 2

    def train(xs):
        return jax.lax.scan(lambda c, x: (lox.log({"x": x[0]}, step=x[1]), (c, c))[1], 0, xs)

    with TensorBoardLogger(tmp_path) as logger:
        logger.spool(jax.jit(train), logger.init(jax.random.key(7)))((values, steps.astype(np.int32)))
    actual = read(tmp_path / "7").Scalars("x")
    assert [e.step for e in actual] == steps.tolist()
    assert np.array([e.value for e in actual], np.float32).tobytes() == values.tobytes()


def show(x):
    def step(x, i):
        media = {"h": lox.Histogram(x, 4, (0, 1)), "frame": lox.Image(x.reshape(2, 1, 3))}
        lox.log(
            {"pair": x[:2], "stats": {"max": x.max()}, "z": jax.lax.complex(x[0], jnp.float32(1)), **media},
            step=i,
            episode=i // 2,
        )
        return x / 2, None

    return jax.lax.scan(step, x, jnp.arange(3))[0]


X = jnp.array([0.1, 0.2, 0.4, 0.6, 0.8, 1.0], jnp.float32)


@pytest.mark.slow
@needs_tensorboard
@pytest.mark.parametrize("how", ["spool", "tap"])
def test_everything_that_can_be_shown(tmp_path, how):
    import PIL.Image

    with TensorBoardLogger(tmp_path) as logger:
        state = logger.init(jax.random.key(0), config={"lr": 0.1, "layers": (2, 3)})
        getattr(logger, how)(show, state)(X)
        logger.log_text(state, "notes", "*one*", step=3)
        jax.jit(lambda state: logger.log_text(state, "notes", "two", step=4))(state)
    actual = read(tmp_path / "0")
    xs = np.asarray(X) / np.float32([[1], [2], [4]])
    tags = actual.Tags()
    assert tags["scalars"] == ["pair/0", "pair/1", "stats/max", "z/real", "z/imag", "episode"]
    assert (tags["histograms"], tags["images"], texts(tags)) == (["h"], ["frame"], ["config", "notes"])
    assert scalars(actual, "pair/1") == list(enumerate(xs[:, 1].tolist()))
    assert scalars(actual, "stats/max") == list(enumerate(xs.max(1).tolist()))
    assert scalars(actual, "z/imag") == [(0, 1), (1, 1), (2, 1)]
    assert scalars(actual, "episode") == [(0, 0), (1, 0), (2, 1)]
    for n, event in enumerate(actual.Histograms("h")):
        value, counts = event.histogram_value, np.histogram(xs[n], 4, (0, 1))[0]
        assert (event.step, value.num, value.sum) == (n, 6, pytest.approx(xs[n].sum(), rel=1e-6))
        assert value.sum_squares == pytest.approx(np.square(xs[n]).sum(), rel=1e-6)
        assert value.bucket == np.trim_zeros(counts).tolist()
        assert value.bucket_limit == [edge for edge, count in zip((0.25, 0.5, 0.75, 1), counts, strict=True) if count]
    for n, event in enumerate(actual.Images("frame")):
        pixels = np.asarray(PIL.Image.open(io.BytesIO(event.encoded_image_string)))
        assert (event.step, event.height, event.width) == (n, 2, 1)
        np.testing.assert_array_equal(pixels, np.round(255 * xs[n].reshape(2, 1, 3)))
    (config,) = actual.Tensors("config")
    (text,) = config.tensor_proto.string_val
    assert json.loads(text.decode().removeprefix("```json").removesuffix("```")) == {"lr": 0.1, "layers": [2, 3]}
    notes = [(e.step, e.tensor_proto.string_val[0].decode()) for e in actual.Tensors("notes")]
    assert notes == [(3, "*one*"), (4, "two")]
    assert actual.SummaryMetadata("notes").plugin_data.plugin_name == "text"


def test_a_text_for_a_run_that_is_closed(tmp_path):
    with TensorBoardLogger(tmp_path) as logger:
        state = logger.init(jax.random.key(0))
        logger.close(state)
        with pytest.raises(lox.LoxError, match="run '0' is closed"):
            logger.log_text(state, "notes", "late")
        with pytest.warns(lox.LoxWarning, match="run '0' is closed"):
            jax.jit(lambda state: logger.log_text(state, "notes", "late"))(state)
            jax.effects_barrier()
        with pytest.raises(lox.LoxError, match="run '0' is closed"):
            logger.flush()


@pytest.mark.slow
@needs_tensorboard
def test_lanes_inside_a_run(tmp_path):
    def masked(x):
        big = x[0] > 0.15
        lox.log({"h": lox.Histogram(x, 4, (0, 1)), "frame": lox.Image(x.reshape(2, 3)), "x": x[0]}, where=big)

    with TensorBoardLogger(tmp_path) as logger:
        logger.spool(jax.vmap(masked), logger.init(jax.random.key(0)))(jnp.stack([X, X / 2, X / 4 + 0.5]))
    actual = read(tmp_path / "0")
    assert actual.Tags()["images"] == ["frame/2"]
    assert scalars(actual, "x/2") == [(0, np.float32(0.525))]
    assert actual.Histograms("h")[0].histogram_value.num == 6


@needs_tensorboard
def test_which_step_is_used(tmp_path):
    with TensorBoardLogger(tmp_path, step="frame") as logger:
        state = logger.init(jax.random.key(0))
        logger.log(state, {"a": 1.0}, step=3, frame=30)
        logger.log(state, {"b": 1.0}, epoch=5)
        logger.log(state, {"b": 2.0}, epoch=5.7)
        logger.log(state, {"c": 1.0})
        logger.log(state, {"c": 2.0})
        logger.log(state, {"step": 7.0}, frame=2)
    actual = read(tmp_path / "0")
    assert {tag: scalars(actual, tag) for tag in actual.Tags()["scalars"]} == {
        "a": [(30, 1.0)],
        "step": [(30, 3.0)],
        "b": [(5, 1.0), (6, 2.0)],  # not an integer, so one more than the last
        "epoch": [(6, np.float32(5.7))],
        "c": [(0, 1.0), (1, 2.0)],
        "step [key]": [(2, 7.0)],
    }


@needs_tensorboard
def test_large_arrays_are_not_guessed_at(tmp_path):
    logger = TensorBoardLogger(tmp_path)
    state = logger.init(jax.random.key(0))
    with pytest.warns(lox.LoxWarning, match="TensorBoardLogger cannot show 'x'"):
        logger.log(state, {"x": np.zeros((40, 40)), "y": 1.0})
        with pytest.raises(
            lox.LogTypeError, match=r"'x': it is an array of float64 with shape \(40, 40\).*64 elements"
        ):
            logger.close()
    assert read(tmp_path / "0").Tags()["scalars"] == ["y"]  # other keys are not affected
    with TensorBoardLogger(tmp_path, arrays="histogram") as logger:
        logger.log(logger.init(jax.random.key(1)), {"x": np.arange(100), "y": 1.0})
    value = read(tmp_path / "1").Histograms("x")[0].histogram_value
    assert (value.num, value.sum, sum(value.bucket)) == (100, 4950, 100)
    assert (value.min, value.max) == (0, 99)
    with pytest.raises(lox.OptionError, match="`arrays` is 'no'; choose 'elements' and 'histogram'"):
        TensorBoardLogger(tmp_path, arrays="no")


@needs_tensorboard
def test_names_that_look_alike_stay_apart(tmp_path):
    with TensorBoardLogger(tmp_path) as logger:
        state = logger.init(jax.random.key(0))
        logger.log(state, {"a": {"b": 1.0}})
        logger.log(state, {"a/b": 2.0})
        logger.log(state, {"a": {"b": 3.0}})
    actual = read(tmp_path / "0")
    assert scalars(actual, "a/b") == [(0, 1.0), (1, 3.0)]
    assert scalars(actual, "a/b [key]") == [(0, 2.0)]


@needs_tensorboard
def test_names_that_are_not_unicode_stay_apart(tmp_path):
    with TensorBoardLogger(tmp_path) as logger:
        state = logger.init(jax.random.key(0), {"half \ud800": "\ud800"})
        logger.log(state, {"half \ud800": 1.0, r"half \ud800": 2.0}, step=0)
        logger.log_text(state, "text \ud800", "\ud800")
    actual = read(tmp_path / "0")
    assert {tag: scalars(actual, tag) for tag in actual.Tags()["scalars"]} == {
        r"half \ud800": [(0, 1.0)],
        r"half \ud800 [key]": [(0, 2.0)],
    }
    assert texts(actual.Tags()) == ["config", r"text \ud800"]


@needs_tensorboard
def test_one_name_for_one_kind_of_thing(tmp_path):
    """In TensorBoard, a tag belongs to scalars, or histograms, or images, or texts."""
    with TensorBoardLogger(tmp_path) as logger:
        state = logger.init(jax.random.key(0), config={"lr": 0.1})
        logger.log(state, {"a": 1.0, "config": 2.0}, step=1)
        logger.log(state, {"a": lox.Histogram(np.ones(3))}, step=2)
        logger.log(state, {"a": lox.Image(np.ones((2, 2)))}, step=3)
    tags = read(tmp_path / "0").Tags()
    assert (tags["scalars"], tags["histograms"]) == (["a", "config [key]"], ["a [histogram]"])
    assert (tags["images"], texts(tags)) == (["a [image]"], ["config"])


@needs_tensorboard
def test_beyond_single_precision(tmp_path):
    with TensorBoardLogger(tmp_path) as logger:
        state = logger.init(jax.random.key(0))
        logger.log(state, {"big": np.float64(1e39), "ok": 1.0}, step=0)
    actual = read(tmp_path / "0")
    assert (scalars(actual, "big"), scalars(actual, "ok")) == ([(0, np.inf)], [(0, 1.0)])


def test_more_runs_than_files_may_be_open(tmp_path):
    with TensorBoardLogger(tmp_path) as logger:
        states = jax.vmap(logger.init)(jax.vmap(jax.random.key)(jnp.arange(100)))
        for _ in range(2):
            jax.vmap(lambda state: logger.log(state, {"x": 1.0}))(states)
        logger.flush()
        assert len(logger._open_files) == 64
    sizes = {path.stat().st_size for path in tmp_path.glob("*/events*")}
    assert len(list(tmp_path.iterdir())) == 100
    assert len(sizes) == 1


@needs_tensorboard
@pytest.mark.parametrize("can_truncate", [True, False])
def test_a_disk_that_is_full_for_a_while(tmp_path, monkeypatch, can_truncate):
    """What was accepted is read back by TensorBoard; the rest is reported, and leaves no torn record in between."""
    disk = Disk(monkeypatch, room=1 << 30)
    logger, refused = TensorBoardLogger(tmp_path), []
    state = logger.init(jax.random.key(0))
    (file,) = tmp_path.glob("0/events*")
    with pytest.warns(lox.LoxWarning, match="failed writing 'x' of run '0': StoreError: cannot write"):
        for n in range(30):
            if n in (10, 20):
                disk.room, disk.can_truncate = (13, can_truncate) if n == 10 else (1 << 30, True)
            logger.log(state, {"x": n}, step=n)
            try:
                logger.flush()
            except lox.StoreError as error:
                assert str(error).startswith(f"cannot write {str(file)!r}: ")
                refused.append(n)
    logger.close()
    assert refused == list(range(10, 20))
    assert scalars(read(tmp_path / "0"), "x") == [(n, n) for n in range(30) if n not in refused]


# --- the HParams tab ---

KEYS = jax.vmap(jax.random.key)(jnp.array([7, 8, 9]))


@contextlib.contextmanager
def data_providers(path, runs):
    """Yield both of TensorBoard's readers: its own, and the data server, which is another implementation."""
    from tensorboard.backend.event_processing import data_provider, plugin_event_multiplexer
    from tensorboard.context import RequestContext
    from tensorboard.data import server_ingester
    from tensorboard.util.grpc_util import ChannelCredsType

    multiplexer = plugin_event_multiplexer.EventMultiplexer()
    multiplexer.AddRunsFromDirectory(str(path)).Reload()
    providers = [data_provider.MultiplexerDataProvider(multiplexer, str(path))]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # the server's process is never waited for
        try:
            binary = server_ingester.get_server_binary()
        except server_ingester.NoDataServerError:
            yield providers
            return
        server = server_ingester.SubprocessServerDataIngester(
            binary,
            str(path),
            reload_interval=0,
            channel_creds_type=ChannelCredsType.LOCAL,
            samples_per_plugin={"scalars": 0},
        )
        server.start()
        while len(server.data_provider.list_runs(RequestContext(), experiment_id="")) < runs:
            time.sleep(0.05)
        yield [*providers, server.data_provider]
        server._stdin_handle.close()  # which ends it


def sessions(path, runs):
    """Ask the backend of the HParams tab: for each group, its hyper-parameters, the last metrics, and the status."""
    from google.protobuf import json_format
    from tensorboard.context import RequestContext
    from tensorboard.plugins import base_plugin
    from tensorboard.plugins.hparams import api_pb2, backend_context, list_session_groups

    everything = api_pb2.ListSessionGroupsRequest(allowed_statuses=[0, 1, 2, 3], slice_size=1000)
    answers = []
    with data_providers(path, runs) as providers:
        for provider in providers:
            context = backend_context.Context(base_plugin.TBContext(data_provider=provider))
            handler = list_session_groups.Handler(RequestContext(), context, "", everything)
            groups = handler.run().session_groups
            assert all(len(group.sessions) == 1 for group in groups)
            answers.append(
                {
                    group.name: (
                        {name: json_format.MessageToDict(value) for name, value in group.hparams.items()},
                        {metric.name.tag: metric.value for metric in group.metric_values},
                        api_pb2.Status.Name(group.sessions[0].status).removeprefix("STATUS_"),
                    )
                    for group in groups
                }
            )
    assert all(answer == answers[0] for answer in answers)
    return answers[0]


@pytest.mark.slow
@needs_tensorboard
def test_the_config_is_hyper_parameters(tmp_path):
    config = {
        "lr": 0.1,
        "steps": 1000,
        "nesterov": True,
        "kind": "sgd",
        "opt": {"betas": (0.9, 0.99), "clip": {"norm": 1.5}},
        "schedule": None,
        "limit": float("inf"),
        "seed": 2**64 - 1,
        "weights": np.arange(500),
        "nothing": {},
        "opt.betas": "taken",
        "half \ud800": "\ud800",
    }
    with TensorBoardLogger(tmp_path) as logger:
        state = logger.init(jax.random.key(0), config)
        for n in range(3):
            logger.log(state, {"loss": 1.0 / 2**n, "train/n": n}, step=n)
        init = jax.vmap(lambda key, lr: logger.init(key, {"lr": lr, "on": lr > 0.15}))
        states = init(KEYS[:2], jnp.array([0.1, 0.2], jnp.float32))
        jax.vmap(lambda state, x: logger.log(state, {"loss": x}, step=0))(states, jnp.arange(2.0))
        logger.log(logger.init(jax.random.key(3)), {"loss": 1.0})
    actual = sessions(tmp_path, 4)
    weights = actual["0"][0].pop("weights")
    assert weights.startswith("[0, 1, 2, ") and weights.endswith("…") and len(weights) == 200
    assert actual == {
        "0": (
            {
                "lr": 0.1,
                "steps": 1000.0,
                "nesterov": True,
                "kind": "sgd",
                "opt.betas": "[0.9, 0.99]",
                "opt.clip.norm": 1.5,
                "schedule": "null",
                "limit": "Infinity",
                "seed": str(2**64 - 1),
                "nothing": "{}",
                "opt.betas [opt.betas]": "taken",
                "half \\ud800": "\\ud800",
            },
            {"loss": 0.25, "train/n": 2.0},
            "SUCCESS",
        ),
        "7 lr=0.1 on=False": ({"lr": 0.1, "on": False}, {"loss": 0.0}, "SUCCESS"),
        "8 lr=0.2 on=True": ({"lr": 0.2, "on": True}, {"loss": 1.0}, "SUCCESS"),
    }  # and the run without a config has no hyper-parameters


@pytest.mark.slow
@needs_tensorboard
def test_how_a_run_has_ended(tmp_path):
    with pytest.raises(ValueError, match="boom"), TensorBoardLogger(tmp_path) as logger:
        done, failed = (logger.init(jax.random.key(n), {"n": n}) for n in range(2))
        logger.close(done)
        logger.log(failed, {"x": 1.0})
        raise ValueError("boom")
    code = (
        "import jax, lox, os, sys\n"
        "logger = lox.loggers.TensorBoardLogger(sys.argv[1])\n"
        "logger.log(logger.init(jax.random.key(2), {'n': 2}), {'x': 2.0})\n"
        "logger.flush()\n"
        "os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], timeout=HANG)
    assert done.returncode == -9
    assert sessions(tmp_path, 3) == {
        "0": ({"n": 0.0}, {}, "SUCCESS"),
        "1": ({"n": 1.0}, {"x": 1.0}, "FAILURE"),
        "2": ({"n": 2.0}, {"x": 2.0}, "UNKNOWN"),
    }


@needs_tensorboard
def test_hyper_parameters_of_a_resumed_run(tmp_path):
    """The newest values count, together with those that stayed; and so does the newest end."""

    def attempt(begin, *steps, fail=False):
        with contextlib.suppress(ZeroDivisionError), TensorBoardLogger(tmp_path) as logger:
            state = begin(logger)
            for n in steps:
                logger.log(state, {"x": n}, step=n)
            if fail:
                raise ZeroDivisionError

    key = jax.random.key(0)
    attempt(lambda logger: logger.init(key, {"opt": {"lr": 0.1, "kind": "sgd"}}), 0, 1, 2, fail=True)
    before = {"opt.lr": 0.1, "opt.kind": "sgd"}
    assert sessions(tmp_path, 1) == {"0": (before, {"x": 2.0}, "FAILURE")}
    attempt(lambda logger: logger.resume(key, step=2), 2, 3)
    assert sessions(tmp_path, 1) == {"0": (before, {"x": 3.0}, "SUCCESS")}
    attempt(lambda logger: logger.resume(key, {"opt": {"lr": 0.01}, "new": True}, step=4), 4, fail=True)
    now = before | {"opt.lr": 0.01, "new": True}
    assert sessions(tmp_path, 1) == {"0": (now, {"x": 4.0}, "FAILURE")}
    for file in tmp_path.glob("0/*"):  # what a crash leaves, also at the end of a file
        os.truncate(file, file.stat().st_size - 5)
    attempt(lambda logger: logger.resume(key, step=0), 0)
    assert sessions(tmp_path, 1) == {"0": (now, {"x": 0.0}, "SUCCESS")}
    with TensorBoardLogger(tmp_path) as logger:  # in one process, while the run is open
        logger.log(logger.resume(key, {"new": False}, step=1), {"x": 1.0}, step=1)
        logger.log(logger.resume(key, {"more": 1}, step=1), {"x": 2.0}, step=1)
    assert sessions(tmp_path, 1) == {"0": (now | {"new": False, "more": 1.0}, {"x": 2.0}, "SUCCESS")}


@needs_tensorboard
def test_only_what_tensorboard_needs_is_marked(tmp_path):
    """Texts that look like a session stay as they are, also at the end of a file, and so does every event."""
    key, hostile = jax.random.key(0), _hparams.end(True, 1.0).decode("latin-1")
    for begin in (lambda logger: logger.init(key), lambda logger: logger.resume(key, step=2)):
        with TensorBoardLogger(tmp_path) as logger:
            logger.log_text(begin(logger), "_hparams_/session_end_info?", hostile, step=1)
    actual = read(tmp_path / "0")
    assert [e.tensor_proto.string_val[0].decode() for e in actual.Tensors("_hparams_/session_end_info?")] == [
        hostile
    ] * 2
    assert sessions(tmp_path, 1) == {}


# --- statistics over runs ---


def spread(x):
    def step(x, i):
        lox.log({"loss": x, "pair": jnp.stack([x, -x])}, step=i)
        lox.log({"big": x}, where=x > 1, step=i)
        return x + 0.5, None

    return jax.lax.scan(step, x, jnp.arange(3))[0]


@pytest.mark.sample(2)
@pytest.mark.slow
@needs_tensorboard
@pytest.mark.parametrize(("how", "options"), [("spool", {}), ("tap", {}), ("tap", {"buffer": 2})])
@pytest.mark.parametrize("jit", [False, True])
def test_aggregate(tmp_path, how, options, jit):
    xs = jnp.array([0.0, 1.0, 5.0])
    with TensorBoardLogger(tmp_path, aggregate=True) as logger:

        def run(key, x):
            state = logger.init(key, {"rate": x, "kind": "sgd"})
            logger.log_text(state, "notes", "begun", step=1)
            return getattr(logger, how)(spread, state, **options)(x)

        (jax.jit if jit else lambda f: f)(jax.vmap(run))(KEYS, xs)
    assert [folder.name for folder in tmp_path.iterdir()] == ["all"]
    actual = read(tmp_path / "all")
    values = np.asarray(xs)[:, None] + np.arange(3) / 2
    mean, std = values.mean(0), values.std(0, ddof=1)
    margin = 4.302653 * std / np.sqrt(3)  # Student's t, by SciPy
    expected = {"loss": mean, "loss/std": std, "loss/ci95_low": mean - margin, "loss/ci95_high": mean + margin}
    for tag, numbers in (expected | {"pair/1": -mean, "pair/1/std": std}).items():
        assert [step for step, _ in scalars(actual, tag)] == [0, 1, 2], tag
        np.testing.assert_allclose([x for _, x in scalars(actual, tag)], numbers, rtol=1e-6)
    # Only the lanes that logged: one at the first step, then two.
    assert scalars(actual, "big") == [(0, 5.0), (1, 3.5), (2, 4.0)]
    assert [step for step, _ in scalars(actual, "big/std")] == [1, 2]
    notes = [(e.step, e.tensor_proto.string_val[0].decode()) for e in actual.Tensors("notes")]
    assert notes == [(1, "begun")]
    hparams = {"runs": '["7 rate=0", "8 rate=1", "9 rate=5"]', "rate": "[0.0, 1.0, 5.0]", "kind": "sgd"}
    ((config, metrics, status),) = sessions(tmp_path, 1).values()
    assert (config, status) == (hparams, "SUCCESS") and metrics["loss"] == pytest.approx(3.0)


@needs_tensorboard
def test_bands_are_charts_in_tensorboard(tmp_path):
    """The tab for custom scalars draws each mean with its interval, also for keys that come late."""
    from tensorboard.context import RequestContext
    from tensorboard.plugins import base_plugin

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a library inside of TensorBoard
        from tensorboard.plugins.custom_scalar import custom_scalars_plugin

    with TensorBoardLogger(tmp_path, aggregate=True) as logger:
        states = jax.vmap(logger.init)(KEYS)
        for keys in (["train/loss", "lr"], ["train/loss"], ["eval/ünï [x]"]):
            jax.vmap(lambda state, keys=keys: logger.log(state, {key: state.run for key in keys}))(states)
            logger.flush()
        logger.log(logger.init(jax.random.key(1)), {"alone": 1.0})
    with data_providers(tmp_path, 1) as providers:
        for provider in providers:
            plugin = custom_scalars_plugin.CustomScalarsPlugin(base_plugin.TBContext(data_provider=provider))
            layout = json.loads(plugin.layout_impl(RequestContext(), ""))
            charts = {
                chart["title"]: [category["title"], *(series.values() for series in chart["margin"]["series"])]
                for category in layout["category"]
                for chart in category["chart"]
            }
            assert {title: [name, *map(list, series)] for title, (name, *series) in charts.items()} == {
                key: [key.partition("/")[0], [key, f"{key}/ci95_low", f"{key}/ci95_high"]]
                for key in ("train/loss", "lr", "eval/ünï [x]")
            }


@needs_tensorboard
def test_runs_that_come_and_go_while_they_are_aggregated(tmp_path):
    with pytest.raises(ValueError, match="boom"), TensorBoardLogger(tmp_path, aggregate=True) as logger:
        first = logger.init(jax.random.key(0), {"lr": 0.1})
        logger.log(first, {"x": 1.0}, step=0)
        logger.flush()
        second = logger.init(jax.random.key(1), {"lr": 0.2})
        logger.close(first)  # and the folder stays open
        logger.log(second, {"x": 3.0}, step=1)
        logger.close(second)
        logger.init(jax.random.key(2), {"lr": 0.3})
        raise ValueError("boom")
    assert scalars(read(tmp_path / "all"), "x") == [(0, 1.0), (1, 3.0)]
    assert sessions(tmp_path, 2) == {
        "all": ({"runs": '["0", "1"]', "lr": "[0.1, 0.2]"}, {"x": 3.0}, "SUCCESS"),
        "all.1": ({"runs": '["2"]', "lr": 0.3}, {}, "FAILURE"),
    }


@needs_tensorboard
def test_aggregated_runs_that_are_resumed(tmp_path):
    for begin, at in ((lambda logger: logger.init, 0), (lambda logger: lambda k: logger.resume(k, step=4), 4)):
        with TensorBoardLogger(tmp_path, aggregate=True) as logger:
            states = jax.vmap(begin(logger))(KEYS)
            for n in range(at, at + 6):
                jax.vmap(lambda state, n=n: logger.log(state, {"x": state.run * 0 + n}, step=n))(states)
                jax.vmap(lambda state, n=n: logger.log(state, {"loose": state.run * 0 + n}))(states)
    for name, at in (("all", 0), ("all.1", 4)):
        for tag in ("x", "loose"):
            assert scalars(read(tmp_path / name), tag) == [(n, n) for n in range(at, at + 6)]
    hparams = sessions(tmp_path, 2)["all.1"][0]
    assert hparams == {"runs": '["7", "8", "9"]', "resumes.run": '["7", "8", "9"]', "resumes.at.step": 4.0}


@pytest.mark.slow
@needs_tensorboard
def test_example(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(EXAMPLES)
    with jax.numpy_dtype_promotion("standard"):
        import tensorboard_ppo

        lengths = tensorboard_ppo.main(tmp_path)
    sys.modules.pop("tensorboard_ppo")
    assert "tensorboard --logdir" in capsys.readouterr().out
    assert len(list(tmp_path.iterdir())) == 8
    for folder in tmp_path.iterdir():
        actual = read(folder)
        assert len(actual.Scalars("loss/policy")) == len(actual.Histograms("gradients")) == 20
        assert len(actual.Scalars("episode_length")) == len(actual.Images("visited")) == 10
    assert lengths.shape == (8, 10)
