"""Eight agents at once in Weights & Biases: `WANDB_MODE=offline python examples/wandb_ppo.py`.

One W&B run per seed, all in one group, and one more run with their mean and its confidence interval.
"""

import jax
from ppo import SEEDS, train

from lox.loggers import MultiLogger, WandbLogger


def main():
    prng_keys = jax.random.split(jax.random.key(0), SEEDS)
    each = WandbLogger(project="lox-ppo", group="ppo")
    together = WandbLogger(project="lox-ppo", name="ppo, all seeds", aggregate=True)
    with MultiLogger(each, together) as logger:

        @jax.jit
        @jax.vmap
        def train_and_log(prng_key):
            state = logger.init(prng_key, config={"algorithm": "PPO"})
            return logger.tap(train, state, buffer=100)(prng_key)

        lengths = train_and_log(prng_keys)
    print(f"episodes lasted {lengths[:, 0].mean():.0f} steps at first and {lengths[:, -1].mean():.0f} in the end")
    return lengths


if __name__ == "__main__":
    main()
