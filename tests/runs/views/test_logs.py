"""Log lines, merged and followed."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest
from runs_testing import make_run, write_log, write_status

from hpcrl.errors import UsageError
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.status import ProcessId, RunState
from hpcrl.runs.views.logs import LogFilter, follow_logs, format_line, read_logs
from hpcrl.storage.files import atomic_write


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = make_run(tmp_path)
    write_status(run, RunState.COMPLETED)
    write_log(run, "2026-01-31 12:00:00,100 INFO one\n  more of one\n2026-01-31 12:00:02,100 INFO three\n")
    log = write_log(run, "before any time\n2026-01-31 12:00:01.100 two\nI0131 12:00:03.500000 four\n", role="trainer")
    write_log(run, "2026-01-31 12:00:00,900 rank\n", role="trainer", rank=1)
    os.utime(log, (1769860000, 1769860000))
    return run


def texts(run: RunDir, *, lines: int = 0, **wanted: object) -> list[str]:
    return [line.line for line in read_logs(run, LogFilter.make(run, **wanted), lines=lines)]  # type: ignore[arg-type]


def test_lines_are_merged_by_time_and_stay_with_the_line_they_belong_to(run: RunDir) -> None:
    assert [line.split()[-1] for line in texts(run)] == ["time", "one", "one", "rank", "two", "three", "four"]


def test_filters(run: RunDir) -> None:
    assert len(texts(run, role="trainer")) == 4
    assert texts(run, role="trainer", rank=1) == ["2026-01-31 12:00:00,900 rank"]
    assert [t.split()[-1] for t in texts(run, grep="t(wo|hree)")] == ["two", "three"]
    assert [t.split()[-1] for t in texts(run, lines=2)] == ["three", "four"]
    assert texts(run, replica=7) == []
    # as `hpcrl shell` names a replica
    assert texts(run, role="trainer/0") == texts(run, role="trainer")
    assert texts(run, role="trainer/1") == []


def test_lines_from_a_time_on(run: RunDir) -> None:
    recent = texts(run, since="2026-01-31T12:00:01")
    # whose time nobody knows is never too old
    assert [t.split()[-1] for t in recent] == ["time", "two", "three", "four"]
    assert [t.split()[-1] for t in texts(run, since="1m")] == ["time"]
    assert len(texts(run, since="36500d")) == 7


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"since": "yesterday"}, "90s, 10m"),
        ({"role": "nobody"}, "hint: it has engine, trainer"),
        ({"role": "nobody/0"}, "hint: it has engine, trainer"),
        ({"role": "trainer/x"}, "such as trainer/0"),
        ({"role": "trainer/0", "replica": 1}, "name two replicas"),
        ({"attempt": 9}, "attempts: 1"),
        ({"grep": "("}, "not a regular"),
    ],
)
def test_wrong_filters_are_refused(run: RunDir, wanted: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        texts(run, **wanted)


def test_a_line_for_people_and_for_programs(run: RunDir) -> None:
    line = read_logs(run, LogFilter.make(run, role="trainer", rank=1))[0]
    assert format_line(line, as_json=False) == "trainer 0.1 | 2026-01-31 12:00:00,900 rank"
    assert '"rank":1' in format_line(line, as_json=True)


def test_bytes_that_are_no_text_do_not_stop_it(run: RunDir) -> None:
    run.log_path(1, "engine", 0).write_bytes(b"\xff\xfe broken\nno end")
    assert texts(run, role="engine") == ["�� broken", "no end"]


def test_the_tail_of_a_large_file_is_read_from_its_end(run: RunDir) -> None:
    write_log(run, "".join(f"line {i} {'x' * 100}\n" for i in range(30_000)))
    assert [t.split()[1] for t in texts(run, role="engine", lines=2)] == ["29998", "29999"]


def test_following_sees_appended_lines_new_files_and_replaced_files(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    me = ProcessId.of(os.getpid())
    assert me is not None
    write_status(run, RunState.RUNNING, supervisor=me)
    path = write_log(run, "old\n")
    seen: list[str] = []

    def read() -> None:
        seen.extend(line.line for line in follow_logs(run, LogFilter.make(run), lines=10, poll_s=0.02))

    def wait_for(line: str) -> None:
        deadline = time.monotonic() + 120
        while line not in seen:
            assert time.monotonic() < deadline, f"{line!r} is not among {seen}"
            time.sleep(0.01)

    thread = threading.Thread(target=read)
    thread.start()
    wait_for("old")
    with path.open("a") as stream:
        stream.write("appended\nhal")
        stream.flush()
        wait_for("appended")
        stream.write("ves\n")
    wait_for("halves")
    write_log(run, "new file\n", role="trainer")
    wait_for("new file")
    path.write_text("again\n")
    wait_for("again")
    with path.open("a") as stream:
        stream.write("last words, no line break")
    status = run.status_path.read_text().replace('"RUNNING"', '"COMPLETED"')
    atomic_write(run.status_path, status.encode())  # as the supervisor writes it: a reader may look at any moment
    thread.join(timeout=120)
    assert not thread.is_alive()
    assert seen == ["old", "appended", "halves", "new file", "again", "last words, no line break"]
