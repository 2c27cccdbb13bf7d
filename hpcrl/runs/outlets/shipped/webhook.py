"""Messages as an HTTP POST: JSON for programs, or what the webhooks of Slack and Discord take."""

from __future__ import annotations

import json
import socket
import urllib.error
import urllib.request
from typing import Any, Literal
from urllib.parse import urlsplit

from hpcrl import __version__
from hpcrl.runs.outlets.interface import Notice, NotSentError, RefusedNoticeError, UnknownOutcomeError
from hpcrl.runs.outlets.secrets import secret_value

Format = Literal["auto", "json", "slack", "discord"]
_DISCORD_MAX = 2000
"""Maximum characters of a message at Discord."""
_MAX_AFTER_S = 60.0
"""Maximum pause in seconds that a server can ask for."""
_BUSY = frozenset({408, 425, 429, 500, 502, 503, 504})
"""HTTP states of servers that have not taken a request and may take it later."""
_READ_BYTES = 200


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Follows no redirect: the address is a secret, and the body is for this server alone."""

    def redirect_request(self, *_: Any) -> None:
        return None


class Webhook:
    """Sends a message to a URL.

    Parameters
    ----------
    url_file, url_env:
        File or variable that has the URL, which is a secret at most services.
    url:
        The URL itself, where it has no secret: it is shown with the recipe.
    format:
        ``json`` is all of the message, with ``text`` and ``content`` for servers that understand Slack or Discord;
        ``auto`` chooses by the host.
    token_file, token_env:
        File or variable with a bearer token.
    timeout_s:
        Maximum wait in seconds for the connection, and for the answer.
    """

    def __init__(
        self,
        *,
        url: str | None = None,
        url_file: str | None = None,
        url_env: str | None = None,
        format: Format = "auto",
        token_file: str | None = None,
        token_env: str | None = None,
        timeout_s: float = 10.0,
    ) -> None:
        if url is not None and (url_file is not None or url_env is not None):
            raise ValueError("url and url_file (or url_env) are both set: set one of them")
        if url is not None and _is_secret(url):
            raise ValueError("this url is a secret: put it into a file of mode 0600 and name that by url_file")
        found = url or secret_value("url", file=url_file, env=url_env)
        parts = urlsplit(found or "")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("the url of a webhook begins with https:// or http://, and has a host")
        if format not in ("auto", "json", "slack", "discord"):
            raise ValueError(f"format is auto, json, slack or discord, not {format!r}")
        self._url, self._timeout_s = str(found), timeout_s
        self._format = _format_of(parts.hostname, parts.path) if format == "auto" else format
        self._token = secret_value("token", file=token_file, env=token_env, required=False)

    def notify(self, notice: Notice) -> None:
        """Send it once.

        Raises
        ------
        NotSentError
            No connection, or the server is busy.
        RefusedNoticeError
            The server refused it.
        UnknownOutcomeError
            The request was sent, and no answer came.
        """
        headers = {
            "Content-Type": "application/json",
            "User-Agent": f"hpcrl/{__version__}",
            "Idempotency-Key": notice.id,
        }
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        body = json.dumps(payload(notice, self._format)).encode()
        request = urllib.request.Request(self._url, data=body, headers=headers, method="POST")
        opener = urllib.request.build_opener(_NoRedirect)
        try:
            with opener.open(request, timeout=self._timeout_s) as answer:
                answer.read(_READ_BYTES)
        except urllib.error.HTTPError as error:
            with error:  # it is the open answer, too
                raise _refusal(error) from None
        except urllib.error.URLError as error:  # before the request was sent as a whole
            raise NotSentError(f"no connection: {_reason(error.reason)}") from None
        except (OSError, urllib.error.ContentTooShortError, ValueError) as error:
            raise UnknownOutcomeError(f"it was sent, and not answered: {_reason(error)}") from None
        except Exception as error:  # noqa: BLE001 - http.client: an answer that is not HTTP
            raise UnknownOutcomeError(f"it was sent, and the answer was no HTTP: {type(error).__name__}") from None


def payload(notice: Notice, form: str) -> dict[str, Any]:
    """Return the JSON that is sent."""
    slack = notice.text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    # a name in a message must not mention all users
    discord = {"content": notice.text[:_DISCORD_MAX], "allowed_mentions": {"parse": []}}
    if form == "slack":
        return {"text": slack}
    return discord if form == "discord" else {**notice.document(), "text": slack, **discord}


def _refusal(error: urllib.error.HTTPError) -> NotSentError | RefusedNoticeError:
    what = f"the server answered {error.code} {error.reason}"
    if error.code in _BUSY:
        return NotSentError(what, after_s=_after_s(error.headers.get("Retry-After")))
    return RefusedNoticeError(what)


def _format_of(host: str, path: str) -> str:
    if host == "hooks.slack.com":
        return "slack"
    return "discord" if host in ("discord.com", "discordapp.com") and path.startswith("/api/webhooks/") else "json"


def _is_secret(url: str) -> bool:
    """Return whether a URL opens something by itself, as far as its form says so."""
    parts = urlsplit(url)
    host = (parts.hostname or "").lower()
    services = ("slack.com", "discord.com", "discordapp.com", "office.com", "webhook.office.com", "googleapis.com")
    return bool(parts.password or parts.query) or any(host == each or host.endswith(f".{each}") for each in services)


def _after_s(header: str | None) -> float:
    try:
        return min(max(float(header or 0.0), 0.0), _MAX_AFTER_S)
    except ValueError:
        return 0.0  # a date


def _reason(reason: object) -> str:
    if isinstance(reason, TimeoutError | socket.timeout):
        return "it took too long"
    return getattr(reason, "strerror", None) or type(reason).__name__
