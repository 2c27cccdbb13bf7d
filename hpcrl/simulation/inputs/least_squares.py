"""Least squares without numpy: few unknowns, none negative."""

from __future__ import annotations

from collections.abc import Sequence


def least_squares(rows: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    """Return the coefficients with the smallest sum of squared errors of ``rows · coefficients ≈ values``.

    No coefficient is below 0.

    Where the best coefficient of a column is negative, the column is left out (its coefficient is 0) and the others
    are fitted again.
    """
    n = len(rows[0])
    scale = [max((abs(row[i]) for row in rows), default=0.0) or 1.0 for i in range(n)]
    products = [[sum(row[i] * row[j] for row in rows) / scale[i] / scale[j] for j in range(n)] for i in range(n)]
    targets = [sum(row[i] * value for row, value in zip(rows, values, strict=True)) / scale[i] for i in range(n)]
    columns = list(range(n))
    while columns:
        found = _solve([[products[i][j] for j in columns] + [targets[i]] for i in columns])
        worst = min(range(len(columns)), key=lambda i: found[i])
        if found[worst] >= 0:
            by_column = dict(zip(columns, found, strict=True))
            return [by_column.get(c, 0.0) / scale[c] for c in range(n)]
        del columns[worst]
    return [0.0] * n


def _solve(matrix: list[list[float]]) -> list[float]:
    """Solve by Gaussian elimination with pivots; an unknown that the equations do not determine is 0."""
    n = len(matrix)
    limit = 1e-9 * max((matrix[i][i] for i in range(n)), default=1.0)
    pivots: list[tuple[int, int]] = []
    free = set(range(n))
    for column in range(n):
        pivot = max(free, key=lambda i: abs(matrix[i][column]))
        if abs(matrix[pivot][column]) <= limit:
            continue
        free.discard(pivot)
        pivots.append((pivot, column))
        for i in range(n):
            if i != pivot:
                factor = matrix[i][column] / matrix[pivot][column]
                matrix[i] = [a - factor * b for a, b in zip(matrix[i], matrix[pivot], strict=True)]
    solution = [0.0] * n
    for row, column in pivots:
        solution[column] = matrix[row][n] / matrix[row][column]
    return solution
