"""Consumed rollouts in ``rollouts/``: a file a step for the newest hundred, a file for each hundred before.

``step-000112.jsonl`` has the rollouts of one step. When a hundred is full, its steps share
``steps-000101-000200.jsonl``, in which each line begins with its step: days of a run are hundreds of files and not ten
thousands. Where a step has a file of its own, that counts: it was written later, by an attempt that did the step again.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

__all__ = ["STEPS_A_FILE", "ConsumedRollouts", "first_step", "shared_name", "step_name"]

STEPS_A_FILE = 100
_STEP = re.compile(r"step-(\d{6,})\.jsonl")
_SHARED = re.compile(r"steps-(\d{6,})-\d{6,}\.jsonl")
_NUMBERED = re.compile(rb'\{"step":(\d+),')


def step_name(step: int) -> str:
    """The file of one step."""
    return f"step-{step:06d}.jsonl"


def first_step(step: int) -> int:
    """The first step of the hundred that ``step`` is in."""
    return (step - 1) // STEPS_A_FILE * STEPS_A_FILE + 1


def shared_name(first: int) -> str:
    """The file of a hundred, by its first step."""
    return f"steps-{first:06d}-{first + STEPS_A_FILE - 1:06d}.jsonl"


class ConsumedRollouts:
    """The consumed rollouts of a run by step, as JSON lines. A step that is not there has none."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._first, self._shared = 0, dict[int, list[bytes]]()

    def of(self, step: int) -> list[bytes]:
        """Lines of one step. The last one may be torn, where its writer was killed."""
        try:
            return (self.directory / step_name(step)).read_bytes().splitlines()
        except FileNotFoundError:  # it was moved after the shared file was complete
            return self.shared(first_step(step)).get(step, [])

    def shared(self, first: int) -> dict[int, list[bytes]]:
        """Lines of the shared file of a hundred, by step; the last hundred that was read is kept."""
        if first != self._first or not self._shared:
            self._first, self._shared = first, {}
            try:
                lines = (self.directory / shared_name(first)).read_bytes().splitlines()
            except FileNotFoundError:
                lines = []
            for line in lines:
                if match := _NUMBERED.match(line):
                    self._shared.setdefault(int(match[1]), []).append(line)
        return self._shared

    def steps(self) -> list[int]:
        """Steps with rollouts, ascending."""
        if not self.directory.is_dir():
            return []
        found: set[int] = set()
        for name in sorted(os.listdir(self.directory)):
            if match := _STEP.fullmatch(name):
                found.add(int(match[1]))
            elif match := _SHARED.fullmatch(name):
                found.update(self.shared(int(match[1])))
        return sorted(found)

    def __iter__(self) -> Iterator[bytes]:
        """Lines of all steps, in their order."""
        for step in self.steps():
            yield from self.of(step)
