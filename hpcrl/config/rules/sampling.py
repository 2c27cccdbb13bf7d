"""Rules of how tokens are drawn."""

from __future__ import annotations

from hpcrl.config.cluster import ClusterProfile
from hpcrl.config.recipe import Recipe
from hpcrl.config.rules.rule import Conflicts, Rule
from hpcrl.config.sampling import LEAST_TEMPERATURE, EvaluationSampling, SamplingConfig, SetSampling


def _fits_context(recipe: Recipe, _: ClusterProfile) -> Conflicts:
    length, new = recipe.engine.max_model_len, {"rollouts": recipe.rollouts.sampling.max_new_tokens}
    new["evaluation"] = recipe.evaluation.sampling.max_new_tokens or 0
    new |= {f"evaluation.sets.{i}": each.sampling.max_new_tokens or 0 for i, each in enumerate(recipe.evaluation.sets)}
    for section, tokens in new.items():
        if tokens >= length:
            what = f"{tokens} leaves no tokens for a prompt in max_model_len {length}"
            yield f"{section}.sampling.max_new_tokens", what


def _truncating(sampling: SamplingConfig | EvaluationSampling | SetSampling) -> list[tuple[str, str]]:
    """Return settings that leave tokens out of the distribution: name, and what it says."""
    top_p, top_k, min_p = sampling.top_p, sampling.top_k, sampling.min_p
    keeps_all = {"top_p": top_p is None or top_p >= 1, "top_k": not top_k, "min_p": not min_p}
    return [(name, f"{getattr(sampling, name):g}") for name, all_kept in keeps_all.items() if not all_kept]


def _trained_on_whole(recipe: Recipe, _: ClusterProfile) -> Conflicts:
    for name, value in _truncating(recipe.rollouts.sampling):
        what = f"{value} leaves tokens out, but the trainer computes probabilities over all tokens"
        yield f"rollouts.sampling.{name}", f"{what}: importance ratios would be wrong"


def _greedy_draws_nothing(recipe: Recipe, _: ClusterProfile) -> Conflicts:
    sampling = recipe.evaluation.sampling
    if 0 < sampling.temperature < LEAST_TEMPERATURE:
        what = f"{sampling.temperature:g} is neither 0 nor at least {LEAST_TEMPERATURE:g}: engines round it"
        yield "evaluation.sampling.temperature", what
    sections: list[tuple[str, EvaluationSampling | SetSampling, float]]
    sections = [("evaluation.sampling", sampling, sampling.temperature)]
    for number, each in enumerate(recipe.evaluation.sets):
        sections.append((f"evaluation.sets.{number}.sampling", each.sampling, each.sampled(sampling).temperature))
    # a set that samples may inherit from `evaluation.sampling`, which is greedy itself
    inherits = any(temperature > 0 for _, _, temperature in sections[1:])
    for section, own, temperature in sections:
        if temperature > 0 or (own is sampling and inherits):
            continue
        for name in [name for name, _ in _truncating(own)] + ["seed"] * (own.seed is not None):
            yield f"{section}.{name}", "has no effect at temperature 0, which takes the most likely token"


SAMPLING_RULES: tuple[Rule, ...] = (
    Rule(
        "answer-fits-context",
        "Prompt and answer fit into the engine's context.",
        "raise engine.max_model_len or lower max_new_tokens",
        _fits_context,
    ),
    Rule(
        "sampling-is-whole",
        "Tokens that are trained on are drawn from the whole distribution.",
        "leave it out; held-out rollouts may have it in evaluation.sampling (docs/algorithms.md, Sampling)",
        _trained_on_whole,
    ),
    Rule(
        "greedy-draws-nothing",
        "Greedy held-out rollouts have no settings of sampling.",
        "leave it out, or set evaluation.sampling.temperature: 0.7, for example",
        _greedy_draws_nothing,
    ),
)
