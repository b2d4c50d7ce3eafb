"""Directories with many runs: the index, and the lock under which names are chosen."""

import multiprocessing
import os
import random
import subprocess
import sys
import textwrap
from typing import Any

import numpy as np
import pytest

import lox
from lox.store import _catalog, _index
from lox.store._catalog import Catalog
from lox.store._group import Group


@pytest.fixture(autouse=True)
def few(monkeypatch: Any) -> None:
    monkeypatch.setattr(_index, "FEW", 4)


def begin(path: Any, seed: int, mode: str, value: float, name: str | None = None, fails: bool = False) -> Any:
    """Begin a run, perhaps with an event; return its name, or the error."""
    with lox.store.Writer(path) as writer:
        try:
            names = None if name is None else [name]
            run = writer.open_runs(names, [[0, seed]], "threefry2x32", [{"value": value}], mode)
        except lox.RunExistsError as error:
            return type(error)
        if fails:
            writer.end_runs(run.tolist(), "ValueError: no")
        else:
            writer.append(run[0], {"x": np.float32(value)})
        return writer.run_names[-1]


def everything(path: Any) -> Any:
    return [(run.name, run.key_data, run.config, run.events) for run in lox.runs(path)]


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(6))
def test_the_index_changes_nothing(tmp_path: Any, monkeypatch: Any, seed: int) -> None:
    """Two directories with the same runs, one of them without an index."""
    rng = random.Random(seed)
    for number in range(60):
        args = rng.randrange(8), rng.choice(["new", "append", "overwrite", "error"]), float(number)
        options = {"name": rng.choice([None, None, "a", "b", "a.1"]), "fails": rng.random() < 0.1}
        indexed = begin(tmp_path / "indexed", *args, **options)
        with monkeypatch.context() as without:
            without.setattr(_index, "usable", lambda: False)
            assert begin(tmp_path / "plain", *args, **options) == indexed
    assert (tmp_path / "indexed" / ".lox" / "index").exists() and not (tmp_path / "plain" / ".lox").exists()
    assert everything(tmp_path / "indexed") == everything(tmp_path / "plain")
    full = Catalog(tmp_path / "indexed")
    full.refresh()
    for record in full.records.values():
        for options in ({"bases": [record.base]}, {"run_names": [record.name]}):
            part = Catalog(tmp_path / "indexed")
            part.look_up(**options)
            assert part.attempts[record.base] == full.attempts[record.base]
            assert part.records[record.name].entries == record.entries
            assert len(part.groups) < len(full.groups)
        assert str(lox.load(tmp_path / "indexed", record.name)) == str(lox.load(tmp_path / "plain", record.name))


def store(path: Any, runs: int = 12) -> None:
    for seed in range(runs):
        begin(path, seed % 10, "new", float(seed))


def load(path: Any) -> list[float]:
    with pytest.warns(lox.LoxWarning, match="'0' and '0.1'"):
        return lox.load(path, np.asarray([[0, seed] for seed in range(10)], np.uint32))["x"][:, 0].tolist()


EXPECTED = [10.0, 11.0, *map(float, range(2, 10))]


def test_a_damaged_index_is_not_used(tmp_path: Any) -> None:
    store(tmp_path)
    assert load(tmp_path) == EXPECTED
    file = tmp_path / ".lox" / "index"
    data, rng = file.read_bytes(), random.Random(0)
    places = [*range(40), *(rng.randrange(len(data)) for _ in range(60))]
    for place in places:
        flipped = bytearray(data)
        flipped[place] ^= 1 << rng.randrange(8)
        file.write_bytes(flipped)
        assert _index.load(tmp_path) is None
    assert load(tmp_path) == EXPECTED
    file.write_bytes(data[: len(data) // 2])
    assert load(tmp_path) == EXPECTED
    store(tmp_path)  # makes it again
    assert _index.load(tmp_path) is not None


def test_an_index_of_another_directory(tmp_path: Any) -> None:
    """What it does not know is read, and what it knows is not there."""
    store(tmp_path / "a")
    store(tmp_path / "b", 11)
    (tmp_path / "b" / ".lox" / "index").write_bytes((tmp_path / "a" / ".lox" / "index").read_bytes())
    assert lox.load(tmp_path / "b", "0.1")["x"].tolist() == [10.0]
    assert begin(tmp_path / "b", 0, "append", 0.5) == "0.1"


def test_a_link_is_not_an_index(tmp_path: Any) -> None:
    store(tmp_path / "a")
    (tmp_path / "mine").mkdir()
    for folder in (tmp_path / "b", tmp_path / "c"):
        folder.mkdir()
    (tmp_path / "b" / ".lox").symlink_to(tmp_path / "mine")
    (tmp_path / "c" / ".lox").mkdir()
    (tmp_path / "c" / ".lox" / "index").symlink_to(tmp_path / "a" / ".lox" / "index")
    store(tmp_path / "b")
    assert not list((tmp_path / "mine").iterdir())
    assert load(tmp_path / "b") == EXPECTED
    assert _index.load(tmp_path / "c") is None


def test_groups_that_are_deleted_by_hand(tmp_path: Any) -> None:
    store(tmp_path)
    (found,) = [r.entries[0].group for r in _refreshed(tmp_path).records.values() if r.name == "0.1"]
    for file in (tmp_path / found).iterdir():
        file.unlink()
    (tmp_path / found).rmdir()
    assert lox.load(tmp_path, np.asarray([0, 0], np.uint32))["x"].tolist() == [0.0]
    assert begin(tmp_path, 0, "new", 1.0) == "0.1"


def _refreshed(path: Any) -> Catalog:
    catalog = Catalog(path)
    catalog.refresh()
    return catalog


def test_a_writer_that_seemed_dead(tmp_path: Any, monkeypatch: Any) -> None:
    """One in a container, for instance, which did not log for a minute and then begins another run."""
    writer = lox.store.Writer(tmp_path)
    writer.open_run("first")
    with monkeypatch.context() as patched:
        patched.setattr(Group, "is_over", lambda self: True)
        store(tmp_path)
    assert writer.group.name in _index.load(tmp_path).ids  # type: ignore[union-attr]
    writer.append(writer.open_run("second"), {"x": np.float32(1)})
    writer.close()
    assert writer.group.name not in _index.load(tmp_path).ids  # type: ignore[union-attr]
    assert lox.load(tmp_path, "second")["x"].tolist() == [1.0]


# --- overwriting ---


@pytest.mark.slow
def test_what_is_overwritten_stays_until_there_is_an_event(tmp_path: Any) -> None:
    begin(tmp_path, 3, "new", 1.0)
    code = f"""
        import os, numpy as np, lox
        writer = lox.store.Writer({str(tmp_path)!r})
        run = writer.open_runs(None, [[0, 3]], "threefry2x32", None, "overwrite")
        writer.append(run[0], {{"x": np.float32(2)}})
        os.kill(os.getpid(), 9)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=False)
    assert lox.load(tmp_path, "3")["x"].tolist() == [1.0]
    writer = lox.store.Writer(tmp_path)
    runs = writer.open_runs(None, [[0, 3], [0, 4]], "threefry2x32", None, "overwrite")
    assert sorted(run.name for run in lox.runs(tmp_path)) == ["3", "4"]
    assert lox.load(tmp_path, "3")["x"].tolist() == [1.0]
    writer.append(runs[1], {"x": np.float32(2)})
    writer.flush()
    assert lox.load(tmp_path, "3")["x"].tolist() == [1.0]
    writer.append(runs[0], {"x": np.float32(2)})
    writer.flush()
    assert lox.load(tmp_path, "3")["x"].tolist() == [2.0]
    writer.close()
    assert [run.name for run in lox.runs(tmp_path)] == ["3", "4"]


def test_a_run_that_fails_without_an_event_overwrites_nothing(tmp_path: Any) -> None:
    begin(tmp_path, 3, "new", 1.0)
    begin(tmp_path, 3, "overwrite", 2.0, fails=True)
    assert lox.load(tmp_path, "3")["x"].tolist() == [1.0]
    with lox.store.Writer(tmp_path) as writer:
        writer.open_runs(None, [[0, 3]], "threefry2x32", None, "overwrite")  # and ends as it should
    assert not lox.load(tmp_path, "3") and len(lox.runs(tmp_path)) == 1


def test_events_that_a_failed_run_has_not_flushed_yet(tmp_path: Any) -> None:
    begin(tmp_path, 3, "new", 1.0)
    with lox.store.Writer(tmp_path) as writer:
        run = writer.open_runs(None, [[0, 3]], "threefry2x32", None, "overwrite")
        writer.append(run[0], {"x": np.float32(2)})
        writer.end_runs(run, "ValueError: no")
    assert lox.load(tmp_path, "3")["x"].tolist() == [2.0]
    assert [run.state for run in lox.runs(tmp_path)] == ["failed"]


def test_a_disk_that_is_full_when_a_run_begins_to_overwrite(tmp_path: Any, monkeypatch: Any) -> None:
    """The events are on disk, but not yet that they count: the next flush says so."""
    begin(tmp_path, 3, "new", 1.0)
    writer = lox.store.Writer(tmp_path)
    run = writer.open_runs(None, [[0, 3]], "threefry2x32", None, "overwrite")
    writer.append(run[0], {"x": np.float32(2)})
    with monkeypatch.context() as full:
        full.setattr(writer, "_write_lines", refuse)
        with pytest.raises(lox.StoreError, match="full"):
            writer.flush()
    assert lox.load(tmp_path, "3")["x"].tolist() in ([1.0], [2.0])  # which flushes
    writer.flush()
    assert lox.store.Reader(tmp_path).poll()["3"]["x"].tolist() == [2.0]
    writer.close()


def refuse(lines: bytes) -> None:
    raise lox.StoreError("the disk is full")


# --- several processes at once ---


def _begin_many(path: str, number: int, mode: str, ready: Any, told: Any) -> None:
    ready.wait()
    for n in range(20):
        told.put((number, n, begin(path, n if mode == "error" else 7, mode, float(number))))


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["new", "error", "overwrite"])
def test_several_processes_at_once(tmp_path: Any, mode: str) -> None:
    """No two of them are told the same name, or that they were the first."""
    context = multiprocessing.get_context("spawn")
    ready, told = context.Barrier(3), context.Queue()
    args = [(str(tmp_path), number, mode, ready, told) for number in range(3)]
    processes = [context.Process(target=_begin_many, args=each) for each in args]
    for process in processes:
        process.start()
    answers = [told.get(timeout=120) for _ in range(60)]
    for process in processes:
        process.join()
        assert process.exitcode == 0
    there = [run.name for run in lox.runs(tmp_path)]
    names = [name for _, _, name in answers if isinstance(name, str)]
    if mode == "new":
        assert sorted(names) == sorted(there) and len(set(names)) == 60
        for number, _, name in answers:
            assert lox.load(tmp_path, name)["x"].tolist() == [number]
    elif mode == "error":
        assert sorted(names) == sorted(there) == sorted(map(str, range(20)))
    else:
        assert len(there) == 1 and len(lox.load(tmp_path, there[0])["x"]) == 1


def test_without_locks_the_order_of_entries_decides(tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(_catalog, "_locked", lambda folder: None)
    a, b = lox.store.Writer(tmp_path), lox.store.Writer(tmp_path)
    write = b._write_lines

    def late(lines: bytes) -> None:
        monkeypatch.setattr(b, "_write_lines", write)
        a.open_run("same")  # between b's choice and b's line
        write(lines)

    monkeypatch.setattr(b, "_write_lines", late)
    b.open_run("same")
    a.close()
    b.close()
    assert sorted(run.name for run in lox.runs(tmp_path)) == ["same", "same.1"]
    assert {*a.run_names, *b.run_names} <= {"same", "same.1"}
    monkeypatch.undo()
    monkeypatch.setattr(_index, "FEW", 1)
    assert begin(tmp_path, 0, "new", 1.0, name="same") == "same.2"
    store(tmp_path)
    assert _index.load(tmp_path).is_ambiguous  # type: ignore[union-attr]
    assert begin(tmp_path, 0, "new", 1.0, name="same") == "same.3"


def test_a_directory_that_is_locked_for_long(tmp_path: Any, monkeypatch: Any) -> None:
    """Somebody who is suspended under the lock does not stop the others."""
    fcntl = pytest.importorskip("fcntl")
    monkeypatch.setattr(_catalog, "_PATIENCE", 0.05)
    descriptor = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    assert begin(tmp_path, 0, "new", 1.0) == "0"
    os.close(descriptor)


def test_an_index_that_cannot_be_written(tmp_path: Any) -> None:
    (tmp_path / ".lox").write_text("mine")
    store(tmp_path)
    assert load(tmp_path) == EXPECTED and (tmp_path / ".lox").read_text() == "mine"
