"""Of several commands that would start the next attempt of a run, one does."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec
import pytest
from runs_testing import GONE, make_run

from hpcrl.errors import RunDirError
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.start import claim
from hpcrl.runs.start.claim import claimed
from hpcrl.runs.status import ProcessId
from hpcrl.storage.files import write_json


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return make_run(tmp_path)


def claims(run: RunDir) -> list[str]:
    return sorted(name for name in os.listdir(run.path) if name.startswith(".resume"))


def leave_claim(run: RunDir, number: int, process: ProcessId, *, age_s: float = 0.0) -> None:
    write_json(run.path / f".resume.{number}", {"process": process, "time_s": time.time() - age_s, "user": "somebody"})


def test_a_second_one_names_the_first_and_leaves_nothing(run: RunDir) -> None:
    with claimed(run, user="me"):
        with (
            pytest.raises(RunDirError, match=rf"another resume of run-1 .*pid {os.getpid()} on .*me, since"),
            claimed(run, user="you"),
        ):
            pytest.fail("two at once")
        assert claims(run) == [".resume.1"]
    assert claims(run) == []
    with claimed(run, user="you"):
        pass


def test_the_claim_of_a_dead_process_does_not_count(run: RunDir) -> None:
    leave_claim(run, 1, GONE)
    with claimed(run, user="me"):
        assert claims(run) == [".resume.2"]


def test_the_claim_of_another_machine_counts_for_a_while(run: RunDir) -> None:
    elsewhere = msgspec.structs.replace(GONE, host="elsewhere")
    leave_claim(run, 1, elsewhere)
    with pytest.raises(RunDirError, match="on elsewhere, somebody"), claimed(run, user="me"):
        pytest.fail("it may be at work")
    leave_claim(run, 1, elsewhere, age_s=3600.0)
    with claimed(run, user="me"):
        pass


def test_one_that_looked_long_ago_gives_way(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """It saw a dead claim; until it makes its own, others have come and gone, and one has come to stay."""
    leave_claim(run, 1, GONE)
    old = claim._claims(run.path)
    living = ProcessId.of(os.getppid())
    assert living is not None
    leave_claim(run, 1, living)
    look, looks = claim._claims, iter([old])
    monkeypatch.setattr(claim, "_claims", lambda directory: next(looks, None) or look(directory))
    with pytest.raises(RunDirError, match=f"pid {os.getppid()} "), claimed(run, user="me"):
        pytest.fail("two at once")
    assert claims(run) == [".resume.1"]


ONE_OF_MANY = """
import sys, time
from pathlib import Path
from hpcrl.errors import RunDirError
from hpcrl.runs.start import claim
from hpcrl.runs.start.claim import claimed
from hpcrl.runs.rundir import RunDir
run, log = RunDir(Path(sys.argv[1])), Path(sys.argv[2])
sys.stdin.readline()
for _ in range(200):
    try:
        with claimed(run, user="x"):
            (log / "held").mkdir()  # fails where another one holds the claim, too
            (log / "held").rmdir()
            print("held", flush=True)
    except RunDirError:
        pass
"""


def test_never_two(run: RunDir, tmp_path: Path) -> None:
    """Processes that claim and let go again and again, from a claim that a dead one left."""
    leave_claim(run, 3, GONE)
    log = tmp_path / "log"
    log.mkdir()
    command = [sys.executable, "-c", ONE_OF_MANY, str(run.path), str(log)]
    racers = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    answers: list[tuple[str, str]] = []
    threads = [
        threading.Thread(target=lambda racer=racer: answers.append(racer.communicate("go\n"))) for racer in racers
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [racer.returncode for racer in racers] == [0, 0, 0], answers
    assert sum(out.count("held") for out, _ in answers) > 0
