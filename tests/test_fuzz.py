"""The differential fuzz: random programs with JAX against the same programs in plain Python.

`make fuzz N=5000 SEED=0` runs more. A failure names its seed: `LOX_FUZZ_SEED=<seed> LOX_FUZZ_N=1` runs it alone.
"""

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

# Each JAX of the test matrix gets programs of its own: 330 in all. (Of the first ones, number 54 is such that XLA as it
# was for JAX 0.7 does not come to an end compiling its reduction.)
_FIRST = {(0, 7): 5000, (0, 10): 110}.get(jax.__version_info__[:2], 220)
N = int(os.environ.get("LOX_FUZZ_N", 110))
SEED = int(os.environ.get("LOX_FUZZ_SEED", _FIRST))
MAX_EVENTS = 120

Sequence = list[tuple[Any, dict[str, Any]]]


def program_for(seed: int) -> tuple[programs.Block, float]:
    """The first program from this seed that logs something, but not too much."""
    attempt = 0
    while True:
        generator = programs.Generator(seed * 1000 + attempt)
        program, x = generator.program(), float(generator.random.randint(0, 20))
        counts = [len(programs.run_plain(program, x + lane)[1]) for lane in range(3)]
        if sum(counts) > 0 and max(counts) <= MAX_EVENTS:
            return program, x
        attempt += 1


def by_key(events: list[programs.Event]) -> dict[tuple[str, tuple[int, ...]], Sequence]:
    """Expected events for every key and every lane of the maps inside the program."""
    found: dict[Any, Sequence] = defaultdict(list)
    for event in events:
        found[event.key, event.lanes].append((event.value, event.steps))
    return found


def sequence(logs: lox.logdict, key: str) -> Sequence:
    """The events of a key in logs that have no lanes and are compact."""
    if key not in logs:
        return []
    model = programs._value(key, np.float32(1), np)
    leaves, treedef = jax.tree.flatten(jax.tree.map(np.asarray, logs[key]))
    model_ndims = [np.ndim(m) for m in jax.tree.leaves(model)]
    assert treedef == jax.tree.structure(model)
    if leaves[0].ndim == model_ndims[0]:
        leaves = [leaf[None] for leaf in leaves]
    steps = {name: np.atleast_1d(of[key]) for name, of in logs.steps.items() if key in of}
    found = []
    for n in range(len(leaves[0])):
        value = jax.tree.unflatten(treedef, [leaf[n] for leaf in leaves])
        found.append((value, {name: int(s[n]) for name, s in steps.items() if s[n] != -1}))
    return found


def assert_same(found: Sequence, expected: Sequence, what: str) -> None:
    assert len(found) == len(expected), f"{what}: {len(found)} events, expected {len(expected)}"
    for n, ((value, steps), (wanted, wanted_steps)) in enumerate(zip(found, expected, strict=True)):
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
    # A lane in which nothing happened has nothing to compare with above.
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
    """Streamed events of one lane as (key, value), in order."""
    found = []
    for event in logs:
        for key in event:
            one = event.filter(lambda k, key=key: k == key)
            if lane is not None:
                one = pick_lane(one, lane)
            if key in one.valid and not np.asarray(one.valid[key]).any():
                continue
            found.append((key, jax.tree.map(np.asarray, one[key])))
    return found


def assert_streamed(logs: list[lox.logdict], events: list[programs.Event], what: str, lane: int | None = None) -> None:
    found, expected = in_order(logs, lane), [(e.key, e.value) for e in events]
    assert [k for k, _ in found] == [k for k, _ in expected], what
    for (key, value), (_, wanted) in zip(found, expected, strict=True):
        for a, b in zip(jax.tree.leaves(value), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_array_equal(a, b, err_msg=f"{what}: {key}")


def canonical(hlo: str) -> list[str]:
    """The functions of a module. Older JAX lowers one function twice if it was traced twice, as `f` and `f_2`."""
    return sorted(
        set(re.findall(r"^  func\.func .*?^  }$", re.sub(r"(@\w+?)_\d+\b", r"\1", hlo), re.DOTALL | re.MULTILINE))
    )


def operations(hlo: str) -> Counter[str]:
    """How often a program has each operation."""
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
        for found, column in zip(jax.tree.leaves(logs[key]), zip(*values, strict=True), strict=True):
            stacked = np.stack(column).astype(np.float64)
            exact = {"first": lambda x: x[0], "last": lambda x: x[-1]}.get(how) or (lambda x: getattr(np, how)(x, 0))
            np.testing.assert_allclose(found, exact(stacked), rtol=1e-5, atol=1e-4, err_msg=f"{what} {how}: {key}")
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


def check_buffers(fun: Any, x: Any, result: float, events: list[programs.Event], size: int, every: int) -> None:
    for interval in (None, every):
        received: list[lox.logdict] = []
        assert float(jax.jit(lox.tap(fun, received.append, interval=interval, buffer=size))(x)) == result
        jax.effects_barrier()
        assert_blocks(received, size)
        kept = thinned(events, interval or 1)
        assert_logs(sum(received, lox.logdict()), kept, f"tap(interval={interval}, buffer={size})")
        # Sums of blocks add up, whatever the blocks are.
        received = []
        assert float(lox.tap(fun, received.append, interval=interval, buffer=size, reduce="sum")(x)) == result
        assert_reduced(sum(received, lox.logdict()).reduce("sum"), kept, "sum", f"tap(interval={interval}, sum)")


def plain_form(event: tuple[str, Any]) -> tuple[str, str]:
    key, value = event
    return key, str([np.asarray(leaf).tolist() for leaf in jax.tree.leaves(value)])


@pytest.mark.parametrize("seed", range(SEED, SEED + N))
def test_program(seed: int) -> None:
    program, x0 = program_for(seed)
    kinds = programs.kinds_in(program)
    result, events = programs.run_plain(program, x0)
    fun = programs.JaxRunner(program)
    fun.__name__ = "program"  # type: ignore[attr-defined]
    x = jnp.float32(x0)
    capacity = MAX_EVENTS if "while" in kinds else None

    def check(spooled: Any, what: str) -> None:
        for call in ("first", "second"):
            out, logs = spooled(x)
            assert float(out) == result, what
            assert_logs(logs, events, f"{what}, {call} call")

    jitted = jax.jit(fun)
    with lox.testing.capture() as leaked:
        check(lox.spool(fun, capacity=capacity), "spool")
        check(jax.jit(lox.spool(fun, capacity=capacity)), "jit(spool)")
        check(lox.spool(jitted, capacity=capacity), "spool(jit)")
    assert not leaked

    if "shard_map" not in kinds:
        xs = x + jnp.arange(3.0)
        lanes = [programs.run_plain(program, x0 + n) for n in range(3)]
        inside = jax.jit(lox.spool(jax.vmap(fun), capacity=3 * MAX_EVENTS if capacity else None))(xs)
        outside = jax.jit(jax.vmap(lox.spool(fun, capacity=capacity)))(xs)
        for n, (lane_result, lane_events) in enumerate(lanes):
            for (outs, logs), what in ((inside, "spool(vmap)"), (outside, "vmap(spool)")):
                assert float(outs[n]) == lane_result, what
                assert_logs(pick_lane(logs, n), lane_events, f"{what}, lane {n}")
        if not kinds & {"vmap"}:
            for what, tapped in (
                ("tap(vmap)", lambda cb: lox.tap(jax.vmap(fun), cb)),
                ("vmap(tap)", lambda cb: jax.jit(jax.vmap(lox.tap(fun, cb)))),
            ):
                received: list[lox.logdict] = []
                tapped(received.append)(xs)
                jax.effects_barrier()
                for n, (_, lane_events) in enumerate(lanes):
                    assert_streamed(received, lane_events, f"{what}, lane {n}", n)

    if not kinds & {"vmap", "shard_map"}:
        for tapped, what in (
            (lambda cb: lox.tap(fun, cb), "tap"),
            (lambda cb: lox.tap(jitted, cb), "tap(jit)"),
            (lambda cb: jax.jit(lox.tap(fun, cb)), "jit(tap)"),
        ):
            received = []
            assert float(tapped(received.append)(x)) == result, what
            jax.effects_barrier()
            assert_streamed(received, events, what)
        # The function itself is as it was. (Without a transformation around, XLA may reorder independent lines.)
        for plain, what in ((fun, "plain"), (jitted, "jit")):
            with lox.testing.capture() as received:
                assert float(plain(x)) == result, what
            assert sorted(map(plain_form, in_order(received))) == sorted(
                plain_form((e.key, e.value)) for e in events
            ), what

    if not kinds & {"vmap", "shard_map"}:
        how, every, size = REDUCTIONS[seed % len(REDUCTIONS)], 2 + seed % 3, (1, 7, 100)[seed % 3]
        out, logs = jax.jit(lox.spool(fun, reduce=how))(x)
        assert float(out) == result
        assert_reduced(logs, events, how, "reduce")
        _, logs = jax.jit(lox.spool(jax.vmap(fun), reduce=how))(xs)
        for n, (_, lane_events) in enumerate(lanes):
            assert_reduced(pick_lane(logs, n), lane_events, how, f"spool(vmap, reduce), lane {n}")
        _, logs = jax.jit(lox.spool(fun, interval=every, capacity=capacity))(x)
        assert_logs(logs, thinned(events, every), f"interval={every}")
        _, logs = jax.jit(lox.spool(jax.vmap(fun), interval=every, capacity=3 * MAX_EVENTS if capacity else None))(xs)
        for n, (_, lane_events) in enumerate(lanes):
            assert_logs(pick_lane(logs, n), thinned(lane_events, every), f"spool(vmap, interval={every}), lane {n}")
        check_buffers(fun, x, result, events, size, every)
        for what, tapped in (
            ("tap(vmap)", lambda cb: lox.tap(jax.vmap(fun), cb, buffer=size)),
            ("vmap(tap)", lambda cb: jax.vmap(lox.tap(fun, cb, buffer=size))),
        ):
            received = []
            jax.jit(tapped(received.append))(xs)
            jax.effects_barrier()
            assert_blocks(received, size)
            for n, (_, lane_events) in enumerate(lanes):
                assert_logs(pick_lane(sum(received, lox.logdict()), n), lane_events, f"{what}, buffer={size}, lane {n}")

    bare = programs.JaxRunner(program, logs=False)
    bare.__name__ = "program"  # type: ignore[attr-defined]
    nolog = jax.jit(lox.nolog(fun)).lower(x).as_text()
    assert "callback" not in nolog
    # By the time nolog sees it, a vmapped while loop inside a jit has its masks; and differentiating a loop that does
    # nothing but log, JAX has already decided that it does something.
    # A solver's constants and operands are its own: JAX does not remove those that nothing reads any more.
    if not kinds & {"linear_solve", "root"} and not ("while" in kinds and kinds & {"vmap", "jvp", "linearize"}):
        without = jax.jit(bare).lower(x).as_text()
        # JAX leaves dead code inside some primitives, which nolog removes: then there is less, but never more.
        assert canonical(nolog) == canonical(without) or operations(nolog) <= operations(without)
