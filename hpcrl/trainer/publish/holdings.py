"""Finds which rank holds which part of the published tensors, for all at once in numpy: there may be 100,000."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hpcrl.modeling.blocks import HeldBlock
from hpcrl.trainer.publish.sources import Form, Source
from hpcrl.weights.format.dtypes import SAFETENSORS_DTYPES
from hpcrl.weights.format.layout import block_runs
from hpcrl.weights.format.quantise import BLOCK
from hpcrl.weights.format.units import Runs

Ints = NDArray[np.int64]


class _Holders(NamedTuple):
    """The different blocks of a parameter that ranks hold, without empty ones, and who holds each.

    Attributes
    ----------
    low, high:
        ``[blocks, dimensions]``.
    ranks:
        ``[blocks, most]``, the first ``held_by`` of each row.
    held_by:
        ``[blocks]`` how many ranks.
    """

    low: Ints
    high: Ints
    ranks: Ints
    held_by: Ints


class Alike(NamedTuple):
    """Common properties of sources: shape of the region, its published form, bytes of a published element."""

    shape: tuple[int, ...]
    form: Form
    width: int


class Overlaps(NamedTuple):
    """Overlaps of blocks with regions that are alike: one entry for each non-empty pair.

    Attributes
    ----------
    source, block:
        ``[pairs]`` number of the source, and of the block in ``holders``.
    low, high:
        ``[pairs, dimensions]`` bounds in the region's own indices.
    alike, holders:
        Common properties of all sources, and holders of all blocks.
    """

    source: Ints
    block: Ints
    low: Ints
    high: Ints
    alike: Alike
    holders: _Holders


def find_overlaps(sources: Sequence[Source], blocks: Sequence[Mapping[str, HeldBlock]]) -> list[Overlaps]:
    """Return the overlaps of ranks' blocks with ``sources``, which are numbered in their order.

    Sources that are alike share one result.

    Parameters
    ----------
    blocks:
        For each rank, its block of each parameter.
    """
    holders: dict[tuple[HeldBlock, ...], _Holders] = {}
    by_parameter: dict[str, _Holders] = {}
    for name in dict.fromkeys(source.parameter for source in sources):
        held = tuple(map(itemgetter(name), blocks))
        if held not in holders:
            holders[held] = _find_holders(held)
        by_parameter[name] = holders[held]
    known = {id(own): own for own in holders.values()}
    alike: dict[tuple[int, tuple[int, ...], Form, str], tuple[list[int], list[tuple[int, ...]]]] = {}
    for number, source in enumerate(sources):
        key = (id(by_parameter[source.parameter]), source.shape, source.form, source.tensor.dtype)
        if (group := alike.get(key)) is None:
            group = alike[key] = [], []
        group[0].append(number)
        group[1].append(source.low)
    found = []
    for (own, shape, form, dtype), (numbers, lows) in alike.items():
        regions = np.array(numbers), np.array(lows, np.int64).reshape(len(lows), len(lows[0]))
        found.append(_overlap(known[own], *regions, Alike(shape, form, SAFETENSORS_DTYPES[dtype][1])))
    return found


def find_runs(overlaps: Sequence[Overlaps]) -> Runs:
    """Return for each source which rank provides which bytes.

    If several ranks hold the same block, they take turns from source to source.
    """
    found: list[tuple[Ints, Ints, Ints, Ints]] = []
    for part in overlaps:
        (shape, form, width), low, high = part.alike, part.low, part.high
        if form is Form.SCALES:
            # a scale belongs to the rank with the first element of its 128 x 128 block
            low, high, shape = -(-low // BLOCK), -(-high // BLOCK), tuple(-(-size // BLOCK) for size in shape)
        pair, start, count = _stretches(low, high, shape)
        source, block = part.source[pair], part.block[pair]
        rank = part.holders.ranks[block, source % part.holders.held_by[block]]
        found.append((source, rank, start * width, count * width))
    columns = zip(*found, strict=True)
    return Runs(*(np.concatenate(column) for column in columns))


def cut_regions(sources: Sequence[Source], overlaps: Sequence[Overlaps]) -> frozenset[tuple[str, tuple[int, ...]]]:
    """Return parameter and first index of quantised regions with a 128 x 128 block that lies on several ranks."""
    cut: set[int] = set()
    for part in overlaps:
        if part.alike.form is Form.QUANTISED:
            size = np.array(part.alike.shape, np.int64)
            inside = (part.low % BLOCK != 0) | ((part.high % BLOCK != 0) & (part.high != size))
            cut.update(part.source[inside.any(axis=1)].tolist())
    return frozenset((sources[number].parameter, sources[number].low) for number in cut)


def _find_holders(held: Sequence[HeldBlock]) -> _Holders:
    ranks: dict[HeldBlock, list[int]] = {}
    for rank, block in enumerate(held):
        if not block.is_empty:
            ranks.setdefault(block, []).append(rank)
    dimensions = len(held[0].low)
    held_by = np.array([len(own) for own in ranks.values()], np.int64)
    table = np.zeros((len(ranks), max((len(own) for own in ranks.values()), default=0)), np.int64)
    for row, own in zip(table, ranks.values(), strict=True):
        row[: len(own)] = own
    low = np.array([block.low for block in ranks], np.int64).reshape(len(ranks), dimensions)
    high = np.array([block.high for block in ranks], np.int64).reshape(len(ranks), dimensions)
    return _Holders(low, high, table, held_by)


def _overlap(own: _Holders, numbers: Ints, lows: Ints, alike: Alike) -> Overlaps:
    """As `hpcrl.modeling.blocks.overlap`, of many regions with many blocks."""
    shape = alike.shape
    leading = lows.shape[1] - len(shape)
    near = np.ones((len(numbers), len(own.low)), bool)
    for i in range(leading):
        # in these a region has one index
        near &= (own.low[:, i] <= lows[:, i, None]) & (lows[:, i, None] < own.high[:, i])
    region, block = np.nonzero(near)
    low = np.maximum(own.low[block, leading:] - lows[region, leading:], 0)
    high = np.minimum(own.high[block, leading:] - lows[region, leading:], np.array(shape, np.int64))
    kept = np.flatnonzero((low < high).all(axis=1))
    return Overlaps(numbers[region[kept]], block[kept], low[kept], high[kept], alike, own)


def _stretches(low: Ints, high: Ints, shape: tuple[int, ...]) -> tuple[Ints, Ints, Ints]:
    """Return the contiguous ranges of blocks in C order: number of the block, first element, number of elements.

    Blocks are parts of tensors of ``shape``.
    """
    pair = np.arange(len(low))
    if not shape:
        return pair, np.zeros_like(pair), np.ones_like(pair)
    kept = (low < high).all(axis=1)
    pair, low, high = pair[kept], low[kept], high[kept]
    size = np.array(shape, np.int64)
    if ((low[:, 1:] == 0) & (high[:, 1:] == size[1:])).all():
        inner = int(size[1:].prod())
        return pair, low[:, 0] * inner, (high - low)[:, 0] * inner
    if len(shape) == 2:
        # a stretch for each row
        rows = (high - low)[:, 0]
        of = np.repeat(np.arange(len(pair)), rows)
        row = np.arange(len(of)) - np.repeat(np.cumsum(rows) - rows, rows) + low[of, 0]
        return pair[of], row * size[1] + low[of, 1], (high - low)[of, 1]
    listed = [
        (number, first, count)
        for number, begin, end in zip(pair.tolist(), low.tolist(), high.tolist(), strict=True)
        for first, count in block_runs(shape, begin, end)
    ]
    columns = np.array(listed, np.int64).reshape(-1, 3)
    return columns[:, 0], columns[:, 1], columns[:, 2]
