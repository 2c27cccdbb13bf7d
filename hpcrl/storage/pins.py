"""Pins: numbered entries of a directory that people want kept, each with a reason, as small files.

A process that removes entries lists the pins, hides an entry, lists them once more, and then restores or deletes it. A
process that pins an entry writes the pin first and checks afterwards whether the entry still has its name.
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import msgspec

from hpcrl.storage import lost_replies
from hpcrl.storage.files import fsync_dir, make_directory, write_json
from hpcrl.storage.msgspec_types import prepared


class Pin(msgspec.Struct, frozen=True, kw_only=True):
    """Reason why an entry is kept.

    Attributes
    ----------
    number:
        Number of the entry: its step or policy version.
    reason:
        Text for people.
    by:
        User who pinned it.
    created_at_s:
        Seconds since the epoch, by the clock of the machine that pinned it.
    """

    number: int
    reason: str
    by: str
    created_at_s: float


class Pins:
    """The pins of one directory: files ``<prefix>000012<suffix>``."""

    def __init__(self, directory: Path, prefix: str, suffix: str) -> None:
        self.directory, self._prefix, self._suffix = directory, prefix, suffix
        self._name = re.compile(rf"{re.escape(prefix)}(\d{{6,}}){re.escape(suffix)}")

    def numbers(self) -> set[int]:
        """Return the pinned numbers, unreadable pins included (OSError if the directory cannot be listed)."""
        try:
            names = os.listdir(self.directory)
        except FileNotFoundError:
            return set()
        return {int(match[1]) for name in names if (match := self._name.fullmatch(name))}

    def all(self) -> dict[int, Pin]:
        """Return pins by number (OSError if the directory cannot be listed)."""
        pins: dict[int, Pin] = {}
        for number in sorted(self.numbers()):
            try:
                pins[number] = msgspec.json.decode(self._path(number).read_bytes(), type=prepared(Pin))
            except FileNotFoundError:
                continue  # unpinned since the listing
            except (OSError, msgspec.DecodeError) as error:
                reason = f"its pin cannot be read: {error}"
                pins[number] = Pin(number=number, reason=reason, by="?", created_at_s=0.0)
        return pins

    def add(self, number: int, *, reason: str, by: str) -> Pin:
        """Pin an entry. The caller must check *afterwards* that the entry still has its name."""
        make_directory(self.directory)
        pin = Pin(number=number, reason=reason, by=by, created_at_s=time.time())
        write_json(self._path(number), pin)
        return pin

    def remove(self, number: int) -> bool:
        """Take a pin away; False where there was none."""
        if not lost_replies.unlink(self._path(number)):
            return False
        fsync_dir(self.directory)
        return True

    def _path(self, number: int) -> Path:
        return self.directory / f"{self._prefix}{number:06d}{self._suffix}"
