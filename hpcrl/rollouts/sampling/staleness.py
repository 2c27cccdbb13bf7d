"""Who may start and who may still be used: the accounting of staleness. Pure, and counted in groups.

With ``B`` groups a step, the bound ``η = max_off_policy_steps``, the version ``v`` that all engines serve, and
``s`` steps consumed so far, a new group may start while

    s·B + waiting + running  <  (η + v + 1)·B

(the capacity rule of AReaL, arXiv 2505.24298; ``s·B + waiting`` is its count of accepted groups). Its
reason: groups are consumed B at a time, so the last of the first ``(η + v + 1)·B`` is consumed at step
``η + v + 1`` at the latest, by a trainer of version ``η + v``; its staleness is then at most η. A group that is
overtaken may still become too old, so consumption checks again: the trainer's version when it consumes step
``s + 1`` is ``s``, and groups with a version below ``s - η`` can never be used again.

Nothing can get stuck: with no group running and fewer than B waiting, engines that serve the trainer's version
(``v = s``) have ``(η + 1)·B - waiting > 0`` places.

A batch may be taken *ahead*, while the step before it is trained. Its version of the trainer, and so its staleness, is
the same; and until the trainer comes to it, it counts as one that waits (`StalenessAccount.may_start`), so that taking
it ahead makes nothing older.
"""

from __future__ import annotations

__all__ = ["StalenessAccount"]


class StalenessAccount:
    """Counts groups that run and wait, and says how many more may start.

    Attributes
    ----------
    bound:
        ``max_off_policy_steps``.
    version:
        Policy version that all engines serve.
    step:
        Optimizer steps whose batch was taken; the trainer's version when it trains on the next batch.
    trained:
        Steps that are known to be trained: the trainer is at the next one.
    running, waiting:
        Groups in flight, and groups that finished and were not consumed.
    """

    def __init__(
        self,
        *,
        groups_per_step: int,
        max_off_policy_steps: int,
        ready_batches: int = 1,
        step: int = 0,
        waiting: int = 0,
    ) -> None:
        """Start (or, after a restore, start again) at ``step``, which is also the version served.

        Parameters
        ----------
        ready_batches:
            Whole batches that may wait before nothing more starts.
        """
        if groups_per_step < 1 or max_off_policy_steps < 0:
            raise ValueError(f"groups_per_step={groups_per_step}, max_off_policy_steps={max_off_policy_steps}")
        self._groups_per_step, self.bound = groups_per_step, max_off_policy_steps
        self._ready_batches = ready_batches
        self.version = self.step = self.trained = step
        self.running, self.waiting = 0, waiting

    @property
    def capacity(self) -> int:
        """Groups that may start now; negative after a restore that brought more groups than fit."""
        return self.capacity_of(self.version)

    def capacity_of(self, version: int) -> int:
        """Groups that may start by weights of ``version``."""
        admitted = self.step * self._groups_per_step + self.waiting + self.running
        return (self.bound + version + 1) * self._groups_per_step - admitted

    @property
    def may_start(self) -> bool:
        """Whether a group should start now: there is a place, and the trainer is not the slower side by far."""
        ahead = max(0, self.step - (self.trained + 1))
        return self.capacity > 0 and self.waiting < (self._ready_batches - ahead) * self._groups_per_step

    @property
    def takes_ahead(self) -> bool:
        """Whether the step before the next one to be taken is still being trained."""
        return self.trained < self.step

    @property
    def oldest_usable(self) -> int:
        """Lowest version of a group that the next step may consume."""
        return self.step - self.bound

    def overtaken_by(self, version: int) -> int:
        """The step by whose consumption groups of ``version`` became too old, or will become so."""
        return version + self.bound + 1

    @property
    def batch_ready(self) -> bool:
        """Whether a step could be consumed now."""
        return self.waiting >= self._groups_per_step

    def serve(self, version: int) -> None:
        """All engines serve ``version``."""
        assert version >= self.version, (version, self.version)
        self.version = version

    def settle(self, step: int) -> None:
        """Steps up to ``step`` are trained."""
        self.trained = max(self.trained, step)

    def start(self) -> None:
        """A group starts."""
        assert self.capacity > 0
        self.running += 1

    def finish(self) -> None:
        """A running group has finished and waits."""
        assert self.running > 0
        self.running -= 1
        self.waiting += 1

    def drop_running(self) -> None:
        """A running group ends without use; its place is free again."""
        assert self.running > 0
        self.running -= 1

    def drop_waiting(self) -> None:
        """A waiting group ends without use; its place is free again."""
        assert self.waiting > 0
        self.waiting -= 1

    def consume(self) -> None:
        """The batch of the next step is taken."""
        assert self.batch_ready
        self.waiting -= self._groups_per_step
        self.step += 1
