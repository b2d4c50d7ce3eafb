"""`lox.Histogram` and `lox.Image` under every transformation, in loggers and in the store."""

import io
import json
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lox
from lox.loggers import ConsoleLogger, CsvLogger, JsonlLogger

VALUES = np.random.default_rng(0).normal(size=(5, 200)).astype(np.float32)


def log_rows(xs):
    def step(carry, x):
        lox.log({"h": lox.Histogram(x, bins=16, range=(-2.0, 2.0))}, step=carry)
        return carry + 1, None

    return jax.lax.scan(step, 0, xs)[0]


def counted(x, edges):
    """Return NumPy's histogram, with values outside in the outermost bins."""
    return np.histogram(np.clip(x, edges[0], edges[-1]), edges)[0]


@pytest.mark.parametrize("jit", [lambda f: f, jax.jit])
def test_counts_are_those_of_numpy(jit):
    _, logs = jit(lox.spool(log_rows))(VALUES)
    histogram = logs["h"]
    assert histogram.edges.tolist() == np.linspace(-2, 2, 17).tolist()
    assert histogram.counts.dtype == jnp.float32
    np.testing.assert_array_equal(histogram.counts, [counted(x, histogram.edges) for x in VALUES])
    np.testing.assert_allclose(histogram.sum, VALUES.sum(1), rtol=1e-4)
    np.testing.assert_allclose(histogram.mean, VALUES.mean(1), rtol=1e-3, atol=1e-6)
    np.testing.assert_allclose(histogram.std, VALUES.std(1), rtol=1e-3)
    assert not histogram.nonfinite.any()


@pytest.mark.slow
def test_they_are_merged_in_the_carry():
    _, logs = jax.jit(lox.spool(log_rows, reduce="sum"))(VALUES)
    np.testing.assert_array_equal(logs["h"].counts, counted(VALUES.ravel(), logs["h"].edges))
    text = jax.jit(lox.spool(log_rows, reduce="sum")).lower(VALUES).as_text()
    assert "5x16x" not in text  # the events are never stacked
    each = lox.spool(log_rows)(VALUES)[1]["h"]
    parts = [jax.tree.map(lambda x, n=n: x[n], each) for n in range(5)]
    np.testing.assert_array_equal((parts[0] + parts[1]).counts, each.counts[:2].sum(0))


@pytest.mark.slow
def test_they_are_merged_by_tap_and_by_while_loops():
    seen = []
    lox.tap(jax.jit(log_rows), lambda logs: seen.append(logs["h"].counts.sum(-1).tolist()), buffer=2, reduce="sum")(
        VALUES
    )
    assert np.ravel(seen).tolist() == [400, 400, 200]

    def halve(x):
        def body(state):
            lox.log({"h": lox.Histogram(state[1])})
            return state[0] + 1, state[1] / 2

        return jax.lax.while_loop(lambda state: state[0] < 7, body, (0, x))

    _, logs = jax.jit(lox.spool(halve, reduce="sum"))(VALUES[0])
    assert float(logs["h"].counts.sum()) == 1400


def test_lanes():
    _, logs = jax.jit(jax.vmap(lox.spool(log_rows)))(VALUES[:, None, :])
    assert logs["h"].counts.shape == (5, 1, 16)
    _, logs = jax.jit(lox.spool(jax.vmap(log_rows)))(VALUES[:, None, :])
    assert logs["h"].counts.shape == (1, 5, 16)
    np.testing.assert_array_equal(logs["h"].counts[0], [counted(x, logs["h"].edges) for x in VALUES])


def test_default_bins_hold_all_magnitudes():
    x = np.array([0.0, 1e-30, 1e-5, -1e-5, 1.0, -1.0, 1e30, -1e30], np.float32)
    histogram = lox.Histogram(x)
    assert len(histogram.edges) == 258
    np.testing.assert_array_equal(histogram.counts, counted(x, histogram.edges))
    assert float(histogram.counts.sum()) == 8


def test_nonfinite_values_are_counted_separately():
    histogram = lox.Histogram(np.array([1.0, np.nan, np.inf, -np.inf]), bins=2, range=(0, 2))
    assert histogram.counts.tolist() == [0, 1]
    assert float(histogram.nonfinite) == 3
    assert float(histogram.sum) == 1
    assert np.isnan(lox.Histogram(np.array([np.nan])).mean)


def test_pytrees_and_other_dtypes():
    tree = {"a": jnp.array([1, 2]), "b": (jnp.array([True]), jnp.bfloat16(3), 0.5)}
    histogram = lox.Histogram(tree, bins=[0, 1, 2, 4])
    assert histogram.counts.tolist() == [1, 2, 2]
    assert float(histogram.sum) == 7.5


@pytest.mark.slow
def test_gradients_pass_by():
    def f(x):
        lox.log({"h": lox.Histogram(x), "i": lox.Image(x)})
        return (x**2).sum()

    grad, logs = lox.spool(jax.grad(f))(jnp.ones((4, 4)))
    assert grad.tolist() == (2 * np.ones((4, 4))).tolist()
    assert float(logs["h"].counts.sum()) == 16


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(bins=8), "without `range`"),
        (dict(bins=0, range=(0, 1)), "at least one bin"),
        (dict(bins=8, range=(1, 1)), "two increasing finite numbers"),
        (dict(bins=8, range=(0, np.inf)), "give it two finite numbers"),
        (dict(bins=[0, 1], range=(0, 1)), "leave one of them out"),
        (dict(bins=[0, 1, 1]), "two or more increasing numbers"),
        (dict(bins="many"), "which are not numbers"),
    ],
)
def test_bad_bins(arguments, message):
    with pytest.raises(lox.OptionError, match=message):
        lox.Histogram(jnp.ones(3), **arguments)


def test_bad_values():
    with pytest.raises(lox.OptionError, match="known when the program is traced"):
        jax.jit(lambda x: lox.Histogram(x, bins=3, range=(0.0, x.max())).counts)(jnp.ones(3))
    with pytest.raises(lox.LogTypeError, match="take `abs`, or the real part"):
        lox.Histogram(jnp.ones(3, jnp.complex64))
    with pytest.raises(lox.LogTypeError, match="it counts real numbers"):
        lox.Histogram(jax.random.key(0))
    with pytest.raises(lox.LogTypeError, match="holds no array"):
        lox.Histogram({})
    with pytest.raises(lox.MismatchError, match="2 bins from 0 to 1 and with 3 bins from 0 to 1 cannot be added"):
        lox.Histogram(jnp.ones(3), 2, (0, 1)) + lox.Histogram(jnp.ones(3), 3, (0, 1))


def test_one_key_with_two_sets_of_bins():
    def f(x):
        lox.log({"h": lox.Histogram(x, 2, (0, 1))})
        lox.log({"h": lox.Histogram(x, 3, (0, 1))})

    with pytest.raises(lox.MismatchError, match="'h' is logged with different structure"):
        lox.spool(f)(jnp.ones(3))


def test_text():
    _, logs = lox.spool(log_rows)(VALUES[:2])
    assert str(logs).startswith("{'h': Histogram(n=[200, 200], mean=[")
    seen = []
    jax.jit(lambda x: seen.append(repr(lox.Histogram(x))))(jnp.ones(3))
    assert seen == ["Histogram(257 bins from -1e+08 to 1e+08)"]
    assert repr(lox.Image(np.zeros((3, 4, 3)))) == "Image(3×4, 3 channels)"


# --- images ---


@pytest.mark.parametrize("jit", [lambda f: f, jax.jit])
def test_pixels_are_bytes(jit):
    floats = np.array([[0.0, 0.5, 1.0], [-1.0, 2.0, np.nan]], np.float32)
    assert jit(lambda x: lox.Image(x).pixels)(floats)[..., 0].tolist() == [[0, 128, 255], [0, 255, 0]]
    whole = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)
    np.testing.assert_array_equal(jit(lambda x: lox.Image(x).pixels)(whole), whole)
    assert jit(lambda x: lox.Image(x).pixels)(np.eye(2, dtype=bool))[..., 0].tolist() == [[255, 0], [0, 255]]


def test_bad_pixels():
    with pytest.raises(lox.LogTypeError, match=r"shape \(2, 3, 4, 3\).*1, 3 or 4 channels"):
        lox.Image(np.zeros((2, 3, 4, 3)))
    with pytest.raises(lox.LogTypeError, match=r"shape \(4, 4, 2\)"):
        lox.Image(np.zeros((4, 4, 2)))
    with pytest.raises(lox.LogTypeError, match="give it bytes"):
        lox.Image(np.zeros((4, 4), np.int32))


# --- where they go ---


def show(x):
    def step(x, i):
        lox.log({"h": lox.Histogram(x, 2, (0, 1)), "frame": lox.Image(jnp.outer(x, x))}, step=i)
        return x + jnp.float32(0.25), None

    return jax.lax.scan(step, x, jnp.arange(2))[0]


X = jnp.array([0.25, 0.5], jnp.float32)
CELLS = [
    {"edges": [0.0, 0.5, 1.0], "counts": [1.0, 1.0], "nonfinite": 0.0, "mean": 0.375, "std": 0.125},
    {"edges": [0.5, 1.0], "counts": [2.0], "nonfinite": 0.0, "mean": 0.625, "std": 0.125},
]


def pixels_of(path):
    """Return the pixels of a gray PNG file without filters."""
    data = path.read_bytes()
    height = int.from_bytes(data[20:24])
    start = data.index(b"IDAT") + 4
    rows = np.frombuffer(zlib.decompress(data[start : data.index(b"IEND") - 8]), np.uint8).reshape(height, -1)
    assert not rows[:, 0].any()
    return rows[:, 1:].tolist()


@pytest.mark.slow
def test_jsonl(tmp_path):
    with JsonlLogger(tmp_path) as logger:
        logger.spool(show, logger.init(jax.random.key(0)))(X)
    lines = [json.loads(line) for line in (tmp_path / "0.jsonl").read_text().splitlines()]
    assert [line["h"] for line in lines] == CELLS
    assert [pixels_of(tmp_path / line["frame"]) for line in lines] == [
        np.round(255 * np.outer(x, x)).tolist() for x in (np.array([0.25, 0.5]), np.array([0.5, 0.75]))
    ]


def test_csv(tmp_path):
    import csv

    with CsvLogger(tmp_path) as logger:
        logger.tap(show, logger.init(jax.random.key(0)))(X)
    with open(tmp_path / "0.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [json.loads(row["h"]) for row in rows] == CELLS
    assert all((tmp_path / row["frame"]).is_file() for row in rows)


def test_lanes_inside_a_run(tmp_path):
    with JsonlLogger(tmp_path) as logger:
        logger.spool(jax.vmap(show), logger.init(jax.random.key(0)))(jnp.stack([X, X]))
    first = json.loads((tmp_path / "0.jsonl").read_text().splitlines()[0])
    assert first["h"] == [CELLS[0]] * 2
    assert len(first["frame"]) == 2


def test_console():
    console = pytest.importorskip("rich.console").Console(file=io.StringIO(), width=200)
    with ConsoleLogger(console=console) as logger:
        logger.spool(show, logger.init(jax.random.key(0)))(X)
    assert "h 0.625 | frame " in console.file.getvalue()


def test_store(tmp_path):
    _, logs = lox.spool(show)(X)
    lox.save(logs, tmp_path)
    loaded = lox.load(tmp_path)
    assert jax.tree.structure(loaded["h"]) == jax.tree.structure(logs["h"])
    assert isinstance(loaded["frame"], lox.Image)
    for a, b in zip(jax.tree.leaves(dict(loaded)), jax.tree.leaves(dict(logs)), strict=True):
        np.testing.assert_array_equal(a, b)
        assert a.dtype == b.dtype
