"""What the planner offers, plans use: a function whose only caller is a bench or a test is checked for nothing."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import hpcrl

PACKAGE = Path(hpcrl.__file__).parent


def names_used(tree: ast.AST, *, strings: bool) -> Iterator[str]:
    """Names that a module reads, or imports by another name; what it defines or lists in ``__all__`` is not read.

    With ``strings`` those, too.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            if isinstance(node.ctx, ast.Load):
                yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.ImportFrom):
            yield from (alias.name for alias in node.names if alias.asname)
        elif strings and isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_every_function_of_the_planner_has_a_caller_in_the_package() -> None:
    trees = {path: ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")}
    used = {
        name
        for path, tree in trees.items()
        # annotations of lazily imported names, and constants of calibration files, are strings
        for name in names_used(tree, strings=path.is_relative_to(PACKAGE / "cli"))
    }
    unused = []
    for path, tree in trees.items():
        if not path.is_relative_to(PACKAGE / "planning"):
            continue
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name not in used:
                decorated = isinstance(node, ast.FunctionDef) and node.decorator_list and node.name.startswith("_")
                if not decorated and not node.name.startswith("__"):
                    unused.append(f"{path.relative_to(PACKAGE)}: {node.name}")
    assert not unused


def test_every_number_of_a_calibration_file_is_used() -> None:
    from hpcrl.planning.calibration.calibration_file import ConstantName, EfficiencyName

    texts = [
        path.read_text() for path in PACKAGE.rglob("*.py") if path != PACKAGE / "planning" / "calibration" / "file.py"
    ]
    names = (*EfficiencyName.__args__, *ConstantName.__args__)  # type: ignore[attr-defined]
    assert [name for name in names if not any(f'"{name}"' in text for text in texts)] == []
