"""The text of a test file, with edits at the positions of its nodes; nothing else of it is changed."""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from hpcrl.swe.judging.assertions import compared, other_literal


@dataclass(frozen=True, slots=True)
class TextEdit:
    """Replace the bytes ``[begin, end)`` of a file."""

    begin: int
    end: int
    text: str


class EditableTests:
    """The text of a test file with the positions of its tests.

    Attributes
    ----------
    tree:
        Its syntax tree; None where this interpreter cannot parse it.
    copyable:
        Functions that can be copied with an assertion that is then false, as ``Class::function``.
    """

    def __init__(self, path: str, text: str) -> None:
        self.path, self._text = path, text
        self._bytes = text.encode()
        self._starts = [0]
        for line in self._bytes.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))
        self.copyable: dict[str, ast.FunctionDef] = {}
        self._definitions: dict[str, list[ast.FunctionDef | ast.AsyncFunctionDef]] = {}
        self.tree: ast.Module | None = None
        # other characters that end a line for Python's bytes, and not for its parser, would move positions
        if re.search("[\x0b\x0c\x1c-\x1e\x85\u2028\u2029]", text):
            return
        try:
            self.tree = ast.parse(text)
        except (SyntaxError, ValueError, RecursionError):
            return
        self._walk(self.tree.body, "")

    def _walk(self, body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef):
                self._walk(node.body, f"{prefix}{node.name}::")
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                self._definitions.setdefault(node.name, []).append(node)
                if isinstance(node, ast.FunctionDef) and self._can_copy(node):
                    self.copyable[f"{prefix}{node.name}"] = node

    def _position(self, line: int, column: int) -> int:
        return self._starts[line - 1] + column

    def _span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._position(node.lineno, node.col_offset), self._position(node.end_lineno, node.end_col_offset)

    def _text_of(self, node: ast.expr) -> str:
        begin, end = self._span(node)
        return self._bytes[begin:end].decode()

    def defines(self, name: str) -> bool:
        """Return whether a function of this name is defined in the file."""
        return name in self._definitions

    def can_rename(self, name: str) -> bool:
        """Return whether a function is named where it is defined, and nowhere else in the file."""
        defined = len(self._definitions.get(name, ()))
        return defined > 0 and len(re.findall(rf"\b{re.escape(name)}\b", self._text)) == defined

    def renaming(self, old: str, new: str) -> Iterator[TextEdit]:
        """Yield the edits that rename a function."""
        for node in self._definitions[old]:
            begin = self._name_position(node)
            yield TextEdit(begin, begin + len(old.encode()), new)

    def _name_position(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
        begin = self._position(node.lineno, node.col_offset)
        found = re.compile(rb"(?:async\s+)?def\s+").match(self._bytes, begin)
        assert found is not None
        return found.end()

    def _can_copy(self, node: ast.FunctionDef) -> bool:
        first = node.decorator_list[0].lineno if node.decorator_list else node.lineno
        before = self._bytes[self._starts[first - 1] : self._starts[first]][: node.col_offset]
        assert node.end_lineno is not None
        after = self._bytes[self._position(node.end_lineno, node.end_col_offset or 0) : self._starts[node.end_lineno]]
        if before.strip() or (after.strip() and not after.strip().startswith(b"#")):
            return False  # it shares a line with something else
        if not node.name.startswith("test") or not all(map(_is_parametrize, node.decorator_list)):
            return False
        # a copy that ends before its assertion would pass
        inner = list(ast.walk(node))
        if any(isinstance(each, ast.Return | ast.Yield | ast.YieldFrom | ast.Await) for each in inner):
            return False
        words = {each.attr for each in inner if isinstance(each, ast.Attribute)}
        words |= {each.id for each in inner if isinstance(each, ast.Name)}
        if words & {"skip", "skipTest", "xfail", "importorskip", "exit", "hypothesis", "given"}:
            return False
        return any(_is_changeable(statement) for statement in node.body)

    def copies(
        self, function: str, names: Iterable[str], real: tuple[str, str], false: tuple[str, str], rng: random.Random
    ) -> list[TextEdit]:
        """Return the edits that add copies of a function, in each of which one assertion is false.

        Parameters
        ----------
        function:
            One of `copyable`.
        names:
            Name of each copy.
        real, false:
            Text around a value of such an assertion: in the function, and in its copies.
        """
        node = self.copyable[function]
        first = node.decorator_list[0].lineno if node.decorator_list else node.lineno
        assert node.end_lineno is not None
        begin, end = self._starts[first - 1], self._starts[node.end_lineno]
        at = self._name_position(node)
        same, falsified = list[TextEdit](), list[TextEdit]()
        before = after = ""
        for name in names:
            # one value of the function has a call around it, and all its copies have theirs there
            if not same:
                same, falsified = self._falsify(_to_change(node.body, rng), real, false, rng)
            text = _apply(self._bytes, [TextEdit(at, at + len(node.name.encode()), name), *falsified], begin, end)
            if not text.endswith("\n"):
                text += "\n"
            if rng.random() < 0.5:
                before += text + "\n"
            else:
                after += "\n" + text
        newline = "" if self._bytes[:end].endswith(b"\n") else "\n"
        return [*same, TextEdit(begin, begin, before), TextEdit(end, end, newline + after)]

    def _falsify(
        self, statement: ast.stmt, real: tuple[str, str], false: tuple[str, str], rng: random.Random
    ) -> tuple[list[TextEdit], list[TextEdit]]:
        """Return edits that leave the assertion of a statement as it is, and others after which it is false."""
        whole, pair = compared(statement)
        for each in rng.sample(pair, 2) if pair is not None else ():
            if (literal := other_literal(each, rng)) is not None:
                return [], [TextEdit(*self._span(each), literal)]
        if pair is not None:
            begin, end = self._span(rng.choice(pair))
            same, falsified = ([TextEdit(begin, begin, text[0]), TextEdit(end, end, text[1])] for text in (real, false))
            return same, falsified
        # the asserted expression is evaluated, but its value is not used: with wrong code it may be true or false
        begin, end = self._span(whole)
        left, right = rng.sample(range(1000, 10_000), 2)
        is_false = isinstance(statement, ast.Expr) and ast.unparse(statement.value.func).endswith("assertFalse")  # type: ignore[attr-defined]
        return [], [TextEdit(begin, begin, "("), TextEdit(end, end, f", {left})[1] == {left if is_false else right}")]

    def edited(self, edits: list[TextEdit]) -> str:
        """Return the text with edits."""
        text = _apply(self._bytes, edits, 0, len(self._bytes))
        return text if text.endswith("\n") else f"{text}\n"


def _apply(content: bytes, edits: list[TextEdit], begin: int, end: int) -> str:
    """Return a part of the content with edits, which do not overlap."""
    parts, position = [], begin
    for edit in sorted(edits, key=lambda each: (each.begin, each.end)):
        parts += [content[position : edit.begin], edit.text.encode()]
        position = edit.end
    return b"".join([*parts, content[position:end]]).decode()


def _is_parametrize(decorator: ast.expr) -> bool:
    """Return whether a decorator gives parameters, and no marks for some of them."""
    if not isinstance(decorator, ast.Call) or not isinstance(decorator.func, ast.Attribute):
        return False
    if decorator.func.attr != "parametrize" or not decorator.args:
        return False
    return not any(isinstance(each, ast.Attribute) and each.attr == "mark" for each in ast.walk(decorator.args[-1]))


def _to_change(body: list[ast.stmt], rng: random.Random) -> ast.stmt:
    """Return an assertion to be made false; one with a literal, if there is any."""
    known = [each for each in body if _is_changeable(each)]
    pairs = [(each, compared(each)[1] or ()) for each in known]
    literal = [each for each, pair in pairs if any(other_literal(value, rng) is not None for value in pair)]
    return rng.choice(literal or known)


def _is_changeable(statement: ast.stmt) -> bool:
    """Return whether an assertion can be made false without knowing what it asserts."""
    if isinstance(statement, ast.Assert):
        return not any(isinstance(each, ast.NamedExpr | ast.Yield) for each in ast.walk(statement.test))
    if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Call):
        return False
    call = statement.value
    if not isinstance(call.func, ast.Attribute) or not isinstance(call.func.value, ast.Name) or call.keywords:
        return False
    if any(isinstance(each, ast.Starred) for each in call.args) or call.func.value.id != "self":
        return False
    method = call.func.attr
    return (method in ("assertEqual", "assertEquals") and len(call.args) in (2, 3)) or (
        method in ("assertTrue", "assertFalse") and len(call.args) == 1
    )
