"""Consumed rollouts: a file a step, then a file for a hundred; what is read is what was written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpcrl import reporting
from hpcrl.rollouts import files as rollout_files
from hpcrl.rollouts.files import RolloutFiles
from hpcrl.runs.consumed import ConsumedRollouts


def lines(step: int, attempt: int = 1) -> bytes:
    return b"".join(json.dumps({"group": step, "member": i, "by": attempt}).encode() + b"\n" for i in range(2))


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if not path.name.startswith("."))


def read(root: Path, step: int) -> list[dict[str, int]]:
    return [json.loads(line) for line in ConsumedRollouts(root).of(step)]


def test_a_full_hundred_shares_a_file(tmp_path: Path) -> None:
    files = RolloutFiles.claim(tmp_path, 1)
    for step in range(1, 202):
        files.write(step, lines(step), wait_s=30.0)
    assert reporting.flush(30.0)
    assert names(tmp_path) == ["step-000201.jsonl", "steps-000001-000100.jsonl", "steps-000101-000200.jsonl"]
    consumed = ConsumedRollouts(tmp_path)
    assert consumed.steps() == list(range(1, 202))
    assert [json.loads(line)["group"] for line in consumed] == [step for step in range(1, 202) for _ in range(2)]
    assert read(tmp_path, 150) == [{"step": 150, "group": 150, "member": i, "by": 1} for i in range(2)]
    assert read(tmp_path, 202) == []


def test_steps_that_are_done_again_count(tmp_path: Path) -> None:
    first = RolloutFiles.claim(tmp_path, 1)
    for step in range(1, 103):
        first.write(step, lines(step), wait_s=30.0)
    assert reporting.flush(30.0)
    again = RolloutFiles.claim(tmp_path, 2)
    for step in range(95, 100):
        again.write(step, lines(step, 2), wait_s=30.0)
    assert {line["by"] for line in read(tmp_path, 97)} == {2}
    assert {line["by"] for line in read(tmp_path, 94)} == {1}
    again.write(101, lines(101, 2), wait_s=30.0)
    assert reporting.flush(30.0)
    assert names(tmp_path) == ["step-000101.jsonl", "step-000102.jsonl", "steps-000001-000100.jsonl"]
    assert [read(tmp_path, step)[0]["by"] for step in (94, 95, 99, 100, 101)] == [1, 2, 2, 1, 2]
    assert ConsumedRollouts(tmp_path).steps() == list(range(1, 103))


def test_an_attempt_that_was_thought_dead_shares_nothing(tmp_path: Path) -> None:
    old = RolloutFiles.claim(tmp_path, 1)
    for step in range(1, 101):
        old.write(step, lines(step), wait_s=30.0)
    RolloutFiles.claim(tmp_path, 2).write(100, lines(100, 2), wait_s=30.0)
    old.write(101, lines(101), wait_s=30.0)
    assert reporting.flush(30.0)
    assert len(names(tmp_path)) == 100
    assert {line["by"] for line in read(tmp_path, 100)} == {2}


def test_large_steps_keep_their_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout_files, "_SHARED_BYTES", 1000)
    files = RolloutFiles.claim(tmp_path, 1)
    for step in range(1, 102):
        files.write(step, lines(step), wait_s=30.0)
    assert reporting.flush(30.0)
    assert len(names(tmp_path)) == 101
