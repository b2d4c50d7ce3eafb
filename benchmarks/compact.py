"""What `lox.store.compact` does for many runs, each in a group of its own: `python benchmarks/compact.py 2000`."""

import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import lox
from lox.store import Writer


def write(folder: Path, runs: int, events: int = 100) -> None:
    """Write runs to `folder`, one group each."""
    rng = np.random.default_rng(0)
    for n in range(runs):
        with Writer(folder / "aside") as writer:  # by itself, because opening a run reads all others
            run = writer.open_run(key_data=[0, n], config={"lr": n / runs})
            arrays = {"loss": rng.random(events, np.float32), "accuracy": rng.random(events, np.float32)}
            writer.append(run, lox.logdict.from_arrays(arrays, steps={"step": np.arange(events)}))
        writer.group.rename(folder / writer.group.name)


def seconds(work: Callable[[], Any]) -> str:
    """Return how long something takes, formatted."""
    start = time.perf_counter()
    work()
    return f"{time.perf_counter() - start:.3f} s"


def measure(folder: Path, label: str) -> None:
    """Print how long it takes to list and to load runs."""
    table = lox.runs(folder)
    print(
        f"{label}: list {seconds(lambda: lox.runs(folder))},",
        f"events and states {seconds(lambda: [(run.events, run.state) for run in table])},",
        f"load all {seconds(lambda: lox.load(folder).stack())},",
        f"load one {seconds(lambda: lox.load(folder, table[-1].name))}",
    )


if __name__ == "__main__":
    folder = Path(tempfile.mkdtemp())
    try:
        write(folder, int(sys.argv[1]) if len(sys.argv) > 1 else 2000)
        measure(folder, "before")
        print("compact", seconds(lambda: print(lox.store.compact(folder))))
        measure(folder, "after")
    finally:
        shutil.rmtree(folder)
