"""The dashboard in a real browser: what people see, and what a hostile name cannot do."""

import json
import re
from typing import Any

import jax
import numpy as np
import pytest
from browser import chromium, complaints, served, until

import lox

pytest.importorskip("starlette", reason="starlette is not installed")
pytest.importorskip("uvicorn", reason="uvicorn is not installed")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def browser():
    with chromium() as driver:
        yield driver


def save(directory: Any, name: Any, values: Any, key: str = "loss", first: int = 0, **config: Any) -> None:
    logs = lox.logdict.from_arrays({key: np.asarray(values)}, steps={"step": first + np.arange(len(values))})
    lox.save(logs, directory, jax.random.key(name), config=config or None)


def seeds(directory: Any, lanes: int = 5, points: int = 40, seed: int = 0, first: int = 0, **config: Any) -> np.ndarray:
    """Write runs of one group; return what they logged, `(lane, point)`."""
    values = np.random.default_rng(seed).normal(size=(lanes, points)).cumsum(1)
    for lane, row in enumerate(values):
        save(directory, first + lane, row, **config)
    return values


def open_page(driver: Any, address: str) -> None:
    driver.get("about:blank")
    complaints(driver)  # of the page before, whose server is gone
    driver.get(address)
    drawn(driver)


def drawn(driver: Any, key: str | None = None) -> None:
    """Wait until the charts are there that can be seen."""
    ready = """
        const all = [...document.querySelectorAll('.panel')];
        const panels = all.filter(p => !arguments[0] || p.dataset.key === arguments[0]);
        const ready = p => p.dataset.loaded && !p.panel.busy && !p.panel.stale;
        return panels.some(p => p.dataset.loaded) && panels.every(p => !p.panel.visible || ready(p));
    """
    until(lambda: driver.execute_script(ready, key), f"the chart of {key or 'every key'}")


def legend(driver: Any, key: str = "loss") -> dict[str, str]:
    """Return what the legend of a chart says of each group, and at which point."""
    script = """
        const panel = [...document.querySelectorAll('.panel')].find(p => p.dataset.key === arguments[0]);
        const rows = [...panel.querySelectorAll('.legend .row[data-group]')];
        return rows.map(row => [row.dataset.group, row.lastChild.textContent]);
    """
    return dict(driver.execute_script(script, key))


def shown(value: float) -> str:
    """Write a number as the page does: with six digits."""
    if value != 0 and (abs(value) < 1e-4 or abs(value) >= 1e9):
        mantissa, exponent = f"{value:.5e}".split("e")
        return f"{mantissa}e{int(exponent):+d}"
    digits = f"{value:.6g}"
    whole = len(digits.lstrip("-").split(".")[0].lstrip("0"))
    leading = 0 if whole else len(re.match(r"0*", digits.lstrip("-").partition(".")[2])[0])  # type: ignore[index]
    return f"{value:.{6 - whole + leading}f}"


def data(driver: Any, key: str = "loss") -> Any:
    return driver.execute_script(
        "return [...document.querySelectorAll('.panel')].find(p => p.dataset.key === arguments[0]).panel.data", key
    )


def colours(driver: Any, key: str = "loss") -> dict[str, int]:
    """Return how many pixels of a chart have each colour."""
    script = """
        const panel = [...document.querySelectorAll('.panel')].find(p => p.dataset.key === arguments[0]);
        const canvas = panel.querySelector('canvas');
        const pixels = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
        const counts = {};
        for (let i = 0; i < pixels.length; i += 4) if (pixels[i + 3] === 255) {
            const name = '#' + [...pixels.slice(i, i + 3)].map(v => v.toString(16).padStart(2, '0')).join('');
            counts[name] = (counts[name] || 0) + 1;
        }
        return counts;
    """
    return driver.execute_script(script, key)


# --- curves ---


def test_a_curve_and_its_band_are_drawn(browser, tmp_path):
    seeds(tmp_path)
    with served(tmp_path) as address:
        open_page(browser, address)
        assert colours(browser)["#0072b2"] > 100  # the mean
        assert browser.title == f"{tmp_path.name} · lox"
        assert complaints(browser) == []


@pytest.mark.parametrize("x", ["", "event"])
def test_numbers_are_those_of_numpy_to_the_last_digit(browser, tmp_path, x):
    values = seeds(tmp_path, lanes=7, points=25)
    from scipy import stats

    with served(tmp_path) as address:
        open_page(browser, f"{address}/#x={x}")
        mean, n = values.mean(0), len(values)
        margin = stats.t.ppf(0.975, n - 1) * values.std(0, ddof=1) / np.sqrt(n)
        text = legend(browser)["all runs"]
        assert text == f"{shown(mean[-1])} [{shown((mean - margin)[-1])}, {shown((mean + margin)[-1])}] n=7"
        found = data(browser)["groups"][0]
        assert found["x"] == list(range(25))
        np.testing.assert_array_equal([shown(v) for v in found["center"]], [shown(v) for v in mean])
        np.testing.assert_array_equal([shown(v) for v in found["low"]], [shown(v) for v in mean - margin])
        np.testing.assert_array_equal([shown(v) for v in found["high"]], [shown(v) for v in mean + margin])


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("band", "edges"),
    [
        ("std", lambda v: (v.mean(0), v.mean(0) - v.std(0, ddof=1), v.mean(0) + v.std(0, ddof=1))),
        ("quantiles", lambda v: (np.median(v, 0), np.quantile(v, 0.25, 0), np.quantile(v, 0.75, 0))),
        ("minmax", lambda v: (v.mean(0), v.min(0), v.max(0))),
    ],
)
def test_the_other_bands_are_those_of_numpy(browser, tmp_path, band, edges):
    values = seeds(tmp_path, lanes=6, points=12)
    with served(tmp_path) as address:
        open_page(browser, f"{address}/#band={band}")
        center, low, high = (shown(v[-1]) for v in edges(values))
        assert legend(browser)["all runs"] == f"{center} [{low}, {high}] n=6"


def test_numbers_under_the_cursor_are_exact_though_a_pixel_stands_for_many_points(browser, tmp_path):
    values = seeds(tmp_path, lanes=4, points=20_000)
    with served(tmp_path) as address:
        open_page(browser, address)
        group = data(browser)["groups"][0]
        assert group["per_bin"] > 10
        assert len(group["x"]) < 2000
        # Extremes are never lost, and what is drawn are points of the curve.
        mean = values.mean(0)
        assert [shown(min(group["center"])), shown(max(group["center"]))] == [shown(mean.min()), shown(mean.max())]
        at = np.array(group["x"], int)
        assert [shown(v) for v in group["center"]] == [shown(v) for v in mean[at]]
        assert "points per pixel" in browser.find_element("css selector", ".density").text
        plot = browser.find_element("css selector", ".u-over")
        from selenium.webdriver import ActionChains

        ActionChains(browser).move_to_element_with_offset(plot, 30, 10).perform()
        row = browser.find_element("css selector", ".legend .row[data-group]")
        point = int(float(row.get_attribute("data-x")))
        assert 0 < point < 19_999
        assert legend(browser)["all runs"].split(" ")[0] == shown(mean[point])


def test_zooming_in_shows_every_point(browser, tmp_path):
    values = seeds(tmp_path, lanes=3, points=20_000)
    with served(tmp_path) as address:
        open_page(browser, f"{address}/#from=5000&to=5040")
        group = data(browser)["groups"][0]
        assert group["x"] == list(range(4999, 5042))
        assert [shown(v) for v in group["center"]] == [shown(v) for v in values.mean(0)[4999:5042]]


def test_cursors_are_one_and_dragging_zooms_all_charts(browser, tmp_path):
    from selenium.webdriver import ActionChains

    steps = np.arange(100)
    data_of_keys = {"a": steps / 3, "b": steps / 7}
    lox.save(lox.logdict.from_arrays(data_of_keys, steps={"step": steps, "epoch": steps // 10}), tmp_path)
    with served(tmp_path) as address:
        open_page(browser, address)
        plot = browser.find_element("css selector", ".panel[data-key=a] .u-over")
        ActionChains(browser).move_to_element_with_offset(plot, 20, 10).perform()
        at = "return [...document.querySelectorAll('.legend .row[data-group]')].map(r => r.dataset.x)"
        places = browser.execute_script(at)
        assert places[0] == places[1]
        assert 50 < float(places[0]) < 99
        ActionChains(browser).click_and_hold(plot).move_by_offset(60, 0).release().perform()
        until(lambda: "from=" in browser.current_url, "the zoom")
        drawn(browser)
        ends = [(data(browser, key)["groups"][0]["x"][0], data(browser, key)["groups"][0]["x"][-1]) for key in "ab"]
        assert ends[0] == ends[1]
        assert 40 < ends[0][0] < ends[0][1] < 90
        browser.find_element("css selector", "#reset").click()
        until(lambda: data(browser, "b") and data(browser, "b")["groups"][0]["x"] == steps.tolist(), "everything")
        assert complaints(browser) == []


def test_another_step_is_the_axis(browser, tmp_path):
    steps = np.arange(20)
    lox.save(lox.logdict.from_arrays({"loss": steps / 3}, steps={"step": steps, "epoch": 5 * steps}), tmp_path)
    save(tmp_path, 1, [1.0, 2.0], key="other")
    with served(tmp_path) as address:
        open_page(browser, f"{address}/#x=epoch")
        assert data(browser)["groups"][0]["x"] == (5 * steps).tolist()
        assert browser.find_element("css selector", ".panel[data-key=loss] .where").text == "epoch 95"
        assert data(browser, "other")["x"] == "step"  # which has no epochs
        browser.execute_script(
            "const e = document.getElementById('x'); e.value = 'wall'; e.dispatchEvent(new Event('change'))"
        )
        until(lambda: data(browser) and data(browser)["x"] == "wall", "time")


def test_the_mean_of_a_group_is_the_same_whatever_else_is_shown(browser, tmp_path):
    one = seeds(tmp_path, lr=0.1)
    with served(tmp_path) as address:
        open_page(browser, address)
        alone = data(browser)["groups"][0]
        other = seeds(tmp_path, lanes=9, points=70, seed=1, first=5, lr=0.2)
        until(lambda: legend(browser).get("lr=0.2", "").endswith("n=9"), "the other group")
        both = data(browser)["groups"]
        assert [both[0][part] for part in ("x", "center", "low", "high")] == [
            alone[part] for part in ("x", "center", "low", "high")
        ]
        drawn(browser)
        numbers = legend(browser)
        assert numbers["lr=0.1"].startswith(f"{shown(one.mean(0)[-1])} ")
        assert numbers["lr=0.2"].startswith(f"{shown(other.mean(0)[-1])} ")
        browser.execute_script("document.querySelectorAll('#groups button')[1].click()")
        until(lambda: list(legend(browser)) == ["lr=0.1"], "one group")
        assert legend(browser)["lr=0.1"] == numbers["lr=0.1"]
        assert complaints(browser) == []


def test_nan_and_stopped_lanes_are_marked_and_named(browser, tmp_path):
    values = np.random.default_rng(0).normal(size=(4, 30))
    values[1, 20:] = np.nan
    for lane, row in enumerate(values):
        save(tmp_path, lane, row[: 10 if lane == 2 else 30])
    with served(tmp_path) as address:
        open_page(browser, address)
        assert legend(browser)["all runs"].endswith(" n=2")
        notes = browser.find_element("css selector", ".panel .notes").text.splitlines()
        assert notes == [
            "× 1 lane ended with NaN or infinity, left out there: 1",
            "□ 1 lane ended before the others: 2",
        ]
        group = data(browser)["groups"][0]
        places = {mark["name"]: (mark["why"], mark["x"], mark["y"]) for mark in group["marks"]}
        assert places == {"1": ("nan", 19.0, values[1, 19]), "2": ("stopped", 9.0, values[2, 9])}
        assert shown(group["center"][-1]) == shown(values[[0, 3], -1].mean())


def test_single_lanes_are_drawn_on_demand(browser, tmp_path):
    values = seeds(tmp_path, lanes=3, points=10)
    with served(tmp_path) as address:
        open_page(browser, address)
        assert "single" not in data(browser)["groups"][0]
        browser.find_element("css selector", "#lanes").click()
        single = until(lambda: (data(browser) or {"groups": [{}]})["groups"][0].get("single"), "single lanes")
        assert single["names"] == ["0", "1", "2"]
        np.testing.assert_array_equal(single["values"], values)
        assert "lanes=1" in browser.current_url


def test_smoothing_is_marked_and_treats_mean_and_band_alike(browser, tmp_path):
    values = seeds(tmp_path, lanes=5, points=50)
    with served(tmp_path) as address:
        open_page(browser, f"{address}/#smooth=0.5&band=minmax")
        assert browser.find_element("css selector", ".chip.smoothed").text == "smoothed 0.5"
        expected = []
        for curve in (values.mean(0), values.min(0), values.max(0)):
            total = norm = 0.0
            for value in curve:
                total, norm = 0.5 * total + 0.5 * value, 0.5 * norm + 0.5
            expected.append(shown(total / norm))
        assert legend(browser)["all runs"] == f"{expected[0]} [{expected[1]}, {expected[2]}] n=5"


# --- live ---


def test_new_events_and_runs_appear_by_themselves(browser, tmp_path):
    with lox.store.Writer(tmp_path) as writer, served(tmp_path) as address:
        runs = [writer.open_run(name) for name in ("a", "b")]

        def log(step: int) -> None:
            for lane, run in enumerate(runs):
                writer.append(run, lox.logdict({"loss": np.float64(step * 10 + lane)}, steps={"step": {"loss": step}}))
            writer.flush()

        log(0)
        open_page(browser, address)
        assert legend(browser)["all runs"].startswith(f"{shown(0.5)} ")
        for step in (1, 2, 3):
            log(step)
            wanted = f"{shown(step * 10 + 0.5)} "
            until(lambda wanted=wanted: legend(browser)["all runs"].startswith(wanted), "the new event")
        group = data(browser)["groups"][0]
        assert group["x"] == [0, 1, 2, 3]
        assert group["center"] == [0.5, 10.5, 20.5, 30.5]
        runs.append(writer.open_run("c"))
        log(4)
        until(lambda: legend(browser)["all runs"].endswith("n=3"), "the new run")
        assert complaints(browser) == []


def test_the_page_fetches_what_has_changed_and_nothing_else(browser, tmp_path):
    with lox.store.Writer(tmp_path) as writer, served(tmp_path) as address:
        run = writer.open_run("a")

        def log(steps: range) -> None:
            logs = lox.logdict.from_arrays({"loss": np.array(steps) / 7}, steps={"step": np.array(steps)})
            writer.append(run, logs)
            writer.flush()

        log(range(5000))
        open_page(browser, address)
        browser.execute_script(
            "window.sizes = []; const real = window.fetch; window.fetch = async (...a) => {"
            "const r = await real(...a); const c = r.clone(); c.text().then(t => { if (String(a[0]).includes('panel'))"
            "window.sizes.push([t.length, JSON.parse(t).grow]) }); return r; }"
        )
        whole = len(json.dumps(data(browser)))
        for stop in range(5010, 5060, 10):
            log(range(stop - 10, stop))
            until(lambda stop=stop: data(browser)["groups"][0]["x"][-1] == stop - 1, "the new events")
        sizes = browser.execute_script("return window.sizes")
        assert sizes
        assert all(grow and size < whole / 10 for size, grow in sizes)
        # What has grown is what a page sees that is opened now.
        before = data(browser)["groups"][0]
        open_page(browser, address)
        after = data(browser)["groups"][0]
        assert {name: before[name] for name in ("x", "center", "at")} == {
            name: after[name] for name in ("x", "center", "at")
        }


# --- names that mean harm ---

HOSTILE = [
    "<img src=x onerror=\"document.title='owned'\">",
    "</script><script>document.title='owned'</script>",
    "__proto__",
    "constructor",
    "hasOwnProperty",
    "\u202eevil\u2066",
    "a" * 5000,
    "javascript:alert(1)",
    "';\"`${document.title='owned'}",
    "../../etc/passwd",
    "toString",
    "%2e%2e/",
]


def test_hostile_names_are_text(browser, tmp_path):
    for n, name in enumerate(HOSTILE):
        logs = {name: np.float32(n), "loss": np.float32(n)}
        lox.save(logs, tmp_path, config={name: name, "nested": {name: [name, {name: name}]}, "n": n % 2})
    with lox.store.Writer(tmp_path) as writer:
        for n, name in enumerate(HOSTILE):
            run = writer.open_run(name[:200], config={"n": n})
            writer.append(run, {"loss": np.float32(n)})
    with served(tmp_path) as address:
        open_page(browser, f"{address}/#table=1&lanes=1")
        keys = browser.execute_script("return [...document.querySelectorAll('.panel')].map(p => p.dataset.key)")
        assert set(HOSTILE) | {"loss"} == set(keys)
        cells = browser.execute_script("return [...document.querySelectorAll('#runs td')].map(c => c.textContent)")
        assert {name[:200] for name in HOSTILE} <= set(cells)
        for name in HOSTILE:  # as an axis of groups, in a filter, in the address
            browser.execute_script("location.hash = '#' + new URLSearchParams({by: arguments[0], table: '1'})", name)
            browser.execute_script("document.querySelector('#keys').focus()")
        drawn(browser)
        assert browser.execute_script("return document.images.length") == 0
        assert browser.execute_script("return document.scripts.length") == 4
        assert browser.execute_script("return ({}).polluted") is None
        assert browser.title == f"{tmp_path.name} · lox"
        assert complaints(browser) == []


def test_a_script_in_the_page_would_not_run(browser, tmp_path):
    save(tmp_path, 0, [1.0])
    with served(tmp_path) as address:
        open_page(browser, address)
        browser.execute_script(
            "const s = document.createElement('div'); document.body.append(s);"
            "s.innerHTML = '<img src=x onerror=\"window.owned = 1\">';"
            "const t = document.createElement('script'); t.textContent = 'window.owned = 2'; document.body.append(t);"
        )
        until(lambda: any("Content Security Policy" in text for text in complaints(browser)), "the policy's refusal")
        assert browser.execute_script("return window.owned") is None


# --- the address ---


def test_the_state_is_in_the_address_and_the_back_button_works(browser, tmp_path):
    seeds(tmp_path, lr=0.1)
    seeds(tmp_path, seed=1, first=5, lr=0.2)
    with served(tmp_path) as address:
        open_page(browser, address)
        select = lambda name, value: browser.execute_script(  # noqa: E731
            "const e = document.getElementById(arguments[0]); e.value = arguments[1];"
            "e.dispatchEvent(new Event('change'))",
            name,
            value,
        )
        select("band", "std")
        until(lambda: data(browser) and data(browser)["band"] == "std", "another band")
        select("by", "lr")
        browser.find_element("css selector", "#logy").click()
        assert browser.current_url == f"{address}/#by=lr&band=std&logy=1"
        browser.back()
        until(lambda: browser.current_url == f"{address}/#by=lr&band=std", "one step back")
        assert not browser.find_element("css selector", "#logy").is_selected()
        browser.back()
        browser.back()
        until(lambda: data(browser) and data(browser)["band"] == "ci95", "the first band")
        assert browser.find_element("css selector", "#band").get_attribute("value") == "ci95"
        browser.forward()
        until(lambda: data(browser) and data(browser)["band"] == "std", "the second band")


def test_a_link_shows_what_it_was_copied_from(browser, tmp_path):
    values = seeds(tmp_path, lr=0.1)
    seeds(tmp_path, seed=1, first=5, lr=0.2)
    save(tmp_path, 99, [1.0, 2.0], key="other", lr=0.1)
    with served(tmp_path) as address:
        open_page(browser, f"{address}/#where=lr%3D0.1&keys=^lo&band=minmax&table=1&lanes=1&logx=1")
        assert [*legend(browser)] == ["all runs"]
        center, low, high = (shown(v[-1]) for v in (values.mean(0), values.min(0), values.max(0)))
        assert legend(browser)["all runs"] == f"{center} [{low}, {high}] n=5"
        assert len(browser.find_elements("css selector", ".panel")) == 1
        assert browser.find_element("css selector", "#count").text == "6 of 11 runs"
        for name in ("lanes", "logx"):
            assert browser.find_element("css selector", f"#{name}").is_selected()


def test_a_broken_filter_says_why(browser, tmp_path):
    save(tmp_path, 0, [1.0], lr=0.1)
    with served(tmp_path) as address:
        browser.get("about:blank")
        browser.get(f"{address}/#where=lr%3Efast")
        problem = "'lr>fast' compares with 'fast', which is not a number."
        until(lambda: browser.find_element("css selector", "#filter-problem").text == problem, problem)


# --- other kinds ---


def test_keyboard_dark_mode_and_help(browser, tmp_path):
    seeds(tmp_path)
    with served(tmp_path) as address:
        open_page(browser, address)
        body = browser.find_element("css selector", "body")
        light = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
        body.send_keys("d")
        assert browser.execute_script("return getComputedStyle(document.body).backgroundColor") != light
        assert colours(browser)["#56a8e8"] > 100  # the mean, lighter
        body.send_keys("d")
        body.send_keys("l")
        until(lambda: "lanes=1" in browser.current_url, "single lanes")
        body.send_keys("?")
        assert "logarithmic y" in browser.find_element("css selector", "#keyboard").text
        browser.find_element("css selector", "#keyboard button").click()


def test_histograms_and_pictures(browser, tmp_path):
    for seed in range(2):
        for step in range(6):
            normal = np.random.default_rng(step).normal(size=500)
            logs = {
                "weights": lox.Histogram(normal, bins=20, range=(-3.0, 3.0)),
                "sample": lox.Image(np.full((4, 6, 3), 40 * step, np.uint8)),
            }
            steps = {"step": {"weights": step, "sample": step}}
            lox.save(lox.logdict(logs, steps=steps), tmp_path, jax.random.key(seed))
    with served(tmp_path) as address:
        open_page(browser, address)
        until(lambda: browser.find_elements("css selector", "canvas.heat"), "the heat map")
        assert "6 columns over step, 2 lanes added up" in browser.find_element("css selector", ".panel .notes").text
        assert len(colours(browser, "weights")) > 10
        image = until(lambda: browser.find_elements("css selector", ".picture img"), "the picture")[0]
        until(lambda: browser.execute_script("return arguments[0].naturalWidth", image) == 6, "its pixels")
        assert complaints(browser) == []


def test_groups_are_compared(browser, tmp_path):
    seeds(tmp_path, lr=0.1)
    seeds(tmp_path, seed=1, first=5, lr=0.2)
    with served(tmp_path) as address:
        open_page(browser, address)
        browser.find_element("css selector", "button[aria-label='compare groups']").click()
        until(lambda: browser.find_elements("css selector", "#comparison tbody tr"), "the comparison")
        text = browser.find_element("css selector", "#comparison").text
        assert "lr=0.1" in text
        assert "P(better)" in text
        assert browser.find_element("css selector", "#better").get_attribute("value") == "lower"
        assert complaints(browser) == []


# --- one file ---


def test_a_page_of_its_own_shows_the_same_chart(browser, tmp_path):
    values = seeds(tmp_path / "runs", lanes=5, points=30)
    title = "</title><script>document.title='owned'</script>"
    lox.plot(tmp_path / "runs", lanes=True, band="minmax", title=title).save(tmp_path / "plot.html")
    browser.get("about:blank")
    complaints(browser)
    browser.get((tmp_path / "plot.html").as_uri())
    until(lambda: browser.find_elements("css selector", ".legend .row[data-group] b"), "the chart")
    center, low, high = (shown(v[-1]) for v in (values.mean(0), values.min(0), values.max(0)))
    text = browser.find_element("css selector", ".legend .values").text
    assert text == f"{center} [{low}, {high}] n=5"
    assert browser.title == title
    assert complaints(browser) == []
