"""The small wrong changes that are tried: each replaces one expression or statement of a module."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from dataclasses import dataclass

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
}
_FUNCTIONS = {"min": "max", "max": "min", "all": "any", "any": "all"}
#: calls whose positional arguments may come in any order (of these, only where no ``key`` decides between equals)
_ANY_ORDER = ("min", "max", "minimum", "maximum", "suppress")
#: calls that make names for type checkers
_FOR_TYPES = ("TypeVar", "ParamSpec", "NewType")
#: calls that say something and change nothing
_TALK = ("log", "_log", "logger", "_logger", "logging", "warnings", "console")
#: of which another function is an error that every test sees
_MODULES = ("torch", "np", "os", "ast", "time", "math", "dist", "F")
#: arguments that are text for people
_TEXTS = ("hint", "message", "help", "what")


@dataclass(frozen=True)
class Mutant:
    """One wrong change.

    Attributes
    ----------
    path, line:
        The module, relative to the checkout, and the line that is changed.
    function:
        Name of the innermost function or class around it; empty at the level of the module.
    function_line:
        First line of the innermost function, decorators included; 0 outside of functions.
    kind:
        The operator.
    before, after:
        Source of what is replaced, and of what takes its place.
    start, end:
        Where it stands, as offsets in bytes.
    """

    path: str
    line: int
    function: str
    function_line: int
    kind: str
    before: str
    after: str
    start: int
    end: int

    @property
    def name(self) -> str:
        """Return what names the mutant in a list of survivors: it does not change with the lines around it."""
        return f"{self.path}::{self.function}: {self.kind}: {self.before} -> {self.after}"

    def apply(self, source: bytes) -> bytes:
        return source[: self.start] + self.after.encode() + source[self.end :]


def mutants_of(path: str, source: str) -> Iterator[Mutant]:
    """Yield all mutants of a module, in the order of its text."""
    walk = _Walk(path, source)
    walk.block(ast.parse(source).body, "", 0, ())
    yield from walk.found


class _Walk:
    def __init__(self, path: str, source: str) -> None:
        self.path, self._source = path, source.encode()
        lines = self._source.splitlines(keepends=True)
        self._begins = [0]
        for line in lines:
            self._begins.append(self._begins[-1] + len(line))
        self.found: list[Mutant] = []

    def block(self, body: list[ast.stmt], name: str, line: int, attributes: tuple[ast.Attribute, ...]) -> None:
        for statement in body:
            self._statement(statement, name, line, attributes)

    def _statement(self, node: ast.stmt, name: str, line: int, attributes: tuple[ast.Attribute, ...]) -> None:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
                within = tuple(each for each in ast.walk(node) if isinstance(each, ast.Attribute))
                self.block(node.body, f"{name}.{node.name}" if name else node.name, first, within)
            case ast.ClassDef():
                self.block(node.body, f"{name}.{node.name}" if name else node.name, line, attributes)
            case ast.Import() | ast.ImportFrom() | ast.Assert() | ast.Global() | ast.Nonlocal() | ast.Pass():
                pass
            case ast.If(test=ast.Name(id="TYPE_CHECKING")) | ast.If(test=ast.Attribute(attr="TYPE_CHECKING")):
                pass
            case _ if _only_talks(node) or _is_for_types(node):
                pass
            case _:
                self._removed(node, name, line)
                self._parts(node, name, line, attributes)

    def _removed(self, node: ast.stmt, name: str, line: int) -> None:
        removable = ast.Expr | ast.AugAssign | ast.Raise | ast.Continue | ast.Break | ast.Delete
        attribute = isinstance(node, ast.Assign) and not isinstance(node.targets[0], ast.Name | ast.Tuple)
        if line and (isinstance(node, removable) or attribute):
            self._add(node, name, line, "statement removed", "pass")
        if line and isinstance(node, ast.Return) and node.value is not None:
            none = isinstance(node.value, ast.Constant) and node.value.value is None
            if not none:
                self._add(node.value, name, line, "return value", "None")

    def _parts(self, node: ast.AST, name: str, line: int, attributes: tuple[ast.Attribute, ...]) -> None:
        """Go through the expressions of a statement, and the statements within."""
        for field, value in ast.iter_fields(node):
            if field in ("annotation", "type_comment", "type_params", "exc", "cause"):
                continue
            for each in value if isinstance(value, list) else [value]:
                if isinstance(each, ast.stmt):
                    self._statement(each, name, line, attributes)
                elif isinstance(each, ast.keyword) and (each.arg in _TEXTS):
                    continue
                elif isinstance(each, ast.AST) and not isinstance(each, ast.JoinedStr):
                    if isinstance(each, ast.expr):
                        self._expression(each, name, line, attributes)
                    self._parts(each, name, line, attributes)

    def _expression(self, node: ast.expr, name: str, line: int, attributes: tuple[ast.Attribute, ...]) -> None:
        for kind, changed in _changed(node, attributes):
            self._add(node, name, line, kind, _text(changed))

    def _add(self, node: ast.expr | ast.stmt, name: str, line: int, kind: str, after: str) -> None:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start = self._begins[node.lineno - 1] + node.col_offset
        end = self._begins[node.end_lineno - 1] + node.end_col_offset
        before = self._source[start:end].decode()
        if " ".join(before.split()) != " ".join(after.split()):
            self.found.append(Mutant(self.path, node.lineno, name, line, kind, before, after, start, end))


def _changed(node: ast.expr, attributes: tuple[ast.Attribute, ...]) -> Iterator[tuple[str, ast.expr]]:
    """Yield each wrong form of one expression."""
    match node:
        case ast.Constant():
            yield from _other_constant(node)
        case ast.Call():
            yield from _other_call(node)
        case ast.Attribute(value=ast.Name(id=owner), ctx=ast.Load()) if owner not in _MODULES:
            yield from _other_attribute(node, owner, attributes)
        case _:
            yield from _other_operation(node)


def _other_operation(node: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    match node:
        case ast.Compare(ops=[op]) if type(op) in _COMPARISONS:
            yield "comparison", _with(node, ops=[_COMPARISONS[type(op)]()])
        case ast.BinOp(op=op) if type(op) in _ARITHMETIC and not _is_text(node.left) and not _is_text(node.right):
            yield "arithmetic", _with(node, op=_ARITHMETIC[type(op)]())
        case ast.BoolOp(op=op):
            yield "and, or", _with(node, op=ast.Or() if isinstance(op, ast.And) else ast.And())
            for i in range(len(node.values)):
                rest = [value for j, value in enumerate(node.values) if j != i]
                yield "part left out", rest[0] if len(rest) == 1 else _with(node, values=rest)
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            yield "negation", operand
        case ast.IfExp():
            yield "branches swapped", _with(node, body=node.orelse, orelse=node.body)


def _other_constant(node: ast.Constant) -> Iterator[tuple[str, ast.expr]]:
    match node.value:
        case bool(value):
            yield "constant", ast.Constant(not value)
        case int(value):
            yield "constant", ast.Constant(value + 1)
        case float(value):
            yield "constant", ast.Constant(value * 2 if value else 1.0)


def _other_call(node: ast.Call) -> Iterator[tuple[str, ast.expr]]:
    if isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS:
        yield "function", _with(node, func=ast.Name(_FUNCTIONS[node.func.id]))
    for i, keyword in enumerate(node.keywords):
        if keyword.arg is not None and keyword.arg not in _TEXTS and not _is_default(keyword):
            yield "argument left out", _with(node, keywords=node.keywords[:i] + node.keywords[i + 1 :])
    if len(node.args) > 1 and not any(isinstance(each, ast.Starred) for each in node.args[:2]) and _has_order(node):
        yield "arguments swapped", _with(node, args=[node.args[1], node.args[0], *node.args[2:]])


def _is_default(keyword: ast.keyword) -> bool:
    """Return whether an argument only says what holds without it: linters want ``zip`` to say that it is not strict."""
    return keyword.arg == "strict" and isinstance(keyword.value, ast.Constant) and keyword.value.value is False


def _has_order(node: ast.Call) -> bool:
    """Return whether a call with its first two arguments swapped may mean something else."""
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    return name not in _ANY_ORDER or any(keyword.arg == "key" for keyword in node.keywords)


def _other_attribute(
    node: ast.Attribute, owner: str, attributes: tuple[ast.Attribute, ...]
) -> Iterator[tuple[str, ast.expr]]:
    """Take the next attribute, by name, that the same function reads of the same object."""
    read = (each for each in attributes if isinstance(each.ctx, ast.Load) and isinstance(each.value, ast.Name))
    names = sorted({each.attr for each in read if isinstance(each.value, ast.Name) and each.value.id == owner})
    if len(names) > 1:
        yield "other attribute", _with(node, attr=names[(names.index(node.attr) + 1) % len(names)])


def _with(node: ast.expr, **fields: object) -> ast.expr:
    changed = copy.copy(node)
    for name, value in fields.items():
        setattr(changed, name, value)
    return changed


def _text(node: ast.expr) -> str:
    text = ast.unparse(node)
    return text if isinstance(node, ast.Name | ast.Attribute | ast.Call | ast.Constant) else f"({text})"


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _only_talks(node: ast.stmt) -> bool:
    """Return whether a statement is a docstring or a message for people."""
    if not isinstance(node, ast.Expr):
        return isinstance(node, ast.Assign | ast.AnnAssign) and _is_dunder(node)
    value = node.value
    if isinstance(value, ast.Constant):
        return True
    function = value.func if isinstance(value, ast.Call) else None
    while isinstance(function, ast.Attribute | ast.Call):
        if isinstance(function, ast.Attribute) and function.attr in _TALK:
            return True
        function = function.func if isinstance(function, ast.Call) else function.value
    return isinstance(function, ast.Name) and function.id in _TALK


def _is_for_types(node: ast.stmt) -> bool:
    """Return whether a statement makes a name that type checkers alone look at."""
    function = node.value.func if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) else None
    return isinstance(function, ast.Name) and function.id in _FOR_TYPES


def _is_dunder(node: ast.Assign | ast.AnnAssign) -> bool:
    target = node.targets[0] if isinstance(node, ast.Assign) else node.target
    return isinstance(target, ast.Name) and target.id.startswith("__")
