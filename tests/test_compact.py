"""`compact` changes the files and nothing else, whatever happens meanwhile."""

import builtins
import contextlib
import errno
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from pathlib import Path

import jax
import numpy as np
import pytest
from compact_cases import abandon, everything, exact_logs, random_store, simple, some_group
from optional import pyarrow

import lox
from lox.store import Reader, Writer, _compact, _group, _merged

pytestmark = pytest.mark.nightly
KILLS = int(os.environ.get("LOX_KILLS", "10"))
SEEDS = int(os.environ.get("LOX_COMPACT_N", "6"))


def groups(path):
    return sorted(p for p in path.iterdir() if _group.GROUP_ID.fullmatch(p.name))


@pytest.fixture
def small(monkeypatch):
    """Small batches and segments, so that few rows need several."""
    monkeypatch.setattr(_merged, "_BATCH_BYTES", 300)
    monkeypatch.setattr(_merged, "_SEGMENT_BYTES", 3000)


# --- nothing changes ---


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(SEEDS))
def test_random_stores(tmp_path, seed):
    rng = np.random.default_rng(seed)
    random_store(tmp_path, rng, 8)
    before = everything(tmp_path)
    done = lox.store.compact(tmp_path)
    assert everything(tmp_path) == before
    assert done["groups"][1] == len(groups(tmp_path)) == 1
    random_store(tmp_path, rng, 3)  # and again, with the merged group among the old ones
    before = everything(tmp_path)
    assert lox.store.compact(tmp_path)["groups"][1] == 1
    assert everything(tmp_path) == before
    assert lox.store.repair(tmp_path) == {}
    assert lox.store.compact(tmp_path)["groups"] == (1, 1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(SEEDS))
def test_random_stores_in_small_pieces(tmp_path, small, seed):
    rng = np.random.default_rng(100 + seed)
    random_store(tmp_path, rng, 6)
    living = some_group(tmp_path, rng, [[0, n] for n in range(5)], living=True)
    before = everything(tmp_path)
    lox.store.compact(tmp_path)
    assert everything(tmp_path) == before
    assert len(groups(tmp_path)) == 2 and living.group.exists()
    living.close()
    before = everything(tmp_path)
    lox.store.compact(tmp_path)
    assert everything(tmp_path) == before and len(groups(tmp_path)) == 1


@pytest.mark.slow
def test_lanes_of_a_training(tmp_path):
    def train(key):
        def body(carry, i):
            x = jax.random.normal(jax.random.fold_in(key, i))
            lox.log({"x": x, "key": jax.random.fold_in(key, i)}, step=i)
            lox.log({"sometimes": x}, where=x > 0)
            return carry, None

        return jax.lax.scan(body, 0, np.arange(4))[0]

    for seed in range(3):
        keys = jax.random.split(jax.random.key(seed), 5)
        with lox.SaveLogger(tmp_path) as logger:
            states = jax.vmap(lambda key: logger.init(key, {"lr": 0.1}))(keys)
            jax.vmap(lambda state, key: logger.tap(train, state)(key))(states, keys)
    before = everything(tmp_path)
    lox.store.compact(tmp_path)
    assert everything(tmp_path) == before
    (segment, *_) = sorted(tmp_path.glob("*/*.arrows"))
    assert pyarrow.ipc.open_stream(segment).read_all().schema.metadata[b"runs"] == b"5"  # rows are still of all lanes


def test_keys_without_events_and_their_order(tmp_path):
    for n in range(4):
        with Writer(tmp_path) as writer:
            run = writer.open_run(f"r{n}")
            for key in "abc" if n % 2 else "cba":
                writer.append(run, {key: np.float32(n)})
            writer.append(run, lox.logdict.from_arrays({f"empty{n % 2}": np.zeros(0, np.float32)}))
    before = everything(tmp_path)
    lox.store.compact(tmp_path)
    assert everything(tmp_path) == before
    assert [list(logs) for logs in lox.load(tmp_path).values()] == [
        ["c", "b", "a", "empty0"],
        ["a", "b", "c", "empty1"],
    ] * 2
    with pytest.warns(lox.LoxWarning, match="empty1"):
        lox.load(tmp_path, "r0", argnames="empty1")


def test_overwritten_runs_are_dropped(tmp_path):
    with Writer(tmp_path) as writer:
        runs = writer.open_runs([f"{n}" for n in range(4)])
        writer.append(runs, lox.logdict.from_arrays({"x": np.arange(4.0)[None]}, lanes=1))
        for run in runs:
            writer.append(run, {"y": np.arange(1000.0) + run})
    with Writer(tmp_path) as writer:
        for name in ("1", "3"):
            writer.append(writer.open_run(name, mode="overwrite"), {"y": np.float64(7)})
    before = everything(tmp_path)
    done = lox.store.compact(tmp_path)
    assert everything(tmp_path) == before
    assert done["bytes"][1] < done["bytes"][0] - 2 * 8000
    (group,) = groups(tmp_path)
    assert len(_lines(group)) == 1 + 4  # what it replaces, and the runs


def _lines(group):
    return [json.loads(line) for line in (group / "runs.jsonl").read_text().splitlines()]


def test_names_that_depend_on_overwritten_runs(tmp_path, monkeypatch):
    """Two processes chose a name at the same moment; the first run was overwritten, but the second keeps its number."""
    first, second = Writer(tmp_path), Writer(tmp_path)
    first.open_run("a", key_data=[0, 1])
    with monkeypatch.context() as patched:
        patched.setattr(second._catalog, "refresh", lambda: None)  # it does not see the other
        second.open_run("a", key_data=[0, 2])
    for n, writer in enumerate((first, second)):
        writer.append(0, {"x": np.float64(n)})
        writer.close()
    assert [run.name for run in lox.runs(tmp_path)] == ["a", "a.1"]
    with monkeypatch.context() as patched, Writer(tmp_path) as writer:
        patched.setattr(_group.Group, "delete", lambda self: None)
        writer.append(writer.open_run("b", key_data=[0, 1], mode="overwrite"), {"x": np.float64(3)})
    before = everything(tmp_path)
    assert [run.name for run in lox.runs(tmp_path)] == ["a.1", "b"]
    lox.store.compact(tmp_path)
    assert everything(tmp_path) == before and len(groups(tmp_path)) == 1


def test_how_runs_ended(tmp_path):
    simple(tmp_path, 1)
    with Writer(tmp_path) as writer:
        failed, _ = writer.open_runs(["failed", "finished"])
        writer.end_runs([failed], "ValueError: boom")
    writer = Writer(tmp_path)
    _, ended = writer.open_runs(["killed", "ended"])
    writer.end_runs([ended])
    abandon(writer)
    expected = {"r0": "finished", "failed": "failed", "finished": "finished", "killed": "killed", "ended": "finished"}
    for _ in range(3):
        assert {run.name: run.state for run in lox.runs(tmp_path)} == expected
        lox.store.compact(tmp_path, min_groups=1)
        assert len(groups(tmp_path)) == 1


def test_resumed_runs(tmp_path):
    def attempt(first, last, resumed=None, noise=0.0):
        with Writer(tmp_path) as writer:
            how = {"mode": "new"} if resumed is None else {"resumed": [("step", resumed)]}
            (run,) = writer.open_runs(key_data=[[0, 7]], **how)
            for i in range(first, last):
                writer.append(run, lox.logdict({"x": np.float32(i + noise)}, steps={"step": {"x": np.int32(i)}}))
                writer.append(run, {"note": np.float32(i)})

    attempt(0, 6)
    attempt(3, 8, resumed=3)
    lox.store.compact(tmp_path)
    attempt(5, 9, resumed=5, noise=0.5)
    before = everything(tmp_path)
    assert [run.resumed for run in lox.runs(tmp_path)] == ["differs from step=5 on ('x')"]
    lox.store.compact(tmp_path)
    assert everything(tmp_path) == before
    assert lox.load(tmp_path).step["x"].tolist() == list(range(9))


def test_format_1(tmp_path):
    path = tmp_path / "old"
    shutil.copytree(Path(__file__).parent / "data" / "format1", path)
    before = everything(path)
    lox.store.compact(path)
    assert everything(path) == before
    (group,) = groups(path)
    assert json.loads((group / "meta.json").read_text())["format"] == "lox-arrow/2"
    assert _lines(group)[0]["meta"]["format"] == "lox-arrow/1"


def test_what_was_known_of_the_groups_is_kept(tmp_path):
    for n in range(3):
        with Writer(tmp_path, config={"batch": n // 2}, process=n) as writer:
            writer.open_run(f"r{n}")
    for _ in range(2):
        old = [group.name for group in groups(tmp_path)]
        lox.store.compact(tmp_path, min_groups=1)
        (group,) = groups(tmp_path)
        lines = [line for line in _lines(group) if "replaces" in line]
        assert _lines(group)[: len(lines)] == lines
        assert {source["group"] for line in lines for source in line["replaces"]} >= set(old)
        metas = [line["meta"] for line in lines]
        assert [(m["process"], m["config"]) for m in metas if m["config"]] == [(n, {"batch": n // 2}) for n in range(3)]
        assert all(meta["versions"]["lox"] == lox.__version__ and meta["host"] for meta in metas)


def test_other_tools(tmp_path, small):
    simple(tmp_path, 20, 10)
    lox.store.compact(tmp_path)
    tables = [pyarrow.ipc.open_stream(file).read_all() for file in sorted(tmp_path.glob("*/*.arrows"))]
    assert len(tables) > 1
    for table in tables:
        table.validate(full=True)
    assert [x for table in tables for x in table["x"].to_pylist()] == [
        100.0 * n + i for n in range(20) for i in range(10)
    ]
    assert [x for table in tables for x in table["run"].to_pylist()] == [n for n in range(20) for _ in range(10)]


def test_batches_and_segments(tmp_path, monkeypatch):
    """Rows of many groups make large batches, sorted by run; large ones are cut."""
    monkeypatch.setattr(_merged, "_BATCH_BYTES", 10_000)
    simple(tmp_path, 30, 5)
    with Writer(tmp_path) as writer:
        run = writer.open_run("long")
        writer.append(run, lox.logdict.from_arrays({"x": np.arange(3000.0)}, steps={"step": np.arange(3000)}))
    lox.store.compact(tmp_path)
    (segment,) = tmp_path.glob("*/*.arrows")
    batches = list(pyarrow.ipc.open_stream(segment))
    assert all(b.num_rows * 28 <= 10_000 + 28 * 357 for b in batches)
    assert sum(b.num_rows for b in batches) == 3150
    assert len(batches) < 15
    for batch in batches:
        runs = batch["run"].to_pylist()
        assert runs == sorted(runs)


@pytest.mark.slow
def test_large_groups_are_left_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(_compact, "_GROUP_BYTES", 100_000)
    simple(tmp_path, 3)
    with Writer(tmp_path) as writer:
        writer.append(writer.open_run("large"), {"x": np.zeros(10_000)})
    simple(tmp_path / "many", 100)
    before = [everything(path) for path in (tmp_path, tmp_path / "many")]
    assert lox.store.compact(tmp_path)["groups"] == (4, 2)
    assert writer.group.exists()
    done = lox.store.compact(tmp_path / "many")  # several new groups, none of which is merged again
    assert 2 < done["groups"][1] < 20
    assert [everything(path) for path in (tmp_path, tmp_path / "many")] == before


def test_few_groups_are_left_alone(tmp_path):
    simple(tmp_path, 4)
    assert lox.store.compact(tmp_path, min_groups=5)["files"] == (12, 12)
    assert lox.store.compact(tmp_path, min_groups=4)["files"] == (12, 3)
    assert lox.store.compact(tmp_path)["files"] == (3, 3)
    with pytest.raises(lox.OptionError, match="`min_groups` is 0; it must be at least 1"):
        lox.store.compact(tmp_path, min_groups=0)
    with pytest.raises(lox.RunNotFoundError, match="there is no directory"):
        lox.store.compact(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    assert lox.store.compact(tmp_path / "empty") == {"groups": (0, 0), "files": (0, 0), "bytes": (0, 0)}


def test_only_dead_groups(tmp_path, monkeypatch):
    with monkeypatch.context() as patched, Writer(tmp_path) as writer:
        patched.setattr(_group.Group, "delete", lambda self: None)
        simple(tmp_path, 3)
        for n in range(3):
            writer.append(writer.open_run(f"r{n}", mode="overwrite"), {"x": np.float64(n)})
        before = everything(tmp_path)
        patched.undo()
        assert lox.store.compact(tmp_path)["groups"] == (4, 1)
        assert everything(tmp_path) == before


# --- what is not lox's to touch ---


def test_living_writers_are_left_alone(tmp_path):
    simple(tmp_path, 2)
    with Writer(tmp_path) as writer:
        run = writer.open_run("living")
        writer.append(run, {"x": np.float64(1)})
        assert lox.store.compact(tmp_path)["groups"] == (3, 2)
        writer.append(run, {"x": np.float64(2)})
        assert lox.load(tmp_path, "living")["x"].tolist() == [1, 2]
        with Writer(tmp_path) as other:
            other.append(other.open_run("r0", mode="append"), {"x": np.float64(9)})
        assert lox.load(tmp_path, "r0")["x"].tolist() == [0, 1, 2, 9]


@pytest.mark.parametrize("force", [False, True])
def test_writers_on_other_machines(tmp_path, force):
    """Nobody can tell whether they are alive; what has been closed is closed."""
    simple(tmp_path, 2)
    writer = Writer(tmp_path)
    writer.append(writer.open_run("far away"), {"x": np.float64(1)})
    abandon(writer)
    meta = _group.Group(writer.group).meta()
    _group._replace_meta(writer.group, {**meta, "host": "elsewhere"})
    for file in writer.group.iterdir():
        os.utime(file, (0, 0))
    before = everything(tmp_path)
    lox.store.compact(tmp_path, force=force)
    assert writer.group.exists() != force
    assert everything(tmp_path) == before


def test_a_writer_that_was_just_writing(tmp_path):
    """It may be alive in a container, where its process cannot be seen."""
    simple(tmp_path, 2)
    writer = Writer(tmp_path)
    writer.append(writer.open_run("killed"), {"x": np.float64(1)})
    abandon(writer)
    os.utime(writer.group / "p0000-000.arrows")
    assert lox.store.compact(tmp_path)["groups"] == (3, 2) and writer.group.exists()
    assert lox.store.compact(tmp_path, force=True)["groups"] == (2, 1)


def test_links_and_files_of_others(tmp_path):
    path = tmp_path / "runs"
    simple(path, 3)
    simple(tmp_path / "elsewhere", 1)
    (linked,) = groups(tmp_path / "elsewhere")
    (path / linked.name).symlink_to(linked)
    first, second, _ = groups(path)[:3]
    (first / "plot.png").write_text("mine")
    (path / "notes.txt").write_text("mine")
    (path / ".compact-mine").mkdir()
    (path / ".compact-0123abcd").mkdir()
    (path / ".compact-0123abcd" / "notes.txt").write_text("mine")
    before = everything(path)
    lox.store.compact(path)
    assert everything(path) == before
    assert [file.name for file in first.iterdir()] == ["plot.png"] and not second.exists()
    assert (path / ".compact-0123abcd" / "notes.txt").exists() and (path / ".compact-mine").exists()
    assert len(list(linked.iterdir())) == 3 and (path / "notes.txt").exists()


def test_damaged_groups_are_left_alone(tmp_path):
    simple(tmp_path, 7)
    values, torn, lines, short, lost, good, better = groups(tmp_path)
    flip(values / "p0000-000.arrows", -20)
    with open(torn / "p0000-000.arrows", "ab") as file:
        file.write(b"\xff\xff")
    flip(lines / "runs.jsonl", 20)
    os.truncate(short / "runs.jsonl", 10)
    flip(lost / "meta.json", 40)
    contents = {file: file.read_bytes() for g in (values, torn, lines, short, lost) for file in g.iterdir()}
    with pytest.warns(lox.LoxWarning) as warned:
        assert lox.store.compact(tmp_path)["groups"] == (7, 6)
    (text,) = {str(w.message) for w in warned if "compact again" in str(w.message)}
    assert text.startswith("5 groups are damaged and were left alone:\n") and "lox.store.repair(" in text
    assert "p0000-000.arrows has 2 bytes at its end" in text and "does not have the checksum" in text
    assert all(file.read_bytes() == data for file, data in contents.items())
    assert not good.exists() and not better.exists()


def flip(file, at):
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


def test_a_torn_tail_is_repaired_first(tmp_path):
    simple(tmp_path, 2)
    writer = Writer(tmp_path)
    writer.append(writer.open_run("killed"), {"x": np.float64(1)})
    abandon(writer)
    with open(writer.group / "p0000-000.arrows", "ab") as file:
        file.write(b"\xff\xff")
    os.utime(writer.group / "p0000-000.arrows", (0, 0))
    with pytest.warns(lox.LoxWarning, match="1 groups are damaged and were left alone"):
        assert lox.store.compact(tmp_path)["groups"] == (3, 2)
    lox.store.repair(tmp_path)
    os.utime(writer.group / "p0000-000.arrows", (0, 0))
    before = everything(tmp_path)
    assert lox.store.compact(tmp_path)["groups"] == (2, 1)
    assert everything(tmp_path) == before


def test_events_of_runs_that_are_not_listed(tmp_path):
    """A loss of power may take the list of runs and leave their events: they are nobody's, and not deleted."""
    simple(tmp_path, 2)
    writer = Writer(tmp_path)
    for n in range(2):
        writer.append(writer.open_run(f"lost {n}"), {"x": np.float64(1)})
    abandon(writer)
    listed = writer.group / "runs.jsonl"
    listed.write_text(listed.read_text().splitlines(keepends=True)[0])
    os.utime(listed, (0, 0))
    with pytest.warns(lox.LoxWarning, match=r"p0000-000.arrows has events of runs that are not in runs.jsonl"):
        assert lox.store.compact(tmp_path)["groups"] == (3, 2)


def test_damage_to_a_merged_group(tmp_path):
    simple(tmp_path, 3, 50)
    lox.store.compact(tmp_path)
    (segment,) = tmp_path.glob("*/*.arrows")
    flip(segment, -20)
    with pytest.raises(lox.StoreError, match=r"(?s)does not have the checksum.*events of 'r0', 'r1' and 'r2'"):
        lox.load(tmp_path, "r2")
    assert lox.store.repair(tmp_path) != {}
    assert [logs["x"].tolist() for logs in lox.load(tmp_path).values()] == [[], [], []]  # all were in one batch
    simple(tmp_path, 2)
    assert lox.store.compact(tmp_path)["groups"] == (3, 2)  # what was taken out is kept with what is left


# --- readers at the same time ---


def test_poll_goes_on_after_a_merge(tmp_path, small):
    """Readers that had polled this much or that much of the groups, before and between merges."""
    readers, stage = [], [0]

    def polls(reader, collected):
        for name, logs in reader.poll().items():
            for key in logs:
                collected.setdefault((name, key), []).extend(logs[key].tolist())

    def poll_some():
        """Each reader polls at other moments; one more begins now."""
        stage[0] += 1
        for n, (reader, collected) in enumerate(readers):
            if (n + stage[0]) % 3:
                polls(reader, collected)
        readers.append((Reader(tmp_path), {}))
        polls(*readers[-1])

    poll_some()
    for round_ in range(3):
        with Writer(tmp_path) as writer:
            runs = writer.open_runs([f"{round_}.{n}" for n in range(3)])
            alone = writer.open_run("alone", mode="append")
            for i in range(4):
                values = np.arange(3.0) + 10 * i
                writer.append(runs, lox.logdict.from_arrays({"wide": values[None]}, lanes=1))
                for run in (runs[1], alone):
                    writer.append(run, {"x": np.float64(100 * round_ + i)})
                    writer.append(run, {"y": np.float64(100 * round_ + i)})
                writer.flush()
                poll_some()
        simple(tmp_path, 2) if round_ == 1 else None
        lox.store.compact(tmp_path, min_groups=1)
        if round_ == 1:
            lox.store.compact(tmp_path, min_groups=1)
    expected: dict = {}
    polls(Reader(tmp_path), expected)
    assert len(expected) == 3 * (3 + 2) + 2 + 2 and len(readers) == 13
    for reader, collected in readers:
        polls(reader, collected)
        assert collected == expected
        assert reader.poll() == {}


class At:
    """Calls a function at the k-th operation on files."""

    NAMES = ("open", "scandir", "listdir", "lstat", "stat")

    def __init__(self, monkeypatch, k, then):
        self.k, self.count, self.then = k, 0, then
        for name in self.NAMES:
            monkeypatch.setattr(os, name, self.counted(getattr(os, name)))

    def counted(self, real):
        def call(*args, **options):
            self.count += 1
            if self.count == self.k:
                self.then()
            return real(*args, **options)

        return call


READS = {
    "runs": lambda path: [(run.name, run.events, run.first, run.last, run.state) for run in lox.runs(path)],
    "one": lambda path: exact_logs(lox.load(path, "r2")),
    "all": lambda path: [(name, exact_logs(logs)) for name, logs in lox.load(path).items()],
    "each": lambda path: [(name, exact_logs(lox.load(path)[name])) for name in ("r0", "r3")],
    "poll": lambda path: polled_twice(path),
}


def polled_twice(path):
    reader = Reader(path)
    found: dict = {}
    for _ in range(2):
        for name, logs in reader.poll().items():
            found.setdefault(name, []).extend(logs["x"].tolist())
    return found


@pytest.mark.slow
@pytest.mark.parametrize("read", READS)
def test_a_merge_at_every_moment_of_reading(tmp_path, read):
    simple(tmp_path / "original", 4)
    writer = Writer(tmp_path / "original")
    writer.append(writer.open_run("killed"), {"x": np.float64(1)})
    abandon(writer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        expected = READS[read](tmp_path / "original")
        k = 0
        while True:
            k += 1
            path = tmp_path / str(k)
            shutil.copytree(tmp_path / "original", path)
            with pytest.MonkeyPatch.context() as patched:
                at = At(patched, k, lambda path=path: lox.store.compact(path))
                assert READS[read](path) == expected, k
            if at.count < k:
                break
            assert len(groups(path)) == 1
    assert k > 10


def test_tables_and_runs_that_were_listed_before(tmp_path):
    simple(tmp_path, 3)
    table, runs, reader = lox.runs(tmp_path), lox.load(tmp_path), Reader(tmp_path)
    reader.refresh()
    expected = [(run.name, 3, "finished", n) for n, run in enumerate(table)]
    lox.store.compact(tmp_path)
    simple(tmp_path / "more", 1)
    shutil.move(groups(tmp_path / "more")[0], tmp_path)
    lox.store.compact(tmp_path)
    assert [(run.name, run.events, run.state, run.config["n"]) for run in table] == expected
    assert [logs["x"].tolist() for logs in runs.values()] == [[100 * n + i for i in range(3)] for n in range(3)]
    assert reader.load("r2")["x"].tolist() == [200, 201, 202]


def test_a_run_that_is_really_gone(tmp_path):
    simple(tmp_path, 2)
    runs = lox.load(tmp_path)
    for group in groups(tmp_path)[1:]:
        shutil.rmtree(group)
    assert runs["r0"]["x"].tolist() == [0, 1, 2]
    with pytest.raises(lox.RunNotFoundError, match="there is no run 'r1'"):
        runs["r1"]


@pytest.mark.slow
def test_readers_and_writers_meanwhile(tmp_path):
    """Threads that list, load and poll while runs are written and merged."""
    simple(tmp_path, 2)
    stop, errors, polled = threading.Event(), [], {}

    def check(name, found):
        n = int(name[1:])
        assert found == [100 * n + i for i in range(3)], (name, found)

    def follow():
        reader = Reader(tmp_path)
        while True:
            last = stop.is_set()
            for name, logs in reader.poll().items():
                polled.setdefault(name, []).extend(logs["x"].tolist())
            if last:
                return

    def load():
        least = 2
        while not stop.is_set():
            loaded = lox.load(tmp_path)
            for name, logs in loaded.items():
                check(name, logs["x"].tolist())
            assert len(loaded) >= least
            least = len(loaded)

    def listed():
        least = 2
        while not stop.is_set():
            table = lox.runs(tmp_path)
            assert all((run.events, run.state) == (3, "finished") for run in table) and len(table) >= least
            least = len(table)

    def guarded(work):
        try:
            work()
        except BaseException as error:
            errors.append(error)
            raise

    threads = [threading.Thread(target=guarded, args=(work,)) for work in (follow, load, listed)]
    for thread in threads:
        thread.start()
    try:
        for n in range(2, 60):
            with Writer(tmp_path.parent / "aside") as writer:
                logs = lox.logdict.from_arrays({"x": 100.0 * n + np.arange(3)}, steps={"step": np.arange(3)})
                writer.append(writer.open_run(f"r{n}"), logs)
            os.rename(writer.group, tmp_path / writer.group.name)
            if n % 3 == 0:
                lox.store.compact(tmp_path)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not errors, errors
    assert len(polled) == 60 and len(groups(tmp_path)) <= 3
    for name, found in polled.items():
        check(name, found)


# --- kills, losses of power, full disks ---


class Killed(BaseException):
    """Stands for the end of the process: nothing catches it."""


class System:
    """Counts what changes the disk; from the k-th operation on, `refuse` is called instead."""

    NAMES = ("open", "write", "fsync", "rename", "replace", "unlink", "rmdir", "mkdir", "ftruncate")

    def __init__(self, monkeypatch, k, refuse):
        self.k, self.refuse, self.count, self.trace = k, refuse, 0, []
        self.files = {}
        self.opened = os.open
        for name in self.NAMES:
            monkeypatch.setattr(os, name, self.wrapped(name, getattr(os, name)))
        for module in (builtins, io):
            monkeypatch.setattr(module, "open", self.wrapped("open_file", open))

    def wrapped(self, name, real):
        def call(*args, **options):
            reads = name == "open" and not args[1] & (os.O_WRONLY | os.O_RDWR)
            reads |= name == "open_file" and not set(str(args[1:2])) & set("wxa+")
            if not reads:
                self.count += 1
                if self.count >= self.k:
                    self.refuse(self, name, real, args)
            result = real(*args, **options)
            if name == "open":
                self.files[result] = Path(args[0])
            if not reads:
                paths = [self.files.get(a, a) if isinstance(a, int) else a for a in args]
                self.trace.append((name, *paths))
            return result

        return call


def die(system, name, real, args):
    if name == "write" and system.count == system.k:
        real(args[0], bytes(args[1])[: len(args[1]) // 2])  # torn
    raise Killed


def prepared(path):
    """A store with most kinds of groups, a merged one among them."""
    simple(path, 2)
    with Writer(path) as writer:
        runs = writer.open_runs(["a", "b", "c"])
        writer.append(runs, lox.logdict.from_arrays({"wide": np.arange(6.0).reshape(2, 3)}, lanes=1))
        writer.append(runs[0], {"x": np.float64(7)})
        writer.end_runs(runs[:1], "ValueError: boom")
    lox.store.compact(path)
    writer = Writer(path)
    writer.append(writer.open_run("killed"), {"x": np.float64(1)})
    abandon(writer)
    with Writer(path) as writer:
        writer.append(writer.open_run("b", mode="overwrite"), {"x": np.float64(8)})
    return everything(path, each=False)


@pytest.mark.slow
@pytest.mark.parametrize("again", [False, True], ids=["once", "twice"])
def test_a_kill_at_every_operation(tmp_path, again):
    """After each, everything reads as before, and the next `compact` finishes the work; also if it is killed too."""
    before = prepared(tmp_path / "original")
    k = 0
    while True:
        k += 1
        path = tmp_path / str(k)
        shutil.copytree(tmp_path / "original", path)
        finished = []
        for n in (k, max(1, k // 3))[: 1 + again]:
            with pytest.MonkeyPatch.context() as patched, contextlib.suppress(Killed):
                System(patched, n, die)
                lox.store.compact(path)
                finished.append(n)
            assert everything(path, each=False) == before, k
        assert lox.store.repair(path) == {}
        lox.store.compact(path)
        assert everything(path, each=False) == before, k
        assert len(groups(path)) == 1 and sorted(p.name for p in path.iterdir())[0] == ".lox", k
        assert len(list(path.iterdir())) == 2
        shutil.rmtree(path)
        if k in finished:
            break
    assert k > 40
    print(f"killed at {k - 1} operations")


def test_what_is_on_the_disk_when(tmp_path, monkeypatch):
    """A loss of power: what is renamed is on the disk before, and the rename before anything is deleted."""
    prepared(tmp_path)
    old = groups(tmp_path)
    system = System(monkeypatch, 1 << 30, die)
    lox.store.compact(tmp_path)
    monkeypatch.undo()
    trace = system.trace
    (renamed,) = [n for n, (name, *_) in enumerate(trace) if name == "rename"]
    made, (new,) = Path(trace[renamed][1]), groups(tmp_path)
    assert Path(trace[renamed][2]) == new
    last_write = {}
    for n, (name, *args) in enumerate(trace[:renamed]):
        if name == "replace":
            last_write[args[1]] = n
        elif name in ("write", "open", "open_file", "ftruncate"):
            last_write[args[0]] = n
    synced = {Path(args[0]): n for n, (name, *args) in enumerate(trace[:renamed]) if name == "fsync"}
    written = {file.name: n for file, n in last_write.items() if isinstance(file, Path) and file.parent == made}
    for file in new.iterdir():
        assert synced[made / file.name] > written[file.name]
    assert synced[made] > max(written.values())
    # The run that overwrites another is on the disk before that one is dropped.
    assert any(file.name == "runs.jsonl" and file.parent in old for file in synced)
    deleted = [n for n, (name, *args) in enumerate(trace) if name == "unlink" and Path(args[0]).parent in old]
    folder = [n for n, (name, *args) in enumerate(trace) if name == "fsync" and Path(args[0]) == tmp_path]
    assert renamed < folder[0] < min(deleted)
    for group in old:  # readers look at the list of runs to see whether a group is still whole
        assert (
            next(args[0] for name, *args in trace if name == "unlink" and Path(args[0]).parent == group).name
            == "runs.jsonl"
        )


def full(system, name, real, args):
    """Nothing can be written, but files can be deleted."""
    if name not in ("unlink", "rmdir", "ftruncate"):
        raise OSError(errno.ENOSPC, "No space left on device")


def hiccup(system, name, real, args):
    """One operation fails."""
    if system.count == system.k:
        raise OSError(errno.EIO, "Input/output error")


@pytest.mark.slow
@pytest.mark.parametrize("refuse", [full, hiccup])
def test_a_full_disk_at_every_operation(tmp_path, refuse):
    before = prepared(tmp_path / "original")
    k = failed = 0
    while True:
        k += 1
        path = tmp_path / str(k)
        shutil.copytree(tmp_path / "original", path)
        with pytest.MonkeyPatch.context() as patched:
            system = System(patched, k, refuse)
            try:
                lox.store.compact(path)
            except lox.StoreError as error:
                failed += 1
                assert "No space left" in str(error) or "Input/output error" in str(error), k
                assert error.errno in (errno.ENOSPC, errno.EIO)
        assert everything(path, each=False) == before, k
        if refuse is full:
            assert not list(path.glob(".compact-*")), k
        lox.store.compact(path)
        assert everything(path, each=False) == before and len(groups(path)) == 1, k
        assert len(list(path.iterdir())) == 2
        shutil.rmtree(path)
        if system.count < k:
            break
    assert failed > 20


PROGRAM = """
    import os, sys, warnings
    import lox
    from lox.store import _merged
    _merged._BATCH_BYTES, _merged._SEGMENT_BYTES = 5000, 100_000
    print("ready", flush=True)
    sys.stdin.readline()
    try:
        lox.store.compact(sys.argv[1])
        print("done", flush=True)
    except lox.StoreError as error:
        assert "compacted already" in str(error), error
        print("busy", flush=True)
"""


def start(path):
    command = [sys.executable, "-c", textwrap.dedent(PROGRAM), str(path)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    return process


def go(process):
    process.stdin.write("\n")
    process.stdin.flush()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="needs signals")
def test_kills_at_random_moments(tmp_path):
    """`LOX_KILLS=100` for more."""
    simple(tmp_path / "original", 40, 20)
    before = everything(tmp_path / "original", each=False)
    shutil.copytree(tmp_path / "original", tmp_path / "timed")
    with start(tmp_path / "timed") as process:
        begin = time.monotonic()
        go(process)
        assert process.stdout.readline() == "done\n"
        duration = time.monotonic() - begin
    rng = np.random.default_rng(int(time.time()))
    path, killed, unfinished, hidden = tmp_path / "original", 0, 0, 0
    while killed < KILLS:
        if len(groups(path)) == 1:
            shutil.rmtree(tmp_path / "next", ignore_errors=True)
            simple(tmp_path / "next", 40, 20)
            path = tmp_path / "next"
            before = everything(path, each=False)
        with start(path) as process:
            go(process)
            time.sleep(rng.uniform(0, 1.1 * duration))
            os.kill(process.pid, signal.SIGKILL)
            killed += process.wait() == -signal.SIGKILL
        unfinished += bool(list(path.glob(".compact-*")))
        hidden += 1 < len(groups(path)) < 40 or any(len(list(group.iterdir())) < 3 for group in groups(path))
        assert everything(path, each=False) == before
    lox.store.compact(path)
    assert everything(path, each=False) == before and len(groups(path)) == 1
    print(f"{killed} kills, {unfinished} unfinished groups, {hidden} in the middle of deleting")


@pytest.mark.slow
def test_several_at_once(tmp_path):
    simple(tmp_path, 60, 5)
    before = everything(tmp_path)
    for _ in range(3):
        processes = [start(tmp_path) for _ in range(3)]
        for process in processes:
            go(process)
        said = [process.communicate()[0].strip() for process in processes]
        assert set(said) <= {"done", "busy"} and "done" in said
        assert everything(tmp_path) == before
    assert len(groups(tmp_path)) == 1


def test_another_is_at_work(tmp_path, monkeypatch):
    simple(tmp_path, 2)
    merge = _compact._merge

    def merge_while_another_tries(*args):
        with pytest.raises(lox.StoreError, match=r"is being compacted already\. Wait until that is done"):
            lox.store.compact(tmp_path)
        return merge(*args)

    monkeypatch.setattr(_compact, "_merge", merge_while_another_tries)
    assert lox.store.compact(tmp_path)["groups"] == (2, 1)


def test_locks_that_do_not_work(tmp_path, monkeypatch):
    """On such file systems two may replace the same groups: nothing is lost or doubled."""
    simple(tmp_path, 4)
    before = everything(tmp_path)
    first, *_, last = groups(tmp_path)
    aside = tmp_path / "aside"
    for kept_away in (last, first):  # each sees three of the four groups
        aside.mkdir()
        for group in groups(tmp_path):
            if group == kept_away or len(_lines(group)) > 1:
                group.rename(aside / group.name)
        with monkeypatch.context() as patched:
            patched.setattr(_compact, "_delete", lambda group: None)
            lox.store.compact(tmp_path)
        for group in groups(aside):
            group.rename(tmp_path / group.name)
        aside.rmdir()
    assert len(groups(tmp_path)) == 6
    assert everything(tmp_path) == before
    lox.store.compact(tmp_path)
    assert everything(tmp_path) == before
    assert len(groups(tmp_path)) == 1


@pytest.mark.parametrize("when", ["read", "written"])
def test_a_run_is_overwritten_meanwhile(tmp_path, monkeypatch, when):
    simple(tmp_path, 3)
    module, name = {"read": (_merged, "write"), "written": (_compact, "_check")}[when]
    real, done = getattr(module, name), []

    def overwrite_first(*args):
        if not done:
            done.append(True)
            lox.save({"x": np.float64(5)}, tmp_path, mode="overwrite")
            with Writer(tmp_path) as writer:
                writer.append(writer.open_run("r1", mode="overwrite"), {"x": np.float64(6)})
        return real(*args)

    monkeypatch.setattr(module, name, overwrite_first)
    lox.store.compact(tmp_path)
    assert done and len(groups(tmp_path)) == 1
    found = {name: logs["x"].tolist() for name, logs in lox.load(tmp_path).items()}
    assert found == {"r0": [0, 1, 2], "r2": [200, 201, 202], "run": [5], "r1": [6]}


def test_a_copy_that_turns_up_again(tmp_path):
    """From a backup, or from a tool that copies without deleting: it is known to be merged, even twice."""
    simple(tmp_path / "runs", 3)
    shutil.copytree(tmp_path / "runs", tmp_path / "backup")
    before = everything(tmp_path / "runs")
    for _ in range(2):
        lox.store.compact(tmp_path / "runs", min_groups=1)
    shutil.copytree(tmp_path / "backup", tmp_path / "runs", dirs_exist_ok=True)
    assert everything(tmp_path / "runs") == before
    (merged,) = [group for group in groups(tmp_path / "runs") if group.name not in os.listdir(tmp_path / "backup")]
    segment = merged / "p0000-000.arrows"
    data = segment.read_bytes()
    flip(segment, -20)
    with pytest.warns(lox.LoxWarning, match="left alone"):
        assert lox.store.compact(tmp_path / "runs")["groups"] == (4, 4)  # the copy may be needed
    segment.write_bytes(data)
    assert lox.store.compact(tmp_path / "runs")["groups"] == (4, 1)
    assert everything(tmp_path / "runs") == before


def test_a_writer_that_only_seemed_dead(tmp_path, monkeypatch):
    """It goes on writing while its group is read: the group stays."""
    simple(tmp_path, 2)
    writer = Writer(tmp_path)
    run = writer.open_run("seems dead")
    writer.append(run, {"x": np.float64(1)})
    writer.flush()
    monkeypatch.setattr(_group.Group, "is_alive", lambda self: False)
    monkeypatch.setattr(_group, "RECENT", -1.0)
    check = _compact._check

    def write_meanwhile(*args):
        writer.append(run, {"x": np.float64(2)})
        writer.flush()
        return check(*args)

    monkeypatch.setattr(_compact, "_check", write_meanwhile)
    with pytest.raises(lox.StoreError, match=r"was changed by others while it was compacted\. Try again"):
        lox.store.compact(tmp_path)
    monkeypatch.undo()
    writer.close()
    assert lox.load(tmp_path, "seems dead")["x"].tolist() == [1, 2, 2, 2]
    assert len(groups(tmp_path)) == 3 and not list(tmp_path.glob(".compact-*"))


def test_many_rows_stay_in_order(tmp_path, monkeypatch):
    """Runs that take turns are sorted, each of them in order."""
    for n in range(2):
        with Writer(tmp_path, buffer_bytes=500) as writer:
            runs = writer.open_runs([f"{n}.{i}" for i in range(3)])
            for i in range(300):
                writer.append(runs[i * 7 % 3], {"x": np.float64(i)})
    before = everything(tmp_path)
    lox.store.compact(tmp_path)
    assert everything(tmp_path) == before
    (segment,) = tmp_path.glob("*/*.arrows")
    (batch,) = pyarrow.ipc.open_stream(segment)
    assert batch["run"].to_pylist() == [run for run in range(6) for _ in range(100)]
