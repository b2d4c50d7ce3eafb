"""Eight agents at once in TensorBoard: `python examples/tensorboard_ppo.py`, then `tensorboard --logdir runs`."""

import sys

import jax
from ppo import SEEDS, train

from lox.loggers import TensorBoardLogger


def main(path="runs"):
    keys = jax.random.split(jax.random.key(0), SEEDS)
    with TensorBoardLogger(path) as logger:

        @jax.jit
        @jax.vmap
        def run(key):
            state = logger.init(key, config={"algorithm": "PPO"})
            return logger.tap(train, state, buffer=100)(key)

        lengths = run(keys)
    print(f"episodes lasted {lengths[:, 0].mean():.0f} steps at first and {lengths[:, -1].mean():.0f} in the end")
    print(f"tensorboard --logdir {path}")
    return lengths


if __name__ == "__main__":
    main(*sys.argv[1:])
