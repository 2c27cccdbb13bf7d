"""The reference run in small differs from it by sizes and by what a CPU must replace, and by nothing else."""

from __future__ import annotations

import pytest
from recipe_differences import declared, differences, reasons

from hpcrl.config.load import load_recipe

#: what may be smaller, beside the name of the recipe
SIZES = (
    "name",
    "description",
    "model.path",
    "model.warmup",
    *(
        f"environments.0.{key}"
        for key in ("tasks", "system", "max_turns", "max_output_characters", "command_timeout_s", "rollout_timeout_s")
    ),
    "environments.0.max_sandboxes",
    "environments.0.memory_gib",
    "environments.0.summary_room_tokens",
    "rollouts.rollouts_per_step",
    "rollouts.group_size",
    "rollouts.max_in_flight",
    "rollouts.sampling.max_new_tokens",
    "trainer.steps",
    "trainer.ranks",
    "trainer.micro_batch_tokens",
    "trainer.memory.lm_head_chunk_tokens",
    "trainer.optimizer.learning_rate",
    "engine.prefill.replicas",
    "engine.decode.replicas",
    "engine.max_model_len",
    "engine.max_num_seqs",
    "engine.block_size",
    "engine.kv_cache_gib",
)
_ONE_PROCESS = "an embedded engine is one process: a replica on each node in place of one over several"
#: what a CPU must replace, with the reason as it stands in the recipe
REPLACED = {
    "environments.0.summary_points": "no demonstration has a summary, so that the small model writes none",
    "trainer.precision.fp8.backend": (
        "DeepGEMM is for Hopper GPUs; the reference in plain torch defines what it computes"
    ),
    "engine.backend": "vLLM has no sparse attention for CPUs; the embedded engine has it, behind vLLM's API",
    "engine.prefill.nodes": _ONE_PROCESS,
    "engine.prefill.vllm_args": "the embedded engine has none of vLLM's flags; two batches in turns are lost",
    "engine.decode.nodes": _ONE_PROCESS,
    "engine.memory": (
        "engines hold no FP8 and share no GPU; their weights are those of versions in FP8, multiplied in bfloat16"
    ),
    "engine.vllm_args": "the embedded engine has none of vLLM's flags; expert parallelism and DeepEP are lost",
    "handoff.kind": "the embedded engine quantises nothing as it loads, so the trainer does, by the same quantiser",
}


def test_only_sizes_and_what_a_cpu_replaces_differ() -> None:
    found = differences(load_recipe("glm5_swe_small").value, load_recipe("glm5_swe").value)
    assert [key for key in found if not declared(key, (*SIZES, *REPLACED))] == []
    # and what is declared does differ: the lists are no longer than they must be
    used = {prefix for key in found for prefix in declared(key, (*SIZES, *REPLACED))}
    assert used == {*SIZES, *REPLACED}


def test_what_a_cpu_replaces_stands_in_the_recipe_with_its_reason() -> None:
    loaded = load_recipe("glm5_swe_small")
    assert reasons(loaded, REPLACED) == {key: f"# CPU: {reason}" for key, reason in REPLACED.items()}
    # and no other line claims to be such a one
    lines = loaded.source.read_text().splitlines()
    assert sum(line.strip().startswith("# CPU: ") for line in lines) == len(REPLACED)


@pytest.mark.parametrize(
    "setting",
    [
        "trainer.memory.optimizer_offload=false",
        "trainer.parallelism.ep=4",
        "rollouts.max_off_policy_steps=4",
        "engine.pause=none",
        "job.layout=single",
        "engine.decode.max_num_batched_tokens=32",
        "engine.router.kind=direct",
        "trainer.precision.fp8.keep=['*.kv_b_proj']",
    ],
)
def test_another_difference_is_found(setting: str) -> None:
    allowed = (*SIZES, *REPLACED)
    found = differences(load_recipe("glm5_swe_small", [setting]).value, load_recipe("glm5_swe").value)
    assert setting.partition("=")[0] in [key.removesuffix(".0") for key in found if not declared(key, allowed)]
