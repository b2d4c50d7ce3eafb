"""The storeys of lox: imports point downward, and no lazy import breaks a cycle."""

import ast
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import lox

ROOT = Path(lox.__file__).parent
# From the ground up. A module outside of the packages may import everything.
STOREYS = [
    "_version",
    "_errors",
    "_record",
    "_compat",
    "_data",
    "_engine",
    "_transforms",
    "store",
    "loggers",
    "view",
    "_command",
]
MODULES = {
    ".".join(["lox", *path.relative_to(ROOT).with_suffix("").parts]).removesuffix(".__init__"): path
    for path in sorted(ROOT.rglob("*.py"))
}


def storey(module: str) -> int:
    name = module.split(".")[1] if "." in module else ""
    return STOREYS.index(name) if name in STOREYS else len(STOREYS)


def imports(module: str) -> dict[str, bool]:
    """Return the modules of lox that a module imports, and whether it does so when it is imported itself."""
    imported: dict[str, bool] = {}

    def visit(node: ast.AST, at_once: bool) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
                continue
            if isinstance(child, ast.ImportFrom) and (child.module or "").split(".")[0] == "lox":
                for alias in child.names:
                    name = f"{child.module}.{alias.name}"
                    name = name if name in MODULES else child.module or ""
                    imported[name] = imported.get(name, False) or at_once
            elif isinstance(child, ast.Import):
                names = [alias.name for alias in child.names if alias.name.split(".")[0] == "lox"]
                imported.update({name: at_once for name in names})
            visit(child, at_once and not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda))

    visit(ast.parse(MODULES[module].read_text()), True)
    return imported


@pytest.mark.slow
def test_imports_point_downward() -> None:
    upward = [f"{a} -> {b}" for a in MODULES for b in imports(a) if storey(b) > storey(a)]
    assert upward == []


@pytest.mark.slow
def test_no_import_is_lazy_to_break_a_cycle() -> None:
    """Lazy imports make lox light, but would not close a cycle if they were at the top."""
    graph = {a: set(imports(a)) for a in MODULES}

    def reaches(a: str, b: str, seen: set[str]) -> bool:
        seen.add(a)
        return b in graph[a] or any(reaches(c, b, seen) for c in graph[a] - seen)

    lazy = [(a, b) for a in MODULES for b, at_once in imports(a).items() if not at_once]
    assert [f"{a} -> {b}" for a, b in lazy if b == a or reaches(b, a, set())] == []


@pytest.mark.slow
def test_there_is_no_cycle() -> None:
    order: list[str] = []
    under_way: list[str] = []

    def visit(module: str) -> None:
        assert module not in under_way, " -> ".join([*under_way[under_way.index(module) :], module])
        if module in order:
            return
        under_way.append(module)
        for other, at_once in imports(module).items():
            if at_once and other in MODULES and "__init__" not in MODULES[other].name:
                visit(other)
        order.append(under_way.pop())

    for module in MODULES:
        if "__init__" not in MODULES[module].name:
            visit(module)


def test_every_module_has_its_storey() -> None:
    faces = {m for m in MODULES if storey(m) == len(STOREYS)}
    modules = {"__main__", "_export", "equinox", "flax", "logify", "neptune", "testing", "wandb"}
    assert faces == {"lox", *(f"lox.{name}" for name in modules)}


# --- what `import lox` imports -------------------------------------------------------------------


def modules_after(program: str) -> set[str]:
    """The names of the modules that a process of its own has imported."""
    program += "\nimport sys\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT.parent)
    return set(done.stdout.split())


@pytest.mark.slow
def test_import_is_light() -> None:
    """Programs that only log do not wait for transformations and loggers, nor for what those need."""
    with_lox, without = modules_after("import jax, lox"), modules_after("import jax")
    of_lox = {name.split(".")[1] for name in with_lox if name.startswith("lox.")}
    rooms = {"_compat", "_data", "_engine", "_errors", "_export", "_record", "_version", "logify"}
    assert of_lox == rooms
    others = {name for name in with_lox - without if name.split(".")[0] not in sys.stdlib_module_names | {"lox"}}
    assert others <= {"jax.export", "jax._src.export.shape_poly_decision"}  # which newer versions import themselves


@pytest.mark.slow
def test_import_without_jit() -> None:
    program = "import jax, lox; print(lox.spool(lambda x: (lox.log({'x': x}), x + 1)[1])(1)[1])"
    environment = {**os.environ, "JAX_DISABLE_JIT": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT.parent, env=environment
    )
    assert (done.stdout, done.stderr) == ("{'x': 1}\n", "")


def test_what_is_imported_later_is_what_type_checkers_see() -> None:
    tree = ast.parse(MODULES["lox"].read_text())
    (shown,) = [n for n in tree.body if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"]
    imports = [n for n in shown.body if isinstance(n, ast.ImportFrom)]
    assert {alias.name: n.module for n in imports for alias in n.names} == lox._LATER


PROGRAM = """
import inspect, pickle, threading, lox
names = set(dir(lox))
assert names >= set(lox._LATER) | {"log", "spool", "logify"} and not names & {"sys", "importlib", "TYPE_CHECKING"}
threads = [threading.Thread(target=getattr, args=(lox, name)) for name in lox._LATER]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert {name: getattr(lox, name) for name in names} == {name: vars(lox)[name] for name in names}
assert lox.load is lox.store.load and lox.SaveLogger is lox.loggers.SaveLogger and lox.plot is lox.view.plot
assert pickle.loads(pickle.dumps(lox.SaveLogger)) is lox.SaveLogger and inspect.getsource(lox.save)
everything = {}
exec("from lox import *", everything)
assert everything.keys() - {"__builtins__"} == {name for name in names if not name.startswith("_")}
assert not hasattr(lox, "SaveLoger")
lox.SaveLoger
"""


@pytest.mark.slow
def test_every_name_is_there_when_it_is_used() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, cwd=ROOT.parent)
    message = "AttributeError: module 'lox' has no attribute 'SaveLoger'. Did you mean: 'SaveLogger'?"
    assert done.stderr.count("Traceback") == 1 and done.stderr.splitlines()[-1] == message


@pytest.mark.slow
def test_the_first_use_may_be_inside_of_a_program_that_is_traced() -> None:
    program = """
        import jax, jax.numpy as jnp, numpy as np, lox, sys
        def f(x):
            lox.log({"x": x}, step=1)
            return jnp.sin(x)
        def all_of_them(x):
            x = lox.log_grad("g", lox.nolog(f)(x))
            y, logs = lox.spool(f)(x)
            z, means = lox.spool(lambda x: jax.lax.map(f, x * jnp.ones(3)).sum(), reduce="mean")(x)
            w = lox.tap(f, lambda logs: seen.append((str(logs), str(logs.step))))(lox.watch(f)(x))
            return y + logs["x"] + means["x"] + z + w
        def by_hand(x):
            x = jnp.sin(x)
            return jnp.sin(x) + x + x + 3 * jnp.sin(x) + jnp.sin(jnp.sin(x))
        assert not [name for name in sys.modules if name.startswith("lox._transforms")]
        xs, lox.config.sink = jnp.arange(3.0), lambda logs: others.extend(logs)
        for _ in range(2):
            seen, others, expected = [], [], jax.vmap(jax.grad(by_hand))(xs)
            with jax.checking_leaks():
                np.testing.assert_allclose(jax.jit(jax.vmap(jax.grad(all_of_them)))(xs), expected, rtol=1e-6)
            jax.effects_barrier()
            inside = jnp.sin(jnp.sin(xs)).tolist()
            print(others, [np.allclose(eval(x)["x"], inside) for x, _ in seen], seen[0][1])
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT.parent)
    assert done.stdout.splitlines() == ["['x', 'g'] [True] {'x': 1}"] * 2, done  # watch lets its logs flow on


@pytest.mark.slow
def test_logs_find_what_their_methods_need() -> None:
    """In a process that has imported nothing but lox."""
    program = """
        import numpy as np, lox
        logs = lox.logdict.from_arrays({"loss": np.ones((3, 2))}, steps={"step": np.arange(3)}, lanes=1)
        print(logs.plot("loss"))
        print("<table" in logs._repr_html_())
        print(len(logs.to_dataframe()) if __import__("importlib.util").util.find_spec("pandas") else 6)
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT.parent)
    assert done.stdout.splitlines() == ["<plot of 'loss': .save('plot.html'), .save('plot.png')>", "True", "6"], done
