"""How long the map of a page takes in Chromium: opening it, a move of its slider, and the file's size, of 2,000 tensors.

    python benchmarks/page.py [--tensors 2000] [--json benchmarks/results/page-cpu.json]

Needs playwright (pip install 'mpinspect[browser]') and a Chromium of the system.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from machine import write_results

from mpinspect.numeric.exponents import ExponentHistogram
from mpinspect.ranges.analysis import analyse
from mpinspect.ranges.kinds import GRADIENT_KINDS
from mpinspect.ranges.session import Progress, Session, TensorInfo, TensorKey, TensorWindow, Window

#: Moves of the slider, over its range.
_MOVES = """() => {
  const slider = document.querySelector(".explorer input[type=range]");
  const taken = [];
  for (let scale = -10; scale < 20; scale += 1) {
    slider.value = scale;
    const begun = performance.now();
    slider.dispatchEvent(new Event("input"));
    taken.push(performance.now() - begun);
  }
  return taken.sort((one, other) => one - other);
}"""


def session(tensors: int, windows: int = 16) -> Session:
    """Gradients of a deep model, spread over some 34 powers of two each."""
    drawn = np.random.default_rng(0)
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


def measure(tensors: int) -> dict[str, Any]:
    from playwright.sync_api import sync_playwright

    report = analyse(session(tensors))
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as started:
        begun = time.perf_counter()
        path = report.save(Path(folder) / "report.html")
        saved_s = time.perf_counter() - begun
        program = shutil.which("chromium") or shutil.which("google-chrome")
        browser = started.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page()
        begun = time.perf_counter()
        page.goto(f"file://{path}")
        page.wait_for_selector(".explorer tbody tr[data-name]")
        opened_s = time.perf_counter() - begun
        in_order = page.evaluate(_MOVES)
        page.click(".explorer thead button:text('flushed')")
        sorted_ = page.evaluate(_MOVES)
        found = {
            "tensors": tensors,
            "file_mb": path.stat().st_size / 1e6,
            "saved_s": saved_s,
            "opened_s": opened_s,
            "slider_ms": {"median": in_order[len(in_order) // 2], "most": in_order[-1]},
            "slider_sorted_ms": {"median": sorted_[len(sorted_) // 2], "most": sorted_[-1]},
            "browser": browser.version,
        }
        browser.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, default=2000)
    parser.add_argument("--json", help="write the results to this file")
    options = parser.parse_args()
    found = measure(options.tensors)
    print(
        f"{found['tensors']:,} tensors: {found['file_mb']:.1f} MB, opens in {found['opened_s']:.2f} s, a move of the slider "
        f"{found['slider_ms']['median']:.0f} ms (at most {found['slider_ms']['most']:.0f}), sorted "
        f"{found['slider_sorted_ms']['median']:.0f} ms (at most {found['slider_sorted_ms']['most']:.0f})"
    )
    if options.json:
        write_results(options.json, found)


if __name__ == "__main__":
    main()
