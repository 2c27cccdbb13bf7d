"""``hpcrl resume`` on a real run: more steps, several at once, nothing that can be restored, from scratch."""

from __future__ import annotations

import json
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest
from lab import SMALL_RUN, Lab, events, steps
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


def test_resume_says_what_is_true(lab: Lab) -> None:
    run = lab.submit("mine", "trainer.steps=3", "checkpoint.every_steps=2", *SMALL_RUN, follow=True)
    recipe = run.recipe_path.read_text()

    # completed: it wants more steps than it has done
    for arguments in ((), ("--set", "trainer.steps=3"), ("--set", "trainer.steps=2")):
        refused = lab.hpcrl("resume", run.name, *arguments, check=False)
        assert refused.returncode == 2, refused.stderr
        assert "nothing to resume" in refused.stderr
    assert run.recipe_path.read_text() == recipe

    # three at once: one resumes, the others say that they changed nothing
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
    listed = lab.hpcrl("checkpoint", "ls", run.name).stdout
    assert "not verified yet" in listed
    kept = {item["step"]: item for item in lab.json("checkpoint", "ls", run.name)["items"]}
    if 3 in kept:
        assert kept[3]["verified_by"] == "attempt 2"

    # one byte of each: sizes say nothing, the trainer finds it, and the run ends with that
    damage_all(run)
    before, versions = steps(run), HandoffStore(run.weights_dir).versions()
    saved = CheckpointLedger(run.checkpoints_dir).steps()
    resumed = lab.hpcrl("resume", run.name, "--set", f"trainer.steps={total + 2}", "--follow", check=False)
    assert resumed.returncode == 94, resumed.stderr
    assert f"the trainer verifies the checkpoint of step {total}" in resumed.stderr
    why = lab.json("why", run.name)
    assert why["cause"]["kind"] == "nothing_to_restore"
    for text in (lab.hpcrl("why", run.name).stdout, "\n".join(why["cause"]["details"]), resumed.stderr):
        for step in saved:
            assert re.search(rf"step {step}: .*__0_0\.distcp does not have the content .*XXH3-128", text)
    status = " ".join(lab.hpcrl("status", run.name).stdout.split())
    assert "a run does not begin again by itself" in status
    assert "hpcrl resume mine --from-scratch" in status
    assert (steps(run), HandoffStore(run.weights_dir).versions()) == (before, versions)
    listed = lab.hpcrl("checkpoint", "ls", run.name, check=False)
    assert listed.returncode == 1
    assert listed.stdout.count("damaged: ") == len(saved)

    # where nothing is left at all, the command itself refuses
    for step in saved[:-1]:
        lab.hpcrl("checkpoint", "prune", run.name, "--step", str(step), "--yes", check=False)
    broken = CheckpointLedger(run.checkpoints_dir).path_of(saved[-1]) / "orchestrator.msgpack"
    text = broken.read_bytes()
    for path in run.checkpoints_dir.glob("step-*/orchestrator.msgpack"):
        path.write_bytes(b"")
    attempts = run.attempts()
    refused = lab.hpcrl("resume", run.name, check=False)
    assert refused.returncode == 94
    assert "orchestrator.msgpack has 0 bytes" in refused.stderr
    broken.write_bytes(text)
    assert run.attempts() == attempts

    # what a person asks for is done, and what is given up is kept
    lab.hpcrl("resume", run.name, "--from-scratch", "--set", "trainer.steps=2", "--follow")
    assert list(steps(run)) == [1, 2]
    assert {record.attempt for record in steps(run).values()} == {attempts[-1] + 1}
    document = json.loads(lab.hpcrl("checkpoint", "ls", run.name, "--json").stdout)
    assert [item["step"] for item in document["items"]] == [2]
    assert [entry["step"] for entry in document["put_aside"]] == [step for step in saved if step > 2]
    assert "put aside" in lab.hpcrl("why", run.name).stdout
