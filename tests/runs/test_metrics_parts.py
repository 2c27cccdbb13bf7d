"""Records of steps in several files, of which those that have ended are compressed: each reader has each step once."""

from __future__ import annotations

import errno
import gzip
import os
import tarfile
from pathlib import Path
from typing import Any

import msgspec
import pytest
from runs_testing import make_run, step_record

from hpcrl.errors import RunDirError
from hpcrl.reporting import reports
from hpcrl.runs import metrics_files
from hpcrl.runs.metrics import MetricsWriter, StepRecord, read_metrics, read_newest
from hpcrl.runs.metrics_files import MetricsTail, metrics_parts, part_path
from hpcrl.runs.outlets.feed import SinkFeed
from hpcrl.runs.outlets.notices.tails import RunTail
from hpcrl.runs.record import RunRecord
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.sharing.run_bundle import write_run_bundle
from hpcrl.storage import sealed_files
from hpcrl.storage.sealed_files import sealed_path

LINE_BYTES = len(msgspec.json.encode(step_record(10))) + 1


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = make_run(tmp_path)
    run.start_attempt()
    return run


def write(run: RunDir, steps: range, *, attempt: int = 1) -> None:
    """Write steps, four in each part."""
    writer = MetricsWriter(run, attempt, part_bytes=int(3.5 * LINE_BYTES))
    for step in steps:
        writer.write(step_record(step, attempt=attempt))
        assert writer.flush(20.0)
    writer.close()
    assert reports.flush(20.0, directory=run.metrics_dir)


def steps_of(records: Any) -> list[int]:
    return [record.step for record in records]


def files(run: RunDir) -> list[str]:
    return sorted(path.name for path in run.metrics_dir.iterdir() if path.is_file())


def test_readers_have_each_step_once(run: RunDir) -> None:
    tail, notices = MetricsTail(run, 1), RunTail(run)
    assert (list(tail.lines()), notices.steps(), read_newest(run)) == ([], [], None)  # no step has ended
    write(run, range(1, 3))
    seen, counted = list(tail.lines()), steps_of(notices.steps())
    write(run, range(3, 15))
    assert files(run) == ["0001-0002.jsonl.gz", "0001-0003.jsonl.gz", "0001-0004.jsonl", "0001.jsonl.gz"]
    assert steps_of(read_metrics(run)) == list(range(1, 15))
    assert read_metrics(run) == [step_record(step) for step in range(1, 15)]
    assert read_newest(run) == step_record(14)
    seen += tail.lines()
    counted += steps_of(notices.steps())
    assert steps_of(msgspec.json.decode(line, type=StepRecord) for line in seen) == list(range(1, 15))
    assert counted == list(range(1, 15))
    assert list(tail.lines()) == []
    assert notices.steps() == []


def test_later_attempts_have_files_of_their_own(run: RunDir) -> None:
    write(run, range(1, 11))
    run.start_attempt()
    write(run, range(8, 13), attempt=2)
    assert [path.name for path in metrics_parts(run)] == [
        *("0001.jsonl", "0001-0002.jsonl", "0001-0003.jsonl"),
        *("0002.jsonl", "0002-0002.jsonl"),
    ]
    records = read_metrics(run)
    assert [(record.attempt, record.step) for record in records] == [
        *((1, step) for step in range(1, 8)),
        *((2, step) for step in range(8, 13)),
    ]
    assert read_newest(run) == step_record(12, attempt=2)
    # the newest of an attempt is never sealed
    assert part_path(run, 1, 3).is_file()


def test_another_process_of_the_attempt_continues_the_newest_part(run: RunDir) -> None:
    write(run, range(1, 7))
    write(run, range(7, 12))
    assert steps_of(read_metrics(run)) == list(range(1, 12))
    assert files(run) == ["0001-0002.jsonl.gz", "0001-0003.jsonl", "0001.jsonl.gz"]


def test_where_the_parts_are_unknown_no_sealed_one_gets_a_second_form(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(run, range(1, 7))

    def refuse(*_: object) -> list[Path]:
        raise OSError(errno.ESTALE, "stale")

    with monkeypatch.context() as patch:
        patch.setattr(metrics_files, "metrics_parts", refuse)
        writer = MetricsWriter(run, 1, part_bytes=1)
    writer.write(step_record(7))
    writer.close()
    assert "0001.jsonl" not in files(run)
    assert steps_of(read_metrics(run)) == list(range(1, 8))


def test_the_newest_step_is_found_in_a_sealed_part(run: RunDir) -> None:
    """The next part has its name with its first line."""
    write(run, range(1, 9))
    part_path(run, 1, 2).unlink()
    assert not part_path(run, 1).exists()
    assert read_newest(run) == step_record(4)


@pytest.mark.parametrize("number", [1, 2])
def test_only_runs_whose_record_says_so_have_parts(number: int, run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """Earlier versions look for one file: they refuse a run of format 2, and find all steps of one of format 1."""
    monkeypatch.setattr(metrics_files, "PART_BYTES", 1)
    record = RunRecord.read(run)
    assert record.format_version == 2  # that of new runs
    msgspec.structs.replace(record, format_version=number).write(run)
    # a resume or a cancel keeps it: programs of the version that began the run may read it
    RunRecord.read(run).write(run)
    writer = MetricsWriter(run, 1)
    for step in (1, 2):
        writer.write(step_record(step))
        assert writer.flush(20.0)
    writer.close()
    assert len(metrics_parts(run)) == number
    assert steps_of(read_metrics(run)) == [1, 2]


def test_a_record_of_a_later_format_is_refused(run: RunDir) -> None:
    msgspec.structs.replace(RunRecord.read(run), format_version=3).write(run)
    with pytest.raises(RunDirError, match="has format 3, this hpcrl reads 1 and 2"):
        RunRecord.read(run)


def test_a_part_is_not_continued_while_its_lines_wait(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line that came into the part before later ones were read would be missed by those who follow."""
    real, refused = reports.open_log, list[Path]()

    def refuse(path: Path) -> int:
        refused.append(path)
        raise OSError(errno.ENOSPC, "full")

    writer = MetricsWriter(run, 1, part_bytes=1)
    with monkeypatch.context() as patch:
        patch.setattr(reports, "open_log", refuse)
        for step in range(1, 5):
            writer.write(step_record(step))
        assert not writer.flush(0.3)
    assert {path.name for path in refused} == {"0001.jsonl"}
    assert reports.open_log is real
    assert writer.flush(20.0)
    writer.write(step_record(5))
    writer.close()
    assert steps_of(msgspec.json.decode(line, type=StepRecord) for line in MetricsTail(run).lines()) == [1, 2, 3, 4, 5]
    assert [path.name for path in metrics_parts(run)] == ["0001.jsonl", "0001-0002.jsonl"]


def test_a_part_that_cannot_be_sealed_stays_and_is_tried_with_the_next(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(path: Path) -> None:
        raise OSError(errno.EDQUOT, "no room")

    with monkeypatch.context() as patch:
        patch.setattr(sealed_files, "fsync_dir", refuse)
        write(run, range(1, 7))
    assert "records of steps are not compressed now" in caplog.text
    assert part_path(run, 1).is_file()
    assert steps_of(read_metrics(run)) == list(range(1, 7))
    write(run, range(7, 11))
    assert files(run) == ["0001-0002.jsonl.gz", "0001-0003.jsonl", "0001.jsonl.gz"]
    assert steps_of(read_metrics(run)) == list(range(1, 11))


def test_the_part_that_is_written_is_not_sealed(run: RunDir) -> None:
    """Its first lines may come before the parts behind it are sealed, where the filesystem refused for a while."""
    write(run, range(1, 7))
    metrics_files._EndedParts(run, 1, 2).put(b"")
    assert reports.flush(20.0, directory=run.metrics_dir)
    assert files(run) == ["0001-0002.jsonl", "0001.jsonl.gz"]


def test_both_forms_count_once(run: RunDir) -> None:
    """A process was killed before it removed the file."""
    write(run, range(1, 11))
    packed = sealed_path(part_path(run, 1, 2)).read_bytes()
    part_path(run, 1, 2).write_bytes(sealed_files.content_from(part_path(run, 1, 2)))
    assert steps_of(read_metrics(run)) == list(range(1, 11))
    assert len(list(MetricsTail(run).lines())) == 10
    write(run, range(11, 15))
    assert not part_path(run, 1, 2).exists()
    assert sealed_path(part_path(run, 1, 2)).read_bytes() == packed


def test_a_damaged_part_is_an_error_and_not_empty(run: RunDir) -> None:
    write(run, range(1, 7))
    path = sealed_path(part_path(run, 1))
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(OSError, match=r"0001\.jsonl\.gz is damaged"):
        read_metrics(run)


def test_a_bundle_has_the_lines_of_sealed_parts(run: RunDir, tmp_path: Path) -> None:
    write(run, range(1, 11))
    # what is no file of the run is not followed
    outside = tmp_path / "outside.gz"
    outside.write_bytes(gzip.compress(b"{}\n"))
    os.symlink(outside, run.metrics_dir / "0009.jsonl.gz")
    write_run_bundle(run, tmp_path / "b.tar.gz", max_bytes=1 << 24)
    with tarfile.open(tmp_path / "b.tar.gz") as tar:
        found = {name.split("/", 1)[1]: tar.extractfile(name) for name in tar.getnames() if "/metrics/" in name}
        lines = {name: stream.read().count(b"\n") for name, stream in found.items() if stream is not None}
    assert lines == {"metrics/0001.jsonl": 4, "metrics/0001-0002.jsonl": 4, "metrics/0001-0003.jsonl": 2}


class Curve:
    """A sink that keeps what it is given."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def open(self, run: object) -> None:
        return None

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self.steps.append(step)

    def close(self) -> None:
        pass


def test_a_sink_that_lags_is_given_sealed_steps(run: RunDir) -> None:
    sink: Any = Curve()
    run.sinks_dir.mkdir()
    write(run, range(1, 3))
    feed = SinkFeed(run, 1, "curve", sink)
    feed.open()
    write(run, range(3, 12))  # parts are sealed before it looks again
    feed.poll()
    write(run, range(12, 14))
    feed.close()
    assert sink.steps == list(range(1, 14))
