"""The training loop of a supervised run: that of a run with rollouts, with conversations in place of the dock."""

from __future__ import annotations

import logging
import os
from functools import partial
from pathlib import Path

import msgspec

from hpcrl.runs.role import RoleContext
from hpcrl.trainer.batch.source import Batches, OtherSide
from hpcrl.trainer.loop import Trainer, run_trainer
from hpcrl.trainer.publish.sync import LastVersionSync, WeightSync
from hpcrl.trainer.step.phases import PhaseClock
from hpcrl.trainer.step.policy import TrainerPolicy
from hpcrl.trainer.supervised.batches import ConversationBatches, rendered_directory
from hpcrl.trainer.supervised.masks import make_conversation_renderer
from hpcrl.trainer.supervised.order import run_steps
from hpcrl.trainer.supervised.rendered import RenderedConversations, RenderingJob

_log = logging.getLogger(__name__)

_CHUNK_S = 10.0
"""Seconds between two progress reports of the rendering rank to the others, which wait."""


def train_supervised(context: RoleContext) -> None:
    """Run the trainer role of a supervised run to its last step. Every rank calls it.

    Raises
    ------
    ConfigError
        The data cannot be used.
    PeerLostError, HpcrlError, OSError, ValueError
        See `hpcrl.trainer.loop.run_trainer`.
    """
    run_trainer(context, SupervisedTrainer)


class SupervisedTrainer(Trainer):
    """One attempt of the trainer of a supervised run, on one rank."""

    def _batch_source(self) -> tuple[OtherSide, Batches]:
        data = self.parallel.data
        self._conversations = ConversationBatches(self.recipe, rank=data.rank, world_size=data.size)
        return self._conversations, self._conversations

    def _weight_sync(self) -> WeightSync:
        def last() -> int:
            return self.recipe.trainer.steps

        self._versions = LastVersionSync(self._publisher(), self.parallel.world, self._emit, last=last)
        return self._versions

    def _begin(self, policy: TrainerPolicy, step: int) -> None:
        data = self._rendered()
        self._conversations.load(data)
        if step:

            def check() -> None:
                self._conversations.check(self.checkpoints.ledger.open(step).orchestrator_state())

            self.parallel.world.on_leader(check, "comparing the data with that of the checkpoint")
        config = self.recipe.sft
        assert config is not None
        steps = run_steps(self.recipe.trainer.steps, data.counts.train, config)
        trainer = self.recipe.trainer.model_copy(update={"steps": steps})
        # the schedule of the learning rate ends with the run
        self.recipe = policy.recipe = self.recipe.model_copy(update={"trainer": trainer})
        self._has_held_out = bool(data.held_out())
        if step >= steps:
            self._versions.complete(policy, step)
        elif step == 0:
            self._held_out_loss(policy, 0, PhaseClock(self._progress))

    def _held_out_loss(self, policy: TrainerPolicy, step: int, clock: PhaseClock) -> float | None:
        config = self.recipe.sft
        assert config is not None
        every = config.evaluate_every_steps
        due = step == self.recipe.trainer.steps or (every > 0 and step % every == 0)
        if not due or not self._has_held_out:
            return None
        with clock.phase("held_out"):
            shard = self._conversations.held_out()
            found = self.parallel.world.sum(policy.held_out_loss(shard, self._still_waiting))
        loss, tokens = float(found[0] / found[1]), int(found[1])
        self._emit("trainer.held_out_loss", step=step, loss=loss, tokens=tokens)
        return loss

    def _rendered(self) -> RenderedConversations:
        """Return the conversations as tokens; rank 0 renders them where no attempt has yet."""
        world, directory = self.parallel.world, rendered_directory(self.context.run.path)
        if not world.on_leader(directory.is_dir, "looking for rendered conversations"):
            self._render(directory)
        opened: list[RenderedConversations] = []

        def look() -> None:
            # an NFS client may remember for a minute that a name did not exist; a listing asks again
            os.listdir(directory.parent)
            opened.append(RenderedConversations(directory))

        world.all_succeed(look, f"reading {directory}")
        (data,) = opened
        counts = msgspec.to_builtins(data.counts)
        self._emit("trainer.conversations", notes=data.notes, **counts)
        if self.leader:
            _log.info("conversations: %s", ", ".join(f"{name} {value:,}" for name, value in counts.items()))
        return data

    def _render(self, directory: Path) -> None:
        config, jobs = self.recipe.sft, list[RenderingJob]()
        assert config is not None
        make = partial(
            make_conversation_renderer,
            self.model_dir,
            self.recipe.model.chat,
            train_on=config.train_on,
            thinking=config.thinking,
        )

        def work() -> bool:
            if not jobs:
                jobs.append(RenderingJob(directory, config, make(), attempt=self.context.attempt))
            if self._progress is not None:
                self._progress.beat(f"render conversations ({jobs[0].counts.sequences:,} so far)")
            return jobs[0].work(_CHUNK_S)

        try:
            while not self.parallel.world.on_leader(work, "rendering conversations"):
                pass
        except BaseException:
            for job in jobs:
                job.discard()
            raise
