"""The task that requeues a job whose supervisor went with its node."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import pytest
from patience import wait_for
from supervisor_testing import make_plan, make_recipe

from hpcrl.config.cluster import SlurmCluster
from hpcrl.config.layout import AttemptPolicy, JobComponent, Layout
from hpcrl.config.load import load_cluster
from hpcrl.processes.interpreter import module_command
from hpcrl.runs.exclusions import read_exclusions
from hpcrl.runs.record import RunRecord, Submission
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.status import HEARTBEAT_S, ComponentState, ComponentStatus, ProcessId, RunState, RunStatus
from hpcrl.slurm.client import SlurmClient
from hpcrl.slurm.command import CommandResult
from hpcrl.slurm.job_nodes import JobNodes
from hpcrl.submit.submission import create_run
from hpcrl.supervisor.recovery import batch_node_watch
from hpcrl.supervisor.recovery import nodes as nodes_module
from hpcrl.supervisor.recovery.batch_node_watch import BatchNodeWatch, LostBatchNode, requeue_without_supervisor

THREE = JobComponent(
    roles=("trainer",),
    nodes=2,
    spares=1,
    partition="gpu",
    gpus_per_node=0,
    gres="none",
    exclusive=True,
    cpus=1,
    memory_gib=1.0,
)


class SlurmOfOneJob(SlurmClient):
    """Job 7 on some nodes; remembers what it was told."""

    def __init__(self, nodes: str = "n[1-3]", *, state: str = "RUNNING", down: Sequence[str] = ()) -> None:
        super().__init__(run=self.answer)
        self.nodes_of_job, self.state, self.down = nodes, state, down
        self.told: list[list[str]] = []

    def answer(self, argv: Sequence[str], *, env: Mapping[str, str], timeout_s: float) -> CommandResult:
        words = list(argv)
        if words[:3] != ["scontrol", "--oneliner", "show"]:
            self.told.append(words)
            return CommandResult(0, "", "")
        if words[3] == "job":
            return CommandResult(0, f"JobId=7 JobState={self.state} NodeList={self.nodes_of_job}", "")
        names = words[4].split(",") if len(words) > 4 else ["n1", "n2", "n3"]
        lines = [
            f"NodeName={name} State={'DOWN' if name in self.down else 'ALLOCATED'} Partitions=gpu" for name in names
        ]
        return CommandResult(0, "\n".join(lines), "")


def spared_run(root: Path, *, requeue: bool = True) -> RunDir:
    cluster = load_cluster("devcluster").value
    assert isinstance(cluster, SlurmCluster)
    plan = make_plan(root / "run", attempts=AttemptPolicy(requeue=requeue, exclude_s=600.0))
    return create_run(make_recipe(), cluster, plan).run


def write_status(run: RunDir, heartbeat_s: float) -> None:
    me = ProcessId.of(os.getpid())
    assert me is not None
    trainer = ComponentStatus(role="trainer", replica=0, state=ComponentState.READY, nodes=["n1", "n2"])
    RunStatus(
        run_id="r",
        attempt=1,
        state=RunState.RUNNING,
        supervisor=me,
        started_at_s=1.0,
        heartbeat_s=heartbeat_s,
        components=[trainer],
    ).write(run)


def test_only_a_heartbeat_that_stands_still_is_silent(tmp_path: Path) -> None:
    run = spared_run(tmp_path)
    lost, now = LostBatchNode(run, SlurmOfOneJob(), 7, "n1"), time.monotonic()
    write_status(run, 100.0)
    assert not lost.is_silent(now)
    assert not lost.is_silent(now + 9 * HEARTBEAT_S)
    write_status(run, 50.0)  # whatever the clock of the other node says
    assert not lost.is_silent(now + 11 * HEARTBEAT_S)
    assert lost.is_silent(now + 21 * HEARTBEAT_S)


@pytest.mark.parametrize(
    ("slurm", "lost"),
    [
        (SlurmOfOneJob(), False),
        (SlurmOfOneJob("n[2-3]"), True),  # Slurm took it out of the job, where it may be up again
        (SlurmOfOneJob(down=["n1"]), True),
        (SlurmOfOneJob(down=["n2"]), False),
        (SlurmOfOneJob("n[2-3]", state="COMPLETING"), False),
        (SlurmOfOneJob("", state="PENDING"), False),
    ],
)
def test_slurms_word_counts(slurm: SlurmOfOneJob, lost: bool, tmp_path: Path) -> None:
    assert LostBatchNode(spared_run(tmp_path), slurm, 7, "n1").is_lost() is lost


def test_the_job_goes_back_into_the_queue_without_its_lost_node(tmp_path: Path) -> None:
    run = spared_run(tmp_path)
    write_status(run, 100.0)
    slurm = SlurmOfOneJob("n[2-3]", down=["n1"])
    requeue_without_supervisor(run, slurm, 7)
    assert slurm.told[0] == ["scontrol", "requeue", "7"]
    assert [entry.node for entry in read_exclusions(run, now_s=time.time())] == ["n1"]


def test_a_job_that_may_not_be_requeued_gives_its_nodes_back(tmp_path: Path) -> None:
    run = spared_run(tmp_path, requeue=False)
    write_status(run, 100.0)
    slurm = SlurmOfOneJob("n[2-3]", down=["n1"])
    requeue_without_supervisor(run, slurm, 7)
    assert slurm.told == [["scancel", "7"]]


def test_a_full_disk_does_not_keep_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*given: object, **named: object) -> None:
        raise OSError(28, "No space left on device")

    run = spared_run(tmp_path)
    write_status(run, 100.0)
    slurm = SlurmOfOneJob("n[2-3]", down=["n1"])
    monkeypatch.setattr(nodes_module, "exclude", full)
    requeue_without_supervisor(run, slurm, 7)
    assert slurm.told == [["scontrol", "requeue", "7"]]


def test_a_task_that_cannot_watch_does_not_say_that_it_does(tmp_path: Path) -> None:
    run = spared_run(tmp_path)
    run.record_path.unlink()
    command = module_command(sys.executable, batch_node_watch.__name__, str(run.path), "7", "n1")
    ended = subprocess.run(command, capture_output=True, timeout=300.0, check=False)
    assert ended.returncode != 0
    assert ended.stdout == b""


SCONTROL = """#!/bin/sh
echo "$* with $SLURM_CONF" >> {said}
case "$*" in
  *"show job"*) echo "JobId=7 JobState=RUNNING NodeList=n[2-3]" ;;
  *"show node"*) for name in n1 n2 n3; do echo "NodeName=$name State=ALLOCATED Partitions=gpu"; done ;;
esac
"""
AT_ONCE = """
import {module} as watch
watch._LOOK_S = watch._SILENCE_S = 0.01
watch.main()
"""


def test_the_task_asks_the_slurm_of_the_last_submission_and_requeues_the_job(tmp_path: Path) -> None:
    run, said = spared_run(tmp_path), tmp_path / "said"
    write_status(run, 100.0)
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.parent.mkdir()
    scontrol.write_text(SCONTROL.format(said=said))
    scontrol.chmod(0o755)
    submissions = []
    for name in ("first", "second", "last"):
        (tmp_path / f"{name}.conf").write_text("ClusterName=mine\n")
        conf = str(tmp_path / f"{name}.conf")
        submissions.append(
            Submission(submitted_at_s=1.0, executor="slurm", job_id="7", folder="", after_attempt=0, slurm_conf=conf)
        )
    msgspec.structs.replace(RunRecord.read(run), submissions=submissions).write(run)
    (run.path / "submitit").mkdir(exist_ok=True)
    command = [sys.executable, "-c", AT_ONCE.format(module=batch_node_watch.__name__), str(run.path), "7", "n1"]
    environ = {**os.environ, "PATH": f"{scontrol.parent}:{os.environ['PATH']}"}
    ended = subprocess.run(command, env=environ, capture_output=True, timeout=300.0, check=False)
    log = (run.path / "submitit/batch_node_watch.log").read_text()
    assert (ended.returncode, ended.stdout) == (0, b"watching\n"), log
    # a person reads it among others
    assert "WARNING batch node watch: the node of the supervisor, n1, is lost" in log
    calls = said.read_text().splitlines()
    assert {call.partition(" with ")[2] for call in calls} == {str(tmp_path / "last.conf")}
    assert [call.partition(" with ")[0] for call in calls if "requeue" in call] == ["requeue 7"]


SRUN = """#!{python}
import os, sys, time
parent = os.getpid()
if not os.fork():
    # the second process of srun, which ends the step when the first one is gone
    while os.getppid() == parent:
        time.sleep(0.01)
    open({said!r}, "a").write("cancelled\\n")
    os._exit(0)
open({said!r}, "a").write(" ".join(sys.argv[1:]) + "\\n")
print({answer!r}, flush=True)
time.sleep(600)
"""


def test_the_task_runs_on_another_node_without_its_srun(tmp_path: Path) -> None:
    run, said = spared_run(tmp_path), tmp_path / "said"
    srun = tmp_path / "bin" / "srun"
    srun.parent.mkdir()
    srun.write_text(SRUN.format(python=sys.executable, said=str(said), answer="watching"))
    srun.chmod(0o755)
    path = f"{srun.parent}:{os.environ['PATH']}"
    environ = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-3]", "SLURMD_NODENAME": "n1", "PATH": path}
    plan = run.plan().model_copy(update={"layout": Layout(kind="single", components=(THREE,))})
    nodes = JobNodes(plan, environ, SlurmOfOneJob())
    with BatchNodeWatch(run, plan, nodes, environ) as watch:
        wait_for(lambda: watch.node == "n3", 20.0, "the task")
        words = said.read_text().split()
        assert "--nodelist=n3" in words
        assert "--overlap" in words
        assert words[-3:] == [str(run.path), "7", "n1"]
        assert nodes.own_pids == set()
        # its node is lost: it goes to the next one
        nodes.lose({"n3": "gone"})
        wait_for(lambda: watch.node == "n2", 20.0, "the task on another node")
    lines = said.read_text().splitlines()
    # an srun that had time to cancel its step would have taken the task with it
    assert ["--nodelist=n3" in lines[0], "--nodelist=n2" in lines[1]] == [True, True]
    assert len(lines) == 2


def test_a_task_that_does_not_start_is_tried_again(tmp_path: Path) -> None:
    run, said = spared_run(tmp_path), tmp_path / "said"
    srun = tmp_path / "bin" / "srun"
    srun.parent.mkdir()
    srun.write_text(f"#!/bin/sh\necho x >> {said}\nexit 1\n")
    srun.chmod(0o755)
    path = f"{srun.parent}:{os.environ['PATH']}"
    environ = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-3]", "SLURMD_NODENAME": "n1", "PATH": path}
    plan = run.plan().model_copy(update={"layout": Layout(kind="single", components=(THREE,))})
    with BatchNodeWatch(run, plan, JobNodes(plan, environ, SlurmOfOneJob()), environ) as watch:
        wait_for(lambda: said.exists() and said.read_text().count("x") > 1, 20.0, "a second try")
        assert watch.node == ""


def test_a_task_that_has_not_begun_keeps_no_supervisor(tmp_path: Path) -> None:
    """Slurm may hold back a new step for minutes."""
    run, said = spared_run(tmp_path), tmp_path / "said"
    srun = tmp_path / "bin" / "srun"
    srun.parent.mkdir()
    srun.write_text(f"#!/bin/sh\necho $$ > {said}\nexec sleep 600\n")
    srun.chmod(0o755)
    path = f"{srun.parent}:{os.environ['PATH']}"
    environ = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-3]", "SLURMD_NODENAME": "n1", "PATH": path}
    plan = run.plan().model_copy(update={"layout": Layout(kind="single", components=(THREE,))})
    nodes = JobNodes(plan, environ, SlurmOfOneJob())
    with BatchNodeWatch(run, plan, nodes, environ):
        wait_for(lambda: said.exists() and said.read_text().strip() != "", 20.0, "srun")
    # a killed process needs a processor to end
    srun_process = Path(f"/proc/{said.read_text().strip()}")
    wait_for(lambda: nodes.own_pids == set() and not srun_process.exists(), 20.0, "the end of srun")
