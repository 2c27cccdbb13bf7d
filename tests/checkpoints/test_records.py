"""What is written beside the entries, as the next attempt and other roles read it back."""

from __future__ import annotations

import json
import os
from pathlib import Path

import msgspec
import pytest

from hpcrl.checkpoints.history import Saved, add_saved, read_saved
from hpcrl.checkpoints.restore import RestoreDecision, SkippedEntry


def test_a_decision_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "restore.json"
    assert RestoreDecision.find(path) is None
    decision = RestoreDecision(
        step=4,
        verified="content",
        seconds=0.5,
        skipped=[SkippedEntry(6, "it is damaged")],
        asked="--from-step 4",
        saved_by=2,
        put_aside=[6, 8],
    )
    decision.write(path)
    found = RestoreDecision.find(path)
    assert found == decision
    assert isinstance(found, RestoreDecision)
    said = json.loads(path.read_bytes())
    assert (said["step"], said["skipped"], said["put_aside"]) == (4, [{"step": 6, "reason": "it is damaged"}], [6, 8])


def test_a_decision_that_cannot_be_read_is_not_counted(tmp_path: Path) -> None:
    """An error, and not a run that begins from nothing."""
    (tmp_path / "restore.json").write_text('{"step": "four"}')
    with pytest.raises(msgspec.ValidationError):
        RestoreDecision.find(tmp_path / "restore.json")


def test_what_was_ever_saved_is_known_in_its_order(tmp_path: Path) -> None:
    assert read_saved(tmp_path) == []
    assert read_saved(tmp_path / "restore.json" / "below") == []
    for step, attempt in ((2, 1), (4, 1), (3, 2)):
        add_saved(tmp_path, step=step, attempt=attempt)
    found = read_saved(tmp_path)
    assert [(each.step, each.attempt) for each in found] == [(2, 1), (4, 1), (3, 2)]
    assert all(isinstance(each, Saved) and each.time_s > 1.7e9 for each in found)


def test_what_was_saved_is_durable_when_it_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, bytes]] = []
    path, fsync = tmp_path / "history.jsonl", os.fsync

    def seen(fd: int) -> None:
        if os.path.samestat(os.fstat(fd), path.stat()):
            calls.append(("fsync", path.read_bytes()))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", seen)
    add_saved(tmp_path, step=2, attempt=1)
    assert calls[-1] == ("fsync", path.read_bytes())
    assert calls[-1][1].endswith(b"}\n")


def test_a_torn_line_costs_itself_alone(tmp_path: Path) -> None:
    add_saved(tmp_path, step=2, attempt=1)
    path = tmp_path / "history.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + whole[: len(whole) // 2])
    add_saved(tmp_path, step=4, attempt=2)
    with path.open("ab") as stream:
        stream.write(b'{"step":6}\n')  # a line of something else
    assert [each.step for each in read_saved(tmp_path)] == [2, 4]


def test_what_was_ever_saved_of_a_file_is_nothing(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file in the place of the directory")
    assert read_saved(tmp_path / "checkpoints") == []
