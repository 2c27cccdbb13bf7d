"""Settings of other systems become recipes: values, what is told of the rest, and nothing of a file is executed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from hpcrl.cli.main import main
from hpcrl.config.foreign.foreign_settings import Outcome
from hpcrl.config.foreign.importing import ImportedRecipe, import_recipe
from hpcrl.config.load import load_recipe
from hpcrl.errors import UsageError

PRIME_RL = """
max_steps = 1000
seq_len = 131072
[deployment]
num_train_nodes = 12
gpus_per_node = 8
[inference.deployment]
prefill_nodes_per_replica = 2
num_prefill_replicas = 4
decode_nodes_per_replica = 8
num_decode_replicas = 1
[inference.deployment.decode_vllm_overrides]
max_num_seqs = 96
enable_dbo = true
[inference.vllm]
model = "zai-org/GLM-5"
quantization = "fp8_per_block"
max_model_len = 131072
tool_call_parser = "glm47"
[trainer.model]
cp = 4
ep = 8
fused_lm_head_token_chunk_size = 1024
[trainer.model.ac]
freq = 1
[trainer.optim]
lr = 1e-6
[trainer.loss]
kl_tau = 0.002
[orchestrator]
batch_size = 256
group_size = 16
max_off_policy_steps = 8
tasks_per_minute = 100
[orchestrator.concurrency]
max_inflight = 512
[[orchestrator.train.source]]
name = "math"
env.taskset.id = "i3_math"
env.taskset.level = 3
"""
VERL = """
actor_rollout_ref:
  model: {path: Qwen/Qwen2.5-7B, enable_gradient_checkpointing: true, lora_rank: 0}
  actor:
    ppo_mini_batch_size: 64
    clip_ratio_low: 0.2
    clip_ratio_high: 0.28
    use_kl_loss: true
    kl_loss_coef: 0.001
    kl_loss_type: low_var_kl
    entropy_coeff: 0.01
    ppo_max_token_len_per_gpu: 16384
    optim: {lr: 1e-6, lr_warmup_steps: -1, weight_decay: 0.1}
  rollout: {name: vllm, n: 8, tensor_model_parallel_size: 2, prompt_length: "${data.max_prompt_length}"}
data:
  train_files: $HOME/data/train.parquet
  val_files: [$HOME/data/test.parquet]
  max_prompt_length: 1024
  max_response_length: 3072
  train_batch_size: 256
algorithm: {adv_estimator: grpo, norm_adv_by_std_in_grpo: false}
trainer:
  {nnodes: 2, n_gpus_per_node: 8, total_training_steps: 100, save_freq: 20, test_freq: -1, logger: [console, wandb]}
"""
NEMO_BASE = """
grpo: {num_prompts_per_step: 32, num_generations_per_prompt: 16, max_num_steps: 500, val_period: 10}
loss_fn: {reference_policy_kl_penalty: 0.01, ratio_clip_min: 0.2, ratio_clip_max: 0.2, ratio_clip_c: null}
policy:
  model_name: Qwen/Qwen2.5-1.5B
  train_global_batch_size: 512
  train_micro_batch_size: 4
  max_total_sequence_length: 512
  precision: bfloat16
  max_grad_norm: 1.0
  dtensor_cfg: {enabled: true, tensor_parallel_size: 1, context_parallel_size: 1, activation_checkpointing: false}
  megatron_cfg: {enabled: false, optimizer: {lr: 5.0}}
  sequence_packing: {train_mb_tokens: "${mul:${policy.max_total_sequence_length}, ${policy.train_micro_batch_size}}"}
  optimizer: {name: torch.optim.AdamW, kwargs: {lr: 5.0e-6, betas: [0.9, 0.95]}}
  generation:
    max_new_tokens: ${policy.max_total_sequence_length}
    vllm_cfg: {tensor_parallel_size: 1, max_model_len: "${policy.max_total_sequence_length}"}
    colocated: {enabled: true}
cluster: {gpus_per_node: 8, num_nodes: 1}
"""
NEMO = """
defaults: base.yaml
grpo: {max_num_steps: 20}
policy:
  dtensor_cfg: {tensor_parallel_size: 4}
  generation: {colocated: {enabled: false, resources: {num_nodes: 3}}}
cluster: {num_nodes: 4}
"""
SLIME = r"""#!/bin/bash
pkill -9 nothing; touch executed
MODEL_DIR=/models
NAME=$MODEL_DIR/Qwen3-30B-A3B
ROLLOUT_ARGS=(
   --hf-checkpoint ${NAME}
   --prompt-data /data/dapo.jsonl
   --input-key prompt   # a comment --seed 5
   # --num-rollout 7
   --num-rollout ${STEPS:-3000}
   --rm-type deepscaler
   --apply-chat-template
   --rollout-batch-size 32
   --n-samples-per-prompt 8
   --global-batch-size 64
   --rollout-max-response-len 8192
   --seed $(date +%s)
)
GRPO_ARGS=(
   --advantage-estimator gspo
   --eps-clip 4e-4
   --use-kl-loss
   --kl-loss-coef 0.00
   --tensor-model-parallel-size 4
   --optimizer adam --lr 1e-6 --weight-decay 0.1
)
ray job submit -- python3 train_async.py \
   --actor-num-nodes 2 --actor-num-gpus-per-node 8 \
   --rollout-num-gpus 16 --rollout-num-gpus-per-engine 8 \
   ${ROLLOUT_ARGS[@]} ${GRPO_ARGS[@]}
"""


def made_of(path: Path, text: str, name: str) -> ImportedRecipe:
    (path / name).write_text(text)
    return import_recipe(path / name)


def fates(made: ImportedRecipe) -> dict[str, tuple[Outcome, str]]:
    return {each.key: (each.outcome, each.target) for each in made.settings}


def loaded(path: Path, made: ImportedRecipe, **changes: Any) -> Any:
    """What hpcrl reads of the recipe's text, with what the file could not say."""
    tree = yaml.safe_load(made.text("file")) | changes
    written = path / "recipes" / f"{tree['name']}.yaml"
    written.parent.mkdir()
    written.write_text(yaml.safe_dump(tree))
    return load_recipe(str(written)).value


def test_prime_rl(tmp_path: Path) -> None:
    made = made_of(tmp_path, PRIME_RL, "glm.toml")
    recipe = loaded(tmp_path, made)
    assert (made.system, recipe.name, recipe.model.path) == ("prime-rl", "glm", "zai-org/GLM-5")
    assert (recipe.trainer.steps, recipe.trainer.nodes, recipe.trainer.ranks) == (1000, 12, 96)
    assert (recipe.trainer.parallelism.cp, recipe.trainer.parallelism.ep) == (4, 8)
    assert (recipe.engine.prefill.replicas, recipe.engine.prefill.nodes) == (4, 2)
    assert (recipe.engine.decode.nodes, recipe.engine.decode.max_num_seqs) == (8, 96)
    assert recipe.engine.decode.vllm_args == {"enable-dbo": True}
    assert (recipe.engine.memory.weights, recipe.engine.max_model_len) == ("fp8", 131072)
    rollouts = recipe.rollouts
    assert (rollouts.rollouts_per_step, rollouts.group_size, rollouts.max_off_policy_steps) == (256, 16, 8)
    assert recipe.algorithm.loss.kl_tau == 0.002
    (environment,) = recipe.environments
    assert (environment.kind, environment.package, environment.args) == ("verifiers", "i3_math", {"level": 3})
    found = fates(made)
    assert found["orchestrator.tasks_per_minute"] == (Outcome.UNKNOWN, "")
    assert found["inference.vllm.tool_call_parser"] == (Outcome.NOT_NEEDED, "")
    assert found["orchestrator.max_off_policy_steps"] == (Outcome.CHANGED, "rollouts.max_off_policy_steps")
    # what differs stands in the file
    assert "#   orchestrator.tasks_per_minute: unknown." in made.text("glm.toml")


def test_a_dtype_that_is_carried_is_the_one_of_the_recipe(tmp_path: Path) -> None:
    made = made_of(
        tmp_path, PRIME_RL.replace("[trainer.model]", '[trainer]\ndtype = "float32"\n[trainer.model]'), "a.toml"
    )
    assert made.tree["trainer"]["dtype"] == "float32"
    assert fates(made)["trainer.dtype"] == (Outcome.CARRIED, "trainer.dtype")


def test_verl(tmp_path: Path) -> None:
    made = made_of(tmp_path, VERL, "run.yaml")
    recipe = loaded(tmp_path, made)
    # 256 prompts in mini-batches of 64 are four optimizer steps
    assert (recipe.rollouts.rollouts_per_step, recipe.rollouts.group_size) == (512, 8)
    assert (recipe.trainer.steps, recipe.checkpoint.every_steps, recipe.evaluation.every_steps) == (400, 80, 0)
    assert recipe.algorithm.advantage == "mean_baseline"
    loss = recipe.algorithm.loss
    assert (loss.kind, loss.clip_low, loss.clip_high) == ("ppo_clip", 0.2, 0.28)
    assert (recipe.algorithm.kl.coefficient, recipe.algorithm.kl.estimator) == (0.001, "k3")
    assert (recipe.engine.max_model_len, recipe.rollouts.sampling.max_new_tokens) == (4096, 3072)
    assert (recipe.trainer.lora, recipe.trainer.optimizer.warmup_steps) == (None, 0)
    # torch's decay where verl says nothing, and not hpcrl's
    assert recipe.trainer.optimizer.beta2 == 0.999
    assert [sink.sink for sink in recipe.sinks] == ["wandb"]
    (environment,) = recipe.environments
    assert (environment.path, environment.held_out_path) == ("$HOME/data/train.parquet", "$HOME/data/test.parquet")
    found = fates(made)
    assert found["actor_rollout_ref.actor.entropy_coeff"][0] is Outcome.LOST
    assert Outcome.UNKNOWN not in {outcome for outcome, _ in found.values()}


def test_verl_by_arguments_of_hydra(tmp_path: Path) -> None:
    script = """
n=4
python3 -m verl.trainer.main_ppo \\
    actor_rollout_ref.model.path=Qwen/Qwen3-8B \\
    actor_rollout_ref.rollout.n=$n \\
    data.train_batch_size=$((2 * 8)) \\
    algorithm.adv_estimator=gae \\
    +trainer.total_training_steps=5
"""
    made = made_of(tmp_path, script, "run_qwen.sh")
    found = fates(made)
    assert made.tree["rollouts"]["group_size"] == 4
    assert made.tree["trainer"]["steps"] == 5
    # a sum is not computed, and no estimator with a critic is replaced by another one in silence
    assert found["data.train_batch_size"][0] is Outcome.LOST
    assert found["algorithm.adv_estimator"][0] is Outcome.LOST
    assert "advantage" not in made.tree.get("algorithm", {})


def test_nemo_rl_with_the_file_it_starts_from(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(NEMO_BASE)
    made = made_of(tmp_path, NEMO, "mine.yaml")
    words = [{"name": "reverse", "kind": "words"}]
    recipe = loaded(tmp_path, made, environments=words)
    assert (recipe.trainer.steps, recipe.rollouts.rollouts_per_step, recipe.rollouts.group_size) == (20, 512, 16)
    assert (recipe.trainer.nodes, recipe.trainer.ranks, recipe.engine.replicas) == (1, 8, 3)
    # of the two backends the one that is enabled
    assert recipe.trainer.optimizer.learning_rate == 5e-6
    assert recipe.trainer.optimizer.beta2 == 0.95
    assert (recipe.trainer.micro_batch_tokens, recipe.engine.max_model_len) == (2048, 512)
    assert (recipe.algorithm.kl.coefficient, recipe.algorithm.kl.estimator) == (0.01, "k3")
    found = fates(made)
    assert found["policy.dtensor_cfg.tensor_parallel_size"][0] is Outcome.LOST
    assert found["policy.megatron_cfg.optimizer.lr"][0] is Outcome.NOT_NEEDED
    (tmp_path / "base.yaml").unlink()
    with pytest.raises(UsageError, match=r"starts from base\.yaml, which does not exist"):
        import_recipe(tmp_path / "mine.yaml")


def test_slime_from_a_script_that_is_not_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made = made_of(tmp_path, SLIME, "run-Qwen3.sh")
    assert not (tmp_path / "executed").exists()
    recipe = loaded(tmp_path, made)
    assert (recipe.name, recipe.model.path) == ("run_qwen3", "/models/Qwen3-30B-A3B")
    # 32 x 8 rollouts in batches of 64 are four optimizer steps
    assert (recipe.rollouts.rollouts_per_step, recipe.trainer.steps) == (64, 12000)
    assert (recipe.trainer.ranks, recipe.engine.tp, recipe.engine.replicas) == (16, 8, 2)
    loss = recipe.algorithm.loss
    assert (loss.kind, loss.clip_low, loss.clip_high, recipe.algorithm.kl) == ("gspo", 4e-4, 4e-4, None)
    (environment,) = recipe.environments
    assert (environment.columns.messages, environment.columns.answer) == ("prompt", "label")
    found = fates(made)
    assert found["seed"][0] is Outcome.LOST
    assert recipe.seed == 0
    assert found["tensor-model-parallel-size"][0] is Outcome.LOST
    assert Outcome.UNKNOWN not in {outcome for outcome, _ in found.values()}


@pytest.mark.parametrize(
    ("name", "text", "more", "invented"),
    [
        ("glm.toml", PRIME_RL, "[inference.router]\nhouse = 7\n", ["inference.router.house"]),
        (
            "run.yaml",
            VERL,
            "actor_rollout_ref.actor.house: 7\nalgorithm.house: 7\ntrainer.house: 7\ndata.house: 7\ncritic.house: 7\n",
            [f"{part}.house" for part in ("actor_rollout_ref.actor", "algorithm", "trainer", "data", "critic")],
        ),
        (
            "base.yaml",
            NEMO_BASE,
            "policy.house: 7\npolicy.generation.house: 7\ngrpo.house: 7\nloss_fn.house: 7\n",
            [f"{part}.house" for part in ("policy", "policy.generation", "grpo", "loss_fn")],
        ),
        ("run-a.sh", SLIME, "   --no-house --use-distributed-house\n", ["no-house", "use-distributed-house"]),
    ],
)
def test_what_no_system_has_is_unknown(tmp_path: Path, name: str, text: str, more: str, invented: list[str]) -> None:
    text = text.rstrip() + " \\\n" if name.endswith(".sh") else text
    found = {each.key: each for each in made_of(tmp_path, text + more, name).settings}
    assert {key: found[key].outcome for key in invented} == dict.fromkeys(invented, Outcome.UNKNOWN)


def test_the_recipe_lists_what_is_not_needed(tmp_path: Path) -> None:
    made = made_of(tmp_path, VERL, "run.yaml")
    head = [line for line in made.text("run.yaml").splitlines() if line.startswith("#")]
    (begin,) = [number for number, line in enumerate(head) if line == "# These settings are not needed:"]
    named = {key for line in head[begin + 1 :] for key in line.rpartition(": ")[2].split(", ")}
    assert named == {each.key for each in made.settings if each.outcome is Outcome.NOT_NEEDED} != set()


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.toml", "max_steps = ", "cannot be read"),
        ("a.toml", "[tool]\nx = 1", "cannot be recognised"),
        ("a.yaml", "steps: 3", "cannot be recognised"),
        ("a.sh", "echo hello", "cannot be recognised"),
        ("a.sh", "\0" * 10, "cannot be recognised"),
    ],
)
def test_a_file_of_no_system_is_refused(tmp_path: Path, name: str, text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        made_of(tmp_path, text, name)


def command(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["hpcrl", "recipe", "import", *words])
    with pytest.raises(SystemExit) as end:
        main()
    return int(end.value.code or 0)


def test_the_command_writes_a_recipe_and_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "glm.toml").write_text(PRIME_RL)
    assert command(monkeypatch, "glm.toml", "-o", "mine.yaml") == 0
    assert load_recipe("mine.yaml").value.name == "mine"
    assert "wrote mine.yaml" in capsys.readouterr().out
    assert command(monkeypatch, "glm.toml", "-o", "mine.yaml") == 2
    assert "mine.yaml exists" in capsys.readouterr().err
    (tmp_path / "short.toml").write_text("max_steps = 3\n[orchestrator]\nbatch_size = 'x\\n- y'\n")
    assert command(monkeypatch, "short.toml", "--json") == 2
    document = json.loads(capsys.readouterr().out)
    assert any(problem.startswith("environments: is required") for problem in document["to_do"])
    (row,) = (row for row in document["settings"] if row["key"] == "orchestrator.batch_size")
    assert row["outcome"] == "lost"
    assert command(monkeypatch, "glm.toml", "--from", "trl") == 2
    assert "one of prime-rl, verl, nemo-rl, slime" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.sh", "--hf-checkpoint /m --rollout-batch-size 8 --num-rollout 5 --use-wandb --wandb-key KEY-OF-MINE"),
        ("a.yaml", "actor_rollout_ref: {model: {path: x}}\ntrainer: {wandb_api_key: KEY-OF-MINE}\n"),
    ],
)
def test_keys_of_services_are_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, text: str
) -> None:
    (tmp_path / name).write_text(text)
    for words in ([], ["--json"]):
        command(monkeypatch, str(tmp_path / name), *words)
        shown = "".join(capsys.readouterr())
        assert "KEY-OF-MINE" not in shown
        assert "(a secret)" in shown
