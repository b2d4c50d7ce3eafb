"""A real browser for tests of pages: Debian's chromium, driven by the chromedriver that comes with it.

Nothing is downloaded: where there is no browser, tests are skipped, and the summary of pytest says so loudly.
"""

import contextlib
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
MISSING = "" if CHROMIUM and DRIVER else "there is no browser: apt-get install chromium chromium-driver"
PATIENCE = 30.0  # seconds


def package() -> str:
    """Return what is missing to drive a browser, in words; nothing if all is there."""
    try:
        import selenium  # noqa: F401
    except ImportError:
        return "selenium is not installed, so that no browser can be driven"
    return MISSING


@contextlib.contextmanager
def chromium(width: int = 1280, height: int = 900, dark: bool = False) -> Iterator[Any]:
    """Start a headless browser."""
    if problem := package():
        pytest.skip(problem)
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = str(CHROMIUM)
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"):
        options.add_argument(argument)
    options.add_argument(f"--window-size={width},{height}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(executable_path=DRIVER))
    try:
        if dark:
            features = [{"name": "prefers-color-scheme", "value": "dark"}]
            driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        yield driver
    finally:
        driver.quit()


@contextlib.contextmanager
def served(directory: str | os.PathLike[str], period: float = 0.1, **options: Any) -> Iterator[str]:
    """Serve the dashboard of a directory in a thread; give its address."""
    from lox.view import _server

    bound = _server._bind("127.0.0.1", 0)
    server = _server.server_of(_server.app(directory, period=period, **options))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
    thread.start()
    until(lambda: server.started, "the server has started")
    try:
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(PATIENCE)
        bound.close()


def until(condition: Callable[[], Any], what: str) -> Any:
    """Wait until something is true, and return it."""
    deadline = time.monotonic() + PATIENCE
    while True:
        found = condition()
        if found:
            return found
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {PATIENCE:.0f} s in vain: {what}")
        time.sleep(0.02)


def complaints(driver: Any) -> list[str]:
    """Return errors and warnings in the browser's console since the last call: exceptions, refusals by the policy."""
    return [entry["message"] for entry in driver.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]


def screenshot(driver: Any, file: Path) -> None:
    """Take a picture of the page."""
    driver.save_screenshot(str(file))
