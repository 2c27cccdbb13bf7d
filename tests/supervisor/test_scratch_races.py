"""Guards of one node make and remove temporary directories of the same run at the same time."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from hpcrl.storage.trusted_paths import make_private
from hpcrl.supervisor.process import leftovers
from hpcrl.supervisor.process.leftovers import Scratch

RUN_ID = "0123456789abcdef"


def scratch(base: Path, *, attempt: int = 2, role: str = "engine") -> Scratch:
    return Scratch(str(base), run_id=RUN_ID, attempt=attempt, role=role, replica=0)


def test_a_run_directory_that_another_guard_removes_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    removals = iter([True, True, False])

    def made_and_removed(path: Path) -> None:
        make_private(path)
        if next(removals):
            path.rmdir()

    monkeypatch.setattr(leftovers, "make_private", made_and_removed)
    own = scratch(tmp_path)
    own.prepare()
    assert own.path.is_dir()


def test_a_run_directory_that_is_removed_every_time_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leftovers, "make_private", lambda path: None)
    with pytest.raises(FileNotFoundError):
        scratch(tmp_path).prepare()


@pytest.mark.parametrize("deep", [False, True], ids=["whole", "a part"])
def test_what_another_guard_removes_at_the_same_time_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deep: bool
) -> None:
    left = scratch(tmp_path, attempt=1, role="env")
    left.prepare()
    (left.path / "deep").mkdir()
    gone = left.path / "deep" if deep else left.path
    scandir = os.scandir

    def removed_before(path: Any) -> Any:
        if str(path) == str(gone):
            monkeypatch.setattr(os, "scandir", scandir)
            shutil.rmtree(gone)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", removed_before)
    own = scratch(tmp_path)
    assert own.prepare() == []
    assert own.path.is_dir()
    assert not left.path.exists()


def test_what_was_removed_is_returned(tmp_path: Path) -> None:
    left = scratch(tmp_path, attempt=1, role="env")
    left.prepare()
    (left.path / "deep").mkdir()
    (left.path / "deep/socket").touch()
    assert scratch(tmp_path).prepare() == [str(left.path / "deep/socket")]
