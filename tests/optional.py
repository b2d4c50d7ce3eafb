"""Skips tests that need several devices or optional packages where there are none."""

import importlib
from typing import Any

import jax
import numpy as np
import pytest


def devices(number: int) -> np.ndarray:
    """Return so many devices, for a mesh, or skip the test."""
    devices = jax.devices()
    if len(devices) < number:
        pytest.skip(f"needs {number} devices, of which there {'is' if len(devices) == 1 else 'are'} {len(devices)}")
    return np.array(devices[:number])


class Missing:
    """Replaces a package that is not installed: using it skips the test."""

    def __init__(self, name: str):
        self.__name__ = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # pytest looks whether it is a test
            raise AttributeError(name)
        pytest.skip(f"{self.__name__} is not installed")


def package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return Missing(name)


duckdb, pandas, polars, pyarrow = map(package, ["duckdb", "pandas", "polars", "pyarrow"])
package("pyarrow.ipc")  # of which pyarrow has the attribute only after this

try:
    from hypothesis import HealthCheck, given, settings
    from hypothesis import strategies as st

    # The time of an example depends on the machine.
    settings.register_profile("lox", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("lox")
except ImportError:
    from unittest.mock import MagicMock

    HealthCheck = st = MagicMock()

    class settings:
        max_examples = 0

        def __init__(self, *_: Any, **__: Any):
            pass

        def __call__(self, test: Any) -> Any:
            return test

    def given(*_: Any, **__: Any) -> Any:
        return pytest.mark.skip(reason="hypothesis is not installed")
