"""Messages as mails: by the ``sendmail`` of the node, or by SMTP."""

from __future__ import annotations

import getpass
import smtplib
import socket
import ssl
from collections.abc import Sequence
from email.headerregistry import Address
from email.message import EmailMessage
from email.utils import formatdate
from pathlib import Path
from typing import Literal

from hpcrl.runs.outlets.interface import Notice, NotSentError, RefusedNoticeError, UnknownOutcomeError
from hpcrl.runs.outlets.secrets import secret_value
from hpcrl.runs.outlets.shipped.command_notifier import run_with_input

_PORTS = {"none": 25, "starttls": 587, "implicit": 465}


class Mail:
    """Sends a mail.

    Parameters
    ----------
    to:
        Addresses.
    sender:
        Address of the sender; by default the user at this host.
    host, port:
        SMTP server. Without a host, ``sendmail`` is used.
    tls:
        ``starttls``, ``implicit`` or ``none``.
    user, password_file, password_env:
        Login at the SMTP server; never without TLS.
    sendmail:
        Path of that program.
    timeout_s:
        Maximum wait in seconds for each answer of the SMTP server.
    """

    def __init__(
        self,
        *,
        to: Sequence[str],
        sender: str | None = None,
        host: str | None = None,
        port: int | None = None,
        tls: Literal["none", "starttls", "implicit"] = "none",
        user: str | None = None,
        password_file: str | None = None,
        password_env: str | None = None,
        sendmail: str = "/usr/sbin/sendmail",
        timeout_s: float = 10.0,
    ) -> None:
        if isinstance(to, str) or not to:
            raise ValueError("to is a list of addresses")
        sender = sender or f"{getpass.getuser()}@{socket.gethostname()}"
        for address in (*to, sender):
            _check_address(address)
        if tls not in _PORTS:
            raise ValueError(f"tls is none, starttls or implicit, not {tls!r}")
        if host is None and not Path(sendmail).is_file():
            raise ValueError(f"there is no {sendmail} here: name the SMTP server with host, or the program by sendmail")
        self._password = secret_value("password", file=password_file, env=password_env, required=user is not None)
        if user is not None and tls == "none":
            raise ValueError("a password is only sent with tls: starttls or implicit")
        self._to, self._sender, self._host, self._port = list(to), sender, host, port or _PORTS[tls]
        self._tls, self._user, self._sendmail, self._timeout_s = tls, user, sendmail, timeout_s

    def notify(self, notice: Notice) -> None:
        """Send it once.

        Raises
        ------
        NotSentError
            No connection, or the server says that it will take it later.
        RefusedNoticeError
            The server refuses it, or some of the addresses.
        UnknownOutcomeError
            The mail was handed over, and the server did not say whether it takes it.
        """
        mail = self.message(notice)
        if self._host is None:
            run_with_input([self._sendmail, "-i", "-f", self._sender, "--", *self._to], mail.as_bytes())
            return
        server = self._connected()
        try:
            refused = self._hand_over(server, mail)
        finally:
            server.close()
        if refused:
            raise RefusedNoticeError(f"the server took it, but not for {', '.join(sorted(refused))}")

    def message(self, notice: Notice) -> EmailMessage:
        """Return the mail of a message."""
        mail = EmailMessage()
        mail["Subject"] = notice.title
        mail["From"], mail["To"] = self._sender, ", ".join(self._to)
        mail["Date"] = formatdate(notice.time_s, localtime=False)
        # the same in every try, by which mail servers and readers recognise a copy
        mail["Message-ID"] = f"<{notice.id}@hpcrl.invalid>"
        mail["Auto-Submitted"] = "auto-generated"
        mail.set_content("\n".join((*notice.why, "", f"{notice.directory}", "")))
        return mail

    def _connected(self) -> smtplib.SMTP:
        assert self._host is not None
        try:
            if self._tls == "implicit":
                return smtplib.SMTP_SSL(
                    self._host, self._port, timeout=self._timeout_s, context=ssl.create_default_context()
                )
            return smtplib.SMTP(self._host, self._port, timeout=self._timeout_s)
        except smtplib.SMTPResponseException as error:
            raise _answer(error) from None
        except (OSError, smtplib.SMTPException) as error:
            raise NotSentError(f"no connection to {self._host}:{self._port}: {_words(error)}") from None

    def _hand_over(self, server: smtplib.SMTP, mail: EmailMessage) -> dict[str, tuple[int, bytes]]:
        """Return the addresses that the server refused."""
        try:
            if self._tls == "starttls":
                server.starttls(context=ssl.create_default_context())
            if self._user is not None:
                server.login(self._user, self._password or "")
            server.ehlo_or_helo_if_needed()
            _expect(server.mail(self._sender))
            replies = {address: server.rcpt(address) for address in self._to}
            refused = {address: reply for address, reply in replies.items() if reply[0] >= 400}
            if len(refused) == len(self._to):
                _expect(next(iter(refused.values())))
        except smtplib.SMTPResponseException as error:
            raise _answer(error) from None
        except (OSError, smtplib.SMTPException) as error:
            raise NotSentError(f"{self._host} ended the conversation: {_words(error)}") from None
        try:
            _expect(server.data(mail.as_bytes()))
        except smtplib.SMTPResponseException as error:
            raise _answer(error) from None
        except (OSError, smtplib.SMTPException) as error:
            raise UnknownOutcomeError(f"{self._host} did not confirm the mail: {_words(error)}") from None
        return refused


def _expect(reply: tuple[int, bytes]) -> None:
    if reply[0] >= 400:
        raise smtplib.SMTPResponseException(*reply)


def _answer(error: smtplib.SMTPResponseException) -> NotSentError | RefusedNoticeError:
    text = error.smtp_error.decode(errors="replace") if isinstance(error.smtp_error, bytes) else str(error.smtp_error)
    what = f"the mail server answered {error.smtp_code} {text.splitlines()[0] if text else ''}".rstrip()
    return NotSentError(what) if 400 <= error.smtp_code < 500 else RefusedNoticeError(what)


def _check_address(address: str) -> None:
    try:
        parsed = Address(addr_spec=address)
    except (ValueError, IndexError) as error:
        raise ValueError(f"{address!r} is not a mail address: {error}") from None
    if not parsed.username or not parsed.domain or address.startswith("-"):
        raise ValueError(f"{address!r} is not a mail address")


def _words(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "it took too long"
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
