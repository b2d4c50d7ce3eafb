"""What goes wrong around a program: other processes, a disk that is full, a directory that is read-only."""

import errno
import os
import subprocess
import sys
import time
import warnings
from pathlib import Path

import lox

HANG = 600  # seconds after which something hangs, even on a busy machine


def start(*arguments, **options):
    script = Path(__file__).parent / "store_process.py"
    command = [sys.executable, str(script), *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


def finish(process):
    out, err = process.communicate(timeout=HANG)
    assert process.returncode == 0, err
    return out


def wait_for(condition):
    deadline = time.monotonic() + HANG
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def load_whatever_is_whole(path):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        logs = lox.load(path)
    assert all(w.category is lox.LoxWarning for w in caught)
    return logs, len(caught)


class Disk:
    """A disk with room for so many bytes, which writes a few at a time."""

    def __init__(self, monkeypatch, room, piece=1 << 30):
        self.room, self.piece = room, piece
        self.really, really_truncate = os.write, os.ftruncate
        self.can_truncate = True

        def truncate(file, size):
            if not self.can_truncate:
                raise OSError(errno.EIO, "no")
            really_truncate(file, size)

        monkeypatch.setattr("os.write", self.write)
        monkeypatch.setattr("os.ftruncate", truncate)

    def write(self, file, data):
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        count = self.really(file, data[: min(self.room, self.piece)])
        self.room -= count
        return count


def refuse(*_, **__):
    """Fails in place of system calls, because root, who may run the tests, can write to any directory."""
    raise PermissionError(errno.EROFS, "Read-only file system")
