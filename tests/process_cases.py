"""Programs for `test_processes`: `python process_cases.py CASE DIR PROCESS PROCESSES PORT`, on four devices in all."""

import json
import os
import signal
import sys
import time
import warnings
from pathlib import Path

case, directory, number, processes, port = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={4 // processes}"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax  # noqa: E402

if processes > 1:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", processes, number)

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import AxisType, NamedSharding, PartitionSpec  # noqa: E402

import lox  # noqa: E402

MESH = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
KEYS = jax.vmap(jax.random.key)(jnp.array([7, 8]))


def spread(x):
    """An array over all devices of all processes."""
    return jax.make_array_from_callback(
        x.shape, NamedSharding(MESH, PartitionSpec("x")), lambda index: np.asarray(x)[index]
    )


XS = spread(np.arange(8.0, dtype=np.float32))


def train(x, first=0, last=6):
    def step(x, i):
        lox.log({"mean": jnp.mean(x), "both": {"min": x.min(), "max": x.max()}}, step=i)
        return x + 1, None

    return jax.lax.scan(step, x + first, first + jnp.arange(last - first))[0]


def plain(logs):
    return {key: jax.tree.map(lambda x: np.asarray(x).tolist(), value) for key, value in logs.items()}


seen = []


def spool():
    _, logs = jax.jit(lox.spool(train))(XS)
    return plain(logs)


def eager_spool():
    _, logs = lox.spool(jax.jit(train))(XS)
    return plain(logs)


def tap():
    jax.block_until_ready(lox.tap(jax.jit(train), lambda logs: seen.append(plain(logs)))(XS))
    return seen


def tap_inside():
    jax.block_until_ready(jax.jit(lox.tap(train, lambda logs: seen.append(plain(logs))))(XS))
    jax.effects_barrier()
    return seen


def tap_buffer():
    jax.block_until_ready(jax.jit(lox.tap(train, lambda logs: seen.append(plain(logs)), buffer=4))(XS))
    jax.effects_barrier()
    return seen


def watch():
    told = []
    for divisor in (1.0, 0.0, 2.0):
        try:
            jax.block_until_ready(lox.nolog(lox.watch(jax.jit(train)))(XS / divisor))
        except lox.NonFiniteError as error:
            told.append([error.key, error.steps, error.lane])
    return told, float(jax.jit(jnp.sum)(XS))


def write(logger, begin, first=0, last=6):
    """Log in all ways to two runs."""
    with logger:
        states = jax.vmap(begin(logger))(KEYS)
        for lane in range(2):
            state = jax.tree.map(lambda x, lane=lane: x[lane], states)
            jax.jit(lambda x, s=state: logger.tap(lambda x: train(x, first, last), s)(x))(XS + lane)
            jax.jit(lambda x, s=state: logger.spool(lambda x: train(x, first, last), s, prefix="spool/")(x))(XS + lane)
            mean = jax.jit(jnp.mean)(XS)
            logger.log(state, {"mine": 1.0, "of all": mean, "numbers": np.arange(3)}, step=first)
            _, logs = jax.jit(lox.spool(train))(XS)
            logger.log(state, logs, prefix="later/")
            for i in range(first, last) if logger._joins_processes else ():
                logger.log(state, {"spread": spread(np.arange(8.0) + i)}, step=i)


def save():
    write(lox.SaveLogger(directory), lambda logger: logger.init)


def resume():
    write(lox.SaveLogger(directory), lambda logger: logger.init)
    write(lox.SaveLogger(directory), lambda logger: lambda key: logger.resume(key, step=3), 3, 9)


def grow(x):
    return jax.lax.scan(lambda x, i: (lox.log({"x": x}, step=i), (x + 1, None))[1], x, jnp.arange(5))[0]


def parts():
    """Log arrays of which each process has a part: of values, events and runs."""
    grid = jax.make_mesh((2, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)

    def over(x, *spec):
        return jax.make_array_from_callback(x.shape, NamedSharding(grid, PartitionSpec(*spec)), lambda index: x[index])

    numbers = np.arange(32.0, dtype=np.float32).reshape(4, 8)
    with lox.SaveLogger(directory) as logger:
        states = jax.vmap(logger.init)(jax.vmap(jax.random.key)(jnp.arange(4)))
        state = jax.tree.map(lambda x: x[0], states)
        for i in range(3):
            values = {"w": over(numbers + i, "a", "b"), "mean": numbers.mean() + i, "plain": np.arange(3) + i}
            logger.log(state, values, step=i)
            columns = over(numbers.astype(jnp.bfloat16), None, "a")
            tree = {"rows": over(numbers - i, "a"), "columns": columns, "i": np.int8(i)}
            logger.log(state, {"tree": [tree, over(numbers, ("b", "a"))]})
        logger.log(state, lox.logdict.from_arrays({"events": XS}, events=True), step=spread(np.arange(8)))
        _, logs = jax.jit(lox.spool(grow))(XS)
        logger.log(state, logs, prefix="spool/")
        seeds = spread(np.arange(4.0, dtype=np.float32))
        _, logs = jax.jit(jax.vmap(lox.spool(train)))(seeds[:, None] + jnp.arange(2.0))
        jax.vmap(lambda state, logs: logger.log(state, logs, prefix="seeds/"))(states, logs)
        keys = over(np.arange(4), "a")
        logger.log(state, {"keys": jax.jit(jax.vmap(jax.random.key))(keys), "last": spread(np.arange(4))}, step=7)


def die():
    Path(directory + ".dying").write_text(str(os.getpid()))
    os.kill(os.getpid(), signal.SIGKILL)


def survive():
    """Exit after the other process: JAX would end it, as this one coordinates them."""
    print(json.dumps("closed"), flush=True)
    note = Path(directory + ".dying")
    while not note.exists() or not note.read_text() or is_alive(int(note.read_text())):
        time.sleep(0.05)
    os._exit(0)  # JAX would wait for the other one


def is_alive(pid):
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


def parts_killed():
    logger = lox.SaveLogger(directory)
    state = logger.init(KEYS[0])
    for i in range(5):
        if number == 1 and i == 3:
            die()
        logger.log(state, {"w": spread(np.arange(8.0) + i), "mean": i}, step=i)
        logger.flush()
    logger.close()
    survive()


def ragged():
    """Logs of a branch, whose empty slots are removed, and arrays of which each process has a part."""

    def step(x, i):
        jax.lax.cond(x.mean() > 5, lambda: (lox.log({"mean": x.mean(), "x": x}, step=i), None)[1], lambda: None)
        return x + 1, None

    def f(x):
        return jax.lax.scan(step, x, jnp.arange(5))[0]

    _, logs = lox.spool(jax.jit(f))(XS)
    _, padded = jax.jit(lox.spool(f))(XS)
    if processes > 1:
        assert str(logs) == "{'mean': [5.5, 6.5, 7.5], 'x': float32[3,8]}", str(logs)
        assert str(padded) == "{'mean': [-, -, 5.5, 6.5, 7.5], 'x': float32[5,8]}", str(padded)
    assert str(logs["x"].sharding.spec) == str(PartitionSpec(None, "x"))
    with lox.SaveLogger(directory) as logger:
        state = logger.init(KEYS[0])
        logger.log(state, logs)
        logger.log(state, padded, prefix="padded/")
        logger.spool(jax.jit(f), state, prefix="spool/")(XS)
        logger.spool(f, state, prefix="eager/")(XS)


def inside():
    """Begin runs inside of programs: one for all processes, and one for each device."""
    logger = lox.SaveLogger(directory)

    def f(key, x):
        state = logger.init(key)
        return state, logger.tap(lambda x: lox.log({"mean": x.mean()}, step=1), state)(x)

    def on_device(words, x):
        f(words[0], x)
        return x

    state, _ = jax.jit(f)(jax.random.key(7), XS)
    logger.log(state, {"late": 2.0})
    if processes > 1:
        try:
            logger.log(state, {"w": XS})
        except lox.LoxError as error:
            assert "'w' has" in str(error) and "begun inside of `jit`" in str(error), error
    words = spread(np.asarray(jax.vmap(jax.random.key_data)(jax.vmap(jax.random.key)(jnp.arange(4)))))
    spec = PartitionSpec("x")
    jax.jit(jax.shard_map(on_device, mesh=MESH, in_specs=spec, out_specs=spec))(words, XS).block_until_ready()
    logger.close()


def corners():
    """What processes have to agree about, though each of them sees something else."""
    with lox.SaveLogger(directory) as logger:
        states = jax.vmap(logger.init)(jax.vmap(jax.random.key)(jnp.arange(4)))
        over_all = jax.tree.map(lambda x: spread(np.asarray(x)), states)
        jax.vmap(lambda state, x: logger.log(state, {"lane": x}))(over_all, spread(np.arange(4.0)))
        state = jax.tree.map(lambda x: x[0], states)
        for i in range(3):
            logger.log(state, {"row": spread(np.full(4, i, np.float32))})
        for dtype, number in ((np.int8, 1), (np.int32, 300), (np.float32, 0.5)):
            logger.log(state, {"promoted": spread(np.full(4, number, dtype))}, at=number)
        local = jax.make_mesh((2,), ("l",), axis_types=(AxisType.Auto,), devices=jax.local_devices()[:2])
        x = jax.device_put(np.arange(2.0, dtype=np.float32), NamedSharding(local, PartitionSpec("l")))
        logger.tap(jax.jit(lambda x: train(x, 0, 2)), state, prefix="local/")(x)
        again = lox.SaveLogger(os.path.join(directory, "..", os.path.basename(directory)))
        again.log(again.init(jax.random.key(0)), {"again": XS})
        again.close()


def different():
    """Processes that log different things."""
    with lox.SaveLogger(directory) as logger:
        state = logger.init(KEYS[0])
        if number == 0:
            logger.log(state, {"a": spread(np.full(4, -1.0))})
        for i in range(3):
            logger.log(state, {"a": spread(np.full(4, float(i)))})
        if number == 1:
            logger.log(state, {"a": spread(np.full(4, -2.0))})
        there = jax.device_put(np.ones(2), jax.devices()[-1]) if number else remote()
        try:
            logger.log(state, {"there": there})
        except lox.LogTypeError as error:
            return str(error)


def remote():
    device = jax.sharding.SingleDeviceSharding(jax.devices()[-1])
    if jax.__version_info__ < (0, 10):
        jax.config.update("jax_enable_empty_arrays", True)
    return jax.make_array_from_single_device_arrays((2,), device, [], dtype=np.float32)


def tracker_parts():
    """A tracker cannot take parts of arrays, nor events of devices of other processes."""
    logger = lox.loggers.MultiLogger(lox.SaveLogger(directory + "/save"), lox.loggers.JsonlLogger(directory + "/json"))
    state = logger.init(KEYS[0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", lox.LoxWarning)
        logger.log(state, {"w": XS, "a": 1.0}, step=0)
        logger.log(state, {"a": 2.0}, step=1)
        spec = PartitionSpec("x")
        body = lambda x: (lox.log({"large": jnp.zeros(100) + x[0]}), x)[1]  # noqa: E731
        logger.tap(jax.jit(jax.shard_map(body, mesh=MESH, in_specs=spec, out_specs=spec)), state)(XS)
        try:
            logger.close()
        except Exception as error:
            return [str(e) for e in getattr(error, "exceptions", [error])]


def jsonl():
    write(lox.loggers.JsonlLogger(directory), lambda logger: logger.init)


def tensorboard(**options):
    def begin(logger):
        def init(key):
            state = logger.init(key)
            logger.log_text(state, "note", "begun")
            return state

        return init

    write(lox.loggers.TensorBoardLogger(directory, **options), begin)


def tensorboard_together():
    tensorboard(aggregate=True)


def wandb():
    write(lox.loggers.WandbLogger(mode="offline", dir=directory, project="p"), lambda logger: logger.init)


def killed():
    logger = lox.SaveLogger(directory)
    state = logger.init(KEYS[0])
    logger.log(state, {"x": 1.0}, step=0)
    logger.flush()
    if number == processes - 1:
        die()
    logger.log(state, {"x": 2.0}, step=1)
    logger.close()
    survive()


result = globals()[case]()
jax.effects_barrier()
print(json.dumps(result), flush=True)
if processes > 1:
    jax.distributed.shutdown()
