"""Documentation of the fields of a model, read on demand from the strings below them in the source.

Pydantic would do so for each class when it is made (``use_attribute_docstrings``), which is a quarter of the import
time of the models: in every command, and in every process of a run.
"""

from __future__ import annotations

import ast
import inspect
import sys
from functools import cache
from itertools import pairwise

from pydantic import BaseModel


@cache
def meanings_of(model: type[BaseModel]) -> dict[str, str]:
    """Return the documentation of fields by their names, including inherited ones; without fields that have none."""
    found: dict[str, str] = {}
    for base in reversed(model.__mro__):
        if issubclass(base, BaseModel) and base is not BaseModel:
            found |= _written_in(base.__module__).get(base.__qualname__, {})
    return found


@cache
def _written_in(module: str) -> dict[str, dict[str, str]]:
    """Give what is written of all classes of a module; nothing where its source is not there."""
    try:
        source = inspect.getsource(sys.modules[module])
    except OSError:
        return {}
    classes = (node for node in ast.parse(source).body if isinstance(node, ast.ClassDef))
    return {node.name: dict(_below_fields(node.body)) for node in classes}


def _below_fields(body: list[ast.stmt]) -> list[tuple[str, str]]:
    found = []
    for field, below in pairwise(body):
        match field, below:
            case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                found.append((name, inspect.cleandoc(text)))
    return found
