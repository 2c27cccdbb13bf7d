"""The optimizer, the learning-rate schedule, and the global gradient norm over shards."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpcrl.config.recipe import OptimizerConfig
from hpcrl.modeling.blocks import local_part
from hpcrl.modeling.hidden_matrices import MatrixParts
from hpcrl.trainer.memory.optimizer import HostAdamW
from hpcrl.trainer.step.muon import Muon

_NORM_PIECE = 1 << 22
"""Elements of a gradient whose norm is taken at once."""
_NORM_ROW = 1024
"""Elements that a processor sums up in float32."""


def learning_rate(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """Return the learning rate of optimizer step ``step`` (from 1 to ``total_steps``).

    Rises linearly over the first ``warmup_steps`` steps (step ``warmup_steps`` has the peak), then stays, or
    falls to 0 one step after the last, along a line or half a cosine.

    Raises
    ------
    ValueError
        ``step`` is not between 1 and ``total_steps``.
    """
    if not 1 <= step <= total_steps:
        raise ValueError(f"step must be between 1 and {total_steps}, it is {step}")
    peak, warmup = config.learning_rate, config.warmup_steps
    if step <= warmup:
        return peak * step / warmup
    first = max(warmup, 1)  # the step with the peak
    progress = (step - first) / (total_steps + 1 - first)
    if config.schedule == "linear":
        return peak * (1.0 - progress)
    if config.schedule == "cosine":
        return peak * 0.5 * (1.0 + math.cos(math.pi * progress))
    return peak


def make_optimizer(
    named: Iterable[tuple[str, nn.Parameter]],
    config: OptimizerConfig,
    *,
    on_host: bool = False,
    matrices: Mapping[str, MatrixParts] | None = None,
) -> torch.optim.AdamW | Muon:
    """Return AdamW with decoupled decay for matrices (experts and adapters, too), embeddings and convolutions.

    Loshchilov and Hutter 2019, arXiv 1711.05101.
    Biases, norm weights, attention sinks and the constants of Mamba-2's heads are not decayed. With ``kind: muon`` the
    hidden matrices have `hpcrl.trainer.step.muon.Muon`, with the same decay.

    Parameters
    ----------
    named:
        Trained parameters, by their names in the model.
    config:
        Learning rate, betas and decay.
    on_host:
        Whether its moments are in host memory, see `hpcrl.trainer.memory.optimizer`.
    matrices:
        The hidden matrices of the model (`hpcrl.modeling.hidden_matrices`); of use with ``kind: muon`` alone.
    """
    by_muon: list[tuple[nn.Parameter, MatrixParts]] = []
    decayed: list[nn.Parameter] = []
    exempt: list[nn.Parameter] = []
    for name, parameter in named:
        if config.kind == "muon" and matrices is not None and name in matrices:
            by_muon.append((parameter, matrices[name]))
            continue
        # biases of all experts of a layer are one matrix: it is their name that tells
        is_exempt = parameter.dim() == 1 or name.endswith("bias")
        (exempt if is_exempt else decayed).append(parameter)
    groups = [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": exempt, "weight_decay": 0.0},
    ]
    betas = (config.beta1, config.beta2)
    adamw: torch.optim.AdamW
    if on_host:
        adamw = HostAdamW(groups, lr=config.learning_rate, betas=betas)
    else:
        # fused: one kernel call a group, which on sharded parameters saves most of the dispatch
        adamw = torch.optim.AdamW(groups, lr=config.learning_rate, betas=betas, fused=True)
    if not by_muon:
        return adamw
    return Muon(
        by_muon, adamw, lr=config.learning_rate, weight_decay=config.weight_decay, momentum=config.muon_momentum
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    """Use ``value`` for all parameters from the next step on."""
    for group in optimizer.param_groups:
        group["lr"] = value


@torch.no_grad()
def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float, group: dist.ProcessGroup | None) -> float:
    """Scale gradients down to the global norm ``max_norm``.

    The norm is summed in float64: in float32 it would depend, by some 1e-5, on how parameters are sharded.

    Parameters
    ----------
    parameters:
        All parameters of the model, or this rank's shards of them; every one has a gradient.
    max_norm:
        Largest global norm.
    group:
        Ranks that together have every parameter once, however each of them is cut; None where they are whole.

    Returns
    -------
    float
        The global norm before clipping. It may be infinite or NaN; gradients are then left as they are.
    """
    local = [local_part(parameter.grad) for parameter in parameters if parameter.grad is not None]
    total = _sum_of_squares(local)
    if group is not None:
        dist.all_reduce(total, group=group)
    # the step's only synchronisation with the device
    norm = math.sqrt(total.item())
    if math.isfinite(norm) and norm > max_norm:
        torch._foreach_mul_(local, max_norm / norm)
    return norm


def _sum_of_squares(gradients: list[Tensor]) -> Tensor:
    """Return the sum of squares of all elements, in float64."""
    if all(x.device.type == "cpu" and x.dtype == torch.float32 for x in gradients):
        # CPUs sum float64 slowly, through copies: rows are so short that a float32 sum is exact enough for one
        rows = [row for x in gradients for row in _rows(x.reshape(-1))]
        total = torch.cat([torch.linalg.vector_norm(row, dim=1) for row in rows]).double().square().sum()
        # a square of a row may be too large for float32, or lost
        if 0.0 < total.item() < math.inf:
            return total
    # by pieces: on CPU each is copied to float64
    pieces = [piece for x in gradients for piece in torch.split(x.reshape(-1), _NORM_PIECE)]
    return torch.stack(torch._foreach_norm(pieces, 2, dtype=torch.float64)).square().sum()


def _rows(x: Tensor) -> Iterator[Tensor]:
    """Return ``[n]`` as ``[n // _NORM_ROW, _NORM_ROW]``, and the remainder as one more row."""
    whole = len(x) // _NORM_ROW * _NORM_ROW
    yield x[:whole].view(-1, _NORM_ROW)
    if whole < len(x):
        yield x[None, whole:]
