"""Situations in which values are logged: a small program for each, and what it logs, in plain Python."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from ways import Logs, Way, by_lane

XS = jnp.array([1.0, 2.0, 3.0, 4.0])
STARTS = jnp.array([0.5, 1.0, 3.0])  # three seeds
HALVED = jnp.array([9.0, 0.5, 3.0])  # loops of four, no and two iterations
BOUNDS = jnp.array([1.5, 9.0, 3.5])  # three, no and one of XS are above
SHARDS = jnp.array([0.0, 1.0, 2.0, 3.0])  # two for each of two devices
SLOW = np.arange(50.0, dtype=np.float32)
ROOM = 10  # for events of a loop whose length is not known


# --- the programs, with a call that logs and returns its values; and what they log, in plain Python --


def scan(log):
    def program(x):
        def step(x, y):
            return log({"x": x / 2 + y})["x"], None

        return lax.scan(step, x, XS)[0]

    return program


def of_scan(x: float) -> Iterator[dict[str, float]]:
    for y in XS.tolist():
        x = x / 2 + y
        yield {"x": x}


def grad_in_scan(log):
    def program(w, lane=0):
        def loss_fn(w, x):
            return log({"loss": jnp.sin(w - x) ** 2, "w": w}, lane)["loss"]

        return lax.scan(lambda w, x: (w - 0.25 * jax.grad(loss_fn)(w, x), None), w, XS)[0]

    return program


def of_grad(w: float) -> Iterator[dict[str, float]]:
    for x in XS.tolist():
        yield {"loss": np.sin(w - x) ** 2, "w": w}
        w -= 0.25 * 2 * np.sin(w - x) * np.cos(w - x)


def grad_of_scan(log, checkpoint=lambda layer: layer):
    def program(x):
        @checkpoint
        def layer(x, w):
            return log({"x": jnp.sin(x * w)})["x"], None

        return jax.grad(lambda x: lax.scan(layer, x, XS)[0] ** 2)(x)

    return program


def remat(log):
    return grad_of_scan(log, jax.checkpoint)


def of_layers(x: float) -> Iterator[dict[str, float]]:
    for w in XS.tolist():
        x = np.sin(x * w)
        yield {"x": x}


def while_loop(log):
    def program(x, lane=0):
        def halve(x):
            return log({"x": x / 2}, lane)["x"]

        return lax.while_loop(lambda x: x > 1, halve, x)

    return program


def of_while(x: float) -> Iterator[dict[str, float]]:
    while x > 1:
        x /= 2
        yield {"x": x}


def cond(log):
    def program(bound, lane=0):
        def large(x):
            return log({"x": jnp.sin(x)}, lane)["x"]

        return lax.scan(lambda c, x: (c, lax.cond(x > bound, large, jnp.negative, x)), 0.0, XS)[1]

    return program


def of_cond(bound: float) -> Iterator[dict[str, float]]:
    yield from ({"x": np.sin(x)} for x in XS.tolist() if x > bound)


def on_shards(log):
    def program(x):
        def step(x, y):
            return log({"x": x / 2 + y}, lax.axis_index("d"))["x"], None

        return x + lax.scan(step, x.sum(), XS)[0]

    return program


def sharded(function: Callable[..., Any]) -> Callable[..., Any]:
    """Run a function of a vector on two devices, with a half of it on each."""
    spec = jax.sharding.PartitionSpec("d")
    options = {"mesh": jax.sharding.Mesh(np.array(jax.devices()), ("d",)), "in_specs": spec, "out_specs": spec}
    if hasattr(jax, "shard_map"):
        return jax.shard_map(function, **options)
    from jax.experimental.shard_map import shard_map

    return shard_map(function, **options)


def slow(log):
    def program(x):
        def step(x, i):
            log({"i": i})
            return lax.fori_loop(0, 300, lambda _, x: jnp.tanh(x @ x), x), None

        return lax.scan(step, x, jnp.asarray(SLOW))[0]

    return program


@dataclass(frozen=True)
class Situation:
    name: str
    program: Callable[..., Any]
    arg: Any
    events: Callable[[Any], Iterator[dict[str, float]]]  # of a lane
    lanes: int = 0
    on_devices: bool = False

    def expected(self) -> Logs:
        args = self.arg.reshape(self.lanes or 1, -1).sum(1).tolist()
        return by_lane(((n, event) for n, x in enumerate(args) for event in self.events(x)), self.lanes)

    def with_log(self, way: Way) -> Callable[..., Any]:
        program = self.program(way.log)
        if self.on_devices:
            return way.around(sharded(program))
        if self.lanes:
            return lambda x: way.mapped(program)(x, jnp.arange(self.lanes))
        return way.around(program)


SITUATIONS = [
    Situation("scan", scan, jnp.float32(1.0), of_scan),
    Situation("grad inside scan", grad_in_scan, jnp.float32(0.5), of_grad),
    Situation("grad around scan", grad_of_scan, jnp.float32(0.5), of_layers),
    Situation("remat", remat, jnp.float32(0.5), of_layers),
    Situation("vmap over seeds", grad_in_scan, STARTS, of_grad, lanes=3),
    Situation("while_loop", while_loop, jnp.float32(9.0), of_while),
    Situation("while_loop, vmap", while_loop, HALVED, of_while, lanes=3),
    Situation("cond", cond, jnp.float32(1.5), of_cond),
    Situation("cond, vmap", cond, BOUNDS, of_cond, lanes=3),
    Situation("shard_map", on_shards, SHARDS, of_scan, lanes=2, on_devices=True),
]
