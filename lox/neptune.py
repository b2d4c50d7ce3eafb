"""Neptune for JAX programs: one run per lane, from inside `jit` and `vmap`.

>>> import jax, lox.neptune
>>> @jax.jit
... @jax.vmap
... def train(prng_key):
...     run = lox.neptune.init(prng_key, project="me/ppo", mode="offline")
...     for step in range(3):
...         lox.neptune.log(run, {"loss": 1.0 / (step + 1)}, step=step)
...     lox.neptune.finish(run)
>>> train(jax.random.split(jax.random.key(0), 2))
[neptune] [info ] Neptune initialized. Open in the app: offline/...

Neptune's hosted service ended in March 2026; see `NeptuneLogger` for what remains. The module can be imported without
the client, which is installed by `pip install 'lox-jax[neptune]'`.
"""

from collections.abc import Mapping
from typing import Any

from lox.loggers._module_api import SingleRuns, SingleRunsLogger
from lox.loggers._run import LoggerState
from lox.loggers._trackers._neptune import NeptuneLogger as NeptuneLogger


class _Runs(SingleRunsLogger, NeptuneLogger):
    module = "lox.neptune"


_runs = SingleRuns(_Runs)


def init(key: Any, config: Mapping[str, Any] | None = None, **kwargs: Any) -> LoggerState:
    """Begin a run; under `vmap`, one per lane.

    Args:
        key: The PRNG key of the run, which gives it its name.
        config: Hyper-parameters, for the namespace `config`. Under `vmap`, arrays may differ between lanes.
        **kwargs: Arguments of `neptune.init_run`. The mode is "offline" unless `mode` or `NEPTUNE_MODE` is set.

    Returns:
        The run, a pytree of arrays.
    """
    return _runs.init(key, kwargs, config)


log, flush, finish = _runs.log, _runs.flush, _runs.finish
