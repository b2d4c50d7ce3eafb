"""Lowering of calls from the device to the host."""

from typing import Any

import jax
import jax.core
import numpy as np
from jax import lax
from jax._src.lib import xla_client  # pyright: ignore[reportPrivateImportUsage]
from jax._src.sharding_impls import SdyArray, SdyArrayList  # pyright: ignore[reportPrivateImportUsage]
from jax.experimental import io_callback
from jax.interpreters import mlir
from jax.interpreters.mlir import SPMDAxisContext

from lox._compat._effects import order_effect
from lox._compat._jaxprs import LogMark
from lox._compat._processes import this_process
from lox._compat._types import (
    aval_of,
    explicit_axes,
    explicit_beside_manual,
    explicit_mesh_of,
    is_first,
    is_prng_key,
    vary_over,
)


def is_exporting(ctx: Any) -> bool:
    """Whether the program is being lowered for `jax.export`."""
    return ctx.module_context.lowering_parameters.for_export


def mark_program(ctx: Any, mark: LogMark) -> None:
    """Mark the program that is being lowered, with an object that JAX keeps alive as long as the executable."""
    if not is_exporting(ctx):  # such an object cannot be exported
        ctx.module_context.add_keepalive(mark)


def lower_callback(ctx: Any, callback: Any, *operands: Any, waits: bool = False, answers: bool = False) -> Any:
    """Emit a host call of `callback(token, *arrays)`, which returns the next token, and results if there are any.

    Not `jax.debug.callback`, which is twenty times slower and starts a computation inside the callback, which may
    deadlock: this passes NumPy arrays. On several devices the callback gets `~token`, a negative number. Inside of
    shard_map the next token is a result of the call, so that each device makes its calls in order; if some axes are
    left to the compiler, only if it `waits`. Outside, where one device calls for all, the others do not wait for its
    calls, unless it `answers`.
    """
    axis_context = ctx.module_context.axis_context
    if is_on_one_device(ctx):
        return lower_host_call(ctx, callback, *operands)

    def one_of_several(token: Any, *arrays: Any) -> Any:
        token, *results = callback(np.invert(token), *arrays)
        return np.invert(token), *results

    if len(ctx.avals_out) > 1:
        return lower_host_call(ctx, one_of_several, *operands)

    def unordered(*arrays: Any) -> Any:
        one_of_several(*arrays)
        return ()

    if isinstance(axis_context, SPMDAxisContext):
        # Inside shard_map every device calls. If some mesh axes are left to the compiler, JAX has to gather first.
        rest = tuple(n for n in axis_context.mesh.axis_names if n not in axis_context.manual_axes)
        if rest:
            in_order = waits and jax.__version_info__ >= (0, 10)  # JAX before it has no such calls in nested shard_maps

            def call(*arrays: Any) -> Any:
                if in_order:
                    shapes = (jax.ShapeDtypeStruct((), np.int32),)
                    return io_callback(lambda *a: one_of_several(*map(np.asarray, a)), shapes, *arrays)
                jax.debug.callback(lambda *a: unordered(*map(np.asarray, a)), *arrays)
                return (arrays[0],)

            def call_from_first(*arrays: Any) -> Any:
                return lax.cond(is_first(rest), call, lambda *arrays: (arrays[0],), *arrays)

            def emit(*arrays: Any) -> Any:
                if in_order or explicit_beside_manual():
                    # JAX does not gather over explicit axes, and has host calls with results only where all are manual.
                    whole = tuple(_whole(x) for x in arrays)
                    specs = (jax.sharding.PartitionSpec(),) * len(whole)
                    on_each = jax.shard_map(call_from_first, in_specs=specs, out_specs=specs[:1], axis_names=set(rest))
                    return on_each(*whole)
                return call(*arrays)

            return mlir.lower_fun(emit, multiple_results=True)(ctx, *operands)
        ctx.set_tokens_out(ctx.tokens_in)
        return _call_in_order(ctx, one_of_several, operands, "MANUAL")
    if answers:
        return lower_host_call(ctx, one_of_several, *operands)
    inner = ctx.replace(avals_out=[])
    _call_in_order(inner, unordered, operands, "MAXIMAL")  # the whole array, on the first device
    ctx.set_tokens_out(inner.tokens_out or ctx.tokens_in)
    return [operands[0]]


def is_on_one_device(ctx: Any) -> bool:
    """Whether the program runs on one device."""
    return getattr(ctx.module_context.axis_context, "num_devices", None) == 1


def reaches_beyond(ctx: Any) -> bool:
    """Whether the program runs on devices of other processes, too."""
    if this_process().processes == 1:
        return False
    axis_context = ctx.module_context.axis_context
    mesh = getattr(axis_context, "mesh", None)
    if mesh is None:
        devices = getattr(axis_context, "device_assignment", None)
    else:
        devices = mesh.devices.reshape(-1) if isinstance(mesh, jax.sharding.Mesh) else None
    if devices is not None:
        return len({device.process_index for device in devices}) > 1
    # JAX does not say yet on which devices: nobody spreads a mesh over processes that would fit into one.
    number = getattr(axis_context, "num_devices", jax.device_count()) if mesh is None else mesh.size
    return number > jax.local_device_count()


def is_called_once(ctx: Any) -> bool:
    """Whether a host call in this program on several devices comes from the first of them only."""
    axis_context = ctx.module_context.axis_context
    return not isinstance(axis_context, SPMDAxisContext) and getattr(axis_context, "num_devices", 1) > 1


def is_gathered(ctx: Any) -> bool:
    """Whether a host call in this program takes whole arrays, whose parts may be on several devices."""
    axis_context = ctx.module_context.axis_context
    if isinstance(axis_context, SPMDAxisContext):
        return axis_context.manual_axes != frozenset(axis_context.mesh.axis_names)
    return getattr(axis_context, "num_devices", 1) > 1


def is_whole(value: Any, aval: Any) -> bool:
    """Whether every device is known to have the whole of an array: by its type, or because it is a constant."""
    mesh = aval.sharding.mesh
    if not mesh.empty and jax.sharding.AxisType.Auto not in mesh.axis_types:
        return not explicit_axes(aval)
    return _is_constant(value)


def _is_constant(value: Any) -> bool:
    """Whether an array of a program that is being lowered depends on nothing but constants, as far as is known."""
    found, rest = 0, [value]
    while rest:
        op = getattr(rest.pop().owner, "operation", None)  # else it is an argument of a function or of a loop
        found += 1
        if op is None or found > _LONGEST or len(op.regions) or not op.name.startswith("stablehlo."):
            return False
        if op.name == "stablehlo.custom_call":
            return False
        rest += op.operands
    return True


_LONGEST = 100  # operations to look at, as the search may meet the same ones again


def lower_on_all_devices(ctx: Any, fun: Any, operands: Any) -> Any:
    """Lower a function such that every device runs it, on whole arrays."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:  # without `set_mesh`, only the types may know it
        mesh = explicit_mesh_of(ctx.avals_in)
    if mesh is None:
        devices = ctx.module_context.axis_context.num_devices
        mesh = jax.sharding.AbstractMesh((devices,), ("lox",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec()
    on_each = jax.shard_map(fun, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return mlir.lower_fun(lambda *arrays: on_each(*map(_whole, arrays)), multiple_results=True)(ctx, *operands)


def lower_agreement(ctx: Any, token: Any, failed: Any) -> Any:
    """Inside of shard_map, tell all devices whether `failed` is positive on any, after the host calls of all of them.

    Returns the token, and where it is a number of the device, which those of meshes of other sizes do not have; else 0.
    """
    mesh = ctx.module_context.axis_context.mesh
    axes, size = tuple(mesh.axis_names), mesh.size

    def agree(token: Any, failed: Any) -> list[Any]:
        both = jax.numpy.stack([token, failed.max()])  # one value, so that no device gets ahead of a host call
        token, any_failed = lax.pmax(vary_over(both, frozenset(axes)), axes)
        number = lax.axis_index(axes) + 1 + size**2
        return [token, jax.numpy.where(any_failed > 0, number, jax.numpy.zeros_like(failed))]

    return _lowered(agree, ctx, ctx.avals_in, token, failed)


def _lowered(fun: Any, ctx: Any, avals_out: Any, *operands: Any) -> list[Any]:
    """Lower a function; returns its results, each of which is one value."""
    outs = mlir.lower_fun(fun, multiple_results=True)(ctx.replace(avals_out=avals_out), *operands)
    return [x for xs in outs for x in (xs if isinstance(xs, list) else [xs])]


def lower_in_whole_bytes(ctx: Any, callback: Any, operands: Any, **options: Any) -> Any:
    """`lower_callback` for any dtype: numbers of less than 8 bits are sent in a wider dtype.

    XLA packs several of them into a byte, but JAX 0.7 reads the bytes with NumPy, which does not.
    """
    dtypes = [a.dtype for a in ctx.avals_in]
    wide = [_in_whole_bytes(d) for d in dtypes]
    if wide == dtypes:
        return lower_callback(ctx, callback, *operands, **options)

    def narrowing(*arrays: Any) -> Any:
        return callback(*[x.astype(d) for x, d in zip(arrays, dtypes, strict=True)])

    def widen(*xs: Any) -> list[Any]:
        return [x.astype(d) for x, d in zip(xs, wide, strict=True)]

    avals = [a.update(dtype=np.dtype(d)) for a, d in zip(ctx.avals_in, wide, strict=True)]
    inner = ctx.replace(avals_in=avals)
    outs = lower_callback(inner, narrowing, *_lowered(widen, ctx, avals, *operands), **options)
    if inner.tokens_out is not None:
        ctx.set_tokens_out(inner.tokens_out)
    return outs


def _in_whole_bytes(dtype: Any) -> Any:
    if is_prng_key(dtype) or dtype.kind == "b":
        return dtype
    if jax.numpy.issubdtype(dtype, jax.numpy.integer):
        small = jax.numpy.iinfo(dtype).bits < 8
        unsigned = jax.numpy.issubdtype(dtype, jax.numpy.unsignedinteger)
        return np.dtype(np.uint8 if unsigned else np.int8) if small else dtype
    return np.dtype(np.float32) if jax.numpy.finfo(dtype).bits < 8 else dtype


def _whole(x: Any) -> Any:
    if not explicit_axes(aval_of(x)):
        return x
    mesh = aval_of(x).sharding.mesh  # which the context need not have
    return jax.sharding.reshard(x, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))


def _callback_sharding(kind: str, results: int) -> Any:
    if jax.config.jax_use_shardy_partitioner:
        devices = (0,) if kind == "MAXIMAL" else ()
        one = SdyArray(mesh_shape=(), dim_shardings=(), logical_device_ids=devices)
        return SdyArrayList((one,) * max(results, 1))
    sharding = xla_client.OpSharding()
    sharding.type = getattr(xla_client.OpSharding.Type, kind)
    if kind == "MAXIMAL":
        sharding.tile_assignment_dimensions = [1]
        sharding.tile_assignment_devices = [0]
    return sharding


def _standing_alone(ctx: Any, operands: Any) -> Any:
    """Keep the operands of a host call from being fused with it.

    XLA for GPUs fuses a slice with the call that takes it, and then aborts the process because of the token that keeps
    calls in order (JAX 0.11).
    """
    if set(ctx.module_context.platforms) == {"cpu"}:
        return operands
    fence = mlir.lower_fun(lambda *arrays: lax.optimization_barrier(arrays), multiple_results=True)
    return fence(ctx.replace(avals_out=ctx.avals_in, tokens_in=mlir.TokenSet()), *operands)


def _call_in_order(ctx: Any, callback: Any, operands: Any, kind: str | None = None) -> Any:
    """Emit a host call, ordered if its effects say so; `kind` is its sharding on several devices."""
    operands = _standing_alone(ctx, operands)
    in_order = order_effect in ctx.tokens_in.effects() and kind != "MANUAL"  # every device has its own order
    order = order_effect if in_order else None
    results, token, _ = mlir.emit_python_callback(
        ctx,
        callback,
        None if order is None else ctx.tokens_in.get(order),
        list(operands),
        ctx.avals_in,
        ctx.avals_out,
        has_side_effect=True,
        sharding=None if kind is None else _callback_sharding(kind, len(ctx.avals_out)),
    )
    if order is not None:
        ctx.set_tokens_out(ctx.tokens_in.update_tokens(mlir.TokenSet({order: token})))
    return results


def lower_host_call(ctx: Any, callback: Any, *operands: Any) -> Any:
    """Emit a host call of `callback(*arrays)`, which returns a tuple of arrays.

    XLA may reorder calls that do not depend on each other, even those with side effects, so its effects must include
    the order effect. Inside shard_map every device calls, and there is no single order to keep.
    """
    if is_on_one_device(ctx):
        return _call_in_order(ctx, callback, operands)
    axis_context = ctx.module_context.axis_context
    inside = isinstance(axis_context, SPMDAxisContext)
    if inside and not is_gathered(ctx) and jax.config.jax_use_shardy_partitioner:
        ctx.set_tokens_out(ctx.tokens_in)
        return _call_in_order(ctx, callback, operands, "MANUAL")
    if inside or ctx.avals_out:
        # With JAX 0.7, XLA refuses the sharding of a token beside results. Data dependence orders those calls anyway.
        shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in ctx.avals_out]

        def call(*arrays: Any) -> Any:
            return io_callback(lambda *a: callback(*map(np.asarray, a)), shapes, *arrays)

        return mlir.lower_fun(call, multiple_results=True)(ctx, *operands)
    return _call_in_order(ctx, callback, operands, "MAXIMAL")
