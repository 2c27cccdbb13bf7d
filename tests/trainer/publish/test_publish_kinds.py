"""What is published does not depend on how many ranks publish, and every kind gives the same weights back."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import threading
from pathlib import Path

import msgspec
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from trainer_testing import run_ranks, tiny_arch, write_model_dir

from hpcrl.config.recipe import HandoffConfig, TrainerParallelismConfig
from hpcrl.modeling.checkpoint_io.load import load_model_dir
from hpcrl.modeling.fp8.quantiser import dequantise
from hpcrl.modeling.parallelize import parallelize_decoder
from hpcrl.modeling.spec import build_model
from hpcrl.models.arch import load_arch
from hpcrl.trainer.parallel.mesh import distributed
from hpcrl.trainer.publish.publisher import Publisher
from hpcrl.weights.format.quantise import QuantisedModules
from hpcrl.weights.read.reconstruct import read_tensors
from hpcrl.weights.store import HandoffStore

CHUNK = 8192
#: rows and columns that are no multiples of 128, of ranks, of pages
ARCH = {"hidden_size": 160, "moe_intermediate_size": 200, "num_experts": 6, "head_dim": 50, "vocab_size": 103}
SETTINGS = {
    "full": {},
    "windowed": {"overlap": False, "staging_gib": 1e-4, "max_shard_gib": 2e-4},
    "direct": {"direct_io": True, "max_shard_gib": 1e-3},
    "fp8": {"kind": "fp8", "max_shard_gib": 5e-4},
    "fp8-windowed": {"kind": "fp8", "max_shard_gib": 5e-4, "overlap": False, "staging_gib": 1e-5},
}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return write_model_dir(tmp_path_factory.mktemp("kinds") / "model", tiny_arch(**ARCH))


def load_model(model_dir, parallel):
    model = build_model(load_arch(model_dir), device="cpu")
    load_model_dir(model, model.adapter, model_dir)
    parallelize_decoder(model, parallel.mesh, dtype=torch.bfloat16)
    return model


def make_publisher(root, parallel, model_dir, acknowledged=None, attempt=1, *, told=None, **settings):
    return Publisher(
        HandoffStore(root),
        parallel,
        arch=load_arch(model_dir),
        model_dir=model_dir,
        dtype=torch.bfloat16,
        attempt=attempt,
        settings=HandoffConfig(**{"retry_s": 0.0, **settings}),
        acknowledged=acknowledged,
        chunk_bytes=CHUNK,
        **(told or {}),
    )


@torch.no_grad()
def change(model, step):
    """Move some elements; which ones and how far depends on their values only."""
    for parameter in model.parameters():
        local = parameter.to_local()
        chosen = (local.abs() * 1e4).long() % 11 == step % 11
        local[chosen] *= 1.02


def publish_all(rank, model_dir, root, ep=1):
    """All settings, and a chain of deltas, from one start."""
    with distributed(timeout_s=60, parallelism=TrainerParallelismConfig(ep=ep)) as parallel:
        model = load_model(model_dir, parallel)
        for name, settings in SETTINGS.items():
            publisher = make_publisher(root / name, parallel, model_dir, **settings)
            publisher.publish(model, 1)
            publisher.wait()
        store = HandoffStore(root / "delta")
        publishers = (
            make_publisher(store.root, parallel, model_dir, store.newest, delta_chain=3, delta_max_share=0.9),
            make_publisher(root / "whole", parallel, model_dir),
        )
        for version in range(6):
            for publisher in publishers:
                publisher.publish(model, version)
            for publisher in publishers:
                publisher.wait()
            change(model, version)


def publish_mixed(rank, model_dir, root):
    """Parameters replicated, and sharded over both axes of a 2 x 2 mesh in several ways."""
    placements = itertools.cycle(
        [(Replicate(), Shard(0)), (Shard(0), Shard(1)), (Shard(1), Shard(1)), (Replicate(), Replicate()), None]
    )
    with distributed(timeout_s=60) as parallel:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
        model = build_model(load_arch(model_dir), device="cpu")
        load_model_dir(model, model.adapter, model_dir)
        for name, parameter in list(model.named_parameters()):
            placement = next(placements)
            module, _, leaf = name.rpartition(".")
            if parameter.dim() == 1 and placement is not None:
                placement = (Replicate(), Shard(0))
            if placement is not None:
                sharded = nn.Parameter(distribute_tensor(parameter.detach(), mesh, placement))
                setattr(model.get_submodule(module), leaf, sharded)
        for name in ("full", "fp8", "windowed"):
            publisher = make_publisher(root / name, parallel, model_dir, **SETTINGS[name])
            publisher.publish(model, 1)
            publisher.wait()


def test_replicated_and_doubly_sharded_parameters_give_the_same_bytes(published, model_dir, tmp_path):
    run_ranks(4, publish_mixed, model_dir, tmp_path, timeout_s=120)
    for name in ("full", "fp8", "windowed"):
        assert content(tmp_path / name / "v000001") == content(published[1] / name / "v000001")


@pytest.fixture(scope="module")
def published(model_dir, tmp_path_factory):
    """Directories by the number of ranks."""
    roots = {ranks: tmp_path_factory.mktemp(f"ranks{ranks}") for ranks in (1, 2, 4)}
    publish_all(0, model_dir, roots[1])
    for ranks, ep in ((2, 1), (4, 2)):
        # with expert parallelism, two ranks share three experts
        run_ranks(ranks, publish_all, model_dir, roots[ranks], ep, timeout_s=120)
    return roots


def content(path: Path):
    files = {name: (path / name).read_bytes() for name in os.listdir(path)}
    manifest = json.loads(files.pop("manifest.json"))
    manifest.pop("created_at_s")
    return files, manifest


@pytest.mark.parametrize("name", SETTINGS)
def test_any_number_of_ranks_writes_the_same_bytes(published, name):
    one = content(published[1] / name / "v000001")
    assert len(one[1]["tensors"]) > 20
    for ranks in (2, 4):
        assert content(published[ranks] / name / "v000001") == one
    HandoffStore(published[4] / name).open(1).verify(content=True)


def test_settings_change_files_but_not_tensors(published):
    full, windowed, direct = (
        {
            t.name: (t.record.dtype, t.record.shape, bytes(t.data))
            for t in read_tensors(HandoffStore(published[2] / name), 1)
        }
        for name in ("full", "windowed", "direct")
    )
    assert full == windowed == direct
    assert len(HandoffStore(published[2] / "windowed").open(1).shards) > 5


def as_torch(tensor):
    return torch.frombuffer(tensor.data, dtype=getattr(torch, tensor.record.dtype)).view(tensor.record.shape)


def values(root):
    """Name, dtype, shape and bytes of the tensors of version 1."""
    return {t.name: (t.record.dtype, t.record.shape, bytes(t.data)) for t in read_tensors(HandoffStore(root), 1)}


def test_fp8_is_within_half_a_step_of_the_published_weights(published):
    full = {t.name: as_torch(t) for t in read_tensors(HandoffStore(published[4] / "full"), 1)}
    fp8 = {t.name: as_torch(t) for t in read_tensors(HandoffStore(published[4] / "fp8"), 1)}
    quantised = [name for name in full if QuantisedModules().has(name, tuple(full[name].shape))]
    assert set(fp8) == {*full, *(f"{name}_scale_inv" for name in quantised)}
    assert not QuantisedModules().has("model.layers.0.mlp.gate.weight", (3, 160))
    for name, tensor in full.items():
        if name not in quantised:
            torch.testing.assert_close(fp8[name], tensor, rtol=0, atol=0)
            continue
        scales = fp8[f"{name}_scale_inv"]
        assert scales.shape == tuple(-(-size // 128) for size in tensor.shape)
        found, wanted = dequantise(fp8[name], scales), tensor.float()
        # e4m3 has three bits of mantissa, and steps of 2^-9 near zero
        spread = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[: found.shape[0], : found.shape[1]]
        assert bool(((found - wanted).abs() <= torch.maximum(wanted.abs() / 16, spread * 2**-10) * 1.001).all()), name
        # the largest of each block uses the whole range
        top = torch.nn.functional.pad(wanted.abs(), (0, -wanted.shape[1] % 128, 0, -wanted.shape[0] % 128))
        blocks = top.view(scales.shape[0], 128, scales.shape[1], 128).amax(dim=(1, 3))
        # 1 / 448 in float32: a quotient would have other bits on a GPU
        assert torch.equal(scales, blocks.clamp(1e-4) * torch.tensor(448.0).reciprocal())


def test_fp8_config_is_what_transformers_reads(published):
    path = published[2] / "fp8" / "v000001"
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.from_pretrained(path)
    assert config.quantization_config["weight_block_size"] == [128, 128]
    kept = config.quantization_config["modules_to_not_convert"]
    assert {"lm_head", "model.embed_tokens", "model.layers.1.mlp.gate"} <= set(kept)
    assert not [name for name in kept if "experts" in name or "self_attn" in name]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_deltas_give_back_every_bit(published, ranks):
    deltas, whole = HandoffStore(published[ranks] / "delta"), HandoffStore(published[ranks] / "whole")
    kinds = [(deltas.open(v).manifest.kind, deltas.open(v).manifest.needs) for v in range(6)]
    assert kinds == [
        ("full", ()),
        ("delta", (0,)),
        ("delta", (0, 1)),
        ("delta", (0, 1, 2)),
        ("full", ()),  # the chain is bounded
        ("delta", (4,)),
    ]
    for version in range(6):
        handoff = deltas.open(version)
        handoff.verify(content=True)
        found = {t.name: (t.record.shape, t.data) for t in read_tensors(deltas, version)}
        wanted = {t.name: (t.record.shape, t.data) for t in read_tensors(whole, version)}
        assert found == wanted
        # hashes of the content are those of the full version
        for name, record in whole.open(version).manifest.tensors.items():
            assert handoff.manifest.tensors[name].xxh3_128 == record.xxh3_128
        if handoff.manifest.kind == "delta":
            assert handoff.manifest.total_bytes < 0.5 * whole.open(version).manifest.total_bytes
    assert any(a.data != b.data for a, b in zip(read_tensors(deltas, 0), read_tensors(deltas, 1), strict=True))


def test_collecting_keeps_what_a_delta_needs(published):
    store = HandoffStore(published[2] / "delta")
    # as a manifest says, not as the numbers would suggest
    assert store.open(3).manifest.needs == (0, 1, 2)
    manifests = {v: store.open(v).manifest for v in store.versions()}
    assert all(set(m.needs) < set(manifests) for m in manifests.values())


def one_rank(root, model_dir, acknowledged, versions, said=None, **settings):
    """Publish on this process; returns (kind, needs) of each version, and adds to ``said`` what was announced."""
    with distributed(timeout_s=120) as parallel:
        model = load_model(model_dir, parallel)
        publisher = make_publisher(root, parallel, model_dir, acknowledged, **settings)
        for version in range(versions):
            publisher.publish(model, version, (said if said is not None else []).append)
            publisher.wait()
            change(model, version)
    store = HandoffStore(root)
    return [(store.open(v).manifest.kind, store.open(v).manifest.needs) for v in store.versions()]


def test_the_base_moves_only_when_all_readers_have_the_version(tmp_path, model_dir):
    answers = iter([None, None, 0, 0, 3])
    kinds = one_rank(tmp_path, model_dir, lambda: next(answers), 5, delta_chain=5, delta_max_share=0.9)
    assert kinds == [
        ("full", ()),
        ("full", ()),  # nobody has version 0
        ("delta", (0,)),
        ("delta", (0,)),  # not against 2, which somebody lacks
        ("delta", (0, 3)),
    ]


def test_a_delta_that_saves_too_little_is_written_whole(tmp_path, model_dir):
    store = HandoffStore(tmp_path)
    kinds = one_rank(tmp_path, model_dir, store.newest, 3, delta_chain=5, delta_max_share=0.001)
    assert kinds == [("full", ())] * 3


def test_a_parent_that_was_collected_is_not_used(tmp_path, model_dir):
    store, said = HandoffStore(tmp_path), []

    def collected():
        newest = store.newest()
        if newest == 1:
            shutil.rmtree(store.path_of(0))
        return newest

    kinds = one_rank(tmp_path, model_dir, collected, 3, said, delta_chain=5, delta_max_share=0.9)
    assert [kind for kind, _ in kinds] == ["delta", "full"]
    assert store.versions() == [1, 2]
    assert [published[:3] for published in said[1:]] == [
        (1, "delta", ""),
        (2, "full", "version 0, which it would need, was collected"),
    ]


def collect_meanwhile(rank, model_dir, root):
    """Version 0 is the parent of 2, and goes when 2 is written, before it has its name."""
    import hpcrl.trainer.publish.version_writer as module

    store, write, said = HandoffStore(root), module.delta_result, []

    def late(directory, *args):
        if rank == 0 and directory.name == "v000002":
            shutil.rmtree(store.path_of(0))
        return write(directory, *args)

    module.delta_result = late
    with distributed(timeout_s=60) as parallel:
        model = load_model(model_dir, parallel)
        publisher = make_publisher(root, parallel, model_dir, lambda: 0, delta_chain=5, delta_max_share=0.9)
        for version in range(4):
            publisher.publish(model, version, said.append)
            publisher.wait()
            change(model, version)
    return said


def test_a_parent_that_is_collected_meanwhile_makes_the_version_whole(tmp_path, model_dir):
    said, nothing = run_ranks(2, collect_meanwhile, model_dir, tmp_path / "weights")
    store = HandoffStore(tmp_path / "weights")
    assert [tuple(published)[:2] for published in said] == [(0, "full"), (1, "delta"), (2, "full"), (3, "full")]
    assert "version 2 was not published: what it needs is gone" in said[2].instead_of_delta
    assert "v000000" in said[2].instead_of_delta
    assert nothing == []
    assert store.versions() == [1, 2, 3]
    for version in (2, 3):
        store.open(version).verify(content=True)
    assert all(os.listdir(writer) == [] for writer in store.root.glob(".writer-*"))


def test_overlap_publishes_the_weights_of_the_call(tmp_path, model_dir, monkeypatch):
    """The writer is held until the parameters have changed; what it writes are the old ones."""
    import hpcrl.trainer.publish.version_writer as module

    gate, write = threading.Event(), module.write_units
    monkeypatch.setattr(module, "write_units", lambda *args: gate.wait(30) and write(*args))
    announced = []
    with distributed(timeout_s=120) as parallel:
        model = load_model(model_dir, parallel)
        store = HandoffStore(tmp_path / "overlap")
        publisher = make_publisher(store.root, parallel, model_dir)
        publisher.publish(model, 0, lambda published: announced.append((published.version, store.versions())))
        assert announced == []
        assert store.versions() == []
        change(model, 0)
        gate.set()
        publisher.wait()
        assert announced == [(0, [0])]  # only when it can be seen
        plain = make_publisher(tmp_path / "plain", parallel, model_dir, overlap=False)
        plain.publish(model, 1)
        fresh = load_model(model_dir, parallel)
        plain = make_publisher(tmp_path / "plain", parallel, model_dir, overlap=False)
        plain.publish(fresh, 0)
    written, changed, expected = (
        store.open(v).manifest.tensors
        for store, v in (
            (store, 0),
            (HandoffStore(tmp_path / "plain"), 1),
            (HandoffStore(tmp_path / "plain"), 0),
        )
    )
    assert msgspec.json.encode(written) == msgspec.json.encode(expected)
    assert written != changed
