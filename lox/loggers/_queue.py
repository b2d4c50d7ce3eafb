"""The thread that does a logger's work, and its queue.

The runtime waits for callbacks, so all they do is queue a job. The queue is bounded, in jobs and in bytes. When it is
full, `put` and with it the program waits: nothing is lost, and memory does not grow.
"""

import collections
import os
import threading
import time
from collections.abc import Callable
from typing import Any

_PAUSE = 0.1  # seconds without a job before `pause` is called
_GATHER = 0.005  # seconds that the thread waits for more jobs: to wake it for each would take longer than the job
_IDLE = 5.0  # seconds without a job before the thread ends; the next job starts another


class Writer:
    """Hands jobs to `process` in order, several at a time, from one thread, and calls `pause` when there are none.

    `pause` may return the seconds after which it wants to be called again.
    """

    def __init__(
        self,
        process: Callable[[list[Any]], None],
        pause: Callable[[], float | None],
        capacity: int,
        capacity_bytes: int,
        name: str,
    ):
        self._process, self._pause, self._name = process, pause, name
        self._capacity, self._capacity_bytes = max(1, capacity), max(1, capacity_bytes)
        self._bytes = 0  # of the unfinished jobs
        self._jobs: collections.deque[Any] = collections.deque()
        lock = threading.RLock()
        self._changed, self._urged = threading.Condition(lock), threading.Condition(lock)
        self._gathering = False  # whether the thread waits for more jobs, to do them together
        self._waiting = 0  # how many wait for the thread
        self._thread: threading.Thread | None = None
        self._put = self._done = 0
        self._stopping = False
        self._pid = os.getpid()

    @property
    def is_of_this_process(self) -> bool:
        """Whether the thread can be alive: `fork` copies the queue, but not the thread."""
        return self._pid == os.getpid()

    def put(self, job: Any, size: int) -> None:
        """Queue a job of `size` bytes; wait while the queue is full."""
        with self._changed:
            inside = threading.current_thread() is self._thread
            while not inside and self._is_full():
                self._start()
                self._urged.notify()
                self._changed.wait(1.0)
            self._jobs.append((job, size))
            self._put += 1
            self._bytes += size
            self._start()
            if not self._gathering:
                self._changed.notify_all()

    def _is_full(self) -> bool:
        return self._put - self._done >= self._capacity or self._bytes >= self._capacity_bytes

    def drain(self, timeout: float | None = None) -> bool:
        """Wait until everything queued so far is done; return False if that takes longer than `timeout` seconds."""
        with self._changed:
            if threading.current_thread() is self._thread:
                return True
            until = self._put
            deadline = None if timeout is None else time.monotonic() + timeout
            self._waiting += 1
            try:
                self._urged.notify()
                while self._done < until:
                    self._start()
                    # Not forever: an interrupt must get through, and a dead thread must be noticed.
                    self._changed.wait(0.2)
                    if deadline is not None and time.monotonic() > deadline:
                        return False
            finally:
                self._waiting -= 1
        return True

    def stop(self) -> None:
        """Let the thread end when its work is done; another job starts a new one."""
        with self._changed:
            self._stopping = True
            self._urged.notify()
            self._changed.notify_all()

    def _start(self) -> None:
        if not self._jobs or (self._thread is not None and self._thread.is_alive()):
            return
        self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # the interpreter is shutting down and starts no threads: the caller does the work
            self._thread = threading.current_thread()
            while self._jobs:
                self._work_once()
            self._thread = None

    def _work(self) -> None:
        with self._changed:
            wait, paused = _IDLE, True
            while True:
                self._changed.wait_for(lambda: self._jobs or self._stopping, wait)
                if self._jobs:
                    if not (self._waiting or self._stopping or self._is_full()):
                        self._gathering = True
                        self._urged.wait(_GATHER)
                        self._gathering = False
                    self._work_once()
                    wait, paused = _PAUSE, False
                elif not paused:
                    self._changed.release()
                    try:
                        again = self._pause()
                    finally:
                        self._changed.acquire()
                    paused = again is None or self._stopping
                    wait = _IDLE if again is None else again
                else:
                    self._thread, self._stopping = None, False
                    return

    def _work_once(self) -> None:
        jobs = list(self._jobs)
        self._jobs.clear()
        self._changed.release()
        try:
            self._process([job for job, _ in jobs])
        finally:
            self._changed.acquire()
            self._done += len(jobs)
            self._bytes -= sum(size for _, size in jobs)
            self._changed.notify_all()
