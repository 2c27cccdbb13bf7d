"""Error of a checker that cannot be made."""

from __future__ import annotations


class CheckerNotMadeError(Exception):
    """Raised where a checker cannot be made; has a problem and a hint."""

    def __init__(self, what: str, hint: str) -> None:
        super().__init__(what)
        self.what, self.hint = what, hint
