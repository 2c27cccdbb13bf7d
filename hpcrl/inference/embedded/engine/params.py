"""Sampling parameters of one request, with vLLM's names, defaults and limits."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

#: largest count of a request: numbers of requests are kept in arrays of 64 bits, and added up there
MAX_COUNT = 2**53
#: temperatures below this are greedy, as in vLLM
GREEDY_BELOW = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Parameters with which the engine samples one sequence.

    Attributes
    ----------
    max_tokens, min_tokens:
        Bounds of the number of generated tokens.
    temperature:
        In [0, 2]; 0 is greedy.
    top_k:
        Keep the k most likely tokens; 0 or -1 keeps all.
    top_p, min_p:
        Nucleus and relative-probability bounds.
    seed:
        Makes the sequence reproducible: the noise of a token depends only on the seed and on the token's position in
        the sequence (prompt included), not on the rest of the batch. A sequence that was cut and is sent again as a
        longer prompt with the same seed therefore continues as it would have.
    eos_token_id:
        Ends the sequence without a ``stop_reason``; None if the request ignores it.
    stop_token_ids:
        End the sequence and are named as ``stop_reason``.
    suppressed_token_ids:
        Not sampled before ``min_tokens``.
    logprobs:
        None for no log-probabilities; else the number of most likely tokens reported in addition to the sampled one.
    prompt_logprobs:
        The same for prompt tokens.
    routed_experts_prompt_start:
        First prompt token whose experts are returned.
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    eos_token_id: int | None = None
    stop_token_ids: frozenset[int] = frozenset()
    suppressed_token_ids: frozenset[int] = frozenset()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    routed_experts_prompt_start: int = 0

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def skip_reading_prefix_cache(self) -> bool:
        """Return whether the whole prompt is computed, because log-probabilities of its tokens are not cached."""
        return self.prompt_logprobs is not None

    def nth(self, index: int) -> SamplingParams:
        """Return the parameters of choice ``index`` of a request for several: seeds are consecutive."""
        if self.seed is None or index == 0:
            return self
        # seeds are 64 bits wide, and the one behind the last is the first
        return replace(self, seed=(self.seed + index + 2**63) % 2**64 - 2**63)

    def check(self, *, vocab_size: int, prompt_length: int) -> None:
        """Refuse what cannot be sampled.

        Raises
        ------
        ValueError
            One sentence that names the parameter, its bounds and its value.
        """
        _bounded("temperature", self.temperature, 0.0, 2.0)
        _bounded("min_p", self.min_p, 0.0, 1.0)
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must be in (0, 1], not {self.top_p}")
        if self.top_k < -1:
            raise ValueError(f"top_k must be 0 or -1 (all tokens) or at least 1, not {self.top_k}")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, not {self.max_tokens}")
        if max(self.max_tokens, self.top_k) > MAX_COUNT:
            raise ValueError(f"max_tokens and top_k must be at most {MAX_COUNT}")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise ValueError(f"min_tokens must be between 0 and max_tokens ({self.max_tokens}), not {self.min_tokens}")
        for name, value in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if value is not None and not -1 <= value <= vocab_size:
                raise ValueError(
                    f"{name} must be -1 (all) or between 0 and the vocabulary of {vocab_size}, not {value}"
                )
        if outside := sorted(t for t in self.stop_token_ids if not 0 <= t < vocab_size):
            raise ValueError(f"stop_token_ids {outside} are outside the vocabulary of {vocab_size}")
        if len([token for token in self.suppressed_token_ids if 0 <= token < vocab_size]) >= vocab_size:
            raise ValueError("min_tokens leaves no token to sample: stop_token_ids are the whole vocabulary")
        if self.seed is not None and not -(2**63) <= self.seed < 2**63:
            raise ValueError(f"seed must fit 64 bits, not {self.seed}")
        if not 0 <= self.routed_experts_prompt_start <= prompt_length:
            raise ValueError(
                f"routed_experts_prompt_start must be between 0 and the prompt length ({prompt_length}), "
                f"not {self.routed_experts_prompt_start}"
            )


def _bounded(name: str, value: float, low: float, high: float) -> None:
    if not (math.isfinite(value) and low <= value <= high):
        raise ValueError(f"{name} must be in [{low:g}, {high:g}], not {value}")
