"""A spooled program on eight devices has the collectives of a program written by hand, and values keep their sharding.

The programs are trainings of a stack of layers, as large models are trained: the layers in a scan, each of them
rematerialised, weights sharded over the data axis (FSDP), over a model axis (tensor parallelism), or over both.
"""

import collections
import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from optional import devices

import lox

pytestmark = pytest.mark.slow

LAYERS, BATCH, WIDTH, HIDDEN = 4, 8, 16, 32
RATE = 0.1
COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast")


def collectives(text: str) -> dict[tuple[str, ...], int]:
    """Return how many collectives a compiled program has, by name and shapes of the results.

    XLA puts several into one, and their order there means nothing.
    """
    found = re.findall(rf"= (\S.*?) ({'|'.join(COLLECTIVES)})(?:-start)?\(", text)
    return dict(collections.Counter((name, *sorted(re.findall(r"\w+\[[\d,]*\]", shapes))) for shapes, name in found))


# --- the training ---------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Alone:
    """Everything is on one device."""

    kind: AxisType = AxisType.Auto
    fsdp: str | None = None  # the axis of the mesh over which weights are sharded, and gathered to be used
    tensor: str | None = None  # the axis over which the hidden dimension is sharded

    @property
    def specs(self) -> dict[str, P]:
        """How weights of all layers are sharded."""
        return {"up": P(None, self.fsdp, self.tensor), "down": P(None, self.tensor, self.fsdp)}

    def place(self, x: Any, *spec: Any) -> Any:
        """Say how a value is sharded."""
        return x

    def gathered(self, weights: Any, axis: int, *spec: Any) -> Any:
        """Return the weights of a layer as they are needed: no longer sharded along this axis."""
        return self.place(weights, *spec)

    def dot(self, a: Any, b: Any, *spec: Any) -> Any:
        """Multiply matrices, and say how the product is sharded."""
        return a @ b

    def total(self, x: Any, *axes: str | None) -> Any:
        """Sum up an array that is sharded over these axes of the mesh."""
        return x.sum()

    def arguments(self) -> Any:
        """Return the weights and the batch."""
        random = np.random.default_rng(0)
        normal = lambda *shape: (random.normal(size=shape) / np.sqrt(shape[-2])).astype(np.float32)  # noqa: E731
        weights = {"up": normal(LAYERS, WIDTH, HIDDEN), "down": normal(LAYERS, HIDDEN, WIDTH)}
        return jax.tree.map(jnp.asarray, (weights, (normal(BATCH, WIDTH), normal(BATCH, WIDTH))))

    def run(self, step: Any, recorded: Any) -> Any:
        """Return the function to call; `recorded` is how by hand what is of interest is sharded."""
        return step


class Sharded(Alone):
    """XLA partitions the program: as it finds best (auto), or as types say (explicit)."""

    @property
    def mesh(self) -> Mesh:
        return jax.make_mesh((4, 2), ("data", "model"), axis_types=(self.kind,) * 2, devices=devices(8))

    def sharding(self, *spec: Any) -> NamedSharding:
        return NamedSharding(self.mesh, P(*spec))

    def place(self, x: Any, *spec: Any) -> Any:
        if self.kind is AxisType.Explicit:
            return jax.sharding.reshard(x, P(*spec))
        return lax.with_sharding_constraint(x, self.sharding(*spec))

    def dot(self, a: Any, b: Any, *spec: Any) -> Any:
        if self.kind is AxisType.Explicit:
            return jnp.einsum("ij,jk->ik", a, b, out_sharding=P(*spec))
        return self.place(a @ b, *spec)

    def arguments(self) -> Any:
        weights, batch = super().arguments()
        weights = {name: jax.device_put(w, self.sharding(*self.specs[name])) for name, w in weights.items()}
        return weights, jax.device_put(batch, self.sharding("data", None))


class Manual(Sharded):
    """The program runs in a shard_map, and has its collectives written out."""

    def place(self, x: Any, *spec: Any) -> Any:
        return x

    def gathered(self, weights: Any, axis: int, *spec: Any) -> Any:
        return weights if self.fsdp is None else lax.all_gather(weights, self.fsdp, axis=axis, tiled=True)

    def dot(self, a: Any, b: Any, *spec: Any) -> Any:
        out = a @ b
        return out if self.tensor is None or self.tensor in spec else lax.psum(out, self.tensor)

    def total(self, x: Any, *axes: str | None) -> Any:
        return lax.psum(x.sum(), tuple(axis for axis in axes if axis))

    def run(self, step: Any, recorded: Any) -> Any:
        specs = (self.specs, P("data", None))
        out = (self.specs, P())
        return jax.shard_map(step, mesh=self.mesh, in_specs=specs, out_specs=(out, recorded) if recorded else out)


# What a training does with the values of interest: `lox.log`, or give them back to be an output.
def log(values: Any, **steps: Any) -> Any:
    lox.log(values, **steps)
    return {}


def give_back(values: Any, **steps: Any) -> Any:
    return {**values, **steps}


def arrays(layout: Alone, h: Any, up: Any) -> dict[str, Any]:
    """Of interest in a layer are arrays that are sharded anyway."""
    return {"h": h, "w": up}


def norms(layout: Alone, h: Any, up: Any) -> dict[str, Any]:
    """Of interest in a layer are sums over devices."""
    return {"h": layout.total(h * h, "data"), "w": layout.total(up * up, layout.fsdp, layout.tensor)}


def training(layout: Alone, interest: Any, record: Any) -> Callable[..., Any]:
    """Return a step of the training; `record` gets what is of interest in a layer, and the new weights."""
    by_hand = record is give_back

    def layer(h: Any, inputs: Any) -> Any:
        up, down, i, zero = inputs
        # On an auto mesh XLA would choose, and may gather first: then what is logged is not sharded, as by hand.
        up, down = layout.place(up, *layout.specs["up"][1:]), layout.place(down, *layout.specs["down"][1:])
        recorded = record(interest(layout, h, up), step=i)
        hidden = jnp.tanh(layout.dot(h, layout.gathered(up, 0, None, layout.tensor), "data", layout.tensor))
        out = h + layout.dot(hidden, layout.gathered(down, 1, layout.tensor, None), "data", None)
        # By hand, the gradient that arrives at a value is the gradient of what is added to it.
        out = out + zero if by_hand else lox.log_grad("dh", out, step=i)
        return out, recorded

    def loss_of(weights: Any, zeros: Any, batch: Any) -> Any:
        x, y = batch
        inputs = (weights["up"], weights["down"], jnp.arange(LAYERS), zeros)
        h, recorded = lax.scan(jax.checkpoint(layer), x, inputs)
        return layout.total((h - y) ** 2, "data") / (BATCH * WIDTH), recorded

    def step(weights: Any, batch: Any) -> Any:
        zeros = None
        if by_hand:
            zeros = layout.place(jnp.zeros_like(batch[0], shape=(LAYERS, *batch[0].shape)), None, "data", None)
        differentiate = jax.value_and_grad(loss_of, argnums=(0, 1) if by_hand else 0, has_aux=True)
        (loss, recorded), grads = differentiate(weights, zeros, batch)
        if by_hand:
            grads, cotangents = grads
            recorded = {**recorded, "dh": cotangents[::-1]}
        weights = {name: w - RATE * grads[name] for name, w in weights.items()}
        weights = {name: layout.place(w, *layout.specs[name]) for name, w in weights.items()}
        recorded = {**recorded, **record({"loss": loss, "new": weights})}
        return ((weights, loss), recorded) if by_hand else (weights, loss)

    return layout.run(step, recorded_specs(layout, interest) if by_hand else None)


def recorded_specs(layout: Alone, interest: Any) -> dict[str, Any]:
    """How what is recorded is sharded: the axis of events is not."""
    inside = {"h": P(None, "data", None), "w": layout.specs["up"]} if interest is arrays else {"h": P(), "w": P()}
    return {**inside, "step": P(), "dh": P(None, "data", None), "loss": P(), "new": layout.specs}


LAYOUTS = [
    cls(kind, *axes)
    for cls in (Sharded, Manual)
    for kind in (AxisType.Auto, AxisType.Explicit)
    for axes in (("data", None), (None, "model"), ("data", "model"))
]


def name_of(layout: Alone) -> str:
    weights = "+".join(name for name, axis in (("fsdp", layout.fsdp), ("tensor", layout.tensor)) if axis)
    return f"{type(layout).__name__.lower()}-{layout.kind.name.lower()}-{weights}"


each_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=name_of)
each_interest = pytest.mark.parametrize("interest", [arrays, norms], ids=lambda f: f.__name__)
OPTIONS: dict[str, tuple[dict[str, Any], Callable[[Any], Any]]] = {  # and what they make of the events of a layer
    "stacked": ({}, lambda x: x),
    "mean": ({"reduce": "mean"}, lambda x: x.mean(0)),
    "interval": ({"interval": 2}, lambda x: x[::2]),
}


def use(mesh: Mesh) -> Any:
    return jax.set_mesh(mesh) if hasattr(jax, "set_mesh") else jax.sharding.use_mesh(mesh)


@functools.cache
def on_one_device(interest: Any) -> Any:
    """Return the results on one device, and by hand what is of interest."""
    alone = Alone()
    return jax.device_get(jax.jit(training(alone, interest, give_back))(*alone.arguments()))


def bitwise(actual: Any, expected: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


def close(actual: Any, expected: Any) -> None:
    jax.tree.map(lambda a, e: np.testing.assert_allclose(a, e, rtol=2e-5, atol=1e-6), actual, expected)


def in_shards(x: Any, layout: Sharded, spec: P, lead: int) -> Any:
    """Return the shards of a value along a new axis, of devices, in front of which there are `lead` others."""
    axes = 0
    for name in layout.mesh.axis_names:
        if name in spec:
            shards = np.split(x, layout.mesh.shape[name], lead + axes + tuple(spec).index(name))
            x, axes = np.stack(shards, lead + axes), axes + 1
    return x.reshape(*x.shape[:lead], -1, *x.shape[lead + axes :]) if axes else x


def check(layout: Sharded, logged: Any, expected: Any, spec: P, lead: int) -> None:
    """Assert that what was logged has a value and a sharding, with so many axes of events, which are not sharded."""
    if isinstance(layout, Manual):
        expected = in_shards(expected, layout, spec, lead)
        names = tuple(name for name in layout.mesh.axis_names if name in spec)
        spec = P(names) if names else P()
    close(logged, expected)
    wanted = layout.sharding(*[None] * lead, *spec)
    assert logged.sharding.is_equivalent_to(wanted, logged.ndim), (logged.sharding, wanted)


def check_logs(layout: Sharded, logs: Any, interest: Any, option: str) -> None:
    """Assert that logs have the values of one device, and the sharding of what was logged."""
    _, recorded = on_one_device(interest)
    specs = recorded_specs(layout, interest)
    assert list(logs) == ["h", "w", "dh", "loss", "new"]
    for key in ("h", "w", "dh"):
        stacked, events = option in ("stacked", "interval"), P(*specs[key][1:])
        check(layout, logs[key], OPTIONS[option][1](recorded[key]), events, lead=int(stacked))
    for key in ("loss", "new"):
        jax.tree.map(lambda x, e, spec: check(layout, x, e, spec, lead=0), logs[key], recorded[key], specs[key])


def compiled(fun: Any, arguments: Any, **options: Any) -> Any:
    return jax.jit(fun, **options).lower(*arguments).compile()


@functools.cache
def without_logs(layout: Sharded) -> tuple[Any, Any]:
    """Return the collectives and the results of a training that logs nothing. The mesh must be in use."""
    program = compiled(lox.nolog(training(layout, arrays, log)), layout.arguments())
    return collectives(program.as_text()), jax.device_get(program(*layout.arguments()))


@pytest.mark.sample(1)
@each_layout
@each_interest
def test_the_collectives_of_a_program_written_by_hand(layout: Sharded, interest: Any) -> None:
    with use(layout.mesh):
        arguments = layout.arguments()
        by_hand = compiled(training(layout, interest, give_back), arguments)
        close(by_hand(*arguments)[0], on_one_device(interest)[0])
        wanted = collectives(by_hand.as_text())
        plain, out = without_logs(layout)
        assert (wanted == plain) is (interest is arrays)
        for option, (options, _) in OPTIONS.items():
            spooled = compiled(lox.spool(training(layout, interest, log), **options), arguments)
            assert collectives(spooled.as_text()) == wanted, option
            result, logs = spooled(*arguments)
            bitwise(result, out)
            check_logs(layout, logs, interest, option)


@pytest.mark.sample(1)
@each_layout
def test_a_jitted_program(layout: Sharded) -> None:
    with use(layout.mesh):
        arguments = layout.arguments()
        spooled = lox.spool(jax.jit(training(layout, arrays, log)))
        plain, out = without_logs(layout)
        assert collectives(compiled(spooled, arguments).as_text()) == plain
        for _ in range(2):
            result, logs = spooled(*arguments)
            bitwise(result, out)
            check_logs(layout, logs, arrays, "stacked")


@pytest.mark.sample(2)
@pytest.mark.parametrize("layout", [x for x in LAYOUTS if x.fsdp and x.tensor], ids=name_of)
def test_donated_weights(layout: Sharded) -> None:
    with use(layout.mesh):
        spooled = compiled(lox.spool(training(layout, arrays, log)), layout.arguments(), donate_argnums=0)
        plain, out = without_logs(layout)
        assert collectives(spooled.as_text()) == plain
        assert len(re.findall(r"may-alias|must-alias", spooled.as_text())) == 2  # both arrays of weights
        weights, batch = layout.arguments()
        result, logs = spooled(weights, batch)
        assert all(w.is_deleted() for w in weights.values())
        bitwise(result, out)
        check_logs(layout, logs, arrays, "stacked")


@pytest.mark.sample(1)
@pytest.mark.parametrize("layout", [x for x in LAYOUTS if x.kind is AxisType.Auto], ids=name_of)
def test_a_mesh_that_only_the_arguments_know(layout: Sharded) -> None:
    arguments = layout.arguments()
    in_shardings = jax.tree.map(lambda x: x.sharding, arguments)
    step = lox.spool(training(layout, arrays, log))
    spooled = compiled(step, jax.device_get(arguments), in_shardings=in_shardings)
    with use(layout.mesh):
        plain, out = without_logs(layout)
    assert collectives(spooled.as_text()) == plain
    result, logs = spooled(*arguments)
    bitwise(result, out)
    check_logs(layout, logs, arrays, "stacked")


# --- values of which lox makes room in the carry of a loop ---


each_kind = pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])


@pytest.mark.sample(1)
@each_kind
def test_sharded_values_in_a_loop_of_unknown_length(kind: AxisType) -> None:
    layout = Sharded(kind)

    def f(x: Any, n: Any) -> Any:
        def body(carry: Any) -> Any:
            i, x = carry
            lox.log({"x": x}, step=i)
            return i + 1, layout.place(x * 2, "data", "model")

        return lax.while_loop(lambda carry: carry[0] < n, body, (jnp.int32(0), x))[1]

    with use(layout.mesh):
        x = jax.device_put(jnp.ones((8, 4)), layout.sharding("data", "model"))
        assert not collectives(compiled(lox.nolog(f), (x, 3)).as_text())
        for options in ({"capacity": 5}, {"capacity": 5, "interval": 2}, {"reduce": "max"}):
            spooled = compiled(lox.spool(f, **options), (x, 3))
            assert not collectives(spooled.as_text())
            (out, logs), lead = spooled(x, 3), int("capacity" in options)
            bitwise(out, 8 * np.ones((8, 4)))
            assert logs["x"].sharding.is_equivalent_to(layout.sharding(*[None] * lead, "data", "model"), 2 + lead)
            values = {0: 4, 1: [1, 2, 4][:: options.get("interval", 1)]}[lead]
            bitwise(jax.device_get(logs.compact()["x"])[..., 0, 0], values)


@pytest.mark.parametrize("constrained", [False, True])
def test_on_an_auto_mesh_a_carry_is_sharded_as_by_hand(constrained: bool) -> None:
    """XLA decides how a slice of weights is sharded that is gathered too, unless a constraint says it."""
    layout = Sharded(AxisType.Auto, fsdp="data")

    def run(add: Any) -> Any:
        def layer(carry: Any, w: Any) -> Any:
            x, total = carry
            total = add(total, layout.place(w, "data", None) if constrained else w)
            return (layout.dot(x, layout.gathered(w, 0, None, None), "data", None), total), None

        return lambda weights, x: lax.scan(layer, (x, jnp.zeros((WIDTH, WIDTH))), weights)[0]

    def log_only(total: Any, w: Any) -> Any:
        lox.log({"w": w})
        return total

    weights = jax.device_put(jnp.ones((LAYERS, WIDTH, WIDTH)), layout.sharding(None, "data", None))
    x = jax.device_put(jnp.ones((BATCH, WIDTH)), layout.sharding("data", None))
    _, total = jax.jit(run(jnp.add))(weights, x)
    _, logs = jax.jit(lox.spool(run(log_only), reduce="sum"))(weights, x)
    bitwise(logs["w"], total)
    assert logs["w"].sharding.is_equivalent_to(total.sharding, 2)
    if constrained:
        assert logs["w"].sharding.is_equivalent_to(layout.sharding("data", None), 2)
