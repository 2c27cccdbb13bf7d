"""Interface for bringing weights to the engines, and the usual one of its two implementations, by files.

The other way is `hpcrl.trainer.publish.swap_sync`, for engines on the trainer's own devices.

The loop knows when the weights are those of a version and when a step no longer needs the device; the implementation
decides what follows from that.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Protocol

from hpcrl.trainer.parallel.ranks import Ranks
from hpcrl.trainer.publish.published import Published
from hpcrl.trainer.publish.publisher import Publisher
from hpcrl.trainer.step.phases import PhaseClock
from hpcrl.trainer.step.policy import TrainerPolicy

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
        """Note that the batch has arrived: the trainer computes from now on."""
        ...

    def publish(self, policy: TrainerPolicy, version: int, announce: Callable[[int], None]) -> None:
        """Publish the weights of ``version``, which stay unchanged until the next `begin_step`.

        After the return others may read the weights, but only this object may change them. ``announce`` is called on
        rank 0 when engines can load the version: during this call, during a later one, or from a thread.
        """
        ...

    def end_step(self, clock: PhaseClock) -> None:
        """Note that the step no longer needs the weights, which have also been copied for a checkpoint."""
        ...

    def wait(self) -> None:
        """Wait until engines can have what was published; its failure is raised here."""
        ...

    def close(self) -> None:
        """Let go of everything, for the way out; failures are logged."""
        ...


class DurableVersions:
    """Versions of a run that become durable, also where engines get them from memory of the ranks.

    Attributes
    ----------
    named:
        Step of the newest checkpoint, which names its version; the last step of a run ends with one.
    """

    def __init__(self, every: int) -> None:
        """Choose each version whose number ``every`` divides, besides those of checkpoints."""
        self._every, self.named = every, -1

    def __contains__(self, version: int) -> bool:
        return version % self._every == 0 or version == self.named


class FileSync:
    """Versions are files in the store of the run, from which engines on other nodes read them.

    With a fabric, ranks also serve them from memory; versions that are not to become durable are there alone.
    """

    def __init__(
        self, publisher: Publisher, ranks: Ranks, emit: Callable[..., Any], durable: DurableVersions | None = None
    ) -> None:
        """Take the publisher of the run, which this closes, what writes events, and which versions become durable."""
        self._publisher, self._ranks, self._emit = publisher, ranks, emit
        self._durable = DurableVersions(1) if durable is None else durable

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
        announced = False

        def on_published(published: Published) -> None:
            # in parallel with the next step if publishing overlaps with it
            nonlocal announced
            if not announced:
                announced = True
                announce(published.version)
            self._say_published(published)

        self._publisher.publish(policy.model, version, on_published, durable=version in self._durable)

    def end_step(self, clock: PhaseClock) -> None:
        pass

    def wait(self) -> None:
        self._publisher.wait()

    def close(self) -> None:
        self._publisher.close()

    def _say_published(self, published: Published) -> None:
        version, form, reason, off_fabric, durable, failures = published
        if not durable:
            self._emit("trainer.version_announced", version=version, form=form)
            return
        if reason:
            _log.info("version %d is whole: %s", version, reason)
        if off_fabric:
            self._emit("trainer.fabric_failed", version=version, why=off_fabric, failures=failures)
        self._emit("trainer.version_published", version=version, form=form, instead_of_delta=reason)


class LastVersionSync(FileSync):
    """Publishes only the last version, in a run without engines, so that other runs can start with it."""

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
