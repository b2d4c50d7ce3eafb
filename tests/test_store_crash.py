"""The store while processes die, disks are full, and others read and write."""

import errno
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from machine import Disk, finish, load_whatever_is_whole, refuse, start, wait_for
from optional import pyarrow

import lox
from lox.store import Reader, Writer

KILLS = int(os.environ.get("LOX_KILL_N", "10"))


def check_events(logs, least):
    """Check for events 0, 1, 2, ... without a gap, each with its value."""
    n = len(logs["x"])
    assert n >= least
    steps = np.arange(n)
    np.testing.assert_array_equal(logs["x"], steps * 3)
    np.testing.assert_array_equal(logs["y"], np.stack([steps, -steps], 1))
    np.testing.assert_array_equal(logs.step["x"], steps)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_kill_at_any_moment(tmp_path):
    acknowledged = json.loads(finish(start("kill", tmp_path, KILLS, int(time.time()))))
    assert len(acknowledged) == KILLS
    assert all(acknowledged[1::2])
    torn = 0
    for i, least in enumerate(acknowledged):
        path = tmp_path / str(i)
        if not least and not list(path.glob("*/*.arrows")):
            continue
        logs, warned = load_whatever_is_whole(path)
        if not least and "x" not in logs:
            continue
        check_events(logs, least)
        torn += warned
        repaired = lox.store.repair(path)
        assert any(repaired.values()) == bool(warned)
        check_events(lox.load(path), least)  # and without a warning
        rows = 0
        for segment in path.glob("*/*.arrows"):
            rows += pyarrow.ipc.open_stream(segment).read_all().num_rows
        assert rows == len(logs["x"])
    print(f"{KILLS} kills, {torn} torn tails, {sum(acknowledged)} acknowledged events")


@pytest.mark.slow
def test_a_second_process_reads_meanwhile(tmp_path):
    writer = start("tail", tmp_path, 400, stdin=subprocess.PIPE)
    reader = Reader(tmp_path)
    seen, half = [], []

    def have_come(number):
        for name, logs in reader.poll().items():
            assert name == "live"
            seen.extend(logs["x"].tolist() if "x" in logs else [])
            half.extend(logs["half"].tolist() if "half" in logs else [])
        return len(seen) == number

    for number in range(40, 401, 40):  # events come little by little
        wait_for(lambda number=number: have_come(number))
        writer.stdin.write("\n")
        writer.stdin.flush()
    finish(writer)
    assert seen == [3 * i for i in range(400)]
    assert half == [200]
    assert reader.poll() == {}
    assert [run.config for run in lox.runs(tmp_path)] == [{"n": 400}]


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_processes_write_at_once(tmp_path):
    finish(start("race", tmp_path, 4, 300))
    runs = lox.load(tmp_path)
    assert sorted(runs) == ["42", "42.1", "42.2", "42.3"]
    for logs in runs.values():
        assert logs["i"].tolist() == list(range(300))
        assert len(set(logs["process"].tolist())) == 1
    assert sorted(logs["process"][0] for logs in runs.values()) == [0, 1, 2, 3]
    assert all(run.key == jax.random.key(42) for run in lox.runs(tmp_path))


# --- disk full ---


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="needs resource limits")
def test_a_real_limit(tmp_path):
    kind, code, file = finish(start("fill", tmp_path, 20_000)).split()
    assert (kind, int(code)) == ("StoreError", errno.EFBIG)
    assert Path(file).name == "p0000-000.arrows"
    check_events(lox.load(tmp_path), 10_020)
    assert len(list(tmp_path.glob("*/*.arrows"))) == 2  # in a new file, never after a torn batch


def test_short_writes(tmp_path, monkeypatch):
    Disk(monkeypatch, 1 << 30, piece=7)
    with Writer(tmp_path) as writer:
        run = writer.open_run()
        for i in range(20):
            writer.append(run, {"x": np.float32(i)})
            writer.flush()
    assert lox.load(tmp_path)["x"].tolist() == list(range(20))


def test_a_key_without_events_when_the_disk_is_full(tmp_path, monkeypatch):
    writer = Writer(tmp_path)
    run = writer.open_run()
    disk = Disk(monkeypatch, 0)
    writer.append(run, lox.logdict.from_arrays({"x": np.zeros(0, np.float32)}))
    with pytest.raises(lox.StoreError, match="No space left"):
        writer.flush()
    disk.room = 1 << 30
    writer.close()
    assert lox.load(tmp_path)["x"].tolist() == []


@pytest.mark.parametrize("can_truncate", [True, False])
@pytest.mark.parametrize("room", [0, 1, 100, 1000, 3000])
def test_disk_full(tmp_path, monkeypatch, room, can_truncate):
    writer = Writer(tmp_path)
    run = writer.open_run()
    disk = Disk(monkeypatch, room)
    disk.can_truncate = can_truncate
    flushed = done = 0
    with pytest.raises(lox.StoreError, match=r"cannot write '.*p0000-000.arrows': No space left") as error:
        for _ in range(100):
            writer.append(run, {"x": np.int64(done), "y": np.zeros(3)})
            done += 1
            writer.flush()
            flushed = done
    assert isinstance(error.value, OSError)
    assert error.value.errno == errno.ENOSPC
    assert "Free some space" in str(error.value)
    assert flushed < done < 100
    # Earlier events are intact, and others can read them meanwhile.
    reader = Reader(tmp_path)
    actual = reader.poll()
    assert (actual["run"]["x"].tolist() if actual else []) == list(range(flushed))
    # Reading in this process cannot flush, warns of it, and reads what there is.
    if flushed:
        with pytest.warns(lox.LoxWarning, match="not all that was logged is on disk"):
            assert lox.load(tmp_path)["x"].tolist() == list(range(flushed))
    # Events are still accepted, and written as soon as there is room.
    writer.append(run, {"x": np.int64(done), "y": np.zeros(3)})
    disk.room = 1 << 30
    writer.flush()
    writer.close()
    logs, warned = load_whatever_is_whole(tmp_path)
    assert logs["x"].tolist() == list(range(done + 1))
    assert warned == (not can_truncate and room > 0)
    lox.store.repair(tmp_path)
    for segment in tmp_path.glob("*/*.arrows"):
        pyarrow.ipc.open_stream(segment).read_all()


def test_full_until_the_end(tmp_path, monkeypatch):
    writer = Writer(tmp_path)
    run = writer.open_run()
    writer.append(run, {"x": np.int64(0)})
    writer.flush()
    Disk(monkeypatch, 0)
    writer.append(run, {"x": np.int64(1)})
    with pytest.raises(lox.StoreError, match=r"(?s)No space left.*\n1 events were not written"):
        writer.close()
    writer.close()  # said once
    monkeypatch.undo()
    assert lox.load(tmp_path)["x"].tolist() == [0]


def test_memory_is_not_filled_while_the_disk_is_full(tmp_path, monkeypatch):
    monkeypatch.setattr("lox.store._writer._MAX_PENDING", 100_000)
    writer = Writer(tmp_path)
    run = writer.open_run()
    disk = Disk(monkeypatch, 0)
    taken = refused = 0
    for _ in range(50):
        try:
            writer.append(run, {"x": np.full(1000, taken)})
            taken += 1
        except lox.StoreError as error:
            if "were not taken" in str(error):
                refused += 1
            else:
                taken += 1
    assert refused > 10
    assert taken < 20
    disk.room = 1 << 30
    writer.close()
    assert lox.load(tmp_path)["x"][:, 0].tolist() == list(range(taken))


def test_no_room_for_a_run(tmp_path, monkeypatch):
    writer = Writer(tmp_path)
    writer.open_run("a")
    disk = Disk(monkeypatch, 10)
    with pytest.raises(lox.StoreError, match=r"cannot write '.*runs.jsonl': No space left"):
        writer.open_run("b")
    disk.room = 1 << 30
    assert writer.open_run("c") == 1
    writer.close()
    assert [run.name for run in lox.runs(tmp_path)] == ["a", "c"]


def test_read_only_directory(tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr("pathlib.Path.mkdir", refuse)
        with pytest.raises(lox.StoreError, match=r"Read-only file system\.\nChoose another directory") as error:
            Writer(tmp_path / "new")
    assert error.value.filename.startswith(str(tmp_path / "new"))
    writer = Writer(tmp_path)
    run = writer.open_run()
    writer.append(run, {"x": np.int64(0)})
    with monkeypatch.context() as patched:
        patched.setattr("os.open", refuse)
        with pytest.raises(lox.StoreError, match=r"cannot write '.*arrows': Read-only file system"):
            writer.flush()
    writer.close()
    assert lox.load(tmp_path)["x"].tolist() == [0]


def test_a_path_through_a_file(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(lox.StoreError, match=r"cannot write .*Not a directory"):
        lox.save({"x": 1}, tmp_path / "file" / "runs")
