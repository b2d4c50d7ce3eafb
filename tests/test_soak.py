"""Trainings that log for long: what is counted by `make soak` is the same after many calls as after a few."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

import soak

pytestmark = pytest.mark.slow

FEW, MANY = 45, 205  # right after runs have begun and ended
# Each call is slow, because of the disk or the client.
FEWER = {"loggers": (15, 55), "wandb": (25, 65)}


def at_rest(work: soak.Work) -> dict[str, float]:
    work.settle()
    soak.rest()
    return {**soak.counts(), **soak.entries()}  # so that it is said which


@pytest.mark.nightly
@pytest.mark.parametrize("name", soak.PARTS)
def test_nothing_grows(name: str, tmp_path: Path) -> None:
    if name == "wandb":
        pytest.importorskip("wandb")
    few, many = FEWER.get(name, (FEW, MANY))
    with soak.PARTS[name](tmp_path) as work:
        for i in range(few):
            work.call(i)
        before = at_rest(work)
        for i in range(few, many):
            work.call(i)
        after = at_rest(work)
    assert {quantity: n for quantity, n in after.items() if n > before.get(quantity, 0)} == {}
