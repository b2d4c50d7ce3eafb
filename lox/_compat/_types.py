"""Types of values: shardings, and the mesh axes over which values vary."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax.core
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src import core as _core
from jax._src.mesh import use_abstract_mesh
from jax.interpreters import ad

from lox._compat._modes import own_transfers
from lox._compat._traces import StagingTrace, Tracer, current_trace, is_evaluating


def is_symbolic_zero(x: Any) -> bool:
    """Whether a tangent or cotangent is known to be zero."""
    return isinstance(x, jax.custom_derivatives.SymbolicZero)


def instantiated(x: Any) -> Any:
    """A cotangent as an array, symbolic zeros included."""
    return zeros_of(x.aval) if is_symbolic_zero(x) else x


def varying_axes(aval: Any) -> frozenset[Any]:
    """The mesh axes over which a value varies inside shard_map."""
    if hasattr(aval, "mat"):  # since 0.10
        return frozenset(aval.mat.varying)
    return frozenset(getattr(aval, "vma", ()))


def varying_over(values: Any) -> frozenset[Any]:
    """The mesh axes over which any of these values varies."""
    return frozenset().union(*[varying_axes(aval_of(x)) for x in values])


def is_first(axes: Iterable[Any]) -> Any:
    """Whether a device inside shard_map is the first along all of these axes."""
    return sum(lax.axis_index(name) for name in sorted(axes)) == 0


def is_without_order() -> bool:
    """Whether host calls made here cannot be ordered: where some axes of the mesh are manual and others are not.

    The XLA of JAX 0.8 to 0.10 aborts the process if the token that keeps the order enters there.
    """
    kinds = set(_axis_types().values())
    return jax.sharding.AxisType.Manual in kinds and len(kinds) > 1


def manual_axes_here() -> tuple[tuple[str, ...], ...]:
    """The mesh axes of the shard_maps around this place, as if it were one; empty if there is none."""
    manual = tuple(name for name, kind in _axis_types().items() if kind == jax.sharding.AxisType.Manual)
    return (manual,) if manual else ()


def axes_without_host_calls() -> list[str]:
    """The explicit axes of the mesh that keep this place from calling the host."""
    return explicit_beside_manual() if jax.__version_info__ < (0, 11) else []  # XLA could not lower it before


def explicit_beside_manual() -> list[str]:
    """The explicit axes of the current mesh if some of its other axes are manual."""
    types = _axis_types()
    manual = jax.sharding.AxisType.Manual in types.values()
    return [n for n, kind in types.items() if manual and kind == jax.sharding.AxisType.Explicit]


def _axis_types() -> dict[str, Any]:
    """The type of each axis of the current mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    return {} if mesh.empty else dict(zip(mesh.axis_names, mesh.axis_types, strict=True))


def array_type(shape: tuple[int, ...], dtype: Any, sharding: Any = None) -> Any:
    """The type of arrays of this shape, dtype and explicit sharding."""
    return jax.core.ShapedArray(shape, dtype, sharding=sharding)


def without_axis(aval: Any, axis: int) -> Any:
    """The type of arrays without this axis."""
    shape, axes = list(aval.shape), list(aval.sharding.spec)
    del shape[axis], axes[axis : axis + 1]
    sharding = jax.sharding.NamedSharding(aval.sharding.mesh, jax.sharding.PartitionSpec(*axes))
    return aval.update(shape=tuple(shape), sharding=sharding)


def scalar_type(dtype: Any, like: Any) -> Any:
    """The type of a scalar on the devices of `like` that varies over them in the same way."""
    aval = aval_of(like)
    sharding = jax.sharding.NamedSharding(aval.sharding.mesh, jax.sharding.PartitionSpec())
    return aval.update(shape=(), dtype=np.dtype(dtype), weak_type=False, sharding=sharding)


def explicit_sharding(aval: Any, lead: int = 0) -> Any:
    """The sharding that the type of an array states, without its leading axes; None if it states none."""
    sharding = getattr(aval, "sharding", None)
    if sharding is None or sharding.mesh.empty:
        return None
    types = set(sharding.mesh.axis_types)
    if jax.sharding.AxisType.Explicit not in types or jax.sharding.AxisType.Manual in types:
        return None
    return jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec(*sharding.spec[lead:]))


def with_leading_axes(sharding: Any, count: int) -> Any:
    """The same sharding for arrays with `count` more leading axes."""
    if sharding is None:
        return None
    return jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec(*[None] * count, *sharding.spec))


def explicit_axes(aval: Any) -> tuple[Any, ...]:
    """For each axis of an array, the mesh axes over which its type says it is sharded; empty if there are none."""
    sharding = getattr(aval, "sharding", None)
    spec = () if sharding is None else tuple(sharding.spec)
    return spec if any(axis is not None for axis in spec) else ()


def abstract_sharding(mesh: Any, axes: list[Any]) -> Any:
    """The sharding of an array's type, from the mesh axes of each array axis; None if no axis is sharded."""
    if not any(axes):
        return None
    mesh = mesh.abstract_mesh if isinstance(mesh, jax.sharding.Mesh) else mesh
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))


def unreduced_axes(x: Any) -> list[str]:
    """The mesh axes over which a value is still to be summed."""
    if not isinstance(x, jax.Array):
        return []
    sharding = getattr(aval_of(x), "sharding", None)
    return sorted(getattr(getattr(sharding, "spec", None), "unreduced", ()))  # since 0.7


class AxisSharding(NamedTuple):
    """The mesh axes over which one axis of an array is explicitly sharded."""

    mesh: Any
    names: Any


def explicit_over(mesh: Any, names: Any) -> AxisSharding | None:
    """The sharding of an array axis over these mesh axes, as far as they are explicit."""
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    explicit = tuple(n for n in names if types[n] == jax.sharding.AxisType.Explicit)
    return AxisSharding(mesh, explicit[0] if len(explicit) == 1 else explicit) if explicit else None


def vmap_names(axis_data: Any) -> tuple[Any, Any]:
    """`axis_name` and `spmd_axis_name` of the vmap that calls a batching rule; None where not given."""
    spmd = axis_data.spmd_name
    if isinstance(spmd, tuple) and len(spmd) == 1:  # JAX makes a tuple of every name
        (spmd,) = spmd
    return None if axis_data.name is _core.no_axis_name else axis_data.name, spmd


def axis_shardings(x: Any) -> list[AxisSharding | None]:
    """The explicit sharding of each axis of an array; an empty list if no axis has one."""
    if not isinstance(x, jax.Array | jax.core.ShapedArray):
        return []
    spec = explicit_axes(aval_of(x))
    if not spec:
        return []
    # Outside of jit a sharding needs devices, which only arrays know.
    sharding: Any = (aval_of(x) if isinstance(x, Tracer) else x).sharding
    return [None if names is None else AxisSharding(sharding.mesh, names) for names in spec]


def shard_axes(x: Any, shardings: dict[int, AxisSharding]) -> Any:
    """Shard the given axes of `x` and leave the others as they are."""
    axes = [*explicit_axes(aval_of(x))] or [None] * x.ndim
    if all(axes[axis] == sharding.names for axis, sharding in shardings.items()):
        return x
    mesh = next(iter(shardings.values())).mesh
    for axis, sharding in shardings.items():
        axes[axis] = sharding.names
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))
    return _reshard(x, sharding)


def _reshard(x: Any, sharding: Any) -> Any:
    if isinstance(sharding.mesh, jax.sharding.Mesh):
        if isinstance(x, Tracer):
            sharding = jax.sharding.NamedSharding(sharding.mesh.abstract_mesh, sharding.spec)
        else:
            return jax.device_put(x, sharding)  # 0.7 reshards only arrays that are already on the devices
    elif is_evaluating() and not isinstance(x, Tracer):
        return x  # an abstract mesh has no devices, and JAX itself moves arrays that are not committed to any
    return jax.sharding.reshard(x, sharding)


def sharded_like(x: Any, other: Any) -> Any:
    """Shard `x` explicitly as another array of the same shape."""
    shardings = {axis: sharding for axis, sharding in enumerate(axis_shardings(other)) if sharding is not None}
    return shard_axes(x, shardings) if shardings else x


def gathered(x: Any, axis: int) -> Any:
    """Gather `x` along an axis: JAX does not take a single index of a sharded one."""
    shardings = axis_shardings(x)
    sharding = shardings[axis] if shardings else None
    return x if sharding is None else shard_axes(x, {axis: AxisSharding(sharding.mesh, None)})


def explicit_mesh_of(avals: Iterable[Any]) -> Any:
    """The mesh with explicit axes that one of these types has, which may be another one than that of the context."""
    meshes = (getattr(getattr(aval, "sharding", None), "mesh", None) for aval in avals)
    return next((m for m in meshes if m is not None and jax.sharding.AxisType.Explicit in m.axis_types), None)


def on_mesh_of(args: Any, tree: Any) -> Any:
    """Put the arrays of `tree` on the explicit mesh of `args`, if there is one.

    The type of a scalar made inside jit has no mesh, and then JAX cannot batch a loop or branch that takes it over an
    explicitly sharded axis.
    """
    mesh = explicit_mesh_of(map(aval_of, args))
    if mesh is None:
        return tree
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    staged = isinstance(current_trace(), StagingTrace)

    def on_mesh(x: Any) -> Any:
        lacks_mesh = (staged or isinstance(x, Tracer)) and aval_of(x).sharding.mesh.empty
        return jax.sharding.reshard(x, sharding) if lacks_mesh else x

    return jax.tree.map(on_mesh, tree)


def zeros_along(x: Any, axis: int) -> Any:
    """A vector of zeros, as long as an axis of `x` and sharded like it."""
    zeros = np.zeros(x.shape[axis], np.int32)
    shardings = axis_shardings(x)
    sharding = shardings[axis] if shardings else None
    return jnp.asarray(zeros) if sharding is None else shard_axes(jnp.asarray(zeros), {0: sharding})


def unsharded(fun: Any, x: Any) -> Any:
    """Apply a function to an array, of whose explicit sharding its results have nothing; XLA finds out how."""
    aval = aval_of(x)
    sharding = explicit_sharding(aval) if explicit_axes(aval) else None
    if sharding is None:
        return fun(x)
    whole = jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec())
    return jax.sharding.auto_axes(fun, out_sharding=whole)(x)


def beside(others: Callable[[], Any], tree: Any) -> Any:
    """Move the arrays of `tree` so that an operation or a program can take them together with `others()`.

    JAX itself moves uncommitted arrays. If none of the others is committed, the arrays become uncommitted too, as
    committed ones would tie the results to their devices.
    """
    leaves = jax.tree.leaves(tree)
    if not any(_is_committed(x) for x in leaves):
        return tree
    place = next((x.sharding for x in others() if _is_committed(x)), None)
    with own_transfers():
        return jax.tree.map(lambda x: _moved(x, place) if _is_committed(x) else x, tree)


def _is_committed(x: Any) -> bool:
    return isinstance(x, jax.Array) and not isinstance(x, Tracer) and x.committed


def _moved(x: Any, place: Any) -> Any:
    if place is None:
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.random.wrap_key_data(_moved(jax.random.key_data(x), None), impl=jax.random.key_impl(x))
        return jnp.asarray(np.asarray(x))
    if x.sharding.device_set == place.device_set:
        return x
    mesh = getattr(place, "mesh", None)
    return jax.device_put(x, place if mesh is None else jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))


def is_weak(aval: Any) -> bool:
    """Whether a type gives way to others in promotions, as that of a Python number does."""
    return getattr(aval, "weak_type", False)


def with_strength(x: Any, weak: bool) -> Any:
    """The same array with a type that is weak, or is not. By the primitive: the function looks at much known here."""
    aval = jax.typeof(x)
    if is_weak(aval) == weak:
        return x
    return lax.convert_element_type_p.bind(x, new_dtype=aval.dtype, weak_type=weak, sharding=None)


def aval_of(x: Any) -> Any:
    """The type of a value, or the type itself."""
    return x if isinstance(x, jax.core.ShapedArray) else jax.typeof(x)


def is_prng_key(dtype: Any) -> bool:
    """Whether this is the dtype of typed PRNG keys."""
    return jax.numpy.issubdtype(dtype, jax.dtypes.prng_key)


def prng_impl(dtype: Any) -> str:
    """The name of the implementation of PRNG keys of this dtype, registered with JAX or not."""
    return dtype._impl.name


def map_words(fun: Any, prng_keys: Any) -> Any:
    """Apply `fun` to the words of PRNG keys."""
    return jax.random.wrap_key_data(fun(jax.random.key_data(prng_keys)), impl=prng_impl(prng_keys.dtype))


def zeros_of(aval: Any) -> Any:
    """Zeros of exactly this type, sharding and varying axes included, which `jnp.zeros` would lose.

    For PRNG keys, those whose words are zero: JAX's own zeros for their type are not keys.
    """
    if is_prng_key(aval.dtype):
        words = jax.numpy.zeros((*aval.shape, *aval.dtype._impl.key_shape), np.uint32)
        return with_varying_axes_of(jax.random.wrap_key_data(words, impl=prng_impl(aval.dtype)), aval)
    if jax.sharding.get_abstract_mesh().empty:
        # A type knows its mesh, but making an array needs a current mesh. Outside of jit it needs the devices too,
        # which the type does not know; an array on one device will do there. It must not have the type of one on a
        # mesh: JAX's caches tell arrays on one device apart by their shape only, and would give that mesh to others.
        if is_evaluating():
            return ad.zeros_like_aval(jax.core.ShapedArray(aval.shape, aval.dtype))
        if (sharding := explicit_sharding(aval)) is not None:
            with use_abstract_mesh(sharding.mesh):
                return ad.zeros_like_aval(aval)
    return ad.zeros_like_aval(aval)


def computed_apart(x: Any) -> Any:
    """The same array, which XLA does not compute again wherever it is used several times.

    The XLA of JAX 0.7 fuses a chain of additions with what computes their operands. Where that has a concatenation, it
    emits code for every path through the chain, which does not come to an end. It leaves a loop as it is (but not an
    optimization barrier, which it removes before it fuses).
    """
    if jax.__version_info__ >= (0, 8) or not isinstance(current_trace(), StagingTrace):
        return x
    return lax.scan(lambda _, n: (x, None), zeros_of(aval_of(x)), None, length=2)[0]


def with_varying_axes_of(x: Any, aval: Any) -> Any:
    """Make `x` vary over the mesh axes over which `aval` varies."""
    return vary_over(x, varying_axes(aval))


def vary_over(x: Any, axes: frozenset[Any]) -> Any:
    """Make `x` vary over these mesh axes too."""
    missing = tuple(axes - varying_axes(jax.typeof(x)))
    if not missing:
        return x
    if hasattr(lax, "pcast"):  # since 0.8
        return lax.pcast(x, missing, to="varying")
    return lax.pvary(x, missing)  # pyright: ignore[reportAttributeAccessIssue]
