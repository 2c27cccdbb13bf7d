"""The orchestrator's side of one engine: vLLM's HTTP API, typed.

Generation is ``POST /inference/v1/generate`` (token ids in and out); weight updates are the calls of vLLM's
RL router. Field names are vLLM's. Only what we read is decoded.
"""

from __future__ import annotations

from typing import Any

import aiohttp
import msgspec

from hpcrl.errors import HpcrlError

__all__ = ["EngineClient", "EngineError", "EngineProtocolError", "Generation", "SamplingParams"]


class EngineError(Exception):
    """A request failed.

    Attributes
    ----------
    retryable:
        Whether it may work elsewhere or later. A request that the engine understood and refused will not.
    unreachable:
        Whether there was no answer at all.
    """

    def __init__(self, message: str, *, retryable: bool = True, unreachable: bool = False) -> None:
        super().__init__(message)
        self.retryable, self.unreachable = retryable, unreachable


class EngineProtocolError(HpcrlError):
    """An engine answers in a way that training cannot use: no version, no log-probabilities, wrong counts."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How to sample. All that shapes the distribution is said, so that no server-side default comes in.

    Attributes
    ----------
    temperature:
        0 is greedy.
    seed:
        In ``[0, 2**63)``.
    logprobs:
        1: the log-probability of the sampled token.
    """

    temperature: float
    max_tokens: int
    seed: int
    stop_token_ids: list[int]
    top_p: float = 1.0
    top_k: int = 0
    logprobs: int = 1


class _Request(msgspec.Struct, frozen=True, kw_only=True):
    token_ids: list[int]
    sampling_params: SamplingParams
    cache_salt: str


class _TokenLogprob(msgspec.Struct, frozen=True):
    logprob: float


class _Logprobs(msgspec.Struct, frozen=True):
    content: list[_TokenLogprob] | None = None


class _Span(msgspec.Struct, frozen=True):
    version: str
    start: int
    end: int


class _Choice(msgspec.Struct, frozen=True):
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    weight_versions: list[_Span] | None = None


class _Response(msgspec.Struct, frozen=True):
    choices: list[_Choice]


class Generation(msgspec.Struct, frozen=True):
    """Sampled tokens; all three lists have the same length.

    Attributes
    ----------
    finish_reason:
        ``stop`` (the last token is a stop token) or ``length``.
    """

    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    finish_reason: str


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(_Response)


class EngineClient:
    """Calls of one engine. Every call has a time limit; failures are `EngineError`."""

    def __init__(self, session: aiohttp.ClientSession, *, name: str, url: str) -> None:
        """Remember where the engine is; nothing is sent.

        Parameters
        ----------
        session:
            Shared by all engines; closed by its owner.
        name:
            ``engine-<replica>``, for messages.
        url:
            ``http://host:port``.
        """
        self.name, self.url = name, url.rstrip("/")
        self._session = session

    async def generate(
        self, token_ids: list[int], params: SamplingParams, *, cache_salt: str, session_id: str, timeout_s: float
    ) -> Generation:
        """Continue ``token_ids``. Cancelling the call closes the connection, and the engine aborts the request.

        Raises
        ------
        EngineError
            No answer, or an error.
        EngineProtocolError
            An answer that training cannot use.
        """
        body = _encoder.encode(_Request(token_ids=token_ids, sampling_params=params, cache_salt=cache_salt))
        headers = {"content-type": "application/json", "x-session-id": session_id}
        data = await self._request("POST", "/inference/v1/generate", body=body, headers=headers, timeout_s=timeout_s)
        return self._read_generation(data)

    async def healthy(self, *, timeout_s: float) -> bool:
        """Whether ``GET /health`` answers 200."""
        try:
            await self._request("GET", "/health", timeout_s=timeout_s)
        except EngineError:
            return False
        return True

    async def control(self, path: str, value: dict[str, Any] | None = None, *, timeout_s: float) -> None:
        """``POST`` a control call (`EngineError` where it does not answer 200)."""
        body = _encoder.encode(value or {})
        headers = {"content-type": "application/json"}
        await self._request("POST", path, body=body, headers=headers, timeout_s=timeout_s)

    async def _request(
        self,
        method: str,
        path: str,
        *,
        timeout_s: float,
        body: bytes | None = None,
        headers: dict[str, str] | None = None,
    ) -> bytes:
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with self._session.request(
                method, self.url + path, data=body, headers=headers, timeout=timeout
            ) as answer:
                data = await answer.read()
        except TimeoutError as error:
            raise EngineError(f"{self.name}: no answer to {path} within {timeout_s:g} s", unreachable=True) from error
        except (aiohttp.ClientError, OSError) as error:
            what = str(error) or type(error).__name__
            raise EngineError(f"{self.name}: {path} failed: {what}", unreachable=True) from error
        if answer.status != 200:
            text = data[:500].decode(errors="replace").strip()
            # 429 and 5xx may pass; other refusals are about the request itself
            retryable = answer.status == 429 or answer.status >= 500
            raise EngineError(f"{self.name}: {path} answered {answer.status}: {text}", retryable=retryable)
        return data

    def _read_generation(self, data: bytes) -> Generation:
        try:
            (choice,) = _decoder.decode(data).choices
        except (msgspec.DecodeError, ValueError) as error:
            raise EngineProtocolError(f"{self.name}: an answer cannot be read: {error}") from error
        if choice.finish_reason not in ("stop", "length"):
            raise EngineError(f"{self.name}: the engine ended a request with {choice.finish_reason!r}")
        token_ids = choice.token_ids or []
        content = (choice.logprobs.content if choice.logprobs else None) or []
        if not token_ids or len(content) != len(token_ids):
            what = f"{len(token_ids)} tokens with {len(content)} log-probabilities"
            raise EngineProtocolError(f"{self.name}: an answer has {what}")
        return Generation(
            token_ids=token_ids,
            logprobs=[token.logprob for token in content],
            versions=self._read_versions(choice.weight_versions or [], len(token_ids)),
            finish_reason=choice.finish_reason,
        )

    def _read_versions(self, spans: list[_Span], count: int) -> list[int]:
        versions: list[int] = []
        for span in spans:
            if span.start != len(versions) or not span.version.isdecimal():
                break
            versions += [int(span.version)] * (span.end - span.start)
        if len(versions) != count:
            raise EngineProtocolError(f"{self.name}: version spans {spans} do not cover {count} tokens")
        return versions
