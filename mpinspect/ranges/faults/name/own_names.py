"""Writes the operands that stand in the user's own line into a finding's code, where the line has the operator just once."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from textwrap import indent

#: The signs of binary operators, by torch's names.
_SIGNS: Mapping[str, type[ast.operator]] = {
    "add": ast.Add,
    "sub": ast.Sub,
    "rsub": ast.Sub,
    "mul": ast.Mult,
    "div": ast.Div,
    "pow": ast.Pow,
    **dict.fromkeys(("mm", "bmm", "mv", "dot"), ast.MatMult),
}
#: Torch's names of operators, by the methods that code calls under another name.
_OPERATORS = {"norm": ("linalg_vector_norm",), "square": ("pow",), "matmul": ("mm", "bmm", "mv", "dot")}
#: The operands of methods with several tensors, by their names in the code of findings.
_SEVERAL = {"index_put": ("total", "index", "terms"), "index_add": ("total", "", "index", "terms")}
#: Other names for operands whose expressions use the names a, b or x themselves.
_OTHERS = {"a": "left", "b": "right", "x": "value"}
#: Modules whose functions take the tensor as their first argument.
_MODULES = re.compile(r"(torch|nn|F|functional)\b")
#: A cast to 16 bits, which code that computes in FP32 must not repeat.
_NARROWS = re.compile(r"\.(half|bfloat16|to|type)\(|float16")
#: The longest expression, in characters, that a sentence quotes.
_LONGEST = 40
#: Any cast.
_CASTS = re.compile(r"\.(float|double|half|bfloat16|to|type|type_as)\(|float(16|32|64)")
#: A comment above the addition to a stream in FP32, and a cast to the stream's dtype, which is FP32 there.
_TO_STREAM, _FOLLOWS = "# in each block\n", re.compile(r"\.to\([\w.]+\.dtype\)")
#: A line that assigns the result, the line that stands for the operators that take it, and a comment above operands.
_RESULT = re.compile(r"^ *(y|result|total|difference) = ", re.MULTILINE)
_TAKEN = re.compile(r"\bz = g\((y|result)\)")
#: The call of the operator as a method, at the end of a line.
_CALL = re.compile(r"(\S+)(?<!\btorch)\.\w+\([^()]*\)$", re.MULTILINE)
_BELOW = re.compile(r"^( *)# (?:from inputs in FP32|in each block)\n", re.MULTILINE)


@dataclass(frozen=True)
class _Use:
    """An operator in a line: its node, its operands by their names in a finding's code, and its form before and after x."""

    node: ast.expr
    operands: Mapping[str, ast.expr]
    before: str = ""
    after: str = ""


def with_own_names(code: str, source: str, operator: str) -> str:
    """Return a finding's code with the operands and the result of the user's line in place of a, b, x and y.

    The code is unchanged where the line is not a statement, where it has the operator not at all or several times, and where an
    operand is cast to 16 bits in it.

    Args:
        code: computes ``operator`` in a line "y = ..."; a line "z = g(y)" stands for the operators that take y. Operands are
            assigned below a comment "from inputs in FP32" or "in each block", or else before the code.
        source: the text of the line.
        operator: its name in torch.
    """
    statement = _statement(source)
    if statement is None:
        return code
    use = _only_use(statement, operator)
    if use is None or not _RESULT.search(code):
        return code
    is_elsewhere = not all(re.search(rf"\b{name}\b", code) for name in use.operands)
    operands = " ".join(map(ast.unparse, use.operands.values()))
    if is_elsewhere or _NARROWS.search(_FOLLOWS.sub("", operands) if _TO_STREAM in code else operands):
        return code
    if use.before or use.after:
        code = _CALL.sub(lambda found: f"{use.before}{found[1]}{use.after}", code, count=1)
    if any(isinstance(each, ast.Name) and each.id == "y" for each in ast.walk(statement)):
        # The user's own y is another value.
        code = re.sub(r"(?<![\w.])y\b", "result", code)
    return _with_result(_with_operands(code, source, use), source, statement, use)


def with_cast(source: str) -> str:
    """Return an assignment with its value cast to FP32; "" if the line is none, or has a cast of its own."""
    statement = _statement(source)
    if not isinstance(statement, ast.Assign) or _CASTS.search(value := ast.unparse(statement.value)):
        return ""
    whole = isinstance(statement.value, ast.Call | ast.Subscript | ast.Attribute)
    return f"{ast.unparse(statement.targets[0])} = {value if whole else f'({value})'}.float()"


def operand_in(source: str, operator: str, index: int) -> str:
    """Return an operand of an operator in a line, by its index, if it is short and can be followed by a method; "" otherwise.

    It is also "" where the line has the operator not at all or several times.
    """
    statement = _statement(source)
    use = None if statement is None else _only_use(statement, operator)
    operands = [] if use is None else [*use.operands.values()]
    if not 0 <= index < len(operands) or not isinstance(
        operands[index], ast.Name | ast.Attribute | ast.Subscript | ast.Call
    ):
        return ""
    own = ast.unparse(operands[index])
    return own if len(own) <= _LONGEST else ""


def _statement(source: str) -> ast.stmt | None:
    """Return the only statement of a line; None if the line is not a statement."""
    try:
        (statement,) = ast.parse(source).body
    except (SyntaxError, ValueError):
        return None
    return statement


def _only_use(statement: ast.stmt, operator: str) -> _Use | None:
    """Return the use of an operator in a statement; None if it has the operator not at all or several times."""
    uses = [use for node in ast.walk(statement) for use in _used(node, operator.strip("_"))]
    return uses[0] if len(uses) == 1 else None


def _used(node: ast.AST, operator: str) -> Iterator[_Use]:
    """Yield the use of an operator that a node is, if it is one."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, _SIGNS.get(operator, ())):
        if operator == "pow" and isinstance(node.left, ast.Constant):
            yield _Use(node, {"x": node.right}, before=f"{ast.unparse(node.left)} ** ")
        elif operator == "pow":
            yield _Use(node, {"x": node.left}, after=f".pow({ast.unparse(node.right)})")
        else:
            yield _Use(node, {"a": node.left, "b": node.right})
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return
    method = node.func.attr.rstrip("_")
    if operator not in (method, *_OPERATORS.get(method, ())):
        return
    given = [*node.args] if _MODULES.match(ast.unparse(node.func)) else [node.func.value, *node.args]
    names = _SEVERAL.get(operator, ("a", "b") if operator in _SIGNS and operator != "pow" else ("x",))
    if len(given) < len(names) or any(isinstance(each, ast.Starred) for each in given):
        return
    more = [*map(ast.unparse, given[1:]), *(ast.unparse(each) for each in node.keywords)]
    operands = {name: each for name, each in zip(names, given, strict=False) if name}
    yield _Use(node, operands, after=f".{method}({', '.join(more)})" * (names == ("x",)))


def _with_operands(code: str, source: str, use: _Use) -> str:
    """Return code with the operands: a name, or a number, in its place, another expression assigned before."""
    operands = use.operands
    mentioned = {each.id for one in operands.values() for each in ast.walk(one) if isinstance(each, ast.Name)}
    names, before = {}, ""
    for name, operand in operands.items():
        names[name] = ast.get_source_segment(source, operand) or name
        if isinstance(operand, ast.Constant):
            code = code.replace(f"{name}.float()", name)
        elif name in _OTHERS and not all(part.isidentifier() for part in names[name].split(".")):
            own = _OTHERS[name] if name in mentioned else name
            before += f"{own} = {names[name]}\n"
            names[name] = own
    code = re.sub(r"^ *[ab] = .*\n", "", code, flags=re.MULTILINE)
    code = re.sub(rf"(?<![\w.])({'|'.join(names)})\b(?! =)", lambda found: names[found[1]], code)
    if _BELOW.search(code):
        return _BELOW.sub(lambda found: found[0] + indent(before, found[1]), code)
    return before + code


def _with_result(code: str, source: str, statement: ast.stmt, use: _Use) -> str:
    """Return code whose result has the user's name, or is put in the place of the operator in the user's line."""
    result = _RESULT.search(code)
    if result is None:
        return code
    if isinstance(statement, ast.Assign) and statement.value is use.node and len(statement.targets) == 1:
        own = ast.unparse(statement.targets[0])
        return re.sub(rf"(?<![\w.]){result[1]}\b", lambda _: own, re.sub(rf"\n *{_TAKEN.pattern}", "", code))
    line, node = source.encode(), use.node
    taken = line[: node.col_offset] + result[1].encode() + line[node.end_col_offset :]
    return _TAKEN.sub(lambda _: taken.decode(), code)
