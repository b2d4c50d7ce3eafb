"""Every example in the README and in a docstring is run, and its output compared."""

import doctest
import importlib
import os
import pkgutil
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lox

README = Path(__file__).parent.parent / "README.md"
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
MODULES = ["lox", *(module.name for module in pkgutil.walk_packages(lox.__path__, "lox."))]


@pytest.fixture(autouse=True)
def promotion_as_users_have_it():
    with jax.numpy_dtype_promotion("standard"):
        yield


def split_readme():
    """Return the README without the sections that need another package or several processes, and the first of them."""
    text = README.read_text(encoding="utf-8").replace(several_processes(), "").replace(see_your_runs(), "")
    # doctest would take the closing fence for expected output.
    text = re.sub(r"^ *```.*$", "", text, flags=re.MULTILINE)
    before, title, rest = text.partition("### Checkpoints and resume\n")
    section, next_title, after = rest.partition("\n###")
    assert title and next_title
    return before + next_title + after, section


def see_your_runs():
    """Return that section."""
    return README.read_text(encoding="utf-8").partition("## See your runs\n")[2].partition("\n## ")[0]


@pytest.mark.slow
def test_readme_from_a_program_to_its_curves(tmp_path, monkeypatch):
    """Its program is run, and every command after it; the dashboard is opened in a browser."""
    pytest.importorskip("typer", reason="typer is not installed")
    pytest.importorskip("starlette", reason="starlette is not installed")
    blocks = re.findall(r"```(\w*)\n(.*?)```", see_your_runs(), flags=re.DOTALL)
    program, *examples = [text for kind, text in blocks if kind == "python"]
    commands = [line for kind, text in blocks if not kind for line in text.splitlines()]
    (tmp_path / "train.py").write_text(program)
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path), "COLUMNS": "200"}
    outputs = {}
    for command in commands:
        name, *words = shlex.split(command)
        words = words if name == "python" else ["-m", "lox", *words]
        if "ui" in words:
            continue
        done = subprocess.run([sys.executable, *words], cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        outputs[command] = done.stdout
    assert len(outputs) >= 6 and outputs["lox ls runs"].count("finished") == 16
    assert (tmp_path / "curves.html").exists() and (tmp_path / "runs.csv").exists()
    monkeypatch.chdir(tmp_path)
    run_examples("\n".join(re.sub("^```.*$", "", text) for text in examples), dict(lox=lox), least=5)

    assert "lox ui runs" in commands
    from test_ui_browser import chromium, legend, open_page, shown  # it skips without a browser

    logs = lox.load("runs", where={"lr": 0.1}).stack()
    last = logs["train/loss"].astype(np.float64)[:, -1].mean()
    words = [sys.executable, "-m", "lox", "ui", "runs", "--no-browser", "--port", "0"]
    server = subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        address = re.search(r"http://\S+", server.stdout.readline())
        with chromium() as page:
            open_page(page, address[0])
            rows = legend(page, "train/loss")
    finally:
        server.send_signal(signal.SIGINT)
        server.communicate(timeout=60)
    assert server.returncode in (0, 130)
    assert list(rows) == ["lr=0.01", "lr=0.1"] and rows["lr=0.1"].startswith(shown(last))


def several_processes():
    """Return that section."""
    return README.read_text(encoding="utf-8").partition("### Several processes\n")[2].partition("\n###")[0]


@pytest.mark.slow
def test_readme_in_several_processes(tmp_path, monkeypatch):
    """Its program is run by two processes with two devices each, and then by one with four."""
    program, reading = re.findall(r"```python\n(.*?)```", several_processes(), flags=re.DOTALL)
    if not hasattr(jax, "NamedSharding"):
        program = program.replace("jax.NamedSharding", "jax.sharding.NamedSharding")
    if not hasattr(jax, "P"):
        program = program.replace("jax.P", "jax.sharding.PartitionSpec")
    for processes in (2, 1):
        folder = tmp_path / str(processes)
        folder.mkdir()
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        text = program.replace("1234", str(port)).replace("num_processes=2", f"num_processes={processes}")
        (folder / "train.py").write_text(text)
        devices = f"--xla_force_host_platform_device_count={4 // processes}"
        backend = {"JAX_PLATFORMS": "cpu", "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo"}
        environment = {**os.environ, **backend, "XLA_FLAGS": devices, "PYTHONPATH": os.pathsep.join(sys.path)}
        started = [
            subprocess.Popen(
                [sys.executable, "train.py", str(n)],
                cwd=folder,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for n in range(processes)
        ]
        outputs = [process.communicate(timeout=240)[0] for process in started]
        assert [process.returncode for process in started] == [0] * processes, "\n".join(outputs)
        monkeypatch.chdir(folder)
        run_examples(reading, dict(lox=lox), least=2)
        assert [run.name for run in lox.runs("runs")] == ["0"]


def run_examples(text, names, least):
    examples = doctest.DocTestParser().get_doctest(text, names, README.name, str(README), 0)
    failed, attempted = doctest.DocTestRunner(optionflags=OPTIONS).run(examples)
    assert attempted >= least
    assert not failed


@pytest.mark.slow
def test_readme():
    run_examples(split_readme()[0], {}, least=50)


@pytest.mark.slow
def test_readme_with_orbax():
    pytest.importorskip("orbax.checkpoint", reason="orbax-checkpoint is installed with the newest JAX only")
    run_examples(split_readme()[1], dict(jax=jax, jnp=jnp, lox=lox, tempfile=tempfile), least=8)


@pytest.mark.parametrize("name", MODULES)
def test_docstrings(name):
    if name == "lox._data._logdict":
        pytest.importorskip("pandas", reason="pandas is not installed")
    if name.startswith("lox._command._"):
        pytest.importorskip("typer", reason="typer is not installed")
    if name in ("lox.equinox", "lox.flax"):
        pytest.importorskip(name[4:], reason=f"{name[4:]} is installed with the newest JAX only")
    assert not doctest.testmod(importlib.import_module(name), optionflags=OPTIONS).failed
