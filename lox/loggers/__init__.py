"""Loggers: they write logs to files, the console, trackers, or several of these at once.

>>> import jax, jax.numpy as jnp, lox, tempfile
>>> def train(x):
...     def step(x, i):
...         lox.log({"x": x}, step=i)
...         return x / 2, None
...
...     return jax.lax.scan(step, x, jnp.arange(3))[0]
>>> with lox.loggers.JsonlLogger(tempfile.mkdtemp()) as logger:
...     state = logger.init(jax.random.key(42))
...     y = logger.spool(train, state)(8.0)
>>> print((logger.path / "42.jsonl").read_text(), end="")
{"step": 0, "x": 8.0}
{"step": 1, "x": 4.0}
{"step": 2, "x": 2.0}
"""

from lox.loggers._console._logger import ConsoleLogger as ConsoleLogger
from lox.loggers._files._csv import CsvLogger as CsvLogger
from lox.loggers._files._jsonl import JsonlLogger as JsonlLogger
from lox.loggers._files._save import SaveLogger as SaveLogger
from lox.loggers._logger import Logger as Logger
from lox.loggers._multi import MultiLogger as MultiLogger
from lox.loggers._run import LoggerState as LoggerState
from lox.loggers._run import Run as Run
from lox.loggers._trackers._mlflow import MLflowLogger as MLflowLogger
from lox.loggers._trackers._neptune import NeptuneLogger as NeptuneLogger
from lox.loggers._trackers._tensorboard import TensorBoardLogger as TensorBoardLogger
from lox.loggers._trackers._trackio import TrackioLogger as TrackioLogger
from lox.loggers._trackers._wandb import WandbLogger as WandbLogger
