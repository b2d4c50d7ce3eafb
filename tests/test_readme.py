"""Every example in the README and in a docstring is run, and its output compared."""

import doctest
import importlib
import pkgutil
import re
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import lox

README = Path(__file__).parent.parent / "README.md"
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
MODULES = ["lox", *(module.name for module in pkgutil.walk_packages(lox.__path__, "lox."))]


@pytest.fixture(autouse=True)
def promotion_as_users_have_it():
    with jax.numpy_dtype_promotion("standard"):
        yield


def split_readme():
    """Return the README without the section that needs another package, and that section."""
    # doctest would take the closing fence for expected output.
    text = re.sub(r"^ *```.*$", "", README.read_text(encoding="utf-8"), flags=re.MULTILINE)
    before, title, rest = text.partition("### Checkpoints and resume\n")
    section, next_title, after = rest.partition("\n###")
    assert title and next_title
    return before + next_title + after, section


def run_examples(text, names, least):
    examples = doctest.DocTestParser().get_doctest(text, names, README.name, str(README), 0)
    failed, attempted = doctest.DocTestRunner(optionflags=OPTIONS).run(examples)
    assert attempted >= least
    assert not failed


@pytest.mark.slow
def test_readme():
    run_examples(split_readme()[0], {}, least=50)


@pytest.mark.slow
def test_readme_with_orbax():
    pytest.importorskip("orbax.checkpoint", reason="orbax-checkpoint is installed with the newest JAX only")
    run_examples(split_readme()[1], dict(jax=jax, jnp=jnp, lox=lox, tempfile=tempfile), least=8)


@pytest.mark.parametrize("name", MODULES)
def test_docstrings(name):
    if name == "lox._data._logdict":
        pytest.importorskip("pandas", reason="pandas is not installed")
    assert not doctest.testmod(importlib.import_module(name), optionflags=OPTIONS).failed
