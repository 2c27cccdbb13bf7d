"""Bugs: small changes of the source text at the positions of syntax nodes, and removed functions.

A file keeps its formatting: nothing but the text of the changed nodes differs. So a bug cannot be found by looking for
reformatted code.
"""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass

_COMPARE = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
}
_BINARY = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "+"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "*"),
    ast.BitAnd: ("&", "|"),
    ast.BitOr: ("|", "&"),
}
_MAX_INT = 1 << 31


@dataclass(frozen=True, slots=True)
class Bug:
    """A change of one place of a file.

    Attributes
    ----------
    kind:
        Kind of the change: ``compare``, ``return``, ``removed`` …
    begin, end:
        Bytes of the file that are replaced.
    text:
        Replacement of these bytes.
    """

    kind: str
    begin: int
    end: int
    text: str


@dataclass(frozen=True, slots=True)
class SourceFunction:
    """A function that can get bugs.

    Attributes
    ----------
    path:
        File, relative to the repository.
    name:
        Qualified name inside of the file.
    line:
        First line, decorators included, as its code object has it.
    node:
        Its syntax.
    """

    path: str
    name: str
    line: int
    node: ast.FunctionDef | ast.AsyncFunctionDef


class SourceFile:
    """The text of a file with the functions that can be changed.

    Attributes
    ----------
    functions:
        Those of modules and classes, not those inside of other functions.
    """

    def __init__(self, path: str, text: str) -> None:
        """Parse a file; one that cannot be parsed has no functions."""
        self.path, self.text = path, text
        self._bytes = text.encode()
        self._starts = [0]
        for line in self._bytes.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))
        self.functions: list[SourceFunction] = []
        if re.search("[\x0b\x0c\x1c-\x1e\x85\u2028\u2029]", text):
            return  # lines of bytes and lines of the parser differ
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError, RecursionError):
            return
        self._collect(tree.body, "")

    def _collect(self, body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef):
                self._collect(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                line = node.decorator_list[0].lineno if node.decorator_list else node.lineno
                self.functions.append(SourceFunction(self.path, f"{prefix}{node.name}", line, node))

    def _span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        begin = self._starts[node.lineno - 1] + node.col_offset
        return begin, self._starts[node.end_lineno - 1] + node.end_col_offset

    def bugs(self, function: SourceFunction) -> list[Bug]:
        """Return all bugs of one place that a function can get, in the order of their places."""
        found: list[Bug] = []
        for statement in function.node.body[_has_docstring(function.node) :]:
            for node in _walk(statement):
                found += self._bugs_of(node)
        return sorted(found, key=lambda bug: (bug.begin, bug.end, bug.kind, bug.text))

    def removal(self, function: SourceFunction) -> Bug | None:
        """Return the bug that removes the body of a function; None where there is nothing to remove."""
        body = function.node.body[_has_docstring(function.node) :]
        if not body or (len(body) == 1 and isinstance(body[0], ast.Pass | ast.Raise)):
            return None
        begin, end = self._span(body[0])[0], self._span(body[-1])[1]
        if self._bytes[self._starts[body[0].lineno - 1] : begin].strip():
            return None  # on the line of its head
        return Bug("removed", begin, end, "raise NotImplementedError")

    def _bugs_of(self, node: ast.AST) -> Iterator[Bug]:
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            yield from self._operator("compare", node.left, node.comparators[0], _COMPARE.get(type(node.ops[0])))
        elif isinstance(node, ast.BinOp):
            yield from self._operator("arithmetic", node.left, node.right, _BINARY.get(type(node.op)))
        elif isinstance(node, ast.BoolOp):
            words = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
            if len(node.values) == 2:
                yield from self._operator("boolean", node.values[0], node.values[1], words)
        elif isinstance(node, ast.If) and not isinstance(node.test, ast.Constant):
            begin, end = self._span(node.test)
            yield Bug("condition", begin, end, f"not ({self._text(begin, end)})")
        elif isinstance(node, ast.Return) and node.value is not None and not _is_none(node.value):
            yield Bug("return", *self._span(node.value), "None")
        elif isinstance(node, ast.Constant):
            yield from self._constant(node)
        elif isinstance(node, ast.AugAssign):
            yield from self._augmented(node)
        elif isinstance(node, ast.Break):
            yield Bug("loop", *self._span(node), "continue")
        elif isinstance(node, ast.Call):
            yield from self._swapped(node)
        elif isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Attribute):
            yield Bug("assignment", *self._span(node.value), "None")

    def _text(self, begin: int, end: int) -> str:
        return self._bytes[begin:end].decode()

    def _operator(self, kind: str, left: ast.expr, right: ast.expr, words: tuple[str, str] | None) -> Iterator[Bug]:
        if words is None:
            return
        begin, end = self._span(left)[1], self._span(right)[0]
        between = self._text(begin, end)
        old, new = words
        # with anything but blanks around it (a comment, a bracket) the place of the operator is not sure
        if between.split() == old.split():
            at = begin + between.index(old.split()[0])
            after = begin + len(between.rstrip().encode())
            yield Bug(kind, at, after, new)

    def _constant(self, node: ast.Constant) -> Iterator[Bug]:
        span = self._span(node)
        if isinstance(node.value, bool):
            yield Bug("constant", *span, str(not node.value))
        elif isinstance(node.value, int) and 0 <= node.value < _MAX_INT and self._text(*span).isdecimal():
            yield Bug("constant", *span, str(node.value + 1))
            if node.value > 0:
                yield Bug("constant", *span, str(node.value - 1))

    def _augmented(self, node: ast.AugAssign) -> Iterator[Bug]:
        words = {ast.Add: ("+=", "-="), ast.Sub: ("-=", "+="), ast.BitOr: ("|=", "&=")}.get(type(node.op))
        yield from self._operator("arithmetic", node.target, node.value, words)

    def _swapped(self, node: ast.Call) -> Iterator[Bug]:
        if len(node.args) == 2 and not node.keywords and not any(isinstance(a, ast.Starred) for a in node.args):
            (begin, middle), (after, end) = self._span(node.args[0]), self._span(node.args[1])
            first, second = self._text(begin, middle), self._text(after, end)
            if first != second:
                yield Bug("arguments", begin, end, f"{second}{self._text(middle, after)}{first}")

    def changed(self, bugs: list[Bug]) -> str | None:
        """Return the text with bugs; None where they overlap, or the result is not valid Python."""
        parts: list[bytes] = []
        position = 0
        for bug in sorted(bugs, key=lambda each: each.begin):
            if bug.begin < position:
                return None
            parts += [self._bytes[position : bug.begin], bug.text.encode()]
            position = bug.end
        text = b"".join([*parts, self._bytes[position:]]).decode()
        try:
            compile(text, self.path, "exec", dont_inherit=True)
        except (SyntaxError, ValueError, RecursionError):
            return None
        return None if text == self.text else text


def mutate(file: SourceFile, function: SourceFunction, rng: random.Random, *, remove: bool) -> Bug | None:
    """Draw a bug of a function; each kind is as likely as any other. None where there is none."""
    if remove:
        return file.removal(function)
    by_kind: dict[str, list[Bug]] = {}
    for bug in file.bugs(function):
        by_kind.setdefault(bug.kind, []).append(bug)
    return rng.choice(by_kind[rng.choice(sorted(by_kind))]) if by_kind else None


def _has_docstring(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    first = node.body[0]
    return int(
        isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)
    )


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and those below it, without parts of formatted strings: Python 3.11 does not tell their places."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.JoinedStr):
            yield from _walk(child)
