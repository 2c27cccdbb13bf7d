"""One sequence in the engine, from submission to its last output."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hpcrl.inference.embedded.engine.blocks import block_hash, root_hash
from hpcrl.inference.embedded.engine.params import SamplingParams


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Output tokens ``[start, end)`` were sampled under the weights labelled ``version``."""

    version: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class TopLogprobs:
    """The most likely tokens at one position, most likely first."""

    token_ids: list[int]
    logprobs: list[float]


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log-probability and rank of one prompt token, and the most likely tokens at its position."""

    logprob: float
    rank: int
    top: TopLogprobs


@dataclass(slots=True)
class Output:
    """New part of a sequence since the last output, or all of it if it is not streamed.

    Attributes
    ----------
    token_ids, logprobs, ranks, top:
        Parallel lists, one entry per generated token; ``top`` is empty if no candidates were requested.
    finish_reason:
        ``stop``, ``length``, ``abort`` or ``error`` with the last output, else None.
    stop_reason:
        The stop token or stop string that ended it; None for end of sequence.
    text:
        Text of the tokens, if the HTTP side made it.
    weight_versions, prompt_logprobs:
        With the last output only.
    routed_experts:
        ``[rows, layers, experts_per_token]``: rows that were not reported yet, of tokens that are computed. All
        outputs together have ``tokens - 1 - routed_experts_prompt_start`` of them.
    num_cached_tokens:
        Prompt tokens whose KV was found in the prefix cache, or came from another engine.
    error:
        Reason why the engine could not continue the sequence, with ``finish_reason`` ``error``; else None.
    """

    token_ids: list[int]
    logprobs: list[float]
    ranks: list[int]
    top: list[TopLogprobs]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    text: str = ""
    weight_versions: list[VersionSpan] = field(default_factory=list)
    routed_experts: NDArray[np.generic] | None = None
    prompt_logprobs: list[PromptLogprobs] | None = None
    num_cached_tokens: int = 0
    error: str | None = None


class EngineRequest:
    """One sequence; owned by the model thread after it was submitted.

    While it runs its tokens live in a row of `hpcrl.inference.embedded.engine.rows.Rows`; `tokens` holds them before
    that and between a preemption and the next start.
    """

    def __init__(
        self,
        request_id: str,
        prompt: list[int],
        params: SamplingParams,
        on_output: Callable[[Output], None],
        *,
        cache_salt: str | None = None,
        priority: int = 0,
        stream: bool = False,
        stream_interval: int = 1,
        experts_in_parts: bool = False,
    ) -> None:
        """Describe a sequence.

        Parameters
        ----------
        request_id:
            The name callers abort it by; not necessarily unique.
        prompt:
            Token ids, at least one.
        params:
            Checked sampling parameters.
        on_output:
            Called with each output, on the thread the engine's owner chose.
        cache_salt:
            Separates prefix caches.
        priority:
            Lower runs earlier.
        stream:
            Whether to report tokens as they come or the whole sequence at its end.
        stream_interval:
            Tokens from one report to the next, from the first token on.
        experts_in_parts:
            Whether reports on the way have the experts of their tokens; else all are in the last one.
        """
        self.request_id, self.params, self.on_output = request_id, params, on_output
        self.priority, self.stream_interval = priority, stream_interval if stream else 0
        self.num_prompt = len(prompt)
        self.tokens: NDArray[np.int32] = np.asarray(prompt, dtype=np.int32)
        self.logprobs: NDArray[np.float32] = np.zeros(0, np.float32)
        self.ranks: NDArray[np.int32] = np.zeros(0, np.int32)
        self.top: list[TopLogprobs] = []
        self.prompt_logprobs: list[PromptLogprobs] = []
        self.hashes: list[bytes] = []
        self._root, self.salted = root_hash(cache_salt), cache_salt is not None
        self.sequence_number = 0
        self.drawn_seed: int | None = None
        self.row: int | None = None
        self.num_reported = 0
        self.experts_in_parts = experts_in_parts
        self.experts_reported = params.routed_experts_prompt_start
        self.ended = False
        self.num_cached_tokens = self.num_fetched_tokens = 0
        #: blocks by hash that other engines computed, for the first start of the sequence
        self.fetched: Mapping[bytes, bytes] = {}
        self.num_preemptions = 0
        self.version_starts: list[tuple[str, int]] = []
        self.arrived_s = time.monotonic()
        self.started_s: float | None = None

    @property
    def sort_key(self) -> tuple[int, int]:
        """Return the order of service: priority, then arrival."""
        return self.priority, self.sequence_number

    def extend_hashes(self, tokens: NDArray[np.int32], block_size: int) -> None:
        """Hash the full blocks of ``tokens [T]`` int32, the first of the sequence, that are not hashed yet."""
        for i in range(len(self.hashes), len(tokens) // block_size):
            parent = self.hashes[-1] if self.hashes else self._root
            self.hashes.append(block_hash(parent, tokens[i * block_size : (i + 1) * block_size].tobytes()))

    def note_version(self, version: str, num_output: int) -> None:
        """Record that tokens from output token ``num_output`` on are sampled under ``version``."""
        if self.version_starts and self.version_starts[-1][1] == num_output:
            self.version_starts.pop()
        if not self.version_starts or self.version_starts[-1][0] != version:
            self.version_starts.append((version, num_output))

    def version_spans(self, num_output: int) -> list[VersionSpan]:
        """Return the spans that cover ``num_output`` generated tokens; empty if there are none."""
        if not num_output:
            return []
        starts = [(version, start) for version, start in self.version_starts if start < num_output]
        ends = [start for _, start in starts[1:]] + [num_output]
        return [VersionSpan(version, start, end) for (version, start), end in zip(starts, ends, strict=True)]
