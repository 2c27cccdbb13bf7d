"""Typed client of one engine: vLLM's HTTP API.

Generation is ``POST /inference/v1/generate`` (token ids in and out); weight updates are the calls of vLLM's
RL router. Field names are vLLM's. Only used fields are decoded.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from functools import partial
from http import HTTPStatus
from typing import Any
from urllib.parse import quote, urlsplit

import aiohttp
import msgspec
import numpy as np
from numpy.typing import NDArray

from hpcrl.network.generate_frames import MEDIA_TYPE, REQUEST_TYPE, FrameSplitter, encode_frame
from hpcrl.network.routed_experts_reference import PATH as ROWS_PATH
from hpcrl.network.routed_experts_reference import RowsReference, digest_of
from hpcrl.rollouts.core.prompts import EncodedTokens, PromptTokens, binary_ids
from hpcrl.rollouts.engines.answers import (
    AnswerPart,
    AnswerReader,
    Generation,
    OnPart,
    SamplingParams,
)
from hpcrl.rollouts.engines.errors import EngineError, EngineProtocolError
from hpcrl.rollouts.engines.http import EngineHttp
from hpcrl.rollouts.engines.limits import AnswerLimits, check_logprobs
from hpcrl.rollouts.engines.rows import beside_loop, read_rows
from hpcrl.rollouts.engines.sse import EventSplitter, Pieces
from hpcrl.storage.msgspec_types import decode_json

__all__ = ["HEALTH_S", "EngineClient", "EngineError", "EngineProtocolError", "Generation", "SamplingParams"]

_log = logging.getLogger(__name__)

HEALTH_S = 5.0
"""Timeout in seconds of a question whether an engine is healthy."""
_FREEZE_S = 2.0
"""Timeout in seconds of a pause request, after which the engine is asked whether it is paused."""


class _Request(msgspec.Struct, frozen=True, kw_only=True):
    token_ids: list[int] | msgspec.Raw | bytes
    sampling_params: SamplingParams
    cache_salt: str
    stream: bool | msgspec.UnsetType = msgspec.UNSET
    rows_by_reference: bool | msgspec.UnsetType = msgspec.UNSET
    rows_unwanted: bool | msgspec.UnsetType = msgspec.UNSET


class _Paused(msgspec.Struct, frozen=True):
    is_paused: bool = False


class _WeightInfo(msgspec.Struct, frozen=True):
    weight_version: str | None = None


class _Score(msgspec.Struct, frozen=True):
    logprob: float


class _PromptAnswer(msgspec.Struct, frozen=True):
    prompt_logprobs: list[dict[str, _Score] | None] | None = None


_GENERATE = "/inference/v1/generate"
_ROWS_S = 60.0
"""Timeout in seconds for the rows of one answer, which have up to 79 MB."""
_PROMPT_ROWS_BYTES = 1 << 30
"""Maximum size in bytes of the rows that an engine has kept for one request; engines keep no more for all requests."""
_LONGEST_NAME = 256
"""Maximum length of a name of rows, which becomes part of a URL."""
_encoder = msgspec.json.Encoder()


class EngineClient(EngineHttp):
    """Calls of one engine. Every call has a time limit; failures are `EngineError`."""

    accepts: str = f"{MEDIA_TYPE}, application/json, text/event-stream"
    """Forms of an answer, the ``Accept`` of a request."""
    alone_reads_requests = True
    """Whether only the engine reads requests: an engine that has answered in frames accepts requests in frames, too."""

    limits = AnswerLimits()
    """Limits of its answers."""

    def __init__(
        self, session: aiohttp.ClientSession, *, name: str, url: str, limits: AnswerLimits | None = None
    ) -> None:
        """Remember where the engine is; nothing is sent.

        Parameters
        ----------
        session:
            Shared by all engines; closed by its owner.
        name:
            ``engine-<replica>``, for messages.
        url:
            ``http://host:port``.
        limits:
            Limits of its model; None: only those that apply to every model.
        """
        super().__init__(session, name=name, url=url)
        self.limits = limits or self.limits
        self._binary = False

    @property
    def servers(self) -> tuple[EngineClient, ...]:
        """Return the servers that accept requests, in the order of ranks; an engine of one rank is its own server."""
        return (self,)

    def server_at(self, address: str) -> EngineClient | None:
        """Return the server of this client at the address ``host:port``; None where there is none."""
        return next((s for s in self.servers if urlsplit(s.url).netloc.lower() == address.lower()), None)

    async def generate(
        self,
        token_ids: PromptTokens,
        params: SamplingParams,
        *,
        cache_salt: str,
        session_id: str,
        timeout_s: float,
        on_part: OnPart = lambda tokens, logprobs, experts: None,
        rows: bool = True,
    ) -> Generation:
        """Continue ``token_ids``. Cancelling the call closes the connection, and the engine aborts the request.

        Parameters
        ----------
        rows:
            Whether rows of experts are wanted where ``params`` ask for them.
        timeout_s:
            Longest time without an answer, or without the next part of it.
        on_part:
            Called with what arrives before the end, where ``params`` ask for parts.

        Raises
        ------
        EngineError
            No answer, or an error.
        EngineProtocolError
            An answer that training cannot use.
        """
        streams = params.stream_interval is not msgspec.UNSET
        content_type, body = self._encoded(token_ids, params, cache_salt, streams=streams, rows=rows)
        if not rows:  # nor looked for in the answer
            params = msgspec.structs.replace(params, routed_experts_prompt_start=msgspec.UNSET)
        headers, path = {"content-type": content_type, "accept": self.accepts, "x-session-id": session_id}, _GENERATE
        timeout = aiohttp.ClientTimeout(**{"sock_read" if streams else "total": timeout_s})
        reader = AnswerReader(self.name, len(token_ids), params, on_part, self.limits)
        max_bytes = self.limits.answer_bytes(tokens=params.max_tokens, rows=len(token_ids) + params.max_tokens)
        async with self._answer("POST", path, body, headers, timeout) as answer:
            framed = answer.content_type == MEDIA_TYPE
            self._binary |= framed and self.alone_reads_requests
            if answer.status != 200 or not (streams or framed):
                data = await self._body(path, answer, max_bytes)
                if answer.status != 200:
                    raise self._refusal(path, answer.status, data)
                part = await self._read(reader, data)
                reader.take(part)
                return await _generation(reader, part)
            # read to the end, so that the connection can be reused
            splitter = FrameSplitter(max_bytes) if framed else EventSplitter()
            async for piece in self._pieces(path, answer, max_bytes):
                for event in self._events(splitter, piece):
                    reader.take(await self._read(reader, event))
        if reader.last is None:
            # the parts that arrived are complete. The engine may be gone, or cut every answer: it is probed, and this
            # is counted
            raise EngineProtocolError(f"{self.name}: {path} ended before the answer did", unreachable=True)
        return await _generation(reader, reader.last)

    def _encoded(
        self, token_ids: PromptTokens, params: SamplingParams, cache_salt: str, *, streams: bool, rows: bool
    ) -> tuple[str, bytes | bytearray]:
        """Return the content type and the body of a generation request."""
        returned = params.routed_experts_prompt_start is not msgspec.UNSET
        request = _Request(
            token_ids=b"",
            sampling_params=params,
            cache_salt=cache_salt,
            stream=True if streams else msgspec.UNSET,
            rows_by_reference=True if returned else msgspec.UNSET,
            rows_unwanted=True if returned and not rows else msgspec.UNSET,
        )
        if self._binary:
            return REQUEST_TYPE, encode_frame(msgspec.structs.replace(request, token_ids=binary_ids(token_ids)))
        text = token_ids.raw if isinstance(token_ids, EncodedTokens) else token_ids
        return "application/json", _encoder.encode(msgspec.structs.replace(request, token_ids=text))

    async def prompt_logprobs(self, token_ids: list[int], *, cache_salt: str, timeout_s: float) -> list[float]:
        """Return the log-probability of each token of a prompt but the first, at temperature 1.

        Raises
        ------
        EngineError
            No answer, or an error.
        EngineProtocolError
            Something else came.
        """
        params = {"temperature": 1.0, "max_tokens": 1, "prompt_logprobs": 0}
        request = {"token_ids": token_ids, "sampling_params": params, "cache_salt": cache_salt}
        headers = {"content-type": "application/json"}
        body = _encoder.encode(request)
        data = await self._request("POST", _GENERATE, body=body, headers=headers, timeout_s=timeout_s)
        try:
            first, *rest = decode_json(data, _PromptAnswer).prompt_logprobs or []
            if first is not None:
                raise ValueError("the first token has a log-probability")
            found = [(scores or {})[str(token)].logprob for token, scores in zip(token_ids[1:], rest, strict=True)]
            check_logprobs(np.array(found, np.float64))
        except (ValueError, KeyError) as error:
            raise EngineProtocolError(f"{self.name}: log-probabilities of a prompt cannot be read: {error}") from error
        return found

    async def prompt_rows(self, request_id: str, *, timeout_s: float) -> NDArray[Any] | None:
        """Return the routed experts of a prompt that this engine computed for a request that another engine answers.

        Returns
        -------
        numpy.ndarray or None
            ``[rows, layers, experts_per_token]``, from the token on that the request asked for, to the end of its
            prompt; None where the engine has none. They are given once.

        Raises
        ------
        EngineError
            No answer, or an error.
        EngineProtocolError
            Something else came.
        """
        try:
            # the router may not have waited for that engine's answer
            data = await self._kept(f"{request_id}/0", "&late=1", max_bytes=_PROMPT_ROWS_BYTES, timeout_s=timeout_s)
            rows = None if data is None else read_rows(data)
            if rows is not None:
                await beside_loop(partial(self.limits.check_rows, rows), rows.nbytes)
        except ValueError as error:
            raise EngineProtocolError(f"{self.name}: routed experts of a prompt cannot be read: {error}") from error
        return rows

    async def kept_rows(self, kept: RowsReference, *, timeout_s: float) -> NDArray[Any]:
        """Return routed experts that this engine has kept, to which an answer refers by ``kept``.

        Raises
        ------
        EngineError
            It does not return these rows: it was restarted, or they were evicted or fetched already.
        """
        if not 0 <= kept.num_bytes <= _PROMPT_ROWS_BYTES or len(kept.name) > _LONGEST_NAME:
            raise EngineProtocolError(
                f"{self.name}: an answer names routed experts of {kept.num_bytes} bytes, which is not a valid size"
            )
        data = await self._kept(kept.name, "", max_bytes=kept.num_bytes, timeout_s=timeout_s)
        if data is None:
            raise EngineError(f"{self.name}: routed experts of an answer are gone")
        digest = await beside_loop(partial(digest_of, data), len(data))
        if len(data) != kept.num_bytes or digest != kept.digest:
            what = f"{len(data)} bytes ({digest}) where {kept.num_bytes} ({kept.digest}) were kept"
            raise EngineError(f"{self.name}: routed experts of an answer have changed: {what}")
        try:
            return read_rows(data)
        except ValueError as error:
            raise EngineError(f"{self.name}: routed experts of an answer cannot be read: {error}") from error

    async def _kept(self, name: str, more: str, *, max_bytes: int, timeout_s: float) -> bytes | None:
        """Return the routed experts that the engine keeps under ``name``; None where it has none."""
        path = f"{ROWS_PATH}?name={quote(name, safe='')}{more}"
        try:
            return await self._request("GET", path, max_bytes=max_bytes, timeout_s=timeout_s)
        except EngineError as error:
            if error.status == HTTPStatus.NOT_FOUND:
                return None
            raise

    async def healthy(self, *, timeout_s: float) -> bool:
        """Return whether ``GET /health`` answers 200."""
        return await self.problem(timeout_s=timeout_s) is None

    async def problem(self, *, timeout_s: float) -> EngineError | None:
        """Return the error of ``GET /health``; None where it answered 200."""
        try:
            await self._request("GET", "/health", timeout_s=timeout_s)
        except EngineError as error:
            return error
        return None

    async def weight_version(self, *, timeout_s: float) -> str | None:
        """Return the label of the weights that the engine serves now; None where it reports none."""
        try:
            data = await self._request("GET", "/weight_info", timeout_s=timeout_s)
            label: str | None = decode_json(data, _WeightInfo).weight_version
        except (EngineError, msgspec.DecodeError):
            return None
        return label

    async def weight_labels(self, *, timeout_s: float) -> list[str | None]:
        """Return the label of the weights of each server; None for a server that reports none."""
        return [await self.weight_version(timeout_s=timeout_s)]

    async def is_paused(self, *, timeout_s: float) -> bool:
        """Return whether the engine reports that requests are frozen; False where it does not answer."""
        try:
            data = await self._request("GET", "/is_paused", timeout_s=timeout_s)
            return bool(decode_json(data, _Paused).is_paused)
        except (EngineError, msgspec.DecodeError):
            return False

    async def freeze(self, *, timeout_s: float) -> asyncio.Task[Any] | None:
        """Freeze requests, keeping them and their KV; the call that does it, where it has not been answered yet.

        vLLM stops at once, but does not say so before KV of ended requests has been fetched by others. A prefill engine
        may wait for minutes for a decode engine whose request was cancelled meanwhile. Whether it stands is asked then.
        """
        # by default vLLM clears its cache here, which recomputes the KV of requests in flight
        call = asyncio.create_task(self.control("/pause?mode=keep&clear_cache=false", timeout_s=timeout_s))
        try:
            while not (await asyncio.wait([call], timeout=_FREEZE_S))[0]:
                if await self.is_paused(timeout_s=_FREEZE_S):
                    return call
            await call
        except BaseException:
            call.cancel()
            raise
        return None

    async def control(self, path: str, value: dict[str, Any] | None = None, *, timeout_s: float) -> dict[str, Any]:
        """``POST`` a control call; return the answer where it is an object (EngineError unless status 200)."""
        body = _encoder.encode(value or {})
        headers = {"content-type": "application/json"}
        data = await self._request("POST", path, body=body, headers=headers, timeout_s=timeout_s)
        try:
            answer = decode_json(data)
        except msgspec.DecodeError:
            return {}
        return answer if isinstance(answer, dict) else {}

    def _events(self, splitter: FrameSplitter | EventSplitter, piece: bytes) -> Iterable[bytes | Pieces | memoryview]:
        try:
            return splitter.feed(piece)
        except ValueError as error:
            raise EngineProtocolError(f"{self.name}: an answer cannot be read: {error}") from error

    async def _read(self, reader: AnswerReader, data: bytes | Pieces | memoryview) -> AnswerPart:
        """Decode a part of an answer, in a thread where that takes milliseconds, and fetch the rows that it refers to.

        Where rows cannot be fetched, the part still has their positions, so that they are not guessed. The next turn
        requests them again; otherwise the trainer routes their tokens itself, and they are counted. Rows of later parts
        are not fetched.
        """
        part = await beside_loop(partial(reader.read, data), len(data))
        if part.kept is None or reader.lost:
            return part
        try:
            # the address is not one of the run's servers, and must not get the run's token
            server = self.server_at(part.kept.engine)
            if server is None:
                raise EngineError(
                    f"{self.name}: {part.kept.engine}, which has routed experts of an answer, is not an engine of this "
                    "run"
                )
            rows = await server.kept_rows(part.kept, timeout_s=_ROWS_S)
        except EngineError as error:
            _log.warning("routed experts of an answer are unknown: %s", error)
            return part
        return part._replace(rows=rows, kept=None)


async def _generation(reader: AnswerReader, last: AnswerPart) -> Generation:
    return await beside_loop(partial(reader.generation, last), reader.row_bytes)
