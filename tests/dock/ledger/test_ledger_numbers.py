"""Numbers of files of a ledger: one that was sealed is not used again, whatever a process has seen before."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from ledger_logs import keep
from patience import wait_for

from hpcrl.dock.ledger import log as logs
from hpcrl.dock.ledger import sealer
from hpcrl.dock.ledger.entries import Finished, ledger_files, read_entries
from hpcrl.dock.ledger.log import RolloutLog
from hpcrl.dock.ledger.payload import read_payload
from hpcrl.dock.ledger.sealer import seal_ended_files


def short_log(path: Path, *, attempt: int = 1) -> RolloutLog:
    """A log that needs a further file after some entries, and whose thread seals nothing."""
    log = RolloutLog(path, attempt=attempt, restored=0, limit_s=0.5, file_bytes=800)
    log._sealer.close()
    return log


def fill(log: RolloutLog, groups: range) -> None:
    for group in groups:
        keep(log, group, 0).result(10.0)


def rollouts(directory: Path) -> list[Finished]:
    return [entry for entry in read_entries(directory) if isinstance(entry, Finished)]


@pytest.mark.parametrize("begins", [True, False])
def test_a_process_that_stood_still_takes_no_number_of_a_sealed_file(
    begins: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has listed the files, its node loses the network, and another process writes and seals the next ones.

    A file by such a name would hide the sealed one, and its columns would replace those of the other process.
    """
    old = short_log(tmp_path)
    real, seen = ledger_files, list[list[Path]]()

    def stopped(directory: Path) -> list[Path]:
        found = real(directory)
        if not seen:
            seen.append(found)
            monkeypatch.setattr(logs, "ledger_files", real)
            new = short_log(tmp_path, attempt=2)
            fill(new, range(10, 22))
            assert "000002.jsonl" in seal_ended_files(new.ledger_dir, newest=f"{new.number:06d}.jsonl")
            new.close()
        return found

    if not begins:  # it continues its file
        fill(old, range(3))
    monkeypatch.setattr(logs, "ledger_files", stopped)
    late = short_log(tmp_path) if begins else old
    fill(late, range(50, 54))
    assert [path.name for path in seen[0]] == ["000001.jsonl"]
    assert late.number > 2
    assert not (late.ledger_dir / "000002.jsonl").exists()
    for log in {late, old}:
        log.close()
    found = rollouts(tmp_path / "ledger")
    assert [entry.group for entry in found if entry.group >= 10] == list(range(10, 22))
    assert all(read_payload(tmp_path / "payload", entry.payload) for entry in found)


def test_what_a_killed_process_left_of_sealing_is_removed_by_the_newest_one(tmp_path: Path) -> None:
    old = short_log(tmp_path)
    new = short_log(tmp_path, attempt=2)
    left = new.ledger_dir / ".000001.jsonl.gz.0123456789abcdef.tmp"
    left.write_bytes(b"half")
    for log, stays in ((old, True), (new, False)):
        seal_ended_files(log.ledger_dir, newest=f"{log.number:06d}.jsonl")
        assert left.exists() == stays
        log.close()


def test_a_listing_that_fails_ends_no_sealing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also the first one of a process, for what others left."""
    real = sealer.remove_remains

    def refuse(directory: Path) -> None:
        monkeypatch.setattr(sealer, "remove_remains", real)
        raise OSError(errno.ESTALE, "stale")

    monkeypatch.setattr(sealer, "remove_remains", refuse)
    log = RolloutLog(tmp_path, attempt=1, restored=0, limit_s=0.5, file_bytes=800)
    fill(log, range(4))
    wait_for(lambda: "are not compressed now: [Errno 116] stale" in caplog.text, 20.0, "message")
    fill(log, range(4, 8))
    wait_for(lambda: not (log.ledger_dir / "000001.jsonl").exists(), 20.0, "a sealed file")
    log.close()
