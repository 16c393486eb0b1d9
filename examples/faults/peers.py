"""Runs a script with other tools: torch's anomaly detection, a GradScaler alone, DebugUnderflowOverflow and wandb.watch."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

NOTHING = "nothing"
#: Code that calls ``attach(model)`` with each model of the script before its first forward.
_ATTACHING = """
import torch
seen = set()
def before(module, args):
    if id(module) not in seen:
        seen.update(map(id, module.modules()))
        attach(module)
torch.nn.modules.module.register_module_forward_pre_hook(before)
"""


@dataclass(frozen=True)
class Peer:
    """Another tool.

    Args:
        name: its name in the table.
        requires: the package to import.
        before: code that enables it, run before the script.
        read: extracts its message from the exit code, stdout and stderr.
    """

    name: str
    requires: str
    before: str
    read: Callable[[int, str, str], str]

    def ask(self, script: Path) -> str:
        """Run the script with this tool; return its message, or "nothing"."""
        code = f"{self.before}\nimport runpy\nrunpy.run_path({str(script)!r}, run_name='__main__')\nAT_END()"
        code = "AT_END = lambda: None\n" + code
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run(
                [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False, cwd=folder
            )
        return self.read(done.returncode, done.stdout, done.stderr)[:100]

    @property
    def is_installed(self) -> bool:
        return importlib.util.find_spec(self.requires) is not None


def _last_error(code: int, out: str, err: str) -> str:
    return (err.strip().splitlines() or [""])[-1] if code else NOTHING


def _skips(code: int, out: str, err: str) -> str:
    told = [line.split() for line in out.splitlines() if line.startswith("SKIPPED")]
    return f"{told[0][1]} steps skipped, scale {told[0][2]}" if told and told[0][2:] and told[0][1] != "0" else NOTHING


def _detected(code: int, out: str, err: str) -> str:
    return next((line.strip() for line in (out + err).splitlines() if line.startswith("Detected")), NOTHING)


PEERS = (
    Peer("anomaly detection", "torch", "import torch; torch.autograd.set_detect_anomaly(True)", _last_error),
    Peer(
        "GradScaler alone",
        "torch",
        """
import torch
skipped, scales, update = [0], [], torch.amp.GradScaler.update
def counting(self, *args):
    before = self.get_scale(); update(self, *args)
    skipped[0] += self.get_scale() < before; scales[:] = [self.get_scale()]
torch.amp.GradScaler.update = counting
AT_END = lambda: print('SKIPPED', skipped[0], *scales)
""",
        _skips,
    ),
    Peer(
        "DebugUnderflowOverflow",
        "transformers",
        f"{_ATTACHING}\nfrom transformers.debug_utils import DebugUnderflowOverflow\nattach = DebugUnderflowOverflow",
        _detected,
    ),
    Peer(
        "wandb.watch",
        "wandb",
        f"{_ATTACHING}\nimport wandb\nwandb.init(mode='offline', settings=wandb.Settings(silent=True))\n"
        "attach = lambda model: wandb.watch(model, log='all', log_freq=1)",
        # Its histograms are pictures, so only its errors count as messages.
        _last_error,
    ),
)
