"""What lox needs of JAX beyond its public API. If a new version of JAX breaks one of these, the message says what for.

Nothing else in `lox/` may use a private name of JAX: the lists here are compared with what the source code uses.
"""

import ast
import functools
import importlib
import inspect
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import pytest

import lox

SOURCE = pathlib.Path(lox.__file__).parent
VERSION = jax.__version_info__[:2]

# The private names of JAX that lox uses, with what each is for. All of them are in lox/_compat/.
NAMES = {
    "jax._src.config.config_ext": "tells C++ dispatch which transformation is around, which it would else pass by",
    "jax._src.core.eval_trace": "tells that operations run immediately, outside of all transformations",
    "jax._src.core.no_axis_name": "tells a vmap that has no axis name from one that has",
    "jax._src.core.trace_ctx": "every call asks it whether anything is being traced, and it is fast",
    "jax._src.debugging.debug_effect": "what the effects of lox are kinds of, so that JAX allows them everywhere",
    "jax._src.dispatch.runtime_tokens": "gives programs a token of their own, keeps what C++ gets, forgets failed ones",
    "jax._src.distributed.global_state": "which process this is, without starting a backend, and their session",
    "jax._src.effects.lowerable_effects": "lets `jax.export` serialize functions that log",
    "jax._src.effects.ordered_effects": "keeps calls of the host in program order",
    "jax._src.effects.shardable_ordered_effects": "does so on several devices",
    "jax._src.interpreters.ad.JVPTrace": "has both rules of a custom_vjp at hand, which a recomputation needs",
    "jax._src.interpreters.ad.LinearizeTrace": "the same for `jax.linearize` and `jax.grad`",
    "jax._src.interpreters.batching.BatchTrace": "tells that a loop under `vmap` runs at once, and is compiled once",
    "jax._src.interpreters.mlir.lower_jaxpr_to_fun": "lowers ordered host calls beside offloaded values",
    "jax._src.interpreters.partial_eval.DynamicJaxprTrace": "tells that a program is traced",
    "jax._src.interpreters.partial_eval.DynamicJaxprTracer": "makes constants of such a program",
    "jax._src.interpreters.partial_eval.call_partial_eval_rules": "lets logs of calls in loops under remat be reached",
    "jax._src.interpreters.partial_eval.custom_staging_rules": "stages logs, and finds those of a jit that are hidden",
    "jax._src.interpreters.remat.rules": "runs logs in the forward pass of the remat that is behind a flag",
    "jax._src.interpreters.pxla.MeshExecutableFastpathData": "lets C++ dispatch call programs that call the host",
    "jax._src.lax.control_flow.loops._scan_known_hoisting": "tells that a loop is about to lose its invariant logs",
    "jax._src.lax.control_flow.loops._scan_partial_eval_custom": "the same under remat",
    "jax._src.lib.xla_client.OpSharding": "places host calls on a device where Shardy is off",
    "jax._src.mesh.use_abstract_mesh": "makes values that know the mesh; public since 0.8",
    "jax._src.named_sharding.UNSPECIFIED": "tells a jit without shardings, and is given to one with further results",
    "jax._src.pjit._get_fastpath_data": "keeps programs that log out of the C++ cache, or lets it pass on their events",
    "jax._src.shard_map.eager_rules": "lets logs of a shard_map outside of jit be seen",
    "jax._src.sharding_impls.SdyArray": "places host calls on a device",
    "jax._src.sharding_impls.SdyArrayList": "the same",
    "jax._src.sharding_impls._internal_use_concrete_mesh": "runs the body of an eager shard_map on its devices",
    "jax._src.sharding_impls.core": "allows `set_mesh` inside a transformed function",
}
# Those that are public in `jax.extend`, which takes longer to import than lox does.
EXTEND = {
    "jax._src.core.ClosedJaxpr": "jax.extend.core.ClosedJaxpr",
    "jax._src.core.Jaxpr": "jax.extend.core.Jaxpr",
    "jax._src.core.Literal": "jax.extend.core.Literal",
    "jax._src.core.Primitive": "jax.extend.core.Primitive",
    "jax._src.core.Var": "jax.extend.core.Var",
    "jax._src.core.closed_call_p": "jax.extend.core.primitives.closed_call_p",
    "jax._src.core.jaxpr_as_fun": "jax.extend.core.jaxpr_as_fun",
    "jax._src.core.set_current_trace": "jax.extend.core.set_current_trace",
    "jax._src.core.take_current_trace": "jax.extend.core.take_current_trace",
    "jax._src.linear_util.StoreException": "jax.extend.linear_util.StoreException",
    "jax._src.linear_util.WrappedFun": "jax.extend.linear_util.WrappedFun",
    "jax._src.linear_util.transformation2": "jax.extend.linear_util.transformation2",
    "jax._src.pjit.jit_p": "jax.extend.core.primitives.jit_p",
    "jax._src.source_info_util.current_name_stack": "jax.extend.source_info_util.current_name_stack",
    "jax._src.source_info_util.new_name_stack": "jax.extend.source_info_util.new_name_stack",
    "jax._src.source_info_util.user_context": "jax.extend.source_info_util.user_context",
}
NAMES |= {name: f"is `{public}`" for name, public in EXTEND.items()}
SINCE = {
    "jax._src.interpreters.remat.rules": (0, 9),
    "jax.extend.core.set_current_trace": (0, 10),
    "jax.extend.core.take_current_trace": (0, 10),
}
UNTIL = {
    "jax._src.core.ClosedJaxpr": (0, 10),
    "jax._src.interpreters.partial_eval.call_partial_eval_rules": (0, 10),
}

# Private attributes of JAX's objects, and of no module.
ATTRIBUTES = {
    "_executable": "an executable that logs is an error inside a transformation",
    "_jit_info": "the static and donated arguments of a jitted function, which keeps them when it is transformed",
    "_buf": "the array of a token, for C++ dispatch",
    "_local_devices": "where a program runs that calls the host",
    "_impl": "what kind of PRNG keys a type is of, if there is no array of it yet",
    "_add_hooks": "tells C++ dispatch when JAX checks calls",
    "_update_global_hook": "the same",
    "_update_thread_local_hook": "the same",
    "_unsafe_call": "lets C++ dispatch call a program whose only effects are logs that go nowhere",
    "_weakref": "JAX's caches must take a trace of lox for the one it stands for",
}

# The primitives of lox, whose rules are no change to JAX; `primitive` is a parameter that stands for one.
OWN = {"log_p", "emit_p", "pass_p", "tick_p", "host_tick_p", "log_grad_p", "_on_shards_p", "primitive"}


def names_in(file: pathlib.Path) -> Iterator[str]:
    """The dotted names of JAX that a module uses, each as long as it goes."""
    tree = ast.parse(file.read_text())
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "jax":
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {
                alias.asname or "jax": alias.name if alias.asname else "jax"
                for alias in node.names
                if alias.name.startswith("jax")
            }

    def dotted(node: ast.AST) -> str:
        if isinstance(node, ast.Name):
            return names.get(node.id, "")
        if isinstance(node, ast.Attribute) and (above := dotted(node.value)):
            return f"{above}.{node.attr}"
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr"):
            above, name = dotted(node.args[0]), node.args[1]
            return f"{above}.{name.value}" if above and isinstance(name, ast.Constant) else ""
        return ""

    yield from names.values()
    yield from filter(None, map(dotted, ast.walk(tree)))


def private_names() -> dict[str, set[str]]:
    """The private names of JAX in `lox/`, with the modules that use them."""
    found: dict[str, set[str]] = {}
    for file in SOURCE.rglob("*.py"):
        for name in names_in(file):
            if "._src." in name:
                found.setdefault(name, set()).add(file.relative_to(SOURCE).as_posix())
    return found


def resolve(name: str) -> Any:
    parts = name.split(".")
    for n in range(len(parts), 0, -1):
        try:
            module = importlib.import_module(".".join(parts[:n]))
        except ModuleNotFoundError:
            continue
        return functools.reduce(getattr, parts[n:], module)
    raise ModuleNotFoundError(name)


def there_is(name: str) -> bool:
    return SINCE.get(name, VERSION) <= VERSION <= UNTIL.get(name, VERSION)


@pytest.mark.slow
def test_every_private_name_has_a_reason() -> None:
    used = private_names()
    known = {name for name in used if any(name == known or name.startswith(f"{known}.") for known in NAMES)}
    modules = {name for name in used if any(known.startswith(f"{name}.") for known in NAMES)}
    assert used.keys() - known - modules == set(), "say in NAMES what they are for"
    assert [name for name in NAMES if name not in used] == [], "no longer used: take them out of NAMES"


@pytest.mark.slow
def test_private_names_are_in_the_compat_code_only() -> None:
    places = {place for places in private_names().values() for place in places}
    for file in SOURCE.rglob("*.py"):
        attributes = {node.attr for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Attribute)}
        if attributes & ATTRIBUTES.keys():
            places.add(file.relative_to(SOURCE).as_posix())
    assert [place for place in places if not place.startswith("_compat/")] == []


def test_private_attributes_have_a_reason() -> None:
    used = {
        node.attr
        for file in (SOURCE / "_compat").glob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__")
    }
    others = {"_core", "_current_frames", "_fields", "_getframe", "_one", "_replace"}  # of lox, of Python
    assert used - others - {name.rpartition(".")[2] for name in NAMES} == ATTRIBUTES.keys()


@pytest.mark.parametrize("name", NAMES)
def test_jax_has(name: str) -> None:
    if not there_is(name):
        pytest.skip(f"JAX has it from {SINCE.get(name, 'the first')} to {UNTIL.get(name, 'the last')}")
    try:
        resolve(name)
    except (AttributeError, ModuleNotFoundError) as error:
        pytest.fail(f"JAX {jax.__version__} has no {name}, which {NAMES[name]} ({error})")


@pytest.mark.parametrize("name", EXTEND)
def test_a_private_name_is_the_public_one(name: str) -> None:
    if not there_is(name) or not there_is(EXTEND[name]):
        pytest.skip("JAX has only one of them")
    assert resolve(name) is resolve(EXTEND[name])


def from_lox(x: Any) -> bool:
    """Whether a function is lox's, or made by it."""
    if isinstance(x, functools.partial):
        return from_lox(x.func) or any(from_lox(arg) for arg in x.args if callable(arg))
    code = getattr(x, "__code__", None)
    return str(SOURCE) in code.co_filename if code else type(x).__module__.startswith("lox")


def rule(table: str, primitive: str) -> Any:
    return lambda: resolve(table)[getattr(jax.extend.core.primitives, primitive)]


# What lox has changed in JAX, as in the table of lox/_compat/_patches.py.
PATCHES = {
    "sharding_impls.core": lambda: resolve("jax._src.sharding_impls.core"),
    "RuntimeTokenSet.get_token_input": lambda: type(resolve("jax._src.dispatch.runtime_tokens")).get_token_input,
    "pjit._get_fastpath_data": lambda: resolve("jax._src.pjit._get_fastpath_data"),
    "the hook of debug_nans": lambda: jax.debug_nans._update_thread_local_hook,
    "the hook of debug_infs": lambda: jax.debug_infs._update_global_hook,
    "the hook of debug_key_reuse": lambda: jax.debug_key_reuse._update_thread_local_hook,
    "jax.stages.Compiled.__call__": lambda: jax.stages.Compiled.__call__,
    "the staging rule of jit": rule("jax._src.interpreters.partial_eval.custom_staging_rules", "jit_p"),
    "JVPTrace.process_custom_vjp_call": lambda: resolve("jax._src.interpreters.ad.JVPTrace").process_custom_vjp_call,
    "LinearizeTrace.process_custom_vjp_call": lambda: (
        resolve("jax._src.interpreters.ad.LinearizeTrace").process_custom_vjp_call
    ),
    "the batching rule of cond": rule("jax.interpreters.batching.fancy_primitive_batchers", "cond_p"),
    "the batching rule of while": rule("jax.interpreters.batching.fancy_primitive_batchers", "while_p"),
    "the batching rule of scan": rule("jax.interpreters.batching.fancy_primitive_batchers", "scan_p"),
    "partial evaluation of scan": rule("jax.interpreters.partial_eval.custom_partial_eval_rules", "scan_p"),
    "partial evaluation of while": rule("jax.interpreters.partial_eval.custom_partial_eval_rules", "while_p"),
    "partial evaluation of jit": rule("jax.interpreters.partial_eval.custom_partial_eval_rules", "jit_p"),
    "the remat rule of while": rule("jax.interpreters.partial_eval.partial_eval_jaxpr_custom_rules", "while_p"),
    "mlir.lower_jaxpr_to_fun": lambda: resolve("jax._src.interpreters.mlir.lower_jaxpr_to_fun"),
    "partial_eval.trace_to_jaxpr_dynamic": lambda: resolve("jax.interpreters.partial_eval.trace_to_jaxpr_dynamic"),
}


@pytest.mark.parametrize("patch", PATCHES)
def test_a_patch_is_in_place(patch: str) -> None:
    assert from_lox(PATCHES[patch]()), f"{patch} is JAX's own: see the table in lox/_compat/_patches.py"


def test_partial_evaluation_of_calls() -> None:
    if not there_is("jax._src.interpreters.partial_eval.call_partial_eval_rules"):
        pytest.skip("JAX no longer has the table")
    assert from_lox(rule("jax._src.interpreters.partial_eval.call_partial_eval_rules", "closed_call_p")())


@pytest.mark.slow
def test_jax_is_changed_in_one_file_only() -> None:
    """What is assigned to a name or a table of JAX's, but for the rules of lox's own primitives."""
    found = set()
    for file in SOURCE.rglob("*.py"):
        tree = ast.parse(file.read_text())
        aliases = {
            alias.asname or alias.name.split(".")[0]
            for node in ast.walk(tree)
            if isinstance(node, ast.Import | ast.ImportFrom)
            for alias in node.names
            if (getattr(node, "module", None) or alias.name).split(".")[0] in ("jax", "flax")
        }
        for node in ast.walk(tree):
            targets = node.targets if isinstance(node, ast.Assign) else []
            for target in targets:
                root = target
                while isinstance(root, ast.Attribute | ast.Subscript):
                    root = root.value
                if root is not target and isinstance(root, ast.Name) and root.id in aliases:
                    own = isinstance(target, ast.Subscript) and ast.unparse(target.slice) in OWN
                    if not own and file.name != "_patches.py":
                        found.add(f"{file.relative_to(SOURCE)}: {ast.unparse(target)}")
    assert found == set()


def test_types_of_tracing() -> None:
    """What a small program shows, and the names that stand for it."""
    found: list[Any] = [lox._compat.current_trace()]

    def probe(x: Any) -> Any:
        found.extend([type(lox._compat.current_trace()), type(x)])
        jax.debug.callback(lambda: None)
        return jax.jit(lambda x: x)(x)

    jaxpr = jax.make_jaxpr(probe)(0.0)
    found += [*map(type, jaxpr.effects), jaxpr.eqns[-1].params["out_shardings"][0]]
    names = ("eval_trace", "StagingTrace", "StagingTracer", "DebugEffect", "UNSPECIFIED")
    known = [getattr(lox._compat._traces, name) for name in names]
    assert all(a is b for a, b in zip(found, known, strict=True)), (found, known)


def test_equations_are_staged_as_they_are() -> None:
    """By methods of JAX's trace, whose names are not private but whose class is."""
    trace, tracer = lox._compat.StagingTrace, lox._compat.StagingTracer
    staging = ["self", "in_tracers", "out_avals", "primitive", "params", "effects", "source_info", "ctx"]
    assert list(inspect.signature(trace.emit_eqn).parameters) == staging
    assert list(inspect.signature(trace.to_jaxpr_tracer).parameters) == ["self", "x", "source_info"]
    assert list(inspect.signature(tracer).parameters)[:4] == ["trace", "aval", "val", "line_info"]


def test_the_modules_by_which_the_console_tells_that_a_program_is_compiled() -> None:
    for name in lox._compat._modes._COMPILING:
        importlib.import_module(name)
