"""Types of values: shardings, and what varies over devices."""

from collections.abc import Iterable
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
    """A cotangent as an array."""
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
    """Inside shard_map: whether a device is the first along all of these axes."""
    return sum(lax.axis_index(name) for name in sorted(axes)) == 0


def is_without_order() -> bool:
    """Whether host calls made here cannot be ordered: not where some axes of the mesh are manual and others are not.

    The XLA of JAX 0.8 to 0.10 ends the process when the token that keeps the order enters there.
    """
    kinds = set(_axis_types().values())
    return jax.sharding.AxisType.Manual in kinds and len(kinds) > 1


def axes_without_host_calls() -> list[str]:
    """The explicit axes of a mesh because of which nothing can be sent to the host from here."""
    return explicit_beside_manual() if jax.__version_info__ < (0, 11) else []  # XLA could not lower it before


def explicit_beside_manual() -> list[str]:
    """The explicit axes of a mesh of which others are manual."""
    types = _axis_types()
    manual = jax.sharding.AxisType.Manual in types.values()
    return [n for n, kind in types.items() if manual and kind == jax.sharding.AxisType.Explicit]


def _axis_types() -> dict[str, Any]:
    """The kind of each axis of the mesh that is around."""
    mesh = jax.sharding.get_abstract_mesh()
    return {} if mesh.empty else dict(zip(mesh.axis_names, mesh.axis_types, strict=True))


def array_type(shape: tuple[int, ...], dtype: Any, sharding: Any = None) -> Any:
    """The type of arrays of this shape, dtype and explicit sharding."""
    return jax.core.ShapedArray(shape, dtype, sharding=sharding)


def without_axis(aval: Any, axis: int) -> Any:
    """The type of arrays with one axis less."""
    shape, axes = list(aval.shape), list(aval.sharding.spec)
    del shape[axis], axes[axis : axis + 1]
    sharding = jax.sharding.NamedSharding(aval.sharding.mesh, jax.sharding.PartitionSpec(*axes))
    return aval.update(shape=tuple(shape), sharding=sharding)


def scalar_type(dtype: Any, like: Any) -> Any:
    """The type of a scalar that is on the devices of a value and varies over them as that does."""
    aval = aval_of(like)
    sharding = jax.sharding.NamedSharding(aval.sharding.mesh, jax.sharding.PartitionSpec())
    return aval.update(shape=(), dtype=np.dtype(dtype), weak_type=False, sharding=sharding)


def explicit_sharding(aval: Any, lead: int = 0) -> Any:
    """How an array is sharded, as far as its type says so and without its leading axes; None if it does not."""
    sharding = getattr(aval, "sharding", None)
    if sharding is None or sharding.mesh.empty:
        return None
    types = set(sharding.mesh.axis_types)
    if jax.sharding.AxisType.Explicit not in types or jax.sharding.AxisType.Manual in types:
        return None
    return jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec(*sharding.spec[lead:]))


def with_leading_axes(sharding: Any, count: int) -> Any:
    """The same sharding for arrays with that many more axes in front."""
    if sharding is None:
        return None
    return jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec(*[None] * count, *sharding.spec))


def explicit_axes(aval: Any) -> tuple[Any, ...]:
    """By axis of an array the mesh axes over which its type says that it is sharded; nothing if there are none."""
    sharding = getattr(aval, "sharding", None)
    spec = () if sharding is None else tuple(sharding.spec)
    return spec if any(axis is not None for axis in spec) else ()


def abstract_sharding(mesh: Any, axes: list[Any]) -> Any:
    """The sharding of an array's type, by axis of the array; None if no axis is sharded."""
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
    """How an axis is sharded over these mesh axes, as far as types tell."""
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    told = tuple(n for n in names if types[n] == jax.sharding.AxisType.Explicit)
    return AxisSharding(mesh, told[0] if len(told) == 1 else told) if told else None


def vmap_names(axis_data: Any) -> tuple[Any, Any]:
    """`axis_name` and `spmd_axis_name` of the vmap that calls a batching rule; None for what was not given."""
    spmd = axis_data.spmd_name
    if isinstance(spmd, tuple) and len(spmd) == 1:  # JAX makes a tuple of every name
        (spmd,) = spmd
    return None if axis_data.name is _core.no_axis_name else axis_data.name, spmd


def axis_shardings(x: Any) -> list[AxisSharding | None]:
    """How each axis of an array is sharded, as far as its type tells; an empty list if it tells nothing."""
    if not isinstance(x, jax.Array | jax.core.ShapedArray):
        return []
    spec = explicit_axes(aval_of(x))
    if not spec:
        return []
    # Outside of jit a sharding takes devices, which only arrays know.
    sharding: Any = (aval_of(x) if isinstance(x, Tracer) else x).sharding
    return [None if names is None else AxisSharding(sharding.mesh, names) for names in spec]


def shard_axes(x: Any, shardings: dict[int, AxisSharding]) -> Any:
    """`x` with these of its axes sharded so, and the others as they are."""
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
            return jax.device_put(x, sharding)  # 0.7 reshards only what is on the devices already
    elif is_evaluating() and not isinstance(x, Tracer):
        return x  # types do not know the devices; JAX moves what is not committed to any
    return jax.sharding.reshard(x, sharding)


def sharded_like(x: Any, other: Any) -> Any:
    """`x`, of the same shape as another array, with its axes explicitly sharded as those."""
    found = {axis: sharding for axis, sharding in enumerate(axis_shardings(other)) if sharding is not None}
    return shard_axes(x, found) if found else x


def gathered(x: Any, axis: int) -> Any:
    """`x`, not sharded along an axis: JAX does not pick a single index of one that is."""
    shardings = axis_shardings(x)
    sharding = shardings[axis] if shardings else None
    return x if sharding is None else shard_axes(x, {axis: AxisSharding(sharding.mesh, None)})


def on_mesh_of(args: Any, tree: Any) -> Any:
    """`tree`, whose arrays know the mesh that the types of some arguments tell of.

    A scalar made inside jit knows no mesh, and then JAX cannot batch a loop or a branch that takes it over an axis that
    is explicitly sharded.
    """
    meshes = (getattr(getattr(aval_of(x), "sharding", None), "mesh", None) for x in args)
    explicit = (m for m in meshes if m is not None and jax.sharding.AxisType.Explicit in m.axis_types)
    mesh = next(explicit, None)
    if mesh is None:
        return tree
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    staged = isinstance(current_trace(), StagingTrace)

    def on_mesh(x: Any) -> Any:
        knows = not (staged or isinstance(x, Tracer)) or not aval_of(x).sharding.mesh.empty
        return x if knows else jax.sharding.reshard(x, sharding)

    return jax.tree.map(on_mesh, tree)


def zeros_along(x: Any, axis: int) -> Any:
    """As many zeros as `x` has along an axis, sharded as that is."""
    zeros = np.zeros(x.shape[axis], np.int32)
    shardings = axis_shardings(x)
    sharding = shardings[axis] if shardings else None
    return jnp.asarray(zeros) if sharding is None else shard_axes(jnp.asarray(zeros), {0: sharding})


def beside(others: Any, tree: Any) -> Any:
    """`tree`, with its arrays moved such that an operation, or a program, can take them together with others.

    What is not committed to devices JAX moves by itself. If none of the others is, they go wherever JAX likes; to be
    committed would tie them, and what comes of them, to a place.
    """
    leaves = jax.tree.leaves(tree)
    if not any(_is_committed(x) for x in leaves):
        return tree
    place = next((x.sharding for x in others if _is_committed(x)), None)
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


def aval_of(x: Any) -> Any:
    """The type of a value; types are their own."""
    return x if isinstance(x, jax.core.ShapedArray) else jax.typeof(x)


def is_prng_key(dtype: Any) -> bool:
    """Whether this is the dtype of typed PRNG keys."""
    return jax.numpy.issubdtype(dtype, jax.dtypes.prng_key)


def map_words(fun: Any, keys: Any) -> Any:
    """What `fun` makes of the words of PRNG keys, as keys."""
    return jax.random.wrap_key_data(fun(jax.random.key_data(keys)), impl=keys.dtype._impl.name)


def zeros_of(aval: Any) -> Any:
    """Zeros of exactly this type: sharding and varying axes included, which `jnp.zeros` would lose.

    Of PRNG keys those whose words are zero; what JAX takes for their zeros are no keys.
    """
    if is_prng_key(aval.dtype):
        words = jax.numpy.zeros((*aval.shape, *aval.dtype._impl.key_shape), np.uint32)
        return with_varying_axes_of(jax.random.wrap_key_data(words, impl=aval.dtype._impl.name), aval)
    sharding = explicit_sharding(aval)
    if sharding is not None and jax.sharding.get_abstract_mesh().empty:
        # An array knows its mesh, but making a new one takes a mesh around. Outside of jit it takes the devices too,
        # which the type does not know; there an array on one device will do.
        if is_evaluating():
            return ad.zeros_like_aval(jax.core.ShapedArray(aval.shape, aval.dtype))
        with use_abstract_mesh(sharding.mesh):
            return ad.zeros_like_aval(aval)
    return ad.zeros_like_aval(aval)


def with_varying_axes_of(x: Any, aval: Any) -> Any:
    """`x`, made to vary over the mesh axes over which `aval` varies."""
    return vary_over(x, varying_axes(aval))


def vary_over(x: Any, axes: frozenset[Any]) -> Any:
    """`x`, made to vary over these mesh axes too."""
    missing = tuple(axes - varying_axes(jax.typeof(x)))
    if not missing:
        return x
    if hasattr(lax, "pcast"):  # since 0.8
        return lax.pcast(x, missing, to="varying")
    return lax.pvary(x, missing)  # pyright: ignore[reportAttributeAccessIssue]
