"""What a sweep found: settings over their seeds, intervals, the best one, and runs that are missing."""

from __future__ import annotations

import math
import statistics
from pathlib import Path

import msgspec
import pytest
from scipy import stats

from hpcrl.config.load import load_cluster, load_recipe
from hpcrl.errors import RunDirError
from hpcrl.jobplan import make_plan
from hpcrl.processes import procfs
from hpcrl.runs.events import Event
from hpcrl.runs.newest_evaluation import read_newest_evaluation
from hpcrl.runs.record import Labels, RunRecord, Submission, SweepMember
from hpcrl.runs.run_progress import read_evaluations
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.status import ProcessId, RunState, RunStatus
from hpcrl.sweeps import sweep_handle
from hpcrl.sweeps.control import cancel_sweep
from hpcrl.sweeps.predecessors import jobs_to_wait_for
from hpcrl.sweeps.queue import SweepQueue
from hpcrl.sweeps.results import read_sweep_result
from hpcrl.sweeps.sweep_files import PlannedMember, QueueState, SweepDir, SweepRecord
from hpcrl.sweeps.sweep_table import result_lines

GONE = ProcessId(host=procfs.hostname(), boot_id=procfs.boot_id(), pid=2**22 + 1, start_ticks=1)
RATE = "trainer.optimizer.learning_rate"


def ended_run(root: Path, member: PlannedMember, reward: float | None, state: RunState = RunState.COMPLETED) -> RunDir:
    """A member as its supervisor would have left it."""
    run = RunDir(root / member.name)
    run.path.mkdir(parents=True)
    recipe, cluster = load_recipe("quickstart").value, load_cluster("local").value
    run.write_configuration(recipe, cluster, make_plan(recipe, cluster, member.name, run.path))
    place = SweepMember(sweep="s", sweep_id="1" * 32, directory="d", number=member.number, values=member.values)
    record = RunRecord.new(run, name=member.name, provenance={}, labels=Labels(("s",), place))
    if state is not RunState.QUEUED:
        submission = Submission(
            submitted_at_s=1.0, executor="local", job_id="1", folder="/f", after_attempt=0, process=GONE
        )
        record = record.with_submission(submission)
        attempt = run.start_attempt()
        status = RunStatus(
            run_id=record.run_id,
            attempt=attempt,
            state=state,
            supervisor=GONE,
            started_at_s=2.0,
            heartbeat_s=3.0,
            ended_at_s=4.0,
            components=[],
        )
        status.write(run)
    record.write(run)
    if reward is not None:
        write_evaluation(run, reward)
    return run


def write_evaluation(run: RunDir, reward: float, *, version: int = 8, attempt: int = 1, padding: int = 0) -> None:
    run.events_dir.mkdir(exist_ok=True)
    data = {"version": version, "reward": reward, "prompts": 40, "counted": 40}
    event = Event(time_s=5.0, attempt=attempt, writer="orchestrator-0", kind="evaluation", data=data)
    other = Event(
        time_s=6.0, attempt=attempt, writer="orchestrator-0", kind="batch", data={"text": '"evaluation"' * 20}
    )
    with (run.events_dir / f"{attempt:04d}-orchestrator-0.jsonl").open("ab") as stream:
        stream.write(msgspec.json.encode(event) + b"\n" + (msgspec.json.encode(other) + b"\n") * padding)


def make(root: Path, rewards: dict[tuple[float, int], float | None], **states: RunState) -> SweepDir:
    """A sweep with a member for each learning rate and seed."""
    planned = [
        PlannedMember(number=number, name=f"s-{number:02d}", values={RATE: str(rate), "seed": str(seed)})
        for number, (rate, seed) in enumerate(rewards, 1)
    ]
    for member, reward in zip(planned, rewards.values(), strict=True):
        ended_run(root, member, reward, states.get(f"m{member.number}", RunState.COMPLETED))
    sweep = SweepDir.below(root, "s")
    sweep.create(
        SweepRecord(
            sweep_id="1" * 32,
            name="s",
            created_at_s=1.0,
            user="me",
            cwd="/",
            argv=[],
            recipe="quickstart",
            cluster="local",
            executor="local",
            max_running=1,
            after=[],
            members=planned,
            made=True,
        )
    )
    return sweep


def test_settings_are_compared_over_their_seeds(tmp_path: Path) -> None:
    good, bad = [0.9, 0.5, 0.7], [0.1, 0.15, 0.2]
    rewards = {(rate, seed): values[seed] for rate, values in ((1e-3, bad), (2e-3, good)) for seed in range(3)}
    result = read_sweep_result(make(tmp_path, rewards))
    assert result.ended
    assert result.best is not None
    assert result.best.values == {RATE: "0.002"}
    assert (result.best.runs, result.best.noise, result.best.count) == (["s-04", "s-05", "s-06"], "seeds", 3)
    # by scipy: Student's interval of three seeds is wider than that of the rollouts
    half = stats.t.ppf(0.975, 2) * statistics.stdev(good) / math.sqrt(3)
    assert result.best.low == pytest.approx(0.7 - half)
    assert result.best.high == pytest.approx(0.7 + half)
    assert result.difference is not None
    assert result.difference.value == pytest.approx(0.55)
    assert "which is " in "\n".join(result_lines(result, {RATE: "rate"}))


def test_equal_seeds_do_not_make_a_reward_certain(tmp_path: Path) -> None:
    rewards = {(rate, seed): value for rate, value in ((1e-3, 0.45), (2e-3, 0.5)) for seed in range(2)}
    result = read_sweep_result(make(tmp_path, rewards))
    assert result.best is not None
    assert result.best.low is not None
    interval = stats.binomtest(20, 40).proportion_ci(method="wilson")
    assert result.best.low == pytest.approx(interval.low)
    assert result.difference is not None
    assert result.difference.low < 0 < result.difference.high
    assert "not more than noise" in "\n".join(result_lines(result, {RATE: "rate"}))


def test_replicates_alone_are_one_setting(tmp_path: Path) -> None:
    sweep = make(tmp_path, {(1e-3, seed): 0.5 + seed / 10 for seed in range(3)})
    record = sweep.read()
    alone = [msgspec.structs.replace(each, values={"seed": each.values["seed"]}) for each in record.members]
    sweep.write(msgspec.structs.replace(record, members=alone))
    result = read_sweep_result(sweep)
    assert [(each.values, each.count) for each in result.settings] == [({}, 3)]
    assert "the only setting: held-out 0.600" in result_lines(result, {})[0]


def test_members_that_failed_count_for_no_setting(tmp_path: Path) -> None:
    rewards = {(1e-3, 0): 0.2, (2e-3, 0): 0.9, (3e-3, 0): None}
    sweep = make(tmp_path, rewards, m2=RunState.FAILED, m3=RunState.QUEUED)
    result = read_sweep_result(sweep)
    assert [(row.state, row.heldout) for row in result.members] == [
        ("COMPLETED", 0.2),
        ("FAILED", 0.9),
        ("QUEUED", None),
    ]
    assert [setting.values for setting in result.settings] == [{RATE: "0.001"}]
    assert (result.ended, result.idle) == (False, True)
    assert "hpcrl sweep resume s" in "\n".join(result_lines(result, {RATE: "rate"}))


def test_a_member_that_was_removed_is_shown_as_removed(tmp_path: Path) -> None:
    sweep = make(tmp_path, {(1e-3, 0): 0.2, (2e-3, 0): 0.3})
    sweep.run_of(sweep.read().members[0]).path.rename(tmp_path / "gone")
    # another run of that name is not a member
    ended_run(tmp_path, PlannedMember(number=1, name="s-01"), 0.99)
    record = RunRecord.read(RunDir(tmp_path / "s-01"))
    msgspec.structs.replace(record, sweep=None).write(RunDir(tmp_path / "s-01"))
    result = read_sweep_result(sweep)
    assert [row.state for row in result.members] == ["REMOVED", "COMPLETED"]
    assert result.counts == {"REMOVED": 1, "COMPLETED": 1}


def test_a_member_that_cannot_be_read_may_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep = make(tmp_path, {(1e-3, 0): 0.2, (2e-3, 0): 0.3})
    (tmp_path / "s-01" / "run.json").write_text("{")
    result = read_sweep_result(sweep)
    assert (result.counts, result.ended) == ({"UNREADABLE": 1, "COMPLETED": 1}, False)
    monkeypatch.setattr(sweep_handle, "_UNREADABLE_S", 0.0)
    assert not sweep_handle.Sweep(sweep.path).wait(timeout_s=60.0).ended
    # it is not forgotten in silence: neither by who cancels, nor by the queue, nor by runs that wait for it
    with pytest.raises(RunDirError, match=r"1 members of s were not cancelled:\n  s-01: .* cannot be read"):
        cancel_sweep(sweep, lambda words: None)
    sweep.cancelled_path.unlink()
    queue = SweepQueue(sweep)
    assert queue.advance()
    assert "cannot be read" in queue.problems[1]
    assert jobs_to_wait_for([RunDir(tmp_path / "s-01")], by_slurm=False)[1] != ""
    assert jobs_to_wait_for([RunDir(tmp_path / "s-02"), RunDir(tmp_path / "gone")], by_slurm=False) == ([], "")


def test_what_was_asked_of_a_queue_outlives_a_file_that_cannot_be_read_for_a_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep = make(tmp_path, {(1e-3, 0): 0.2})
    sweep.write_queue(QueueState(targets={1: 2}))
    queue, read = SweepQueue(sweep), Path.read_bytes

    def stale(path: Path) -> bytes:
        if path == sweep.queue_path:
            raise OSError(116, "Stale file handle")
        return read(path)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", stale)
        queue.report(QueueState(heartbeat_s=1.0))
        with pytest.raises(OSError, match="Stale"):
            queue.advance()
    assert sweep.queue().targets == {1: 2}


def test_the_newest_evaluation_is_read_from_the_end(tmp_path: Path) -> None:
    run = ended_run(tmp_path, PlannedMember(number=1, name="s-01"), None)
    assert read_newest_evaluation(run) is None
    write_evaluation(run, 0.1, version=4)
    # a later one, and more text behind it than the first look reads
    write_evaluation(run, 0.6, version=8, padding=2000)
    assert read_newest_evaluation(run) == read_evaluations(run)[-1]
    run.start_attempt()
    assert read_newest_evaluation(run) == read_evaluations(run)[-1]
    write_evaluation(run, 0.7, version=12, attempt=2)
    newest = read_newest_evaluation(run)
    assert newest is not None
    assert (newest.reward, newest.version, newest.attempt) == (0.7, 12, 2)
