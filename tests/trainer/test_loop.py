"""The whole trainer against a stub dock: versions, joint checkpoints, metrics, resume, signals."""

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys

import pytest
import torch
from patience import wait_for
from trainer_testing import StubDock, make_recipe, run_ranks, start_attempt, tiny_arch, write_model_dir, write_recipe

from hpcrl.checkpoints.checks import read_check
from hpcrl.checkpoints.ledger import CheckpointLedger
from hpcrl.checkpoints.restore import RestoreDecision
from hpcrl.errors import ConfigError, DeadlineError, NothingToRestoreError, PeerLostError, RunFailedError
from hpcrl.runs.events import read_events
from hpcrl.runs.metrics import read_metrics
from hpcrl.runs.resume_request import ResumeRequest
from hpcrl.runs.role import FailureRecord, RoleContext, restore_path
from hpcrl.runs.rundir import RunDir
from hpcrl.storage.quarantine import list_asides
from hpcrl.trainer.loop import train
from hpcrl.weights.store import HandoffStore


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return write_model_dir(tmp_path_factory.mktemp("loop") / "model")


@pytest.fixture
def dock():
    with StubDock().serving() as dock:
        yield dock


def new_run(path, model_dir, steps, **trainer):
    run = RunDir(path)
    write_recipe(run, make_recipe(model_dir, steps=steps, **trainer))
    return run


def run_steps(run, model_dir, dock, steps):
    """One attempt up to ``steps``."""
    write_recipe(run, make_recipe(model_dir, steps=steps))
    train(start_attempt(run, dock))
    return read_metrics(run)


@pytest.mark.parametrize("payload", ["roles", "probe"])
def test_settings_that_are_only_planned_are_refused_without_a_submit(tmp_path, model_dir, dock, payload):
    run = new_run(tmp_path / "run", model_dir, 2)
    recipe = run.recipe()
    changes = {"job": recipe.job.model_copy(update={"payload": payload})}
    changes["engine"] = recipe.engine.model_copy(update={"tp": 2})
    write_recipe(run, recipe.model_copy(update=changes))
    with pytest.raises(ConfigError) as caught:
        train(start_attempt(run, dock))
    assert [finding.key for finding in caught.value.findings] == ["engine.tp"]
    assert str(run.recipe_path) in str(caught.value)
    assert "hint" in str(caught.value)
    # nothing was begun
    assert dock.asked == dock.published == []
    assert not run.weights_dir.exists()


def rank_train(rank, run_path, attempt):
    run = RunDir(run_path)
    train(RoleContext(run, attempt=attempt, role="trainer", replica=0, rank=rank))


def train_ranks(run, dock, ranks, **options):
    context = start_attempt(run, dock)
    return run_ranks(ranks, rank_train, run.path, context.attempt, **options)


def events(run, kind):
    return [event.data for event in read_events(run) if event.kind == kind]


def losses(run):
    return [record.loss for record in read_metrics(run)]


def test_a_whole_run(tmp_path, model_dir, dock):
    run = new_run(tmp_path / "run", model_dir, 5, deterministic=True)
    context = start_attempt(run, dock)
    torch.use_deterministic_algorithms(False)
    train(context)
    assert torch.are_deterministic_algorithms_enabled()
    records = read_metrics(run)
    assert [r.step for r in records] == [1, 2, 3, 4, 5]
    for record in records:
        for value in (record.loss, record.entropy, record.grad_norm, record.mismatch_kl, record.ess):
            assert math.isfinite(value)
        assert set(record.phases_s) == {
            "wait_batch",
            "forward_backward",
            "optimizer",
            "publish",
            "checkpoint",
            "other",
        }
        assert record.tokens_per_s == pytest.approx(record.tokens / sum(record.phases_s.values()))
        assert record.learning_rate == 1e-3
        assert record.sampled_tokens < record.tokens
        assert record.rollouts == {"finished": 6.0}
    assert {"2", "mixed"} <= set(records[4].mismatch_kl_by_lag) <= {"0", "1", "2", "mixed"}
    assert records[1].phases_s["checkpoint"] > 0 == records[0].phases_s["checkpoint"]
    # a line a step, also of those that saved a checkpoint
    lines = [json.loads(line) for line in (run.metrics_dir / "0001.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    assert [path.name for path in run.metrics_dir.glob("*.jsonl")] == ["0001.jsonl"]
    assert HandoffStore(run.weights_dir).versions() == [0, 1, 2, 3, 4, 5]
    for version in range(6):
        HandoffStore(run.weights_dir).open(version).verify(content=True)
    # every second step and the last
    assert dock.snapshots == [2, 4, 5]
    assert CheckpointLedger(run.checkpoints_dir).steps() == [4, 5]
    entry = CheckpointLedger(run.checkpoints_dir).newest_verified().entry
    assert entry.orchestrator_state() == b"orchestrator at 5"
    assert dock.published == [1, 2, 3, 4, 5]
    assert dock.finished == [5]
    assert (run.attempt_dir(1) / "ready" / "trainer-0.json").is_file()
    assert [e["step"] for e in events(run, "step")] == [1, 2, 3, 4, 5]
    (ready,) = events(run, "trainer.ready")
    assert (ready["deterministic"], ready["kernels"]) == (True, {"attention": "fused"})
    assert list(run.weights_dir.glob(".*/*")) == []
    assert list(run.checkpoints_dir.glob(".*/*")) == []


@pytest.mark.parametrize("tied", [False, True])
def test_resume_equals_an_uninterrupted_run(tmp_path, dock, tied):
    model_dir = write_model_dir(tmp_path / "model", tiny_arch(tie_word_embeddings=tied))
    whole, parted = RunDir(tmp_path / "whole"), RunDir(tmp_path / "parted")
    run_steps(whole, model_dir, dock, 6)
    run_steps(parted, model_dir, dock, 3)
    run_steps(parted, model_dir, dock, 6)
    assert losses(parted) == losses(whole)  # bit-equal
    assert [r.attempt for r in read_metrics(parted)] == [1, 1, 1, 2, 2, 2]
    (restored,) = events(parted, "trainer.restored")
    assert restored["step"] == 3
    a, b = (HandoffStore(run.weights_dir).open(6).manifest.tensors for run in (whole, parted))
    assert {n: r.xxh3_128 for n, r in a.items()} == {n: r.xxh3_128 for n, r in b.items()}


def test_resume_skips_a_damaged_checkpoint_and_withdraws_later_versions(tmp_path, model_dir, dock):
    whole, run = RunDir(tmp_path / "whole"), RunDir(tmp_path / "run")
    run_steps(whole, model_dir, dock, 6)
    run_steps(run, model_dir, dock, 4)
    damaged = next((run.checkpoints_dir / "step-000004" / "trainer").glob("*.distcp"))
    damaged.write_bytes(damaged.read_bytes()[:-1])
    (writer,) = run.weights_dir.glob(".writer-000001-*")
    (writer / "v000005").mkdir()
    # the version that it resumes from was collected in the meantime
    shutil.rmtree(HandoffStore(run.weights_dir).path_of(2))
    run_steps(run, model_dir, dock, 6)
    (skipped,) = events(run, "trainer.checkpoint_skipped")
    assert skipped["step"] == 4
    assert "damaged" in skipped["reason"]
    decision = RestoreDecision.find(restore_path(run, 2))
    assert (decision.step, decision.verified, [s.step for s in decision.skipped]) == (2, "content", [4])
    assert RestoreDecision.find(restore_path(run, 1)).step is None
    assert events(run, "trainer.versions_withdrawn") == [{"versions": [3, 4]}]
    assert losses(run) == losses(whole)
    assert [r.attempt for r in read_metrics(run)] == [1, 1, 2, 2, 2, 2]
    assert HandoffStore(run.weights_dir).versions() == [0, 1, 2, 3, 4, 5, 6]
    HandoffStore(run.weights_dir).open(2).verify(content=True)
    (writer,) = run.weights_dir.glob(".*")
    assert (writer.name[:14], os.listdir(writer)) == (".writer-000002", [])


def begin_at(run, begin, step=None):
    """What `hpcrl resume --from-scratch` or `--from-step` writes down."""
    after = (run.attempts() or [0])[-1]
    ResumeRequest(begin=begin, step=step, after_attempt=after, time_s=0.0, by="test").write(run)


def damage_all(run):
    """One byte of each checkpoint."""
    for path in run.checkpoints_dir.glob("step-*/trainer/__0_0.distcp"):
        data = path.read_bytes()
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


def kept(root, prefix):
    return [(aside.number, aside.token) for aside in list_asides(root, prefix)]


def test_a_run_that_has_saved_does_not_begin_again_by_itself(tmp_path, model_dir, dock):
    run = RunDir(tmp_path / "run")
    first = run_steps(run, model_dir, dock, 4)
    damage_all(run)
    versions = HandoffStore(run.weights_dir).versions()
    for attempt in (2, 3):  # also the next one: a requeue, or a retry
        with pytest.raises(NothingToRestoreError, match="saved 2 of them, the last at step 4") as error:
            run_steps(run, model_dir, dock, 6)
        for step in (2, 4):
            what = rf"step {step}: .*__0_0.distcp does not have .*XXH3-128 \w{{32}}, the manifest"
            assert re.search(what, str(error.value))
        assert f"hpcrl resume {run.path} --from-scratch" in str(error.value)
        decision = RestoreDecision.find(restore_path(run, attempt))
        assert (decision.step, [s.step for s in decision.skipped]) == (None, [4, 2])
        assert decision.refused == str(error.value)
    # nothing was changed, and the entries are said to be damaged
    assert read_metrics(run) == first
    assert HandoffStore(run.weights_dir).versions() == versions
    assert CheckpointLedger(run.checkpoints_dir).steps() == [2, 4]
    assert "does not have" in read_check(CheckpointLedger(run.checkpoints_dir), 4).problem
    # also where nothing at all is left of them
    shutil.rmtree(run.checkpoints_dir)
    with pytest.raises(NothingToRestoreError, match="no entry is left"):
        run_steps(run, model_dir, dock, 6)


def test_what_a_restart_gives_up_is_put_aside_until_it_is_passed(tmp_path, model_dir, dock):
    whole, run = RunDir(tmp_path / "whole"), RunDir(tmp_path / "run")
    run_steps(whole, model_dir, dock, 6)
    run_steps(run, model_dir, dock, 4)
    damage_all(run)
    begin_at(run, "scratch")
    run_steps(run, model_dir, dock, 2)
    # step 2 was saved again; the checkpoint and the versions beyond are kept
    assert CheckpointLedger(run.checkpoints_dir).steps() == [2]
    assert kept(run.checkpoints_dir, "step-") == [(4, 2)]
    assert [number for number, _ in kept(run.weights_dir, "v")] == [1, 2, 3, 4]
    decision = RestoreDecision.find(restore_path(run, 2))
    assert (decision.step, decision.asked, decision.put_aside) == (None, "--from-scratch", [2, 4])
    # what was asked for is done: the next attempt goes on from what it has saved since
    run_steps(run, model_dir, dock, 6)
    assert RestoreDecision.find(restore_path(run, 3)).step == 2
    assert kept(run.checkpoints_dir, "step-") == []
    assert losses(run) == losses(whole)


def test_a_run_continues_from_the_step_that_a_person_names(tmp_path, model_dir, dock):
    run = RunDir(tmp_path / "run")
    first = losses_by_step(run_steps(run, model_dir, dock, 4))
    begin_at(run, "step", 2)
    run_steps(run, model_dir, dock, 3)
    assert kept(run.checkpoints_dir, "step-") == [(4, 2)]
    assert CheckpointLedger(run.checkpoints_dir).steps() == [2, 3]
    # and back to what was put aside: the later step that was given up first
    begin_at(run, "step", 4)
    again = losses_by_step(run_steps(run, model_dir, dock, 5))
    assert RestoreDecision.find(restore_path(run, 3)).step == 4
    assert {step: again[step] for step in first} == first
    # a damaged one is not replaced by another, and nothing is put aside for it
    damage_all(run)
    steps = CheckpointLedger(run.checkpoints_dir).steps()
    begin_at(run, "step", 4)
    with pytest.raises(NothingToRestoreError, match="checkpoint of step 4 cannot be restored"):
        run_steps(run, model_dir, dock, 6)
    assert CheckpointLedger(run.checkpoints_dir).steps() == steps


def losses_by_step(records):
    return {record.step: record.loss for record in records}


def test_a_finished_run_that_is_resumed_finishes_again(tmp_path, model_dir, dock):
    run = RunDir(tmp_path / "run")
    first = run_steps(run, model_dir, dock, 2)
    again = run_steps(run, model_dir, dock, 2)
    assert again == first
    assert dock.finished == [2, 2]


def test_an_intact_start_version_stays_and_a_damaged_one_is_made_again(tmp_path, model_dir, dock):
    run = RunDir(tmp_path / "run")
    run_steps(run, model_dir, dock, 1)
    begin_at(run, "scratch")
    manifest = run.weights_dir / "v000000" / "manifest.json"
    made = manifest.stat().st_ino
    run_steps(run, model_dir, dock, 1)
    assert manifest.stat().st_ino == made
    begin_at(run, "scratch")
    (run.weights_dir / "v000000" / "config.json").write_text("{}")
    run_steps(run, model_dir, dock, 1)
    HandoffStore(run.weights_dir).open(0).verify(content=True)


def test_two_ranks_equal_one_and_resume_from_each_other(tmp_path, model_dir, dock):
    """Two ranks with two of four experts each; then one with all of them; then two that share a batch."""
    one, two = RunDir(tmp_path / "one"), new_run(tmp_path / "two", model_dir, 3, parallelism={"ep": 2})
    run_steps(one, model_dir, dock, 7)
    train_ranks(two, dock, 2)
    assert {(rank, size) for _, rank, size in dock.asked} == {(0, 1), (0, 2), (1, 2)}
    assert HandoffStore(two.weights_dir).versions() == [0, 1, 2, 3]
    HandoffStore(two.weights_dir).open(3).verify(content=True)
    run_steps(two, model_dir, dock, 5)  # goes on with one rank
    (restored,) = events(two, "trainer.restored")
    assert (restored["saved_by_ranks"], restored["ranks"]) == (2, 1)
    dock.asked.clear()
    write_recipe(two, make_recipe(model_dir, steps=7, parallelism={"cp": 2}))
    train_ranks(two, dock, 2)
    assert sorted(dock.asked) == [(6, 0, 1), (6, 0, 1), (7, 0, 1), (7, 0, 1)]
    assert losses(two) == pytest.approx(losses(one), rel=1e-3, abs=1e-5)
    # the same rollouts, however ranks divide or share them
    digests = [record.rollouts_digest for record in read_metrics(two)]
    assert digests == [record.rollouts_digest for record in read_metrics(one)]
    assert len(set(digests)) == 7


def test_a_batch_that_never_comes(tmp_path, model_dir):
    run = RunDir(tmp_path / "run")
    recipe = make_recipe(model_dir, steps=2)
    orchestrator = recipe.orchestrator.model_copy(update={"wait_timeout_s": 0.3})
    write_recipe(run, recipe.model_copy(update={"orchestrator": orchestrator}))
    with StubDock(hold_step=2).serving() as dock, pytest.raises(DeadlineError, match="batch of step 2"):
        train(start_attempt(run, dock))
    assert HandoffStore(run.weights_dir).versions() == [0, 1]


class WrongShard(StubDock):
    """Serves the shard of another rank."""

    def get(self, path):
        return super().get(path.replace("rank=0", "rank=1"))


def test_a_shard_for_another_rank_is_refused(tmp_path, model_dir):
    run = new_run(tmp_path / "run", model_dir, 1)
    with WrongShard().serving() as dock, pytest.raises(ValueError, match="requested was"):
        train(start_attempt(run, dock))


class FailingDock(StubDock):
    """Cannot say its state."""

    def post(self, path):
        return (500, b"broken") if "snapshot" in path else super().post(path)


def test_a_checkpoint_that_fails_ends_all_ranks(tmp_path, model_dir):
    run = new_run(tmp_path / "run", model_dir, 2)
    with FailingDock().serving() as dock:
        answers = train_ranks(run, dock, 2, fails=True)
    assert answers[0][0] == answers[1][0] == PeerLostError.__name__
    assert "500" in answers[0][1]
    assert "state after step 2 failed on trainer rank 0" in answers[1][1]
    assert CheckpointLedger(run.checkpoints_dir).steps() == []
    # the step is on record although its checkpoint failed
    assert [r.step for r in read_metrics(run)] == [1, 2]


def test_a_learning_rate_that_explodes_stops_before_the_weights_are_lost(tmp_path, model_dir, dock):
    run = new_run(tmp_path / "run", model_dir, 9, optimizer={"learning_rate": 1e15})
    with pytest.raises(RunFailedError, match="gradient norm of step"):
        train(start_attempt(run, dock))


def start_ranks(run, context, ranks):
    """The trainer as a plan starts it: by a launcher where there are several ranks."""
    environment = {
        **os.environ,
        "HPCRL_RUN_DIR": str(run.path),
        "HPCRL_ATTEMPT": str(context.attempt),
        "HPCRL_ROLE": "trainer",
        "HPCRL_REPLICA": "0",
        "OMP_NUM_THREADS": "1",
    }
    trainer = ["hpcrl.trainer.launcher", "--ranks", str(ranks), "--grace-s", "600"] if ranks > 1 else ["hpcrl.trainer"]
    (run.attempt_dir(context.attempt) / "logs" / "trainer").mkdir(exist_ok=True)
    return subprocess.Popen([sys.executable, "-m", *trainer], env=environment)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_train_and_obey_sigterm(tmp_path, model_dir, ranks):
    run = new_run(tmp_path / "run", model_dir, 6)
    with StubDock(hold_step=4).serving() as dock:
        process = start_ranks(run, start_attempt(run, dock), ranks)
        wait_for(lambda: sum(step == 4 for step, _, _ in dock.asked) >= ranks, 60, "request for batch 4 of each rank")
        # it is written beside the next step
        wait_for(lambda: CheckpointLedger(run.checkpoints_dir).steps() == [2], 60, "checkpoint of step 2")
        process.send_signal(signal.SIGTERM)
        # a launcher that waited for its ranks would take ten minutes
        assert process.wait(timeout=120) != 0
    assert CheckpointLedger(run.checkpoints_dir).steps() == [2]
    with StubDock().serving() as dock:
        # to the end in processes that have imported torch; whole runs show that those of a plan exit with 0
        train_ranks(run, dock, ranks)
        assert dock.finished == [6]
    assert [r.step for r in read_metrics(run)] == [1, 2, 3, 4, 5, 6]


@pytest.mark.slow
def test_a_missing_orchestrator_is_not_a_first_cause(tmp_path, model_dir):
    run = new_run(tmp_path / "run", model_dir, 1)
    with FailingDock().serving() as dock:
        assert start_ranks(run, start_attempt(run, dock), 2).wait(timeout=120) == 1
    records = FailureRecord.read_all(run, 1)
    assert records
    assert all(record.secondary for record in records)
    assert re.search("500|rank 0", records[0].message)
