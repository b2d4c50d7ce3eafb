"""Train eight small networks at once, and look at their logs: `make demo`.

The training is plain JAX: eight seeds under `vmap`, a loop of steps inside a loop of rounds, all of
it compiled. Metrics are logged where they are computed, without passing them through. The same
function is then called four ways: logs are returned, streamed, removed, and saved: for two learning
rates, one run per seed, in the folder `lox-demo`. `make ui` shows their curves in a browser.
"""

import itertools
import os
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import lox

SEEDS, ROUNDS, STEPS, BATCH = 8, 10, 100, 64
DIRECTORY = Path("lox-demo")


# --- The training: a network of 32 × 32 units learns to tell two spirals apart -------------------


def spirals(prng_key, n):
    label_key, turn_key, noise_key = jax.random.split(prng_key, 3)
    label = jax.random.bernoulli(label_key, shape=(n,)).astype(jnp.int32)
    turn = 0.25 + 1.5 * jax.random.uniform(turn_key, (n,))
    angle = 2 * jnp.pi * (turn + label / 2)
    x = turn[:, None] * jnp.stack([jnp.cos(angle), jnp.sin(angle)], -1)
    return x + 0.1 * jax.random.normal(noise_key, (n, 2)), label


def init(prng_key):
    sizes = (2, 32, 32, 2)
    prng_keys = jax.random.split(prng_key, len(sizes) - 1)
    return [
        (jax.random.normal(k, (i, o)) * (2 / i) ** 0.5, jnp.zeros(o))
        for k, (i, o) in zip(prng_keys, itertools.pairwise(sizes), strict=True)
    ]


def forward(params, x):
    for w, b in params[:-1]:
        x = jax.nn.relu(x @ w + b)
    w, b = params[-1]
    return x @ w + b


def loss(params, batch, step):
    x, label = batch
    logits = forward(params, x)
    value = -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), label[:, None], 1))
    accuracy = jnp.mean(jnp.argmax(logits, -1) == label)
    lox.log({"loss": value, "accuracy": accuracy}, step=step)
    return value


def train(prng_key, lr=0.3):
    """Train one network with SGD, from its seed."""
    init_key, data_key, test_key = jax.random.split(prng_key, 3)
    params = init(init_key)
    test_x, test_label = spirals(test_key, 500)

    def train_step(params, step):
        batch = spirals(jax.random.fold_in(data_key, step), BATCH)
        grads = jax.grad(loss)(params, batch, step)
        lox.log({"grad_norm": jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))})
        return jax.tree.map(lambda p, g: p - lr * g, params, grads), None

    def train_round(params, number):
        params, _ = jax.lax.scan(train_step, params, number * STEPS + jnp.arange(STEPS))
        accuracy = jnp.mean(jnp.argmax(forward(params, test_x), -1) == test_label)
        lox.log({"test/accuracy": accuracy}, step=(number + 1) * STEPS)
        return params, None

    return jax.lax.scan(train_round, params, jnp.arange(ROUNDS))[0]


train_all = jax.vmap(train)


# --- What to do with the logs --------------------------------------------------------------------


def title(text):
    print(f"\n{text}\n{'-' * len(text)}")


def curve(values, width=20):
    """Draw values as a line of bars, each the mean of several."""
    heights = np.array([part.mean() for part in np.array_split(np.asarray(values), width)])
    scaled = (heights - heights.min()) / max(np.ptp(heights), 1e-9)
    return "".join("▁▂▃▄▅▆▇█"[int(7 * h)] for h in scaled)


def return_logs(prng_keys):
    title("spool: the logs come back with the result")
    params, logs = jax.jit(lox.spool(train_all))(prng_keys)
    for key in logs:
        print(f"{key:<14} {logs[key].shape[0]:>5} events × {logs[key].shape[1]} seeds")

    line = "{:>4} {:7.3f} {:9.3f} {:7.3f} {:6.3f}"
    print(f"\n{'seed':>4} {'loss':>7} {'accuracy':>9} {'|grad|':>7} {'test':>6}   loss curve")
    names = ["loss", "accuracy", "grad_norm", "test/accuracy"]
    table = []
    for seed in range(SEEDS):
        lane = logs.lane(seed)
        # The mean over the last round, or the last event of what is logged once per round.
        final = lane.filter(names[:3]).slice[-STEPS:].reduce("mean")
        final |= lane.filter("test/*").reduce("last")
        table.append([float(final[name]) for name in names])
        print(line.format(seed, *table[-1]), "", curve(lane["loss"]))
    print(line.format("mean", *np.mean(table, 0)))
    print(line.format("+/-", *np.std(table, 0)))
    return params


def stream_logs(prng_keys):
    title("tap: the logs arrive while the training runs, all seeds in one call")

    def show(logs):
        accuracy = logs["test/accuracy"]
        print(
            f"step {logs.step['test/accuracy']:>5}   test accuracy {accuracy.mean():.3f}"
            f" +/- {accuracy.std():.3f}   worst seed {accuracy.argmin()}: {accuracy.min():.3f}",
            flush=True,
        )

    # The steps log too, but only the log of the outer loop is wanted here.
    lox.tap(jax.jit(train_all), show, argnames="test/*")(prng_keys)


def save_logs(prng_keys):
    title("SaveLogger: one run per seed and learning rate, on disk")
    # The same runs again replace those of the last demo.
    with lox.SaveLogger(DIRECTORY, mode="overwrite") as logger:

        @jax.jit
        @jax.vmap
        def train_and_save(prng_key, lr):
            run = logger.init(prng_key, config={"lr": lr})
            return logger.tap(train, run, buffer=STEPS)(prng_key, lr)

        rates = jnp.repeat(jnp.array([0.3, 0.1]), SEEDS)
        train_and_save(jnp.concatenate([prng_keys, prng_keys]), rates)
    print(lox.compare(lox.load(DIRECTORY), "test/accuracy", by="lr"))


def remove_logs(prng_keys, params):
    title("nolog: the logs are gone, and so is their cost")
    silent = jax.jit(lox.nolog(train_all))
    for name, function in ("with logs", jax.jit(train_all)), ("nolog", silent):
        calls = function.lower(prng_keys).as_text().count("callback")
        print(f"{name:<10} {calls} calls from the compiled program to Python")
    pairs = zip(jax.tree.leaves(silent(prng_keys)), jax.tree.leaves(params), strict=True)
    difference = max(float(jnp.max(jnp.abs(a - b))) for a, b in pairs)
    print(f"largest difference to the parameters that spool gave: {difference:g}")


def say_what_next():
    """Print what to type: the command of this environment, which may not be on the PATH."""
    command = Path(sys.executable).with_name("lox")
    shown = os.path.relpath(command) if command.exists() else f"{os.path.relpath(sys.executable)} -m lox"
    title("The curves in a browser, with a mean and a band for each learning rate")
    if Path("Makefile").exists():
        print("make ui\n\nwhich is short for\n")
    print(f"{shown} ui {DIRECTORY}")


def main():
    prng_keys = jax.random.split(jax.random.key(0), SEEDS)
    platform = jax.devices()[0].platform
    print(f"{SEEDS} seeds × {ROUNDS * STEPS} steps on {platform}, JAX {jax.__version__}")
    params = return_logs(prng_keys)
    stream_logs(prng_keys)
    remove_logs(prng_keys, params)
    save_logs(prng_keys)
    say_what_next()


if __name__ == "__main__":
    main()
