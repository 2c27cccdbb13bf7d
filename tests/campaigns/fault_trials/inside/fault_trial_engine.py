"""An embedded engine that answers damaged, loses connections in an update, or puts other weights into its model.

Only what leaves the engine, or what a device would have done to its memory, is changed: everything that has to notice
it is the code of the run.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import torch
from aiohttp import web
from fault_trial_orders import Orders

from hpcrl.inference.embedded.serving import api_generate
from hpcrl.inference.embedded.serving.api_control import ControlApi
from hpcrl.inference.embedded.serving.api_generate import GenerateApi
from hpcrl.inference.embedded.weights.updates import UpdateSession
from hpcrl.network.generate_frames import MEDIA_TYPE, encode_frame

_LONG = 5000
"""More tokens than any request of these runs asks for."""
_SLOW_S = 0.4
"""How long an exchange of weights takes while its connections are cut, so that some are cut inside of it."""
_ORDERS = Orders()
_RANDOM = random.Random()


def install() -> None:
    """Change the engine of this process; without an order it does what it always does."""
    _damage_answers()
    _cut_updates()
    _spoil_weights()


def _damage_answers() -> None:
    choice = GenerateApi._choice

    def damaged(self: GenerateApi, request: Any, *arguments: Any) -> dict[str, Any]:
        good = choice(self, request, *arguments)
        what = _ORDERS.now("answers").get("what")
        if what is None or what == "truncated":
            return good
        _ORDERS.followed()
        return _DAMAGES[what](good)

    GenerateApi._choice = damaged  # type: ignore[method-assign]
    send_frames, frame_response = api_generate.send_frames, api_generate.frame_response

    async def send(http: web.Request, chunks: AsyncIterator[dict[str, Any]]) -> web.StreamResponse:
        if _ORDERS.now("answers").get("what") != "truncated":
            return await send_frames(http, chunks)
        _ORDERS.followed()
        response = web.StreamResponse(headers={"Content-Type": MEDIA_TYPE})
        await response.prepare(http)
        async for chunk in chunks:
            frame = encode_frame(chunk)
            await response.write(frame[: len(frame) // 2])
            break
        await response.write_eof()
        return response

    def respond(body: Any) -> web.Response:
        if _ORDERS.now("answers").get("what") != "truncated":
            return frame_response(body)
        _ORDERS.followed()
        frame = encode_frame(body)
        return web.Response(body=frame[: len(frame) // 2], content_type=MEDIA_TYPE)

    api_generate.send_frames, api_generate.frame_response = send, respond


def _tokens(good: dict[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    tokens = change(np.frombuffer(good["token_ids"], "<i4").copy())
    return {**good, "token_ids": tokens.astype("<i4").tobytes()}


def _scores(good: dict[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    scores = change(np.frombuffer(good["logprobs"], "<f8").copy())
    return {**good, "logprobs": scores.astype("<f8").tobytes()}


def _first(value: float) -> Callable[[Any], Any]:
    def change(array: Any) -> Any:
        array[:1] = value
        return array

    return change


def _more(good: dict[str, Any]) -> dict[str, Any]:
    longer = _tokens(good, lambda tokens: np.resize(tokens, _LONG))
    return _scores(longer, lambda scores: np.resize(scores, _LONG))


def _of_version(good: dict[str, Any], version: str) -> dict[str, Any]:
    spans = good["weight_versions"]
    return good if spans is None else {**good, "weight_versions": [{**span, "version": version} for span in spans]}


_DAMAGES: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "token -1": lambda good: _tokens(good, _first(-1)),
    "token beyond the vocabulary": lambda good: _tokens(good, _first(2**31 - 1)),
    "more tokens than asked for": _more,
    "log-probability 55": lambda good: _scores(good, _first(55.0)),
    "log-probability NaN": lambda good: _scores(good, _first(math.nan)),
    "log-probability -infinity": lambda good: _scores(good, _first(-math.inf)),
    "fewer log-probabilities than tokens": lambda good: _scores(good, lambda scores: scores[:-1]),
    "half a number": lambda good: {**good, "token_ids": good["token_ids"][:-1]},
    "another type": lambda good: {**good, "token_ids": {"a": [1]}},
    "no choice": lambda good: {"index": good["index"]},
    "a version that is none": lambda good: _of_version(good, "999999"),
}


def _cut_updates() -> None:
    finish, exchange = ControlApi.finish_update, UpdateSession._exchange

    async def cut(self: ControlApi, http: web.Request) -> web.Response:
        if _ORDERS.now("cut") and http.transport is not None:
            _ORDERS.followed()
            # at its begin, while weights are exchanged, or just behind that
            asyncio.get_running_loop().call_later(_RANDOM.uniform(0.0, 1.5 * _SLOW_S), http.transport.abort)
        return await finish(self, http)

    def slow(self: UpdateSession, *arguments: Any) -> None:
        if _ORDERS.now("cut"):
            time.sleep(_RANDOM.uniform(0.0, _SLOW_S))
        exchange(self, *arguments)

    ControlApi.finish_update = cut  # type: ignore[method-assign]
    UpdateSession._exchange = slow  # type: ignore[method-assign]


def _spoil_weights() -> None:
    fill = UpdateSession._fill

    def spoiled(self: UpdateSession, tensors: Any, reading: Any) -> None:
        order = _ORDERS.now("weights")
        if order.get("what") == "not loaded" and self._spare is not None:
            for _ in tensors:  # read and verified, and not copied
                pass
            return
        fill(self, tensors, reading)
        if order.get("what") == "altered":
            assert self._spare is not None
            # one tensor, the same in each update
            matrices = [weight for weight in self._spare.parameters() if weight.dim() > 1]
            weight = matrices[order["number"] % len(matrices)]
            with torch.no_grad():
                weight += 0.5

    UpdateSession._fill = spoiled  # type: ignore[method-assign]
