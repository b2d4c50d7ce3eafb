"""lox against code written by hand, as ratios: `make bench`, or `make bench ARGS="tap --json"`."""

import argparse
import json
import os
import platform

import jax
from cases import CASES
from timing import Row

HEADER = ("", "lox", "reference", "", "ratio", "goal", "ok")
FORMAT = "{:<40} {:>9} {:>9} {:<5} {:>6} {:>7} {:>4}"


def line(row: Row) -> str:
    digits = 0 if row.unit == "lines" else 2
    goal = "equal" if row.equal is not None else f"<= {row.goal}" if row.goal else ""
    return FORMAT.format(
        row.name,
        f"{row.lox:.{digits}f}",
        f"{row.reference:.{digits}f}",
        row.unit,
        f"{row.ratio:.2f}",
        goal,
        {True: "yes", False: "NO", None: ""}[row.ok],
    ).rstrip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="case", help=f"out of {', '.join(CASES)}")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    options = parser.parse_args()
    if unknown := set(options.cases) - set(CASES):
        parser.error(f"no case {', '.join(sorted(unknown))}: choose out of {', '.join(CASES)}")

    machine = {
        "jax": jax.__version__,
        "python": platform.python_version(),
        "backend": jax.default_backend(),
        "cores": os.cpu_count(),
    }
    if not options.json:
        print(", ".join(f"{name} {value}" for name, value in machine.items()))
        print(FORMAT.format(*HEADER), flush=True)
    rows = []
    for name in options.cases or CASES:
        for row in CASES[name]():
            rows.append(row)
            if not options.json:
                print(line(row), flush=True)
    if options.json:
        print(json.dumps({**machine, "rows": [row.to_json() for row in rows]}, indent=2))


if __name__ == "__main__":
    main()
