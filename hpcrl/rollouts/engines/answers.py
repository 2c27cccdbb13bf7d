"""What comes back for a generation request, and what is wrong with it. Field names are vLLM's; only what we read is
decoded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from hpcrl.errors import HpcrlError
from hpcrl.rollouts.engines.rows import EncodedRows, Rows, join_rows, read_rows, rows_bytes
from hpcrl.rollouts.engines.sse import Pieces

__all__ = ["AnswerReader", "EngineError", "EngineProtocolError", "Generation", "OnPart", "Part", "SamplingParams"]

OnPart = Callable[[list[int], list[float], Rows | None], None]
"""Told of tokens, log-probabilities, and rows of experts where these come in parts, too."""


class EngineError(Exception):
    """An engine did not answer a request, or answered with an error.

    Attributes
    ----------
    retryable:
        Whether it may work elsewhere or later. A request that the engine understood and refused will not.
    unreachable:
        Whether there was no answer at all.
    refused:
        Whether nobody listens there: the process is gone, or not ready yet.
    forgot:
        Whether the engine answered with weights that it was not given by us: it was started anew.
    timed_out:
        Whether the time for an answer ran out: the engine may live, and hang.
    status:
        Of the answer; None where there was none.
    """

    def __init__(
        self,
        message: str,
        *,
        retryable: bool = True,
        unreachable: bool = False,
        refused: bool = False,
        forgot: bool = False,
        timed_out: bool = False,
        status: int | None = None,
    ) -> None:
        super().__init__(message)
        self.timed_out, self.status = timed_out, status
        self.retryable, self.unreachable, self.refused, self.forgot = retryable, unreachable, refused, forgot


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
    stream_interval:
        The answer comes in parts of so many tokens (the first has one); not set: as a whole.
    routed_experts_prompt_start:
        First prompt token whose experts are wanted; not set: none are.
    """

    temperature: float
    max_tokens: int
    seed: int
    stop_token_ids: list[int]
    top_p: float = 1.0
    top_k: int = 0
    logprobs: int = 1
    stream_interval: int | msgspec.UnsetType = msgspec.UNSET
    routed_experts_prompt_start: int | msgspec.UnsetType = msgspec.UNSET


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
    routed_experts: msgspec.Raw = msgspec.Raw()  # base64 in JSON, skipped by the decoder


class _Event(msgspec.Struct, frozen=True):
    request_id: str = ""
    choices: list[_Choice] = []
    error: Any = None


class _FramedChoice(msgspec.Struct, frozen=True):
    finish_reason: str | None = None
    token_ids: memoryview | None = None
    logprobs: memoryview | None = None
    weight_versions: list[_Span] | None = None
    routed_experts: memoryview | None = None


class _FramedEvent(msgspec.Struct, frozen=True):
    """An event in the frames of `hpcrl.answer_frames`."""

    request_id: str = ""
    choices: list[_FramedChoice] = []
    error: Any = None


class Part(NamedTuple):
    """A decoded answer, or a part of one: new tokens, and their log-probabilities and rows as far as there are any.

    Attributes
    ----------
    versions:
        Of all tokens of the answer, with its end.
    error:
        None, or what the engine ended the request with; the rest means nothing then.
    """

    token_ids: list[int]
    logprobs: list[float]
    rows: Rows | None
    finish_reason: str | None = None
    versions: list[_Span] | None = None
    request_id: str = ""
    error: Any = None


class Generation(msgspec.Struct, frozen=True):
    """Sampled tokens; the lists have the same length.

    Attributes
    ----------
    finish_reason:
        ``stop`` (the last token is a stop token) or ``length``.
    experts:
        ``[rows, layers, experts_per_token]``: of the last tokens, the very last excluded, which has not gone into the
        model; None where they were not asked for.
    request_id:
        What the engine calls the request.
    """

    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    finish_reason: str
    experts: NDArray[Any] | None = None
    request_id: str = ""


_decoder = msgspec.json.Decoder(_Event)
_framed_decoder = msgspec.msgpack.Decoder(_FramedEvent)


def _rows_in(text: msgspec.Raw) -> EncodedRows | None:
    """Rows of experts of a part, which nobody has decoded yet; None where it has none."""
    quoted = memoryview(text)
    return None if not quoted or quoted == b"null" else EncodedRows(quoted)


class AnswerReader:
    """Reads one answer of an engine, at once or part after part."""

    def __init__(self, engine: str, prompt_length: int, params: SamplingParams, on_part: OnPart) -> None:
        """Begin.

        Parameters
        ----------
        engine:
            Name of the engine, for messages.
        prompt_length, params:
            Of the request.
        on_part:
            Called with each part but the last one.
        """
        self._engine, self._prompt_length, self._on_part = engine, prompt_length, on_part
        self._experts_start = params.routed_experts_prompt_start
        self._token_ids: list[int] = []
        self._logprobs: list[float] = []
        self._experts: list[Rows] = []
        self._last: Part | None = None

    def read(self, data: bytes | Pieces | memoryview) -> Part:
        """Decode an answer, or an event of one: JSON, whole or in pieces, or what is in a frame (a memoryview).

        Nothing is changed, so that a thread may do it.

        Raises
        ------
        EngineProtocolError
            It cannot be read.
        """
        try:
            if isinstance(data, memoryview):
                return self._framed(data)
            return self._text(data.joined() if isinstance(data, Pieces) else data)
        except (msgspec.DecodeError, ValueError) as error:
            raise EngineProtocolError(f"{self._engine}: an answer cannot be read: {error}") from error

    def _text(self, data: bytes | memoryview) -> Part:
        event = _decoder.decode(data)
        if event.error is not None:
            return Part([], [], None, error=event.error)
        (choice,) = event.choices
        return Part(
            token_ids=choice.token_ids or [],
            logprobs=[token.logprob for token in (choice.logprobs.content if choice.logprobs else None) or []],
            rows=None if self._experts_start is msgspec.UNSET else _rows_in(choice.routed_experts),
            finish_reason=choice.finish_reason,
            versions=choice.weight_versions,
            request_id=event.request_id,
        )

    def _framed(self, data: memoryview) -> Part:
        event = _framed_decoder.decode(data)
        if event.error is not None:
            return Part([], [], None, error=event.error)
        (choice,) = event.choices
        rows = None if self._experts_start is msgspec.UNSET else choice.routed_experts
        return Part(
            token_ids=np.frombuffer(choice.token_ids or b"", "<i4").tolist(),
            logprobs=np.frombuffer(choice.logprobs or b"", "<f8").tolist(),
            rows=None if rows is None else read_rows(rows),
            finish_reason=choice.finish_reason,
            versions=choice.weight_versions,
            request_id=event.request_id,
        )

    def take(self, part: Part) -> None:
        """The next part (EngineError where the engine ended the request with an error)."""
        if part.error is not None:
            raise EngineError(f"{self._engine}: the engine ended a request with {part.error}")
        self._token_ids += part.token_ids
        self._logprobs += part.logprobs
        if part.rows is not None:
            self._experts.append(part.rows)
        if part.finish_reason is not None:
            self._last = part
        elif len(part.logprobs) == len(part.token_ids):
            self._on_part(part.token_ids, part.logprobs, part.rows)

    @property
    def last(self) -> Part | None:
        """The part that has the end; None before it has come."""
        return self._last

    @property
    def row_bytes(self) -> int:
        """How many bytes of rows `generation` has to go through."""
        return rows_bytes(self._experts)

    def generation(self, last: Part) -> Generation:
        """What was read, with its end; a thread may do it when all parts were taken.

        Raises
        ------
        EngineError
            The engine gave the request up, or samples with weights that are not ours.
        EngineProtocolError
            Counts do not fit each other, or rows of experts cannot be read.
        """
        token_ids, logprobs = self._token_ids, self._logprobs
        if last.finish_reason not in ("stop", "length"):
            raise EngineError(f"{self._engine}: the engine ended a request with {last.finish_reason!r}")
        if not token_ids or len(logprobs) != len(token_ids):
            what = f"{len(token_ids)} tokens with {len(logprobs)} log-probabilities"
            raise EngineProtocolError(f"{self._engine}: an answer has {what}")
        return Generation(
            token_ids=token_ids,
            logprobs=logprobs,
            versions=self._versions(last.versions or [], len(token_ids)),
            finish_reason=last.finish_reason,
            experts=self._all_experts(),
            request_id=last.request_id,
        )

    def _all_experts(self) -> NDArray[Any] | None:
        """Rows from where they were asked for to the last token but one, and no others."""
        start, prompt = self._experts_start, self._prompt_length
        if start is msgspec.UNSET:
            return None
        wanted, found = prompt + len(self._token_ids) - 1 - start, sum(len(rows) for rows in self._experts)
        if found != wanted or len({rows.shape[1:] for rows in self._experts}) != 1:
            # another alignment would give each token the experts of a neighbour
            what = f"{found} rows of experts for {wanted} tokens, from token {start} of {prompt} of the prompt on"
            raise EngineProtocolError(
                f"{self._engine}: an answer has {what}\n"
                "    hint: engine.return_routed_experts and trainer.router_replay: false, where its engines cannot say"
            )
        try:
            return join_rows(self._experts)
        except ValueError as error:
            raise EngineProtocolError(f"{self._engine}: an answer cannot be read: {error}") from error

    def _versions(self, spans: list[_Span], count: int) -> list[int]:
        versions: list[int] = []
        for span in spans:
            if not span.version.isdecimal():
                what = f"an answer is of weights {span.version!r}, which it was not given"
                raise EngineError(f"{self._engine}: {what}", forgot=True)
            if span.start != len(versions):
                break
            versions += [int(span.version)] * (span.end - span.start)
        if len(versions) != count:
            raise EngineProtocolError(f"{self._engine}: version spans {spans} do not cover {count} tokens")
        return versions
