"""Plans which rank copies, sends and writes which bytes of a version: once, equal on all ranks except their shares."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from hpcrl.modeling.blocks import HeldBlock, local_block
from hpcrl.modeling.hf import HfAdapter
from hpcrl.trainer.parallel.ranks import Ranks
from hpcrl.trainer.publish.holdings import cut_regions, find_overlaps, find_runs
from hpcrl.trainer.publish.sources import Source, find_sources
from hpcrl.weights.format.dtypes import SAFETENSORS_DTYPES
from hpcrl.weights.format.layout import PAGE_BYTES, PublishedTensor, ShardLayout, layout_shards
from hpcrl.weights.format.quantise import QuantisedModules
from hpcrl.weights.format.units import UnitTable, assign_units
from hpcrl.weights.write.own_units import OwnUnit, UnitChunk


class Copy(NamedTuple):
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
        Sources of their tensors, in the order of parameters.
    units:
        Units that this rank writes.
    image_bytes:
        Memory for these.
    copies:
        Destination of this rank's part of each tensor.
    sent, received:
        Bytes to and from each rank.
    arrivals:
        Place of the bytes from each rank in the image: (position, length).
    """

    shards: list[ShardLayout]
    sources: list[Source]
    world_size: int
    units: list[OwnUnit] = field(default_factory=list)
    image_bytes: int = 0
    copies: dict[str, list[Copy]] = field(default_factory=dict)
    sent: list[int] = field(init=False)
    received: list[int] = field(init=False)
    arrivals: list[list[tuple[int, int]]] = field(init=False)

    def __post_init__(self) -> None:
        self.sent, self.received = [0] * self.world_size, [0] * self.world_size
        self.arrivals = [[] for _ in range(self.world_size)]

    def add(self, table: UnitTable, names: Sequence[str], widths: Sequence[int], rank: int) -> None:
        """Note what ``rank`` has to do for the units of these files.

        Parameters
        ----------
        names, widths:
            By tensor number: the name, and bytes per element.
        """
        units, parts = table.units, table.parts
        own = np.flatnonzero(units.writer == rank)
        # each unit begins on a page of memory, for direct I/O
        padded = units.bytes[own] + -units.bytes[own] % PAGE_BYTES
        at = np.full(len(units.writer), -1, np.int64)
        at[own] = self.image_bytes + np.cumsum(padded) - padded
        self.image_bytes += int(padded.sum())
        cuts = _cuts_of(table, own, names, widths)
        files = [shard.file for shard in self.shards]
        columns = (units.file[own].tolist(), units.offset[own].tolist(), at[own].tolist(), units.bytes[own].tolist())
        for number, file, offset, position, size in zip(own.tolist(), *columns, strict=True):
            self.units.append(OwnUnit(files[file], offset, position, size, tuple(cuts[number])))

        writer = units.writer[parts.unit]
        for i in np.flatnonzero(parts.rank == rank).tolist():
            to, size = int(writer[i]), int(parts.bytes[i])
            mine = to == rank
            position = int(at[parts.unit[i]] + parts.at[i]) if mine else self.sent[to]
            copy = Copy(-1 if mine else to, position, size)
            self.copies.setdefault(names[int(parts.tensor[i])], []).append(copy)
            if not mine:
                self.sent[to] += size
        for i in np.flatnonzero((writer == rank) & (parts.rank != rank)).tolist():
            giver, size = int(parts.rank[i]), int(parts.bytes[i])
            self.arrivals[giver].append((int(at[parts.unit[i]] + parts.at[i]), size))
            self.received[giver] += size


def _cuts_of(
    table: UnitTable, own: NDArray[np.int64], names: Sequence[str], widths: Sequence[int]
) -> dict[int, list[UnitChunk]]:
    """Return the hash chunks of units, by number of the unit."""
    chunks = table.chunks
    cuts: dict[int, list[UnitChunk]] = {number: [] for number in own.tolist()}
    mine = np.flatnonzero(np.isin(chunks.unit, own))
    unit, tensor, number, size = (column[mine].tolist() for column in chunks)
    for i, of in enumerate(unit):
        cuts[of].append(UnitChunk(names[tensor[i]], number[i], size[i], widths[tensor[i]]))
    return cuts


def held_blocks(tensors: Mapping[str, Tensor], ranks: Ranks) -> list[dict[str, HeldBlock]]:
    """Return each rank's block of each of ``tensors``, by name and in rank order. Collective.

    Indices are those of the whole tensors; see `hpcrl.modeling.blocks.local_block`.
    """
    return ranks.gather({name: local_block(own) for name, own in tensors.items()})


class PublishPlan(NamedTuple):
    """Work of one rank for each version.

    Attributes
    ----------
    tensors:
        All published tensors.
    windows:
        Files that are staged together, with this rank's share of them.
    cut:
        Parameter and first index of the quantised regions with a 128 x 128 block that lies on several ranks.
    """

    tensors: list[PublishedTensor]
    windows: list[Window]
    cut: frozenset[tuple[str, tuple[int, ...]]]


def plan_publication(
    model: nn.Module,
    adapter: HfAdapter,
    blocks: Sequence[Mapping[str, HeldBlock]],
    rank: int,
    dtype: torch.dtype,
    *,
    fp8: QuantisedModules | None,
    max_shard_bytes: int,
    chunk_bytes: int,
    window_bytes: int | None,
    only_file: str | None = None,
) -> PublishPlan:
    """Plan which rank copies and writes which part; plans differ between ranks only in their own share.

    Parameters
    ----------
    model, adapter:
        Model to publish, and the map to its published names.
    blocks:
        For each rank, its block of each parameter.
    rank:
        Number of this rank.
    dtype:
        Dtype of published tensors that are not quantised.
    fp8:
        Matrices to quantise; None for none.
    max_shard_bytes:
        Maximum size of a file in bytes.
    chunk_bytes:
        Size of hash chunks in bytes.
    window_bytes:
        Maximum bytes of files that are staged together (a single file may be larger); None stages all at once.
    only_file:
        See `hpcrl.weights.format.layout.layout_shards`.
    """
    with _collector_paused():
        sources = find_sources(model, adapter, dtype, fp8=fp8)
        tensors = [source.tensor for source in sources]
        names = [tensor.name for tensor in tensors]
        widths = [SAFETENSORS_DTYPES[tensor.dtype][1] for tensor in tensors]
        number_of = {name: number for number, name in enumerate(names)}
        overlaps = find_overlaps(sources, blocks)
        runs = find_runs(overlaps)
        windows = []
        for group in _grouped(layout_shards(tensors, max_shard_bytes, only_file=only_file), window_bytes):
            inside = sorted(number_of[tensor.name] for shard in group for tensor, _ in shard.tensors)
            window = Window(group, [sources[number] for number in inside], len(blocks))
            table = assign_units(group, number_of, runs, len(blocks), chunk_bytes=chunk_bytes)
            window.add(table, names, widths, rank)
            windows.append(window)
        return PublishPlan(tensors, windows, cut_regions(sources, overlaps))


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Pause the cyclic garbage collector, which would scan half a million new objects repeatedly."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _grouped(layouts: Sequence[ShardLayout], window_bytes: int | None) -> list[list[ShardLayout]]:
    groups: list[list[ShardLayout]] = []
    for shard in layouts:
        if groups and (window_bytes is None or sum(s.bytes for s in groups[-1]) + shard.bytes <= window_bytes):
            groups[-1].append(shard)
        else:
            groups.append([shard])
    return groups
