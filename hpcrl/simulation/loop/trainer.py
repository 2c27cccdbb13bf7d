"""The trainer of a simulation: a batch, an optimizer step, a version, again and again; checkpoints on the way.

The batch of a step is taken, built and fetched while the step before it trains, as `hpcrl.dock.ahead` does it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from hpcrl.planning.distributions import drawer
from hpcrl.simulation.inputs.scenario import Scenario
from hpcrl.simulation.loop.clock import Clock
from hpcrl.simulation.loop.records import Group
from hpcrl.simulation.loop.simulated_fleet import Fleet
from hpcrl.simulation.loop.simulated_host import Host
from hpcrl.simulation.loop.simulated_orchestrator import SimulatedOrchestrator
from hpcrl.simulation.loop.tally import StepSample, Tally


@dataclass(frozen=True)
class Checkpoint:
    """Joint checkpoint.

    Attributes
    ----------
    step, time_s:
        Its step, and the time when it was complete.
    finished:
        Groups that waited to be consumed.
    """

    step: int
    time_s: float
    finished: list[Group]


class SimulatedTrainer:
    """One attempt of the trainer.

    Attributes
    ----------
    step:
        Steps done.
    checkpoint:
        The last complete one.
    consumed:
        Groups by step, of steps that no checkpoint holds yet; with those of the step that is not trained yet.
    """

    def __init__(
        self,
        clock: Clock,
        scenario: Scenario,
        tally: Tally,
        rng: Random,
        *,
        checkpoint: Checkpoint,
        host: Host,
        finished: Callable[[], None],
    ) -> None:
        """Begin at a checkpoint; ``finished`` is called after the recipe's last step."""
        recipe, durations = scenario.recipe, scenario.durations
        costs, size = durations.trainer, scenario.size
        self._clock, self._tally, self._finished = clock, tally, finished
        self.step, self.checkpoint = checkpoint.step, checkpoint
        self._last_step, self._every = recipe.trainer.steps, recipe.checkpoint.every_steps
        self._batch_s, self._optimizer_s = drawer(costs.batch_s, rng), drawer(costs.optimizer_s, rng)
        self._noise, self._other_s = drawer(costs.forward_backward_noise, rng), drawer(costs.other_s, rng)
        self._checkpoint_s = drawer(costs.checkpoint_s, rng)
        self._checkpoint_write_s = drawer(costs.checkpoint_write_s, rng)
        self._publish_s = drawer(durations.handoff.publish_s, rng)
        self._write_s = drawer(durations.handoff.write_s, rng)
        self._base_s = costs.forward_backward_base_s
        # a sample of the rollouts stands for all of them, and more nodes share the work of more rollouts
        batch = size.groups_per_step / scenario.groups_per_step
        ranks = size.trainer_nodes / recipe.trainer.nodes
        self._per_token_s = costs.forward_backward_per_token_s * batch / ranks
        self._tokens_factor = batch
        self._host = host
        self.consumed: dict[int, list[Group]] = {}
        self._threads = recipe.trainer.ranks
        self._waiting = self._writing = self._saving = False
        self._copy_waits = self._save_waits = False
        self._taken = self._begun = checkpoint.step
        self._fetched = False
        self._asked_s = self._began_s = 0.0

    def start(self, orchestrator: SimulatedOrchestrator, fleet: Fleet) -> None:
        """Ask for the first batch."""
        self._orchestrator, self._fleet = orchestrator, fleet
        self._ask()

    def _ask(self, _: object = None) -> None:
        if self.step >= self._last_step:
            self._finished()
            return
        self._asked_s, self._waiting = self._clock.now, True
        self._orchestrator.settle(self.step)
        if self._fetched:
            self._train()
        else:
            self.batch_ready()

    def batch_ready(self) -> None:
        """Take a batch if one is ready: that of the next step, or ahead of time that of the following one."""
        most = self.step + 1 if self._waiting else self._begun + 1
        if self._taken >= min(most, self._last_step) or not self._orchestrator.may_take():
            return
        self._taken += 1
        self.consumed[self._taken] = self._orchestrator.take_batch()
        self._clock.after(self._batch_s(), self._arrived)

    def _arrived(self, _: object) -> None:
        self._fetched = True
        if self._waiting:
            self._train()

    def _train(self) -> None:
        self._waiting = self._fetched = False
        version, self._begun = self.step, self.step + 1
        groups = self.consumed[version + 1]
        lags = Counter(version - r.first_version for g in groups for r in g.members if r.first_version is not None)
        rollouts = [rollout for group in groups for rollout in group.members]
        self._tally.rollout_s.extend(rollout.ended_s - rollout.started_s for rollout in rollouts)
        tokens = sum(rollout.context + rollout.left for rollout in rollouts)
        self._sample = StepSample(
            step=self.step + 1,
            end_s=0.0,
            phases_s={},
            staleness=lags,
            tokens=round(tokens * self._tokens_factor),
            sampled_tokens=round(sum(rollout.sampled_tokens for rollout in rollouts) * self._tokens_factor),
        )
        self._tokens = tokens
        self._phase("wait_batch", self._asked_s)
        self._forward_backward()
        self.batch_ready()

    def _forward_backward(self) -> None:
        seconds = (self._base_s + self._per_token_s * self._tokens) * self._noise()
        self._host.run(seconds, self._optimizer, threads=self._threads)

    def _optimizer(self, _: object) -> None:
        self._phase("forward_backward")
        self._host.run(self._optimizer_s(), self._publish, threads=self._threads)

    # -- versions: a copy stops the trainer, and its writing the next copy

    def _publish(self, _: object) -> None:
        self._phase("optimizer")
        self._copy_waits = self._writing
        if not self._copy_waits:
            self._copy()

    def _copy(self) -> None:
        self._host.run(self._publish_s(), self._copied, threads=self._threads)

    def _copied(self, _: object) -> None:
        self._phase("publish")
        self.step += 1
        self._writing = True
        self._host.run(self._write_s(), self._written, self.step, threads=self._threads)
        due = self.step == self._last_step or (self._every > 0 and self.step % self._every == 0)
        if due:
            self._save()
        else:
            self._clock.after(self._other_s(), self._end)

    def _written(self, version: int) -> None:
        self._writing = False
        self._fleet.announce(version)
        if self._copy_waits:
            self._copy_waits = False
            self._copy()

    # -- checkpoints: the same

    def _save(self) -> None:
        self._save_waits = self._saving
        if self._save_waits:
            return
        # batches that were taken ahead count as not consumed
        ahead = [group for step, groups in self.consumed.items() if step > self.step for group in groups]
        self._clock.after(self._checkpoint_s(), self._saved, [*self._orchestrator.snapshot(), *ahead])

    def _saved(self, groups: list[Group]) -> None:
        self._phase("checkpoint")
        self._saving = True
        # it contains what was consumed until here, and is complete when it is written
        self._clock.after(self._checkpoint_write_s(), self._complete, (self.step, groups))
        self._clock.after(self._other_s(), self._end)

    def _complete(self, entry: tuple[int, list[Group]]) -> None:
        self._saving = False
        step, groups = entry
        self.checkpoint = Checkpoint(step, self._clock.now, groups)
        self._tally.checkpoints += 1
        self.consumed = {later: taken for later, taken in self.consumed.items() if later > step}
        if self._save_waits:
            self._save()

    def _end(self, _: object) -> None:
        self._phase("other")
        sample = self._sample
        sample.end_s = self._clock.now
        self._tally.steps.append(sample)
        self._ask()

    def _phase(self, name: str, began_s: float | None = None) -> None:
        """End the phase that began at the end of the last one."""
        now = self._clock.now
        self._sample.phases_s[name] = now - (self._began_s if began_s is None else began_s)
        self._began_s = now
