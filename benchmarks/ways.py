"""Ways of getting values out of a JAX program, each used as its documentation recommends: lox, its peers, JAX itself.

A way has a call like `lox.log` for inside of the program (`log`), something that is put around the program (`around`),
and a place to find the values afterwards (`logs`). Those without such a call have a training of their own. Packages
are imported where they are used: what is not installed is missing from the tables by name, and nothing else.
"""

import contextlib
import functools
import importlib
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import training

Logs = dict[str, list[np.ndarray]]  # of each key and lane, the values in the order in which they came


class Way:
    """One way, for programs with that many lanes: of a `vmap`, or the devices of a `shard_map`."""

    name: str
    package = "jax"  # what has to be installed
    modules: tuple[str, ...] = ()  # what has to be importable
    streams = False  # while the program runs, and not beside its result

    def __init__(self, lanes: int = 0):
        self.lanes = lanes
        self.received: list[Any] = []
        for module in self.modules:
            importlib.import_module(module)

    def log(self, metrics: dict[str, Any], lane: Any = 0) -> dict[str, Any]:
        """Log inside of the program, and return the values that it shall go on with."""
        raise NotImplementedError

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return function

    def mapped(self, function: Callable[..., Any], in_axes: Any = 0) -> Callable[..., Any]:
        return jax.vmap(self.around(function), in_axes)

    def training(self) -> Callable[..., Any]:
        """Return the training of `training.by_hand`, of one run or of several seeds, logged in this way."""
        if not self.lanes:
            return self.around(functools.partial(training.logged, self.log))

        def one(lane: Any, params: Any, batches: Any) -> Any:
            return training.logged(lambda metrics: self.log(metrics, lane), params, batches)

        mapped = self.mapped(one, (0, 0, None))
        return lambda params, batches: mapped(jnp.arange(self.lanes), params, batches)

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Forget what has come so far, and wait for all that comes."""
        self.received.clear()
        yield
        if self.streams:
            jax.effects_barrier()

    def logs(self, result: Any) -> Logs:
        """Return the values, from the result of the program or from what has been received."""
        raise NotImplementedError


def by_lane(events: Iterator[tuple[int, dict[str, Any]]], lanes: int) -> Logs:
    """Sort events by key and lane."""
    found: dict[str, list[list[Any]]] = defaultdict(lambda: [[] for _ in range(lanes or 1)])
    for lane, metrics in events:
        for key, value in metrics.items():
            found[key][lane].append(value)
    return {key: [np.asarray(x, np.float32) for x in columns] for key, columns in found.items()}


def rows(arrays: dict[str, Any], lanes: int) -> Logs:
    """Split arrays of (event) or (lane, event)."""
    return {key: list(np.asarray(x).reshape(lanes or 1, -1)) for key, x in arrays.items()}


def reason(error: BaseException) -> str:
    """Return an error in one line."""
    first = re.sub(r"<(\S+) object at 0x\w+>", r"\1", str(error).strip().partition("\n")[0])
    return f"{type(error).__name__}: {first}"[:160]


def verdict(expected: Logs, got: Logs) -> str:
    """Tell whether all values are there, once, right and in order; if not, what is wrong with them."""
    for key, lanes in expected.items():
        found = got.get(key, [np.zeros(0)] * len(lanes))
        if all(len(a) == len(b) and np.allclose(a, b, 1e-4, 1e-5) for a, b in zip(lanes, found, strict=True)):
            continue
        wanted, seen = (np.sort(np.concatenate(x)) for x in (lanes, found))
        if len(seen) == 2 * len(wanted) and np.allclose(seen, np.repeat(wanted, 2), 1e-4, 1e-5):
            return "each twice"
        if len(seen) > len(wanted):
            return f"{len(seen) - len(wanted)} too many"
        if len(seen) < len(wanted):
            return f"{len(seen)} of {len(wanted)}"
        return "another order" if np.allclose(seen, wanted, 1e-4, 1e-5) else "other values"
    return "right"


# --- beside the result ----------------------------------------------------------------------------


class ByHand(Way):
    """Metrics as `has_aux` and as outputs of the loop."""

    name = "by hand"

    def training(self) -> Callable[..., Any]:
        return jax.vmap(training.by_hand, (0, None)) if self.lanes else training.by_hand

    def logs(self, result: Any) -> Logs:
        return rows(result[1], self.lanes)


class Spool(Way):
    name = "lox.spool"
    package = "lox-jax"
    modules = ("lox",)
    options: ClassVar[dict[str, Any]] = {}

    def log(self, metrics: dict[str, Any], lane: Any = 0) -> dict[str, Any]:
        import lox

        lox.log(metrics)
        return metrics

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        import lox

        return lox.spool(function, **self.options)

    def logs(self, result: Any) -> Logs:
        logs = result[1]
        lanes = [logs.lane(n) for n in range(self.lanes)] if self.lanes else [logs]
        return {key: [np.ravel(lane.compact().get(key, [])) for lane in lanes] for key in logs}


class Oryx(Way):
    """`sow` with mode='append', and `harvest` around."""

    name = "oryx"
    package = "oryx"
    modules = ("oryx",)
    tag = "metrics"

    def log(self, metrics: dict[str, Any], lane: Any = 0) -> dict[str, Any]:
        from oryx.core import sow

        return {key: sow(value, tag=self.tag, name=key, mode="append") for key, value in metrics.items()}

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        from oryx.core import harvest

        return functools.partial(harvest(function, tag=self.tag), {})

    def logs(self, result: Any) -> Logs:
        return rows(result[1], self.lanes)


class Linen(Way):
    """`Module.sow`, under Flax's own `nn.scan` and `nn.value_and_grad`, and `apply` with `mutable`."""

    name = "Flax sow"
    package = "flax"
    modules = ("flax.linen",)

    def training(self) -> Callable[..., Any]:
        from flax import linen as nn

        class Step(nn.Module):
            @nn.compact
            def __call__(self, params: Any, batch: Any) -> Any:
                def loss_fn(module: Any, params: Any) -> Any:
                    loss, accuracy = training.loss_and_accuracy(params, batch)
                    module.sow("metrics", "loss", loss)
                    module.sow("metrics", "accuracy", accuracy)
                    return loss

                _, (grads,) = nn.value_and_grad(loss_fn, self, params)
                self.sow("metrics", "grad_norm", training.norm(grads))
                return training.sgd(params, grads), None

        def train(params: Any, batches: Any) -> Any:
            steps = nn.scan(Step, variable_axes={"metrics": 0})()
            (params, _), state = steps.apply({}, params, batches, mutable=["metrics"])
            return params, state["metrics"]

        return jax.vmap(train, (0, None)) if self.lanes else train

    def logs(self, result: Any) -> Logs:
        return rows({key: x for key, (x,) in result[1].items()}, self.lanes)  # `sow` makes tuples


class Nnx(Way):
    """`Module.sow` and `nnx.capture` inside of `nnx.grad`; from there on, and for the norm, by hand."""

    name = "Flax nnx.capture"
    package = "flax"
    modules = ("flax.nnx",)

    def training(self) -> Callable[..., Any]:
        from flax import nnx

        class Model(nnx.Module):
            def __init__(self, params: Any):
                self.weights = nnx.List([nnx.Param(w) for w, _ in params])
                self.biases = nnx.List([nnx.Param(b) for _, b in params])

            def __call__(self, batch: Any) -> Any:
                params = [(w[...], b[...]) for w, b in zip(self.weights, self.biases, strict=True)]
                loss, accuracy = training.loss_and_accuracy(params, batch)
                self.sow(nnx.Intermediate, "loss", loss)
                self.sow(nnx.Intermediate, "accuracy", accuracy)
                return loss

        def train(params: Any, batches: Any) -> Any:
            graph, state = nnx.split(Model(params))

            @nnx.capture(nnx.Intermediate)
            def loss_fn(model: Any, batch: Any) -> Any:
                return model(batch)

            def step(state: Any, batch: Any) -> Any:
                grads, sown = nnx.grad(loss_fn, has_aux=True)(nnx.merge(graph, state), batch)
                metrics = {key: x for key, (x,) in nnx.to_pure_dict(sown).items()}
                return training.sgd(state, grads), {**metrics, "grad_norm": training.norm(grads)}

            return jax.lax.scan(step, state, batches)

        return jax.vmap(train, (0, None)) if self.lanes else train

    def logs(self, result: Any) -> Logs:
        return rows(result[1], self.lanes)


class Clu(Way):
    """A `Collection` of `LastValue`s, made in each step and handed through as by hand."""

    name = "clu.metrics"
    package = "clu"
    modules = ("clu.metrics",)

    @staticmethod
    def collection(*keys: str) -> Any:
        from clu import metrics

        return metrics.Collection.create(**{key: metrics.LastValue.from_output(key) for key in keys})

    def training(self) -> Callable[..., Any]:
        collection = self.collection("loss", "accuracy", "grad_norm")

        def train(params: Any, batches: Any) -> Any:
            def step(params: Any, batch: Any) -> Any:
                grad = jax.value_and_grad(lambda p: training.loss_and_accuracy(p, batch), has_aux=True)
                (loss, accuracy), grads = grad(params)
                values = {"loss": loss, "accuracy": accuracy, "grad_norm": training.norm(grads)}
                return training.sgd(params, grads), collection.single_from_model_output(**values)

            return jax.lax.scan(step, params, batches)

        return jax.vmap(train, (0, None)) if self.lanes else train

    def logs(self, result: Any) -> Logs:
        compute = jax.vmap(lambda metrics: metrics.compute())
        return rows((jax.vmap(compute) if self.lanes else compute)(result[1]), self.lanes)


# --- while the program runs -----------------------------------------------------------------------


class Tap(Spool):
    name = "lox.tap"
    streams = True

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        import lox

        return lox.tap(function, self.received.append, **self.options)

    def mapped(self, function: Callable[..., Any], in_axes: Any = 0) -> Callable[..., Any]:
        return self.around(jax.vmap(function, in_axes))

    def logs(self, result: Any) -> Logs:
        found: dict[str, list[list[Any]]] = defaultdict(lambda: [[] for _ in range(self.lanes or 1)])
        for logs in self.received:
            for n in range(self.lanes or 1):
                for key, values in (logs.lane(n) if self.lanes else logs).items():
                    found[key][n] += np.ravel(values).tolist()
        return {key: [np.asarray(x, np.float32) for x in columns] for key, columns in found.items()}


class BufferedTap(Tap):
    name = "lox.tap(buffer=10)"
    options: ClassVar = {"buffer": 10}


class Callback(Way):
    """`jax.debug.callback`, which also gets the number of the lane: it is called once for each."""

    name = "debug.callback"
    streams = True
    options: ClassVar[dict[str, Any]] = {}

    def receive(self, lane: Any, metrics: dict[str, Any]) -> None:
        self.received.append((lane, metrics))

    def log(self, metrics: dict[str, Any], lane: Any = 0) -> dict[str, Any]:
        jax.debug.callback(self.receive, lane, metrics, **self.options)
        return metrics

    def logs(self, result: Any) -> Logs:
        return by_lane(((int(lane), metrics) for lane, metrics in self.received), self.lanes)


class OrderedCallback(Callback):
    name = "debug.callback(ordered=True)"
    options: ClassVar = {"ordered": True}


class IoCallback(Callback):
    """`io_callback`, in order except under `vmap`, and of values without gradients: it refuses both."""

    name = "io_callback"

    def log(self, metrics: dict[str, Any], lane: Any = 0) -> dict[str, Any]:
        from jax.experimental import io_callback

        io_callback(self.receive, None, lane, jax.lax.stop_gradient(metrics), ordered=not self.lanes)
        return metrics


class Print(Callback):
    """`jax.debug.print`, and what it prints read again."""

    name = "debug.print"

    def log(self, metrics: dict[str, Any], lane: Any = 0) -> dict[str, Any]:
        form = " ".join(["{lane}", *(f"{key}={{{key}}}" for key in metrics)])
        jax.debug.print(form, lane=lane, **metrics)
        return metrics

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        with super().listening(), contextlib.redirect_stdout(self):  # type: ignore[type-var]
            yield
            jax.effects_barrier()

    def write(self, text: str) -> None:
        self.received.append(text)

    def flush(self) -> None:
        pass

    def logs(self, result: Any) -> Logs:
        lines = [line.split() for line in "".join(self.received).splitlines()]
        return by_lane(((int(n), dict(pair.split("=") for pair in pairs)) for n, *pairs in lines), self.lanes)


class JaxTap(Way):
    """`verbose` around the program by hand, with `on_ys`: it sees carries and outputs of loops, and no other values."""

    name = "jax-tap"
    package = "jax-tap"
    modules = ("jaxtap",)
    streams = True

    def training(self) -> Callable[..., Any]:
        import jaxtap

        by_hand = ByHand(self.lanes).training()

        def train(params: Any, batches: Any) -> Any:
            anew = lambda *args: by_hand(*args)  # noqa: E731 - it keeps the trace of a function that it has seen
            return jaxtap.verbose(anew, on_ys=self.received.append)(params, batches)

        return train

    def logs(self, result: Any) -> Logs:
        keys = ("accuracy", "grad_norm", "loss")  # as JAX sorts them; their names are lost
        columns = {key: np.stack([event.value[n] for event in self.received], -1) for n, key in enumerate(keys)}
        return rows(columns, self.lanes)


class PythonLoop(Way):
    """By hand as well: a Python loop over a jitted step, which fetches the metrics of each. It is no single program."""

    name = "a Python loop, by hand"
    streams = True

    def training(self) -> Callable[..., Any]:
        def loss_fn(params: Any, batch: Any) -> Any:
            loss, accuracy = training.loss_and_accuracy(params, batch)
            return loss, {"loss": loss, "accuracy": accuracy}

        def step(params: Any, batch: Any) -> Any:
            grads, metrics = jax.grad(loss_fn, has_aux=True)(params, batch)
            return training.sgd(params, grads), {**metrics, "grad_norm": training.norm(grads)}

        compiled = jax.jit(jax.vmap(step, (0, None)) if self.lanes else step)

        def train(params: Any, batches: Any) -> Any:
            for batch in zip(*map(np.asarray, batches), strict=True):
                params, metrics = compiled(params, batch)
                self.received.append(jax.device_get(metrics))
            return params

        return train

    def logs(self, result: Any) -> Logs:
        stacked = jax.tree.map(lambda *x: np.stack(x, -1), *self.received)
        return rows(stacked, self.lanes)


RETURNED: tuple[type[Way], ...] = (Spool, Oryx, Linen, Nnx, Clu)
STREAMED: tuple[type[Way], ...] = (Tap, BufferedTap, JaxTap, Callback, OrderedCallback, IoCallback, Print, PythonLoop)
