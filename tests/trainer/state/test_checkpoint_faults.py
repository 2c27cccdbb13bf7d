"""A filesystem that fails while a checkpoint is saved, for real: what was good stays good, and the training goes on."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from patience import wait_for
from trainer_testing import StubDock, make_recipe, start_attempt, write_model_dir, write_recipe

from hpcrl.checkpoints import CheckpointLedger, CheckpointWriter
from hpcrl.errors import CheckpointError, FencedError
from hpcrl.runs.events import read_events
from hpcrl.runs.metrics import read_metrics
from hpcrl.runs.role import FailureRecord, save_answer_path, save_request_path
from hpcrl.runs.rundir import RunDir
from hpcrl.storage.files import write_json
from hpcrl.trainer.loop import train

SOURCE = Path(__file__).with_name("failing_writes.c")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return write_model_dir(tmp_path_factory.mktemp("faults") / "model")


@pytest.fixture(scope="module")
def failing_writes(tmp_path_factory):
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler: faults of the filesystem cannot be injected")
    library = tmp_path_factory.mktemp("shim") / "failing_writes.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, SOURCE, "-ldl"], check=True)
    return library


def new_run(path, model_dir, steps=6):
    """Saves after 2, 4 and 6 steps, keeps two."""
    run = RunDir(path)
    write_recipe(run, make_recipe(model_dir, steps=steps))
    return run


def run_trainer(run, dock, **environment):
    """The trainer's own process; its exit code."""
    context = start_attempt(run, dock)
    (run.attempt_dir(context.attempt) / "logs" / "trainer").mkdir(exist_ok=True)
    variables = {
        "HPCRL_RUN_DIR": str(run.path),
        "HPCRL_ATTEMPT": str(context.attempt),
        "HPCRL_ROLE": "trainer",
        "HPCRL_REPLICA": "0",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "hpcrl.trainer"]
    result = subprocess.run(
        command,
        env={**os.environ, **variables, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )
    return result.returncode


def failed(run):
    return [event.data for event in read_events(run) if event.kind == "trainer.checkpoint_failed"]


def good_steps(run):
    """Entries whose every byte is right; there must be no others, and nothing half done."""
    ledger = CheckpointLedger(run.checkpoints_dir)
    for step in ledger.steps():
        ledger.open(step).verify()
    assert list(run.checkpoints_dir.glob(".*/*")) == []
    return ledger.steps()


#: by the step whose save fails
FAULTS = {
    4: ("write", errno.ENOSPC, "trainer/__0_0.distcp"),
    8: ("write", errno.EDQUOT, "trainer/.metadata"),
    12: ("fsync", errno.EIO, "trainer/__0_0.distcp"),
    16: ("write", errno.EDQUOT, ".orchestrator.msgpack"),
    20: ("fsync", errno.EIO, ".manifest.json"),
}


def rules(faults):
    """As `failing_writes.c` reads them."""
    return ";".join(f"{op}:{number}:step-{step:06}/{file}" for step, (op, number, file) in faults.items())


@pytest.mark.slow
def test_a_periodic_save_that_fails_is_reported_and_survived(tmp_path, model_dir, failing_writes):
    run = new_run(tmp_path / "run", model_dir, steps=22)
    left = {}

    def saved(step):
        done = list(run.checkpoints_dir.glob(".*/*")) == []
        return done and step in CheckpointLedger(run.checkpoints_dir).steps()

    class Watching(StubDock):
        def get(self, path):
            step = int(urlsplit(path).path.rsplit("/", 1)[1]) - 3
            if (
                step in FAULTS
            ):  # the save after the one that failed is still under way, and what is too old goes after it
                wait_for(lambda: saved(step + 2) and len(good_steps(run)) == 2, 15, f"checkpoint of step {step + 2}")
                left[step] = good_steps(run)
            return super().get(path)

    with Watching().serving() as dock:
        assert run_trainer(run, dock, LD_PRELOAD=str(failing_writes), FAIL=rules(FAULTS)) == 0
    assert {**left, 20: good_steps(run)} == {step: [step - 2, step + 2] for step in FAULTS}
    for (step, (_, number, _)), event in zip(FAULTS.items(), failed(run), strict=True):
        assert (event["step"], event["newest"], event["failures_in_a_row"]) == (step, step - 2, 1)
        assert os.strerror(number) in event["reason"]
    assert [record.step for record in read_metrics(run)] == list(range(1, 23))


@pytest.mark.slow
def test_a_last_save_that_fails_is_an_error(tmp_path, model_dir, failing_writes):
    run = new_run(tmp_path / "run", model_dir)
    fault = rules({6: ("write", errno.ENOSPC, "trainer")})
    with StubDock().serving() as dock:
        assert run_trainer(run, dock, LD_PRELOAD=str(failing_writes), FAIL=fault) == 1
        (record,) = FailureRecord.read_all(run, 1)
        assert os.strerror(errno.ENOSPC) in record.message
        assert not record.secondary
        assert good_steps(run) == [2, 4]
        # with room again it goes on from there
        train(start_attempt(run, dock))
    assert good_steps(run) == [4, 6]


@pytest.fixture
def small_filesystem(tmp_path):
    """A run directory's place for checkpoints on a filesystem of its own."""
    path = tmp_path / "run" / "checkpoints"
    path.mkdir(parents=True)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=6m,mode=700", "tmpfs", path], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"a small filesystem cannot be mounted here: {mounted.stderr.decode().strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", path], check=True)


def test_a_full_disk_is_seen_before_and_leaves_what_is_there(tmp_path, model_dir, small_filesystem):
    run = new_run(tmp_path / "run", model_dir)
    filler = small_filesystem / "filler"
    with StubDock().serving() as dock:
        train(start_attempt(run, dock))
        assert good_steps(run) == [4, 6]
        assert failed(run) == []
        free = os.statvfs(small_filesystem)
        filler.write_bytes(b"x" * (free.f_bavail * free.f_frsize - 200_000))
        write_recipe(run, make_recipe(model_dir, steps=9))
        with pytest.raises(CheckpointError, match="the filesystem leaves"):
            train(start_attempt(run, dock))
        (periodic, final) = failed(run)
        assert (periodic["step"], final["step"], final["failures_in_a_row"]) == (8, 9, 2)
        assert "hint" in periodic["reason"]
        assert good_steps(run) == [4, 6]
        # a person makes room; the run goes on from the last good one
        filler.unlink()
        train(start_attempt(run, dock))
    assert good_steps(run) == [8, 9]


def test_a_newer_attempt_ends_the_older_one_at_its_next_save(tmp_path, model_dir):
    run = new_run(tmp_path / "run", model_dir, steps=50)

    class Overtaken(StubDock):
        def post(self, path):
            if path.endswith("/published/3"):  # the save of step 2 may still be under way: its entry is expected
                wait_for(lambda: good_steps(run) == [2], 30, "checkpoint of step 2")
                CheckpointWriter.claim(run.checkpoints_dir, 7)
            return super().post(path)

    with Overtaken().serving() as dock, pytest.raises(FencedError, match="attempt 7 writes there"):
        train(start_attempt(run, dock))
    assert good_steps(run) == [2]


def test_a_save_on_request_is_complete_before_the_training_continues(tmp_path, model_dir):
    run = new_run(tmp_path / "run", model_dir, steps=5)
    found = {}

    class Asking(StubDock):
        def get(self, path):
            asked = int(urlsplit(path).path.rsplit("/", 1)[1])
            if asked == 3:
                write_json(save_request_path(run, 1), {})
            found.setdefault(asked, CheckpointLedger(run.checkpoints_dir).steps())
            return super().get(path)

    with Asking().serving() as dock:
        train(start_attempt(run, dock))
    # the batch of step 3 is asked for while step 2 trains, and that of step s + 2 when step s + 1 begins
    answer = json.loads(save_answer_path(run, 1).read_text())
    assert answer in ({"step": 2, "reason": ""}, {"step": 3, "reason": ""})
    assert answer["step"] in found[answer["step"] + 2]


@pytest.mark.slow
def test_a_process_that_sleeps_through_its_successor_changes_nothing(tmp_path, model_dir):
    """The attempt is stopped, thought dead, replaced, and wakes up."""
    run = new_run(tmp_path / "run", model_dir, steps=200)
    with StubDock().serving() as dock:
        context = start_attempt(run, dock)
        (run.attempt_dir(1) / "logs" / "trainer").mkdir(exist_ok=True)
        variables = {
            "HPCRL_RUN_DIR": str(run.path),
            "HPCRL_ATTEMPT": "1",
            "HPCRL_ROLE": "trainer",
            "HPCRL_REPLICA": "0",
        }
        old = subprocess.Popen([sys.executable, "-m", "hpcrl.trainer"], env={**os.environ, **variables})
        try:
            deadline = time.monotonic() + 300
            while len(CheckpointLedger(run.checkpoints_dir).steps()) < 2:
                assert time.monotonic() < deadline
                time.sleep(0.02)
            old.send_signal(signal.SIGSTOP)
            newer = CheckpointWriter.claim(run.checkpoints_dir, context.attempt + 1)
            before = sorted(path for path in run.checkpoints_dir.rglob("*") if path != newer.fence.path)
            old.send_signal(signal.SIGCONT)
            assert old.wait(timeout=300) == 1
        finally:
            old.kill()
            old.wait()
    assert sorted(path for path in run.checkpoints_dir.rglob("*") if path != newer.fence.path) == before
    (record,) = FailureRecord.read_all(run, 1)
    assert record.error == "FencedError"
