"""One plain file per run: what `CsvLogger` and `JsonlLogger` share."""

import collections
import contextlib
import errno
import functools
import hashlib
import json
import mmap
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator
from typing import IO

import numpy as np

try:
    import resource
except ImportError:  # on Windows
    resource = None

from lox import _errors
from lox._data._bundle import Bundle
from lox._data._image import png
from lox.loggers._batch import Batch
from lox.loggers._files._rows import Column, Labels, strict_json, tables
from lox.loggers._logger import Logger
from lox.loggers._run import Run
from lox.store.names import Taken

_MAX_OPEN = 64
# Errors of `fsync` on what is not on a disk, such as a pipe: there is nothing more to do.
_NO_DISK = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP)
_WAY_OUT = "These events are not written. Free some space, or make the folder writable, before the next ones."


def folder(path: str | os.PathLike[str]) -> pathlib.Path:
    """Check the name of a folder, and make it absolute because the working directory may change."""
    if not isinstance(path, str | os.PathLike):
        raise _errors.LogTypeError(f"`path` is {path!r}; it must be the name of a folder.")
    return pathlib.Path(path).absolute()


def is_missing(file: pathlib.Path) -> bool:
    """Tell whether a file was removed or renamed."""
    try:
        os.stat(file)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        pass  # such as a folder that may not be read: nothing is lost
    return False


def create_for(run: Run, taken: Taken, create: Callable[[str], None]) -> None:
    """Create something named after the run; if the name is taken, 42 becomes 42.1."""
    name = run.name
    while True:
        run.name = taken.take(name)
        try:
            return create(run.name)
        except FileExistsError:
            pass


def most_open() -> int:
    """Return how many files a logger may keep open: a sixteenth of what the process may, because it is not alone."""
    if resource is None:
        return _MAX_OPEN
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return _MAX_OPEN if limit == resource.RLIM_INFINITY else max(1, min(_MAX_OPEN, limit // 16))


class OpenFiles(collections.OrderedDict[pathlib.Path, IO[bytes]]):
    """The files of runs. Those used last are kept open: there may be more than the system allows."""

    def __init__(self) -> None:
        super().__init__()
        self._runs: dict[pathlib.Path, str] = {}  # the run of each file, until it ends
        self._torn: dict[pathlib.Path, int] = {}  # where files end whose last write failed
        self._unsynced: set[pathlib.Path] = set()  # files written to since the last commit

    def create(self, file: pathlib.Path, run: str) -> None:
        """Begin a file; it must not exist, so that two processes never write to the same one."""
        file.touch(exist_ok=False)
        self._runs[file] = run

    def reopen(self, file: pathlib.Path, run: str) -> None:
        """Go on with a file of lines, without the half of one at its end that a crash may have left."""
        self._runs[file] = run
        with self.writing(file), open(file, "rb") as lines:
            if os.fstat(lines.fileno()).st_size:
                with mmap.mmap(lines.fileno(), 0, access=mmap.ACCESS_READ) as content:
                    self._torn[file] = content.rfind(b"\n") + 1
        self.append(file, b"")

    def append(self, file: pathlib.Path, data: bytes) -> None:
        """Add to a file, so that others see it at once: everything, or nothing if the system refuses."""
        rest = memoryview(data)
        with self.writing(file):
            descriptor = self._use(file)
            self._mend(file)
            self._unsynced.add(file)
            try:
                while rest:
                    rest = rest[os.write(descriptor, rest) :]
            except BaseException:
                self._torn[file] = os.fstat(descriptor).st_size - (len(data) - len(rest))
                self._mend(file)
                raise

    @contextlib.contextmanager
    def writing(self, file: pathlib.Path) -> Iterator[None]:
        """Give the errors of the system the name of the file."""
        try:
            yield
        except FileNotFoundError as error:
            raise _errors.lost_file(file, [self._runs.get(file, file.stem)]) from error
        except OSError as error:
            raise _errors.cannot_write(file, error, _WAY_OUT) from error

    def _use(self, file: pathlib.Path) -> int:
        """Open a file, unless it is open. One that was removed is not made again: it would lack its beginning."""
        without_creating = lambda name, flags: os.open(name, flags & ~os.O_CREAT)  # noqa: E731
        opened = self.pop(file, None) or open(file, "ab", buffering=0, opener=without_creating)  # noqa: SIM115
        self[file] = opened
        while len(self) > most_open():
            self.popitem(last=False)[1].close()
        return opened.fileno()

    def _mend(self, file: pathlib.Path) -> None:
        """Cut off what a failed write has left: nobody could read what is added behind it."""
        if file in self._torn:
            os.ftruncate(self[file].fileno(), self._torn[file])
            del self._torn[file]

    def release(self, file: pathlib.Path) -> None:
        """Close a file, if it is open; it is opened again when it is needed."""
        if file in self:
            self.pop(file).close()

    def finish(self, file: pathlib.Path) -> None:
        """Close a file for good."""
        try:
            if file in self or file in self._unsynced:
                self.commit([file])
        finally:
            self.release(file)
            self._runs.pop(file, None)

    def commit(self, files: Iterable[pathlib.Path] | None = None) -> None:
        """Ask the system to put everything on disk, and make sure that all files, or these, are still there."""
        files = list(self._runs if files is None else files)
        lost = [file for file in files if self._is_lost(file)]
        for file in lost:
            self.release(file)
        self._unsynced.difference_update(lost)
        for file in self._unsynced.intersection(files):
            with self.writing(file):
                try:
                    os.fsync(self._use(file))  # a disk that is full or broken may report it only now
                except OSError as error:
                    if error.errno not in _NO_DISK:
                        raise
            self._unsynced.discard(file)
        if lost:
            raise _errors.lost_file(lost[0], [self._runs[file] for file in lost])

    def _is_lost(self, file: pathlib.Path) -> bool:
        if is_missing(file):
            return True
        # Some file systems number files anew when they are looked up, so a link must be missing too.
        mine = os.fstat(self[file].fileno()) if file in self else None
        return mine is not None and not mine.st_nlink and not os.path.samestat(mine, os.stat(file))


ATTEMPT = "attempt"  # the column of events after a `resume`
_NOTES = ".attempts.json"


class RunFile:
    """The file of one run, with the names of its columns, and the number of the attempt."""

    def __init__(self, file: pathlib.Path, attempt: int = 0, columns: Iterable[str] = ()):
        self.file, self.attempt = file, attempt
        self.columns = list(columns)
        self.labels = Labels([ATTEMPT])
        self.labels.recall(self.columns)


class FileLogger(Logger):
    """Base class of loggers that write one text file per run, named after the run and never overwritten."""

    suffix = ""

    def __init__(self, path: str | os.PathLike[str]):
        self.path = folder(path)
        self._names = Taken()
        self.open_files = OpenFiles()

    def _resumable(self, wanted: list[str]) -> tuple[Iterable[str], str]:
        files = self.path.glob(f"*{self.suffix}")
        return sorted(file.name.removesuffix(self.suffix) for file in files), repr(str(self.path))

    def _reopen(self, run: Run) -> None:
        """Go on with the file; where from, and what has changed in the config, goes to a file next to it."""
        assert run.resumed is not None
        file = self.path / (run.name + self.suffix)
        notes = file.with_name(file.name + _NOTES)
        attempts = json.loads(notes.read_text(encoding="utf-8")) if notes.exists() else []
        step, number = run.resumed
        attempts.append({ATTEMPT: len(attempts) + 1, "resumed": {step: number}, "config": run.config})
        complete = file.with_name(f".{notes.name}.new")
        complete.write_text(json.dumps(strict_json(attempts), indent=2) + "\n", encoding="utf-8")
        os.replace(complete, notes)
        self.open_files.reopen(file, run.name)
        run.resource = RunFile(file, len(attempts), self.columns(file))

    def columns(self, file: pathlib.Path) -> Iterable[str]:
        """Return the names of columns in a file, at least those whose kind is added."""
        raise NotImplementedError

    def open(self, run: Run) -> None:
        """Create the file; if the name is taken, 42 becomes 42.1. The config goes to a file next to it."""
        if run.resumed is not None:
            return self._reopen(run)
        self.path.mkdir(parents=True, exist_ok=True)
        create_for(run, self._names, lambda name: self.open_files.create(self.path / (name + self.suffix), name))
        run.resource = RunFile(self.path / (run.name + self.suffix))
        (self.path / f"{run.name}{self.suffix}{_NOTES}").unlink(missing_ok=True)  # of a file that was removed
        if run.config:
            config = json.dumps(strict_json(run.config), indent=2)
            (self.path / f"{run.name}{self.suffix}.config.json").write_text(config + "\n", encoding="utf-8")

    def _write_batch(self, runs: list[Run], batch: Batch) -> None:
        self._pipeline.write_each(runs, batch, self.add)

    def add(self, run: Run, bundles: list[Bundle]) -> None:
        """Add the events of these bundles to the file of a run."""
        raise NotImplementedError

    def tables(self, run: Run, bundles: list[Bundle], split: bool = False) -> Iterator[tuple[int, dict[str, Column]]]:
        """Yield numbers of events, with their steps and values by the names of their columns.

        A picture is the name of its file.
        """
        label, attempt = run.resource.labels.of, run.resource.attempt
        for count, steps, values in tables(bundles, functools.partial(self.save_picture, run), split):
            table = {label("step", name): x for name, x in steps.items()}
            table |= {label("key", key): x for key, x in values.items()}
            if attempt:
                table[ATTEMPT] = np.full(count, attempt)
            yield count, table

    def append(self, run: Run, text: str) -> None:
        """Add text to the run's file, so that others see it at once."""
        self.open_files.append(run.resource.file, text.encode(errors="backslashreplace"))

    def save_picture(self, run: Run, pixels: np.ndarray) -> str:
        """Write a picture to a file named after its content; return its name, relative to the run's file."""
        data = png(pixels.astype(np.uint8, copy=False))
        file = self.path / f"{run.name}.media" / f"{hashlib.sha256(data).hexdigest()[:16]}.png"
        if not file.exists():
            file.parent.mkdir(exist_ok=True)
            try:
                file.write_bytes(data)
            except BaseException:
                file.unlink(missing_ok=True)  # or half a picture would be taken for the whole one
                raise
        return file.relative_to(self.path).as_posix()

    def commit(self) -> None:
        """Ask the system to put everything on disk, and make sure that it is there."""
        self.open_files.commit()

    def finish(self, run: Run) -> None:
        """Close the file."""
        self.open_files.finish(run.resource.file)
