"""What is not trained: parameters that a recipe freezes, and tensors of multi-token prediction."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_checkpoint import load, save, whole
from test_families import FAMILIES, add_mtp, published
from test_publish import make_publisher
from trainer_testing import Rollouts, make_recipe, write_model_dir

from hpcrl.checkpoints import CheckpointLedger
from hpcrl.errors import CheckpointError, UsageError
from hpcrl.inference.embedded.weights.loading import check_fits
from hpcrl.modeling.fp8.quantiser import block_amax, dequantise, quantise, scales_of
from hpcrl.modeling.hf import load_hf_tensors
from hpcrl.modeling.spec import build_model
from hpcrl.models.arch import arch_from_config, load_arch
from hpcrl.trainer.parallel.mesh import distributed
from hpcrl.trainer.state.checkpoint import trainer_state
from hpcrl.trainer.state.export import export_checkpoint
from hpcrl.trainer.step.policy import TrainerPolicy
from hpcrl.weights.store import HandoffStore

GATE, HEAD = "*.mlp.gate.weight", "lm_head.*"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return write_model_dir(tmp_path_factory.mktemp("freeze") / "model")


def test_what_is_frozen_has_no_state_and_does_not_move(model_dir):
    with distributed(timeout_s=120) as parallel:
        recipe = make_recipe(model_dir, steps=2, freeze=[GATE, HEAD, "*.experts.*.down_proj.weight"])
        policy = TrainerPolicy(recipe, load_arch(model_dir), parallel, model_dir=model_dir)
        before = {name: whole(parameter) for name, parameter in policy.model.named_parameters()}
        policy.forward_backward(Rollouts(1).shard(0, 1))
        policy.optimizer_step(1)
        after = {name: whole(parameter) for name, parameter in policy.model.named_parameters()}
        frozen = {name for name in before if torch.equal(before[name], after[name])}
        layers = {f"layers.{i}.mlp.{name}" for i in range(2) for name in ("gate.weight", "experts.down_proj")}
        assert frozen == {"lm_head.weight"} | layers
        assert len(policy.optimizer.state) == len(before) - len(frozen)
        assert trainer_state(policy.model, policy.optimizer, 1)["optimizer"].keys() == before.keys() - frozen


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (
            ["*.mlp.gates.weight"],
            "no tensor of qwen3_moe has a name like '*.mlp.gates.weight'; near it is 'model.layers.*.mlp.gate.weight'",
        ),
        (["*"], "nothing of qwen3_moe is left to train"),
        (["*.experts.1.up_proj.weight"], "experts.1.up_proj.weight, but not all of the 8 tensors that are one param"),
    ],
)
def test_patterns_that_do_not_fit_are_refused(model_dir, patterns, message):
    recipe = make_recipe(model_dir, steps=2, freeze=patterns)
    with distributed(timeout_s=120) as parallel, pytest.raises(UsageError) as caught:
        TrainerPolicy(recipe, load_arch(model_dir), parallel, model_dir=model_dir)
    assert message in str(caught.value)
    assert "hint: trainer.freeze takes patterns" in str(caught.value)


def test_a_checkpoint_without_the_moments_says_so(model_dir, tmp_path):
    save(0, model_dir, tmp_path, freeze=[HEAD])
    with pytest.raises(CheckpointError, match=r"no optimizer state of 1 parameters, the first is lm_head\.weight"):
        load(0, model_dir, tmp_path)


@pytest.mark.parametrize("what", ["keep", "drop"])
@pytest.mark.parametrize(
    ("family", "count"), [("glm4_moe", "num_nextn_predict_layers"), ("minimax_m2", "num_mtp_modules")]
)
def test_multi_token_prediction_is_kept_or_dropped(tmp_path, family, count, what):
    """Tensors in bfloat16 and float32 of a model that trains in float32; `test_families` has two ranks."""
    arch = arch_from_config({"model_type": family, "vocab_size": 103, **FAMILIES[family]})
    model_dir = write_model_dir(tmp_path / "model", arch)
    names, start = add_mtp(model_dir, "model.layers.2", count), published(model_dir)
    wanted = set(start) if what == "keep" else set(start) - names
    save(0, model_dir, tmp_path / "checkpoints", mtp_tensors=what)
    with distributed(timeout_s=120) as parallel:
        recipe = make_recipe(model_dir, steps=2, mtp_tensors=what)
        policy = TrainerPolicy(recipe, load_arch(model_dir), parallel, model_dir=model_dir)
        publisher = make_publisher(HandoffStore(tmp_path / "weights"), parallel, model_dir)
        publisher.publish(policy.model, 1)
        publisher.wait()
    handoff = HandoffStore(tmp_path / "weights").open(1)
    # an engine takes the version, and leaves out what it does not run
    check_fits(handoff, load_arch(model_dir))
    engine = build_model(load_arch(model_dir), device="cpu")
    load_hf_tensors(engine, engine.adapter, published(handoff.path).items())
    assert torch.equal(engine.norm.weight, start["model.norm.weight"])
    entry = CheckpointLedger(tmp_path / "checkpoints").newest_verified().entry
    export_checkpoint(entry, model_dir, tmp_path / "export", dtype="bfloat16")
    for directory in (handoff.path, tmp_path / "export"):
        found = published(directory)
        assert found.keys() == wanted
        assert all(torch.equal(found[name], start[name]) for name in names & wanted)
        assert all(found[name].dtype == start[name].dtype for name in names & wanted)
        config = json.loads((directory / "config.json").read_text())
        assert config[count] == (what == "keep")


def test_multi_token_prediction_in_block_fp8_is_brought_back(tmp_path):
    arch = arch_from_config({"model_type": "glm4_moe", "vocab_size": 103, **FAMILIES["glm4_moe"]})
    model_dir = write_model_dir(tmp_path / "model", arch)
    add_mtp(model_dir, "model.layers.2")
    stored, name = load_file(model_dir / "mtp.safetensors"), "model.layers.2.eh_proj.weight"
    original = stored[name].float()
    scales = scales_of(block_amax(original, (0, 0)))
    stored[name], stored[f"{name}_scale_inv"] = quantise(original, (0, 0), scales), scales
    save_file(stored, model_dir / "mtp.safetensors")
    with distributed(timeout_s=120) as parallel:
        policy = TrainerPolicy(make_recipe(model_dir, steps=2), load_arch(model_dir), parallel, model_dir=model_dir)
        carried = {n: whole(t) for n, t in policy.model.named_buffers() if n.startswith("carried.")}
    assert carried.keys() == {f"carried.{n}" for n in stored} - {f"carried.{name}_scale_inv"}
    assert torch.equal(carried[f"carried.{name}"], dequantise(stored[name], scales).bfloat16())


def test_tensors_behind_the_modules_of_the_config_are_refused(tmp_path):
    arch = arch_from_config({"model_type": "glm4_moe", "vocab_size": 103, **FAMILIES["glm4_moe"]})
    model_dir = write_model_dir(tmp_path / "model", arch)
    add_mtp(model_dir, "model.layers.3")
    with distributed(timeout_s=120) as parallel, pytest.raises(ValueError, match=r"model\.layers\.3\..* is not part"):
        TrainerPolicy(make_recipe(model_dir, steps=2), load_arch(model_dir), parallel, model_dir=model_dir)
    assert load_file(model_dir / "mtp.safetensors")
