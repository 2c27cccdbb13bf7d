"""Routed experts: routers that choose them, the experts themselves, and the block of a sparse layer.

Experts are fused, ``gate_up_proj [E, 2F, D]`` and ``down_proj [E, D, F]``, so that FSDP and expert parallelism
shard one tensor a layer; `hpcrl.modeling.hf` maps them to the per-expert names of a published model.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpcrl.modeling.blocks import local_part
from hpcrl.modeling.compile.opaque import opaque
from hpcrl.modeling.context import BatchContext
from hpcrl.modeling.layers.dispatch import Dispatcher, LocalDispatcher
from hpcrl.modeling.layers.swiglu import swiglu
from hpcrl.modeling.low_rank import GroupedAdapter, multiply_aligned, multiply_groups


class Router(nn.Linear):
    """Scores of experts, the experts that it prefers, and the weights of any that are taken.

    These are apart because a replay takes the experts that an engine preferred and weighs them by scores of its own.
    """

    top_k: int

    def scores(self, x: Tensor) -> Tensor:
        """Map ``[T, hidden_size]`` to scores ``[T, experts]``, with gradient."""
        raise NotImplementedError

    def prefer(self, scores: Tensor) -> Tensor:
        """Return the ``k`` preferred experts of ``scores``: ``[T, k]`` int64, best first, without gradient."""
        return scores.detach().topk(self.top_k, dim=1).indices

    def weigh(self, scores: Tensor, taken: Tensor) -> Tensor:
        """Return weights ``[T, k]`` float32 of the experts ``taken [T, k]`` int64, with gradient through ``scores``."""
        raise NotImplementedError


class SoftmaxRouter(Router):
    """The most likely experts by a softmax in float32."""

    def __init__(self, hidden_size: int, experts: int, *, top_k: int, normalise: bool) -> None:
        super().__init__(hidden_size, experts, bias=False)
        self.top_k, self.normalise = top_k, normalise

    def scores(self, x: Tensor) -> Tensor:
        """Return probabilities, ``[T, experts]`` float32."""
        probabilities: Tensor = self(x).softmax(1, dtype=torch.float32)
        return probabilities

    def weigh(self, scores: Tensor, taken: Tensor) -> Tensor:
        """See `Router`."""
        weights = scores.gather(1, taken)
        return weights / weights.sum(1, keepdim=True) if self.normalise else weights


class ChosenSoftmaxRouter(Router):
    """The experts with the highest scores, with a bias; weights are a softmax over the chosen alone, in float32."""

    def __init__(self, hidden_size: int, experts: int, *, top_k: int) -> None:
        super().__init__(hidden_size, experts, bias=True)
        self.top_k = top_k

    def scores(self, x: Tensor) -> Tensor:
        """Return logits, ``[T, experts]`` in the dtype of the model."""
        logits: Tensor = self(x)
        return logits

    def weigh(self, scores: Tensor, taken: Tensor) -> Tensor:
        """See `Router`."""
        return scores.gather(1, taken).softmax(1, dtype=torch.float32)


class SigmoidRouter(Router):
    """Scores by a sigmoid in float32; a correction bias takes part in the choice alone, and groups are chosen first.

    DeepSeek-V3, arXiv 2412.19437, section 2.1.2. The bias is a buffer: no gradient reaches it, and RL does not move it.
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
            Factor of the weights.
        """
        super().__init__(hidden_size, experts, bias=False)
        self.top_k, self.normalise, self.scale = top_k, normalise, scale
        self.groups, self.top_groups = groups, top_groups
        self.register_buffer("e_score_correction_bias", torch.zeros(experts))

    def scores(self, x: Tensor) -> Tensor:
        """Return sigmoids, ``[T, experts]`` float32, without the bias."""
        return F.linear(x.float(), self.weight.float()).sigmoid()

    def weigh(self, scores: Tensor, taken: Tensor) -> Tensor:
        """See `Router`."""
        weights = scores.gather(1, taken)
        if self.normalise:
            weights = weights / (weights.sum(1, keepdim=True) + 1e-20)
        return weights * self.scale

    @torch.no_grad()
    def prefer(self, scores: Tensor) -> Tensor:
        """See `Router`."""
        preferred = scores + self.e_score_correction_bias
        if self.top_groups < self.groups:
            by_group = preferred.view(len(scores), self.groups, -1)
            best = by_group.topk(2, dim=-1).values.sum(-1).topk(self.top_groups, dim=1).indices
            closed = torch.ones_like(by_group[..., 0], dtype=torch.bool).scatter_(1, best, value=False)
            preferred = by_group.masked_fill(closed[..., None], float("-inf")).flatten(1)
        return preferred.topk(self.top_k, dim=1).indices


class GroupedProduct(Protocol):
    """Rows that are sorted by expert, each multiplied with the matrix of its own."""

    def __call__(self, x: Tensor, weight: Tensor, counts: Tensor, *, parts: int = 1) -> Tensor:
        """Multiply ``x [rows, in]`` by ``weight [experts, out, in]``; expert ``e`` has ``counts[e]`` of the rows.

        ``parts`` matrices lie one behind the other in the matrix of an expert.
        """
        ...


def plain_product(x: Tensor, weight: Tensor, counts: Tensor, *, parts: int = 1) -> Tensor:
    """See `GroupedProduct`; in the dtype that it gets."""
    return multiply_groups(x, weight, counts)


class _GroupedExperts(nn.Module):
    """Experts whose matrices of a kind share one tensor, and may have adapters by its name."""

    def __init__(self) -> None:
        super().__init__()
        self.product: GroupedProduct = plain_product
        self.adapters = nn.ModuleDict()

    def multiply(self, name: str, x: Tensor, counts: Tensor, *, parts: int = 1) -> Tensor:
        """Apply `GroupedProduct` with the parameter ``name``, and add its adapter's result."""
        weight = local_part(getattr(self, name))
        if name not in self.adapters:
            return self.product(x, weight, counts, parts=parts)
        adapter = self.adapters[name]
        assert isinstance(adapter, GroupedAdapter)
        y = self.product(x, adapter.effective(weight), counts, parts=parts)
        return y + adapter(x, counts) if adapter.mode == "apart" else y


class Experts(_GroupedExperts):
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
        both = self.multiply("gate_up_proj", x, counts, parts=2)
        return self.multiply("down_proj", swiglu(both), counts)


class SquaredExperts(_GroupedExperts):
    """Experts without a gate, ``down(relu(up(x))²)``: ``up_proj [E, F, D]`` and ``down_proj [E, D, F]``."""

    def __init__(self, hidden_size: int, experts: int, intermediate_size: int) -> None:
        super().__init__()
        self.up_proj = nn.Parameter(torch.empty(experts, intermediate_size, hidden_size))
        self.down_proj = nn.Parameter(torch.empty(experts, hidden_size, intermediate_size))

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        """As `Experts.forward`."""
        up = self.multiply("up_proj", x, counts)
        return self.multiply("down_proj", F.relu(up).square(), counts)


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
        both = multiply_aligned(x, local_part(self.gate_up_proj), ends) + local_part(self.gate_up_proj_bias)[experts]
        gate, up = both[..., ::2].clamp(max=self.limit), both[..., 1::2].clamp(-self.limit, self.limit)
        mixed = (up + 1) * (gate * torch.sigmoid(gate * self.alpha))
        return multiply_aligned(mixed, local_part(self.down_proj), ends) + local_part(self.down_proj_bias)[experts]


class TokenGate(nn.Linear):
    """A number between 0 and 1 for each token; as a router it has no adapter and stays out of FP8."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__(hidden_size, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[T, hidden_size]`` to ``[T, 1]``."""
        numbers: Tensor = super().forward(x)
        return numbers.sigmoid()


class SparseMLP(nn.Module):
    """A router, the experts that it chooses, and shared experts if there are any."""

    def __init__(
        self,
        layer: int,
        gate: Router,
        experts: nn.Module,
        shared_experts: nn.Module | None = None,
        *,
        latent_size: int | None = None,
        shared_gate: bool = False,
    ) -> None:
        """Put the parts together.

        Parameters
        ----------
        experts:
            Called with rows sorted by expert and the number of rows of each, as `Experts` is.
        latent_size:
            Width of what experts take and give, where projections lead there and back; None: there are none.
        shared_gate:
            Whether the output of shared experts is multiplied with the sigmoid of a number from each token.
        """
        super().__init__()
        self.layer = layer
        self.gate = gate
        self.experts = experts
        self.shared_experts = shared_experts
        self.outer = nn.ModuleDict()
        """Common parts of the adapters of all experts."""
        self.fc1_latent_proj = self.fc2_latent_proj = None
        if latent_size is not None:
            self.fc1_latent_proj = nn.Linear(gate.in_features, latent_size, bias=False)
            self.fc2_latent_proj = nn.Linear(latent_size, gate.in_features, bias=False)
        self.shared_expert_gate = TokenGate(gate.in_features) if shared_gate else None
        self.dispatcher: Dispatcher = LocalDispatcher(gate.out_features)

    def forward(self, x: Tensor, context: BatchContext) -> Tensor:
        """Map ``[T, hidden_size]`` to the same shape."""
        scores = self.gate.scores(x)
        taken = self.take(scores, context)
        narrow = x if self.fc1_latent_proj is None else self.fc1_latent_proj(x)
        mixed = self.mix(narrow, self.gate.weigh(scores, taken), taken)
        if self.fc2_latent_proj is not None:
            mixed = self.fc2_latent_proj(mixed)
        if self.shared_experts is None:
            return mixed
        shared: Tensor = self.shared_experts(x)
        return mixed + (shared if self.shared_expert_gate is None else self.shared_expert_gate(x) * shared)

    @opaque
    def take(self, scores: Tensor, context: BatchContext) -> Tensor:
        """Return the experts ``[T, k]`` of tokens: the router's choice, or the engine's if that is replayed.

        Where the layer is computed again, those of the first time.
        """
        if context.taken is not None and self.layer in context.taken:
            return context.taken[self.layer]
        taken = self.gate.prefer(scores)
        if context.record is not None:
            context.record(self.layer, taken)
        if context.replay is not None:
            taken = context.replay.instead_of(taken, self.layer)
        if context.taken is not None:
            context.taken[self.layer] = taken
        return taken

    @opaque
    def mix(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Return the experts' results for ``x [T, expert width]``, combined by ``weights [T, k]`` float32.

        The result has the shape of ``x``. ``chosen`` is ``[T, k]`` int64: global numbers of experts.
        """
        rows, counts, combine = self.dispatcher.dispatch(x, weights, chosen)
        return combine(self.experts(rows, counts))
