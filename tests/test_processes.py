"""Several real processes: `jax.distributed` with gloo, on CPU devices."""

import json
import shutil
import socket
import subprocess
from pathlib import Path
from typing import Any

import forks
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import wandb_file

import lox

pytestmark = pytest.mark.slow
KEYS = jax.vmap(jax.random.key)(jnp.array([7, 8]))


def run(case: str, path: Path, processes: int) -> list[Any]:
    """Run a case in so many processes; return what each of them prints in the end, or minus its signal."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program = Path(__file__).with_name("process_cases.py")
    path.mkdir(exist_ok=True)
    outputs = [open(path.with_name(f"{path.name}-{n}.txt"), "w+") for n in range(processes)]  # noqa: SIM115
    environment = forks.user_environment()
    started = [
        subprocess.Popen(
            forks.command(program, case, path, n, processes, port),
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        for n, output in enumerate(outputs)
    ]
    try:
        codes = [process.wait(timeout=240) for process in started]
    finally:
        for process, output in zip(started, outputs, strict=True):
            process.kill()
            process.wait()
            output.close()
    results = []
    for output, code in zip(outputs, codes, strict=True):
        lines = Path(output.name).read_text().splitlines()
        assert code <= 0, "\n".join(lines[-30:])
        said = [line for line in lines if line[:1] in '[{"n' and _is_json(line)]
        results.append(json.loads(said[-1]) if code == 0 else code)
    return results


def _is_json(line: str) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


@pytest.mark.sample(1)
@pytest.mark.parametrize("case", ["spool", "eager_spool", "watch"])
def test_every_process_sees_the_same(tmp_path: Path, case: str) -> None:
    (expected,) = run(case, tmp_path / "one", 1)
    assert run(case, tmp_path / "two", 2) == [expected, expected]


@pytest.mark.sample(1)
@pytest.mark.parametrize("case", ["tap", "tap_inside", "tap_buffer"])
def test_the_first_process_taps(tmp_path: Path, case: str) -> None:
    (expected,) = run(case, tmp_path / "one", 1)
    assert expected
    assert run(case, tmp_path / "two", 2) == [expected, []]


@pytest.mark.sample(1)
@pytest.mark.parametrize("case", ["save", "resume"])
def test_one_run_on_disk(tmp_path: Path, case: str) -> None:
    for processes, name in ((1, "one"), (2, "two")):
        run(case, tmp_path / name, processes)
    one, two = (
        [(r.name, r.events, r.attempts, r.state, r.resumed) for r in lox.runs(tmp_path / n)] for n in ("one", "two")
    )
    assert one == two and len(one) == 2
    expected, logs = (lox.load(tmp_path / name, KEYS) for name in ("one", "two"))
    assert str(logs) == str(expected) and str(logs.steps) == str(expected.steps)
    groups = [path for path in (tmp_path / "two").iterdir() if path.is_dir()]
    assert len(groups) == 2 * len([path for path in (tmp_path / "one").iterdir() if path.is_dir()])


@pytest.mark.nightly
def test_parts_of_arrays(tmp_path: Path) -> None:
    for processes, name in ((1, "one"), (2, "two")):
        run("parts", tmp_path / name, processes)
    one, two = lox.runs(tmp_path / "one"), lox.runs(tmp_path / "two")
    assert [(r.name, r.events, r.state) for r in one] == [(r.name, r.events, r.state) for r in two]
    assert [r.name for r in one] == ["0", "1", "2", "3"]
    for name in ("0", "1", "2", "3"):
        expected, logs = lox.load(tmp_path / "one", name), lox.load(tmp_path / "two", name)
        same(logs, expected)
    keys = jax.vmap(jax.random.key)(jnp.arange(4))
    both = [lox.load(tmp_path / name, keys) for name in ("one", "two")]
    same(both[1], both[0])
    polled = [lox.store.Reader(tmp_path / name).poll() for name in ("one", "two")]
    for name in polled[0]:
        same(polled[1][name], polled[0][name])
    lox.store.compact(tmp_path / "two")
    same(lox.load(tmp_path / "two", keys), both[0])


def same(logs: Any, expected: Any) -> None:
    assert sorted(logs) == sorted(expected)
    data = lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x  # noqa: E731
    for key in logs:
        assert jax.tree.structure(logs[key]) == jax.tree.structure(expected[key]), key
        for a, b in zip(jax.tree.leaves(logs[key]), jax.tree.leaves(expected[key]), strict=True):
            a, b = np.asarray(data(a)), np.asarray(data(b))
            assert a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes(), key
    for name in {*logs.steps, *expected.steps}:
        assert sorted(map(str, logs.steps[name].items())) == sorted(map(str, expected.steps[name].items()))


def test_what_processes_agree_about(tmp_path: Path) -> None:
    for processes, name in ((1, "one"), (2, "two")):
        run("corners", tmp_path / name, processes)
    one, two = ([(r.name, r.events) for r in lox.runs(tmp_path / name)] for name in ("one", "two"))
    assert one == two and [name for name, _ in one] == ["0", "1", "2", "3", "0.1"]
    for name, _ in one:
        same(lox.load(tmp_path / "two", name), lox.load(tmp_path / "one", name))
    logs = lox.load(tmp_path / "two", "0", wall=True)
    assert logs["row"].tolist() == [[i] * 4 for i in range(3)]
    assert (np.diff(logs.steps["wall"]["row"]) >= 0).all()
    assert logs["promoted"].tolist() == [[1.0] * 4, [300.0] * 4, [0.5] * 4] and logs["promoted"].dtype == np.float32


def test_processes_that_log_different_things(tmp_path: Path) -> None:
    first, second = run("different", tmp_path / "two", 2)
    assert first.startswith("one of 'there' is an array of shape (2,) on devices of another process") and second is None
    text = r"2 of 5 events of 'a' are incomplete and left out: processes have logged different events"
    with pytest.warns(lox.LoxWarning, match=text):
        assert lox.load(tmp_path / "two", "7")["a"].tolist() == [[i] * 4 for i in range(3)]


@pytest.mark.sample(1)
@pytest.mark.parametrize("case", ["ragged", "inside"])
def test_the_same_runs_as_from_one_process(tmp_path: Path, case: str) -> None:
    for processes, name in ((1, "one"), (2, "two")):
        run(case, tmp_path / name, processes)
    one, two = (sorted((r.name, r.events, r.state) for r in lox.runs(tmp_path / name)) for name in ("one", "two"))
    assert one == two
    for name, *_ in one:
        same(lox.load(tmp_path / "two", name), lox.load(tmp_path / "one", name))


@pytest.mark.nightly
def test_a_tracker_takes_whole_arrays(tmp_path: Path) -> None:
    first, second = run("tracker_parts", tmp_path / "two", 2)
    assert len(first) == 1 and first[0].startswith(
        "'w' has an array of shape (8,) that is spread over several processes"
    )
    assert len(second) == 1 and "events of the devices of this process were not written: JsonlLogger" in second[0]
    (file,) = (tmp_path / "two" / "json").iterdir()
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert lines[:2] == [{"step": 0, "a": 1.0}, {"step": 1, "a": 2.0}]
    assert sorted(line["large"][0] for line in lines[2:]) == [0.0, 2.0]
    logs = lox.load(tmp_path / "two" / "save", "7")
    assert logs["w"].tolist() == [[*range(8)]] and logs["a"].tolist() == [1.0, 2.0]
    assert sorted(logs["large"][:, 0].tolist()) == [0.0, 2.0, 4.0, 6.0]
    order = np.argsort(logs.steps["x"]["large"])
    assert logs["large"][order, 0].tolist() == [0.0, 2.0, 4.0, 6.0]


@pytest.mark.nightly
def test_parts_of_a_process_that_is_killed_are_missing(tmp_path: Path) -> None:
    assert run("parts_killed", tmp_path / "two", 2) == ["closed", -9]
    reader = lox.store.Reader(tmp_path / "two")
    assert reader.poll()["7"]["w"].shape == (3, 8)
    assert not reader.poll()
    with pytest.warns(
        lox.LoxWarning, match=r"run '7': 2 of 5 events of 'w' are .* left out: process 1 has written 3\."
    ):
        logs = lox.load(tmp_path / "two", "7")
    assert np.array_equal(logs["w"], np.arange(8) + np.arange(3)[:, None])
    assert logs.step["w"].tolist() == [0, 1, 2]
    assert logs["mean"].tolist() == [0, 1, 2, 3, 4]
    (run_,) = lox.runs(tmp_path / "two")
    assert run_.state == "killed" and run_.attempts == 1
    for group in (tmp_path / "two").iterdir():
        if group.is_dir() and '"process": 1' in (group / "runs.jsonl").read_text():
            shutil.rmtree(group)
    with pytest.warns(lox.LoxWarning, match=r"5 of 5 events of 'w' .*: process 1 has written nothing of it\."):
        assert [*lox.load(tmp_path / "two", "7")] == ["mean"]
    with pytest.warns(lox.LoxWarning, match=r"run '7': process 1 has written nothing here, of 2: what only they had"):
        lox.load(tmp_path / "two", "7", argnames="mean")


@pytest.mark.nightly
def test_a_text_file_is_written_by_the_first_process(tmp_path: Path) -> None:
    for processes, name in ((1, "one"), (2, "two")):
        run("jsonl", tmp_path / name, processes)
    one, two = ({f.name: f.read_text() for f in (tmp_path / name).iterdir()} for name in ("one", "two"))
    assert one == two and len(one) == 2


@pytest.mark.nightly
@pytest.mark.parametrize(("case", "folders"), [("tensorboard", 2), ("tensorboard_together", 1)])
def test_tensorboard_in_the_first_process(tmp_path: Path, case: str, folders: int) -> None:
    readers = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found: list[Any] = []
    for processes in (1, 2):
        path = tmp_path / str(processes)
        run(case, path, processes)
        files = sorted(path.rglob("*tfevents*"))
        assert len(files) == folders
        accumulators = [readers.EventAccumulator(str(file.parent), size_guidance={"scalars": 0}) for file in files]
        found.append(
            [
                {tag: [(e.step, e.value) for e in a.Scalars(tag)] for tag in a.Tags()["scalars"]}
                | {tag: len(a.Tensors(tag)) for tag in a.Tags()["tensors"]}
                for a in (a.Reload() for a in accumulators)
            ]
        )
    assert found[0] == found[1] and len(found[0][0]) > 5


@pytest.mark.nightly
def test_wandb_in_the_first_process(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    found = []
    for processes in (1, 2):
        run("wandb", tmp_path / str(processes), processes)
        files = wandb_file.read_all(tmp_path / str(processes))
        found.append({name: file.events("step") for name, file in files.items()})
    assert found[0] == found[1] and len(found[0]) == 2


def test_one_process_is_killed(tmp_path: Path) -> None:
    assert run("killed", tmp_path / "two", 2) == ["closed", -9]
    assert lox.load(tmp_path / "two", "7")["x"].tolist() == [1.0, 2.0]
    assert lox.runs(tmp_path / "two")[0].state == "killed"
