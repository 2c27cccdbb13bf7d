"""Errors on the wire, in the shape of OpenAI's and vLLM's: ``{"error": {message, type, param, code}}``."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from http import HTTPStatus

import msgspec
from aiohttp import web

from hpcrl.errors import HandoffError
from hpcrl.inference.embedded.weights.sessions import UpdateOrderError

_log = logging.getLogger(__name__)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class ApiError(Exception):
    """An answer that is an error.

    Attributes
    ----------
    status:
        HTTP status.
    kind:
        The ``type`` field.
    param:
        The request field that is wrong, where one is.
    """

    def __init__(self, status: int, message: str, *, kind: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.kind, self.param = status, kind, param


def bad_request(message: str, param: str | None = None) -> ApiError:
    """Return the error for a request that cannot be served as it is."""
    return ApiError(400, message, kind="BadRequestError", param=param)


def error_body(error: ApiError) -> bytes:
    """Return an error as JSON."""
    return msgspec.json.encode(
        {"error": {"message": str(error), "type": error.kind, "param": error.param, "code": error.status}}
    )


_CLIENT_HAS_GONE = 499
"""Status as nginx logs it; it is never sent."""


def _as_api_error(error: Exception) -> ApiError:
    if isinstance(error, ApiError):
        return error
    if isinstance(error, web.HTTPException):
        return ApiError(error.status, error.reason, kind=HTTPStatus(error.status).phrase)
    if isinstance(error, UpdateOrderError):
        return ApiError(409, str(error), kind="ConflictError")
    if isinstance(error, (HandoffError, ValueError)):
        return bad_request(str(error))
    _log.exception("a request failed")
    return ApiError(500, f"{type(error).__name__}: {error}", kind="InternalServerError")


@web.middleware
async def error_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn exceptions of handlers into error answers."""
    try:
        return await handler(request)
    except ConnectionResetError as error:
        # the client is gone, as an orchestrator that drops a rollout: the answer will not be read
        _log.debug("a client has disconnected: %s", error)
        return web.Response(status=_CLIENT_HAS_GONE)
    except Exception as error:  # noqa: BLE001 - every failure becomes an answer here
        answer = _as_api_error(error)
        return web.Response(status=answer.status, body=error_body(answer), content_type="application/json")
