"""How the weights of a step come to the engines: one interface, and the usual one of its two ways, by files.

The other way is `hpcrl.trainer.publish.swap_sync`, for engines on the trainer's own devices.

The loop knows when weights are those of a version and when a step leaves the device alone; what follows from that is
the way's own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Protocol

from hpcrl.trainer.parallel.ranks import Ranks
from hpcrl.trainer.publish.publisher import Published, Publisher
from hpcrl.trainer.step.phases import PhaseClock
from hpcrl.trainer.step.policy import TrainerPolicy

__all__ = ["FileSync", "LastVersionSync", "WeightSync"]

_log = logging.getLogger(__name__)


class WeightSync(Protocol):
    """Brings policy versions to the engines. All ranks call every method together.

    ::

        restored ──> (begin_step ── publish ── end_step) ... ──> wait ──> close
    """

    def restored(self, policy: TrainerPolicy, step: int) -> None:
        """Make what was restored, or the start model, the newest version that engines can have.

        The orchestrator finds it by itself: it may not run yet.
        """
        ...

    def begin_step(self, clock: PhaseClock) -> None:
        """The batch is there: the trainer computes from now on."""
        ...

    def publish(self, policy: TrainerPolicy, version: int, announce: Callable[[int], None]) -> None:
        """The weights are those of ``version`` until the next `begin_step`. On return they may be read, not changed,
        by others than this.

        ``announce`` is called on rank 0 when engines can have it, from this call or from a later one, or from a thread.
        """
        ...

    def end_step(self, clock: PhaseClock) -> None:
        """The step has no more to do with the weights: they have also been copied for a checkpoint."""
        ...

    def wait(self) -> None:
        """Wait until engines can have what was published; its failure is raised here."""
        ...

    def close(self) -> None:
        """Let go of everything, for the way out; failures are logged."""
        ...


class FileSync:
    """Versions are files in the store of the run, from which engines on other nodes read them."""

    def __init__(self, publisher: Publisher, ranks: Ranks, emit: Callable[..., Any]) -> None:
        """Take the publisher of the run, which this closes, and what writes events."""
        self._publisher, self._ranks, self._emit = publisher, ranks, emit

    def restored(self, policy: TrainerPolicy, step: int) -> None:
        def prepare() -> bool:
            output = self._publisher.output
            withdrawn = output.withdraw_after(step)
            if withdrawn:
                self._emit("trainer.versions_withdrawn", versions=withdrawn)
            if self._publisher.is_intact(step):
                return True
            output.put_aside(step)
            return False

        if not self._ranks.on_leader(prepare, f"looking for version {step}"):
            self._publisher.publish(policy.model, step, self._say_published)
            # engines cannot begin before it is there
            self._publisher.wait()

    def begin_step(self, clock: PhaseClock) -> None:
        pass

    def publish(self, policy: TrainerPolicy, version: int, announce: Callable[[int], None]) -> None:
        def on_published(published: Published) -> None:
            # beside the next step, where publishing overlaps with it
            announce(published.version)
            self._say_published(published)

        self._publisher.publish(policy.model, version, on_published)

    def end_step(self, clock: PhaseClock) -> None:
        pass

    def wait(self) -> None:
        self._publisher.wait()

    def close(self) -> None:
        self._publisher.close()

    def _say_published(self, published: Published) -> None:
        version, form, reason = published
        if reason:
            _log.info("version %d is whole: %s", version, reason)
        self._emit("trainer.version_published", version=version, form=form, instead_of_delta=reason)


class LastVersionSync(FileSync):
    """Of a run without engines: the last version alone is written, for runs that begin with it."""

    def __init__(
        self, publisher: Publisher, ranks: Ranks, emit: Callable[..., Any], *, last: Callable[[], int]
    ) -> None:
        """As `FileSync`; ``last`` returns the number of the last version, from the first step on."""
        super().__init__(publisher, ranks, emit)
        self._last = last

    def restored(self, policy: TrainerPolicy, step: int) -> None:
        def withdraw() -> None:
            if withdrawn := self._publisher.output.withdraw_after(step):
                self._emit("trainer.versions_withdrawn", versions=withdrawn)

        self._ranks.on_leader(withdraw, f"looking for versions after {step}")

    def complete(self, policy: TrainerPolicy, step: int) -> None:
        """Write the version of a run that has done all its steps, where it is not there."""
        super().restored(policy, step)

    def publish(self, policy: TrainerPolicy, version: int, announce: Callable[[int], None]) -> None:
        if version == self._last():
            super().publish(policy, version, announce)
