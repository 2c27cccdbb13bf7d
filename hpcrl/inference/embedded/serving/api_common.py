"""Pieces of answers that several endpoints share: usage, log-probability shapes, server-sent events."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import numpy as np
from aiohttp import web
from numpy.typing import NDArray

from hpcrl.inference.embedded.engine.params import SamplingParams
from hpcrl.inference.embedded.engine.request import Output, PromptLogprobs
from hpcrl.inference.embedded.serving.errors import ApiError, error_body
from hpcrl.inference.embedded.serving.protocol import OpenAIRequest, StreamOptions, WireSampling
from hpcrl.inference.embedded.serving.serving import ServedModel
from hpcrl.network.generate_frames import MEDIA_TYPE, encode_frame

#: JSON has no minus infinity; OpenAI's floor
_FLOOR = -9999.0


def clamp(logprob: float) -> float:
    """Return a log-probability in nats that JSON can hold: at least -9999.

    Raises
    ------
    ApiError
        500: it is not a number, which no floor makes one.
    """
    if math.isnan(logprob):
        raise ApiError(500, "the engine is broken: a log-probability is not a number", kind="InternalServerError")
    return logprob if logprob > _FLOOR else _FLOOR


def json_response(body: object) -> web.Response:
    """Return status 200 with a JSON body."""
    return web.Response(body=msgspec.json.encode(body), content_type="application/json")


def takes_frames(http: web.Request) -> bool:
    """Return whether the client reads `hpcrl.network.generate_frames`."""
    return MEDIA_TYPE in http.headers.get("accept", "")


def frame_response(body: object) -> web.Response:
    """Return status 200 with one frame."""
    return web.Response(body=encode_frame(body), content_type=MEDIA_TYPE)


def npy_bytes(array: NDArray[np.generic] | None) -> memoryview | None:
    """Return the array as the bytes of an ``.npy`` file; None for None.

    The array may have any shape and any dtype without objects.
    """
    if array is None:
        return None
    stream = io.BytesIO()
    np.save(stream, array, allow_pickle=False)
    return stream.getbuffer()


def encode_as_text(array: NDArray[np.generic] | None) -> str | None:
    """Return the array, of any shape, as an ``.npy`` file in base64; None for None."""
    data = npy_bytes(array)
    return None if data is None else base64.b64encode(data).decode()


def usage(facts: ServedModel, prompt_tokens: int, outputs: list[Output]) -> dict[str, Any]:
    """Make the ``usage`` field of an answer."""
    completion = sum(len(output.token_ids) for output in outputs)
    details = None
    if facts.prompt_tokens_details and outputs:
        cached = outputs[0].num_cached_tokens
        details = {"cached_tokens": cached, "created_cache_tokens": None, "multimodal_tokens": None}
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion,
        "completion_tokens": completion,
        "prompt_tokens_details": details,
        "completion_tokens_details": None,
    }


def wants_usage(options: StreamOptions | None) -> tuple[bool, bool]:
    """Return whether a stream ends with usage, and whether each chunk carries it."""
    if options is None or not options.include_usage:
        return False, False
    return True, bool(options.continuous_usage_stats)


def stop_strings(stop: str | list[str] | None) -> list[str]:
    """Return the ``stop`` field as a list.

    Raises
    ------
    ValueError
        One of them is empty.
    """
    strings = [stop] if isinstance(stop, str) else list(stop or ())
    if any(not s for s in strings):
        raise ValueError("stop cannot contain an empty string")
    return strings


def to_params(
    facts: ServedModel, request: WireSampling | OpenAIRequest, *, max_tokens: int, logprobs: int | None
) -> SamplingParams:
    """Return the sampling parameters of a request, with the defaults of its endpoint.

    Parameters
    ----------
    facts:
        End-of-sequence tokens and defaults of the model.
    request:
        Request; None in a field means its default.
    max_tokens:
        Limit after resolution against the model's length.
    logprobs:
        Number of candidates to report.
    """
    stop_token_ids = frozenset(request.stop_token_ids or ())
    end = facts.further_eos_token_ids | ({facts.eos_token_id} if facts.eos_token_id is not None else frozenset())
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=request.min_tokens,
        temperature=facts.default_temperature if request.temperature is None else request.temperature,
        top_p=facts.default_top_p if request.top_p is None else request.top_p,
        top_k=facts.default_top_k if request.top_k is None else request.top_k,
        min_p=facts.default_min_p if request.min_p is None else request.min_p,
        # -1 is "no seed", as in vLLM
        seed=None if request.seed == -1 else request.seed,
        eos_token_id=None if request.ignore_eos else facts.eos_token_id,
        stop_token_ids=stop_token_ids if request.ignore_eos else stop_token_ids | facts.further_eos_token_ids,
        suppressed_token_ids=stop_token_ids | end if request.min_tokens else frozenset(),
        logprobs=logprobs,
        prompt_logprobs=request.prompt_logprobs,
        routed_experts_prompt_start=request.routed_experts_prompt_start,
    )


def prompt_logprobs_json(
    token_ids: list[int], scores: list[PromptLogprobs] | None
) -> list[dict[str, dict[str, Any]] | None] | None:
    """Return ``prompt_logprobs``: None for the first token, then a map from token id for each."""
    if scores is None:
        return None
    entries: list[dict[str, dict[str, Any]] | None] = [None]
    for token, score in zip(token_ids[1:], scores, strict=False):
        entry = {str(token): {"logprob": clamp(score.logprob), "rank": score.rank, "decoded_token": None}}
        for rank, (other, logprob) in enumerate(zip(score.top.token_ids, score.top.logprobs, strict=True), start=1):
            entry.setdefault(str(other), {"logprob": clamp(logprob), "rank": rank, "decoded_token": None})
        entries.append(entry)
    return entries


async def send_frames(http: web.Request, chunks: AsyncIterator[dict[str, Any]]) -> web.StreamResponse:
    """Answer with a frame for each event. An error on the way becomes one."""
    response = web.StreamResponse(headers={"Content-Type": MEDIA_TYPE})
    await response.prepare(http)
    try:
        async for chunk in chunks:
            await response.write(encode_frame(chunk))
    except ApiError as error:
        await response.write(encode_frame(msgspec.json.decode(error_body(error))))
    await response.write_eof()
    return response


async def send_events(http: web.Request, chunks: AsyncIterator[dict[str, Any]]) -> web.StreamResponse:
    """Answer with server-sent events, ended by ``[DONE]``. An error on the way becomes an event."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    await response.prepare(http)
    try:
        async for chunk in chunks:
            await response.write(b"data: " + msgspec.json.encode(chunk) + b"\n\n")
    except ApiError as error:
        await response.write(b"data: " + error_body(error) + b"\n\n")
    await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response
