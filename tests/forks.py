"""Starts Python programs that use lox in a few milliseconds instead of a second.

A server process has imported JAX and lox. For each program it forks, and the fork runs the program as `python` would:
with the arguments, environment, folder and standard streams of the caller. No JAX backend exists before the fork, so
each program starts its own. Tests that kill a program, or test the import of lox, start Python themselves.

    forks.run(["program.py", "argument"], cwd=folder)   replaces subprocess.run([sys.executable, ...])
    forks.command("program.py", "argument")             replaces [sys.executable, ...]
    forks.executables(folder)                           `python` and `lox`, for shell commands of a page
"""

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import runpy
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

FILE = Path(__file__).resolve()
# Python, JAX and lox read these once, when they start. A program with other values cannot come from the server.
READ_AT_START = ("PYTHON", "JAX_", "LOX_")
# To compile fast, where the result does not depend on how floats are rounded.
FAST = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
CACHE = {name for name in os.environ if name.startswith(("JAX_COMPILATION_CACHE", "JAX_PERSISTENT_CACHE"))}
SERVED = {"PYTHONPATH", "PYTHONWARNINGS", "JAX_PLATFORMS", *CACHE}


def user_environment() -> dict[str, str]:
    """Return an environment without the settings of the tests, such as eight devices and strict types."""
    hidden = (*READ_AT_START, "XLA_")
    kept = {name: value for name, value in os.environ.items() if name in CACHE or not name.startswith(hidden)}
    return kept | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def run(arguments: list[Any], **options: Any) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments, like `subprocess.run`."""
    return subprocess.run(command(*arguments), **options)


def command(*arguments: Any) -> list[str]:
    """Return the command that replaces `python` with these arguments."""
    return [sys.executable, "-I", "-S", str(FILE), _server(), *map(str, arguments)]


def executables(folder: Path) -> None:
    """Write the programs `python` and `lox` into a folder, for the PATH of a shell."""
    for name, words in ("python", []), ("lox", ["-P", "-m", "lox"]):
        file = folder / name
        file.write_text(f'#!/bin/sh\nexec {shlex.join(command(*words))} "$@"\n')
        file.chmod(0o755)


@functools.cache
def _server() -> str:
    """Return the path of the socket of the server. Start it, unless this process comes from one."""
    if address := os.environ.get("FORKS_SERVER"):
        return address
    folder = tempfile.TemporaryDirectory()
    address = os.path.join(folder.name, "socket")
    command = [sys.executable, "-P", str(FILE), "--serve", address]
    env = user_environment() | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}  # a fork copies no threads
    server = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    assert server.stdout is not None
    assert server.stdout.readline() == b"ready\n"

    def stop() -> None:
        server.terminate()
        server.wait()
        folder.cleanup()

    atexit.register(stop)
    return address


# --- The client: replaces `python` in a command --------------------------------------------------


def ask(address: str, arguments: list[str]) -> int:
    """Have a program run by the server, pass signals on to it, and return its exit code."""
    is_option = arguments[0].startswith("-") and arguments[0] not in ("-P", "-m", "-u")
    if is_option or any(name.startswith(READ_AT_START) and name not in SERVED for name in os.environ):
        os.execv(sys.executable, [sys.executable, *arguments])
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(address)
        request = json.dumps([arguments, os.getcwd(), dict(os.environ)]).encode()
        socket.send_fds(server, [len(request).to_bytes(4, "big")], [0, 1, 2])
        server.sendall(request)
        answers = server.makefile()
        process = int(answers.readline())

        def forward(number: int, _: object) -> None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, number)

        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, forward)
        code = int(answers.readline())
    if code < 0:  # a signal ended the program
        with contextlib.suppress(OSError):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


# --- The server ----------------------------------------------------------------------------------


def serve(address: str) -> list[str]:
    """Fork for each request. Return, in the fork, the arguments of its program."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen()
    print("ready", flush=True)
    while True:
        connection, _ = listener.accept()
        if os.fork():
            connection.close()
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG) != (0, 0):
                    pass
            continue
        listener.close()
        length, streams, _, _ = socket.recv_fds(connection, 4, 3)
        request = connection.makefile("rb").read(int.from_bytes(length, "big"))
        arguments, folder, environment = json.loads(request)
        if program := os.fork():
            report(connection, program, streams)
        connection.close()
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        for number, mode in enumerate("rww"):
            name = ("stdin", "stdout", "stderr")[number]
            is_by_line = number == 2 or os.isatty(number)
            setattr(sys, name, os.fdopen(number, mode, buffering=1 if is_by_line else -1, closefd=False))
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment, FORKS_SERVER=address)
        time.tzset()
        return arguments


def report(connection: socket.socket, program: int, streams: list[int]) -> None:
    """Tell the client the process id of its program, and later the exit code."""
    for stream in streams:
        os.close(stream)
    connection.sendall(f"{program}\n".encode())
    code = os.waitstatus_to_exitcode(os.waitpid(program, 0)[1])
    with contextlib.suppress(BrokenPipeError):  # the client was killed
        connection.sendall(f"{code}\n".encode())
    os._exit(0)


def run_program(arguments: list[str]) -> None:
    """Run a program as `python [-P] [-u] [-m module | file] ...` does."""
    if action := os.environ.get("PYTHONWARNINGS"):
        warnings.simplefilter(action)  # type: ignore[arg-type]
    safe_path = "-P" in arguments[:2]
    while arguments[0] in ("-P", "-u"):
        if arguments.pop(0) == "-u":
            sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = [*filter(None, paths), *(path for path in sys.path if path not in paths)]
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        if not safe_path:
            sys.path.insert(0, os.getcwd())
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        if not safe_path:
            sys.path.insert(0, os.path.dirname(os.path.abspath(arguments[0])))
        runpy.run_path(arguments[0], run_name="__main__")


# Most programs import these. Some environments have no matplotlib or Typer. Pandas would start a thread.
IMPORTED = ("jax.numpy", "lox.loggers", "lox.store", "lox._command._app", "matplotlib.pyplot")

if __name__ == "__main__":
    if sys.argv[1] == "--serve":
        for name in IMPORTED:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
        gc.freeze()
        run_program(serve(sys.argv[2]))
    else:
        sys.exit(ask(sys.argv[1], sys.argv[2:]))
