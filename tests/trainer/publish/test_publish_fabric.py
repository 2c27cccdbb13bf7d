"""Versions that ranks of the trainer serve over the fabric: all kinds, from several ranks, with the share below."""

from __future__ import annotations

import errno
import secrets

import pytest
import torch
from trainer_testing import make_recipe, run_ranks, write_model_dir

from hpcrl.config.handoff import HandoffConfig
from hpcrl.config.lora import LoraConfig
from hpcrl.models.arch import load_arch
from hpcrl.network.auth import Gate
from hpcrl.network.credentials import Credentials
from hpcrl.trainer.parallel.mesh import distributed
from hpcrl.trainer.publish import fabric_serving
from hpcrl.trainer.publish.adapters import AdapterPublisher
from hpcrl.trainer.publish.fabric_serving import FabricPlace
from hpcrl.trainer.publish.publisher import Publisher
from hpcrl.trainer.step.policy import TrainerPolicy
from hpcrl.weights.read.subscriber import ReaderSettings, Subscriber
from hpcrl.weights.store import HandoffStore

pytest.importorskip("mooncake.engine", reason="the extra store is not installed")

TOKEN = secrets.token_hex(32)
SETTINGS = ReaderSettings(segment_bytes=16 << 10)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return write_model_dir(tmp_path_factory.mktemp("fabric") / "model")


def publisher_of(store, parallel, model_dir, token=TOKEN, host=lambda: "127.0.0.1", **settings):
    return Publisher(
        store,
        parallel,
        arch=load_arch(model_dir),
        model_dir=model_dir,
        dtype=torch.float32,
        attempt=1,
        settings=HandoffConfig(transport="fabric", retry_s=0.0, **settings),
        chunk_bytes=4096,
        fabric=FabricPlace(token, host),
    )


def read(root, version, token):
    """All bytes of a version, and the reader that has read them."""
    with Subscriber(root, "r", SETTINGS, gate=Gate("fanout", Credentials(token))) as reader:
        with reader.reading(version) as reading:
            tensors = {name: bytes(data) for name, _, data in reading.tensors()}
        return tensors, reader


def noting_durable(said):
    """A receiver of reports that keeps those of durable versions (others: test_publish_announced.py)."""
    return lambda published: said.append(published) if published.durable else None


def no_route():
    raise OSError(errno.ENETUNREACH, "no route")


def move(model, by):
    with torch.no_grad():
        for parameter in model.parameters():
            local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            local.view(-1)[:4] += by


def publish_and_read(rank, model_dir, root, token, settings):
    """Publish two versions of changing weights; for each what was read over the fabric, from the share, and why not."""
    store, found = HandoffStore(root), []
    with distributed(timeout_s=120) as parallel:
        arch = load_arch(model_dir)
        policy = TrainerPolicy(make_recipe(model_dir, steps=2, dtype="float32"), arch, parallel, model_dir=model_dir)
        publisher = publisher_of(store, parallel, model_dir, token, **settings)
        said = []
        for version in (1, 2):
            publisher.publish(policy.model, version, noting_durable(said))
            publisher.wait()
            if rank == 0:
                pulled, reader = read(root, version, token)
                with Subscriber(root, "s", ReaderSettings(fabric=False)) as other, other.reading(version) as reading:
                    assert pulled == {name: bytes(data) for name, _, data in reading.tensors()}
                found.append((reader.fabric.bytes_read, reader.share.bytes_read, reader.fabric.problem))
            parallel.world.gather(None)
            move(policy.model, 1.0)
        publisher.close()
        return found, [(published.version, published.kind, published.off_fabric) for published in said]


@pytest.mark.parametrize(("ranks", "settings"), [(2, {}), (1, {"kind": "fp8"})], ids=["full", "fp8"])
def test_ranks_serve_what_they_publish(model_dir, tmp_path, ranks, settings):
    root = tmp_path / "weights"
    arguments = (model_dir, root, TOKEN, settings)
    if ranks == 1:
        found, said = publish_and_read(0, *arguments)
    else:
        (found, said), nothing = run_ranks(2, publish_and_read, *arguments, timeout_s=120)
        assert nothing == ([], [])
    assert said == [(version, settings.get("kind", "full"), "") for version in (1, 2)]
    for version, (pulled, from_share, problem) in zip((1, 2), found, strict=True):
        bytes_there = HandoffStore(root).open(version).manifest.tensor_bytes
        assert (from_share, problem) == (0, "")
        assert bytes_there <= pulled < bytes_there + (64 << 10)
    assert not list(root.glob(".writer-*/fabric/v??????.json")), "records stay behind a trainer that has ended"


def test_a_delta_is_served_by_those_who_made_it(model_dir, tmp_path):
    root = tmp_path / "weights"
    settings = {"delta_chain": 2, "delta_max_share": 0.9, "fabric_versions": 2}
    (found, said), _ = run_ranks(2, publish_and_read, model_dir, root, TOKEN, settings, timeout_s=120)
    assert said == [(1, "full", ""), (2, "delta", "")]
    for pulled, from_share, problem in found:
        assert (from_share, problem) == (0, "")
        assert pulled > 0


def test_a_version_without_fabric_is_published_all_the_same(model_dir, tmp_path):
    root, said = tmp_path / "weights", []
    with distributed(timeout_s=120) as parallel:
        policy = TrainerPolicy(make_recipe(model_dir, steps=2), load_arch(model_dir), parallel, model_dir=model_dir)
        publisher = publisher_of(HandoffStore(root), parallel, model_dir, host=no_route)
        publisher.publish(policy.model, 1, said.append)
        publisher.wait()
    (published,) = said
    assert "rank 0" in published.off_fabric
    assert "no route" in published.off_fabric
    _, reader = read(root, 1, TOKEN)
    assert reader.fabric.bytes_read == 0
    assert reader.share.bytes_read > 0


def test_the_memory_is_registered_once_and_bounded(model_dir, tmp_path):
    root = tmp_path / "weights"
    with distributed(timeout_s=120) as parallel:
        policy = TrainerPolicy(make_recipe(model_dir, steps=2), load_arch(model_dir), parallel, model_dir=model_dir)
        publisher = publisher_of(HandoffStore(root), parallel, model_dir, fabric_versions=2)
        sizes = []
        for version in (1, 2, 3):
            publisher.publish(policy.model, version)
            publisher.wait()
            sizes.append(publisher._fabric.nbytes)
            kept = sorted(path.name for path in root.glob(".writer-*/fabric/v??????.json"))
            assert kept == [f"v{number:06d}.json" for number in range(max(1, version - 1), version + 1)]
        assert len(list(root.glob(".writer-*/fabric/layout-*"))) == 1
        share = HandoffStore(root).open(1).manifest.total_bytes
        assert len(set(sizes)) == 1
        assert sizes[0] < 2 * share + (64 << 10)
        publisher.close()


def test_adapters_are_served_and_their_base_is_not(tmp_path):
    model_dir, root = write_model_dir(tmp_path / "model"), tmp_path / "weights"
    with distributed(timeout_s=120) as parallel:
        recipe = make_recipe(model_dir, steps=2, dtype="float32", lora={"rank": 4})
        arch = load_arch(model_dir)
        policy = TrainerPolicy(recipe, arch, parallel, model_dir=model_dir)
        publisher = AdapterPublisher(
            HandoffStore(root),
            parallel,
            lora=LoraConfig(rank=4),
            model_dir=model_dir,
            arch=arch,
            dtype=torch.float32,
            attempt=1,
            settings=HandoffConfig(transport="fabric", retry_s=0.0),
            fabric=FabricPlace(TOKEN, lambda: "127.0.0.1"),
        )
        said = []
        for version in (0, 1):
            publisher.publish(policy.model, version, noting_durable(said))
            publisher.wait()
        assert [path.name for path in root.glob(".writer-*/fabric/v??????.json")] == ["v000001.json"]
        _, reader = read(root, 1, TOKEN)
        assert reader.fabric.bytes_read > 0
        assert (reader.share.bytes_read, reader.fabric.problem) == (0, "")
        publisher.close()
    assert [(published.version, published.kind, published.off_fabric) for published in said] == [
        (0, "full", ""),
        (1, "lora", ""),
    ]


def test_memory_that_cannot_be_had_is_asked_for_again_with_pauses(model_dir, tmp_path, caplog):
    """Three tries fail: for the versions 1, 3 and 6. The fourth one, four versions later, succeeds."""
    root, tried, said = tmp_path / "weights", [], []
    version = 0

    def host():
        tried.append(version)
        return no_route() if len(tried) < 4 else "127.0.0.1"

    with distributed(timeout_s=120) as parallel:
        policy = TrainerPolicy(make_recipe(model_dir, steps=2), load_arch(model_dir), parallel, model_dir=model_dir)
        publisher = publisher_of(HandoffStore(root), parallel, model_dir, host=host)
        for version in range(1, 13):
            publisher.publish(policy.model, version, noting_durable(said))
            publisher.wait()
        _, reader = read(root, 12, TOKEN)
        publisher.close()
    assert tried == [1, 3, 6, 11]
    assert [published.off_fabric_versions for published in said] == [*range(1, 11), 0, 0]
    assert all("no route" in published.off_fabric for published in said[:10])
    assert (reader.share.bytes_read, reader.fabric.problem) == (0, "")
    warnings = [record.getMessage() for record in caplog.records if "not served over the fabric" in record.msg]
    assert len(warnings) == 1
    assert warnings[0].startswith("version 1 ")
    HandoffStore(root).open(10).verify(content=True)


def test_an_engine_without_memory_is_used_by_the_next_try(model_dir, tmp_path, monkeypatch):
    """Each has threads and a port of its own."""
    engines, said, ring = set(), [], fabric_serving.FabricRing

    def no_memory(engine, **settings):
        engines.add(id(engine))
        kept.append(engine)
        if len(kept) < 3:
            raise OSError(errno.ENOMEM, "no memory")
        return ring(engine, **settings)

    kept = []
    monkeypatch.setattr(fabric_serving, "FabricRing", no_memory)
    with distributed(timeout_s=120) as parallel:
        policy = TrainerPolicy(make_recipe(model_dir, steps=2), load_arch(model_dir), parallel, model_dir=model_dir)
        publisher = publisher_of(HandoffStore(tmp_path / "weights"), parallel, model_dir)
        for version in range(1, 7):
            publisher.publish(policy.model, version, noting_durable(said))
            publisher.wait()
        publisher.close()
    assert (len(kept), len(engines)) == (3, 1)
    assert [bool(published.off_fabric) for published in said] == [True] * 5 + [False]


def publish_with_one_rank_without_memory(rank, model_dir, root, token):
    """Publish five versions; return those that this rank has copied, and the failures that rank 0 reports."""
    copied, said, ring_fill = [], [], fabric_serving.FabricRing.fill
    with distributed(timeout_s=120) as parallel, pytest.MonkeyPatch.context() as patch:

        def fill(ring, parts, seal):
            copied.append(version)
            return ring_fill(ring, parts, seal)

        patch.setattr(fabric_serving.FabricRing, "fill", fill)
        policy = TrainerPolicy(make_recipe(model_dir, steps=2), load_arch(model_dir), parallel, model_dir=model_dir)
        host = no_route if rank else (lambda: "127.0.0.1")
        publisher = publisher_of(HandoffStore(root), parallel, model_dir, token, host)
        for version in range(1, 6):
            publisher.publish(policy.model, version, noting_durable(said))
            publisher.wait()
        publisher.close()
        return copied, [(published.version, published.off_fabric_versions) for published in said]


def test_no_rank_copies_while_another_one_has_no_memory(model_dir, tmp_path):
    (copied, said), (others, _) = run_ranks(
        2, publish_with_one_rank_without_memory, model_dir, tmp_path / "weights", TOKEN, timeout_s=120
    )
    assert copied == [1, 3]
    assert others == []
    assert said == [(version, version) for version in range(1, 6)]
