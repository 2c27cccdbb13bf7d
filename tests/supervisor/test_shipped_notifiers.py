"""Notifiers that hpcrl brings, against real servers on loopback: what arrives, and what each answer means."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from email import message_from_bytes, policy
from pathlib import Path
from typing import Any

import pytest
from aiosmtpd.smtp import SMTP, AuthResult, LoginPassword
from notice_lab import mail_server, make_notice, posted, secret_file
from patience import patience, wait_for

from hpcrl.config.outlets import NotifierConfig
from hpcrl.extend import ExtensionError
from hpcrl.runs.outlets.interface import NotSentError, RefusedNoticeError, UnknownOutcomeError
from hpcrl.runs.outlets.making import make_notifier
from hpcrl.runs.outlets.notices.delivery import send_in_process
from hpcrl.runs.outlets.notify import try_notice
from hpcrl.runs.outlets.shipped.command_notifier import Program
from hpcrl.runs.outlets.shipped.mail import Mail
from hpcrl.runs.outlets.shipped.webhook import Webhook, payload

ROOT = Path(__file__).parents[2]
APPRISE = ROOT / ".sinks" / "bin" / "python"


def test_a_webhook_gets_json_that_slack_and_discord_understand(tmp_path: Path) -> None:
    notice = make_notice()
    with posted() as server:
        token = secret_file(tmp_path / "token", "bearer-of-the-lab")
        Webhook(url=server.url, token_file=str(token)).notify(notice)
        ((_, headers, body),) = server.requests
    assert headers["Content-Type"] == "application/json"
    assert headers["Authorization"] == "Bearer bearer-of-the-lab"
    assert headers["Idempotency-Key"] == body["id"] == "0123456789ab.failed-0001"
    assert (body["schema"], body["event"], body["run"], body["step"]) == ("hpcrl.notice/1", "failed", "run-1", 12)
    assert body["why"] == list(notice.why)
    assert body["content"].splitlines() == [notice.title, *notice.why]
    # Slack's own signs are escaped, and Discord calls nobody
    assert body["text"].splitlines()[1] == "trainer 0 failed: &lt;@everyone&gt; &amp; co"
    assert body["allowed_mentions"] == {"parse": []}


def test_services_get_what_they_take() -> None:
    notice = make_notice(why=("x" * 3000, "", ""))
    assert set(payload(notice, "slack")) == {"text"}
    assert set(payload(notice, "discord")) == {"content", "allowed_mentions"}
    assert len(payload(notice, "discord")["content"]) == 2000


@pytest.mark.parametrize("state", [429, 500, 503])
def test_a_busy_server_is_asked_again(state: int) -> None:
    with posted() as server:
        server.answers, server.retry_after = [state], "7"
        with pytest.raises(NotSentError, match=f"the server answered {state}") as caught:
            Webhook(url=server.url).notify(make_notice())
    assert caught.value.after_s == 7.0


@pytest.mark.parametrize("state", [302, 308, 400, 403, 404])
def test_a_refusal_is_final_and_no_redirect_is_followed(state: int) -> None:
    with posted() as server:
        server.answers = [state]
        with pytest.raises(RefusedNoticeError, match=f"the server answered {state}"):
            Webhook(url=server.url).notify(make_notice())
        assert [path for path, _, _ in server.requests] == ["/hook"]


def test_no_connection_is_not_sent_and_no_answer_is_unknown() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(NotSentError, match="no connection: Connection refused"):
        Webhook(url=f"http://127.0.0.1:{port}/").notify(make_notice())
    with posted() as server:
        server.answers = [0]
        with pytest.raises(UnknownOutcomeError, match="it was sent, and not answered: it took too long"):
            Webhook(url=server.url, timeout_s=0.3).notify(make_notice())
    # a server that closes the connection in place of an answer
    with socket.create_server(("127.0.0.1", 0)) as rude:
        threading.Thread(target=lambda: _close_after_a_request(rude), daemon=True).start()
        with pytest.raises(UnknownOutcomeError, match="it was sent"):
            Webhook(url=f"http://127.0.0.1:{rude.getsockname()[1]}/").notify(make_notice())


def _close_after_a_request(server: socket.socket) -> None:
    connection, _ = server.accept()
    data = b""
    while b"allowed_mentions" not in data:
        data += connection.recv(65536)
    connection.close()


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({}, "url_file or url_env is required"),
        ({"url": "https://hooks.slack.com/services/T0/B0/abcdefgh"}, "this url is a secret"),
        ({"url": "https://lab.example.org/hook?key=abcdefgh"}, "this url is a secret"),
        ({"url": "https://user:abcdefgh@lab.example.org/hook"}, "this url is a secret"),
        ({"url": "ftp://lab.example.org/abcdefgh"}, "begins with https://"),
        ({"url": "http://a/", "url_env": "B"}, "set one of them"),
        ({"url_env": "NOT_SET_HERE"}, "the variable NOT_SET_HERE"),
        ({"url": "http://a/", "format": "telex"}, "format is auto"),
    ],
)
def test_a_webhook_that_cannot_be_is_refused_without_its_secret(parameters: dict[str, Any], words: str) -> None:
    with pytest.raises(ExtensionError) as caught:
        make_notifier(NotifierConfig(name="a", notifier="webhook", parameters=parameters))
    assert words in str(caught.value)
    assert "abcdefgh" not in str(caught.value)


def test_a_secret_that_others_can_read_is_refused(tmp_path: Path) -> None:
    path = secret_file(tmp_path / "url", "https://hooks.slack.com/services/T0/B0/abcdefgh")
    path.chmod(0o644)
    with pytest.raises(ExtensionError, match="others may read or write"):
        make_notifier(NotifierConfig(name="a", notifier="webhook", parameters={"url_file": str(path)}))


def test_what_a_try_prints_has_no_secrets(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "leaky.py").write_text(
        "from hpcrl.runs.outlets.secrets import secret_value\n"
        "class Leaky:\n"
        "    def __init__(self, path):\n"
        "        self.value = secret_value('url', file=path, env=None)\n"
        "    def notify(self, notice):\n"
        "        raise RuntimeError('cannot reach ' + self.value)\n"
    )
    path = secret_file(tmp_path / "url", "https://lab.example.org/abcdefgh")
    code = (
        "import sys, json; sys.path.insert(0, sys.argv[1])\n"
        "from hpcrl.config.outlets import NotifierConfig\n"
        "from hpcrl.runs.outlets.notify import try_notice\n"
        "from notice_lab import make_notice\n"
        "config = NotifierConfig(name='a', notifier='leaky:Leaky', parameters={'path': sys.argv[2]})\n"
        "print(json.dumps(try_notice(config, make_notice())))\n"
    )
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path), str(path)], env=environ, capture_output=True, text=True, check=True
    )
    result = json.loads(done.stdout)
    assert (result["outcome"], result["why"]) == ("failed", "RuntimeError: cannot reach [secret]")
    assert "Traceback" in done.stderr
    assert "abcdefgh" not in done.stderr


def test_a_program_gets_json_and_no_shell(tmp_path: Path) -> None:
    path = tmp_path / "got"
    code = "import sys; open(sys.argv[1], 'w').write(sys.stdin.read())"
    Program(command=[sys.executable, "-c", code, f"{path};$(id)"]).notify(make_notice())
    document = json.loads(Path(f"{path};$(id)").read_text())
    assert (document["event"], document["title"]) == ("failed", "hpcrl: run run-1 failed at step 12")
    with pytest.raises(NotSentError, match="ended with 75"):
        Program(command=["/bin/sh", "-c", "exit 75"]).notify(make_notice())
    with pytest.raises(RefusedNoticeError, match="ended with 3"):
        Program(command=["/bin/sh", "-c", "exit 3"]).notify(make_notice())
    for wrong in ("echo word", [], ["no-such-program-here"]):
        with pytest.raises(ValueError, match=r"command is a list|there is no program"):
            Program(command=wrong)


def test_what_takes_too_long_is_killed_with_its_children(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    config = NotifierConfig(
        name="slow",
        notifier="command",
        parameters={"command": ["/bin/sh", "-c", f"echo $$ > {pid_file}; exec sleep 600"]},
    )
    # time enough for the process to begin, and to start the program
    limit_s = round(6.0 * patience(), 1)
    result = send_in_process(config, make_notice(), limit_s)
    assert result.outcome == "unknown"
    assert f"it took longer than {limit_s:g} s" in result.why
    state = Path(f"/proc/{int(pid_file.read_text())}/stat")
    # a killed process ends when it gets a processor
    wait_for(lambda: not state.exists() or state.read_text().rpartition(")")[2].split()[0] in "ZX", 30.0, "end of it")


class Mailbox:
    """Keeps mails; answers of the server can be replaced."""

    def __init__(self) -> None:
        self.mails: list[tuple[str, list[str], bytes]] = []
        self.data_answer, self.unknown = "250 kept", ""

    async def handle_RCPT(self, server: SMTP, session: Any, envelope: Any, address: str, options: list[str]) -> str:
        if self.unknown and address == self.unknown:
            return "550 no such user"
        envelope.rcpt_tos.append(address)
        return "250 ok"

    async def handle_DATA(self, server: SMTP, session: Any, envelope: Any) -> str:
        if self.data_answer == "hang":
            await asyncio.sleep(600)
        if self.data_answer.startswith("250"):
            self.mails.append((envelope.mail_from, list(envelope.rcpt_tos), envelope.content))
        return self.data_answer


@pytest.fixture
def mailbox() -> Iterator[tuple[Mailbox, int]]:
    box = Mailbox()
    with mail_server(box) as port:
        yield box, port


def mail(port: int, **more: Any) -> Mail:
    return Mail(to=["a@lab.example.org", "b@lab.example.org"], sender="run@node", host="127.0.0.1", port=port, **more)


def test_a_mail_arrives(mailbox: tuple[Mailbox, int]) -> None:
    box, port = mailbox
    mail(port).notify(make_notice(title="hpcrl: run läuft failed"))
    ((sender, to, content),) = box.mails
    assert (sender, to) == ("run@node", ["a@lab.example.org", "b@lab.example.org"])
    read = message_from_bytes(content, policy=policy.default)
    assert read["Subject"] == "hpcrl: run läuft failed"
    assert read["Message-ID"] == "<0123456789ab.failed-0001@hpcrl.invalid>"
    assert read.get_content().splitlines()[:3] == [  # type: ignore[attr-defined]
        "trainer 0 failed: <@everyone> & co",
        "RuntimeError: no memory",
        "hpcrl resume run-1",
    ]


def test_answers_of_mail_servers(mailbox: tuple[Mailbox, int]) -> None:
    box, port = mailbox
    box.data_answer = "451 later"
    with pytest.raises(NotSentError, match="answered 451 later"):
        mail(port).notify(make_notice())
    box.data_answer = "554 no"
    with pytest.raises(RefusedNoticeError, match="answered 554 no"):
        mail(port).notify(make_notice())
    box.data_answer = "hang"
    with pytest.raises(UnknownOutcomeError, match="did not confirm"):
        mail(port, timeout_s=3.0).notify(make_notice())
    box.data_answer, box.unknown = "250 kept", "b@lab.example.org"
    with pytest.raises(RefusedNoticeError, match="but not for b@lab"):
        mail(port).notify(make_notice())
    assert [to for _, to, _ in box.mails] == [["a@lab.example.org"]]
    with socket.create_server(("127.0.0.1", 0)) as free:
        unused = free.getsockname()[1]
    with pytest.raises(NotSentError, match="no connection to"):
        mail(unused).notify(make_notice())


@pytest.mark.skipif(shutil.which("openssl") is None, reason="there is no openssl to make a certificate")
def test_a_password_is_only_sent_with_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import ssl

    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"),
            *("-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)),
        ],
        check=True,
        capture_output=True,
    )
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)
    seen: list[bytes] = []

    def login(server: SMTP, session: Any, envelope: Any, mechanism: str, data: Any) -> AuthResult:
        assert isinstance(data, LoginPassword)
        seen.append(data.password)
        return AuthResult(success=data.password == b"word-of-the-lab", handled=False)

    box = Mailbox()
    with mail_server(box, tls_context=context, authenticator=login, auth_required=True) as port:
        password = secret_file(tmp_path / "password", "word-of-the-lab")
        login_of: dict[str, Any] = {"tls": "starttls", "user": "u", "password_file": str(password)}
        with pytest.raises(NotSentError, match="certificate"):
            mail(port, **login_of).notify(make_notice())
        assert seen == []
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        mail(port, **login_of).notify(make_notice())
        assert len(box.mails) == 1
        secret_file(password, "another-word")
        with pytest.raises(RefusedNoticeError, match="answered 535"):
            mail(port, **login_of).notify(make_notice())
    with pytest.raises(ValueError, match="only sent with tls"):
        mail(port, user="u", password_file=str(password))


def test_sendmail_gets_the_mail(tmp_path: Path) -> None:
    program = tmp_path / "sendmail"
    program.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {tmp_path}/words\ncat > {tmp_path}/mail\n')
    program.chmod(0o755)
    Mail(to=["a@lab.example.org"], sender="run@node", sendmail=str(program)).notify(make_notice())
    assert (tmp_path / "words").read_text().split() == ["-i", "-f", "run@node", "--", "a@lab.example.org"]
    assert message_from_bytes((tmp_path / "mail").read_bytes())["Subject"] == "hpcrl: run run-1 failed at step 12"


@pytest.mark.parametrize("address", ["no address", "a@b\nBcc: c@d", "-oQ/tmp@b", ""])
def test_addresses_are_checked(address: str) -> None:
    with pytest.raises(ValueError, match="not a mail address"):
        Mail(to=[address], host="127.0.0.1")


def _has_apprise() -> bool:
    code = "import apprise"
    return APPRISE.is_file() and not subprocess.run([APPRISE, "-c", code], capture_output=True, check=False).returncode


@pytest.mark.skipif(not _has_apprise(), reason="Apprise is not there (tools/bootstrap.py --sinks)")
def test_apprise_in_an_interpreter_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    with posted() as server:
        urls = secret_file(tmp_path / "urls", f"json://127.0.0.1:{server.port}/first\njson://127.0.0.1:{server.port}/b")
        config = NotifierConfig(
            name="many", notifier="apprise", python=str(APPRISE), parameters={"urls_file": str(urls)}
        )
        assert send_in_process(config, make_notice(), 60.0).outcome == "sent"
        assert sorted(path for path, _, _ in server.requests) == ["/b", "/first"]
        assert server.bodies[0]["title"] == "hpcrl: run run-1 failed at step 12"
        assert server.bodies[0]["type"] == "failure"
        server.answers = [500, 500]
        result = send_in_process(config, make_notice(), 60.0)
        assert result.outcome == "failed"
        assert "Apprise could not send it" in result.why


def test_a_missing_library_names_its_package() -> None:
    result = try_notice(NotifierConfig(name="a", notifier="apprise", parameters={"urls_env": "A"}), make_notice())
    assert result["outcome"] == "failed"
    assert "pip install apprise" in result["why"]
