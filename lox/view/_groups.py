"""Which runs belong together: those over which a mean is taken.

The lanes of one `vmap` are a group without any setting, as long as they have the same config; runs that were begun one
by one are a group if they have the same config. A seed is not a difference.
"""

import collections
import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from lox import _errors
from lox._data import _sites
from lox.store import Run
from lox.store._table import flat_config

# Names in a config that tell repetitions apart, and not what is repeated.
_SEEDS = {"seed", "random_seed", "rng_seed", "prng_seed", "rng", "replicate", "repeat", "trial"}


@dataclasses.dataclass(frozen=True)
class Group:
    """Runs that are repetitions of each other.

    Attributes:
        name: What tells it apart from other groups: `"lr=0.1"`.
        config: What its runs have in common, by names with dots for dicts inside.
        runs: The names of its runs.
    """

    name: str
    config: dict[str, Any]
    runs: tuple[str, ...]


def groups(runs: Sequence[Run], by: str | Iterable[str] | None = None, pooled: Iterable[str] = ()) -> list[Group]:
    """Sort runs into groups, in the order of their first runs.

    Args:
        runs: The runs.
        by: Names in the config: runs with the same values are a group, whatever else differs, with a warning if
            something does. By default all names but that of a seed, and lanes of different vmaps are kept apart.
        pooled: Names that may differ within a group.
    """
    configs = [flat_config(run.config) for run in runs]
    known = dict.fromkeys(name for config in configs for name in config)
    if by is None:
        names, together = [name for name in known if not is_seed(name)], collections.Counter(r.opened for r in runs)
        calls = [run.opened if together[run.opened] > 1 else None for run in runs]
    else:
        names, calls = [by] if isinstance(by, str) else list(by), [None] * len(runs)
        for name in names:
            if name not in known:
                parts = [part.strip() for part in name.split(",")]
                several = len(parts) > 1 and all(part in known for part in parts)
                hint = f" Name {_errors.listing(parts)} one by one." if several else _errors.nearest(name, known)
                has = f"The configs have {_errors.listing(known)}." if known else "The runs have no config."
                raise _errors.OptionError(f"`by` names {name!r}, which is not in the config of any run. {has}{hint}")
    members: dict[Any, list[int]] = {}
    for n, (config, call) in enumerate(zip(configs, calls, strict=True)):
        values = tuple(identity(config.get(name)) if name in config else None for name in names)
        members.setdefault((call, values), []).append(n)
    if by is not None:
        _warn_of_pooling([[configs[n] for n in indices] for indices in members.values()], names, set(pooled))
    commons = [common([configs[n] for n in indices]) for indices in members.values()]
    titles = _titles(commons, names if by is not None else None)
    made = []
    for title, config, indices in zip(titles, commons, members.values(), strict=True):
        first = runs[indices[0]].name
        if not title:
            title = "all runs" if len(members) == 1 and len(indices) > 1 else first
        elif titles.count(title) > 1:
            title = f"{title}, {first}" if len(indices) == 1 else f"{title}, {first} and {len(indices) - 1} more"
        made.append(Group(title, config, tuple(runs[n].name for n in indices)))
    return made


def is_seed(name: str) -> bool:
    """Tell whether a name in a config is that of a seed."""
    return name.rpartition(".")[2].lower() in _SEEDS


def common(configs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what flat configs have in common."""
    first = configs[0] if configs else {}
    return {
        name: value
        for name, value in first.items()
        if all(name in other and identity(other[name]) == identity(value) for other in configs[1:])
    }


def text_of(value: Any) -> str:
    """Format a value of a config."""
    return f"{value:g}" if isinstance(value, float) else value if isinstance(value, str) else json.dumps(value)


def identity(value: Any) -> str:
    """Return a text that is the same for equal values; 0.1 may have been a float32."""
    return json.dumps(_exact(value), sort_keys=True)


def _exact(value: Any) -> Any:
    """Return the number that was meant, as an integer if it is one: 0.1 of what was 0.1 as a float32."""
    if isinstance(value, list):
        return [_exact(x) for x in value]
    if isinstance(value, dict):
        return {name: _exact(x) for name, x in value.items()}
    if not isinstance(value, float) or not np.isfinite(value):
        return value
    if value.is_integer():
        return int(value)
    with np.errstate(over="ignore", under="ignore"):
        short = np.float32(value)
    return float(str(short)) if float(short) == value else value


def _titles(configs: Sequence[Mapping[str, Any]], names: list[str] | None) -> list[str]:
    """Name groups by what differs between them, or by these names."""
    known = dict.fromkeys(name for config in configs for name in config) if names is None else names
    differ = [
        name
        for name in known
        if names is not None or len({identity(c[name]) if name in c else None for c in configs}) > 1
    ]
    return [", ".join(f"{name}={text_of(c[name])}" for name in differ if name in c) for c in configs]


def _warn_of_pooling(groups_of: Sequence[Sequence[Mapping[str, Any]]], names: list[str], pooled: set[str]) -> None:
    mixed = {}
    for configs in groups_of:
        for name in dict.fromkeys(name for config in configs for name in config):
            values = {identity(config[name]) if name in config else None for config in configs}
            if len(values) > 1 and not is_seed(name) and name not in pooled.union(names):
                mixed[name] = max(mixed.get(name, 0), len(values))
    if mixed:
        others = _errors.listing(mixed)
        _sites.warn(
            f"grouped by {_errors.listing(names)}, runs of one group differ in {others}. "
            f"Group by {_errors.listing([*names, *mixed])} to keep them apart, or choose runs with `where`."
        )
