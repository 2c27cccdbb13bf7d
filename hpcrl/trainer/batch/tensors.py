"""A micro-batch of the dock as tensors, and the log-probabilities of its sampled tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from hpcrl.config.recipe import ContextScheme
from hpcrl.dock.wire import MicroBatch
from hpcrl.modeling.attention.balanced_chunks import head_tail
from hpcrl.modeling.attention.context_parallel import ContextParallelAttention
from hpcrl.modeling.attention.latent_gather import LatentGather
from hpcrl.modeling.attention.packed import PackedAttention
from hpcrl.modeling.attention.ring import RingAttention
from hpcrl.modeling.context import BatchContext, ReplayedExperts, RoutedExpertsRecorder
from hpcrl.modeling.memory.transfer import move
from hpcrl.models.arch import ModelArch
from hpcrl.trainer.batch.fused_logits import find_programs
from hpcrl.trainer.batch.routed_experts import cut_experts, engine_experts


class TokenBatch(NamedTuple):
    """One forward pass. ``T`` tokens, of which ``N`` are trained; ``N`` may be 0, ``T`` is at least 1.

    It is made and cut on the host, where nothing has to be waited for, and goes to the device in one copy: how many
    tokens, trained tokens and sequences there are, and where these begin, the host knows without asking.

    Attributes
    ----------
    input_ids:
        ``[T]`` int64.
    attention:
        Knows positions and sequence boundaries.
    select:
        ``[max(N, 1)]`` int64: the tokens whose logits predict the trained ones, that is, those before them.
        Without trained tokens it is the first token: its logits keep this rank in the collectives.
    targets:
        ``[N]`` int64: the trained tokens.
    engine_logprobs, advantages:
        ``[N]`` float32.
    versions:
        ``[N]`` int64: policy version that sampled each token.
    context_versions:
        ``[N]`` int64: oldest version that the engine's context of each token was computed with.
    sequences:
        ``[N]`` int64: sequence of each token. A rollout has one, or one for each of its branches.
    num_sequences:
        Number of sequences; ranks may share each of them.
    routes:
        Experts that engines chose for all ``T`` tokens; None where they did not return them.
    teacher_logprobs:
        ``[N]`` float32: those of a teacher, NaN for tokens without one; None where no token has one.
    environments:
        ``[N]`` int64: number of the environment of each token, -1 where it is unknown; None where all are.
    """

    input_ids: Tensor
    attention: PackedAttention | ContextParallelAttention | RingAttention | LatentGather
    select: Tensor
    targets: Tensor
    engine_logprobs: Tensor
    advantages: Tensor
    versions: Tensor
    context_versions: Tensor
    sequences: Tensor
    num_sequences: int
    routes: ReplayedExperts | None = None
    teacher_logprobs: Tensor | None = None
    environments: Tensor | None = None

    @property
    def num_trained(self) -> int:
        return len(self.targets)

    def context(self, record: RoutedExpertsRecorder | None = None, *, replay: bool = False) -> BatchContext:
        """Return the context of the forward pass of the batch; with ``replay`` routers take the engines' experts."""
        context = self.attention.context(self.select, record)
        return replace(context, replay=self.routes) if replay else context

    @classmethod
    def from_wire(
        cls, batch: MicroBatch, arch: ModelArch | None = None, *, environments: Mapping[int, int] | None = None
    ) -> TokenBatch:
        """Return the tensors of a micro-batch, on the host. An empty one becomes one token that is not trained.

        Parameters
        ----------
        arch:
            Architecture for the batch's routed experts; None leaves them out.
        environments:
            Number of the environment of each group, by the index of the group; empty or None where it is unknown.

        Raises
        ------
        ValueError
            Lengths do not fit each other, the first token of a sequence is to be trained, or routed experts are not of
            this model (`engine_experts`).
        """
        total = len(batch.token_ids)
        if total == 0:
            ids, starts = np.zeros(1, np.int64), np.array([0, 1], np.int64)
            trained, contexts = np.zeros(0, np.int64), np.zeros(0, np.int32)
        else:
            _check(batch)
            ids, starts = batch.token_ids.astype(np.int64), batch.cu_seqlens.astype(np.int64)
            trained = np.flatnonzero(batch.loss_mask)
            # a sequence begins with context of the policy, whose version is that of the whole context
            contexts = np.repeat(batch.versions[starts[:-1]], np.diff(starts))[trained]
        attention = PackedAttention(torch.from_numpy(starts))
        where, teacher = torch.from_numpy(trained), batch.teacher_logprobs
        input_ids, sequences = torch.from_numpy(ids), attention.sequences[where]
        numbers = None
        if environments and total and batch.rollouts:
            numbers = torch.tensor([environments.get(group, -1) for group, _ in batch.rollouts])[sequences]
        return cls(
            input_ids=input_ids,
            attention=attention,
            select=where - 1 if len(trained) else torch.zeros(1, dtype=torch.int64),
            targets=input_ids[where],
            engine_logprobs=torch.from_numpy(batch.logprobs[trained].astype(np.float32)),
            advantages=torch.from_numpy(batch.advantages[trained].astype(np.float32)),
            versions=torch.from_numpy(batch.versions[trained].astype(np.int64)),
            context_versions=torch.from_numpy(contexts.astype(np.int64)),
            sequences=sequences,
            num_sequences=len(starts) - 1,
            routes=engine_experts(batch, arch) if total and arch is not None else None,
            teacher_logprobs=None if teacher is None else torch.from_numpy(teacher[trained].astype(np.float32)),
            environments=numbers,
        )

    def cut(self, group: dist.ProcessGroup, scheme: ContextScheme = "ulysses") -> TokenBatch:
        """Return this rank's part of a batch, still on the host, that all ranks of a context-parallel ``group`` have.

        Each rank gets an equal range of the tokens (``ulysses``), or chunks of each sequence with equal work (``ring``,
        ``gather``). Missing tokens are filled up with tokens of the batch as a sequence of their own, so that routers
        distribute them like others. A trained token belongs to the rank that has the token before it, whose logits
        predict it.
        """
        assert isinstance(self.attention, PackedAttention)
        ranks, total, starts = dist.get_world_size(group), len(self.input_ids), self.attention.starts
        if scheme != "ulysses":
            # no rank without a token
            wanting = 0 if all(head_tail(starts, rank, ranks).starts[-1] for rank in range(ranks)) else 2 * ranks
        else:
            wanting = -total % ranks
        cu_seqlens = torch.tensor([*starts, total + wanting] if wanting else starts)
        attention: ContextParallelAttention | RingAttention | LatentGather
        if scheme == "ulysses":
            attention = ContextParallelAttention(PackedAttention(cu_seqlens), group)
            own = torch.arange(total + wanting)[attention.own]
        else:
            attention = (RingAttention if scheme == "ring" else LatentGather)(cu_seqlens, group)
            own = attention.own
        places = torch.full((total + wanting,), -1)
        places[own] = torch.arange(len(own))
        select = places[self.select]
        mine = select >= 0
        select = select[mine]
        # without trained tokens the batch selects a token all the same
        trained = mine[: self.num_trained]
        fill = torch.arange(wanting) % total
        return TokenBatch(
            input_ids=torch.cat((self.input_ids, self.input_ids[fill]))[own],
            attention=attention,
            select=select if len(select) else select.new_zeros(1),
            targets=self.targets[trained],
            engine_logprobs=self.engine_logprobs[trained],
            advantages=self.advantages[trained],
            versions=self.versions[trained],
            context_versions=self.context_versions[trained],
            sequences=self.sequences[trained],
            num_sequences=self.num_sequences,
            routes=None if self.routes is None else cut_experts(self.routes, own, wanting),
            teacher_logprobs=None if self.teacher_logprobs is None else self.teacher_logprobs[trained],
            environments=None if self.environments is None else self.environments[trained],
        )

    def to(self, device: torch.device) -> TokenBatch:
        """Return the batch on ``device``; one asynchronous copy moves it."""
        return move(self, device)


def _check(batch: MicroBatch) -> None:
    total, starts = len(batch.token_ids), batch.cu_seqlens
    for name in ("loss_mask", "logprobs", "versions", "advantages"):
        if len(getattr(batch, name)) != total:
            raise ValueError(f"micro-batch of {total} tokens has {len(getattr(batch, name))} {name}")
    if len(starts) < 2 or starts[0] != 0 or starts[-1] != total or (np.diff(starts) < 1).any():
        raise ValueError(f"cu_seqlens {starts.tolist()} do not cut {total} tokens into sequences")
    if batch.loss_mask[starts[:-1]].any():
        raise ValueError("the first token of a sequence cannot be a sampled one")


def token_logprobs(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Return the log-probability of each target, and each distribution's entropy, after the temperature.

    Parameters
    ----------
    logits:
        ``[N, vocab_size]`` with gradient, worked on in float32. The backward pass puts their gradient into their
        memory, so no other computation may need the logits then.
    targets:
        ``[N]`` int64.
    temperature:
        Divides the logits, as the engine does.

    Returns
    -------
    tuple
        ``[N]`` log-probabilities with gradient, and ``[N]`` entropies in nats, detached:
        ``H = log Z - Σ p logit``.
    """
    found: tuple[Tensor, Tensor] = _TokenLogprobs.apply(logits, targets, temperature)  # type: ignore[no-untyped-call]
    return found


PIECE_BYTES = {"cpu": 1 << 20}
"""Bytes of logits in float32 that are processed at a time: those of a CPU fit its cache, so that memory is read and
written once."""
_LARGE_PIECE_BYTES = 64 << 20
"""The same for other devices, which need larger pieces to be fully used."""


class Normalised(NamedTuple):
    """Log-probability of each row's target, entropy in nats, and log of the sum; each ``[N]`` float32."""

    logprobs: Tensor
    entropies: Tensor
    normaliser: Tensor


class _TokenLogprobs(torch.autograd.Function):
    """By hand, because the copies of logits that autograd makes on both ways can be done without: a piece at a time."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        found = normalise(logits, targets, temperature)
        ctx.save_for_backward(logits, targets, found.normaliser)
        ctx.temperature = temperature
        ctx.mark_non_differentiable(found.entropies)
        return found.logprobs, found.entropies

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        logits, targets, normaliser = ctx.saved_tensors
        put_gradient(logits, targets, normaliser, gradients[0], ctx.temperature)
        return logits, None, None


def normalise(logits: Tensor, targets: Tensor, temperature: float) -> Normalised:
    """Return log-probabilities and entropies of ``logits [N, vocab_size]``, computed in at least float32.

    ``targets`` ``[N]`` int64. Nothing has a gradient.
    """
    if (programs := find_programs(logits)) is not None:
        return Normalised(*programs.normalise(logits, targets, temperature))
    wide = _wide(logits)
    own = logits.gather(1, targets[:, None])[:, 0].to(wide)
    if temperature != 1.0:
        own = own / temperature
    # exp(logit - largest) summed over the vocabulary; the same times logit
    largest, total, weighted = (logits.new_empty(len(logits), dtype=wide) for _ in range(3))
    for rows in _pieces(logits):
        piece = logits[rows].to(wide)
        if temperature != 1.0:
            piece = piece / temperature
        torch.amax(piece, 1, out=largest[rows])
        exponentials = (piece - largest[rows, None]).exp_()
        torch.sum(exponentials, 1, out=total[rows])
        torch.sum(exponentials.mul_(piece), 1, out=weighted[rows])
        # or they would be held until the next piece has its own
        del piece, exponentials
    normaliser = largest + total.log()
    return Normalised(own - normaliser, normaliser - weighted / total, normaliser)


def put_gradient(logits: Tensor, targets: Tensor, normaliser: Tensor, slopes: Tensor, temperature: float) -> None:
    """Put the gradient of a loss into the memory of ``logits``, rounded to their dtype.

    Parameters
    ----------
    logits, targets, temperature:
        Argument of `normalise`.
    normaliser:
        Result of `normalise`.
    slopes:
        ``[N]`` float32: the loss by the log-probability of each target.
    """
    if (programs := find_programs(logits)) is not None:
        programs.put_gradient(logits, targets, normaliser, slopes, temperature)
        return
    scale, wide = slopes[:, None] / temperature, _wide(logits)
    for rows in _pieces(logits):
        # float32 logits are not copied, but changed in place
        piece = logits[rows].to(wide)
        if temperature != 1.0:
            piece = piece.div_(temperature)
        # of a log-probability: one at its target, less all probabilities
        piece.sub_(normaliser[rows, None]).exp_().mul_(-scale[rows])
        piece.scatter_add_(1, targets[rows, None], scale[rows])
        if logits.dtype != wide:
            logits[rows] = piece
        del piece


def _wide(logits: Tensor) -> torch.dtype:
    return torch.promote_types(logits.dtype, torch.float32)


def _pieces(logits: Tensor) -> Iterator[slice]:
    most = PIECE_BYTES.get(logits.device.type, _LARGE_PIECE_BYTES)
    step = max(1, most // (4 * logits.shape[1]))
    for begin in range(0, len(logits), step):
        yield slice(begin, begin + step)
