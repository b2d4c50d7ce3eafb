"""The dashboard against `lox.load`: whatever happens in a directory, what a page has is what was logged.

A page asks for what has changed since its last answer, and puts it behind what it has. Random things happen in a
directory meanwhile. `LOX_LIVE_N=N` tries N seeds, and `LOX_LIVE_SEED=M` begins with another one.
"""

import dataclasses
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import lox
from lox.store._reader import runs_in
from lox.view import _bands, _panels, _pixels
from lox.view._curves import EVENT, STEP, WALL, curves
from lox.view._live import Live
from lox.view._panels import Options

SEEDS = int(os.environ.get("LOX_LIVE_N", "12"))
FIRST = int(os.environ.get("LOX_LIVE_SEED", "0"))
FOUND = (1773, 6240, 6641)  # attempts that are removed, and runs that get another name then
ARRAYS = ("x", "center", "low", "high", "low_there", "high_there", "at")
VALUES = (np.float32, np.int32, np.uint8, np.bool_, jnp.bfloat16)


def grown(old: dict[str, Any], news: dict[str, Any]) -> dict[str, Any]:
    """Do what `grown` in chart.js does: put what has changed behind what is known, in place of what it replaces."""
    if not news.get("grow"):
        return news
    groups = []
    for before, group in zip(old["groups"], news["groups"], strict=True):
        if group["same"]:
            groups.append({**group, **{n: before[n] for n in (*ARRAYS, "single", "per_bin") if n in before}})
            continue
        cut = int(np.searchsorted(before["x"], group["from"]))
        merged = {**group, "per_bin": max(before["per_bin"], group["per_bin"])}
        for name in ARRAYS:
            fallback = {"low_there": "low", "high_there": "high"}.get(name, name)
            if name in before or name in group:
                merged[name] = before.get(name, before.get(fallback))[:cut] + group.get(name, group.get(fallback))
        if "single" in group:
            start = int(np.searchsorted(before["single"]["x"], group["from"]))
            one, other = before["single"], group["single"]
            merged["single"] = {
                **other,
                "per_bin": max(one["per_bin"], other["per_bin"]),
                "x": one["x"][:start] + other["x"],
                "values": [a[:start] + b for a, b in zip(one["values"], other["values"], strict=True)],
            }
        groups.append(merged)
    return {**news, "groups": groups}


class Page:
    """A chart in a browser: what it asks for, and what it has got."""

    def __init__(self, key: str, by: list[str] | None, where: str, options: Options):
        self.key, self.by, self.where, self.options = key, by, where, options
        self.data: dict[str, Any] = {}
        self.groups: list[Any] = []

    def ask(self, live: Live) -> None:
        groups = live.groups(self.by, self.where)
        if groups != self.groups:  # then the page begins anew
            self.data, self.groups = {}, groups
        asked = dataclasses.replace(self.options, since=self.data.get("token", ""))
        try:
            news = _panels.panel(live, self.key, groups, asked)
        except lox.KeyNotFoundError:
            self.data = {}
            return
        self.data = grown(self.data, news) if self.data else news

    def check(self, live: Live, fresh: Live) -> None:
        """What the page has is what a server that is started now says."""
        self.ask(live)
        groups = fresh.groups(self.by, self.where)
        assert groups == self.groups
        try:
            expected = _panels.panel(fresh, self.key, groups, self.options)
        except lox.KeyNotFoundError:
            assert not self.data
            return
        if self.data["name"] != expected["name"]:  # the first that there was, which stays chosen
            expected = _panels.panel(fresh, self.key, groups, dataclasses.replace(self.options, name=self.data["name"]))
        for name in ("names", "x", "steps", "kind", "name"):
            assert sorted(map(str, self.data[name])) == sorted(map(str, expected[name])), name
        if expected["kind"] != "number":
            return
        assert len(self.data["groups"]) == len(expected["groups"])
        for mine, theirs in zip(self.data["groups"], expected["groups"], strict=True):
            same = ("name", "color", "lanes", "n", "lost", "method", "points", "marks", "marked", "replaced")
            for name in same:
                assert str(mine.get(name)) == str(theirs.get(name)), name
            if self.options.range and theirs["x"]:  # the point before the part that is shown may be an older one
                mine = _from(mine, theirs["x"][0], ARRAYS)
                if "single" in mine and theirs["single"]["x"]:
                    first = theirs["single"]["x"][0]
                    cut = int(np.searchsorted(mine["single"]["x"], first))
                    values = [v[cut:] for v in mine["single"]["values"]]
                    mine["single"] = {**mine["single"], "x": mine["single"]["x"][cut:], "values": values}
            for name in ARRAYS:
                _same(mine.get(name, mine.get(name[:-6])), theirs.get(name, theirs.get(name[:-6])), name)
            if "single" in theirs:
                assert mine["single"]["names"] == theirs["single"]["names"]
                _same(mine["single"]["x"], theirs["single"]["x"], "x of lanes")
                _same(mine["single"]["values"], theirs["single"]["values"], "lanes")


def _from(group: dict[str, Any], first: float, names: tuple[str, ...]) -> dict[str, Any]:
    cut = int(np.searchsorted(group["x"], first))
    return {**group, **{name: group[name][cut:] for name in names if name in group}}


def _same(a: Any, b: Any, name: str) -> None:
    np.testing.assert_allclose(np.array(a, float), np.array(b, float), rtol=1e-9, atol=1e-12, err_msg=name)


def check_curves(fresh: Live, path: Path, key: str) -> None:
    """What a server that is started now has is what `lox.load` gives, and its bands are those of `lox.plot`."""
    try:
        read = fresh.tracks(key)
    except lox.KeyNotFoundError:
        return
    runs = runs_in(path)
    for step in (None, EVENT, "episode"):
        for group in fresh.groups(None, ""):
            for track in read.tracks.values():
                at = step or track.default_step()
                if track.kind != "number" or at not in (*track.steps(), EVENT):
                    continue
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", lox.LoxWarning)
                    try:
                        found = [c for c in curves(runs.only(key, names=group.runs), x=at) if c.name == track.name]
                    except lox.StepError:
                        found = []
                view = fresh.view(track, group.runs, at)
                if key == "xs" and len(group.runs) > 1:
                    continue  # `lox.load` may name arrays of several shapes differently, if other runs have others
                if not found:
                    assert not view.points
                    continue
                mine, theirs = view.curve(), found[0]
                np.testing.assert_array_equal(mine.x, theirs.x)
                np.testing.assert_array_equal(mine.there, theirs.there)
                np.testing.assert_array_equal(mine.values, theirs.values)
                for kind in ("ci95", "minmax"):
                    one, other = view.band(kind), _bands.band(theirs, kind)
                    for field in ("center", "low", "high", "n", "lost"):
                        np.testing.assert_array_equal(getattr(one, field), getattr(other, field))


class World:
    """A directory in which something happens."""

    def __init__(self, path: Path, rng: np.random.Generator):
        self.path, self.rng = path, rng
        self.writers: list[tuple[lox.store.Writer, list[int]]] = []
        self.next: dict[Any, int] = {}
        self.key = 0

    def happen(self) -> str:
        names = ("begin", "log", "log", "log", "log", "flush", "flush", "close", "resume", "save", "compact", "remove")
        what = str(self.rng.choice(names))
        getattr(self, what)()
        return what

    def begin(self, **options: Any) -> None:
        if len(self.writers) < 4:
            count = int(self.rng.integers(1, 4))
            data = [[0, 100 + self.key + n] for n in range(count)]
            if options:
                known = sorted({run.key_data for run in lox.runs(self.path)}) if self.path.exists() else []
                if not known:
                    return
                data = [known[self.rng.integers(len(known))]]
            self.key += count
            configs = [{"lr": float(self.rng.choice([0.1, 0.2])), "seed": n} for n in range(count)]
            if self.rng.random() < 0.5:
                configs = [{**configs[0], "seed": n} for n in range(count)]
            configs = configs[:1] if options else configs
            writer = lox.store.Writer(self.path)
            runs = writer.open_runs(None, data, "fry", configs, **options)
            self.writers.append((writer, list(map(int, runs))))

    def resume(self) -> None:
        if self.key:
            self.begin(mode="append", resumed=[("step", int(self.rng.integers(0, 12)))])

    def log(self) -> None:
        rng = self.rng
        if not self.writers:
            return
        writer, runs = self.writers[rng.integers(len(self.writers))]
        key, events = str(rng.choice(["loss", "late", "xs"], p=[0.7, 0.15, 0.15])), int(rng.integers(1, 9))
        dtype = VALUES[rng.integers(len(VALUES))] if rng.random() < 0.2 else np.float32
        shape = (int(rng.choice([2, 2, 3])),) if key == "xs" else ()
        together = len(runs) > 1 and rng.random() < 0.7
        lanes = len(runs) if together else 1
        values = (rng.normal(size=(lanes, events, *shape)) * 10).astype(dtype)
        if values.dtype.kind == "f":
            values[rng.random(values.shape) < 0.05] = rng.choice([np.nan, np.inf, -np.inf])
        run: Any = np.array(runs) if together else int(rng.choice(runs))
        place = writer, str(run), key
        jumps = rng.choice([0, 1, 1, 1, 1, 2, -3], size=events, p=[0.04, 0.2, 0.2, 0.2, 0.3, 0.03, 0.03])
        at = np.maximum(0, self.next.get(place, 0) + np.cumsum(jumps))  # -1 would stand for no step
        self.next[place] = int(at[-1])
        steps: dict[str, Any] = {}
        if key != "late":  # an event without any step, of a key that has some, cannot be told from one at -1
            steps["step"] = at.astype(np.float32 if rng.random() < 0.05 else np.int32)
        if rng.random() < 0.3 and key != "late":
            steps["episode"] = at // 3
        if together:
            valid = rng.random((events, lanes)) < 0.8 if rng.random() < 0.5 else None
            logs = lox.logdict.from_arrays({key: values.swapaxes(0, 1)}, steps=steps, lanes=1, valid=valid)
        else:
            logs = lox.logdict.from_arrays({key: values[0]}, steps=steps)
        writer.append(run, logs)

    def flush(self) -> None:
        for writer, _ in self.writers:
            writer.flush()

    def close(self) -> None:
        if self.writers:
            self.writers.pop(int(self.rng.integers(len(self.writers))))[0].close()

    def save(self) -> None:
        mode = str(self.rng.choice(["new", "append", "overwrite"]))
        first = int(self.rng.integers(0, 10))
        values = self.rng.normal(size=int(self.rng.integers(1, 6))).astype(np.float32)
        logs = lox.logdict.from_arrays({"loss": values}, steps={"step": first + np.arange(len(values))})
        with lox.store.Writer(self.path) as writer:
            run = writer.open_run(None, [0, int(self.rng.integers(8))], "fry", {"lr": 0.1, "seed": 0}, mode)
            writer.append(run, logs)

    def compact(self) -> None:
        lox.store.compact(self.path)

    def remove(self) -> None:
        """Remove what a writer has left, if no later attempt goes on with its runs."""
        open_ = {writer.group.name for writer, _ in self.writers}
        groups = sorted(p for p in self.path.glob("*/") if p.name not in open_)
        if groups and self.rng.random() < 0.3:
            shutil.rmtree(groups[self.rng.integers(len(groups))])

    def end(self) -> None:
        while self.writers:
            self.close()


def random_page(rng: np.random.Generator) -> Page:
    options = Options(
        name=str(rng.choice(["xs/0", "xs@2/1"])) if rng.random() < 0.2 else None,
        x=str(rng.choice([STEP, EVENT, "episode", WALL])) if rng.random() < 0.5 else None,
        band=str(rng.choice(["ci95", "std", "quantiles", "minmax", "none"])),
        smooth=float(rng.choice([0.0, 0.0, 0.6])),
        bins=int(rng.choice([4, 16, 1000])),
        range=(2.0, 9.0) if rng.random() < 0.2 else None,
        log=bool(rng.random() < 0.2),
        lanes=bool(rng.random() < 0.4),
    )
    key = str(rng.choice(["loss", "late", "xs"], p=[0.6, 0.15, 0.25]))
    return Page(key, ["lr"] if rng.random() < 0.3 else None, "lr=0.1" if rng.random() < 0.2 else "", options)


@pytest.mark.sample(2)
@pytest.mark.slow
@pytest.mark.parametrize("seed", [*FOUND, *range(FIRST, FIRST + SEEDS)])
def test_a_page_has_what_was_logged_whatever_happens(tmp_path: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    world, live = World(tmp_path, rng), Live(tmp_path)
    pages = [random_page(rng) for _ in range(4)]
    done = []
    try:
        for _ in range(40):
            done.append(world.happen())
            if rng.random() < 0.5:
                done.append("look")
                live.refresh()
                pages[rng.integers(len(pages))].ask(live)
            if rng.random() < 0.1:
                done.append("check")
                _check(world, live, pages)
        world.end()
        done.append("end")
        _check(world, live, pages)
    except BaseException as error:
        error.add_note(f"after {done}")
        raise
    finally:
        for writer, _ in world.writers:
            writer.close()


def _check(world: World, live: Live, pages: list[Page]) -> None:
    path = world.path
    world.flush()  # as `lox.load` does
    live.refresh()
    fresh = Live(path)
    fresh.refresh()
    for page in pages:
        page.check(live, fresh)
    if fresh.infos:
        for key in ("loss", "late", "xs"):
            check_curves(fresh, path, key)


# --- what was found so ---


def one(writer: lox.store.Writer, run: int, value: float, step: int) -> None:
    writer.append(run, lox.logdict({"loss": np.float32(value)}, steps={"step": {"loss": step}}))
    writer.flush()


def test_a_second_lane_at_the_only_point_is_sent(tmp_path: Path) -> None:
    with lox.store.Writer(tmp_path) as writer:
        a, b = map(int, writer.open_runs(["a", "b"]))
        live, page = Live(tmp_path), Page("loss", None, "", Options())
        for run, mean in [(a, 1.0), (b, 2.0)]:
            one(writer, run, 1.0 + 2 * (run == b), step=7)
            live.refresh()
            page.ask(live)
            assert page.data["groups"][0]["center"] == [mean]


def test_a_chart_in_which_nothing_is_chosen_is_empty_and_fills(tmp_path: Path) -> None:
    with lox.store.Writer(tmp_path) as writer:
        run = writer.open_run("a", config={"lr": 0.1})
        one(writer, run, 1.0, 0)
        live = Live(tmp_path)
        page = Page("loss", None, "lr=5", Options())
        for _ in range(3):
            live.refresh()
            page.ask(live)
            assert page.data["groups"] == []


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("steps", [[0], [-3, 0], [5], [-1e308, 1e308], [0.0, np.inf]])
def test_axes_with_no_room(tmp_path: Path, steps: list[float], log: bool) -> None:
    values = np.arange(len(steps), dtype=np.float32)
    lox.save(lox.logdict.from_arrays({"loss": values}, steps={"step": np.array(steps)}), tmp_path)
    live = Live(tmp_path)
    live.refresh()
    found = _panels.panel(live, "loss", live.groups(None, ""), Options(log=log, lanes=True))
    expected = [x for x in steps if np.isfinite(x) and (x > 0 or not log)]
    assert [x for group in found["groups"] for x in group["x"]] == expected


def test_arrays_whose_shape_changes_are_named_as_if_they_were_read_at_once(tmp_path: Path) -> None:
    with lox.store.Writer(tmp_path) as writer:
        run, live = writer.open_run("a"), Live(tmp_path)
        for size in (2, 3, 2):
            writer.append(run, lox.logdict({"xs": np.ones(size, np.float32)}))
            writer.flush()
            live.refresh()
            live.tracks("xs")
        tracks = {name: track.lanes["a"].size for name, track in live.tracks("xs").tracks.items()}
    assert tracks == {"xs@2/0": 2, "xs@2/1": 2, "xs@3/0": 1, "xs@3/1": 1, "xs@3/2": 1}


def test_attempts_that_are_removed_take_only_their_own_events_along(tmp_path: Path) -> None:
    groups = []
    for value in (1.0, 2.0):
        with lox.store.Writer(tmp_path) as writer:
            one(writer, writer.open_run("a", mode="append"), value, int(value))
            groups.append(writer.group)
    live, page = Live(tmp_path), Page("loss", None, "", Options())
    live.refresh()
    page.ask(live)
    assert page.data["groups"][0]["center"] == [1.0, 2.0]
    shutil.rmtree(groups[0])
    live.refresh()
    page.ask(live)
    assert page.data["groups"][0]["center"] == [2.0]


def test_what_replaces_as_many_events_is_announced(tmp_path: Path) -> None:
    logs = lox.logdict.from_arrays({"loss": np.ones(3, np.float32)})
    with lox.store.Writer(tmp_path) as writer:
        writer.append(writer.open_run("a"), logs)
    live = Live(tmp_path)
    before = live.refresh()["keys"]
    assert live.refresh()["keys"] == before
    with lox.store.Writer(tmp_path) as writer:
        writer.append(writer.open_run("a", mode="overwrite"), logs)
    assert live.refresh()["keys"]["loss"] != before["loss"]


def test_infinities_hide_no_extreme_of_a_lane() -> None:
    values = np.array([[1, np.inf, 5, 2, 3, -np.inf, 4, 0.0]])
    assert _pixels.reduced_lanes(np.arange(8.0), values, _pixels.Grid(3))[1].tolist() == [[5.0, 0.0]]


def test_another_attempt_instead_of_a_removed_one_has_its_own_config(tmp_path: Path) -> None:
    with lox.store.Writer(tmp_path) as writer:
        one(writer, writer.open_run("a", config={"lr": 0.1}), 1.0, 0)
    live = Live(tmp_path)
    for lr in (0.2, 0.3):
        with lox.store.Writer(tmp_path) as writer:
            run = int(writer.open_runs(["a"], configs=[{"lr": lr}], resumed=[("step", 1)])[0])
            one(writer, run, lr, 1)
        live.refresh()
        assert live.infos["a"].run.config == {"lr": lr} and live.infos["a"].run.attempts == 2
        (curve,) = _panels.panel(live, "loss", live.groups(None, ""), Options())["groups"]
        assert curve["center"] == [1.0, float(np.float32(lr))]
        shutil.rmtree(writer.group)


def test_one_run_instead_of_another_is_not_one_more_in_the_table(tmp_path: Path) -> None:
    live = Live(tmp_path)
    seen = []
    for name in ("a", "b"):
        with lox.store.Writer(tmp_path) as writer:
            one(writer, writer.open_run(name), 1.0, 0)
        live.refresh()
        seen.append((list(live.infos), live.removals))
        shutil.rmtree(writer.group)
    assert seen == [(["a"], 0), (["b"], 1)]
