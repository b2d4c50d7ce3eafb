"""Every example in the README, in the documentation and in a docstring is run, and its output compared.

Also: every public name is documented, every link leads somewhere, and the README's program has its curves in a browser.
"""

import ast
import doctest
import importlib
import inspect
import os
import pkgutil
import re
import signal
import subprocess
import sys
from pathlib import Path

import documents
import forks
import jax
import numpy as np
import pytest

import lox

ROOT = documents.ROOT
README = ROOT / "README.md"
PAGES = sorted((ROOT / "docs").rglob("*.md"))
MODULES = ["lox", *(module.name for module in pkgutil.walk_packages(lox.__path__, "lox."))]
# What modules need that not every environment has.
NEEDED = {
    "lox._data._logdict": "pandas",
    "lox.equinox": "equinox",
    "lox.flax": "flax",
    "lox.loggers._trackers._mlflow": "mlflow",
    "lox.loggers._trackers._neptune": "neptune",
    "lox.loggers._trackers._trackio": "trackio",
    "lox.loggers._trackers._wandb": "wandb",
    "lox.neptune": "neptune",
    "lox.wandb": "wandb",
}


def run_page(page: Path, tmp_path: Path) -> str:
    """Run a page in a process of its own, as a reader would."""
    command = ["-P", documents.__file__, page]
    environment = forks.user_environment()
    if page.stem != "solvers":  # an adaptive solver takes other steps where floats are rounded differently
        environment["XLA_FLAGS"] = forks.FAST
    done = forks.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    if done.returncode == documents.MISSING:
        pytest.skip(f"{page.name}: {done.stdout.strip()}")
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_readme(tmp_path):
    assert int(run_page(README, tmp_path).split()[0]) >= 12


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT / "docs").with_suffix("")))
def test_page(page, tmp_path):
    run_page(page, tmp_path)


@pytest.mark.slow
def test_curves_of_the_readme_in_a_browser(tmp_path, monkeypatch):
    pytest.importorskip("starlette", reason="starlette is not installed")
    from test_ui_browser import chromium, legend, open_page, shown  # it skips without a browser

    (program,) = [block.text for block in documents.blocks(README) if block.text.startswith("# train.py")]
    (tmp_path / "train.py").write_text(program)
    monkeypatch.chdir(tmp_path)
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "train.py"], env=environment, check=True)
    logs = lox.load("runs", where={"lr": 0.1}).stack()
    last = logs["loss"].astype(np.float64)[:, -1].mean()
    words = [sys.executable, "-m", "lox", "ui", "runs", "--no-browser", "--port", "0"]
    server = subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        address = re.search(r"http://\S+", server.stdout.readline())
        assert address is not None
        with chromium() as page:
            open_page(page, address[0])
            rows = legend(page, "loss")
    finally:
        server.send_signal(signal.SIGINT)
        server.communicate(timeout=60)
    assert server.returncode in (0, 130)
    assert list(rows) == ["lr=0.1", "lr=0.3", "lr=1"] and rows["lr=0.1"].startswith(shown(last))


@pytest.mark.slow
@pytest.mark.parametrize("name", MODULES)
def test_docstrings(name, tmp_path, monkeypatch):
    if name in NEEDED:
        pytest.importorskip(NEEDED[name], reason=f"{NEEDED[name]} is not installed")
    if name.startswith("lox._command._"):
        pytest.importorskip("typer", reason="typer is not installed")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))
    with jax.numpy_dtype_promotion("standard"):  # as users have it
        assert not doctest.testmod(importlib.import_module(name), optionflags=documents.OPTIONS).failed


# --- what is documented --------------------------------------------------------------------------

FACES = ["", "equinox", "flax", "loggers", "logify", "neptune", "store", "testing", "view", "wandb"]


def public_names():
    """Give the names that users may use, and what they are: those re-exported `X as X`, or defined in a face."""
    for face in FACES:
        module = importlib.import_module(f"lox.{face}".rstrip("."))
        exported = set(re.findall(r"import (\w+) as \1$", inspect.getsource(module), flags=re.MULTILINE))
        for name in dir(module):  # also what is imported when it is first used
            if name.startswith("_"):
                continue
            value = getattr(module, name)
            own = getattr(value, "__module__", None) == module.__name__
            is_own = own and (inspect.isfunction(value) or inspect.isclass(value))
            is_method = face in ("wandb", "neptune") and name in ("log", "flush", "finish")
            if is_own or is_method or name in exported:
                yield f"{module.__name__}.{name}", value


def documented_names():
    text = "\n".join(page.read_text() for page in PAGES)
    return set(re.findall(r"^\.\. auto\w+:: (\S+)", text, flags=re.MULTILINE))


def test_every_public_name_is_documented():
    documented = {id(_resolve(name)) for name in documented_names()}
    missing = [
        name
        for name, value in public_names()
        # A module is documented by what it has.
        if not inspect.ismodule(value) and id(value) not in documented
    ]
    assert missing == []
    assert len(list(public_names())) > 60


def _resolve(name):
    """Return the object of a documented name, which must exist."""
    parts = name.split(".")
    value = importlib.import_module(parts[0])
    for n, part in enumerate(parts[1:], 2):
        value = getattr(value, part, None) or importlib.import_module(".".join(parts[:n]))
    return value


def test_every_public_name_says_what_it_is():
    for name, value in public_names():
        if inspect.isroutine(value) or inspect.isclass(value):
            assert inspect.getdoc(value), name


LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(#[^)\s]*)?\)")


@pytest.mark.parametrize("page", [*PAGES, *sorted(ROOT.glob("*.md"))], ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files(page):
    """Those between pages are also checked when they are built, with their headings."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for target, _ in LINK.findall(text):
        assert not target or (page.parent / target).exists(), f"{page}: {target}"


def test_the_readme_is_short():
    assert len(README.read_text().splitlines()) <= 150


TESTS = ROOT / "tests"


def nightly_tests():
    """Give the tests that are marked `nightly`, by file; "all" if the mark is the file's."""
    for file in sorted(TESTS.glob("test_*.py")):
        tree = ast.parse(file.read_text())
        marks = [node.value for node in tree.body if isinstance(node, ast.Assign) and "pytestmark" in ast.unparse(node)]
        names = {
            node.name
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef) and "pytest.mark.nightly" in map(ast.unparse, node.decorator_list)
        }
        if any("nightly" in ast.unparse(mark) for mark in marks):
            names = {"all"}
        if names:
            yield file.stem, names


@pytest.mark.slow
def test_the_list_of_nightly_tests_is_complete():
    text = (TESTS / "README.md").read_text()
    rows = re.findall(r"^\| `(test_\w+)` \| (.*) \|$", text.partition("## Only with")[2], flags=re.MULTILINE)
    listed = {file: set(re.findall(r"`(test_\w+)`", tests)) or {"all"} for file, tests in rows}
    assert listed == dict(nightly_tests())
    tables = sum(
        len(re.findall(r"^ *@pytest.mark.sample", f.read_text(), re.MULTILINE)) for f in TESTS.glob("test_*.py")
    )
    assert f"{tables} tables run a sample" in text
