"""Whole outputs compared exactly: keys and their order, structure, shape, dtype, value."""

import numpy as np

import lox


def f32(x):
    return np.asarray(x, np.float32)


def i32(x):
    return np.asarray(x, np.int32)


def boolean(x):
    return np.asarray(x, bool)


def same(actual, expected):
    """Assert that two trees agree; NaN equals NaN. The order of keys counts in a logdict only."""
    if isinstance(expected, dict):
        assert isinstance(actual, dict)
        if isinstance(actual, lox.logdict):
            assert list(actual) == list(expected)
        assert sorted(actual) == sorted(expected)
        for key in expected:
            same(actual[key], expected[key])
    elif isinstance(expected, list | tuple):
        assert type(actual) is type(expected)
        assert len(actual) == len(expected)
        for a, e in zip(actual, expected, strict=True):
            same(a, e)
    else:
        a, e = np.asarray(actual), np.asarray(expected)
        assert (a.dtype, a.shape) == (e.dtype, e.shape)
        np.testing.assert_array_equal(a, e)
