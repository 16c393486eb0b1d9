"""Takes the README's picture: the page of the run that README and ``docs/tutorials/nan.md`` quote. Needs a Chromium.

The file holds the verdict in words, too, which ``tests/project/test_docs.py`` compares with the README.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from PIL import Image
from PIL.PngImagePlugin import PngInfo

DOCS = Path(__file__).parent.parent
PICTURE = DOCS / "pictures" / "report.png"
#: The key of the verdict's words in the file, which the PNG specification recommends for descriptions.
WORDS = "Description"
_BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def take(picture: Path) -> None:
    """Run the tutorial's script under mpinspect in a temporary folder, and write its page's first screen as a PNG."""
    browser = next(filter(None, map(shutil.which, _BROWSERS)), None)
    if browser is None:
        sys.exit(f"the picture needs a browser: one of {', '.join(_BROWSERS)}")
    with TemporaryDirectory() as name:
        folder = Path(name).resolve()
        (folder / "train.py").write_text(script(), "utf-8")
        run = [sys.executable, "-m", "mpinspect", "run", "--log-dir", "runs/nan", "train.py"]
        subprocess.run(run, cwd=folder, check=True, capture_output=True)
        page, taken = folder / "runs" / "nan" / "report.html", folder / "taken.png"
        page.write_text(page.read_text("utf-8").replace(f"{folder}/", ""), "utf-8")
        options = ["--headless", "--no-sandbox", "--hide-scrollbars", "--virtual-time-budget=3000"]
        shot = [f"--screenshot={taken}", "--window-size=1440,900", page.as_uri()]
        subprocess.run([browser, *options, *shot], check=True, capture_output=True)
        words = PngInfo()
        words.add_itxt(WORDS, verdict(page.with_suffix(".json")))
        with Image.open(taken) as image:
            image.convert("RGB").save(picture, pnginfo=words, optimize=True)


def script() -> str:
    """Return the tutorial's ``train.py``."""
    found = re.search(
        r"```python\n(# train\.py\n.*?)```", (DOCS / "tutorials" / "nan.md").read_text("utf-8"), re.DOTALL
    )
    assert found is not None
    return found[1]


def verdict(report: Path) -> str:
    """Return the first event, the cause and the change of a run's report in JSON, a line each."""
    run = json.loads(report.read_text("utf-8"))
    found = run["models"][0]["ranges"]["verdict"]
    return "\n".join([run["first_line"], *found["sentences"], f"Change: {found['change']}"])


if __name__ == "__main__":
    take(PICTURE)
