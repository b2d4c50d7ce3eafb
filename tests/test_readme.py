"""Every example in the README and in a docstring is run, and its output compared."""

import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import jax
import pytest

import lox

README = Path(__file__).parent.parent / "README.md"
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
MODULES = ["lox", *(module.name for module in pkgutil.walk_packages(lox.__path__, "lox."))]


@pytest.fixture(autouse=True)
def promotion_as_users_have_it():
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.mark.slow
def test_readme():
    # doctest would take the closing fence for expected output.
    text = re.sub(r"^ *```.*$", "", README.read_text(encoding="utf-8"), flags=re.MULTILINE)
    examples = doctest.DocTestParser().get_doctest(text, {}, README.name, str(README), 0)
    failed, attempted = doctest.DocTestRunner(optionflags=OPTIONS).run(examples)
    assert attempted > 50
    assert not failed


@pytest.mark.parametrize("name", MODULES)
def test_docstrings(name):
    if name == "lox._data._logdict":
        pytest.importorskip("pandas", reason="pandas is not installed")
    assert not doctest.testmod(importlib.import_module(name), optionflags=OPTIONS).failed
