"""The files of a ledger where there is none."""

from __future__ import annotations

from pathlib import Path

from hpcrl.dock.ledger.entries import ledger_files


def test_a_run_without_a_ledger_has_no_files_of_one(tmp_path: Path) -> None:
    assert ledger_files(tmp_path / "ledger") == []
