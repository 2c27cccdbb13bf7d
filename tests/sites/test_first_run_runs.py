"""The runs of `hpcrl site first-run`: followed to their end, ended where they were left, their rollouts verified."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_first_run_stages import Site, interpreter, site, stopped

from hpcrl.bringup import follow_run, run_stages
from hpcrl.bringup.rollout_proof import RolloutProof, prove_rollouts
from hpcrl.bringup.stage import StageStoppedError
from hpcrl.config.plan import Role
from hpcrl.dock.ledger.log import RolloutLog
from hpcrl.errors import HpcrlError
from hpcrl.models.character_tokenizer import write_character_tokenizer
from hpcrl.models.tokenizer import ChatTokenizer
from hpcrl.runs.job_facts import JobFact
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.status import RunState

__all__ = ["site"]  # a fixture

# -- runs that were left ----------------------------------------------------------------------------------------------


def test_a_run_that_an_earlier_call_left_is_ended_first(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    sys.path.append(str(Path(__file__).parents[1] / "runs"))
    from runs_testing import make_run

    run = make_run(site.runs_root, "first-run-probe-1")
    site.state.open_run = str(run.path)
    asked: list[str] = []

    def cancel(found: Any, *, user: str) -> Any:
        asked.append(found.name)
        raise HpcrlError("Slurm is silent")

    monkeypatch.setattr(
        follow_run, "observe", lambda run: type("View", (), {"state": type("S", (), {"ended": False})})()
    )
    monkeypatch.setattr(follow_run, "cancel", cancel)
    follow_run.end_open_run(site.bench)
    assert asked == ["first-run-probe-1"]
    # it may still have a job: the next call tries again
    assert site.state.open_run == str(run.path)
    assert f"hpcrl cancel {run.path}" in site.said[-1]
    monkeypatch.setattr(follow_run, "cancel", lambda run, *, user: type("View", (), {"state": "CANCELLED"})())
    follow_run.end_open_run(site.bench)
    assert site.state.open_run == ""
    assert site.said[-1] == "first-run-probe-1 is CANCELLED"


def test_a_run_that_was_never_made_is_forgotten(site: Site) -> None:
    site.state.open_run = str(site.runs_root / "nowhere")
    follow_run.end_open_run(site.bench)
    assert site.state.open_run == ""
    assert site.said == []


# -- the proof of rollouts --------------------------------------------------------------------------------------------


class Planned(RunDir):
    """A run with an interpreter of the orchestrator."""

    python: str | None = sys.executable

    def plan(self) -> Any:
        group = SimpleNamespace(role=Role.ORCHESTRATOR, python=self.python)
        return SimpleNamespace(groups=[group], python=None, container=None)


@pytest.fixture
def verified(site: Site, monkeypatch: pytest.MonkeyPatch) -> Planned:
    """A run with a finished rollout, seen from an environment without arrays."""
    for room in ("runs", "cli"):
        monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / room))
    from runs_testing import make_run, write_steps
    from test_rollout_commands import finish, make_rollout

    run = make_run(site.runs_root, "tiny")
    write_steps(run, 1)
    write_character_tokenizer(site.place / "tokens")
    log = RolloutLog(run.rollouts_dir, attempt=1, restored=0, limit_s=5.0)
    finish(log, 1, make_rollout(0, ChatTokenizer(site.place / "tokens")))
    log.close()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    return Planned(run.path)


def test_a_login_node_lets_the_orchestrators_interpreter_verify(
    verified: Planned, monkeypatch: pytest.MonkeyPatch
) -> None:
    proof = prove_rollouts(verified)
    assert (proof.finished, proof.trained, proof.waiting) == (1, 0, 1)
    monkeypatch.undo()
    assert prove_rollouts(verified) == proof


def test_an_interpreter_that_cannot_verify_is_quoted(verified: Planned, site: Site) -> None:
    verified.python = str(interpreter(site.place / "python", "echo no arrays here >&2; exit 3"))
    with pytest.raises(StageStoppedError, match=r"could not verify its rollouts:\n    no arrays here"):
        prove_rollouts(verified)
    verified.python = str(site.place / "moon/python")
    with pytest.raises(StageStoppedError, match="has no numpy, and the interpreter of") as caught:
        prove_rollouts(verified)
    assert caught.value.commands[0].startswith(f"hpcrl rollouts verify {verified.path}")


def test_rollouts_that_contradict_the_ledger_stop(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = SimpleNamespace(trainer=SimpleNamespace(steps=2), engine=SimpleNamespace(backend="vllm"))
    run = SimpleNamespace(name="tiny", path=site.runs_root / "tiny", recipe=lambda: recipe)
    monkeypatch.setattr(run_stages, "_run", lambda *_: (run, None, 1.0))
    monkeypatch.setattr(run_stages, "read_metrics", lambda _: [None])
    assert "1 of 2 steps are on record" in str(stopped(run_stages.run_tiny, site.bench))
    monkeypatch.setattr(run_stages, "read_metrics", lambda _: [None, None])
    proof = RolloutProof(finished=2, trained=2, waiting=0, problems=["step 2: batch and ledger differ in 1/0"])
    monkeypatch.setattr(run_stages, "prove_rollouts", lambda _: proof)
    error = stopped(run_stages.run_tiny, site.bench)
    assert "step 2: batch and ledger differ in 1/0" in str(error)
    assert error.commands == (f"hpcrl rollouts verify {run.path}",)


# -- a run that does not complete -------------------------------------------------------------------------------------


class Seen:
    """A run as it is seen, one look after the other."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *states: RunState, reason: str = "") -> None:
        job = JobFact(job_id="7", state="PENDING", reason=reason)
        views = [SimpleNamespace(state=state, job=job, components=[]) for state in states]
        monkeypatch.setattr(follow_run, "observe", lambda run: views.pop(0) if len(views) > 1 else views[0])
        monkeypatch.setattr(follow_run, "read_metrics", lambda run: [])
        monkeypatch.setattr(follow_run, "_POLL_S", 0.01)
        monkeypatch.setattr(follow_run, "set_job_query", lambda source: None)
        self.run = RunDir(Path("/runs/tiny"))
        self.plan: Any = SimpleNamespace(time_limit_s=0.1)
        self.said: list[str] = []

    def follow(self, wait_s: float = 60.0) -> None:
        follow_run.follow_to_end(self.run, self.plan, wait_s=wait_s, say=self.said.append)


def test_a_run_that_completes_is_reported_once_a_state(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Seen(monkeypatch, *[RunState.SUBMITTED] * 3, *[RunState.RUNNING] * 2, RunState.COMPLETED, reason="Priority")
    seen.follow()
    assert seen.said == ["job 7 pending (Priority)", "running", "completed"]


def test_a_run_that_fails_stops_with_its_cause_and_last_words(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Seen(monkeypatch, RunState.FAILED)
    found = SimpleNamespace(sentence="trainer 0 ended with exit code 1", hint="look there", last_words=["one", "two"])
    monkeypatch.setattr(follow_run, "diagnose", lambda run: found)
    with pytest.raises(StageStoppedError) as caught:
        seen.follow()
    said = "tiny is FAILED: trainer 0 ended with exit code 1\n    hint: look there\n    | one\n    | two"
    assert str(caught.value) == said
    assert [command.partition("  ")[0] for command in caught.value.commands] == [
        "hpcrl why /runs/tiny",
        "hpcrl logs /runs/tiny",
    ]


def test_a_job_that_gets_no_nodes_in_time_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Seen(monkeypatch, RunState.SUBMITTED, reason="Resources")
    with pytest.raises(StageStoppedError, match=r"no nodes within 0\.05 s \(Resources\); (?s:.*)hint: --wait"):
        seen.follow(wait_s=0.05)


def test_a_job_that_outlives_its_limit_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow_run, "_LATE_S", 0.05)
    seen = Seen(monkeypatch, RunState.RUNNING)
    with pytest.raises(StageStoppedError, match=r"has not ended 0\.05 s after its time limit"):
        seen.follow()
