"""Opens the pages of runs in Chromium and counts what their first screens show, at 1440 x 900.

    python examples/faults/first_screens.py RUNS

RUNS is a folder of runs, such as `gallery.py --runs` keeps. For each page: the share of the picture (losses, map and steps),
whether a broken run's culprit is visible without a click, the number of words in the panel up to the change (of a run without
one: in the headline), the lines of the change's code that are to be typed, and whether the headline or the code names a line of
the script. Exits with 1 where a picture takes less than 60 %, or a culprit is hidden.

Needs playwright (pip install 'mpinspect[browser]') and a Chromium of the system.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
from pathlib import Path
from typing import Any

#: Least share of the first screen for the picture.
LEAST = 0.6

#: Returns the figures of the first screen.
_COUNT = """() => {
  const seen = (node) => {
    const { top, bottom, width } = node.getBoundingClientRect();
    const rows = node.closest(".rows")?.getBoundingClientRect() ?? { top: 0, bottom: innerHeight };
    return width > 0 && top >= rows.top - 1 && Math.min(bottom, innerHeight) <= rows.bottom + 1 && bottom <= innerHeight + 1;
  };
  const area = (node) => {
    const { left, top, right, bottom } = node.getBoundingClientRect();
    return Math.max(0, Math.min(right, innerWidth) - left) * Math.max(0, Math.min(bottom, innerHeight) - top);
  };
  const sum = (selector) => [...document.querySelectorAll(selector)].reduce((total, node) => total + area(node), 0);
  const words = (text) => text.split(/\\s+/).filter((word) => /\\w/.test(word)).length;
  // Without the explanations of terms, which show on hover.
  const shown = (node) => {
    const copy = node.cloneNode(true);
    copy.querySelectorAll("dfn > *").forEach((explanation) => explanation.remove());
    return copy.textContent;
  };
  const panel = [...document.querySelectorAll(".panel > *")];
  const change = panel.findIndex((node) => node.textContent.startsWith("Change"));
  const read = panel.slice(0, change + 1 || 1);
  const next = change < 0 ? null : panel[change + 1];
  const code = next?.matches("pre") ? next : next?.querySelector(":scope > pre");
  const marked = [...document.querySelectorAll(".explorer tr.marked, .explorer tr.near")];
  return {
    state: document.querySelector(".bar .state")?.textContent ?? "",
    picture: sum(".explorer figure.losses, .explorer .rows, .explorer figure.steps") / (innerWidth * innerHeight),
    marked: marked.length,
    seen: marked.some(seen),
    head: panel.length ? shown(panel[0]) : "",
    words: read.reduce((total, node) => total + words(shown(node)), 0),
    changes: change >= 0,
    lines: code?.querySelectorAll("span:not(.comment)").length ?? 0,
    placed: /\\w\\.py:\\d/.test([...read, code].map((node) => node?.textContent ?? "").join(" ")),
  };
}"""


def counted(pages: list[Path]) -> dict[str, dict[str, Any]]:
    """Return the figures of each page, by the name of its folder."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as started:
        program = shutil.which("chromium") or shutil.which("google-chrome")
        browser = started.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 1440, "height": 900})
        found = {}
        for path in pages:
            page.goto(path.absolute().as_uri())
            page.wait_for_selector(".explorer .rows tr, .explorer figure.steps", state="attached")
            page.wait_for_timeout(300)
            found[path.parent.name] = page.evaluate(_COUNT)
        browser.close()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path)
    options = parser.parse_args()
    found = counted(sorted(options.runs.glob("*/report.html")))
    wrong = 0
    for name, page in found.items():
        hidden = page["marked"] > 0 and not page["seen"]
        wrong += hidden or page["picture"] < LEAST
        culprit = "hidden" if hidden else "seen" if page["seen"] else "none"
        figures = (
            f"picture {page['picture']:.3f}  culprit {culprit:6}  {page['words']:3} words  {page['lines']:2} lines"
        )
        figures += "  placed" * page["placed"]
        print(f"{name:32} {page['state']:8} {figures}  {page['head']}")
    shares, words = ([page[key] for page in found.values()] for key in ("picture", "words"))
    asking = [page for page in found.values() if page["changes"]]
    print(
        f"{len(found)} pages: picture {min(shares):.3f} to {max(shares):.3f}; words until the change is said: median "
        f"{statistics.median(words):.0f}, most {max(words)}; {wrong} fall short"
    )
    if asking:
        lines = [page["lines"] for page in asking]
        print(
            f"{len(asking)} ask for a change: lines of code to type: median {statistics.median(lines):.0f}, most {max(lines)}; "
            f"{sum(page['placed'] for page in asking)} name a line of the script"
        )
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
