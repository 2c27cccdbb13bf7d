"""Answers as OpenAI's API and vLLM's token endpoint shape them."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcrl.rollouts.environments.base import ToolCall
from hpcrl.rollouts.sampling.turn_sampler import SampledTurn

_PIECE = 4096
"""Maximum characters of a part of a stream."""


def models_body(model: str, *, max_model_len: int) -> dict[str, Any]:
    """Return the list of models: the policy."""
    card = {"id": model, "object": "model", "created": 0, "owned_by": "hpcrl", "max_model_len": max_model_len}
    return {"object": "list", "data": [card]}


@dataclass(frozen=True, eq=False)
class ChatAnswer:
    """A turn of the policy for a program.

    Attributes
    ----------
    turn:
        As the chat template reads it.
    calls:
        Tool calls, as the program receives them.
    pieces:
        The text of each token, where log-probabilities were asked for.
    """

    sampled: SampledTurn
    turn: dict[str, Any]
    calls: tuple[ToolCall, ...]
    pieces: list[str] | None
    name: str = field(default_factory=lambda: f"chatcmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def finish_reason(self) -> str:
        """``length`` for a turn that was cut at a limit."""
        if not self.sampled.finished:
            return "length"
        return "tool_calls" if self.calls else "stop"

    def body(self, model: str) -> dict[str, Any]:
        """Return the JSON of the answer."""
        choice = {
            "index": 0,
            "message": self._message(),
            "logprobs": self._logprobs(),
            "finish_reason": self.finish_reason,
        }
        return self._head(model, "chat.completion") | {"choices": [choice], **_about(self.sampled)}

    def chunks(self, model: str, *, include_usage: bool) -> Iterator[dict[str, Any]]:
        """Yield the answer as parts of a stream."""
        head = self._head(model, "chat.completion.chunk")

        def chunk(delta: dict[str, Any], reason: str | None = None, logprobs: Any = None) -> dict[str, Any]:
            choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
            return head | {"choices": [choice]} | ({"usage": None} if include_usage else {})

        yield chunk({"role": "assistant", "content": ""}, logprobs=self._logprobs())
        message = self._message()
        for name in ("reasoning_content", "content"):
            text = message.get(name) or ""
            for at in range(0, len(text), _PIECE):
                yield chunk({name: text[at : at + _PIECE]})
        for number, call in enumerate(message.get("tool_calls", ())):
            yield chunk({"tool_calls": [{"index": number, **call}]})
        about = _about(self.sampled)
        yield chunk({}, self.finish_reason) | {"weight_versions": about["weight_versions"]}
        if include_usage:
            yield head | {"choices": [], "usage": about["usage"]}

    def _head(self, model: str, kind: str) -> dict[str, Any]:
        return {"id": self.name, "object": kind, "created": self.created, "model": model}

    def _message(self) -> dict[str, Any]:
        """Return the turn in OpenAI's form: arguments are text."""
        message = {**self.turn, "refusal": None}
        if not self.calls:
            return message
        message["content"] = message["content"] or None
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
            }
            for call in self.calls
        ]
        return message

    def _logprobs(self) -> dict[str, Any] | None:
        if self.pieces is None:
            return None
        scores = self.sampled.turn.logprobs.tolist()
        return {
            "content": [
                {"token": piece, "logprob": score, "bytes": list(piece.encode()), "top_logprobs": []}
                for piece, score in zip(self.pieces, scores, strict=True)
            ]
        }


@dataclass(frozen=True, eq=False)
class TokenAnswer:
    """A turn as token ids."""

    sampled: SampledTurn
    name: str = field(default_factory=lambda: f"generate-tokens-{uuid.uuid4().hex}")

    def body(self, model: str) -> dict[str, Any]:
        """Return the JSON of the answer; each token of its log-probabilities is named by its id."""
        turn = self.sampled.turn
        token_ids = turn.token_ids.tolist()
        content = [
            {"token": f"token_id:{token}", "logprob": score, "top_logprobs": []}
            for token, score in zip(token_ids, turn.logprobs.tolist(), strict=True)
        ]
        choice = {
            "index": 0,
            "token_ids": token_ids,
            "logprobs": {"content": content},
            "finish_reason": turn.finish_reason,
            "routed_experts": None,
        }
        head = {"request_id": self.name, "model": model, "created": int(time.time()), "output_mode": "tokens"}
        return head | {"choices": [choice], "prompt_logprobs": None, **_about(self.sampled)}


def _about(sampled: SampledTurn) -> dict[str, Any]:
    prompt, completion = len(sampled.prompt), len(sampled.turn.token_ids)
    usage = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    return {"usage": usage, "weight_versions": _spans(sampled.turn.versions)}


def _spans(versions: NDArray[np.int32]) -> list[dict[str, Any]]:
    """Return versions as engines say them: of tokens from ``start`` to before ``end``."""
    if (versions == versions[0]).all():  # of nearly all turns, and in a third of the time
        return [{"version": str(int(versions[0])), "start": 0, "end": len(versions)}]
    bounds = [0, *(np.flatnonzero(np.diff(versions)) + 1).tolist(), len(versions)]
    return [{"version": str(int(versions[start])), "start": start, "end": end} for start, end in pairwise(bounds)]
