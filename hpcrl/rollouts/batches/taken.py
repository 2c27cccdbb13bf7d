"""Which groups belong to a step that was begun and may still be undone.

A group has one owner at a time: it waits to be started, is in flight, has finished, or was taken by a step. A step also
takes away what its consumption made too old: groups that had finished, and groups in flight. As long as nobody knows
that the step was trained, a checkpoint of an earlier step must give all of them back.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from hpcrl.rollouts.records import Group
from hpcrl.rollouts.sampling.data_order import GroupTask
from hpcrl.rollouts.telemetry.counters import Counters

__all__ = ["Pending", "TakenStep", "TakenSteps"]


@dataclass(frozen=True)
class Pending:
    """What is left to do after some step, for a snapshot.

    Attributes
    ----------
    restart:
        Groups that were dealt out and must be started again, in the order of their indices.
    finished:
        Groups that wait to be consumed, in that order.
    counters:
        With nothing in them of the steps that were undone.
    """

    restart: list[GroupTask]
    finished: list[Group]
    counters: Counters


@dataclass
class TakenStep:
    """What one step took.

    Attributes
    ----------
    step:
        Its number.
    groups:
        What it consumed, in the order of their indices.
    stale:
        Groups that had finished and were dropped, because after this step they were too old.
    cancelled:
        Groups in flight that were aborted for that reason.
    consumed, dropped_stale, cancelled_stale:
        What was added to the counters of these names.
    """

    step: int
    groups: list[Group]
    stale: list[Group] = field(default_factory=list)
    cancelled: list[GroupTask] = field(default_factory=list)
    consumed: int = 0
    dropped_stale: int = 0
    cancelled_stale: int = 0


class TakenSteps:
    """The steps that were begun and are not known to be trained: neighbours, up to the last one."""

    def __init__(self) -> None:
        self._steps: dict[int, TakenStep] = {}

    def add(self, taken: TakenStep) -> None:
        """The next step was begun."""
        self._steps[taken.step] = taken

    def find(self, step: int) -> TakenStep | None:
        """What ``step`` took; None where it is trained, or was not begun."""
        return self._steps.get(step)

    def settle(self, step: int) -> None:
        """Steps up to ``step`` are trained: what they took is gone for good."""
        for number in [number for number in self._steps if number <= step]:
            del self._steps[number]

    def undo(
        self, step: int, *, last: int, restart: Iterable[GroupTask], finished: Iterable[Group], counters: Counters
    ) -> Pending | None:
        """What would be pending after ``step``, if the steps from there to ``last`` had not been begun.

        Parameters
        ----------
        last:
            The last step that was begun.
        restart, finished, counters:
            As they are now; they are not changed.

        Returns
        -------
        Pending or None
            None where a step between is known to be trained, or ``step`` was not begun.
        """
        undone = [self._steps.get(number) for number in range(step + 1, last + 1)]
        steps = [taken for taken in undone if taken is not None]
        if step > last or len(steps) != len(undone):
            return None
        again = [*restart, *(task for taken in steps for task in taken.cancelled)]
        back = [*finished, *(group for taken in steps for group in (*taken.groups, *taken.stale))]
        own = Counters(**counters.as_dict())
        for taken in steps:
            own.consumed -= taken.consumed
            own.dropped_stale -= taken.dropped_stale
            own.cancelled_stale -= taken.cancelled_stale
        return Pending(
            restart=sorted(again, key=lambda task: task.index),
            finished=sorted(back, key=lambda group: group.index),
            counters=own,
        )
