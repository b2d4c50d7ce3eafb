"""Modes of JAX: guards, debugging, disabled jit."""

import contextlib
import os
import sys
from typing import Any

import jax.core
from jax._src import config


def own_transfers() -> Any:
    """A context for what lox computes on its own, outside of compiled programs, from Python's and NumPy's numbers.

    Who guards against implicit transfers is after those of the program.
    """
    if all(guard.value in (None, "allow") for guard in _TRANSFER_GUARDS):
        return _NO_CONTEXT
    return jax.transfer_guard("allow")


def debugged() -> tuple[bool, bool]:
    """Whether NaNs and infinities are being debugged: what lox traces then contains none of its own.

    JAX's caches do not know of it, so that lox's must.
    """
    return config.debug_nans.value, config.debug_infs.value


_NO_CONTEXT = contextlib.nullcontext()
_TRANSFER_GUARDS = (
    config.transfer_guard_host_to_device,
    config.transfer_guard_device_to_host,
    config.transfer_guard_device_to_device,
)
_PYTHON_LOOPS = frozenset(["scan", "while_loop", "fori_loop"])
_LOOPS_HOME = os.path.join("lax", "control_flow", "loops.py")


def in_python_loop(outermost: Any) -> bool:
    """Whether this is called from a loop that JAX runs in Python, inside of the function whose code is `outermost`.

    Under `disable_jit` there are no primitives for loops: nothing but the stack knows of them.
    """
    if not config.disable_jit.value:
        return False
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not outermost:
        if frame.f_code.co_name in _PYTHON_LOOPS and frame.f_code.co_filename.endswith(_LOOPS_HOME):
            return True
        frame = frame.f_back
    return False
