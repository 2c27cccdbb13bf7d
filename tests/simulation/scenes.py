"""Small scenarios for tests."""

from __future__ import annotations

from typing import Any

from hpcrl.config.cluster import ClusterProfile
from hpcrl.config.load import load_cluster, load_recipe
from hpcrl.config.recipe import Recipe
from hpcrl.simulation import Durations, Failures, Scenario, make_scenario


def constant(value: float) -> dict[str, Any]:
    return {"kind": "constant", "value": value}


def durations(**changes: Any) -> Durations:
    """One turn of 100 tokens in 1 s alone, judged in 1 s; the trainer takes 2 s, an update 0.5 s."""
    value: dict[str, Any] = {
        "environments": {
            "*": {"turns": constant(1), "prompt_tokens": constant(10), "sampled_tokens": constant(100),
                  "judge_s": constant(1.0)}
        },
        "engine": {"step_base_s": 0.01},
        "trainer": {"forward_backward_per_token_s": 0.0, "forward_backward_base_s": 1.5, "optimizer_s": constant(0.5)},
        "handoff": {"publish_s": constant(0.0), "load_s": constant(0.5)},
    }  # fmt: skip
    for name, change in changes.items():
        value[name] = (
            {**value[name], **change}
            if isinstance(change, dict) and name in value and name != "environments"
            else change
        )
    return Durations.model_validate(value)


def recipe(*settings: str) -> Recipe:
    return load_recipe(
        "quickstart",
        (
            "evaluation.prompts=1",
            "checkpoint.every_steps=0",
            "rollouts.rollouts_per_step=16",
            "rollouts.group_size=4",
            "trainer.steps=1000000",
            "rollouts.sampling.max_new_tokens=200",
            *settings,
        ),
    ).value


def local() -> ClusterProfile:
    return load_cluster("local").value


def scenario(
    *settings: str, days: float = 0.002, failures: Failures | None = None, seed: int = 0, nodes: int | None = None,
    sample: int | None = 0, **changes: Any
) -> Scenario:  # fmt: skip
    return make_scenario(
        recipe(*settings),
        local(),
        durations(**changes),
        days=days,
        failures=failures,
        seed=seed,
        nodes=nodes,
        sample=sample,
    )


LONG_TAIL: dict[str, Any] = {
    "*": {
        "turns": {"kind": "lognormal", "median": 3, "sigma": 0.6, "maximum": 8},
        "prompt_tokens": constant(20),
        "sampled_tokens": {"kind": "lognormal", "median": 20, "sigma": 0.8},
        "said_tokens": constant(5),
        "tool_s": {"kind": "pareto", "minimum": 0.2, "alpha": 1.5, "maximum": 120},
        "judge_s": {"kind": "lognormal", "median": 1.0, "sigma": 1.0},
    }
}
