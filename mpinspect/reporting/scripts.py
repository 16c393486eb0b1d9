"""Scripts of pages: ES modules in a folder, joined into the one module that a page without requests can hold."""

from __future__ import annotations

import re
from importlib import resources

_IMPORT = re.compile(r'^(?:import|export) \{[^}]*\} from "\./([\w-]+)\.js";\n', re.MULTILINE)
_CHECKED = re.compile(r"^// @ts-check\n", re.MULTILINE)


def bundled(package: str, name: str) -> str:
    """Return the module ``name``.js of a package's folder ``name``_js, after the modules that it imports, as one module.

    Imports name their objects in braces, and no two modules share a top-level name.
    """
    folder = resources.files(package).joinpath(f"{name}_js")
    parts: dict[str, str] = {}

    def add(module: str) -> None:
        text = folder.joinpath(f"{module}.js").read_text("utf-8")
        for imported in _IMPORT.findall(text):
            if imported not in parts:
                add(imported)
        parts[module] = _CHECKED.sub("", _IMPORT.sub("", text))

    add(name)
    return "\n".join(parts.values())
