"""`Writer`: writes everything that is logged through it to one group."""

import collections
import os
import struct
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lox import _errors
from lox._data import _sites
from lox._data._bundle import Bundle
from lox.store import _catalog, _group, _index, _open, names
from lox.store._catalog import Catalog
from lox.store._group import Entry, Part
from lox.store._record_batch import Batches
from lox.store._schema import Schema
from lox.store._segment import WAY_OUT, SegmentWriter
from lox.store._to_rows import RowMaker, Rows

Array = np.ndarray[Any, Any]

_MAX_OPEN = 64  # segments open at once, because each has a file descriptor
_MAX_PENDING = 256 << 20  # bytes to keep while nothing can be written
MOST_WAITING = _MAX_PENDING // 2  # bytes to collect


_begun: dict[Any, collections.Counter[str]] = {}  # runs of this process, by directory and session


class _Table:
    """Rows of one schema waiting to be written, and the segment that they go to."""

    def __init__(self, schema: Schema):
        self.batches = Batches(schema)
        self.segment: SegmentWriter | None = None
        self.started = False  # whether the schema is written, even without rows, because the keys exist
        self.columns: list[list[bytes]] = [[] for _ in self.batches.columns]
        self.rows = 0
        self.size = 0  # of the rows, in bytes

    def add(self, rows: Rows, wall: bytes) -> int:
        """Add rows; return their size in bytes."""
        if not rows.count:
            return 0
        size = 0
        columns = [rows.runs, wall * rows.count, *rows.columns]
        for waiting, data in zip(self.columns, columns, strict=True):
            waiting.append(data)
            size += len(data)
        self.rows += rows.count
        self.size += size
        return size

    def batch(self) -> list[Any]:
        """Return the waiting rows as the columns of a record batch, sorted by run."""
        raw = [b"".join(parts) for parts in self.columns]
        # Keeps the joined bytes, so that trying again is cheaper if writing fails.
        self.columns = [[data] for data in raw]
        runs = np.frombuffer(raw[0], np.int32)
        order = np.argsort(runs, kind="stable") if (runs[1:] < runs[:-1]).any() else None
        encoded: list[Any] = []
        batches = self.batches
        for items, codec, as_is, data in zip(batches.items, batches.codecs, batches.stored_as_is, raw, strict=True):
            if order is not None and items:
                data = np.frombuffer(data, np.dtype((np.void, len(data) // self.rows)))[order].tobytes()
            if as_is or not items:
                encoded.append(data)
                continue
            stored = codec.encode(np.frombuffer(data, codec.memory))
            if stored.dtype == np.bool_:
                stored = np.packbits(stored, bitorder="little")
            encoded.append(stored.data.cast("B"))
        return encoded

    def runs(self) -> set[int]:
        """Return the runs of the waiting rows."""
        firsts = np.unique(np.frombuffer(b"".join(self.columns[0]), np.int32)).tolist()
        return {first + n for first in firsts for n in range(self.batches.schema.runs)}

    def clear(self) -> None:
        """Forget the rows, which are on disk now."""
        self.columns = [[] for _ in self.batches.columns]
        self.rows = self.size = 0


class Writer:
    """Writes runs to a directory, to which others may write at the same time.

    >>> import tempfile, numpy as np, lox
    >>> directory = tempfile.mkdtemp()
    >>> with lox.store.Writer(directory) as writer:
    ...     run = writer.open_run("my run")
    ...     for i in range(3):
    ...         writer.append(run, lox.logdict({"loss": np.float32(i)}, steps={"step": {"loss": i}}))
    >>> print(lox.load(directory))
    {'loss': [0.0, 1.0, 2.0]}

    It takes NumPy arrays and never touches JAX, so callbacks may use it, from any thread. Small appends are collected
    up to `buffer_bytes`; `flush` makes everything that was appended readable for everyone.

    What the operating system refuses to write stays in memory, and every `append` that tries again and every `flush`
    raises a `StoreError`, until it succeeds. Segments that were written before stay readable.

    Several processes of one program write to one run if they have the same `session`, a text that no other program has:
    each gives its number as `process`, and how many `processes` there are. The n-th run that one of them begins with a
    PRNG key or name is that of the others, too.

    With `write_once`, no file is ever appended to: what was collected becomes a segment of its own, and the list of
    runs is replaced by a longer one. For object stores, where an append would upload a file again.

    Attributes:
        path: The directory.
        group: This writer's own directory inside it.
        run_names: The name of each run, by its number.
        closed: Whether nothing can be appended any more.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        config: Any = None,
        process: int | None = None,
        processes: int = 1,
        session: str | None = None,
        buffer_bytes: int = 64 << 10,
        segment_bytes: int = 256 << 20,
        write_once: bool = False,
    ):
        self.path = Path(path).absolute()  # the working directory may change
        self.run_names: list[str] = []
        self._process, self._processes, self._session = process or 0, processes, session
        self._place = os.path.realpath(self.path), session, self._process
        self._buffer_bytes, self._segment_bytes = min(buffer_bytes, MOST_WAITING), segment_bytes
        self._write_once, self._lines = write_once, b""
        _group.check_nesting(config, fields=True)
        self._config = _group.plain(config)
        self._warn = _sites.warner()
        self._lock = threading.RLock()
        self._created = time.time()
        self._pid = os.getpid()
        self._catalog = Catalog(self.path)
        self._rows = RowMaker()
        self._tables: dict[Schema, _Table] = {}  # the last one written comes last
        self._pending = 0
        self._refused = 0  # pending bytes when writing failed, to try again when there are more
        self._wall = 0.0
        self._segments = 0
        self._overwriting: dict[int, str] = {}  # runs that will overwrite others at their first event, and their bases
        self._with_events: set[int] = set()  # of these, those that have one on disk
        self._failed: set[int] = set()  # of these, those that have ended by an exception
        self._unsynced: list[str] = []  # segments written to since the last fsync
        self._warned = False
        self.closed = True  # until it is open
        self.group = _group.create(self.path).resolve()
        _group.write_meta(self.group, self._created, self._process, "open", self._config)
        self.closed = False
        _open.register(self.path, self.flush, self.close)

    # --- runs ---

    def open_run(
        self,
        name: str | None = None,
        key_data: Any = None,
        key_impl: str | None = None,
        config: Any = None,
        mode: str = "new",
    ) -> int:
        """Begin a run, or go on with one.

        Args:
            name: The name of the run; by default it is named after its PRNG key.
            key_data: The words of its PRNG key.
            key_impl: The name of the PRNG key's implementation.
            config: Its hyper-parameters, stored as JSON.
            mode: `"new"` makes another attempt, such as `42.1`; `"append"` goes on with the newest one; `"overwrite"`
                replaces all of them; `"error"` refuses.

        Returns:
            The number of the run, for `append`.
        """
        data = None if key_data is None else np.asarray(key_data, np.uint32).reshape(1, -1)
        return int(self.open_runs(None if name is None else [name], data, key_impl, [config], mode)[0])

    def open_runs(
        self,
        run_names: Sequence[str] | None = None,
        key_data: Any = None,
        key_impl: str | None = None,
        configs: Sequence[Any] | None = None,
        mode: str = "new",
        resumed: Sequence[tuple[str, Any]] | None = None,
        alone: bool = False,
    ) -> Array:
        """Open many runs at once, by names or PRNG keys `(run, words)`, with a configuration for each.

        With `resumed`, they are runs to go on with, each from a step with a name and a number on: what they already
        have from there on is hidden, because it is computed again. With `alone`, other processes have no part in them.
        """
        mode = _catalog.check_mode(mode)
        for config in configs or ():
            _group.check_nesting(config, fields=True)
        wanted = bases = [names.UNNAMED] if run_names is None else list(run_names)
        words: list[Any] = [None] * len(bases)
        impl = None
        if key_data is not None:
            data = np.asarray(key_data, np.uint32)
            data = data.reshape(-1, data.shape[-1])
            impl = key_impl or names.impl_of_raw(data)
            bases, words = names.base_names(data, impl), [tuple(row) for row in data.tolist()]
            wanted = names.of_runs(data, impl, configs) if run_names is None else wanted
        configs = [None] * len(bases) if configs is None else [_group.plain(config) for config in configs]
        if not len(words) == len(configs) == len(bases) == len(wanted):
            raise _errors.OptionError(f"{len(bases)} runs need as many PRNG keys and configurations.")
        with self._lock, self._catalog.locked() as locked:
            self._check_open()
            parts = [None] * len(bases) if alone else self._parts(bases)
            self._catalog.look_up(bases if mode != "new" or resumed or self._session else ())
            chosen = _catalog.choose(self._catalog, bases, wanted, mode, configs, resumed, parts)
            order, opened = self._catalog.next_order(), self._tick()
            first, here = len(self.run_names), self.group.name
            runs = zip(chosen, wanted, bases, words, configs, resumed or [None] * len(bases), parts, strict=True)
            entries = [
                Entry(
                    *(here, number, name, title, base, run_mode, order, opened, prng_key, impl, config),
                    resumed=None if run_mode == "new" else step,
                    part=part,
                )
                for number, ((name, run_mode), title, base, prng_key, config, step, part) in enumerate(runs, first)
            ]
            self._overwriting |= {e.number: e.base for e in entries if e.mode == "overwrite"}
            self._catalog.written_to(here)
            if self._session and not alone:
                _begun[self._place].update(bases)
            self._write_lines(b"".join(entry.to_line() for entry in entries))
            opened_as = {e.number: e.name for e in entries}
            if not locked:  # another process may have chosen the same names at the same moment
                self._catalog.refresh()
                records = self._catalog.records.values()
                opened_as |= {e.number: r.name for r in records for e in r.entries if e.group == here}
            elif len(self._catalog.groups) > _index.FEW:
                self._catalog.update_index()
            self.run_names += [opened_as[e.number] for e in entries]
            return np.arange(first, first + len(bases), dtype=np.int32)

    def _parts(self, bases: Sequence[str]) -> list[Part | None]:
        """Return which parts of runs this process begins: the n-th with a base is that of the other processes, too."""
        if not self._session:
            return [None] * len(bases)
        begun = _begun.setdefault(self._place, collections.Counter()).copy()
        parts: list[Part | None] = []
        for base in bases:
            parts.append(Part(self._session, begun[base], self._process, self._processes))
            begun[base] += 1
        return parts

    def end_runs(self, runs: Iterable[int], failure: str | None = None) -> None:
        """Note that runs have ended before the writer is closed, or why they have failed."""
        runs = list(map(int, runs))
        with self._lock:
            self._check_open()
            self._write_lines(_group.End(time.time(), failure).to_line(runs))
            if failure is not None:
                self._failed.update(self._overwriting.keys() & runs)  # without an event, they overwrite nothing

    def _begin(self, runs: Iterable[int]) -> None:
        """Let runs that have events now overwrite others: hide these, and delete them if nobody writes to them."""
        runs = list(runs)
        if not runs:
            return
        bases = {self._overwriting[run] for run in runs}
        self._write_lines(_group.began_line(runs))
        for run in runs:
            del self._overwriting[run]
        self._with_events.difference_update(runs)
        with self._catalog.locked():
            dead = [group for group in self._catalog.dead_groups(bases) if not group.is_alive()]
            if dead:
                self._sync_files()  # after a loss of power, one of both must be there
            for group in dead:
                try:
                    group.delete()
                except _errors.StoreError as error:
                    self._warn(f"what was overwritten is hidden, but could not be deleted: {error}")

    def _write_lines(self, lines: bytes) -> None:
        file = self.group / _group.RUNS
        if self._write_once:
            _group.replace(file, self._lines + lines)
            self._lines += lines
            return
        try:
            descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0), 0o666)
            try:
                before = os.fstat(descriptor).st_size
                rest = memoryview(lines)
                try:
                    while rest:
                        rest = rest[os.write(descriptor, rest) :]
                except OSError:
                    os.ftruncate(descriptor, before)  # or the next line would continue a torn one
                    raise
            finally:
                os.close(descriptor)
        except OSError as error:
            raise _errors.cannot_write(file, error, _group.WAY_OUT) from error

    # --- events ---

    def append(self, runs: Any, logs: Mapping[str, Any], wall: float | None = None) -> None:
        """Add events.

        Args:
            runs: The number of a run, or an array of numbers, one for each lane of the logs, whether lanes come first,
                as from `vmap(spool(f))`, or right after the event axis. What does not depend on the lane is stored for
                each of them.
            logs: NumPy arrays; a key has an event axis if the logdict says so, and is one event otherwise. Invalid
                events (`logs.valid`) are not stored.
            wall: The time of the events, in seconds since 1970; now by default. Times never go backwards.

        Raises:
            StoreError: The system refuses to write. The events are kept and written later, if possible: do not append
                them again, unless the message says that they were not taken.
        """
        self._append(lambda: self._rows.of_logs(runs, logs), wall)

    def append_bundles(self, runs: Array, bundles: Sequence[Bundle]) -> None:
        """Add events whose outermost lane is the run; they are NumPy arrays with an event axis."""
        self._append(lambda: self._rows.of(runs, bundles))

    def _append(self, make: Callable[[], list[Rows]], wall: float | None = None) -> None:
        with self._lock:
            self._check_open()
            made = make()
            if self._pending > _MAX_PENDING:
                raise _errors.StoreError(
                    f"{str(self.group)!r} cannot be written to, and {self._pending >> 20} MB are waiting in memory: "
                    f"{sum(rows.count for rows in made)} events were not taken.\nFree some space and flush."
                )
            stamp = struct.pack("<d", self._tick(wall))
            for rows in made:
                table = self._tables.get(rows.schema)
                if table is None:
                    table = self._tables[rows.schema] = _Table(rows.schema)
                self._pending += table.add(rows, stamp)
            if self._pending - self._refused >= self._buffer_bytes:
                self._write_pending()

    def _tick(self, wall: float | None = None) -> float:
        """Return a time later than any before, by which events of a key from two segments are sorted."""
        now = time.time() if wall is None else float(wall)
        self._wall = now if now > self._wall else float(np.nextafter(self._wall, np.inf))
        return self._wall

    def _write_pending(self) -> None:
        self._refused = self._pending
        for schema, table in list(self._tables.items()):
            if not table.rows and table.started:
                continue
            segment = self._segment_of(schema, table)
            if table.rows:
                segment.write_batch(table.rows, table.batch())
                if self._overwriting:
                    self._with_events |= self._overwriting.keys() & table.runs()
                self._pending -= table.size
                table.clear()
            else:
                segment.write_schema()
            table.started = True
            if self._write_once or segment.size >= self._segment_bytes:
                segment.close()
        self._refused = 0
        self._begin(self._with_events)
        self._forget_old_tables()

    def _segment_of(self, schema: Schema, table: _Table) -> SegmentWriter:
        self._tables[schema] = self._tables.pop(schema)  # moved to the end
        if table.segment is None or table.segment.closed:
            self._close_oldest_segments()
            file = self.group / f"p{self._process:04d}-{self._segments:03d}.arrows"
            table.segment = SegmentWriter(file, table.batches)
            self._unsynced.append(file.name)
            self._segments += 1
        return table.segment

    def _close_oldest_segments(self) -> None:
        live = self._open_segments()
        if len(live) < _MAX_OPEN:
            return
        for segment in live[: len(live) - _MAX_OPEN + 1]:
            segment.close()
        if not self._warned:
            self._warned = True
            self._warn(
                f"more than {_MAX_OPEN} different sets of keys, shapes or dtypes are being logged to "
                f"{str(self.path)!r}; each needs a file, and there will be many. "
                "Log the same keys together, with the same shapes."
            )

    def _open_segments(self) -> list[SegmentWriter]:
        return [t.segment for t in self._tables.values() if t.segment is not None and not t.segment.closed]

    def _forget_old_tables(self) -> None:
        # Shapes that change with every event must not fill the memory.
        for schema in list(self._tables)[: max(0, len(self._tables) - 4 * _MAX_OPEN)]:
            table = self._tables.pop(schema)
            if table.segment is not None:
                table.segment.close()

    @property
    def waiting(self) -> bool:
        """Whether events wait to be written."""
        return self._pending > 0

    def flush(self, fsync: bool = False) -> None:
        """Make everything that was appended readable by others; with `fsync`, also safe from a loss of power."""
        with self._lock:
            if self.closed:
                return
            self._check_open()
            self._write_pending()
            if fsync:
                self._sync_files()

    def _sync_files(self) -> None:
        # Directories too, or the files might be missing after a loss of power.
        segments = [self.group / name for name in self._unsynced]
        for file in [*segments, self.group / _group.RUNS, self.group, self.path]:
            _sync(file)
        self._unsynced = [segment.file.name for segment in self._open_segments()]

    def close(self) -> None:
        """Flush and close the files. Afterwards nothing can be appended; closing again does nothing."""
        with self._lock:
            if self.closed:
                return
            self._check_open()
            try:
                self._write_pending()
                for segment in self._open_segments():
                    segment.close()
                self._begin(self._overwriting.keys() - self._failed)
                if self.run_names:
                    sizes = _group.sizes(self.group)
                    _group.write_meta(self.group, self._created, self._process, "closed", self._config, sizes)
                else:  # an empty group is useless
                    _group.Group(self.group).delete()
            except _errors.StoreError as error:
                rows = sum(table.rows for table in self._tables.values())
                lost = f"\n{rows} events were not written." if rows else ""
                refused = _errors.StoreError(str(error).splitlines()[0] + lost)
                refused.errno, refused.filename = error.errno, error.filename
                raise refused from error
            finally:
                for segment in self._open_segments():
                    segment.abandon()
                self.closed = True
                self._tables.clear()
                _open.unregister(self.flush)

    def __del__(self) -> None:
        # Nothing is lost if the user does not close it. In a fork, it is the parent's to close.
        if not getattr(self, "closed", True) and os.getpid() == self._pid:
            self.close()

    def _check_open(self) -> None:
        if self.closed:
            raise _errors.StoreError(f"the writer of {str(self.path)!r} is closed. Make a new one.")
        if os.getpid() != self._pid:
            raise _errors.StoreError(
                f"the writer of {str(self.path)!r} belongs to the process that this one was forked from. "
                "Make a new one."
            )

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        try:
            self.close()
        except _errors.StoreError as refused:
            if error is None:
                raise
            error.add_note(str(refused))  # the error inside the block comes first


def _sync(file: Path) -> None:
    """Wait until a file or directory is on the disk."""
    if os.name == "nt" and file.is_dir():
        return  # directories cannot be opened on Windows
    try:
        descriptor = os.open(file, os.O_RDONLY if os.name != "nt" else os.O_RDWR)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except FileNotFoundError:
        pass  # no run is open yet
    except OSError as error:
        raise _errors.cannot_write(file, error, WAY_OUT) from error
