"""Several processes of one program write one run."""

from typing import Any

import numpy as np
import pytest

import lox
from lox.store import Writer, _shards

KEYS = np.asarray([[0, 7], [0, 8]], np.uint32)


def begin(path: Any, session: str, mode: str = "new", order: Any = (0, 1), **options: Any) -> list[Writer]:
    """Begin the same two runs in each of two processes, in some order; the values say which process wrote them."""
    writers = {n: Writer(path, process=n, processes=2, session=session) for n in order}
    for writer in writers.values():
        writer.open_runs(None, KEYS, "threefry2x32", [{"lr": 0.1}] * 2, mode, **options)
    return [writers[0], writers[1]]


def log(writers: list[Writer], steps: Any, value: float = 0.0) -> None:
    """Log a key of its own in each process."""
    for n, writer in enumerate(writers):
        for step in steps:
            for run in range(2):
                logs = lox.logdict({f"p{n}": np.float32(value + run)}, steps={"step": {f"p{n}": step}})
                writer.append(run, logs)
        writer.close()


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("mode", ["new", "append", "overwrite", "error"])
def test_one_run_for_all_processes(tmp_path: Any, mode: str, order: Any) -> None:
    if mode != "error":
        log(begin(tmp_path, "before"), range(2), 5.0)
    writers = begin(tmp_path, "now", mode, order)
    name = {"new": "7.1", "append": "7", "overwrite": "7", "error": "7"}[mode]
    assert [writer.run_names[0] for writer in writers] == [name, name]
    assert lox.runs(tmp_path)[0].state == ("finished" if mode in ("new", "overwrite") else "running")
    log(writers, range(2))
    expected = {"new": ["7", "8", "7.1", "8.1"]}.get(mode, ["7", "8"])
    runs = {run.name: run for run in lox.runs(tmp_path)}
    assert list(runs) == expected
    assert {run.state for run in runs.values()} == {"finished"}
    assert runs[name].attempts == (2 if mode == "append" else 1)
    logs = lox.load(tmp_path, name)
    before = [5.0, 5.0] if mode == "append" else []
    assert {key: logs[key].tolist() for key in logs} == {"p0": [*before, 0.0, 0.0], "p1": [*before, 0.0, 0.0]}
    assert runs[name].events == len(logs["p0"]) + len(logs["p1"])


def test_runs_that_one_program_begins_again(tmp_path: Any) -> None:
    for attempt in range(2):
        writers = begin(tmp_path, "now")
        assert [writer.run_names[0] for writer in writers] == [["7", "7"], ["7.1", "7.1"]][attempt]
        log(writers, range(1), attempt)
    assert len(lox.runs(tmp_path)) == 4


def test_resumed_by_all_processes(tmp_path: Any) -> None:
    log(begin(tmp_path, "first"), range(6))
    for session, value in (("second", 0.0), ("third", 0.5)):
        writers = begin(tmp_path, session, resumed=[("step", 3)] * 2)
        log(writers, range(3, 8), value)
        logs = lox.load(tmp_path, "7")
        assert [logs.step[key].tolist() for key in ("p0", "p1")] == [list(range(8))] * 2
    assert logs["p1"].tolist() == [0.0] * 3 + [0.5] * 5
    run = lox.runs(tmp_path)[0]
    assert (run.attempts, run.resumed) == (3, "differs from step=3 on ('p0')")
    assert lox.load(tmp_path, "7", attempts="all").attempt["p1"].tolist() == [0] * 6 + [1] * 5 + [2] * 5


def test_a_process_that_is_killed(tmp_path: Any) -> None:
    zero, one = begin(tmp_path, "now")
    one.append(0, {"p1": np.float32(1)})
    one.flush()
    for segment in one._open_segments():
        segment.abandon()
    one._overwriting.clear()
    one.closed = True  # it never says that it ended
    lox.store._open.unregister(one.flush)
    zero.append(0, {"p0": np.float32(0)})
    zero.close()
    assert lox.load(tmp_path, "7")["p1"].tolist() == [1.0]
    assert lox.runs(tmp_path)[0].state == "killed"


def test_events_of_one_call_are_in_order_whatever_clocks_say() -> None:
    """Two processes log half of four events each, one of them with a slow clock; another line logs in between."""
    first, second = 5, 3
    number = lambda count, call: (count << 32) + call  # noqa: E731
    at = {number(0, first): 10.0, number(1, first): 10.0, number(2, first): 9.0, number(3, first): 20.0}
    at |= {number(0, second): 1.0, number(1, second): 15.0}
    numbers = np.asarray(sorted(at))
    times = _shards._in_time(numbers, np.asarray([at[n] for n in numbers.tolist()]))
    order = [divmod(int(n), 1 << 32) for n in numbers[np.lexsort((numbers, times))]]
    assert order == [(0, second), (0, first), (1, first), (2, first), (1, second), (3, first)]
