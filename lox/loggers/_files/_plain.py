"""One plain file per run: what `CsvLogger` and `JsonlLogger` share."""

import collections
import errno
import hashlib
import json
import os
import pathlib
from typing import IO, Any, TextIO

import numpy as np

from lox import _errors
from lox._data._png import png
from lox.loggers._files._rows import Labels, strict_json
from lox.loggers._logger import Logger
from lox.loggers._run import Run

_MANY = 64  # files open at once: there may be more runs than the system allows open files


def folder(path: str | os.PathLike[str]) -> pathlib.Path:
    """The directory that a user has named; absolute, because the working directory may change."""
    if not isinstance(path, str | os.PathLike):
        raise _errors.LogTypeError(f"`path` is {path!r}; it must be the name of a folder.")
    return pathlib.Path(path).absolute()


class RunFile:
    """The file of one run."""

    def __init__(self, path: pathlib.Path):
        self.path = path
        self.labels = Labels()
        self.columns: list[str] = []


class FileLogger(Logger):
    """Base class of loggers that write one text file per run, named after the run and never overwritten."""

    suffix = ""

    def __init__(self, path: str | os.PathLike[str]):
        self.path = folder(path)
        self._open_files: collections.OrderedDict[pathlib.Path, TextIO] = collections.OrderedDict()

    def open(self, run: Run) -> None:
        """Create the file; if the name is taken, 42 becomes 42.1. The config goes to a file beside it."""
        self.path.mkdir(parents=True, exist_ok=True)
        name, attempt = run.name, 0
        while True:
            try:
                # Exclusively, so that two processes never write to the same file.
                file = open(self.path / (run.name + self.suffix), "x", encoding="utf-8", newline="")  # noqa: SIM115
                break
            except FileExistsError:
                attempt += 1
                run.name = f"{name}.{attempt}"
        run.resource = RunFile(self.path / (run.name + self.suffix))
        self._keep_open(run.resource.path, file)
        if run.config:
            config = json.dumps(strict_json(run.config), indent=2)
            (self.path / f"{run.name}{self.suffix}.config.json").write_text(config + "\n", encoding="utf-8")

    def append(self, run: Run, text: str) -> None:
        """Add text to the run's file, so that others see it at once."""
        path = run.resource.path
        file = self._open_files.pop(path, None)
        if file is None:
            file = open(path, "a", encoding="utf-8", errors="backslashreplace", newline="")  # noqa: SIM115
        self._keep_open(path, file)
        file.write(text)
        file.flush()

    def save_picture(self, run: Run, pixels: np.ndarray) -> str:
        """Put a picture in a file of its own, named after its content; returns where, relative to the run's file."""
        data = png(pixels.astype(np.uint8, copy=False))
        path = self.path / f"{run.name}.media" / f"{hashlib.sha256(data).hexdigest()[:16]}.png"
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(data)
        return path.relative_to(self.path).as_posix()

    def _keep_open(self, path: pathlib.Path, file: TextIO) -> None:
        self._open_files[path] = file
        while len(self._open_files) > _MANY:
            self._open_files.popitem(last=False)[1].close()

    def forget(self, run: Run) -> None:
        """Close the run's file, if it is open."""
        file = self._open_files.pop(run.resource.path, None)
        if file is not None:
            file.close()

    def commit(self) -> None:
        """Ask the system to put everything on disk."""
        for file in self._open_files.values():
            file.flush()
            put_on_disk(file)

    def finish(self, run: Run) -> None:
        """Close the file."""
        self.forget(run)


# What is said where there is no disk to put it on: then the data has been handed over, and that is all there is.
_CANNOT = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP)


def put_on_disk(file: IO[Any]) -> None:
    """Ask the system to put on disk what was written. A disk that is full or broken may say so only now."""
    try:
        os.fsync(file.fileno())
    except OSError as error:
        if error.errno not in _CANNOT:
            raise
