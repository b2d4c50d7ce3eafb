"""Run lox in virtual environments that create themselves: the demo, the checks, the test matrix.

    python tools/envs.py run examples/demo.py       any script or -m module, on the newest JAX
    python tools/envs.py demo                       examples/demo.py, in a small environment of its own
    python tools/envs.py ui                         what it has saved, in a browser
    python tools/envs.py bench tap                  benchmarks/run.py, with what lox is compared with
    python tools/envs.py lint                       ruff and pyright
    python tools/envs.py docs                       the documentation, in docs/_build; a warning is an error
    python tools/envs.py quick -k scan              the fast tests on the newest JAX, of the source tree
    python tools/envs.py dist                       the release: built, installed elsewhere, tried out
    python tools/envs.py test "oldest newest" -x    lint, then pytest -x in each named cell
    python tools/envs.py test "newest smoke"        also a few tests in each cell that is not named
    python tools/envs.py test all                   all tests in all cells

An environment holds lox's dependencies and is reused until pyproject.toml or the interpreter
changes. lox itself is built and installed anew on every run, so that what is tested is the wheel
that users get (a file missing from it is a failing test) and not the source tree; only `quick`
takes that, because it is for the time between two edits.

Standard library only: this file is what makes the environments, so it has none to rely on.
"""

import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = ROOT / "pyproject.toml"


@dataclass(frozen=True)
class Cell:
    """One environment: the Python versions that will do, best first, what goes into it, and the tests to run there."""

    name: str
    pythons: tuple[str, ...]
    jax: str
    extras: tuple[str, ...] = ("test",)
    others: tuple[str, ...] = ()
    tests: tuple[str, ...] = ()  # all
    with_lox: bool = True

    def smoke(self) -> "Cell":
        """A smaller environment for fewer tests: every transformation of lox under every one of JAX."""
        others = ("pytest>=8", "pytest-xdist>=3.6")
        return replace(self, name=f"smoke-{self.name}", extras=("ui", "pandas"), others=others, tests=SMOKE)


SMOKE = ("tests/test_log.py", "tests/test_transforms.py", "tests/test_docs.py::test_readme")

# No upper bound: a new JAX is to be tested on the day it is released. The lower one turns an index
# or an interpreter that offers only an older JAX into an error.
NEWEST = Cell("newest", ("3.13", "3.12", "3.14"), "jax>=0.12", ("test", "lint", "docs"))
# What a page shows and what statistics say does not depend on JAX, and the examples need libraries that only the newest
# has. What becomes of many files when they are merged, and of many devices, takes longer than it depends on JAX.
NEWEST_ONLY = ("test_ui_browser", "test_examples", "test_compare", "test_compact", "test_index", "test_collectives")
# The README is for every JAX; most other pages need libraries that only the newest has.
README_ONLY = ("--deselect=tests/test_docs.py::test_page", "--deselect=tests/test_docs.py::test_links_lead_to_files")
OLDEST = Cell(
    "oldest",
    ("3.11",),
    "jax==0.7.0",
    tests=("tests", *(f"--ignore=tests/{name}.py" for name in NEWEST_ONLY), *README_ONLY),
)
# The last JAX that Python 3.11 can install: what depends on how JAX traces. Of the tests of meshes, the other two run
# those that take longest.
TRACING = (
    *("test_canary", "test_dispatch", "test_fuzz", "test_hidden", "test_meshes", "test_order", "test_recompute"),
    *("test_scope", "test_streams", "test_tap"),
)
LONGEST = (
    "test_lanes_over_a_mesh",  # and all whose names begin so
    "test_logs_in_a_shard_map_do_not_depend_on_concrete_values",
    "test_programs_on_several_devices_in_one_function",
    "test_python_control_flow_in_shard_map",
)
MIDDLE = Cell(
    "middle",
    ("3.11",),
    "jax==0.10.2",
    tests=(
        *SMOKE,
        *(f"tests/{name}.py" for name in TRACING),
        *(f"--deselect=tests/test_meshes.py::{name}" for name in LONGEST),
    ),
)
BETWEEN = (
    Cell("0.8", ("3.11", "3.12", "3.13"), "jax==0.8.*"),
    Cell("0.9", ("3.11", "3.12", "3.13"), "jax==0.9.*"),
    Cell("0.11", ("3.12", "3.13"), "jax==0.11.*"),
)

# The newest JAX that Oryx works with is too old for lox. It is for a comparison, and no cell of the matrix.
ORYX = Cell("oryx", ("3.13", "3.12", "3.11"), "jax==0.5.0", (), ("oryx==0.2.9",), with_lox=False)

# In this order, because lint runs in the first one and is the fastest to fail.
CELLS = {cell.name: cell for cell in (NEWEST, MIDDLE, OLDEST, *BETWEEN)}


def chosen(names: list[str], arguments: list[str]) -> list[Cell]:
    if not names or not set(names) <= {*CELLS, "smoke", "all"}:
        sys.exit(f"MATRIX={' '.join(names)!r}: choose one or more of {', '.join(CELLS)}, smoke, or all")
    cells = [cell for cell in CELLS.values() if cell.name in names or "all" in names]
    if "smoke" in names and not arguments:  # which select tests of their own
        cells += [cell.smoke() for cell in CELLS.values() if cell not in cells]
    if not cells:
        sys.exit("MATRIX=smoke has tests of its own: name a cell to run others")
    return cells


@dataclass(frozen=True)
class Python:
    version: str
    path: str


@dataclass
class Outcome:
    """What a cell, or the lint step, came to."""

    name: str
    note: str
    passed: int = 0
    failed: int = 0
    skipped: int = 0

    def counts(self) -> str:
        return f"{self.passed} passed, {self.failed} failed, {self.skipped} skipped"


# ---- Interpreters ----------------------------------------------------------------------------

# A Python counts if it can make environments (Debian ships ones that cannot) and can install the
# wheels of jaxlib (PyPy and free-threaded builds cannot be relied on to).
PROBE = """
import sys, sysconfig, ensurepip, venv
if sys.implementation.name == "cpython" and not sysconfig.get_config_var("Py_GIL_DISABLED"):
    print("%d.%d.%d" % sys.version_info[:3], sys.executable)
"""


def output(*command: str | Path) -> str:
    """The command's output, or nothing if it fails: a broken candidate is no candidate."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()


def candidates(minor: str) -> Iterator[str | Path]:
    yield sys.executable
    # Every match on PATH and not only the first, which may be a pyenv shim that refuses to run.
    for folder in os.get_exec_path():
        for name in (f"python{minor}", "python3", "python"):
            if found := shutil.which(name, path=folder):
                yield found
    # A shell that has not sourced pyenv's set-up may still have it in its default place.
    home = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser()
    if pyenv := shutil.which("pyenv") or shutil.which("pyenv", path=str(home / "bin")):
        root = Path(output(pyenv, "root"))
        for name in reversed(output(pyenv, "versions", "--bare").split()):
            if name.startswith(minor):
                yield root / "versions" / name / "bin" / "python"
    # --system, or uv takes our .venv folder for a broken environment.
    if uv := shutil.which("uv"):
        yield output(uv, "python", "find", "--system", minor)


def find_python(cell: Cell) -> Python | None:
    for minor in cell.pythons:
        for candidate in candidates(minor):
            version, _, path = output(candidate, "-c", PROBE).partition(" ")
            if version.startswith(f"{minor}."):
                return Python(version, path)
    return None


def missing(cell: Cell) -> str:
    return f"NOT RUN: no Python {' or '.join(cell.pythons)} found"


def shout(text: str) -> None:
    bar = "!" * 88
    print(f"{bar}\n{text}\n{bar}", file=sys.stderr, flush=True)


def shout_missing(cell: Cell) -> None:
    shout(
        f"{cell.name} ({cell.jax}): {missing(cell)} on PATH, in pyenv or with uv.\n"
        f"Get one:              pyenv install {cell.pythons[0]}\n"
        f"or:                   uv python install {cell.pythons[0]}\n"
        "(a Python that lacks the venv module does not count: Debian has python3-venv for it)\n"
        f'or choose the cells:  make test MATRIX="..."  out of {", ".join(CELLS)}, smoke'
    )


def newest() -> Python:
    base = find_python(NEWEST)
    if base is None:
        shout_missing(NEWEST)
        sys.exit(1)
    return base


# ---- Environments ----------------------------------------------------------------------------


def run(*command: str | Path, **environment: str) -> int:
    return subprocess.run(command, cwd=ROOT, env=os.environ | environment).returncode


def pip_install(python: Path, *arguments: str) -> None:
    """Install, and say what pip does meanwhile: on a terminal in one line that changes, else in a line now and then."""
    command = [python, "-m", "pip", "install", "--progress-bar=off", "--disable-pip-version-check", *arguments]
    start, shown, doing = time.monotonic(), time.monotonic(), "looking for packages"
    is_terminal = sys.stderr.isatty()
    pip = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert pip.stdout is not None
    lines: queue.Queue[str | None] = queue.Queue()

    def read(output: IO[str]) -> None:
        for line in output:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, args=[pip.stdout], daemon=True).start()
    said: list[str] = []
    try:
        while True:
            try:
                line = lines.get(timeout=1.0)
            except queue.Empty:
                line = ""
            if line is None:
                break
            said += [line] if line else []
            # "Downloading https://.../jaxlib-0.12.0-cp313.whl (95.1 MB)": the name and the size.
            if match := re.match(r"\s*(Collecting|Downloading|Installing|Building|Processing)\b(.*)", line):
                doing = f"{match[1].lower()} {re.sub(r'[^ ]*/', '', match[2]).strip()}"[:100]
                if line.startswith("Installing collected packages"):  # names all of them, and then is silent
                    doing = f"installing {line.count(',') + 1} packages"
            now = time.monotonic()
            if is_terminal:
                text = f"  {now - start:4.0f} s  {doing}"[: shutil.get_terminal_size().columns - 1]
                print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
            elif now - shown > 5:
                print(f"  {now - start:4.0f} s  {doing}", file=sys.stderr, flush=True)
                shown = now
    finally:
        if is_terminal:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
        if sys.exc_info()[0] is not None:  # Ctrl-C
            pip.kill()
        code = pip.wait()
    if code:
        sys.stderr.write("".join(said))  # why
        raise subprocess.CalledProcessError(code, command)


def ready(cell: Cell, base: Python, install: bool = True) -> Path:
    """Return the Python of the cell's environment, with lox as it is now installed in it."""
    home = ROOT / ".venv" / cell.name
    python = home / "bin" / "python"
    stamp = home / "stamp"

    requirements, text = [cell.jax, *cell.others], ""
    if cell.with_lox:
        text = PYPROJECT.read_text()
        config = tomllib.loads(text)
        project = config["project"]
        requirements += [*project["dependencies"], *config["build-system"]["requires"]]
        for extra in cell.extras:
            requirements += project["optional-dependencies"][extra]

    wanted = "\n".join([base.version, *requirements, text])
    if not (python.exists() and stamp.exists() and stamp.read_text() == wanted):
        start = time.monotonic()
        print(f"creating .venv/{cell.name}: Python {base.version}, {cell.jax} (once, until it changes)", flush=True)
        shutil.rmtree(home, ignore_errors=True)
        subprocess.run([base.path, "-m", "venv", home], check=True)
        pip_install(python, *requirements)
        stamp.write_text(wanted)
        print(f"created .venv/{cell.name} in {time.monotonic() - start:.0f} s", flush=True)
    if install and cell.with_lox:  # the build requirements are already there, so that this needs no network
        pip_install(python, "--no-deps", "--no-build-isolation", ".")
    return python


# ---- Commands --------------------------------------------------------------------------------


def lint(python: Path) -> Outcome:
    checks = {
        "ruff check": ("ruff", "check"),
        "ruff format": ("ruff", "format", "--check"),
        "pyright": ("pyright", "--pythonpath", str(python)),
    }
    failed = []
    for name, command in checks.items():
        print(f"--- {name}", flush=True)
        if run(python, "-m", *command):
            failed.append(name)
    note = f"FAILED: {', '.join(failed)}" if failed else f"ok: {', '.join(checks)}"
    return Outcome("lint", note, failed=len(failed))


def docs(python: Path, arguments: list[str]) -> Outcome:
    """Build the documentation of the installed lox: from nothing, so that no page is left over from another state."""
    print("--- docs", flush=True)
    built = ROOT / "docs" / "_build"
    shutil.rmtree(built, ignore_errors=True)
    options = ("--fail-on-warning", "--keep-going", "--quiet", *arguments)
    if run(python, "-P", "-m", "sphinx", *options, "docs", str(built)):
        return Outcome("docs", "FAILED", failed=1)
    return Outcome("docs", "ok: docs/_build/index.html")


def run_pytest(cell: Cell, base: Python, python: Path, arguments: list[str]) -> Outcome:
    jax = output(python, "-c", "from importlib.metadata import version; print(version('jax'))")
    outcome = Outcome(cell.name, f"Python {base.version}, jax {jax}")
    print(f"\n--- {cell.name}: {outcome.note}", flush=True)
    report = ROOT / ".venv" / cell.name / "junit.xml"
    report.unlink(missing_ok=True)

    start = time.monotonic()
    # -P keeps the working directory off the path: lox must come from the wheel.
    code = run(python, "-P", "-m", "pytest", "-n", "2", f"--junit-xml={report}", *cell.tests, *arguments)
    seconds = time.monotonic() - start

    if report.exists():
        for case in ElementTree.parse(report).iter("testcase"):
            found = {child.tag for child in case}
            if found & {"failure", "error"}:
                outcome.failed += 1
            elif "skipped" in found:
                outcome.skipped += 1
            else:
                outcome.passed += 1
    if code and not outcome.failed:  # it crashed, or there was no test to run
        outcome.failed = 1
        outcome.note += f", pytest exited with {code}"
    outcome.note += f": {outcome.counts()} in {seconds:.0f} s"
    return outcome


def test(names: list[str], arguments: list[str]) -> int:
    cells = chosen(names, arguments)
    pythons = {cell.name: find_python(cell) for cell in cells}
    for cell in cells:
        if pythons[cell.name] is None:
            shout_missing(cell)

    # A step that fails without a test to blame counts as one failure, so that the last line never
    # says "0 failed" about a run that did.
    outcomes = []
    if pythons.get(NEWEST.name) is None:
        outcomes.append(Outcome("lint", f"NOT RUN: it needs the cell {NEWEST.name!r}"))
    for cell in cells:
        base = pythons[cell.name]
        if base is None:
            # In CI the whole matrix has to run. At home the cells that can, do, and the banner says what is missing.
            failed = int(bool(os.environ.get("CI")) or not any(pythons.values()))
            outcomes.append(Outcome(cell.name, missing(cell), failed=failed))
            continue
        try:
            python = ready(cell, base)
        except subprocess.CalledProcessError as error:
            shout(f"{cell.name}: its environment could not be made\n{error}")
            outcomes.append(Outcome(cell.name, "NOT RUN: no environment, see above", failed=1))
            continue
        if cell is NEWEST:
            outcomes += [lint(python), docs(python, [])]
        outcomes.append(run_pytest(cell, base, python, arguments))

    print("\n--- summary")
    width = max(len(outcome.name) for outcome in outcomes)
    for outcome in outcomes:
        print(f"{outcome.name:{width}} {outcome.note}")
    total = Outcome("total", "")
    for outcome in outcomes:
        total.passed += outcome.passed
        total.failed += outcome.failed
        total.skipped += outcome.skipped
    print(total.counts(), flush=True)
    return int(total.failed > 0)


def quick(arguments: list[str]) -> int:
    python = ready(NEWEST, newest(), install=False)
    return run(python, "-m", "pytest", "-q", "-n", "2", "-m", "not slow", *arguments, PYTHONPATH=str(ROOT))


def dist() -> int:
    """Build the sdist and the wheel, and try the wheel where there is nothing else of lox."""
    base = newest()
    builder, folder = ROOT / ".venv" / "dist", ROOT / "dist"
    for old in (builder, folder):
        shutil.rmtree(old, ignore_errors=True)
    subprocess.run([base.path, "-m", "venv", builder], check=True)
    python = builder / "bin" / "python"
    pip_install(python, "build", "twine")
    if run(python, "-m", "build", "--outdir", str(folder)):
        return 1
    if run(python, "-m", "twine", "check", "--strict", *folder.glob("*")):
        return 1
    with tempfile.TemporaryDirectory() as empty:
        subprocess.run([base.path, "-m", "venv", f"{empty}/venv"], check=True)
        user = Path(empty, "venv", "bin", "python")
        (wheel,) = folder.glob("*.whl")
        pip_install(user, f"{wheel}[ui,pandas]")
        # Every line of it, in a folder and a process of its own.
        page = [user, "-P", ROOT / "tests" / "documents.py", ROOT / "README.md"]
        code = subprocess.run(page, cwd=empty).returncode
        print("the README, with the wheel in an empty environment:", "failed" if code else "ok")
    for file in sorted(folder.glob("*")):
        print(f"{file.name}  {file.stat().st_size:,} bytes")
    with zipfile.ZipFile(wheel) as content:
        others = [name for name in content.namelist() if not name.startswith(("lox/", "lox_jax-"))]
    if others:
        print(f"the wheel has what it does not need: {', '.join(others)}")
    return int(bool(code or others))


def in_default(name: str, extras: tuple[str, ...], *command: str) -> int:
    """Run Python with these arguments, on the newest JAX that the interpreter at hand allows, whatever that is."""
    minor = f"{sys.version_info.major}.{sys.version_info.minor}"
    cell = Cell(name, (minor,), "jax", extras)
    base = find_python(cell)
    if base is None:
        sys.exit(f"{sys.executable} cannot make environments: install its venv module")
    return run(ready(cell, base), *command)


def bench(arguments: list[str]) -> int:
    cases = [argument for argument in arguments if not argument.startswith("-")]
    if not cases or any(case.startswith("peers") for case in cases):
        if base := find_python(ORYX):
            try:
                ready(ORYX, base)
            except subprocess.CalledProcessError as error:  # the table has the others
                shout(f"{ORYX.name}: its environment could not be made\n{error}")
        else:
            shout(f"{ORYX.name}: {missing(ORYX)}")
    return in_default("bench", ("test", "bench"), "benchmarks/run.py", *arguments)


def main() -> int:
    match sys.argv[1:]:
        case ["run", *command] if command:
            return in_default("default", ("test",), *command)
        case ["demo", *arguments]:  # without all that the tests need, so that it begins sooner
            return in_default("demo", ("ui",), "examples/demo.py", *arguments)
        case ["ui", *arguments]:
            if not (ROOT / "lox-demo").exists():
                sys.exit("there are no runs of the demo yet: `make demo` makes them")
            return in_default("demo", ("ui",), "-P", "-m", "lox", "ui", "lox-demo", *arguments)
        case ["bench", *arguments]:
            return bench(arguments)
        case ["lint"]:
            return int(lint(ready(NEWEST, newest())).failed > 0)
        case ["docs", *arguments]:
            outcome = docs(ready(NEWEST, newest()), arguments)
            print(outcome.note)
            return outcome.failed
        case ["quick", *arguments]:
            return quick(arguments)
        case ["dist"]:
            return dist()
        case ["test", names, *arguments]:
            return test(names.split(), arguments)
        case _:
            print(__doc__, file=sys.stderr)
            return 2


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
    except subprocess.CalledProcessError as error:  # venv or pip, which have said why
        sys.exit(f"the environment could not be made: {error}")
