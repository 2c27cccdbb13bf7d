"""From sharded parameters to the bytes that this rank writes: a plan made once, then a copy for each version.

Nothing is gathered. A rank converts what it holds, tensor by tensor, and copies it into its **image**: the units of
files that it writes (`hpcrl.weights.format.layout`), one behind the other in host memory, pinned where there is an
accelerator. The few bytes that lie in units of other ranks go there in one exchange.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpcrl.modeling.blocks import Block, local_block
from hpcrl.modeling.fp8 import block_amax, quantise, scales_of
from hpcrl.modeling.hf import model_tensors
from hpcrl.trainer.parallel.ranks import Ranks
from hpcrl.trainer.publish.sources import Form, Source, is_cut, source_part, source_runs
from hpcrl.weights.format.layout import PAGE_BYTES, ShardLayout, Unit, assign_units
from hpcrl.weights.format.quantize import BLOCK
from hpcrl.weights.format.shard import SAFETENSORS_DTYPES
from hpcrl.weights.write.publisher import Cut, OwnUnit

__all__ = ["Staging", "Window", "held_blocks", "new_image", "plan_windows"]


class _Copy(NamedTuple):
    """The next ``bytes`` of a tensor go into the image (``rank`` is -1) or into what is sent to ``rank``."""

    rank: int
    at: int
    bytes: int


@dataclass
class Window:
    """Files that are staged together.

    Attributes
    ----------
    shards:
        The files.
    sources:
        Where their tensors come from, in the order of parameters.
    units:
        What this rank writes.
    image_bytes:
        Memory for these.
    copies:
        Where this rank's part of each tensor goes.
    sent, received:
        Bytes to and from each rank.
    arrivals:
        Where the bytes from each rank belong in the image: (position, length).
    """

    shards: list[ShardLayout]
    sources: list[Source]
    world_size: int
    units: list[OwnUnit] = field(default_factory=list)
    image_bytes: int = 0
    copies: dict[str, list[_Copy]] = field(default_factory=dict)
    sent: list[int] = field(init=False)
    received: list[int] = field(init=False)
    arrivals: list[list[tuple[int, int]]] = field(init=False)

    def __post_init__(self) -> None:
        self.sent, self.received = [0] * self.world_size, [0] * self.world_size
        self.arrivals = [[] for _ in range(self.world_size)]

    def add(self, unit: Unit, cuts: Iterable[Cut], rank: int) -> None:
        """Note what ``rank`` has to do for a unit."""
        if unit.writer == rank:
            at = self.image_bytes
            self.units.append(OwnUnit(unit.file, unit.offset, at, unit.bytes, tuple(cuts)))
            # each unit begins on a page of memory, for direct I/O
            self.image_bytes += unit.bytes + -unit.bytes % PAGE_BYTES
        for part in unit.parts:
            if part.rank == rank:
                mine = unit.writer == rank
                position = at + part.at if mine else self.sent[unit.writer]
                copy = _Copy(-1 if mine else unit.writer, position, part.bytes)
                self.copies.setdefault(part.tensor, []).append(copy)
                if not mine:
                    self.sent[unit.writer] += part.bytes
            elif unit.writer == rank:
                self.arrivals[part.rank].append((at + part.at, part.bytes))
                self.received[part.rank] += part.bytes


def held_blocks(model: nn.Module, ranks: Ranks) -> list[dict[str, Block]]:
    """What each rank holds of each parameter; collective."""
    return ranks.gather({name: local_block(own) for name, own in model_tensors(model).items()})


def plan_windows(
    sources: Sequence[Source],
    layouts: Sequence[ShardLayout],
    blocks: Sequence[Mapping[str, Block]],
    rank: int,
    *,
    chunk_bytes: int,
    window_bytes: int | None,
) -> list[Window]:
    """Who copies and writes what; the same on all ranks but for what is theirs.

    Parameters
    ----------
    sources:
        From `find_sources`.
    layouts:
        Of their tensors.
    blocks:
        What each rank holds of each parameter.
    rank:
        This one.
    chunk_bytes:
        Size of hash chunks.
    window_bytes:
        Files that are staged together have at most so many bytes (one file may have more); None for all at once.
    """
    by_name = {source.tensor.name: source for source in sources}
    order = {name: i for i, name in enumerate(by_name)}
    runs = {
        name: source_runs(source, [held[source.parameter] for held in blocks], order[name])
        for name, source in by_name.items()
    }
    windows = []
    for group in _grouped(layouts, window_bytes):
        names = sorted((tensor.name for shard in group for tensor, _ in shard.tensors), key=order.__getitem__)
        window = Window(group, [by_name[name] for name in names], len(blocks))
        for shard in group:
            cuts = iter(_cuts(shard, chunk_bytes))
            for unit in assign_units(shard, runs, len(blocks), chunk_bytes=chunk_bytes):
                taken, size = [], 0
                while size < unit.bytes:
                    taken.append(next(cuts))
                    size += taken[-1].bytes
                window.add(unit, taken, rank)
        windows.append(window)
    return windows


def _grouped(layouts: Sequence[ShardLayout], window_bytes: int | None) -> list[list[ShardLayout]]:
    groups: list[list[ShardLayout]] = []
    for shard in layouts:
        if groups and (window_bytes is None or sum(s.bytes for s in groups[-1]) + shard.bytes <= window_bytes):
            groups[-1].append(shard)
        else:
            groups.append([shard])
    return groups


def _cuts(shard: ShardLayout, chunk_bytes: int) -> list[Cut]:
    return [
        Cut(tensor.name, number, min(chunk_bytes, tensor.bytes - start), SAFETENSORS_DTYPES[tensor.dtype][1])
        for tensor, _ in shard.tensors
        for number, start in enumerate(range(0, tensor.bytes, chunk_bytes))
    ]


def new_image(size: int, device: torch.device) -> Tensor:
    """``size`` bytes of host memory that begin on a page, pinned where copies come from an accelerator."""
    room = torch.empty(size + PAGE_BYTES, dtype=torch.uint8, pin_memory=device.type == "cuda")
    return room[-room.data_ptr() % PAGE_BYTES :][:size]


class Staging:
    """Fills images from the parameters of one model. All ranks call it together."""

    def __init__(
        self,
        model: nn.Module,
        sources: Sequence[Source],
        blocks: Sequence[Mapping[str, Block]],
        dtype: torch.dtype,
        ranks: Ranks,
        *,
        device: torch.device,
    ) -> None:
        """Remember the model.

        Parameters
        ----------
        model:
            Sharded; read at each `fill`.
        sources:
            Of all its tensors.
        blocks:
            What each rank holds of each parameter.
        dtype:
            Of what is published unquantised; what is quantised is rounded to it before.
        ranks:
            That publish; their group carries host memory.
        device:
            Where the model is.
        """
        self._parameters = model_tensors(model)
        self._dtype, self._ranks, self._device = dtype, ranks, device
        self._is_cut = {
            (s.parameter, s.low): is_cut(s, [held[s.parameter] for held in blocks])
            for s in sources
            if s.form is Form.QUANTISED
        }
        self._scales: tuple[tuple[str, tuple[int, ...]], Tensor] | None = None

    @torch.no_grad()
    def fill(self, window: Window, image: Tensor) -> None:
        """Copy the parameters, as they are now, into ``image``. On return they may change."""
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
        """This rank's part of a published tensor, ``[bytes]`` on its device."""
        part, local = source_part(self._parameters, source)
        if source.form is Form.PLAIN:
            result = local.to(getattr(torch, source.tensor.dtype))
        elif source.form is Form.QUANTISED:
            scales = self._local_scales(source, part, local)
            result = quantise(local.to(self._dtype), _low2(part), scales) if local.numel() else local
        else:
            scales = self._local_scales(source, part, local)
            # blocks whose first element is another rank's are that rank's
            first = [int(i % BLOCK != 0) for i in part.low]
            result = scales[first[0] :, first[1] :] if local.numel() else scales
        return result.contiguous().view(-1).view(torch.uint8) if result.numel() else result.new_empty(0).byte()

    def _local_scales(self, source: Source, part: Block, local: Tensor) -> Tensor:
        """Scales of the blocks that this rank touches; a collective where a block lies on several ranks."""
        key = (source.parameter, source.low)
        if self._scales is not None and self._scales[0] == key:
            return self._scales[1]
        low = _low2(part)
        amax = block_amax(local.to(self._dtype), low) if local.numel() else local.new_zeros((0, 0))
        if self._is_cut[key]:
            first, (rows, columns) = [i // BLOCK for i in low], amax.shape
            whole = torch.zeros([-(-size // BLOCK) for size in source.shape])
            whole[first[0] : first[0] + rows, first[1] : first[1] + columns] = amax.cpu()
            dist.all_reduce(whole, op=dist.ReduceOp.MAX, group=self._ranks.group)
            amax = whole[first[0] : first[0] + rows, first[1] : first[1] + columns].to(local.device)
        self._scales = (key, scales_of(amax))
        return self._scales[1]


def _low2(part: Block) -> tuple[int, int]:
    rows, columns = part.low
    return rows, columns
