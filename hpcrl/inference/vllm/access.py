"""Authentication of vLLM's HTTP servers (``--middleware``): every path refuses requests without the run's token.

vLLM's own ``--api-key`` guards only some paths, and is visible in the list of processes. This is the outermost layer
of each API server process, and knows the run from the environment that the supervisor has set.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from hpcrl.errors import RunDirError
from hpcrl.inference.vllm.uvicorn_limits import limit_uvicorn
from hpcrl.network.credentials import Refusal
from hpcrl.processes.environment_marks import START_WEIGHTS_VARIABLE
from hpcrl.runs.refusals import gate_from_env

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

_POLICY_VIOLATION = 1008
_LABEL_ALONE = "/update_weight_version"
"""Path that changes the label of the weights but not the weights."""


class RunAccess:
    """Hands on what brings the token and belongs to the attempt."""

    def __init__(self, app: App, *, open_health: bool = False) -> None:
        """Read the token.

        Parameters
        ----------
        open_health:
            See `hpcrl.network.auth.Gate`; vLLM answers ``GET /health`` with a status alone.

        Raises
        ------
        RunDirError
            The process belongs to no run, or its token cannot be read: then no request is served.
        """
        self._app, self._gate = app, gate_from_env("vllm", open_health=open_health)
        if self._gate.credentials is None:
            raise RunDirError(
                "HPCRL_RUN_DIR is not set: this server could not check requests\n"
                "    hint: outside of a run leave --middleware away, and listen on 127.0.0.1"
            )
        self._keeps_weights = os.environ.get(START_WEIGHTS_VARIABLE) == "1"
        # this layer is made before the server accepts connections
        limit_uvicorn(self._gate.pending)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer one connection of ASGI."""
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, send)
        authorization = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        client = tuple(scope.get("client") or ("", None))
        method = scope.get("method", scope["type"])
        refusal = self._gate.refusal(
            method, scope["path"], authorization.decode("latin-1"), client[0], connection=client
        )
        if refusal is None and not self._keeps_weights and scope["path"].rstrip("/").endswith(_LABEL_ALONE):
            refusal = Refusal(409, "label_alone", "a label changes together with the weights, by /finish_weight_update")
        if refusal is None:
            last = scope["type"] == "http" and self._gate.is_open(method, scope["path"])
            return await self._app(scope, receive, _Closing(send) if last else send)
        if scope["type"] != "http":
            return await send({"type": "websocket.close", "code": _POLICY_VIOLATION})
        headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"connection", b"close")]
        if refusal.status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
        await send({"type": "http.response.body", "body": refusal.message.encode()})
        return None


class _Closing:
    """Sends an answer after which the server closes the connection."""

    def __init__(self, send: Send) -> None:
        self._send = send

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = [(name, value) for name, value in message.get("headers", ()) if name.lower() != b"connection"]
            message = {**message, "headers": [*headers, (b"connection", b"close")]}
        await self._send(message)


class RunAccessBehindRouter(RunAccess):
    """The same behind vllm-router, whose health checks cannot bring a token."""

    def __init__(self, app: App) -> None:
        super().__init__(app, open_health=True)
