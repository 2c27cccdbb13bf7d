"""Batches by reference: bit for bit the batches that the orchestrator made when it held all columns itself."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
import xxhash
from recorded_rollouts import STEP, WORLD_SIZE, recorded_recipe, recorded_rollouts

from hpcrl.dock.assemble import assemble_batch
from hpcrl.dock.columns import encode_columns
from hpcrl.dock.ledger.entries import PayloadPlace
from hpcrl.dock.ledger.payload import PayloadWriter
from hpcrl.dock.warehouse.embedded import EmbeddedWarehouse
from hpcrl.dock.warehouse.interface import Location
from hpcrl.dock.warehouse.reading import BlockReader
from hpcrl.dock.warehouse.sharing import Sharing
from hpcrl.dock.wire import BatchShard, ReferencedShard, decode_answer, encode_shard
from hpcrl.errors import RolloutsLostError
from hpcrl.rollouts.batches.build import Batch, build_batch
from hpcrl.rollouts.batches.columns import RolloutColumns
from hpcrl.rollouts.core.records import Group, StoredRollout, encode_rollout

#: xxh3_128 of the shards of the recorded rollouts, encoded by the orchestrator before batches went by reference
RECORDED = {
    False: ["737d62c629b2536e20c85318642778a0", "5bc67263c25de4927e99618e27c7bc6c"],
    True: ["301c70bd0f7b8b0c3017b250953f3f76", "aaa427a35dcbb920454fb734cdd50e32"],
}
LINES = "c6ce506d5d595a58514c320878a287a2"
"""The same of the lines for people."""


def stored_batch(directory: Path, *, experts: bool, counts_as: int | None = None) -> tuple[Batch, EmbeddedWarehouse]:
    """The batch of the recorded rollouts, which lie in a warehouse and on disk."""
    for name in ("memory", "payload"):
        (directory / name).mkdir()
    warehouse = EmbeddedWarehouse(directory / "memory", limit_bytes=1 << 20)
    writer, groups = PayloadWriter(directory / "payload", 1), []
    for index, rollouts in enumerate(recorded_rollouts(experts=experts)):
        stored = []
        for rollout in rollouts:
            block = encode_columns(*encode_rollout(rollout))
            place = writer.write([block])[0]
            assert warehouse.put(place, block)
            stored.append(StoredRollout.of(rollout, place, counts_as=counts_as))
        groups.append(Group(index=10 + index, environment="words", prompt_index=100 + index, rollouts=stored))

    def decode(ids: Sequence[int]) -> str:
        return "-".join(map(str, ids))

    batch = build_batch(
        groups,
        step=STEP,
        world_size=WORLD_SIZE,
        recipe=recorded_recipe(),
        counters={"finished": 9.0},
        text=RolloutColumns(directory / "payload", lambda: None, decode=decode).text,
        cost=float,
        location=Location(str(warehouse.directory)),
        payload_dir=directory / "payload",
    )
    return batch, warehouse


def digest(shard: BatchShard) -> str:
    """Hash a shard as it was recorded: the counts of its means are newer, and so are branches and environments."""
    assert shard.stats.reward_count == sum(shard.stats.reward_count_by_env.values()) > 0
    document = msgspec.msgpack.decode(encode_shard(shard))
    for name in ("reward_count", "reward_count_by_env", "reward_count_by_part"):
        del document["stats"][name]
    environments = document["stats"].pop("environments")
    assert environments == {"words": [10 + index for index in range(len(environments["words"]))]}
    assert not {"model_flops", "wait_for_policy_s"} & set(document["stats"])
    assert (document["stats"].pop("branches_mean"), shard.stats.branches_max) == (1.0, 1)
    for micro_batch in document["micro_batches"]:
        assert micro_batch.pop("sequences") == []
        assert micro_batch.pop("teacher_logprobs") is None
    return xxhash.xxh3_128_hexdigest(msgspec.msgpack.encode(document))


def lines_digest(lines: bytes) -> str:
    """Hash lines for people as they were recorded: what they say of branches is newer."""
    found = []
    for line in lines.splitlines():
        document = msgspec.json.decode(line)
        assert document.pop("branches") == 1
        assert all(turn[4:] == [0, 0, 0] for turn in document["turns"])
        found.append(document | {"turns": [turn[:4] for turn in document["turns"]]})
    return xxhash.xxh3_128_hexdigest(b"".join(msgspec.json.encode(each) + b"\n" for each in found))


def referenced(data: bytes) -> ReferencedShard:
    shard = decode_answer(data)
    assert isinstance(shard, ReferencedShard)
    return shard


@pytest.mark.parametrize("experts", [False, True])
@pytest.mark.parametrize("source", ["node", "disk"])
def test_a_batch_by_reference_is_the_recorded_one_bit_for_bit(tmp_path: Path, experts: bool, source: str) -> None:
    batch, warehouse = stored_batch(tmp_path, experts=experts)
    assert lines_digest(batch.lines) == LINES
    if source == "disk":
        warehouse.close()
    found = []
    for data in batch.shards:
        shard = referenced(data)
        reader = BlockReader(shard.location, Path(shard.payload_dir))
        found.append(digest(assemble_batch(shard, reader.read)))
        assert set(reader.sources) == {source}
    assert found == RECORDED[experts]
    warehouse.close()


@pytest.mark.parametrize("experts", [False, True])
def test_a_batch_that_ranks_of_a_node_share_is_the_recorded_one_bit_for_bit(tmp_path: Path, experts: bool) -> None:
    batch, warehouse = stored_batch(tmp_path, experts=experts)
    (tmp_path / "node").mkdir(mode=0o700)
    # of a warehouse on another node, that nobody serves
    warehouse.close()
    sharing = [Sharing(tmp_path / "node", limit_bytes=1 << 20) for _ in range(2)]
    sources = []
    for each in sharing:
        found = []
        for data in batch.shards:
            shard = referenced(data)
            reader = BlockReader(shard.location, Path(shard.payload_dir))
            reader.share(each, shard.step)
            found.append(digest(assemble_batch(shard, reader.read)))
            sources.append(set(reader.sources))
        assert found == RECORDED[experts]
    assert sources == [{"disk"}, {"disk"}, {"node"}, {"node"}]
    for each in sharing:
        each.close()


def test_after_a_restore_all_tokens_count_as_one_version(tmp_path: Path) -> None:
    batch, warehouse = stored_batch(tmp_path, experts=False, counts_as=2)
    shard = referenced(batch.shards[0])
    assert shard.stats.staleness_histogram == {str(STEP - 1 - 2): 9}
    reader = BlockReader(shard.location, Path(shard.payload_dir))
    for micro_batch in assemble_batch(shard, reader.read).micro_batches:
        assert np.all(micro_batch.versions == 2)
    warehouse.close()


def test_columns_that_are_gone_everywhere_are_an_error_that_names_the_rollout(tmp_path: Path) -> None:
    batch, warehouse = stored_batch(tmp_path, experts=False)
    warehouse.close()
    shard = referenced(batch.shards[0])
    first = shard.micro_batches[0][0]
    name = f"{first.group}/{first.member}"
    longer = msgspec.structs.replace(first, tokens=first.tokens + 1)
    wrong = msgspec.structs.replace(shard, micro_batches=[[longer]])
    with pytest.raises(RolloutsLostError, match=f"rollout {name} has {first.tokens + 1} tokens, its columns"):
        assemble_batch(wrong, BlockReader(shard.location, Path(shard.payload_dir)).read)
    (tmp_path / "payload" / first.place.file).unlink()
    with pytest.raises(RolloutsLostError, match=rf"rollout {name} cannot be read: (.|\n)*hint: hpcrl rollouts verify"):
        assemble_batch(shard, BlockReader(shard.location, Path(shard.payload_dir)).read)


def test_a_block_is_read_once_for_all_sequences_of_its_rollout(tmp_path: Path) -> None:
    """They may be in several micro-batches, and among rollouts of one sequence."""
    batch, warehouse = stored_batch(tmp_path, experts=False)
    shard = referenced(batch.shards[0])
    first, other = [sample for some in shard.micro_batches for sample in some][:2]
    half, tokens = first.tokens // 2, first.tokens
    branches = [
        msgspec.structs.replace(first, tokens=half, rollout_tokens=tokens),
        msgspec.structs.replace(first, tokens=tokens - half, begin=half, sequence=1, rollout_tokens=tokens),
    ]
    reader, places = BlockReader(shard.location, Path(shard.payload_dir)), list[PayloadPlace]()

    def read(place: PayloadPlace) -> memoryview:
        places.append(place)
        return reader.read(place)

    changed = msgspec.structs.replace(shard, micro_batches=[[branches[0], other], [branches[1]]])
    one, two = assemble_batch(changed, read).micro_batches
    assert sorted(place.offset for place in places) == sorted({first.place.offset, other.place.offset})
    (whole,) = assemble_batch(msgspec.structs.replace(shard, micro_batches=[[first]]), reader.read).micro_batches
    assert [*one.token_ids[:half].tolist(), *two.token_ids.tolist()] == whole.token_ids.tolist()
    warehouse.close()


@pytest.mark.parametrize("count", [1, 2, 3])
def test_routed_experts_of_a_micro_batch_are_those_of_its_rollouts_in_a_row(tmp_path: Path, count: int) -> None:
    """Rows of a rollout without any are missing, and those of the others are where its tokens are."""
    batch, warehouse = stored_batch(tmp_path, experts=True)
    shard = referenced(batch.shards[0])
    recorded = recorded_rollouts(experts=True)
    samples = [sample for some in shard.micro_batches for sample in some][: count + 1]
    for first in range(len(samples) - count + 1):
        chosen = samples[first : first + count]
        changed = msgspec.structs.replace(shard, micro_batches=[chosen])
        reader = BlockReader(shard.location, Path(shard.payload_dir))
        (found,) = assemble_batch(changed, reader.read).micro_batches
        rollouts = [recorded[sample.group - 10][sample.member] for sample in chosen]
        assert [len(rollout.token_ids) for rollout in rollouts] == [sample.tokens for sample in chosen]
        present, rows = [], []
        for rollout in rollouts:
            tokens, routes = len(rollout.token_ids), rollout.routed_experts
            present.append(np.zeros(tokens, np.uint8) if routes is None else np.frombuffer(routes.present, np.uint8))
            shape = (tokens, 3, 2)
            rows.append(np.zeros(shape) if routes is None else np.frombuffer(routes.data, routes.dtype).reshape(shape))
        if not any(rollout.routed_experts for rollout in rollouts):
            assert found.routed_experts is None
            continue
        assert found.routed_experts is not None
        assert found.routed_experts.shape == (sum(sample.tokens for sample in chosen), 3, 2)
        there = np.concatenate(present)
        assert np.array_equal(np.frombuffer(found.routed_experts.present, np.uint8), there)
        experts = np.frombuffer(found.routed_experts.data, found.routed_experts.dtype).reshape(-1, 3, 2)
        assert np.array_equal(experts[there == 1], np.concatenate(rows)[there == 1])
    warehouse.close()
