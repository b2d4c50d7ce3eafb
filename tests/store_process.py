"""Other processes that write to a store: `python store_process.py kill|kill_training|tail|... DIR ...`.

lox is imported once; the writers are forks of this process, which has started no JAX backend.
"""

import json
import os
import random
import signal
import struct
import sys
import time
import warnings

import numpy as np

import lox
from lox.store import Writer


def events(start, count):
    steps = np.arange(start, start + count, dtype=np.int64)
    logs = lox.logdict({"x": steps * 3, "y": np.stack([steps, -steps], 1).astype(np.float64)})
    logs.steps = {"step": {"x": steps, "y": steps}}
    return logs


def write_until_killed(directory, acknowledge, rng):
    """Write events 0, 1, 2, ... in flushes of all sizes; acknowledge the number of events after each."""
    writer = Writer(directory, segment_bytes=1 << 22)
    run = writer.open_run("killed")
    done = 0
    while True:
        count = rng.choice([1, 10, 1000, 100_000])
        writer.append(run, events(done, count))
        done += count
        if rng.random() < 0.7:
            writer.flush()
            os.write(acknowledge, struct.pack("<q", done))


def training(logger, length, buffer=None):
    """Return a compiled training of three seeds, each a run, that can start at any step."""
    import jax
    import jax.numpy as jnp

    def train(seed, start):
        def step(carry, i):
            lox.log({"x": 3 * i + seed, "y": jnp.stack([i, -i])}, step=i)
            return carry, None

        return jax.lax.scan(step, 0, start + jnp.arange(length))[0]

    seeds = jnp.arange(3)
    states = jax.vmap(lambda seed: logger.init(jax.random.key(seed), {"seed": seed}))(seeds)
    lane = lambda state, seed, start: logger.tap(train, state, buffer=buffer)(seed, start)  # noqa: E731
    run = jax.jit(jax.vmap(lane, in_axes=(0, 0, None)))
    return lambda start: run(states, seeds, start)


def train_until_killed(directory, acknowledge, rng):
    """Do the same from a training that is logged with SaveLogger."""
    logger = lox.SaveLogger(directory)
    run = training(logger, 50, rng.choice([None, 16, 50]))
    done = 0
    while True:
        run(done)
        done += 50
        if done == 50 or rng.random() < 0.3:  # the first once it is compiled
            logger.flush()
            os.write(acknowledge, struct.pack("<q", done))


def kill_training(directory, number, seed):
    """Kill that many trainings."""
    kill(directory, number, seed, train_until_killed)


def kill(directory, number, seed, write=write_until_killed):
    """Kill that many writers, every other one early on; print what each had acknowledged."""
    rng = random.Random(seed)
    acknowledged = []
    for i in range(number):
        reader, writer = os.pipe()
        child_seed = rng.random()
        pid = os.fork()
        if pid == 0:
            os.close(reader)
            write(os.path.join(directory, str(i)), writer, random.Random(child_seed))
        os.close(writer)
        # JAX takes a while to start.
        data = os.read(reader, 8) if write is train_until_killed or i % 2 else b""
        time.sleep(rng.uniform(0.02, 0.15))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        while block := os.read(reader, 1 << 16):
            data += block
        os.close(reader)
        acknowledged.append(struct.unpack("<q", data[-8:])[0] if data else 0)
    print(json.dumps(acknowledged))


def tail(directory, number):
    """Write, and wait for a reader every 40 events."""
    with Writer(directory) as writer:
        run = writer.open_run("live", config={"n": number})
        for i in range(number):
            writer.append(run, events(i, 1))
            if i == number // 2:
                writer.append(run, {"half": np.float32(i)})
            if i % 5 == 4:
                writer.flush()
            if i % 40 == 39:
                sys.stdin.readline()


def tail_training(directory, number):
    """Train without a flush, and wait for a reader; print the name of the first run."""
    with lox.SaveLogger(directory) as logger:
        run = training(logger, 10)
        print(logger._pipeline.runs[min(logger._pipeline.runs)].name, flush=True)
        for i in range(number):
            run(10 * i)
            sys.stdin.readline()


def race_training(directory, number):
    """Train on the same directory and with the same PRNG keys as others."""
    logger = lox.SaveLogger(directory)  # closed by the end of the process
    run = training(logger, 10)
    for i in range(number):
        run(10 * i)


def race(directory, processes, number):
    """Begin a run with the same PRNG key in several processes at the same moment, and write at once."""
    start = time.time() + 0.2
    children = []
    for p in range(processes):
        pid = os.fork()
        if pid == 0:
            time.sleep(max(0, start - time.time()))
            with Writer(directory, process=p, buffer_bytes=500) as writer:
                run = writer.open_run(key_data=[0, 42])
                for i in range(number):
                    writer.append(run, lox.logdict({"process": np.int32(p), "i": np.int32(i)}))
            os._exit(0)
        children.append(pid)
    for pid in children:
        _, status = os.waitpid(pid, 0)
        assert status == 0


def fill(directory, limit):
    """Write until the operating system refuses, by a real limit on the size of files."""
    import resource

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    writer = Writer(directory)
    run = writer.open_run()
    writer.append(run, events(0, 10))
    writer.flush()
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        writer.append(run, events(10, 10_000))
    except lox.StoreError as error:
        print(type(error).__name__, error.errno, error.filename)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    writer.append(run, events(10_010, 10))
    writer.close()


if __name__ == "__main__":
    warnings.filterwarnings("ignore", "os.fork", RuntimeWarning)
    warnings.filterwarnings("ignore", ".*fork.*", DeprecationWarning)
    name, directory, *numbers = sys.argv[1:]
    commands = [kill, kill_training, tail, tail_training, race, race_training, fill]
    {command.__name__: command for command in commands}[name](directory, *map(int, numbers))
