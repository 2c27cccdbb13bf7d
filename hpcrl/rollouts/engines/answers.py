"""Answers to generation requests and their problems. Field names are vLLM's; only used fields are decoded.

Routed experts come in frames, or are fetched from the location in an answer (`hpcrl.network.routed_experts_reference`).
Engines that are not started by hpcrl write base64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from hpcrl.network.routed_experts_reference import RowsReference
from hpcrl.rollouts.core.token_sequence import TokenSequence
from hpcrl.rollouts.engines.errors import EngineError, EngineProtocolError
from hpcrl.rollouts.engines.limits import MAX_VERSION, AnswerLimits
from hpcrl.rollouts.engines.rows import EncodedRows, Rows, join_rows, read_rows, rows_bytes
from hpcrl.rollouts.engines.sse import Pieces
from hpcrl.storage.msgspec_types import decode_json, decode_msgpack

__all__ = ["AnswerPart", "AnswerReader", "EngineError", "EngineProtocolError", "Generation", "OnPart", "SamplingParams"]

OnPart = Callable[[NDArray[np.int32], NDArray[np.float32], Rows | None], None]
"""Called with tokens, log-probabilities, and rows of experts where these come in parts as well."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling parameters of a request.

    All parameters that shape the distribution are explicit, so that no default of the server applies.

    Attributes
    ----------
    temperature:
        0 is greedy.
    seed:
        In ``[0, 2**63)``.
    top_p, top_k, min_p:
        Truncation of the distribution; log-probabilities are those of the truncated distribution.
    stop:
        Texts that end the answer, which includes the token that completes such a text.
    skip_special_tokens:
        Whether the engine matches these texts against the sampled text without control tokens.
    logprobs:
        1: the log-probability of the sampled token.
    stream_interval:
        Number of tokens of each part of the answer (the first part has one); not set: one part.
    routed_experts_prompt_start:
        First prompt token whose routed experts are returned; not set: none are.
    """

    temperature: float
    max_tokens: int
    seed: int
    stop_token_ids: list[int]
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: list[str] | msgspec.UnsetType = msgspec.UNSET
    skip_special_tokens: bool | msgspec.UnsetType = msgspec.UNSET
    logprobs: int = 1
    stream_interval: int | msgspec.UnsetType = msgspec.UNSET
    routed_experts_prompt_start: int | msgspec.UnsetType = msgspec.UNSET


class _TokenLogprob(msgspec.Struct, frozen=True):
    logprob: float


class _Logprobs(msgspec.Struct, frozen=True):
    content: list[_TokenLogprob] | None = None


_Label = Annotated[str, msgspec.Meta(max_length=1024)]
"""Names and labels of engines, which come back in messages and requests."""


class _Span(msgspec.Struct, frozen=True):
    version: _Label
    start: int
    end: int


class _Choice(msgspec.Struct, frozen=True):
    finish_reason: _Label | None = None
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    weight_versions: list[_Span] | None = None
    routed_experts: msgspec.Raw = msgspec.Raw()  # a reference, or base64, which the decoder skips


class _Event(msgspec.Struct, frozen=True):
    request_id: _Label = ""
    choices: list[_Choice] = []
    error: Any = None


class _FramedChoice(msgspec.Struct, frozen=True):
    finish_reason: _Label | None = None
    token_ids: memoryview | None = None
    logprobs: memoryview | None = None
    weight_versions: list[_Span] | None = None
    routed_experts: memoryview | None = None


class _FramedEvent(msgspec.Struct, frozen=True):
    """Event in the frames of `hpcrl.network.generate_frames`."""

    request_id: _Label = ""
    choices: list[_FramedChoice] = []
    error: Any = None


class AnswerPart(NamedTuple):
    """Decoded answer or part of one: new tokens, and their log-probabilities and routed experts where there are any.

    Attributes
    ----------
    versions:
        Versions of all tokens of the answer; present in its last part.
    error:
        Error with which the engine ended the request; the other fields are meaningless then. None without an error.
    kept:
        Reference to the routed experts while they were not fetched.
    """

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    rows: Rows | None
    finish_reason: str | None = None
    versions: list[_Span] | None = None
    request_id: str = ""
    error: Any = None
    kept: RowsReference | None = None


class Generation(msgspec.Struct, frozen=True):
    """Sampled tokens; the arrays have the same length.

    Attributes
    ----------
    finish_reason:
        ``stop`` (the last token is a stop token, or completes a text that ends answers) or ``length``.
    experts:
        ``[rows, layers, experts_per_token]``: of the last tokens, the very last excluded, which has not gone into the
        model; None where they were not asked for, and where an engine had kept them and does not give them.
    request_id:
        Engine's id of the request.
    """

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    finish_reason: str
    experts: NDArray[Any] | None = None
    request_id: str = ""


_GIVEN_UP = frozenset({"abort", "error"})
"""Finish reasons of requests that the engine gave up."""
_SHOWN = 500
"""Maximum number of characters of an engine's error that a message shows."""
_NO_LIMITS = AnswerLimits()
_NO_IDS, _NO_LOGPROBS = np.empty(0, np.int32), np.empty(0, np.float32)


def _rows_in(text: msgspec.Raw) -> EncodedRows | RowsReference | None:
    """Return the routed experts in a JSON value: null, a reference, or base64, which is not decoded here."""
    quoted = memoryview(text)
    if bytes(quoted[:1]) != b'"':
        return decode_json(quoted, RowsReference | None) if quoted else None
    return EncodedRows(quoted)


class AnswerReader:
    """Reads one answer of an engine, at once or part after part."""

    def __init__(
        self,
        engine: str,
        prompt_length: int,
        params: SamplingParams,
        on_part: OnPart,
        limits: AnswerLimits = _NO_LIMITS,
    ) -> None:
        """Initialise without parts.

        Parameters
        ----------
        engine:
            Name of the engine, for messages.
        prompt_length, params:
            Length of the prompt and parameters of the request.
        on_part:
            Called with each part but the last one.
        limits:
            Limits by the model.
        """
        self._limits, self._max_tokens = limits, params.max_tokens
        self._engine, self._prompt_length, self._on_part = engine, prompt_length, on_part
        self._experts_start = params.routed_experts_prompt_start
        self._tokens, self._scored, self._complete = TokenSequence(), 0, True
        self._experts: list[Rows] = []
        self._lost = False
        self._last: AnswerPart | None = None

    def read(self, data: bytes | Pieces | memoryview) -> AnswerPart:
        """Decode an answer, or an event of one: JSON, whole or in pieces, or the content of a frame (a memoryview).

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
        except (ValueError, OverflowError, MemoryError, RecursionError) as error:
            raise EngineProtocolError(f"{self._engine}: an answer cannot be read: {error}") from error

    def _text(self, data: bytes | memoryview) -> AnswerPart:
        event: _Event = decode_json(data, _Event)
        if event.error is not None:
            return AnswerPart(_NO_IDS, _NO_LOGPROBS, None, error=event.error)
        (choice,) = event.choices
        scores = (choice.logprobs.content if choice.logprobs else None) or []
        rows: EncodedRows | RowsReference | None = None
        if self._experts_start is not msgspec.UNSET:
            rows = _rows_in(choice.routed_experts)
        kept = rows if isinstance(rows, RowsReference) else None
        token_ids, logprobs = self._limits.checked(
            np.array(choice.token_ids or [], np.int32), np.array([token.logprob for token in scores], np.float64)
        )
        return AnswerPart(
            token_ids=token_ids,
            logprobs=logprobs,
            rows=None if isinstance(rows, RowsReference) else rows,
            kept=kept,
            finish_reason=choice.finish_reason,
            versions=choice.weight_versions,
            request_id=event.request_id,
        )

    def _framed(self, data: memoryview) -> AnswerPart:
        event: _FramedEvent = decode_msgpack(data, _FramedEvent)
        if event.error is not None:
            return AnswerPart(_NO_IDS, _NO_LOGPROBS, None, error=event.error)
        (choice,) = event.choices
        rows = None if self._experts_start is msgspec.UNSET else choice.routed_experts
        token_ids, logprobs = self._limits.checked(
            np.frombuffer(choice.token_ids or b"", "<i4"), np.frombuffer(choice.logprobs or b"", "<f8")
        )
        return AnswerPart(
            token_ids=token_ids,
            logprobs=logprobs,
            rows=None if rows is None else read_rows(rows),
            finish_reason=choice.finish_reason,
            versions=choice.weight_versions,
            request_id=event.request_id,
        )

    def take(self, part: AnswerPart) -> None:
        """Append the next part of the answer.

        Where the routed experts of a part could not be fetched, those of later parts are skipped as well: rows are
        identified by their position.

        Raises
        ------
        EngineError
            The engine ended the request with an error.
        EngineProtocolError
            The answer had ended already, or has more tokens than requested.
        """
        if part.error is not None:
            raise EngineError(f"{self._engine}: the engine ended a request with {_shown(part.error)}")
        if self._last is not None:
            raise EngineProtocolError(f"{self._engine}: an answer continues after its end")
        if len(self._tokens) + len(part.token_ids) > self._max_tokens:
            raise EngineProtocolError(
                f"{self._engine}: an answer has more tokens than the {self._max_tokens} asked for"
            )
        complete = len(part.logprobs) == len(part.token_ids)
        # a part without all log-probabilities makes the whole answer an error, so later parts are not kept
        self._tokens.append_sampled(part.token_ids, part.logprobs if complete else 0.0, 0)
        self._scored, self._complete = self._scored + len(part.logprobs), self._complete and complete
        self._lost |= part.kept is not None
        if part.rows is not None:
            self._experts.append(part.rows)
        if part.finish_reason is not None:
            self._last = part
        elif self._complete:
            self._on_part(part.token_ids, part.logprobs, None if self._lost else part.rows)

    @property
    def last(self) -> AnswerPart | None:
        """Return the part that ends the answer; None before it has arrived."""
        return self._last

    @property
    def lost(self) -> bool:
        """Return whether the routed experts of a part could not be fetched; those of later parts are then useless."""
        return self._lost

    @property
    def row_bytes(self) -> int:
        """Return how many bytes of routed experts `generation` has to decode."""
        return rows_bytes(self._experts)

    def generation(self, last: AnswerPart) -> Generation:
        """Return the whole answer; callable from a thread after all parts were taken.

        Raises
        ------
        EngineError
            The engine gave up the request, or samples with weights of another run.
        EngineProtocolError
            The numbers of tokens, log-probabilities and versions differ, or the routed experts cannot be read.
        """
        token_ids, _, logprobs, _ = self._tokens.arrays(len(self._tokens))
        if last.finish_reason not in ("stop", "length"):
            kind = EngineError if last.finish_reason in _GIVEN_UP else EngineProtocolError
            raise kind(f"{self._engine}: the engine ended a request with {last.finish_reason!r}")
        if not len(token_ids) or not self._complete:
            what = f"{len(token_ids)} tokens with {self._scored} log-probabilities, not one of each in each part"
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
        """Return the rows from the first requested one to the last token but one; None where some were lost."""
        start, prompt = self._experts_start, self._prompt_length
        if start is msgspec.UNSET or self._lost:
            return None
        wanted, found = prompt + len(self._tokens) - 1 - start, sum(len(rows) for rows in self._experts)
        if found != wanted or len({rows.shape[1:] for rows in self._experts}) != 1:
            # another alignment would give each token the experts of a neighbour
            what = f"routed experts of {found}, not {wanted} tokens, from token {start} of {prompt} of the prompt on"
            raise EngineProtocolError(
                f"{self._engine}: an answer has {what}\n"
                "    hint: engine.return_routed_experts and trainer.router_replay: false, if its engines cannot "
                "return them"
            )
        try:
            rows = join_rows(self._experts)
            if rows is not None:
                self._limits.check_rows(rows)
        except (ValueError, OverflowError, MemoryError, RecursionError) as error:
            raise EngineProtocolError(f"{self._engine}: an answer cannot be read: {error}") from error
        return rows

    def _versions(self, spans: list[_Span], count: int) -> NDArray[np.int32]:
        versions, known = np.empty(count, np.int32), 0
        for span in spans:
            if not (span.version.isascii() and span.version.isdecimal()):
                what = f"an answer is of weights {span.version!r}, which the engine was not given"
                raise EngineError(f"{self._engine}: {what}", forgot=True)
            if len(span.version) > len(str(MAX_VERSION)) or int(span.version) > MAX_VERSION:
                raise EngineProtocolError(
                    f"{self._engine}: an answer has version {_shown(span.version)}, which is not a version"
                )
            if span.start != known or not span.start <= span.end <= count:
                known = -1
                break
            versions[known : span.end] = int(span.version)
            known = span.end
        if known != count:
            raise EngineProtocolError(f"{self._engine}: version spans {_shown(spans)} do not cover {count} tokens")
        return versions


def _shown(said: object) -> str:
    """Return the beginning of an engine's statement, for a message."""
    try:
        text = str(said)
    except (RecursionError, MemoryError):
        return "a value that is nested too deeply to show"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
