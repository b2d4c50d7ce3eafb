"""The commands and their arguments. What they do is in the other modules, which are imported when they are needed."""

import contextlib
import functools
import inspect
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from lox import _errors
from lox._command import _choose, _complete, _print
from lox._version import __version__

_INTERRUPTED, _CLOSED_PIPE = 130, 141  # as shells number what SIGINT and SIGPIPE have ended

app = typer.Typer(
    name="lox",
    help="Look at runs that lox has saved.",
    no_args_is_help=True,
    rich_markup_mode=None,  # plain help, which is never cut off and can be searched
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class _Options:
    traceback = False


def run(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a command line, by default that of the process, and exit."""
    app(args=None if arguments is None else list(arguments), prog_name="lox")
    sys.exit(0)


# --- errors and exit codes ---


@contextlib.contextmanager
def _guarded() -> Iterator[None]:
    """Print what lox refuses as one message; let what nobody expected show where it comes from."""
    traceback = _Options.traceback or os.environ.get("LOX_TRACEBACK", "0") not in ("", "0")
    with warnings.catch_warnings():
        _print.show_warnings_in_lines()
        try:
            yield
            sys.stdout.flush()
        except KeyboardInterrupt:
            raise typer.Exit(_INTERRUPTED) from None
        except BrokenPipeError:
            # Python would try to write the rest when it exits.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(_CLOSED_PIPE) from None
        except _errors.LoxError as error:
            if traceback:
                raise
            _print.error(error)
            raise typer.Exit(1) from None
        except ImportError as error:
            # One without the name of a module is lox's, and says what to install.
            if traceback or error.name is not None:
                raise
            _print.error(error)
            raise typer.Exit(1) from None


def _command(*examples: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a function a command with examples in its help."""

    def register(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def guarded(*args: Any, **kwargs: Any) -> None:
            with _guarded():
                function(*args, **kwargs)

        lines = "\n".join(f"  {example}" for example in examples)
        text = f"{inspect.getdoc(function)}\n\n\b\nExamples:\n{lines}"
        app.command(function.__name__.rstrip("_"), help=text)(guarded)
        return function

    return register


def _version(wanted: bool) -> None:
    if wanted:
        _print.plain_line(f"lox {__version__}")
        raise typer.Exit()


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    traceback: Annotated[
        bool, typer.Option("--traceback", help="Show where an error comes from; so does LOX_TRACEBACK=1.")
    ] = False,
) -> None:
    """Look at runs that lox has saved."""
    del version
    _Options.traceback = traceback


# --- arguments that several commands have ---

Directory = Annotated[Path, typer.Argument(metavar="DIR", help="The directory that a SaveLogger wrote to.")]
RunNames = Annotated[
    list[str] | None,
    typer.Argument(metavar="RUN", help="Names of runs, or globs.", autocompletion=_complete.runs),
]
Where = Annotated[
    list[str] | None,
    typer.Option(
        "--where",
        "-w",
        metavar="NAME=VALUE",
        help="Only runs with this in their config: 'lr=0.1', 'depth>=3', 'opt!=sgd'. Several must all hold.",
        autocompletion=_complete.conditions,
    ),
]
Keys = Annotated[
    list[str] | None,
    typer.Option(
        "--key", "-k", metavar="KEY", help="Only these keys: names, or globs in quotes.", autocompletion=_complete.keys
    ),
]
InJson = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]
By = Annotated[
    list[str] | None,
    typer.Option(
        "--by",
        "--group-by",
        metavar="NAME",
        help="Runs with the same value of this in their config are a group. By default all values but seeds count.",
        autocompletion=_complete.names,
    ),
]
Axis = Annotated[
    str | None,
    typer.Option(
        "--x", metavar="STEP", help="The x axis: the name of a step, 'event' or 'wall'.", autocompletion=_complete.steps
    ),
]
Port = Annotated[
    int | None,
    typer.Option("--port", "-p", min=0, max=65535, help="By default 6007, or the next that is free."),
]


class Format(StrEnum):
    """What to export to."""

    csv = "csv"
    jsonl = "jsonl"
    parquet = "parquet"
    tensorboard = "tensorboard"


class BandKind(StrEnum):
    """What is drawn around the mean."""

    ci95 = "ci95"
    std = "std"
    quantiles = "quantiles"
    iqm = "iqm"
    minmax = "minmax"


class Better(StrEnum):
    """Which scores are better."""

    HIGHER = "higher"
    LOWER = "lower"


class Damaged(StrEnum):
    """What to do about damaged rows."""

    error = "error"
    skip = "skip"


# --- commands ---


@_command("lox ls runs", "lox ls runs --where 'lr>=0.1'", "lox ls runs --json | jq '.[].name'")
def ls(directory: Directory, where: Where = None, in_json: InJson = False) -> None:
    """List the runs in DIR: names, configs, events, states."""
    from lox._command import _list

    found = _choose.runs(_choose.opened(directory), where=where or ())
    if in_json:
        _print.as_json([_list.as_dict(run) for run in found])
    else:
        _list.print_runs(found)


@_command("lox show runs", "lox show runs 42", "lox show runs --by lr --key 'train/*'")
def show(
    directory: Directory,
    run: RunNames = None,
    key: Keys = None,
    where: Where = None,
    by: By = None,
    in_json: InJson = False,
) -> None:
    """Show the keys of a run: events, last value, range and trend.

    Several runs are shown by groups: those that differ in nothing but their seed.
    """
    from lox._command import _list, _show
    from lox.view import _groups

    reader = _choose.opened(directory)
    chosen = {one.name: one for one in _choose.runs(reader, run or (), where or ())}
    groups = _groups.groups(list(chosen.values()), by or None)
    _choose.keys(reader, list(chosen), key or ())
    found = _show.summaries(reader, list(chosen), key or ())
    if in_json:
        of_runs = [
            {**_list.as_dict(one), "keys": [_show.as_dict(s) for s in found[name]]} for name, one in chosen.items()
        ]
        of_groups = []
        for group in groups:
            by_key = _show.grouped([found[name] for name in group.runs])
            keys = [_show.over_runs(of_key) for of_key in by_key.values()]
            of_groups.append({"name": group.name, "config": group.config, "runs": list(group.runs), "keys": keys})
        _print.as_json({"runs": of_runs, "groups": of_groups})
        return
    for number, group in enumerate(groups):
        if number:
            _print.line()
        members = [chosen[name] for name in group.runs]
        if len(members) == 1:
            _show.print_run(members[0], found[members[0].name])
        else:
            _show.print_group(group.name, members, found)


@_command(
    "lox plot runs -o plot.html",
    "lox plot runs --key 'train/*' --by lr --log-y -o plot.png",
    "lox plot runs 42 --where 'lr<0.1' --x wall --smooth 0.9 -o plot.svg",
)
def plot(
    directory: Directory,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="OUT", help="A file: .html, .png, .svg or .pdf.")],
    run: RunNames = None,
    key: Keys = None,
    where: Where = None,
    by: By = None,
    x: Axis = None,
    band: Annotated[BandKind, typer.Option(help="The mean with its 95% confidence interval, or with another band.")] = (
        BandKind.ci95
    ),
    lanes: Annotated[bool, typer.Option("--lanes", help="Draw single runs too, as thin lines.")] = False,
    log_x: Annotated[bool, typer.Option("--log-x", help="A logarithmic x axis.")] = False,
    log_y: Annotated[bool, typer.Option("--log-y", help="Logarithmic values.")] = False,
    smooth: Annotated[float, typer.Option(metavar="WEIGHT", help="Smooth the curves: from 0 to below 1.")] = 0.0,
    title: Annotated[str | None, typer.Option(help="A title.")] = None,
) -> None:
    """Plot curves to a file: mean and band over seeds."""
    from lox.view import _plot

    reader = _choose.opened(directory)
    found = _choose.runs(reader, run or (), where or ())
    _choose.keys(reader, [one.name for one in found], key or ())
    logs = _choose.loadable(reader, found, x)
    style: dict[str, Any] = dict(lanes=lanes, log_x=log_x, log_y=log_y, smooth=smooth, title=title)
    made = _plot.plot(logs, key or None, x=x, band=str(band), by=by or None, **style)
    try:
        made.save(out)
    except OSError as error:
        if isinstance(error, _errors.LoxError):
            raise
        raise _errors.cannot_write(out, error, "Choose another place with -o.") from error
    count = len(made.charts)
    _print.note(f"wrote {count} chart{'s' * (count > 1)} of {len(found)} run{'s' * (len(found) > 1)} to {out}")


@_command(
    "lox compare runs --key test/return --by lr",
    "lox compare runs --key loss --by lr --better lower --at best",
    "lox compare runs --key loss --where 'env=ant' -o compared.png",
)
def compare(
    directory: Directory,
    key: Annotated[
        str, typer.Option("--key", "-k", metavar="KEY", help="What to compare by.", autocompletion=_complete.keys)
    ],
    by: By = None,
    run: RunNames = None,
    where: Where = None,
    at: Annotated[
        str, typer.Option(metavar="WHICH", help="The score of a run: last, best, mean, or its value at a step.")
    ] = "last",
    better: Annotated[Better, typer.Option(help="Which scores are better.")] = Better.HIGHER,
    strata: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="In the config, such as env: compare within.", autocompletion=_complete.names
        ),
    ] = None,
    paired: Annotated[
        bool | None, typer.Option("--paired/--unpaired", help="By default, pairs of runs with the same PRNG key.")
    ] = None,
    x: Axis = None,
    seed: Annotated[int, typer.Option(help="The seed of the bootstrap.")] = 0,
    out: Annotated[Path | None, typer.Option("--out", "-o", metavar="OUT", help="Draw it to this file too.")] = None,
    in_json: InJson = False,
) -> None:
    """Compare groups of runs: mean, median and IQM with intervals.

    For each two groups there are the probability that one is better, and the difference of their means. Every number
    comes with the number of runs and the method.
    """
    from lox.view import _compare

    reader = _choose.opened(directory)
    logs = _choose.loadable(reader, _choose.runs(reader, run or (), where or ()), x)
    score: Any = at
    for number in (float, int):
        with contextlib.suppress(ValueError):  # what is no number is a word, which `compare` checks
            score = number(at)
    options: dict[str, Any] = dict(better=str(better), strata=strata or None, paired=paired, x=x, seed=seed)
    found = _compare.compare(logs, key, by or None, at=score, **options)
    if out is not None:
        found.plot(out)
    if in_json:
        _print.as_json(found.to_dict())
        return
    _print.line(f"{found.key}, {found.better} is better")
    for titles, rows in found.tables():
        _print.line()
        _print.rows(titles, rows, [])
    _print.line()
    for method in found.methods:
        _print.line(method)


@_command("lox tail runs", "lox tail runs 42 --key loss", "lox tail runs --json --until-finished | jq .values.loss")
def tail(
    directory: Directory,
    run: RunNames = None,
    key: Keys = None,
    where: Where = None,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="How many of the last events to begin with.")] = 10,
    interval: Annotated[float, typer.Option(min=0.01, help="Seconds between two looks at the files.")] = 0.5,
    once: Annotated[bool, typer.Option("--once", help="Print the last events and end.")] = False,
    until_finished: Annotated[
        bool, typer.Option("--until-finished", help="End when nobody writes to the runs any more.")
    ] = False,
    time: Annotated[bool, typer.Option("--time", "-t", help="Print the time of each event.")] = False,
    in_json: Annotated[bool, typer.Option("--json", help="Print a line of JSON per event.")] = False,
) -> None:
    """Print the last events, and new ones as they arrive, until Ctrl-C."""
    from lox._command import _tail

    reader = _choose.opened(directory)
    stop = "once" if once else "finished" if until_finished else "never"
    _tail.run(reader, run or (), where or (), key or (), lines, interval, stop, in_json, time)


@_command(
    "lox export runs --to csv -o runs.csv",
    "lox export runs --run '4*' --key 'train/*' --config -o runs.parquet",
    "lox export runs --to tensorboard -o tb && tensorboard --logdir tb",
    "lox export runs --to jsonl -o - | gzip > runs.jsonl.gz",
)
def export(
    directory: Directory,
    out: Annotated[str, typer.Option("--out", "-o", metavar="OUT", help="A file, or a folder for TensorBoard.")],
    to: Annotated[Format | None, typer.Option(help="By default what the name of OUT says.")] = None,
    run: Annotated[
        list[str] | None,
        typer.Option("--run", metavar="NAME", help="Only these runs: names, or globs.", autocompletion=_complete.runs),
    ] = None,
    key: Keys = None,
    where: Where = None,
    config: Annotated[bool, typer.Option("--config", help="Add the config of each run as columns.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace OUT if it exists.")] = False,
    damaged: Annotated[Damaged, typer.Option(help="What to do about damaged rows.")] = Damaged.error,
) -> None:
    """Write the events of runs to a file for other programs.

    CSV, JSON lines and Parquet have a row per event of each key: run, key, dtype, lane, event, the steps, wall (seconds
    since 1970) and value. Numbers read back as the same bits; arrays are JSON, histograms JSON with their bins, and
    pictures PNG in a data: address (in Parquet: array and shape, json, png). A leaf of a pytree is a key of its own. In
    CSV, text that a spreadsheet would take for a formula has an apostrophe in front.

    TensorBoard gets a folder per run: numbers in single precision, small arrays as several curves, histograms,
    pictures, the config as a text. What it cannot show is left out, with a warning that names the key.
    """
    from lox._command import _export

    format_ = _export.format_of(to, out)
    if out != "-":
        _export.check_free(Path(out), force, format_ == "tensorboard")
    reader = _choose.opened(directory, damaged)
    found = _choose.runs(reader, run or (), where or ())
    done = _export.export(reader, found, key or (), format_, out, force, config)
    if out != "-":
        _print.note(f"wrote {done} to {out}")


@_command("lox repair runs", "lox repair runs --json")
def repair(
    directory: Directory,
    force: Annotated[bool, typer.Option("--force", help="Also runs that seem to be written to.")] = False,
    in_json: InJson = False,
) -> None:
    """Cut off what a crash has left at the ends of files.

    lox reads such files as they are; after a repair, every reader of Arrow files does. Damaged bytes are kept in a file
    next to the original, which ends in .damaged.
    """
    from lox import store

    cut = store.repair(directory, force=force)
    if in_json:
        _print.as_json([{"file": file, "bytes": size} for file, size in cut.items()])
        return
    for file, size in cut.items():
        _print.line(f"{file}: cut off {size:,} bytes")
    if not cut:
        _print.line("nothing to repair")


@_command("lox ui runs", "lox ui runs --port 8080 --no-browser", "lox ui runs --host 0.0.0.0 --name gpu1.example.org")
def ui(
    directory: Directory,
    port: Port = None,
    host: Annotated[str, typer.Option(help="The address to listen on. Other machines need the token in the link.")] = (
        "127.0.0.1"
    ),
    name: Annotated[
        list[str] | None, typer.Option(metavar="HOST", help="Another name of this server, such as that of a proxy.")
    ] = None,
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open the page in a browser.")] = True,
) -> None:
    """Show the runs in a browser.

    There are means and bands over seeds, and everything grows while runs are written. Ctrl-C ends it.
    """
    from lox.view import _server

    def say(text: str) -> None:
        _print.plain_line(text)
        _print.flush()  # it may be a pipe

    _server.serve(directory, port, host, browser, tuple(name or ()), say)
