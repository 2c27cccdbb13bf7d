"""A checkpoint as a Hugging Face directory: what transformers computes with it is what the trainer computes."""

import json
import os
import stat
import subprocess
import sys

import pytest
import torch
from safetensors import safe_open
from test_loop import run_steps
from trainer_testing import VOCAB, StubDock, make_recipe, tiny_arch, write_model_dir

from hpcrl.checkpoints import CheckpointLedger
from hpcrl.config.lora import LoraConfig
from hpcrl.errors import CheckpointError
from hpcrl.modeling.attention.packed import PackedAttention
from hpcrl.models.arch import arch_from_config
from hpcrl.models.configfile import read_config
from hpcrl.models.known import find_config
from hpcrl.runs.rundir import RunDir
from hpcrl.trainer.parallel.mesh import distributed
from hpcrl.trainer.state import export
from hpcrl.trainer.state.checkpoint import load_checkpoint
from hpcrl.trainer.state.export import _tell_unread, export_checkpoint
from hpcrl.trainer.step.policy import TrainerPolicy


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return write_model_dir(tmp_path_factory.mktemp("export") / "model")


@pytest.fixture(scope="module")
def run(tmp_path_factory, model_dir):
    run = RunDir(tmp_path_factory.mktemp("export") / "run")
    with StubDock().serving() as dock:
        run_steps(run, model_dir, dock, 4)
    return run


def tensors_of(path):
    found = {}
    for file in path.glob("*.safetensors"):
        with safe_open(file, framework="pt") as shard:
            found |= {name: shard.get_tensor(name) for name in shard.keys()}  # noqa: SIM118 - not a dict
    return found


def test_the_command_writes_what_the_trainer_published(run, model_dir, tmp_path):
    output = tmp_path / "out"
    command = [sys.executable, "-m", "hpcrl.trainer.state.export", str(run.path), str(output), "--step", "4"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == str(output)
    published, exported = tensors_of(run.weights_dir / "v000004"), tensors_of(output)
    assert published.keys() == exported.keys()
    for name, tensor in published.items():
        assert torch.equal(exported[name], tensor), name
    assert (output / "tokenizer.json").read_bytes() == (model_dir / "tokenizer.json").read_bytes()
    assert not list(tmp_path.glob(".*"))


def test_transformers_gives_the_logits_of_the_trainer(run, model_dir, tmp_path):
    transformers = pytest.importorskip("transformers")
    entry = CheckpointLedger(run.checkpoints_dir).newest_verified().entry
    # so small that the model is cut into several files
    export_checkpoint(entry, model_dir, tmp_path / "out", dtype="float32", shard_bytes=20_000)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 2
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tokens = torch.randint(VOCAB, (12,), generator=torch.Generator().manual_seed(1))
    attention = PackedAttention(torch.tensor([0, 12]))
    with torch.no_grad(), distributed(timeout_s=120) as parallel:
        policy = TrainerPolicy(make_recipe(model_dir, steps=9), tiny_arch(), parallel, model_dir=model_dir)
        start = policy.model(tokens, attention.context())
        load_checkpoint(entry, policy.model, policy.optimizer, parallel)
        ours = policy.model(tokens, attention.context())
        torch.testing.assert_close(theirs(tokens[None]).logits[0], ours, atol=1e-5, rtol=1e-5)
    # it is the trained model and not the one that the run began with
    assert float((start - ours).abs().max()) > 1e-3


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_files_have_the_mode_of_the_umask(run, model_dir, tmp_path, umask):
    """What is written outside of runs is as open as everything else that its user writes."""
    entry = CheckpointLedger(run.checkpoints_dir).newest_verified().entry
    previous = os.umask(umask)
    try:
        export_checkpoint(entry, model_dir, tmp_path / "exported", dtype="float32")
    finally:
        os.umask(previous)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "exported").iterdir()}
    assert any(name.endswith(".safetensors") for name in modes)
    assert modes == dict.fromkeys(modes, 0o666 & ~umask)


def test_another_dtype(run, model_dir, tmp_path):
    entry = CheckpointLedger(run.checkpoints_dir).newest_verified().entry
    size = export_checkpoint(entry, model_dir, tmp_path / "out", dtype="bfloat16")
    tensors = tensors_of(tmp_path / "out")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert size == sum(tensor.numel() * 2 for tensor in tensors.values())
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == size
    assert set(index["weight_map"]) == set(tensors)


@pytest.mark.parametrize(("limit", "copied"), [(1000, True), (999, False)])
def test_files_that_are_too_large_for_a_companion_are_left(tmp_path, monkeypatch, limit, copied):
    """Weights under another name, for example: only settings and the tokenizer are copied."""
    monkeypatch.setattr(export, "_COMPANION_BYTES", limit)
    for name, size in (("merges.txt", 1000), ("vocab.json", 10), ("config.json", 10)):
        (tmp_path / name).write_bytes(bytes(size))
    (tmp_path / "out").mkdir()
    export._copy_companions(tmp_path, tmp_path / "out", wrapper=False)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"vocab.json", *(["merges.txt"] if copied else [])}


def test_what_does_not_fit_leaves_nothing(run, tmp_path):
    entry = CheckpointLedger(run.checkpoints_dir).newest_verified().entry
    other = write_model_dir(tmp_path / "other", tiny_arch(num_experts=8))
    with pytest.raises(CheckpointError, match="does not fit the model"):
        export_checkpoint(entry, other, tmp_path / "out", dtype="float32")
    assert [path.name for path in tmp_path.iterdir()] == ["other"]


@pytest.mark.parametrize(
    ("targets", "said"),
    [(None, "mlp and shared_experts"), (["attention", "mlp"], "mlp"), (["attention", "experts"], "")],
)
def test_it_says_which_adapters_peft_leaves_out(targets, said, capsys):
    """Dense layers first, shared experts behind: GLM-5, whose adapters of both PEFT takes for those of experts."""
    _tell_unread(arch_from_config(read_config(find_config("GLM-5"))), targets)
    found = capsys.readouterr().err
    assert found.startswith(f"adapters of {said} are merged here; PEFT leaves them out") if said else not found


def test_the_command_says_it_of_a_run_with_adapters(run, model_dir, tmp_path, monkeypatch, capsys):
    recipe = run.recipe()
    trainer = recipe.trainer.model_copy(update={"lora": LoraConfig(rank=4, alpha=8.0, targets=["attention"])})
    monkeypatch.setattr(RunDir, "recipe", lambda _: recipe.model_copy(update={"trainer": trainer}))
    monkeypatch.setattr(export, "export_checkpoint", lambda *_, **__: 1)
    monkeypatch.setattr(export, "unread_by_peft", lambda _, targets: tuple(targets))
    monkeypatch.setattr(sys, "argv", ["export", str(run.path), str(tmp_path / "out"), "--model-dir", str(model_dir)])
    assert export.main() == 0
    assert "adapters of attention are merged here" in capsys.readouterr().err
