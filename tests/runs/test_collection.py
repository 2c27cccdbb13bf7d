"""Removal by a policy: old runs that have ended, of this user; never a living one."""

from __future__ import annotations

import os
import time
from pathlib import Path

import msgspec
import pytest
import xxhash
from runs_testing import make_run, write_status

from hpcrl.checkpoints import CheckpointLedger, CheckpointWriter
from hpcrl.checkpoints.pins import pin
from hpcrl.cli.keeping import collect_runs
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.status import ProcessId, RunState, RunStatus
from hpcrl.storage.files import FileRecord
from hpcrl.submit.collection import CollectionPolicy, collect_run, find_collectable

DAY_S = 86400.0
ENDED = frozenset({RunState.FAILED, RunState.CANCELLED, RunState.LOST})


def ended(root: Path, name: str, days: float, state: RunState = RunState.FAILED) -> RunDir:
    run = make_run(root, name)
    write_status(run, state)
    status = RunStatus.read(run)
    assert status is not None
    msgspec.structs.replace(status, ended_at_s=time.time() - days * DAY_S).write(run)
    return run


def let_live(run: RunDir) -> None:
    myself = ProcessId.of(os.getpid())
    assert myself is not None
    write_status(run, RunState.RUNNING, supervisor=myself)


def test_old_runs_that_failed_go_and_nothing_else(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    old, new = ended(root, "old", 40), ended(root, "new", 2)
    done = ended(root, "done", 40, RunState.COMPLETED)
    alive = make_run(root, "alive")
    let_live(alive)
    going, spared = find_collectable([old, new, done, alive], CollectionPolicy(30.0, ENDED))
    assert [each.run.name for each in going] == ["old"]
    assert going[0].bytes > 0
    assert round(going[0].age_days) == 40
    assert spared == []
    collect_run(going[0])
    assert sorted(os.listdir(root)) == ["alive", "done", "new"]


def test_a_run_of_a_stranger_is_spared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = ended(tmp_path / "runs", "theirs", 40)
    monkeypatch.setattr(os, "geteuid", lambda: run.path.stat().st_uid + 1)
    going, (spared,) = find_collectable([run], CollectionPolicy(30.0, ENDED))
    assert going == []
    assert spared.why == "it belongs to another user"


def test_one_that_lives_again_is_not_removed(tmp_path: Path) -> None:
    run = ended(tmp_path / "runs", "old", 40)
    (found,), _ = find_collectable([run], CollectionPolicy(30.0, ENDED))
    let_live(run)
    with pytest.raises(Exception, match="has not ended"):
        collect_run(found)
    assert run.path.is_dir()


def test_the_command_shows_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tmp_path / "runs"
    run = ended(root, "old", 40)
    collect_runs(older_than=30.0, state=None, keep_checkpoints=None, yes=True, dry_run=True, root=str(root))
    assert "would go" in capsys.readouterr().err
    assert run.path.is_dir()
    collect_runs(older_than=30.0, state=["failed"], keep_checkpoints=None, yes=True, dry_run=False, root=str(root))
    assert capsys.readouterr().out.strip() == "old"
    assert not run.path.exists()


def test_only_checkpoints_go_and_pinned_ones_stay(tmp_path: Path) -> None:
    run = ended(tmp_path / "runs", "old", 40)
    writer = CheckpointWriter.claim(run.checkpoints_dir, 1)
    for step in (1, 2, 3, 4):
        (writer.stage(step) / "trainer" / "0.distcp").write_bytes(b"x")
        files = {"trainer/0.distcp": FileRecord(1, xxhash.xxh3_128_hexdigest(b"x"))}
        writer.commit(step=step, world_size=1, files=files, orchestrator_state=b"", started_at_s=0.0, blocked_s=0.0)
    pin(CheckpointLedger(run.checkpoints_dir), 1, reason="shown in the paper", by="me")
    # the whole run stays for its pin, and with a number of checkpoints the others go
    assert find_collectable([run], CollectionPolicy(30.0, ENDED))[0] == []
    (found,), spared = find_collectable([run], CollectionPolicy(30.0, ENDED, keep_checkpoints=1))
    assert spared == []
    assert [item.step for item in found.checkpoints] == [2, 3]
    collect_run(found)
    assert CheckpointLedger(run.checkpoints_dir).steps() == [1, 4]
    assert run.path.is_dir()
