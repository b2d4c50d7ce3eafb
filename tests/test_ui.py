"""The dashboard's server: what it serves, whom it refuses, and what it knows of runs that grow."""

import hashlib
import json
import re
import socket
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path
from typing import Any

import browser
import jax
import numpy as np
import pytest
from browser import served, until

import lox
from lox.view import _filter, _panels, _pixels, _server
from lox.view._bands import Band
from lox.view._live import Live, View
from lox.view._panels import Options
from lox.view._pixels import Grid

pytest.importorskip("starlette", reason="starlette is not installed")
pytest.importorskip("uvicorn", reason="uvicorn is not installed")

STATIC = Path(_server.__file__).parent / "static"


def request(
    address: str, path: str, host: str | None = None, method: str = "GET", **headers: str
) -> tuple[int, dict[str, str], bytes]:
    """Send a request byte by byte, as no client would change it; return status, headers and body."""
    port = int(address.rpartition(":")[2])
    lines = [f"{method} {path} HTTP/1.1", f"Host: {host or f'127.0.0.1:{port}'}", "Connection: close"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    with socket.create_connection(("127.0.0.1", port), 30) as connection:
        connection.sendall("\r\n".join([*lines, "", ""]).encode("latin-1"))
        raw = b""
        while part := connection.recv(1 << 16):
            raw += part
    head, _, body = raw.partition(b"\r\n\r\n")
    first, *rest = head.decode("latin-1").split("\r\n")
    return int(first.split(" ")[1]), {k.lower(): v for k, _, v in (line.partition(": ") for line in rest)}, body


def ask(address: str, path: str) -> Any:
    status, _, body = request(address, path)
    assert status == 200, body
    return json.loads(body)


def save(directory: Any, run: int, values: Any, key: str = "loss", first: int = 0, **config: Any) -> None:
    logs = lox.logdict.from_arrays({key: np.asarray(values)}, steps={"step": first + np.arange(len(values))})
    lox.save(logs, directory, jax.random.key(run), config=config or None)


@pytest.fixture
def runs(tmp_path):
    values = np.random.default_rng(0).normal(size=(4, 50))
    for lane, row in enumerate(values):
        save(tmp_path / "runs", lane, row, lr=[0.1, 0.2][lane % 2], seed=lane)
    (tmp_path / "secret.txt").write_text("secret")
    return tmp_path / "runs"


# --- who may ask ---


@pytest.mark.sample(3)
@pytest.mark.slow
@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:80",
        "127.0.0.1.evil.example",
        "localhost.evil.example",
        "",
        "[::2]",
        "a b",
        "127.0.0.1@evil",
        "localhost:99999999",
        "169.254.169.254",
    ],
)
def test_a_wrong_host_gets_400(runs, host):
    with served(runs) as address:
        for path in ("/", "/api/runs", "/app.js", "/api/events"):
            status, _, body = request(address, path, host=host or " ")
            assert status == 400
            assert b"loss" not in body


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "LOCALHOST:1234", "[::1]:80"])
def test_its_own_names_are_answered(runs, host):
    with served(runs) as address:
        assert request(address, "/api/runs", host=host)[0] == 200


def test_two_hosts_are_refused(runs):
    with served(runs) as address:
        assert request(address, "/", Host="evil.example")[0] == 400


@pytest.mark.sample(3)
@pytest.mark.slow
@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
def test_it_is_read_only(runs, method):
    with served(runs) as address:
        status, headers, _ = request(address, "/api/runs", method=method)
        assert (status, headers["allow"]) == (405, "GET, HEAD")


def test_another_site_may_not_read(runs):
    with served(runs) as address:
        assert request(address, "/api/runs", Sec_Fetch_Site="cross-site")[0] == 403
        assert request(address, "/api/runs", Sec_Fetch_Site="same-origin")[0] == 200
        status, headers, _ = request(address, "/api/runs", Origin="http://evil.example")
        assert status == 200
        assert not any(name.startswith("access-control") for name in headers)


@pytest.mark.sample(3)
@pytest.mark.slow
@pytest.mark.parametrize(
    "path",
    [
        "/../secret.txt",
        "/%2e%2e/secret.txt",
        "/..%2fsecret.txt",
        "/static/app.js",
        "//etc/passwd",
        "/uplot/../../_server.py",
        "/_server.py",
        "/app.js/../../_server.py",
        "/api/picture?key=../../secret.txt&run=..&event=0",
        "/api/panel?key=../secret.txt",
        "/api/panel?key=%00",
        "/meta.json",
        "/runs.jsonl",
    ],
)
def test_nothing_but_what_it_knows_is_served(runs, path):
    with served(runs) as address:
        status, _, body = request(address, path)
        assert status in (400, 404)
        assert b"secret" not in body.replace(b"secret.txt", b"")
        assert b"import" not in body


def test_every_answer_has_the_policy(runs):
    with served(runs) as address:
        for path in ("/", "/app.js", "/uplot.js", "/api/runs", "/nothing", "/api/panel?key=none", "/api/at?point=x"):
            _, headers, _ = request(address, path)
            assert headers["content-security-policy"].startswith("default-src 'none'; script-src 'self';"), path
            assert "unsafe" not in headers["content-security-policy"]
            assert headers["x-content-type-options"] == "nosniff"
            assert headers["referrer-policy"] == "no-referrer"
        assert request(address, "/", host="evil.example")[1]["content-security-policy"].startswith("default-src 'none'")


def test_the_page_refers_to_nothing_elsewhere():
    for file in STATIC.rglob("*"):
        if file.suffix in (".js", ".css", ".html") and "uplot" not in file.parts:
            text = file.read_text()
            assert not re.search(r"https?://", text), file
            assert "innerHTML" not in text
            assert "eval(" not in text
    page = (STATIC / "index.html").read_text()
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\bon\w+=|\bstyle=", page)


def test_a_token_is_asked_for_where_others_can_reach_it(runs):
    with served(runs, host="0.0.0.0", token="abc-123_XYZ") as address:
        port = address.rpartition(":")[2]
        for path in ("/", "/api/runs", "/?token=wrong", "/api/runs?token=abc-123_XYZ"):
            assert request(address, path)[0] == 403
        assert request(address, "/api/runs", Cookie=f"lox-{port}=wrong")[0] == 403
        status, headers, _ = request(address, "/?token=abc-123_XYZ")
        assert (status, headers["location"]) == (303, "/")
        cookie = headers["set-cookie"]
        assert cookie == f"lox-{port}=abc-123_XYZ; HttpOnly; SameSite=Strict; Path=/"
        assert request(address, "/api/runs", Cookie=cookie.partition(";")[0])[0] == 200
        # By an address, which nobody can make point elsewhere, or by its name; by no other.
        cookie = cookie.partition(";")[0]
        assert request(address, "/api/runs", host="10.1.2.3:80", Cookie=cookie)[0] == 200
        assert request(address, "/api/runs", host=socket.gethostname(), Cookie=cookie)[0] == 200
        assert request(address, "/api/runs", host="evil.example", Cookie=cookie)[0] == 400


def test_nothing_is_written(runs):
    tree = lambda: {p: (p.stat().st_mtime_ns, p.stat().st_size) for p in sorted(runs.rglob("*"))}  # noqa: E731
    before = tree()
    with served(runs) as address:
        for path in (
            "/",
            "/api/runs",
            "/api/panel?key=loss&lanes=1&smooth=0.5",
            "/api/compare?key=loss",
            "/api/at?key=loss&point=3",
        ):
            assert request(address, path)[0] == 200, path
    assert tree() == before


# --- what it says ---


def test_runs_groups_and_keys(runs):
    with served(runs) as address:
        found = ask(address, "/api/runs")
        assert [run["name"] for run in found["runs"]] == ["0", "1", "2", "3"]
        assert found["runs"][1]["config"] == [["lr", 0.2], ["seed", 1]]
        assert {run["state"] for run in found["runs"]} == {"finished"}
        assert {run["events"] for run in found["runs"]} == {50}
        assert found["groups"] == [{"name": "lr=0.1", "runs": ["0", "2"]}, {"name": "lr=0.2", "runs": ["1", "3"]}]
        assert found["keys"] == [["loss", "number", 200, ["step"]]]
        again = ask(address, f"/api/runs?since={found['version']}")
        assert (again["whole"], again["runs"]) == (False, [])
        assert ask(address, "/api/runs?where=lr%3D0.1%20seed%3E0")["groups"] == [{"name": "2", "runs": ["2"]}]


def test_an_exact_point(runs):
    values = np.random.default_rng(0).normal(size=(4, 50))
    with served(runs) as address:
        found = ask(address, "/api/at?key=loss&point=17.2&band=std")["groups"]
        for group, lanes in zip(found, ([0, 2], [1, 3]), strict=True):
            own = values[lanes, 17]
            assert (group["x"], group["n"], group["lost"]) == (17, 2, 0)
            np.testing.assert_allclose(group["center"], own.mean(), rtol=1e-15)
            np.testing.assert_allclose(group["high"], own.mean() + own.std(ddof=1), rtol=1e-14)


@pytest.mark.sample(3)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("query", "problem"),
    [
        ("band=no", "`band` is 'no'; choose one of"),
        ("smooth=1.5", "`smooth` is 1.5; it must be from 0 to below 1."),
        ("smooth=x", "could not convert string to float"),
        ("bins=0", "`bins` is 0; it must be positive."),
        ("where=lr%3Eoften", "'lr>often' compares with 'often', which is not a number."),
        ("since=0:x", None),
        ("by=nothing", None),
        ("x=nothing", None),
    ],
)
def test_bad_questions_get_an_answer_that_says_why(runs, query, problem):
    with served(runs) as address:
        status, _, body = request(address, f"/api/panel?key=loss&{query}")
        assert status == (200 if problem is None else 400)
        if problem is not None:
            assert problem in json.loads(body)["error"]


def test_an_unknown_key_is_404(runs):
    with served(runs) as address:
        status, _, body = request(address, "/api/panel?key=no")
        assert status == 404
        assert json.loads(body)["error"].startswith("there is no key 'no' in ")


def test_growth_is_announced(tmp_path):
    with lox.store.Writer(tmp_path) as writer, served(tmp_path, period=0.02) as address:
        run = writer.open_run("a")
        writer.append(run, {"loss": np.float32(1)})
        writer.flush()
        port = int(address.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port), 30) as connection:
            connection.sendall(f"GET /api/events HTTP/1.1\r\nHost: localhost:{port}\r\n\r\n".encode())
            heard: list[bytes] = []
            listener = threading.Thread(target=_listen, args=(connection, heard), daemon=True)
            listener.start()
            until(lambda: b'"keys": [["loss", 1]]' in b"".join(heard), "the first event")
            writer.append(run, {"loss": np.float32(2)})
            writer.flush()
            until(lambda: b'"keys": [["loss", 2]]' in b"".join(heard), "the second event")
            connection.shutdown(socket.SHUT_RDWR)
            listener.join(30)


def test_who_comes_later_is_told_what_was_announced_before(tmp_path):
    """Between the question for runs and that for news, something may have grown: another page has heard of it."""
    save(tmp_path, 0, [1.0, 2.0])
    with served(tmp_path, period=0.02) as address:
        port = int(address.rpartition(":")[2])
        connections = [socket.create_connection(("127.0.0.1", port), 30) for _ in range(2)]
        for connection in connections:
            heard: list[bytes] = []
            connection.sendall(f"GET /api/events HTTP/1.1\r\nHost: localhost:{port}\r\n\r\n".encode())
            listener = threading.Thread(target=_listen, args=(connection, heard), daemon=True)
            listener.start()
            until(lambda heard=heard: b'"keys": [["loss", 2]]' in b"".join(heard), "what there is")
        for connection in connections:
            connection.shutdown(socket.SHUT_RDWR)
            connection.close()


def test_an_unexpected_error_does_not_end_the_news(tmp_path, monkeypatch):
    save(tmp_path, 0, [1.0, 2.0])
    refresh, looks = Live.refresh, []

    def failing(self):
        looks.append(1)
        if len(looks) == 2:
            raise RuntimeError("unexpected")
        return refresh(self)

    monkeypatch.setattr(Live, "refresh", failing)
    with served(tmp_path, period=0.02) as address:
        port = int(address.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port), 30) as connection:
            connection.sendall(f"GET /api/events HTTP/1.1\r\nHost: localhost:{port}\r\n\r\n".encode())
            heard: list[bytes] = []
            listener = threading.Thread(target=_listen, args=(connection, heard), daemon=True)
            listener.start()
            until(lambda: b"RuntimeError('unexpected')" in b"".join(heard), "the problem")
            save(tmp_path, 1, [1.0])
            until(lambda: b'["loss", 3]' in b"".join(heard), "what came after it")
            connection.shutdown(socket.SHUT_RDWR)
            listener.join(30)


def _listen(connection: socket.socket, heard: list[bytes]) -> None:
    while True:
        try:
            part = connection.recv(4096)
        except OSError:
            return
        if not part:
            return
        heard.append(part)


@pytest.mark.slow
def test_an_empty_directory_and_one_that_does_not_exist_yet(tmp_path):
    with served(tmp_path / "later") as address:
        assert ask(address, "/api/runs")["runs"] == []
        save(tmp_path / "later", 0, [1.0])
        until(lambda: len(ask(address, "/api/runs")["runs"]) == 1, "the run")


@pytest.mark.slow
def test_the_command_line_of_the_server(tmp_path):
    save(tmp_path, 0, [1.0])
    program = f"from lox.view._server import serve; serve({str(tmp_path)!r}, 0, browser=False)"
    with subprocess.Popen(
        [sys.executable, "-u", "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        match = re.fullmatch(rf"{tmp_path.name}: (http://127\.0\.0\.1:\d+)/  \(Ctrl-C ends it\)\n", line)
        assert match, line + str(process.stderr and process.poll() is not None and process.stderr.read())
        until(lambda: _answers(match[1]), "the server answers")
        process.send_signal(2)
        out, err = process.communicate(timeout=60)
        assert (out, err) == ("", "")


def _answers(address: str) -> bool:
    try:
        return len(ask(address, "/api/runs")["runs"]) == 1
    except ConnectionRefusedError:
        return False


def test_a_port_that_is_taken_is_an_error_that_says_so():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(
            lox.OptionError, match=rf"the server cannot listen on 127.0.0.1:{port}: .* Choose another port"
        ):
            _server._bind("127.0.0.1", port)
    with pytest.raises(lox.OptionError, match=r"`port` is 70000; it must be from 0 to 65535"):
        _server._bind("127.0.0.1", 70000)


def test_a_directory_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(lox.RunNotFoundError, match="there is no directory"):
        _server.serve(tmp_path / "no", browser=False)
    (tmp_path / "file").touch()
    with pytest.raises(lox.StoreError, match="is a file: give the directory that lox wrote to"):
        _server.serve(tmp_path / "file", browser=False)


# --- choosing runs ---


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", "abc"),
        ("lr=0.1", "ab"),
        ("lr=1e-1", "ab"),
        ("lr!=0.1", "c"),
        ("depth>2", "bc"),
        ("depth>=2 depth<4", "ab"),
        ("opt.name=adam", "ac"),
        ("opt.name~^s", "b"),
        ("name=b", "b"),
        ("a", "a"),
        ("note='two words'", "c"),
        ("state=finished", "abc"),
        ("missing=1", ""),
    ],
)
def test_filters(tmp_path, text, names):
    configs = {
        "a": {"lr": 0.1, "depth": 2, "opt": {"name": "adam"}},
        "b": {"lr": float(np.float32(0.1)), "depth": 3, "opt": {"name": "sgd"}},
        "c": {"lr": 0.2, "depth": 4, "opt": {"name": "adam"}, "note": "two words"},
    }
    with lox.store.Writer(tmp_path) as writer:
        for name, config in configs.items():
            writer.append(writer.open_run(name, config=config), {"x": np.float32(0)})
    chosen = _filter.parse(text)
    assert "".join(run.name for run in lox.runs(tmp_path) if chosen(run)) == names


# --- reduction to pixels ---


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_extremes_survive_the_reduction_and_points_are_exact(seed, log):
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 5000))
    x = np.sort(rng.choice(20_000, count, replace=False)).astype(np.float64) + 1
    center = rng.normal(size=count)
    center[rng.random(count) < 0.1] = np.nan
    width = rng.random(count)
    band = Band(x, center, center - width, center + width, np.full(count, 3), np.zeros(count, int), "")
    drawn = _pixels.reduced(band, Grid.of(x[0], x[-1], 100, log))
    at = np.searchsorted(x, drawn.x)
    np.testing.assert_array_equal(x[at], drawn.x)
    np.testing.assert_array_equal(center[at], drawn.center)
    np.testing.assert_array_equal(band.low[at], drawn.low_there)
    assert len(drawn.x) <= 2 * 102 + 2
    assert (drawn.x[0], drawn.x[-1]) == (x[0], x[-1])
    for mine, all_of_it in (
        (np.nanmin(drawn.center), np.nanmin(center)),
        (np.nanmax(drawn.center), np.nanmax(center)),
        (np.nanmin(drawn.low), np.nanmin(band.low)),
        (np.nanmax(drawn.high), np.nanmax(band.high)),
    ):
        assert mine == all_of_it


def test_lanes_keep_their_extremes():
    values = np.random.default_rng(0).normal(size=(5, 3000))
    x, drawn, most = _pixels.reduced_lanes(np.arange(3000.0), values, Grid.of(0, 2999, 100))
    assert most > 20
    assert drawn.shape == (5, len(x))
    np.testing.assert_array_equal(drawn.min(1), values.min(1))
    np.testing.assert_array_equal(drawn.max(1), values.max(1))


# --- runs that grow ---


def whole(directory: Path, options: Options = Options()) -> dict[str, Any]:  # noqa: B008
    """Return what a server that is started now says."""
    live = Live(directory)
    live.refresh()
    return _panels.panel(live, "loss", live.groups(None, ""), options)


def merged(old: dict[str, Any], news: dict[str, Any]) -> dict[str, Any]:
    """Do what the page does: put what has changed behind what is known."""
    if not news["grow"]:
        return news
    groups = []
    for before, group in zip(old["groups"], news["groups"], strict=True):
        kept = before
        if not group["same"]:
            cut = int(np.searchsorted(before["x"], group["from"]))
            kept = {name: before[name][:cut] + group[name] for name in ("x", "center", "low", "high", "at")}
        groups.append({**group, **{name: kept[name] for name in ("x", "center", "low", "high", "at")}})
    return {**news, "groups": groups}


@pytest.mark.sample(4)
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_what_grows_is_what_it_would_be_if_it_were_read_anew(tmp_path, seed):
    """Runs that log at different speeds, twice at a step, backwards, NaN, begin late, in any order."""
    rng = np.random.default_rng(seed)
    live = Live(tmp_path)
    known: dict[str, Any] | None = None
    steps: dict[str, int] = {}
    options = Options(bins=int(rng.choice([20, 1000])), smooth=float(rng.choice([0.0, 0.6])))
    with lox.store.Writer(tmp_path) as writer:
        opened: dict[str, Any] = {}
        for _ in range(25):
            name = f"run{rng.integers(4)}"
            if name not in opened:
                opened[name] = writer.open_run(name, config={"lr": int(name[-1]) % 2})
            for _ in range(int(rng.integers(1, 30))):
                steps[name] = steps.get(name, 0) + int(
                    rng.choice([0, 1, 1, 1, 2, -3], p=[0.03, 0.3, 0.3, 0.3, 0.04, 0.03])
                )
                value = rng.normal() if rng.random() > 0.05 else np.nan
                writer.append(opened[name], lox.logdict({"loss": value}, steps={"step": {"loss": steps[name]}}))
            writer.flush()
            live.refresh()
            asked = Options(**{**options.__dict__, "since": known["token"] if known else ""})
            answer = _panels.panel(live, "loss", live.groups(None, ""), asked)
            known = answer if known is None else merged(known, answer)
            expected = whole(tmp_path, options)
            for mine, theirs in zip(known["groups"], expected["groups"], strict=True):
                for part in ("x", "at"):
                    assert mine[part] == theirs[part]
                for part in ("center", "low", "high"):
                    a, b = (np.array(g[part], float) for g in (mine, theirs))
                    np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)
                assert (mine["marks"], mine["n"]) == (theirs["marks"], theirs["n"])


def test_a_view_computes_only_what_is_new(tmp_path, monkeypatch):
    live = Live(tmp_path)
    sizes: list[int] = []
    real = _panels._bands.band
    monkeypatch.setattr(
        "lox.view._live._bands.band", lambda curve, kind: sizes.append(len(curve.x)) or real(curve, kind)
    )
    with lox.store.Writer(tmp_path) as writer:
        run = writer.open_run("a")
        for first in (0, 1000, 1001):
            steps = np.arange(first, first + (1000 if first == 0 else 1))
            writer.append(run, lox.logdict.from_arrays({"loss": steps / 7}, steps={"step": steps}))
            writer.flush()
            live.refresh()
            _panels.panel(live, "loss", live.groups(None, ""), Options())
    assert sizes == [1000, 1, 1]


def test_overwritten_runs_are_forgotten(tmp_path):
    save(tmp_path, 0, [1.0, 2.0, 3.0])
    live = Live(tmp_path)
    live.refresh()
    assert _panels.panel(live, "loss", live.groups(None, ""), Options())["groups"][0]["x"] == [0, 1, 2]
    logs = lox.logdict.from_arrays({"loss": np.array([7.0])}, steps={"step": np.array([5])})
    lox.save(logs, tmp_path, jax.random.key(0), mode="overwrite")
    live.refresh()
    group = _panels.panel(live, "loss", live.groups(None, ""), Options())["groups"][0]
    assert (group["x"], group["center"]) == ([5], [7.0])


def test_superseded_attempts_are_apart_and_enter_no_statistics(tmp_path):
    def attempt(values: Any, first: int, resumed: bool) -> None:
        with lox.SaveLogger(tmp_path) as logger:
            key = jax.random.key(0)
            state = logger.resume(key, step=first) if resumed else logger.init(key)
            for n, value in enumerate(values):
                logger.log(state, {"loss": np.float32(value)}, step=first + n)

    attempt([0.0, 1.0, 2.0, 3.0], 0, False)
    live = Live(tmp_path)
    live.refresh()
    before = _panels.panel(live, "loss", live.groups(None, ""), Options())
    assert before["groups"][0]["center"] == [0, 1, 2, 3]
    attempt([20.0, 30.0, 40.0], 2, True)
    live.refresh()
    asked = Options(lanes=True, since=before["token"])
    group = _panels.panel(live, "loss", live.groups(None, ""), asked)["groups"][0]
    assert (group["x"], group["center"]) == ([0, 1, 2, 3, 4], [0, 1, 20, 30, 40])
    assert group["replaced"] == [{"name": "0, attempt 0", "x": [2, 3], "values": [2, 3]}]


def test_over_time_lanes_are_aligned_by_their_step(tmp_path):
    for step in range(5):
        for run in (0, 1):
            save(tmp_path, run, [step + run], first=step)
            time.sleep(0.003)
    panel = whole(tmp_path, Options(x="wall"))
    assert panel["x"] == "wall"
    assert panel["groups"][0]["at"] == [2] * 5
    plotted = lox.plot(tmp_path, x="wall").charts[0].groups[0].band
    np.testing.assert_allclose(panel["groups"][0]["x"], plotted.x, atol=1e-6)
    np.testing.assert_array_equal(panel["groups"][0]["center"], plotted.center)


@pytest.mark.parametrize("band", ["ci95", "std", "quantiles", "iqm", "minmax"])
def test_the_page_and_lox_plot_say_the_same(tmp_path, band):
    rng = np.random.default_rng(3)
    for seed in range(6):
        save(tmp_path, seed, rng.normal(size=int(rng.integers(20, 40))), lr=seed % 2)
    panel = whole(tmp_path, Options(band=band, smooth=0.3))
    chart = lox.plot(tmp_path, band=band, smooth=0.3).charts[0]
    for group, drawn in zip(panel["groups"], chart.groups, strict=True):
        assert group["name"] == drawn.group
        for part in ("x", "center", "low", "high"):
            expected = getattr(drawn.band, part)
            np.testing.assert_allclose(np.array(group[part], float), expected, rtol=1e-9, atol=1e-12)


def test_keys_that_nobody_looks_at_are_forgotten_and_read_again(tmp_path, monkeypatch):
    monkeypatch.setattr("lox.view._live._MOST_NUMBERS", 100)
    for key in ("a", "b"):
        save(tmp_path, 0, np.arange(30.0), key=key)
    live = Live(tmp_path)
    live.refresh()
    for key in ("a", "b", "a"):
        panel = _panels.panel(live, key, live.groups(None, ""), Options())
        assert panel["groups"][0]["center"] == list(range(30))
        assert list(live._read) == [key]
        assert len(live._views) == 1


def test_arrays_have_a_curve_per_element(tmp_path):
    logs = lox.logdict.from_arrays({"xs": np.arange(12.0).reshape(4, 3)}, steps={"step": np.arange(4)})
    lox.save(logs, tmp_path)
    live = Live(tmp_path)
    live.refresh()
    panel = _panels.panel(live, "xs", live.groups(None, ""), Options(name="xs/1"))
    assert [one["name"] for one in panel["names"]] == ["xs/0", "xs/1", "xs/2"]
    assert panel["groups"][0]["center"] == [1, 4, 7, 10]


def test_a_damaged_file_is_a_problem_that_the_page_shows(tmp_path):
    save(tmp_path, 0, np.arange(100.0))
    save(tmp_path, 1, np.arange(100.0))
    segment = sorted(tmp_path.rglob("*.arrows"))[0]
    content = bytearray(segment.read_bytes())
    content[-200] ^= 255
    segment.write_bytes(content)
    with served(tmp_path) as address:
        panel = ask(address, "/api/panel?key=loss")
        assert panel["groups"][0]["at"][0] == 1
        problems = ask(address, "/api/runs")["problems"]
        assert "does not have the checksum that it was written with" in problems[0]


def test_a_cursor_of_its_own(tmp_path):
    reader, mine = lox.store.Reader(tmp_path), lox.store.Cursor()
    with lox.store.Writer(tmp_path) as writer:
        run = writer.open_run("a")
        writer.append(run, {"x": np.float32(1), "y": np.float32(2)})
        writer.flush()
        assert reader.poll("x", since=mine)["a"]["x"].tolist() == [1]
        assert reader.poll("x", since=mine) == {}
        assert reader.poll()["a"]["y"].tolist() == [2]  # the reader's own has not moved
        writer.append(run, {"x": np.float32(3), "y": np.float32(4)})
        writer.flush()
        assert reader.poll("x", since=mine, refresh=False) == {}
        assert "wall" in reader.poll("x", since=mine, wall=True)["a"].steps
        assert list(reader.poll()["a"]) == ["x", "y"]


def test_states_and_events_follow_a_refresh(tmp_path):
    reader = lox.store.Reader(tmp_path)
    with lox.store.Writer(tmp_path) as writer:
        run = writer.open_run("a")
        for n in (1, 2, 3):
            writer.append(run, {"x": np.float32(n)})
            writer.flush()
            reader.refresh()
            assert [(r.events, r.state) for r in reader.runs()] == [(n, "running")]
    reader.refresh()
    assert [(r.events, r.state) for r in reader.runs()] == [(3, "finished")]


def test_views_are_exact_with_many_versions(tmp_path):
    """Who is further behind than a view remembers gets everything."""
    view = View(_track([0.0]), ["a"], "step")
    view.update()
    lane = view.track.lanes["a"]
    for n in range(1, 400):
        lane.extend(np.array([1.0]), 1, {"step": np.array([float(n)]), "wall": np.array([float(n)])})
        view.update()
    assert view.changed_since(view.version) == np.inf
    assert view.changed_since(view.version - 1) == 398  # the last point, which was drawn as such
    assert view.changed_since(1) == -np.inf
    assert view.changed_since(10_000) == -np.inf


def _track(steps: list[float]) -> Any:
    from lox.view._live import Lane, Track

    track = Track("loss", "number")
    track.lanes["a"] = Lane()
    track.lanes["a"].extend(np.zeros(len(steps)), len(steps), {"step": np.array(steps), "wall": np.array(steps)})
    return track


# --- files ---


def test_uplot_is_what_it_says(tmp_path):
    text = (STATIC / "uplot" / "README.md").read_text()
    sums = dict(reversed(line.split()) for line in text.splitlines() if re.fullmatch(r" +[0-9a-f]{64}  \S+", line))
    assert sorted(sums) == ["LICENSE", "uPlot.iife.min.js", "uPlot.min.css"]
    for name, expected in sums.items():
        assert hashlib.sha256((STATIC / "uplot" / name).read_bytes()).hexdigest() == expected
    assert (
        "v1.6.32"
        in (STATIC / "uplot" / "uPlot.iife.min.js").read_text()[:400] + (STATIC / "uplot" / "uPlot.min.css").read_text()
    )
    assert "1.6.32" in text


def test_a_page_of_its_own_needs_nothing_else(tmp_path):
    save(tmp_path, 0, [1.0, 2.0], key="</script><script>alert(1)</script>")
    page = lox.plot(tmp_path, title="<b>").to_html()
    assert page.count("<script") == 2
    assert page.count("</script>") == 2
    assert "<title>&lt;b&gt;</title>" in page
    source = re.search(r'type="application/json">(.*?)</script>', page, re.DOTALL)
    assert source
    assert json.loads(source[1])["panels"][0]["name"] == "</script><script>alert(1)</script>"
    # Nothing is fetched: what looks like an address is in comments or names.
    assert not re.search(r"""(src|href|url)\s*[=(]\s*["']?(https?:)?//""", page)


def test_a_wheel_has_the_files_of_the_page(tmp_path):
    pytest.importorskip("hatchling", reason="hatchling is not installed")
    root = Path(lox.__file__).parents[1]
    if not (root / "pyproject.toml").exists():
        pytest.skip("lox is installed without its sources")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=root, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    for file in STATIC.rglob("*"):
        if file.is_file():
            assert f"lox/view/static/{file.relative_to(STATIC).as_posix()}" in names


def test_the_browser_is_there_or_its_absence_is_said():
    """Where this is skipped, what people see was not tested."""
    if problem := browser.package():
        pytest.skip(problem)


def test_histograms_with_other_bins_are_counted_and_left_out(tmp_path):
    def save(seed, low):
        logs = lox.spool(
            lambda: lox.log({"h": lox.Histogram(np.arange(4.0, dtype=np.float32), 4, (low, 4.0))}, step=0)
        )()[1]
        lox.save(logs, tmp_path, jax.random.key(seed))

    for seed, low in enumerate((0.0, 0.0, -4.0)):
        save(seed, low)
    with served(tmp_path) as address:
        answer = json.loads(request(address, "/api/histogram?key=h")[2])
    assert (answer["n"], answer["left_out"], answer["counts"]) == (2, 1, [[2, 2, 2, 2]])
