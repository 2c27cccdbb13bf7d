"""Between HTTP and the engine: sampling parameters, sequences of one call, their text and their end."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from aiohttp import web

from hpcrl.inference.embedded.engine.engine import Engine
from hpcrl.inference.embedded.engine.params import SamplingParams
from hpcrl.inference.embedded.engine.request import EngineRequest, Output, TopLogprobs, VersionSpan
from hpcrl.inference.embedded.kv.fetching import KvFetcher
from hpcrl.inference.embedded.serving.errors import ApiError, bad_request
from hpcrl.inference.embedded.serving.text import TextStream
from hpcrl.models.tokenizer import ChatTokenizer

#: sequences one prompt may ask for, as in vLLM
MAX_CHOICES = 16384


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """Facts about the served model that request handlers need.

    Attributes
    ----------
    names:
        Names it is served under; answers carry the first.
    root:
        Directory it was loaded from.
    eos_token_id, further_eos_token_ids:
        The first ends a sequence without a ``stop_reason``, the others with one.
    default_temperature, default_top_p, default_top_k, default_min_p:
        Defaults of requests (from ``generation_config.json``), for text endpoints only.
    max_logprobs:
        Maximum candidates that a request may ask for; -1 for all.
    prompt_tokens_details:
        Whether usage reports how much of the prompt was cached.
    priority_scheduling:
        Whether the priority of a request counts.
    """

    names: tuple[str, ...]
    root: str
    eos_token_id: int | None
    further_eos_token_ids: frozenset[int] = frozenset()
    default_temperature: float = 1.0
    default_top_p: float = 1.0
    default_top_k: int = 0
    default_min_p: float = 0.0
    max_logprobs: int = 20
    prompt_tokens_details: bool = False
    priority_scheduling: bool = False
    created: int = field(default_factory=lambda: int(time.time()))


@dataclass(frozen=True, slots=True, kw_only=True)
class CallPrompt:
    """One prompt of a call and the name its sequences are aborted by."""

    request_id: str
    token_ids: list[int]


class CallSequences:
    """The sequences of one call, prompts times ``n``, in order."""

    def __init__(self) -> None:
        self.requests: list[EngineRequest] = []
        self._texts: list[TextStream | None] = []
        self._queue: asyncio.Queue[tuple[int, Output]] = asyncio.Queue()
        self._cut: dict[int, int] = {}
        self.abort: Callable[[list[EngineRequest]], object] = lambda _: None

    def add(self, request: EngineRequest, text: TextStream | None) -> None:
        """Add a sequence; ``text`` where its text is wanted."""
        self.requests.append(request)
        self._texts.append(text)

    def receiver(self, index: int) -> Callable[[Output], None]:
        """Return the callback to which sequence ``index`` reports."""
        return lambda output: self._queue.put_nowait((index, output))

    async def outputs(self) -> AsyncIterator[tuple[int, Output]]:
        """Yield outputs of all sequences as they arrive, each with its index, until all have ended.

        Raises
        ------
        ApiError
            500: the engine could not continue one of them.
        """
        open_sequences = len(self.requests)
        while open_sequences:
            index, output = await self._queue.get()
            if output.error is not None:
                raise ApiError(500, output.error, kind="InternalServerError")
            if self._shape(index, output):
                yield index, output
                open_sequences -= output.finish_reason is not None

    async def final(self) -> list[Output]:
        """Return the whole of each sequence (ApiError as for `outputs`)."""
        whole: dict[int, Output] = {}
        async for index, output in self.outputs():
            if index in whole:
                _extend(whole[index], output)
            else:
                whole[index] = output
        return [whole[i] for i in range(len(self.requests))]

    def _shape(self, index: int, output: Output) -> bool:
        """Fill in text and apply stop strings; return False for an output that must not be sent."""
        text = self._texts[index]
        if text is None:
            return True
        if text.has_stopped():
            return self._after_stop(index, output, text)
        total = len(output.token_ids)
        taken = text.push(output.token_ids)
        if text.has_stopped():
            _cut(output, taken)
            self._cut[index] = self._cut.get(index, 0) + taken
            if output.finish_reason is None:
                # the model thread continues until it reads the abort; its last output has versions and routed experts
                self.abort([self.requests[index]])
            else:
                self._finish_cut(index, output, text)
        else:
            self._cut[index] = self._cut.get(index, 0) + total
        output.text = text.take(final=output.finish_reason is not None)
        return True

    def _after_stop(self, index: int, output: Output, text: TextStream) -> bool:
        if output.finish_reason is None:
            return False
        _cut(output, 0)
        self._finish_cut(index, output, text)
        return True

    def _finish_cut(self, index: int, output: Output, text: TextStream) -> None:
        kept = self._cut[index]
        output.finish_reason, output.stop_reason = "stop", text.stopped_by
        output.weight_versions = [
            VersionSpan(span.version, span.start, min(span.end, kept))
            for span in output.weight_versions
            if span.start < kept
        ]
        if output.routed_experts is not None:
            request = self.requests[index]
            rows = request.num_prompt + kept - 1 - request.params.routed_experts_prompt_start
            output.routed_experts = output.routed_experts[: max(0, rows)]


def _cut(output: Output, count: int) -> None:
    output.token_ids, output.logprobs = output.token_ids[:count], output.logprobs[:count]
    output.ranks, output.top = output.ranks[:count], output.top[:count]


def _extend(whole: Output, output: Output) -> None:
    whole.token_ids += output.token_ids
    whole.logprobs += output.logprobs
    whole.ranks += output.ranks
    whole.top += output.top
    whole.text += output.text
    whole.finish_reason, whole.stop_reason = output.finish_reason, output.stop_reason
    whole.weight_versions, whole.routed_experts = output.weight_versions, output.routed_experts
    whole.prompt_logprobs = output.prompt_logprobs


class Serving:
    """Common state and methods of all endpoints."""

    def __init__(
        self, engine: Engine, tokenizer: ChatTokenizer | None, facts: ServedModel, fetcher: KvFetcher | None = None
    ) -> None:
        """Prepare; without ``fetcher`` all prompts are computed here."""
        self.engine, self.facts, self._fetcher = engine, facts, fetcher
        self._tokenizer = tokenizer
        self._by_id: dict[str, set[EngineRequest]] = defaultdict(set)

    @property
    def tokenizer(self) -> ChatTokenizer:
        """Return the model's tokenizer.

        Raises
        ------
        ApiError
            400: the model directory has none, so only token ids can be served.
        """
        if self._tokenizer is None:
            raise bad_request("this model has no tokenizer and chat template: send token ids to /inference/v1/generate")
        return self._tokenizer

    def request_id(self, http: web.Request, given: str | None) -> str:
        """Return the caller's id (header first) or a new one."""
        return http.headers.get("X-Request-Id") or given or uuid.uuid4().hex

    def check_model(self, name: str | None) -> None:
        """Refuse another model's name.

        Raises
        ------
        ApiError
            404.
        """
        if name and name not in self.facts.names:
            raise ApiError(404, f"The model `{name}` does not exist.", kind="NotFoundError", param="model")

    def max_tokens(self, wanted: int | None, prompt_length: int) -> int:
        """Return the tokens that a sequence may get: the request's limit, or as many as fit. The context cuts both.

        Raises
        ------
        ApiError
            400: the prompt leaves no room.
        """
        limit = self.engine.config.max_model_len
        if prompt_length >= limit:
            raise bad_request(
                f"the prompt has {prompt_length} tokens, which leaves no room for output: "
                f"the maximum model length is {limit}",
                "prompt",
            )
        return limit - prompt_length if wanted is None else wanted

    def check_logprobs(self, name: str, count: int | None) -> None:
        """Refuse more candidates than ``--max-logprobs`` allows.

        Raises
        ------
        ApiError
            400.
        """
        vocab_size = self.engine.arch.vocab_size
        allowed = vocab_size if self.facts.max_logprobs == -1 else self.facts.max_logprobs
        if count is not None and (count < -1 or (vocab_size if count == -1 else count) > allowed):
            raise bad_request(f"{name} must be between 0 and {allowed}, or -1 for all where allowed, not {count}", name)

    def check_prompt(self, token_ids: list[int]) -> None:
        """Refuse prompts the model cannot read.

        Raises
        ------
        ApiError
            400: empty, or with ids outside of the vocabulary.
        """
        if not token_ids:
            raise bad_request("the prompt must not be empty", "prompt")
        vocab_size = self.engine.arch.vocab_size
        if min(token_ids) < 0 or max(token_ids) >= vocab_size:
            worst = next(t for t in token_ids if not 0 <= t < vocab_size)
            raise bad_request(f"token id {worst} is out of vocabulary: it has {vocab_size} tokens", "prompt")

    @contextlib.asynccontextmanager
    async def generate(
        self,
        prompts: list[CallPrompt],
        params: SamplingParams | list[SamplingParams],
        *,
        n: int,
        stream: bool,
        cache_salt: str | None,
        priority: int,
        make_text: Callable[[], TextStream | None],
        has_stop_strings: bool = False,
        stream_interval: int = 1,
        experts_in_parts: bool = False,
        prefill: tuple[str, int] | None = None,
    ) -> AsyncIterator[CallSequences]:
        """Run sequences; those that have not ended when the context is left (a client went away) are aborted.

        Parameters
        ----------
        prefill:
            Host and port of the engine that has computed the one prompt.

        Raises
        ------
        ApiError
            400: parameters are out of bounds; 503: the engine has failed.
        """
        if self.engine.failure is not None:
            raise ApiError(503, f"the engine has failed: {self.engine.failure}", kind="ServiceUnavailableError")
        if not 1 <= n <= MAX_CHOICES:
            raise bad_request(f"n must be between 1 and {MAX_CHOICES}, not {n}", "n")
        if n * len(prompts) > MAX_CHOICES:
            raise bad_request(f"a request may ask for {MAX_CHOICES} sequences, not {n * len(prompts)}", "n")
        per_prompt = params if isinstance(params, list) else [params] * len(prompts)
        generation = CallSequences()
        for prompt, one in zip(prompts, per_prompt, strict=True):
            self.check_prompt(prompt.token_ids)
            if n > 1 and one.greedy:
                raise bad_request(f"n must be 1 when sampling greedily, not {n}", "n")
            try:
                one.check(vocab_size=self.engine.arch.vocab_size, prompt_length=len(prompt.token_ids))
            except ValueError as error:
                raise bad_request(str(error)) from error
            for i in range(n):
                request = EngineRequest(
                    prompt.request_id,
                    prompt.token_ids,
                    one.nth(i),
                    generation.receiver(len(generation.requests)),
                    cache_salt=cache_salt,
                    priority=priority if self.facts.priority_scheduling else 0,
                    stream=stream or has_stop_strings,
                    # stop strings are looked for after each token
                    stream_interval=1 if has_stop_strings else stream_interval,
                    # stop strings cut tokens that were reported
                    experts_in_parts=experts_in_parts and not has_stop_strings,
                )
                generation.add(request, make_text())
        if self._fetcher is not None:
            await self._fetcher.fetch(generation.requests, prefill)
        generation.abort = self.engine.abort
        for request in generation.requests:
            self._by_id[request.request_id].add(request)
            self.engine.submit(request)
        try:
            yield generation
        finally:
            self._forget(generation.requests)
            unfinished = [request for request in generation.requests if not request.ended]
            if unfinished:
                self.engine.abort(unfinished)

    def find(self, request_ids: list[str]) -> list[EngineRequest]:
        """Return the sequences in flight with these ids."""
        return [request for name in request_ids for request in self._by_id.get(name, ())]

    def in_flight(self) -> list[EngineRequest]:
        """Return all sequences in flight."""
        return [request for group in self._by_id.values() for request in group]

    def _forget(self, requests: list[EngineRequest]) -> None:
        for request in requests:
            group = self._by_id.get(request.request_id)
            if group is not None:
                group.discard(request)
                if not group:
                    del self._by_id[request.request_id]


def candidates(output: Output, index: int, count: int) -> list[tuple[int, float, int]]:
    """Return ``(token id, log-probability, rank)`` of a position: the sampled token, then the likeliest others.

    Parameters
    ----------
    output, index:
        The position.
    count:
        Maximum number; -1 for all there are.
    """
    sampled = output.token_ids[index]
    entries = [(sampled, output.logprobs[index], output.ranks[index])]
    top = output.top[index] if output.top else TopLogprobs([], [])
    for rank, (token, logprob) in enumerate(zip(top.token_ids, top.logprobs, strict=True), start=1):
        if token != sampled:
            entries.append((token, logprob, rank))
    return entries if count == -1 else entries[:count]
