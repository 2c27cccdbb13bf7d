"""What a worker of vLLM reads before requests are frozen: what it will load, verified, once a node."""

from __future__ import annotations

import math
import re
import threading
from pathlib import Path

import pytest
import torch
from adapter_helpers import EXPERTS, QUERY, factors, flip_last_byte, merged, publish_factors
from delta_helpers import model, nudged, publish_bf16, publish_delta
from engine_helpers import publish, random_model, tensors_of, tiny_arch, write_model
from patience import wait_for

from hpcrl.errors import HandoffError
from hpcrl.inference.adapters import KeptBase
from hpcrl.inference.vllm.staging import Staged
from hpcrl.inference.vllm.version_memory import VersionMemory
from hpcrl.models.adapting import adapted_blocks
from hpcrl.weights import Handoff, HandoffStore
from hpcrl.weights.lifetime.leases import ReaderWatch
from hpcrl.weights.read.subscriber import ReaderSettings, Subscriber

#: a segment for each tensor of the tiny model, and none ahead: what is read can be counted
SETTINGS = ReaderSettings(segment_bytes=1 << 10, streams=1)
HELD = ("experts.0.", "experts.1.")


def everything(_: str) -> bool:
    return True


def of_two_experts(name: str) -> bool:
    return ".experts." not in name or any(part in name for part in HELD)


@pytest.fixture
def version(tmp_path: Path) -> Handoff:
    write_model(tmp_path / "model", 1)
    return publish(HandoffStore(tmp_path / "weights"), 3, tmp_path / "model", tensors_of(random_model(tiny_arch(), 3)))


def test_a_worker_reads_what_it_loads_and_nothing_else(version: Handoff) -> None:
    expected = tensors_of(random_model(tiny_arch(), 3))
    held = {name for name in expected if of_two_experts(name)}
    with Subscriber(version.path.parent, "engine-0", SETTINGS) as subscriber:
        staged = Staged(version.path, None, subscriber, of_two_experts)
        tensors = dict(staged.take())
        assert (staged.done, staged.problem, staged.kept) == (True, "", 0)
        assert tensors.keys() == held
        assert staged.elsewhere == len(expected) - len(held) > 0
        assert all(torch.equal(tensor, expected[name]) for name, tensor in tensors.items())
        sizes = {name: tensor.nbytes for name, tensor in expected.items()}
        assert subscriber.share.bytes_read == sum(sizes[name] for name in held) < sum(sizes.values())


def test_what_was_read_stays_until_a_version_is_acknowledged(version: Handoff) -> None:
    watch = ReaderWatch(version.path.parent, expiry_s=60.0)
    with Subscriber(version.path.parent, "engine-0", SETTINGS) as subscriber:
        staged = Staged(version.path, None, subscriber, everything)
        staged.take()
        (record,) = watch.observe()
        assert (record.leases, record.acknowledged) == ((3,), None)
        subscriber.acknowledge(staged.version)
        (record,) = watch.observe()
        assert (record.leases, record.acknowledged) == ((), 3)


def test_workers_of_a_node_read_a_version_once(version: Handoff, tmp_path: Path) -> None:
    settings = ReaderSettings(segment_bytes=1 << 10, cache_dir=tmp_path / "node")
    root = version.path.parent
    with Subscriber(root, "engine-0-0", settings) as one, Subscriber(root, "engine-0-1", settings) as two:
        staged = [Staged(version.path, None, one, everything), Staged(version.path, None, two, everything)]
        first, second = (dict(each.take()) for each in staged)
        assert one.share.bytes_read + two.share.bytes_read == sum(tensor.nbytes for tensor in first.values())
        assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())


def test_versions_take_turns_in_the_memory_of_a_worker(version: Handoff) -> None:
    store = HandoffStore(version.path.parent)
    start = version.path.parent.parent / "model"
    others = [publish(store, n, start, tensors_of(random_model(tiny_arch(), n))) for n in (4, 5)]
    memory = VersionMemory(torch.device("meta"), pin=lambda size, _: torch.empty(size, dtype=torch.uint8))
    places = set()
    with Subscriber(store.root, "engine-0", SETTINGS) as subscriber:
        for handoff, seed in zip((version, *others), (3, 4, 5), strict=True):
            staged = Staged(handoff.path, None, subscriber, everything, memory=memory)
            tensors = dict(staged.take())
            expected = tensors_of(random_model(tiny_arch(), seed))
            assert all(torch.equal(tensors[name], tensor) for name, tensor in expected.items())
            places.add(min(tensor.data_ptr() for tensor in tensors.values()))
            staged.drop()
            # once and not twice: else two versions would have the same memory
            staged.drop()
    assert len(places) == 1


def test_a_version_that_is_still_being_read_keeps_its_memory(version: Handoff) -> None:
    """The thread of one that was given up writes on, and the next one must have other memory."""
    stopped, go_on = threading.Event(), threading.Event()

    class Slow(VersionMemory):
        def allocate(self, size: int) -> torch.Tensor:
            stopped.set()
            assert go_on.wait(30.0)
            return super().allocate(size)

    memory = Slow(torch.device("meta"), segment_bytes=1, pin=lambda size, _: torch.empty(size, dtype=torch.uint8))
    with Subscriber(version.path.parent, "engine-0", SETTINGS) as subscriber:
        first = Staged(version.path, None, subscriber, everything, memory=memory)
        assert stopped.wait(30.0)
        first.drop()
        lease = memory.lend()
        go_on.set()
        wait_for(lambda: first.done, 30.0, "end of the thread")
        # what it had came back when its thread ended, and not to a version that had begun before
        assert lease.end() == []
        assert memory.lend().end() != []


def test_a_delta_is_applied_to_what_is_held(tmp_path: Path) -> None:
    """Of the version that it was made against, too, nothing else is read."""
    write_model(tmp_path / "model", 1)
    store = HandoffStore(tmp_path / "weights")
    old = model(5)
    new = nudged(old, 6)
    publish_bf16(store, 1, old, tmp_path / "model")
    delta = publish_delta(store, 2, (1,), old, new)
    expected = tensors_of(new)
    held = {name for name in expected if of_two_experts(name)}
    with Subscriber(store.root, "engine-0", SETTINGS) as subscriber:
        staged = Staged(delta.path, None, subscriber, of_two_experts)
        tensors = dict(staged.take())
        assert tensors.keys() == held
        assert all(torch.equal(tensor, expected[name]) for name, tensor in tensors.items())
        whole = sum(tensor.nbytes for tensor in expected.values())
        assert subscriber.share.bytes_read < whole
        # both stay until it is acknowledged
        (record,) = ReaderWatch(store.root, expiry_s=60.0).observe()
        assert 2 in record.leases


def test_a_torn_version_is_refused_with_a_reason(version: Handoff) -> None:
    flip_last_byte(next(version.path.glob("*.safetensors")))
    with Subscriber(version.path.parent, None, SETTINGS) as subscriber:
        staged = Staged(version.path, None, subscriber, everything)
        with pytest.raises(HandoffError, match="safetensors"):
            staged.take()
        assert "safetensors" in staged.problem


def test_what_is_not_a_version_is_refused_at_once(version: Handoff) -> None:
    with (
        Subscriber(version.path.parent, None, SETTINGS) as subscriber,
        pytest.raises(ValueError, match=r"not like v000012"),
    ):
        Staged(version.path.parent / "newest", None, subscriber, everything)


def test_an_adapter_is_merged_into_the_experts_that_are_held(version: Handoff) -> None:
    store = HandoffStore(version.path.parent)
    start = random_model(tiny_arch(), 3)
    given = factors(tensors_of(start), 1, QUERY, EXPERTS)
    adapter = publish_factors(store, 4, version, given)
    expected = tensors_of(merged(start, given))
    with Subscriber(store.root, "engine-0", SETTINGS) as subscriber:
        base = Staged(version.path, None, subscriber, of_two_experts)
        base.take()
        staged = Staged(adapter.path, base.contents, subscriber, of_two_experts)
        tensors = dict(staged.take())
        assert staged.kept > 0
        assert staged.elsewhere > 0
        assert len(tensors) + staged.kept + staged.elsewhere == len(expected)
        assert all(of_two_experts(name) for name in tensors)
        for name, tensor in tensors.items():
            torch.testing.assert_close(tensor, expected[name])


@pytest.mark.parametrize("limit_bytes", [None, 1 << 14, 0])
def test_of_a_base_that_is_kept_nothing_is_read_again(version: Handoff, limit_bytes: int | None) -> None:
    """What does not fit within the limit is, each time; and the weights are the same."""
    store = HandoffStore(version.path.parent)
    start = random_model(tiny_arch(), 3)
    tensors = tensors_of(start)
    given = {4: factors(tensors, 1, QUERY, EXPERTS), 5: factors(tensors, 2, QUERY), 6: factors(tensors, 3, EXPERTS)}
    base, served, read = KeptBase(limit_bytes), None, {}
    with Subscriber(store.root, "engine-0", SETTINGS) as subscriber:
        for number, adapter in given.items():
            handoff = publish_factors(store, number, version, adapter)
            before = subscriber.share.bytes_read
            staged = Staged(handoff.path, served, subscriber, of_two_experts, base)
            found, served = dict(staged.take()), staged.contents
            own = sum(4 * math.prod(record.shape) for record in handoff.manifest.tensors.values())
            read[number] = subscriber.share.bytes_read - before - own
            expected = tensors_of(merged(start, adapter))
            assert all(torch.allclose(tensor, expected[name], atol=1e-5) for name, tensor in found.items())
            # the caller may do with them what it likes
            for tensor in found.values():
                tensor.fill_(7.0)
        blocks = sum(t.nbytes for n, t in tensors.items() if of_two_experts(n) and in_blocks(n, QUERY, EXPERTS))
        kept = blocks if limit_bytes is None else base.bytes
        assert kept <= blocks
        assert 0 < kept < blocks if limit_bytes else kept == (blocks if limit_bytes is None else 0)
        # from the second adapter on blocks of the first are wanted again, and nothing else but ends of their segments
        assert blocks - kept <= read[5] == read[6] < blocks - kept + SETTINGS.segment_bytes
        assert (read[6] == 0) == (limit_bytes is None)


@pytest.mark.parametrize("targets", [["attention"], ["experts"], None])
def test_a_plan_counts_what_a_worker_keeps(version: Handoff, targets: list[str] | None) -> None:
    """Bytes of the blocks of layers that adapters change, of a rank that has two of eight experts."""
    store, tensors = HandoffStore(version.path.parent), tensors_of(random_model(tiny_arch(), 3))
    modules = {name.removesuffix(".weight") for name in tensors}
    parts = {
        "attention": [name for name in modules if re.fullmatch(r".+\.self_attn\.[qkvo]_proj", name)],
        "experts": [f"model.layers.{layer}.mlp.experts" for layer in range(2)],
    }
    adapted = [name for target in targets or parts for name in parts[target]]
    handoff, base = publish_factors(store, 4, version, factors(tensors, 1, *adapted)), KeptBase()
    with Subscriber(store.root, "engine-0", SETTINGS) as subscriber:
        Staged(handoff.path, None, subscriber, of_two_experts, base).take()
    experts, others = adapted_blocks(tiny_arch().facts, targets, "float32")
    assert base.bytes == experts * len(HELD) // 8 + others > 0


def test_another_base_takes_the_place_of_the_one_that_is_kept(version: Handoff, tmp_path: Path) -> None:
    store = HandoffStore(version.path.parent)
    base, served = KeptBase(), None
    other = random_model(tiny_arch(), 9)
    with Subscriber(store.root, "engine-0", SETTINGS) as subscriber:
        for number, model_of, handoff in (
            (4, random_model(tiny_arch(), 3), version),
            (6, other, publish(store, 5, tmp_path / "model", tensors_of(other))),
        ):
            given = factors(tensors_of(model_of), number, QUERY, EXPERTS)
            adapter = publish_factors(store, number, handoff, given)
            staged = Staged(adapter.path, served, subscriber, everything, base)
            found, served = dict(staged.take()), staged.contents
            expected = tensors_of(merged(model_of, given))
            assert found.keys() == expected.keys()
            assert all(torch.allclose(tensor, expected[name], atol=1e-5) for name, tensor in found.items())
            blocks = sum(t.nbytes for n, t in expected.items() if in_blocks(n, QUERY, EXPERTS))
            assert base.bytes == blocks


def in_blocks(name: str, *modules: str) -> bool:
    """Whether a tensor lies in a block of one of the modules."""
    return any(name.startswith(".".join(module.split(".")[:4]) + ".") for module in modules)


def test_who_is_dropped_gives_its_memory_back(version: Handoff) -> None:
    with Subscriber(version.path.parent, None, SETTINGS) as subscriber:
        staged = Staged(version.path, None, subscriber, everything)
        staged.drop()
        wait_for(lambda: staged.done, 20, "the end of reading")
        assert staged.take() == []
