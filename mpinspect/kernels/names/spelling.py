"""Parse kernel names as compilers write them: mangled, or with return type, template arguments and parameters."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from mpinspect.reporting.words import filled

#: Itanium C++ ABI, 5.1: an identifier follows the number of its letters; I and J open template arguments. The digits in literals
#: (Li128E, Lb0E), _Float16 and the like (DF16b), substitutions (S1_) and template parameters (T0_) are not such numbers.
_MANGLED = re.compile(r"L[a-z]n?\d*E|DF\d+[b_x]?|[ST][0-9A-Z]*_|(\d+)(?=[A-Za-z_])|([IJ])|.", re.DOTALL)

#: The CuTe DSL writes this between a Python function's name and the types of its arguments.
_ARGUMENTS_OF_PYTHON = re.compile(r"_object_at_|(?<=kernel)_tensorptr")
#: Before that: a method, its module's path without dots, and its class. The path gives only the file's location.
_METHOD_OF_CLASS = re.compile(
    r"kernel_cutlass_(\w+?(?=___main__)|(?:[a-z0-9_]*?_)??kernel(?:_impl)?|)[a-z0-9_]*?_*([A-Z]\w*?)_(?:object_at_|o?b?j?e?c?t?_?a?t?$)"
)
#: Where a word begins within a name: SparseMLADecode, Sm100Gemm, MoESwap.
_WORD = re.compile(r"(?<=[a-z0-9])(?!(?<=Mo)E)(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_OPEN = "<({["

#: Maximum number of letters read. A name's start identifies the kernel, and some patterns take quadratic time in the length.
_MOST_READ = 4096


@dataclass(frozen=True, slots=True)
class Spelling:
    """A name in lower case, without its return type and its parameters, which repeat the template's types.

    Args:
        function: the function with its namespaces; the whole name if it is not a C++ name.
        arguments: the template arguments; "" without any.
        whole: both, followed by the mangled name if the name was mangled.
    """

    function: str
    arguments: str
    whole: str

    @classmethod
    @lru_cache(maxsize=1 << 10)
    def of(cls, name: str) -> Spelling:
        """Parse a name as a profiler wrote it."""
        name = name[:_MOST_READ]
        is_mangled = name.startswith("_Z")
        if method := _METHOD_OF_CLASS.match(name):
            function = f"kernel_cutlass_{method[1]}::{_WORD.sub('_', method[2])}".lower()
            return cls(function, "", function)
        readable = (_demangled(name) if is_mangled else name).lower().replace("(anonymous namespace)::", "")
        function, arguments = _function_and_arguments(readable)
        whole = f"{function}<{arguments}" if function else readable
        if is_mangled:
            # Traces truncate names, so an identifier may have fewer letters than its number states.
            whole = f"{whole} {name.lower()}"
        return cls(function or readable, arguments, whole)


def with_words_apart(name: str) -> str:
    """Return the function with "_" before each word that only a capital begins (sumChannelsNCHWKernel); "" without one.

    A method of a class, whose path proves nothing, gives "" too: its class is already read in words.
    """
    name = name[:_MOST_READ]
    if _METHOD_OF_CLASS.match(name):
        return ""
    readable = _demangled(name) if name.startswith("_Z") else name
    apart = _WORD.sub("_", readable)
    return "" if apart == readable else _function_and_arguments(apart.lower())[0]


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
            if not is_nested:
                # The template arguments follow.
                found = arguments
        elif token[2] or (token[0] == "E" and path):
            found = arguments
    if not path:
        return name
    readable = "::".join(each for each in path if each != "_GLOBAL__N_1")
    return readable + filled("<{}>", " ".join(arguments))


def _function_and_arguments(name: str) -> tuple[str, str]:
    """Return the function with its namespaces, and its template arguments ("" if absent), without type and parameters."""
    path: list[str] = []
    arguments: list[str] = []
    brackets: list[str] = []
    for letter in _ARGUMENTS_OF_PYTHON.split(name, maxsplit=1)[0]:
        if letter == "(" and path and not brackets:
            break
        if brackets:
            arguments.append(letter)
        if letter in _OPEN:
            brackets.append(letter)
        # A ">" within parentheses is a comparison and closes no template argument.
        elif letter in ")}]" or (letter == ">" and brackets[-1:] == ["<"]):
            del brackets[-1:]
        elif not brackets:
            if letter == " ":
                path.clear()
                arguments.clear()
            else:
                path.append(letter)
    return "".join(path), "".join(arguments)
