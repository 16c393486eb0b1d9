"""``mpinspect demo``: train a small model with the inspector on; with --curves also in FP16, in three ways."""

from __future__ import annotations

import argparse
import ctypes
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

from mpinspect.commands.output import (
    INTERRUPTED,
    UnusableError,
    add_output_options,
    positive,
    range_finding,
    save_to,
    status,
)
from mpinspect.reporting.streams import say

if TYPE_CHECKING:
    from mpinspect.ranges.analysis.report import RangeReport


#: Numbers of the parameters in glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-o", "--log-dir", metavar="DIR", default="runs/demo", help="where the run is written (%(default)s)"
    )
    parser.add_argument("--steps", type=positive, metavar="N", help="training steps of a run (160; with --curves 100)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="random seed (%(default)s)")
    parser.add_argument("--quiet", action="store_true", help="print nothing")
    parser.add_argument(
        "--curves",
        action="store_true",
        help="also train in FP16 without loss scaling, with the recommended scale and with a dynamic one; print a table and "
        "draw the losses (curves.png). With --json: one document, the report under 'report', the runs under 'curves'",
    )
    parser.add_argument(
        "--seeds", type=positive, metavar="N", help="with --curves: N seeds from --seed on, and their means (1)"
    )
    add_output_options(parser, range_finding)


def run(options: argparse.Namespace) -> int:
    if options.seeds and not options.curves:
        raise UnusableError("--seeds is for --curves: give both, or --seed for the one seed of the demo alone")
    _keep_freed_memory()
    try:
        report = _curves(options) if options.curves else _demo_alone(options)
    except OSError as error:
        raise UnusableError(f"the demo can't run: {error}") from error
    except KeyboardInterrupt as stop:
        say(sys.stderr, ": ".join(filter(None, ["stopped", str(stop)])))
        return INTERRUPTED
    save_to(report, options.png, options.md, options.html)
    return status(report.findings, options.fail_on)


def _keep_freed_memory() -> None:
    """Let glibc reuse large freed tensors. By default it returns them, and zeroing their pages again takes half of each step."""
    with suppress(OSError, AttributeError, TypeError):
        libc = ctypes.CDLL(None)
        for parameter, value in ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, 2**31 - 1), (_M_TOP_PAD, 2**28)):
            libc.mallopt(parameter, value)


def _demo_alone(options: argparse.Namespace) -> RangeReport:
    from mpinspect.demo import demo

    # The demo prints its report itself.
    quiet = options.quiet or options.json
    report = demo.run(log_dir=options.log_dir, seed=options.seed, quiet=quiet, **_steps(options))
    if options.json:
        sys.stdout.write(report.to_json())
    return report


def _steps(options: argparse.Namespace) -> dict[str, int]:
    """Return the number of steps as a keyword argument, if one was given."""
    return {"steps": options.steps} if options.steps else {}


def _curves(options: argparse.Namespace) -> RangeReport:
    from mpinspect.demo.curves import Setting
    from mpinspect.demo.curves import run as compare

    comparison = compare(
        log_dir=options.log_dir,
        setting=Setting(**_steps(options)),
        seeds=range(options.seed, options.seed + (options.seeds or 1)),
        quiet=options.quiet or options.json,
    )
    if options.json:
        sys.stdout.write(comparison.to_json())
    return comparison.report
