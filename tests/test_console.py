"""The console: its exact output, on terminals and elsewhere."""

import collections
import contextlib
import io
import os
import re
import select
import signal
import subprocess
import sys
import threading
import types
import warnings
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from machine import HANG, wait_for

import lox
from lox import _compat
from lox._data._bundle import Bundle, Site
from lox._data._lanes import Laned
from lox.loggers import ConsoleLogger
from lox.loggers._console import _board, _logger, _notebook, _progress, _render, _screen
from lox.loggers._console._board import Board, History
from lox.loggers._run import Run

pytest.importorskip("rich")
from rich import cells
from rich.console import Console


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """A clock that stands still, however long a test takes."""
    clock = types.SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    for module in (_progress, _board, _screen):
        monkeypatch.setattr(module, "time", clock)
    return clock


def bundle(values, steps=None, valid=None):
    """Events with arrays `(run, event, ...)`."""
    steps = {name: Laned(x) for name, x in (steps or {}).items()}
    valid = None if valid is None else Laned(valid)
    treedefs = (jax.tree.structure(0),) * len(values)
    return Bundle([*map(Laned, values.values())], steps, valid, tuple(values), treedefs, False, Site(""))


def board(runs, steps=6, progress=None):
    """Make a board with known numbers."""
    made = Board(progress, now=0.0)
    objects = [Run(n, np.array([0, 42 + n], np.uint32), {}) for n in range(runs)]
    for run in objects:
        made.add_run(run)
    events = np.broadcast_to(np.arange(steps), (runs, steps))
    loss = 1.0 / (1 + events) + np.arange(runs)[:, None]
    values = {
        "lr": np.full((runs, steps), 1e-3),
        "train/loss": loss,
        "train/n": 1000 * events,
        "w": np.ones((runs, steps, 2, 3)),
    }
    made.update(objects, [bundle(values, {"step": events})], now=2.0)
    return made


def text(renderable, width=72):
    console = Console(width=width, file=io.StringIO(), color_system=None)
    console.print(renderable)
    return console.file.getvalue()


# --- the picture ---

ONE_RUN = """\
╭─ run 42 ─────────────────────────────────────────────────────────────╮
│ step 5                                                               │
│                                           last  trend                │
│ lr                                       0.001  ▄▄▄▄▄▄               │
│ w [2×3]                                      1  ▄▄▄▄▄▄               │
│ train                                                                │
│   loss                                  0.1667  █▄▂▁▁▁               │
│   n                                      5,000  ▁▂▄▅▇█               │
│                                                                      │
│ step ━━━━━━━━━━━━━━━━━━━╸━━━━━━━━━━━━━  60%  6/10  1.5it/s  eta 0:02 │
╰───────────────────────────────────────────── 24 events  6.0/s  0:04 ─╯
"""


def test_the_table_of_one_run():
    shown = text(_render.table(board(1, progress={"step": 10}).view(now=4.0), 72))
    assert shown == ONE_RUN


def test_the_table_of_several_runs():
    shown = text(_render.table(board(3).view(now=4.0), 90), 90).splitlines()
    assert shown[0].startswith("╭─ 3 runs ─")
    assert shown[2].split() == ["│", "mean", "±", "std", "min", "max", "trend", "│"]
    assert [line.split()[1:-1] for line in shown[3:8]] == [
        ["lr", "0.001", "±", "0", "0.001", "0.001", "▄▄▄▄▄▄"],
        ["w", "[2×3]", "1", "±", "0", "1", "1", "▄▄▄▄▄▄"],
        ["train"],
        ["loss", "1.167", "±", "0.8165", "0.1667", "2.167", "█▄▂▁▁▁"],
        ["n", "5,000", "±", "0", "5,000", "5,000", "▁▂▄▅▇█"],
    ]
    assert len({len(line) for line in shown}) == 1


def test_what_does_not_fit_is_counted():
    many = Board(now=0.0)
    run = Run(0, np.array([0, 1], np.uint32), {})
    many.add_run(run)
    many.update([run], [bundle({f"group{n % 3}/k{n}": np.ones((1, 1)) for n in range(40)})], now=1.0)
    shown = text(_render.table(many.view(now=1.0), 60, height=15), 60)
    assert len(shown.splitlines()) <= 15
    assert re.search(r"and \d+ more keys", shown)
    assert len(text(_render.table(many.view(now=1.0), 60), 60).splitlines()) > 40


def test_numbers_that_overflow():
    made = Board(now=0.0)
    runs = [Run(n, np.array([0, n], np.uint32), {}) for n in range(2)]
    made.update(runs, [bundle({"x": np.array([[1e200], [-1e200]])})], now=1.0)
    assert _render.line(made.view(now=1.0)).endswith("x 0 ± inf")


def test_a_run_that_diverges_is_marked():
    made = board(3)
    runs = [Run(n, np.array([0, 42 + n], np.uint32), {}) for n in range(3)]
    made.update(runs, [bundle({"train/loss": np.array([[1.0], [np.nan], [3.0]])})], now=3.0)
    assert "loss 1 of 3 not finite" in text(_render.table(made.view(now=4.0), 100), 100)
    assert "train/loss 2 ± 1 (1 of 3 not finite)" in _render.line(made.view(now=4.0))


def test_hostile_keys_do_not_break_the_picture():
    made = Board(now=0.0)
    run = Run(0, np.array([0, 1], np.uint32), {})
    made.add_run(run)
    keys = ["[bold red]x[/]", "a\nb", "", "x" * 10_000, "\x1b[31mred", "/", "a//b", "../.."]
    made.update([run], [bundle({key: np.ones((1, 1)) for key in keys})], now=1.0)
    shown = text(_render.table(made.view(now=1.0), 80), 80)
    assert "[bold red]x[" in shown and "\x1b" not in shown
    assert {len(line) for line in shown.splitlines()} == {80}
    assert "\n" not in _render.line(made.view(now=1.0)) and "\x1b" not in _render.line(made.view(now=1.0))


HOSTILE = "\x1b]0;owned\x07st\nep\x1b[31m\u202e\ud800"  # sets the title, the colour, the direction of writing
SHOWN = "�]0;owned�st�ep�[31m��"


def test_no_name_acts_on_a_terminal_or_pipe(clock):
    """Keys, steps, totals and the names of bars, as a line and as a picture."""
    run = types.SimpleNamespace(id=0, name=HOSTILE, resumed=None)
    made = Board({HOSTILE: 10}, now=0.0)
    made.add_run(run)
    made.update([run], [bundle({HOSTILE: np.ones((1, 1))}, {HOSTILE: np.zeros((1, 1))})], now=1.0)
    line = _render.line(made.view(now=1.0))
    assert line == f"0:01 run {SHOWN} | {SHOWN} 0/10 (10%, eta 0:09) | {SHOWN} 1"
    shown = text(_render.table(made.view(now=1.0), 80), 80)
    assert SHOWN[:10] in shown and shown.replace("\n", "").isprintable()
    for total in (None, 10):
        out = io.StringIO()
        bar = lox.progress(total, name=HOSTILE, every=0.0, console=Console(file=out))
        bar.while_loop(lambda x: x < 10, lambda x: x + 1, 0)
        jax.effects_barrier()
        assert out.getvalue().startswith(f"{SHOWN} ") and out.getvalue().replace("\n", "").isprintable()


def test_only_valid_events_count():
    made = Board({"step": 10}, now=0.0)
    runs = [Run(n, np.array([0, n], np.uint32), {}) for n in range(2)]
    for run in runs:
        made.add_run(run)
    valid = np.array([[True, True, False], [True, False, False]])
    steps = np.where(valid, [0, 1, 2], -1)
    made.update(runs, [bundle({"x": np.where(valid, 5.0, np.nan)}, {"step": steps}, valid)], now=1.0)
    view = made.view(now=1.0)
    assert view.keys[0].events == 3 and view.keys[0].mean == 5.0 and view.keys[0].bad == 0
    assert view.steps == (("step", 0.5),) and view.keys[0].history == (5.0, 5.0)


def test_the_history_stays_short():
    history = History()
    for part in np.array_split(np.arange(100_000.0), 33):
        history.add(part)
    points = np.asarray(history.points)
    assert 32 <= len(points) <= 66 and history.stride == 2048
    assert np.all(np.diff(points) > 0) and abs(points.mean() - 50_000) < 2_000


@pytest.mark.parametrize(
    ("number", "shown"),
    [
        (0.0, "0"),
        (1 / 3, "0.3333"),
        (1e-7, "1e-07"),
        (123456.7, "1.235e+05"),
        (float("nan"), "nan"),
        (float("-inf"), "-inf"),
    ],
)
def test_numbers(number, shown):
    assert _render.number(number) == shown


def test_small_pieces():
    assert _render.number(1234567, True) == "1,234,567"
    assert [_render.duration(s) for s in (0, 59.9, 61, 3723)] == ["0:00", "0:59", "1:01", "1:02:03"]
    assert [_render.rate(r) for r in (0.5, 12, 1234, 5.6e6, 7e9)] == ["0.5/s", "12/s", "1.2k/s", "5.6M/s", "7.0G/s"]
    assert _render.sparkline([]) == "" and _render.sparkline([1, 1]) == "▄▄"
    assert _render.sparkline([0, float("nan"), 1]) == "▁·█"
    assert _render.sparkline(list(range(100)), 8) == "▁▂▃▄▅▆▇█"


def crowded(runs):
    """Make a board with long names of everything, and long numbers."""
    made = Board({"step": 10_000_000, "environment/interactions": 2_000_000_000}, now=0.0)
    name = "{} lr=0.0001 optimizer=adamw-with-schedule"
    objects = [Run(n, np.array([0, n], np.uint32), {}, name=name.format(n)) for n in range(runs)]
    for run in objects:
        made.add_run(run)
    events = np.broadcast_to(np.arange(30), (runs, 30))
    values = {
        "lr": np.full((runs, 30), 1e-3),
        "w": np.ones((runs, 30, 2, 3)),
        "model/block_11/self_attention/query/gradient_norm_before_clipping": 1e-12 * events + np.arange(runs)[:, None],
        "train/environment_interactions_of_all": 123_456_789 * events,
        "train/loss": np.where(np.arange(runs)[:, None] == 1, np.nan, -1.2345e-100 * events),
        "日本語/損失関数の値": 1.5 * events,
    }
    steps = {
        "step": 100_000 * events,
        "environment/interactions": 20_000_000 * events,
        "epoch": events // 3,
        "a_step_with_a_very_long_name_of_some_kind": events,
    }
    made.update(objects, [bundle(values, steps)], now=2.0)
    return made.view(now=4000.0)


@pytest.mark.parametrize("runs", [1, 8])
@pytest.mark.parametrize("width", [60, 80, 120])
def test_nothing_that_matters_is_cut_off(runs, width):
    shown = text(_render.table(crowded(runs), width), width)
    assert {cells.cell_len(line) for line in shown.splitlines()} == {min(width, 100)}
    rows = {line.split()[1]: line for line in shown.splitlines() if len(line.split()) > 1}
    for number in ("0.001", "3,580,246,881", "-3.58e-99", "43.5", "580,000,000", "2,900,000", "29"):
        assert re.search(rf"(?<=\s){re.escape(number)}(?=\s)", shown), number
    for end in ("_norm_before_clipping", "ment_interactions_of_all", "損失関数の値", "interactions", "some_kind"):
        assert end + " " in shown, end
    assert "block_11/self_attention/query " in shown and "w [2×3] " in shown
    # Bars: share, count and time left.
    assert re.search(r"29%  2,900,001/10,000,000  .*eta 2:43:13 ", rows["step"])
    assert re.search(r"ractions .*29%  580,000,001/2,000,000,000  .*eta 2:43:13 ", shown)
    if runs == 1:
        assert re.search(r"╭─ run 0 lr=0.0001 \S+adamw-with-schedule ─", shown)
        assert "▁▂▃▄▅▆▇█" in rows["損失関数の値"] or width > 60
    else:
        assert "╭─ 8 runs ─" in shown and "loss 1 of 8 not finite " in shown
        assert ("± 2.291" in shown) and ("trend" in shown) == (width > 60)


def test_a_key_or_a_step_of_any_length_leaves_room_for_numbers():
    made = Board({"x" * 500: 10}, now=0.0)
    run = Run(0, np.array([0, 1], np.uint32), {}, name="n" * 500)
    made.add_run(run)
    made.update([run], [bundle({"a/" * 300 + "y" * 500: np.full((1, 1), 1.5)}, {"x" * 500: np.zeros((1, 1))})], now=1.0)
    assert (
        text(_render.table(made.view(now=1.0), 50), 50)
        == """\
╭─ run nnnnnnnnnnnnnnnnnnnn…nnnnnnnnnnnnnnnnnnn ─╮
│ …xxxxxxxxxxxxxxxxxxx 0                         │
│                                 last  trend    │
│ …a/a/a/a/a/a/a/a/a/a/a/a/a/a/a/a/a/a/a/a/a/a/a │
│   …yyyyyyyyyyyyyyyyyyyyyyyyyyy   1.5  ▄        │
│                                                │
│ …xxxxxxxxxxxxxxxxxxx 10%  1/10  eta 0:09       │
╰──────────────────────── 1 events  1.0/s  0:01 ─╯
"""
    )


def test_columns_do_not_come_and_go():
    """Whatever the digits of the numbers are."""
    headers = set()
    for scale in (1.0, 1 / 3, 1e-9 / 3, -1e50 / 3):
        made = Board(now=0.0)
        runs = [Run(n, np.array([0, n], np.uint32), {}) for n in range(2)]
        for run in runs:
            made.add_run(run)
        made.update(runs, [bundle({"a_key_of_17_chars": scale * np.array([[1.0], [2.0]])})], now=1.0)
        lines = text(_render.table(made.view(now=1.0), 80), 80).splitlines()
        assert {len(line) for line in lines} == {80}
        headers.add(tuple(lines[1].split()))
    assert headers == {("│", "mean", "±", "std", "min", "max", "trend", "│")}


# --- before the first event ---

COMPILING = """\
╭─ 8 runs ─────────────────────────────────────────────────╮
│ compiling ... 0:12                                       │
│ 0 lr=0.1, 1 lr=0.1, 2 lr=0.1, 3 lr=0.1, and 4 more       │
│                                                          │
│ step ━━━━━━━━━━━━━━━━━━━━   0%  0/100  0.0it/s  eta -:-- │
╰─────────────────────────────────────────────────── 0:13 ─╯
"""


def test_the_table_while_a_program_is_compiled(monkeypatch):
    monkeypatch.setattr(_board._compat, "is_compiling", lambda thread: thread == 7)
    made = Board({"step": 100}, now=0.0)
    made.follow(7)
    assert text(_render.table(made.view(now=1.0), 60), 60).splitlines()[1] == f"│ {'compiling ... 0:00':56} │"
    for n in range(8):
        made.add_run(Run(n, np.array([0, n], np.uint32), {}, name=f"{n} lr=0.1"))
    assert text(_render.table(made.view(now=13.0), 60), 60) == COMPILING
    made.follow(8)
    shown = text(_render.table(made.view(now=13.0), 60), 60)
    assert shown == COMPILING.replace("compiling ... 0:12", "waiting for events")
    made.follow(7)  # something else is compiled: from here on
    assert made.view(now=20.0).compiling == 0.0 and made.view(now=25.0).compiling == 5.0
    made.update([Run(0, np.array([0, 0], np.uint32), {})], [bundle({"x": np.ones((1, 1))})], now=26.0)
    assert text(_render.table(made.view(now=26.0), 60), 60).splitlines()[-1] == (
        "╰────────────── compiling ... 0:06  1 events  0.1/s  0:26 ─╯"
    )


def test_jax_says_whether_it_compiles():
    """While tracing, and while compiling, seen from another thread; but not while a program or its callback runs."""
    here, seen = threading.get_ident(), []

    def look(when):
        with ThreadPoolExecutor(1) as pool:
            seen.append((when, pool.submit(_compat.is_compiling, here).result()))

    def f(x):
        look("trace")
        jax.debug.callback(lambda: look("run"))
        return x + 1

    look("before")
    jax.jit(f)(1.0)
    jax.effects_barrier()
    jax.vmap(lambda x: (look("vmap"), x)[1])(jnp.arange(2.0))
    look("after")
    assert seen == [("before", False), ("trace", True), ("run", False), ("vmap", False), ("after", False)]


@pytest.mark.slow
def test_jax_says_that_it_compiles_after_tracing():
    here, ended, seen = threading.get_ident(), threading.Event(), collections.defaultdict(set)
    phase = ["trace"]

    def watch():
        while not ended.wait(0.001):
            seen[phase[0]].add(_compat.is_compiling(here))

    def f(x):
        for _ in range(100):
            x = jnp.sin(x @ x)
        phase[0] = "compile"
        return x

    with ThreadPoolExecutor(1) as pool:
        pool.submit(watch)
        jax.jit(f).lower(jnp.ones((4, 4))).compile()
        ended.set()
    assert True in seen["trace"] and True in seen["compile"]


def test_a_line_before_the_first_event(clock):
    out = io.StringIO()
    with ConsoleLogger(console=Console(file=out)) as logger:
        state = logger.init(jax.random.key(42))
        assert out.getvalue() == ""
        clock.now = 1.0

        @jax.jit
        def run(state, x):
            y = logger.tap(train, state)(x)
            assert out.getvalue() == "0:01 run 42 | compiling ...\n"  # while it is traced
            return logger.tap(train, state)(y)

        run(state, 8.0)
        logger.flush()
        run(state, 8.0)
    lines = out.getvalue().splitlines()
    assert lines[-1].startswith("0:01 run 42 | step 4 | train/x ")
    assert ["compiling" in line for line in lines] == [True] + [False] * (len(lines) - 1)  # once


@pytest.mark.parametrize("together", [False, True])
def test_a_line_before_runs_that_begin_inside(together, clock):
    out = io.StringIO()
    logger = ConsoleLogger(console=Console(file=out))
    with lox.MultiLogger(logger) if together else logger as logger:

        @jax.jit
        @jax.vmap
        def run(key):
            clock.now += 1.0
            state = logger.init(key)
            assert out.getvalue() == "0:00 no runs yet | compiling ...\n"
            return logger.spool(train, state)(8.0)

        run(jax.random.split(jax.random.key(0), 2))
    lines = out.getvalue().splitlines()
    assert lines[-1] == "0:00 2 runs | step 4 | train/x 0.5 ± 0" and len(lines) == 2


ONLY_TRACED = {
    "make_jaxpr": lambda f, x: jax.make_jaxpr(f)(x),
    "eval_shape": lambda f, x: jax.eval_shape(f, x),
    "lower": lambda f, x: jax.jit(f).lower(x),
    "an error": lambda f, x: jax.jit(lambda x: f(x) + jnp.zeros(3) @ jnp.zeros(4))(x),
}


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.parametrize("how", ONLY_TRACED)
@pytest.mark.parametrize("terminal", [False, True])
def test_a_program_that_is_only_traced_leaves_nothing(how, terminal):
    console = Console(file=io.StringIO(), force_terminal=terminal, width=60)
    logger = ConsoleLogger(console=console)
    run = lambda key: logger.tap(train, logger.init(key))(8.0)  # noqa: E731
    try:
        with pytest.raises(TypeError, match="dot_general") if how == "an error" else contextlib.nullcontext():
            ONLY_TRACED[how](run, jax.random.key(0))
        assert "compiling ..." in console.file.getvalue()
        wait_for(lambda: not _screen.screen_of(console)._parts)  # without `close`, or any other call
        shown = console.file.getvalue()
        assert shown.rfind("\x1b[?25h") > shown.rfind("\x1b[?25l") or not terminal
        run(jax.random.key(0))  # and then it runs
        logger.flush()
        assert _screen.screen_of(console)._parts == [logger]
    finally:
        logger.close()
    last = console.file.getvalue().splitlines()
    assert last[-1] == "0:00 run 0 | step 4 | train/x 0.5" or (terminal and "╰─" in last[-1])


def test_close_takes_away_what_was_only_traced(monkeypatch):
    monkeypatch.setattr(_logger, "_PATIENCE", HANG)
    console = Console(file=io.StringIO(), force_terminal=True, width=60)
    with ConsoleLogger(console=console) as logger:
        jax.make_jaxpr(lambda key: logger.tap(train, logger.init(key))(8.0))(jax.random.key(0))
        assert _screen.screen_of(console)._parts == [logger]
    shown = console.file.getvalue()
    assert not _screen.screen_of(console)._parts and _screen.screen_of(console)._live is None
    assert shown.rfind("\x1b[?25h") > shown.rfind("\x1b[?25l") >= 0  # the cursor
    assert shown.rfind("\x1b[2K") > shown.rfind("compiling ...") > 0  # the lines are erased


def test_time_spent_compiling_is_no_progress(monkeypatch):
    """It took a minute to compile, and since then a step per second."""
    monkeypatch.setattr(_board._compat, "is_compiling", lambda thread: thread == 7)
    made = Board({"step": 100}, now=0.0)
    made.follow(7)
    made.view(now=0.0)  # as when it is announced
    assert made.view(now=60.0)[-2:] == (60.0, 0.0)
    made.follow(8)
    run = Run(0, np.array([0, 42], np.uint32), {})
    made.add_run(run)
    for n in range(10):
        made.update([run], [bundle({"x": np.ones((1, 1))}, {"step": np.full((1, 1), n)})], now=60.0 + n)
    view = made.view(now=70.0)
    assert _render.line(view) == "1:10 run 42 | step 9/100 (10%, eta 1:30) | x 1"
    assert "10/100  1.0it/s  eta 1:30" in text(_render.table(view, 72))


def test_leaks_can_be_looked_for():
    out = io.StringIO()
    with ConsoleLogger(console=Console(file=out, force_terminal=True)) as logger, jax.checking_leaks():
        jax.jit(lambda key: logger.tap(train, logger.init(key))(8.0))(jax.random.key(0))
    assert "compiling" not in out.getvalue() and "run 0" in out.getvalue()


def test_the_next_run_has_a_table_of_its_own():
    out = io.StringIO()
    with ConsoleLogger(console=Console(file=out)) as logger:
        for n in range(2):
            state = logger.init(jax.random.key(n))
            logger.log(state, {"x": n})
            logger.close(state)
    assert out.getvalue().splitlines() == ["0:00 run 0 | x 0", "0:00 run 1 | x 1"]


def test_a_run_that_ends_does_not_end_the_display_of_others():
    console = Console(file=io.StringIO(), width=60)
    with ConsoleLogger(console=console) as logger:
        first, second = (logger.init(jax.random.key(n)) for n in range(2))
        logger.close(first)
        assert _screen.screen_of(console)._parts == [logger]
        logger.close(second)
        assert not _screen.screen_of(console)._parts


# --- in a notebook ---

CELL = """
import jax, jax.numpy as jnp, lox, time
def train(x):
    def step(x, i):
        jax.debug.callback(lambda: time.sleep(0.01))
        lox.log({"train/x": x}, step=i)
        return x / 2, None
    return jax.lax.scan(step, x, jnp.arange(50))[0]
with lox.loggers.ConsoleLogger(progress={"step": 50}) as logger:
    jax.jit(lambda key: logger.tap(train, logger.init(key))(8.0))(jax.random.key(42))
slow = lambda c, _: (c + 1, jax.debug.callback(lambda: time.sleep(0.01)))
inner = lox.progress(30, name="inner")
lox.progress(3, name="outer").scan(lambda c, _: (inner.scan(slow, c)[0], None), 0)
jax.effects_barrier()
jax.make_jaxpr(lambda key: lox.loggers.ConsoleLogger().init(key))(jax.random.key(0))
from lox.loggers._console._screen import screen_of
gone = False
while not gone:
    time.sleep(0.05)
    with screen_of()._lock:
        gone = not screen_of()._parts
"""


@pytest.mark.slow
def test_a_notebook(tmp_path):
    """In a real kernel: one output for the table and one for bars, each updated in place, and no warning."""
    manager = pytest.importorskip("jupyter_client.manager")
    pytest.importorskip("ipykernel")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the client
        kernel, client = manager.start_new_kernel(startup_timeout=HANG, kernel_name="python3", env={**os.environ})
        messages = []
        try:
            reply = client.execute_interactive(CELL, output_hook=messages.append, timeout=HANG)
        finally:
            client.stop_channels()
            kernel.shutdown_kernel(now=True)
    assert reply["content"]["status"] == "ok", reply["content"]
    outputs, counts = {}, collections.Counter()
    for message in messages:
        kind, content = message["msg_type"], message["content"]
        assert kind in ("status", "execute_input", "display_data", "update_display_data"), content  # such as a stream
        if "data" in content:
            name = content["transient"]["display_id"]
            assert (kind == "update_display_data") == (name in outputs)  # in place
            outputs.setdefault(name, []).append(content["data"])
            counts[name] += 1
    table, bars, traced = outputs.values()
    assert all(count > 1 for count in list(counts.values())[:2])
    assert "no runs yet" in table[0]["text/plain"] and "compiling ... 0:00" in table[0]["text/plain"]
    lines = table[-1]["text/plain"].splitlines()
    assert lines[0].startswith("╭─ run 42 ─") and re.search(r"100%  50/50  .*done", lines[-2])
    assert re.fullmatch(r"outer ━+ 100%  3/3  \S+it/s  done\n", bars[-1]["text/plain"])
    assert any("inner" in data["text/plain"] for data in bars)
    assert "compiling ..." in traced[0]["text/plain"] and traced[-1] == {"text/plain": "", "text/html": ""}
    html = table[-1]["text/html"]
    assert html.startswith("<pre style=") and html.count("<span") == html.count("</span>") and "script" not in html


def test_names_are_text_in_a_notebook():
    made = Board(now=0.0)
    run = Run(0, np.array([0, 1], np.uint32), {}, name="<script>alert(1)</script>")
    made.add_run(run)
    made.update([run], [bundle({"<img src=x onerror=alert(1)>": np.ones((1, 1))})], now=1.0)
    html = _notebook._as_html([_render.table(made.view(now=1.0), 80)], 80)["text/html"]
    assert "&lt;script&gt;alert(1)" in html and "<script" not in html and "<img" not in html


# --- not on a terminal ---


def train(x, n=5):
    def step(x, i):
        lox.log({"train/x": x}, step=i)
        return x / 2, None

    return jax.lax.scan(step, x, jnp.arange(n))[0]


def test_lines_where_there_is_no_terminal(capsys, clock):
    out = io.StringIO()
    with ConsoleLogger(progress={"step": 5}, every=0.0, console=Console(file=out)) as logger:
        state = logger.init(jax.random.key(42))
        for n in range(2):
            clock.now += 2.0
            logger.log(state, {"train/x": 8.0 / 2**n}, step=n)
            logger.flush()
        logger.tap(train, state)(2.0)
    lines = out.getvalue().splitlines()
    assert lines[0] == "0:02 run 42 | step 0/5 (20%, eta 0:08) | train/x 8"
    assert lines[1] == "0:04 run 42 | step 1/5 (40%, eta 0:06) | train/x 4"
    assert lines[-1] == "0:04 run 42 | step 4/5 (100%, done) | train/x 0.125"
    assert capsys.readouterr().out == ""


def test_lines_come_at_a_fixed_rate(clock):
    out = io.StringIO()
    with ConsoleLogger(every=10.0, console=Console(file=out)) as logger:
        state = logger.init(jax.random.key(42))
        for n in range(40):
            clock.now = 1.0 * n
            logger.log(state, {"n": n})
            logger.flush()
    assert out.getvalue().splitlines() == [f"0:{n:02} run 42 | n {n}" for n in (0, 10, 20, 30, 39)]


def test_lines_are_rare():
    out = io.StringIO()
    with ConsoleLogger(console=Console(file=out)) as logger:
        states = jax.vmap(logger.init)(jax.random.split(jax.random.key(0), 3))
        jax.jit(jax.vmap(lambda s, x: logger.tap(lambda x: train(x, 500), s)(x)))(states, jnp.arange(3.0))
    lines = out.getvalue().splitlines()
    assert len(lines) <= 3  # before the first event, the first, and the last
    assert lines[0] == "0:00 3 runs | compiling ..."
    assert lines[-1].startswith("0:00 3 runs | step 499 | train/x ")


def test_one_key_of_many_shapes():
    def f():
        for n in (2, 4):
            jax.vmap(lambda x, n=n: lox.log({"h": x}, step=n))(jnp.arange(n, dtype=jnp.float32))
        lox.log({"v": jnp.ones((2, 2))}, step=5)
        lox.log({"v": jnp.zeros(3)}, step=6)

    for options in ({}, {"buffer": 3}):
        console = Console(file=io.StringIO(), width=100)
        with ConsoleLogger(console=console) as logger:
            logger.tap(f, logger.init(jax.random.key(0)), **options)()
        assert console.file.getvalue().splitlines()[-1] == "0:00 run 0 | step 6 | h 1.5 | v 0"
    made = Board(None, now=0.0)
    run = Run(0, np.array([0, 42], np.uint32), {})
    made.add_run(run)
    for shape in ((2, 3), (4,), ()):
        made.update([run], [bundle({"w": np.ones((1, 1, *shape))})], now=1.0)
        label = f"w [{'×'.join(map(str, shape))}]" if shape else "w"
        assert f"│ {label} " in text(_render.table(made.view(now=1.0), 72))


def test_nothing_is_shown_before_a_run_begins():
    out = io.StringIO()
    ConsoleLogger(console=Console(file=out)).close()
    assert out.getvalue() == ""


def test_wrong_totals():
    with pytest.raises(ValueError, match=r"`progress\['step'\]` is 0; it must be the total, a positive number"):
        ConsoleLogger(progress={"step": 0})


# --- on a terminal ---

SCRIPT = """
import sys, time, jax, jax.numpy as jnp, lox
mode, hang = sys.argv[1], float(sys.argv[2])
def slow(i):
    time.sleep(0.01)
    if i % 20 == 0:
        print(f"<printed {i}>")
    if mode == "raise" and i == 30:
        raise ValueError("boom")
    if mode == "interrupt" and i == 30:
        print("<waiting>")
        time.sleep(hang)
def train(x):
    def step(x, i):
        jax.debug.callback(slow, i)
        lox.log({"train/x": x}, step=i)
        return 0.9 * x, None
    return jax.lax.scan(step, x, jnp.arange(60))[0]
logger = lox.loggers.ConsoleLogger(progress={"step": 60})
print("<ready>", flush=True)
def run(x, state=None):
    return logger.tap(train, logger.init(jax.random.key(42)) if state is None else state)(x)
state = None if mode == "inside" else logger.init(jax.random.key(42))
try:
    jax.jit(run)(1.0, state).block_until_ready()
except BaseException as error:
    if mode != "interrupt":
        raise
    print("<interrupted>")
    sys.exit(3)
print("<done>")
"""


def on_a_terminal(tmp_path, mode, interrupt=False):
    import pty

    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    main, other = pty.openpty()
    env = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24", "XLA_FLAGS": ""}
    process = subprocess.Popen(
        [sys.executable, script, mode, str(HANG)], stdin=other, stdout=other, stderr=other, env=env
    )
    os.close(other)
    data, sent = b"", False
    while select.select([main], [], [], HANG)[0]:
        try:
            chunk = os.read(main, 65536)
        except OSError:
            break
        if not chunk:
            break
        data += chunk
        if interrupt and not sent and b"<waiting>" in data:
            process.send_signal(signal.SIGINT)
            sent = True
    process.wait(HANG)
    os.close(main)
    return process.returncode, data.decode()


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["plain", "inside", "raise", "interrupt"])
def test_a_terminal_is_left_as_it_was(tmp_path, mode):
    code, shown = on_a_terminal(tmp_path, mode, interrupt=mode == "interrupt")
    assert code == {"plain": 0, "inside": 0, "raise": 1, "interrupt": 3}[mode], shown
    assert shown.rfind("\x1b[?25h") > shown.rfind("\x1b[?25l") >= 0  # the cursor is back
    assert 0 < shown.find("compiling ... 0:00") < shown.find("<printed 0>")
    assert ("no runs yet" in shown) == (mode == "inside")
    for printed in ("<ready>", "<printed 0>", "<printed 20>"):
        assert shown.count(printed) == 1  # whole, and once: never a part of the table
    assert ("boom" in shown) == (mode == "raise")
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown)
    last = plain[plain.rfind("╭─ run 42") :]
    assert ("60/60" in last) == (mode in ("plain", "inside"))
    assert last.count("╰") == 1 and "│" not in last[last.rfind("╯") :]  # a GPU's runtime may say something at the end


# --- progress bars ---


@pytest.fixture
def host_calls(monkeypatch, clock):
    """Record the kind and the count of each call, at 100,000 iterations per second."""
    calls, tick = [], lox.progress._tick

    def _tick(self, kind, number, count):
        calls.append((kind, count))
        clock.now = count / 100_000
        return tick(self, kind, number, count)

    monkeypatch.setattr(lox.progress, "_tick", _tick)
    return calls


def bar(total=None, **options):
    return lox.progress(total, console=Console(file=io.StringIO()), **options)


def shown(progress):
    return progress._console.file.getvalue().splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("jit", [lambda f: f, jax.jit])
def test_bars_of_all_loops(jit, host_calls):
    step = lambda c, x: (c + x, 2 * x)  # noqa: E731
    of_scan = bar()
    carry, ys = jit(lambda xs: of_scan.scan(step, 0, xs))(jnp.arange(5))
    assert int(carry) == 10 and ys.tolist() == [0, 2, 4, 6, 8]
    of_length = bar(7)
    assert int(jit(lambda: of_length.scan(lambda c, _: (c + 1, None), 0)[0])()) == 7
    of_fori = bar(name="epochs")
    assert int(jit(lambda n: of_fori.fori_loop(2, n, lambda i, c: c + i, 0))(6)) == 14
    of_while, of_unknown = bar(100), bar(name="solver")
    for loop in (of_while, of_unknown):
        halve = lambda x, loop=loop: loop.while_loop(lambda x: x > 1, lambda x: x // 2, x)  # noqa: E731
        assert int(jit(halve)(1000)) == 1
    jax.effects_barrier()
    assert shown(of_scan) == ["progress 100%, 5/5, done"]
    assert shown(of_length) == ["progress 100%, 7/7, done"]
    assert shown(of_fori) == ["epochs 100%, 4/4, done"]
    assert shown(of_while) == ["progress 100%, 9/9, done"]
    assert shown(of_unknown) == ["solver 9, 0:00"]


@pytest.mark.parametrize("wrap", [jax.jit, lambda f: jax.jit(jax.vmap(f, axis_size=3, in_axes=None)), jax.grad])
def test_the_host_is_called_now_and_then(wrap, host_calls):
    progress = bar(50_000)
    wrap(lambda x: progress.scan(lambda c, _: (0.999 * c, None), x)[0])(1.0)
    jax.effects_barrier()
    # The distance doubles until it is a tenth of a second.
    counts = [*[2**n for n in range(15)], 26_384, 36_384, 46_384]
    assert host_calls == [("begin", 0), *[("step", count) for count in counts], ("end", 50_000)]
    assert shown(progress) == ["progress 100%, 50,000/50,000, done"]


def test_lanes_that_end_at_different_times_share_a_bar(host_calls):
    progress = bar(20_000)
    loop = lambda n: progress.while_loop(lambda i: i < n, lambda i: i + 1, 0)  # noqa: E731
    assert jax.jit(jax.vmap(loop))(jnp.array([3, 20_000, 50])).tolist() == [3, 20_000, 50]
    jax.effects_barrier()
    assert host_calls == [("begin", 0), *[("step", 2**n) for n in range(15)], ("end", 20_000)]
    assert shown(progress) == ["progress 100%, 20,000/20,000, done"]


def test_nested_loops():
    out = io.StringIO()
    console = Console(file=out)
    outer, inner = lox.progress(3, name="epochs", console=console), lox.progress(4, name="steps", console=console)
    step = lambda c, _: (c + 1, None)  # noqa: E731
    assert int(jax.jit(lambda: outer.scan(lambda c, _: (inner.scan(step, c)[0], None), 0)[0])()) == 12
    jax.effects_barrier()
    assert out.getvalue().splitlines() == ["epochs 100%, 3/3, done"]


@pytest.mark.parametrize("late", [False, True])
def test_an_aborted_loop(monkeypatch, late):
    def fail(i):
        if i == 3:
            raise ValueError("boom")

    def step(c, i):
        jax.debug.callback(fail, i)
        return c, None

    progress = bar(5)
    with pytest.raises(Exception, match="boom"), progress:
        if late:  # on a GPU, waiting for the callbacks raises again what they have raised
            monkeypatch.setattr(jax, "effects_barrier", lambda: fail(3))
        jax.jit(lambda: progress.scan(step, 0, jnp.arange(5)))()
        jax.effects_barrier()
    monkeypatch.undo()
    assert not progress._bars
    assert int(progress.scan(lambda c, _: (c + 1, None), 0)[0]) == 5  # and it can be used again


def test_wrong_progress():
    with pytest.raises(ValueError, match=r"`total` is 'many'; it must be a number of iterations, below 2\*\*31"):
        lox.progress("many")
    with pytest.raises(ValueError, match="`scan` needs `xs`, `length` or a total"):
        lox.progress().scan(lambda c, _: (c, None), 0)


def test_a_bar_that_cannot_be_drawn_does_not_end_the_program(monkeypatch):
    progress = bar(5)
    monkeypatch.setattr(progress, "_open", lambda total: 1 / 0)
    with pytest.warns(lox.LoxWarning, match="the progress bar failed and is gone: ZeroDivisionError"):
        assert int(jax.jit(lambda: progress.scan(lambda c, _: (c + 1, None), 0)[0])()) == 5
        jax.effects_barrier()


def test_a_summary_after_the_steps_does_not_move_the_bar_back(capsys):
    def body(carry, i):
        lox.log({"a": carry}, step=2 * i)
        lox.log({"b": carry}, step=2 * i + 1)
        lox.log({"late": carry}, step=2 * i)
        return carry, None

    with lox.ConsoleLogger(progress={"step": 20}) as logger:
        logger.tap(lambda: jax.lax.scan(body, 0.0, jnp.arange(10))[0], logger.init(jax.random.key(0)))()
    assert "step 19/20 (100%, done)" in capsys.readouterr().out.splitlines()[-1]
