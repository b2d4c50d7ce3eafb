"""Logging for JAX: values out of jit, scan, grad, vmap and the rest.

Write `lox.log` wherever a value is interesting, and decide outside what becomes of it.

>>> import jax, jax.numpy as jnp, lox
>>> def f(xs):
...     def step(carry, x):
...         carry += x
...         lox.log({"carry": carry})
...         return carry, x
...
...     return jax.lax.scan(step, 0, xs)[0]
>>> y, logs = lox.spool(f)(jnp.arange(3))  # return the logs beside the result
>>> print(logs)
{'carry': [0, 1, 3]}
>>> y = lox.tap(f, callback=print)(jnp.arange(3))  # stream them while the program runs
{'carry': 0}
{'carry': 1}
{'carry': 3}
>>> y = lox.nolog(f)(jnp.arange(3))  # remove them, at no cost
"""

import importlib as _importlib
import sys as _sys
import threading as _threading
from typing import TYPE_CHECKING

from lox import _export
from lox import logify as logify
from lox._data import _logdict
from lox._data._histogram import Histogram as Histogram
from lox._data._image import Image as Image
from lox._data._logdict import logdict as logdict
from lox._data._reduce import Reduction as Reduction
from lox._engine import _batching, _differentiation, _hidden, _recompute, _trace
from lox._engine import _rules_custom as _rules_custom  # with _rules, which it imports: they register the rules
from lox._engine._primitive import log as log
from lox._engine._scope import scope as scope
from lox._engine._sink import config as config
from lox._errors import KeyNotFoundError as KeyNotFoundError
from lox._errors import LogTypeError as LogTypeError
from lox._errors import LoxError as LoxError
from lox._errors import LoxWarning as LoxWarning
from lox._errors import MismatchError as MismatchError
from lox._errors import NonFiniteError as NonFiniteError
from lox._errors import OptionError as OptionError
from lox._errors import RunExistsError as RunExistsError
from lox._errors import RunNotFoundError as RunNotFoundError
from lox._errors import SpoolError as SpoolError
from lox._errors import StepError as StepError
from lox._errors import StoreError as StoreError
from lox._errors import TransformError as TransformError
from lox._version import __version__ as __version__

if TYPE_CHECKING:
    from lox import equinox as equinox
    from lox import flax as flax
    from lox import loggers as loggers
    from lox import neptune as neptune
    from lox import store as store
    from lox import testing as testing
    from lox import view as view
    from lox import wandb as wandb
    from lox._transforms._log_grad import log_grad as log_grad
    from lox._transforms._nolog import keep as keep
    from lox._transforms._nolog import nolog as nolog
    from lox._transforms._nolog import strip as strip
    from lox._transforms._reraise import reraise as reraise
    from lox._transforms._spool import spool as spool
    from lox._transforms._tap import tap as tap
    from lox._transforms._watch import watch as watch
    from lox.loggers import ConsoleLogger as ConsoleLogger
    from lox.loggers import CsvLogger as CsvLogger
    from lox.loggers import JsonlLogger as JsonlLogger
    from lox.loggers import Logger as Logger
    from lox.loggers import MultiLogger as MultiLogger
    from lox.loggers import SaveLogger as SaveLogger
    from lox.loggers._console._progress import progress as progress
    from lox.loggers._files._save_once import save as save
    from lox.store import load as load
    from lox.store import runs as runs
    from lox.view import compare as compare
    from lox.view import plot as plot

_batching.install()
_hidden.install(_trace.run_function)
_differentiation.install()
_recompute.install()
_export.install()

# What is imported when it is first used, because programs that only log should not wait for it: the imports above, as
# module and names. A test compares the two.
_LATER = {
    name: module
    for module, names in {
        "lox": ("equinox", "flax", "loggers", "neptune", "store", "testing", "view", "wandb"),
        "lox._transforms._log_grad": ("log_grad",),
        "lox._transforms._nolog": ("keep", "nolog", "strip"),
        "lox._transforms._reraise": ("reraise",),
        "lox._transforms._spool": ("spool",),
        "lox._transforms._tap": ("tap",),
        "lox._transforms._watch": ("watch",),
        "lox.loggers": ("ConsoleLogger", "CsvLogger", "JsonlLogger", "Logger", "MultiLogger", "SaveLogger"),
        "lox.loggers._console._progress": ("progress",),
        "lox.loggers._files._save_once": ("save",),
        "lox.store": ("load", "runs"),
        "lox.view": ("compare", "plot"),
    }.items()
    for name in names
}
# Two threads that import modules of one package, each from another end, may get half of one.
_importing = _threading.RLock()

if not TYPE_CHECKING:  # or every misspelt name would have a type

    def __getattr__(name: str) -> object:
        if name == "__all__":  # or `from lox import *` would leave these out
            return [public for public in __dir__() if not public.startswith("_")]
        module = _LATER.get(name)
        if module is None:
            # With what Python needs to suggest another name.
            raise AttributeError(f"module 'lox' has no attribute {name!r}", name=name, obj=_sys.modules[__name__])
        with _importing:
            if module == "lox":
                return _importlib.import_module(f"lox.{name}")
            value = globals()[name] = getattr(_importlib.import_module(module), name)
            return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *_LATER})

    # What the data has methods for, storeys above it.
    _logdict.plotter = lambda *args, **options: __getattr__("plot")(*args, **options)


del TYPE_CHECKING  # it is not a name of lox
