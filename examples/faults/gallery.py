"""Runs every script of the gallery under ``mpinspect run`` and prints which faults were named, with module and step.

    python examples/faults/gallery.py [--only NAME ...] [--jobs N] [--json PATH] [--page PATH] [--runs DIR] [--peers] [--check]

A script's line "# Finding: ID in MODULE, from step N" states its fault; module and step are optional. A fault counts as named
if a finding above "info" has its id, module and step. A healthy script must have no such finding.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from peers import NOTHING, PEERS

from mpinspect.ranges.faults import registry

HERE = Path(__file__).parent
HEALTHY = [f"healthy/{path.name}" for path in sorted((HERE / "healthy").glob("*.py"))]
#: The arguments of Python that run a script under ``mpinspect run``, before the folder of the run and the script.
LAUNCHER: tuple[str, ...] = ("-m", "mpinspect", "run", "--log-dir")
#: Seconds that a script may take.
LONGEST_S = 300


@dataclass(frozen=True)
class Fault:
    """The fault of a script.

    Args:
        script: its file.
        id: the id of its finding.
        module: a prefix of its module's name; "" if the fault concerns the whole run.
        step: its first step; None if it belongs to no step.
    """

    script: str
    id: str
    module: str = ""
    step: int | None = None


_FINDING = re.compile(r"^# Finding: ([\w-]+)(?: in (\S+?))?(?:, from step (\d+))?$", re.MULTILINE)


def _faults() -> tuple[Fault, ...]:
    """Return the faults that the scripts state, in the order of the registry."""
    order, found = list(registry.FAULTS), []
    for path in sorted(HERE.glob("*.py")):
        if line := _FINDING.search(path.read_text("utf-8")):
            id, module, step = line.groups()
            found.append(Fault(path.name, id, module or "", None if step is None else int(step)))
    return tuple(sorted(found, key=lambda fault: order.index(fault.id)))


FAULTS = _faults()


@dataclass(frozen=True)
class Told:
    """A report on one script."""

    script: str
    outcome: str
    verdicts: tuple[str, ...] = ()
    findings: tuple[dict[str, object], ...] = field(default=(), repr=False)

    def above_info(self) -> list[dict[str, object]]:
        return [finding for finding in self.findings if finding["severity"] != "info"]

    def of(self, fault: Fault) -> str:
        """Return "yes", "half" (another module or step) or "no"."""
        named = [finding for finding in self.above_info() if finding["id"] == fault.id]
        if any(
            _in_module(finding, fault) and (fault.step is None or finding["step"] == fault.step) for finding in named
        ):
            return "yes"
        return "half" if named else "no"


def _in_module(finding: dict[str, object], fault: Fault) -> bool:
    return str(finding["layer"]).startswith(fault.module)


def run(script: str, runs: str | None = None) -> Told:
    """Run a script under ``mpinspect run`` and read its report; the run is kept in a folder of ``runs``, if one is given."""
    with tempfile.TemporaryDirectory() as folder:
        log_dir = Path(runs or folder) / Path(script).stem
        command = [sys.executable, *LAUNCHER, str(log_dir), str(HERE / script)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST_S, check=False)
        report = log_dir / "report.json"
        if not report.exists():
            return Told(script, f"no report: {done.stderr[-300:]}")
        models = json.loads(report.read_text("utf-8"))["models"]
    findings = [finding for model in models for finding in model["ranges"]["findings"]]
    verdicts = [" ".join(model["ranges"]["verdict"]["sentences"]) for model in models]
    return Told(script, f"exit {done.returncode}", tuple(verdicts), tuple(findings))


def page(told: dict[str, Told], before: str) -> str:
    """Return the page of the diagnoses: each with its condition, its finding on a script of the gallery, and its fix.

    A diagnosis keeps the examples of ``before``, the present page, if one of its scripts did not run.
    """
    sections = {part.split("\n", 1)[0]: part for part in before.split("\n## ")}
    parts = [_PAGE_HEAD]
    for diagnosis in registry.DIAGNOSES:
        shown = [fault for fault in FAULTS if fault.id == diagnosis.id]
        parts += [f"## {diagnosis.id}\n", f"{diagnosis.about}\n"]
        if diagnosis.id in sections and not all(fault.script in told for fault in shown):
            examples = sections[diagnosis.id].split("\n\n", 2)[2]
            parts.append(examples.rsplit(_FALSE_ALARMS, 1)[0].rstrip("\n") + "\n")
        else:
            parts += [_example(fault, told[fault.script]) for fault in shown if fault.script in told]
        parts.append(f"{_FALSE_ALARMS} {diagnosis.false_alarms}\n")
    return "\n".join(parts)


def _example(fault: Fault, told: Told) -> str:
    """Return the section on one script: its first line, its thread, the finding and the fix as code."""
    text = (HERE / fault.script).read_text("utf-8")
    thread = re.search(r"^# Thread: (https\S+)", text, re.MULTILINE)
    found = next(finding for finding in told.findings if finding["id"] == fault.id)
    code = f"\n<!-- no-run -->\n```python\n{found['code']}\n```\n" if found["code"] else ""
    after = f" (after [this thread]({thread[1]}))" if thread else ""
    source = f"[`{fault.script}`](../examples/faults/{fault.script}){after}"
    return (
        f"{source}: {ast.get_docstring(ast.parse(text))}\n\n> {found['severity']}{_inferred(found)}: {found['message']}\n>\n"
        f"> {found['fix'] or 'Nothing to do.'}\n{code}"
    )


def _inferred(finding: dict[str, object]) -> str:
    return "" if finding["certainty"] == "measured" else " (inferred)"


_FALSE_ALARMS = "**False alarms.**"
_PAGE_HEAD = """# Diagnoses

Findings of the ranges that name a cause. One function makes each, from the record of a run; if the record does not show the
cause, there is no finding. Below: its condition, its finding on a script in `examples/faults/`, and when it may be wrong.
`make gallery` runs the scripts and writes this page.
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", help="names of scripts, or parts of them")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", metavar="PATH", help="write what was told here too")
    parser.add_argument("--page", metavar="PATH", help="renew the page of all diagnoses")
    parser.add_argument("--runs", metavar="DIR", help="keep the runs, with their pages, in folders of this one")
    parser.add_argument("--peers", action="store_true", help="run the faults under other tools as well")
    parser.add_argument(
        "--check", action="store_true", help="exit with 1 where a fault is missed or a healthy script is not"
    )
    options = parser.parse_args()

    def wanted(script: str) -> bool:
        return not options.only or any(part in script for part in options.only)

    faults = [fault for fault in FAULTS if wanted(fault.script)]
    healthy = [script for script in HEALTHY if wanted(script)]
    scripts = (*(fault.script for fault in faults), *healthy)
    with ThreadPoolExecutor(options.jobs) as pool:
        told = dict(zip(scripts, pool.map(partial(run, runs=options.runs), scripts), strict=True))
        asked = [peer for peer in PEERS if options.peers and peer.is_installed]
        answers = {peer.name: list(pool.map(peer.ask, [HERE / fault.script for fault in faults])) for peer in asked}
    missed = _print_faults(faults, told) + _print_healthy(healthy, told)
    for name, said in answers.items():
        print(f"\n{name}: something to say on {sum(answer != NOTHING for answer in said)} of {len(faults)}")
        for fault, answer in zip(faults, said, strict=True):
            print(f"  {fault.script:28} {answer}")
    if options.json:
        rows = {script: {"verdicts": found.verdicts, "findings": found.findings} for script, found in told.items()}
        Path(options.json).write_text(json.dumps(rows, indent=1), "utf-8")
    if options.page:
        path = Path(options.page)
        path.write_text(page(told, path.read_text("utf-8") if path.exists() else ""), "utf-8")
    return int(options.check and missed > 0)


def _print_faults(faults: list[Fault], told: dict[str, Told]) -> int:
    """Print a row for each fault and the score; return how many were not named."""
    print(f"{'script':28} {'named':5}  told")
    for fault in faults:
        found = told[fault.script]
        print(f"{fault.script:28} {found.of(fault):5}  {'; '.join(map(_place, found.above_info())) or found.outcome}")
    scores = [told[fault.script].of(fault) for fault in faults]
    print(
        f"{scores.count('yes')} of {len(faults)} faults named with module and step, {scores.count('half')} half, "
        f"{scores.count('no')} not\n"
    )
    return len(faults) - scores.count("yes")


def _print_healthy(healthy: list[str], told: dict[str, Told]) -> int:
    """Print a row for each healthy script; return how many had a finding above info, or no verdict."""
    alarms = 0
    for script in healthy:
        found = told[script]
        alarms += bool(found.above_info()) or not found.verdicts
        words = "; ".join(f"{_place(finding)}: {finding['message']}" for finding in found.above_info())
        print(f"{script:34} {words or ('healthy' if found.verdicts else found.outcome)}")
    print(f"{alarms} false alarms in {len(healthy)} healthy scripts")
    return alarms


def _place(finding: dict[str, object]) -> str:
    step = "" if finding["step"] is None else f" {finding['step']}"
    return f"{finding['id']} {finding['layer'] or '-'}{step}"


if __name__ == "__main__":
    sys.exit(main())
