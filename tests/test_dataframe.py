"""Logs as data frames and as HTML."""

import base64
import html.parser
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lox
from lox._data import _html
from lox._data._image import png


def f(x):
    lox.log({"lr": 0.5})

    def step(x, i):
        lox.log({"x": x}, step=i)
        lox.log({"big": 10 * x}, where=x > 1, step=i, epoch=i // 2)
        return x + 1, None

    return jax.lax.scan(step, x, jnp.arange(3))[0]


@pytest.fixture
def pd():
    return pytest.importorskip("pandas")


def rows(frame):
    """Return rows with None for missing values."""
    return [
        tuple(None if x is None or x != x else x for x in row)
        for row in frame.astype(object).where(frame.notna(), None).itertuples(index=False)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
def test_long(wrap, pd):
    _, logs = wrap(lox.spool(f))(1)
    frame = logs.to_dataframe()
    assert list(frame) == ["key", "event", "step", "epoch", "value"]
    assert rows(frame) == [
        ("lr", 0, None, None, 0.5),
        ("x", 0, 0, None, 1),
        ("x", 1, 1, None, 2),
        ("x", 2, 2, None, 3),
        ("big", 0, 1, 0, 20),
        ("big", 1, 2, 1, 30),
    ]
    assert [str(frame[c].dtype) for c in ("event", "step", "epoch")] == ["int64", "Int64", "Int64"]


@pytest.mark.slow
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
def test_wide(wrap, pd):
    frame = wrap(lox.spool(f, argnames=["x", "big"]))(1)[1].filter(lambda k: k != "lr").to_dataframe("wide")
    assert list(frame) == ["step", "epoch", "x", "big"]
    assert rows(frame) == [
        (0, None, 1, None),
        (1, 0, None, 20),
        (1, None, 2, None),
        (2, 1, None, 30),
        (2, None, 3, None),
    ]

    def g(x):
        def step(x, i):
            lox.log({"train": x}, step=i)
            lox.log({"eval": -x}, where=i % 2 == 0, step=i)
            return x + 1, None

        return jax.lax.scan(step, x, jnp.arange(3))[0]

    frame = wrap(lox.spool(g))(1)[1].to_dataframe("wide")
    assert str(frame["step"].dtype) == "int64"
    assert rows(frame) == [(0, 1, -1), (1, 2, None), (2, 3, -3)]  # keys with the same step share a row


@pytest.mark.slow
def test_lanes_of_both_orders_are_the_same(pd):
    xs = jnp.array([0, 1])
    inside, outside = lox.spool(jax.vmap(f))(xs)[1], jax.vmap(lox.spool(f))(xs)[1]
    for form in ("long", "wide"):
        a, b = inside.to_dataframe(form), outside.to_dataframe(form)
        pd.testing.assert_frame_equal(a, b)
        for lane in range(2):
            one = lox.spool(f)(xs[lane])[1].to_dataframe(form)
            mine = a[a["lane"] == lane].drop(columns="lane").reset_index(drop=True)
            assert rows(mine) == rows(one)
    nested = jax.vmap(lox.spool(jax.vmap(f)))(jnp.arange(6).reshape(2, 3))[1].to_dataframe()
    assert list(nested)[:4] == ["key", "lane_0", "lane_1", "event"]
    one = nested[(nested.key == "x") & (nested.lane_0 == 1) & (nested.lane_1 == 2)]
    assert one["value"].tolist() == [5, 6, 7]
    assert len(nested[nested.key == "lr"]) == 6


def test_pytrees_arrays_and_small_types(pd):
    logs = lox.logdict({"t": {"a": jnp.ones((2,)), "b": [1.5]}, "h": jnp.bfloat16(0.5), "k": jax.random.key(3)})
    frame = logs.to_dataframe()
    assert frame["key"].tolist() == ["t['a']", "t['b'][0]", "h", "k"]
    np.testing.assert_array_equal(frame["value"][0], [1.0, 1.0])
    np.testing.assert_array_equal(frame["value"][3], [0, 3])
    assert float(frame["value"][2]) == 0.5
    assert lox.logdict({"h": jnp.ones((), jnp.bfloat16)}).to_dataframe("wide")["h"].dtype == np.float32


def test_names_that_are_taken(pd):
    logs = lox.logdict(
        {"value": jnp.arange(2)}, steps={"key": {"value": jnp.arange(2)}, "event": {"value": jnp.arange(2)}}
    )
    assert list(logs.to_dataframe()) == ["key", "event", "step_key", "step_event", "value"]


def test_empty_and_wrong(pd, monkeypatch):
    assert list(lox.logdict().to_dataframe()) == ["key", "event", "value"]
    assert lox.logdict().to_dataframe("wide").empty
    _, logs = lox.spool(f)(-5)
    assert "big" not in logs.to_dataframe()["key"].tolist() and logs.to_dataframe("wide")["big"].isna().all()
    with pytest.raises(ValueError, match="`form` is 'tall'; choose 'long' or 'wide'"):
        logs.to_dataframe("tall")
    with pytest.raises(TypeError, match="these logs are being traced: return them from the jitted function first"):
        jax.jit(lambda x: lox.spool(f)(x)[1].to_dataframe() and x)(1)
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match="`to_dataframe` needs pandas: pip install pandas"):
        logs.to_dataframe()


# --- HTML ---


class Reader(html.parser.HTMLParser):
    """Checks that tags match, and collects the cells."""

    def __init__(self, text):
        super().__init__()
        self.stack, self.rows, self.tags = [], [], []
        self.feed(text)
        assert not self.stack

    def handle_starttag(self, tag, attrs):
        self.stack.append(tag)
        self.tags.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.stack.pop() == tag

    def handle_data(self, data):
        if self.stack and self.stack[-1] in ("td", "th"):
            self.rows[-1][-1] += data


def test_html_of_lanes_and_ragged_logs():
    logs = lox.spool(jax.vmap(f))(jnp.array([0, 1]))[1]
    page = Reader(logs._repr_html_())
    assert page.rows == [
        ["key", "events", "type", "last", "range", ""],
        ["lr", "1", "float32 × 2 lanes", "0.5 ± 0", "0.5", ""],
        ["x", "3", "int32 × 2 lanes", "2.5 ± 0.5", "0 … 3", ""],
        ["big", "1 – 2", "int32 × 2 lanes", "25 ± 5", "20 … 30", ""],
    ]
    assert page.tags.count("svg") == 2 and page.tags.count("polygon") == 2


def test_html_escapes_everything():
    hostile = "<script>alert(1)</script>&\"'"
    text = lox.logdict({hostile: jnp.arange(3.0)}, steps={"step": {hostile: jnp.arange(3)}})._repr_html_()
    assert "<script" not in text
    assert Reader(text).rows[1][:5] == [hostile, "3", "float32", "2", "0 … 2"]


def test_html_of_odd_logs():
    assert Reader(lox.logdict()._repr_html_()).rows == [["key", "events", "type", "last", "range", ""]]
    odd = {"nan": jnp.full(3, jnp.nan), "inf": jnp.array([1.0, jnp.inf, 2.0]), "none": jnp.zeros((0,)), "flag": True}
    page = Reader(lox.logdict(odd | {"z": jnp.array([3 + 4j, 0j])})._repr_html_())
    assert [row[:1] + row[3:5] for row in page.rows[1:]] == [
        ["nan", "nan", ""],
        ["inf", "inf", ""],
        ["none", "nan", ""],
        ["flag", "1", "1"],
        ["z", "2.5", "2.5"],
    ]
    many = Reader(lox.logdict({str(n): jnp.zeros(()) for n in range(60)})._repr_html_())
    assert len(many.rows) == 51
    traced = []
    jax.jit(lambda x: traced.append(lox.spool(f)(x)[1]._repr_html_()))(1)
    assert traced[0].startswith("<pre>{&#x27;lr&#x27;: ")


def test_curves():
    assert _html.curve(np.zeros((1, 1))) == ""
    flat = _html.curve(np.array([[1.0, 1.0, 1.0]]))
    assert "points='1.0,14.0 80.0,14.0 159.0,14.0'" in flat
    rising = _html.curve(np.array([[0.0, np.nan, 1.0]]))
    assert "points='1.0,26.0 159.0,2.0'" in rising
    assert len(_html.curve(np.random.default_rng(0).normal(size=(4, 10_000)))) < 5_000


def pictured(x):
    def step(c, i):
        frame = jnp.full((2, 3, 3), i * 100 + x, jnp.uint8)
        lox.log({"frame": lox.Image(frame), "deep": {"h": lox.Histogram(jnp.arange(4.0), bins=4, range=(0.0, 4.0))}})
        return c, None

    return jax.lax.scan(step, 0, jnp.arange(3))[0]


def pngs(text):
    return [base64.b64decode(data) for data in re.findall("data:image/png;base64,([^']*)'", text)]


def test_html_shows_pictures_and_histograms():
    text = lox.spool(pictured)(1)[1]._repr_html_()
    assert Reader(text.replace("'picture'>", "'picture'/>")).rows == [
        ["key", "events", "type", "last", "range", ""],
        ["frame", "3", "image 2×3", "", "", ""],
        ["deep['h']", "3", "histogram of 4", "", "0 … 4", ""],
    ]
    assert pngs(text) == [png(np.full((2, 3, 3), 201, np.uint8))]  # the last one
    assert text.count("<rect ") == 40 and text.count("aria-label='histogram'") == 1


@pytest.mark.slow
@pytest.mark.parametrize("order", [lambda f: lox.spool(jax.vmap(f)), lambda f: jax.vmap(lox.spool(f))])
def test_html_shows_pictures_of_a_few_lanes(order):
    text = order(pictured)(jnp.arange(6))[1]._repr_html_()
    assert pngs(text) == [png(np.full((2, 3, 3), 200 + lane, np.uint8)) for lane in range(4)]
    rows = Reader(text.replace("'picture'>", "'picture'/>")).rows
    assert rows[1] == ["frame", "3", "image 2×3 × 6 lanes", "", "", " …"]
    assert rows[2][0].startswith("deep")


@pytest.mark.slow
def test_html_of_odd_pictures_and_histograms():
    def f(x):
        lox.log({"h": lox.Histogram(jnp.full(3, jnp.nan)), "never": lox.Histogram(x)}, where=x > 0)
        lox.log({"big": lox.Image(jnp.zeros((10, 1000)))})
        lox.log({"x": x}, where=x > 0)
        return x

    text = lox.spool(f)(-1.0)[1]._repr_html_()
    rows = Reader(text.replace("'picture'>", "'picture'/>")).rows
    assert [row[:5] for row in rows[1:]] == [
        ["h", "0", "histogram of 0", "", ""],
        ["never", "0", "histogram of 0", "", ""],
        ["big", "1", "image 10×1000", "", ""],
        ["x", "0", "float32", "–", ""],
    ]
    assert pngs(text) == [png(np.zeros((3, 250, 1), np.uint8))]  # thinned out
    assert _html.bars([0.0], [0.0, 1.0]) == ""


def test_names_that_are_not_unicode():
    """A notebook shows the code of half a character, and pandas, which cannot hold it, is not asked to."""
    logs = lox.spool(lambda: lox.log({"a\ud800": 1, "b": {"\udfff": 2.0}}, step=0))()[1]
    rows = Reader(logs._repr_html_().encode().decode()).rows
    assert [row[0] for row in rows[1:]] == [r"a\ud800", r"b['\udfff']"]
    pytest.importorskip("pandas")
    for form in ("long", "wide"):
        with pytest.raises(
            lox.LogTypeError, match=r"`to_dataframe` cannot name a column 'a\\ud800': .* half a character"
        ):
            logs.to_dataframe(form)
        with pytest.raises(lox.LogTypeError, match=r"`to_dataframe` cannot name a column '\\udfff'"):
            lox.spool(lambda: lox.log({"a": 1}, **{"\udfff": 2}))()[1].to_dataframe(form)
    assert len(logs.filter(["b"]).to_dataframe()) == 1


def test_bars_have_the_shape_of_the_values_whatever_the_bins():
    text = _html.bars([1.0, 1.0, 2.0], [0.0, 1.0, 2.0, 4.0])  # as many in every unit
    assert {float(h) for h in re.findall(r" height='([0-9.]*)' fill", text)} == {26.0}
