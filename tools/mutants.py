"""Plants small faults in lox, one at a time, and sees whether the tests find them: `make mutants`.

The first run records the lines that each test executes. Then a fixed seed draws faults from executed lines. For each,
the tests that execute the line run, nearest file first, until one fails. A fault that no test finds is printed with its
line: write a test for it, or say why it changes nothing.

    make mutants                                         60 faults with seed 0
    make mutants ARGS="--number 20 --seed 7"             others
    make mutants ARGS="--only 3,17 --nightly"            two of them again, against all tests
"""

import argparse
import ast
import concurrent.futures
import copy
import difflib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / ".nox" / "lines"  # of `make test`; the folder "nightly" has the lines of `make nightly`
SOURCES = ("lox/_engine/*.py", "lox/_transforms/*.py", "lox/_data/_bundle.py", "lox/_data/_lanes.py", "lox/store/*.py")
SOURCES += tuple(f"lox/loggers/_{name}.py" for name in ("pipeline", "queue", "batch", "logger"))
# Their behaviour goes with the renovations: compaction, the index, calls from C++ inside a transformed function.
EXCLUDED = {"_compact.py", "_merged.py", "_index.py", "_catalog.py", "_flatbuffers.py", "_call.py"}


# --- Recording: a plugin of pytest ---------------------------------------------------------------


class Lines:
    """Records the lines of lox that each test executes."""

    def __init__(self):
        self.executed = defaultdict(set)
        self.current = set()
        self.failed = set()
        monitoring = sys.monitoring
        monitoring.use_tool_id(monitoring.COVERAGE_ID, "mutants")
        monitoring.register_callback(monitoring.COVERAGE_ID, monitoring.events.LINE, self.line)
        monitoring.set_events(monitoring.COVERAGE_ID, monitoring.events.LINE)

    def line(self, code, number):
        _, found, path = code.co_filename.rpartition("/lox/")
        if found:
            self.current.add((f"lox/{path}", number))
        return sys.monitoring.DISABLE  # until the next test

    def pytest_runtest_logstart(self, nodeid):
        self.current = self.executed[nodeid.partition("[")[0]]
        sys.monitoring.restart_events()

    def pytest_runtest_logreport(self, report):
        if report.failed:  # without a fault: it cannot tell one
            self.failed.add(report.nodeid.partition("[")[0])

    def pytest_sessionfinish(self):
        folder = Path(os.environ["LOX_RECORD"])
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"{os.environ.get('PYTEST_XDIST_WORKER', 'main')}.json"
        passed = self.executed.keys() - self.failed
        file.write_text(json.dumps({test: sorted(self.executed[test]) for test in sorted(passed)}))


def pytest_configure(config):
    if "LOX_RECORD" in os.environ and (hasattr(config, "workerinput") or not config.getoption("numprocesses", None)):
        config.pluginmanager.register(Lines())


def record(folder, *options):
    """Return the tests that execute each line."""
    if not list(folder.glob("*.json")):
        command = [
            sys.executable,
            "-P",
            "-m",
            "pytest",
            "-q",
            "-n",
            "auto",
            "--tb=no",
            "-p",
            "mutants",
            *options,
            "tests",
        ]
        paths = os.pathsep.join([str(ROOT), str(ROOT / "tools"), os.environ.get("PYTHONPATH", "")])
        subprocess.run(command, cwd=ROOT, env=os.environ | {"LOX_RECORD": str(folder), "PYTHONPATH": paths})
    tests = defaultdict(set)
    for file in folder.glob("*.json"):
        for test, lines in json.loads(file.read_text()).items():
            for path, line in lines:
                tests[path, line].add(test)
    return tests


# --- Faults --------------------------------------------------------------------------------------

SWAPS = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq},
    **{ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And},
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult},
}


def faults_in(node):
    """Give each small fault of one node, as a node to put in its place."""
    new = copy.deepcopy(node)
    if isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPS:
        new.ops[0] = SWAPS[type(node.ops[0])]()
        yield new
    elif isinstance(node, ast.BoolOp | ast.BinOp) and type(node.op) in SWAPS:
        new.op = SWAPS[type(node.op)]()
        yield new
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield node.operand
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield ast.Constant(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        yield ast.Constant(node.value + 1)
    elif isinstance(node, ast.If | ast.IfExp) and not isinstance(node.test, ast.Compare | ast.BoolOp):
        new.test = ast.UnaryOp(ast.Not(), node.test)
        yield new
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield ast.Pass()
    elif isinstance(node, ast.Continue):
        yield ast.Break()


def faults(tests):
    """Give each fault on a line that tests execute: the file, the node, the node that replaces it."""
    for pattern in SOURCES:
        for path in sorted(ROOT.glob(pattern)):
            name = str(path.relative_to(ROOT))
            if path.name in EXCLUDED:
                continue
            pending = [
                node for f in ast.walk(ast.parse(path.read_text())) if isinstance(f, ast.FunctionDef) for node in f.body
            ]
            seen = set()
            while pending:
                node = pending.pop()
                # Faults in messages, type annotations and assertions are not about behaviour.
                if isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr | ast.arguments) or id(node) in seen:
                    continue
                seen.add(id(node))
                if tests.get((name, getattr(node, "lineno", None))):
                    for new in faults_in(node):
                        yield name, node, new
                pending += (
                    [node.value] if isinstance(node, ast.AnnAssign) and node.value else ast.iter_child_nodes(node)
                )


def place(fault):
    name, node, new = fault
    return name, node.lineno, node.col_offset, ast.unparse(ast.fix_missing_locations(new))


def replaced(text, node, new):
    """Return the source with a node replaced."""
    if isinstance(node, ast.If):  # replace its condition alone: it may stand behind `elif`
        return replaced(text, node.test, new.test)
    lines = text.encode().splitlines(keepends=True)
    first, last = node.lineno - 1, node.end_lineno - 1
    before, after = lines[first][: node.col_offset], lines[last][node.end_col_offset :]
    words = ast.unparse(ast.fix_missing_locations(new))
    words = words if isinstance(node, ast.stmt) else f"({words})"
    return b"".join([*lines[:first], before, words.encode(), after, *lines[last + 1 :]]).decode()


# --- Running the tests ---------------------------------------------------------------------------


def nearest_first(name, tests):
    """Order tests by file: names that resemble the module's come first, then files with many tests."""
    by_file = defaultdict(list)
    for test in sorted(tests):
        by_file[test.partition("::")[0]].append(test)
    module = Path(name).stem.strip("_")

    def distance(file):
        likeness = difflib.SequenceMatcher(None, module, Path(file).stem.removeprefix("test_")).ratio()
        return -likeness, -len(by_file[file])

    return [test for file in sorted(by_file, key=distance) for test in by_file[file]]


class Runner:
    """Runs tests in copies of the tree, one for each thread."""

    def __init__(self, is_nightly, timeout):
        self.options = ["--nightly"] if is_nightly else []
        self.timeout = timeout
        self.local = threading.local()
        self.folder = Path(tempfile.mkdtemp(prefix="mutants-"))

    def tree(self):
        if not hasattr(self.local, "tree"):
            self.local.tree = self.folder / str(threading.get_ident())
            for name in ("lox", "tests", "docs", "examples", "benchmarks"):
                shutil.copytree(ROOT / name, self.local.tree / name)
            for file in ROOT.glob("*.*"):
                if file.is_file():
                    shutil.copy(file, self.local.tree)
        return self.local.tree

    def run(self, name, node, new, tests):
        """Plant a fault. Return the test that finds it, or nothing."""
        tree = self.tree()
        source = (ROOT / name).read_text()
        (tree / name).write_text(replaced(source, node, new))
        command = [sys.executable, "-P", "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *self.options]
        paths = os.pathsep.join([str(tree), os.environ.get("PYTHONPATH", "")])
        env = os.environ | {"PYTHONPATH": paths, "JAX_COMPILATION_CACHE_DIR": str(self.folder / "cache")}
        options = {"cwd": tree, "env": env, "capture_output": True, "text": True, "timeout": self.timeout}
        try:
            done = subprocess.run([*command, *nearest_first(name, tests)], **options)
        except subprocess.TimeoutExpired:
            return f"no end after {self.timeout} s"
        finally:
            (tree / name).write_text(source)
        if done.returncode == 0:
            return ""
        failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
        return failed[0].split(" - ")[0] if failed else f"exit code {done.returncode}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="the numbers of a few faults, such as 3,17")
    parser.add_argument("--nightly", action="store_true", help="run every case of the tests, not a sample")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--timeout", type=float, default=400, help="seconds: a fault may make a loop endless")
    arguments = parser.parse_args()
    tests = record(RECORD)
    drawn = random.Random(arguments.seed).sample(sorted(faults(tests), key=place), arguments.number)
    chosen = range(len(drawn)) if arguments.only is None else [int(n) for n in arguments.only.split(",")]
    if arguments.nightly:
        tests = record(RECORD / "nightly", "--nightly")
    runner = Runner(arguments.nightly, arguments.timeout)

    def run(number):
        name, node, new = drawn[number]
        found = runner.run(name, node, new, tests[name, node.lineno])
        old, replacement = (ast.unparse(part).partition("\n")[0][:70] for part in (node, new))
        verdict = f"found by {found}" if found else f"NOT FOUND by {len(tests[name, node.lineno])} tests"
        print(f"{number:3d} {name}:{node.lineno}: {old}  ->  {replacement}\n      {verdict}", flush=True)
        return bool(found)

    try:
        with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
            found = list(pool.map(run, chosen))
    finally:
        shutil.rmtree(runner.folder, ignore_errors=True)
    print(f"{sum(found)} of {len(found)} faults found")


if __name__ == "__main__":
    main()
