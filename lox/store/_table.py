"""The runs of a directory as a table, without their events."""

import dataclasses
import datetime
import functools
import html
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, overload

import jax
import jax.numpy as jnp

from lox import _errors
from lox.store.names import base_name

Where = Mapping[str, Any] | Callable[["Run"], bool]
_SHOWN = 40  # rows of a table
_WIDEST = 48  # characters of a cell


class Activity(NamedTuple):
    """The events of a run: how many, and the times of the first and the last, in seconds since 1970.

    Events of which several processes have parts are known by their numbers.
    """

    events: int
    first: float
    last: float
    split: frozenset[int] = frozenset()


@dataclasses.dataclass(frozen=True)
class Run:
    """What is known of a run without loading it.

    Attributes:
        name: What tells it apart from the others in its directory.
        key_data: The words of its PRNG key; None if it has none.
        key_impl: The name of the PRNG key's implementation.
        config: Its hyper-parameters, as of the last attempt; those that `resume` did not get are as before.
        opened: When it began.
        attempts: How many times it was begun or continued.
        config_changes: The number of each attempt that changed the config, and the values before and after by their
            names, with dots for dicts inside: `[(1, {"optimizer.lr": (0.1, 0.01)})]`. None is no value.
    """

    name: str
    key_data: tuple[int, ...] | None
    key_impl: str | None
    config: Any
    opened: datetime.datetime
    attempts: int = 1
    config_changes: list[tuple[int, dict[str, tuple[Any, Any]]]] = dataclasses.field(default_factory=list)
    _look: Callable[[str], tuple[Activity, str]] | None = dataclasses.field(default=None, repr=False, compare=False)
    _compare: Callable[[str], str | None] | None = dataclasses.field(default=None, repr=False, compare=False)

    @property
    def key(self) -> Any:
        """The PRNG key, or None."""
        if self.key_data is None:
            return None
        return jax.random.wrap_key_data(jnp.asarray(self.key_data, jnp.uint32), impl=self.key_impl)

    @property
    def events(self) -> int:
        """How many rows of events it has on disk: keys that came together, with the same steps, share one."""
        return self._found[0].events

    @property
    def first(self) -> datetime.datetime | None:
        """The time of its first event."""
        return _time(self._found[0].first)

    @property
    def last(self) -> datetime.datetime | None:
        """The time of its last event."""
        return _time(self._found[0].last)

    @property
    def state(self) -> str:
        """Whether it is "running", "finished", "failed" (by an exception), or was "killed"."""
        return self._found[1]

    @functools.cached_property
    def resumed(self) -> str | None:
        """If it was resumed: "resumed exactly" if what was computed again came out the same, else where it differs.

        That is from which step on, and in which key. If nothing was computed again, there is nothing to compare, and it
        says so.
        """
        return None if self._compare is None else self._compare(self.name)

    @functools.cached_property
    def _found(self) -> tuple[Activity, str]:
        return (Activity(0, math.nan, math.nan), "finished") if self._look is None else self._look(self.name)


def _time(seconds: float) -> datetime.datetime | None:
    return None if math.isnan(seconds) else datetime.datetime.fromtimestamp(seconds, datetime.UTC)


class RunTable(Sequence[Run]):
    """Runs, oldest first. It prints as a table, and so it does in notebooks.

    >>> import tempfile, jax, numpy as np, lox
    >>> directory = tempfile.mkdtemp()
    >>> for lr in (0.1, 0.2):
    ...     lox.save({"loss": np.float32(1)}, directory, jax.random.key(7), mode="new", config={"lr": lr, "depth": 2})
    >>> for run in lox.runs(directory).where({"lr": 0.2}):
    ...     print(run.name, run.config, run.events, run.state)
    7.1 {'lr': 0.2, 'depth': 2} 1 finished
    """

    def __init__(self, runs: Sequence[Run]):
        self._runs = list(runs)

    @overload
    def __getitem__(self, index: int) -> Run: ...
    @overload
    def __getitem__(self, index: slice) -> "RunTable": ...
    def __getitem__(self, index: Any) -> Any:
        return RunTable(self._runs[index]) if isinstance(index, slice) else self._runs[index]

    def __len__(self) -> int:
        return len(self._runs)

    def __iter__(self) -> Iterator[Run]:
        return iter(self._runs)

    def __eq__(self, other: object) -> bool:
        return self._runs == list(other) if isinstance(other, RunTable | list) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def where(self, where: Where) -> "RunTable":
        """Return the runs whose config has these values, or for which a function of a `Run` is true.

        Args:
            where: A dict from names in the config, with dots for dicts inside, to values or functions of values.
        """
        if not isinstance(where, Mapping) and not callable(where):
            raise _errors.OptionError(
                f"`where` is {where!r}; it must be a dict of config values, or a function of a run."
            )
        return RunTable([run for run in self._runs if _matches(run, where)])

    def to_dataframe(self) -> Any:
        """Return a pandas DataFrame with a row per run, and a column for each hyper-parameter: `config.lr`."""
        try:
            import pandas as pd
        except ImportError as error:
            raise ImportError("`to_dataframe` needs pandas: pip install pandas") from error
        configs = [flat_config(run.config) for run in self._runs]
        rows = [
            {
                "name": run.name,
                "key": run.key_data,
                **{f"config.{name}": value for name, value in config.items()},
                "attempts": run.attempts,
                "events": run.events,
                "opened": run.opened,
                "first": run.first,
                "last": run.last,
                "state": run.state,
                "resumed": run.resumed,
            }
            for run, config in zip(self._runs, configs, strict=True)
        ]
        names = dict.fromkeys(f"config.{name}" for config in configs for name in config)
        order = ["name", "key", *names, "attempts", "events", "opened", "first", "last", "state", "resumed"]
        return pd.DataFrame(rows, columns=order)

    def _cells(self) -> tuple[list[str], list[list[str]]]:
        """Return the names of the columns, and the rows to show; a row of dots stands for those that are not shown."""
        runs = self._runs
        half = _SHOWN // 2
        shown = runs if len(runs) <= _SHOWN else [*runs[:half], None, *runs[-half:]]
        configs = [flat_config(run.config) for run in shown if run is not None]
        names = list(dict.fromkeys(name for config in configs for name in config))
        rest = iter(configs)
        rows = []
        for run in shown:
            if run is None:
                rows.append(["…"] * (len(names) + 7))
                continue
            config = next(rest)
            values = [_history(run, name, config) for name in names]
            times = [f"{t:%Y-%m-%d %H:%M:%S}" if t else "" for t in (run.first, run.last)]
            state = run.state if run.attempts == 1 or not run.resumed else f"{run.state}, {run.resumed}"
            rows.append([run.name, _key(run), *values, str(run.attempts), str(run.events), *times, state])
        titles = ["name", "key", *names, "attempts", "events", "first", "last", "state"]
        clean = lambda text: _errors.printable(text)[:_WIDEST]  # noqa: E731
        return list(map(clean, titles)), [list(map(clean, row)) for row in rows]

    def __repr__(self) -> str:
        if not self._runs:
            return "<no runs>"
        titles, rows = self._cells()
        widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
        lines = ["  ".join(x.ljust(n) for x, n in zip(row, widths, strict=True)).rstrip() for row in (titles, *rows)]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """Return a table for notebooks."""
        if not self._runs:
            return "<i>no runs</i>"
        titles, rows = self._cells()
        style = "padding:2px 10px;text-align:left;border:none;white-space:nowrap"
        row = lambda cells, tag: "".join(f"<{tag} style='{style}'>{html.escape(x)}</{tag}>" for x in cells)  # noqa: E731
        body = "".join(f"<tr>{row(cells, 'td')}</tr>" for cells in rows)
        return _errors.encodable(f"<table><thead><tr>{row(titles, 'th')}</tr></thead>{body}</table>")


def _key(run: Run) -> str:
    """Format a PRNG key: its seed, or the words of one that was split from another."""
    if run.key_data is None:
        return ""
    seed = base_name(run.key_data, run.key_impl)
    return seed if len(seed) < 13 else "-".join(f"{word:08x}" for word in run.key_data)


def flat_config(config: Any) -> dict[str, Any]:
    """Return the values of a config by their names, with dots for dicts inside: `optimizer.lr`."""
    return dict(_flat(config))


def merged(config: Any, changes: Any) -> Any:
    """Return a config with some values changed, also inside its dicts."""
    if not isinstance(config, Mapping) or not isinstance(changes, Mapping):
        return changes
    return {**config, **{name: merged(config.get(name), value) for name, value in changes.items()}}


def differences(before: Any, after: Any) -> dict[str, tuple[Any, Any]]:
    """Return what differs between two configs: the values before and after by their names."""
    old, new = flat_config(before), flat_config(after)
    return {name: (old.get(name), new.get(name)) for name in {**old, **new} if old.get(name) != new.get(name)}


def _history(run: Run, name: str, config: Mapping[str, Any]) -> str:
    """Format a value of the config, after those that it had in attempts before: `0.1 → 0.01`."""
    before = [changes[name][0] for _, changes in run.config_changes if name in changes]
    shown = [_short(value) for value in before if value is not None]
    return " → ".join([*shown, _short(config[name])] if name in config else shown)


def _flat(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in config.items() if isinstance(config, Mapping) else ():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _matches(run: Run, where: Where) -> bool:
    return bool(where(run)) if callable(where) else has_values(run.config, where)


def has_values(config: Any, where: Mapping[str, Any]) -> bool:
    """Tell whether a config has these values, by names with dots or in dicts of their own."""
    config, where = flat_config(config), flat_config(where)
    return all(name in config and _is(config[name], wanted) for name, wanted in where.items())


def _is(value: Any, wanted: Any) -> bool:
    if callable(wanted):
        return bool(wanted(value))
    if isinstance(value, float) and isinstance(wanted, float | int):
        return value == wanted or math.isclose(value, wanted, rel_tol=1e-6)  # 0.1 may have been a float32
    return bool(value == wanted)
