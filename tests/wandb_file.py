"""Reads W&B's offline files: a LevelDB log of protocol buffers, `offline-run-*/run-*.wandb`."""

import dataclasses
import json
import pathlib
import struct
from typing import Any

from machine import wait_for

BLOCK = 32768


@dataclasses.dataclass
class WandbFile:
    folder: pathlib.Path
    name: str = ""
    group: str = ""
    project: str = ""
    config: dict[str, Any] = dataclasses.field(default_factory=dict)
    rows: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    metrics: dict[str, str] = dataclasses.field(default_factory=dict)  # the axis of each
    exit_code: int | None = None
    branch: tuple[str, float, str] | None = None  # the run, step and metric that this one is forked from

    def events(self, *steps):
        """Return steps and value of each event, by key."""
        events = {}
        for row in self.rows:
            mine = {name: value for name, value in row.items() if name in steps}
            for key, value in row.items():
                if key not in steps and not key.startswith("_"):
                    events.setdefault(key, []).append((mine, value))
        return events


def read_all(path):
    """Read all runs in a folder, by name. Waits until they are finished, because W&B's own process writes that."""
    files = []

    def are_finished():
        files[:] = [read(file) for file in sorted(pathlib.Path(path).glob("wandb/offline-run-*/run-*.wandb"))]
        return files and all(file.exit_code is not None for file in files)

    wait_for(are_finished)
    assert len({file.name for file in files}) == len(files)
    return {file.name: file for file in files}


def read(path):
    from wandb.proto import wandb_internal_pb2

    file = WandbFile(path.parent)
    for data in _records(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        kind = record.WhichOneof("record_type")
        if kind == "run":
            file.name, file.group, file.project = record.run.display_name, record.run.run_group, record.run.project
            file.config |= {u.key: json.loads(u.value_json) for u in record.run.config.update if u.key != "_wandb"}
            if record.run.HasField("branch_point"):
                branch = record.run.branch_point
                file.branch = branch.run, branch.value, branch.metric
        elif kind == "config":
            file.config |= {u.key: json.loads(u.value_json) for u in record.config.update if u.key}
        elif kind == "history":
            file.rows.append(_row(record.history))
        elif kind == "metric":
            file.metrics[record.metric.name] = record.metric.step_metric
        elif kind == "exit":
            file.exit_code = record.exit.exit_code
    return file


def _row(history):
    row = {"_step": history.step.num}
    for item in history.item:
        *path, last = list(item.nested_key) or [item.key]
        inner = row
        for part in path:
            inner = inner.setdefault(part, {})
        inner[last] = json.loads(item.value_json)
    return row


def _records(data):
    assert data[:4] in (b"", b":W&B")
    at, parts = 7, b""
    while at + 7 <= len(data):
        left = BLOCK - at % BLOCK
        _, length, kind = struct.unpack_from("<IHB", data, at) if left >= 7 else (0, 0, 0)
        if not kind:  # the rest of the block is empty
            at += left
            continue
        part, at = data[at + 7 : at + 7 + length], at + 7 + length
        if at > len(data):  # W&B's own process is still writing this one
            return
        first, last = kind in (1, 2), kind in (1, 4)
        parts = part if first else parts + part
        if last:
            yield parts
