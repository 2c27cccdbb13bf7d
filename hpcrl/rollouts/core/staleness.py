"""Account of staleness, counted in groups: which may start and which may still be used. It has no side effects.

With ``B`` groups a step, the bound ``η = max_off_policy_steps``, the version ``v`` that all engines serve, and
``s`` steps consumed so far, a new group may start while

    s·B + waiting + running  <  (η + v + 1)·B

(the capacity rule of AReaL, arXiv 2505.24298; ``s·B + waiting`` is its count of accepted groups). Its
reason: groups are consumed B at a time, so the last of the first ``(η + v + 1)·B`` is consumed at step
``η + v + 1`` at the latest, by a trainer of version ``η + v``; its staleness is then at most η. A group that is
overtaken may still become too old, so consumption checks again: the trainer's version when it consumes step
``s + 1`` is ``s``, and groups with a version below ``s - η`` can never be used again.

A deadlock is impossible: with no group running and fewer than B waiting, engines that serve the trainer's version
(``v = s``) have ``(η + 1)·B - waiting > 0`` places.

A batch may be taken *ahead*, while the step before it is trained. Its version of the trainer, and so its staleness, is
the same; and until the trainer comes to it, it counts as one that waits (`StalenessAccount.may_start`), so that taking
it ahead makes nothing older.
"""

from __future__ import annotations


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
        """Return how many groups may start now; negative after a restore of more groups than fit."""
        return self.capacity_of(self.version)

    def capacity_of(self, version: int) -> int:
        """Return how many groups may start with weights of ``version``."""
        # every accepted group counts, whether it is consumed, waits or runs: each takes a place in a future batch
        admitted = self.step * self._groups_per_step + self.waiting + self.running
        return (self.bound + version + 1) * self._groups_per_step - admitted

    @property
    def may_start(self) -> bool:
        """Return whether a group should start: there is capacity, and not too many finished groups wait already."""
        # a batch taken ahead still waits for the trainer, so it reduces the number of whole batches that may wait
        ahead = max(0, self.step - (self.trained + 1))
        return self.capacity > 0 and self.waiting < (self._ready_batches - ahead) * self._groups_per_step

    @property
    def takes_ahead(self) -> bool:
        """Return whether the step before the next one to be taken is still being trained."""
        return self.trained < self.step

    @property
    def oldest_usable(self) -> int:
        """Return the lowest version of a group that the next step may consume."""
        # the trainer has version `step` when it trains on the next batch
        return self.step - self.bound

    def last_usable_step(self, version: int) -> int:
        """Return the step whose consumption makes groups of ``version`` too old."""
        # after this step `oldest_usable` is `version + 1`
        return version + self.bound + 1

    @property
    def batch_ready(self) -> bool:
        """Return whether a step could be consumed now."""
        return self.waiting >= self._groups_per_step

    def serve(self, version: int) -> None:
        """Record that all engines serve ``version``."""
        assert version >= self.version, (version, self.version)
        self.version = version

    def settle(self, step: int) -> None:
        """Record that steps up to ``step`` are trained."""
        self.trained = max(self.trained, step)

    def start(self) -> None:
        """Record that a group starts."""
        assert self.capacity > 0
        self.running += 1

    def finish(self) -> None:
        """Record that a running group has finished and waits."""
        assert self.running > 0
        self.running -= 1
        self.waiting += 1

    def drop_running(self) -> None:
        """Record that a running group ended without use; its place is free again."""
        assert self.running > 0
        self.running -= 1

    def drop_waiting(self) -> None:
        """Record that a waiting group was dropped without use; its place is free again."""
        assert self.waiting > 0
        self.waiting -= 1

    def consume(self) -> None:
        """Record that the batch of the next step is taken."""
        assert self.batch_ready
        self.waiting -= self._groups_per_step
        self.step += 1
