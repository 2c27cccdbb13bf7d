"""Reports that cannot be written: nobody fails, nobody waits, nothing is lost, and it is said once."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path

import msgspec
import pytest
from fault_shim import build_shim, run_with_fault
from patience import wait_for

from hpcrl.reporting import reports
from hpcrl.reporting.reports import Outage, ReportedFile, ReportedLines
from hpcrl.runs import role
from hpcrl.runs.events import EventWriter, read_events
from hpcrl.runs.progress import RoleProgress, progress_path
from hpcrl.runs.role import Complaint, RoleContext
from hpcrl.runs.rundir import RunDir

#: a writer of events and of a status under a fault of the filesystem
_WRITER = """
import logging, sys, threading, time
from pathlib import Path
from hpcrl.reporting.reports import ReportedFile
from hpcrl.runs.events import EventWriter, read_events
from hpcrl.runs.rundir import RunDir
said = []
handler = logging.Handler(logging.WARNING)
handler.emit = lambda record: said.append(record.getMessage())  # two threads would mix their lines on a stream
logging.getLogger().addHandler(handler)
run = RunDir(Path(sys.argv[1]))
events = EventWriter(run, attempt=1, writer="supervisor")
status = ReportedFile(run.status_path, on_caught_up=events.caught_up)
for number in range(20):
    events.emit("tick", number=number)
    status.put(str(number).encode())
    time.sleep(0.005)
print("went on, main thread only:", threading.current_thread() is threading.main_thread())
print("written:", status.flush(30))
events.close()
print("status:", run.status_path.read_text())
print("ticks:", [event.data["number"] for event in read_events(run, kind="tick")])
for event in read_events(run, kind="reports.caught_up"):
    print("again:", event.data["file"], event.data["dropped"], event.data["problem"])
for line in said:
    print("log", line)
"""


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_shim(tmp_path_factory.mktemp("shim"))


@pytest.mark.parametrize(
    ("fault", "file", "word"),
    [
        ("op=write errno=116 path=/events/ count=3", "events/0001-supervisor.jsonl", "Stale file handle"),
        ("op=open errno=122 path=/events/ count=3", "events/0001-supervisor.jsonl", "Disk quota exceeded"),
        ("op=write short=9 path=/events/ skip=2 count=2", "events/0001-supervisor.jsonl", "only 9 of"),
        ("op=open errno=28 path=status.json skip=1 count=3", "status.json", "No space left"),
        ("op=fsync errno=116 path=status.json count=2", "status.json", "Stale file handle"),
        ("op=rename errno=122 path=status.json count=1", "status.json", "Disk quota exceeded"),
    ],
)
def test_what_could_not_be_written_is_caught_up(shim: Path, tmp_path: Path, fault: str, file: str, word: str) -> None:
    lines = run_with_fault(shim, fault, _WRITER, tmp_path)
    assert "went on, main thread only: True" in lines
    assert "status: 19" in lines
    assert f"ticks: {list(range(20))}" in lines
    (again,) = [line for line in lines if line.startswith("again:")]
    assert again.startswith(f"again: {file} 0 ")
    assert word in again
    # once when it begins, once when it is over
    assert sum(line.startswith("log") for line in lines) == 2


_HANGING = """
import sys, time
from pathlib import Path
from hpcrl.runs.events import EventWriter
from hpcrl.runs.progress import ProgressReporter
from hpcrl.runs.rundir import RunDir
run = RunDir(Path(sys.argv[1]))
events, progress = EventWriter(run, attempt=1, writer="engine-0"), ProgressReporter(run.path / "progress.json")
events.emit("first")
for step in range(100):
    events.emit("step", step=step)
    with progress.phase("forward_backward"):
        pass
path = run.events_dir / "0001-engine-0.jsonl"
print(path.stat().st_size if path.exists() else 0)
"""


def test_a_hanging_filesystem_blocks_no_caller(shim: Path, tmp_path: Path) -> None:
    # the first write takes two seconds: all was said before anything of it is in the file, and all is in it at the end
    lines = run_with_fault(shim, "op=write path=/events/ count=1 delay_us=2000000", _HANGING, tmp_path)
    assert lines == ["0"]
    assert len(read_events(RunDir(tmp_path), kind="step")) == 100


@pytest.fixture
def blocked(tmp_path: Path) -> Path:
    """A directory whose place a file has taken: nothing can be written below it until that is gone."""
    path = tmp_path / "run"
    path.write_text("in the way")
    return path


def test_of_many_contents_the_newest_is_written(blocked: Path) -> None:
    outages: list[Outage] = []
    report = ReportedFile(blocked / "status.json", on_caught_up=outages.append)
    for number in range(100):
        report.put(str(number).encode())
    wait_for(lambda: bool(reports.problems()), 10, "the first failure")
    assert "status.json cannot be written" in reports.problems()[0]
    assert not report.flush(0.05)
    blocked.unlink()
    assert report.flush(30)
    assert (blocked / "status.json").read_text() == "99"
    wait_for(lambda: len(outages) == 1, 10, "the word that it is over")
    assert reports.problems() == []


def test_a_later_attempts_status_is_not_replaced_by_an_older_one(blocked: Path) -> None:
    older, newer = ReportedFile(blocked / "status.json"), ReportedFile(blocked / "status.json")
    older.put(b"attempt 1")
    wait_for(lambda: bool(reports.problems()), 10, "the first failure")
    newer.put(b"attempt 2")
    blocked.unlink()
    assert reports.flush(30, directory=blocked)
    assert (blocked / "status.json").read_text() == "attempt 2"


def test_lines_that_wait_have_a_bound_and_are_counted(blocked: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reports, "_MAX_BYTES", 1000)
    events = EventWriter(RunDir(blocked), attempt=1, writer="trainer-0")
    for number in range(100):
        events.emit("tick", number=number)
    wait_for(lambda: bool(reports.problems()), 10, "the first failure")
    blocked.unlink()
    events.close(30)
    events.close(30)  # with the word that it was caught up
    found = read_events(RunDir(blocked))
    ticks = [event.data["number"] for event in found if event.kind == "tick"]
    (again,) = [event for event in found if event.kind == "reports.caught_up"]
    assert ticks == list(range(100 - len(ticks), 100))
    assert 0 < len(ticks) < 20
    assert again.data["dropped"] == 100 - len(ticks)


def test_lines_that_a_slow_filesystem_leaves_no_room_for_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No write fails: one takes its time, while more is said than is kept."""
    monkeypatch.setattr(reports, "_MAX_BYTES", 1000)
    outages: list[Outage] = []
    lines, goes_on = ReportedLines(tmp_path / "events.jsonl", on_caught_up=outages.append), threading.Event()
    write = lines._write
    monkeypatch.setattr(lines, "_write", lambda data: (goes_on.wait(30), write(data)))
    for _ in range(100):
        lines.append(b"x" * 50)
    goes_on.set()
    assert lines.flush(30)
    written = len((tmp_path / "events.jsonl").read_bytes().splitlines())
    assert 0 < written < 100
    assert sum(outage.dropped for outage in outages) == 100 - written


def test_one_file_that_fails_does_not_keep_the_others(blocked: Path, tmp_path: Path) -> None:
    lines, other = ReportedLines(blocked / "events.jsonl"), ReportedFile(tmp_path / "other")
    lines.append(b"{}")
    wait_for(lambda: bool(reports.problems()), 10, "the first failure")
    other.put(b"there")
    assert other.flush(30)
    blocked.unlink()
    assert lines.flush(30)


def test_a_forked_child_does_not_repeat_its_parent(blocked: Path) -> None:
    lines = ReportedLines(blocked / "events.jsonl")
    lines.append(b'"parent"')
    wait_for(lambda: bool(reports.problems()), 10, "the first failure")
    blocked.unlink()
    pid = os.fork()
    if pid == 0:
        lines.append(b'"child"')
        os._exit(0 if lines.flush(30) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert lines.flush(30)
    found = [msgspec.json.decode(line) for line in (blocked / "events.jsonl").read_text().split()]
    assert sorted(found) == ["child", "parent"]


def test_many_writers_lose_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    events = EventWriter(RunDir(tmp_path), attempt=1, writer="engine-0")

    def say(first: int) -> None:
        for number in range(first, first + 200):
            events.emit("tick", number=number)

    threads = [threading.Thread(target=say, args=(1000 * i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    events.close()
    numbers = sorted(event.data["number"] for event in read_events(RunDir(tmp_path)))
    assert numbers == [1000 * i + j for i in range(4) for j in range(200)]
    assert not caplog.records


_LOGGING = """
import asyncio, logging, sys
from hpcrl.reporting.log_thread import log_in_thread
logging.basicConfig(level=logging.INFO, format="%(message)s", filename=sys.argv[1])
log_in_thread()

async def main():
    for number in range(100):
        logging.info("line %d", number)
    print(len(open(sys.argv[1]).readlines()))

asyncio.run(main())
try:
    1 / 0
except ZeroDivisionError:
    logging.exception("last")
"""


def test_a_log_that_hangs_holds_no_loop_up(shim: Path, tmp_path: Path) -> None:
    # the first write takes two seconds: all was said before any of it is in the file, and all is in it at the end
    log = tmp_path / "the.log"
    assert run_with_fault(shim, "op=write path=the.log count=1 delay_us=1500000", _LOGGING, log) == ["0"]
    lines = log.read_text().splitlines()
    assert lines[:101] == [*(f"line {number}" for number in range(100)), "last"]
    assert lines[-1] == "ZeroDivisionError: division by zero"


# -- roles ---------------------------------------------------------------------------------------------------------


def test_a_role_is_ready_although_it_cannot_say_so_yet(blocked: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(role, "_SAY_S", 0.1)
    context = RoleContext(RunDir(blocked), attempt=1, role="trainer", replica=0, rank=0)
    context.ready()
    with context.progress().phase("forward_backward"):
        Complaint(time_s=1.0, role="engine", replica=1, message="takes no weights").write(context.run, 1)
    blocked.unlink()
    assert reports.flush(30)
    assert role.ready_path(context.run, 1, "trainer", 0).is_file()
    assert [complaint.message for complaint in Complaint.read_all(context.run, 1)] == ["takes no weights"]
    progress = RoleProgress.read(progress_path(context.run, 1, "trainer", 0))
    assert progress is not None
    assert progress.phase == "forward_backward"
