"""Format of conversations for the model: the section ``chat``."""

from __future__ import annotations

from typing import Any, Literal

from hpcrl.config.base import StrictModel

ChatFormat = Literal[
    "deepseek-v3",
    "glm-4.5",
    "glm-5",
    "gpt-oss",
    "kimi-k2",
    "llama-3",
    "minimax-m2",
    "nemotron-3",
    "qwen2.5",
    "qwen3",
    "qwen3.5",
]


class ChatConfig(StrictModel):
    """Format of conversations for the model. They are always rendered by its own chat template."""

    format: Literal["auto", "text"] | ChatFormat = "auto"
    """The family's format of thinking and tool calls in what the model says. ``auto``: found from ``model_type`` of
    config.json and the vocabulary; ``text``: replies are text alone."""
    variables: dict[str, Any] = {}
    """Variables of the chat template, for example ``enable_thinking: false``."""
    thinking: Literal["kept", "cut"] = "kept"
    """Treatment of earlier thinking where the chat template leaves it out, as most do at a new message of the user.
    ``kept``: it stays in the context, as it was sampled. ``cut``: the template decides; where it leaves thinking out,
    the rollout branches: it continues with a new sequence of tokens, the whole conversation rendered again."""
