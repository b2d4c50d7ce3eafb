"""The `lox` command: what it prints, what it refuses and how, and that what it exports reads back exactly."""

import csv
import io
import json
import os
import pty
import re
import select
import shlex
import signal
import subprocess
import sys
import time
import urllib.request
import warnings
from pathlib import Path

import forks
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from optional import duckdb, package, pandas, polars, pyarrow

import lox

typer = pytest.importorskip("typer", reason="typer is not installed")
from lox._command import _app, _choose, _tail  # noqa: E402
from lox.view import _filter  # noqa: E402

package("pyarrow.parquet")
ROOT = Path(lox.__file__).parent.parent
ENVIRONMENT = {**forks.user_environment(), "TZ": "UTC"}
HOSTILE = ["=cmd|' /C calc'!A0", "a\nb", "\x1b[31mred\x1b[0m", "[bold]x[/bold]", "größe/πάθος", "a,b;\"c'", "'quoted"]


@pytest.fixture
def command(capsys):
    """Run a command line in this process; return its exit code and what it printed."""

    def run(*arguments):
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            _app.run([str(argument) for argument in arguments])
        printed = capsys.readouterr()
        return end.value.code or 0, printed.out, printed.err

    return run


def process(*arguments, environment=None, **options):
    command = forks.command("-m", "lox", *arguments)
    return subprocess.run(
        command, capture_output=True, text=True, env={**ENVIRONMENT, **(environment or {})}, **options
    )


def logs_of(values, **keys):
    return lox.logdict.from_arrays(
        {"loss": np.asarray(values, np.float32), **keys}, steps={"step": np.arange(len(values))}
    )


@pytest.fixture
def directory(tmp_path):
    """Four runs: two seeds of two learning rates, of which the second has lost one early."""
    for lr in (0.1, 0.01):
        for seed in (0, 1):
            values = [1.0, 0.5, 0.25, lr + seed / 100][: 2 if lr == 0.01 and seed else 4]
            lox.save(
                logs_of(values),
                tmp_path / "runs",
                key=jax.random.key(seed),
                mode="new",
                config={"lr": lr, "seed": seed, "opt": {"name": "adam", "depth": 3}},
            )
    return tmp_path / "runs"


# --- ls ---


def test_ls_is_a_table_of_what_differs_and_a_line_of_what_does_not(command, directory):
    code, out, err = command("ls", directory)
    assert (code, err) == (0, "")
    out = re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", "YYYY-MM-DD HH:MM:SS", out)
    assert out == (
        "run  lr    seed  events  began                duration  state\n"
        "0    0.1   0          4  YYYY-MM-DD HH:MM:SS      0:00  finished\n"
        "1    0.1   1          4  YYYY-MM-DD HH:MM:SS      0:00  finished\n"
        "0.1  0.01  0          4  YYYY-MM-DD HH:MM:SS      0:00  finished\n"
        "1.1  0.01  1          2  YYYY-MM-DD HH:MM:SS      0:00  finished\n"
        "\n"
        "all 4 runs have opt.name=adam, opt.depth=3\n"
    )


def test_ls_in_json(command, directory):
    code, out, _ = command("ls", directory, "--json", "--where", "lr=0.01")
    first, second = json.loads(out)
    assert code == 0 and [first["name"], second["name"]] == ["0.1", "1.1"]
    assert first["config"] == {"lr": 0.01, "seed": 0, "opt": {"name": "adam", "depth": 3}}
    assert (first["events"], second["events"], first["state"], first["attempts"]) == (4, 2, "finished", 1)
    assert first["key_data"] == [0, 0] and first["key_impl"] == "threefry2x32"


@pytest.mark.parametrize(
    ("condition", "names"),
    [
        ("lr=0.1", ["0", "1"]),
        ("lr==0.1", ["0", "1"]),
        ("lr!=0.1", ["0.1", "1.1"]),
        ("lr>0.05", ["0", "1"]),
        ("lr<=0.01", ["0.1", "1.1"]),
        (" seed >= 1 ", ["1", "1.1"]),
        ("opt.name=adam", ["0", "1", "0.1", "1.1"]),
        ('opt.name="adam"', ["0", "1", "0.1", "1.1"]),
        ("opt.depth<4", ["0", "1", "0.1", "1.1"]),
    ],
)
def test_where(command, directory, condition, names):
    code, out, _ = command("ls", directory, "--json", "-w", condition)
    assert code == 0 and [run["name"] for run in json.loads(out)] == names


def test_values_of_other_types_are_compared_as_such():
    holds = lambda text, value: _filter.condition(text).holds_for(value)  # noqa: E731
    assert holds("x=true", True) and holds("x=True", True) and not holds("x=1", True)
    assert holds("x=null", None) and holds("x=None", None) and holds("x=[1, 2]", [1, 2])
    assert holds("x=1", 1) and holds("x=1", 1.0) and holds("x=1", "1") and not holds("x=2", "1")
    assert holds("x=0.1", float(np.float32(0.1))) and holds("x=1e-3", 0.001)
    assert not holds("x>1", True) and not holds("x>1", None) and not holds("x>1", "2")


def test_all_conditions_must_hold(command, directory):
    assert command("ls", directory, "-w", "lr=0.1", "-w", "seed=1")[1].count("finished") == 1


# --- refusals ---


def test_what_lox_refuses_is_one_message_and_exit_code_1(command, directory, tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    (tmp_path / "file").write_text("")
    expected = {
        (
            tmp_path / "none",
        ): f"there is no directory '{tmp_path}/none'. Check the path; loggers and `lox.save` make it.",
        (empty,): f"the directory '{empty}' has no runs: lox has written nothing to it. Check the path.",
        (tmp_path / "file",): f"'{tmp_path}/file' is a file: give the directory that lox wrote to.",
        (tmp_path,): f"the directory '{tmp_path}' has no runs: lox has written nothing to it. Check the path. "
        f"'{directory}' has some.",
        (directory, "-w", "lrr=1"): f"no run in '{directory}' has 'lrr' in its config. The names are 'lr', 'seed', "
        "'opt.name' and 'opt.depth'. Did you mean 'lr'?",
        (directory, "-w", "lr=7"): f"no run in '{directory}' has lr=7 in its config. `lox ls {directory}` shows what "
        "they have.",
        (
            directory,
            "-w",
            "lr",
        ): "'lr' is not a condition. Write the name of a value in the config, a sign (= != > >= < "
        "<= ~) and a value: lr=0.1, opt.depth>=3; ~ is for regular expressions.",
    }
    for arguments, message in expected.items():
        assert command("ls", *arguments) == (1, "", f"error: {message}\n")
    code, out, err = command("show", directory, "42")
    assert (code, out) == (1, "")
    assert err == f"error: there is no run '42' in '{directory}'. The runs are '0', '1', '0.1' and '1.1'.\n"
    code, out, err = command("show", directory, "-k", "los")
    assert (code, err) == (1, "error: no key matches 'los'. The keys are 'loss'. Did you mean 'loss'?\n")
    code, out, err = command("compare", directory, "-k", "loss", "--by", "lr,seed")
    assert code == 1 and err.endswith(" Name 'lr' and 'seed' one by one.\n")


def test_runs_without_events_and_keys_in_scopes(command, tmp_path):
    with pytest.raises(RuntimeError), lox.SaveLogger(tmp_path) as logger:
        logger.init(jax.random.key(0))
        raise RuntimeError
    assert command("show", tmp_path)[1].endswith("\n\nno events\n")  # and none will come
    assert command("show", tmp_path, "-k", "loss")[2] == "error: no key matches 'loss'. Nothing was logged.\n"
    with lox.SaveLogger(tmp_path) as logger:
        logger.log(logger.init(jax.random.key(1)), {"eval/return": 1.0})
    expected = "error: no key matches 'eval'. The keys are 'eval/return'. Did you mean 'eval/*'?\n"
    assert command("show", tmp_path, "-k", "eval")[2] == expected


def test_a_name_may_be_typed_up_to_its_first_blank(command, tmp_path):
    for lane in (1, 10):
        run = lox.store.Writer(tmp_path / "runs")
        run.append(run.open_run(f"lane{lane} lr=0.1"), {"x": np.float32(lane)})
        run.close()
    assert command("show", tmp_path / "runs", "lane1")[1].startswith("run lane1 lr=0.1\n")
    assert command("tail", tmp_path / "runs", "lane1", "--once")[1] == "lane1 lr=0.1  x 1\n"
    code, _, err = command("ls", tmp_path / "run")
    assert code == 1 and err.endswith("Did you mean 'runs'?\n")


@pytest.mark.parametrize("name", ["show", "tail", "repair", "export"])
def test_every_command_says_that_there_is_nothing(command, tmp_path, name):
    options = ["-o", tmp_path / "x.csv"] if name == "export" else []
    code, out, err = command(name, tmp_path / "none", *options)
    assert (code, out) == (1, "") and err.startswith("error: there is no directory")
    code, out, err = command(name, tmp_path, *options)
    assert (code, out) == (1, "") and "has no runs: lox has written nothing to it" in err
    assert list(tmp_path.iterdir()) == []


def test_usage_errors_have_exit_code_2(command, directory):
    for arguments in (["ls"], ["lss", directory], ["ls", directory, "--jsn"], ["tail", directory, "-n", "many"]):
        code, out, err = command(*arguments)
        assert (code, out) == (2, "") and "Usage: lox" in err and "Traceback" not in err
    code, out, err = command("export", directory, "--to", "xlsx", "-o", "x")
    assert code == 2 and "csv" in err and "parquet" in err


@pytest.mark.slow
def test_tracebacks_on_demand(directory, tmp_path, command):
    with pytest.raises(lox.RunNotFoundError, match="there is no directory"):
        _app.run(["--traceback", "ls", str(tmp_path / "none")])
    done = process("ls", tmp_path / "none", environment={"LOX_TRACEBACK": "1"})
    assert done.returncode == 1 and "Traceback" in done.stderr and "RunNotFoundError" in done.stderr
    done = process("ls", tmp_path / "none")
    assert (done.returncode, done.stdout) == (1, "") and done.stderr.count("\n") == 1


def test_what_nobody_expected_shows_where_it_comes_from(command, directory, monkeypatch):
    def fail(*_, **__):
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(_choose, "runs", fail)
    with pytest.raises(ZeroDivisionError, match="a bug"):
        _app.run(["ls", str(directory)])


def test_help_has_examples_that_parse(command):
    names = [line.split()[0] for line in command("--help")[1].partition("Commands:\n")[2].splitlines()]
    assert set(names) == {"ls", "show", "plot", "compare", "tail", "export", "repair", "ui"}
    for name in names:
        code, out, _ = command(name, "--help")
        assert code == 0 and "DIR" in out
        examples = [line.strip() for line in out.partition("Examples:\n")[2].partition("\n\n")[0].splitlines()]
        assert examples and all(example.startswith(f"lox {name} runs") for example in examples)


def test_version(command):
    assert command("--version") == (0, f"lox {lox.__version__}\n", "")


@pytest.mark.slow
def test_without_typer_it_says_what_to_install():
    program = "import sys; sys.modules['typer'] = None; from lox._command import main; main()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=ENVIRONMENT)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == 'error: the `lox` command needs Typer: pip install "lox-jax[cli]"\n'


# --- show ---


def test_show_one_run(command, directory):
    code, out, err = command("show", directory, "0")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "run 0" and lines[1].startswith("finished, began ")
    assert lines[2:] == [
        "lr=0.1, seed=0, opt.name=adam, opt.depth=3",
        "",
        "key   events  last  min  max  trend",
        "loss       4   0.1  0.1    1  █▄▂▁",
    ]


def test_show_groups_of_seeds(command, directory):
    code, out, err = command("show", directory)
    assert (code, err) == (0, "")
    assert out == (
        "lr=0.1\n"
        "2 runs: 2 finished\n"
        "\n"
        "key   events  last ± std over runs  min  max  trend\n"
        "loss       4      0.105 ± 0.007071  0.1    1  █▄▂▁\n"
        "\n"
        "lr=0.01\n"
        "2 runs: 2 finished\n"
        "\n"
        "key   events  last ± std over runs   min  max  trend\n"
        "loss     2–4        0.255 ± 0.3465  0.01    1  █▄▂▁\n"
    )


def test_show_in_json_has_the_numbers(command, directory):
    code, out, _ = command("show", directory, "--json", "--by", "lr")
    found = json.loads(out)
    assert code == 0 and [run["keys"][0]["last"] for run in found["runs"]] == pytest.approx([0.1, 0.11, 0.01, 0.5])
    last = np.float32([0.1, 0.11]).astype(float)
    assert found["groups"][0]["name"] == "lr=0.1" and found["groups"][0]["runs"] == ["0", "1"]
    assert found["groups"][0]["keys"][0]["last"] == last.mean()
    assert found["groups"][0]["keys"][0]["std"] == last.std(ddof=1)


def test_show_every_kind_of_value(command, tmp_path):
    values = {
        "array": np.ones((3, 2), np.float32),
        "hist": jax.tree.map(lambda x: np.asarray(x)[None], lox.Histogram(jnp.array([1.0, 3.0]))),
        "image": lox.Image(np.zeros((4, 4), np.uint8)),
        "complex": np.complex64([3 + 4j]),
        "nan": np.float32([1, np.nan, np.inf]),
        "count": np.int32([1, 2, 12345]),
        "flag": np.array([True, False]),
        "prng": jax.random.split(jax.random.key(1), 2),
        "tree": {"a": np.float64([1, 2])},
    }
    for name, value in values.items():
        one = lox.logdict({name: value}) if name == "image" else lox.logdict.from_arrays({name: value})
        lox.save(one, tmp_path, mode="append", key=jax.random.key(0))
    code, out, err = command("show", tmp_path)
    assert (code, err) == (0, "")
    rows = {line.split("  ")[0]: line for line in out.splitlines()}
    assert "3  1 not finite" not in rows["nan"] and "2 not finite" in rows["nan"]
    assert "12,345" in rows["count"] and "5" in rows["complex"].split() and "image" in rows["image"]
    assert "2" in rows["hist"].split() and "tree['a']" in rows
    found = json.loads(command("show", tmp_path, "--json")[1])["runs"][0]["keys"]
    kinds = {key["key"]: key["type"] for key in found}
    assert kinds["array"] == "float32[2]" and kinds["hist"] == "histogram" and kinds["prng"] == "uint32[2]"


# --- tail ---


def test_tail_once(command, directory):
    code, out, err = command("tail", directory, "--once", "-n", "3")
    assert (code, err) == (0, "")
    assert out.splitlines() == ["0.1  step=3  loss 0.01", "1.1  step=0  loss 1", "1.1  step=1  loss 0.5"]
    code, out, err = command("tail", directory, "0", "--once", "--json", "-n", "1")
    event = json.loads(out)
    assert event["run"] == "0" and event["steps"] == {"step": 3} and event["values"] == {"loss": 0.1}
    assert abs(event["wall"] - time.time()) < 3600
    assert command("tail", directory, "--once", "-n", "0") == (0, "", "")


def reading(process, wanted, seconds=60.0):
    """Read lines of a process until one contains this; end it if that does not come."""
    lines, end = [], time.monotonic() + seconds
    while time.monotonic() < end:
        if select.select([process.stdout], [], [], 1)[0]:
            lines.append(process.stdout.readline())
            if wanted in lines[-1]:
                return lines
    process.kill()
    raise AssertionError(f"{wanted!r} did not come; there was {lines}")


@pytest.mark.slow
def test_tail_follows_new_events_and_new_runs_and_ctrl_c_ends_it(tmp_path):
    writer = lox.store.Writer(tmp_path)
    run = writer.open_run("first")
    writer.append(run, lox.logdict({"loss": np.float32(1)}, steps={"step": {"loss": np.int32(0)}}))
    writer.flush()
    tail = subprocess.Popen(
        forks.command("-m", "lox", "tail", tmp_path, "--interval", "0.05"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    )
    assert reading(tail, "loss")[-1] == "first  step=0  loss 1\n"
    writer.append(run, lox.logdict({"loss": np.float32(0.5)}, steps={"step": {"loss": np.int32(1)}}))
    writer.flush()
    assert reading(tail, "loss")[-1] == "first  step=1  loss 0.5\n"
    with lox.store.Writer(tmp_path) as second:
        second.append(second.open_run("second"), {"other": np.int32(7)})
    assert reading(tail, "other")[-1] == "second  other 7\n"
    tail.send_signal(signal.SIGINT)
    out, err = tail.communicate(timeout=60)
    assert (tail.returncode, out, err) == (130, "", "")
    writer.close()


@pytest.mark.slow
def test_tail_until_finished_has_everything(tmp_path):
    writer = lox.store.Writer(tmp_path)
    run = writer.open_run("a")
    writer.append(run, {"x": np.int32(0)})
    writer.flush()
    arguments = ["tail", str(tmp_path), "--until-finished", "--json", "--interval", "0.01"]
    tail = subprocess.Popen(forks.command("-m", "lox", *arguments), stdout=subprocess.PIPE, text=True, env=ENVIRONMENT)
    lines = reading(tail, '"x"')
    for n in range(1, 50):
        writer.append(run, {"x": np.int32(n)})
        writer.flush()
    writer.close()
    lines += tail.communicate(timeout=60)[0].splitlines()
    assert tail.returncode == 0 and [json.loads(line)["values"]["x"] for line in lines] == list(range(50))


@pytest.mark.sample(4)
@pytest.mark.slow
@pytest.mark.parametrize("backlog", [0, 3])
@pytest.mark.parametrize("seed", range(int(os.environ.get("LOX_TAIL_N", "6"))))
def test_tail_neither_loses_nor_doubles_events(tmp_path, seed, backlog):
    """Runs begin, log, end, go on and are merged while somebody looks."""
    rng = np.random.default_rng(seed)
    logged, writers = [], []

    def happen():
        what = rng.choice(["begin", "log", "log", "log", "flush", "close", "compact"])
        if what == "begin" or not writers:
            mode = str(rng.choice(["new", "append"]))
            writer = lox.store.Writer(tmp_path)
            writers.append((writer, writer.open_run(f"run{rng.integers(3)}", mode=mode)))
        elif what == "log":
            writer, run = writers[rng.integers(len(writers))]
            key = str(rng.choice(["a", "b"]))
            writer.append(run, {key: rng.choice([np.int32, np.float32])(len(logged))})
            logged.append(float(len(logged)))
        elif what == "compact":
            lox.store.compact(tmp_path)
        elif what == "flush":
            writers[rng.integers(len(writers))][0].flush()
        else:
            writers.pop(rng.integers(len(writers)))[0].close()

    def close():
        while writers:
            writers.pop()[0].close()

    for _ in range(20):
        happen()
    close()
    before, looks = len(logged), 0

    def ends(names):
        nonlocal looks
        looks += 1
        happen() if 1 < looks < 60 else close()
        return looks == 60

    reader = lox.store.Reader(tmp_path)
    reader._wall = True
    reader.refresh()
    found = [e for events in _tail.follow(reader, (), (), (), backlog, 0.0, ends) for e in events]
    seen = [float(value) for event in found for value in event.values.values()]
    assert sorted(seen) == logged[max(0, before - backlog) :]


# --- files that are not whole ---


def torn(directory):
    """Leave half a batch at the end of a file, as a kill does."""
    (file,) = sorted(directory.glob("*/p0000-000.arrows"))[-1:]
    whole = file.read_bytes()
    file.write_bytes(whole + whole[-60:-20])
    meta = file.with_name("meta.json")
    meta.unlink()
    return file


def test_a_killed_run_is_shown_with_a_warning_and_can_be_repaired(command, tmp_path):
    writer = lox.store.Writer(tmp_path)
    run = writer.open_run("a")
    writer.append(run, {"x": np.float32(1)})
    writer.close()
    file = torn(tmp_path)
    code, out, _ = command("ls", tmp_path)
    assert code == 0 and "killed" in out
    for name in ("show", "tail"):
        code, out, err = command(name, tmp_path, *["--once"] * (name == "tail"))
        assert code == 0 and " 1" in out and err.count("\n") <= 1
    code, out, err = command("show", tmp_path)
    assert err.startswith("warning: 1 damaged files were skipped in part: ") and err.count("\n") == 1
    code, out, err = command("export", tmp_path, "--to", "jsonl", "-o", "-")
    assert code == 0 and json.loads(out)["value"] == 1 and err.startswith("warning: ")
    code, out, err = command("repair", tmp_path, "--json")
    assert (code, err) == (0, "") and json.loads(out) == [{"file": str(file), "bytes": 40}]
    assert command("repair", tmp_path) == (0, "nothing to repair\n", "")
    assert command("show", tmp_path)[2] == ""


def test_damaged_rows_are_an_error_in_an_export_unless_asked_for(command, tmp_path):
    lox.save(logs_of(np.arange(1000.0)), tmp_path / "runs")
    (file,) = (tmp_path / "runs").glob("*/p0000-000.arrows")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    code, out, err = command("export", tmp_path / "runs", "-o", tmp_path / "x.csv")
    assert (code, out) == (1, "") and err.startswith("error: ") and "checksum" in err
    assert not (tmp_path / "x.csv").exists() and [p.name for p in tmp_path.iterdir()] == ["runs"]
    code, out, err = command("export", tmp_path / "runs", "-o", tmp_path / "x.csv", "--damaged", "skip")
    assert code == 0 and "warning: " in err and (tmp_path / "x.csv").exists()


# --- terminals and pipes ---


def on_terminal(*arguments, columns=100, environment=None):
    """Run a command on a terminal so wide, and return what it gets."""
    outer, inner = pty.openpty()
    environment = {**ENVIRONMENT, "COLUMNS": str(columns), "TERM": "xterm-256color", **(environment or {})}
    environment.pop("NO_COLOR", None) if not (environment or {}).get("NO_COLOR") else None
    command = forks.command("-m", "lox", *arguments)
    started = subprocess.Popen(command, stdout=inner, stderr=inner, stdin=inner, env=environment)
    os.close(inner)
    data = b""
    while True:
        try:
            part = os.read(outer, 65536)
        except OSError:  # the other side is closed
            break
        if not part:
            break
        data += part
    os.close(outer)
    assert started.wait(60) == 0
    return data.decode().replace("\r\n", "\n")


@pytest.mark.slow
def test_colours_are_for_terminals(directory):
    assert "\x1b[" in on_terminal("ls", directory)
    assert "\x1b[3" not in on_terminal("show", directory, environment={"NO_COLOR": "1"})  # bold is no colour
    assert "\x1b" not in process("show", directory).stdout


@pytest.mark.slow
def test_nothing_that_matters_is_cut_off_on_a_narrow_terminal(directory):
    for columns in (30, 60):
        out = on_terminal("ls", directory, columns=columns, environment={"NO_COLOR": "1"})
        assert "…" not in out and out.count("finished") == 4 and "began" in out
        if columns == 60:  # lines end between two settings, and not in the middle of one
            rows = out.partition("\n\n")[0].splitlines()
            assert all(len(row) <= columns for row in rows) and "state finished" in out
        out = on_terminal("show", directory, columns=columns, environment={"NO_COLOR": "1"})
        out = out.replace("\n", "")
        assert "loss" in out and "0.007071" in out


def test_a_pipe_gets_everything_in_one_line_however_long(command, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    config = {f"parameter{n}": "x" * 30 + str(n) for n in range(10)}
    lox.save(logs_of([1.0]), tmp_path, config=config)
    code, out, _ = command("ls", tmp_path)
    assert code == 0 and out.count("\n") == 2 and all(value in out.splitlines()[1] for value in config.values())


@pytest.mark.slow
def test_a_closed_pipe_is_no_error(tmp_path):
    for n in range(300):
        lox.save({"x": n}, tmp_path, key=jax.random.key(n), config={"text": "x" * 500})
    for name in ("ls", "tail"):
        arguments = f"{name} {tmp_path} --json" + (" --once -n 1000" if name == "tail" else "")
        program = f"{shlex.join(forks.command('-m', 'lox'))} {arguments} | head -n 1; echo ${{PIPESTATUS[0]}}"
        done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, env=ENVIRONMENT)
        assert done.stderr == "" and done.stdout.splitlines()[-1] in ("0", "141")


def test_names_do_not_act_on_the_terminal(command, tmp_path):
    keys = {name: np.float32([1]) for name in HOSTILE}
    config = {"\x1b]0;title\x07": "\x1b[2J", "[red]": "[/]"}
    lox.save(lox.logdict.from_arrays(keys), tmp_path / "runs", config=config)
    for arguments in (["ls"], ["show"], ["tail", "--once"]):
        code, out, err = command(arguments[0], tmp_path / "runs", *arguments[1:])
        assert code == 0 and "\x1b" not in out + err and "\x07" not in out
        shown = ["�[31mred�[0m", "[bold]x[/bold]", "a�b"] if arguments[0] != "ls" else ["�]0;title�", "[red]", "[/]"]
        assert all(name in out for name in shown)
    code, out, err = command("show", tmp_path / "runs", "\x1b[31m")
    assert code == 1 and "\x1b" not in err


# --- JAX ---


@pytest.mark.slow
def test_no_command_starts_a_backend(directory, tmp_path):
    lox.save({"prng": jax.random.split(jax.random.key(3), 2)}, directory, key=jax.random.key(9))
    lox.save({"h": lox.Histogram(jnp.ones(3)), "i": lox.Image(jnp.ones((2, 2)))}, directory, key=jax.random.key(10))
    lines = [
        ["ls", directory],
        ["ls", directory, "--json"],
        ["show", directory],
        ["show", directory, "9", "--json"],
        ["tail", directory, "--once", "-n", "100"],
        ["repair", directory],
        ["compare", directory, "-k", "loss", "--by", "lr", "-w", "lr>0"],
        ["plot", directory, "-o", tmp_path / "plot.html"],
        ["plot", directory, "-k", "loss", "--x", "wall", "-o", tmp_path / "plot.png"],
        *[["export", directory, "--to", to, "-o", tmp_path / to] for to in ("csv", "jsonl", "parquet", "tensorboard")],
    ]
    program = (
        "import json, sys\n"
        "from lox._command import _app\n"
        "from jax._src import xla_bridge\n"
        "for line in json.loads(sys.argv[1]):\n"
        "    try:\n"
        "        _app.run(line)\n"
        "    except SystemExit as end:\n"
        "        assert not end.code, line\n"
        "    assert not xla_bridge.backends_are_initialized(), line\n"
    )
    lines = json.dumps([[str(word) for word in line] for line in lines])
    done = subprocess.run([sys.executable, "-c", program, lines], capture_output=True, text=True, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr


# --- completion ---


@pytest.mark.slow
def test_shells_complete_runs_and_keys_of_the_directory(directory):
    def completed(*words):
        environment = {
            "_LOX_COMPLETE": "complete_bash",
            "COMP_WORDS": " ".join(words),
            "COMP_CWORD": str(len(words) - 1),
        }
        return process(environment=environment).stdout.split()

    assert completed("lox", "show", str(directory), "1") == ["1", "1.1"]
    assert completed("lox", "show", str(directory), "--key", "lo") == ["loss"]
    assert completed("lox", "ls", str(directory), "--where", "opt") == ["opt.name=", "opt.depth="]
    assert completed("lox", "show", str(directory / "none"), "x") == []
    assert "show" in completed("lox", "sh")


# --- export ---

SPECIAL = np.float32([0.1, -0.0, np.nan, np.inf, -np.inf, 1e-45, 3.4028235e38, 1 / 3])


def variety():
    """Values of every dtype, with steps that some keys lack."""
    rng = np.random.default_rng(0)
    steps, epochs = {"step": np.arange(8)}, {"epoch": np.arange(8) / 2}
    from_arrays = lox.logdict.from_arrays
    first = from_arrays({"f32": SPECIAL, "f64": rng.normal(size=8) * 10.0 ** np.arange(-150, 170, 40)}, steps=steps)
    parts = [
        first,
        from_arrays({"i64": np.int64([2**63 - 1, -(2**63), 2**53 + 1, 0, 1, 2, 3, 4])}, steps=epochs),
        from_arrays({"u64": np.uint64([2**64 - 1, 0]), "flag": np.array([True, False])}),
        from_arrays({"bf16": np.asarray(jnp.asarray([0.1, 3.0], jnp.bfloat16)), "f16": np.float16([0.1, 65504])}),
        from_arrays({"array": rng.normal(size=(3, 2, 2)).astype(np.float32), "complex": np.complex64([1 + 2j, 0, 1j])}),
    ]
    whole = parts[0]
    for part in parts[1:]:
        whole = whole | part
    return whole


@pytest.fixture
def many(tmp_path):
    """Runs with different keys: of every dtype, ragged, in lanes, and with hostile names."""
    lox.save(variety(), tmp_path / "runs", key=jax.random.key(0), config={"lr": 0.1, "name": "=1+1"})
    hostile = lox.logdict.from_arrays({name: np.float32([n, n + 0.5]) for n, name in enumerate(HOSTILE)})
    lox.save(hostile, tmp_path / "runs", key=jax.random.key(1), config={"lr": 0.2, "other": [1, 2]})

    def ragged(x):
        def body(carry, i):
            lox.log({"ragged": i * x}, step=i, where=i % 3 < x)
            return carry, None

        return jax.lax.scan(body, 0, jnp.arange(6))[0]

    _, lanes = lox.spool(jax.vmap(ragged))(jnp.arange(3))
    lox.save(lanes, tmp_path / "runs", key=jax.random.key(2))
    return tmp_path / "runs"


def expected(directory):
    """Return what an export must have: for each run, key, lane and event the value, as `lox.load` gives it."""
    found = {}
    for run in lox.runs(directory):
        for column in lox._data._dataframe.columns(lox.load(directory, run.name)):
            lanes, events = column.valid.shape[:-1], column.valid.shape[-1]
            for lane in np.ndindex(lanes):
                happened = [n for n in range(events) if column.valid[(*lane, n)]]
                for number, n in enumerate(happened):
                    place = run.name, column.name, "/".join(map(str, lane)), number
                    steps = {name: x[(*lane, n)].item() for name, x in column.steps.items()}
                    found[place] = column.values[(*lane, n)], steps
    return found


def same_bits(a, b):
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and (a.tobytes() == b.tobytes() or np.isnan(a).all() & np.isnan(b).all())
    )


def from_text(text, dtype):
    """Read a cell as a user would, who knows the dtype."""
    if text.startswith("["):
        return np.array(json.loads(text), dtype)
    if dtype == "bool":
        return np.array(text == "True")
    if dtype.startswith("complex"):
        return np.array(complex(text), dtype)
    return np.array(int(text) if "int" in dtype else float(text), dtype=jnp.dtype(dtype))


def unquoted(text):
    return text.removeprefix("'")


def test_csv_reads_back_exactly(command, many, tmp_path):
    code, out, err = command("export", many, "--to", "csv", "-o", tmp_path / "all.csv")
    assert (code, out) == (0, "") and err == f"wrote 58 rows to {tmp_path}/all.csv\n"
    wanted = expected(many)
    with open(tmp_path / "all.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(wanted) == 58
    assert list(rows[0]) == ["run", "key", "dtype", "lane", "event", "step", "epoch", "wall", "value"]
    for row in rows:
        value, steps = wanted.pop((unquoted(row["run"]), unquoted(row["key"]), row["lane"], int(row["event"])))
        assert same_bits(from_text(row["value"], row["dtype"]), value), row
        assert {k: float(row[k]) for k in ("step", "epoch") if row[k]} == steps
        assert abs(float(row["wall"]) - time.time()) < 3600
    assert not wanted


def test_no_cell_of_a_csv_file_is_a_formula(command, many, tmp_path):
    assert command("export", many, "--config", "-o", tmp_path / "all.csv")[0] == 0
    with open(tmp_path / "all.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.reader(file))
    texts = [cell for row in rows for cell in row]
    for cell in texts:
        if cell[:1] in tuple("=+@\t\r\n"):
            raise AssertionError(cell)
        if cell.startswith("-"):
            float(cell)  # a number
    assert "'=1+1" in texts and "[1, 2]" in texts


def test_csv_is_read_by_others(command, many, tmp_path):
    assert command("export", many, "-k", "f32", "-o", tmp_path / "f.csv")[0] == 0
    frames = [
        pandas.read_csv(tmp_path / "f.csv"),
        polars.read_csv(tmp_path / "f.csv").to_pandas(),
        duckdb.sql(f"select * from read_csv('{tmp_path}/f.csv')").df(),
    ]
    for frame in frames:
        values = frame["value"].to_numpy(np.float64).astype(np.float32)
        assert same_bits(values[~np.isnan(SPECIAL)], SPECIAL[~np.isnan(SPECIAL)]) and np.isnan(values[2])
        assert frame["step"].tolist() == list(range(8)) and set(frame["key"]) == {"f32"}


def test_jsonl_reads_back_exactly(command, many, tmp_path):
    assert command("export", many, "-o", tmp_path / "all.jsonl")[0] == 0
    wanted = expected(many)
    rows = [json.loads(line) for line in (tmp_path / "all.jsonl").read_text().splitlines()]
    assert len(rows) == len(wanted)
    for row in rows:
        value, steps = wanted.pop((row["run"], row["key"], row.get("lane", ""), row["event"]))
        found = json.dumps(row["value"]) if isinstance(row["value"], list) else str(row["value"])
        assert same_bits(from_text(found, row["dtype"]), value), row
        assert {k: row[k] for k in ("step", "epoch") if k in row} == steps
    strict = lambda text: pytest.fail(f"{text} is not JSON")  # noqa: E731
    for line in (tmp_path / "all.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=strict)
    assert len(pandas.read_json(tmp_path / "all.jsonl", lines=True)) == len(rows)
    assert duckdb.sql(f"select count(*) from read_json('{tmp_path}/all.jsonl')").fetchall() == [(len(rows),)]
    command("export", many, "-k", "f64", "-o", tmp_path / "f.ndjson")
    assert polars.read_ndjson(tmp_path / "f.ndjson")["value"].to_list() == lox.load(many, "0")["f64"].tolist()


def test_parquet_reads_back_exactly(command, many, tmp_path):
    code, _, err = command("export", many, "--config", "-o", tmp_path / "all.parquet")
    assert code == 0 and err.startswith("wrote 58 rows")
    wanted = expected(many)
    table = pyarrow.parquet.read_table(tmp_path / "all.parquet")
    types = {field.name: str(field.type) for field in table.schema}
    assert types["step"] == "int64" and types["epoch"] == types["wall"] == types["value"] == "double"
    assert types["config.lr"] == "double" and types["config.other"] == types["run"] == "string"
    assert types["value_int64"] == "int64" and types["value_uint64"] == "uint64"
    for row in table.to_pylist():
        value, steps = wanted.pop((row["run"], row["key"], row["lane"] or "", row["event"]))
        if row["json"]:
            found = np.array(complex(json.loads(row["json"])), row["dtype"])
        elif row["shape"]:
            found = np.array(row["array"], row["dtype"]).reshape(row["shape"])
        elif row["dtype"] in ("int64", "uint64"):
            found = np.array(row[f"value_{row['dtype']}"], row["dtype"])
            assert row["value"] == found.item() if abs(found.item()) < 2**53 else row["value"] is None
        else:
            found = np.array(row["value"]).astype(jnp.dtype(row["dtype"]))
        assert same_bits(found, value), row
        assert {k: row[k] for k in ("step", "epoch") if row[k] is not None} == steps
        assert row["config.name"] == ("=1+1" if row["run"] == "0" else None)
    assert not wanted
    file = str(tmp_path / "all.parquet")
    query = f"select value from '{file}' where key = 'f32' order by step"
    assert np.array_equal(duckdb.sql(query).df()["value"].to_numpy().astype(np.float32), SPECIAL, equal_nan=True)
    assert polars.read_parquet(file).height == pandas.read_parquet(file).shape[0] == 58


def test_histograms_and_pictures(command, tmp_path):
    pixels = np.arange(12, dtype=np.uint8).reshape(2, 2, 3) * 20
    histogram = lox.Histogram(jnp.array([0.1, 0.6, 0.9, jnp.nan]), bins=4, range=(0.0, 1.0))
    lox.save({"h": histogram, "i": lox.Image(pixels)}, tmp_path / "runs")
    wanted = dict(edges=[0.0, 0.25, 0.5, 0.75, 1.0], counts=[1.0, 0.0, 1.0, 1.0], nonfinite=1.0)
    command("export", tmp_path / "runs", "-o", tmp_path / "x.jsonl")
    h, i = [json.loads(line) for line in (tmp_path / "x.jsonl").read_text().splitlines()]
    assert h["dtype"] == "histogram" and i["dtype"] == "image"
    assert {name: h["value"][name] for name in wanted} == wanted
    assert np.float32(h["value"]["sum"]) == histogram.sum
    command("export", tmp_path / "runs", "-o", tmp_path / "x.csv")
    with open(tmp_path / "x.csv", newline="") as file:
        of_csv = [row["value"] for row in csv.DictReader(file)]
    assert json.loads(of_csv[0]) == h["value"] and of_csv[1] == i["value"]
    assert same_picture(i["value"], pixels)
    command("export", tmp_path / "runs", "-o", tmp_path / "x.parquet")
    h, i = pyarrow.parquet.read_table(tmp_path / "x.parquet").to_pylist()
    assert {name: json.loads(h["json"])[name] for name in wanted} == wanted and i["png"][:4] == b"\x89PNG"


def same_picture(address, pixels):
    import base64

    image = package("PIL.Image")
    data = base64.b64decode(address.removeprefix("data:image/png;base64,"))
    return np.array_equal(np.asarray(image.open(io.BytesIO(data))), pixels)


@pytest.mark.slow
def test_tensorboard_shows_what_was_logged_when_it_was(command, many, tmp_path):
    package("tensorboard").__name__  # noqa: B018
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    big = lox.logdict.from_arrays({"big": np.zeros((1, 100), np.float32)})
    lox.save(big, many, key=jax.random.key(3))
    lox.save({"h": lox.Histogram(jnp.ones(3)), "i": lox.Image(np.zeros((2, 2), np.uint8))}, many, key=jax.random.key(4))
    code, out, err = command("export", many, "--to", "tensorboard", "-o", tmp_path / "tb")
    assert code == 0 and out == ""
    assert err.splitlines()[0].startswith("warning: left out of '3': TensorBoard cannot show 'big'")
    assert sorted(path.name for path in (tmp_path / "tb").iterdir()) == ["0", "1", "2", "3", "4"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        events = accumulator.EventAccumulator(str(tmp_path / "tb" / "0"), {"scalars": 0, "tensors": 0}).Reload()
        pictures = accumulator.EventAccumulator(str(tmp_path / "tb" / "4")).Reload()
    times = lox.load(many, "0", wall=True).steps["wall"]["f32"]
    found = events.Scalars("f32")
    assert np.array_equal(np.float32([e.value for e in found]), SPECIAL, equal_nan=True)
    assert [e.step for e in found] == list(range(8)) and [e.wall_time for e in found] == times.tolist()
    assert [e.value for e in events.Scalars("array/0/1")] == lox.load(many, "0")["array"][:, 0, 1].tolist()
    assert '"lr": 0.1' in events.Tensors("config")[0].tensor_proto.string_val[0].decode()
    assert "_hparams_/session_start_info" in events.summary_metadata
    assert pictures.Images("i")[0].height == 2 and pictures.Histograms("h")[0].histogram_value.num == 3


def test_an_export_never_overwrites_unless_told_to(command, directory, tmp_path):
    out = tmp_path / "x.csv"
    out.write_text("precious")
    code, _, err = command("export", directory, "-o", out)
    assert (code, err) == (1, f"error: '{out}' exists. Choose another name with -o, or replace it with --force.\n")
    assert out.read_text() == "precious"
    assert command("export", directory, "-o", out, "--force")[0] == 0 and out.read_text().startswith("run,key")
    folder = tmp_path / "home"
    folder.mkdir()
    (folder / "thesis.tex").write_text("precious")
    code, _, err = command("export", directory, "--to", "tensorboard", "-o", folder, "--force")
    assert code == 1 and "--force would delete it" in err and (folder / "thesis.tex").exists()
    for _ in range(2):
        assert command("export", directory, "--to", "tensorboard", "-o", tmp_path / "tb", "--force")[0] == 0
    code, _, err = command("export", directory, "-o", tmp_path / "none" / "x.csv")
    assert code == 1 and err == f"error: there is no directory '{tmp_path}/none' to write 'x.csv' to.\n"
    code, _, err = command("export", directory, "-o", tmp_path / "x")
    assert code == 1 and err == (
        f"error: -o '{tmp_path}/x' does not say the format: choose --to csv, jsonl, parquet or tensorboard.\n"
    )
    assert not [path for path in tmp_path.iterdir() if path.name.endswith(".part")]


def test_an_export_that_fails_leaves_nothing(command, directory, tmp_path, monkeypatch):
    from lox._command import _export

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(_export, "write_text", fail)
    code, _, err = command("export", directory, "-o", tmp_path / "x.csv")
    assert code == 1 and err.startswith(f"error: cannot write '{tmp_path}/x.csv': No space left on device.")
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


def test_parquet_says_what_to_install(command, directory, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    code, _, err = command("export", directory, "-o", tmp_path / "x.parquet")
    assert (code, err) == (1, 'error: Parquet needs pyarrow: pip install "lox-jax[parquet]"\n')
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


@pytest.mark.parametrize("to", ["csv", "jsonl"])
def test_large_files_are_read_a_key_at_a_time_with_the_same_result(command, many, tmp_path, monkeypatch, to):
    command("export", many, "--to", to, "-o", tmp_path / "whole")
    monkeypatch.setattr(_choose, "_AT_ONCE", 0)
    command("export", many, "--to", to, "-o", tmp_path / "parts")
    assert sorted((tmp_path / "whole").read_bytes().split(b"\n")) == sorted(
        (tmp_path / "parts").read_bytes().split(b"\n")
    )


def test_exports_choose_runs_and_keys(command, directory, tmp_path):
    code, out, _ = command("export", directory, "--run", "0*", "-w", "lr=0.1", "--to", "jsonl", "-o", "-")
    assert code == 0 and {json.loads(line)["run"] for line in out.splitlines()} == {"0"}
    code, _, err = command("export", directory, "-k", "nothing", "-o", tmp_path / "x.csv")
    assert code == 1 and "no key matches 'nothing'" in err


def test_steps_with_the_names_of_columns(command, tmp_path):
    steps = {"run": np.arange(2), "value": np.arange(2) + 5, "wall": np.float64([7, 8])}
    lox.save(lox.logdict.from_arrays({"x": np.int32([1, 2])}, steps=steps), tmp_path / "runs")
    code, out, err = command("export", tmp_path / "runs", "--to", "csv", "-o", "-")
    assert code == 0 and err.startswith("warning: these logs have a step called 'wall'")
    rows = list(csv.DictReader(io.StringIO(out)))
    assert [(row["step_run"], row["step_value"], row["wall"], row["value"]) for row in rows] == [
        ("0", "5", "7.0", "1"),
        ("1", "6", "8.0", "2"),
    ]
    assert command("tail", tmp_path / "runs", "--once")[1].splitlines()[-1].endswith("x 2")


# --- plot and compare ---


@pytest.mark.slow
def test_plot_writes_a_picture(command, directory, tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    options = ["--by", "lr", "--lanes", "--log-y", "--smooth", "0.5", "--x", "step", "--band", "std", "--title", "x"]
    code, out, err = command("plot", directory, "-k", "lo*", *options, "-o", tmp_path / "x.png")
    assert (code, out, err) == (0, "", f"wrote 1 chart of 4 runs to {tmp_path}/x.png\n")
    assert (tmp_path / "x.png").read_bytes()[:4] == b"\x89PNG"
    code, _, err = command("plot", directory, "0", "--x", "wall", "-o", tmp_path / "x.svg")
    assert code == 0 and "<svg" in (tmp_path / "x.svg").read_text()
    code, _, err = command("plot", directory, "-o", tmp_path / "x.txt")
    assert code == 1 and err.startswith("error: ") and ".svg" in err
    code, _, err = command("plot", directory, "-o", tmp_path / "none" / "x.png")
    assert code == 1 and err.startswith(f"error: cannot write '{tmp_path}/none/x.png'")
    code, _, err = command("plot", directory, "--smooth", "2", "-o", tmp_path / "y.png")
    assert code == 1 and "smooth" in err and not (tmp_path / "y.png").exists()


def test_compare_prints_what_lox_compare_finds(command, directory):
    found = lox.compare(lox.load(directory), "loss", by="lr", better="lower")
    code, out, err = command("compare", directory, "-k", "loss", "--by", "lr", "--better", "lower", "--json")
    assert (code, err) == (0, "") and json.loads(out) == json.loads(json.dumps(found.to_dict()))
    code, out, err = command("compare", directory, "-k", "loss", "--by", "lr", "--better", "lower")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "loss, lower is better"
    for titles, rows in found.tables():
        for row in [titles, *rows]:
            assert any(all(cell in line for cell in row) for line in lines), row
    assert lines[-len(found.methods) :] == list(found.methods)
    code, _, err = command("compare", directory, "-k", "loss", "--at", "worst")
    assert code == 1 and "worst" in err
    assert command("compare", directory, "-k", "loss", "--at", "1", "--json")[0] == 0
    assert command("compare", directory, "--by", "lr")[0] == 2


# --- ui ---


@pytest.mark.slow
def test_ui_serves_the_directory_until_ctrl_c(directory):
    pytest.importorskip("uvicorn", reason="uvicorn is not installed")
    pytest.importorskip("starlette", reason="starlette is not installed")
    command = [sys.executable, "-m", "lox", "ui", str(directory), "--port", "0", "--no-browser"]
    options = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)
    server = subprocess.Popen(command, **options)
    try:
        address = re.search(r"http://127\.0\.0\.1:\d+/", reading(server, "http://")[-1])[0]
        with urllib.request.urlopen(address, timeout=60) as page:
            assert page.status == 200 and b"<html" in page.read()
        server.send_signal(signal.SIGINT)
        _, err = server.communicate(timeout=60)
    finally:
        server.kill()
        server.wait()
    assert server.returncode in (0, 130) and "Traceback" not in err


def test_ui_refuses_what_is_not_a_directory(command, tmp_path):
    pytest.importorskip("uvicorn", reason="uvicorn is not installed")
    code, out, err = command("ui", tmp_path / "none", "--no-browser")
    assert (code, out) == (1, "") and err.startswith("error: there is no directory")
    assert command("ui", tmp_path, "--port", "70000")[0] == 2
