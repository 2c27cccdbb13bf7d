"""A model directory into shards: a rank reads its own bytes, block FP8 is brought back, what does not fit is said."""

import os

import pytest
import torch
from safetensors.torch import load_file, save_file
from trainer_testing import make_recipe, run_ranks, tiny_arch, write_model_dir

from hpcrl.errors import UsageError
from hpcrl.modeling.checkpoint_io.load import load_model_dir
from hpcrl.modeling.fp8.quantiser import block_amax, quantise, scales_of
from hpcrl.modeling.hf import published_tensors
from hpcrl.modeling.spec import build_model
from hpcrl.models.arch import load_arch
from hpcrl.trainer.parallel.mesh import distributed
from hpcrl.trainer.step.policy import TrainerPolicy
from hpcrl.weights.format.quantise import QuantisedModules


def start(rank, model_dir):
    """What this rank's model has after the start, whole, and how many bytes of tensors it read."""
    read, preadv = [], os.preadv

    def counted(*arguments):
        read.append(preadv(*arguments))
        return read[-1]

    os.preadv = counted
    try:
        with distributed(timeout_s=120) as parallel:
            policy = TrainerPolicy(make_recipe(model_dir, steps=1), load_arch(model_dir), parallel, model_dir=model_dir)
            size = sum(read)
            return {n: p.detach().full_tensor().tolist() for n, p in policy.model.named_parameters()}, size
    finally:
        os.preadv = preadv


def whole(model_dir):
    """The same model in one piece."""
    model = build_model(load_arch(model_dir), device="cpu")
    load_model_dir(model, model.adapter, model_dir)
    return model


def changed(model_dir, change):
    """Write the tensors of a model directory again, after ``change`` of the mapping."""
    tensors = load_file(model_dir / "model.safetensors")
    change(tensors)
    save_file(tensors, model_dir / "model.safetensors")


@pytest.mark.parametrize("tied", [False, True])
def test_a_rank_reads_the_bytes_of_its_shards(tmp_path, tied):
    # sizes that two ranks do not share evenly
    arch = tiny_arch(tie_word_embeddings=tied, num_experts=5, vocab_size=101)
    model_dir = write_model_dir(tmp_path / "model", arch)
    stored = load_file(model_dir / "model.safetensors")
    total = sum(tensor.nbytes for tensor in stored.values())
    answers = run_ranks(2, start, model_dir)
    expected = {name: parameter.tolist() for name, parameter in whole(model_dir).named_parameters()}
    for weights, size in answers:
        assert weights == expected
        assert 0.3 * total < size < 0.7 * total
    assert sum(size for _, size in answers) == total
    assert dict(published_tensors(whole(model_dir), whole(model_dir).adapter)).keys() == stored.keys()


def test_block_fp8_is_brought_back(tmp_path):
    """Blocks of 128 x 128 that lie on both ranks, and matrices whose last blocks are smaller."""
    arch = tiny_arch(hidden_size=144, moe_intermediate_size=136, num_attention_heads=20)
    model_dir = write_model_dir(tmp_path / "model", arch)
    back = {}

    def quantised(tensors):
        for name, tensor in list(tensors.items()):
            if QuantisedModules().has(name, tuple(tensor.shape)):
                scales = scales_of(block_amax(tensor, (0, 0)))
                tensors[name] = quantise(tensor, (0, 0), scales)
                tensors[f"{name}_scale_inv"] = scales
                spread = scales.repeat_interleave(128, 0)[: tensor.shape[0]].repeat_interleave(128, 1)
                back[name] = tensors[name].float() * spread[:, : tensor.shape[1]]
            else:
                back[name] = tensor

    changed(model_dir, quantised)
    assert sum("proj" in name for name in back) == len(back) - 2 * 5 - 3
    one = whole(model_dir)
    loaded = dict(published_tensors(one, one.adapter))
    assert loaded.keys() == back.keys()
    assert all(torch.equal(loaded[name], back[name]) for name in back)
    for weights, _ in run_ranks(2, start, model_dir):
        assert weights == {name: parameter.tolist() for name, parameter in one.named_parameters()}


def without(name):
    return lambda tensors: tensors.pop(name)


NORM = "model.norm.weight"
QUERY = "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without(NORM), f"1 tensors are missing, the first is '{NORM}'"),
        (lambda t: t.update({NORM: torch.ones(31)}), f"tensor '{NORM}' has shape (31,), not (32,)"),
        (lambda t: t.update({NORM: torch.ones(32, dtype=torch.bool)}), "has dtype BOOL, which cannot be read"),
        (lambda t: t.update({"model.bias": torch.ones(1)}), "tensor 'model.bias' of model.safetensors is not part"),
        (lambda t: t.update({QUERY: t[QUERY].to(torch.float8_e4m3fn)}), "its scales, 'model.layers.0.self_attn.q_"),
    ],
)
def test_a_model_that_does_not_fit_is_refused(tmp_path, change, message):
    model_dir = write_model_dir(tmp_path / "model")
    changed(model_dir, change)
    with pytest.raises(ValueError, match="model: ") as caught:
        whole(model_dir)
    assert message in str(caught.value)
    assert str(model_dir) in str(caught.value)


def test_files_that_are_not_whole_are_refused(tmp_path):
    model_dir = write_model_dir(tmp_path / "model")
    file = model_dir / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:-4])
    with pytest.raises(UsageError, match=r"ends before its tensor 'lm_head\.weight' does"):
        whole(model_dir)
    file.write_bytes(b"<html>")
    with pytest.raises(UsageError, match="is not a safetensors file"):
        whole(model_dir)
    file.unlink()
    with pytest.raises(UsageError, match=r"has no \*\.safetensors"):
        whole(model_dir)


def start_where_one_cannot_read(rank, model_dir):
    if rank == 1:
        os.preadv = fails
    with distributed(timeout_s=120) as parallel:
        TrainerPolicy(make_recipe(model_dir, steps=1), load_arch(model_dir), parallel, model_dir=model_dir)


def fails(*arguments):
    raise OSError(116, "Stale file handle")


def test_all_ranks_know_that_one_cannot_read(tmp_path):
    model_dir = write_model_dir(tmp_path / "model")
    first, second = run_ranks(2, start_where_one_cannot_read, model_dir, fails=True)
    assert first[0] == "PeerLostError"
    assert f"reading {model_dir} failed on trainer rank 1" in first[1]
    assert second[0] == "OSError"
