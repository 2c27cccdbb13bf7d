"""The embedded engine takes hand-offs of all kinds, in place, and says which version it has."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from adapter_helpers import EXPERTS, OUTPUT, QUERY, factors, flip_last_byte, merged, publish_factors
from delta_helpers import ARCH, model, nudged, publish_bf16, publish_delta, shard_of_any
from engine_helpers import publish, random_model, tensors_of

from hpcrl.errors import HandoffError
from hpcrl.inference.embedded.weights.updates import ReaderConfig, Update, UpdateSession
from hpcrl.modeling.decoder import Decoder
from hpcrl.modeling.fp8.quantiser import block_amax, quantise, scales_of
from hpcrl.weights import HandoffStore, VersionCommitter
from hpcrl.weights.format.quantise import QuantisedModules
from hpcrl.weights.lifetime.collector import Collector
from hpcrl.weights.lifetime.leases import ReaderWatch
from hpcrl.weights.read.subscriber import ReaderSettings

READER_SETTINGS = ReaderSettings()
#: modules of all matrices but those of experts; the last tensor of a file is one of them
DENSE = [
    name.removesuffix(".weight")
    for name, tensor in tensors_of(random_model(ARCH, 1)).items()
    if tensor.dim() == 2 and ".experts." not in name
]


def same(one: Decoder, other: Decoder) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


class Engine:
    """The updater with a model that is exchanged, as the engine does it."""

    def __init__(self, root: Path, name: str | None = "engine-0", settings: ReaderSettings = READER_SETTINGS) -> None:
        self.model = model(1)
        self.updater = UpdateSession(self.model, ReaderConfig(root, name, settings))
        self.updater.init()
        self.label = "start"

    def load(self, store: HandoffStore, version: int, *, fallback: bool = False) -> Update:
        self.updater.start()
        update = self.updater.update({"path": str(store.path_of(version)), "fallback": fallback})
        self.updater.finish(self.exchange, str(update.version))
        return update

    def exchange(self, new: Decoder, label: str) -> Decoder:
        old, self.model, self.label = self.model, new, label
        return old


@pytest.fixture
def store(tmp_path: Path) -> HandoffStore:
    return HandoffStore(tmp_path / "weights")


@pytest.fixture
def engine(store: HandoffStore) -> Iterator[Engine]:
    engine = Engine(store.root)
    yield engine
    engine.updater.shutdown()


def share_bytes(engine: Engine) -> int:
    assert engine.updater._subscriber is not None
    return engine.updater._subscriber.share.bytes_read


def test_deltas_are_exact_and_read_nothing_but_changes(store: HandoffStore, engine: Engine, tmp_path: Path) -> None:
    models = [model(2)]
    for seed in (1, 2, 3):
        models.append(nudged(models[-1], seed))
    publish_bf16(store, 1, models[0], tmp_path)
    deltas = [
        publish_delta(store, 2, (1,), models[0], models[1]),
        publish_delta(store, 3, (1, 2), models[1], models[2]),
    ]
    publish_delta(store, 4, (1, 2, 3), models[2], models[3])
    engine.load(store, 1)
    assert same(engine.model, models[0])
    before = share_bytes(engine)
    engine.load(store, 2)
    engine.load(store, 3)
    assert same(engine.model, models[2])
    assert share_bytes(engine) - before <= sum(delta.manifest.total_bytes for delta in deltas)
    late = Engine(store.root, "engine-1")  # has nothing: reads the whole chain
    try:
        assert late.load(store, 4).kind == "delta"
        assert same(late.model, models[3])
        watch = ReaderWatch(store.root, expiry_s=60.0)
        assert [(r.reader, r.acknowledged) for r in watch.observe()] == [("engine-0", 3), ("engine-1", 4)]
        assert watch.acknowledged_version() == 3
        assert Collector(store, watch, keep_last=1, settle_s=0.0).collect().removed == []
    finally:
        late.updater.shutdown()


def test_a_delta_of_another_history_is_refused(store: HandoffStore, engine: Engine, tmp_path: Path) -> None:
    one, other = model(2), model(3)
    publish_bf16(store, 1, one, tmp_path)
    engine.load(store, 1)
    VersionCommitter.claim(store.root, 1).remove(1)
    publish_bf16(store, 1, other, tmp_path)  # a trainer that resumed wrote it anew
    publish_delta(store, 2, (1,), other, nudged(other, 1))
    engine.load(store, 2)
    assert same(engine.model, nudged(other, 1))  # and not the changes on top of what it served
    publish_delta(store, 3, (1,), one, nudged(one, 1))
    engine.updater.start()
    with pytest.raises(HandoffError, match=r"v000003: tensor .* does not have the content"):
        engine.updater.update({"path": str(store.path_of(3))})


def publish_fp8(store: HandoffStore, source: Decoder, model_dir: Path, dtype: torch.dtype = torch.float32) -> None:
    """Version 7 in block FP8, with scales in ``dtype``."""
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in tensors_of(source).items():
        if QuantisedModules().has(name, tuple(tensor.shape)):
            scales = scales_of(block_amax(tensor, (0, 0)))
            tensors[name], tensors[f"{name}_scale_inv"] = quantise(tensor, (0, 0), scales), scales.to(dtype)
        else:
            tensors[name] = tensor
    writer = VersionCommitter.claim(store.root, 1)
    stage = writer.stage(7)
    shard = shard_of_any(stage / "model-00001-of-00001.safetensors", tensors)
    writer.publish(version=7, shards=[shard], model_dir=model_dir, producer="test", kind="fp8")


def test_fp8_is_brought_back_to_the_dtype_of_the_engine(store: HandoffStore, engine: Engine, tmp_path: Path) -> None:
    source = model(4)
    publish_fp8(store, source, tmp_path)
    assert engine.load(store, 7).kind == "fp8"
    for one, other in zip(engine.model.parameters(), source.parameters(), strict=True):
        assert (one.float() - other.float()).abs().max() <= 0.07 * other.float().abs().max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int32, torch.uint8])
def test_fp8_with_scales_of_another_dtype_is_refused(
    store: HandoffStore, engine: Engine, tmp_path: Path, dtype: torch.dtype
) -> None:
    publish_fp8(store, model(4), tmp_path, dtype)
    engine.updater.start()
    with pytest.raises(HandoffError, match=r"_scale_inv has dtype \w+, not float32"):
        engine.updater.update({"path": str(store.path_of(7))})
    assert same(engine.model, model(1))


def test_an_engine_takes_the_newest_good_version_and_keeps_it(
    store: HandoffStore, engine: Engine, tmp_path: Path
) -> None:
    good = model(5)
    publish_bf16(store, 1, good, tmp_path)
    damaged = publish_bf16(store, 2, model(6), tmp_path).shards[0]
    damaged.write_bytes(damaged.read_bytes()[:-10])
    publish(store, 3, tmp_path, {"x": torch.zeros(3)})  # of another model
    update = engine.load(store, 3, fallback=True)
    assert (update.version, update.loaded) == (1, True)
    assert [skipped.version for skipped in update.skipped] == [3, 2]
    assert "does not fit" in update.skipped[0].reason
    assert damaged.name in update.skipped[1].reason
    assert same(engine.model, good)
    update = engine.load(store, 3, fallback=True)
    assert (update.version, update.loaded) == (1, False)  # it is served already
    engine.updater.start()
    with pytest.raises(HandoffError, match="does not fit"):
        engine.updater.update({"path": str(store.path_of(3))})
    assert same(engine.model, good)


# -- adapters ----------------------------------------------------------------------------------------------------


def test_each_adapter_starts_from_the_base(store: HandoffStore, engine: Engine, tmp_path: Path) -> None:
    """From one to the next, with other modules: bit by bit what a fresh engine gets, also back at a whole version."""
    start = model(7)
    base = publish_bf16(store, 0, start, tmp_path)
    given = {
        1: factors(tensors_of(start), 1, QUERY, EXPERTS),
        2: factors(tensors_of(start), 2, QUERY, OUTPUT),  # experts go back to the base
        3: factors(tensors_of(start), 3, EXPERTS),
    }
    for version, some in given.items():
        publish_factors(store, version, base, some, "fused" if version == 1 else "per_expert")
    publish_bf16(store, 4, model(8), tmp_path)
    for version in (1, 2, 3, 0, 2, 4, 3):
        update = engine.load(store, version)
        whole = {0: start, 4: model(8)}.get(version)
        assert same(engine.model, merged(start, given[version]) if whole is None else whole), version
        assert (update.version, update.kind, update.loaded) == (version, "full" if whole else "lora", True)
    assert not engine.load(store, 3).loaded  # it is served already
    late = Engine(store.root, "engine-1")
    try:
        late.load(store, 2)
        assert same(late.model, merged(start, given[2]))
        watch = ReaderWatch(store.root, expiry_s=60.0)
        assert {record.acknowledged for record in watch.observe()} == {2, 3}
        # nobody serves the base itself, and it stays for the next adapter
        assert Collector(store, watch, keep_last=1, settle_s=0.0).collect().removed == [1]
    finally:
        late.updater.shutdown()


def test_a_delta_may_be_the_base(store: HandoffStore, engine: Engine, tmp_path: Path) -> None:
    first = model(7)
    second = nudged(first, 1)
    publish_bf16(store, 1, first, tmp_path)
    base = publish_delta(store, 2, (1,), first, second)
    given = factors(tensors_of(second), 1, OUTPUT, EXPERTS)
    assert publish_factors(store, 3, base, given).manifest.needs == (1, 2)
    engine.load(store, 3)
    assert same(engine.model, merged(second, given))
    engine.load(store, 2)
    assert same(engine.model, second)


@pytest.mark.parametrize("modules", [(QUERY,), (QUERY, OUTPUT), (EXPERTS,)])
def test_the_base_of_adapters_is_read_once(store: HandoffStore, tmp_path: Path, modules: tuple[str, ...]) -> None:
    start = model(7)
    base = publish_bf16(store, 0, start, tmp_path)
    some = [factors(tensors_of(start), seed, *modules) for seed in (1, 2)]
    adapters = [publish_factors(store, version, base, given) for version, given in enumerate(some, start=1)]
    # a segment a tensor
    engine = Engine(store.root, settings=ReaderSettings(segment_bytes=1))
    try:
        engine.load(store, 1)
        before = share_bytes(engine)
        assert before >= base.manifest.tensor_bytes
        engine.load(store, 2)
        assert same(engine.model, merged(start, some[1]))
        assert share_bytes(engine) - before == adapters[1].manifest.tensor_bytes
        # who leaves and comes again begins anew
        engine.updater.shutdown()
        engine.updater.init()
        engine.load(store, 1)
        assert same(engine.model, merged(start, some[0]))
    finally:
        engine.updater.shutdown()


def test_a_bad_adapter_changes_nothing(store: HandoffStore, engine: Engine, tmp_path: Path) -> None:
    """Torn, of another base, of unknown modules, or with a torn base: the engine has what it had, and goes on."""
    start = model(7)
    base = publish_bf16(store, 0, start, tmp_path)
    good = factors(tensors_of(start), 1, QUERY)
    publish_factors(store, 1, base, good)
    engine.load(store, 1)
    flip_last_byte(publish_factors(store, 2, base, good).path / "adapter_model.safetensors")
    other = publish_bf16(HandoffStore(tmp_path / "elsewhere"), 0, model(8), tmp_path)
    publish_factors(store, 3, other, good)
    unknown = {"model.layers.5.self_attn.q_proj": good.linear[QUERY]}
    publish_factors(store, 4, base, good._replace(linear=unknown))
    reasons = {2: "adapter_model.safetensors", 3: "adapter of other weights", 4: "the base has no such module"}
    for version, reason in reasons.items():
        engine.updater.start()
        with pytest.raises(HandoffError, match=reason):
            engine.updater.update({"path": str(store.path_of(version))})
        assert same(engine.model, merged(start, good))
    assert engine.load(store, 4, fallback=True).version == 1
    better = factors(tensors_of(start), 5, QUERY)
    publish_factors(store, 5, base, better)
    engine.load(store, 5)
    assert same(engine.model, merged(start, better))
    flip_last_byte(base.shards[0])
    publish_factors(store, 6, base, factors(tensors_of(start), 6, *DENSE))
    engine.updater.start()
    with pytest.raises(HandoffError, match=base.shards[0].name):
        engine.updater.update({"path": str(store.path_of(6))})
    assert same(engine.model, merged(start, better))


def test_a_base_of_another_model_is_refused(store: HandoffStore, engine: Engine, tmp_path: Path) -> None:
    base = publish(store, 0, tmp_path, {f"{QUERY}.weight": torch.zeros(12, 3)}, shards=1)
    publish_factors(store, 1, base, factors({f"{QUERY}.weight": torch.zeros(12, 3)}, 1, QUERY))
    engine.updater.start()
    with pytest.raises(HandoffError, match=r"v000000 does not fit the model: .* is missing"):
        engine.updater.update({"path": str(store.path_of(1))})
