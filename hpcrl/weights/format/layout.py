"""Byte layout of a published model: pure functions, equal on all ranks.

`hpcrl.weights.format.units` assigns it to ranks.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from hpcrl.weights.format.shard import safetensors_header, tensor_size

PAGE_BYTES = 4096


class PublishedTensor(NamedTuple):
    """Tensor to publish; ``dtype`` is torch's name."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return tensor_size(self.name, self.dtype, self.shape)


class ShardLayout(NamedTuple):
    """Safetensors file: its head, and its tensors with their offsets from the start of the file."""

    file: str
    head: bytes
    tensors: tuple[tuple[PublishedTensor, int], ...]
    bytes: int


def layout_shards(
    tensors: Iterable[PublishedTensor], max_shard_bytes: int, *, only_file: str | None = None
) -> list[ShardLayout]:
    """Distribute tensors over shard files.

    Tensors keep their order, a shard is full before it would exceed ``max_shard_bytes`` (a tensor larger than
    that has a shard of its own), and inside a shard tensors of whole pages come first, so that they all begin
    on a page and the others share few. With ``only_file`` all are in one file of this name, however large.

    Raises
    ------
    ValueError
        A dtype is unknown, a name comes twice, or there are no tensors.
    """
    groups: list[list[tuple[PublishedTensor, int]]] = []
    names: set[str] = set()
    filled = 0
    for tensor in tensors:
        if tensor.name in names:
            raise ValueError(f"tensor {tensor.name!r} comes twice")
        names.add(tensor.name)
        size = tensor.bytes
        if not groups or (only_file is None and filled + size > max_shard_bytes):
            groups.append([])
            filled = 0
        groups[-1].append((tensor, size))
        filled += size
    if not groups:
        raise ValueError("there are no tensors to publish")
    if only_file is not None:
        return [_layout(only_file, groups[0])]
    return [
        _layout(f"model-{number:05d}-of-{len(groups):05d}.safetensors", group)
        for number, group in enumerate(groups, start=1)
    ]


def _layout(file: str, tensors: list[tuple[PublishedTensor, int]]) -> ShardLayout:
    ordered = [own for own in tensors if own[1] % PAGE_BYTES == 0] + [own for own in tensors if own[1] % PAGE_BYTES]
    head = safetensors_header([tensor for tensor, _ in ordered], align=PAGE_BYTES)
    offsets = list(itertools.accumulate((size for _, size in ordered), initial=len(head)))
    placed = tuple((tensor, offset) for (tensor, _), offset in zip(ordered, offsets, strict=False))
    return ShardLayout(file, head, placed, offsets[-1])


def block_runs(shape: Sequence[int], low: Sequence[int], high: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the contiguous runs of the block ``low <= index < high`` of a tensor: (first element, number), ascending.

    The runs one after the other have the elements of the block in C order.
    """
    if any(end <= begin for begin, end in zip(low, high, strict=True)):
        return
    # trailing dimensions that the block covers completely, and one more, are one contiguous run
    split = len(shape)
    while split > 0 and (low[split - 1], high[split - 1]) == (0, shape[split - 1]):
        split -= 1
    inner = math.prod(shape[split:])
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    if split == 0:
        yield 0, inner
        return
    first, length = low[split - 1] * inner, (high[split - 1] - low[split - 1]) * inner
    for index in itertools.product(*(range(low[i], high[i]) for i in range(split - 1))):
        yield first + sum(i * stride for i, stride in zip(index, strides, strict=False)), length
