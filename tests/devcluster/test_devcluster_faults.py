"""Faults on a virtual cluster, and what the client says at each stage."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from devcluster_testing import wait_until
from patience import patience
from virtual_site import wait_written

from hpcrl.config.joined import load_both
from hpcrl.devcluster.dev_cluster import DevCluster
from hpcrl.jobplan import make_plan
from hpcrl.runs.record import RunRecord
from hpcrl.slurm.client import SlurmClient
from hpcrl.slurm.command import CommandResult, command_environment, run_command
from hpcrl.slurm.directives import JobIdentity
from hpcrl.slurm.errors import (
    NoSuchJobError,
    SlurmRejectedError,
    SlurmUnavailableError,
    SubmitUnclearError,
)
from hpcrl.slurm.records import Job
from hpcrl.slurm.replica_jobs import ReplicaJobs
from hpcrl.slurm.states import JobState
from hpcrl.slurm.watch import JobWatcher
from hpcrl.submit.submission import create_run

pytestmark = pytest.mark.slurm

HETJOB = """#!/bin/bash
#SBATCH --requeue --open-mode=append --time=10 --output={out}
#SBATCH --partition={partition} --nodes=2 --ntasks-per-node=1 --gres=gpu:h200:8 --exclusive
#SBATCH hetjob
#SBATCH --partition={partition} --nodes=3 --ntasks-per-node=1 --gres=gpu:h200:8 --exclusive
trap 'echo told; exit 7' USR2
echo "start ${{SLURM_RESTART_COUNT:-0}}"
for group in 0 1; do
    srun --het-group=$group bash -c 'echo "$SLURMD_NODENAME" '$group' "$CUDA_VISIBLE_DEVICES"; {body}' &
done
wait
"""


@pytest.fixture
def client(cluster: DevCluster) -> Iterator[SlurmClient]:
    client = cluster.client()
    yield client
    for record in client.show("job"):
        if record.get("JobState") in ("PENDING", "RUNNING") and record.get("HetJobOffset", "0") == "0":
            client.cancel(int(record["JobId"]))
    for node in client.nodes():
        if "DOWN" in node.states:
            cluster.revive_node(node.name)
    wait_until("the queue is empty and all nodes are idle", lambda: all(n.states == {"IDLE"} for n in client.nodes()))


class Hetjob:
    """Two nodes and three."""

    def __init__(self, client: SlurmClient, directory: Path, body: str = "sleep 1000", partition: str = "gpu") -> None:
        self.client, self.out = client, directory / "out.log"
        self.script = directory / "het job's script.sh"
        self.script.write_text(HETJOB.format(out=self.out, body=body, partition=partition))
        self.token = f"t-{time.time_ns()}"
        self.id = client.submit(self.script, name="het", token=self.token).job_id

    @property
    def job(self) -> Job:
        return self.client.jobs([self.id])[self.id]

    @property
    def states(self) -> list[JobState]:
        return [component.state for component in self.job.components]

    def wait_for(self, state: JobState) -> Job:
        wait_until(f"the job is {state}", lambda: self.job.state is state)
        return self.job

    def lines(self) -> list[str]:
        return sorted(self.out.read_text().splitlines()) if self.out.exists() else []

    def wait_running(self, starts: int = 1) -> None:
        self.wait_for(JobState.RUNNING)
        # Slurm writes lines of its own there about what it ends
        wait_until("the roles run", lambda: sum(ln.startswith(("start ", "dev-")) for ln in self.lines()) >= 6 * starts)


def test_hetjob_runs_on_its_nodes(client: SlurmClient, tmp_path: Path) -> None:
    het = Hetjob(client, tmp_path, body=f'until test -e "{tmp_path}/go"; do sleep 0.1; done')
    state = het.job.state
    assert state.waiting or state.holding
    (tmp_path / "go").touch()
    done = het.wait_for(JobState.COMPLETED)
    assert [len(c.nodes) > 0 for c in done.components] == [True, True]
    assert [c.offset for c in done.components] == [0, 1]
    assert [c.job_id for c in done.components] == [het.id, het.id + 1]
    gpus = "0,1,2,3,4,5,6,7"
    placed = {line.split()[0]: line.split()[1:] for line in het.lines() if line.startswith("dev-")}
    assert sorted(placed) == sorted(done.nodes)
    assert sorted(placed.values()) == [["0", gpus]] * 2 + [["1", gpus]] * 3
    assert done.leader.exit is not None
    assert done.leader.exit.code == 0
    assert done.leader.restarts == 0
    assert done.leader.time_limit_s == 600.0


def test_submit_is_idempotent(client: SlurmClient, tmp_path: Path) -> None:
    het = Hetjob(client, tmp_path)
    again = client.submit(het.script, name="het", token=het.token)
    assert (again.job_id, again.recovered) == (het.id, True)
    other = client.submit(het.script, name="het", token=f"{het.token}-other")
    assert other.job_id != het.id
    assert not other.recovered


@pytest.mark.skipif(os.getuid() != 0, reason="only root may submit in the name of somebody else")
def test_a_strangers_job_with_our_name_and_comment_is_not_ours(client: SlurmClient, tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    script.write_text("#!/bin/bash\n#SBATCH --nodes=1 --hold --output=/dev/null --chdir=/\ntrue\n")
    forged = ["sbatch", "--parsable", "--uid=65534", "--gid=65534", "--job-name=mine", "--comment=hpcrl:stranger:main"]
    sent = run_command([*forged, str(script)], env=command_environment(conf=client.conf, reading=False), timeout_s=60)
    stranger = int(sent.stdout)
    assert client.jobs([stranger])[stranger].leader.user_id == 65534
    assert client.find(name="mine", token="stranger:main") == []
    assert client.of_run("stranger") == {}
    own = client.submit(script, name="mine", token="stranger:main")
    assert (own.job_id != stranger, own.recovered) == (True, False)
    assert [job.job_id for job in client.find(name="mine", token="stranger:main")] == [own.job_id]
    # beside both the same submit finds ours again, and the next one of the run gets a job of its own
    again = client.submit(script, name="mine", token="stranger:main")
    assert (again.job_id, again.recovered) == (own.job_id, True)
    second = client.submit(script, name="mine", token="stranger:main-2")
    assert not second.recovered
    assert set(client.of_run("stranger")) == {own.job_id, second.job_id}


def test_refusals(client: SlurmClient, tmp_path: Path) -> None:
    script = tmp_path / "big.sh"
    script.write_text("#!/bin/bash\n#SBATCH --nodes=2 --gres=gpu:h200:9\ntrue\n")
    with pytest.raises(SlurmRejectedError, match="configuration is not available"):
        client.submit(script, name="big", token="big")
    with pytest.raises(SlurmRejectedError):
        client.test_only(script)
    with pytest.raises(NoSuchJobError):
        client.requeue(999999)
    with pytest.raises(NoSuchJobError):
        client.details(999999)
    assert client.jobs([999999]) == {}
    assert client.jobs([999998, 999999]) == {}
    client.cancel(999999)


def test_start_estimate(client: SlurmClient, tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    script.write_text("#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH hetjob\n#SBATCH --nodes=3\ntrue\n")
    estimate = client.test_only(script)
    assert estimate.start_time_s is not None
    assert abs(estimate.start_time_s - time.time()) < 3600
    assert client.find(name="job.sh", token="") == []


def test_replicas_wait_for_a_trainer_that_was_requeued(client: SlurmClient, tmp_path: Path) -> None:
    """A replica without nodes does not take those that the trainer has just given back, and waits for."""
    recipe, site = load_both("quickstart", "devcluster", ["job.layout=elastic", "engine.replicas=2"], environ={})
    plan = make_plan(recipe.value, site.value, "mine", tmp_path / "runs/mine")
    run = create_run(recipe.value, site.value, plan).run
    script = tmp_path / "sleep.sh"
    # as a supervisor, which asks for the requeue and tells Slurm about the replicas before it ends
    script.write_text("#!/bin/bash\ntrap 'sleep 5; exit' TERM\nsleep 1000 &\nwait\n")

    def submit(part: str, nodes: int) -> int:
        token = JobIdentity("mine", RunRecord.read(run).run_id, part).token
        options = ["--partition=gpu", f"--nodes={nodes}", "--exclusive", "--requeue", "--output=/dev/null"]
        return client.submit(script, name="mine", token=token, options=options).job_id

    def state(job_id: int) -> JobState:
        return client.jobs([job_id])[job_id].state

    main, first = submit("main", 4), submit("engine-0", 2)
    wait_until("both run", lambda: {state(main), state(first)} == {JobState.RUNNING})
    waiting, another = submit("engine-1", 1), submit("engine-2", 1)
    client.requeue(main)
    ReplicaJobs(run, plan=plan, client=client, number=1).let_main_go_first(main)
    wait_until("the trainer waits", lambda: state(main) is JobState.PENDING)
    # Slurm lets a requeued job wait for a while, in which others are started
    time.sleep(5)
    assert {state(waiting), state(another)} == {JobState.PENDING}
    with contextlib.suppress(SlurmRejectedError):  # it has just begun by itself
        client._run(["scontrol", "update", f"JobId={main}", "StartTime=now"])
    wait_until("the trainer runs", lambda: state(main) is JobState.RUNNING)
    assert state(first) is JobState.RUNNING
    client.cancel(first)
    wait_until("replicas have nodes, too", lambda: {state(waiting), state(another)} == {JobState.RUNNING})


def test_signal_to_the_batch_script_alone(client: SlurmClient, tmp_path: Path) -> None:
    het = Hetjob(client, tmp_path, body='trap "echo role told" USR2; sleep 1000')
    het.wait_running()
    client.cancel(het.id, signal="USR2", batch=True)
    ended = het.wait_for(JobState.FAILED)
    assert ended.leader.exit is not None
    assert ended.leader.exit.code == 7
    assert "told" in het.lines()
    assert "role told" not in het.lines()


def test_requeue(client: SlurmClient, tmp_path: Path) -> None:
    het = Hetjob(client, tmp_path)
    het.wait_running()
    client.requeue(het.id)
    wait_until("both components wait", lambda: all(s.waiting for s in het.states))
    assert het.job.state.waiting
    het.wait_running(starts=2)
    assert "start 1" in het.lines()
    assert het.job.leader.restarts == 1


def test_cancel_of_one_component(client: SlurmClient, tmp_path: Path) -> None:
    het = Hetjob(client, tmp_path)
    het.wait_running()
    client.cancel(het.id, component=1)
    wait_until("component 1 has ended", lambda: het.states[1].ended)
    assert het.states == [JobState.RUNNING, JobState.CANCELLED]
    assert het.job.state is JobState.RUNNING
    client.cancel(het.id)
    het.wait_for(JobState.CANCELLED)


def test_node_failure_requeues(cluster: DevCluster, client: SlurmClient, tmp_path: Path) -> None:
    het = Hetjob(client, tmp_path)
    het.wait_running()
    lost = het.job.components[1].nodes.removeprefix("dev-[").split("-")[0]
    assert cluster.kill_node(f"dev-{lost}") >= 3  # slurmd, the step's manager, the task
    node = next(n for n in client.nodes() if n.name == f"dev-{lost}")
    assert "DOWN" in node.states
    assert not node.usable
    assert node.reason.startswith("hpcrl devcluster kill-node")
    het.wait_running(starts=2)
    assert f"dev-{lost}" not in het.job.nodes
    assert next(n for n in cluster.status().nodes if n.name == node.name).alive is False
    cluster.revive_node(node.name)
    assert next(n for n in client.nodes() if n.name == node.name).usable


@pytest.mark.campaign
def test_preemption_requeues(client: SlurmClient, tmp_path: Path) -> None:
    (tmp_path / "low").mkdir()
    (tmp_path / "high").mkdir()
    # what ends by itself within the grace time has ended, and is not requeued: this one holds out
    low = Hetjob(client, tmp_path / "low", body='trap "" TERM; sleep 1000')
    low.wait_running()
    until_then = f'until test -e "{tmp_path}/go"; do sleep 0.1; done'
    high = Hetjob(client, tmp_path / "high", body=until_then, partition="urgent")
    high.wait_running()
    assert low.job.state.waiting
    (tmp_path / "go").touch()
    high.wait_for(JobState.COMPLETED)
    low.wait_running(starts=2)
    assert low.job.leader.restarts == 1


def test_frozen_controller(cluster: DevCluster, client: SlurmClient, tmp_path: Path) -> None:
    """Silence is a warning; what was known is kept; a submission whose answer got lost is found."""
    het = Hetjob(client, tmp_path)
    het.wait_running()
    hasty = SlurmClient(conf=cluster.paths.conf, timeout_s=3.0 * patience())
    watcher = JobWatcher(hasty, interval_s=0.0)
    assert watcher.poll([het.id])[het.id].state is JobState.RUNNING
    cluster.pause_controller()
    assert cluster.status().controller == "paused"
    with pytest.raises(SlurmUnavailableError):
        hasty.jobs([het.id])
    view = watcher.poll([het.id])[het.id]
    assert view.state is JobState.UNKNOWN
    assert view.last is not None
    assert view.last.state is JobState.RUNNING
    assert "has not answered" in view.warning
    assert not hasty.answers()
    cluster.resume_controller()
    wait_until("the job is known again", lambda: watcher.poll([het.id])[het.id].state is JobState.RUNNING)


def test_lost_answer_is_looked_up(cluster: DevCluster, client: SlurmClient, tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    script.write_text(f"#!/bin/bash\n#SBATCH --nodes=1 --output={tmp_path}/out\nsleep 1000\n")
    pauses = []

    def lose(argv: Sequence[str], *, env: Mapping[str, str], timeout_s: float) -> CommandResult:
        if argv[0] == "sbatch":
            run_command(argv, env=env, timeout_s=timeout_s)
            raise SlurmUnavailableError("the answer got lost")
        if not pauses and "--name=lost" in argv and script.with_suffix(".first").exists():
            pauses.append(1)
            raise SlurmUnavailableError("and the first look, too")
        script.with_suffix(".first").touch()
        return run_command(argv, env=env, timeout_s=timeout_s)

    losing = SlurmClient(conf=cluster.paths.conf, run=lose, timeout_s=10.0)
    found = losing.submit(script, name="lost", token="lost-1")
    assert found.recovered
    assert [job.job_id for job in client.find(name="lost", token="lost-1")] == [found.job_id]


def test_killed_controller_comes_back_with_its_jobs(cluster: DevCluster, client: SlurmClient, tmp_path: Path) -> None:
    het = Hetjob(client, tmp_path)
    het.wait_running()
    undo = wait_written(cluster)
    hasty = SlurmClient(conf=cluster.paths.conf, timeout_s=2.0)
    cluster.pause_controller(kill=True)
    assert cluster.status().controller == "dead"
    with pytest.raises(SlurmUnavailableError):
        hasty.jobs([het.id])
    with pytest.raises(SlurmUnavailableError) as caught:
        hasty.submit(het.script, name="het", token="while away")
    assert not isinstance(caught.value, SubmitUnclearError), "nothing was sent: the look before already failed"
    cluster.resume_controller()
    undo()
    het.wait_for(JobState.RUNNING)


def test_json_says_what_columns_say(cluster: DevCluster, client: SlurmClient, tmp_path: Path) -> None:
    def no_columns(argv: Sequence[str], *, env: Mapping[str, str], timeout_s: float) -> CommandResult:
        if any(word.startswith("--Format=") for word in argv):
            return CommandResult(1, "", "squeue: error: Invalid job format specification: Gone")
        return run_command(argv, env=env, timeout_s=timeout_s)

    het = Hetjob(client, tmp_path, body="false")
    het.wait_for(JobState.COMPLETED)
    assert SlurmClient(conf=cluster.paths.conf, run=no_columns).jobs([het.id]) == client.jobs([het.id])
