"""Weights & Biases for JAX programs: one run per lane, from inside `jit` and `vmap`.

>>> import jax, lox.wandb
>>> @jax.jit
... @jax.vmap
... def train(prng_key):
...     run = lox.wandb.init(prng_key, project="demo", group="seeds", mode="offline")
...     for step in range(3):
...         lox.wandb.log(run, {"loss": 1.0 / (step + 1)}, step=step)
...     lox.wandb.finish(run)
>>> train(jax.random.split(jax.random.key(0), 2))

To spool or tap logs, use the logger `lox.wandb.WandbLogger`, which can do all of this too. The module can be imported
without the client; the first use says what to install.
"""

from collections.abc import Mapping
from typing import Any

from lox.loggers._module_api import SingleRuns, SingleRunsLogger
from lox.loggers._run import LoggerState
from lox.loggers._trackers._wandb import WandbLogger as WandbLogger


class _Runs(SingleRunsLogger, WandbLogger):
    module = "lox.wandb"


_runs = SingleRuns(_Runs)


def init(key: Any, *, config: Mapping[str, Any] | None = None, **kwargs: Any) -> LoggerState:
    """Begin a run.

    Args:
        key: The PRNG key of the run, which gives it its name.
        config: Hyper-parameters. Under `vmap`, arrays may differ between lanes.
        **kwargs: Arguments of `wandb.init`. The name of each run is appended to a given `name` or `id`.

    Returns:
        A pytree of arrays, for `log` and `finish`; under `vmap` one run per lane.
    """
    return _runs.init(key, kwargs, config)


log, flush, finish = _runs.log, _runs.flush, _runs.finish
