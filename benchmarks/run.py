"""lox against code written by hand, as ratios: `make bench`, or `make bench ARGS="tap --json"`."""

import argparse
import json
import os
import platform
import shutil

import jax
from cases import CASES
from timing import SCALES, Row, Table

HEADER = ("", "lox", "reference", "", "ratio", "goal", "ok")
FORMAT = "{:<50} {:>9} {:>9} {:<5} {:>6} {:>7} {:>4}"


def line(row: Row) -> str:
    digits = 2 if row.unit in SCALES else 0
    goal = "equal" if row.equal is not None else f"<= {row.goal:.3g}" if row.goal else ""
    return FORMAT.format(
        row.name,
        f"{row.lox:.{digits}f}",
        f"{row.reference:.{digits}f}",
        row.unit,
        f"{row.ratio:.2f}",
        goal,
        {True: "yes", False: "NO", None: ""}[row.ok],
    ).rstrip()


def use_one_core() -> int:
    """Stay on one core if possible: work on several would measure what else the machine does.

    This must come before the first computation, because JAX's threads inherit it. With a GPU, all cores are used,
    because several threads of the host feed it.
    """
    if not shutil.which("nvidia-smi") and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
        return 1
    return os.cpu_count() or 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="case", help=f"one of {', '.join(CASES)}")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    options = parser.parse_args()
    if unknown := set(options.cases) - set(CASES):
        parser.error(f"no case {', '.join(sorted(unknown))}: choose from {', '.join(CASES)}")

    machine = {
        "cores": use_one_core(),
        "backend": jax.default_backend(),
        "jax": jax.__version__,
        "python": platform.python_version(),
    }
    if not options.json:
        print(", ".join(f"{name} {value}" for name, value in machine.items()), flush=True)
    rows, tables = [], []
    for name in options.cases or CASES:
        for result in CASES[name]():
            kind = tables if isinstance(result, Table) else rows
            kind.append(result)
            if options.json:
                continue
            if kind is rows and len(rows) == 1:
                print(FORMAT.format(*HEADER))
            print(result if kind is tables else line(result), flush=True)
    if options.json:
        results = {"rows": rows, "tables": tables}
        print(
            json.dumps({**machine, **{name: [r.to_json() for r in found] for name, found in results.items()}}, indent=2)
        )


if __name__ == "__main__":
    main()
