"""Neptune inside of `jit` and `vmap`: one run per lane.

```python
import jax, lox.neptune


@jax.jit
@jax.vmap
def train(key, lr):
    run = lox.neptune.init(key, project="me/ppo", config={"lr": lr})
    for step in range(10):
        ...
        lox.neptune.log(run, {"loss": loss}, step=step)
    lox.neptune.finish(run)


train(jax.random.split(jax.random.key(0), 8), jnp.geomspace(1e-4, 1e-2, 8))
```

The hosted service of Neptune ended in March 2026; see `NeptuneLogger` for what is left of it. This module can be
imported without the client: `pip install 'lox-jax[neptune]'`.
"""

from collections.abc import Mapping
from typing import Any

from lox.loggers._functional import SeparateRuns, Shared
from lox.loggers._neptune import NeptuneLogger as NeptuneLogger
from lox.loggers._run import LoggerState, Run


class _NeptuneRuns(SeparateRuns, NeptuneLogger):
    def begin(self, run: Run, settings: dict[str, Any]) -> None:
        self._begin(run, settings)


_logger = Shared(_NeptuneRuns)


def init(key: Any, config: Mapping[str, Any] | None = None, **kwargs: Any) -> LoggerState:
    """Begin a run. Under `vmap` every lane is a run of its own.

    Args:
        key: The PRNG key of the run, which gives it its name.
        config: Hyper-parameters, for the namespace `config`; under `vmap`, arrays may differ from lane to lane.
        **kwargs: What `neptune.init_run` takes. The mode is "offline" unless `mode` or `NEPTUNE_MODE` says otherwise.

    Returns:
        The run, a pytree of arrays.
    """
    return _logger().init_with(key, config, kwargs)


def log(run: LoggerState, logs: Mapping[str, Any], prefix: str = "", **steps: Any) -> None:
    """Log values, or logs that `lox.spool` returned.

    Args:
        run: What `init` returned.
        logs: A dict of values, which is one event, or a `logdict`.
        prefix: Put in front of every key.
        **steps: Steps of these events: one number for all, or one for each event.
    """
    _logger().log(run, logs, prefix, **steps)


def finish(run: LoggerState) -> None:
    """End a run, after what was logged is written. What is not finished ends with the process.

    Raises:
        Exception: What went wrong since the last time, unless this is inside of a transformation.
    """
    _logger().finish_run(run)
