"""shard_map outside of jit."""

from typing import Any

import jax.core
from jax import lax
from jax._src.mesh import use_abstract_mesh
from jax._src.shard_map import eager_rules as _eager_rules
from jax._src.sharding_impls import _internal_use_concrete_mesh

from lox._compat._traces import Primitive, set_current_trace
from lox._compat._types import aval_of, varying_axes
from lox._record import record

# There JAX runs the body one primitive at a time, each as its own jitted shard_map on arrays with a leading axis for
# the devices. These calls bypass all traces, except for a primitive that has a rule in `eager_rules`.
_on_shards_p = Primitive("lox_on_shards")
_on_shards_p.multiple_results = True


def bind_on_shards(shards: Any, around: Any, primitive: Any, params: dict[str, Any], args: Any) -> Any:
    """Bind a primitive inside the shard_map whose trace is `shards`, such that the trace `around` it sees the call."""
    mesh, check = shards.mesh, shards.check

    def axes(aval: Any) -> tuple[Any, ...]:
        varying = varying_axes(aval) if check else shards.manual_axes
        return tuple(name for name in mesh.axis_names if name in varying)

    types = [aval_of(x) for x in args]
    out_types = primitive.abstract_eval(*types, **params)[0]
    one = not primitive.multiple_results
    call = _OnShards(
        primitive,
        tuple(params.items()),
        mesh,
        frozenset(shards.manual_axes),
        check,
        tuple(map(axes, types)),
        tuple(map(axes, [out_types] if one else out_types)),
    )
    with set_current_trace(shards):
        outs = _on_shards_p.bind(*args, call=call, around=around)
    return outs[0] if one else outs


@record
class _OnShards:
    """A primitive on arrays with a leading axis for the devices; compared by value, so that jit's cache finds it."""

    primitive: Any
    params: tuple[tuple[str, Any], ...]
    mesh: Any
    manual_axes: frozenset[Any]
    check: bool
    in_axes: tuple[tuple[Any, ...], ...]
    out_axes: tuple[tuple[Any, ...], ...]

    def __call__(self, *args: Any) -> Any:
        def body(*args: Any) -> list[Any]:
            outs = self.primitive.bind(*[lax.squeeze(x, [0]) for x in args], **dict(self.params))
            return [lax.expand_dims(x, [0]) for x in (outs if self.primitive.multiple_results else [outs])]

        specs = [[jax.sharding.PartitionSpec(names) for names in axes] for axes in (self.in_axes, self.out_axes)]
        return jax.shard_map(
            body,
            mesh=self.mesh,
            in_specs=tuple(specs[0]),
            out_specs=specs[1],
            axis_names=self.manual_axes,
            check_vma=self.check,
        )(*args)


@_on_shards_p.def_effectful_abstract_eval
def _abstract_eval_on_shards(*avals: Any, call: _OnShards, around: Any) -> Any:
    del around
    outs, effects = call.primitive.abstract_eval(*avals, **dict(call.params))
    return outs if call.primitive.multiple_results else [outs], effects


def _run_on_shards(mesh: Any, *args: Any, call: _OnShards, around: Any) -> Any:
    on_mesh = use_abstract_mesh(mesh.abstract_mesh), _internal_use_concrete_mesh(mesh)
    with set_current_trace(around), jax.disable_jit(False), on_mesh[0], on_mesh[1]:
        return jax.jit(call)(*args)


_eager_rules[_on_shards_p] = _run_on_shards
