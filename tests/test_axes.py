"""Axes with names: aligned as a plain loop over all indices would do it, for NumPy and for JAX."""

import itertools
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exact import same

from lox._data import _axes

NAMES = [_axes.EVENT, 0, 1, 2]


@st.composite
def cases(draw: Any) -> Any:
    """An array, the names of its leading axes, those it shall have, and sizes for what it lacks."""
    sizes = {name: draw(st.integers(0, 3)) for name in NAMES}
    wanted = draw(st.permutations(NAMES))[: draw(st.integers(0, len(NAMES)))]
    axes = [name for name in draw(st.permutations(wanted)) if draw(st.booleans())]
    item = draw(st.lists(st.integers(0, 2), max_size=2))
    given = {name: size for name, size in sizes.items() if draw(st.booleans())}
    shape = [*[sizes[name] for name in axes], *item]
    return np.arange(np.prod(shape, dtype=int)).reshape(shape), axes, wanted, given


def plainly(x: Any, axes: Any, wanted: Any, given: Any) -> Any:
    """One element after the other."""
    have = dict(zip(axes, x.shape, strict=False))
    shape = [have.get(name, given.get(name, 1)) for name in wanted]
    out = np.zeros([*shape, *x.shape[len(axes) :]], x.dtype)
    for index in itertools.product(*map(range, shape)):
        place = dict(zip(wanted, index, strict=True))
        out[index] = x[tuple(place[name] for name in axes)]
    return out


@hypothesis.given(cases())
def test_align(case: Any) -> None:
    x, axes, wanted, given = case
    expected = plainly(x, axes, wanted, given)
    result = _axes.align(x, axes, wanted, given)
    assert isinstance(result, np.ndarray)
    same(result, expected)


@pytest.mark.slow
@hypothesis.settings(max_examples=50, deadline=None)
@hypothesis.given(cases())
def test_align_of_jax(case: Any) -> None:
    x, axes, wanted, given = case
    x = x.astype(np.int32)
    expected = plainly(x, axes, wanted, given)
    same(_axes.align(jnp.asarray(x), axes, wanted, given), expected)
    same(jax.jit(lambda x: _axes.align(x, axes, wanted, given))(x), expected)


def test_no_axis_is_dropped() -> None:
    with pytest.raises(ValueError, match=r"an array with axes \['event', 0\] cannot have only \[0\]"):
        _axes.align(np.zeros((2, 3)), [_axes.EVENT, 0], [0])
