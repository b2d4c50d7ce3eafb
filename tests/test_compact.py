"""`compact` changes the files and nothing else, whatever happens meanwhile."""

import builtins
import contextlib
import errno
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from pathlib import Path

import jax
import numpy as np
import pytest
from compact_cases import abandon, everything, exact_logs, random_store, simple, some_group
from optional import pyarrow

import lox
from lox.store import Reader, Writer, _compact, _group

KILLS = int(os.environ.get("LOX_KILLS", "10"))
SEEDS = int(os.environ.get("LOX_COMPACT_N", "6"))


def groups(path):
    return sorted(p for p in path.iterdir() if _group.GROUP_ID.fullmatch(p.name))


@pytest.fixture
def small(monkeypatch):
    """Small batches and segments, so that few rows need several."""
    monkeypatch.setattr(_compact, "_BATCH_BYTES", 300)
    monkeypatch.setattr(_compact, "_SEGMENT_BYTES", 3000)


# --- nothing changes ---


@pytest.mark.parametrize("seed", range(SEEDS))
def test_random_stores(tmp_path, seed):
    rng = np.random.default_rng(seed)
    random_store(tmp_path, rng, 8)
    before = everything(tmp_path)
    done = lox.store.compact(tmp_path)
    assert everything(tmp_path) == before
    assert done["groups"][1] == len(groups(tmp_path)) == 1
    random_store(tmp_path, rng, 3)  # and again, with the merged group among the old ones
    before = everything(tmp_path)
    assert lox.store.compact(tmp_path)["groups"][1] == 1
    assert everything(tmp_path) == before
    assert lox.store.repair(tmp_path) == {}
    assert lox.store.compact(tmp_path)["groups"] == (1, 1)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_random_stores_in_small_pieces(tmp_path, small, seed):
    rng = np.random.default_rng(100 + seed)
    random_store(tmp_path, rng, 6)
    living = some_group(tmp_path, rng, [[0, 1]], living=True)
    before = everything(tmp_path)
    lox.store.compact(tmp_path)
    assert everything(tmp_path) == before
    assert len(groups(tmp_path)) == 2 and living.group.exists()
    living.close()
    before = everything(tmp_path)
    lox.store.compact(tmp_path)
    assert everything(tmp_path) == before and len(groups(tmp_path)) == 1
