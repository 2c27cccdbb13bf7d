"""Models that also see: a language model in a wrapper, whose ``config.json`` has its own as ``text_config``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpcrl.errors import HpcrlError

WRAPPER_FILES = frozenset({"preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"})
"""Small files of wrappers that say nothing of the language model."""
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Keys that wrappers may have in place of the language model."""
_ALWAYS = {"qwen3_vl_moe_text": {"norm_topk_prob": True}}
"""Values of a wrapped language model whatever its config has, by ``model_type``."""


def language_config(config: Mapping[str, Any], same_text: Mapping[str, str]) -> dict[str, Any]:
    """Return the config of the language model that ``config`` wraps, under the keys of its own family.

    Parameters
    ----------
    same_text:
        Families that compute on text what a language model in wrappers does, by its ``model_type``.
    """
    inner: Mapping[str, Any] = config["text_config"]
    own = {**{key: config[key] for key in _TOKENS if key in config}, **inner}
    for key in ("dtype", "torch_dtype", "quantization_config"):
        if own.get(key) is None and config.get(key) is not None:
            own[key] = config[key]
    # wrappers differ in which config's key they read
    own["tie_word_embeddings"] = any(part.get("tie_word_embeddings") is True for part in (config, inner))
    kind = str(own.get("model_type"))
    own |= {"model_type": same_text.get(kind, kind), **_ALWAYS.get(kind, {})}
    for key in ("rope_scaling", "rope_parameters"):
        if isinstance(own.get(key), dict):
            # sections of positions in pictures: of text all sections have the same position
            own[key] = {name: value for name, value in own[key].items() if not name.startswith("mrope")}
    return own


def is_tied(model_dir: Path, config: Mapping[str, Any]) -> bool:
    """Return whether head and embedding of the language model in ``model_dir`` are one.

    Wrappers decide on it by a key of their own, which few files have: so the tensors are compared, by their heads and
    some bytes. Where there are none, ``config`` of the language model counts.
    """
    # not at the top: the weights' part is imported only for models that wrap another one
    from hpcrl.weights.read.model_files import ModelFiles  # noqa: PLC0415
    from hpcrl.weights.read.stored_weights import EMBEDDING, HEAD, rows_differ  # noqa: PLC0415

    said = config.get("tie_word_embeddings") is True
    try:
        with ModelFiles(model_dir) as files:
            if EMBEDDING not in files.tensors:
                return said or HEAD in files.tensors
            return HEAD not in files.tensors or (said and not rows_differ(files))
    except (HpcrlError, OSError, ValueError):
        return said
