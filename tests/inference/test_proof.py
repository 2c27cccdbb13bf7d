"""An engine proves which version it runs, for versions of all kinds; what it only says is of no account."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from adapter_helpers import OUTPUT, QUERY, factors, merged, publish_factors
from delta_helpers import model, nudged, publish_bf16, publish_delta, shard_of_any
from engine_helpers import tensors_of
from patience import patience

from hpcrl.inference import proof as proving
from hpcrl.inference.proof import Proofs, TensorSample, rows_of, same_bits
from hpcrl.modeling.decoder import Decoder
from hpcrl.modeling.fp8.quantiser import block_amax, dequantise, quantise, scales_of
from hpcrl.modeling.hf import load_hf_tensors
from hpcrl.weights import HandoffStore, TensorRecord, VersionCommitter
from hpcrl.weights.proof import WeightsProof


@pytest.fixture
def store(tmp_path: Path) -> HandoffStore:
    return HandoffStore(tmp_path / "weights")


def prove(
    store: HandoffStore,
    running: Decoder,
    version: int,
    before: int | None = None,
    number: int = 1,
    *,
    can_compare: Callable[[str, TensorRecord], bool] | None = None,
) -> WeightsProof:
    tensors = tensors_of(running)
    proofs = Proofs(can_compare or (lambda name, record: name in tensors), store.root)
    other = None if before is None else store.path_of(before)

    def compare(sample: TensorSample) -> bool:
        return same_bits(sample.tensor, rows_of(sample, tensors[sample.name]))

    deadline = time.monotonic() + 10 * patience()
    while (found := proofs.prove(store.path_of(version), other, number, compare)).state == "reading":
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return found


def check(store: HandoffStore, version: int, before: int, running: Decoder, old: Decoder) -> None:
    """What runs is the version, as each of several proofs says; what ran before is not."""
    for number in range(4):
        right = prove(store, running, version, before, number)
        assert (right.state, right.wrong, right.decisive) == ("compared", [], True)
        assert right.compared
        wrong = prove(store, old, version, before, number)
        assert wrong.state == "compared"
        assert wrong.wrong


def test_whole_versions(store: HandoffStore, tmp_path: Path) -> None:
    old, new = model(1), model(2)
    publish_bf16(store, 1, old, tmp_path)
    publish_bf16(store, 2, new, tmp_path)
    check(store, 2, 1, new, old)
    # an engine that computes in another dtype has other bytes, and the same numbers
    assert prove(store, model(2).float(), 2, 1).wrong == []


def test_the_tensors_that_changed_are_checked(store: HandoffStore, tmp_path: Path) -> None:
    """One of many: a sample of any would say of the version before that it is this one."""
    old, new = model(1), model(1)
    tensors = tensors_of(new)
    name = "model.layers.1.mlp.experts.5.up_proj.weight"
    tensors[name].view(-1)[7] += 1.0
    load_hf_tensors(new, new.adapter, tensors.items())
    publish_bf16(store, 1, old, tmp_path)
    publish_bf16(store, 2, new, tmp_path)
    for number in range(4):
        right, wrong = prove(store, new, 2, 1, number), prove(store, old, 2, 1, number)
        assert name in right.compared
        assert (right.wrong, right.decisive, wrong.wrong) == ([], True, [name])
    # where just that one cannot be compared nothing is proved
    blind = prove(store, old, 2, 1, can_compare=lambda each, record: each != name)
    assert (blind.state, blind.wrong, blind.decisive) == ("compared", [], False)
    # a version that changes nothing is proved by any
    publish_bf16(store, 3, new, tmp_path)
    assert prove(store, new, 3, 2).decisive


def test_deltas(store: HandoffStore, tmp_path: Path) -> None:
    models = [model(2)]
    for seed in (1, 2):
        models.append(nudged(models[-1], seed))
    publish_bf16(store, 1, models[0], tmp_path)
    publish_delta(store, 2, (1,), models[0], models[1])
    publish_delta(store, 3, (1, 2), models[1], models[2])
    check(store, 3, 2, models[2], models[1])


def publish_fp8(store: HandoffStore, version: int, source: Decoder, path: Path) -> Decoder:
    """Publish matrices of experts in FP8; returns the model that an engine makes of it."""
    published, loaded = {}, {}
    for name, tensor in tensors_of(source).items():
        loaded[name] = published[name] = tensor
        if ".experts." in name and tensor.dim() == 2:
            scales = scales_of(block_amax(tensor, (0, 0)))
            published[name], published[f"{name}_scale_inv"] = quantise(tensor, (0, 0), scales), scales
            loaded[name] = dequantise(published[name], scales)
    writer = VersionCommitter.claim(store.root, 1)
    shard = shard_of_any(writer.stage(version) / "model-00001-of-00001.safetensors", published)
    writer.publish(version=version, shards=[shard], model_dir=path, producer="test", kind="fp8")
    result = model(1)
    load_hf_tensors(result, result.adapter, loaded.items())
    return result


def test_fp8(store: HandoffStore, tmp_path: Path) -> None:
    old, new = (publish_fp8(store, version, model(version), tmp_path) for version in (1, 2))
    check(store, 2, 1, new, old)
    looked_at = {name for number in range(12) for name in prove(store, new, 2, 1, number).compared}
    assert any(".experts." in name for name in looked_at)
    assert not any(name.endswith("_scale_inv") for name in looked_at)


def test_adapters(store: HandoffStore, tmp_path: Path) -> None:
    start = model(1)
    base = publish_bf16(store, 1, start, tmp_path)
    first, second = (factors(tensors_of(start), seed, QUERY, OUTPUT) for seed in (1, 2))
    publish_factors(store, 2, base, first)
    publish_factors(store, 3, base, second)
    check(store, 2, 1, merged(start, first), start)
    check(store, 3, 2, merged(start, second), merged(start, first))
    # the base under an adapter's number, with the adapter's version before: both are found out
    assert prove(store, start, 3, 2).wrong


def test_large_tensors_are_compared_in_part(
    store: HandoffStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an embedding of gigabytes is; other rows each time."""
    monkeypatch.setattr(proving, "_SAMPLE_BYTES", 1000)
    monkeypatch.setattr(proving, "_SEGMENT_BYTES", 1000)
    old, new = model(1), model(2)
    publish_bf16(store, 1, old, tmp_path)
    publish_bf16(store, 2, new, tmp_path)
    name, seen = "model.embed_tokens.weight", []
    tensors = tensors_of(new)

    def compare(sample: TensorSample) -> bool:
        seen.append((sample.first_row, sample.tensor.nbytes))
        return same_bits(sample.tensor, rows_of(sample, tensors[sample.name]))

    for number in range(4):
        proofs = Proofs(lambda each, record: each == name, store.root)
        while (found := proofs.prove(store.path_of(2), None, number, compare)).state == "reading":
            time.sleep(0.005)
        assert (found.compared, found.wrong) == ([name], [])
        assert prove(store, old, 2, 1, number, can_compare=lambda each, record: each == name).wrong == [name]
    assert all(0 < size <= 1000 for _, size in seen)
    assert len({first for first, _ in seen}) > 1


def test_what_cannot_be_compared_is_unknown(store: HandoffStore, tmp_path: Path) -> None:
    handoff = publish_bf16(store, 1, model(1), tmp_path)
    assert prove(store, model(1), 9).state == "unknown"
    nothing = prove(store, model(1), 1, can_compare=lambda name, record: False)
    assert (nothing.state, "no tensor of the version" in nothing.why) == ("unknown", True)
    data = bytearray(handoff.shards[0].read_bytes())
    data[-handoff.manifest.tensor_bytes :] = bytes(handoff.manifest.tensor_bytes)
    handoff.shards[0].write_bytes(data)
    damaged = prove(store, model(1), 1)
    assert (damaged.state, damaged.wrong) == ("unknown", [])
    elsewhere = Proofs(lambda name, record: True, tmp_path / "another")
    while (found := elsewhere.prove(store.path_of(1), None, 1, lambda sample: True)).state == "reading":
        time.sleep(0.005)
    assert (found.state, "outside of" in found.why) == ("unknown", True)


def test_numbers_that_are_none_are_compared_by_their_bits() -> None:
    nan = torch.tensor(np.array([1.0, np.nan], np.float32))
    assert same_bits(nan, nan.clone())
    assert not same_bits(nan, torch.tensor([1.0, 2.0]))
