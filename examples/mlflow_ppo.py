"""PPO with eight seeds, each an MLflow run: `python examples/mlflow_ppo.py`.

To look at it: `pip install mlflow`, then `mlflow ui --backend-store-uri sqlite:///mlflow.db`.
"""

import jax
import jax.numpy as jnp
from ppo import SEEDS, train

from lox.loggers import MLflowLogger


def main(tracking_uri="sqlite:///mlflow.db"):
    prng_keys = jax.random.split(jax.random.key(0), SEEDS)
    rates = jnp.geomspace(1e-3, 1e-2, SEEDS)
    with MLflowLogger("ppo", tracking_uri) as logger:

        @jax.jit
        @jax.vmap
        def train_and_log(prng_key, learning_rate):
            run = logger.init(prng_key, config={"learning_rate": learning_rate})
            return logger.tap(train, run, buffer=100)(prng_key, learning_rate)

        jax.block_until_ready(train_and_log(prng_keys, rates))


if __name__ == "__main__":
    main()
