"""Results of a run of tests, as its program signed them. The output is foreign: tested code may have written to it."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from dataclasses import dataclass, field

from hpcrl.reporting.screen_text import visible_line

_OUTCOMES = frozenset("PFS")
_SHOWN = 200


@dataclass(slots=True)
class RunRecords:
    """Report of a run of tests.

    Attributes
    ----------
    started:
        Pytest was there; nothing of the tested code was imported before that.
    outcomes:
        ``P`` (passed), ``F`` (failed) or ``S`` (skipped) by the id of the test in this run.
    messages:
        First lines of failures, by id.
    code:
        Exit code that the run announced at its end; None where it did not come to its end.
    forged:
        Reasons why the output cannot be that of the program alone.
    head:
        Output before the first record.
    """

    started: bool = False
    outcomes: dict[str, str] = field(default_factory=dict)
    messages: dict[str, str] = field(default_factory=dict)
    code: int | None = None
    forged: list[str] = field(default_factory=list)
    head: str = ""

    def passed(self, test: str) -> bool:
        """Return whether a test has passed; one without an outcome has failed."""
        return self.code is not None and self.outcomes.get(test) == "P"


def read_verdicts(output: bytes, key: bytes, tests: Sequence[str]) -> RunRecords:
    """Read the records of a run.

    Parameters
    ----------
    key:
        Secret of the run.
    tests:
        Ids in the order in which they were asked for; records have their numbers.
    """
    found = RunRecords()
    number = 0
    lines = output.split(b"\n")
    for place, line in enumerate(lines):
        if not found.started and not _is_signed(line, key):
            found.head += visible_line(line.decode("utf-8", "replace"), _SHOWN) + "\n"
            continue
        if not line and place == len(lines) - 1:
            break
        if not _is_signed(line, key):
            found.forged.append("the channel has a line that is not signed")
            break
        head, kind, text = line.rpartition(b" ")[0].split(b" ", 2)
        if head != b"%d" % number:
            found.forged.append("a record is missing, or is there twice")
            break
        number += 1
        _take(found, kind, text.decode("utf-8", "replace"), tests)
    return found


def _is_signed(line: bytes, key: bytes) -> bool:
    record, _, signature = line.rpartition(b" ")
    if record.count(b" ") < 2:
        return False
    return hmac.compare_digest(hashlib.blake2b(record, key=key, digest_size=16).hexdigest().encode(), signature)


def _take(found: RunRecords, kind: bytes, text: str, tests: Sequence[str]) -> None:
    """Take one record, whose signature is right."""
    if found.code is not None:
        found.forged.append("there is a record after the end")
    elif kind == b"ready":
        found.started = True
    elif kind == b"changed":
        found.forged.append(f"replaced: {visible_line(text, _SHOWN)}")
    elif kind == b"test":
        number, _, outcome = text.partition(" ")
        if outcome not in _OUTCOMES or not number.isdecimal() or int(number) >= len(tests):
            found.forged.append("a record has an unknown outcome")
        elif tests[int(number)] in found.outcomes:
            found.forged.append("a test has two outcomes")
        else:
            found.outcomes[tests[int(number)]] = outcome
    elif kind == b"message":
        number, _, message = text.partition(" ")
        if number.isdecimal() and int(number) < len(tests):
            found.messages.setdefault(tests[int(number)], visible_line(message))
    elif kind == b"end":
        code, *counts = (int(each) for each in text.split())
        tally = [sum(each == outcome for each in found.outcomes.values()) for outcome in "PFS"]
        if counts != tally:
            found.forged.append("the counts of the run are not those of its records")
        found.code = code
