"""PPO with eight seeds, each a Neptune run: `python examples/neptune_ppo.py`.

Runs are offline, under `.neptune/offline`, because Neptune's hosted service ended in March 2026. `lox.neptune` is used
like Neptune's client, but inside the compiled and mapped program.
"""

import functools

import jax
import jax.numpy as jnp
from ppo import SEEDS, train

import lox
import lox.neptune


@jax.jit
@jax.vmap
def train_and_log(prng_key, learning_rate):
    run = lox.neptune.init(prng_key, config={"learning_rate": learning_rate}, tags=["ppo"])
    params, logs = lox.spool(functools.partial(train, prng_key))(learning_rate)
    lox.neptune.log(run, logs, prefix="train/")
    lox.neptune.finish(run)
    return params


def main():
    prng_keys = jax.random.split(jax.random.key(0), SEEDS)
    jax.block_until_ready(train_and_log(prng_keys, jnp.geomspace(1e-3, 1e-2, SEEDS)))
    lox.neptune.flush()


if __name__ == "__main__":
    main()
