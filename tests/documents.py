"""Runs a page of the documentation as its reader would: `python tests/documents.py docs/guides/rl.md`.

A page runs from top to bottom, in one empty folder and one Python session:

- ```python blocks with `>>>` are doctests. Their output is compared.
- ```python blocks without `>>>` are files. Their first line is the name: `# train.py`.
- ```console blocks hold commands behind `$ ` and their output. A shell runs the commands, and the output, if there is
  any, is compared. `lox ui` is started, asked for its page, and stopped. `git clone` and `pip install` are not run, but
  the extras that they name must exist.
- ```text blocks are only shown. No other block is allowed: it would be an example without a test.

Blocks may be indented, as in lists. `...` in an output stands for anything.
"""

import contextlib
import doctest
import importlib.util
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import tomllib
import urllib.request
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import forks

ROOT = Path(__file__).resolve().parent.parent
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
MISSING = 77  # the exit code if the page needs packages that are not installed
SHOWN = ("text",)  # shown, and not run
DIRECTIVE = re.compile(r"\{[\w:-]+\}")  # of MyST, such as {note}: its body is prose
FENCE = re.compile(r"^( *)```(?P<kind>[^\n`]*)\n(?P<text>.*?)^\1``` *$", re.DOTALL | re.MULTILINE)


@dataclass
class Block:
    """One fenced block: what it is, its text, and the line of the page where it begins."""

    kind: str
    text: str
    line: int


def blocks(page: Path) -> Iterator[Block]:
    """Give the fenced blocks of a page."""
    text = page.read_text(encoding="utf-8")
    for match in FENCE.finditer(text):
        kind = match["kind"].strip()
        if not DIRECTIVE.match(kind):
            yield Block(kind, textwrap.dedent(match["text"]), text.count("\n", 0, match.start("text")))


def packages(page: Path) -> set[str]:
    """Return the packages that a page imports and that are not there."""
    found: set[str] = set()
    for block in blocks(page):
        if block.kind == "python":
            for line in re.findall(r"^(?:>>> |\.\.\. )?\s*(?:import|from) (.*)", block.text, flags=re.MULTILINE):
                names = line.partition(" import ")[0] if " import " in line else line
                found |= {part.split()[0].partition(".")[0] for part in names.split(",")}
    here = {block.text.splitlines()[0][2:].removesuffix(".py") for block in blocks(page) if block.kind == "python"}
    return {name for name in found - here if importlib.util.find_spec(name) is None}


class Failure(Exception):
    """What a page says is not what happens."""


class Reader:
    """Reads a page, and does what it says."""

    def __init__(self, page: Path, folder: Path):
        self.page, self.folder = page, folder
        self.names: dict[str, object] = {"__name__": "__main__"}
        self.done = 0
        programs = folder / "bin"
        programs.mkdir()
        forks.executables(programs)
        self.environment = {
            **forks.user_environment(),
            "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "COLUMNS": "120",
        }
        with socket.socket() as free:
            free.bind(("localhost", 0))
            self.port = free.getsockname()[1]

    def read(self) -> None:
        """Do what each block says, in order."""
        for block in blocks(self.page):
            if block.kind == "python" and ">>> " in block.text:
                self.run_examples(block)
            elif block.kind == "python":
                self.write_file(block)
            elif block.kind == "console":
                self.run_commands(block)
            elif block.kind not in SHOWN:
                self.fail(block, f"a block of {block.kind or 'no'} language: use python, console or text")

    def fail(self, block: Block, what: str) -> None:
        name = self.page.relative_to(ROOT) if self.page.is_relative_to(ROOT) else self.page
        raise Failure(f"{name}:{block.line}: {what}")

    def run_examples(self, block: Block) -> None:
        # Each block has a name of its own, by which doctest finds its source: functions live on in later blocks.
        name = f"{self.page.name}:{block.line}"
        examples = doctest.DocTestParser().get_doctest(block.text, self.names, name, str(self.page), block.line)
        examples.globs = self.names  # the parser has copied them
        said: list[str] = []
        failed, attempted = doctest.DocTestRunner(optionflags=OPTIONS, verbose=False).run(
            examples, out=said.append, clear_globs=False
        )
        self.done += attempted
        if failed:
            self.fail(block, "\n" + "".join(said))

    def write_file(self, block: Block) -> None:
        first = block.text.partition("\n")[0]
        if not re.fullmatch(r"# [\w.-]+\.py", first):
            self.fail(block, f"a program whose first line is not its name, `# train.py`, but {first!r}")
        # A page has a port of its own on the machine where it is tested.
        (self.folder / first[2:]).write_text(block.text.replace("localhost:1234", f"localhost:{self.port}"))

    def run_commands(self, block: Block) -> None:
        commands = re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n?)*)", block.text, flags=re.MULTILINE)
        if not commands or not block.text.startswith("$ "):
            self.fail(block, "a console without a command: commands begin with `$ `")
        for command, wanted in commands:
            self.done += 1
            if command.startswith(("git clone", "pip install")):
                check_install(command) or self.fail(block, f"{command}: there is no such extra")
            elif command.startswith("lox ui "):
                self.look_at_page(block, command)
            else:
                done = subprocess.run(
                    # A plain `wait` would not tell that a program in the background has failed.
                    ["bash", "-c", f"set -e; {command}\nfor job in $(jobs -p); do wait $job; done"],
                    cwd=self.folder,
                    env=self.environment,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
                matches = doctest.OutputChecker().check_output(wanted, done.stdout, OPTIONS)
                if done.returncode or (wanted.strip() and not matches):
                    self.fail(block, f"$ {command}\nexit code {done.returncode}\n{done.stdout}")

    def look_at_page(self, block: Block, command: str) -> None:
        words = [*shlex.split(command), "--no-browser", "--port", "0"]
        server = subprocess.Popen(
            words, cwd=self.folder, env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        try:
            assert server.stdout is not None
            line = server.stdout.readline()
            address = re.search(r"http://\S+", line)
            if address is None:
                self.fail(block, f"$ {command}\n{line}{server.communicate()[0]}")
            else:
                with urllib.request.urlopen(address[0]) as answer:
                    assert b"<html" in answer.read()
        finally:
            server.send_signal(signal.SIGINT)
            server.communicate(timeout=60)


def check_install(command: str) -> bool:
    """Whether the extras of lox that a command installs exist."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = [name.strip() for part in re.findall(r"\[(.*?)\]", command) for name in part.split(",")]
    return set(named) <= set(extras)


def main(page: Path) -> int:
    if missing := packages(page):
        print(f"not installed: {', '.join(sorted(missing))}")
        return MISSING
    import jax

    import lox

    # JAX would add a note to every error, and doctest would compare the note too.
    jax.config.update("jax_traceback_filtering", "off")

    with tempfile.TemporaryDirectory() as folder:
        reader = Reader(page, Path(folder))
        with contextlib.chdir(folder), warnings.catch_warnings():
            warnings.simplefilter("error", lox.LoxWarning)  # if one is shown on purpose, the page catches it
            sys.path.insert(0, folder)
            try:
                reader.read()
            except Failure as failure:
                print(failure)
                return 1
    print(f"{reader.done} examples")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve()))
