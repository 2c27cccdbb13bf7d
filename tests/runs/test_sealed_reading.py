"""Readers of records while a part is sealed, and of parts that are damaged."""

from __future__ import annotations

import os
import shutil
import tarfile
from pathlib import Path
from typing import Any

import msgspec
import pytest
from runs_testing import Hpcrl, make_run, step_record, write_status

from hpcrl.dock.ledger.entries import Begin, Kept
from hpcrl.reporting import reports
from hpcrl.runs import metrics_files
from hpcrl.runs.metrics import MetricsWriter, StepRecord, read_metrics
from hpcrl.runs.metrics_files import MetricsTail, metrics_parts, part_path
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.sharing import run_bundle
from hpcrl.runs.sharing.group_access import find_leaks
from hpcrl.runs.sharing.run_bundle import write_run_bundle
from hpcrl.runs.sharing.secret_scan import SecretFinding
from hpcrl.runs.status import RunState
from hpcrl.runs.views import rollouts
from hpcrl.storage.sealed_files import SealedFileError, content_bytes, content_from, seal_file, sealed_path

LINE_BYTES = len(msgspec.json.encode(step_record(10))) + 1


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run of ten steps: two parts are sealed, and the third has two steps."""
    run = make_run(tmp_path)
    write_status(run, RunState.COMPLETED)
    write(run, range(1, 11))
    assert sealed_path(part_path(run, 1, 2)).exists()
    return run


def write(run: RunDir, steps: range) -> None:
    """Write steps, four in each part."""
    writer = MetricsWriter(run, 1, part_bytes=int(3.5 * LINE_BYTES))
    for step in steps:
        writer.write(step_record(step))
        assert writer.flush(20.0)
    writer.close()
    assert reports.flush(20.0, directory=run.metrics_dir)


def steps_of(tail: MetricsTail) -> list[int]:
    return [msgspec.json.decode(line, type=StepRecord).step for line in tail.lines()]


def hide_once(monkeypatch: pytest.MonkeyPatch, name: str) -> list[str]:
    """Let the next listing of a directory lack a file; returns the files that were hidden."""
    real, hidden = os.listdir, list[str]()

    def hasty(path: Any) -> list[str]:
        names = real(path)
        if not hidden and name in names:
            hidden.append(name)
            return [each for each in names if each != name]
        return names

    monkeypatch.setattr(os, "listdir", hasty)
    return hidden


@pytest.mark.parametrize("name", ["0001.jsonl.gz", "0001-0002.jsonl.gz"])
def test_a_listing_that_misses_a_part_is_repeated(name: str, run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory that changes while it is listed may show a part in neither form."""
    hidden = hide_once(monkeypatch, name)
    assert [record.step for record in read_metrics(run)] == list(range(1, 11))
    assert hidden == [name]


def test_a_part_that_is_lost_is_not_waited_for(run: RunDir) -> None:
    sealed_path(part_path(run, 1, 2)).unlink()
    assert [record.step for record in read_metrics(run)] == [1, 2, 3, 4, 9, 10]


def test_lines_wait_for_a_part_that_cannot_be_opened_yet(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client of NFS may remember names for a while; a sink drops steps that come after later ones."""
    second = part_path(run, 1, 2)

    def hasty(path: Path, *how: Any) -> bytes:
        if path == second:
            raise FileNotFoundError(path)
        return content_from(path, *how)

    tail = MetricsTail(run, 1)
    with monkeypatch.context() as patch:
        patch.setattr(metrics_files, "content_from", hasty)
        assert steps_of(tail) == [1, 2, 3, 4]
        assert steps_of(tail) == []
    assert steps_of(tail) == [5, 6, 7, 8, 9, 10]
    assert steps_of(tail) == []


@pytest.mark.parametrize("part_bytes", [1 << 30, None])
def test_no_part_is_made_where_a_sealed_one_is(
    part_bytes: int | None, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process was killed after it had sealed a part, and before the first line of the next one."""
    part_path(run, 1, 3).unlink()
    monkeypatch.setattr(metrics_files, "_may_have_parts", lambda _: False)
    writer = MetricsWriter(run, 1, part_bytes=part_bytes)
    writer.write(step_record(9))
    writer.close()
    assert not part_path(run, 1, 2).exists()
    assert [record.step for record in read_metrics(run)] == list(range(1, 10))


def test_what_a_killed_process_left_of_sealing_is_removed(run: RunDir) -> None:
    left = run.metrics_dir / ".0001.jsonl.gz.0123456789abcdef.tmp"
    left.write_bytes(b"half")
    write(run, range(11, 15))
    assert not left.exists()


@pytest.mark.parametrize("size", [0, 10, 100])
def test_a_damaged_part_is_named_with_a_way_on(size: int, run: RunDir, hpcrl: Hpcrl) -> None:
    path = sealed_path(part_path(run, 1, 1))
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(SealedFileError):
        read_metrics(run)
    code, out, err = hpcrl("status", str(run.path), "--json")
    assert (code, out) == (1, "")
    assert f"hpcrl: {path} is damaged: " in err
    assert "hint: if no copy is whole, move it away" in err
    if size < 18:
        with pytest.raises(SealedFileError, match="is damaged: it is cut off"):
            content_bytes(part_path(run, 1, 1))


def bundled_lines(run: RunDir, output: Path) -> dict[str, int]:
    write_run_bundle(run, output, max_bytes=1 << 24)
    with tarfile.open(output) as tar:
        found = [(name, tar.extractfile(name)) for name in tar.getnames() if "/metrics/" in name]
        assert len(found) == len(dict(found))
        return {Path(name).name: stream.read().count(b"\n") for name, stream in found if stream is not None}


@pytest.mark.parametrize("before", [True, False])
def test_a_bundle_has_a_part_that_is_sealed_meanwhile(
    before: bool, run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    third, real = part_path(run, 1, 3), run_bundle._files

    def slow(directory: Path) -> list[Path]:
        found = [] if before else real(directory)
        if directory == run.metrics_dir:
            assert seal_file(third, size=third.stat().st_size)
        return real(directory) if before else found

    monkeypatch.setattr(run_bundle, "_files", slow)
    assert bundled_lines(run, tmp_path / "b.tar.gz") == {"0001.jsonl": 4, "0001-0002.jsonl": 4, "0001-0003.jsonl": 2}
    assert not third.exists()


def test_a_bundle_is_made_where_records_cannot_be_listed(run: RunDir, tmp_path: Path) -> None:
    shutil.rmtree(run.metrics_dir)
    run.metrics_dir.write_text("no directory")
    with pytest.raises(NotADirectoryError):
        metrics_parts(run)
    assert bundled_lines(run, tmp_path / "b.tar.gz") == {}


@pytest.mark.parametrize("cut", [0, 10])
def test_a_secret_in_a_packed_file_is_found(cut: int, run: RunDir) -> None:
    path, noise = part_path(run, 1, 3), os.urandom(20_000).hex().encode()
    path.write_bytes(b"{}\n" + b"hf_" + b"x" * 34 + b"\n" + noise)
    assert seal_file(path, size=path.stat().st_size)
    packed = sealed_path(path)
    packed.write_bytes(packed.read_bytes()[: packed.stat().st_size - cut])
    (run.metrics_dir / "other.gz").write_bytes(b"none")
    found = list(find_leaks(run))
    assert found == [SecretFinding("a token of the Hugging Face hub", packed, 2)]


def test_verify_counts_no_bytes_that_come_meanwhile(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of the newest file is compared with its size: a run in progress adds entries."""
    path = run.rollouts_dir / "ledger" / "000001.jsonl"
    path.parent.mkdir(parents=True)
    entries = [Begin(attempt=1, restored=0, time_s=1.0, believed={}), Kept(group=1)]
    path.write_bytes(b"".join(msgspec.json.encode(entry) + b"\n" for entry in entries))
    real = rollouts.whole_bytes

    def slow(newest: Path) -> int:
        with newest.open("ab") as stream:
            stream.write(msgspec.json.encode(Kept(group=2)) + b"\n")
        return real(newest)

    monkeypatch.setattr(rollouts, "whole_bytes", slow)
    assert [note for note in rollouts.verify_rollouts(run).notes if "incomplete" in note] == []
