"""Equinox: the paths of modules in front of the keys that are logged in them.

>>> import equinox as eqx, jax, jax.numpy as jnp, lox, lox.equinox
>>> class Layer(eqx.Module):
...     linear: eqx.nn.Linear
...
...     def __call__(self, x):
...         x = self.linear(x)
...         lox.log({"norm": jnp.linalg.norm(x)})
...         return x
>>> class Model(eqx.Module):
...     layers: list[Layer]
...
...     def __call__(self, x):
...         for layer in self.layers:
...             x = layer(x)
...         return x
>>> model = Model([Layer(eqx.nn.Linear(2, 2, key=jax.random.key(n))) for n in range(2)])
>>> list(lox.spool(lox.equinox.scope_modules(model))(jnp.ones(2))[1])
['layers/0/norm', 'layers/1/norm']

The module can be imported without Equinox.
"""

import dataclasses
from typing import Any, TypeVar

import jax

from lox import _errors
from lox._engine import _scope

Model = TypeVar("Model")


def scope_modules(model: Model) -> Model:
    """Return the same model, in which every module is a scope: two that log `norm` give `encoder/norm`, `decoder/norm`.

    Paths are made of the names of fields, the numbers in lists and tuples, and the keys of dicts. All methods count but
    those with a leading underscore. A module that another one calls without containing it has its path below that of
    the caller.

    The modules of the new model belong to subclasses of their classes, so that the scopes are there under every
    transformation of JAX and Equinox. To JAX, it therefore has another structure than `model`. Either make it where the
    model is called, `scope_modules(model)(x)`, which leaves gradients and the state of the optimizer as they are; or
    make it once, before the optimizer sees the model.

    Args:
        model: An Equinox module, or any pytree of them.

    Returns:
        The model with scopes.
    """
    import equinox as eqx

    def name_of(key: Any) -> str:
        return jax.tree_util.keystr((key,), simple=True)

    def rename(path: _scope.Path, node: Any) -> Any:
        """Give the modules in `node` their scopes; those that contain others first, as the paths are known then."""
        if not isinstance(node, eqx.Module):
            leaves, treedef = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda x: isinstance(x, eqx.Module))
            inside = [
                rename((*path, *map(name_of, keys)), leaf) if isinstance(leaf, eqx.Module) else leaf
                for keys, leaf in leaves
            ]
            return jax.tree.unflatten(treedef, inside)
        cls = _scope.unscoped_class(type(node))
        # Some of Equinox's classes, such as `StateIndex`, only hold things, and are asked for by their very type.
        if callable(node) or not cls.__module__.startswith("equinox."):
            cls = _scope.scoped_class(cls, path, eqx.Module)
        renamed = object.__new__(cls)
        static = {field.name for field in dataclasses.fields(node) if field.metadata.get("static", False)}
        for name, value in vars(node).items():
            if name in static:  # may be anything
                object.__setattr__(renamed, name, value)
                continue
            inside = path if name.startswith("__") else (*path, name)  # a bound method has its module as `__self__`
            object.__setattr__(renamed, name, rename(inside, value))
        return renamed

    scoped = rename((), model)
    if not any(isinstance(x, eqx.Module) for x in jax.tree.leaves(model, is_leaf=lambda x: isinstance(x, eqx.Module))):
        raise _errors.LogTypeError(
            f"`lox.equinox.scope_modules` got {type(model).__name__}, in which there is no `equinox.Module`."
        )
    return scoped
