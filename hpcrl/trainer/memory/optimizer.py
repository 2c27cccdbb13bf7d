"""AdamW whose moments live in host memory and come to the device a bucket at a time.

The step itself runs on the device, by the same kernel and with the same result as without. It begins when the gradient
norm is known, so that nothing is applied that clipping would have scaled down. What is overlapped: the moments of the
first two buckets come while the backward pass still runs (`HostAdamW.prefetch`); behind it, while one bucket is
computed, the next one arrives and the last one returns. Besides parameters and gradients the device holds three
buckets, whatever the size of the model; a large parameter is computed in several.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from hpcrl.modeling.blocks import is_sharded, local_part
from hpcrl.trainer.memory.copies import StartedCopy, copies_of, host_like

BUCKET_BYTES = 256 << 20
"""Bytes of moments that move together, two float32 numbers per parameter."""
_ALIGNED = 64
"""Elements to whose multiples parameters are cut: an incomplete CPU vector would be rounded differently."""
_MOMENTS = ("exp_avg", "exp_avg_sq")


def host_zeros(parameter: nn.Parameter, device: torch.device) -> Tensor:
    """Return zeros in host memory, sharded as ``parameter`` is, from which and to which ``device`` copies."""
    host = host_like(local_part(parameter), device).zero_()
    if not is_sharded(parameter):
        return host
    # on the mesh of the parameter, though the mesh is of another device: as FSDP2 has offloaded parameters itself
    return DTensor(host, parameter._spec, requires_grad=False)  # type: ignore[no-untyped-call]


class _Piece(NamedTuple):
    """A run of the elements of a parameter that this rank has."""

    parameter: nn.Parameter
    elements: slice
    group: dict[str, Any]


class _Bucket:
    """Moments of some pieces on the device, and the copy that brings them or takes them away."""

    def __init__(self, pieces: list[_Piece]) -> None:
        self.pieces = pieces
        self.moments: list[tuple[Tensor, ...]] = []
        self.copies: list[StartedCopy] = []

    def finish(self) -> None:
        for copy in self.copies:
            copy.finish()
        self.copies = []


class HostAdamW(torch.optim.AdamW):
    """As `torch.optim.AdamW` with ``fused=True`` for float32 parameters, sharded or whole, all on one device."""

    def __init__(
        self, groups: list[dict[str, Any]], *, lr: float, betas: tuple[float, float], bucket_bytes: int = BUCKET_BYTES
    ) -> None:
        """Make moments of zeros in host memory at once: pinning memory waits for the device, a step should not."""
        super().__init__(groups, lr=lr, betas=betas, fused=True)
        parameters = [p for group in self.param_groups for p in group["params"]]
        self._device = local_part(parameters[0]).device
        # each direction has its own copies, so that they overlap
        self._in, self._out = copies_of(self._device), copies_of(self._device)
        for parameter in parameters:
            self.state[parameter] = {"step": torch.zeros((), dtype=torch.float32)} | {
                moment: host_zeros(parameter, self._device) for moment in _MOMENTS
            }
        self._buckets = [_Bucket(pieces) for pieces in self._cut(bucket_bytes)]

    def _cut(self, bucket_bytes: int) -> Iterator[list[_Piece]]:
        most = max(_ALIGNED, bucket_bytes // (4 * len(_MOMENTS)))
        pieces: list[_Piece] = []
        room = most
        for group in self.param_groups:
            for parameter in group["params"]:
                begin, size = 0, local_part(parameter).numel()
                while begin < size:
                    end = min(size, begin + room // _ALIGNED * _ALIGNED)
                    if end > begin:
                        pieces.append(_Piece(parameter, slice(begin, end), group))
                        room, begin = room - (end - begin), end
                    if room < _ALIGNED:
                        yield pieces
                        pieces, room = [], most
        if pieces:
            yield pieces

    @torch.no_grad()
    def prefetch(self) -> None:
        """Begin to bring the moments of the first two buckets: before the last backward pass of a step."""
        for bucket in self._buckets[:2]:
            self._bring(bucket)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update all parameters; every one has a gradient, which is clipped already."""
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["step"] += 1
        for number, bucket in enumerate(self._buckets):
            self._bring(bucket)
            bucket.finish()
            for following in self._buckets[number + 1 : number + 2]:
                self._bring(following)
            self._compute(bucket)
            self._take_away(bucket)
            for before in self._buckets[:number][-1:]:
                self._release(before)
        for last in self._buckets[-1:]:
            self._release(last)

    def _host(self, piece: _Piece) -> Iterator[Tensor]:
        for moment in _MOMENTS:
            yield local_part(self.state[piece.parameter][moment]).view(-1)[piece.elements]

    def _bring(self, bucket: _Bucket) -> None:
        if bucket.moments:
            return
        for piece in bucket.pieces:
            here = tuple(torch.empty_like(host, device=self._device) for host in self._host(piece))
            bucket.copies += [self._in.start(*pair) for pair in zip(here, self._host(piece), strict=True)]
            bucket.moments.append(here)

    def _take_away(self, bucket: _Bucket) -> None:
        for piece, here in zip(bucket.pieces, bucket.moments, strict=True):
            bucket.copies += [self._out.start(*pair) for pair in zip(self._host(piece), here, strict=True)]

    @staticmethod
    def _release(bucket: _Bucket) -> None:
        bucket.finish()
        bucket.moments = []

    def _compute(self, bucket: _Bucket) -> None:
        for piece, (mean, square) in zip(bucket.pieces, bucket.moments, strict=True):
            parameter, group = piece.parameter, piece.group
            assert parameter.grad is not None
            adamw(
                [local_part(parameter).view(-1)[piece.elements]],
                [local_part(parameter.grad).view(-1)[piece.elements]],
                [mean],
                [square],
                [],
                # the kernel adds one
                [torch.full((), float(self.state[parameter]["step"]) - 1, device=self._device)],
                fused=True,
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )
