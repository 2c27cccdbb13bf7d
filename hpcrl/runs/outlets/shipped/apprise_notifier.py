"""Messages by Apprise, which knows a hundred services."""

from __future__ import annotations

from typing import Any

from hpcrl.runs.outlets.interface import Notice, RefusedNoticeError
from hpcrl.runs.outlets.secrets import secret_value
from hpcrl.runs.outlets.shipped.library import import_library

_TYPES = {"completed": "success", "best": "success", "failed": "failure", "stalled": "warning", "disk": "warning"}


class AppriseNotifier:
    """Sends a message to all URLs of Apprise in a file or a variable, one a line.

    Parameters
    ----------
    urls_file, urls_env:
        That file or variable: such URLs have passwords and tokens in them.
    """

    def __init__(self, *, urls_file: str | None = None, urls_env: str | None = None) -> None:
        apprise: Any = import_library("apprise", "apprise")
        urls = (secret_value("urls", file=urls_file, env=urls_env) or "").split()
        self._servers = apprise.Apprise()
        for number, url in enumerate(urls, 1):
            if not self._servers.add(url):
                raise ValueError(f"Apprise does not know URL {number} of {len(urls)}")

    def notify(self, notice: Notice) -> None:
        """Send it once to each.

        Raises
        ------
        RefusedNoticeError
            Apprise says that one of them did not take it, or that it does not know: another try could send it twice to
            the others.
        """
        kind = _TYPES.get(notice.event, "info")
        if not self._servers.notify(title=notice.title, body="\n".join(notice.why), notify_type=kind):
            raise RefusedNoticeError("Apprise could not send it to all URLs: the log has its messages")
