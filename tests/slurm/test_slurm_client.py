"""The client against a fake of Slurm's commands; tests/devcluster has the real ones."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from fake_slurm import FakeSlurm, job, sacct_row

from hpcrl.slurm.client import SlurmClient
from hpcrl.slurm.command import CommandResult
from hpcrl.slurm.errors import (
    SlurmAnswerError,
    SlurmError,
    SlurmRejectedError,
    SlurmUnavailableError,
    SubmitUnclearError,
)
from hpcrl.slurm.states import JobState


def test_many_jobs_are_one_call(slurm: FakeSlurm) -> None:
    slurm.queue = {i: job(i, "RUNNING") for i in range(1, 101)}
    found = slurm.client().jobs(range(1, 101))
    assert len(found) == 100
    assert all(j.state is JobState.RUNNING for j in found.values())
    assert [call[0] for call in slurm.calls] == ["squeue"]


def test_no_jobs_are_no_call(slurm: FakeSlurm) -> None:
    assert slurm.client().jobs([]) == {}
    assert slurm.calls == []


def test_history_fills_in(slurm: FakeSlurm) -> None:
    slurm.queue = {1: job(1, "RUNNING", leader=1), 2: job(2, "CANCELLED", leader=1)}
    slurm.history = "\n".join([sacct_row("7+0", "7", "COMPLETED"), sacct_row("7+1", "8", "FAILED")])
    found = slurm.client().jobs([1, 7, 9])
    assert {i: j.state for i, j in found.items()} == {1: JobState.RUNNING, 7: JobState.FAILED}
    assert slurm.calls[1][-1] == "--jobs=7,9"


def test_the_queue_counts_before_history(slurm: FakeSlurm) -> None:
    slurm.queue = {1: job(1, "RUNNING")}
    slurm.history = sacct_row("1", "1", "NODE_FAIL")
    assert slurm.client().jobs([1, 5])[1].state is JobState.RUNNING


def test_without_accounting_history_is_asked_once(slurm: FakeSlurm) -> None:
    slurm.accounting = False
    client = slurm.client()
    assert client.jobs([5]) == {}
    assert client.jobs([5]) == {}
    assert [call[0] for call in slurm.calls] == ["squeue", "sacct", "squeue"]


def test_fewer_components_than_expected(slurm: FakeSlurm) -> None:
    slurm.history = sacct_row("7+0", "7", "COMPLETED")
    assert slurm.client().jobs([7])[7].state is JobState.COMPLETED
    assert slurm.client().jobs([7], expected={7: 2})[7].state is JobState.UNKNOWN


def test_refused_columns_fall_back_to_json(slurm: FakeSlurm) -> None:
    slurm.queue, slurm.columns = {1: job(1, "RUNNING")}, False
    client = slurm.client()
    assert client.jobs([1])[1].state is JobState.RUNNING
    assert client.jobs([1])[1].state is JobState.RUNNING
    assert sum("--json" in call for call in slurm.calls) == 2
    assert len(slurm.calls) == 3, "columns are not tried again"


def test_submit_once(slurm: FakeSlurm) -> None:
    client, script = slurm.client(), Path("job's script\n.sh")
    first = client.submit(script, name="run", token="t1")
    again = client.submit(script, name="run", token="t1")
    assert (first.recovered, again.recovered, first.job_id) == (False, True, again.job_id)
    assert client.submit(script, name="run", token="t2").job_id != first.job_id
    submits = [call for call in slurm.calls if call[0] == "sbatch"]
    assert len(submits) == 2
    assert submits[0][-1] == str(script)


@pytest.mark.parametrize("lose_answers", [False, True])
def test_a_job_that_ended_is_replaced_where_that_is_meant(slurm: FakeSlurm, lose_answers: bool) -> None:
    client = slurm.client()
    first = client.submit(Path("s"), name="run-engine-0", token="t:engine-0").job_id
    assert client.submit(Path("s"), name="run-engine-0", token="t:engine-0", again=True).job_id == first
    slurm.queue[first]["State"] = "CANCELLED"
    assert client.submit(Path("s"), name="run-engine-0", token="t:engine-0").job_id == first
    slurm.lose_answers = lose_answers
    second = client.submit(Path("s"), name="run-engine-0", token="t:engine-0", again=True)
    assert (second.job_id != first, second.recovered) == (True, lose_answers)


def test_all_jobs_of_a_run(slurm: FakeSlurm) -> None:
    client = slurm.client()
    mine = [client.submit(Path("s"), name=f"j{i}", token=f"abc{i}:engine-{i}").job_id for i in ("", "-2")]
    client.submit(Path("s"), name="other", token="abd:main")
    assert {job_id: token for job_id, (token, _) in client.of_run("abc").items()} == {
        mine[0]: "abc:engine-",
        mine[1]: "abc-2:engine--2",
    }


@pytest.mark.parametrize("delay_s", [0.0, 5.0])
def test_lost_answer_is_looked_up(slurm: FakeSlurm, delay_s: float) -> None:
    slurm.lose_answers, slurm.appears_after = True, delay_s
    found = slurm.client().submit(Path("s"), name="run", token="t")
    assert found.recovered
    assert found.job_id in slurm.queue
    assert sum(call[0] == "sbatch" for call in slurm.calls) == 1


def test_lost_submission_is_not_repeated(slurm: FakeSlurm) -> None:
    slurm.lose_answers, slurm.appears_after = True, 1e9
    with pytest.raises(SubmitUnclearError, match="submit again"):
        slurm.client().submit(Path("s"), name="run", token="t")
    assert sum(call[0] == "sbatch" for call in slurm.calls) == 1
    assert slurm.now < 60


def test_controller_goes_away_while_submitting(slurm: FakeSlurm) -> None:
    def sbatch(argv: list[str]) -> CommandResult:
        slurm.away = True
        return slurm.error("sbatch: error: Batch job submission failed: Unable to contact slurm controller")

    slurm.sbatch = sbatch  # type: ignore[method-assign]
    with pytest.raises(SubmitUnclearError, match="cannot be asked"):
        slurm.client().submit(Path("s"), name="run", token="t")
    assert slurm.now < 120


def test_nothing_is_submitted_while_the_controller_is_away(slurm: FakeSlurm) -> None:
    slurm.away = True
    with pytest.raises(SlurmUnavailableError) as caught:
        slurm.client().submit(Path("s"), name="run", token="t")
    assert not isinstance(caught.value, SubmitUnclearError)
    assert all(call[0] != "sbatch" for call in slurm.calls)


def test_unreadable_job_id(slurm: FakeSlurm) -> None:
    slurm.sbatch = lambda argv: CommandResult(0, "Submitted batch job\n", "")  # type: ignore[method-assign]
    with pytest.raises(SlurmAnswerError, match="an existing job is found"):
        slurm.client().submit(Path("s"), name="run", token="t")


@pytest.mark.parametrize(
    ("banner", "looked_up"),
    [
        ("Welcome to the cluster\nmaintenance on 12 May\n\n{}", False),
        ("{}have a nice day\n", False),
        ("\x1b[1mquota: 80 %\x1b[0m\n  {}", False),
        ("2026\n{}", True),  # a line of a banner that could be the number as well
        ("submitted\n", True),
        ("", True),
    ],
)
def test_a_banner_does_not_hide_the_job(slurm: FakeSlurm, banner: str, looked_up: bool) -> None:
    slurm.banner = banner
    submitted = slurm.client().submit(Path("s"), name="run", token="t")
    assert list(slurm.queue) == [submitted.job_id]
    assert submitted.recovered == looked_up
    assert sum(call[0] == "sbatch" for call in slurm.calls) == 1


def test_a_job_that_exists_is_not_called_refused(slurm: FakeSlurm) -> None:
    """A wrapper of the site around sbatch fails after the job was taken."""
    slurm.wrapper_fails = True
    submitted = slurm.client().submit(Path("s"), name="run", token="t")
    assert (list(slurm.queue), submitted.recovered) == ([submitted.job_id], True)
    slurm.queue.clear()
    slurm.sbatch = lambda argv: slurm.error("sbatch: error: Invalid qos specification")  # type: ignore[method-assign]
    with pytest.raises(SlurmRejectedError, match="qos"):
        slurm.client().submit(Path("s"), name="run", token="t")


def test_the_record_of_what_slurm_refused_is_not_a_job(slurm: FakeSlurm) -> None:
    """As Slurm 22.05 does where no node has what is asked for: refused, and listed as failed for a while."""

    def refuse(argv: Sequence[str]) -> CommandResult:
        slurm.queue[5] = job(5, "FAILED", Name="run", Comment="hpcrl:t")
        return slurm.error("sbatch: error: Batch job submission failed: Requested node configuration is not available")

    slurm.sbatch = refuse  # type: ignore[method-assign]
    with pytest.raises(SlurmRejectedError, match="configuration is not available"):
        slurm.client().submit(Path("s"), name="run", token="t")


@pytest.mark.parametrize("lets_through", [False, True])
def test_a_strangers_job_is_not_ours(slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, lets_through: bool) -> None:
    """Names and comments are everybody's to write; also where a wrapper of squeue drops --me."""
    stranger = str(os.getuid() + 1)
    slurm.queue = {7: job(7, "RUNNING", Name="run", Comment="hpcrl:abc:main", UserID=stranger)}
    if lets_through:
        real = slurm.squeue
        monkeypatch.setattr(slurm, "squeue", lambda argv: real([word for word in argv if word != "--me"]))
    client = slurm.client()
    assert client.find(name="run", token="abc:main") == []
    assert client.of_run("abc") == {}
    mine = client.submit(Path("s"), name="run", token="abc:main")
    assert (mine.job_id != 7, mine.recovered) == (True, False)
    assert [found.job_id for found in client.find(name="run", token="abc:main")] == [mine.job_id]


def test_only_the_nodes_that_are_asked_for(slurm: FakeSlurm) -> None:
    known = [f"n{i}" for i in range(1, 5)]

    def scontrol(argv: list[str]) -> CommandResult:
        wanted = argv[3].split(",") if len(argv) > 3 else known
        if strange := [name for name in wanted if name not in known]:
            return CommandResult(1, f"Node {strange[0]} not found\n", "")
        return CommandResult(0, "".join(f"NodeName={name} NodeAddr=10.0.0.{name[1]}\n" for name in wanted), "")

    slurm.scontrol = scontrol  # type: ignore[attr-defined]
    client = slurm.client()
    assert [node.address for node in client.nodes({"n3", "n1"})] == ["10.0.0.1", "10.0.0.3"]
    assert slurm.calls == [["scontrol", "--oneliner", "show", "node", "n1,n3"]]
    assert client.nodes(()) == []
    assert len(slurm.calls) == 1, "no names are no question"
    # a node that the admins have taken out meanwhile
    assert [node.name for node in client.nodes({"n2", "gone"})] == ["n2"]
    assert len(client.nodes()) == 4


def test_arguments_of_cancel(slurm: FakeSlurm) -> None:
    slurm.scancel = lambda argv: CommandResult(0, "", "")  # type: ignore[attr-defined]
    client = slurm.client()
    client.cancel(93)
    client.cancel(93, component=1)
    client.cancel(93, signal="USR2", batch=True)
    assert slurm.calls == [["scancel", "93"], ["scancel", "93+1"], ["scancel", "--signal=USR2", "--batch", "93"]]


def test_cancel_of_an_ended_job_is_not_an_error(slurm: FakeSlurm) -> None:
    text = "scancel: error: Kill job error on job id 5: Job/step already completing or completed"
    slurm.scancel = lambda argv: slurm.error(text)  # type: ignore[attr-defined]
    slurm.client().cancel(5)
    slurm.scancel = lambda argv: slurm.error("scancel: error: Access/permission denied")  # type: ignore[attr-defined]
    with pytest.raises(SlurmRejectedError, match="denied"):
        slurm.client().cancel(5)


def test_a_run_is_asked_about_on_the_cluster_that_took_its_job(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[tuple[list[str], str | None]] = []

    def run(argv: Sequence[str], *, env: Mapping[str, str], timeout_s: float) -> CommandResult:
        said.append((list(argv), env.get("SLURM_CLUSTERS")))
        return CommandResult(0, "110;beta\n" if argv[0] == "sbatch" else "", "")

    monkeypatch.setenv("SLURM_CLUSTERS", "alpha")
    assert SlurmClient(run=run).submit(Path("x"), name="n", token="t").cluster == "beta"
    for kept, asked in (("beta", "beta"), ("", None), (None, "alpha")):
        said.clear()
        client = SlurmClient(cluster=kept, run=run)
        client.jobs([110])
        client.cancel(110)
        client.details(110)
        assert [argv[0] for argv, _ in said] == ["squeue", "sacct", "scancel", "scontrol"]
        assert {cluster for _, cluster in said} == {asked}
        # sacct does not read the variable
        assert (f"--clusters={asked}" in said[1][0]) == (asked is not None)


@pytest.mark.parametrize(("away_from", "away_until", "ends"), [(1e9, 1e9, 10.0), (3.0, 7.0, 18.0), (-1.0, 1.0, 12.0)])
def test_a_job_that_is_not_there_is_looked_for_ten_seconds_in_a_row(
    slurm: FakeSlurm, away_from: float, away_until: float, ends: float
) -> None:
    """Looks are two seconds apart; where Slurm was away in between, the seconds count from its return."""
    slurm.lose_answers, slurm.appears_after = True, 1e9
    lost_at: list[float] = []

    def run(argv: Sequence[str], *, env: Mapping[str, str], timeout_s: float) -> CommandResult:
        if lost_at:
            slurm.away = away_from < slurm.now - lost_at[0] < away_until
        answer = slurm(argv, env=env, timeout_s=timeout_s)
        if argv[0] == "sbatch":
            lost_at.append(slurm.now)
        return answer

    client = SlurmClient(run=run, clock=slurm.clock, sleep=slurm.sleep)
    with pytest.raises(SubmitUnclearError, match="Slurm has no job 'run' of it"):
        client.submit(Path("s"), name="run", token="t")
    assert slurm.now - lost_at[0] == ends


def test_a_job_that_says_it_is_ours_is_ours(slurm: FakeSlurm) -> None:
    """And one of which Slurm does not say whose it is: it was asked for ours alone."""
    mine = {"Name": "run", "Comment": "hpcrl:abc:main"}
    slurm.queue = {7: job(7, "RUNNING", UserID=str(os.getuid()), **mine), 8: job(8, "RUNNING", **mine)}
    client = slurm.client()
    assert [found.job_id for found in client.find(name="run", token="abc:main")] == [7, 8]
    assert sorted(client.of_run("abc")) == [7, 8]
    assert all("--me" in call for call in slurm.calls)
    again = client.submit(Path("s"), name="run", token="abc:main")
    assert (again.job_id, again.recovered) == (8, True)


def test_only_what_has_the_comment_of_the_submission_is_its_job(slurm: FakeSlurm) -> None:
    slurm.queue = {
        5: job(5, "RUNNING", leader=5, Name="run", Comment="hpcrl:abc:main"),
        6: job(6, "PENDING", leader=5, Name="run"),
        7: job(7, "RUNNING", Name="run", Comment="hpcrl:abc-2:main"),
        8: job(8, "RUNNING", Name="run", Comment="abc:main"),
        9: job(9, "RUNNING", Name="run"),
    }
    (found,) = slurm.client().find(name="run", token="abc:main")
    assert (found.job_id, [component.job_id for component in found.components]) == (5, [5, 6])


def test_a_job_is_named_by_the_comment_of_its_first_component(slurm: FakeSlurm) -> None:
    slurm.queue = {
        5: job(5, "RUNNING", leader=5, Name="run", Comment="hpcrl:other:main"),
        6: job(6, "RUNNING", leader=5, Name="run", Comment="hpcrl:abc:main"),
    }
    assert slurm.client().find(name="run", token="abc:main") == []
    assert [found.job_id for found in slurm.client().find(name="run", token="other:main")] == [5]


def test_an_ended_job_that_lives_again_is_not_the_one_that_was_to_replace_it(slurm: FakeSlurm) -> None:
    """Slurm starts a job again by itself whose node failed, and refuses ours in the same moment."""
    client = slurm.client()
    first = client.submit(Path("s"), name="run", token="t").job_id
    slurm.queue[first]["State"] = "NODE_FAIL"

    def refuse(argv: list[str]) -> CommandResult:
        slurm.queue[first]["State"] = "PENDING"
        return slurm.error("sbatch: error: Batch job submission failed: Invalid qos specification")

    slurm.sbatch = refuse  # type: ignore[method-assign]
    with pytest.raises(SlurmRejectedError, match="qos"):
        client.submit(Path("s"), name="run", token="t", again=True)


def test_where_slurm_goes_away_a_refusal_is_reported_as_it_was(slurm: FakeSlurm) -> None:
    def refuse(argv: list[str]) -> CommandResult:
        slurm.away = True
        return slurm.error("sbatch: error: Batch job submission failed: Invalid qos specification")

    slurm.sbatch = refuse  # type: ignore[method-assign]
    with pytest.raises(SlurmRejectedError, match="qos"):
        slurm.client().submit(Path("s"), name="run", token="t")


def test_a_submission_says_name_comment_and_what_else_it_is_given(slurm: FakeSlurm) -> None:
    waits: list[float] = []

    def run(argv: Sequence[str], *, env: Mapping[str, str], timeout_s: float) -> CommandResult:
        waits.append(timeout_s)
        return slurm(argv, env=env, timeout_s=timeout_s)

    SlurmClient(run=run, timeout_s=5.0).submit(Path("s"), name="run", token="t", options=["--dependency=after:3"])
    assert slurm.calls[-1] == [
        "sbatch",
        "--parsable",
        "--job-name=run",
        "--comment=hpcrl:t",
        "--dependency=after:3",
        "s",
    ]
    # sbatch may take longer than a question: what it does must not be asked for twice
    assert waits == [5.0, 60.0]
    waits.clear()
    SlurmClient(run=run, timeout_s=90.0).submit(Path("s"), name="run", token="other")
    assert waits == [90.0, 90.0]


def sent(slurm: FakeSlurm, text: str = "") -> SlurmClient:
    """A client whose commands that change something are noted, and answered with ``text``."""
    for name in ("scontrol", "sacctmgr"):
        setattr(slurm, name, lambda argv: slurm.error(text) if text else CommandResult(0, "", ""))
    return slurm.client()


def test_arguments_of_changes(slurm: FakeSlurm) -> None:
    client = sent(slurm)
    client.requeue(93)
    client.exclude_nodes(93, ["n1", "n2"])
    client.exclude_nodes(93, ["n1"], components=2)
    client.start_after([94, 95], 93)
    client.update_node("n1", "DOWN", reason="no fan")
    client.update_node("n1", "RESUME")
    client.add_cluster("alpha")
    update = ["scontrol", "update"]
    assert slurm.calls == [
        ["scontrol", "requeue", "93"],
        [*update, "JobId=93", "ExcNodeList=n1,n2"],
        [*update, "JobId=93+0", "ExcNodeList=n1"],
        [*update, "JobId=93+1", "ExcNodeList=n1"],
        [*update, "JobId=94,95", "Dependency=after:93"],
        [*update, "NodeName=n1", "State=DOWN", "Reason=no fan"],
        [*update, "NodeName=n1", "State=RESUME"],
        ["sacctmgr", "--immediate", "add", "cluster", "alpha"],
    ]


def test_a_cluster_that_is_there_needs_not_be_added(slurm: FakeSlurm) -> None:
    sent(slurm, " This cluster alpha already exists.  Not adding.").add_cluster("alpha")
    with pytest.raises(SlurmRejectedError, match="privilege"):
        sent(slurm, "Your user/uid doesn't have sufficient privilege").add_cluster("alpha")


@pytest.mark.parametrize(
    ("code", "text", "there"),
    [
        (0, "Slurmctld(primary) at head is UP", True),
        (0, "Slurmctld(primary) at head is DOWN", False),
        (1, "Slurmctld(primary) at head is DOWN", False),
        (1, "slurm_load_ctl_conf error: Unable to contact slurm controller", False),
    ],
)
def test_whether_a_controller_answers(slurm: FakeSlurm, code: int, text: str, there: bool) -> None:
    slurm.scontrol = lambda argv: CommandResult(code, text, "")  # type: ignore[attr-defined]
    assert slurm.client().answers() is there
    assert slurm.calls == [["scontrol", "ping"]]


def test_a_question_that_slurm_ended_together_with_our_job_is_asked_again(slurm: FakeSlurm) -> None:
    answers = [CommandResult(-15, "", ""), CommandResult(0, "Slurmctld(primary) at head is UP", "")]
    slurm.scontrol = lambda argv: answers.pop(0)  # type: ignore[attr-defined]
    assert slurm.client().answers()
    assert slurm.calls == [["scontrol", "ping"]] * 2


def test_a_submission_that_was_ended_is_looked_up_and_not_repeated(slurm: FakeSlurm) -> None:
    slurm.sbatch = lambda argv: CommandResult(-15, "", "")  # type: ignore[method-assign]
    with pytest.raises(SlurmError):
        slurm.client().submit(Path("s"), name="run", token="t")
    assert [call[0] for call in slurm.calls] == ["squeue", "sbatch", "squeue"]


def test_history_that_cannot_be_read_now_is_asked_for_again(slurm: FakeSlurm) -> None:
    slurm.sacct = lambda argv: slurm.error("Problem talking to the database")  # type: ignore[method-assign]
    client = slurm.client()
    slurm.queue = {1: job(1, "RUNNING")}
    for _ in range(2):
        assert list(client.jobs([1, 7])) == [1]
    assert [call[0] for call in slurm.calls] == ["squeue", "sacct"] * 2


def test_a_question_that_is_refused_for_another_reason_than_its_columns_is_not_asked_otherwise(
    slurm: FakeSlurm,
) -> None:
    slurm.squeue = lambda argv: slurm.error("squeue: error: Access denied")  # type: ignore[method-assign]
    with pytest.raises(SlurmRejectedError, match="denied"):
        slurm.client().jobs([1])
    assert len(slurm.calls) == 1
