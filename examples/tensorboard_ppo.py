"""Eight agents at once in TensorBoard: `python examples/tensorboard_ppo.py`, then `tensorboard --logdir runs`."""

import sys

import jax
from ppo import SEEDS, train

from lox.loggers import TensorBoardLogger


def main(folder="runs"):
    prng_keys = jax.random.split(jax.random.key(0), SEEDS)
    with TensorBoardLogger(folder) as logger:

        @jax.jit
        @jax.vmap
        def train_and_log(prng_key):
            state = logger.init(prng_key, config={"algorithm": "PPO"})
            return logger.tap(train, state, buffer=100)(prng_key)

        lengths = train_and_log(prng_keys)
    print(f"episodes lasted {lengths[:, 0].mean():.0f} steps at first and {lengths[:, -1].mean():.0f} in the end")
    print(f"tensorboard --logdir {folder}")
    return lengths


if __name__ == "__main__":
    main(*sys.argv[1:])
