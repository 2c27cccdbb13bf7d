"""Experts of tokens in the shards of a batch: one row a token, as narrow as is exact."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from routed_rows_testing import LAYERS, WIDTH, experts_of

from hpcrl.dock.routes import RoutedExperts, exact_dtype, joined
from hpcrl.dock.wire import BatchShard, BatchStats, MicroBatch, decode_shard, encode_shard


@pytest.mark.parametrize(
    ("experts", "dtype"), [(1, "uint8"), (256, "uint8"), (257, "uint16"), (65536, "uint16"), (65537, "uint32")]
)
def test_the_dtype_is_the_smallest_that_is_exact(experts: int, dtype: str) -> None:
    assert exact_dtype(experts) == np.dtype(dtype)
    assert np.array(experts - 1).astype(dtype) == experts - 1


def shard_of(routes: RoutedExperts | None, tokens: int) -> BatchShard:
    flat = {name: np.zeros(tokens, np.float32) for name in ("logprobs", "advantages")}
    micro_batch = MicroBatch(
        token_ids=np.zeros(tokens, np.int32),
        cu_seqlens=np.array([0, tokens], np.int32),
        loss_mask=np.zeros(tokens, np.uint8),
        versions=np.zeros(tokens, np.int32),
        routed_experts=routes,
        **flat,
    )
    return BatchShard(step=1, rank=0, world_size=1, micro_batches=[micro_batch], stats=BatchStats.of_tokens(tokens))


def test_a_decoded_shard_has_views_into_the_message() -> None:
    experts = np.random.default_rng(0).integers(0, 256, (4096, LAYERS, WIDTH)).astype(np.uint8)
    present = np.ones(4096, np.uint8)
    present[7] = 0
    data, plain = encode_shard(shard_of(RoutedExperts.of(experts, present), 4096)), encode_shard(shard_of(None, 4096))
    # as they are: no text, no wider numbers
    assert len(data) - len(plain) < experts.nbytes + present.nbytes + 100
    routes = decode_shard(data).micro_batches[0].routed_experts
    assert routes is not None
    assert (routes.experts == experts).all()
    assert routes.experts.dtype == np.uint8
    assert np.flatnonzero(~routes.known).tolist() == [7]
    message = np.frombuffer(data, np.uint8)
    assert np.shares_memory(routes.experts, message)
    assert np.shares_memory(routes.known, message)
    assert not routes.experts.flags.writeable
    assert decode_shard(plain).micro_batches[0].routed_experts is None


def test_wide_experts_stay_exact() -> None:
    experts = np.array([[[300, 5]], [[0, 383]]], np.uint16)
    data = encode_shard(shard_of(RoutedExperts.of(experts, np.ones(2, np.uint8)), 2))
    routes = decode_shard(data).micro_batches[0].routed_experts
    assert routes is not None
    assert routes.experts.dtype == np.uint16
    assert routes.experts.tolist() == experts.tolist()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shape": (3, LAYERS, WIDTH)}, "are not"),
        ({"dtype": "<i8"}, "unsigned"),
        ({"present": memoryview(b"\1")}, "1 flags for 2 rows"),
    ],
)
def test_what_does_not_fit_is_not_a_shard(change: dict[str, Any], message: str) -> None:
    good = RoutedExperts.of(experts_of([4, 5]), np.ones(2, np.uint8))
    with pytest.raises(ValueError, match=message):
        RoutedExperts(**{**msgspec.structs.asdict(good), **change})
    shard = shard_of(good, 2)
    wire = msgspec.msgpack.decode(encode_shard(shard))
    bad = {name: bytes(value) if isinstance(value, memoryview) else value for name, value in change.items()}
    wire["micro_batches"][0]["routed_experts"].update(bad)
    with pytest.raises(ValueError, match=message):
        decode_shard(msgspec.msgpack.encode(wire))


def test_packed_sequences_keep_their_rows() -> None:
    one, two = experts_of([1, 2, 3]), experts_of([9, 8])
    here, there = np.array([1, 1, 0], np.uint8), np.array([0, 1], np.uint8)
    routes = joined([RoutedExperts.of(one, here), None, RoutedExperts.of(two, there)], [3, 2, 2])
    assert routes is not None
    assert routes.known.tolist() == [True, True, False, False, False, False, True]
    assert (routes.experts[:2] == one[:2]).all()
    assert (routes.experts[6] == two[1]).all()
    assert joined([None, None], [3, 2]) is None
    assert joined([], []) is None
    with pytest.raises(ValueError, match="do not fit"):
        joined([RoutedExperts.of(one, here), RoutedExperts.of(two[:, :1], there)], [3, 2])
    with pytest.raises(ValueError, match="do not fit"):
        joined([RoutedExperts.of(one, here)], [4])
