"""The training loop: restore or begin, publish, then a batch, an optimizer step and a version at a time."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch

from hpcrl.checkpoints.writer import CheckpointWriter
from hpcrl.config.recipe import Recipe
from hpcrl.config.rules.parallel import refuse_planned_settings
from hpcrl.dock.ahead import BatchFetcher
from hpcrl.dock.client import DockClient
from hpcrl.dock.warehouse.sharing import Sharing
from hpcrl.errors import HandoffError, PeerLostError
from hpcrl.models.arch import load_arch
from hpcrl.mooncake import load_client
from hpcrl.reporting.reports import ReportedFile
from hpcrl.runs.events import EventWriter
from hpcrl.runs.metrics import MetricsWriter, StepRecord
from hpcrl.runs.progress import ProgressReporter
from hpcrl.runs.role import RoleContext, save_answer_path
from hpcrl.trainer.batch.source import Batches, OtherSide, check_shard
from hpcrl.trainer.device import prepare_device
from hpcrl.trainer.parallel.device_check import device_name
from hpcrl.trainer.parallel.mesh import Parallel, distributed, is_lost_rank
from hpcrl.trainer.precision import quantised_modules
from hpcrl.trainer.publish.adapters import AdapterPublisher
from hpcrl.trainer.publish.colocated_engines import ColocatedEngines
from hpcrl.trainer.publish.custom_sync import SyncParts, make_custom_sync
from hpcrl.trainer.publish.fabric_serving import FabricPlace, fabric_place
from hpcrl.trainer.publish.publisher import Publisher
from hpcrl.trainer.publish.swap_sync import SwapSync
from hpcrl.trainer.publish.sync import DurableVersions, FileSync, WeightSync
from hpcrl.trainer.state.attempt_requests import RequestReader
from hpcrl.trainer.state.checkpoint import load_checkpoint
from hpcrl.trainer.state.restart import choose_restored_checkpoint
from hpcrl.trainer.state.saver import CheckpointSaver
from hpcrl.trainer.step.canary import CanaryMaker
from hpcrl.trainer.step.nonfinite import NonFiniteGradientError, SkippedSteps, skipped_before
from hpcrl.trainer.step.phases import PhaseClock
from hpcrl.trainer.step.policy import TrainerPolicy
from hpcrl.trainer.step.record import Update, step_record
from hpcrl.trainer.step.step_profiler import StepProfiler
from hpcrl.weights.lifetime.leases import ReaderWatch
from hpcrl.weights.store import HandoffStore

_log = logging.getLogger(__name__)

_LEAVE_S = 60.0
"""Timeout in seconds of the wait of a failing trainer for a save that has begun."""
_ON_RECORD_S = 2.0
"""Timeout in seconds of a save's wait for its step's record: the filesystem may still accept a checkpoint."""


def train(context: RoleContext) -> None:
    """Run the trainer role of a run with rollouts to the last step of the recipe. Every rank calls it.

    Raises
    ------
    ConfigError, PeerLostError, HpcrlError, OSError, ValueError
        See `run_trainer`.
    """
    run_trainer(context, Trainer)


def run_trainer(context: RoleContext, kind: type[Trainer]) -> None:
    """Run a trainer of some ``kind`` to the last step of the recipe. Every rank calls it.

    Raises
    ------
    ConfigError
        The recipe asks for what this version only plans.
    PeerLostError
        Another rank, or the orchestrator, went away: a consequence, not a cause.
    HpcrlError, OSError, ValueError
        The run cannot go on; the last published version and the last checkpoint are whole.
    """
    recipe = context.run.recipe()
    # a role that was started by hand has not been checked by `hpcrl submit`
    refuse_planned_settings(recipe, str(context.run.recipe_path))
    torch.set_num_threads(recipe.trainer.threads)
    torch.manual_seed(recipe.seed)
    with distributed(timeout_s=recipe.collective_timeout_s, parallelism=recipe.trainer.parallelism) as parallel:
        prepare_device(parallel.device, recipe, context.run.plan)
        try:
            kind(context, recipe, parallel).run()
        except RuntimeError as error:
            if is_lost_rank(error):
                raise PeerLostError(f"another rank of the trainer was lost: {error}") from error
            raise


class Trainer:
    """One attempt of the trainer, on one rank."""

    def __init__(self, context: RoleContext, recipe: Recipe, parallel: Parallel) -> None:
        self.context, self.recipe, self.parallel = context, recipe, parallel
        self.leader = parallel.world.rank == 0
        self.model_dir = Path(recipe.model.path)
        self.arch = load_arch(self.model_dir)
        self.store = HandoffStore(context.run.weights_dir)
        self.dock, self.batches = self._batch_source()
        self._readers = ReaderWatch(self.store.root, expiry_s=recipe.handoff.lease_timeout_s)
        self._durable = DurableVersions(recipe.handoff.durable_every)
        self.sync = self._weight_sync()
        self._events: EventWriter | None = None
        self._progress: ProgressReporter | None = None
        self._requests = RequestReader(context)
        self._profiler = StepProfiler(
            context, parallel.world.rank, parallel.device, emit=self._emit_on_any_rank, on_work=self._profile_is_made
        )
        claim = partial(CheckpointWriter.claim, context.run.checkpoints_dir, context.attempt)
        self.checkpoints = parallel.world.on_leader(claim, "claiming the ledger of checkpoints")
        self.saver = CheckpointSaver(self.checkpoints, parallel.world, recipe.checkpoint, self._emit)

    def _batch_source(self) -> tuple[OtherSide, Batches]:
        """Return the dock, and what fetches batches from it."""
        recipe, data = self.recipe, self.parallel.data
        if recipe.rollouts.warehouse.backend == "mooncake":
            load_client()  # not first when the first batch is there
        dock = DockClient(
            self.context.endpoints().one("orchestrator"),
            credentials=self.context.credentials,
            wait_timeout_s=recipe.wait_for_batch_s,
            on_wait=self._still_waiting,
            on_disk=self._read_from_disk,
            sharing=_sharing(recipe),
        )
        return dock, BatchFetcher(dock, rank=data.rank, world_size=data.size, last_step=recipe.trainer.steps)

    def _weight_sync(self) -> WeightSync:
        recipe = self.recipe
        if recipe.engine.is_colocated:
            engines = ColocatedEngines(
                [member.url for member in self.context.endpoints().fixed("engine")],
                self.context.credentials.headers,
                timeout_s=recipe.handoff.update_timeout_s,
                start_timeout_s=recipe.orchestrator.wait_timeout_s,
                on_wait=self._still_waiting,
            )
            return SwapSync(self.parallel, engines, dtype=getattr(torch, recipe.engine.dtype), emit=self._emit)
        publisher = self._publisher(fabric_place(recipe.handoff, self.context))
        files, custom = FileSync(publisher, self.parallel.world, self._emit, self._durable), recipe.handoff.sync
        if custom is None:
            return files
        made: list[WeightSync] = []
        parts = SyncParts(files, self.parallel.world, self._emit, recipe, self.context.run.path)
        self.parallel.world.all_succeed(lambda: made.append(make_custom_sync(custom, parts)), "making handoff.sync")
        return made[0]

    def _publisher(self, fabric: FabricPlace | None = None) -> Publisher:
        recipe, lora = self.recipe, self.recipe.trainer.lora
        new_publisher: Callable[..., Publisher] = Publisher
        if lora is not None:
            canary = CanaryMaker(recipe, self.arch, self.parallel)
            new_publisher = partial(AdapterPublisher, lora=lora, canary=canary)
        return new_publisher(
            self.store,
            self.parallel,
            arch=self.arch,
            model_dir=self.model_dir,
            dtype=getattr(torch, recipe.handoff.dtype or recipe.trainer.dtype),
            attempt=self.context.attempt,
            settings=recipe.handoff,
            quantised=quantised_modules(recipe.trainer.precision.fp8),
            acknowledged=self._acknowledged,
            wanted=self._readers.wanted_version,
            on_wait=self._still_waiting,
            on_refused=lambda words: self._emit("trainer.version_refused", what=words),
            fabric=fabric,
        )

    def run(self) -> None:
        """Restore, train, finish."""
        with self._outputs() as metrics:
            try:
                self._run(metrics)
            finally:
                self.batches.close()
                self.dock.close()
                self.sync.close()

    def _run(self, metrics: MetricsWriter | None) -> None:
        started = time.monotonic()
        policy, step = self._restore()
        self._skipped = self._skipped_before(step)
        self.sync.restored(policy, step)
        if self.leader:
            self.context.ready()
        self._emit(
            "trainer.ready",
            step=step,
            seconds=time.monotonic() - started,
            device=device_name(self.parallel.device),
            mesh=self.parallel.mesh.degrees,
            memory=self.recipe.trainer.memory.model_dump(exclude_defaults=True),
            kernels=policy.kernels,
            deterministic=self.recipe.trainer.deterministic,
        )
        self._begin(policy, step)
        try:
            while step < self.recipe.trainer.steps:
                step += 1
                self._step(policy, step, metrics)
            self._profiler.end()
            self.sync.wait()
            if self.leader:
                assert self._progress is not None
                with self._progress.phase("finish", waits=True):
                    self.dock.finish(step)
            self._finish_saving()
        except BaseException:
            # the copy was made before this failure and is valid: finish writing it
            self.saver.leave(_LEAVE_S)
            raise
        self._emit("trainer.finished", version=step)

    def _begin(self, policy: TrainerPolicy, step: int) -> None:
        """Do what must be done before the step after ``step``. All ranks call it."""

    def _held_out_loss(self, policy: TrainerPolicy, step: int, clock: PhaseClock) -> float | None:
        """Return the loss on held-out data after ``step``; None where it is not computed. All ranks call it."""
        return None

    @contextmanager
    def _outputs(self) -> Iterator[MetricsWriter | None]:
        """Open what rank 0 writes."""
        if not self.leader:
            yield None
            return
        self._events = self.context.events()
        metrics = MetricsWriter(self.context.run, self.context.attempt, on_caught_up=self._events.caught_up)
        self._progress = self.context.progress()
        try:
            yield metrics
        finally:
            metrics.close()
            self._events.close()

    def _still_waiting(self) -> None:
        if self._progress is not None:
            self._progress.again()

    def _profile_is_made(self) -> None:
        if self._progress is not None:
            self._progress.beat("profile")

    def _read_from_disk(self, step: int, rollouts: int, why: str) -> None:
        self._emit_on_any_rank("rollouts.read_from_disk", step=step, rollouts=rollouts, why=why)

    def _emit_on_any_rank(self, kind: str, **data: Any) -> None:
        events = self._events or self.context.events()  # of rank 0 alone there is one that stays open
        events.emit(kind, **data)
        if events is not self._events:
            events.close()

    def _emit(self, kind: str, **data: Any) -> None:
        if self._events is not None:
            self._events.emit(kind, **data)

    def _restore(self) -> tuple[TrainerPolicy, int]:
        """Return the policy of the newest intact checkpoint, or of the start model; and its step."""
        config = self.recipe.checkpoint
        step = choose_restored_checkpoint(self.context, self.checkpoints, self.parallel.world, config, self._emit).step
        if step is None:
            policy = TrainerPolicy(self.recipe, self.arch, self.parallel, model_dir=self.model_dir)
            self._emit("trainer.started", model=str(self.model_dir), parameters=self.arch.num_parameters())
            return policy, 0
        # a checkpoint of adapters has not the weights that these change
        start = None if self.recipe.trainer.lora is None else self.model_dir
        policy = TrainerPolicy(self.recipe, self.arch, self.parallel, model_dir=start)
        entry = self.checkpoints.ledger.open(step)
        load_checkpoint(
            entry, policy.model, policy.optimizer, self.parallel, base=policy.base, reference=policy.reference
        )
        self._emit(
            "trainer.restored",
            step=step,
            saved_by_ranks=entry.manifest.world_size,
            ranks=self.parallel.world.size,
            attempt=entry.manifest.attempt,
        )
        return policy, step

    def _step(self, policy: TrainerPolicy, step: int, metrics: MetricsWriter | None) -> None:
        turns, parallel = self.recipe.engine.is_colocated, self.parallel
        clock = PhaseClock(self._progress, turns=turns, span=self._profiler.span)
        if self._progress is not None:
            self._progress.count(step=step)
        with clock.phase("wait_batch"):
            shard = self.batches.take(step)
        self.sync.begin_step(clock)
        with clock.phase("forward_backward"):
            check_shard(shard, step, parallel.data)
            tokens = policy.forward_backward(shard).reduce(parallel.world)
        with clock.phase("optimizer"):
            update = self._update(policy, step, nonfinite_tokens=tokens.nonfinite_tokens)
        held_out_loss = self._held_out_loss(policy, step, clock)
        requests = parallel.world.on_leader(self._requests.read, "looking for requests")
        due = requests.save or self._checkpoint_due(step)
        if due:
            self._durable.named = step
        with clock.phase("publish"):
            self.sync.publish(policy, step, self.dock.published)

        def record() -> StepRecord:
            return step_record(
                shard.stats,
                tokens,
                attempt=self.context.attempt,
                step=step,
                update=update,
                phases_s=clock.seconds(),
                held_out_loss=held_out_loss,
            )

        if due:
            if metrics is not None:
                # the step's record is written before the checkpoint counts, so that a resume from it has no gap
                metrics.write(record())
                metrics.flush(_ON_RECORD_S)
            with clock.phase("checkpoint"):
                self.saver.start(policy, step, orchestrator_state=lambda: self.dock.snapshot(step))
                if requests.save:
                    self._answer(step, self.saver.wait(self.recipe.checkpoint.save_timeout_s))
        self.sync.end_step(clock)
        if metrics is not None:
            metrics.write_ratios(step, policy.take_ratios())
            final = record()
            if due:
                metrics.write_final_phases(final)
            else:
                metrics.write(final)
            self._emit("step", step=step, loss=final.loss, reward=final.reward_mean, phases_s=final.phases_s)
        self._profiler.between_steps(step, requests.profiled_ranks)

    def _skipped_before(self, step: int) -> SkippedSteps:
        """Return the counter of skipped steps, restored from the records: a restart does not reset it."""
        count = partial(skipped_before, self.context.run, step)
        config = self.recipe.trainer.nonfinite
        return SkippedSteps(config, in_a_row=self.parallel.world.on_leader(count, "counting skipped steps"))

    def _update(self, policy: TrainerPolicy, step: int, *, nonfinite_tokens: int) -> Update:
        try:
            update = policy.optimizer_step(step, nonfinite_tokens=nonfinite_tokens)
        except NonFiniteGradientError as error:
            in_a_row = self._skipped.skip(error)
            _log.warning("step %d is skipped: %s", step, error.what)
            self._emit("trainer.step_skipped", step=step, in_a_row=in_a_row, what=error.what)
            return None
        self._skipped.trained()
        return update

    def _acknowledged(self) -> int | None:
        """Return the newest version that all engines have loaded; None if it is unknown."""
        try:
            return self._readers.acknowledged_version()
        except HandoffError as error:
            _log.warning("acknowledgements are unknown, so a full version is published: %s", error)
            return None

    def _checkpoint_due(self, step: int) -> bool:
        """Return whether the recipe asks for a checkpoint after this step."""
        every = self.recipe.checkpoint.every_steps
        return step == self.recipe.trainer.steps or (every > 0 and step % every == 0)

    def _answer(self, step: int, error: Exception | None) -> None:
        """Report to the supervisor that its requested save is done: entries may also come from saves begun before."""
        if self.leader:
            answer = {"step": None, "reason": str(error)} if error is not None else {"step": step, "reason": ""}
            path = save_answer_path(self.context.run, self.context.attempt)
            ReportedFile(path).put(msgspec.json.encode(answer) + b"\n")

    def _finish_saving(self) -> None:
        """Wait for the last save. A run whose end is not on disk has not ended well."""
        error = self.saver.wait(self.recipe.checkpoint.save_timeout_s)
        if error is not None:
            raise error


def _sharing(recipe: Recipe) -> Sharing | None:
    """Return the settings for sharing rollouts on a node; None unless context-parallel ranks run on one node.

    Ranks of one context-parallel group train on the same rollouts.
    """
    warehouse = recipe.rollouts.warehouse
    together = recipe.trainer.parallelism.cp > 1 and int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > 1
    if not together or warehouse.backend != "embedded" or warehouse.directory is None:
        return None
    return Sharing(Path(warehouse.directory), limit_bytes=int(warehouse.limit_gib * (1 << 30)))
