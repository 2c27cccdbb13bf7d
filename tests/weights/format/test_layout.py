"""Where bytes lie and who writes them, for any sharding: every byte once, pages never shared."""

from __future__ import annotations

import itertools
import random
from typing import NamedTuple

import numpy as np
import pytest
from safetensors.numpy import load_file

from hpcrl.weights.format.layout import PAGE_BYTES, PublishedTensor, block_runs, layout_shards
from hpcrl.weights.format.units import Runs, assign_units


class Run(NamedTuple):
    """Bytes of a tensor that a rank has."""

    rank: int
    start: int
    bytes: int


def tensors(rng: random.Random) -> list[PublishedTensor]:
    shapes = [(rng.randint(1, 60), rng.choice([7, 128, 1024])) for _ in range(12)] + [(5,), (1024,)]
    rng.shuffle(shapes)
    return [PublishedTensor(f"t{i}", rng.choice(["bfloat16", "float32"]), shape) for i, shape in enumerate(shapes)]


def split(rng: random.Random, size: int, ranks: int) -> list[Run]:
    """Any dealing out of a tensor's bytes."""
    ends = [*sorted(rng.randint(0, size) for _ in range(ranks)), size]
    begins = [0, *ends[:-1]]
    return [Run(rng.randrange(ranks), a, b - a) for a, b in itertools.zip_longest(begins, ends) if b > a]


def table_of(runs: dict[str, list[Run]]) -> tuple[dict[str, int], Runs]:
    """Numbers of tensors, and their runs, which need no order."""
    numbers = {name: number for number, name in enumerate(runs)}
    rows = [(numbers[name], *run) for name, own in runs.items() for run in own]
    random.Random(0).shuffle(rows)
    return numbers, Runs(*np.array(rows, np.int64).reshape(-1, 4).T)


@pytest.mark.parametrize("seed", range(8))
def test_each_byte_has_one_writer_and_comes_from_who_has_it(seed: int) -> None:
    rng = random.Random(seed)
    ranks = rng.randint(1, 5)
    wanted = tensors(rng)
    runs = {tensor.name: split(rng, tensor.bytes, ranks) for tensor in wanted}
    shards = layout_shards(wanted, rng.choice([100_000, 10_000_000]))
    numbers, table = table_of(runs)
    names, chunk_bytes = list(numbers), PAGE_BYTES * rng.choice([1, 4])
    units, chunks, parts = assign_units(shards, numbers, table, ranks, chunk_bytes=chunk_bytes)
    for number, shard in enumerate(shards):
        assert len(shard.head) % PAGE_BYTES == 0
        position = len(shard.head)
        where = {tensor.name: offset for tensor, offset in shard.tensors}
        for turn, unit in enumerate(np.flatnonzero(units.file == number)):
            assert units.offset[unit] == position
            assert position % PAGE_BYTES == 0
            position += units.bytes[unit]
            inside = 0
            held = dict.fromkeys(range(ranks), 0)
            for part in np.flatnonzero(parts.unit == unit):
                name, start, size = names[parts.tensor[part]], parts.start[part], parts.bytes[part]
                assert parts.at[part] == inside
                assert units.offset[unit] + inside == where[name] + start
                assert any(
                    run.rank == parts.rank[part] and run.start <= start and start + size <= run.start + run.bytes
                    for run in runs[name]
                )
                inside += size
                held[int(parts.rank[part])] += size
            assert inside == units.bytes[unit]
            most = [rank for rank in range(ranks) if held[rank] == max(held.values())]
            # who has equally much takes turns
            assert units.writer[unit] == min(most, key=lambda rank, turn=turn: (rank - turn) % ranks)
            own = np.flatnonzero(chunks.unit == unit)
            assert chunks.bytes[own].sum() == units.bytes[unit]
            for chunk in own:
                name = names[chunks.tensor[chunk]]
                offset = where[name] + chunks.number[chunk] * chunk_bytes
                # it ends on a page only where its unit ends
                at_end = offset + chunks.bytes[chunk] == position
                assert at_end == ((offset + chunks.bytes[chunk]) % PAGE_BYTES == 0 or chunk == own[-1])
        assert position == shard.bytes


def test_ranks_that_have_equally_much_take_turns() -> None:
    wanted = [PublishedTensor(name, "float32", (2, PAGE_BYTES)) for name in "ab"]
    half = PAGE_BYTES // 2
    runs = {tensor.name: [Run(i % 2, i * half, half) for i in range(tensor.bytes // half)] for tensor in wanted}
    shards = layout_shards(wanted, wanted[0].bytes)
    units, _, _ = assign_units(shards, *table_of(runs), 2, chunk_bytes=PAGE_BYTES)
    assert units.writer.tolist() == [0, 1, 0, 1, 0, 1, 0, 1] * 2


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
    broken = ([], [Run(0, 0, 4000)], [Run(0, 0, 4096), Run(1, 4000, 96)], [Run(0, 96, 4000)], [Run(0, 0, 4100)])
    for at, runs in zip((0, 4000, 4000, 0, 0), broken, strict=True):
        with pytest.raises(ValueError, match=rf"'a' do not fit together at byte {at}$"):
            assign_units([shard], *table_of({"a": runs}), 2)
    with pytest.raises(ValueError, match="twice"):
        layout_shards([one, one], 1 << 20)
    with pytest.raises(ValueError, match="no tensors"):
        layout_shards([], 1 << 20)
