"""Where bytes lie and who writes them, for any sharding: every byte once, pages never shared."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from safetensors.numpy import load_file

from hpcrl.weights.format.layout import PAGE_BYTES, PublishedTensor, Run, assign_units, block_runs, layout_shards


def tensors(rng: random.Random) -> list[PublishedTensor]:
    shapes = [(rng.randint(1, 60), rng.choice([7, 128, 1024])) for _ in range(12)] + [(5,), (1024,)]
    rng.shuffle(shapes)
    return [PublishedTensor(f"t{i}", rng.choice(["bfloat16", "float32"]), shape) for i, shape in enumerate(shapes)]


def split(rng: random.Random, size: int, ranks: int) -> list[Run]:
    """Any dealing out of a tensor's bytes."""
    ends = [*sorted(rng.randint(0, size) for _ in range(ranks)), size]
    begins = [0, *ends[:-1]]
    return [Run(rng.randrange(ranks), a, b - a) for a, b in itertools.zip_longest(begins, ends) if b > a]


@pytest.mark.parametrize("seed", range(8))
def test_each_byte_has_one_writer_and_comes_from_who_has_it(seed: int) -> None:
    rng = random.Random(seed)
    ranks = rng.randint(1, 5)
    wanted = tensors(rng)
    runs = {tensor.name: split(rng, tensor.bytes, ranks) for tensor in wanted}
    for shard in layout_shards(wanted, rng.choice([100_000, 10_000_000])):
        units = assign_units(shard, runs, ranks, chunk_bytes=PAGE_BYTES * rng.choice([1, 4]))
        assert len(shard.head) % PAGE_BYTES == 0
        position = len(shard.head)
        where = {tensor.name: offset for tensor, offset in shard.tensors}
        for unit in units:
            assert unit.offset == position
            assert unit.offset % PAGE_BYTES == 0
            position += unit.bytes
            inside = 0
            held = dict.fromkeys(range(ranks), 0)
            for part in unit.parts:
                assert part.at == inside
                assert unit.offset + part.at == where[part.tensor] + part.start
                assert any(
                    run.rank == part.rank
                    and run.start <= part.start
                    and part.start + part.bytes <= run.start + run.bytes
                    for run in runs[part.tensor]
                )
                inside += part.bytes
                held[part.rank] += part.bytes
            assert inside == unit.bytes
            assert held[unit.writer] == max(held.values())
        assert position == shard.bytes


def test_layout_is_a_safetensors_file_and_keeps_the_limit(tmp_path) -> None:
    wanted = tensors(random.Random(0))
    shards = layout_shards(wanted, 60_000)
    assert len(shards) > 2
    assert {tensor.name for shard in shards for tensor, _ in shard.tensors} == {tensor.name for tensor in wanted}
    for shard in shards:
        assert sum(tensor.bytes for tensor, _ in shard.tensors) <= 60_000 or len(shard.tensors) == 1
    only32 = [PublishedTensor("a", "float32", (3, 5)), PublishedTensor("b", "float32", (1024,))]
    (shard,) = layout_shards(only32, 1 << 30)
    path = tmp_path / shard.file
    path.write_bytes(shard.head + np.arange((shard.bytes - len(shard.head)) // 4, dtype=np.float32).tobytes())
    loaded = load_file(path)
    assert [tensor.name for tensor, _ in shard.tensors] == ["b", "a"]  # whole pages first
    np.testing.assert_array_equal(loaded["a"], np.arange(1024, 1039, dtype=np.float32).reshape(3, 5))


@pytest.mark.parametrize("seed", range(20))
def test_runs_of_a_block(seed: int) -> None:
    rng = random.Random(seed)
    shape = tuple(rng.randint(1, 5) for _ in range(rng.randint(1, 4)))
    low = tuple(rng.randint(0, size) for size in shape)
    high = tuple(rng.randint(begin, size) for begin, size in zip(low, shape, strict=True))
    index = np.arange(np.prod(shape)).reshape(shape)
    expected = index[tuple(slice(a, b) for a, b in zip(low, high, strict=True))].ravel().tolist()
    found = [i for first, count in block_runs(shape, low, high) for i in range(first, first + count)]
    assert found == expected


def test_contradictions_are_refused() -> None:
    one = PublishedTensor("a", "float32", (1024,))
    (shard,) = layout_shards([one], 1 << 20)
    for runs in ([], [Run(0, 0, 4000)], [Run(0, 0, 4096), Run(1, 4000, 96)]):
        with pytest.raises(ValueError, match="'a'"):
            assign_units(shard, {"a": runs}, 2)
    with pytest.raises(ValueError, match="twice"):
        layout_shards([one, one], 1 << 20)
    with pytest.raises(ValueError, match="no tensors"):
        layout_shards([], 1 << 20)
