"""`lox ui`: a dashboard of a directory on this machine.

It is read-only, and serves what the reader knows and a fixed list of files: no path comes from a request. It listens on
loopback unless it is told otherwise, and answers only to its own names: a page that makes its name point here (DNS
rebinding) gets 400. Elsewhere, a random token is asked for.
"""

import asyncio
import contextlib
import ipaddress
import json
import math
import os
import re
import secrets
import socket
import sys
import time
import webbrowser
from collections.abc import AsyncIterator, Callable, Mapping
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lox import _errors
from lox._data._image import png
from lox._version import __version__
from lox.store._reader import runs_in
from lox.store._table import flat_config
from lox.view import _bands, _compare, _filter, _panels
from lox.view._live import Live, kind_of
from lox.view._panels import Options

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

PORT = 6007  # one beside TensorBoard's
_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_PERIOD = 1.0  # seconds between two looks into the directory, while a page listens
_HEARTBEAT = 15.0  # seconds between signs of life
_STATIC = Path(__file__).parent / "static"
_FILES = {
    "/": ("index.html", "text/html"),
    "/app.css": ("app.css", "text/css"),
    "/app.js": ("app.js", "text/javascript"),
    "/chart.js": ("chart.js", "text/javascript"),
    "/theme.js": ("theme.js", "text/javascript"),
    "/uplot.js": ("uplot/uPlot.iife.min.js", "text/javascript"),
    "/uplot.css": ("uplot/uPlot.min.css", "text/css"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}


class Guard:
    """Middleware that refuses what does not come from the dashboard's own page, before anything else sees it."""

    def __init__(self, app: Any, host: str, token: str | None, names: tuple[str, ...] = ()):
        self._app, self._token = app, token
        self._any_address = host not in _LOOPBACK
        own = (socket.gethostname(), socket.getfqdn()) if self._any_address else ()
        self._names = {name.lower() for name in (*_LOOPBACK, host, *own, *names)}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Handle a request, or pass it on."""
        if scope["type"] != "http":
            return  # no web sockets here, and nothing to do at the start
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        refused = self._refusal(scope, headers)
        if refused is not None:
            status, text, more = refused
            return await _answer(send, status, text, more)

        async def with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                extra = [(name.encode(), value.encode()) for name, value in _HEADERS.items()]
                message = {**message, "headers": [*message["headers"], *extra]}
            await send(message)

        await self._app(scope, receive, with_headers)

    def _refusal(self, scope: Any, headers: Mapping[bytes, str]) -> tuple[int, str, dict[str, str]] | None:
        hosts = [value for name, value in scope["headers"] if name == b"host"]
        if len(hosts) != 1 or not self._knows(headers.get(b"host", "")):
            return 400, "This server does not answer to that name. Open the address that `lox ui` printed.", {}
        if scope["method"] not in ("GET", "HEAD"):
            return 405, "This server is read-only.", {"allow": "GET, HEAD"}
        if headers.get(b"sec-fetch-site") in ("cross-site", "same-site") and scope["path"] != "/":
            return 403, "Another page may not read this one.", {}
        if self._token is None:
            return None
        cookie = f"lox-{(scope.get('server') or ('', 0))[1]}"
        given = re.fullmatch(r"token=([\w-]+)", scope.get("query_string", b"").decode("latin-1"))
        if scope["path"] == "/" and given and secrets.compare_digest(given[1], self._token):
            # Once in the address, then in a cookie that no other site can send: a token in the address is copied.
            value = f"{cookie}={self._token}; HttpOnly; SameSite=Strict; Path=/"
            return 303, "", {"location": "/", "set-cookie": value}
        if not secrets.compare_digest(_cookie(headers.get(b"cookie", ""), cookie), self._token):
            return 403, "Open the address that `lox ui` printed, with its token.", {}
        return None

    def _knows(self, host: str) -> bool:
        match = re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[\w.-]+)(:\d{1,5})?", host, re.ASCII)
        if match is None:
            return False
        name = match[1].strip("[]").lower()
        if name in self._names:
            return True
        # An address is no name, so nobody can make it point elsewhere.
        return self._any_address and _is_address(name)


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _cookie(header: str, name: str) -> str:
    try:
        found = SimpleCookie(header).get(name)
    except CookieError:
        return ""
    return "" if found is None else found.value


async def _answer(send: Any, status: int, text: str, headers: Mapping[str, str]) -> None:
    body = text.encode()
    fields = {**_HEADERS, "content-type": "text/plain; charset=utf-8", "content-length": str(len(body)), **headers}
    raw = [(name.encode(), value.encode()) for name, value in fields.items()]
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": body})


class Watcher:
    """Looks into the directory while pages listen, and tells them what grew."""

    def __init__(self, live: Live, period: float):
        self._live, self._period = live, period
        self._listeners: set[asyncio.Queue[str | None]] = set()
        self._task: asyncio.Task[None] | None = None
        self._known: dict[str, Any] = {}

    async def listen(self) -> AsyncIterator[str]:
        """Yield server-sent events until the page goes away."""
        queue: asyncio.Queue[str | None] = asyncio.Queue()
        self._listeners.add(queue)
        if self._task is None:
            self._task = asyncio.create_task(self._watch())
        try:
            yield "retry: 2000\n\n"
            if self._known:  # what was announced since the page was loaded, or while it was not connected
                yield _message({"version": self._known[""], "keys": [[k, n[1]] for k, n in self._known.items() if k]})
            while True:
                try:
                    news = await asyncio.wait_for(queue.get(), _HEARTBEAT)
                except TimeoutError:
                    news = ": alive\n\n"
                if news is None:
                    return
                yield news
        finally:
            self._listeners.discard(queue)
            if not self._listeners and self._task is not None:
                self._task.cancel()
                self._task = None

    def stop(self) -> None:
        """Say goodbye to all pages, because the server ends."""
        for queue in self._listeners:
            queue.put_nowait(None)

    async def _watch(self) -> None:
        from starlette.concurrency import run_in_threadpool

        while True:
            try:
                found = await run_in_threadpool(self._live.refresh)
                keys = [[key, now[1]] for key, now in found["keys"].items() if self._known.get(key) != now]
                known = found["keys"] | {"": found["version"]}
                news = {"version": found["version"], "keys": keys} if known != self._known else None
                self._known = known
            except Exception as error:  # any: the page shows it, and goes on being told what grows
                news = {"problem": str(error) if isinstance(error, _errors.LoxError | OSError) else repr(error)}
            if news is not None:
                for queue in self._listeners:
                    queue.put_nowait(_message(news))
            await asyncio.sleep(self._period)


def _message(news: dict[str, Any]) -> str:
    return f"data: {json.dumps(news)}\n\n"


def app(
    directory: str | os.PathLike[str],
    host: str = "127.0.0.1",
    token: str | None = None,
    names: tuple[str, ...] = (),
    period: float = _PERIOD,
) -> "Starlette":
    """Return the dashboard of a directory, as an ASGI application.

    Args:
        directory: What a `SaveLogger` or `lox.save` wrote to, or will.
        host: The address that the server listens on.
        token: What a page must know; None if everybody on this machine may look.
        names: More names that the server is known by, for instance behind a proxy.
        period: Seconds between two looks into the directory.
    """
    try:
        from starlette.applications import Starlette
        from starlette.concurrency import run_in_threadpool
        from starlette.middleware import Middleware
        from starlette.responses import JSONResponse, Response, StreamingResponse
        from starlette.routing import Route
    except ImportError as error:
        raise ImportError("the dashboard needs Starlette and uvicorn: pip install 'lox-jax[ui]'") from error

    live = Live(directory)
    service = _Service(live)
    watcher = Watcher(live, period)

    def answering(answer: Callable[["Request"], Any]) -> Any:
        def endpoint(request: "Request") -> "Response":
            try:
                found = answer(request)
            except (_errors.KeyNotFoundError, _errors.RunNotFoundError) as error:
                return JSONResponse({"error": _text(error)}, 404)
            except (_errors.LoxError, ValueError) as error:
                return JSONResponse({"error": _text(error)}, 400)
            if isinstance(found, bytes):
                return Response(found, media_type="image/png")
            return Response(json.dumps(found, allow_nan=False), media_type="application/json")

        async def in_thread(request: "Request") -> "Response":
            return await run_in_threadpool(endpoint, request)

        return in_thread

    def file(name: str, media_type: str) -> Any:
        content = (_STATIC / name).read_bytes()

        async def endpoint(request: "Request") -> "Response":
            return Response(content, media_type=media_type, headers={"cache-control": "no-cache"})

        return endpoint

    async def events(request: "Request") -> "Response":
        return StreamingResponse(watcher.listen(), media_type="text/event-stream")

    routes = [Route(path, file(*what)) for path, what in _FILES.items()]
    routes += [Route("/api/events", events)]
    for name in ("runs", "panel", "at", "histogram", "pictures", "picture", "compare"):
        routes.append(Route(f"/api/{name}", answering(getattr(service, name))))
    made = Starlette(routes=routes, middleware=[Middleware(Guard, host=host, token=token, names=names)])
    made.state.watcher = watcher
    return made


def _text(error: BaseException) -> str:
    return str(error.args[0]) if error.args else type(error).__name__


class _Service:
    """Answers the questions of the page."""

    def __init__(self, live: Live):
        self._live, self._session = live, secrets.token_hex(4)
        self._refreshed = 0.0

    def _refresh(self) -> None:
        """Look into the directory, unless the watcher has done so just now."""
        if time.monotonic() - self._refreshed > _PERIOD / 2:
            self._live.refresh()
            self._refreshed = time.monotonic()

    def _groups(self, request: "Request") -> list[Any]:
        query = request.query_params
        by = [name for name in query.getlist("by") if name]
        if not self._live.infos:
            self._refresh()
        return self._live.groups(by or None, query.get("where", ""))

    def runs(self, request: "Request") -> dict[str, Any]:
        """The table of runs, or what of it has changed; the keys; and which runs are a group."""
        self._refresh()
        live, query = self._live, request.query_params
        since = query.get("since", "")
        session, _, version = since.partition(":")
        with live.locked():
            problem, found = "", []
            try:
                found = self._groups(request)
            except _errors.OptionError as error:  # of the filter: the page shows it beside the field
                problem = _text(error)
            whole = session != f"{self._session}.{live.removals}" or not version.isdigit()
            infos = [info for info in live.infos.values() if whole or info.version > int(version)]
            return {
                "version": f"{self._session}.{live.removals}:{live.version}",
                "whole": whole,
                "directory": live.reader.path.name,
                "path": str(live.reader.path),
                "lox": __version__,
                "runs": [
                    {
                        "name": info.run.name,
                        "config": _panels.pairs(flat_config(info.run.config)),
                        "state": info.state,
                        "events": info.events,
                        "attempts": info.run.attempts,
                        "opened": info.run.opened.timestamp(),
                        "last": _panels.numbers_or_none(info.last),
                    }
                    for info in infos
                ],
                "keys": [[name, kind_of(key.structure), key.rows, key.steps] for name, key in live.keys.items()],
                "groups": [{"name": group.name, "runs": group.runs} for group in found],
                "filter": problem,
                "problems": live.problems,
            }

    def panel(self, request: "Request") -> dict[str, Any]:
        """What is drawn of a key."""
        groups = self._groups(request)
        return _panels.panel(self._live, request.query_params.get("key", ""), groups, _options(request.query_params))

    def at(self, request: "Request") -> dict[str, Any]:
        """The exact statistics at a point."""
        query = request.query_params
        groups = self._groups(request)
        return _panels.at(self._live, query.get("key", ""), groups, _options(query), float(query.get("point", "nan")))

    def histogram(self, request: "Request") -> dict[str, Any]:
        """Histograms over steps."""
        query = request.query_params
        groups = self._groups(request)
        return _panels.histogram(self._live, query.get("key", ""), groups, _options(query), query.get("group", ""))

    def pictures(self, request: "Request") -> dict[str, Any]:
        """Which pictures there are."""
        self._groups(request)
        return _panels.pictures(self._live, request.query_params.get("key", ""), _options(request.query_params))

    def picture(self, request: "Request") -> bytes:
        """One picture, as a PNG file."""
        query = request.query_params
        self._groups(request)
        run, event = query.get("run", ""), int(query.get("event", "0"))
        return png(_panels.picture(self._live, query.get("key", ""), _options(query), run, event))

    def compare(self, request: "Request") -> dict[str, Any]:
        """The tables of `lox.compare`, over the runs that the filter chooses."""
        query = request.query_params
        self._groups(request)
        by = [name for name in query.getlist("by") if name] or None
        with self._live.locked():
            track = _panels.choose(self._live.tracks(query.get("key", "")), query.get("name") or None)
            with_it = set(track.lanes)
        chosen = _filter.parse(query.get("where", ""))
        runs = runs_in(self._live.reader.path, lambda run: run.name in with_it and chosen(run))
        at, better = query.get("at", "last"), query.get("better", "higher")
        with self._live.locked():  # where warnings become problems that the page shows
            found = _compare.compare(runs, track.name, by, at=at, better=better, x=query.get("x") or None)
        tables = [{"columns": columns, "rows": rows} for columns, rows in found.tables()]
        return {"title": f"{found.key}, {found.better} is better", "tables": tables, "notes": list(found.methods)}


def _options(query: Any) -> Options:
    low, high = query.get("from"), query.get("to")
    smooth, bins = float(query.get("smooth") or 0), int(query.get("bins") or 800)
    if not 0 <= smooth < 1:
        raise _errors.OptionError(f"`smooth` is {smooth!r}; it must be from 0 to below 1.")
    if not bins >= 1:
        raise _errors.OptionError(f"`bins` is {bins!r}; it must be positive.")
    if not all(math.isfinite(float(x)) for x in (low, high) if x is not None):
        raise _errors.OptionError(f"`from` and `to` are {low!r} and {high!r}; they must be finite numbers.")
    return Options(
        name=query.get("name") or None,
        x=query.get("x") or None,
        band=kind if (kind := query.get("band") or "ci95") == _panels.NONE else _bands.check_kind(kind),
        smooth=smooth,
        bins=bins,
        range=None if low is None or high is None else (float(low), float(high)),
        log=query.get("log") == "1",
        lanes=query.get("lanes") == "1",
        since=query.get("since", ""),
    )


def serve(
    directory: str | os.PathLike[str],
    port: int | None = None,
    host: str = "127.0.0.1",
    browser: bool = True,
    names: tuple[str, ...] = (),
    say: Callable[[str], None] = print,
) -> None:
    """Serve the dashboard of a directory until it is interrupted.

    Args:
        directory: What a `SaveLogger` or `lox.save` wrote to, or will.
        port: The port; 0 is any that is free. By default 6007, or the next one that is free.
        host: The address to listen on. Anything but loopback is reachable by others, who need the token.
        browser: Whether to open the page in a browser.
        names: More names that the server is known by, for instance behind a proxy.
        say: What gets the address, as a line of text.
    """
    path = Path(directory).absolute()
    if not path.is_dir():
        what = f"{str(path)!r} is a file: give the directory that lox wrote to."
        if path.exists():
            raise _errors.StoreError(what)
        raise _errors.RunNotFoundError(f"there is no directory {str(path)!r}. Check the path.")
    bound = _bind(host, port)
    token = None if host in _LOOPBACK else secrets.token_urlsafe(24)
    address = _address(host, bound.getsockname()[1], token)
    application = app(path, host, token, names)
    server = server_of(application)
    say(f"{path.name}: {address}  (Ctrl-C ends it)")
    if browser:
        webbrowser.open(address)
    with bound, contextlib.suppress(KeyboardInterrupt):
        server.run(sockets=[bound])


def server_of(application: "Starlette") -> Any:
    """Return a server for the dashboard, whose `run(sockets=...)` serves it."""
    try:
        import uvicorn
    except ImportError as error:
        raise ImportError("the dashboard needs Starlette and uvicorn: pip install 'lox-jax[ui]'") from error

    class Server(uvicorn.Server):
        async def shutdown(self, sockets: Any = None) -> None:
            application.state.watcher.stop()  # a page listens for ever, and the server would wait for it
            await super().shutdown(sockets)

    return Server(uvicorn.Config(application, log_level="warning", lifespan="off", timeout_graceful_shutdown=2))


def _address(host: str, port: int, token: str | None) -> str:
    shown = {"0.0.0.0": socket.gethostname(), "::": socket.gethostname()}.get(host, host)
    shown = f"[{shown}]" if ":" in shown else shown
    return f"http://{shown}:{port}/" + (f"?token={token}" if token else "")


def _bind(host: str, port: int | None) -> socket.socket:
    """Bind a port, or the first that is free if none is asked for."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    problem: OSError | None = None
    for candidate in [port] if port is not None else [*range(PORT, PORT + 50), 0]:
        bound = socket.socket(family, socket.SOCK_STREAM)
        try:
            if sys.platform != "win32":  # where it would let two servers share a port
                bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind((host, candidate))
            bound.listen()  # before anybody is told: a browser may be faster than the server
            return bound
        except OSError as error:
            bound.close()
            problem = error
        except OverflowError:
            bound.close()
            raise _errors.OptionError(f"`port` is {port}; it must be from 0 to 65535.") from None
    raise _errors.OptionError(f"the server cannot listen on {host}:{port}: {problem}. Choose another port.")
