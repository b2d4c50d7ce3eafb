"""The differential fuzz: random programs with JAX against the same programs in plain Python.

`make fuzz N=5000 SEED=0` runs more. A failure names its seed: `LOX_FUZZ_SEED=<seed> LOX_FUZZ_N=1` runs it alone.
"""

import contextlib
import itertools
import os
import re
from collections import Counter, defaultdict
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest

import lox
import lox.testing

# Each JAX of the test matrix gets programs of its own, 330 in all. (A reduction of number 54 is one that the XLA of JAX
# 0.7 would compile without end, if sums were compensated otherwise.)
_FIRST = {(0, 8): 0, (0, 10): 110}.get(jax.__version_info__[:2], 220)
N = int(os.environ.get("LOX_FUZZ_N", 25))
SEED = int(os.environ.get("LOX_FUZZ_SEED", _FIRST))
MAX_EVENTS = 120

Sequence = list[tuple[Any, dict[str, Any]]]


def program_for(seed: int) -> tuple[programs.Block, float]:
    """Return the first program from this seed that logs something, but not too much."""
    attempt = 0
    while True:
        generator = programs.Generator(seed * 1000 + attempt)
        program, x = generator.program(), float(generator.random.randint(0, 20))
        counts = [len(programs.run_plain(program, x + lane)[1]) for lane in range(3)]
        # What is on one device does not fit a shard_map over others, with lox or without.
        kinds = programs.kinds_in(program)
        possible = not {"move", "shard_map"} <= kinds
        # Nor does JAX know what varies over devices inside a solver that closes over something that does not.
        possible = possible and not {"linear_solve", "shard_map"} <= kinds
        if possible and sum(counts) > 0 and max(counts) <= MAX_EVENTS:
            return program, x
        attempt += 1


def by_key(events: list[programs.Event]) -> dict[tuple[str, tuple[int, ...]], Sequence]:
    """Group the expected events by key and by lane of the maps inside the program."""
    actual: dict[Any, Sequence] = defaultdict(list)
    for event in events:
        actual[event.key, event.lanes].append((event.value, event.steps))
    return actual


def sequence(logs: lox.logdict, key: str) -> Sequence:
    """Return the events of a key in compact logs without lanes."""
    if key not in logs:
        return []
    model = programs._value(key, np.float32(1), np)
    leaves, treedef = jax.tree.flatten(jax.tree.map(np.asarray, logs[key]))
    model_ndims = [np.ndim(m) for m in jax.tree.leaves(model)]
    assert treedef == jax.tree.structure(model)
    if leaves[0].ndim == model_ndims[0]:
        leaves = [leaf[None] for leaf in leaves]
    steps = {name: np.atleast_1d(by_key[key]) for name, by_key in logs.steps.items() if key in by_key}
    actual = []
    for n in range(len(leaves[0])):
        value = jax.tree.unflatten(treedef, [leaf[n] for leaf in leaves])
        actual.append((value, {name: int(s[n]) for name, s in steps.items() if s[n] != -1}))
    return actual


def assert_same(actual: Sequence, expected: Sequence, what: str) -> None:
    assert len(actual) == len(expected), f"{what}: {len(actual)} events, expected {len(expected)}"
    for n, ((value, steps), (wanted, wanted_steps)) in enumerate(zip(actual, expected, strict=True)):
        for a, b in zip(jax.tree.leaves(value), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_array_equal(a, b, err_msg=f"{what}, event {n}")
            assert np.asarray(a).dtype == np.asarray(b).dtype, what
        assert steps == wanted_steps, f"{what}, event {n}: steps {steps}, expected {wanted_steps}"


def assert_logs(logs: lox.logdict, events: list[programs.Event], what: str) -> None:
    """Compare the logs of one run with the events of a plain one."""
    logs = logs.compact()
    expected = by_key(events)
    keys = {key for key, _ in expected}
    for key in logs:
        if key not in keys:
            assert_empty(logs, key, what)
    for (key, lanes), wanted in expected.items():
        one = logs.filter(lambda k, key=key: k == key)
        for lane in lanes:
            one = pick_lane(one, lane)
        assert_same(sequence(one, key), wanted, f"{what}: {key} in lanes {lanes}")
    # A lane without events has nothing to compare with above.
    for key in keys:
        counts = [len(w) for (k, _), w in expected.items() if k == key]
        if key in logs.valid:
            assert int(np.asarray(logs.valid[key]).sum()) in (sum(counts), counts[0]), f"{what}: {key}"


def pick_lane(logs: lox.logdict, lane: int) -> lox.logdict:
    try:
        return logs.lane(lane)
    except lox.LoxError:  # the same in all lanes
        return logs


def assert_empty(logs: lox.logdict, key: str, what: str) -> None:
    valid = logs.valid.get(key)
    size = jax.tree.leaves(logs[key])[0].shape[:1]
    assert size == (0,) or (valid is not None and not np.asarray(valid).any()), f"{what}: phantom {key}"


def in_order(logs: list[lox.logdict], lane: int | None = None) -> list[tuple[str, Any]]:
    """Return streamed events of one lane as (key, value), in order."""
    actual = []
    for event in logs:
        for key in event:
            one = event.filter(lambda k, key=key: k == key)
            if lane is not None:
                one = pick_lane(one, lane)
            if key not in one or (key in one.valid and not np.asarray(one.valid[key]).any()):
                continue
            actual.append((key, jax.tree.map(np.asarray, one[key])))
    return actual


def assert_streamed(logs: list[lox.logdict], events: list[programs.Event], what: str, lane: int | None = None) -> None:
    actual, expected = in_order(logs, lane), [(e.key, e.value) for e in events]
    assert [k for k, _ in actual] == [k for k, _ in expected], what
    for (key, value), (_, wanted) in zip(actual, expected, strict=True):
        for a, b in zip(jax.tree.leaves(value), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_array_equal(a, b, err_msg=f"{what}: {key}")


def canonical(hlo: str) -> list[str]:
    """The functions of a module. Older JAX lowers one function twice if it was traced twice, as `f` and `f_2`."""
    return sorted(
        set(re.findall(r"^  func\.func .*?^  }$", re.sub(r"(@\w+?)_\d+\b", r"\1", hlo), re.DOTALL | re.MULTILINE))
    )


def operations(hlo: str) -> Counter[str]:
    """Count the operations of a program by kind."""
    return Counter(re.findall(r"stablehlo\.\w+", "".join(canonical(hlo))))


REDUCTIONS = ("mean", "sum", "min", "max", "first", "last", "count", "std", "var")


def assert_reduced(logs: lox.logdict, events: list[programs.Event], how: str, what: str) -> None:
    """Compare reduced logs with NumPy's reductions of the events of a plain run."""
    expected = by_key(events)
    assert {key for key, _ in expected} == {k for k in logs if np.all(np.asarray(logs.valid.get(k, True)))}, what
    for (key, _), wanted in expected.items():
        values = [jax.tree.leaves(value) for value, _ in wanted]
        if how == "count":
            assert int(logs[key]) == len(values), what
            continue
        for actual, column in zip(jax.tree.leaves(logs[key]), zip(*values, strict=True), strict=True):
            stacked = np.stack(column).astype(np.float64)
            exact = {"first": lambda x: x[0], "last": lambda x: x[-1]}.get(how) or (lambda x: getattr(np, how)(x, 0))
            np.testing.assert_allclose(actual, exact(stacked), rtol=1e-5, atol=1e-4, err_msg=f"{what} {how}: {key}")
        for name, steps in logs.steps.items():
            if key in steps:
                assert int(steps[key]) == wanted[-1][1].get(name, -1), f"{what}: {name} of {key}"


def thinned(events: list[programs.Event], every: int) -> list[programs.Event]:
    """Events 0, k, 2k, ... of each key."""
    seen: Counter[str] = Counter()
    kept = []
    for event in events:
        kept += [event] if seen[event.key] % every == 0 else []
        seen[event.key] += 1
    return kept


def assert_blocks(received: list[lox.logdict], size: int) -> None:
    for logs in received:
        assert all(1 <= n <= size for n in logs.event_counts().values()), logs


def plain_form(event: tuple[str, Any]) -> tuple[str, str]:
    key, value = event
    return key, str([np.asarray(leaf).tolist() for leaf in jax.tree.leaves(value)])


class Subject:
    """A program, and the events of plain Python, alone and in three lanes."""

    def __init__(self, seed: int):
        self.program, x0 = program_for(seed)
        self.kinds = programs.kinds_in(self.program)
        self.result, self.events = programs.run_plain(self.program, x0)
        self.lanes = [programs.run_plain(self.program, x0 + n) for n in range(3)]
        self.fun = programs.JaxRunner(self.program)
        self.fun.__name__ = "program"  # type: ignore[attr-defined]
        with lox.testing.capture():
            self.fun.warm_up()
        self.x = jnp.float32(x0)
        self.xs = self.x + jnp.arange(3.0)
        self.capacity = MAX_EVENTS if "while" in self.kinds else None
        self.lane_capacity = 3 * MAX_EVENTS if "while" in self.kinds else None
        self.choice = choice = seed // 3
        self.how, self.every = REDUCTIONS[choice % len(REDUCTIONS)], 2 + choice % 3
        self.size = (1, 7, 100)[choice % 3]

    def spooled(self, spooled: Any, events: list[programs.Event], what: str) -> None:
        out, logs = spooled(self.x)
        assert float(out) == self.result, what
        assert_logs(logs, events, what)

    def spooled_in_lanes(self, spooled: Any, every: int, what: str) -> None:
        outs, logs = spooled(self.xs)
        for n, (lane_result, lane_events) in enumerate(self.lanes):
            assert float(outs[n]) == lane_result, what
            assert_logs(pick_lane(logs, n), thinned(lane_events, every), f"{what}, lane {n}")

    def tapped(self, tap: Any, what: str) -> list[lox.logdict]:
        received: list[lox.logdict] = []
        assert float(tap(received.append)(self.x)) == self.result, what
        jax.effects_barrier()
        return received

    def tapped_in_lanes(self, tap: Any) -> list[lox.logdict]:
        received: list[lox.logdict] = []
        tap(received.append)(self.xs)
        jax.effects_barrier()
        return received


def check_spool(s: Subject) -> None:
    jitted = jax.jit(s.fun)
    with lox.testing.capture() as leaked:
        for what, spooled in (
            ("spool", lox.spool(s.fun, capacity=s.capacity)),
            ("jit(spool)", jax.jit(lox.spool(s.fun, capacity=s.capacity))),
            ("spool(jit)", lox.spool(jitted, capacity=s.capacity)),
        ):
            for call in ("first", "second"):
                s.spooled(spooled, s.events, f"{what}, {call} call")
    assert not leaked
    if not s.kinds & {"shard_map", "composite"}:
        s.spooled_in_lanes(jax.jit(lox.spool(jax.vmap(s.fun), capacity=s.lane_capacity)), 1, "spool(vmap)")
        s.spooled_in_lanes(jax.jit(jax.vmap(lox.spool(s.fun, capacity=s.capacity))), 1, "vmap(spool)")


def check_nolog(s: Subject) -> None:
    bare = programs.JaxRunner(s.program, logs=False)
    bare.__name__ = "program"  # type: ignore[attr-defined]
    nolog = jax.jit(lox.nolog(s.fun)).lower(s.x).as_text()
    assert "callback" not in nolog
    # By the time nolog sees it, a vmapped while loop inside a jit has its masks; and differentiating a loop that does
    # nothing but log, JAX has already decided that it does something.
    # JAX does not remove constants and operands of a solver that nothing reads any more.
    if not s.kinds & {"linear_solve", "root"} and not ("while" in s.kinds and s.kinds & {"vmap", "jvp", "linearize"}):
        without = jax.jit(bare).lower(s.x).as_text()
        # JAX leaves dead code inside some primitives, which nolog removes: then there is less, but never more.
        assert canonical(nolog) == canonical(without) or operations(nolog) <= operations(without)


def check_tap(s: Subject) -> None:
    jitted = jax.jit(s.fun)
    for what, tap in (
        ("tap", lambda cb: lox.tap(s.fun, cb)),
        ("tap(jit)", lambda cb: lox.tap(jitted, cb)),
        ("jit(tap)", lambda cb: jax.jit(lox.tap(s.fun, cb))),
    ):
        assert_streamed(s.tapped(tap, what), s.events, what)
    # The function itself is unchanged. (Without a transformation, XLA may reorder independent lines.)
    for plain, what in ((s.fun, "plain"), (jitted, "jit")):
        with lox.testing.capture() as received:
            assert float(plain(s.x)) == s.result, what
        wanted = sorted(plain_form((e.key, e.value)) for e in s.events)
        assert sorted(map(plain_form, in_order(received))) == wanted, what
    for what, tap in (
        ("tap(vmap)", lambda cb: lox.tap(jax.vmap(s.fun), cb)),
        ("vmap(tap)", lambda cb: jax.jit(jax.vmap(lox.tap(s.fun, cb)))),
    ):
        received = s.tapped_in_lanes(tap)
        for n, (_, lane_events) in enumerate(s.lanes):
            assert_streamed(received, lane_events, f"{what}, lane {n}", n)


def check_reduce(s: Subject) -> None:
    out, logs = jax.jit(lox.spool(s.fun, reduce=s.how))(s.x)
    assert float(out) == s.result
    assert_reduced(logs, s.events, s.how, "reduce")
    _, logs = jax.jit(lox.spool(jax.vmap(s.fun), reduce=s.how))(s.xs)
    for n, (_, lane_events) in enumerate(s.lanes):
        assert_reduced(pick_lane(logs, n), lane_events, s.how, f"spool(vmap, reduce), lane {n}")
    thin = jax.jit(lox.spool(s.fun, interval=s.every, capacity=s.capacity))
    s.spooled(thin, thinned(s.events, s.every), f"interval={s.every}")
    thin = jax.jit(lox.spool(jax.vmap(s.fun), interval=s.every, capacity=s.lane_capacity))
    s.spooled_in_lanes(thin, s.every, f"spool(vmap, interval={s.every})")


def check_buffer(s: Subject) -> None:
    for interval in (None, s.every):
        what = f"tap(interval={interval}, buffer={s.size})"
        options = {"interval": interval, "buffer": s.size}
        received = s.tapped(lambda cb, o=options: jax.jit(lox.tap(s.fun, cb, **o)), what)
        assert_blocks(received, s.size)
        kept = thinned(s.events, interval or 1)
        assert_logs(sum(received, lox.logdict()), kept, what)
        # Partial sums add up, whatever the parts are.
        received = s.tapped(lambda cb, o=options: lox.tap(s.fun, cb, reduce="sum", **o), what)
        assert_reduced(sum(received, lox.logdict()).reduce("sum"), kept, "sum", f"{what}, sum")
    for what, tap in (
        ("tap(vmap)", lambda cb: jax.jit(lox.tap(jax.vmap(s.fun), cb, buffer=s.size))),
        ("vmap(tap)", lambda cb: jax.jit(jax.vmap(lox.tap(s.fun, cb, buffer=s.size)))),
    ):
        received = s.tapped_in_lanes(tap)
        assert_blocks(received, s.size)
        for n, (_, lane_events) in enumerate(s.lanes):
            logs = pick_lane(sum(received, lox.logdict()), n)
            assert_logs(logs, lane_events, f"{what}, buffer={s.size}, lane {n}")


def check_mesh(s: Subject) -> None:
    """Compare lanes sharded over a mesh of 1 to 8 devices, with an explicit or automatic axis."""
    count, explicit, around = MESHES[s.choice % len(MESHES)]
    count = min(count, len(jax.devices()))
    kind = jax.sharding.AxisType.Explicit if explicit else jax.sharding.AxisType.Auto
    mesh = jax.make_mesh((count,), ("lanes",), axis_types=(kind,), devices=jax.devices()[:count])
    numbers = np.asarray(s.x) + np.arange(max(count, 2), dtype=np.float32)
    xs = jax.device_put(numbers, jax.NamedSharding(mesh, jax.sharding.PartitionSpec("lanes")))
    lanes = [programs.run_plain(s.program, float(x)) for x in numbers]
    if max(len(events) for _, events in lanes) > MAX_EVENTS:
        return
    bare = jax.jit(jax.vmap(programs.JaxRunner(s.program, logs=False)))
    set_mesh = jax.set_mesh if hasattr(jax, "set_mesh") else jax.sharding.use_mesh
    with set_mesh(mesh) if around else contextlib.nullcontext():
        try:
            bare(xs)
        except (TypeError, ValueError, NotImplementedError, jax.errors.JaxRuntimeError):
            return  # JAX itself cannot
        mapped, capacity = jax.jit(jax.vmap(s.fun)), count * s.lane_capacity if s.lane_capacity else None
        for what, spooled in (
            ("spool(jit(vmap))", lox.spool(mapped, capacity=capacity)),
            ("jit(vmap(spool))", jax.jit(jax.vmap(lox.spool(s.fun, capacity=s.capacity)))),
        ):
            outs, logs = spooled(xs)
            assert np.asarray(outs).tolist() == [result for result, _ in lanes], f"{what} on a mesh"
            for n, (_, events) in enumerate(lanes):
                assert_logs(pick_lane(logs, n), events, f"{what} on a mesh, lane {n}")
        outs, logs = lox.spool(mapped, reduce=s.how)(xs)
        for n, (_, events) in enumerate(lanes):
            assert_reduced(pick_lane(logs, n), events, s.how, f"reduce on a mesh, lane {n}")
        received: list[lox.logdict] = []
        jax.block_until_ready(lox.tap(mapped, received.append)(xs))
        jax.effects_barrier()
        for n, (_, events) in enumerate(lanes):
            assert_streamed(received, events, f"tap on a mesh, lane {n}", n)
        with lox.testing.capture() as leaked:
            jax.block_until_ready((lox.nolog(mapped)(xs), lox.spool(mapped, capacity=capacity)(xs)))
        assert not leaked
        with lox.testing.capture() as received:
            jax.block_until_ready(mapped(xs))
        for n, (_, events) in enumerate(lanes):
            wanted = sorted(plain_form((e.key, e.value)) for e in events)
            assert sorted(map(plain_form, in_order(received, n))) == wanted, f"mesh, lane {n}"


# The number of devices, whether the axis is explicit, and whether the mesh is around or comes with the inputs only.
MESHES = list(itertools.product((1, 2, 4, 8), (True, False), (True, False)))


QUICK = 1  # program for the time between two edits


@pytest.mark.parametrize(
    "seed", [pytest.param(SEED + n, marks=pytest.mark.slow if n >= QUICK else ()) for n in range(N)]
)
def test_program(seed: int) -> None:
    subject = Subject(seed)
    check_spool(subject)
    check_nolog(subject)
    if subject.kinds & {"vmap", "shard_map", "composite"}:
        return
    # To save time, CI gives each of these a quarter of the programs.
    checks = (check_tap, check_reduce, check_buffer, check_mesh)
    for check in checks if "LOX_FUZZ_N" in os.environ else checks[seed % 4 : seed % 4 + 1]:
        check(subject)
