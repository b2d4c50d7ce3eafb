"""PPO with eight seeds, each a Trackio run: `python examples/trackio_ppo.py`, then `trackio show --project ppo`."""

import jax
import jax.numpy as jnp
from ppo import SEEDS, train

from lox.loggers import TrackioLogger


def main(project="ppo"):
    prng_keys = jax.random.split(jax.random.key(0), SEEDS)
    rates = jnp.geomspace(1e-3, 1e-2, SEEDS)
    with TrackioLogger(project, group="sweep") as logger:
        # The runs exist before the training starts, so that they can be used in several compiled functions.
        runs = jax.vmap(lambda prng_key, rate: logger.init(prng_key, config={"learning_rate": rate}))(prng_keys, rates)
        tapped = jax.vmap(lambda run, prng_key, rate: logger.tap(train, run, buffer=100)(prng_key, rate))
        jax.block_until_ready(jax.jit(tapped)(runs, prng_keys, rates))


if __name__ == "__main__":
    main()
