"""`lox.compare`: is one setting better than another, and how sure is that, given a handful of seeds?

Every run has one score. Of a group of runs, there are mean, median and interquartile mean with confidence intervals; of
two groups, the probability that one is better, and the difference of their means, by pairs of runs with the same PRNG
key where there are such. Every number says over how many runs it is, and how it was computed.
"""

import dataclasses
import functools
import glob
import html
import itertools
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from lox import _errors
from lox._data import _sites, _statistics
from lox._data._logdict import logdict
from lox.store import Runs
from lox.store._reader import runs_in
from lox.store._table import Where, flat_config
from lox.view import _bands, _groups
from lox.view._bands import Band
from lox.view._curves import WALL, Curve, curves

Array = np.ndarray[Any, Any]
At = str | float | Callable[[Array], float]

_BETTER = ("higher", "lower")
_ATS = ("last", "best", "mean")


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A number with its confidence interval; the interval is NaN if there are too few runs for one."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.4g}" if math.isnan(self.low) else f"{self.value:.4g} [{self.low:.4g}, {self.high:.4g}]"


@dataclasses.dataclass(frozen=True)
class GroupScores:
    """The scores of a group of runs.

    Attributes:
        name: The group: `"lr=0.1"`.
        n: How many runs the statistics are over.
        lost: The names of runs that are left out, because their score is NaN or infinite, or because they have none:
            a run that failed before its first event.
        scores: The score of each run, by its name.
        mean: With the interval of Student's t.
        median: With a bootstrap interval.
        iqm: The interquartile mean, that is without the lowest and the highest quarter, with a bootstrap interval.
    """

    name: str
    n: int
    lost: tuple[str, ...]
    scores: dict[str, float]
    mean: Estimate
    median: Estimate
    iqm: Estimate


@dataclasses.dataclass(frozen=True)
class Pair:
    """One group compared with another.

    Attributes:
        a: The name of the one.
        b: The name of the other.
        improvement: The probability that a run of `a` is better than one of `b`; ties count half.
        difference: The mean of `a` minus that of `b`, over pairs of runs if they are paired.
        paired: How many pairs of runs with the same PRNG key that is over; 0 if they are not paired.
        wins: In how many pairs `a` is better; ties count half.
    """

    a: str
    b: str
    improvement: Estimate
    difference: Estimate
    paired: int
    wins: float


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What `lox.compare` found. It prints as a table, also in notebooks.

    Attributes:
        key: What was compared.
        groups: The scores of each group.
        pairs: Each group compared with each other.
        curves: The curves behind the scores, by group.
        better: Which scores are better.
        methods: How it was computed, in words.
    """

    key: str
    groups: tuple[GroupScores, ...]
    pairs: tuple[Pair, ...]
    curves: dict[str, Curve]
    better: str
    methods: tuple[str, ...]

    @functools.cached_property
    def efficiency(self) -> dict[str, Band]:
        """For each group, its interquartile mean over the steps, with a 95% band."""
        return {name: _bands.band(curve, "iqm") for name, curve in self.curves.items()}

    def to_dict(self) -> dict[str, Any]:
        """Return everything but the curves as plain values, for JSON; NaN is None."""
        return {
            "key": self.key,
            "better": self.better,
            "groups": [_plain(group) for group in self.groups],
            "pairs": [_plain(pair) for pair in self.pairs],
            "methods": list(self.methods),
        }

    def to_dataframe(self) -> Any:
        """Return a pandas DataFrame with a row per group."""
        try:
            import pandas as pd
        except ImportError as error:
            raise ImportError("`to_dataframe` needs pandas: pip install pandas") from error
        rows = []
        for group in self.groups:
            row: dict[str, Any] = {"group": group.name, "n": group.n, "lost": len(group.lost)}
            for name in ("mean", "median", "iqm"):
                one = getattr(group, name)
                row |= {name: one.value, f"{name}_low": one.low, f"{name}_high": one.high}
            rows.append(row)
        return pd.DataFrame(rows)

    def tables(self) -> list[tuple[list[str], list[list[str]]]]:
        """Return titles and rows of the two tables: groups and pairs."""
        titles = ["group", "n", "mean", "median", "IQM"]
        rows = [
            [g.name, f"{g.n}" + (f" ({len(g.lost)} lost)" if g.lost else ""), str(g.mean), str(g.median), str(g.iqm)]
            for g in self.groups
        ]
        sign = ">" if self.better == "higher" else "<"
        pairs = [[f"{p.a} {sign} {p.b}", str(p.improvement), str(p.difference), _wins(p)] for p in self.pairs]
        tables = [(titles, rows)]
        return [*tables, (["pair", "P(better)", "difference of means", "better in pairs"], pairs)] if pairs else tables

    def __str__(self) -> str:
        parts = [f"{_errors.printable(self.key)}, {self.better} is better"]
        parts += [_text(*table) for table in self.tables()]
        return "\n\n".join([*parts, "\n".join(map(_errors.printable, self.methods))])

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        """For notebooks: the tables and how they were computed."""
        style = "padding:2px 10px;text-align:left;border:none;white-space:nowrap"
        row = lambda cells, tag: "".join(f"<{tag} style='{style}'>{html.escape(x)}</{tag}>" for x in cells)  # noqa: E731
        tables = "".join(
            f"<table><thead><tr>{row(titles, 'th')}</tr></thead>"
            + "".join(f"<tr>{row(cells, 'td')}</tr>" for cells in rows)
            + "</table>"
            for titles, rows in self.tables()
        )
        notes = "<br>".join(map(html.escape, self.methods))
        title = f"<b>{html.escape(self.key)}</b>, {self.better} is better"
        return _errors.encodable(f"{title}{tables}<small>{notes}</small>")

    def plot(self, path: str | os.PathLike[str] | None = None, title: str | None = None) -> Any:
        """Draw the intervals of the groups, and their curves; to a file if a path is given.

        Returns:
            The `matplotlib` figure.
        """
        from lox.view import _plot

        return _plot.plot_comparison(self, path, title)


def compare(
    runs: Any,
    key: str,
    by: str | Iterable[str] | None = None,
    *,
    at: At = "last",
    better: str = "higher",
    strata: str | Iterable[str] | None = None,
    paired: bool | None = None,
    where: Where | None = None,
    x: str | None = None,
    draws: int = _bands.DRAWS,
    seed: int = 0,
) -> Comparison:
    """Compare groups of runs by a score: the statistics that papers need over seeds.

    >>> import tempfile, jax, numpy as np, lox
    >>> directory = tempfile.mkdtemp()
    >>> for lr, seed in [(lr, seed) for lr in (0.1, 0.2) for seed in range(4)]:
    ...     loss = lox.logdict.from_arrays({"loss": np.array([1.0, 10 * lr + seed])})
    ...     lox.save(loss, directory, jax.random.key(seed), mode="new", config={"lr": lr})
    >>> found = lox.compare(lox.load(directory), "loss", by="lr", better="lower")
    >>> for group in found.groups:
    ...     print(group.name, group.n, group.mean.value)
    lr=0.1 4 2.5
    lr=0.2 4 3.5
    >>> pair = found.pairs[0]
    >>> print(pair.a, pair.b, pair.improvement.value, pair.difference.value, pair.paired)
    lr=0.1 lr=0.2 0.71875 -1.0 4

    Args:
        runs: What `lox.load` gives, a path, or a mapping from the name of a group to logs whose lanes are its runs.
        key: The key to compare by, such as `"test/return"`; an element of an array is `"xs/0"`.
        by: Names in the config: runs with equal values are a group. By default all but that of a seed.
        at: What the score of a run is: its `"last"` value, its `"best"` one, the `"mean"` of all, the value at a step,
            given as a number, or a function of all values.
        better: Whether `"higher"` or `"lower"` is better.
        strata: Names in the config, such as `"env"`: draws of the bootstrap keep the number of runs of each stratum,
            and the probability of improvement is the mean of those within strata.
        paired: Whether to pair runs of two groups. By default they are if both groups have the same PRNG keys, each
            once in each stratum; `True` makes it an error if not. Logs by group are paired by lane if this is `True`.
        where: Compare only runs with these values in their config, as for `lox.load`.
        x: The step of the curves, as for `lox.plot`.
        draws: How many draws the bootstrap makes.
        seed: The seed of the bootstrap: the same seed gives the same intervals.

    Returns:
        A `Comparison`, which prints as a table; `to_dataframe()`, `to_dict()` and `plot()` give its other forms.
    """
    if better not in _BETTER:
        raise _errors.OptionError(f"`better` is {better!r}; choose {_errors.listing(_BETTER)}.")
    if not callable(at) and not _is_number(at) and at not in _ATS:
        raise _errors.OptionError(
            f"`at` is {at!r}; choose one of {_errors.listing(_ATS)}, the number of a step, or a function of the values."
        )
    if isinstance(draws, bool) or not isinstance(draws, int) or draws < 1:
        raise _errors.OptionError(f"`draws` is {draws!r}; it must be a positive integer.")
    if isinstance(runs, str | os.PathLike):
        runs, where = runs_in(runs, where, wall=x == WALL), None
    lanes = _lanes_of_groups(runs, key, by, [strata] if isinstance(strata, str) else list(strata or ()), where, x)
    scored = [_Scored(name, curve, at, better, identities, layers) for name, curve, identities, layers in lanes]
    generator = np.random.default_rng(seed)
    groups = tuple(one.summary(draws, generator) for one in scored)
    pairs = tuple(_compared(a, b, better, paired, draws, generator) for a, b in itertools.combinations(scored, 2))
    methods = _methods(scored, pairs, at, strata, draws, key, lanes[0][1].step)
    return Comparison(key, groups, pairs, {name: curve for name, curve, _, _ in lanes}, better, methods)


# --- which lanes ---


class _Lane(NamedTuple):
    """A lane of logs: that two of them have the same number need not mean that they have the same seed."""

    number: int


_Lanes = tuple[str, Curve, list[Any], list[Any]]  # the group, its curve, what identifies and what stratifies its runs


def _lanes_of_groups(
    runs: Any, key: str, by: Any, strata: list[str], where: Where | None, x: str | None
) -> list[_Lanes]:
    if isinstance(runs, Runs):
        return _of_runs(runs, key, by, strata, where, x)
    if isinstance(runs, logdict):
        raise _errors.OptionError(
            "`lox.compare` got the logs of one run, or of one group: give it what `lox.load(path)` returns for several "
            "runs, or a mapping from the name of each group to its logs."
        )
    if not isinstance(runs, Mapping) or not runs:
        raise _errors.OptionError(
            f"`lox.compare` got {type(runs).__name__}: give it a path, what `lox.load` returns, or a mapping from the "
            "name of each group to its logs."
        )
    for option, given in (("by", by), ("strata", strata or None), ("where", where)):
        if given is not None:
            raise _errors.OptionError(f"`{option}` is for runs with a config: these logs have groups already.")
    lanes = []
    for name, logs in runs.items():
        curve = _curve_of(logs, key, x, f"nothing in the group {name!r}")
        lanes.append((str(name), curve, [_Lane(n) for n in range(len(curve.lanes))], [None] * len(curve.lanes)))
    return lanes


def _of_runs(runs: Runs, key: str, by: Any, strata: list[str], where: Where | None, x: str | None) -> list[_Lanes]:
    table = runs.table if where is None else runs.table.where(where)
    if not table:
        raise _errors.RunNotFoundError(f"no run has {where!r} in its config.")
    infos = {run.name: run for run in table}
    configs = {name: flat_config(run.config) for name, run in infos.items()}
    for name in strata:
        if not any(name in config for config in configs.values()):
            known = dict.fromkeys(n for config in configs.values() for n in config)
            hint = _errors.nearest(name, known)
            raise _errors.OptionError(f"`strata` names {name!r}, which is not in the config of any run.{hint}")
    if by is None and strata:
        known = dict.fromkeys(n for config in configs.values() for n in config)
        by = [name for name in known if name not in strata and not _groups.is_seed(name)]
    groups = _groups.groups(table, by, pooled=strata)
    whole = _curve_of(runs.only(names=list(infos)), key, x, "no run")
    lanes, without = [], []
    for group in groups:
        curve = whole.of_lanes([whole.lanes.index(name) for name in group.runs])
        if curve is None:
            without.append(group.name)
            continue
        identities = [_seed_of(infos[name], configs[name]) for name in group.runs]
        layers = [tuple(_groups.identity(configs[name].get(s)) for s in strata) for name in group.runs]
        lanes.append((group.name, curve, identities, layers))
    if without:
        # A sweep has settings that fail at once: they are no reason to say nothing of the others.
        _sites.warn(f"left out, since no run has {key!r}: {_errors.listing(without)}.")
    return lanes


def _curve_of(logs: Any, name: str, x: str | None, whose: str) -> Curve:
    """Return the curve of this name; `xs/0` may be an element of `xs`."""
    parts = name.split("/")
    may_have = {"/".join(parts[:n]) for n in range(len(parts), 0, -1)}
    logs = logs if isinstance(logs, Runs | logdict) else logdict(logs)
    known = logs.logged if isinstance(logs, Runs) else list(logs)
    keys = [glob.escape(key) for key in known if key in may_have]
    found = curves(logs, keys, x) if keys else []
    for curve in found:
        if curve.name == name:
            return curve
    names = [curve.name for curve in found] or known
    has = f" There is {_errors.listing(names[:20])}." if names else ""
    raise _errors.KeyNotFoundError(f"{whose} has {name!r}.{has}{_errors.nearest(name, names)}")


def _seed_of(run: Any, config: Mapping[str, Any]) -> Any:
    """Return what two runs with the same seed have in common; None if nothing tells."""
    if run.key_data is not None:
        return run.key_data, run.key_impl
    seeds = [(name, _groups.identity(value)) for name, value in config.items() if _groups.is_seed(name)]
    return tuple(seeds) or None


# --- scores ---


class _Scored:
    """The scores of the runs of a group."""

    def __init__(self, name: str, curve: Curve, at: At, better: str, identities: list[Any], layers: list[Any]):
        self.name = name
        scores = [_score(curve, lane, at, better) for lane in range(len(curve.lanes))]
        finite = [lane for lane, score in enumerate(scores) if math.isfinite(score)]
        self.by_run = dict(zip(curve.lanes, scores, strict=True))
        self.lost = tuple(run for run, score in self.by_run.items() if not math.isfinite(score))
        self.without = [run for run, there in zip(curve.lanes, curve.there, strict=True) if not there.any()]
        self.ends = [float(curve.x[there][-1]) for there in curve.there if there.any()]
        self.scores = np.array([scores[lane] for lane in finite])
        self.layers = [layers[lane] for lane in finite]
        self.everyone = list(zip(identities, layers, strict=True))
        self.place = {self.everyone[lane]: n for n, lane in enumerate(finite)}
        known = [lane for lane in finite if identities[lane] is not None and not isinstance(identities[lane], _Lane)]
        first = {(self.everyone[lane], scores[lane]): lane for lane in reversed(known)}
        self.repeated = [curve.lanes[lane] for lane in known if first[self.everyone[lane], scores[lane]] != lane]

    def strata(self) -> list[Array]:
        """Return the places of the scores of each stratum."""
        kinds = dict.fromkeys(self.layers)
        return [np.array([n for n, layer in enumerate(self.layers) if layer == kind]) for kind in kinds]

    def drawn(self, draws: int, generator: np.random.Generator) -> Array:
        """Return scores that are drawn with replacement, stratum by stratum: `(n, draws)`."""
        parts = [self.scores[at[_statistics.draw(len(at), draws, generator)]] for at in self.strata()]
        return np.concatenate(parts) if parts else np.zeros((0, draws))

    def summary(self, draws: int, generator: np.random.Generator) -> GroupScores:
        """Return mean, median and interquartile mean."""
        n, mean, std = _statistics.mean_and_std(self.scores[:, None])
        margin = _statistics.margin95(n, std)
        of_mean = Estimate(*(float(x[0]) for x in (mean, mean - margin, mean + margin)))
        drawn = self.drawn(draws, generator)
        enough = len(self.scores) > 1

        def estimate(statistic: Callable[[Array], Array]) -> Estimate:
            value = float(statistic(self.scores[:, None])[0]) if len(self.scores) else math.nan
            low, high = _interval(statistic(drawn)) if enough else (math.nan, math.nan)
            return Estimate(value, low, high)

        median = estimate(lambda x: _statistics.quantile(x, 0.5))
        iqm = estimate(_statistics.interquartile_mean)
        return GroupScores(self.name, len(self.scores), self.lost, self.by_run, of_mean, median, iqm)


def _interval(found: Array) -> tuple[float, float]:
    return float(_statistics.quantile(found, 0.025)), float(_statistics.quantile(found, 0.975))


def _score(curve: Curve, lane: int, at: At, better: str) -> float:
    values, x = curve.values[lane][curve.there[lane]], curve.x[curve.there[lane]]
    run = curve.lanes[lane]
    if not len(values):
        return math.nan  # it is left out, and named
    if callable(at):
        score = at(values)
        if np.ndim(score) or np.asarray(score).dtype.kind not in "biuf":
            raise _errors.OptionError(f"`at` gives {score!r} for the run {run!r}; it must return a number.")
        return float(score)
    if at == "last":
        return float(values[-1])
    if at == "mean":
        return float(values.mean())
    if at == "best":
        # A run that has diverged still has a best value before.
        finite = values[np.isfinite(values)]
        return float((finite.max() if better == "higher" else finite.min()) if len(finite) else math.nan)
    here = values[x == at]
    if not len(here):
        near = x[np.abs(x - float(at)).argmin()]
        raise _errors.StepError(
            f"the run {run!r} has no {curve.name!r} at {curve.step}={at:g}; the nearest is {near:g}.", name=curve.step
        )
    return float(here[-1])


def _is_number(at: Any) -> bool:
    return isinstance(at, int | float | np.integer | np.floating) and not isinstance(at, bool)


# --- pairs ---


def _compared(
    a: _Scored, b: _Scored, better: str, paired: bool | None, draws: int, generator: np.random.Generator
) -> Pair:
    pairs, nan = _pairs(a, b, paired), Estimate(math.nan, math.nan, math.nan)
    if not len(a.scores) or not len(b.scores):
        return Pair(a.name, b.name, nan, nan, 0, 0)
    enough = len(a.scores) > 1 and len(b.scores) > 1
    interval = _drawn(a, b, better, draws, generator) if enough else (math.nan, math.nan)
    improvement = Estimate(_improvement(a, b, better), *interval)
    if pairs is None or not len(pairs):
        interval = _welch(a.scores, b.scores) if enough else (math.nan, math.nan)
        return Pair(a.name, b.name, improvement, Estimate(float(a.scores.mean() - b.scores.mean()), *interval), 0, 0)
    differences = a.scores[pairs[:, 0]] - b.scores[pairs[:, 1]]
    n, mean, std = _statistics.mean_and_std(differences[:, None])
    margin = _statistics.margin95(n, std)
    difference = Estimate(*(float(x[0]) for x in (mean, mean - margin, mean + margin)))
    gains = differences if better == "higher" else -differences
    wins = float((gains > 0).sum() + 0.5 * (gains == 0).sum())
    return Pair(a.name, b.name, improvement, difference, len(pairs), wins)


def _pairs(a: _Scored, b: _Scored, paired: bool | None) -> Array | None:
    """Return the places of the scores of runs with the same seed, `(pair, 2)`; None if they are not to be paired."""
    if paired is False:
        return None
    by_lane = any(isinstance(identity, _Lane) for identity, _ in a.everyone)
    unique = len(set(a.everyone)) == len(a.everyone) and len(set(b.everyone)) == len(b.everyone)
    known = all(identity is not None for identity, _ in [*a.everyone, *b.everyone])
    if unique and known and set(a.everyone) == set(b.everyone) and (paired or not by_lane):
        both = [one for one in a.everyone if one in a.place and one in b.place]
        return np.array([(a.place[one], b.place[one]) for one in both], int).reshape(-1, 2)
    if paired:
        raise _errors.OptionError(
            f"the runs of {a.name!r} and {b.name!r} cannot be paired: they must have the same PRNG keys, each once. "
            "Choose runs with `where`, or leave out `paired`."
        )
    return None


def _improvement(a: _Scored, b: _Scored, better: str) -> float:
    """Return the probability that a run of `a` is better than one of `b`: the mean of those within strata."""
    found = [_probability(a.scores[m], b.scores[n], better) for m, n in _common_strata(a, b)]
    return float(np.mean(found))


def _common_strata(a: _Scored, b: _Scored) -> list[tuple[Array, Array]]:
    of_a, of_b = (dict(zip(dict.fromkeys(one.layers), one.strata(), strict=True)) for one in (a, b))
    if of_a.keys() != of_b.keys():
        differ = _errors.listing([str(x) for x in of_a.keys() ^ of_b.keys()])
        raise _errors.OptionError(
            f"{a.name!r} and {b.name!r} do not have finite scores in the same strata: {differ} differ."
        )
    return [(of_a[layer], of_b[layer]) for layer in of_a]


def _probability(a: Array, b: Array, better: str) -> Array:
    return _statistics.probability_greater(a, b) if better == "higher" else _statistics.probability_greater(b, a)


def _drawn(a: _Scored, b: _Scored, better: str, draws: int, generator: np.random.Generator) -> tuple[float, float]:
    total = np.zeros(draws)
    strata = _common_strata(a, b)
    for m, n in strata:
        one = a.scores[m[_statistics.draw(len(m), draws, generator)]]
        other = b.scores[n[_statistics.draw(len(n), draws, generator)]]
        total += _probability(one, other, better)
    return _interval(total / len(strata))


def _welch(a: Array, b: Array) -> tuple[float, float]:
    """Return the 95% interval of the difference of two means whose variances may differ."""
    of_a, of_b = a.var(ddof=1) / len(a), b.var(ddof=1) / len(b)
    error, mean = math.sqrt(of_a + of_b), float(a.mean() - b.mean())
    if not error:
        return mean, mean
    freedom = (of_a + of_b) ** 2 / (of_a**2 / (len(a) - 1) + of_b**2 / (len(b) - 1))
    margin = _statistics.t_quantile(float(freedom)) * error
    return mean - margin, mean + margin


# --- words ---


def _methods(
    scored: Sequence[_Scored], pairs: Sequence[Pair], at: At, strata: Any, draws: int, key: str, step: str
) -> tuple[str, ...]:
    what = {"last": "its last value", "best": "its best value", "mean": "the mean of its values"}
    named = getattr(at, "__name__", "<lambda>") if callable(at) else "<lambda>"
    of_function = "a function of its values" if named.startswith("<") else f"{named!r} of its values"
    score = of_function if callable(at) else what.get(str(at), f"its value at {at}")
    ends = [end for one in scored for end in one.ends]
    if not _is_number(at) and min(ends) < max(ends):
        # A run that was killed, or goes on, counts with what it has; nobody should have to guess that.
        score += f"; not all runs have come equally far: the last {step} is from {min(ends):g} to {max(ends):g}"
    names = [strata] if isinstance(strata, str) else list(strata or ())
    within = f", within strata of equal {_errors.listing(names)}" if names else ""
    texts = [
        f"score of a run: {score}",
        "mean: 95% interval by Student's t",
        f"median, IQM (mean of the middle half), P(better): 95% percentile bootstrap over runs, {draws} draws{within}",
    ]
    if any(pair.paired for pair in pairs):
        by_lane = any(isinstance(identity, _Lane) for one in scored for identity, _ in one.everyone)
        same = "lanes with the same number" if by_lane else "runs with the same PRNG key"
        texts.append(f"difference, better in pairs: of {same}, 95% interval by Student's t")
    if any(not pair.paired for pair in pairs):
        texts.append(f"difference{' without pairs' * (len(texts) > 3)}: 95% interval by Welch's t")
    again = [run for one in scored for run in one.repeated]
    if again:
        # A program that was started twice, for instance. It is no further evidence, and makes intervals too narrow.
        number = f"{len(again)} runs have" if len(again) > 1 else "1 run has"
        texts.append(
            f"counted more than once: {number} the PRNG key and the score of another in the group, "
            f"such as {_errors.printable(str(again[0]))!r}"
        )
    for why, named in (
        ("their score is not finite", lambda one: [run for run in one.lost if run not in one.without]),
        (f"they have no {key!r}", lambda one: one.without),
    ):
        runs = [f"{run} of {one.name}" for one in scored for run in named(one)]
        more = f" and {len(runs) - 8} more" if len(runs) > 8 else ""
        texts += [f"left out, because {why}: {', '.join(runs[:8])}{more}"] if runs else []
    return tuple(texts)


def _wins(pair: Pair) -> str:
    return f"{pair.wins:g} of {pair.paired}" if pair.paired else "not paired"


def _plain(one: Any) -> Any:
    if dataclasses.is_dataclass(one):
        return {field.name: _plain(getattr(one, field.name)) for field in dataclasses.fields(one)}
    if isinstance(one, dict):
        return {name: _plain(value) for name, value in one.items()}
    if isinstance(one, tuple):
        return [_plain(value) for value in one]
    return None if isinstance(one, float) and not math.isfinite(one) else one


def _text(titles: list[str], rows: list[list[str]]) -> str:
    rows = [list(map(_errors.printable, row)) for row in rows]
    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
    lines = ["  ".join(x.ljust(n) for x, n in zip(row, widths, strict=True)).rstrip() for row in (titles, *rows)]
    return "\n".join(lines)
