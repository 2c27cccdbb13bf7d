"""What is said of a checker that cannot be made."""

from __future__ import annotations

__all__ = ["CheckerNotMadeError"]


class CheckerNotMadeError(Exception):
    """A checker cannot be made: what is wrong, and a hint."""

    def __init__(self, what: str, hint: str) -> None:
        super().__init__(what)
        self.what, self.hint = what, hint
