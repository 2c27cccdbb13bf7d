"""Configuration of LoRA adapters, as PEFT and vLLM read it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def adapter_config(*, rank: int, alpha: float, modules: Sequence[str], base_model: str) -> dict[str, Any]:
    """Make the content of ``adapter_config.json``.

    Parameters
    ----------
    rank, alpha:
        The product of B and A is scaled by ``alpha / rank``.
    modules:
        Those that have an A and a B, for example ``model.layers.0.self_attn.q_proj``; experts one by one.
    base_model:
        Path or name of the model that is adapted.
    """
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
        "inference_mode": True,
        "target_modules": sorted({name.rpartition(".")[2] for name in modules}),
        "target_parameters": None,
    }
