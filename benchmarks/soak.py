"""A long training in a few minutes: does anything grow that should not? `make soak`, `make soak ARGS="--minutes 20"`.

Each part calls a small training step again and again, in another way of logging. At regular moments it is measured what
the process holds: memory, arrays on devices, Python objects, threads, file descriptors, entries of lox's own tables,
compiled programs. A part ends by closing what it has opened, and then has to leave no thread and no file behind.

Something grows if its median over the last third of the measurements is above that over the first third by more than a
tolerance, with the second third between: noise, unlike a leak, does not rise twice. The first quarter is warm-up and
does not count: programs are compiled, allocators and caches fill up to their limits.
"""

import argparse
import collections
import contextlib
import ctypes
import dataclasses
import gc
import importlib
import importlib.util
import os
import platform
import re
import statistics
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

import lox

# --- the parts ------------------------------------------------------------------------------------

EVENTS = 20
RUN = 20  # calls after which a run ends and the next begins
FLUSH = 5  # calls after which a logger is flushed


def train(x: Any, first: Any) -> Any:
    """Do a few steps of a training that logs."""

    def step(x: Any, i: Any) -> Any:
        x = x * 0.999 + 0.1
        lox.log({"loss": x.sum(), "x": x}, step=i)
        return x, None

    return jax.lax.scan(step, x, first + jnp.arange(EVENTS))[0]


@dataclasses.dataclass
class Work:
    """What a part does."""

    call: Callable[[int], Any]  # one iteration
    settle: Callable[[], Any] = lambda: None  # get to rest before a measurement
    files: Callable[[], float] | None = None  # how many there are per run


Part = Callable[[Path], contextlib.AbstractContextManager[Work]]


def start() -> Any:
    return jnp.zeros(8, jnp.float32)


@contextlib.contextmanager
def spool(folder: Path) -> Iterator[Work]:
    """`lox.spool` of a jitted step, and around one, whose logs are used and kept for a while."""
    del folder
    inside, outside = lox.spool(jax.jit(train)), jax.jit(lox.spool(train, reduce={"x": "mean"}))
    kept: collections.deque[lox.logdict] = collections.deque(maxlen=10)

    def call(i: int) -> None:
        for spooled in (inside, outside):
            _, logs = spooled(start(), i * EVENTS)
            kept.append(logs)
            assert float(logs["loss"][-1]) > 0
        assert len(sum(list(kept)[1::2], kept[1])["loss"]) >= EVENTS

    yield Work(call)


@contextlib.contextmanager
def tap(folder: Path) -> Iterator[Work]:
    """`lox.tap` with and without a buffer."""
    del folder
    received: collections.deque[lox.logdict] = collections.deque(maxlen=10)
    buffered = lox.tap(jax.jit(train), received.append, buffer=10)
    single = jax.jit(lox.tap(train, received.append))

    def call(i: int) -> None:
        buffered(start(), i * EVENTS)
        single(start(), i * EVENTS)

    yield Work(call)
    assert received


@contextlib.contextmanager
def runs_of(logger: lox.Logger) -> Iterator[Callable[[int], Any]]:
    """Return the state of the run for an iteration: runs end and begin all the time."""
    state = None

    def state_for(i: int) -> Any:
        nonlocal state
        if i % FLUSH == 0:
            logger.flush()
        if i % RUN == 0:
            if state is not None:
                logger.close(state)
            state = logger.init(jax.random.key(i), config={"rate": i / 10})
        return state

    with logger:
        yield state_for


def files_in(folder: Path) -> int:
    return sum(len(names) for _, _, names in os.walk(folder))


@contextlib.contextmanager
def save_by_tap(folder: Path) -> Iterator[Work]:
    """`lox.SaveLogger`, by tap."""
    logger = lox.SaveLogger(folder)
    step = jax.jit(train)
    with runs_of(logger) as state_for:
        runs = 0

        def call(i: int) -> None:
            nonlocal runs
            runs = i // RUN + 1
            logger.tap(step, state_for(i), buffer=10)(start(), i * EVENTS)

        yield Work(call, logger.flush, lambda: files_in(folder) / runs)


@contextlib.contextmanager
def save_by_spool(folder: Path) -> Iterator[Work]:
    """`lox.SaveLogger`, by spool, in a program that is compiled once."""
    logger = lox.SaveLogger(folder)
    step = jax.jit(lambda state, x, i: logger.spool(train, state)(x, i))
    with runs_of(logger) as state_for:
        runs = 0

        def call(i: int) -> None:
            nonlocal runs
            runs = i // RUN + 1
            step(state_for(i), start(), i * EVENTS)

        yield Work(call, logger.flush, lambda: files_in(folder) / runs)


@contextlib.contextmanager
def wandb(folder: Path) -> Iterator[Work]:
    """W&B's client, offline. A run takes long to begin, so there are few."""
    quietly = {"silent": True, "x_disable_stats": True, "x_disable_meta": True, "disable_git": True}
    logger = lox.loggers.WandbLogger(mode="offline", dir=str(folder), project="soak", settings=quietly)
    step = jax.jit(train)
    with runs_of(logger) as state_for:
        yield Work(lambda i: logger.tap(step, state_for(i), buffer=10)(start(), i * EVENTS), logger.flush)
    importlib.import_module("wandb").teardown()  # ends its process, which lox leaves to others


@contextlib.contextmanager
def eager(folder: Path) -> Iterator[Work]:
    """`lox.log` in a Python loop, through a logger, a tap and a spool, and `logger.log`."""
    logger = lox.SaveLogger(folder)

    def loop(x: Any, first: int) -> Any:
        for i in range(3):
            x = x * 0.999
            lox.log({"loss": x.sum()}, step=first + i)
        return x

    with runs_of(logger) as state_for:

        def call(i: int) -> None:
            state = state_for(i)
            logger.tap(loop, state)(start(), i * EVENTS)
            logger.log(state, {"rate": 0.1}, step=i)
            lox.tap(loop, lambda logs: None)(start(), i)
            lox.spool(loop)(start(), i)

        yield Work(call, logger.flush)


@contextlib.contextmanager
def fresh(folder: Path) -> Iterator[Work]:
    """A new callback for every call, as in a notebook, and new functions around a jitted one."""
    del folder
    step = jax.jit(train)

    def call(i: int) -> None:
        received: list[Any] = []
        lox.tap(step, lambda logs: received.append(logs["loss"]), buffer=10)(start(), i)
        lox.tap(lambda x: step(x, i), lambda logs: received.append(logs["loss"]))(start())
        lox.spool(lambda x: step(x, i))(start())
        lox.nolog(lambda x: step(x, i))(start())
        jax.effects_barrier()
        assert len(received) == EVENTS // 10 + EVENTS

    yield Work(call)


@contextlib.contextmanager
def watch(folder: Path) -> Iterator[Work]:
    """`lox.watch`, with values that are all right and with values that are not, alone and in a spool."""
    del folder
    errors: collections.deque[lox.NonFiniteError] = collections.deque(maxlen=10)
    step = jax.jit(train)
    reported, raised = lox.watch(step, errors.append), lox.spool(lox.watch(step))

    def call(i: int) -> None:
        x = start() + (jnp.inf if i % 3 == 0 else 0)
        reported(x, i * EVENTS)
        try:
            raised(x, i * EVENTS)
        except lox.NonFiniteError:
            assert i % 3 == 0
        else:
            assert i % 3

    sink, lox.config.sink = lox.config.sink, "off"  # where the logs go that flow on
    yield Work(call)
    lox.config.sink = sink
    assert errors


@contextlib.contextmanager
def loggers(folder: Path) -> Iterator[Work]:
    """A new logger for every call."""
    step = jax.jit(train)

    def call(i: int) -> None:
        with lox.SaveLogger(folder / str(i % 10)) as logger:
            logger.tap(step, logger.init(jax.random.key(i)), buffer=10)(start(), i * EVENTS)

    def settle() -> None:
        for thread in threading.enumerate():  # those of closed loggers are about to end
            if thread.name.startswith("lox-"):
                thread.join()

    yield Work(call, settle)


PARTS: dict[str, Part] = {
    "spool": spool,
    "tap": tap,
    "save by tap": save_by_tap,
    "save by spool": save_by_spool,
    "loggers": loggers,
    "eager": eager,
    "fresh lambdas": fresh,
    "watch": watch,
    "wandb": wandb,
}


# --- what is measured -----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Quantity:
    """Something that must not grow."""

    unit: str
    tolerance: float  # growth that is noise
    why: str  # the tolerance is what it is


QUANTITIES = {
    "memory": Quantity("MB", 4, "the allocator keeps pages in pieces, and gives them back late"),
    "memory of children": Quantity("MB", 8, "that of W&B is a Go program, which collects garbage when it wants to"),
    "live arrays": Quantity("", 4, "those of calls under way"),
    "bytes of live arrays": Quantity("kB", 1, "those of calls under way"),
    "memory of the device": Quantity("MB", 1, "the allocator rounds up"),
    "Python objects": Quantity("", 100, "the catalog of runs goes up and down, as it moves them to its index"),
    "threads": Quantity("", 1, "a thread may be about to end"),
    "file descriptors": Quantity("", 1, "a file may be about to be closed"),
    "files per run": Quantity("", 0.5, "the index of the directory has files too"),
    "entries of lox": Quantity("", 8, "tables that drop the oldest entry go up and down"),
    "programs compiled": Quantity("", 0, "after warm-up there is nothing new"),
}

_compiled = 0


def _count_compilations(event: str, duration: float, **_: Any) -> None:
    global _compiled
    del duration
    _compiled += event == "/jax/core/compile/backend_compile_duration"


jax.monitoring.register_event_duration_secs_listener(_count_compilations)


def counts() -> dict[str, float]:
    """Return how many there are of everything that can be counted exactly."""
    arrays = jax.live_arrays()
    return {
        "live arrays": len(arrays),
        "bytes of live arrays": sum(x.nbytes for x in arrays) / 1e3,
        "threads": threading.active_count(),
        "file descriptors": len(os.listdir("/proc/self/fd")),
        "entries of lox": sum(entries().values()),
        "programs compiled": _compiled,
    }


def measure(work: Work) -> dict[str, float]:
    """Return the value of every quantity, at rest."""
    work.settle()
    rest()
    values = counts()
    values["Python objects"] = len(gc.get_objects())
    values["memory"] = resident(os.getpid())
    if processes := children(os.getpid()):
        values["memory of children"] = sum(map(resident, processes))
    if stats := jax.local_devices()[0].memory_stats():
        values["memory of the device"] = stats["bytes_in_use"] / 1e6
    if work.files is not None:
        values["files per run"] = work.files()
    return values


def rest() -> None:
    """Wait for what is under way, and free what can be freed."""
    jax.effects_barrier()
    gc.collect()
    if hasattr(_C, "malloc_trim"):
        _C.malloc_trim(0)


_C = ctypes.CDLL(None)


def resident(process: int) -> float:
    """Return the memory of a process in megabytes; of one that is gone, none."""
    try:
        pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def children(process: int) -> list[int]:
    """Return the processes that a process has started, and those that these have started."""
    parents = collections.defaultdict(list)
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            after_name = (folder / "stat").read_text().rpartition(")")[2].split()
            parents[int(after_name[1])].append(int(folder.name))
    found = parents[process]
    for child in found:  # grows meanwhile
        found += parents[child]
    return found


CONTAINERS = (
    *(dict, list, set, collections.deque),
    *(weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet),
)


# Names of runs that have ended: a new run must get another, and events that come too late an error.
NAMES_OF_RUNS = (r"\.ended$", r"\._names\.names$", r"\._catalog\.", r"\.run_names$", r"\._inside\b")
# Which of these there are depends on how many rows are written at once; never more than a thousand.
LIMITED = (r"\._layouts$",)
NOT_COUNTED = re.compile("|".join(NAMES_OF_RUNS + LIMITED))


def entries() -> dict[str, int]:
    """Return how many entries lox's tables have: all that can be reached from its modules, by the way to them."""
    found: collections.Counter[str] = collections.Counter()
    seen: set[int] = set()

    def visit(name: str, value: Any) -> None:
        if id(value) in seen or NOT_COUNTED.search(name):
            return
        seen.add(id(value))
        if isinstance(value, CONTAINERS):
            found[name] += len(value)
            for item in list(value.values() if hasattr(value, "values") else value):
                visit(f"{name}[]", item)
        elif hasattr(value, "cache_info"):
            found[name] += value.cache_info().currsize
        elif type(value).__module__.partition(".")[0] == "lox" and not isinstance(value, type):
            for attribute, inner in list(getattr(value, "__dict__", {}).items()):
                visit(f"{name}.{attribute}", inner)

    for module in [module for name, module in sorted(sys.modules.items()) if name.partition(".")[0] == "lox"]:
        for name, value in list(vars(module).items()):
            if not name.startswith("__"):
                visit(f"{module.__name__}.{name}", value)
    return dict(found)


# --- the verdict ----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Line:
    """A quantity in a part."""

    part: str
    name: str
    first: float  # the medians of the first and the last third of the measurements
    last: float
    per_1000: float  # growth in 1000 calls, by the slope of a line through all measurements
    grows: bool


def judge(part: str, name: str, calls: list[int], values: list[float]) -> Line:
    """Compare the thirds of the measurements of a quantity."""
    third = len(values) // 3
    first, second, last = map(statistics.median, (values[:third], values[third:-third], values[-third:]))
    slope = statistics.linear_regression(calls, values).slope
    grows = last - first > QUANTITIES[name].tolerance and first <= second <= last
    return Line(part, name, first, last, 1000 * slope, grows)


MEASUREMENTS, WARM_UP = 24, 6


@dataclasses.dataclass
class Outcome:
    """What became of a part."""

    calls: int
    lines: list[Line]
    more: collections.Counter[str]  # Python objects that there are more of than after warm-up, by type


def soak(name: str, seconds: float) -> Outcome:
    """Run a part for so long, and look whether it leaves something behind, more than the first time."""
    run_briefly(name)  # what is opened only once, such as threads of clients, is there then
    rest()
    before = counts()
    outcome = watch_part(name, seconds)
    rest()
    after = counts()
    for quantity in ("live arrays", "threads", "file descriptors"):
        grows = after[quantity] - before[quantity] > QUANTITIES[quantity].tolerance
        outcome.lines.append(Line(name, f"{quantity}, before and after", before[quantity], after[quantity], 0, grows))
    return outcome


def run_briefly(name: str, calls: int = RUN + 1) -> None:
    with tempfile.TemporaryDirectory() as folder, PARTS[name](Path(folder)) as work:
        for i in range(calls):
            work.call(i)


def watch_part(name: str, seconds: float) -> Outcome:
    """Run a part for so long, and measure meanwhile."""
    calls: list[int] = []
    measured: list[dict[str, float]] = []
    after_warm_up: collections.Counter[str] = collections.Counter()
    with tempfile.TemporaryDirectory() as folder, PARTS[name](Path(folder)) as work:
        number, begin = 0, time.monotonic()
        for n in range(1, MEASUREMENTS + 1):
            work.call(number)  # at least one
            number += 1
            while time.monotonic() < begin + seconds * n / MEASUREMENTS:
                work.call(number)
                number += 1
            calls.append(number)
            measured.append(measure(work))
            if n == WARM_UP:
                after_warm_up = objects_by_type()
        more = objects_by_type() - after_warm_up
    found = [quantity for quantity in QUANTITIES if all(quantity in values for values in measured)]
    lines = [judge(name, q, calls[WARM_UP:], [values[q] for values in measured[WARM_UP:]]) for q in found]
    return Outcome(number, lines, more)


def objects_by_type() -> collections.Counter[str]:
    gc.collect()
    return collections.Counter(f"{type(x).__module__}.{type(x).__qualname__}" for x in gc.get_objects())


def show(console: Console, outcomes: dict[str, Outcome]) -> None:
    table = Table("part", "quantity", "", box=None, pad_edge=False)
    for column in ("first third", "last third", "per 1000 calls", "tolerance"):
        table.add_column(column, justify="right")
    table.add_column("verdict")
    for part, outcome in outcomes.items():
        for number, line in enumerate(outcome.lines):
            quantity = QUANTITIES[line.name.partition(",")[0]]
            digits = 1 if quantity.unit else 0
            table.add_row(
                f"{part}, {outcome.calls} calls" if number == 0 else "",
                line.name,
                quantity.unit,
                *(f"{value:.{digits}f}" for value in (line.first, line.last)),
                f"{line.per_1000:+.2f}" if line.per_1000 else "",
                f"{quantity.tolerance:g}",
                "GROWS" if line.grows else "ok",
            )
    console.print(table)
    for part, outcome in outcomes.items():
        if any(line.grows for line in outcome.lines):
            console.print(f"{part}: more of {dict(outcome.more.most_common(20))}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("parts", nargs="*", metavar="part", help=f"one of {', '.join(PARTS)}")
    parser.add_argument("--minutes", type=float, default=3, help="for all parts together")
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"no part {', '.join(sorted(unknown))}: choose from {', '.join(PARTS)}")
    if not Path("/proc/self/statm").exists():
        parser.error("memory and descriptors are read from /proc, which only Linux has")
    names = options.parts or list(PARTS)
    console = Console(width=None if sys.stdout.isatty() else 130)
    if "wandb" in names and importlib.util.find_spec("wandb") is None:
        names.remove("wandb")
        console.print("wandb is not installed: without its part")
    versions = f"jax {jax.__version__}, python {platform.python_version()}, {jax.default_backend()}"
    console.print(f"{versions}, {os.cpu_count()} cores, {options.minutes:g} minutes")
    outcomes = {name: soak(name, 60 * options.minutes / len(names)) for name in names}
    show(console, outcomes)
    return int(any(line.grows for outcome in outcomes.values() for line in outcome.lines))


if __name__ == "__main__":
    sys.exit(main())
