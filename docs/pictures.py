"""Draw the picture of the README again: `python docs/pictures.py`, with the packages of the tests and chromium.

It is a screenshot of `lox ui` after the program of the README.
"""

import contextlib
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

import documents  # noqa: E402
from browser import chromium, served  # noqa: E402
from test_ui_browser import open_page  # noqa: E402


def main() -> None:
    (program,) = [block.text for block in documents.blocks(ROOT / "README.md") if block.text.startswith("# train.py")]
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        subprocess.run([sys.executable, "-c", program], check=True)
        with served("runs") as address, chromium(1280, 497) as page:
            open_page(page, address)
            time.sleep(2)  # the curves grow into place
            page.save_screenshot(str(ROOT / "docs" / "_static" / "curves.png"))


if __name__ == "__main__":
    main()
