"""Try one way of logging in all situations: does every value come out, once, right and in order?

`make bench ARGS=peers-right` runs this for each of them, with two devices on the CPU, and makes a table of what is
printed here. Each has a process of its own, so that one that hangs or crashes says only that.
"""

import json
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import ways
from peer_programs import OWN, silent
from situations import SITUATIONS, SLOW, Situation, slow
from ways import Way


def tried(kind: type[Way], situation: Situation) -> tuple[str, str]:
    """Return what came of it, and what was done by hand."""
    way = kind(situation.lanes)
    if build := OWN.get((kind, situation.program)):
        function, read, hand = build(way)
    else:
        function, read, hand = situation.with_log(way), way.logs, ""
    compiled = jax.jit(function)
    for _ in range(3):  # it may differ from call to call
        with way.listening():
            result = jax.block_until_ready(compiled(situation.arg))
        found = ways.verdict(situation.expected(), read(result))
        if found != "right":
            return found, hand
    return "right", hand


class Arrivals(list):
    """A list that knows when the first thing came into it."""

    first = 0.0

    def append(self, item: Any) -> None:
        self.first = self.first or time.perf_counter()
        super().append(item)


def streamed(kind: type[Way]) -> str:
    """Tell whether the first event is there before half of the time of the program."""
    way = kind()
    if not way.streams:
        return "no"
    way.received = arrivals = Arrivals()
    if kind is ways.JaxTap:
        import jaxtap

        options = {"select": lambda leaves: (), "where": lambda path: path == "scan[0]"}
        function = jaxtap.verbose(slow(silent), on_step=way.received.append, **options)
    else:
        function = way.around(slow(way.log))
    compiled = jax.jit(function)
    for _ in range(2):  # the first one compiles
        arrivals.first = 0.0
        start = time.perf_counter()
        with way.listening():
            jax.block_until_ready(compiled(jnp.eye(16)))
        end = time.perf_counter()
    found = {"i": [[event.step for event in arrivals]]} if kind is ways.JaxTap else way.logs(None)
    if (verdict := ways.verdict({"i": [SLOW]}, found)) != "right":
        return verdict
    return "right" if arrivals.first - start < (end - start) / 2 else "at the end"


def main() -> None:
    (kind,) = (kind for kind in (*ways.RETURNED, *ways.STREAMED) if kind.name == sys.argv[1])
    for situation in SITUATIONS:
        try:
            found, note = tried(kind, situation)
        except Exception as error:
            found, note = "error", ways.reason(error)
        print(json.dumps([situation.name, found, note]), flush=True)
    try:
        found, note = streamed(kind), ""
    except Exception as error:
        found, note = "error", ways.reason(error)
    print(json.dumps(["while it runs", found, note]), flush=True)


if __name__ == "__main__":
    main()
