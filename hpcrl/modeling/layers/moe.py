"""Routed experts: routers that choose them, the experts themselves, and the block of a sparse layer.

Experts are fused, ``gate_up_proj [E, 2F, D]`` and ``down_proj [E, D, F]``, so that FSDP and expert parallelism
shard one tensor a layer; `hpcrl.modeling.hf` maps them to the per-expert names of a published model.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpcrl.modeling.blocks import local_part
from hpcrl.modeling.context import BatchContext
from hpcrl.modeling.layers.dispatch import Dispatcher, LocalDispatcher

__all__ = [
    "Choice",
    "ChosenSoftmaxRouter",
    "ClampedExperts",
    "Experts",
    "SigmoidRouter",
    "SoftmaxRouter",
    "SparseMLP",
    "SquaredExperts",
]


class Choice(NamedTuple):
    """What a router says of ``T`` tokens.

    Attributes
    ----------
    weights:
        ``[T, k]`` float32, with gradient.
    experts:
        ``[T, k]`` int64, ordered by falling preference.
    """

    weights: Tensor
    experts: Tensor


class SoftmaxRouter(nn.Linear):
    """The most likely experts by a softmax in float32."""

    def __init__(self, hidden_size: int, experts: int, *, top_k: int, normalise: bool) -> None:
        super().__init__(hidden_size, experts, bias=False)
        self.top_k, self.normalise = top_k, normalise

    def choose(self, x: Tensor, given: Tensor | None = None) -> Choice:
        """Of tokens ``[T, hidden_size]``; with ``given``, ``[T, k]`` experts, only what these weigh."""
        probabilities = self(x).softmax(-1, dtype=torch.float32)
        chosen = probabilities.detach().topk(self.top_k, dim=-1).indices if given is None else given
        weights = probabilities.gather(1, chosen)
        if self.normalise:
            weights = weights / weights.sum(-1, keepdim=True)
        return Choice(weights, chosen)


class ChosenSoftmaxRouter(nn.Linear):
    """The experts with the highest scores, with a bias; weights are a softmax over the chosen alone, in float32."""

    def __init__(self, hidden_size: int, experts: int, *, top_k: int) -> None:
        super().__init__(hidden_size, experts, bias=True)
        self.top_k = top_k

    def choose(self, x: Tensor, given: Tensor | None = None) -> Choice:
        """Of tokens ``[T, hidden_size]``; with ``given``, ``[T, k]`` experts, only what these weigh."""
        scores = self(x)
        chosen = scores.detach().topk(self.top_k, dim=-1).indices if given is None else given
        return Choice(scores.gather(1, chosen).softmax(-1, dtype=torch.float32), chosen)


class SigmoidRouter(nn.Linear):
    """Scores by a sigmoid in float32; a correction bias takes part in the choice alone, and groups are chosen first.

    The bias is a buffer: no gradient reaches it, and RL does not move it.
    """

    e_score_correction_bias: Tensor

    def __init__(
        self, hidden_size: int, experts: int, *, top_k: int, normalise: bool, groups: int, top_groups: int, scale: float
    ) -> None:
        """Make the router.

        Parameters
        ----------
        groups, top_groups:
            Experts lie in ``groups`` groups of equal size; the best ``top_groups``, by their two best experts, are
            chosen from.
        scale:
            Of the weights.
        """
        super().__init__(hidden_size, experts, bias=False)
        self.top_k, self.normalise, self.scale = top_k, normalise, scale
        self.groups, self.top_groups = groups, top_groups
        self.register_buffer("e_score_correction_bias", torch.zeros(experts))

    def choose(self, x: Tensor, given: Tensor | None = None) -> Choice:
        """Of tokens ``[T, hidden_size]``; with ``given``, ``[T, k]`` experts, only what these weigh."""
        scores = F.linear(x.float(), self.weight.float()).sigmoid()
        chosen = self._preferred(scores) if given is None else given
        weights = scores.gather(1, chosen)
        if self.normalise:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return Choice(weights * self.scale, chosen)

    @torch.no_grad()
    def _preferred(self, scores: Tensor) -> Tensor:
        preferred = scores + self.e_score_correction_bias
        if self.top_groups < self.groups:
            by_group = preferred.view(len(scores), self.groups, -1)
            best = by_group.topk(2, dim=-1).values.sum(-1).topk(self.top_groups, dim=-1).indices
            closed = torch.ones_like(by_group[..., 0], dtype=torch.bool).scatter_(1, best, value=False)
            preferred = by_group.masked_fill(closed[..., None], float("-inf")).flatten(1)
        return preferred.topk(self.top_k, dim=-1).indices


class Experts(nn.Module):
    """The experts of a layer in two tensors; with expert parallelism these are DTensors: a rank has some experts."""

    def __init__(self, hidden_size: int, experts: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * intermediate_size, hidden_size))
        self.down_proj = nn.Parameter(torch.empty(experts, hidden_size, intermediate_size))

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        """Run tokens that are sorted by expert.

        Parameters
        ----------
        x:
            ``[assignments, hidden_size]``, sorted by expert.
        counts:
            ``[experts of this rank]`` assignments of each expert.
        """
        ends = counts.cumsum(0).to(torch.int32)
        gate, up = F.grouped_mm(x, local_part(self.gate_up_proj).transpose(1, 2), offs=ends).chunk(2, dim=-1)
        return F.grouped_mm(F.silu(gate) * up, local_part(self.down_proj).transpose(1, 2), offs=ends)


class SquaredExperts(nn.Module):
    """Experts without a gate, ``down(relu(up(x))²)``: ``up_proj [E, F, D]`` and ``down_proj [E, D, F]``."""

    def __init__(self, hidden_size: int, experts: int, intermediate_size: int) -> None:
        super().__init__()
        self.up_proj = nn.Parameter(torch.empty(experts, intermediate_size, hidden_size))
        self.down_proj = nn.Parameter(torch.empty(experts, hidden_size, intermediate_size))

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        """As `Experts.forward`."""
        ends = counts.cumsum(0).to(torch.int32)
        up = F.grouped_mm(x, local_part(self.up_proj).transpose(1, 2), offs=ends)
        return F.grouped_mm(F.relu(up).square(), local_part(self.down_proj).transpose(1, 2), offs=ends)


class ClampedExperts(nn.Module):
    """gpt-oss's experts: with biases, ``down((up + 1) · gate · sigmoid(alpha · gate))`` of clamped gates and ups.

    Tensors are ``[E, in, out]``, and gates and ups lie in turn, as they are published.
    """

    def __init__(self, hidden_size: int, experts: int, intermediate_size: int, *, alpha: float, limit: float) -> None:
        """Make the experts.

        Parameters
        ----------
        limit:
            Gates are clamped to it from above, ups from both sides.
        """
        super().__init__()
        self.alpha, self.limit = alpha, limit
        self.gate_up_proj = nn.Parameter(torch.empty(experts, hidden_size, 2 * intermediate_size))
        self.gate_up_proj_bias = nn.Parameter(torch.empty(experts, 2 * intermediate_size))
        self.down_proj = nn.Parameter(torch.empty(experts, intermediate_size, hidden_size))
        self.down_proj_bias = nn.Parameter(torch.empty(experts, hidden_size))

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        """As `Experts.forward`."""
        ends = counts.cumsum(0).to(torch.int32)
        experts = torch.arange(len(counts), device=x.device).repeat_interleave(counts, output_size=len(x))
        both = F.grouped_mm(x, local_part(self.gate_up_proj), offs=ends) + local_part(self.gate_up_proj_bias)[experts]
        gate, up = both[..., ::2].clamp(max=self.limit), both[..., 1::2].clamp(-self.limit, self.limit)
        mixed = (up + 1) * (gate * torch.sigmoid(gate * self.alpha))
        return F.grouped_mm(mixed, local_part(self.down_proj), offs=ends) + local_part(self.down_proj_bias)[experts]


class SparseMLP(nn.Module):
    """A router, the experts that it chooses, and shared experts beside them where there are any."""

    def __init__(
        self,
        layer: int,
        gate: SoftmaxRouter | SigmoidRouter | ChosenSoftmaxRouter,
        experts: nn.Module,
        shared_experts: nn.Module | None = None,
        *,
        latent_size: int | None = None,
    ) -> None:
        """Put the parts together.

        Parameters
        ----------
        experts:
            Called with rows sorted by expert and the number of rows of each, as `Experts` is.
        latent_size:
            Width of what experts take and give, where projections lead there and back; None: there are none.
        """
        super().__init__()
        self.layer = layer
        self.gate = gate
        self.experts = experts
        self.shared_experts = shared_experts
        self.fc1_latent_proj = self.fc2_latent_proj = None
        if latent_size is not None:
            self.fc1_latent_proj = nn.Linear(gate.in_features, latent_size, bias=False)
            self.fc2_latent_proj = nn.Linear(latent_size, gate.in_features, bias=False)
        self.dispatcher: Dispatcher = LocalDispatcher(gate.out_features)

    def forward(self, x: Tensor, context: BatchContext) -> Tensor:
        """``[T, hidden_size]`` to the same."""
        weights, chosen = self.gate.choose(x, context.routes.get(self.layer))
        if context.record is not None:
            context.record(self.layer, chosen)
        taken = x if self.fc1_latent_proj is None else self.fc1_latent_proj(x)
        rows, counts, combine = self.dispatcher.dispatch(taken, weights, chosen)
        mixed = combine(self.experts(rows, counts))
        if self.fc2_latent_proj is not None:
            mixed = self.fc2_latent_proj(mixed)
        return mixed if self.shared_experts is None else mixed + self.shared_experts(x)
