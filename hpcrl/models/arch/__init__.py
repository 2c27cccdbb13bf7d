"""Architectures that trainer and embedded engine run, from the ``config.json`` of a model; without torch.

`hpcrl.models.facts` knows more families than these: what can be planned is more than what can be trained here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpcrl.models.arch.base import GroupedQueryArch, KvShape, ModelArch, StateShape
from hpcrl.models.arch.deepseek import DeepseekV3Arch, Glm4MoeArch, SigmoidMoeArch
from hpcrl.models.arch.dense import DenseArch, LlamaArch, MistralArch, Qwen2Arch
from hpcrl.models.arch.gated_delta import GatedDeltaArch, Qwen3NextArch, Qwen35Arch, Qwen35MoeArch
from hpcrl.models.arch.glm5 import GlmMoeDsaArch
from hpcrl.models.arch.gpt_oss import GptOssArch
from hpcrl.models.arch.minimax import MinimaxM2Arch
from hpcrl.models.arch.nemotron import NemotronHArch
from hpcrl.models.arch.qwen3 import Qwen3Arch, Qwen3MoeArch
from hpcrl.models.arch.rope import RopeScaling
from hpcrl.models.configfile import read_config
from hpcrl.models.defaults import completed
from hpcrl.models.external import external_family, external_types
from hpcrl.models.sizes import check_kinds, checked
from hpcrl.models.wrapped import is_tied, language_config

__all__ = [
    "ARCHS",
    "SAME_TEXT",
    "DeepseekV3Arch",
    "DenseArch",
    "GatedDeltaArch",
    "Glm4MoeArch",
    "GlmMoeDsaArch",
    "GptOssArch",
    "GroupedQueryArch",
    "KvShape",
    "LlamaArch",
    "MinimaxM2Arch",
    "MistralArch",
    "ModelArch",
    "NemotronHArch",
    "Qwen2Arch",
    "Qwen3Arch",
    "Qwen3MoeArch",
    "Qwen3NextArch",
    "Qwen35Arch",
    "Qwen35MoeArch",
    "RopeScaling",
    "SigmoidMoeArch",
    "StateShape",
    "arch_from_config",
    "load_arch",
    "read_model_config",
    "trainable_types",
    "wrapped_kind",
]

ARCHS: tuple[type[ModelArch], ...] = (
    DeepseekV3Arch,
    Glm4MoeArch,
    GlmMoeDsaArch,
    GptOssArch,
    LlamaArch,
    MinimaxM2Arch,
    MistralArch,
    NemotronHArch,
    Qwen2Arch,
    Qwen3Arch,
    Qwen3MoeArch,
    Qwen3NextArch,
    Qwen35Arch,
    Qwen35MoeArch,
)
"""One a family."""


SAME_TEXT: Mapping[str, str] = {"qwen3_vl_text": "qwen3", "qwen3_vl_moe_text": "qwen3_moe"}
"""Language models in wrappers that compute on text what another family does, by ``model_type``.

Their sections of rotary embeddings are for positions in pictures; of text all sections have the same position.
"""


def trainable_types() -> tuple[str, ...]:
    """Every ``model_type`` that can be run, those of other packages included."""
    return tuple(sorted({*(kind for arch in ARCHS for kind in arch.MODEL_TYPES), *external_types()}))


def arch_from_config(config: Mapping[str, Any]) -> ModelArch:
    """Read a ``config.json``.

    Raises
    ------
    ValueError
        The family is none of these, it asks for what its model does not compute, or a size is missing.
    ExtensionError
        The family is that of another package, and cannot be imported.
    """
    if not isinstance(config, Mapping):
        raise ValueError(f"config.json holds a {type(config).__name__}, not an object")
    kind = config.get("model_type")
    for arch in ARCHS:
        if kind in arch.MODEL_TYPES:
            if config.get("text_config") is not None:
                # readers of sizes would read the inner config, and this one the outer
                raise ValueError("text_config and a model_type without one exclude each other; remove one of them")
            whole = completed(config)
            check_kinds(whole)
            found = arch.from_hf_config(whole)
            checked(whole)
            return found
    if (external := external_family(kind)) is not None:
        completed_outside = external.complete(config)
        read = external.arch.from_hf_config(completed_outside)
        checked(completed_outside)
        return read
    if (inner := wrapped_kind(config)) is not None:
        raise ValueError(
            f"model_type is {kind!r}, a wrapper around a language model of {inner} (text_config); what becomes of the "
            "rest is set by model.vision of the recipe; or `hpcrl model extract DIR --output DIR` writes the "
            "language model alone"
        )
    text = config.get("text_config")
    wrapped = f"; its text_config is of {text.get('model_type')!r}" if isinstance(text, Mapping) else ""
    raise ValueError(
        f"model_type is {kind!r}; trainer and embedded engine know {', '.join(trainable_types())}{wrapped}"
    )


def read_model_config(model_dir: Path) -> Any:
    """Read ``model_dir/config.json`` in the form of the language model's family.

    For a vision-language model this is the ``text_config``, completed by the values around it; the files decide whether
    head and embedding are one, where they exist.

    Raises
    ------
    ValueError
        It is not JSON, or the wrapped config needs an unsupported computation. The message has no path.
    OSError
        The filesystem refused.
    """
    config = read_config(model_dir / "config.json")
    if wrapped_kind(config) is None:
        return config
    own = language_config(config, SAME_TEXT)
    own["tie_word_embeddings"] = is_tied(model_dir, own)
    try:
        return {**own, "architectures": [arch_from_config(own).ARCHITECTURE]}
    except ValueError as error:
        raise ValueError(f"text_config: {error}") from error


def wrapped_kind(config: Any) -> str | None:
    """Return the ``model_type`` of the language model that ``config`` wraps, where that can be run; else None."""
    inner = config.get("text_config") if isinstance(config, Mapping) else None
    if not isinstance(inner, Mapping) or config.get("model_type") in trainable_types():
        return None
    kind = inner.get("model_type")
    return str(kind) if kind in (*trainable_types(), *SAME_TEXT) else None


def load_arch(model_dir: Path) -> ModelArch:
    """Read ``model_dir/config.json``; for a vision-language model that of its language model.

    Raises
    ------
    FileNotFoundError
        ``config.json`` does not exist.
    ValueError
        It is not a model this project can run (the message names the file).
    """
    try:
        return arch_from_config(read_model_config(model_dir))
    except ValueError as error:
        raise ValueError(f"{model_dir / 'config.json'}: {error}") from error
