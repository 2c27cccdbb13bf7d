"""Of two writers that are both alive only the newer one can change the store, whatever the older one does."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest
from ledger_testing import hidden, save_as

from hpcrl.checkpoints import CheckpointWriter
from hpcrl.errors import FencedError
from hpcrl.storage.fence import Fence
from hpcrl.storage.quarantine import list_asides


def test_an_older_writer_cannot_commit_what_it_had_built(tmp_path: Path) -> None:
    old = CheckpointWriter.claim(tmp_path, 1)
    save_as(old, 10)
    staged = old.stage(20)
    (staged / "trainer" / "0.distcp").write_text("half")
    new = CheckpointWriter.claim(tmp_path, 2)
    with pytest.raises(FencedError, match="attempt 2 writes there"):
        old.commit(step=20, world_size=1, files={}, orchestrator_state=b"", started_at_s=0.0)
    assert new.ledger.steps() == [10]
    save_as(new, 20, "new")
    new.ledger.open(20).verify()


@pytest.mark.parametrize("what", ["stage", "save", "retain", "commit", "hide"])
def test_an_older_writer_can_change_nothing(tmp_path: Path, what: str) -> None:
    old = CheckpointWriter.claim(tmp_path, 1)
    for step in (10, 20):
        save_as(old, step)
    old.stage(30)
    CheckpointWriter.claim(tmp_path, 2)
    before = sorted(str(path) for path in tmp_path.rglob("*"))
    actions = {
        "stage": lambda: old.stage(40),
        "save": lambda: save_as(old, 40),
        "retain": lambda: old.retain(keep_last=1),
        # the rename itself must fail: this writer does not look first
        "commit": lambda: old.fence.commit("step-000030"),
        "hide": lambda: old.fence.hide("step-000010"),
    }
    with pytest.raises(FencedError):
        actions[what]()
    assert sorted(str(path) for path in tmp_path.rglob("*")) == before


def test_a_writer_that_comes_late_with_an_old_token_is_refused(tmp_path: Path) -> None:
    """An attempt that was stopped before its claim, and wakes up when a newer one has come and gone."""
    CheckpointWriter.claim(tmp_path, 3)
    with pytest.raises(FencedError, match="attempt 3 writes there"):
        CheckpointWriter.claim(tmp_path, 2)
    assert len(list(tmp_path.glob(".writer-*"))) == 1


def test_of_two_with_one_token_the_later_wins(tmp_path: Path) -> None:
    first, second = CheckpointWriter.claim(tmp_path, 1), CheckpointWriter.claim(tmp_path, 1)
    with pytest.raises(FencedError):
        save_as(first, 10)
    save_as(second, 10)


def test_who_held_its_directory_open_cannot_use_it(tmp_path: Path) -> None:
    """A client that has cached the directory's handle, as NFS clients do, works on that and not on the name."""
    old = Fence.claim(tmp_path, 1)
    old.create("entry")
    handle = os.open(old.path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        Fence.claim(tmp_path, 2)
        with pytest.raises(FileNotFoundError):
            os.rename("entry", str(tmp_path / "entry"), src_dir_fd=handle)
        with pytest.raises(FileNotFoundError):
            os.mkdir("again", dir_fd=handle)
    finally:
        os.close(handle)


@pytest.mark.parametrize("died", ["before the new one came", "after the new one came"])
def test_an_entry_that_was_put_aside_comes_back(tmp_path: Path, died: str) -> None:
    old = Fence.claim(tmp_path, 1)
    (old.create("entry") / "file").write_text("old")
    old.commit("entry")
    (old.create("entry") / "file").write_text("new")
    assert old.hide("entry")  # the first half of replacing it
    if died.startswith("after"):
        os.rename(old.path / "entry", tmp_path / "entry")
    Fence.claim(tmp_path, 2)
    assert (tmp_path / "entry" / "file").read_text() == ("old" if died.startswith("before") else "new")
    assert hidden(tmp_path) == []


def test_a_rename_that_fails_puts_the_old_entry_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fence = Fence.claim(tmp_path, 1)
    (fence.create("entry") / "file").write_text("old")
    fence.commit("entry")
    (fence.create("entry") / "file").write_text("new")
    rename = os.rename

    def failing(source: Path, target: Path) -> None:
        if source == fence.path / "entry":
            raise OSError(5, "Input/output error")
        rename(source, target)

    monkeypatch.setattr("hpcrl.storage.fence.os.rename", failing)
    with pytest.raises(OSError, match="Input/output"):
        fence.commit("entry")
    assert (tmp_path / "entry" / "file").read_text() == "old"


def test_a_claim_between_the_two_directories_of_a_stage_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, create = CheckpointWriter.claim(tmp_path, 1), Fence.create

    def create_and_be_overtaken(fence: Fence, name: str) -> Path:
        path = create(fence, name)
        Fence.claim(tmp_path, 2)
        return path

    monkeypatch.setattr(Fence, "create", create_and_be_overtaken)
    with pytest.raises(FencedError, match="attempt 2 writes there"):
        old.stage(10)


def test_who_dies_while_taking_back_leaves_it_to_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = CheckpointWriter.claim(tmp_path, 1)
    for step in (10, 20):
        save_as(writer, step)
    assert writer.put_aside_after(10) == [20]
    (aside,) = list_asides(tmp_path, "step-")
    rename = os.rename

    def dying(source: Path, target: Path) -> None:
        if target == tmp_path / "step-000020":
            raise KeyboardInterrupt
        rename(source, target)

    monkeypatch.setattr("hpcrl.storage.fence.os.rename", dying)
    with pytest.raises(KeyboardInterrupt):
        writer.take_back(aside)
    monkeypatch.undo()
    later = CheckpointWriter.claim(tmp_path, 2)
    later.ledger.open(20).verify()


def test_what_cannot_be_removed_is_put_out_of_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On NFS the directory of a file that is still open cannot be removed."""
    fence = Fence.claim(tmp_path, 1)
    (fence.create("step-000001") / "part").touch()

    def stays(path: Path, *_: object) -> None:
        raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), str(path))

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", stays)
        assert os.listdir(fence.create("step-000001")) == []
    fence.commit("step-000001")
    Fence.claim(tmp_path, 2)
    assert [name for name in sorted(os.listdir(tmp_path)) if not name.startswith(".writer-000002")] == ["step-000001"]


def test_a_filesystem_that_removes_nothing_now_is_named_not_a_name_that_exists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that whoever tries again knows that it may pass."""
    fence = Fence.claim(tmp_path, 1)
    (fence.create("step-000001") / "part").touch()

    def stale(path: Path, *_: object) -> None:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", stale)
        patched.setattr(os, "rename", stale)
        with pytest.raises(OSError, match="Stale file handle"):
            fence.create("step-000001")
    assert os.listdir(fence.create("step-000001")) == []
