"""Where packages of Node.js are installed: by the Makefile, or where ``NODE_PATH`` points."""

import os
from pathlib import Path

NODE_PLACES = [
    Path(__file__).parents[1] / ".venv" / "js" / "node_modules",
    *map(Path, filter(None, os.environ.get("NODE_PATH", "").split(os.pathsep))),
]
