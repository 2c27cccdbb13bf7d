"""Requests as they are sent. Names, types and defaults are vLLM's; unknown fields are ignored as there.

A field that vLLM knows and this engine does not is declared all the same, so that a request which needs it is
refused and never answered as if the field had not been there.
"""

from __future__ import annotations

from typing import Any, TypeVar, cast

import msgspec
import numpy as np
from aiohttp import web

from hpcrl.inference.embedded.serving.errors import bad_request
from hpcrl.network.generate_frames import REQUEST_TYPE, only_frame
from hpcrl.storage.msgspec_types import decode_json, decode_msgpack

S = TypeVar("S", bound=msgspec.Struct)
_MAX_SALT = 128


class StreamOptions(msgspec.Struct, kw_only=True):
    """Additional content of a stream besides tokens."""

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class _Common(msgspec.Struct, kw_only=True):
    """Sampling fields that all three kinds of request have."""

    n: int = 1
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    min_tokens: int = 0
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    routed_experts_prompt_start: int = 0
    # known to vLLM, not to this engine
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    logprob_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    structured_outputs: dict[str, Any] | None = None
    repetition_detection: dict[str, Any] | None = None
    thinking_token_budget: int | None = None


class WireSampling(_Common, kw_only=True):
    """``sampling_params`` of ``/inference/v1/generate``."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int | msgspec.UnsetType | None = msgspec.UNSET
    logprobs: int | None = None
    detokenize: bool = True
    stream_interval: int | None = None
    trace_decode_token_ids: list[int] | None = None
    prompt_logprob_token_ids: list[list[int]] | None = None


class KvTransferParams(msgspec.Struct, kw_only=True):
    """Source and destination of a prompt's KV; names are those of vLLM's connector for NIXL.

    Attributes
    ----------
    do_remote_decode:
        Whether another engine continues from this prompt: the answer then says where its KV is.
    do_remote_prefill, remote_host, remote_port:
        Whether another engine, which listens there, has computed it: these fields are copied from its answer.
    """

    do_remote_decode: bool = False
    do_remote_prefill: bool = False
    remote_host: str | None = None
    remote_port: int | None = None

    @property
    def prefill(self) -> tuple[str, int] | None:
        """Return host and port of the engine that has the KV; None if there is none."""
        if not self.do_remote_prefill or self.remote_host is None or self.remote_port is None:
            return None
        return self.remote_host, self.remote_port


class GenerateRequest(msgspec.Struct, kw_only=True):
    """``/inference/v1/generate``: token ids in, token ids out."""

    token_ids: list[int]
    sampling_params: WireSampling
    model: str | None = None
    request_id: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    priority: int = 0
    return_token_ids: bool | None = None
    kv_transfer_params: KvTransferParams | None = None
    # whether rows of experts stay here until they are fetched (`hpcrl.network.routed_experts_reference`)
    rows_by_reference: bool = False
    rows_unwanted: bool = False
    # known to vLLM, not to this engine
    output_mode: str = "tokens"
    features: dict[str, Any] | None = None
    content_parts: list[dict[str, Any]] | None = None
    ec_transfer_params: dict[str, Any] | None = None


class _FramedRequest(GenerateRequest, kw_only=True):
    """The same as `hpcrl.network.generate_frames` has it."""

    token_ids: memoryview  # type: ignore[assignment]


class OpenAIRequest(_Common, kw_only=True):
    """Common fields of the two text endpoints. None means the model's default."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_tokens: int | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    priority: int = 0
    request_id: str | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    user: str | None = None
    # known to vLLM, not to this engine
    use_beam_search: bool = False
    response_format: dict[str, Any] | None = None
    kv_transfer_params: dict[str, Any] | None = None
    ec_transfer_params: dict[str, Any] | None = None
    truncate_prompt_tokens: int | None = None


class CompletionRequest(OpenAIRequest, kw_only=True):
    """The body of ``/v1/completions``."""

    prompt: str | list[int | str | list[int]] | None = None
    logprobs: int | None = None
    echo: bool | None = False
    suffix: str | None = None
    prompt_embeds: str | list[str] | None = None


class ChatRequest(OpenAIRequest, kw_only=True):
    """The body of ``/v1/chat/completions``."""

    messages: list[dict[str, Any]]
    logprobs: bool | None = False
    top_logprobs: int | None = 0
    max_completion_tokens: int | None = None
    add_generation_prompt: bool = True
    # known to vLLM, not to this engine
    continue_final_message: bool = False
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    functions: list[dict[str, Any]] | None = None
    function_call: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


#: fields that this engine does not serve, and their values that request nothing
_UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "presence_penalty": (None, 0.0),
    "frequency_penalty": (None, 0.0),
    "repetition_penalty": (None, 1.0),
    "logit_bias": (None, {}),
    "allowed_token_ids": (None, []),
    "logprob_token_ids": (None, []),
    "bad_words": (None, []),
    "structured_outputs": (None, {}),
    "repetition_detection": (None,),
    "thinking_token_budget": (None, -1),
    "trace_decode_token_ids": (None,),
    "prompt_logprob_token_ids": (None,),
    "output_mode": ("tokens",),
    "features": (None,),
    "content_parts": (None, []),
    "kv_transfer_params": (None,),
    "ec_transfer_params": (None,),
    "use_beam_search": (False,),
    "response_format": (None, {"type": "text"}),
    "truncate_prompt_tokens": (None,),
    "echo": (None, False),
    "suffix": (None, ""),
    "prompt_embeds": (None, []),
    "continue_final_message": (False,),
    "tools": (None, []),
    "tool_choice": (None, "none"),
    "functions": (None, []),
    "function_call": (None, "none"),
    "parallel_tool_calls": (None, True),
    "reasoning_effort": (None,),
    "chat_template": (None,),
    "chat_template_kwargs": (None, {}),
}


def refuse_unsupported(request: msgspec.Struct) -> None:
    """Refuse a request that asks, at any depth, for something this engine does not do, or for numbers without end.

    Raises
    ------
    ApiError
        400, naming the field.
    """
    for name in request.__struct_fields__:
        value, neutral = getattr(request, name), _UNSUPPORTED.get(name)
        if isinstance(value, int) and abs(value) >= 2**64:
            # Python's integers are unbounded, those of numpy and torch are not
            raise bad_request(f"{name} does not fit 64 bits", name)
        if isinstance(value, msgspec.Struct):
            refuse_unsupported(value)
        elif neutral is not None and value not in neutral:
            raise bad_request(f"{name} is not supported by the embedded engine", name)


async def parse(http: web.Request, kind: type[S]) -> S:
    """Read a body: JSON, or of a `GenerateRequest` a frame.

    Raises
    ------
    ApiError
        400: the body is invalid, or a field is missing or of another type (the message has its path).
    """
    if http.content_type == REQUEST_TYPE and issubclass(kind, GenerateRequest):
        framed = _read_frame(await http.read())
        refuse_unsupported(framed)
        return cast(S, framed)
    if http.content_type != "application/json":
        raise bad_request("the request's content type must be application/json")
    try:
        request: S = decode_json(await http.read(), kind)
    except msgspec.DecodeError as error:
        raise bad_request(str(error)) from error
    refuse_unsupported(request)
    return request


def _read_frame(body: bytes) -> GenerateRequest:
    try:
        framed = decode_msgpack(only_frame(body), _FramedRequest)
        token_ids = np.frombuffer(framed.token_ids, "<i4").tolist()
    except (msgspec.DecodeError, ValueError) as error:
        raise bad_request(f"the frame of a request cannot be read: {error}") from error
    return GenerateRequest(**{**msgspec.structs.asdict(framed), "token_ids": token_ids})


def check_cache_salt(salt: str | None) -> None:
    """Refuse salts that vLLM refuses.

    Raises
    ------
    ApiError
        400: empty, longer than 128 characters, or with characters that stores use in keys.
    """
    if salt is None:
        return
    if not salt:
        raise bad_request("cache_salt must not be empty; leave it out for none", "cache_salt")
    if len(salt) > _MAX_SALT or any(character in salt for character in "@/\\\0"):
        raise bad_request(
            f"cache_salt must be at most {_MAX_SALT} characters without '@', '/', '\\' and NUL", "cache_salt"
        )
