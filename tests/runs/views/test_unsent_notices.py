"""`hpcrl status` says which messages of notifiers were not sent, until one is sent again."""

from __future__ import annotations

import json
from pathlib import Path

from runs_testing import Hpcrl, make_run, write_steps

from hpcrl.runs.notice_claims import Claim, Claims, Outcome
from hpcrl.runs.rundir import RunDir


def noted(run: RunDir, notifier: str, key: str, outcome: Outcome, why: str = "", *, time_s: float = 1.8e9) -> None:
    claims = Claims(run, notifier)
    claims.since_s()
    assert claims.take(key, Claim(time_s=time_s, attempt=1, event="best", title=f"run-1: {key}"))
    claims.settle(key, Claim(time_s=time_s, attempt=1, event="best", title=f"run-1: {key}", outcome=outcome, why=why))


def warnings_of(hpcrl: Hpcrl, run: RunDir) -> list[str]:
    found: list[str] = json.loads(hpcrl("status", str(run.path), "--json")[1])["warnings"]
    return [each for each in found if each.startswith("notifier ")]


def test_messages_that_were_not_sent_are_warnings(tmp_path: Path, hpcrl: Hpcrl) -> None:
    run = make_run(tmp_path)
    write_steps(run, 2)
    assert warnings_of(hpcrl, run) == []
    noted(run, "chat", "best-000001", "sent")
    noted(run, "chat", "best-000002", "failed", "the server\nanswered 403", time_s=1.8e9 + 1)
    noted(run, "chat", "best-000003", "failed", "the server answered 404", time_s=1.8e9 + 2)
    noted(run, "mail", "best-000002", "unknown", "no answer within 10 s")
    # these say nothing about whether the notifier works
    noted(run, "chat", "best-000004", "held_back", "", time_s=1.8e9 + 3)
    noted(run, "hook", "best-000001", "old")
    chat, mail = warnings_of(hpcrl, run)
    assert chat.startswith("notifier chat: 'run-1: best-000003' was not sent (")
    assert "): the server answered 404; 2 of its 3 messages (hpcrl notify ls " in chat
    assert mail.startswith("notifier mail: 'run-1: best-000002' may not have been sent (")
    text = " ".join(hpcrl("status", str(run.path))[1].split())
    assert "warning: notifier chat: 'run-1: best-000003' was not sent" in text
    # it works again
    noted(run, "chat", "best-000005", "sent", "", time_s=1.8e9 + 4)
    assert [each.split(":")[0] for each in warnings_of(hpcrl, run)] == ["notifier mail"]
