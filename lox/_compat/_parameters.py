"""Parameters of primitives whose layout changed."""

import functools
import itertools
from typing import Any

import jax

from lox._compat import _extend
from lox._compat._jaxprs import make_jaxpr, out_avals
from lox._compat._traces import UNSPECIFIED, jaxpr_as_fun
from lox._compat._types import vary_over, varying_axes


def scan_split(params: dict[str, Any]) -> tuple[int, int]:
    """How many constants and how many carries a scan has."""
    if "num_consts" in params:  # up to 0.10
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(consts), len(carry)


def scan_options(params: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments of `lax.scan` that reproduce the scan."""
    options = {k: params[k] for k in ("length", "reverse", "unroll")}
    if "_split_transpose" in params:  # up to 0.9
        options["_split_transpose"] = params["_split_transpose"]
    return options


def widen_jit(params: dict[str, Any], jaxpr: Any, extra_in: int, extra_out: int) -> dict[str, Any]:
    """A jit's parameters for `jaxpr`, which has that many more leading arguments and trailing results."""
    return dict(
        params,
        jaxpr=jaxpr,
        in_shardings=(*[UNSPECIFIED] * extra_in, *params["in_shardings"]),
        in_layouts=(*[None] * extra_in, *params["in_layouts"]),
        donated_invars=(*[False] * extra_in, *params["donated_invars"]),
        out_shardings=(*params["out_shardings"], *[UNSPECIFIED] * extra_out),
        out_layouts=(*params["out_layouts"], *[None] * extra_out),
    )


def widen_remat(params: dict[str, Any], jaxpr: Any, extra_in: int) -> dict[str, Any]:
    """A remat's parameters for `jaxpr`, which has that many more leading arguments."""
    return dict(params, jaxpr=jaxpr, prevent_cse=_widen_prevent_cse(params["prevent_cse"], extra_in))


def widen_high_remat(prim: Any, jaxpr: Any, extra_in: int) -> Any:
    """The same for the remat that 0.12 has behind a flag."""
    return type(prim)(jaxpr, prim.policy, _widen_prevent_cse(prim.prevent_cse, extra_in))


def _widen_prevent_cse(prevent_cse: Any, extra_in: int) -> Any:
    return prevent_cse if isinstance(prevent_cse, bool) else (False,) * extra_in + tuple(prevent_cse)


def with_common_types(jaxprs: list[Any], avals: list[Any]) -> list[Any]:
    """Make the results of branches vary over the same mesh axes, as `cond` requires."""
    varying = [[varying_axes(a) for a in out_avals(j)] for j in jaxprs]
    if all(v == varying[0] for v in varying[1:]):
        return jaxprs
    joint = [frozenset().union(*axes) for axes in zip(*varying, strict=True)]

    def widened(jaxpr: Any) -> Any:
        def fun(*args: Any) -> list[Any]:
            return [vary_over(x, axes) for x, axes in zip(jaxpr_as_fun(jaxpr)(*args), joint, strict=True)]

        return make_jaxpr(fun, avals)

    return [widened(j) for j in jaxprs]


def is_plain_jit(params: dict[str, Any]) -> bool:
    """Whether a jit has no sharding, layout or compiler option."""
    shardings = (*params["in_shardings"], *params["out_shardings"])
    layouts = (*params["in_layouts"], *params["out_layouts"])
    plain = shardings.count(UNSPECIFIED) == len(shardings) and layouts.count(None) == len(layouts)
    return plain and not params["compiler_options_kvs"] and not params["keep_unused"]


# Some versions count donated arguments among those that are not static.
_example: Any = jax.jit(lambda x, y: y, static_argnums=0, donate_argnums=1)
_REBASED = _example._jit_info.donate_argnums == (0,)


def _donated(info: Any) -> list[int]:
    if not _REBASED:
        return list(info.donate_argnums)
    others = (n for n in itertools.count() if n not in info.static_argnums)
    others = list(itertools.islice(others, max(info.donate_argnums, default=-1) + 1))
    return [others[n] for n in info.donate_argnums]


def options_of_jit(jitted: Any, shift: int = 0) -> dict[str, Any] | None:
    """The options of a jitted function, for one with `shift` more leading arguments.

    None if it has a sharding, a layout, a device or a compiler option, which depend on its arguments and results, or
    counts arguments from the last.
    """
    info = jitted._jit_info
    placed = (*info.in_shardings_leaves, *info.out_shardings_leaves)
    laid_out = (*info.in_layouts_leaves, *info.out_layouts_leaves, info.device, info.backend)
    if (
        any(x is not UNSPECIFIED for x in placed)
        or any(x is not None for x in (*laid_out, getattr(info, "abstracted_axes", None)))  # up to 0.9
        or any(n < 0 for n in (*info.static_argnums, *info.donate_argnums))
        or info.compiler_options_kvs
        or info.use_resource_env
    ):
        return None
    return {
        "static_argnums": tuple(n + shift for n in info.static_argnums),
        "static_argnames": info.static_argnames,
        "donate_argnums": tuple(n + shift for n in _donated(info)),
        "donate_argnames": info.donate_argnames,
        "keep_unused": info.keep_unused,
    }


def manual_axes(params: dict[str, Any]) -> Any:
    """The mesh axes that a shard_map makes manual."""
    return params.get("newly_manual_axes", params.get("manual_axes"))  # since 0.10 / up to 0.9


@_extend.transformation2
def _around(fun: Any, around: Any, *args: Any, **kwargs: Any) -> Any:
    return around(functools.partial(fun, **kwargs), *args)


def wrap_rule(rule: Any, around: Any) -> Any:
    """A derivative rule that is run by `around(rule, *args)`."""
    return _around(rule, around) if isinstance(rule, _extend.WrappedFun) else functools.partial(around, rule)


def flat_results(results: Any) -> tuple[list[Any], Any]:
    """What a trace returns for a primitive as a list, and a function that restores its form."""
    if hasattr(results, "unflatten") and hasattr(results, "update"):  # since 0.11 shard_map's are a FlatTree
        return list(results.vals), results.update
    return list(results), lambda flat: flat


def forget_trees(fun: Any, rule: Any) -> None:
    """Reset a function to the state before it ran, if its derivative rule has run too.

    JAX runs one of the two, takes the structure of the result from it, and raises if both have run. lox runs both: one
    for the logs, one for the derivative. A rule that stores nothing is one that JAX made of a jaxpr: what its function
    stores then is read by nobody else.
    """
    stores = [store for store in rule.stores if store is not None]
    if stores and all(map(_is_filled, stores)):
        forget_results(fun)


def forget_results(fun: Any) -> None:
    """Let a function be called again: JAX stores the structure of its results, and raises if it is stored twice."""
    for store in getattr(fun, "stores", ()):
        if store is not None:
            store.reset()


def _is_filled(store: Any) -> bool:
    try:
        store.val  # noqa: B018  one of the two store classes offers no other test
    except _extend.StoreException:
        return False
    return True
