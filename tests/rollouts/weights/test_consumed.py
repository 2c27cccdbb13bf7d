"""Consumed rollouts: a file a step, then a file for a hundred; what is read is what was written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpcrl.reporting import reports
from hpcrl.rollouts.core import consumed_files as rollout_files
from hpcrl.rollouts.core.consumed_files import RolloutFiles
from hpcrl.runs.consumed import ConsumedRollouts, pack_lines


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
    assert reports.flush(30.0)
    assert names(tmp_path) == ["step-000201.jsonl", "steps-000001-000100.jsonl.gz", "steps-000101-000200.jsonl.gz"]
    consumed = ConsumedRollouts(tmp_path)
    assert consumed.steps() == list(range(1, 202))
    assert [json.loads(line)["group"] for line in consumed] == [step for step in range(1, 202) for _ in range(2)]
    assert read(tmp_path, 150) == [{"step": 150, "group": 150, "member": i, "by": 1} for i in range(2)]
    assert read(tmp_path, 202) == []
    assert [consumed.newest_steps(count) for count in (1, 3)] == [[201], [199, 200, 201]]


def test_only_the_newest_files_are_read_for_the_newest_steps(tmp_path: Path) -> None:
    (tmp_path / "steps-000001-000100.jsonl.gz").write_bytes(b"damaged")
    (tmp_path / "step-000101.jsonl").write_bytes(lines(101))
    consumed = ConsumedRollouts(tmp_path)
    assert consumed.newest_steps(1) == [101]
    with pytest.raises(OSError, match="gzip"):
        consumed.steps()
    whole = pack_lines(b'{"step":1,"group":1}\n' * 500)
    (tmp_path / "steps-000001-000100.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(OSError, match="is damaged"):
        ConsumedRollouts(tmp_path).of(1)


def test_a_hundred_of_an_earlier_version_is_read_and_compressed_when_it_is_written_again(tmp_path: Path) -> None:
    numbered = [b'{"step":%d,' % step + lines(step).splitlines()[0][1:] + b"\n" for step in range(1, 101)]
    (tmp_path / "steps-000001-000100.jsonl").write_bytes(b"".join(numbered))
    assert ConsumedRollouts(tmp_path).steps() == list(range(1, 101))
    again = RolloutFiles.claim(tmp_path, 2)
    for step in range(99, 102):
        again.write(step, lines(step, 2), wait_s=30.0)
    assert reports.flush(30.0)
    assert names(tmp_path) == ["step-000101.jsonl", "steps-000001-000100.jsonl.gz"]
    assert [read(tmp_path, step)[0]["by"] for step in (98, 99, 100, 101)] == [1, 2, 2, 2]


def test_steps_that_are_done_again_count(tmp_path: Path) -> None:
    first = RolloutFiles.claim(tmp_path, 1)
    for step in range(1, 103):
        first.write(step, lines(step), wait_s=30.0)
    assert reports.flush(30.0)
    again = RolloutFiles.claim(tmp_path, 2)
    for step in range(95, 100):
        again.write(step, lines(step, 2), wait_s=30.0)
    assert {line["by"] for line in read(tmp_path, 97)} == {2}
    assert {line["by"] for line in read(tmp_path, 94)} == {1}
    again.write(101, lines(101, 2), wait_s=30.0)
    assert reports.flush(30.0)
    assert names(tmp_path) == ["step-000101.jsonl", "step-000102.jsonl", "steps-000001-000100.jsonl.gz"]
    assert [read(tmp_path, step)[0]["by"] for step in (94, 95, 99, 100, 101)] == [1, 2, 2, 1, 2]
    assert ConsumedRollouts(tmp_path).steps() == list(range(1, 103))


def test_an_attempt_that_was_thought_dead_shares_nothing(tmp_path: Path) -> None:
    old = RolloutFiles.claim(tmp_path, 1)
    for step in range(1, 101):
        old.write(step, lines(step), wait_s=30.0)
    RolloutFiles.claim(tmp_path, 2).write(100, lines(100, 2), wait_s=30.0)
    old.write(101, lines(101), wait_s=30.0)
    assert reports.flush(30.0)
    assert len(names(tmp_path)) == 100
    assert {line["by"] for line in read(tmp_path, 100)} == {2}


def test_large_steps_keep_their_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout_files, "_SHARED_BYTES", 1000)
    files = RolloutFiles.claim(tmp_path, 1)
    for step in range(1, 102):
        files.write(step, lines(step), wait_s=30.0)
    assert reports.flush(30.0)
    assert len(names(tmp_path)) == 101
