"""From a Hugging Face ``config.json`` to `ModelFacts`: one function a family, one module a group of families."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from hpcrl.models.defaults import completed
from hpcrl.models.external import external_family
from hpcrl.models.facts import ModelFacts, Naming
from hpcrl.models.families.common import Config, Reader
from hpcrl.models.families.deepseek import deepseek, glm4_moe
from hpcrl.models.families.dense import llama, mistral, qwen2
from hpcrl.models.families.fused import LLAMA4_NAMES, gpt_oss, llama4
from hpcrl.models.families.mixtral import minimax_m2, mixtral
from hpcrl.models.families.nemotron import nemotron_h
from hpcrl.models.families.qwen3 import qwen3, qwen3_5, qwen3_5_moe, qwen3_moe, qwen3_next
from hpcrl.models.sizes import checked

__all__ = ["FAMILIES", "facts_from_config"]


def facts_from_config(config: Config, *, name: str) -> ModelFacts:
    """Read the sizes of a ``config.json``.

    Raises
    ------
    ValueError
        The architecture is not known, or sizes are missing or impossible (`hpcrl.models.sizes`).
    ExtensionError
        The architecture is that of another package, and cannot be imported.
    """
    whole = checked(config)
    # vision-language models wrap the language model's config
    inner = whole.get("text_config", config)
    config = checked(completed(inner) if isinstance(inner, Mapping) else inner)
    kind = config.get("model_type")
    family = FAMILIES.get(str(kind))
    if family is None and (external := external_family(kind)) is not None:
        family, config = external.facts, checked(external.complete(config))
    if family is None:
        raise ValueError(f"model_type is {kind!r}; known are {', '.join(sorted(FAMILIES))}")
    try:
        facts = family(config, name)
    except KeyError as error:
        raise ValueError(f"config.json lacks {error.args[0]}") from error
    naming = _WRAPPED.get(str(whole.get("model_type")))
    return facts if naming is None else replace(facts, naming=naming)


FAMILIES: dict[str, Reader] = {
    "deepseek_v3": deepseek,
    "deepseek_v32": deepseek,
    "glm4_moe": glm4_moe,
    "glm4_moe_lite": deepseek,
    "glm_moe_dsa": deepseek,
    "gpt_oss": gpt_oss,
    "kimi_k2": deepseek,
    "llama": llama,
    "llama4_text": llama4,
    "minimax_m2": minimax_m2,
    "mistral": mistral,
    "mixtral": mixtral,
    "nemotron_h": nemotron_h,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "qwen3_5_moe_text": qwen3_5_moe,
    "qwen3_5_text": qwen3_5,
    "qwen3_moe": qwen3_moe,
    "qwen3_next": qwen3_next,
}
"""Reader of each ``model_type``."""

_WRAPPED: Mapping[str, Naming] = {"llama4": LLAMA4_NAMES}
"""Names of the language model in a checkpoint that has more, by the ``model_type`` around it."""
