"""History from sacct, on a virtual cluster with slurmdbd and MariaDB."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
from devcluster_testing import wait_until

from hpcrl.devcluster.dev_cluster import DevCluster
from hpcrl.slurm.client import SlurmClient
from hpcrl.slurm.command import CommandResult, run_command
from hpcrl.slurm.states import JobState

pytestmark = pytest.mark.slurm("accounting")


def forgetful(argv: Sequence[str], *, env: Mapping[str, str], timeout_s: float) -> CommandResult:
    """A controller that has forgotten all jobs, as it does after MinJobAge."""
    if argv[0] == "squeue":
        return CommandResult(1, "", "slurm_load_jobs error: Invalid job id specified")
    return run_command(argv, env=env, timeout_s=timeout_s)


def test_history_of_a_hetjob(make_cluster: Callable[..., DevCluster], tmp_path: Path) -> None:
    cluster = make_cluster("acct", nodes=3, accounting=True)
    script = tmp_path / "job.sh"
    script.write_text(
        "#!/bin/bash\n#SBATCH --nodes=1 --time=3 --output=/dev/null\n#SBATCH hetjob\n#SBATCH --nodes=2\nexit 3\n"
    )
    client = cluster.client()
    job_id = client.submit(script, name="history", token="h1").job_id
    wait_until("the job has ended", lambda: client.jobs([job_id])[job_id].state.ended)

    history = SlurmClient(conf=cluster.paths.conf, run=forgetful)
    # for a second or two the database has one row, that of a plain job which has failed; whoever knows that there
    # are two components is not misled
    wait_until("the database has a row", lambda: job_id in history.jobs([job_id]))
    wait_until("the database has it", lambda: history.jobs([job_id], expected={job_id: 2})[job_id].state.ended)
    job = history.jobs([job_id], expected={job_id: 2})[job_id]
    assert job.state is JobState.FAILED
    assert [c.source for c in job.components] == ["sacct", "sacct"]
    assert [c.job_id for c in job.components] == [job_id, job_id + 1]
    assert len(job.nodes) == 3
    assert job.leader.exit is not None
    assert job.leader.exit.code == 3
    assert job.leader.comment == "hpcrl:h1"
    assert job.leader.time_limit_s == 180.0
    assert job.leader.submit_time_s is not None
    # fewer components than the plan has: no end
    assert history.jobs([job_id], expected={job_id: 3})[job_id].state is JobState.UNKNOWN
    assert history.jobs([999999]) == {}
