"""Control of an engine that shares its device with a trainer: vLLM's names where it has them too."""

from __future__ import annotations

import asyncio

from aiohttp import web

from hpcrl.inference.embedded.serving.api_common import json_response
from hpcrl.inference.embedded.serving.errors import bad_request
from hpcrl.inference.embedded.weights.turns import Turns
from hpcrl.weights.handover import decode_layer


class TurnsApi:
    """Handlers of ``/sleep``, ``/load_layer``, ``/wake_up`` and ``/is_sleeping``.

    What is asked wrongly is an `ApiError`, which `hpcrl.inference.embedded.serving.errors` answers.
    """

    def __init__(self, turns: Turns) -> None:
        self._turns = turns

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/sleep", self.sleep),
            web.post("/load_layer", self.load_layer),
            web.post("/wake_up", self.wake_up),
            web.get("/is_sleeping", self.is_sleeping),
        ]

    async def sleep(self, http: web.Request) -> web.Response:
        """Handle ``?level=2``: release weights and KV, and freeze requests."""
        if http.query.get("level", "2") != "2":
            raise bad_request("level must be 2: what was given back comes from the trainer again", "level")
        return json_response({"device_bytes": await asyncio.to_thread(self._turns.sleep)})

    async def load_layer(self, http: web.Request) -> web.Response:
        """Load a layer from shared memory of this node; the body is a `hpcrl.weights.handover.HandoverLayer`.

        Raises
        ------
        HandoffError
            The body is not one.
        """
        layer = decode_layer(await http.read())
        return json_response({"device_bytes": await asyncio.to_thread(self._turns.load, layer)})

    async def wake_up(self, http: web.Request) -> web.Response:
        """Handle ``?version=12``: all layers are loaded. Requests stay frozen until ``/resume``."""
        text = http.query.get("version", "")
        if not text.isdecimal():
            raise bad_request(f"version must be a policy version, not {text!r}", "version")
        return json_response({"device_bytes": await asyncio.to_thread(self._turns.wake, int(text))})

    async def is_sleeping(self, _: web.Request) -> web.Response:
        return json_response({"is_sleeping": self._turns.is_asleep, "version": self._turns.version})
