"""Sizes and switches of an engine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Sizes and switches of an engine.

    Attributes
    ----------
    max_num_seqs:
        Sequences that run at once.
    max_model_len:
        Tokens of a sequence, prompt and output.
    max_num_batched_tokens:
        Tokens of a step.
    block_size, num_blocks:
        The KV cache: ``block_size`` tokens a block.
    enable_prefix_caching, return_routed_experts:
        Switches.
    logprobs_mode:
        See `hpcrl.inference.embedded.engine.sampler.TokenSampler`.
    seed:
        Seed of the seeds drawn for requests without one.
    weight_version:
        Label of the weights at the start.
    """

    max_num_seqs: int
    max_model_len: int
    max_num_batched_tokens: int
    block_size: int
    num_blocks: int
    enable_prefix_caching: bool = True
    return_routed_experts: bool = False
    logprobs_mode: str = "raw_logprobs"
    seed: int = 0
    weight_version: str = "default"
