"""Every example in the README and in a docstring is run, and its output compared."""

import doctest
import importlib
import os
import pkgutil
import re
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
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
    text = README.read_text(encoding="utf-8").replace(several_processes(), "")
    # doctest would take the closing fence for expected output.
    text = re.sub(r"^ *```.*$", "", text, flags=re.MULTILINE)
    before, title, rest = text.partition("### Checkpoints and resume\n")
    section, next_title, after = rest.partition("\n###")
    assert title and next_title
    return before + next_title + after, section


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
    assert not doctest.testmod(importlib.import_module(name), optionflags=OPTIONS).failed
