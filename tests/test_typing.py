"""Type checkers know the parameters and the result of a transformed function."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).with_name("typing_examples.py")


def pyright(path: Path) -> str:
    pytest.importorskip("pyright", reason="pyright is installed with the newest JAX only")
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, path.name]
    return subprocess.run(command, cwd=path.parent, capture_output=True, text=True).stdout


def test_examples(tmp_path: Path) -> None:
    # Copied, so that lox is the installed package, as for users, and not the folder next to the tests.
    shutil.copy(EXAMPLES, tmp_path)
    assert pyright(tmp_path / EXAMPLES.name) == "0 errors, 0 warnings, 0 informations\n"


def test_a_missing_error_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "wrong.py"
    lines = ("# pyright: reportUnnecessaryTypeIgnoreComment=true", "import lox", "def f(x: int) -> int: ...", "")
    path.write_text("\n".join([*lines, "lox.spool(f)(1)  # pyright: ignore[reportArgumentType]"]))
    assert 'error: Unnecessary "# pyright: ignore" rule: "reportArgumentType"' in pyright(path)
