"""A training that is killed and goes on from its checkpoint: `python examples/resume_orbax.py`.

Four networks are trained at once, each a run, and Orbax saves a checkpoint every 100 steps. The training is a process
of its own, which is killed in the middle, by SIGKILL, about which it can do nothing. Started again, it finds the last
checkpoint, and `logger.resume` goes on with the same runs: the steps after the checkpoint are computed, and logged,
once more. In the end every run has every step once, and lox says that what was computed again came out the same, bit by
bit.
"""

import argparse
import functools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import optax

import lox

SEEDS, STEPS, SAVE = 4, 1000, 100
WIDTH, BATCH = 128, 256


# --- the training: networks learn a function from samples of it ----------------------------------

optimizer = optax.adam(optax.cosine_decay_schedule(3e-3, STEPS))


def init(prng_key):
    keys = jax.random.split(prng_key, 3)
    params = {
        "in": 3.0 * jax.random.normal(keys[0], (2, WIDTH)),
        "hidden": jax.random.normal(keys[1], (WIDTH, WIDTH)) * WIDTH**-0.5,
        "out": jax.random.normal(keys[2], (WIDTH,)) * WIDTH**-0.5,
    }
    return {"params": params, "moments": optimizer.init(params)}


def loss(params, x, step):
    predicted = jnp.tanh(jnp.tanh(x @ params["in"]) @ params["hidden"]) @ params["out"]
    value = jnp.mean((predicted - jnp.sin(4 * x[:, 0]) * jnp.cos(3 * x[:, 1])) ** 2)
    lox.log({"loss": value}, step=step)
    return value


def train_step(training, prng_key, step):
    # All random numbers come from the seed and the step, so that a step that is computed again has the same.
    x = jax.random.uniform(jax.random.fold_in(prng_key, step), (BATCH, 2), minval=-1.0)
    grads = jax.grad(loss)(training["params"], x, step)
    lox.log({"grad_norm": optax.tree.norm(grads)}, step=step)
    changes, moments = optimizer.update(grads, training["moments"])
    return {"params": optax.apply_updates(training["params"], changes), "moments": moments}


def train(directory):
    """Train to the end, from the last checkpoint if there is one."""
    import orbax.checkpoint as ocp  # here, because only the training needs it

    prng_keys = jax.vmap(jax.random.key)(jnp.arange(SEEDS))
    training = jax.vmap(init)(prng_keys)
    # What was being saved when the process was killed is of no use.
    options = ocp.CheckpointManagerOptions(max_to_keep=2, cleanup_tmp_directories=True)
    saved = ocp.CheckpointManager(directory / "checkpoints", options=options)
    with lox.SaveLogger(directory / "runs") as logger, saved as manager:
        first = manager.latest_step() or 0
        if first:
            training = manager.restore(first, args=ocp.args.StandardRestore(training))
        # At step 0 this begins the runs; later it goes on with them.
        runs = jax.vmap(lambda prng_key: logger.resume(prng_key, step=first))(prng_keys)

        @jax.jit
        @functools.partial(jax.vmap, in_axes=(0, 0, 0, None))
        def logged_step(run, training, prng_key, step):
            return logger.tap(train_step, run)(training, prng_key, step)

        for step in range(first, STEPS):
            training = logged_step(runs, training, prng_keys, step)
            if (step + 1) % SAVE == 0:
                logger.flush()  # so that the logs are never behind the checkpoint
                manager.save(step + 1, args=ocp.args.StandardSave(training))


# --- the experiment: kill it in the middle, and start it again -----------------------------------


def logged(folder):
    """Return how many steps the runs have so far. They can be read while another process writes them."""
    runs = lox.runs(folder / "runs") if (folder / "runs").exists() else []
    return min((len(lox.load(folder / "runs", run.name).get("loss", ())) for run in runs), default=0)


def last_checkpoint(folder):
    """Return the step of the last checkpoint: Orbax renames its folder once it is complete."""
    return max((int(path.name) for path in folder.glob("checkpoints/*") if path.name.isdecimal()), default=0)


def main(directory="lox-resume-orbax"):
    # A new folder each time, since a training that is done would have nothing to do. Orbax wants its path in full.
    folder = Path(directory, time.strftime("%Y-%m-%d-%H%M%S")).resolve()
    folder.mkdir(parents=True)
    command = [sys.executable, __file__, "--train", folder]
    print(f"{SEEDS} runs of {STEPS} steps, with a checkpoint every {SAVE} steps", flush=True)

    with subprocess.Popen(command) as process:
        # Until there are checkpoints, and steps after the last one.
        while (last := last_checkpoint(folder)) < 2 * SAVE or logged(folder) < last + SAVE // 2:
            assert process.poll() is None, "the training ended before it could be killed"
            time.sleep(0.01)
        process.kill()
    assert process.returncode == -signal.SIGKILL
    last, before = last_checkpoint(folder), logged(folder)
    print(f"killed: {before} steps are logged, and the last checkpoint is that of step {last}", flush=True)

    subprocess.run(command, check=True)
    print(f"started again: from step {last} to {STEPS}\n")

    runs = lox.runs(folder / "runs")
    print(f"{runs}\n")
    for run in runs:
        logs = lox.load(folder / "runs", run.name)
        assert all(logs.step[key].tolist() == list(range(STEPS)) for key in ("loss", "grad_norm"))
        everything = lox.load(folder / "runs", run.name, attempts="all")
        assert len(everything["loss"]) - STEPS >= before - last > 0  # they are still on disk
        assert (run.attempts, run.state, run.resumed) == (2, "finished", "resumed exactly")
    print(f"each run has each step once; {before - last} steps were computed twice, and came out the same")
    print(f"\nthe curves: lox ui {os.path.relpath(folder / 'runs')}")
    return runs


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--directory", default="lox-resume-orbax", help="where all goes (default: %(default)s)")
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.train is None:
        main(arguments.directory)
    else:
        train(arguments.train)
