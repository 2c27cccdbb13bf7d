"""Muon for hidden matrices, and AdamW for the rest, as one optimizer of a sharded model.

Momentum lies where its parameter lies. The Newton–Schulz iteration wants whole matrices, so that ranks that share some
matrices share the work, too: of a batch of matrices of one shape each rank gets some whole, by one exchange, and gives
the parts of the result back by another. Nothing is computed twice in one copy of the model. Experts that lie whole on a
rank are not sent. How a model is cut changes an update by no more than the rounding of the products.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpcrl.modeling.blocks import is_sharded, local_part
from hpcrl.modeling.hidden_matrices import MatrixParts
from hpcrl.trainer.memory.optimizer import HostAdamW, host_zeros
from hpcrl.trainer.step.newton_schulz import orthogonalise_parts, update_scale

BATCH_BYTES = 128 << 20
"""Bytes of bfloat16 matrices that a rank processes at once; one matrix if it is larger. The iteration needs up to five
times that."""
MOMENTUM = "momentum_buffer"
"""Key of a parameter's state."""


class _Sharding(NamedTuple):
    """Sharding of the matrices of a parameter over ranks.

    Attributes
    ----------
    group:
        Ranks that have a part of each matrix.
    dim:
        Sharded dimension of the matrix, -2 or -1.
    sizes:
        Sizes of that dimension, by rank of the group.
    """

    group: dist.ProcessGroup
    dim: int
    sizes: tuple[int, ...]


class _Matrix(NamedTuple):
    """The last two dimensions of a parameter of an expert, or of a parameter without experts (``expert`` 0)."""

    parameter: nn.Parameter
    expert: int


class _Batch(NamedTuple):
    """Matrices that are computed at once: of one shape, with equal parts and cut in the same way, if they are."""

    matrices: list[_Matrix]
    shape: torch.Size
    parts: MatrixParts
    sharding: _Sharding | None


class Muon(torch.optim.Optimizer):
    """Jordan et al. 2024 with Nesterov momentum, decoupled decay, and updates of the size of AdamW's.

    ``B ← m B + (1 − m) g``, ``W ← (1 − lr · decay) W − lr · 0.2 sqrt(max(rows, columns)) · NS((1 − m) g + m B)``: what
    `torch.optim.Muon` computes with ``adjust_lr_fn="match_rms_adamw"`` (Moonlight, arXiv 2502.16982).
    """

    def __init__(
        self,
        matrices: Sequence[tuple[nn.Parameter, MatrixParts]],
        others: torch.optim.AdamW,
        *,
        lr: float,
        weight_decay: float,
        momentum: float,
        batch_bytes: int = BATCH_BYTES,
    ) -> None:
        """Plan the batches; every rank does so with the same parameters in the same order.

        Parameters
        ----------
        matrices:
            Float32 parameters, sharded or whole, with the matrices of each.
        others:
            The optimizer of all other parameters; where it is a `HostAdamW`, momentum is in host memory as well.
        batch_bytes:
            See `BATCH_BYTES`.
        """
        defaults = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum}
        super().__init__([{"params": [parameter for parameter, _ in matrices]}], defaults)
        self._others, self._matrices = others, {parameter for parameter, _ in matrices}
        # one state and one list of groups, so that saves, restores and schedules see one optimizer
        self.state = others.state
        self.param_groups += others.param_groups
        self._device = _computes_on(matrices[0][0])
        if self.is_on_host:
            for parameter, _ in matrices:
                self.state[parameter] = {MOMENTUM: host_zeros(parameter, self._device)}
        self._batches = list(_batches(matrices, batch_bytes))

    @property
    def is_on_host(self) -> bool:
        """Return whether the state is in host memory, apart from the parameters."""
        return isinstance(self._others, HostAdamW)

    def has(self, parameter: nn.Parameter) -> bool:
        """Return whether ``parameter`` is one of the matrices."""
        return parameter in self._matrices

    def prefetch(self) -> None:
        """Begin to bring AdamW's moments from the host, where they are there."""
        if isinstance(self._others, HostAdamW):
            self._others.prefetch()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update all parameters; every one has a gradient. Collective."""
        assert closure is None
        self._others.step()
        for batch in self._batches:
            self._update(batch)

    def _update(self, batch: _Batch) -> None:
        (group, *_), ratio = self.param_groups, update_scale(batch.shape, batch.parts)
        directions = [self._direction(matrix, group["momentum"]) for matrix in batch.matrices]
        if batch.sharding is None:
            whole = torch.stack(directions)
            directions.clear()
            updates = list(orthogonalise_parts(whole, batch.parts))
        else:
            updates = _computed_by_owners(directions, batch.parts, batch.sharding)
        for matrix, update in zip(batch.matrices, updates, strict=True):
            own = _own(matrix.parameter, matrix.expert)
            own.mul_(1.0 - group["lr"] * group["weight_decay"])
            own.add_(update.to(own.device), alpha=-group["lr"] * ratio)

    def _direction(self, matrix: _Matrix, momentum: float) -> Tensor:
        """Move the momentum on, and return this rank's part of what is made orthogonal, bfloat16 on the device."""
        parameter, state = matrix.parameter, self.state[matrix.parameter]
        assert parameter.grad is not None
        if MOMENTUM not in state:
            state[MOMENTUM] = torch.zeros_like(parameter)
        gradient, kept = _own(parameter.grad, matrix.expert), _own(state[MOMENTUM], matrix.expert)
        mean = kept.to(gradient.device)  # itself where it is there already
        mean.lerp_(gradient, 1.0 - momentum)
        if mean is not kept:
            kept.copy_(mean)
        return gradient.lerp(mean, momentum).to(self._device, torch.bfloat16)


def _computes_on(parameter: nn.Parameter) -> torch.device:
    """Return where products are computed: the device of the mesh, also of parameters in host memory."""
    if is_sharded(parameter) and parameter.device_mesh.device_type != "cpu":
        return torch.device(parameter.device_mesh.device_type, torch.accelerator.current_device_index())
    return local_part(parameter).device


def _own(tensor: Tensor, expert: int) -> Tensor:
    """Return this rank's part of a matrix, ``[rows, columns]``."""
    own = local_part(tensor)
    return own[expert] if own.dim() == 3 else own


def _sharding_of(parameter: nn.Parameter) -> _Sharding | None:
    """Return how the matrices of a parameter are cut; None where this rank has whole ones."""
    if not is_sharded(parameter):
        return None
    mesh = parameter.device_mesh
    found = None
    for mesh_dim, placement in enumerate(parameter.placements):
        # a shard along the first of three dimensions distributes experts, and leaves their matrices whole
        dim = getattr(placement, "dim", None)
        if dim is None or dim < parameter.dim() - 2 or mesh.size(mesh_dim) == 1:
            continue
        assert found is None, f"a matrix is cut twice: {parameter.placements}"
        whole, ranks = parameter.shape[dim], mesh.size(mesh_dim)
        each = -(-whole // ranks)
        sizes = tuple(max(0, min(each, whole - rank * each)) for rank in range(ranks))
        assert local_part(parameter).shape[dim] == sizes[mesh.get_local_rank(mesh_dim)], "not cut as FSDP2 cuts"
        found = _Sharding(mesh.get_group(mesh_dim), dim - parameter.dim(), sizes)
    return found


def _batches(matrices: Sequence[tuple[nn.Parameter, MatrixParts]], batch_bytes: int) -> Iterator[_Batch]:
    alike: dict[Any, tuple[list[_Matrix], MatrixParts, _Sharding | None]] = {}
    for parameter, parts in matrices:
        sharding = _sharding_of(parameter)
        experts = local_part(parameter).shape[0] if parameter.dim() == 3 else 1
        key = (parameter.shape[-2:], parts.dim, str(parts.slices), sharding)
        found, *_ = alike.setdefault(key, ([], parts, sharding))
        found += [_Matrix(parameter, expert) for expert in range(experts)]
    for (shape, *_), (found, parts, sharding) in alike.items():
        each = max(1, batch_bytes // (2 * shape.numel()))
        if sharding is not None:
            each *= len(sharding.sizes)
        for begin in range(0, len(found), each):
            yield _Batch(found[begin : begin + each], shape, parts, sharding)


def _computed_by_owners(directions: list[Tensor], parts: MatrixParts, sharding: _Sharding) -> list[Tensor]:
    """Return this rank's part of each update; rank r of the group computes the matrices r, r + ranks, …. Collective.

    ``directions`` is empty then: what was sent is not held while the iteration has its own matrices.
    """
    group, dim, sizes = sharding
    ranks, (rows, columns) = len(sizes), directions[0].shape
    counts = [len(directions[rank::ranks]) for rank in range(ranks)]
    mine = counts[dist.get_rank(group)]
    # numbers that this rank sends to each other one, and then receives again
    sent = [count * rows * columns for count in counts]
    received = [mine * size * (columns if dim == -2 else rows) for size in sizes]
    flat = torch.cat([direction.reshape(-1) for rank in range(ranks) for direction in directions[rank::ranks]])
    directions.clear()
    arrived = flat.new_empty(sum(received))
    dist.all_to_all_single(arrived, flat, received, sent, group=group)
    del flat
    blocks = [
        block.view((mine, size, columns) if dim == -2 else (mine, rows, size))
        for block, size in zip(torch.split(arrived, received), sizes, strict=True)
    ]
    whole = torch.cat(blocks, dim=dim)
    del arrived, blocks
    computed = orthogonalise_parts(whole, parts) if mine else whole
    back = torch.cat([block.reshape(-1) for block in torch.split(computed, list(sizes), dim=dim)])
    returned = back.new_empty(sum(sent))
    dist.all_to_all_single(returned, back, sent, received, group=group)
    updates: list[Tensor] = [returned] * sum(counts)
    for rank, some in enumerate(torch.split(returned, sent)):
        updates[rank::ranks] = some.view(counts[rank], rows, columns)
    return updates
