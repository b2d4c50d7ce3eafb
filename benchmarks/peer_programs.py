"""The programs of `situations`, written for those that have no call like `lox.log`, or need more than it."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import ways
from jax import lax
from situations import ROOM, XS, cond, grad_in_scan, grad_of_scan, on_shards, remat, scan, sharded, while_loop
from ways import Logs, Way

Read = Callable[[Any], Logs]
Own = tuple[Callable[..., Any], Read, str]  # the program, how to read its result, and what is done by hand
OWN: dict[tuple[type[Way], Callable[..., Any]], Callable[[Any], Own]] = {}


def own(kind: type[Way], *programs: Callable[..., Any]) -> Callable[..., Any]:
    """Register how a way does some of the programs."""

    def register(build: Callable[..., Own]) -> Callable[..., Own]:
        for program in programs:
            further = (program,) if len(programs) > 1 else ()  # which of them it shall be
            OWN[kind, program] = lambda way, further=further: build(way, *further)
        return build

    return register


# What is done by hand, or cannot be done.
HAND = "values are handed through by hand, in a metrics.Collection"
AUX = "has_aux and outputs of the loop by hand"
SPECS = "collected inside of shard_map, with out_specs by hand"
BUFFER = "sow with a reduce_fn that fills a buffer, which is made before"
LAST = "mode='clobber', which keeps the last one; 'append' is refused there"
MERGED = "merged in the carry, which leaves one value for all events"
NAN = "NaN sown in the other branch, and left out afterwards"


def silent(metrics: dict[str, Any], lane: Any = 0) -> dict[str, Any]:
    """Log nothing."""
    return metrics


def unchanged(function: Any) -> Any:
    return function


def mapped(way: Way, program: Callable[..., Any]) -> Callable[..., Any]:
    return way.mapped(program) if way.lanes else way.around(program)


@own(ways.Spool, while_loop)
def _(way: ways.Spool) -> Own:
    way.options = {"capacity": ROOM}
    return mapped(way, while_loop(way.log)), way.logs, ""


# Oryx: in a `while_loop` the last value only, and every branch must sow the same names.


@own(ways.Oryx, while_loop)
def _(way: ways.Oryx) -> Own:
    from oryx.core import sow

    def log(metrics, lane=0):
        return {"x": sow(metrics["x"], tag=way.tag, name="x", mode="clobber")}

    return mapped(way, while_loop(log)), way.logs, LAST


@own(ways.Oryx, cond)
def _(way: ways.Oryx) -> Own:
    def program(bound):
        def large(x):
            return way.log({"x": jnp.sin(x)})["x"]

        def small(x):
            way.log({"x": jnp.nan})
            return -x

        return lax.scan(lambda c, x: (c, lax.cond(x > bound, large, small, x)), 0.0, XS)[1]

    def read(result):
        return {"x": [x[~np.isnan(x)] for x in ways.rows(result[1], way.lanes)["x"]]}

    return mapped(way, program), read, NAN


@own(ways.Oryx, on_shards)
def _(way: ways.Oryx) -> Own:
    return sharded(way.around(on_shards(way.log))), way.logs, SPECS


# Flax: `sow` and its own transformations. Without a known length, into a buffer that is there from the beginning.


def module(call: Callable[..., Any]) -> Any:
    from flax import linen as nn

    class Logged(nn.Module):
        @nn.compact
        def __call__(self, *args):
            return call(self, *args)

    return Logged


def apply(kind: Any, *args: Any, **variables: Any) -> Any:
    out, state = kind().apply(variables, *args, mutable=["metrics"])
    return out, state["metrics"]


def put(buffer: Any, value: Any) -> Any:
    values, count = buffer
    return values.at[count].set(value), count + 1


def buffer() -> dict[str, Any]:
    return {"x": (jnp.zeros(ROOM), jnp.array(0))}


def from_buffers(lanes: int) -> Read:
    def read(result):
        values, counts = result[1]["x"]
        values, counts = np.reshape(values, (lanes or 1, -1)), np.reshape(counts, -1)
        return {"x": [x[:n] for x, n in zip(values, counts, strict=True)]}

    return read


@own(ways.Linen, scan, on_shards)
def _(way: ways.Linen, which: Any) -> Own:
    from flax import linen as nn

    def step(module, x, y):
        x = x / 2 + y
        module.sow("metrics", "x", x)
        return x, None

    def program(x):
        (last, _), metrics = apply(nn.scan(module(step), variable_axes={"metrics": 0}), x.sum(), XS)
        return x + last, metrics

    if which is on_shards:
        return sharded(program), way.logs, SPECS
    return program, way.logs, ""


@own(ways.Linen, grad_in_scan)
def _(way: ways.Linen) -> Own:
    from flax import linen as nn

    def step(module, w, x):
        def loss_fn(module, w):
            loss = jnp.sin(w - x) ** 2
            module.sow("metrics", "loss", loss)
            module.sow("metrics", "w", w)
            return loss

        _, (grad,) = nn.value_and_grad(loss_fn, module, w)
        return w - 0.25 * grad, None

    def program(w):
        return apply(nn.scan(module(step), variable_axes={"metrics": 0}), w, XS)

    return mapped(way, program), way.logs, ""


@own(ways.Linen, grad_of_scan, remat)
def _(way: ways.Linen, which: Any) -> Own:
    from flax import linen as nn

    checkpoint = nn.remat if which is remat else unchanged

    def layer(module, x, w):
        x = jnp.sin(x * w)
        module.sow("metrics", "x", x)
        return x, None

    def call(logged, x):
        def total(logged, x):
            layers = nn.scan(checkpoint(module(layer)), variable_axes={"metrics": 0})
            return layers(name="layers")(x, XS)[0] ** 2

        return nn.value_and_grad(total, logged, x)

    def program(x):
        grad, metrics = apply(module(call), x)
        return grad, metrics["layers"]

    return program, way.logs, ""


@own(ways.Linen, while_loop)
def _(way: ways.Linen) -> Own:
    from flax import linen as nn

    def halve(module, x):
        x = x / 2
        module.sow("metrics", "x", x, reduce_fn=put)
        return x

    def call(module, x):
        return nn.while_loop(lambda module, x: x > 1, halve, module, x, carry_variables="metrics")

    return mapped(way, lambda x: apply(module(call), x, metrics=buffer())), from_buffers(way.lanes), BUFFER


@own(ways.Linen, cond)
def _(way: ways.Linen) -> Own:
    from flax import linen as nn

    def large(module, x):
        x = jnp.sin(x)
        module.sow("metrics", "x", x, reduce_fn=put)
        return x

    def program(bound):
        def step(module, c, x):
            return c, nn.cond(x > bound, large, lambda module, x: -x, module, x)

        return apply(nn.scan(module(step), variable_carry="metrics"), 0.0, XS, metrics=buffer())

    return mapped(way, program), from_buffers(way.lanes), BUFFER


# clu: values are handed through by hand, in a `Collection`.


def from_collections(lanes: int) -> Read:
    def read(result):
        metrics = jax.tree.map(lambda x: np.reshape(x, (lanes or 1, -1)), result[1])
        keys = [key for key in metrics.__annotations__ if not key.startswith("_")]
        columns = {key: getattr(metrics, key) for key in keys}
        return {
            key: [x[n > 0] for x, n in zip(column.total, column.count, strict=True)] for key, column in columns.items()
        }

    return read


@own(ways.Clu, scan, on_shards)
def _(way: ways.Clu, which: Any) -> Own:
    metrics = way.collection("x")

    def program(x):
        def step(x, y):
            x = x / 2 + y
            return x, metrics.single_from_model_output(x=x)

        last, logs = lax.scan(step, x.sum(), XS)
        return x + last, logs

    return sharded(program) if which is on_shards else program, from_collections(way.lanes), HAND


@own(ways.Clu, grad_in_scan)
def _(way: ways.Clu) -> Own:
    metrics = way.collection("loss", "w")

    def program(w):
        def loss_fn(w, x):
            loss = jnp.sin(w - x) ** 2
            return loss, metrics.single_from_model_output(loss=loss, w=w)

        def step(w, x):
            grad, logs = jax.grad(loss_fn, has_aux=True)(w, x)
            return w - 0.25 * grad, logs

        return lax.scan(step, w, XS)

    return mapped(way, program), from_collections(way.lanes), HAND


@own(ways.Clu, grad_of_scan, remat)
def _(way: ways.Clu, which: Any) -> Own:
    metrics = way.collection("x")
    checkpoint = jax.checkpoint if which is remat else unchanged

    def program(x):
        @checkpoint
        def layer(x, w):
            x = jnp.sin(x * w)
            return x, metrics.single_from_model_output(x=x)

        def total(x):
            x, logs = lax.scan(layer, x, XS)
            return x**2, logs

        return jax.grad(total, has_aux=True)(x)

    return mapped(way, program), from_collections(way.lanes), HAND


@own(ways.Clu, while_loop)
def _(way: ways.Clu) -> Own:
    metrics = way.collection("x")

    def program(x):
        def halve(carry):
            x, logs = carry
            return x / 2, logs.merge(metrics.single_from_model_output(x=x / 2))

        return lax.while_loop(lambda carry: carry[0] > 1, halve, (x, metrics.empty()))

    return mapped(way, program), from_collections(way.lanes), MERGED


@own(ways.Clu, cond)
def _(way: ways.Clu) -> Own:
    metrics = way.collection("x")

    def program(bound):
        def large(x):
            x = jnp.sin(x)
            return x, metrics.single_from_model_output(x=x)

        def small(x):
            return -x, metrics.empty()

        return lax.scan(lambda c, x: (c, lax.cond(x > bound, large, small, x)), 0.0, XS)[1]

    return mapped(way, program), from_collections(way.lanes), HAND


# jax-tap: it sees carries and outputs of loops, and values of a primitive by its name, here `sin`.


def from_events(way: Way, *keys: str) -> Read:
    """Read events with a lane axis, or with the number of the lane as the first value."""

    def read(result):
        found = []
        for event in way.received:
            values = [np.asarray(x) for x in jax.tree.leaves(event.value)]
            if values[0].ndim:
                found += [(n, dict(zip(keys, row, strict=True))) for n, row in enumerate(zip(*values, strict=True))]
            else:
                lane, *rest = values if len(values) > len(keys) else (0, *values)
                found.append((int(lane), dict(zip(keys, rest, strict=True))))
        return ways.by_lane(iter(found), way.lanes)

    return read


@own(ways.JaxTap, scan)
def _(way: ways.JaxTap) -> Own:
    import jaxtap

    return jaxtap.verbose(scan(silent), on_step=way.received.append), from_events(way, "x"), ""


@own(ways.JaxTap, on_shards)
def _(way: ways.JaxTap) -> Own:
    import jaxtap

    def select(leaves):
        return lax.axis_index("d"), leaves[0]

    tapped = jaxtap.verbose(on_shards(silent), on_step=way.received.append, select=select)
    return sharded(tapped), from_events(way, "x"), ""


@own(ways.JaxTap, grad_in_scan)
def _(way: ways.JaxTap) -> Own:
    import jaxtap

    def program(w):
        def loss_fn(w, x):
            loss = jnp.sin(w - x) ** 2
            return loss, (loss, w)

        def step(w, x):
            grad, logs = jax.grad(loss_fn, has_aux=True)(w, x)
            return w - 0.25 * grad, logs

        return lax.scan(step, w, XS)

    tapped = jaxtap.verbose(mapped(way, program), on_ys=way.received.append)
    return tapped, from_events(way, "loss", "w"), AUX


@own(ways.JaxTap, grad_of_scan, remat)
def _(way: ways.JaxTap, which: Any) -> Own:
    import jaxtap

    checkpoint = jax.checkpoint if which is remat else unchanged

    def program(x):
        @checkpoint
        def layer(x, w):
            return jnp.sin(x * w), None

        def last(x):
            return lax.scan(layer, x, XS)[0]

        return jax.grad(lambda x: jaxtap.verbose(last, on_step=way.received.append)(x) ** 2)(x)

    return program, from_events(way, "x"), ""


@own(ways.JaxTap, while_loop)
def _(way: ways.JaxTap) -> Own:
    import jaxtap

    def program(x, lane=0):
        halve = while_loop(silent)
        return jaxtap.verbose(halve, on_step=way.received.append, select=lambda leaves: (lane, leaves[0]))(x)

    numbered = lambda xs: jax.vmap(program)(xs, jnp.arange(way.lanes))  # noqa: E731
    return numbered if way.lanes else program, from_events(way, "x"), ""


@own(ways.JaxTap, cond)
def _(way: ways.JaxTap) -> Own:
    import jaxtap

    program = mapped(way, cond(silent))
    tapped = jaxtap.verbose(program, on_step=way.received.append, ops=(), taps=[jaxtap.on("sin")])
    return tapped, from_events(way, "x"), ""
