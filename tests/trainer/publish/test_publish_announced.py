"""Versions that ranks announce before they write them, write later, only on demand, or never."""

from __future__ import annotations

import errno
import secrets
import threading

import pytest
import torch
from trainer_testing import make_recipe, run_ranks, write_model_dir

from hpcrl.config.handoff import HandoffConfig
from hpcrl.config.lora import LoraConfig
from hpcrl.errors import FencedError, HandoffError
from hpcrl.models.arch import load_arch
from hpcrl.network.auth import Gate
from hpcrl.network.credentials import Credentials
from hpcrl.trainer.parallel.mesh import distributed
from hpcrl.trainer.publish import version_writer as writer_module
from hpcrl.trainer.publish.adapters import AdapterPublisher
from hpcrl.trainer.publish.fabric_serving import FabricPlace
from hpcrl.trainer.publish.publisher import Publisher
from hpcrl.trainer.publish.sync import DurableVersions, FileSync
from hpcrl.trainer.step.policy import TrainerPolicy
from hpcrl.weights.lifetime.leases import ReaderWatch
from hpcrl.weights.lifetime.readers import Registration
from hpcrl.weights.read.adapters import plan_merge
from hpcrl.weights.read.announced import announced_versions, open_version
from hpcrl.weights.read.subscriber import ReaderSettings, Subscriber
from hpcrl.weights.store import HandoffStore
from hpcrl.weights.write.handoff_writer import VersionCommitter

pytest.importorskip("mooncake.engine", reason="the extra store is not installed")

TOKEN = secrets.token_hex(32)
SETTINGS = ReaderSettings(segment_bytes=16 << 10)
LONG_S = 60.0


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return write_model_dir(tmp_path_factory.mktemp("announced") / "model")


def publisher_of(store, parallel, model_dir, *, token=TOKEN, host=lambda: "127.0.0.1", wanted=None, **settings):
    return Publisher(
        store,
        parallel,
        arch=load_arch(model_dir),
        model_dir=model_dir,
        dtype=torch.float32,
        attempt=1,
        settings=HandoffConfig(transport="fabric", **{"retry_s": 0.0, **settings}),
        wanted=wanted,
        chunk_bytes=4096,
        fabric=FabricPlace(token, host),
    )


def policy_of(model_dir, parallel):
    recipe = make_recipe(model_dir, steps=2, dtype="float32")
    return TrainerPolicy(recipe, load_arch(model_dir), parallel, model_dir=model_dir)


def read(root, version, token=TOKEN):
    """All bytes of a version, and how many came from the share."""
    with Subscriber(root, "r", SETTINGS, gate=Gate("fanout", Credentials(token))) as reader:
        with reader.reading(version) as reading:
            tensors = {name: bytes(data) for name, _, data in reading.tensors()}
        return tensors, reader.share.bytes_read


def publish_announced(rank, model_dir, root, token):
    """Publish version 1, which becomes durable, and 2, which does not; what readers had when each was announced."""
    store, found, reports = HandoffStore(root), {}, []
    with distributed(timeout_s=120) as parallel:
        policy = policy_of(model_dir, parallel)
        publisher = publisher_of(store, parallel, model_dir, token=token, kind="fp8")

        def note(published):
            reports.append((published.version, published.durable))
            if not published.durable:
                pulled, from_share = read(root, published.version, token)
                found[published.version] = pulled, from_share, store.versions(), announced_versions(root)

        for version in (1, 2):
            publisher.publish(policy.model, version, note, durable=version == 1)
            publisher.wait()
        if rank == 0:
            written = {name: bytes(data) for name, _, data in _tensors(root, 1)}
            announced = open_version(store, 2).manifest
            assert written == found[1][0] == found[2][0]
            assert {name: record.xxh3_128 for name, record in announced.tensors.items()} == {
                name: record.xxh3_128 for name, record in store.open(1).manifest.tensors.items()
            }
        parallel.world.gather(None)
        publisher.close()
        return reports, [(version, *rest[1:]) for version, rest in found.items()]


def _tensors(root, version):
    with Subscriber(root, "s", ReaderSettings(fabric=False)) as reader, reader.reading(version) as reading:
        yield from reading.tensors()


def test_ranks_announce_what_they_write_later_or_never(model_dir, tmp_path):
    root = tmp_path / "weights"
    (reports, found), nothing = run_ranks(2, publish_announced, model_dir, root, TOKEN, timeout_s=120)
    assert nothing == ([], [])
    assert reports == [(1, False), (1, True), (2, False)]
    # at each announcement readers had all bytes from memory, and the store had nothing of the version
    assert found == [(1, 0, [], [1]), (2, 0, [1], [2])]
    HandoffStore(root).open(1).verify(content=True)
    assert HandoffStore(root).versions() == [1]
    assert announced_versions(root) == [], "announcements stay behind a trainer that has ended"


def test_a_share_that_hangs_holds_up_no_engine(model_dir, tmp_path, monkeypatch):
    root, reports = tmp_path / "weights", []
    open_again, write = threading.Event(), writer_module.write_units
    seen = threading.Event()

    def hang(*arguments):
        assert open_again.wait(LONG_S)
        return write(*arguments)

    monkeypatch.setattr(writer_module, "write_units", hang)
    with distributed(timeout_s=120) as parallel:
        policy = policy_of(model_dir, parallel)
        publisher = publisher_of(HandoffStore(root), parallel, model_dir)

        def note(published):
            reports.append((published.version, published.durable))
            seen.set()

        publisher.publish(policy.model, 1, note)
        assert seen.wait(LONG_S)
        tensors, from_share = read(root, 1)
        assert (len(tensors) > 10, from_share) == (True, 0)
        assert HandoffStore(root).versions() == []
        open_again.set()
        publisher.wait()
        publisher.close()
    assert reports == [(1, False), (1, True)]
    HandoffStore(root).open(1).verify(content=True)


def test_a_version_that_the_share_refuses_for_a_while_is_durable_late(model_dir, tmp_path, monkeypatch):
    root, reports, refused = tmp_path / "weights", [], []
    write = writer_module.write_units

    def refuse(*arguments):
        if len(refused) < 2:
            # engines have it meanwhile
            refused.append(read(root, 1)[1])
            raise OSError(errno.ENOSPC, "no space")
        return write(*arguments)

    monkeypatch.setattr(writer_module, "write_units", refuse)
    with distributed(timeout_s=120) as parallel:
        policy = policy_of(model_dir, parallel)
        publisher = publisher_of(HandoffStore(root), parallel, model_dir, retry_s=LONG_S)
        publisher.publish(policy.model, 1, lambda published: reports.append((published.version, published.durable)))
        publisher.wait()
        publisher.close()
    assert refused == [0, 0]
    assert reports == [(1, False), (1, True)]
    HandoffStore(root).open(1).verify(content=True)


def test_a_version_is_written_when_a_reader_asks_for_it(model_dir, tmp_path):
    root, durable = tmp_path / "weights", threading.Event()
    watch = ReaderWatch(root, expiry_s=60.0)
    with distributed(timeout_s=120) as parallel, Registration(root, "engine-0", expiry_s=60.0) as engine:
        policy = policy_of(model_dir, parallel)
        publisher = publisher_of(HandoffStore(root), parallel, model_dir, wanted=watch.wanted_version)

        def note(published):
            if published.durable:
                durable.set()

        engine.want(1)  # another version than that which follows
        publisher.publish(policy.model, 2, note, durable=False)
        publisher.wait()
        assert HandoffStore(root).versions() == []
        publisher.publish(policy.model, 3, note, durable=False)
        engine.want(3)
        assert durable.wait(LONG_S)
        publisher.wait()
        publisher.close()
    assert HandoffStore(root).versions() == [3]


def test_without_the_fabric_every_version_is_written(model_dir, tmp_path):
    root, reports = tmp_path / "weights", []

    def no_route():
        raise OSError(errno.ENETUNREACH, "no route")

    with distributed(timeout_s=120) as parallel:
        policy = policy_of(model_dir, parallel)
        publisher = publisher_of(HandoffStore(root), parallel, model_dir, host=no_route)
        publisher.publish(policy.model, 1, reports.append, durable=False)
        publisher.wait()
    (published,) = reports
    assert (published.version, published.durable) == (1, True)
    assert "no route" in published.off_fabric
    assert HandoffStore(root).versions() == [1]


def test_an_announcement_that_cannot_be_written_ends_in_a_durable_version(model_dir, tmp_path):
    root, reports = tmp_path / "weights", []
    with distributed(timeout_s=120) as parallel:
        policy = policy_of(model_dir, parallel)
        publisher = publisher_of(HandoffStore(root), parallel, model_dir)

        def refuse(manifest, companions):
            raise OSError(errno.EDQUOT, "quota exceeded")

        publisher._fabric._records.announce = refuse
        publisher.publish(policy.model, 1, reports.append, durable=False)
        publisher.wait()
        publisher.close()
    assert [published.durable for published in reports] == [True]
    HandoffStore(root).open(1).verify(content=True)


@pytest.mark.parametrize("durable", [True, False])
def test_an_older_attempt_announces_no_version(model_dir, tmp_path, durable):
    root, reports = tmp_path / "weights", []
    with distributed(timeout_s=120) as parallel:
        policy = policy_of(model_dir, parallel)
        publisher = publisher_of(HandoffStore(root), parallel, model_dir)
        VersionCommitter.claim(root, 2)
        publisher.publish(policy.model, 1, reports.append, durable=durable)
        with pytest.raises(FencedError):
            publisher.wait()
        publisher.close()
    assert reports == []
    assert announced_versions(root) == HandoffStore(root).versions() == []


def test_bytes_that_change_before_they_are_written_are_no_version(model_dir, tmp_path, monkeypatch):
    root, write = tmp_path / "weights", writer_module.write_units

    def damage(writer, units, image, turn):
        image[units[0].at] ^= 1
        return write(writer, units, image, turn)

    monkeypatch.setattr(writer_module, "write_units", damage)
    with distributed(timeout_s=120) as parallel:
        policy = policy_of(model_dir, parallel)
        publisher = publisher_of(HandoffStore(root), parallel, model_dir)
        publisher.publish(policy.model, 1)
        with pytest.raises(HandoffError, match="announced with other bytes"):
            publisher.wait()
        publisher.close()
    assert HandoffStore(root).versions() == []


def test_a_report_that_fails_does_not_keep_a_version_from_the_share(model_dir, tmp_path):
    root = tmp_path / "weights"
    with distributed(timeout_s=120) as parallel:
        policy = policy_of(model_dir, parallel)
        publisher = publisher_of(HandoffStore(root), parallel, model_dir)

        def fail(published):
            raise ConnectionError("the orchestrator is away")

        publisher.publish(policy.model, 1, fail)
        with pytest.raises(ConnectionError):
            publisher.wait()
        publisher.close()
    assert HandoffStore(root).versions() == [1]


def test_adapters_are_announced_with_what_engines_need_to_merge_them(tmp_path):
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
        for version in (0, 1):
            publisher.publish(policy.model, version, durable=False)
            publisher.wait()
        # the base, which adapters change, is always durable
        assert HandoffStore(root).versions() == [0]
        gate = Gate("fanout", Credentials(TOKEN))
        with Subscriber(root, "r", SETTINGS, gate=gate) as reader, reader.reading(1) as reading:
            merge = plan_merge(reading.handoff, reading.chain[0])
            assert merge.parts
            assert len(list(reading.tensors())) > 0
            assert reader.share.bytes_read == 0
        publisher.close()


def test_each_version_is_announced_once(model_dir, tmp_path):
    root, named, events = tmp_path / "weights", [], []
    with distributed(timeout_s=120) as parallel:
        policy = policy_of(model_dir, parallel)
        publisher = publisher_of(HandoffStore(root), parallel, model_dir)
        durable = DurableVersions(3)
        sync = FileSync(publisher, parallel.world, lambda kind, **data: events.append((kind, data["version"])), durable)
        sync.restored(policy, 4)  # a resumed run begins with a durable version
        assert HandoffStore(root).versions() == [4]
        for version in (5, 6, 7, 8):
            if version == 8:
                durable.named = 8  # a checkpoint
            sync.publish(policy, version, named.append)
        sync.wait()
        sync.close()
    assert named == [5, 6, 7, 8]
    assert HandoffStore(root).versions() == [4, 6, 8]
    announced, published = "trainer.version_announced", "trainer.version_published"
    assert events == [
        (announced, 4),
        (published, 4),
        (announced, 5),
        (announced, 6),
        (published, 6),
        (announced, 7),
        (announced, 8),
        (published, 8),
    ]
