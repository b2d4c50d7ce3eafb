"""`WandbLogger`: logs to Weights & Biases.

A row of W&B has one step, which must not decrease: the client drops rows with a lower step, and a value with the same
step and name replaces the one before. So steps are columns of their own, declared as the axis of the metrics logged
with them, and a row's own step is the user's as long as that keeps all rows apart.
"""

import collections
import dataclasses
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from lox import _errors
from lox._data._bundle import Bundle
from lox._data._histogram import Histogram, few_bins
from lox._data._image import Image
from lox.loggers._batch import Batch
from lox.loggers._files._rows import plain, strict_json
from lox.loggers._logger import Logger
from lox.loggers._run import Run, check_config
from lox.loggers._trackers import _bands, _clients, _wandb_file
from lox.loggers._trackers._clients import pillow
from lox.loggers._trackers._series import MOST_ELEMENTS, Series, Splitter, missing_steps, raise_problems
from lox.store import names
from lox.store._table import differences, merged
from lox.store.names import Taken

_RESERVED = ("_step", "_runtime", "_timestamp", "_wandb")  # columns that the client fills itself
_MAIN = "step"  # the step that may become that of W&B's rows
_LARGEST = 2**53  # larger steps are columns only, because those of the client end at 2**63


def client(user: str = "WandbLogger") -> Any:
    """Import `wandb`, or raise an error that says how to install it."""
    return _clients.client("wandb", "wandb", user)


Steps = tuple[tuple[str, Any], ...]  # names and numbers


class _Row(NamedTuple):
    steps: Steps
    cells: dict[str, Any]

    @property
    def wanted(self) -> int | None:
        """The step that the row should have."""
        step = _main(self.steps)
        return step if step is not None and 0 <= step < _LARGEST else None


def _main(steps: Steps) -> int | None:
    step = dict(steps).get(_MAIN)
    return step if isinstance(step, int) else None


class _Rows:
    """Writes rows to one W&B run, so that none is dropped and none replaces another."""

    def __init__(self, run: Any):
        self.run = run
        self._at = run.starting_step - 1  # the client's step; it drops rows before the first one of a fork
        self._open: _Row | None = None  # the row at that step, as long as more can be added
        self._declared: set[str] = set()  # metrics that have an axis, and the axes

    def write(self, rows: list[_Row], columns: Mapping[str, str]) -> None:
        """Write rows; `columns` has the column of each step."""
        for row in rows:
            self._declare(row, columns)
            cells = {columns[name]: step for name, step in row.steps} | row.cells
            before = self._open
            if before is not None and before.steps == row.steps and before.cells.keys().isdisjoint(row.cells):
                row = _Row(row.steps, before.cells | row.cells)
            else:
                wanted = row.wanted
                self._at = wanted if wanted is not None and wanted > self._at else self._at + 1
            self.run.log(cells, step=self._at)
            self._open = row

    def _declare(self, row: _Row, columns: Mapping[str, str]) -> None:
        """Make the step the axis of metrics that are logged with it for the first time."""
        names = [name for name, _ in row.steps]
        for name in [name for name in row.cells if names and name not in self._declared]:
            axis = columns[_MAIN if _MAIN in names else names[0]]
            if axis not in self._declared:
                self._define(axis, hidden=True)
            # With `step_sync`, the client would invent steps where they are missing.
            self._define(name, step_metric=axis, step_sync=False)
            self._declared |= {axis, name}

    def _define(self, name: str, **options: Any) -> None:
        if "*" not in name:  # a wildcard, which cannot be escaped
            self.run.define_metric(name.replace(".", "\\."), **options)

    def commit(self) -> None:
        """Complete the last row."""
        if self._open is not None:
            self.run.log({}, step=self._at, commit=True)
            self._open = None


class WandbLogger(Logger):
    """Logs to Weights & Biases, one run per PRNG key, also under `vmap`.

    >>> import jax, lox
    >>> with lox.loggers.WandbLogger(project="demo", group="seeds", mode="offline") as logger:
    ...     state = logger.init(jax.random.key(42), config={"lr": 0.1})
    ...     logger.log(state, {"loss": 0.5}, step=0)

    A run has the name that `init` gives it (`42`, or `42.1` if that is used again), has the config given to `init`, and
    belongs to `group` if there is one. W&B's environment variables (`WANDB_MODE`, `WANDB_DIR`, ...) work as usual.

    Steps are columns: `lox.log(..., step=i, episode=e)` makes a row with `step` and `episode`, and `step`, or else the
    first of them, is the axis of its metrics. No event is dropped, whatever order they come in. W&B's own `Step` equals
    `step`, except for events that come late or have no step.

    Offline, W&B drops what it cannot write, on a full disk for instance, and everything after it. `flush` and `close`
    raise an error if there are signs of that.

    `resume` forks the newest W&B run of that name: `42.1` has what `42` has up to the step, and goes on from there. For
    that, `resume` must get the step called `step`. At another step, or offline, where W&B cannot look at other runs, it
    begins another run of the group. In both cases the config says so, `{"resumes": {"run": "42", "at": {"step":
    1000}}}`, with the values before of what has changed as `was`, if they are known.

    Your own runs are separate: `wandb.init()` never returns a run of the logger, and `wandb.finish()` never ends one.

    `lox.Histogram` and `lox.Image` are shown as such. Arrays of up to 64 elements have one metric per element, `xs/0`,
    `xs/1`, and pytrees one per leaf, `stats/mean`.

    Args:
        aggregate: Whether to make one W&B run for all runs. Of events that the lanes of a `vmap` log together, it has
            the mean over lanes under their name, the standard deviation as `.../std`, and the 95% confidence interval
            of the mean as `.../ci95_low` and `.../ci95_high`.
        arrays: How to show plain arrays: as "elements" or as a "histogram".
        max_elements: The size of the largest array whose elements become metrics.
        **kwargs: Arguments of `wandb.init`. The name of each run is appended to a given `name` or `id`.
    """

    def __init__(
        self,
        *,
        aggregate: bool = False,
        arrays: str = "elements",
        max_elements: int = MOST_ELEMENTS,
        **kwargs: Any,
    ):
        client(self._pipeline.name)  # now, and not in the first callback
        check_config(kwargs.get("config"))
        self.aggregate = aggregate
        self._kwargs = kwargs
        self._splitter = Splitter(self._pipeline.name, arrays, max_elements, _RESERVED)
        self._names = Taken()
        self._parents: dict[str, Any] = {}  # W&B's runs that may be resumed, by name
        self._rows: dict[int, _Rows] = {}  # by run
        self._shared: _Rows | None = None
        self._configs: dict[str, Mapping[str, Any]] = {}  # of the runs behind the shared one
        self._sent = 0  # how many of them W&B knows

    def open(self, run: Run) -> None:
        """Begin a W&B run."""
        options, config = self._options_of(run), run.config
        if run.resumed is None:
            run.name = self._names.take(run.name)
        else:
            options, config = self._resume(run, options)
        if self.aggregate:
            if self._shared is None:
                self._shared = _Rows(_begin(options, {}, None))
            self._rows[run.id] = self._shared
            self._configs[run.name] = strict_json(dict(config))
        else:
            self._rows[run.id] = _Rows(_begin(options, config, run.name))
        run.resource = self._rows[run.id].run

    def _resume(self, run: Run, options: dict[str, Any]) -> tuple[dict[str, Any], Mapping[str, Any]]:
        """Name an attempt that goes on with another run; return its options, and its config, which says so."""
        assert run.resumed is not None
        before, (step, number) = run.name, run.resumed
        self._names.names |= {before, *self._parents}
        run.name = self._names.take(names.title(before))
        config, resumes = run.config, {"run": before, "at": {step: number}}
        if parent := self._parents.get(before):
            config = merged(parent.config, strict_json(dict(config)))
            was = {name: old for name, (old, _) in differences(parent.config, config).items() if old is not None}
            resumes |= {"id": parent.id, **({"was": was} if was else {})}
            if step == _MAIN and number > 0:
                # A fork has everything up to this step, itself included, and its own rows begin after it.
                options = {**options, "fork_from": f"{parent.id}?_step={int(number) - 1}"}
        return options, {**config, "resumes": resumes}

    def _resumable(self, wanted: list[str]) -> tuple[Iterable[str], str] | None:
        wandb, given = client(), self._kwargs
        defaults = wandb.setup().settings
        mode = given.get("mode") or _chosen(given.get("settings")).get("mode") or defaults.mode
        if self.aggregate or mode != "online":
            return None  # W&B's files do not tell which runs there are, and a fork needs the server
        project = given.get("project") or defaults.project or "uncategorized"
        prefix = f"{name}-" if (name := given.get("name") or os.environ.get("WANDB_NAME")) else ""
        # By the first words, because the rest may have changed with the config.
        starts = "|".join(sorted({re.escape(prefix + name.split(" ")[0]) for name in wanted}))
        path = "/".join(filter(None, [given.get("entity") or defaults.entity, project]))
        runs = wandb.Api().runs(path, filters={"display_name": {"$regex": f"^({starts})"}}, order="+created_at")
        found = {run.name.removeprefix(prefix): run for run in runs}
        self._parents |= found
        return found, f"project {path!r}"

    def _options_of(self, run: Run) -> dict[str, Any]:
        """Return the arguments of `wandb.init`, for a run that begins."""
        del run
        return self._kwargs

    def _write_batch(self, runs: list[Run], batch: Batch) -> None:
        """Write a row for every event of each run, or of the statistics of all; equal steps share rows."""
        if not self.aggregate:
            return self._pipeline.write_each(runs, batch, self._write_run)
        assert self._shared is not None
        self._send_configs()
        series, problems = self._series(batch.run_first(), lead=2)
        parts = [part for one in series for part in _bands.over_lanes(one, self._splitter.part_name)]
        self._write_rows(self._shared, parts, problems)

    def _write_run(self, run: Run, bundles: list[Bundle]) -> None:
        self._write_rows(self._rows[run.id], *self._series(bundles, lead=1))

    def _send_configs(self) -> None:
        """Send the configs of the runs behind the shared one: what they have in common, and lists of what differs."""
        if self._shared is None or self._sent == len(self._configs):
            return
        self._shared.run.config.update(_bands.common_config(self._configs), allow_val_change=True)
        self._sent = len(self._configs)

    def _series(self, bundles: list[Bundle], lead: int) -> tuple[list[Series], list[Exception]]:
        for bundle in bundles:
            for name in bundle.steps:
                self._splitter.step_name(name)  # steps take their names before keys do
        return self._splitter.split(bundles, lead)

    def _write_rows(self, rows: _Rows, series: list[Series], problems: list[Exception]) -> None:
        names = dict.fromkeys(name for one in series for name in one.steps)
        series = [dataclasses.replace(one, name=_errors.encodable(one.name)) for one in series]
        rows.write(_together(series), {name: _errors.encodable(self._splitter.step_name(name)) for name in names})
        raise_problems(problems)

    def commit(self) -> None:
        """Complete the last rows, and make sure that the client can write them, if that is to a file."""
        for rows in set(self._rows.values()):
            rows.commit()
        for rows in set(self._rows.values()):
            _wandb_file.check(rows.run)

    def finish(self, run: Run) -> None:
        """End the W&B run; a shared one ends with the last of its runs."""
        if self.aggregate:
            self._send_configs()
        rows = self._rows.pop(run.id)
        if rows not in self._rows.values():
            rows.commit()
            rows.run.finish(exit_code=1 if run.failure is not None else None)
            _wandb_file.check_finished(rows.run)


def _begin(kwargs: dict[str, Any], config: Mapping[str, Any], name: str | None) -> Any:
    """Begin a W&B run; `name` is None for a shared one."""
    options = dict(kwargs)
    if name is not None:
        in_id = re.sub(r"[^\w.-]+", "_", name)
        for field, variable, suffix in (("name", "WANDB_NAME", name), ("id", "WANDB_RUN_ID", in_id)):
            given = options.get(field) or os.environ.get(variable)
            if given:
                options[field] = f"{given}-{suffix}"
        options["name"] = options.get("name") or name
    options["config"] = {**(options.get("config") or {}), **strict_json(dict(config))}
    options.setdefault("reinit", "create_new")  # or runs that are open, ours or the user's, would end
    options["settings"] = _settings(options.get("settings"))
    wandb = client()
    run = wandb.init(**options)
    # Or `wandb.init()` would return it to the user, whose steps could make the client drop ours.
    hide = getattr(wandb.setup(), "remove_active_run", None)
    if hide is not None and options["reinit"] == "create_new":
        hide(run)
    return run


def _chosen(settings: Any) -> dict[str, Any]:
    """Return the settings that the user has made, given as a dict or an object."""
    if settings is None or isinstance(settings, Mapping):
        return dict(settings or {})
    return {name: getattr(settings, name) for name in settings.model_fields_set}


def _settings(given: Any) -> Any:
    """Make settings for one run, since the client refuses to share them. The user's settings and variables win."""
    settings = _chosen(given)
    if "WANDB_CONSOLE" not in os.environ:
        settings.setdefault("console", "off")  # or every run would capture what the program prints
    if "WANDB_QUIET" not in os.environ:
        settings.setdefault("quiet", True)  # or every run would end with a page of text
    return client().Settings(**settings)


def _together(series: list[Series]) -> list[_Row]:
    """Make rows in the order of their steps; values with the same steps share a row, unless they have the same name.

    Every name keeps the order of its events. Where its steps decrease, the program has started counting again: what
    follows is another round, which comes after all of this one.
    """
    rows: dict[Any, _Row] = {}
    order: dict[Any, Any] = {}
    seen_under: collections.defaultdict[str, collections.Counter[Any]] = collections.defaultdict(collections.Counter)
    for one in series:
        seen = seen_under[one.name]  # lanes with different steps make several series of one name
        round_, last = 0, -math.inf
        for steps, value in _events(one):
            wanted = _main(steps)
            if wanted is not None:
                round_, last = round_ + (wanted < last), wanted
            place = (round_ if wanted is not None else None, steps)
            place = (*place, seen[place])
            seen[place[:2]] += 1
            rows.setdefault(place, _Row(steps, {})).cells[one.name] = value
            order[place] = (wanted is None, round_ if wanted is not None else 0, wanted or 0)
    return [rows[place] for place in sorted(rows, key=order.__getitem__)]


def _events(one: Series) -> Iterator[tuple[Steps, Any]]:
    if one.valid is not None:
        one = one.at(one.valid)
    columns = [[(name, step) for step in plain(x)] for name, x in one.steps.items()]
    missing = [x.tolist() for x in missing_steps(one.steps).values()]
    for n, cell in enumerate(_cells(one.value)):
        yield tuple(column[n] for column, is_missing in zip(columns, missing, strict=True) if not is_missing[n]), cell


def _cells(value: np.ndarray | Histogram | Image) -> Iterator[Any]:
    if isinstance(value, np.ndarray):
        yield from plain(value)
        return
    wandb = client()
    for n in range(len(jax.tree.leaves(value)[0])):
        one = jax.tree.map(lambda x, n=n: x[n], value)
        if isinstance(one, Histogram):
            yield wandb.Histogram(np_histogram=few_bins(one, wandb.Histogram.MAX_LENGTH))
        else:
            yield wandb.Image(pillow(one), file_type="png")
