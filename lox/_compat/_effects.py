"""The effects that tell JAX what logs and what calls the host."""

from typing import Any

import jax.core
from jax._src import effects as _effects
from jax._src.dispatch import runtime_tokens as _runtime_tokens

from lox._compat._traces import DebugEffect

# JAX keeps several sets of effect types (lowerable, allowed in control flow, in custom derivatives, in remat, kept by
# partial evaluation), all tested with isinstance. Subclassing the debug effect joins them all; an effect outside the
# last one gives zero events under grad(scan).
_DebugEffect: Any = DebugEffect


class LogEffect(_DebugEffect):
    """Marks an equation that logs or contains one that does. A singleton, as `jax.export` makes it from its class."""

    _one: Any = None
    __str__ = lambda self: "Log"  # noqa: E731

    def __new__(cls) -> Any:
        cls._one = cls._one or super().__new__(cls)
        return cls._one


class EmitEffect(_DebugEffect):
    """Marks an equation that hands values to the host."""

    __str__ = lambda self: "Emit"  # noqa: E731


class OrderEffect(_DebugEffect):
    """Marks an equation whose host calls are in program order with all others so marked.

    JAX passes a token from one to the next, through loops, branches and calls. It refuses its own ordered effects under
    `vmap` and on several devices, but it does so by their type.
    """

    __str__ = lambda self: "Order"  # noqa: E731


log_effect = LogEffect()
emit_effect = EmitEffect()
order_effect = OrderEffect()
host_call_effects = {emit_effect, order_effect}
_effects.lowerable_effects.add_type(LogEffect)  # by its own name, under which `jax.export` finds it again
_effects.ordered_effects.add_type(OrderEffect)
_effects.shardable_ordered_effects.add_type(OrderEffect)


def forget_failed_effects(text: str) -> None:
    """Forget an error with this text once it has been reported.

    JAX keeps it, and would raise it again for everyone who waits for effects until the process ends.
    """
    for tokens in (_runtime_tokens.current_tokens, _runtime_tokens.output_runtime_tokens):
        for holder, token in list(tokens.items()):
            try:
                token.block_until_ready()
            except jax.errors.JaxRuntimeError as error:
                if text in str(error):
                    tokens.pop(holder, None)  # our token may already be gone
