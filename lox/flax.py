"""Flax, Linen and NNX: what modules sow is logged, and their paths can be in front of the keys that they log.

>>> import flax.linen as nn, jax, jax.numpy as jnp, lox, lox.flax
>>> class Layer(nn.Module):
...     @nn.compact
...     def __call__(self, x):
...         x = nn.Dense(2)(x)
...         self.sow("intermediates", "mean", x.mean())
...         lox.log({"norm": jnp.linalg.norm(x)})
...         return x
>>> model = nn.Sequential([Layer(), Layer()])
>>> x = jnp.ones(2)
>>> variables = lox.nolog(model.init)(jax.random.key(0), x)
>>> forward = lox.flax.scope_modules(lox.flax.log_sown(model.apply))
>>> list(lox.spool(forward)(variables, x)[1])
['layers_0/norm', 'layers_1/norm', 'layers_0/mean', 'layers_1/mean']

The module can be imported without Flax.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from lox import _compat, _errors
from lox._data._sites import warn
from lox._engine import _scope
from lox._engine._primitive import log
from lox._transforms import _call

R = TypeVar("R")


def log_sown(
    fun: Callable[..., R],
    collection: Any = None,
    *,
    tags: str | Iterable[str] = (),
    reduce: Any = None,
    prefix: str = "",
    explicit: bool = False,
    **steps: Any,
) -> Callable[..., R]:
    """Log what the modules of a model sow, with their paths as keys: `encoder/norm`.

    Every value that was sown is an event; if one name was sown several times, these are several events of its key. What
    a `reduce_fn` of Flax has combined is one. They happen when the call of the model ends. Values sown inside Linen's
    `nn.scan` have an axis for its iterations, and are there if `variable_axes` names the collection: what Flax does not
    keep, lox cannot log.

    Args:
        fun: For Linen `model.apply`. For NNX the model, one of its methods, or a function whose first argument it is.
        collection: For Linen the name of a collection, `"intermediates"` by default. For NNX a type of variables,
            `nnx.Intermediate` by default.
        tags: As in `lox.log`.
        reduce: As in `lox.log`; a single one for all keys.
        prefix: Put in front of every key.
        explicit: As in `lox.log`.
        **steps: As in `lox.log`.

    Returns:
        A function with the arguments and the result of `fun`: what was sown is not returned, unless you ask for it,
        with `mutable`.

    Raises:
        LogTypeError: `fun` is none of these.
    """
    options: dict[str, Any] = {"tags": tags, "reduce": reduce, "prefix": prefix, "explicit": explicit, **steps}
    scoped, inner = getattr(fun, _SCOPED, (None, None))
    if scoped is fun and inner is not None:  # and not something around it; the other way round is the same
        return scope_modules(log_sown(inner, collection, **options))
    if _is_apply(fun):
        return _linen_logging_sown(fun, "intermediates" if collection is None else collection, options)
    return _nnx_logging_sown(fun, collection, options)


# What a function that this module returns knows of the one that it was given: the function, and the model of NNX.
_SCOPED, _MODEL = "_lox_scoped", "_lox_model"


def _is_apply(fun: Any) -> bool:
    from flax import linen as nn

    return inspect.ismethod(fun) and isinstance(fun.__self__, nn.Module) and fun.__name__ == "apply"


def _linen_logging_sown(apply: Any, collection: Any, options: dict[str, Any]) -> Any:
    from flax.core import scope as flax_scope

    if not isinstance(collection, str):
        raise _errors.LogTypeError(f"`collection` is {collection!r}; in Linen it is a name, such as 'intermediates'.")

    @_call.wraps(apply)
    def applied(*args: Any, mutable: Any = False, **kwargs: Any) -> Any:
        out, state = apply(*args, mutable=flax_scope.union_filters(mutable, collection), **kwargs)
        _log_events(state.get(collection, {}), repr(collection), options)
        if mutable is False:
            return out
        if not flax_scope.in_filter(mutable, collection):
            state = {name: variables for name, variables in state.items() if name != collection}
        return out, state

    return applied


def _nnx_logging_sown(fun: Any, kind: Any, options: dict[str, Any]) -> Any:
    from flax import nnx

    if not hasattr(nnx, "capture"):
        raise _errors.LoxError("`lox.flax.log_sown` needs a newer Flax, which has `nnx.capture`.")
    kind = nnx.Intermediate if kind is None else kind
    if not (isinstance(kind, type) and issubclass(kind, nnx.Variable)):
        raise _errors.LogTypeError(f"`collection` is {kind!r}; in NNX it is a type, such as `nnx.Intermediate`.")

    @_call.wraps(fun)
    def called(*args: Any, **kwargs: Any) -> Any:
        model = _nnx_model(fun, args)
        if model is None:
            raise _unknown_model("log_sown")
        out, state = nnx.capture(lambda model: fun(*args, **kwargs), kind)(model)
        _log_events(nnx.to_pure_dict(state), f"{kind.__name__!r}", options)
        return out

    setattr(called, _MODEL, _nnx_model(fun))
    return called


def _nnx_model(fun: Any, args: Any = ()) -> Any:
    """The model of NNX that a call is about: the callable itself, the object of a method, or the first argument."""
    from flax import nnx

    candidates = (fun, getattr(fun, "__self__", None), getattr(fun, _MODEL, None), *args[:1])
    return next((x for x in candidates if isinstance(x, nnx.Module)), None)


def _unknown_model(user: str) -> _errors.LogTypeError:
    return _errors.LogTypeError(
        f"`lox.flax.{user}` does not know where the model is.\n"
        f"With Linen, give it the model's apply:  lox.flax.{user}(model.apply)\n"
        f"with NNX the model:                     lox.flax.{user}(model)\n"
        f"or a function of it:                    lox.flax.{user}(lambda model, x: model(x))(model, x)"
    )


def _log_events(sown: Mapping[Any, Any], where: str, options: dict[str, Any]) -> None:
    """Log what was sown: the first value of every name in one event, then the second ones, ..."""
    found = {key: value if isinstance(value, tuple) else (value,) for key, value in _flat(sown, ())}
    if not found:
        warn(f"`lox.flax.log_sown` has found nothing that was sown into {where}: no event is logged.")
    for n in range(max(map(len, found.values()), default=0)):
        log({key: values[n] for key, values in found.items() if n < len(values)}, **options)


def _flat(tree: Mapping[Any, Any], path: _scope.Path) -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        inside = (*path, str(name))
        if isinstance(value, Mapping):
            yield from _flat(value, inside)
        else:
            yield "/".join(inside), value


def scope_modules(fun: Callable[..., R]) -> Callable[..., R]:
    """Make a scope of every module: two that log `norm` give `encoder/norm` and `decoder/norm`.

    A module that another one calls without containing it has its path below that of the caller.

    With Linen, `fun` may be any function that calls `model.apply`. It must not be jitted: JAX would not run it again if
    it knows it already. Write `jax.jit(scope_modules(f))`, or use it inside.

    Args:
        fun: For Linen `model.apply`, or a function that calls it. For NNX the model, one of its methods, or a function
            whose first argument it is.

    Returns:
        A function with the arguments and the result of `fun`.

    Raises:
        LogTypeError: `fun` is jitted, or no module of Flax is called.
    """
    from flax import linen as nn

    if isinstance(fun, _compat.PjitFunction):
        raise _errors.LogTypeError(
            "`lox.flax.scope_modules` got a jitted function, which JAX may not run again: "
            "write `jax.jit(lox.flax.scope_modules(f))`."
        )
    if isinstance(fun, nn.Module):
        raise _errors.LogTypeError("`lox.flax.scope_modules` got a module of Linen: give it `model.apply`.")

    @_call.wraps(fun)
    def scoped(*args: Any, **kwargs: Any) -> Any:
        model = _nnx_model(fun, args)
        if model is not None:
            return _nnx_scoped(model, fun, args, kwargs)
        called = []

        def in_scope(next_fun: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
            called.append(context.module)
            if context.module.scope is None:  # it is not bound yet, and has no path
                return next_fun(*args, **kwargs)
            with _scope.module_scope(context.module.path):
                return next_fun(*args, **kwargs)

        with nn.intercept_methods(in_scope):
            out = fun(*args, **kwargs)
        if not called:
            raise _unknown_model("scope_modules")
        return out

    setattr(scoped, _SCOPED, (scoped, fun))  # itself too, as decorators copy attributes
    setattr(scoped, _MODEL, _nnx_model(fun))
    return scoped


def _nnx_scoped(model: Any, fun: Any, args: Any, kwargs: Any) -> Any:
    from flax import nnx

    modules = list(nnx.iter_modules(model))
    before = [type(module) for _, module in modules]
    try:
        for path, module in modules:
            cls = _scope.scoped_class(_scope.unscoped_class(type(module)), tuple(map(str, path)), nnx.Module)
            # Not by the module's own `__setattr__`, which is for what belongs to the model.
            object.__setattr__(module, "__class__", cls)
        return fun(*args, **kwargs)
    finally:
        for (_, module), cls in zip(modules, before, strict=True):
            object.__setattr__(module, "__class__", cls)
