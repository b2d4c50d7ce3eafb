"""PPO with 16 seeds for each of three learning rates, in one compiled program: `python examples/ppo_sweep.py`.

The training of `ppo.py` knows nothing of seeds, sweeps or loggers. Here it is mapped over both, each seed with each
learning rate is a run on disk, and everything is written while the program runs: 48 runs, with one call of the host for
all of them whenever the device has collected 20 events of a key. Afterwards, the learning rates are compared over their
seeds, and their curves drawn.
"""

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp
from ppo import ENVS, STEPS, train

import lox

SEEDS, UPDATES = 16, 60
RATES = [3e-4, 1e-3, 3e-3]


def last_updates(lengths):
    """Score a run: episodes at the end, over several updates, because each has only a few of them."""
    return lengths[-10:].mean()


def main(directory="lox-ppo-sweep"):
    prng_keys = jax.random.split(jax.random.key(0), SEEDS)
    # The same runs again replace those of the last time.
    saved = lox.SaveLogger(directory, mode="overwrite")
    console = lox.ConsoleLogger(progress={"frames": UPDATES * STEPS * ENVS})
    with lox.MultiLogger(saved, console) as logger:

        def run(prng_key, rate):
            state = logger.init(prng_key, config={"lr": rate})
            return logger.tap(train, state, buffer=20)(prng_key, rate, UPDATES)

        # Every learning rate gets the same PRNG keys, and so the same first networks: `lox.compare` then looks at the
        # differences within pairs of runs, which vary less than the runs do.
        every_seed = jax.vmap(run, in_axes=(0, None))
        every_rate = jax.vmap(every_seed, in_axes=(None, 0))
        jax.block_until_ready(jax.jit(every_rate)(prng_keys, jnp.array(RATES)))

    found = lox.compare(directory, "episode_length", by="lr", at=last_updates)
    print(f"\n{found}\n")

    curves = lox.plot(directory, ["episode_length", "entropy", "loss/*"], by="lr")
    print(f"curves of {len(lox.runs(directory))} runs: {curves.save(Path(directory, 'curves.html'))}")
    print(f"in a browser, with all that was logged: lox ui {directory}")
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--directory", default="lox-ppo-sweep", help="where the runs go (default: %(default)s)")
    main(**vars(parser.parse_args()))
