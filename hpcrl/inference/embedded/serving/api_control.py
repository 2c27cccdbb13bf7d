"""Control of a running engine: pause and resume, weight updates, caches, health, models, metrics."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
import xxhash
from aiohttp import web
from torch import Tensor

import hpcrl
from hpcrl.inference.embedded.engine.engine import PAUSE_MODES
from hpcrl.inference.embedded.serving.api_common import json_response
from hpcrl.inference.embedded.serving.errors import bad_request
from hpcrl.inference.embedded.serving.serving import Serving
from hpcrl.inference.embedded.weights.sessions import UpdateOrderError
from hpcrl.inference.embedded.weights.turns import Turns
from hpcrl.inference.embedded.weights.updates import UpdateSession
from hpcrl.inference.metrics import EngineMetrics
from hpcrl.inference.proof import Proofs, TensorSample, rows_of, same_bits
from hpcrl.modeling.decoder import Decoder
from hpcrl.modeling.hf import published_tensors
from hpcrl.storage.msgspec_types import decode_json
from hpcrl.weights.proof import PROVE_WEIGHTS, WeightsProof
from hpcrl.weights.session import SESSION, read_owner

_PROOF_LOOKS = 50
_PROOF_LOOK_S = 0.02
"""Timeout in seconds of the wait for a proof in one call; the caller repeats it while samples are being read."""


class ControlApi:
    """Handlers of control endpoints; names and answers are those of vLLM's RL and development routers.

    What is asked wrongly, or at the wrong time, is an error that `hpcrl.inference.embedded.serving.errors` answers: 400
    for `ApiError`, `HandoffError` and `ValueError`, 409 for `UpdateOrderError`.
    """

    def __init__(
        self, serving: Serving, updater: UpdateSession, metrics: EngineMetrics, turns: Turns | None = None
    ) -> None:
        self._turns = turns
        self._serving, self._engine, self._updater, self._metrics = serving, serving.engine, updater, metrics
        self._proofs: Proofs | None = None

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/health", self.health),
            web.get("/ping", self.health),
            web.get("/version", self.version),
            web.get("/metrics", self.metrics),
            web.get("/v1/models", self.models),
            web.post("/pause", self.pause),
            web.post("/resume", self.resume),
            web.get("/is_paused", self.is_paused),
            web.post("/abort_requests", self.abort_requests),
            web.post("/reset_prefix_cache", self.reset_prefix_cache),
            web.post("/init_weight_transfer_engine", self.init_weights),
            web.post("/shutdown_weight_transfer_engine", self.shutdown_weights),
            web.post("/start_weight_update", self.start_update),
            web.post("/update_weights", self.update_weights),
            web.post("/finish_weight_update", self.finish_update),
            web.post("/update_weight_version", self.update_version),
            web.get("/weight_info", self.weight_info),
            web.post("/weight_checker", self.weight_checker),
            web.post("/collective_rpc", self.collective_rpc),
            web.get("/get_world_size", self.world_size),
        ]

    async def health(self, _: web.Request) -> web.Response:
        """Answer 200 while the model thread is alive, else 503."""
        return web.Response(status=200 if self._engine.failure is None else 503)

    async def version(self, _: web.Request) -> web.Response:
        return json_response({"version": f"hpcrl {hpcrl.__version__}"})

    async def metrics(self, _: web.Request) -> web.Response:
        text = self._metrics.registry.render()
        return web.Response(text=text, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    async def models(self, _: web.Request) -> web.Response:
        facts = self._serving.facts
        cards: list[dict[str, Any]] = [
            {
                "id": name,
                "object": "model",
                "created": facts.created,
                "owned_by": "hpcrl",
                "root": facts.root,
                "parent": None,
                "max_model_len": self._engine.config.max_model_len,
                "permission": [],
            }
            for name in facts.names
        ]
        return json_response({"object": "list", "data": cards})

    async def pause(self, http: web.Request) -> web.Response:
        """Handle ``?mode=abort|wait|keep&clear_cache=true``; answer when the pause is complete."""
        mode = http.query.get("mode", "abort")
        if mode not in PAUSE_MODES:
            raise bad_request(f"mode must be one of {', '.join(PAUSE_MODES)}, not {mode!r}", "mode")
        await asyncio.wrap_future(self._engine.pause(mode, clear_cache=_flag(http, "clear_cache", default=True)))
        return json_response({"status": "paused"})

    async def resume(self, _: web.Request) -> web.Response:
        """Let requests run; with weights that a trainer has put here not before they are labelled."""
        self._check_awake()
        if self._turns is not None and self._weights_here() != self._engine.weight_version:
            raise UpdateOrderError(
                f"the label {self._engine.weight_version!r} names other weights than those that are there "
                f"({self._weights_here()!r}): call /update_weight_version first"
            )
        await asyncio.wrap_future(self._engine.resume())
        return json_response({"status": "resumed"})

    async def is_paused(self, _: web.Request) -> web.Response:
        return json_response({"is_paused": self._engine.is_paused})

    async def abort_requests(self, http: web.Request) -> web.Response:
        """End the named requests, or all where none are named."""
        body = await _body(http)
        names = body.get("request_ids")
        if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
            raise bad_request("request_ids must be a list of names", "request_ids")
        doomed = self._serving.find(names) if names else self._serving.in_flight()
        await asyncio.wrap_future(self._engine.abort(doomed))
        return json_response({"status": "aborted", "aborted": len(names) if names else len(doomed)})

    async def reset_prefix_cache(self, http: web.Request) -> web.Response:
        running = _flag(http, "reset_running_requests", default=False)
        success = await asyncio.wrap_future(self._engine.reset_prefix_cache(reset_running_requests=running))
        return json_response({"success": success})

    async def init_weights(self, http: web.Request) -> web.Response:
        """Handle ``{"init_info": {}}``: the command line decides where this engine reads; other values are refused."""
        with self._timed("init"):
            info = (await _body(http)).get("init_info")
            if not isinstance(info, dict):
                raise bad_request("init_info must be an object", "init_info")
            await asyncio.to_thread(self._updater.init, info)
        return json_response({"message": "Weight transfer initialized"})

    async def shutdown_weights(self, _: web.Request) -> web.Response:
        with self._timed("shutdown"):
            await asyncio.to_thread(self._updater.shutdown)
        return json_response({"message": "Weight transfer shut down"})

    async def start_update(self, http: web.Request) -> web.Response:
        """Begin an update for the owner ``{"session": [attempt, number]}``; an unfinished one ends."""
        with self._timed("start"):
            owner = read_owner((await _body(http, empty={})).get(SESSION))
            self._updater.start(owner)
        return json_response({"message": "Weight update started"})

    async def update_weights(self, http: web.Request) -> web.Response:
        """Read ``{"update_info": {"path": <version directory>}}`` while generation continues.

        The answer names the version that was read: with ``"fallback": true`` it may be an older one.
        """
        with self._timed("update"):
            info = (await _body(http)).get("update_info")
            if not isinstance(info, dict):
                raise bad_request("update_info must be an object", "update_info")
            owner = read_owner(info.get(SESSION))
            try:
                update = await asyncio.to_thread(self._updater.update, info, owner)
            except asyncio.CancelledError:
                # the caller is gone: it cannot finish this session, and an unfinished read would delay the next one
                self._updater.abandon(owner)
                raise
            self._metrics.update_bytes.inc(update.bytes)
        skipped = [{"version": version, "reason": reason} for version, reason in update.skipped]
        return json_response(
            {"message": "Weights updated", "version": update.version, "kind": update.kind, "skipped": skipped}
        )

    async def finish_update(self, http: web.Request) -> web.Response:
        """Serve the weights that were read from the next step on, as version ``{"weight_version": "12"}``.

        It completes even if its caller disconnects meanwhile, because a thread does the work.
        """
        with self._timed("finish"):
            body = await _body(http, empty={})
            version, owner = _version(body, "weight_version"), read_owner(body.get(SESSION))

            def exchange(model: Decoder, label: str) -> Decoder:
                return self._engine.exchange_weights(model, label).result()

            await asyncio.to_thread(self._updater.finish, exchange, version, owner)
        return json_response({"message": "Weight update finished"})

    async def update_version(self, http: web.Request) -> web.Response:
        """Label the weights that a trainer has put here with their version, ``{"new_version": "12"}``.

        A label that names other weights than those that are there is refused with 409.
        """
        version = _version(await _body(http), "new_version")
        if version is None:
            raise bad_request("new_version is missing", "new_version")
        if not await asyncio.wrap_future(self._engine.label_weights(version, self._weights_here)):
            raise UpdateOrderError(
                f"the label {version!r} names other weights than those that are there ({self._weights_here()!r}); "
                "a label changes together with the weights, by /finish_weight_update"
            )
        return json_response({"success": True, "new_version": version})

    def _weights_here(self) -> str | None:
        """Return the label that the weights which are there may have; None while there are none, or they change."""
        if self._turns is not None:
            return None if self._turns.version is None else str(self._turns.version)
        if self._updater.exchanges:
            return None
        served = self._updater.served_version
        return self._engine.config.weight_version if served is None else str(served)

    async def weight_info(self, _: web.Request) -> web.Response:
        return json_response({"weight_version": self._engine.weight_version})

    async def weight_checker(self, http: web.Request) -> web.Response:
        """Return hashes of the served weights by published tensor name, or their comparison with ``baseline``.

        They are those of a hand-off's manifest where both have the same dtype.
        """
        self._check_awake()
        body = await _body(http)
        action, baseline = body.get("action"), body.get("baseline")
        if action not in ("checksum", "compare"):
            raise bad_request("action must be 'checksum' or 'compare'", "action")
        if action == "compare" and not isinstance(baseline, dict):
            raise bad_request("compare needs a baseline object", "baseline")
        sums = await asyncio.wrap_future(self._engine.inspect_model(_checksums))
        if action == "checksum":
            return json_response({"checksums": sums})
        assert isinstance(baseline, dict)
        wrong = sorted(name for name in sums.keys() | baseline.keys() if sums.get(name) != baseline.get(name))
        return json_response({"match": not wrong, "mismatches": wrong})

    async def collective_rpc(self, http: web.Request) -> web.Response:
        """Handle ``{"method": ..., "args": [...]}``: calls of hpcrl's vLLM workers that have a meaning here.

        ``abandon_weight_update`` ends the open session. ``prove_weights`` compares samples of a version with the
        running weights (`hpcrl.inference.proof`).
        """
        body = await _body(http)
        method, args = body.get("method"), body.get("args", [])
        if method == "abandon_weight_update":
            self._updater.end_session()
            return json_response({"results": [None]})
        if method != PROVE_WEIGHTS:
            raise bad_request(f"method must be abandon_weight_update or {PROVE_WEIGHTS}, not {method!r}", "method")
        if not isinstance(args, list) or len(args) != 3 or not all(isinstance(arg, str) for arg in args):
            raise bad_request("args must be the directories of two versions and a number, as strings", "args")
        path, before, number = args
        if not number.isdecimal():
            raise bad_request(f"the number of a proof must be one, not {number!r}", "args")
        self._check_awake()
        self._proofs = self._proofs or Proofs(self._updater.has_tensor, self._updater.root, self._updater.gate)
        asked = partial(_prove, self._proofs, Path(path), Path(before) if before else None, int(number))
        for _ in range(_PROOF_LOOKS):
            proof = await asyncio.wrap_future(self._engine.inspect_model(asked))
            if proof.state != "reading":
                break
            await asyncio.sleep(_PROOF_LOOK_S)
        return json_response({"results": [msgspec.to_builtins(proof)]})

    async def world_size(self, _: web.Request) -> web.Response:
        return json_response({"world_size": 1})

    def _check_awake(self) -> None:
        if self._turns is not None and self._turns.is_asleep:
            raise UpdateOrderError("the engine sleeps and has no weights: the trainer uses the device")

    @contextmanager
    def _timed(self, operation: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self._metrics.weight_operation.observe(time.perf_counter() - began, value=operation)


def _prove(proofs: Proofs, path: Path, before: Path | None, number: int, model: Decoder) -> WeightsProof:
    """Compare with the served model, between two steps."""
    tensors: dict[str, Tensor] = {}

    def compare(sample: TensorSample) -> bool:
        if not tensors:
            tensors.update(published_tensors(model, model.adapter))
        return same_bits(sample.tensor, rows_of(sample, tensors[sample.name]))

    return proofs.prove(path, before, number, compare)


def _checksums(model: Decoder) -> dict[str, str]:
    return {
        name: xxhash.xxh3_128_hexdigest(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
        for name, tensor in published_tensors(model, model.adapter)
    }


async def _body(http: web.Request, *, empty: dict[str, Any] | None = None) -> dict[str, Any]:
    data = await http.read()
    if not data and empty is not None:
        return empty
    try:
        body = decode_json(data)
    except msgspec.DecodeError as error:
        raise bad_request(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise bad_request("the body must be a JSON object")
    return body


def _version(body: dict[str, Any], name: str) -> str | None:
    value = body.get(name)
    if value is not None and not isinstance(value, str):
        raise bad_request(f"{name} must be a string", name)
    return value


def _flag(http: web.Request, name: str, *, default: bool) -> bool:
    value = http.query.get(name)
    if value is None:
        return default
    if value.lower() not in ("true", "false", "1", "0"):
        raise bad_request(f"{name} must be true or false, not {value!r}", name)
    return value.lower() in ("true", "1")
