"""From sharded parameters to the bytes that this rank writes: a copy for each version, as the plan says.

Nothing is gathered. A rank converts what it holds, tensor by tensor, and copies it into its **image**: the units of
files that it writes (`hpcrl.weights.format.layout`), one behind the other in host memory, pinned where there is an
accelerator. The few bytes that lie in units of other ranks go there in one exchange.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from hpcrl.modeling.blocks import HeldBlock
from hpcrl.modeling.fp8.quantiser import block_amax, quantise, scales_of
from hpcrl.modeling.memory.host_memory import pinned_bytes
from hpcrl.trainer.parallel.ranks import Ranks
from hpcrl.trainer.publish.plan import Window
from hpcrl.trainer.publish.sources import Form, Source, source_part
from hpcrl.weights.format.layout import PAGE_BYTES
from hpcrl.weights.format.quantise import BLOCK


def new_image(size: int, device: torch.device) -> Tensor:
    """Return ``[size]`` uint8 of page-aligned host memory, pinned if copies come from an accelerator."""
    room = pinned_bytes(size + PAGE_BYTES, device)
    return room[-room.data_ptr() % PAGE_BYTES :][:size]


class Staging:
    """Fills images from the tensors of one model. All ranks call it together."""

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        cut: frozenset[tuple[str, tuple[int, ...]]],
        dtype: torch.dtype,
        ranks: Ranks,
        *,
        device: torch.device,
    ) -> None:
        """Prepare to stage the published tensors.

        Parameters
        ----------
        tensors:
            Parameters and buffers by name, sharded; read at each `fill`.
        cut:
            Cut regions of the plan.
        dtype:
            Dtype of unquantised tensors; quantised ones are rounded to it before.
        ranks:
            Publishing ranks; their group carries host memory.
        device:
            Device of the model.
        """
        self._parameters = tensors
        self._dtype, self._ranks, self._device = dtype, ranks, device
        self._cut = cut
        self._scales: tuple[tuple[str, tuple[int, ...]], Tensor] | None = None

    @torch.no_grad()
    def fill(self, window: Window, image: Tensor) -> None:
        """Copy the parameters, as they are now, into ``image``. On return they may change. Collective.

        ``image`` is uint8 of the host with room for ``window.image_bytes``.
        """
        send = torch.empty(sum(window.sent), dtype=torch.uint8)
        begins = [sum(window.sent[:rank]) for rank in range(len(window.sent))]
        self._scales = None
        for source in window.sources:
            data = self._bytes(source)
            position = 0
            for copy in window.copies.get(source.tensor.name, ()):
                target, at = (image, copy.at) if copy.rank < 0 else (send, begins[copy.rank] + copy.at)
                target[at : at + copy.bytes].copy_(data[position : position + copy.bytes], non_blocking=True)
                position += copy.bytes
            # a rank may hold a copy that another rank provides
            assert position in (0, data.numel()), source.tensor.name
        if self._device.type != "cpu":
            torch.accelerator.synchronize()
        self._scales = None
        if self._ranks.size > 1:
            self._exchange(window, send, image)

    def _exchange(self, window: Window, send: Tensor, image: Tensor) -> None:
        received = torch.empty(sum(window.received), dtype=torch.uint8)
        dist.all_to_all_single(received, send, window.received, window.sent, group=self._ranks.group)
        position = 0
        for arrivals in window.arrivals:
            for at, size in arrivals:
                image[at : at + size] = received[position : position + size]
                position += size

    def _bytes(self, source: Source) -> Tensor:
        """Return this rank's part of a published tensor, ``[bytes]`` on its device."""
        part, local = source_part(self._parameters, source)
        if source.form is Form.PLAIN:
            result = local.to(getattr(torch, source.tensor.dtype))
        elif source.form is Form.QUANTISED:
            scales = self._local_scales(source, part, local)
            result = quantise(local.to(self._dtype), _low2(part), scales) if local.numel() else local
        else:
            scales = self._local_scales(source, part, local)
            # the rank with a block's first element publishes its scale
            first = [int(i % BLOCK != 0) for i in part.low]
            result = scales[first[0] :, first[1] :] if local.numel() else scales
        return result.contiguous().view(-1).view(torch.uint8) if result.numel() else result.new_empty(0).byte()

    def _local_scales(self, source: Source, part: HeldBlock, local: Tensor) -> Tensor:
        """Return scales of the blocks that this rank touches; a collective if a block lies on several ranks."""
        key = (source.parameter, source.low)
        if self._scales is not None and self._scales[0] == key:
            return self._scales[1]
        low = _low2(part)
        amax = block_amax(local.to(self._dtype), low) if local.numel() else local.new_zeros((0, 0))
        if key in self._cut:
            first, (rows, columns) = [i // BLOCK for i in low], amax.shape
            whole = torch.zeros([-(-size // BLOCK) for size in source.shape])
            whole[first[0] : first[0] + rows, first[1] : first[1] + columns] = amax.cpu()
            dist.all_reduce(whole, op=dist.ReduceOp.MAX, group=self._ranks.group)
            amax = whole[first[0] : first[0] + rows, first[1] : first[1] + columns].to(local.device)
        self._scales = (key, scales_of(amax))
        return self._scales[1]


def _low2(part: HeldBlock) -> tuple[int, int]:
    rows, columns = part.low
    return rows, columns
