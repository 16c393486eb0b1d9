"""``mpinspect compile``: compile the loops that count on a CPU now, so that no training has to count with torch meanwhile."""

from __future__ import annotations

import argparse
import sys

from mpinspect.commands.output import UnusableError
from mpinspect.reporting.streams import say


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare no options: the machine and numba decide everything."""


def run(options: argparse.Namespace) -> int:
    from mpinspect.counting import fastest

    troubles = fastest.warm_up(compile_here=True)
    if troubles or fastest.cpu_counter() is None:
        raise UnusableError(next(iter(troubles), "numba is not installed: pip install 'mpinspect[cpu]'"))
    say(sys.stdout, "the counting kernels are compiled, and cached on disk for all processes on this machine")
    return 0
