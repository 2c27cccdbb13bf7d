"""Errors as programs that speak OpenAI's API know them: ``{"error": {message, type, param, code}}``."""

from __future__ import annotations

from typing import Any


class GatewayError(Exception):
    """An answer that is an error.

    Attributes
    ----------
    status:
        HTTP status.
    code:
        For programs, for example ``context_length_exceeded``.
    param:
        The field that is wrong, where one is.
    retry:
        An SDK may repeat the request.
    """

    def __init__(
        self, status: int, message: str, *, code: str | None = None, param: str | None = None, retry: bool = False
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param, self.retry = status, code, param, retry

    @property
    def body(self) -> dict[str, Any]:
        """Return the JSON of the answer."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


def bad_request(message: str, param: str | None = None) -> GatewayError:
    """Return the error for a request that cannot be served as it is."""
    return GatewayError(400, message, code="invalid_value", param=param)


def context_exceeded(tokens: int, most: int) -> GatewayError:
    """Return the error for a prompt of ``tokens`` tokens that leaves no room for an answer in ``most``."""
    message = (
        f"This model's maximum context length is {most} tokens. However, your messages resulted in {tokens} tokens. "
        "Please reduce the length of the messages."
    )
    return GatewayError(400, message, code="context_length_exceeded", param="messages")


def rollout_failed(error: Exception) -> GatewayError:
    """Return the error for all further requests of a rollout that has failed: a program should end."""
    return GatewayError(400, f"the rollout has failed: {type(error).__name__}", code="rollout_failed")
