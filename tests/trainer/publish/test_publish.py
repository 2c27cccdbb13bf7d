"""Published versions: transformers loads them and agrees; a failing rank leaves the last good one."""

import errno
import json
import os

import pytest
import torch
from trainer_testing import Rollouts, make_recipe, run_ranks, tiny_arch, write_model_dir

from hpcrl.config.recipe import HandoffConfig
from hpcrl.errors import HandoffError
from hpcrl.modeling.attention.packed import PackedAttention
from hpcrl.models.arch import load_arch
from hpcrl.trainer.parallel.mesh import distributed
from hpcrl.trainer.publish import version_writer
from hpcrl.trainer.publish.publisher import Publisher
from hpcrl.trainer.step.policy import TrainerPolicy
from hpcrl.weights.store import HandoffStore

PROBE = torch.tensor([7, 30, 41, 99, 8, 50, 2, 3, 77])


def publish_after_a_step(rank, model_dir, weights_dir, dtype="float32", version=1, fail_rank=None):  # noqa: PLR0917
    """Train a step, publish, and return the trainer's own logits on `PROBE`."""
    store = HandoffStore(weights_dir)
    with distributed(timeout_s=120) as parallel:
        arch = load_arch(model_dir)
        recipe = make_recipe(model_dir, steps=2, dtype=dtype)
        policy = TrainerPolicy(recipe, arch, parallel, model_dir=model_dir)
        policy.forward_backward(Rollouts(1).shard(parallel.data.rank, parallel.data.size)).reduce(parallel.world)
        policy.optimizer_step(1)
        if fail_rank == rank:
            version_writer.write_units = no_space
        publisher = make_publisher(store, parallel, model_dir, dtype=getattr(torch, dtype))
        publisher.publish(policy.model, version)
        publisher.wait()
        assert publisher.is_intact(version)
        with torch.no_grad():
            attention = PackedAttention(torch.tensor([0, len(PROBE)]))
            return policy.model(PROBE, attention.context()).tolist()


def make_publisher(store, parallel, model_dir, *, dtype=torch.float32, chunk_bytes=4096, **settings):
    return Publisher(
        store,
        parallel,
        arch=load_arch(model_dir),
        model_dir=model_dir,
        dtype=dtype,
        attempt=1,
        settings=HandoffConfig(**{"retry_s": 0.0, **settings}),
        chunk_bytes=chunk_bytes,
    )


def no_space(*args):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return write_model_dir(tmp_path_factory.mktemp("publish") / "model")


def transformers_logits(path):
    transformers = pytest.importorskip("transformers")
    model = transformers.Qwen3MoeForCausalLM.from_pretrained(path, attn_implementation="eager")
    with torch.no_grad():
        return model(PROBE[None]).logits[0].float(), model


@pytest.mark.parametrize("ranks", [1, 2])
def test_transformers_agrees_on_logits(model_dir, tmp_path, ranks):
    if ranks == 1:
        own = publish_after_a_step(0, model_dir, tmp_path)
    else:
        own, other = run_ranks(2, publish_after_a_step, model_dir, tmp_path)
        assert own == other
    logits, _ = transformers_logits(tmp_path / "v000001")
    torch.testing.assert_close(torch.tensor(own), logits, rtol=1e-4, atol=1e-5)
    before, _ = transformers_logits(model_dir)
    assert not torch.allclose(before, logits, atol=1e-3)  # the step did something
    handoff = HandoffStore(tmp_path).open(1)
    assert len(handoff.shards) == 1
    handoff.verify(content=True)


def test_bfloat16_is_published_as_such(model_dir, tmp_path):
    own = publish_after_a_step(0, model_dir, tmp_path, "bfloat16")
    logits, model = transformers_logits(tmp_path / "v000001")
    assert model.dtype == torch.bfloat16
    assert json.loads((tmp_path / "v000001" / "config.json").read_text())["dtype"] == "bfloat16"
    torch.testing.assert_close(torch.tensor(own), logits, rtol=0.1, atol=0.1)


@pytest.mark.parametrize("tied", [False, True])
def test_names_and_shapes_are_those_of_the_architecture(tmp_path, tied):
    arch = tiny_arch(tie_word_embeddings=tied)
    model_dir = write_model_dir(tmp_path / "model", arch)
    publish_after_a_step(0, model_dir, tmp_path / "weights")
    manifest = HandoffStore(tmp_path / "weights").open(1).manifest
    assert {n: r.shape for n, r in manifest.tensors.items()} == {t.name: t.shape for t in arch.tensors()}
    assert {r.dtype for r in manifest.tensors.values()} == {"float32"}
    assert "tokenizer.json" in manifest.files


def test_one_rank_without_space_fails_all(model_dir, tmp_path):
    publish_after_a_step(0, model_dir, tmp_path, version=1)
    answers = run_ranks(2, publish_after_a_step, model_dir, tmp_path, "float32", 2, 1, fails=True)
    assert answers[0][0] == "PeerLostError"
    assert "writing version 2 failed on trainer rank 1: OSError: [Errno 28]" in answers[0][1]
    assert answers[1][0] == "OSError"
    assert [name for name in os.listdir(tmp_path) if not name.startswith(".writer-")] == ["v000001"]
    assert list(tmp_path.glob(".writer-*/*")) == []
    HandoffStore(tmp_path).open(1).verify(content=True)


def test_a_version_is_never_overwritten(model_dir, tmp_path):
    publish_after_a_step(0, model_dir, tmp_path)
    before = HandoffStore(tmp_path).open(1).manifest
    with pytest.raises(FileExistsError):
        publish_after_a_step(0, model_dir, tmp_path)
    assert HandoffStore(tmp_path).open(1).manifest == before
    assert [name for name in os.listdir(tmp_path) if not name.startswith(".writer-")] == ["v000001"]
    assert list(tmp_path.glob(".writer-*/*")) == []


def test_damage_is_seen(model_dir, tmp_path):
    publish_after_a_step(0, model_dir, tmp_path)
    store = HandoffStore(tmp_path)
    with distributed(timeout_s=120) as parallel:
        publisher = make_publisher(store, parallel, model_dir)
    (shard,) = store.open(1).shards
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    assert not publisher.is_intact(1)
    assert not publisher.is_intact(2)
    with pytest.raises(HandoffError, match="damaged"):
        store.open(1).verify(content=True)
