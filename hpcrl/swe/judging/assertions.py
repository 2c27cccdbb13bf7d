"""Assertions of tests: the values that they compare, and another literal in the place of one of them."""

from __future__ import annotations

import ast
import math
import random


def compared(statement: ast.stmt) -> tuple[ast.expr, tuple[ast.expr, ast.expr] | None]:
    """Return what an assertion asserts, and the two values that it compares for equality; None where it does not.

    Parameters
    ----------
    statement:
        An ``assert``, or a call of ``self.assertEqual``, ``self.assertTrue`` or ``self.assertFalse``.
    """
    if isinstance(statement, ast.Assert):
        whole = statement.test
        if isinstance(whole, ast.Compare) and len(whole.ops) == 1 and isinstance(whole.ops[0], ast.Eq):
            return whole, (whole.left, whole.comparators[0])
        return whole, None
    assert isinstance(statement, ast.Expr)
    assert isinstance(statement.value, ast.Call)
    given = statement.value.args
    return given[0], (given[0], given[1]) if len(given) >= 2 else None


def other_literal(node: ast.expr, rng: random.Random) -> str | None:
    """Return the text of another literal of the same type; None where a node is no literal of which that is sure.

    Code under test cannot tell a test with it from one with the right literal, unless it knows that one. A number is
    far away, because wrong code may give the next one.
    """
    value, number = getattr(node, "value", None) if isinstance(node, ast.Constant) else None, rng.randrange(100, 1000)
    if isinstance(value, float) and math.isfinite(value):
        return repr(-value - number - 0.125)
    if isinstance(value, int) and not isinstance(value, bool):
        return repr(value + number)
    if isinstance(value, str):
        return repr(f"{value}{number}")
    return repr(value + b"%d" % number) if isinstance(value, bytes) else None
