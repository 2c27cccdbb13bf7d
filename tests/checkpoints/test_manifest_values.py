"""Numbers and names of a manifest at the edges of what they can be, and what a look at entries that go away says."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import msgspec
import pytest
from ledger_testing import save

from hpcrl.checkpoints import CheckpointLedger
from hpcrl.checkpoints.checks import read_check, record_check
from hpcrl.checkpoints.ledger import CheckpointEntry, CheckpointManifest
from hpcrl.checkpoints.verify import damaged_files, share_of
from hpcrl.errors import CheckpointError
from hpcrl.storage.files import FileRecord


def manifest(**changes: object) -> CheckpointManifest:
    whole = CheckpointManifest(
        step=0,
        policy_version=0,
        attempt=0,
        world_size=1,
        created_at_s=1.0,
        save_s=0.0,
        blocked_s=0.0,
        files={"trainer/empty": FileRecord(0, "")},
    )
    return msgspec.structs.replace(whole, **changes)


def test_the_smallest_values_are_values() -> None:
    assert list(manifest().problems()) == []


def test_the_largest_values_are_values() -> None:
    """A policy version is an int32, a save takes less than a hundred days, and JSON has no integer above 2^53."""
    largest = manifest(step=2147483647, save_s=1e7, blocked_s=1e7, files={"a": FileRecord(9007199254740992, "")})
    assert list(largest.problems()) == []


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"step": -1}, "its step, attempt or number of ranks is not valid"),
        ({"step": 2147483648}, "its step, attempt or number of ranks is not valid"),
        ({"attempt": -1}, "its step, attempt or number of ranks is not valid"),
        ({"world_size": 0}, "its step, attempt or number of ranks is not valid"),
        ({"save_s": -1.0}, "its duration of -1 s, or its pause of 0 s, is not valid"),
        ({"blocked_s": -1.0}, "its duration of 0 s, or its pause of -1 s, is not valid"),
        ({"save_s": float("nan")}, "its duration of nan s, or its pause of 0 s, is not valid"),
        ({"save_s": 1.01e7}, "its duration of 1.01e+07 s, or its pause of 0 s, is not valid"),
        ({"files": {"a": FileRecord(9007199254740993, "")}}, "'a' has a size that is not valid"),
        ({"files": {"a": FileRecord(-1, "")}}, "'a' has a size that is not valid"),
        ({"files": {"a": FileRecord(1 << 62, "")}}, "'a' has a size that is not valid"),
        ({"files": {"../a": FileRecord(1, "")}}, "'../a' is not a valid name of a file"),
        ({"files": {"/a": FileRecord(1, "")}}, "'/a' is not a valid name of a file"),
        ({"files": {"manifest.json": FileRecord(1, "")}}, "'manifest.json' is not a valid name of a file"),
        ({"files": {"a\nb": FileRecord(1, "")}}, "'a\\nb' is not a valid name of a file"),
        ({"files": {"": FileRecord(1, "")}}, "'' is not a valid name of a file"),
        ({"files": {".": FileRecord(1, "")}}, "'.' is not a valid name of a file"),
    ],
)
def test_each_value_that_cannot_be_is_reported_by_itself(changes: dict[str, object], problem: str) -> None:
    assert list(manifest(**changes).problems()) == [problem]


def test_an_entry_that_was_found_is_taken_although_a_newer_one_went_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The entries need not be read again: each is as large as the model."""
    for step in (4, 5):
        save(tmp_path, step)
    listings = iter([[4, 5, 6], [4, 5], [4]])
    monkeypatch.setattr(CheckpointLedger, "steps", lambda _: next(listings))
    entry, skipped = CheckpointLedger(tmp_path).newest_verified()
    assert entry is not None
    assert (entry.step, skipped, list(listings)) == (5, [], [[4]])


@pytest.mark.parametrize("looks", [1, 2])
def test_the_entries_are_listed_again_only_where_one_went_away(
    looks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of a list are replaced meanwhile by newer ones, or all of it are damaged and stay."""
    listings: list[list[int]] = []
    gone = {1: [[3]], 2: [[3], [], [4]]}[looks]
    save(tmp_path, 4)

    def steps(_: CheckpointLedger) -> list[int]:
        listings.append(gone[min(len(listings), len(gone) - 1)])
        return listings[-1]

    monkeypatch.setattr(CheckpointLedger, "steps", steps)
    choice = CheckpointLedger(tmp_path).newest_verified()
    if looks == 1:  # it is in the list, and cannot be read
        assert (choice.entry, [step for step, _ in choice.skipped], len(listings)) == (None, [3], 2)
    else:
        assert choice.entry is not None
        assert (choice.entry.step, choice.skipped) == (4, [])


def test_what_was_found_is_known_of_the_entry_that_was_compared_alone(tmp_path: Path) -> None:
    save(tmp_path, 1)
    ledger = CheckpointLedger(tmp_path)
    assert read_check(ledger, 1) is None
    record_check(ledger, 1, content=True, by="me", problem="it is damaged")
    found = read_check(ledger, 1)
    assert found is not None
    assert (found.step, found.compared, found.by, found.problem) == (1, "content", "me", "it is damaged")
    save(tmp_path, 1, "other weights", attempt=2)
    assert read_check(ledger, 1) is None
    for by in ("earlier", "bytes"):  # the last one counts
        record_check(ledger, 1, content=True, by=by)
    record_check(ledger, 1, content=False, by="sizes")  # says less
    found = read_check(ledger, 1)
    assert found is not None
    assert (found.by, found.compared) == ("bytes", "content")
    record_check(ledger, 1, content=False, by="sizes", problem="a file is missing")
    found = read_check(ledger, 1)
    assert found is not None
    assert (found.by, found.compared, found.problem) == ("sizes", "sizes", "a file is missing")


def test_a_comparison_of_sizes_is_known_where_there_is_no_better(tmp_path: Path) -> None:
    save(tmp_path, 1)
    ledger = CheckpointLedger(tmp_path)
    for by in ("attempt 1", "attempt 2"):
        record_check(ledger, 1, content=False, by=by)
        found = read_check(ledger, 1)
        assert found is not None
        assert (found.by, found.compared, found.problem) == (by, "sizes", "")


def test_a_problem_of_an_entry_whose_manifest_is_gone_is_known(tmp_path: Path) -> None:
    (save(tmp_path, 1).path / "manifest.json").unlink()
    ledger = CheckpointLedger(tmp_path)
    record_check(ledger, 1, content=True, by="me", problem="it has no manifest.json")
    found = read_check(ledger, 1)
    assert found is not None
    assert (found.problem, found.manifest_xxh3_128) == ("it has no manifest.json", "")


def test_a_check_is_of_its_time_and_in_a_file_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1), save(tmp_path, 2, attempt=2)
    ledger = CheckpointLedger(tmp_path)
    monkeypatch.setattr("hpcrl.checkpoints.checks.time.time", lambda: 2e9)
    record_check(ledger, 1, content=True, by="me")
    assert json.loads((tmp_path / "step-000001.check.json").read_bytes())["time_s"] == 2e9
    assert read_check(ledger, 2) is None


def test_a_torn_check_is_none(tmp_path: Path) -> None:
    save(tmp_path, 1)
    ledger = CheckpointLedger(tmp_path)
    record_check(ledger, 1, content=True, by="me")
    path = tmp_path / "step-000001.check.json"
    path.write_bytes(path.read_bytes()[:-5])
    assert read_check(ledger, 1) is None


def test_the_bytes_of_an_entry_are_those_of_its_files() -> None:
    assert manifest(files={"a": FileRecord(3, ""), "b": FileRecord(0, ""), "c": FileRecord(5, "")}).total_bytes == 8


def test_large_files_are_shared_out_first() -> None:
    files = {name: FileRecord(size, "") for name, size in {"a": 1, "b": 1, "c": 1, "d": 1, "e": 4}.items()}
    assert sorted(sorted(share_of(files, rank, 2)) for rank in range(2)) == [["a", "b", "c", "d"], ["e"]]


def test_an_entry_without_the_orchestrators_state_is_none(tmp_path: Path) -> None:
    path = save(tmp_path, 5).path / "manifest.json"
    whole = json.loads(path.read_bytes())
    whole["files"] = {name: record for name, record in whole["files"].items() if name.startswith("trainer/")}
    path.write_text(json.dumps(whole))
    with pytest.raises(CheckpointError, match="has no orchestrator state: it is not joint"):
        CheckpointEntry.open(path.parent)


def test_an_entry_that_is_not_joint_is_none(tmp_path: Path) -> None:
    path = save(tmp_path, 5).path / "manifest.json"
    text = path.read_text()
    assert '"policy_version":5' in text.replace(" ", "")
    path.write_text(text.replace(" ", "").replace('"policy_version":5', '"policy_version":4'))
    with pytest.raises(CheckpointError, match="says step 5 and policy version 4: it is not joint"):
        CheckpointEntry.open(path.parent)


@pytest.mark.parametrize(("files", "threads"), [(3, 3), (40, 8)])
def test_at_most_eight_files_are_read_at_a_time(
    files: int, threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str] = []
    start = threading.Thread.start

    def counted(thread: threading.Thread) -> None:
        started.append(thread.name)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", counted)
    records = {f"f{number:02}": FileRecord(1, "") for number in range(files)}
    assert len(damaged_files(tmp_path, records)) == files  # none of them is there
    assert started == ["verify"] * threads
