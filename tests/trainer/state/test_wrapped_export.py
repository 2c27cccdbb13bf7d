"""A model that also sees from its published form through training to an export that transformers takes whole."""

import json

import pytest
import torch
from model_agreement import load_ours, packed_logits, token_ids
from safetensors.torch import load_file
from test_checkpoint import save
from test_families import published, restore_and_publish
from test_publish import PROBE
from trainer_testing import make_recipe
from wrapped_models import KINDS, write_wrapper

from hpcrl.checkpoints import CheckpointLedger
from hpcrl.errors import UsageError
from hpcrl.inference.embedded.weights.loading import load_model
from hpcrl.modeling.attention.packed import PackedAttention
from hpcrl.trainer.state.export import export_checkpoint
from hpcrl.weights.read.towers import read_tower


def with_vision(model_dir, vision, **trainer):
    recipe = make_recipe(model_dir, steps=9, **trainer)
    return recipe.model_copy(update={"model": recipe.model.model_copy(update={"vision": vision})})


def run(tmp_path, kind, **text):
    """Two steps of training of a wrapper; returns its directory, the entry, the version and its logits."""
    whole = tmp_path / "whole"
    write_wrapper(whole, kind, **text)
    save(0, whole, tmp_path / "checkpoints")
    _, logits = restore_and_publish(0, whole, tmp_path / "checkpoints", tmp_path / "weights")
    entry = CheckpointLedger(tmp_path / "checkpoints").newest_verified().entry
    return whole, entry, tmp_path / "weights/v000002", torch.tensor(logits)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_wrapper_is_trained_and_exported(tmp_path, kind, tied):
    transformers = pytest.importorskip("transformers")
    whole, entry, version, logits = run(tmp_path, kind, tie_word_embeddings=tied)
    # what engines get is a language model, and says so
    config = json.loads((version / "config.json").read_text())
    assert "text_config" not in config
    assert not any("vision" in name or "visual" in name or "projector" in name for name in published(version))
    served = load_model(version, "auto")(PROBE, PackedAttention(torch.tensor([0, len(PROBE)])).context())
    assert torch.equal(served, logits)

    export_checkpoint(entry, whole, tmp_path / "text", dtype="float32", recipe=with_vision(whole, "drop"))
    assert not (tmp_path / "text/preprocessor_config.json").exists()
    text, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "text", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    with torch.no_grad():
        torch.testing.assert_close(text(PROBE[None]).logits[0], logits, rtol=2e-4, atol=2e-5)

    export_checkpoint(entry, whole, tmp_path / "seeing", dtype="float32", recipe=with_vision(whole, "carry"))
    seeing, report = transformers.AutoModelForImageTextToText.from_pretrained(
        tmp_path / "seeing", output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert not report["mismatched_keys"]
    with torch.no_grad():
        torch.testing.assert_close(seeing(input_ids=PROBE[None]).logits[0], logits, rtol=2e-4, atol=2e-5)
    start, exported = published(whole), published(tmp_path / "seeing")
    assert all(exported[name].shape == start[name].shape for name in start)
    tower = read_tower(whole)
    assert tower.keys() == read_tower(tmp_path / "seeing").keys()
    assert all(torch.equal(start[name], exported[name]) for name in tower)
    assert exported.keys() == start.keys()
    # multi-token prediction is carried as it is, in the layout of the start model
    kept = {*tower, *(name for name in start if name.startswith("mtp."))}
    assert {name for name in start if not torch.equal(start[name], exported[name])} == start.keys() - kept
    index = json.loads((tmp_path / "seeing/model.safetensors.index.json").read_text())["weight_map"]
    assert all(name in load_file(tmp_path / "seeing" / file) for name, file in index.items())
    assert (tmp_path / "seeing/preprocessor_config.json").exists()
    # it is as good a start as the first one was
    torch.testing.assert_close(
        packed_logits(load_ours(tmp_path / "seeing"), token_ids()),
        packed_logits(load_ours(tmp_path / "text"), token_ids()),
        rtol=0,
        atol=0,
    )


def test_tower_keeps_its_dtype(tmp_path):
    whole, entry, _, _ = run(tmp_path, "llava")
    export_checkpoint(entry, whole, tmp_path / "seeing", dtype="bfloat16", recipe=with_vision(whole, "carry"))
    exported = published(tmp_path / "seeing")
    tower = read_tower(whole)
    assert {exported[name].dtype for name in tower} == {torch.float32}
    assert {exported[name].dtype for name in exported.keys() - tower.keys()} == {torch.bfloat16}
    config = json.loads((tmp_path / "seeing/config.json").read_text())
    assert config["dtype"] == config["text_config"]["dtype"] == "bfloat16"


def test_nothing_to_carry_is_refused(tmp_path):
    whole, entry, version, _ = run(tmp_path, "llava")
    with pytest.raises(UsageError, match=r"(?s)has no vision tower.*hint: --model-dir"):
        export_checkpoint(entry, version, tmp_path / "out", dtype="float32", recipe=with_vision(whole, "carry"))
    assert not (tmp_path / "out").exists()
