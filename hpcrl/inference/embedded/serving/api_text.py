"""``/v1/completions`` and ``/v1/chat/completions``, as OpenAI and vLLM shape them."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from hpcrl.inference.embedded.engine.params import SamplingParams
from hpcrl.inference.embedded.engine.request import Output
from hpcrl.inference.embedded.serving.api_common import (
    clamp,
    encode_as_text,
    json_response,
    prompt_logprobs_json,
    send_events,
    stop_strings,
    to_params,
    usage,
    wants_usage,
)
from hpcrl.inference.embedded.serving.errors import bad_request
from hpcrl.inference.embedded.serving.protocol import (
    ChatRequest,
    CompletionRequest,
    OpenAIRequest,
    check_cache_salt,
    parse,
)
from hpcrl.inference.embedded.serving.serving import CallPrompt, CallSequences, Serving, candidates
from hpcrl.inference.embedded.serving.text import TextStream
from hpcrl.models.chat_template import ChatTemplateError

_OF_TOOLS = ("tool_calls", "tool_call_id", "function_call")
"""Fields of messages that many chat templates do not read."""


@dataclass(frozen=True, slots=True)
class _Shape:
    """Format of an endpoint's answer.

    ``head`` takes the kind (``whole`` or ``chunk``), ``choice`` an index and an output; ``extra`` goes into the whole
    answer and the first chunk.
    """

    head: Callable[[str], dict[str, Any]]
    choice: Callable[[int, Output], dict[str, Any]]
    extra: dict[str, Any]


class TextApi:
    """Handlers of the text endpoints.

    What is asked wrongly is an `ApiError`, which `hpcrl.inference.embedded.serving.errors` answers.
    """

    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/v1/completions", self.completions),
            web.post("/v1/chat/completions", self.chat_completions),
        ]

    async def completions(self, http: web.Request) -> web.StreamResponse:
        """Continue prompts given as text or token ids."""
        request = await parse(http, CompletionRequest)
        self._check(request)
        prompts = self._prompts(request)
        wanted = 16 if request.max_tokens is None else request.max_tokens
        name = f"cmpl-{self._serving.request_id(http, request.request_id)}"
        n = max(1, request.n)

        def head(kind: str) -> dict[str, Any]:
            return self._head(name, kind, "text_completion")

        offsets: dict[int, int] = {}

        def choice(index: int, output: Output) -> dict[str, Any]:
            prompt = prompts[index // n]
            first = index not in offsets
            logprobs, offsets[index] = self._completion_logprobs(request, output, offsets.get(index, 0))
            entry: dict[str, Any] = {
                "index": index,
                "text": output.text,
                "logprobs": logprobs,
                "finish_reason": output.finish_reason,
                "stop_reason": output.stop_reason,
                "token_ids": output.token_ids if request.return_token_ids else None,
                "prompt_token_ids": prompt if request.return_token_ids and first else None,
            }
            if not request.stream:
                entry["prompt_logprobs"] = prompt_logprobs_json(prompt, output.prompt_logprobs)
                entry["routed_experts"] = encode_as_text(output.routed_experts)
            return entry

        named = [CallPrompt(request_id=f"{name}-{i}", token_ids=prompt) for i, prompt in enumerate(prompts)]
        params = [self._params(request, prompt, wanted, request.logprobs) for prompt in prompts]
        return await self._answer(http, request, named, params, _Shape(head, choice, {}))

    async def chat_completions(self, http: web.Request) -> web.StreamResponse:
        """Answer a conversation, rendered by the model's chat template."""
        request = await parse(http, ChatRequest)
        self._check(request)
        if request.top_logprobs and not request.logprobs:
            raise bad_request("top_logprobs needs logprobs to be true", "top_logprobs")
        prompt = self._render(request)
        count = (request.top_logprobs or 0) if request.logprobs else None
        wanted = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
        name = f"chatcmpl-{self._serving.request_id(http, request.request_id)}"

        def head(kind: str) -> dict[str, Any]:
            return self._head(name, kind, "chat.completion.chunk" if kind == "chunk" else "chat.completion")

        def choice(index: int, output: Output) -> dict[str, Any]:
            text: dict[str, Any] = {"content": output.text}
            if not request.stream:
                absent = ("refusal", "annotations", "audio", "function_call", "reasoning")
                text = {"role": "assistant", **text, **dict.fromkeys(absent)}
            entry: dict[str, Any] = {
                "index": index,
                "delta" if request.stream else "message": text,
                "logprobs": self._chat_logprobs(request, output),
                "finish_reason": output.finish_reason,
                "stop_reason": output.stop_reason,
                "token_ids": output.token_ids if request.return_token_ids else None,
            }
            if not request.stream:
                entry["routed_experts"] = encode_as_text(output.routed_experts)
            return entry

        extra = {"prompt_token_ids": prompt if request.return_token_ids else None}
        params = [self._params(request, prompt, wanted, count)]
        shape = _Shape(head, choice, extra)
        return await self._answer(http, request, [CallPrompt(request_id=name, token_ids=prompt)], params, shape)

    def _check(self, request: OpenAIRequest) -> None:
        check_cache_salt(request.cache_salt)
        self._serving.check_model(request.model)
        if request.stream and request.prompt_logprobs is not None:
            raise bad_request("prompt_logprobs are not available when stream is true", "prompt_logprobs")
        if request.stream_options is not None and not request.stream:
            raise bad_request("stream_options need stream to be true", "stream_options")

    def _params(
        self, request: OpenAIRequest, prompt: list[int], wanted: int | None, logprobs: int | None
    ) -> SamplingParams:
        self._serving.check_prompt(prompt)
        self._serving.check_logprobs("logprobs", logprobs)
        self._serving.check_logprobs("prompt_logprobs", request.prompt_logprobs)
        max_tokens = self._serving.max_tokens(wanted, len(prompt))
        return to_params(self._serving.facts, request, max_tokens=max_tokens, logprobs=logprobs)

    def _prompts(self, request: CompletionRequest) -> list[list[int]]:
        prompt = request.prompt
        if not prompt:
            raise bad_request("prompt must not be empty", "prompt")
        if isinstance(prompt, str):
            return [self._serving.tokenizer.encode(prompt)]
        token_ids = [one for one in prompt if isinstance(one, int)]
        if token_ids:
            if len(token_ids) != len(prompt):
                raise bad_request("prompt must be all token ids or all prompts", "prompt")
            return [token_ids]
        return [
            self._serving.tokenizer.encode(one) if isinstance(one, str) else one
            for one in prompt
            if not isinstance(one, int)
        ]

    def _render(self, request: ChatRequest) -> list[int]:
        messages = []
        for message in request.messages:
            self._check_template_reads(message)
            content = message.get("content")
            if isinstance(content, list):
                if any(not isinstance(part, dict) or part.get("type") != "text" for part in content):
                    raise bad_request("only text content is supported", "messages")
                content = "".join(str(part.get("text", "")) for part in content)
            content = "" if content is None else content
            if not isinstance(message.get("role"), str) or not isinstance(content, str):
                raise bad_request("each message needs a role, and its content must be text", "messages")
            messages.append({**message, "role": str(message["role"]), "content": content})
        if not messages:
            raise bad_request("messages must not be empty", "messages")
        prompt = request.add_generation_prompt
        try:
            return self._serving.tokenizer.render_ids(messages, add_generation_prompt=prompt)
        except ChatTemplateError as error:
            raise bad_request(str(error), "messages") from error

    def _check_template_reads(self, message: dict[str, Any]) -> None:
        """Refuse what the chat template would leave out, or would write as the name of an unknown role."""
        reads = self._serving.tokenizer.template_reads
        for name in _OF_TOOLS:
            # most templates that know calls tell their results by order, and read no id
            known = reads(name) or (name == "tool_call_id" and reads("tool_calls"))
            if message.get(name) not in (None, []) and not known:
                raise bad_request(f"the model's chat template does not read {name} of messages", "messages")
        if message.get("role") == "developer" and not reads("developer"):
            raise bad_request("the model's chat template does not know the role developer: use system", "messages")

    def _head(self, name: str, kind: str, what: str) -> dict[str, Any]:
        head: dict[str, Any] = {"id": name, "object": what, "created": int(time.time())}
        head["model"] = self._serving.facts.names[0]
        if kind == "whole":
            absent = ("service_tier", "system_fingerprint", "kv_transfer_params", "ec_transfer_params", "metrics")
            head |= dict.fromkeys(absent)
        return head

    async def _answer(
        self,
        http: web.Request,
        request: OpenAIRequest,
        prompts: list[CallPrompt],
        params: list[SamplingParams],
        shape: _Shape,
    ) -> web.StreamResponse:
        serving, stops = self._serving, stop_strings(request.stop)

        def make_text() -> TextStream:
            return TextStream(
                serving.tokenizer,
                stop=stops,
                include_stop=request.include_stop_str_in_output,
                min_tokens=request.min_tokens,
                skip_special_tokens=request.skip_special_tokens,
            )

        prompt_tokens = sum(len(prompt.token_ids) for prompt in prompts)
        async with serving.generate(
            prompts,
            params,
            n=request.n,
            stream=bool(request.stream),
            cache_salt=request.cache_salt,
            priority=request.priority,
            make_text=make_text,
            has_stop_strings=bool(stops),
        ) as generation:
            if request.stream:
                chunks = self._chunks(request, prompt_tokens, generation, shape)
                return await send_events(http, chunks)
            outputs = await generation.final()
            body = shape.head("whole") | shape.extra
            body["choices"] = [shape.choice(i, output) for i, output in enumerate(outputs)]
            body["usage"] = usage(serving.facts, prompt_tokens, outputs)
            if isinstance(request, ChatRequest):
                body["prompt_logprobs"] = prompt_logprobs_json(prompts[0].token_ids, outputs[0].prompt_logprobs)
            return json_response(body)

    async def _chunks(
        self,
        request: OpenAIRequest,
        prompt_tokens: int,
        generation: CallSequences,
        shape: _Shape,
    ) -> AsyncIterator[dict[str, Any]]:
        include_usage, continuous = wants_usage(request.stream_options)
        counted: list[Output] = []
        if isinstance(request, ChatRequest):
            # the role comes first, in a chunk of its own
            for index in range(len(generation.requests)):
                delta = {"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
                yield shape.head("chunk") | shape.extra | {"choices": [{**delta, "logprobs": None}]}
        async for index, output in generation.outputs():
            chunk = shape.head("chunk") | {"choices": [shape.choice(index, output)]}
            counted.append(Output(output.token_ids, [], [], [], num_cached_tokens=output.num_cached_tokens))
            if continuous:
                chunk["usage"] = usage(self._serving.facts, prompt_tokens, counted)
            yield chunk
        if include_usage:
            yield shape.head("chunk") | {"choices": [], "usage": usage(self._serving.facts, prompt_tokens, counted)}

    def _token_text(self, request: OpenAIRequest, token: int) -> str:
        if request.return_tokens_as_token_ids:
            return f"token_id:{token}"
        return self._serving.tokenizer.decode([token], skip_special_tokens=False)

    def _completion_logprobs(
        self, request: CompletionRequest, output: Output, offset: int
    ) -> tuple[dict[str, Any] | None, int]:
        """Return the four parallel lists of the completions API, and the text offset after them."""
        if request.logprobs is None:
            return None, offset
        limit = -1 if request.logprobs == -1 else request.logprobs + 1
        tokens: list[str] = []
        offsets: list[int] = []
        top: list[dict[str, float]] = []
        for i, token in enumerate(output.token_ids):
            tokens.append(self._token_text(request, token))
            offsets.append(offset)
            offset += len(tokens[-1])
            top.append({self._token_text(request, t): clamp(p) for t, p, _ in candidates(output, i, limit)})
        logprobs = {
            "text_offset": offsets,
            "token_logprobs": [clamp(p) for p in output.logprobs],
            "tokens": tokens,
            "top_logprobs": top,
        }
        return logprobs, offset

    def _chat_logprobs(self, request: ChatRequest, output: Output) -> dict[str, Any] | None:
        if not request.logprobs:
            return None
        content = []
        for i in range(len(output.token_ids)):
            entries = [self._chat_entry(request, token, logprob) for token, logprob, _ in candidates(output, i, -1)]
            content.append({**entries[0], "top_logprobs": entries[: request.top_logprobs or 0]})
        return {"content": content}

    def _chat_entry(self, request: ChatRequest, token: int, logprob: float) -> dict[str, Any]:
        text = self._token_text(request, token)
        return {"token": text, "logprob": clamp(logprob), "bytes": list(text.encode())}
