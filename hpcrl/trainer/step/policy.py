"""The policy under training: model, optimizer, and what one optimizer step does with a batch."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import tensor as dtensor
from torch.distributed.tensor import Replicate, Shard

from hpcrl.config.recipe import Recipe
from hpcrl.dock.wire import BatchShard
from hpcrl.modeling.adapters import adapt, init_adapters
from hpcrl.modeling.checkpoint_io.carried import CarriedTensor, carry, find_mtp_tensors
from hpcrl.modeling.checkpoint_io.load import load_model_dir
from hpcrl.modeling.context import RoutedExpertsRecorder
from hpcrl.modeling.decoder import Decoder, HeadFn
from hpcrl.modeling.fp8.backends import Backend
from hpcrl.modeling.hidden_matrices import hidden_matrices
from hpcrl.modeling.parallelize import sum_over_copies
from hpcrl.modeling.spec import spec_of
from hpcrl.models.arch import ModelArch
from hpcrl.runs.token_ratios import RolloutRatios
from hpcrl.trainer.batch.routed_experts import RoutedExpertsComparison
from hpcrl.trainer.batch.tensors import TokenBatch
from hpcrl.trainer.kernels import TrainerKernels, apply_kernels, find_kernels
from hpcrl.trainer.memory.optimizer import HostAdamW
from hpcrl.trainer.memory.tools import apply_memory_tools, find_tools
from hpcrl.trainer.parallel.dispatcher import find_dispatcher, use_dispatcher
from hpcrl.trainer.parallel.mesh import Parallel
from hpcrl.trainer.precision import apply_precision, find_precision
from hpcrl.trainer.step.base_digest import base_digest
from hpcrl.trainer.step.freezing import freeze_parameters
from hpcrl.trainer.step.head import chunked_logprobs, loss_in_pieces, whole_logprobs
from hpcrl.trainer.step.losses import PolicyLoss, TrainedTokens, make_loss, policy_loss, supervised_loss
from hpcrl.trainer.step.metrics import TokenSums
from hpcrl.trainer.step.muon import Muon
from hpcrl.trainer.step.nonfinite import GradientWatch
from hpcrl.trainer.step.optim import clip_gradients, learning_rate, make_optimizer, set_learning_rate
from hpcrl.trainer.step.ratio_sample import RatioSample
from hpcrl.trainer.step.reference import ReferencePolicy, logprobs_of
from hpcrl.trainer.token_loss import TokenLoss
from hpcrl.weights.read.model_directory import find_weight_files

_log = logging.getLogger(__name__)


class TrainerPolicy:
    """Sharded model and optimizer, and the steps they make. All ranks call every method together."""

    _ratios: RatioSample | None = None
    """Log-ratios of some rollouts of the last step, on rank 0."""

    def __init__(self, recipe: Recipe, arch: ModelArch, parallel: Parallel, *, model_dir: Path | None) -> None:
        """Build the model, shard it, and read this rank's shards. Collective.

        Parameters
        ----------
        recipe:
            Loss, optimizer, dtype and number of steps.
        arch:
            Architecture of the model.
        parallel:
            The ranks.
        model_dir:
            Directory of the weights; None leaves them unset, for a checkpoint to fill, which never has the weights
            that adapters change.

        Raises
        ------
        UsageError, ValueError, PeerLostError
            On all ranks, where one of them cannot read the model (see `load_model_dir`) or lacks the dispatcher, the
            compiler or the FP8 products of the recipe, or where what the recipe freezes, adapts or keeps out of FP8
            does not fit the model (see `freeze_parameters`, `adapt` and `use_fp8`).
        """
        self.recipe, self.arch, self.parallel = recipe, arch, parallel
        self._replay = recipe.trainer.router_replay
        spec, memory = spec_of(arch), recipe.trainer.memory
        self._token_loss = _make_loss(recipe, parallel)
        parallel.world.all_succeed(partial(find_tools, memory, parallel.device), "looking for a compiler")
        find = partial(find_dispatcher, recipe.trainer, parallel.device)
        parallel.world.all_succeed(lambda: find() is None, "selecting the dispatcher")
        fp8 = recipe.trainer.precision.fp8
        multipliers: list[Backend | None] = []
        parallel.world.all_succeed(
            lambda: multipliers.append(find_precision(fp8, parallel.device)), "selecting the FP8 backend"
        )
        kernels: list[TrainerKernels] = []
        parallel.world.all_succeed(
            lambda: kernels.append(find_kernels(recipe.trainer, arch, parallel.device)), "trying kernels"
        )
        dtype, lora, multiplier = getattr(torch, recipe.trainer.dtype), recipe.trainer.lora, multipliers[0]
        self.kernels = kernels[0].names | ({} if multiplier is None else {"fp8": multiplier.name})
        """Kernels for attention, and the backend for products in FP8."""

        def sharded(master: torch.dtype, choose_trained: Callable[[Decoder], object], *, on_host: bool) -> Decoder:
            # no rank ever holds the whole model: memory is allocated after sharding
            model = spec.build(arch, device="meta", dtype=master)
            apply_precision(model, fp8, multiplier)
            apply_kernels(model, kernels[0])
            choose_trained(model)
            spec.parallelize(model, parallel.mesh, dtype=dtype, on_host=on_host)
            use_dispatcher(model, parallel.mesh, recipe.trainer, find(), timeout_s=recipe.collective_timeout_s)
            apply_memory_tools(model, memory, parallel.device, dtype=dtype)
            model.materialise(parallel.device, on_host=on_host)
            return model

        if lora is None:
            choose = partial(freeze_parameters, patterns=recipe.trainer.freeze)
            self.model = sharded(torch.float32, choose, on_host=memory.parameter_offload)
        else:
            self.model = sharded(dtype, partial(adapt, config=lora), on_host=memory.parameter_offload)
        self._watch = GradientWatch(self.model)
        self._carry_mtp()
        if model_dir is not None:
            read = partial(load_model_dir, self.model, self.model.adapter, model_dir)
            parallel.world.all_succeed(read, f"reading {model_dir}")
            if parallel.world.rank == 0 and (ignored := find_weight_files(model_dir).ignored):
                _log.warning("not read in %s, as they are not the model's: %s", model_dir, ", ".join(ignored))
        self.base: Tensor | None = None
        """Digest of the weights that adapters change; None where there are none."""
        if lora is not None:
            assert model_dir is not None, "adapters are trained on a start model"
            init_adapters(self.model, recipe.seed)
            self.base = base_digest(self.model, parallel.sharding.group)
        self.reference: ReferencePolicy | None = None
        """Reference that the policy is kept close to; None without a penalty."""
        if recipe.algorithm.kl is not None:

            def frozen(on_host: bool) -> Decoder:
                return sharded(dtype, lambda model: model.requires_grad_(requires_grad=False), on_host=on_host)

            self.reference = ReferencePolicy(recipe, parallel, self.model, frozen)
        trained = [(name, parameter) for name, parameter in self.model.named_parameters() if parameter.requires_grad]
        self.optimizer = make_optimizer(
            trained,
            recipe.trainer.optimizer,
            on_host=memory.optimizer_offload,
            matrices=hidden_matrices(self.model) if recipe.trainer.optimizer.kind == "muon" else None,
        )

    def _carry_mtp(self) -> None:
        """Give the model room for the published tensors of multi-token prediction, cut by rows. Collective."""
        if not self.arch.num_nextn_predict_layers:
            return
        model_dir, keep = Path(self.recipe.model.path), self.recipe.trainer.mtp_tensors == "keep"
        find = partial(find_mtp_tensors, model_dir, self.model.adapter, checked=keep)
        found = self.parallel.world.on_leader(find, f"looking for multi-token prediction in {model_dir}")
        if found and self.parallel.world.rank == 0:
            what = "carried through as they are" if keep else "left out (trainer.mtp_tensors: drop)"
            _log.info("%d tensors of multi-token prediction are %s", len(found), what)
        if not keep:
            return
        mesh = self.parallel.mesh.sharding

        def empty(own: CarriedTensor) -> Tensor:
            cut = Shard(0) if own.shape else Replicate()
            # replicated dimensions of the mesh precede the sharded one
            placements = [*[Replicate()] * (mesh.ndim - 1), cut]
            return dtensor.empty(own.shape, dtype=getattr(torch, own.dtype), device_mesh=mesh, placements=placements)

        carry(self.model, found, empty)

    def forward_backward(self, shard: BatchShard) -> TokenSums:
        """Add the gradient of this rank's micro-batches to ``grad``; returns sums of this rank.

        Raises
        ------
        ValueError
            The shard does not keep the dock's contract.
        """
        context = self.parallel.mesh.get_optional_mesh("cp")
        # ranks that share a context have the same tokens: one of them counts
        counts = context is None or context.get_local_rank() == 0
        sums = TokenSums.of_shard(
            shard, self.parallel.device, counts=counts, replay=self._replay, loss_metrics=self._token_loss.metrics
        )
        # a context-parallel rank has only parts of a rollout, in another order: such runs have no record
        samples = self.parallel.world.rank == 0 and context is None and self.recipe.sft is None
        self._ratios = RatioSample.of_shard(shard) if samples else None
        self._watch.begin_step(shard)
        if self.reference is not None:
            self.reference.begin_step(shard.step)
        environments = shard.stats.environment_numbers()
        for number, micro_batch in enumerate(shard.micro_batches, start=1):
            last = number == len(shard.micro_batches)
            sum_over_copies(self.model, now=last)
            batch = TokenBatch.from_wire(micro_batch, self.arch, environments=environments)
            if context is not None:
                batch = batch.cut(context.get_group(), self.recipe.trainer.parallelism.cp_scheme)
            batch = batch.to(self.parallel.device)
            comparison = None if batch.routes is None else RoutedExpertsComparison(batch.routes)
            self._watch.begin(batch.attention.sequences)
            peers = None
            if context is not None and self.recipe.algorithm.loss.is_of_rollouts:
                peers = context.get_group()
            probe = number == 1 and self._probes(shard.step)
            unreplayed = self._unreplayed(batch) if probe else None
            reference = None if self.reference is None else self.reference.logprobs(batch)
            # without trained tokens the loss is 0, and joins the collectives of ranks that have some
            total = shard.stats.total_sampled_tokens if batch.num_trained else 1
            loss, entropies = self._loss(batch, comparison, peers, total, reference)
            if isinstance(self.optimizer, HostAdamW | Muon) and last:
                self.optimizer.prefetch()
            if comparison is not None:
                sums.add_routes(comparison, batch)
            loss.loss.backward()  # type: ignore[no-untyped-call]
            if batch.num_trained:
                sums.add(loss, entropies, batch.versions, batch.context_versions, batch.environments)
                if self._ratios is not None:
                    self._ratios.add(number, loss.log_ratio)
                if unreplayed is not None:
                    sums.add_probe(loss, unreplayed)
                if reference is not None:
                    sums.add_reference(reference - (loss.log_ratio + batch.engine_logprobs))
        return sums

    def take_ratios(self) -> list[RolloutRatios]:
        """Return the log-ratios of some rollouts of the last step, and forget them; none on ranks other than 0."""
        sample, self._ratios = self._ratios, None
        return [] if sample is None else sample.fetch()

    def _probes(self, step: int) -> bool:
        every = self.recipe.trainer.replay_probe_steps
        return self._replay and every > 0 and step % every == 0

    @torch.no_grad()
    def held_out_loss(self, shard: BatchShard, on_progress: Callable[[], None]) -> Tensor:
        """Return the sum of the cross entropy over this rank's tokens of a shard, and their number: ``[2]`` float64.

        All ranks call it together; on ranks that share a context each counts its own tokens. ``on_progress`` is called
        after each micro-batch.
        """
        context = self.parallel.mesh.get_optional_mesh("cp")
        found = torch.zeros(2, dtype=torch.float64)
        for micro_batch in shard.micro_batches:
            batch = TokenBatch.from_wire(micro_batch, self.arch)
            if context is not None:
                batch = batch.cut(context.get_group(), self.recipe.trainer.parallelism.cp_scheme)
            logprobs = logprobs_of(self.model, self.recipe, batch.to(self.parallel.device))
            if batch.num_trained:
                found += torch.tensor([-float(logprobs.double().sum()), len(logprobs)], dtype=torch.float64)
            on_progress()
        return found

    def _unreplayed(self, batch: TokenBatch) -> Tensor:
        """Return the log-ratio of each trained token if routers choose the experts."""
        return logprobs_of(self.model, self.recipe, batch) - batch.engine_logprobs

    def _loss(
        self,
        batch: TokenBatch,
        record: RoutedExpertsRecorder | None,
        peers: dist.ProcessGroup | None,
        total: int,
        reference: Tensor | None,
    ) -> tuple[PolicyLoss, Tensor]:
        """Return the loss of one micro-batch and the entropy of each trained token; ``total`` as in `policy_loss`."""
        chunk, whole = self.recipe.trainer.memory.lm_head_chunk_tokens, self.recipe.algorithm.loss.is_of_rollouts
        teacher = batch.teacher_logprobs if "teacher" in self._token_loss.needs else None
        if teacher is None and "teacher" in self._token_loss.needs:
            teacher = torch.full_like(batch.engine_logprobs, float("nan"))
        measures = bool(self._token_loss.metrics) and self.recipe.sft is None
        # pieces of tokens have their parts of it
        shape = (len(self._token_loss.metrics), len(batch.targets))
        metrics = batch.engine_logprobs.new_empty(shape) if measures else None
        temperature, targets = self.recipe.rollouts.sampling.temperature, batch.targets
        supervised = self.recipe.sft is not None

        def loss_at(logprobs: Tensor, rows: slice) -> PolicyLoss:
            if supervised:
                return supervised_loss(logprobs, total_tokens=total)
            engine, advantages = batch.engine_logprobs[rows], batch.advantages[rows]
            tokens = TrainedTokens(logprobs, engine, advantages, batch.sequences[rows], batch.num_sequences, peers)
            if reference is not None:
                tokens = tokens._replace(reference_logprobs=reference[rows])
            if teacher is not None:
                tokens = tokens._replace(teacher_logprobs=teacher[rows])
            part = policy_loss(tokens, self._token_loss, total_tokens=total, kl=self.recipe.algorithm.kl)
            if metrics is not None and part.metrics is not None:
                metrics[:, rows] = part.metrics
            return part

        head: HeadFn
        if chunk is None:
            head = partial(whole_logprobs, targets=targets, temperature=temperature)
        else:
            make = chunked_logprobs if whole else partial(loss_in_pieces, loss=loss_at)
            pieces = None if chunk == "auto" else chunk
            head = partial(make, targets=targets, temperature=temperature, tokens=pieces)
        found = self.model(batch.input_ids, batch.context(record, replay=self._replay), head)
        if chunk is None or whole:
            logprobs, entropies = found
            return loss_at(logprobs, slice(None)), entropies
        loss, masked, log_ratio, entropies = found
        return PolicyLoss(loss, masked, log_ratio, metrics), entropies

    def optimizer_step(self, step: int, *, nonfinite_tokens: int = 0) -> tuple[float, float]:
        """Clip, update and reset gradients; return the gradient norm before clipping and the learning rate.

        Parameters
        ----------
        nonfinite_tokens:
            Trained tokens of all ranks whose log-probabilities are not finite, for the error's message.

        Raises
        ------
        NonFiniteGradientError
            On all ranks: the gradient is not finite and is forgotten; weights and optimizer are as before.
        """
        config = self.recipe.trainer.optimizer
        norm = clip_gradients(self.model.parameters(), config.max_grad_norm, self.parallel.sharding.group)
        if not norm < float("inf"):
            # the norm is that of all ranks, so that all of them enter this collective
            world = self.parallel.world
            error = self._watch.error(self.model, step, norm, world, nonfinite_tokens=nonfinite_tokens)
            self.optimizer.zero_grad()
            raise error
        self._watch.end_step()
        rate = learning_rate(config, step, self.recipe.trainer.steps)
        set_learning_rate(self.optimizer, rate)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm, rate


def _make_loss(recipe: Recipe, parallel: Parallel) -> TokenLoss:
    """Make the loss of the recipe; raises on all ranks where one of them cannot. Collective."""
    made: list[TokenLoss] = []
    parallel.world.all_succeed(lambda: made.append(make_loss(recipe.algorithm.loss)), "making the loss")
    return made[0]
