"""What the planner offers, plans use: a function whose only caller is a bench or a test is checked for nothing."""

from __future__ import annotations

import ast
from pathlib import Path

import hpcrl

PACKAGE = Path(hpcrl.__file__).parent


def names_used(tree: ast.AST) -> set[str]:
    """Names that a module reads, or imports by another name; what it defines or lists in ``__all__`` is not read."""
    aliased = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname
    }
    found = aliased | {
        node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
    }
    return found | {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}


def test_every_function_of_the_planner_has_a_caller_in_the_package() -> None:
    trees = {path: ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")}
    used = set().union(*(names_used(tree) for tree in trees.values()))
    used |= {
        # annotations of lazily imported names, and constants of calibration files, are strings
        node.value
        for path, tree in trees.items()
        if path.is_relative_to(PACKAGE / "cli")
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
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
    from hpcrl.planning.calibration.file import ConstantName, EfficiencyName

    texts = [
        path.read_text() for path in PACKAGE.rglob("*.py") if path != PACKAGE / "planning" / "calibration" / "file.py"
    ]
    names = (*EfficiencyName.__args__, *ConstantName.__args__)  # type: ignore[attr-defined]
    assert [name for name in names if not any(f'"{name}"' in text for text in texts)] == []
