"""The environments of lox, and the checks that run in them.

`make` lists the everyday commands, `nox --list` the sessions. The session `newest` makes the environment of daily work;
`lint`, `types`, `tests` and most others share it. Each further cell of the matrix is a session with an environment of
its own. Environments stay in `.nox/` and install again when their requirements change.

lox itself is built and installed for every run, so that the tests see the wheel that users get: a file missing from it
fails a test. Only `quick` and the benchmarks read the source tree.
"""

import atexit
import datetime
import os
import re
import shutil
import subprocess
import time
import tomllib
import zipfile
from pathlib import Path

import nox
from python_discovery import get_interpreter

ROOT = Path(__file__).parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
BUILD = PROJECT["build-system"]["requires"]
EXTRAS = PROJECT["project"]["optional-dependencies"]

nox.needs_version = ">=2026.10.20"
nox.options.sessions = ["lint", "types", "tests"]
nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_venv = "yes"
nox.options.error_on_missing_interpreters = True
nox.options.download_python = "never"

# --- Interpreters --------------------------------------------------------------------------------


def show_all_of_pyenv() -> None:
    """Let the search find every Python of pyenv. Its shims offer only the selected one."""
    home = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    if pyenv := shutil.which("pyenv") or shutil.which("pyenv", path=str(home / "bin")):
        versions = subprocess.run([pyenv, "versions", "--bare"], capture_output=True, text=True, check=True).stdout
        os.environ["PYENV_ROOT"] = str(home)
        os.environ["PYENV_VERSION"] = ":".join(reversed(versions.split()))
        os.environ["PATH"] = os.pathsep.join([os.environ["PATH"], str(home / "shims")])


def newest_python() -> str:
    """Return the newest minor version of the released CPythons on this machine."""
    for minor in range(20, 10, -1):
        found = get_interpreter(f"cpython3.{minor}")
        if found is not None and found.version_info.releaselevel == "final" and not found.free_threaded:
            return f"3.{minor}"
    return "3.11"  # nox says that it is missing


show_all_of_pyenv()
NEWEST = newest_python()

# --- Environments --------------------------------------------------------------------------------


def pip(python: str, *arguments: str) -> None:
    """Run `pip install`, and say every few seconds how far it is."""
    command = [python, "-m", "pip", "install", "--progress-bar=off", "--disable-pip-version-check", *arguments]
    output, found, shown = [], 0, time.monotonic()
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            output.append(line)
            found += line.startswith("Collecting")
            if line.startswith("Installing collected packages") and found > 1:
                print(f"  installing {line.count(',') + 1} packages: a minute on two cores", flush=True)
            elif line.startswith(("Collecting", "  Downloading", "Building")) and time.monotonic() - shown > 2:
                name = re.sub(r"\S*/", "", line.strip())  # pip shows whole addresses
                print(f"  {found} packages found; {name[:100]}", flush=True)
                shown = time.monotonic()
    if process.returncode:
        raise SystemExit("".join(output) + f"\npip failed: {' '.join(command)}")


def prepare(session: nox.Session, *requirements: str) -> str:
    """Install requirements, unless the environment has them already. Return its Python."""
    python = session.env_dir / "bin" / "python"
    stamp = session.env_dir / "requirements.txt"
    wanted = "\n".join([*requirements, *BUILD, *PROJECT["project"]["dependencies"], ""])
    if not stamp.exists() or stamp.read_text() != wanted:
        start = time.monotonic()
        pip(str(python), *wanted.split("\n")[:-1])
        stamp.write_text(wanted)
        session.log(f"{session.name}: {count_packages(python)} packages installed in {time.monotonic() - start:.0f} s")
    return str(python)


def count_packages(python: Path) -> int:
    return len(list(python.parent.parent.glob("lib/python*/site-packages/*.dist-info")))


def install_lox(python: str) -> None:
    """Build the wheel and install it. The build requirements are there already, so this needs no network."""
    pip(python, "--no-deps", "--no-build-isolation", "--force-reinstall", ".")


def limit_cache() -> None:
    """Drop the compiled programs of the tests when they take more than a gigabyte."""
    cache = ROOT / ".nox" / "xla-cache"
    if sum(file.stat().st_size for file in cache.glob("*")) > 1e9:
        shutil.rmtree(cache)


def run(session: nox.Session, python: str, *arguments: str, **env: str) -> None:
    """Run Python without the working directory on its path: `lox` is the installed one."""
    session.run(python, "-P", *arguments, env=env, external=True)


def pytest(session: nox.Session, python: str, *arguments: str, **env: str) -> None:
    run(session, python, "-m", "pytest", "-n", "auto", *arguments, **env)


# --- Daily work: one environment, on the newest JAX ----------------------------------------------

SHARED = str(ROOT / ".nox" / "newest" / "bin" / "python")
BROWSER = "import sys; sys.path.insert(0, 'tests'); import browser; print(browser.package())"


@nox.session(python=NEWEST, default=False)
def newest(session: nox.Session) -> None:
    """The environment: the newest Python, the newest JAX that it can install, and all tools."""
    prepare(session, "jax", *EXTRAS["test"], *EXTRAS["lint"])


@nox.session(python=False, requires=["newest"], default=False)
def lint(session: nox.Session) -> None:
    """Check style, formatting, workflows and configuration files."""
    run(session, SHARED, "-m", "ruff", "check")
    run(session, SHARED, "-m", "ruff", "format", "--check")
    session.run(str(Path(SHARED).with_name("zizmor")), "--offline", "--quiet", ".github", external=True)
    workflows = sorted(map(str, Path(".github/workflows").glob("*.yml")))
    checks = {
        "vendor.github-workflows": workflows,
        "vendor.github-issue-forms": sorted(map(str, Path(".github/ISSUE_TEMPLATE").glob("[!c]*.yml"))),
        "vendor.github-issue-config": [".github/ISSUE_TEMPLATE/config.yml"],
        "vendor.dependabot": [".github/dependabot.yml"],
        "vendor.readthedocs": [".readthedocs.yaml"],
    }
    for schema, files in checks.items():
        run(session, SHARED, "-m", "check_jsonschema", "--builtin-schema", schema, *files)


@nox.session(python=False, requires=["newest"], default=False)
def types(session: nox.Session) -> None:
    """Check types, against the newest JAX: it needs Python 3.12."""
    if NEWEST == "3.11":
        atexit.register(print, "NOT CHECKED: the types. Their check needs Python 3.12 or later.")
        return session.log("Python 3.12 or later is needed to check types")
    run(session, SHARED, "-m", "pyright", "--pythonpath", SHARED)


@nox.session(python=False, requires=["newest"], default=False)
def tests(session: nox.Session) -> None:
    """Run the tests of every change, of the built wheel."""
    limit_cache()
    install_lox(SHARED)
    if problem := str(session.run(SHARED, "-c", BROWSER, external=True, silent=True)).strip():
        atexit.register(print, f"NOT TESTED: the dashboard in a browser, because {problem}")  # below nox's summary
    pytest(session, SHARED, *session.posargs)


@nox.session(python=False, requires=["newest"], default=False)
def quick(session: nox.Session) -> None:
    """Run the fast tests on the source tree, between two edits."""
    session.run(SHARED, "-m", "pytest", "-n", "auto", "-m", "not slow", *session.posargs, external=True)


@nox.session(python=False, requires=["newest"], default=False)
def nightly(session: nox.Session) -> None:
    """Run all tests, whole tables and thousands of random programs, new ones every day."""
    install_lox(SHARED)
    today = str(datetime.datetime.now(datetime.UTC).date().toordinal() * 1000)
    numbers = {"LOX_FUZZ_N": "2000", "LOX_FUZZ_SEED": today, "LOX_KILL_N": "100"}
    env = {name: os.environ.get(name, number) for name, number in numbers.items()}
    session.log(f"random programs: {env}")
    pytest(session, SHARED, "--nightly", *session.posargs, **env)


@nox.session(python=False, requires=["newest"], default=False)
def fuzz(session: nox.Session) -> None:
    """Run random programs against plain Python."""
    install_lox(SHARED)
    pytest(session, SHARED, "--nightly", "tests/test_fuzz.py", *session.posargs)


@nox.session(python=False, requires=["newest"], default=False)
def mutants(session: nox.Session) -> None:
    """Plant small faults in lox and see whether the tests find them."""
    session.run(SHARED, "tools/mutants.py", *session.posargs, external=True)


@nox.session(python=False, requires=["newest"], default=False)
def soak(session: nox.Session) -> None:
    """Run a long training in three minutes and look for leaks of memory, objects and threads."""
    install_lox(SHARED)
    run(session, SHARED, "benchmarks/soak.py", *session.posargs)


# --- The matrix: everything else that CI runs ----------------------------------------------------

# Their outcome depends on how a JAX release traces and lowers programs and treats effects.
TRACING = [
    *("test_canary", "test_dispatch", "test_fuzz", "test_hidden", "test_log", "test_meshes", "test_options"),
    *("test_order", "test_recompute", "test_scope", "test_sharded", "test_streams", "test_tap", "test_transforms"),
]
TRACING = [f"tests/{name}.py" for name in TRACING]
README = "tests/test_docs.py::test_readme"
SMOKE = ["tests/test_log.py", "tests/test_transforms.py", README]
SMALL = [*EXTRAS["ui"], *EXTRAS["pandas"], "pytest>=8", "pytest-xdist>=3.6"]
# For each minor release that no other cell covers, its first version and its last.
BETWEEN = {"0.8.*": "3.12", "0.9.0": "3.12", "0.9.*": "3.13", "0.10.0": "3.12", "0.11.0": "3.13", "0.11.*": "3.13"}


@nox.session(python=NEWEST, tags=["matrix"], default=False)
def docs(session: nox.Session) -> None:
    """Build the documentation of the installed lox. A warning is an error."""
    python = prepare(session, "jax", *EXTRAS["docs"], *EXTRAS["ui"])
    install_lox(python)
    shutil.rmtree("docs/_build", ignore_errors=True)
    arguments = ["--fail-on-warning", "--keep-going", "--quiet", *session.posargs]
    run(session, python, "-m", "sphinx", *arguments, "docs", "docs/_build")
    session.log("docs/_build/index.html")


@nox.session(python="3.11", tags=["matrix"], default=False)
def oldest(session: nox.Session) -> None:
    """Run the tests of tracing on the oldest JAX."""
    python = prepare(session, "jax==0.8.0", *EXTRAS["test"])
    install_lox(python)
    pytest(session, python, *TRACING, README, *session.posargs)


@nox.session(python="3.11", tags=["matrix"], default=False)
def py311(session: nox.Session) -> None:
    """Run the tests of tracing on the newest JAX of Python 3.11, and the tests against rliable."""
    if NEWEST == "3.11":
        return session.log("`make test` has run all tests in this cell")
    python = prepare(session, "jax", *EXTRAS["test"])
    install_lox(python)
    pytest(session, python, *TRACING, README, "tests/test_compare.py", *session.posargs)


@nox.session(tags=["matrix"], default=False)
@nox.parametrize("python,jax", [(python, jax) for jax, python in BETWEEN.items()], ids=BETWEEN)
def smoke(session: nox.Session, jax: str) -> None:
    """Run a few tests on a JAX between the oldest and the newest."""
    python = prepare(session, f"jax=={jax}", *SMALL)
    install_lox(python)
    pytest(session, python, *SMOKE, *session.posargs)


# --- For users and releases: on the Python at hand -----------------------------------------------


USER = str(ROOT / ".nox" / "user" / "bin" / "python")


@nox.session(default=False)
def user(session: nox.Session) -> None:
    """The environment: lox and the packages of its page."""
    install_lox(prepare(session, "jax", *EXTRAS["ui"]))


@nox.session(python=False, requires=["user"], default=False)
def demo(session: nox.Session) -> None:
    """Train a few small networks, logged with lox."""
    run(session, USER, "examples/demo.py", *session.posargs)


@nox.session(python=False, requires=["user"], default=False)
def ui(session: nox.Session) -> None:
    """Show the curves of the demo in a browser."""
    if not Path("lox-demo").exists():
        session.error("there are no runs of the demo yet: `make demo` makes them")
    run(session, USER, "-m", "lox", "ui", "lox-demo", *session.posargs)


@nox.session(default=False)
def bench(session: nox.Session) -> None:
    """Measure run time and compile time as ratios to hand-written code."""
    python = prepare(session, "jax", *EXTRAS["test"], *EXTRAS["bench"])
    install_lox(python)
    run(session, python, "benchmarks/run.py", *session.posargs)


@nox.session(default=False)
def oryx(session: nox.Session) -> None:
    """Make the environment of a comparison: the newest JAX for Oryx is too old for lox."""
    pip(str(session.env_dir / "bin" / "python"), "jax==0.5.0", "oryx==0.2.9")


@nox.session(default=False)
def dist(session: nox.Session) -> None:
    """Build the release, and run the README with the wheel in an empty environment."""
    python = prepare(session, "build", "twine>=6.1")
    shutil.rmtree("dist", ignore_errors=True)
    run(session, python, "-m", "build")
    (wheel,), (sdist,) = Path("dist").glob("*.whl"), Path("dist").glob("*.tar.gz")
    run(session, python, "-m", "twine", "check", "--strict", str(wheel), str(sdist))
    empty = session.env_dir / "empty"
    session.run(python, "-m", "venv", "--clear", str(empty), external=True)
    fresh = str(empty / "bin" / "python")
    pip(fresh, f"{wheel}[ui,pandas]")
    # Without -P: the folder of the tests is on the path then, and the source tree is not.
    session.run(fresh, "tests/documents.py", "README.md", external=True)
    with zipfile.ZipFile(wheel) as content:
        others = [name for name in content.namelist() if not name.startswith(("lox/", "lox_jax-"))]
    if others:
        session.error(f"the wheel has files outside of lox/: {', '.join(others)}")
    for file in wheel, sdist:
        session.log(f"{file}: {file.stat().st_size:,} bytes")
