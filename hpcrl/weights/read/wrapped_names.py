"""Names of the tensors of a language model in the files of a model that also sees, and which models those are."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

_MOST_BYTES = 16 << 20
"""Maximum size in bytes of a ``config.json``, which usually has some kilobytes."""
_NAMES = (
    (re.compile(r"^language_model\.(model\.|lm_head\.)"), r"\1"),
    (re.compile(r"^model\.language_model\.(?!model\.|lm_head\.)"), "model."),
    (re.compile(r"^(lm_head|mtp)\."), r"\1."),
)
"""Patterns of the language model's tensors in wrappers of older and newer transformers, and their own names.

Modules of multi-token prediction (``mtp.``) are next to the model, not inside it.
"""
STACKED_EXPERTS = frozenset({"qwen3_5_moe_text", "qwen3_vl_moe_text"})
"""Language models in wrappers whose files may store the experts of a layer in one tensor."""


def wrapped_type(model_dir: Path) -> str | None:
    """Return the ``model_type`` of the language model that a directory wraps; None where it wraps none."""
    inner = text_config(model_dir)
    return None if inner is None else str(inner.get("model_type"))


def text_config(model_dir: Path) -> dict[str, Any] | None:
    """Return the ``text_config`` of a directory's ``config.json``; None where it has none.

    None also where it cannot be read: its readers say what is wrong with it.
    """
    path = model_dir / "config.json"
    try:
        if path.stat().st_size > _MOST_BYTES:
            return None
        config = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError):
        return None
    inner = config.get("text_config") if isinstance(config, dict) else None
    return inner if isinstance(inner, dict) else None


def language_model_name(name: str) -> str | None:
    """Return the own name of a wrapper's tensor; None where it is not part of the language model."""
    for pattern, own in _NAMES:
        found, count = pattern.subn(own, name)
        if count:
            return found
    return None


def wrapped_name(own: str, *, like: str) -> str:
    """Return the name in a wrapper of the language model's tensor ``own``.

    Parameters
    ----------
    like:
        The stored name of any of its tensors but the head: wrappers differ in what they put before names.
    """
    if like.startswith("language_model."):
        return f"language_model.{own}"
    return own.replace("model.", "model.language_model.", 1) if own.startswith("model.") else own
