"""What `init` gets as config, for trackers that know no nesting."""

from typing import Any


def flat(config: Any, path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Any]]:
    """The entries of nested dicts, with their paths."""
    if isinstance(config, dict) and config:
        return [entry for key, value in config.items() for entry in flat(value, (*path, str(key)))]
    return [(path, config)] if path else []
