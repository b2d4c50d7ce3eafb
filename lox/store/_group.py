"""A group: the directory that one opening of a logger writes, with the files that `lox.store` describes.

Its id sorts by time, and the names of segments have the numbers of process and segment. Only files and directories with
such names are ever read, repaired or deleted.
"""

import bisect
import contextlib
import dataclasses
import datetime
import json
import math
import os
import platform
import re
import secrets
import socket
import stat
import sys
import time
import types
import zlib
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lox import _errors
from lox._version import __version__
from lox.store import _open
from lox.store._schema import FORMAT, FORMAT_1
from lox.store._segment import SegmentReader, open_file

GROUP_ID = re.compile(r"\d{8}T\d{6}-\d{6}-[0-9a-f]{8}")
SEGMENT = re.compile(r"p(\d{4,})-(\d{3,})\.arrows")
_LEFTOVER = re.compile(
    SEGMENT.pattern + r"\.(damaged|repaired)|(meta\.json|runs\.jsonl)\.\d+\.tmp"
)  # of repairs and of crashes
META, RUNS = "meta.json", "runs.jsonl"
RECENT = 60.0  # seconds after a write in which a writer on another machine is probably alive

_LARGEST_META, _LARGEST_RUNS = 16 << 20, 512 << 20  # bytes
_FAR_FUTURE = 2.0e11  # larger times cannot be dates

_CRC, _CRC_SIZE = b', "crc": "%08x"}', 20  # the end of a line
_NEW = (
    "crc",
    "title",
    "order",
    "end",
    "begin",
    "replaces",
)  # what lines of format 1, which have no checksum, do not have

_DEEPEST = 100  # levels of a config; beyond some more, neither JAX nor JSON can handle them

WAY_OUT = "Choose another directory, or make this one writable."


class Part(NamedTuple):
    """Which part of a run an entry is, if several processes of one program write it."""

    session: str  # of the program: the same in all its processes, and in no other program
    number: int  # how many runs with the same base the process has begun before
    process: int
    processes: int


class Entry(NamedTuple):
    """A line of runs.jsonl: a run, or the continuation of one."""

    group: str
    number: int  # of the run in its group
    name: str
    title: str  # the name without the number of the attempt
    base: str  # what identifies it: the words of its PRNG key, or its title if it has none
    mode: str
    order: int  # larger than that of all entries before, whatever the clock says; 0 in format 1
    opened: float
    key_data: tuple[int, ...] | None
    key_impl: str | None
    config: Any
    # A step and its number, from which on what earlier attempts have is replaced.
    resumed: tuple[str, Any] | None = None
    began: bool = False  # for one that overwrites others: whether it does so already
    part: Part | None = None

    @property
    def attempt(self) -> Any:
        """What entries of the same attempt at the same run have in common."""
        if self.part is None:
            return self.group, self.number
        return self.part.session, self.base, self.part.number

    def to_line(self) -> bytes:
        """Return one line of ASCII."""
        prng_key = None if self.key_data is None else {"impl": self.key_impl, "data": list(self.key_data)}
        line: dict[str, Any] = {
            "run": self.number,
            "name": self.name,
            "title": self.title,
            "base": self.base,
            "mode": self.mode,
            "order": self.order,
            "opened": self.opened,
            "key": prng_key,
            "config": self.config,
        }
        if self.resumed is not None:
            line["resumed"] = list(self.resumed)
        if self.began:
            line["began"] = True
        if self.part is not None:
            line["part"] = self.part._asdict()
        try:
            json.dumps(self.config, allow_nan=False)
        except ValueError:
            line |= {"config": _as_text(self.config), "infinite": True}
        return _with_checksum(line)

    @classmethod
    def from_json(cls, line: Any, group: str) -> "Entry":
        """Undo `to_line`, given the parsed line; raise a ValueError for anything else."""
        try:
            prng_key = line["key"]
            data = None if prng_key is None else tuple(map(int, prng_key["data"]))
            if data is not None and (not 0 < len(data) <= 64 or min(data) < 0 or max(data) >= 2**32):
                raise ValueError("not a PRNG key")
            entry = cls(
                group,
                int(line["run"]),
                str(line["name"]),
                str(line.get("title", line["base"])),
                str(line["base"]),
                str(line["mode"]),
                int(line.get("order", 0)),
                float(line["opened"]),
                data,
                None if prng_key is None else str(prng_key["impl"]),
                _from_text(line["config"]) if line.get("infinite") else line["config"],
                _resumed(line.get("resumed")),
                # In format 1 there was no waiting.
                line.get("began") is True or "order" not in line,
                Part(**line["part"]) if "part" in line else None,
            )
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
            raise ValueError(f"not a run: {error}") from error
        if not (0 <= entry.number < 2**31 and 0 <= entry.opened < _FAR_FUTURE):
            raise ValueError("not a run: an impossible number")
        return entry


def _resumed(given: Any) -> tuple[str, Any] | None:
    if given is None:
        return None
    name, number = given
    if not isinstance(name, str) or not isinstance(number, int | float):
        raise ValueError("not a step")
    return name, number


def _as_text(value: Any) -> Any:
    """Replace NaN and infinities, which JSON does not have, by a dict of one text."""
    if isinstance(value, dict):
        return {key: _as_text(x) for key, x in value.items()}
    if isinstance(value, list):
        return [_as_text(x) for x in value]
    return {"float": repr(value)} if isinstance(value, float) and not math.isfinite(value) else value


def _from_text(value: Any) -> Any:
    if isinstance(value, dict):
        text = value.get("float") if len(value) == 1 else None
        return float(text) if text in ("nan", "inf", "-inf") else {key: _from_text(x) for key, x in value.items()}
    return [_from_text(x) for x in value] if isinstance(value, list) else value


class End(NamedTuple):
    """How runs of a group ended, if not by the end of the group."""

    at: float
    failure: str | None
    killed: bool = False  # said by a group that is closed of a run that came from one that never was

    def to_line(self, runs: list[int]) -> bytes:
        """Return one line of ASCII for all runs that ended so."""
        line: dict[str, Any] = {"end": runs, "at": self.at, "failure": self.failure}
        if self.killed:
            line["killed"] = True
        return _with_checksum(line)

    @classmethod
    def from_json(cls, line: dict[str, Any]) -> "dict[int, End]":
        """Undo `to_line`, given the parsed line; raise a ValueError for anything else."""
        end = cls(float(line["at"]), line["failure"], bool(line.get("killed", False)))
        return {int(number): end for number in line["end"]}


class Source(NamedTuple):
    """A group that was merged into another one, which replaces it: `lox.store.compact`."""

    group: str
    first: int  # what its runs have added to their numbers
    runs: int  # how many numbers it has
    alone: bool  # whether it had one run, to which even keys without events belong
    merged: bool  # whether it was merged from others, which are sources too
    segments: dict[str, str]  # from the names of its files to those that their rows are in now
    meta: dict[str, Any]  # what its meta.json said, without times and sizes

    @staticmethod
    def to_line(sources: "list[Source]") -> bytes:
        """Return one line of ASCII for groups with the same `meta`."""
        replaced = [{name: x for name, x in source._asdict().items() if name != "meta"} for source in sources]
        return _with_checksum({"replaces": replaced, "meta": sources[0].meta})

    @classmethod
    def from_json(cls, line: dict[str, Any]) -> "list[Source]":
        """Undo `to_line`, given the parsed line; raise a ValueError for anything else."""
        return [cls(**source, meta=line["meta"]) for source in line["replaces"]]


def began_line(runs: list[int]) -> bytes:
    """Return the line that says that runs overwrite others from now on."""
    return _with_checksum({"begin": runs})


def _with_checksum(line: dict[str, Any]) -> bytes:
    """Return a line of ASCII that ends with the checksum of the rest."""
    text = json.dumps(line).encode()
    return text[:-1] + _CRC % zlib.crc32(text) + b"\n"


def _check(raw: bytes, line: Any) -> None:
    """Raise a ValueError if a line is not JSON, or does not have the checksum that it was written with."""
    if line is None:
        raise ValueError("not JSON")
    if raw[-_CRC_SIZE:] != _CRC % zlib.crc32(raw[:-_CRC_SIZE] + b"}") and any(name in line for name in _NEW):
        raise ValueError("not the checksum that it was written with")


def checksum(value: Any) -> str:
    """Return the checksum of what is about to be written as JSON, or was read."""
    return f"{zlib.crc32(json.dumps(value).encode()):08x}"


def check_nesting(
    value: Any, place: str = "config", outer: Mapping[int, str] = types.MappingProxyType({}), fields: bool = False
) -> None:
    """Raise an error if a config contains itself. It must not get to JAX, after whose attempt Python is unusable.

    With `fields`, those of dataclasses count too, because they will be written; otherwise their text is.
    """
    if id(value) in outer:
        raise _errors.LogTypeError(
            f"`{place}` is `{outer[id(value)]}` again: what contains itself cannot be written. Leave it out."
        )
    if len(outer) > _DEEPEST:
        raise _errors.LogTypeError(f"`{place}` is more than {_DEEPEST} levels deep in the config. Leave it out.")
    if isinstance(value, Mapping):
        inside = [(f"{place}[{name!r}]", x) for name, x in value.items()]
    elif isinstance(value, list | tuple | set | frozenset):
        inside = [(f"{place}[{n}]", x) for n, x in enumerate(value)]
    elif fields and dataclasses.is_dataclass(value) and not isinstance(value, type):
        inside = [(f"{place}.{field.name}", getattr(value, field.name, None)) for field in dataclasses.fields(value)]
    else:
        return
    for where, x in inside:
        check_nesting(x, where, {**outer, id(value): place}, fields)


def plain(value: Any) -> Any:
    """Convert a configuration to JSON: arrays become lists of numbers, other objects become text."""
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(v) for v in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.ndarray | np.generic) or hasattr(value, "__array__"):
        array = np.asarray(value)
        if array.dtype.kind in "biuf" or array.dtype.name == "bfloat16":
            return (array.astype(np.float64) if array.dtype.kind not in "biu" else array).tolist()
        return str(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    return str(value)


# --- writing ---


def create(folder: Path) -> Path:
    """Create the directory of a new group in `folder`."""
    now = datetime.datetime.now(datetime.UTC)
    while True:
        group = folder / f"{now:%Y%m%dT%H%M%S-%f}-{secrets.token_hex(4)}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            group.mkdir()
        except FileExistsError:
            if folder.is_dir():
                continue
            raise _errors.StoreError(f"{str(folder)!r} is a file: choose a directory.") from None
        except OSError as error:
            raise _errors.cannot_write(group, error, WAY_OUT) from error
        return group


def write_meta(
    group: Path, created: float, process: int, status: str, config: Any, sizes: dict[str, int] | None = None
) -> None:
    """Write meta.json, whole or not at all; `sizes` are those of all other files, when they are closed."""
    import jax

    meta = {
        "format": FORMAT,
        "status": status,
        "created": created,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "process": process,
        "versions": {
            "lox": __version__,
            "jax": jax.__version__,
            "numpy": np.__version__,
            "python": sys.version.split()[0],
        },
        "platform": platform.platform(),
        "config": config,
        "sizes": sizes,
    }
    _replace_meta(group, meta)


def _replace_meta(group: Path, meta: dict[str, Any]) -> None:
    replace(group / META, json.dumps({**meta, "crc": checksum(meta)}, indent=2).encode())


def replace(file: Path, data: bytes) -> None:
    """Write a file, whole or not at all."""
    temporary = file.with_name(f"{file.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(data)
        temporary.replace(file)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise _errors.cannot_write(file, error, WAY_OUT) from error


def files(group: Path) -> dict[str, int]:
    """Return the sizes of the files of a group; none if it is gone."""
    try:
        with os.scandir(group) as found:
            own = [f for f in found if f.name in (RUNS, META) or SEGMENT.fullmatch(f.name)]
            return {f.name: f.stat(follow_symlinks=False).st_size for f in own}
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise _errors.cannot_read(group, error) from error


def sizes(group: Path) -> dict[str, int]:
    """Return the sizes of the files of a group but meta.json."""
    return {name: size for name, size in files(group).items() if name != META}


def accept_sizes(group: Path) -> None:
    """Accept the files of a closed group as they are now."""
    meta = Group(group).meta()
    if meta is not None and meta.get("sizes"):
        _replace_meta(group, {**meta, "sizes": sizes(group)})


# --- reading ---


class Group:
    """What is known of a group on disk; `read_runs` and `scan` look for new runs and events."""

    def __init__(self, folder: Path):
        self.folder, self.id = folder, folder.name
        self.entries: list[Entry] = []
        self.ends: dict[int, End] = {}  # by the number of the run
        self.began = 0  # how many runs began to overwrite others after they were opened
        self.last_order = 0
        self.sources: list[Source] = []  # if it was merged from others
        self.segments: dict[tuple[int, int], SegmentReader] = {}
        self.problems: dict[Path, str] = {}  # what is wrong with which file
        self._runs_read, self._numbers = 0, set[int]()
        self._origins: list[Source] = []  # the sources that have runs of their own, in order

    def meta(self) -> dict[str, Any] | None:
        """Read meta.json; return None if there is none, and raise an error if it is not lox's."""
        file = self.folder / META
        try:
            with open_file(file) as opened:
                text = opened.read(_LARGEST_META)
        except FileNotFoundError:
            return None
        except _errors.StoreError:
            raise
        except OSError as error:
            raise _errors.cannot_read(file, error) from error
        try:
            meta = json.loads(text)
            written_as = meta["format"]
            if written_as == FORMAT and meta.pop("crc") != checksum(meta):
                raise ValueError("not the checksum that it was written with")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise _errors.StoreError(
                f"{str(file)!r} is damaged: it is not what lox writes there.\n"
                "Delete that one file to load the runs next to it without their configuration."
            ) from None
        if written_as not in (FORMAT, FORMAT_1):
            raise _errors.StoreError(
                f"{str(file)!r} says that the runs next to it are of format {written_as!r}; "
                f"this lox reads {FORMAT!r}.\nInstall the version of lox that wrote them."
            )
        return meta

    def read_runs(self) -> None:
        """Read the lines of runs.jsonl that are new."""
        file = self.folder / RUNS
        try:
            with open_file(file) as opened:
                size = os.fstat(opened.fileno()).st_size - self._runs_read
                if size <= 0:
                    return
                if size > _LARGEST_RUNS:
                    raise _errors.StoreError(f"{str(file)!r} is damaged: lox did not write {size} bytes to it.")
                opened.seek(self._runs_read)
                text = opened.read(size)  # allocates this much memory at once
        except FileNotFoundError:
            return
        except _errors.StoreError:
            raise
        except OSError as error:
            raise _errors.cannot_read(file, error) from error
        whole = text.rfind(b"\n") + 1  # the last line may still be on its way
        self._runs_read += whole
        damaged: list[str] = []
        lines = text[:whole].splitlines()
        for raw, line in zip(lines, _parse(lines), strict=True):
            try:
                _check(raw, line)
                if isinstance(line, dict) and "end" in line:
                    self.ends |= End.from_json(line)
                    continue
                if isinstance(line, dict) and "begin" in line:
                    began = set(line["begin"])
                    self.entries = [e._replace(began=True) if e.number in began else e for e in self.entries]
                    self.began += len(began)
                    continue
                if isinstance(line, dict) and "replaces" in line:
                    self.sources += Source.from_json(line)
                    continue
                entry = Entry.from_json(line, self.id)
            except (ValueError, KeyError, TypeError) as error:
                damaged.append(str(error))
                self.problems[file] = f"{str(file)!r}: {len(damaged)} damaged lines ({damaged[0]})"
                continue
            if entry.number not in self._numbers:
                self._numbers.add(entry.number)
                self.entries.append(entry)
                self.last_order = max(self.last_order, entry.order)

    def scan(self) -> None:
        """Find new segments, and new batches in them."""
        try:
            names = os.listdir(self.folder)
        except FileNotFoundError:
            return
        except OSError as error:
            raise _errors.cannot_read(self.folder, error) from error
        for name in names:
            match = SEGMENT.fullmatch(name)
            if match:
                self.segments.setdefault((int(match[1]), int(match[2])), SegmentReader(self.folder / name))
        self.segments = dict(sorted(self.segments.items()))
        for number in list(self.segments):
            try:
                self.segments[number].scan()
            except _errors.RunNotFoundError:
                del self.segments[number]  # overwritten meanwhile

    def segments_of(self, run: int) -> tuple[list[SegmentReader], bool]:
        """Return the segments that may have events of a run, and whether all their keys are keys of that run."""
        if not self.sources:
            return list(self.segments.values()), len(self.entries) == 1
        if not self._origins:
            self._origins = sorted((s for s in self.sources if s.runs and not s.merged), key=lambda s: s.first)
        # A run is in the last of them that begins before it: they are one after the other.
        origin = self._origins[bisect.bisect_right(self._origins, run, key=lambda s: s.first) - 1]
        names = set(origin.segments.values())
        return [segment for segment in self.segments.values() if segment.file.name in names], origin.alone

    def is_there(self) -> bool:
        """Tell whether nothing was deleted because another group replaces this one: the list of runs goes first."""
        return os.path.lexists(self.folder / RUNS)

    def damage(self) -> dict[Path, str]:
        """Say what is wrong with lines of runs.jsonl, and which files are shorter than when they were closed, or gone.

        Raises an error if this lox cannot read the group.
        """
        meta, found = self.meta(), {}
        sizes = (meta or {}).get("sizes") or {}
        for name, size in sizes.items() if isinstance(sizes, dict) else ():
            file = self.folder / name
            try:
                there = file.lstat().st_size
            except FileNotFoundError:
                found[file] = f"{str(file)!r} is gone"
                continue
            except OSError as error:
                raise _errors.cannot_read(file, error) from error
            if there < size:
                found[file] = f"{str(file)!r} has {there} of {size} bytes"
            elif name == RUNS and self._runs_read < size:
                found[file] = f"{str(file)!r} does not end with a line"
        return found | self.problems

    def fate(self) -> str:
        """Tell whether runs of which nothing else is known are "running", "finished", or were "killed"."""
        if (self.meta() or {}).get("status") == "closed":
            return "finished"
        return "running" if self.is_alive() else "killed"

    def state(self, number: int, fate: str) -> str:
        """Tell whether a run is "running", "finished", "failed", or was "killed", given the `fate` of the group."""
        end = self.ends.get(number)
        if end is None:
            return fate
        return "killed" if end.killed else "finished" if end.failure is None else "failed"

    def is_over(self) -> bool:
        """Tell whether nobody writes here any more: not even a process in a container, which cannot be seen."""
        try:
            meta = self.meta()
        except _errors.StoreError:
            return False  # which `load` reports
        if meta is not None and meta.get("status") == "closed":
            return True
        return not self.is_alive() and time.time() - self.last_change() > RECENT

    def is_alive(self) -> bool:
        """Tell whether some process may still be writing here."""
        meta = self.meta()
        if meta is None or meta.get("status") == "closed":
            return False
        if meta.get("host") != socket.gethostname():
            return time.time() - self.last_change() < RECENT
        pid = meta.get("pid")
        if pid == os.getpid():
            return _open.is_open(self.folder)
        return isinstance(pid, int) and pid > 0 and _is_running(pid)

    def last_change(self) -> float:
        """Return when a file of the group was last written to."""
        try:
            return max((entry.stat().st_mtime for entry in os.scandir(self.folder)), default=0.0)
        except OSError:
            return 0.0

    def delete(self) -> None:
        """Delete what lox wrote here, and the directory if nothing else is in it."""
        if self.folder.is_symlink():
            return  # lox makes no links: what it points to is not lox's
        try:
            # RUNS and META go last, so that an interrupted deletion can be told from damage.
            names = os.listdir(self.folder)
            segments = [name for name in names if SEGMENT.fullmatch(name) or _LEFTOVER.fullmatch(name)]
            for name in [*segments, RUNS, META]:
                with contextlib.suppress(FileNotFoundError):
                    (self.folder / name).unlink()
            if not os.listdir(self.folder):
                self.folder.rmdir()
        except FileNotFoundError:
            pass  # somebody else has done it
        except OSError as error:
            raise _errors.cannot_write(self.folder, error, WAY_OUT) from error


def _parse(lines: list[bytes]) -> list[Any]:
    """Parse each line; None for those that are damaged."""
    with contextlib.suppress(ValueError, RecursionError):
        parsed = json.loads(b"[" + b",".join(lines) + b"]")  # twice as fast as line by line
        if len(parsed) == len(lines):
            return parsed
    parsed = []
    for line in lines:
        try:
            parsed.append(json.loads(line))
        except (ValueError, RecursionError):
            parsed.append(None)
    return parsed


def _is_running(pid: int) -> bool:
    if os.name == "nt":
        return False  # os.kill would end the process
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (ProcessLookupError, OverflowError):
        return False
    return True


def _mode(path: str) -> int:
    try:
        return os.lstat(path).st_mode
    except FileNotFoundError:
        return 0


def groups_in(folder: Path, without: Container[str] = ()) -> list[str]:
    """Return the ids of the groups in a directory, oldest first, or of those that one does not know."""
    try:
        others = [name for name in os.listdir(folder) if name not in without and GROUP_ID.fullmatch(name)]
        # A link is not lox's.
        return sorted(name for name in others if stat.S_ISDIR(_mode(os.path.join(folder, name))))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise _errors.cannot_read(folder, error) from error
