"""What a filesystem refuses for a while is tried again, what it refuses for good is not."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from hpcrl.errors import RunDirError, refusal
from hpcrl.network.credentials import read_token
from hpcrl.storage.retry import is_transient, retry_transient


def failing(number: int, times: int) -> tuple[Callable[[], str], list[int]]:
    tries: list[int] = []

    def action() -> str:
        tries.append(1)
        if len(tries) <= times:
            raise OSError(number, os.strerror(number), "/share/run.json")
        return "done"

    return action, tries


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.ESTALE, errno.EIO])
def test_what_passes_is_tried_again(number: int) -> None:
    action, tries = failing(number, 3)
    assert retry_transient(action, limit_s=60.0, what="a file", sleep=lambda seconds: None) == "done"
    assert len(tries) == 4


def test_what_does_not_pass_is_raised_at_once() -> None:
    action, tries = failing(errno.EACCES, 3)
    with pytest.raises(PermissionError):
        retry_transient(action, limit_s=60.0, what="a file")
    assert len(tries) == 1


def test_what_stays_is_raised_when_the_time_is_over() -> None:
    action, tries = failing(errno.ESTALE, 1000)
    with pytest.raises(OSError, match="Stale file handle"):
        retry_transient(action, limit_s=0.5, what="a file")
    assert 1 < len(tries) < 10


def test_an_error_for_people_that_came_from_a_file_passes_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def stale(*_: object) -> int:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr(os, "open", stale)
    with pytest.raises(RunDirError) as failure:
        read_token(Path("run", "token"))
    assert is_transient(failure.value)
    assert not is_transient(RunDirError("it holds no token"))


def test_commands_say_a_stale_handle_without_a_traceback() -> None:
    said = refusal(OSError(errno.ESTALE, os.strerror(errno.ESTALE), "/share/plan.json"))
    assert said is not None
    assert str(said).startswith("/share/plan.json: the handle is stale")
    assert "hint" in str(said)
