"""Logs of any size, with lines of any length, of hosts in any zone, over attempts."""

from __future__ import annotations

import io
import logging
import os
import random
import re
import subprocess
import sys
import threading
import time
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from runs_testing import make_run, write_log, write_status

from hpcrl.reporting.log_format import start_logging
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.status import ProcessId, RunState
from hpcrl.runs.views.log_clock import LogClock
from hpcrl.runs.views.log_lines import LONGEST_BYTES, file_blocks, split_lines, tail_start
from hpcrl.runs.views.logs import LogFilter, follow_logs, iterate_logs, read_logs


@pytest.mark.parametrize("seed", range(20))
def test_lines_are_those_of_the_whole_text_however_it_is_cut(seed: int) -> None:
    draw = random.Random(seed)
    text = "".join(draw.choices(["a", "bc", "\n", "\r\n", "\r", "", "ä東", "\n\n", " "], k=300)).encode()
    cuts = sorted(draw.sample(range(len(text)), 40))
    blocks = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    found = [line.text for line in split_lines(blocks, None)]
    assert found == text.decode().splitlines()
    matching = [line.text for line in split_lines(blocks, re.compile("c")) if line.matches]
    assert matching == [line for line in text.decode().splitlines() if "c" in line]


def test_a_long_line_is_cut_and_searched_whole() -> None:
    blocks = [b"before\n", *[b"x" * 50_000] * 40, b"needle", *[b"y" * 50_000] * 40, b"\nafter\n"]
    lines = list(split_lines(blocks, re.compile("needle|after")))
    assert [line.matches for line in lines] == [False, True, True]
    assert len(lines[1].text) < LONGEST_BYTES + 100
    assert lines[1].text.endswith(f"… {4_000_006 - LONGEST_BYTES:,} more bytes of this line are not shown")


@pytest.mark.parametrize("lines", [1, 3, 200])
def test_what_stands_before_a_long_line_is_shown(lines: int, tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"".join(b"line %d\n" % i for i in range(1000)) + b"z" * 3_000_000 + b"\nlast\n")
    begin = tail_start(path, lines, least_bytes=0)
    found = [line.text for line in split_lines(file_blocks(path, begin), None)]
    assert len(found) >= lines
    assert found[-1] == "last"
    if lines > 2:
        assert found[-3] == "line 999"


def test_a_search_through_a_large_log_needs_little_memory(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    path = write_log(run, "")
    with path.open("wb") as stream:
        block = b"".join(b"2026-11-25 19:00:00,123 trainer line %07d loss 1.0\n" % i for i in range(20_000))
        for _ in range(20):
            stream.write(block)
        stream.write(b"w" * 30_000_000 + b"\n")
    code = (
        "import re, resource, sys; from pathlib import Path; from hpcrl.runs.rundir import RunDir; "
        "from hpcrl.runs.views.logs import *; run = RunDir(Path(sys.argv[1])); m = resource.RUSAGE_SELF; "
        "kib = lambda: resource.getrusage(m).ru_maxrss; before = kib(); "
        "n = sum(1 for _ in iterate_logs(run, LogFilter(1))); "
        "list(iterate_logs(run, LogFilter(1, grep=re.compile('loss')), lines=9)); print(n, kib() - before)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(run.path)], capture_output=True, text=True, check=True)
    number, more_kib = map(int, done.stdout.split())
    assert number == 400_001
    assert more_kib < 16_384


def texts(run: RunDir, **wanted: object) -> list[str]:
    return [line.line.split()[-1] for line in read_logs(run, LogFilter.make(run, **wanted))]  # type: ignore[arg-type]


def test_lines_of_two_zones_are_merged_in_order(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    write_status(run, RunState.COMPLETED)
    write_log(run, "2026-01-31 12:00:00,100+0000 one\n2026-01-31T12:00:02.500Z three\n")
    write_log(run, "2026-01-31 21:00:01,100+0900 two\n2026-01-31 04:00:03,0-08:00 four\n", role="trainer")
    assert texts(run) == ["one", "two", "three", "four"]


@pytest.mark.parametrize("zone", ["UTC", "Asia/Tokyo", "America/Los_Angeles"])
def test_since_is_the_same_for_readers_of_all_zones(zone: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    try:
        run = make_run(tmp_path)
        write_status(run, RunState.COMPLETED)
        # a few seconds ago: the fractions that the lines have are past in any case
        now = (datetime.now() - timedelta(seconds=5)).astimezone(datetime.strptime("+0530", "%z").tzinfo)
        write_log(run, f"{now:%Y-%m-%d %H:%M:%S},100+0530 fresh\n{now:%Y-%m-%d %H:%M:%S},200 beside\n")
        # a program of others in another file of the same attempt, without a zone
        write_log(run, f"I{now:%m%d %H:%M:%S}.300000 others\n", role="trainer")
        assert sorted(texts(run, since="10m")) == ["beside", "fresh", "others"]
        assert texts(run, since="0s") == []
    finally:
        monkeypatch.undo()
        time.tzset()


def test_what_looks_like_a_zone_and_is_none(tmp_path: Path) -> None:
    path = tmp_path / "0-0.log"
    path.write_text("")
    clock = LogClock(path)
    for line in ("2026-01-31 12:00:00,1+9999 x", "2026-99-31 12:00:00,1+0100", "2026-01-31 12:00:00,1-xx"):
        clock.time_of(line)
    assert (
        clock.time_of("2026-01-31 12:00:00,5+0000 x")
        == datetime.fromisoformat("2026-01-31T12:00:00.5+00:00").timestamp()
    )


def test_our_lines_have_their_zone(monkeypatch: pytest.MonkeyPatch) -> None:
    root, stream = logging.getLogger(), io.StringIO()
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(root, "level", root.level)
    monkeypatch.setenv("TZ", "Asia/Kolkata")
    time.tzset()
    try:
        start_logging("%(levelname)s of mine: %(message)s", stream=stream)
        logging.getLogger("any").info("said")
        assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}\+0530 INFO of mine: said\n", stream.getvalue())
    finally:
        monkeypatch.undo()
        time.tzset()


def test_no_process_of_hpcrl_writes_times_without_a_zone() -> None:
    sources = Path(__file__).parents[3] / "hpcrl"
    writers = [path.name for path in sources.rglob("*.py") if "asctime" in path.read_text(encoding="utf-8")]
    assert writers == ["log_format.py"]


@pytest.mark.parametrize("asked", [None, 1])
def test_following_over_a_requeue(asked: int | None, tmp_path: Path) -> None:
    run = make_run(tmp_path)
    me = ProcessId.of(os.getpid())
    assert me is not None
    write_status(run, RunState.RUNNING, supervisor=me)
    write_log(run, "first\n")
    seen: list[tuple[int, str]] = []

    def read() -> None:
        wanted = LogFilter.make(run, attempt=asked)
        seen.extend((line.attempt, line.line) for line in follow_logs(run, wanted, lines=10, poll_s=0.02))

    thread = threading.Thread(target=read)
    thread.start()
    deadline = time.monotonic() + 120
    while (1, "first") not in seen:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    with run.log_path(1, "engine", 0).open("a") as stream:
        stream.write("last of the first")
    path = run.log_path(2, "engine", 0)
    path.parent.mkdir(parents=True)
    path.write_text("second\n")
    if asked is None:
        while (2, "second") not in seen:
            assert time.monotonic() < deadline, seen
            time.sleep(0.01)
        write_status(run, RunState.COMPLETED)
    thread.join(timeout=120)
    assert not thread.is_alive()
    rest = [(2, "second")] if asked is None else []
    assert seen == [(1, "first"), (1, "last of the first"), *rest]


def test_much_that_is_appended_is_followed_in_parts(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    write_status(run, RunState.COMPLETED)
    path = write_log(run, "old\n")
    lines = follow_logs(run, LogFilter.make(run), lines=1)
    assert next(lines).line == "old"
    with path.open("ab") as stream:
        stream.write(b"".join(b"%09d\n" % i for i in range(1_000_000)) + b"end")
    count = last = 0
    for line in lines:
        count, last = count + 1, line.line
    assert (count, last) == (1_000_001, "end")
    assert next(iterate_logs(run, LogFilter.make(run), lines=1)).line == "end"
