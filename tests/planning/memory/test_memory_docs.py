"""docs/planning-memory.md names every term that the planner can print, and every rule."""

from __future__ import annotations

import ast
from pathlib import Path

import hpcrl
from hpcrl.jobplan.model_rules import MODEL_RULES

PLANNING = Path(hpcrl.__file__).parent / "planning"
DOCS = (Path(__file__).parents[3] / "docs/planning-memory.md").read_text()


def _term_names() -> set[str]:
    """First argument of each `Term(...)` of the planner."""
    names = set()
    for path in (PLANNING / "memory").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Term":
                assert isinstance(node.args[0], ast.Constant), f"{path.name}:{node.lineno}"
                names.add(str(node.args[0].value))
    return names


def test_every_term_is_documented() -> None:
    assert len(_term_names()) > 40
    assert {name for name in _term_names() if name not in DOCS} == set()


def test_every_rule_is_documented() -> None:
    for rule in MODEL_RULES:
        assert f"| {rule.name} | {rule.conflict} | {rule.hint} |" in DOCS
