"""Small parts of the trainer's policy that change no number, and so are seen by no comparison of numbers."""

import logging
from types import SimpleNamespace

import pytest
import torch
from test_families import FAMILIES, add_mtp
from trainer_testing import make_recipe, write_model_dir

from hpcrl.modeling.spec import build_model
from hpcrl.models.arch import arch_from_config, load_arch
from hpcrl.trainer.parallel.mesh import distributed
from hpcrl.trainer.state.checkpoint import trainer_state
from hpcrl.trainer.step import policy as policy_module
from hpcrl.trainer.step.head import chunked_logprobs, whole_logprobs
from hpcrl.trainer.step.policy import TrainerPolicy


@pytest.mark.parametrize(
    ("chunk", "function", "tokens"),
    [(None, whole_logprobs, None), ("auto", chunked_logprobs, None), (8, chunked_logprobs, 8)],
)
def test_a_probe_of_replay_needs_no_more_memory_than_the_step(chunk, function, tokens):
    """It has the head of the recipe, and its temperature."""
    heads = []
    targets, engine = torch.tensor([3, 1, 2]), torch.tensor([-1.0, -2.0, -3.0])

    def model(ids, context, head):
        heads.append(head)
        return torch.tensor([-0.5, -2.5, -3.0]), None

    recipe = SimpleNamespace(
        trainer=SimpleNamespace(memory=SimpleNamespace(lm_head_chunk_tokens=chunk)),
        rollouts=SimpleNamespace(sampling=SimpleNamespace(temperature=0.7)),
    )
    batch = SimpleNamespace(targets=targets, engine_logprobs=engine, input_ids=None, context=lambda: None)
    found = TrainerPolicy._unreplayed(SimpleNamespace(recipe=recipe, model=model), batch)
    assert found.tolist() == [0.5, -0.5, 0.0]
    (head,) = heads
    assert head.func is function
    wanted = {"targets": targets, "temperature": 0.7}
    assert head.keywords == (wanted if function is whole_logprobs else {**wanted, "tokens": tokens})


def test_moments_are_made_where_the_parameter_is(monkeypatch):
    """Also the count of steps: an optimizer on a device does not wait for the host."""
    # of a device that holds nothing no state of random numbers can be had
    # torch 2.11 asks whether it is there
    host = SimpleNamespace(get_rng_state=lambda device: torch.get_rng_state(), is_available=lambda: False)
    monkeypatch.setattr(torch, "get_device_module", lambda device: host)
    model = build_model(arch_from_config({"model_type": "qwen3", "vocab_size": 103, **QWEN3}), device="meta")
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained)
    state = trainer_state(model, optimizer, 3)
    assert len(state["optimizer"]) == len(trained)
    for moments in state["optimizer"].values():
        assert {name: value.device.type for name, value in moments.items()} == dict.fromkeys(moments, "meta")
        assert moments["step"].dtype == torch.float32
        assert moments["step"].shape == ()


QWEN3 = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}


@pytest.mark.parametrize("what", ["keep", "drop"])
@pytest.mark.parametrize("stored", [True, False])
def test_tensors_that_are_carried_are_reported_where_there_are_any(tmp_path, caplog, stored, what):
    arch = arch_from_config({"model_type": "glm4_moe", "vocab_size": 103, **FAMILIES["glm4_moe"]})
    model_dir = write_model_dir(tmp_path / "model", arch)
    names = add_mtp(model_dir, "model.layers.2")
    if not stored:
        (model_dir / "mtp.safetensors").unlink()
        (model_dir / "model.safetensors.index.json").unlink()
    caplog.set_level(logging.INFO, policy_module.__name__)
    with distributed(timeout_s=120) as parallel:
        recipe = make_recipe(model_dir, steps=2, mtp_tensors=what)
        TrainerPolicy(recipe, load_arch(model_dir), parallel, model_dir=model_dir)
    told = [record.message for record in caplog.records if "multi-token prediction" in record.message]
    how = "carried through as they are" if what == "keep" else "left out (trainer.mtp_tensors: drop)"
    assert told == ([f"{len(names)} tensors of multi-token prediction are {how}"] if stored else [])
