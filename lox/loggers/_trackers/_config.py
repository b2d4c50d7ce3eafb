"""The config given to `init`, for trackers that do not nest parameters."""

from typing import Any


def flat(config: Any, scope: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Any]]:
    """Flatten nested dicts; return each value with the names that lead to it."""
    if isinstance(config, dict) and config:
        return [item for name, value in config.items() for item in flat(value, (*scope, str(name)))]
    return [(scope, config)] if scope else []
