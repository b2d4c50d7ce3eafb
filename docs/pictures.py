"""Make the picture of the dashboard anew: `python docs/pictures.py`, with the packages of the tests and chromium.

It is a screenshot of what `examples/ppo_sweep.py` has logged: PPO with 16 seeds for each of three learning rates.
"""

import contextlib
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from browser import chromium, served  # noqa: E402
from test_ui_browser import open_page  # noqa: E402


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        subprocess.run([sys.executable, ROOT / "examples" / "ppo_sweep.py"], check=True)
        with served("lox-ppo-sweep") as address, chromium(1280, 505) as page:
            open_page(page, address)
            time.sleep(2)  # the histogram is drawn after the curves
            page.save_screenshot(str(ROOT / "docs" / "_static" / "curves.png"))


if __name__ == "__main__":
    main()
