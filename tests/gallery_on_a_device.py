"""Runs scripts of the gallery of faults on the stand-in device, and prints which faults are named there.

    python tests/gallery_on_a_device.py [--only NAME ...] [--jobs N] ...

Takes the arguments of ``examples/faults/gallery.py`` and prints what it prints. Every script is run as if its device were the
stand-in. Some can't be: those that train on ranks or exchange storages. The stand-in's BatchNorm writes no running statistics,
and its autocast caches no casts, so that faults of these are not found. The whole gallery takes half an hour.
"""

from __future__ import annotations

import functools
import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
FAULTS = HERE.parent / "examples" / "faults"
#: The functions that make tensors on the default device: random ones are drawn on the CPU, so that all devices have the same.
_MAKERS = (
    *(
        "empty",
        "zeros",
        "ones",
        "full",
        "arange",
        "linspace",
        "logspace",
        "eye",
        "tensor",
        "scalar_tensor",
        "as_tensor",
    ),
    *("hann_window", "triu_indices"),
)
_DRAWN = ("rand", "randn", "randint", "randperm", "normal", "from_numpy")
_OF_CPU = re.compile(r'(autocast\(|GradScaler\(|device_type=|device=|torch\.device\(|\.to\()"cpu"')


def _prepare() -> None:
    """Make the stand-in the device of all tensors that a script makes."""
    import stand_in_device
    import torch

    stand_in_device.load()
    name = stand_in_device.NAME

    def made(make: Any, *args: Any, **options: Any) -> Any:
        return make(*args, **{**options, "device": options.get("device") or name})

    def drawn(make: Any, *args: Any, **options: Any) -> Any:
        device = options.pop("device", None) or name
        return make(*args, **options).to(device)

    for each in (*_MAKERS, *_DRAWN):
        original = getattr(torch, each)
        wrapped = functools.partial(made if each in _MAKERS else drawn, original)
        setattr(torch, each, functools.wraps(original)(wrapped))
    to_numpy = torch.Tensor.numpy
    torch.Tensor.numpy = lambda tensor, **options: to_numpy(tensor.cpu(), **options)  # type: ignore[method-assign]


def _run_one(log_dir: str, script: str) -> int:
    """Run one script on the stand-in under ``mpinspect run``."""
    from mpinspect.commands.cli import main

    _prepare()
    with tempfile.TemporaryDirectory() as folder:
        # Some import their neighbours.
        for path in Path(script).parent.glob("*.py"):
            shutil.copy(path, folder)
        copy = Path(folder, Path(script).name)
        copy.write_text(_OF_CPU.sub(r'\1"standin"', copy.read_text("utf-8")), "utf-8")
        return main(["run", "--log-dir", log_dir, str(copy)])


def main() -> int:
    if sys.argv[1:2] == ["--one"]:
        return _run_one(*sys.argv[2:])
    sys.path.insert(0, str(FAULTS))
    import gallery

    gallery.LAUNCHER = (str(Path(__file__).resolve()), "--one")
    return gallery.main()


if __name__ == "__main__":
    sys.exit(main())
