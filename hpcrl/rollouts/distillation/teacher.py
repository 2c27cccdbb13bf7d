"""Teacher of an on-policy distillation: log-probabilities of the tokens that the policy has sampled.

The teacher is a server of vLLM's HTTP API (``/v1/completions`` with ``prompt_logprobs``). It is not part of the run and
not started by it. So it gets no credentials of the run, and its answers are validated before use.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import aiohttp
import msgspec
import numpy as np
from numpy.typing import NDArray

from hpcrl.config.distillation import TeacherConfig
from hpcrl.config.recipe import Recipe
from hpcrl.errors import RunFailedError
from hpcrl.rollouts.core.counters import Counters
from hpcrl.rollouts.core.records import Rollout
from hpcrl.rollouts.distillation.vocabulary import Probe
from hpcrl.rollouts.engines.errors import EngineError, EngineProtocolError
from hpcrl.rollouts.engines.http import EngineHttp
from hpcrl.rollouts.engines.limits import AnswerLimits, check_logprobs
from hpcrl.rollouts.engines.rows import beside_loop
from hpcrl.storage.msgspec_types import decode_json

_log = logging.getLogger(__name__)
_PATH, _MODELS = "/v1/completions", "/v1/models"
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 10.0
"""Pause in seconds after the first failed request, which is doubled each time, and its maximum."""
_MAX_DAMAGED = 3
"""Maximum number of unusable answers to one question; further attempts would not succeed."""
_BYTES_PER_TOKEN = 200
"""Approximate size in bytes of a token in an answer; it decides whether an answer is decoded in a thread."""


class TeacherError(Exception):
    """Raised where a rollout has no log-probabilities of the teacher and cannot be trained on."""


class _Scored(msgspec.Struct, frozen=True):
    logprob: float


class _Choice(msgspec.Struct, frozen=True):
    prompt_logprobs: list[dict[str, _Scored] | None] | None = None
    prompt_token_ids: list[int] | None = None


class _Completion(msgspec.Struct, frozen=True):
    choices: list[_Choice]


class _Model(msgspec.Struct, frozen=True):
    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct, frozen=True):
    data: list[_Model]


class _Server(EngineHttp):
    """Calls of the server, each once."""

    limits = AnswerLimits()

    async def models(self, *, timeout_s: float) -> list[_Model]:
        data = await self._request("GET", _MODELS, timeout_s=timeout_s)
        answer: _Models = decode_json(data, _Models)
        return answer.data

    async def complete(self, request: dict[str, Any], *, tokens: int, timeout_s: float) -> _Choice:
        body = msgspec.json.encode({"max_tokens": 1, "temperature": 1.0, "add_special_tokens": False, **request})
        headers, size = {"content-type": "application/json"}, self.limits.answer_bytes(tokens=tokens + 1, rows=0)
        data = await self._request("POST", _PATH, body=body, headers=headers, timeout_s=timeout_s, max_bytes=size)
        decode = partial(decode_json, data, _Completion)
        answer: _Completion = await beside_loop(decode, tokens * _BYTES_PER_TOKEN)
        if len(answer.choices) != 1:
            raise ValueError(f"{len(answer.choices)} choices in place of one")
        return answer.choices[0]


class Teacher:
    """Scores finished rollouts. Many wait at once; each has a deadline."""

    def __init__(self, config: TeacherConfig) -> None:
        """Remember where the server is; nothing is sent before `check`."""
        self._config = config
        self._model = config.model or ""
        self._session: aiohttp.ClientSession | None = None
        self._places = asyncio.Semaphore(config.max_requests)
        self._counters = Counters()

    @classmethod
    def of(cls, recipe: Recipe) -> Teacher | None:
        """Return the teacher of a recipe; None where it has none."""
        distillation = recipe.algorithm.distillation
        return None if distillation is None else cls(distillation.teacher)

    async def aclose(self) -> None:
        """Close connections."""
        if self._session is not None:
            await self._session.close()

    def count_in(self, counters: Counters) -> None:
        """Count requests in ``counters`` from now on."""
        self._counters = counters

    @property
    def _server(self) -> _Server:
        if self._session is None:
            # a separate session: that of the run's servers sends the token of the run
            self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None))
        return _Server(self._session, name="the teacher", url=self._config.url)

    async def check(self, probe: Probe, *, max_model_len: int, timeout_s: float) -> None:
        """Wait until the server answers, and check that it can score the policy's tokens.

        Parameters
        ----------
        probe:
            Probe texts by the policy's tokenizer.
        max_model_len:
            Maximum length of a rollout, that of the policy's engines.
        timeout_s:
            Maximum time in seconds to wait for a server that does not answer yet.

        Raises
        ------
        RunFailedError
            It does not answer, does not serve the model, has a shorter context, or another tokenizer.
        """
        where = f"the teacher at {self._config.url}"
        try:
            async with asyncio.timeout(timeout_s):
                await self._check(probe, max_model_len, where)
        except TimeoutError as error:
            raise RunFailedError(
                f"{where} did not answer within {timeout_s:g} s\n"
                "    hint: start it before the run, and check that compute nodes reach "
                "algorithm.distillation.teacher.url"
            ) from error
        except TeacherError as error:
            raise RunFailedError(f"{where} cannot be used: {error}") from error

    async def _check(self, probe: Probe, max_model_len: int, where: str) -> None:
        served = await self._patiently(partial(self._server.models, timeout_s=self._config.timeout_s))
        found = next((model for model in served if self._model in (model.id, "")), None)
        if found is None:
            names = ", ".join(repr(model.id) for model in served) or "none"
            raise RunFailedError(
                f"{where} does not serve {self._model!r}; it serves {names}\n"
                "    hint: set algorithm.distillation.teacher.model to one of them"
            )
        self._model = found.id
        # the server samples at least one token, which is not used
        if found.max_model_len is not None and found.max_model_len <= max_model_len:
            raise RunFailedError(
                f"{where} has a context of {found.max_model_len} tokens, and it needs one of {max_model_len + 1}\n"
                f"    hint: start it with --max-model-len {max_model_len + 1}, or lower engine.max_model_len"
            )
        for text, token_ids in probe.texts(min(found.max_model_len or max_model_len, max_model_len) // 2):
            request = {"model": self._model, "prompt": text, "return_token_ids": True}
            send = partial(self._server.complete, request, tokens=len(text), timeout_s=self._config.timeout_s)
            answer = await self._patiently(send)
            if answer.prompt_token_ids is None:
                raise RunFailedError(
                    f"{where} does not return the token IDs of a prompt (return_token_ids): its tokenizer is unknown\n"
                    "    hint: use vLLM 0.10.2 or later"
                )
            if answer.prompt_token_ids != token_ids:
                raise RunFailedError(
                    f"{where} has another tokenizer: {probe.difference(token_ids, answer.prompt_token_ids)}\n"
                    "    hint: a teacher must have the vocabulary of the policy, as models of one family have"
                )

    async def scored(self, rollout: Rollout) -> Rollout:
        """Return ``rollout`` with the teacher's log-probabilities of its sampled tokens: a request for each sequence.

        Raises
        ------
        TeacherError
            The teacher refused the rollout, did not answer before the deadline, or its answers cannot be used.
        """
        deadline_s = self._config.deadline_s
        try:
            async with asyncio.timeout(deadline_s), self._places:
                found = [await self._patiently(partial(self._score, ids.tolist())) for ids in rollout.sequences]
        except TimeoutError as error:
            what = f"the teacher at {self._config.url} gave no log-probabilities within {deadline_s:g} s"
            raise TeacherError(f"{what} (algorithm.distillation.teacher.deadline_s)") from error
        own = np.where(rollout.sampled != 0, np.concatenate(found), np.float32(0))
        return msgspec.structs.replace(rollout, teacher_logprobs=own.astype(np.float32))

    async def _score(self, token_ids: list[int]) -> NDArray[np.float32]:
        request = {"model": self._model, "prompt": token_ids, "prompt_logprobs": 0}
        answer = await self._server.complete(request, tokens=len(token_ids), timeout_s=self._config.timeout_s)
        scores = answer.prompt_logprobs or []
        if len(scores) != len(token_ids):
            raise ValueError(f"{len(scores)} log-probabilities for {len(token_ids)} tokens")
        found = np.zeros(len(token_ids), np.float64)
        for i, (token, score) in enumerate(zip(token_ids[1:], scores[1:], strict=True), start=1):
            if score is None or str(token) not in score:
                raise ValueError(f"no log-probability of token {i}")
            found[i] = score[str(token)].logprob
        check_logprobs(found)
        return found.astype(np.float32)

    async def _patiently(self, ask: Callable[[], Any]) -> Any:
        """Ask until there is an answer that can be used; the caller has a deadline."""
        pause_s, damaged, began = _FIRST_PAUSE_S, 0, time.monotonic()
        while True:
            self._counters.teacher_requests += 1
            try:
                return await ask()
            except (ValueError, EngineProtocolError) as error:
                damaged += 1
                if damaged == _MAX_DAMAGED:
                    raise TeacherError(
                        f"{damaged} answers of the teacher could not be used; the last: {error}"
                    ) from error
                what: Exception = error
            except EngineError as error:
                if not error.retryable:
                    raise TeacherError(str(error)) from error
                what = error
            self._counters.teacher_retries += 1
            _log.warning(
                "asking the teacher again in %.1f s, after %.0f s: %s", pause_s, time.monotonic() - began, what
            )
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
