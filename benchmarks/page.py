"""The maps of a page with 2,000 tensors in Chromium: time to open it, time to move their slider, and file size.

    python benchmarks/page.py [--tensors 2000] [--json benchmarks/results/page-cpu.json]

A page has one map for a run, and two coupled maps for a comparison. For a move of the slider, the results give the script's
time and the time until the last map shows it. The second map follows at the next frame, at 60 frames per second.

Needs playwright (pip install 'mpinspect[browser]') and a Chromium of the system.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from machine import arguments, write_results
from targets import checked, verdicts

from mpinspect.numeric.exponents import ExponentHistogram
from mpinspect.ranges.analyse import analyse
from mpinspect.ranges.kinds import GRADIENT_KINDS
from mpinspect.ranges.session import Progress, Session
from mpinspect.ranges.windows.tensors import TensorInfo, TensorKey, TensorWindow
from mpinspect.ranges.windows.window import Window
from mpinspect.run.diff import diff

#: Moves the slider over its range; returns the milliseconds of the script, and until every map shows each move.
_MOVES = """async () => {
  const slider = document.querySelector(".explorer input[type=range]");
  const [works, shows] = [[], []];
  for (let scale = -10; scale < 20; scale += 1) {
    slider.value = scale;
    await new Promise(requestAnimationFrame);
    const begun = performance.now();
    slider.dispatchEvent(new Event("input"));
    works.push(performance.now() - begun);
    // Called after the maps that follow were drawn, in the same frame.
    await new Promise(requestAnimationFrame);
    shows.push(performance.now() - begun);
  }
  const outputs = [...document.querySelectorAll(".explorer output")].filter((each) => each.textContent.includes("2¹⁹"));
  return [outputs.length, ...[works, shows].map((taken) => taken.sort((one, other) => one - other))];
}"""


def session(tensors: int, windows: int = 16, seed: int = 0) -> Session:
    """Return the gradients of a deep model, each spread over some 34 powers of two."""
    drawn = np.random.default_rng(seed)
    keys = [
        TensorKey(f"model.layers.{place // 20}.part{place % 20}.weight", kind)
        for place in range(tensors // len(GRADIENT_KINDS))
        for kind in GRADIENT_KINDS
    ]

    def histogram(place: int) -> ExponentHistogram:
        bell = np.exp(-(((np.arange(34) - 17 - place % 7) / 6) ** 2))
        counts = np.maximum(0, drawn.normal(1, 0.05, 34) * 1e5 * bell).astype(int)
        return ExponentHistogram.from_counts(counts, -40, powers_of_two=counts // 4000, near_top=counts // 3000)

    return Session(
        watched=tuple(TensorInfo(key.name, key.kind, key.name, "Linear") for key in keys),
        windows=tuple(
            Window(
                10 * number,
                10 * number + 9,
                1,
                {key: TensorWindow(histogram(place), 1) for place, key in enumerate(keys)},
            )
            for number in range(windows)
        ),
        progress=Progress(10 * windows, windows, 0, 10 * windows, True, True),
    )


def measure(maps: int, save: Callable[[Path], Path]) -> dict[str, Any]:
    """Save a page with this many maps, open it, and move the slider."""
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as folder, sync_playwright() as started:
        begun = time.perf_counter()
        path = save(Path(folder) / "report.html")
        saved_s = time.perf_counter() - begun
        program = shutil.which("chromium") or shutil.which("google-chrome")
        browser = started.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        # Both maps must be visible: a hidden map is drawn only once it is scrolled into view.
        page = browser.new_page(viewport={"width": 1280, "height": 1300 * maps})
        begun = time.perf_counter()
        # A page on two runs opens with their difference.
        page.goto(f"file://{path}{'#view=all' if maps > 1 else ''}")
        page.wait_for_function(
            "maps => [...document.querySelectorAll('.explorer .rows')].filter(map => map.querySelector('tr[data-name]'))"
            ".length === maps",
            arg=maps,
        )
        opened_s = time.perf_counter() - begun
        page.locator(".explorer .rows").last.scroll_into_view_if_needed()
        page.wait_for_timeout(500)
        moved, works, shows = page.evaluate(_MOVES)
        assert moved == maps, f"{moved} of {maps} maps show the last move"
        page.click(".explorer thead button:text('flushed') >> nth=0")
        _, sorted_, _ = page.evaluate(_MOVES)
        found = {
            "maps": maps,
            "file_mb": path.stat().st_size / 1e6,
            "saved_s": saved_s,
            "opened_s": opened_s,
            "move_ms": works[len(works) // 2],
            "longest_move_ms": works[-1],
            "sorted_move_ms": sorted_[len(sorted_) // 2],
            "longest_sorted_move_ms": sorted_[-1],
            "move_until_shown_ms": shows[len(shows) // 2],
            "browser": browser.version,
        }
        browser.close()
    return found


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--tensors", type=int, default=2000)
    options = parser.parse_args()
    one, other = (session(options.tensors, seed=seed) for seed in (0, 1))
    rows = [measure(1, analyse(one).save), measure(2, diff(one, other).save)]
    for row in rows:
        print(
            ", ".join(
                f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}" for name, value in row.items()
            )
        )
    results = {
        "tensors": options.tensors,
        "pages": rows,
        "checked": [
            checked("page.opens", rows[0]["opened_s"]),
            checked("page.move", max(rows[0]["longest_move_ms"], rows[0]["longest_sorted_move_ms"])),
            checked("page.size", rows[0]["file_mb"]),
        ],
    }
    print(verdicts(results["checked"]))
    if options.json:
        write_results(options.json, results)


if __name__ == "__main__":
    main()
