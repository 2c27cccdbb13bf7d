"""Groups that belong to a step that was begun and may still be undone.

A group has one owner at a time: it waits to be started, is in flight, has finished, or was taken by a step. A step also
takes the groups that its consumption made too old, finished ones and ones in flight. Until the step is known to be
trained, a checkpoint of an earlier step must restore all of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from hpcrl.rollouts.core.counters import Counters
from hpcrl.rollouts.core.records import Group
from hpcrl.rollouts.environments.data_order import GroupTask


@dataclass(frozen=True)
class Pending:
    """Work that is pending after a step, as a snapshot stores it.

    Attributes
    ----------
    restart:
        Groups that were dispatched and must be started again, in the order of their indices.
    finished:
        Groups that wait to be consumed, in the order of their indices.
    counters:
        Counters without the contribution of the steps that were undone.
    """

    restart: list[GroupTask]
    finished: list[Group]
    counters: Counters


@dataclass
class TakenStep:
    """Groups that one step consumed, dropped and cancelled.

    Attributes
    ----------
    step:
        Number of the step.
    groups:
        Groups that it consumed, in the order of their indices.
    stale:
        Finished groups that were dropped because this step made them too old.
    cancelled:
        Groups in flight that were aborted for the same reason.
    consumed, dropped_stale, cancelled_stale:
        Increments of the counters of these names.
    """

    step: int
    groups: list[Group]
    stale: list[Group] = field(default_factory=list)
    cancelled: list[GroupTask] = field(default_factory=list)
    consumed: int = 0
    dropped_stale: int = 0
    cancelled_stale: int = 0


class TakenSteps:
    """Consecutive steps that were begun and are not known to be trained, up to the last one."""

    def __init__(self) -> None:
        self._steps: dict[int, TakenStep] = {}

    def add(self, taken: TakenStep) -> None:
        """Record the next step."""
        self._steps[taken.step] = taken

    def find(self, step: int) -> TakenStep | None:
        """Return the record of ``step``; None where it is trained already, or was not begun."""
        return self._steps.get(step)

    def settle(self, step: int) -> None:
        """Forget the records of steps up to ``step``: they are trained and can no longer be undone."""
        for number in [number for number in self._steps if number <= step]:
            del self._steps[number]

    def undo(
        self, step: int, *, last: int, restart: Iterable[GroupTask], finished: Iterable[Group], counters: Counters
    ) -> Pending | None:
        """Return the work pending after ``step``, as if the steps from there to ``last`` had not begun.

        Parameters
        ----------
        last:
            The last step that was begun.
        restart, finished, counters:
            Their current values; they are not changed.

        Returns
        -------
        Pending or None
            None where a step in between is known to be trained, or ``step`` was not begun.
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
