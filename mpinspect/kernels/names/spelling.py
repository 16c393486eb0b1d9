"""Reads names of kernels as compilers spell them: mangled, or with return type, template arguments and parameters."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

#: Itanium C++ ABI, 5.1: literals (Li128E, Lb0E), _Float16 and the like (DF16b), substitutions (S1_) and template parameters (T0_)
#: have digits that count no letters; the number of its letters stands before an identifier; I and J open template arguments.
_MANGLED = re.compile(r"L[a-z]n?\d*E|DF\d+[b_x]?|[ST][0-9A-Z]*_|(\d+)(?=[A-Za-z_])|([IJ])|.", re.DOTALL)

#: In front of the types of arguments that the CuTe DSL writes behind a Python function's name.
_ARGUMENTS_OF_PYTHON = "_object_at_"
_OPEN = "<({["

#: Letters of a name that are read. Its beginning says what a kernel is, and some patterns take time by the square of the length.
_MOST_READ = 4096


@dataclass(frozen=True, slots=True)
class Spelling:
    """A name in lower case, without its return type and its parameters, which repeat the template's types.

    Args:
        function: the function with its namespaces; the whole name where it is none of C++.
        arguments: the template arguments; "" without any.
        whole: both, followed by the mangled name where it was mangled.
    """

    function: str
    arguments: str
    whole: str

    @classmethod
    @lru_cache(maxsize=1 << 10)
    def of(cls, name: str) -> Spelling:
        """Read a name as a profiler wrote it."""
        name = name[:_MOST_READ]
        is_mangled = name.startswith("_Z")
        readable = (_demangled(name) if is_mangled else name).lower().replace("(anonymous namespace)::", "")
        function, arguments = _function_and_arguments(readable)
        whole = f"{function}<{arguments}" if function else readable
        # Traces cut names short, so that fewer letters than their number may follow.
        return cls(function or readable, arguments, f"{whole} {name.lower()}" if is_mangled else whole)


def _demangled(name: str) -> str:
    """Return a mangled name's namespaces, name and template arguments: "ck_tile::kentry<Rmsnorm2dFwd ..."."""
    path: list[str] = []
    arguments: list[str] = []
    found, position, is_nested = path, 2, name.startswith(("_ZN", "_ZLN"))
    while token := _MANGLED.match(name, position):
        position = token.end()
        if token[1]:
            end = position + int(token[1])
            found.append(name[position:end])
            position = end
            # Its arguments follow a name that is not nested.
            found = found if is_nested else arguments
        elif token[2] or (token[0] == "E" and path):
            found = arguments
    if not path:
        return name
    return "::".join(each for each in path if each != "_GLOBAL__N_1") + (
        f"<{' '.join(arguments)}>" if arguments else ""
    )


def _function_and_arguments(name: str) -> tuple[str, str]:
    """Return the function with its namespaces and its template arguments, each "" where absent; drop type and parameters."""
    path: list[str] = []
    arguments: list[str] = []
    brackets: list[str] = []
    for letter in name.partition(_ARGUMENTS_OF_PYTHON)[0]:
        if letter == "(" and path and not brackets:
            break
        if brackets:
            arguments.append(letter)
        if letter in _OPEN:
            brackets.append(letter)
        # A comparison within parentheses closes no template argument.
        elif letter in ")}]" or (letter == ">" and brackets[-1:] == ["<"]):
            del brackets[-1:]
        elif not brackets:
            if letter == " ":
                path.clear()
                arguments.clear()
            else:
                path.append(letter)
    return "".join(path), "".join(arguments)
