"""The small recipe of Qwen3-30B-A3B differs from the full one by sizes, its layout, and what a CPU must replace."""

from __future__ import annotations

import pytest
from recipe_differences import declared, differences, reasons

from hpcrl.config.load import load_recipe

SMALL = "qwen3_30b_a3b_small"
#: what may be smaller, beside the name of the recipe
SIZES = (
    "name",
    "description",
    "model.path",
    "model.warmup",
    "rollouts.rollouts_per_step",
    "rollouts.group_size",
    "rollouts.max_in_flight",
    "rollouts.sampling.max_new_tokens",
    "trainer.steps",
    "trainer.ranks",
    "trainer.micro_batch_tokens",
    "trainer.memory.lm_head_chunk_tokens",
    "trainer.optimizer.learning_rate",
    "engine.max_model_len",
    "engine.kv_cache_gib",
)
#: what the small one is there to show
SHOWN = ("job.layout",)
#: what a CPU must replace, with the reason as it stands in the recipe
REPLACED = {"engine.backend": "vLLM for processors needs a minute for each start; the embedded engine has its API"}
ALLOWED = (*SIZES, *SHOWN, *REPLACED)


def test_only_sizes_layout_and_what_a_cpu_replaces_differ() -> None:
    found = differences(load_recipe(SMALL).value, load_recipe("qwen3_30b_a3b").value)
    assert [key for key in found if not declared(key, ALLOWED)] == []
    # and what is declared does differ: the lists are no longer than they must be
    assert {prefix for key in found for prefix in declared(key, ALLOWED)} == set(ALLOWED)


def test_what_a_cpu_replaces_stands_in_the_recipe_with_its_reason() -> None:
    loaded = load_recipe(SMALL)
    assert reasons(loaded, REPLACED) == {key: f"# CPU: {reason}" for key, reason in REPLACED.items()}
    assert loaded.source.read_text().count("# CPU: ") == len(REPLACED)


@pytest.mark.parametrize("setting", ["trainer.nodes=1", "engine.replicas=3", "trainer.memory.optimizer_offload=true"])
def test_another_difference_is_found(setting: str) -> None:
    found = differences(load_recipe(SMALL, [setting]).value, load_recipe("qwen3_30b_a3b").value)
    assert setting.partition("=")[0] in [key for key in found if not declared(key, ALLOWED)]
