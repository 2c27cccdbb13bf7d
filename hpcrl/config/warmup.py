"""The section ``model.warmup`` of a recipe."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from hpcrl.config.base import Fraction, PositiveFloat, PositiveInt, StrictModel


class WarmupConfig(StrictModel):
    """Small start model of ``hpcrl warmup``: random weights, then supervised steps on demonstrations."""

    family: str = "qwen3_moe"
    """Family of the model: the ``model_type`` of its ``config.json``; docs/training.md has those that are trained."""
    config: dict[str, Any] = {}
    """Values of ``config.json`` in addition to the sizes below, by the keys of the family (``q_lora_rank``,
    ``index_topk``)."""
    hidden_size: PositiveInt = 64
    """Width of the residual stream."""
    num_hidden_layers: PositiveInt = 2
    """Decoder layers; all are sparse, unless ``config`` says otherwise."""
    num_attention_heads: PositiveInt = 4
    """Query heads."""
    num_key_value_heads: PositiveInt = 2
    """Key and value heads; divides ``num_attention_heads``."""
    head_dim: PositiveInt = 16
    """Size of a head; even."""
    moe_intermediate_size: PositiveInt = 64
    """Inner width of an expert."""
    num_experts: PositiveInt = 8
    """Experts a layer."""
    num_experts_per_tok: PositiveInt = 2
    """Experts that a token visits."""
    max_position_embeddings: PositiveInt = 512
    """Longest sequence in tokens."""
    initializer_range: PositiveFloat = 0.02
    """Standard deviation of random weights. With small widths, attention without norms of queries and keys (latent
    attention) begins almost flat at 0.02 and learns slowly; ``hidden_size ** -0.5`` is a scale for any width."""
    steps: PositiveInt = 300
    """Supervised optimizer steps."""
    batch_size: PositiveInt = 64
    """Demonstrations a step."""
    learning_rate: PositiveFloat = 3e-3
    """Peak learning rate of AdamW (linear warm-up, cosine decay)."""
    correct_share: Fraction = 0.3
    """Share of demonstrations that show the right behaviour; the others show a plausible wrong one, so that
    the start model knows both and reinforcement learning has something to choose from."""
    chat: Literal["text", "qwen2.5", "glm-5"] = "text"
    """Format of conversations: control tokens and the chat template of the tokenizer. ``text`` has no tool calls;
    ``qwen2.5`` has them; ``glm-5`` has thinking as well, and the next speaker's mark ends a turn."""
    words: Annotated[tuple[Annotated[str, Field(pattern=r"(?s)^.")], ...], Field(strict=False)] = ()
    """Texts that are one token each, in addition to printable ASCII characters: they make frequent turns short."""
