"""Random programs that log, and two ways to run them: with JAX, and in plain Python.

A program is a list of statements that change one number `x` and log. All numbers are small integers held in floats, so
that both runs agree to the last bit. Keys logged under a vmap or shard_map inside the program carry a prefix `m0/`,
`m1/`, ..., since they have lanes of their own.
"""

import dataclasses
import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from optional import devices

import lox

WRAP = 64.0  # keeps numbers small; the derivative of the floor is zero, so gradients stay integers too
DEVICES = 2


@dataclasses.dataclass(frozen=True, eq=False)
class Statement:
    """One statement of a program."""

    kind: str
    numbers: tuple[int, ...] = ()
    bodies: tuple[tuple["Statement", ...], ...] = ()
    keys: tuple[str, ...] = ()

    def __repr__(self) -> str:
        parts = [self.kind, *map(str, self.numbers), *self.keys]
        return f"({' '.join(parts)}{''.join(' ' + repr(list(b)) for b in self.bodies)})"


Block = tuple[Statement, ...]

# --- making them ---------------------------------------------------------------------------------

KEYS = ("a", "b", "c", "int", "vector", "tree")


class Generator:
    """Makes programs from a seed."""

    def __init__(self, seed: int):
        self.random = random.Random(seed)
        self.maps = 0

    def program(self) -> Block:
        """Make a program of moderate size."""
        return self.block(depth=self.random.choice([1, 2, 3, 3]), prefix="", inside=frozenset())

    def block(self, depth: int, prefix: str, inside: frozenset[str]) -> Block:
        made: list[Statement] = []
        for _ in range(self.random.randint(1, 3)):
            if made and self.random.random() < 0.15:
                made.append(self.random.choice(made))  # the very same function, called again
            else:
                made.append(self.statement(depth, prefix, inside))
        return tuple(made)

    def statement(self, depth: int, prefix: str, inside: frozenset[str]) -> Statement:
        pick = self.random
        if depth == 0 or pick.random() < 0.35:
            if pick.random() < 0.3:
                return Statement("op", (pick.randint(1, 5), pick.randint(0, 9)))
            keys = tuple(prefix + k for k in pick.sample(KEYS, pick.choice([1, 1, 1, 2])))
            return Statement("log", (pick.randint(1, 3), pick.randint(0, 2), pick.randint(0, 5)), (), keys)
        kinds = [
            "jit",
            "warm",
            "scan",
            "fori",
            "cond",
            "cond",
            "switch",
            "remat",
            "custom_jvp",
            "custom_vjp",
            "jvp",
            "call",
        ]
        if "grad" not in inside:
            kinds += ["while", "while", "custom_vmap"]
        if not inside & {"grad", "jvp"}:
            kinds += ["linear_solve", "root"]  # when differentiated, their solvers are called for the tangents too
        if not inside & {"grad", "jvp", "map"}:
            kinds += ["composite"]  # which hides its effects, and can neither be differentiated nor mapped
        if inside & {"jvp"}:
            kinds.remove("custom_vjp")  # JAX has no forward mode for it
            kinds = [k for k in kinds if k != "custom_vmap"]  # nor, on some versions, the right shapes for this one
        if not inside & {"grad", "jvp"}:
            kinds += ["grad", "grad", "linearize"]
        if not inside:
            kinds += ["vmap", "vmap", "shard_map", "move"]
        kind = pick.choice(kinds)
        if kind in ("vmap", "shard_map"):
            prefix = f"m{self.maps}/"
            self.maps += 1
        now = inside | {{"linearize": "grad"}.get(kind, kind)} if kind in ("grad", "linearize", "jvp") else inside
        if kind == "linearize":
            now = now | {"jvp"}
        now = now | {"map"} if kind in ("vmap", "shard_map") else now
        now = now | {"loop"} if kind in ("scan", "fori", "while") else now
        now = now | {"branch"} if kind in ("cond", "switch") else now
        if kind not in ("vmap", "shard_map"):
            now = now | {"deep"} if now else now
        n_bodies = {"cond": 2, "switch": 3}.get(kind, 1)
        bodies = tuple(self.block(depth - 1, prefix, now) for _ in range(n_bodies))
        if kind == "cond" and pick.random() < 0.3:
            bodies = (bodies[0], bodies[0])
        numbers = (pick.randint(0, 3), pick.randint(0, 1), pick.randint(1, 2))
        keys = (f"{prefix}test",) if kind == "while" else ()  # for a condition that logs
        return Statement(kind, numbers, bodies, keys)


# --- running them with JAX -----------------------------------------------------------------------


def wrap(x: Any) -> Any:
    """Keep a number small."""
    return x - WRAP * jnp.floor(x / WRAP)


class JaxRunner:
    """Builds the program as a JAX function; without logs on request."""

    def __init__(self, program: Block, logs: bool = True):
        self.program, self.logs = program, logs
        self.functions: dict[Any, Any] = {}

    def __call__(self, x: Any) -> Any:
        """Run it."""
        return self.block(self.program, x, jnp.int32(0))

    def block(self, block: Block, x: Any, i: Any) -> Any:
        for statement in block:
            x = getattr(self, f"do_{statement.kind}")(statement, x, i)
        return x

    def body(self, s: Statement, number: int = 0) -> Any:
        """Return a body as a function, the same object every time."""
        key = (id(s), number)
        if key not in self.functions:
            self.functions[key] = lambda x, i: self.block(s.bodies[number], x, i)
        return self.functions[key]

    def once(self, s: Statement, make: Any) -> Any:
        key = (id(s), "made")
        if key not in self.functions:
            self.functions[key] = make(self.body(s))
        return self.functions[key]

    def do_op(self, s: Statement, x: Any, i: Any) -> Any:
        return wrap(s.numbers[0] * x + s.numbers[1])

    def do_log(self, s: Statement, x: Any, i: Any) -> Any:
        if self.logs:
            factor, add, options = s.numbers
            value = factor * x + add
            extra: dict[str, Any] = {}
            if options % 2:
                extra["step"] = i
            if options == 3:
                extra["episode"] = i + 10
            if options == 4:
                extra["where"] = jnp.floor(x) % 2 == 0
            lox.log({k: _value(k, value, jnp) for k in s.keys}, **extra)
        return x

    def do_jit(self, s: Statement, x: Any, i: Any) -> Any:
        return self.once(s, jax.jit)(x, i)

    def do_warm(self, s: Statement, x: Any, i: Any) -> Any:
        """An ordinary jit, but `warm_up` has called it before."""
        return self.do_jit(s, x, i)

    def warm_up(self, block: Block | None = None) -> None:
        """Call functions that must have been called before: from then on JAX dispatches them without looking inside."""
        for s in self.program if block is None else block:
            for body in s.bodies:
                self.warm_up(body)
            if s.kind == "warm":
                for _ in range(2):
                    jax.block_until_ready(self.do_warm(s, jnp.float32(1), jnp.int32(0)))

    def do_composite(self, s: Statement, x: Any, i: Any) -> Any:
        return self.once(s, lambda body: lax.composite(body, "lox.test"))(x, i)

    def do_move(self, s: Statement, x: Any, i: Any) -> Any:
        """Move what follows to another device, unless it is part of one program."""
        if not isinstance(x, jax.core.Tracer):
            x = jax.device_put(x, jax.devices()[s.numbers[0] % len(jax.devices())])
        return self.do_jit(s, x, i) if s.numbers[1] else self.do_call(s, x, i)

    def do_call(self, s: Statement, x: Any, i: Any) -> Any:
        return self.body(s)(x, i)

    def do_remat(self, s: Statement, x: Any, i: Any) -> Any:
        return self.once(s, jax.checkpoint)(x, i)

    def do_scan(self, s: Statement, x: Any, i: Any) -> Any:
        length, reverse, unroll = s.numbers

        def step(x: Any, j: Any) -> Any:
            return self.body(s)(x, j), x

        return lax.scan(step, x, jnp.arange(length, dtype=jnp.int32), reverse=bool(reverse), unroll=unroll)[0]

    def do_fori(self, s: Statement, x: Any, i: Any) -> Any:
        return lax.fori_loop(0, s.numbers[0], lambda j, x: self.body(s)(x, j), x)

    def do_while(self, s: Statement, x: Any, i: Any) -> Any:
        limit = (jnp.floor(x) % 4).astype(jnp.int32)

        def test(carry: Any) -> Any:
            j, y = carry
            if s.numbers[1] and self.logs:
                lox.log({s.keys[0]: y}, step=j)
            return j < limit

        return lax.while_loop(test, lambda c: (c[0] + 1, self.body(s)(c[1], c[0])), (jnp.int32(0), x))[1]

    def do_cond(self, s: Statement, x: Any, i: Any) -> Any:
        return lax.cond(jnp.floor(x) % 2 == 0, self.body(s, 0), self.body(s, 1), x, i)

    def do_switch(self, s: Statement, x: Any, i: Any) -> Any:
        index = (jnp.floor(x) % 3).astype(jnp.int32)
        return lax.switch(index, [self.body(s, n) for n in range(3)], x, i)

    def do_custom_jvp(self, s: Statement, x: Any, i: Any) -> Any:
        def make(body: Any) -> Any:
            fun = jax.custom_jvp(body)
            fun.defjvp(lambda p, t: (body(*p), 3 * t[0]))
            return fun

        return self.once(s, make)(x, i)

    def do_custom_vjp(self, s: Statement, x: Any, i: Any) -> Any:
        def make(body: Any) -> Any:
            fun = jax.custom_vjp(body)
            fun.defvjp(lambda x, i: (body(x, i), None), lambda _, ct: (3 * ct, None))
            return fun

        return self.once(s, make)(x, i)

    def do_custom_vmap(self, s: Statement, x: Any, i: Any) -> Any:
        def make(body: Any) -> Any:
            fun = jax.custom_batching.custom_vmap(body)

            def rule(size: int, batched: Any, x: Any, i: Any) -> Any:
                axes = tuple(0 if b else None for b in batched)
                return jax.vmap(body, in_axes=axes, axis_size=size)(x, i), True

            fun.def_vmap(rule)
            return fun

        return self.once(s, make)(x, i)

    def do_grad(self, s: Statement, x: Any, i: Any) -> Any:
        value, grad = jax.value_and_grad(self.body(s))(x, i)
        return value + 0 * grad

    def do_jvp(self, s: Statement, x: Any, i: Any) -> Any:
        value, tangent = jax.jvp(lambda y: self.body(s)(y, i), (x,), (jnp.ones_like(x),))
        return value + 0 * tangent

    def do_linearize(self, s: Statement, x: Any, i: Any) -> Any:
        value, linear = jax.linearize(lambda y: self.body(s)(y, i), x)
        return value + 0 * linear(jnp.ones_like(x))

    def do_linear_solve(self, s: Statement, x: Any, i: Any) -> Any:
        solve = lambda _, b: self.body(s)(b, i)  # noqa: E731
        return lax.custom_linear_solve(lambda v: v, x, solve, symmetric=True)

    def do_root(self, s: Statement, x: Any, i: Any) -> Any:
        solve = lambda _, x0: self.body(s)(x0, i)  # noqa: E731
        return lax.custom_root(lambda y: y, x, solve, lambda g, y: y / g(jnp.ones_like(y)))

    def do_vmap(self, s: Statement, x: Any, i: Any) -> Any:
        lanes = s.numbers[2] + 1
        results = jax.vmap(self.body(s), in_axes=(0, None))(x + jnp.arange(lanes, dtype=x.dtype), i)
        return wrap(results.sum())

    def do_shard_map(self, s: Statement, x: Any, i: Any) -> Any:
        mesh = Mesh(devices(DEVICES), ("d",))

        def on_device(xs: Any, i: Any) -> Any:
            return self.body(s)(xs[0], i)[None]

        spec = PartitionSpec("d")
        fun = jax.shard_map(on_device, mesh=mesh, in_specs=(spec, PartitionSpec()), out_specs=spec)
        return wrap(fun(x + jnp.arange(DEVICES, dtype=x.dtype), i).sum())


def _value(key: str, x: Any, xp: Any) -> Any:
    kind = key.rsplit("/", 1)[-1]
    if kind == "int":
        return xp.asarray(x, xp.float32).astype(xp.int32)
    if kind == "vector":
        return xp.stack([x, 2 * x, 3 * x])
    if kind == "tree":
        return {"p": x + 0.0, "q": (2 * x,)}
    return x


# --- running them in plain Python ----------------------------------------------------------------


@dataclasses.dataclass
class Event:
    """One execution of `lox.log`."""

    key: str
    value: Any
    steps: dict[str, int]
    lanes: tuple[int, ...]  # indices of the maps inside the program


class PlainRunner:
    """Interprets the program in Python and keeps the events, in order."""

    def __init__(self, program: Block):
        self.program = program
        self.events: list[Event] = []
        self.lanes: tuple[int, ...] = ()

    def __call__(self, x: float) -> float:
        """Run it."""
        return self.block(self.program, x, 0)

    def block(self, block: Block, x: float, i: int) -> float:
        for s in block:
            do = getattr(self, f"do_{s.kind}", None)
            x = do(s, x, i) if do else self.block(s.bodies[0], x, i)
        return x

    def do_op(self, s: Statement, x: float, i: int) -> float:
        return (s.numbers[0] * x + s.numbers[1]) % WRAP

    def do_log(self, s: Statement, x: float, i: int) -> float:
        factor, add, options = s.numbers
        steps = {"step": i} if options % 2 else {}
        if options == 3:
            steps["episode"] = i + 10
        if options != 4 or x % 2 == 0:
            for key in s.keys:
                self.events.append(Event(key, _value(key, np.float32(factor * x + add), np), steps, self.lanes))
        return x

    def do_scan(self, s: Statement, x: float, i: int) -> float:
        length, reverse, _ = s.numbers
        for j in reversed(range(length)) if reverse else range(length):
            x = self.block(s.bodies[0], x, j)
        return x

    def do_fori(self, s: Statement, x: float, i: int) -> float:
        for j in range(s.numbers[0]):
            x = self.block(s.bodies[0], x, j)
        return x

    def do_while(self, s: Statement, x: float, i: int) -> float:
        limit, j = int(x % 4), 0
        while True:
            if s.numbers[1]:
                self.events.append(Event(s.keys[0], np.float32(x), {"step": j}, self.lanes))
            if j >= limit:
                return x
            x, j = self.block(s.bodies[0], x, j), j + 1

    def do_cond(self, s: Statement, x: float, i: int) -> float:
        return self.block(s.bodies[0 if x % 2 == 0 else 1], x, i)

    def do_switch(self, s: Statement, x: float, i: int) -> float:
        return self.block(s.bodies[int(x % 3)], x, i)

    def do_vmap(self, s: Statement, x: float, i: int) -> float:
        return self._map(s, x, i, s.numbers[2] + 1)

    def do_shard_map(self, s: Statement, x: float, i: int) -> float:
        return self._map(s, x, i, DEVICES)

    def _map(self, s: Statement, x: float, i: int, count: int) -> float:
        total, outer = 0.0, self.lanes
        for lane in range(count):
            self.lanes = (*outer, lane)
            total += self.block(s.bodies[0], x + lane, i)
        self.lanes = outer
        return total % WRAP


def run_plain(program: Block, x: float) -> tuple[float, list[Event]]:
    """Return the result and all events."""
    runner = PlainRunner(program)
    return runner(x), runner.events


def kinds_in(block: Block) -> set[str]:
    """Return the kinds of statements that a program uses."""
    kinds = set()
    for s in block:
        kinds.add(s.kind)
        for body in s.bodies:
            kinds |= kinds_in(body)
    return kinds
