"""``hpcrl resume`` on a real run: more steps, several at once, nothing that can be restored, from scratch.

The run replays the engines' experts: with the same weights the trainer would choose the same ones.
"""

from __future__ import annotations

import contextlib
import json
import re
import stat
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from lab import SMALL_RUN, Lab, events, processes, steps
from patience import patience

from hpcrl.checkpoints import CheckpointLedger
from hpcrl.runs.rundir import RunDir
from hpcrl.weights.store import HandoffStore

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]


def damage_all(run: RunDir) -> None:
    """One byte of the trainer's state in each checkpoint; sizes stay."""
    for path in run.checkpoints_dir.glob("step-*/trainer/__0_0.distcp"):
        data = path.read_bytes()
        path.write_bytes(data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])


def resume_at_once(lab: Lab, run: RunDir, totals: list[int]) -> list[subprocess.CompletedProcess[str]]:
    def resume(total: int) -> subprocess.CompletedProcess[str]:
        return lab.hpcrl("resume", run.name, "--set", f"trainer.steps={total}", check=False)

    with ThreadPoolExecutor(len(totals)) as pool:
        return list(pool.map(resume, totals))


@pytest.mark.campaign
def test_resume_says_what_is_true(lab: Lab) -> None:
    """One run, through all that a person may meet after its first end."""
    with watched_command_lines(lab.runs_root / "mine") as seen:
        settings = ("trainer.steps=3", "checkpoint.every_steps=2", "trainer.router_replay=true")
        run = lab.submit("mine", *settings, *SMALL_RUN, to_end=True)
    check_token_is_nowhere(run, seen)
    check_trainer_and_engine_choose_the_same_experts(lab, run)
    check_a_completed_run_wants_more_steps(lab, run)
    check_of_three_at_once_one_resumes(lab, run)
    check_another_run_begins_with_its_weights(lab, run)
    check_nothing_to_restore(lab, run)
    check_a_start_from_scratch(lab, run)


@contextlib.contextmanager
def watched_command_lines(run: Path) -> Iterator[set[str]]:
    """What everybody sees of the processes of a run, and the environments that they are started with."""
    seen: set[str] = set()
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.3):
            for process in processes(RunDir(run)):
                with contextlib.suppress(psutil.Error):
                    seen.add(" ".join([*process.cmdline(), *map("=".join, process.environ().items())]))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()


def check_token_is_nowhere(run: RunDir, command_lines: set[str]) -> None:
    """The run's token is in its own file, and in no other, and no process shows it."""
    file = run.path / "token"
    token = file.read_text()
    assert (len(token), stat.S_IMODE(file.stat().st_mode)) == (64, 0o600)
    for role in ("hpcrl.inference.embedded.server", "hpcrl.rollouts", "hpcrl.trainer"):
        assert any(role in line for line in command_lines), role
    assert not [line for line in command_lines if token in line]
    found = [path for path in run.path.rglob("*") if path.is_file() and token.encode() in path.read_bytes()]
    assert found == [file]


def check_trainer_and_engine_choose_the_same_experts(lab: Lab, run: RunDir) -> None:
    records = steps(run)
    assert list(records) == [1, 2, 3]
    for record in records.values():
        assert record.routing_mismatch is not None
        # of each rollout all rows are there but the last, over all turns
        rollouts = run.recipe().rollouts.rollouts_per_step
        assert record.tokens - record.routed_tokens == rollouts
        assert record.replayed_share == pytest.approx(record.routed_tokens / record.tokens)
        assert record.unknown_routing == pytest.approx({"last": rollouts / record.tokens})
    # the policy moves, so tokens of older versions may differ
    fresh = [r.routing_mismatch_by_lag["0"] for r in records.values() if "0" in r.routing_mismatch_by_lag]
    assert fresh
    assert max(fresh) < 1e-3
    assert "routes" in lab.hpcrl("status", run.name).stdout


def check_a_completed_run_wants_more_steps(lab: Lab, run: RunDir) -> None:
    recipe = run.recipe_path.read_text()
    done = "nothing to resume"
    for asked, why in ((None, done), (3, done), (2, "has done 3 steps, trainer.steps=2 asks for fewer")):
        arguments = () if asked is None else ("--set", f"trainer.steps={asked}")
        refused = lab.hpcrl("resume", run.name, *arguments, check=False)
        assert refused.returncode == 2, refused.stderr
        assert why in refused.stderr
    assert run.recipe_path.read_text() == recipe


def check_of_three_at_once_one_resumes(lab: Lab, run: RunDir) -> None:
    totals = [5, 6, 7]
    results = resume_at_once(lab, run, totals)
    assert sorted(result.returncode for result in results) == [0, 2, 2], results
    (total,) = [total for total, result in zip(totals, results, strict=True) if result.returncode == 0]
    for other, result in zip(totals, results, strict=True):
        if other != total:
            assert re.search(r"another resume of mine is under way \(pid \d+|is alive \(.*pid \d+", result.stderr)
            assert f"changed nothing: --set trainer.steps={other}" in result.stderr
    assert run.recipe().trainer.steps == total
    assert lab.wait_end(run, 120 * patience()).upper() == "COMPLETED"
    assert list(steps(run)) == list(range(1, total + 1))
    assert [(event.attempt, event.data["step"]) for event in events(run, "trainer.restored")] == [(2, 3)]
    assert "restored step 3 (every byte verified)" in lab.hpcrl("status", run.name).stdout
    assert "not verified yet" in lab.hpcrl("checkpoint", "ls", run.name).stdout
    by = {item["step"]: item["verified_by"] for item in lab.json("checkpoint", "ls", run.name)["items"]}
    assert by[total] == ""
    assert by.get(3, "attempt 2") == "attempt 2"


def check_another_run_begins_with_its_weights(lab: Lab, run: RunDir) -> None:
    step = CheckpointLedger(run.checkpoints_dir).steps()[-1]
    wanted = weights(run, step)
    settings = (f"model.path={lab.model}", "trainer.steps=1", *SMALL_RUN)
    sets = [part for setting in settings for part in ("--set", setting)]
    for name, source in (("second", f"mine@{step}"), ("third", f"mine@v{step}")):
        lab.hpcrl("submit", "quickstart", "--name", name, "--from", source, *sets)
        lab.complete(RunDir(lab.runs_root / name))
        begun = RunDir(lab.runs_root / name)
        assert weights(begun, 0) == wanted
        what = "the checkpoint of step" if name == "second" else "version"
        assert f"began with {what} {step} of mine" in lab.hpcrl("status", name).stdout
        origin = json.loads(begun.record_path.read_bytes())["origin"]
        assert (origin["run"], origin["number"]) == ("mine", step)


def weights(run: RunDir, version: int) -> dict[str, str]:
    """Hashes of all tensors of a version."""
    tensors = HandoffStore(run.weights_dir).open(version).manifest.tensors
    return {name: record.xxh3_128 for name, record in tensors.items()}


def check_nothing_to_restore(lab: Lab, run: RunDir) -> None:
    """One byte of each entry is wrong: sizes say nothing, the trainer finds it, and the attempt ends with that."""
    damage_all(run)
    before, versions = steps(run), HandoffStore(run.weights_dir).versions()
    saved = CheckpointLedger(run.checkpoints_dir).steps()
    resumed = lab.hpcrl("resume", run.name, "--set", "trainer.steps=9", "--follow", check=False)
    assert resumed.returncode == 94, resumed.stderr
    assert f"the trainer verifies the checkpoint of step {saved[-1]}" in resumed.stderr
    why = lab.json("why", run.name)
    assert why["cause"]["kind"] == "nothing_to_restore"
    for text in (lab.hpcrl("why", run.name).stdout, "\n".join(why["cause"]["details"]), resumed.stderr):
        for step in saved:
            assert re.search(rf"step {step}: .*__0_0\.distcp does not have the content .*XXH3-128", text)
    status = " ".join(lab.hpcrl("status", run.name).stdout.split())
    assert "A run never restarts at step 0 by itself" in status
    assert "hpcrl resume mine --from-scratch" in status
    assert (steps(run), HandoffStore(run.weights_dir).versions()) == (before, versions)
    listed = lab.hpcrl("checkpoint", "ls", run.name, check=False)
    assert listed.returncode == 1
    assert all(item["problem"] for item in json.loads(listed_json(lab, run))["items"])
    assert listed.stdout.count("damaged: ") == len(saved)

    # where sizes say it already, the command itself refuses
    states = {path: path.read_bytes() for path in run.checkpoints_dir.glob("step-*/orchestrator.msgpack")}
    for path in states:
        path.write_bytes(b"")
    attempts = run.attempts()
    refused = lab.hpcrl("resume", run.name, check=False)
    assert refused.returncode == 94
    assert "orchestrator.msgpack has 0 bytes" in refused.stderr
    for path, state in states.items():
        path.write_bytes(state)
    assert run.attempts() == attempts


def check_a_start_from_scratch(lab: Lab, run: RunDir) -> None:
    """What a person asks for is done, and what is given up is kept."""
    saved, attempts = CheckpointLedger(run.checkpoints_dir).steps(), run.attempts()
    lab.hpcrl("resume", run.name, "--from-scratch", "--set", "trainer.steps=2", "--follow")
    assert [(record.step, record.attempt) for record in steps(run).values()] == [(n, attempts[-1] + 1) for n in (1, 2)]
    document = json.loads(listed_json(lab, run))
    assert [item["step"] for item in document["items"]] == [2]
    assert [entry["step"] for entry in document["put_aside"]] == [step for step in saved if step > 2]
    assert "put aside" in lab.hpcrl("why", run.name).stdout


def listed_json(lab: Lab, run: RunDir) -> str:
    return lab.hpcrl("checkpoint", "ls", run.name, "--json", check=False).stdout
