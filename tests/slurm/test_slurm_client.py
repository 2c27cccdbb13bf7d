"""The client against a fake of Slurm's commands; tests/devcluster has the real ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import cast

import pytest
from patience import patience, wait_for

from hpcrl import procfs
from hpcrl.runs.record import Submission
from hpcrl.slurm import lookup, parse
from hpcrl.slurm.client import SlurmClient
from hpcrl.slurm.command import CommandResult, command_environment, run_command
from hpcrl.slurm.errors import (
    NoAccountingError,
    NoClusterError,
    NoSuchJobError,
    SlurmAnswerError,
    SlurmError,
    SlurmMissingError,
    SlurmRejectedError,
    SlurmUnavailableError,
    SubmitUnclearError,
    classify,
)
from hpcrl.slurm.records import HetComponent, Job
from hpcrl.slurm.states import JobState
from hpcrl.slurm.watch import JobWatcher


class FakeSlurm:
    """Slurm's commands as methods; jobs are rows of what squeue prints, by id."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []
        self.queue: dict[int, dict[str, str]] = {}
        self.history = ""
        self.accounting = True
        self.away = False
        self.lose_answers = False
        self.appears_after = 0.0
        self.now = 0.0
        self.columns = True
        self.banner = "{}"
        self.wrapper_fails = False
        self._late: list[tuple[float, int, dict[str, str]]] = []

    # the client's seams

    def __call__(self, argv: Sequence[str], *, env: Mapping[str, str], timeout_s: float) -> CommandResult:
        self.calls.append(list(argv))
        if self.away:
            return self.error("slurm_load_jobs error: Unable to contact slurm controller (connect failure)")
        result = getattr(self, argv[0])(list(argv[1:]))
        assert isinstance(result, CommandResult)
        return result

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        for at, job_id, row in self._late:
            if at <= self.now:
                self.queue[job_id] = row

    def client(self) -> SlurmClient:
        return SlurmClient(run=self, clock=self.clock, sleep=self.sleep)

    # the commands

    def error(self, text: str) -> CommandResult:
        return CommandResult(1, "", text)

    def squeue(self, argv: list[str]) -> CommandResult:
        options = dict(word.removeprefix("--").partition("=")[::2] for word in argv)
        if "Format" in options and not self.columns:
            return self.error("squeue: error: Invalid job format specification: RestartCnt")
        rows = list(self.queue.values())
        if "me" in options:
            rows = [row for row in rows if row.get("UserID") in (None, str(os.getuid()))]
        if "name" in options:
            rows = [row for row in rows if row["Name"] == options["name"]]
        elif "jobs" in options:
            wanted = options["jobs"].split(",")
            rows = [row for row in rows if row["HetJobID"] in wanted or row["JobID"] in wanted]
            if not rows and len(wanted) == 1:
                return self.error("slurm_load_jobs error: Invalid job id specified")
        if "json" in options:
            jobs = [{"job_id": int(row["JobID"]), "job_state": [row["State"]]} for row in rows]
            return CommandResult(0, json.dumps({"jobs": jobs}), "")
        names = [item.partition(":")[0] for item in options["Format"].split(",")]
        lines = [parse.SEPARATOR.join([*(row.get(name, "N/A") for name in names), ""]) for row in rows]
        return CommandResult(0, "\n".join(lines) + "\n", "")

    def sacct(self, argv: list[str]) -> CommandResult:
        return (
            CommandResult(0, self.history, "")
            if self.accounting
            else self.error("Slurm accounting storage is disabled")
        )

    def sbatch(self, argv: list[str]) -> CommandResult:
        options = dict(word.removeprefix("--").partition("=")[::2] for word in argv if word.startswith("--"))
        job_id = 100 + len(self.queue) + len(self._late)
        row = job(job_id, "PENDING", Name=options["job-name"], Comment=options["comment"])
        if self.appears_after:
            self._late.append((self.now + self.appears_after, job_id, row))
        else:
            self.queue[job_id] = row
        if self.lose_answers:
            return self.error("sbatch: error: Batch job submission failed: Socket timed out on send/recv operation")
        if self.wrapper_fails:
            return self.error("sbatch: error: Requested node configuration is not available (says our own check)")
        return CommandResult(0, self.banner.format(f"{job_id};cluster\n"), "")


def job(job_id: int, state: str, *, leader: int | None = None, **cells: str) -> dict[str, str]:
    het = {} if leader is None else {"HetJobID": str(leader), "HetJobOffset": str(job_id - leader)}
    return {"JobID": str(job_id), "HetJobID": "N/A", "State": state, **het, **cells}


def sacct_row(job_id: str, raw: str, state: str) -> str:
    cells = {"JobID": job_id, "JobIDRaw": raw, "State": state}
    return parse.SEPARATOR.join(cells.get(name, "") for name in parse.SACCT_FORMAT.split(","))


@pytest.fixture
def slurm() -> FakeSlurm:
    return FakeSlurm()


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


def test_nothing_is_submitted_when_nobody_answers(slurm: FakeSlurm) -> None:
    slurm.away = True
    with pytest.raises(SlurmUnavailableError) as caught:
        slurm.client().submit(Path("s"), name="run", token="t")
    assert not isinstance(caught.value, SubmitUnclearError)
    assert all(call[0] != "sbatch" for call in slurm.calls)


def test_unreadable_job_id(slurm: FakeSlurm) -> None:
    slurm.sbatch = lambda argv: CommandResult(0, "Submitted batch job\n", "")  # type: ignore[method-assign]
    with pytest.raises(SlurmAnswerError, match="a job that exists is found"):
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


def test_the_record_of_what_slurm_refused_is_no_job(slurm: FakeSlurm) -> None:
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


def test_a_number_that_somebody_else_has_now_is_not_our_job(slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a site loses its state, numbers begin again."""
    monkeypatch.setattr(lookup, "client_of", lambda submission, timeout_s: slurm.client())
    slurm.queue = {7: job(7, "RUNNING", UserID="1234")}
    states = {}
    for owner in (1234, 1235, None):
        monkeypatch.setattr(lookup, "_watchers", {})
        monkeypatch.setattr(lookup, "_watched", {})
        submission = Submission(
            submitted_at_s=0.0, executor="slurm", job_id="7", folder="", after_attempt=0, user_id=owner
        )
        fact = lookup.look_up([submission])["7"]
        states[owner] = (fact.state, fact.gone, fact.holding)
    assert states == {1234: ("RUNNING", False, True), 1235: ("UNKNOWN", True, False), None: ("RUNNING", False, True)}


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


def test_cancel_of_an_ended_job_is_no_error(slurm: FakeSlurm) -> None:
    text = "scancel: error: Kill job error on job id 5: Job/step already completing or completed"
    slurm.scancel = lambda argv: slurm.error(text)  # type: ignore[attr-defined]
    slurm.client().cancel(5)
    slurm.scancel = lambda argv: slurm.error("scancel: error: Access/permission denied")  # type: ignore[attr-defined]
    with pytest.raises(SlurmRejectedError, match="denied"):
        slurm.client().cancel(5)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("squeue: error: Unable to contact slurm controller (connect failure)", SlurmUnavailableError),
        ("slurm_load_jobs error: Socket timed out on send/recv operation", SlurmUnavailableError),
        ("slurm_load_jobs error: Zero Bytes were transmitted or received", SlurmUnavailableError),
        (
            "sbatch: error: Batch job submission failed: Slurm temporarily unable to accept job, sleeping",
            SlurmUnavailableError,
        ),
        ("sacct: error: Problem talking to the database: Connection refused", SlurmUnavailableError),
        ('sinfo: error: Munge encode failed: Failed to access "/run/munge/munge.socket.2"', SlurmUnavailableError),
        ("slurm_load_jobs error: Invalid job id specified", NoSuchJobError),
        ("Slurm accounting storage is disabled", NoAccountingError),
        ("You are not running a supported accounting_storage plugin", NoAccountingError),
        (
            "sbatch: error: Batch job submission failed: Requested node configuration is not available",
            SlurmRejectedError,
        ),
        ("squeue: fatal: Could not establish a configuration source", NoClusterError),
        ("", SlurmRejectedError),
    ],
)
def test_classification(text: str, kind: type[SlurmError]) -> None:
    error = classify(["squeue", "--jobs=1"], 1, text)
    assert type(error) is kind
    assert "squeue" in str(error)


# -- the real runner and its environment -----------------------------------------------------------------------------


def test_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("SLURM_JOB_ID", "SBATCH_PARTITION", "SQUEUE_FORMAT", "SLURM_CONF", "HOME_OF_MINE", "SLURMD_NODENAME"):
        monkeypatch.setenv(name, "x")
    monkeypatch.delenv("LC_ALL", raising=False)
    reading = command_environment(conf=None, reading=True)
    assert reading["SLURM_CONF"] == "x"
    assert reading["HOME_OF_MINE"] == "x"
    assert (reading["LC_ALL"], reading["SLURM_TIME_FORMAT"]) == ("C", "%s")
    assert not {"SLURM_JOB_ID", "SBATCH_PARTITION", "SQUEUE_FORMAT", "SLURMD_NODENAME"} & set(reading)
    submitting = command_environment(conf=tmp_path, reading=False)
    assert submitting["SLURM_CONF"] == str(tmp_path)
    assert not {"LC_ALL", "SLURM_TIME_FORMAT"} & set(submitting), "the job would inherit them"


def test_runner() -> None:
    code = "import sys; print('out\\xff'); sys.stderr.write('err'); sys.exit(3)"
    result = run_command([sys.executable, "-c", code], env={**os.environ, "PYTHONIOENCODING": "latin-1"}, timeout_s=30)
    assert result == CommandResult(3, "out\ufffd\n", "err")
    with pytest.raises(SlurmMissingError, match="devcluster"):
        run_command(["no-such-command"], env=os.environ, timeout_s=1)


def test_runner_kills_at_the_time_out(tmp_path: Path) -> None:
    """The command's own children, too: they hold the pipes."""
    pidfile = tmp_path / "pid"
    with pytest.raises(SlurmUnavailableError, match="no answer"):
        run_command(["sh", "-c", f"sleep 1000 & echo $! > {pidfile}; wait"], env=os.environ, timeout_s=patience())
    pid = int(pidfile.read_text())
    # nobody may have reaped it
    wait_for(lambda: (child := procfs.read_process(pid)) is None or child.dead, 5.0, "end of the child")


def test_an_interrupt_as_the_command_ends_is_told_and_ends_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """The id of a command that was waited for may be another's by now."""
    ended: list[int] = []

    def interrupted(process: subprocess.Popen[str], timeout: float | None = None) -> None:
        process.wait(timeout)
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess.Popen, "communicate", interrupted)
    monkeypatch.setattr("hpcrl.slurm.command.os.killpg", lambda pid, _: ended.append(pid))
    with pytest.raises(KeyboardInterrupt):
        run_command(["true"], env=os.environ, timeout_s=30)
    assert ended == []


# -- watching --------------------------------------------------------------------------------------------------------


def watcher(slurm: FakeSlurm) -> JobWatcher:
    return JobWatcher(slurm.client(), interval_s=10.0, clock=slurm.clock)


def test_watcher_bounds_the_load(slurm: FakeSlurm) -> None:
    slurm.queue = {1: job(1, "RUNNING"), 2: job(2, "RUNNING")}
    watch = watcher(slurm)
    for _ in range(5):
        watch.poll([1, 2])
    assert len(slurm.calls) == 1
    slurm.now = 10.0
    watch.poll([1, 2])
    assert len(slurm.calls) == 2
    slurm.now = 14.0
    assert {view.age_s for view in watch.poll([1, 2]).values()} == {4.0}
    assert len(slurm.calls) == 2


def test_silence_is_a_warning(slurm: FakeSlurm) -> None:
    slurm.queue = {1: job(1, "RUNNING")}
    watch = watcher(slurm)
    assert watch.poll([1])[1].state is JobState.RUNNING
    slurm.away, slurm.now = True, 600.0
    view = watch.poll([1])[1]
    assert view.state is JobState.UNKNOWN
    assert view.last is not None
    assert view.last.state is JobState.RUNNING
    assert view.age_s == 600.0
    assert "has not answered for 600 s" in view.warning
    slurm.away, slurm.now = False, 620.0
    assert watch.poll([1])[1].warning == ""


def test_never_answered(slurm: FakeSlurm) -> None:
    slurm.away = True
    view = watcher(slurm).poll([1])[1]
    assert (view.state, view.last) == (JobState.UNKNOWN, None)
    assert "has not answered yet" in view.warning


def test_vanished_job_is_unknown_not_completed(slurm: FakeSlurm) -> None:
    slurm.queue, slurm.accounting = {1: job(1, "RUNNING")}, False
    watch = watcher(slurm)
    watch.poll([1])
    slurm.queue, slurm.now = {}, 20.0
    view = watch.poll([1])[1]
    assert view.state is JobState.UNKNOWN
    assert "does not know job 1" in view.warning


@pytest.mark.parametrize(
    ("end", "later"), [("COMPLETED", "COMPLETED"), ("CANCELLED", "CANCELLED"), ("NODE_FAIL", "UNKNOWN")]
)
def test_ends_are_remembered_unless_slurm_may_requeue(slurm: FakeSlurm, end: str, later: str) -> None:
    slurm.queue, slurm.accounting = {1: job(1, end)}, False
    watch = watcher(slurm)
    assert watch.poll([1])[1].state == end
    slurm.queue, slurm.now = {}, 20.0
    assert watch.poll([1])[1].state == later


class SlowSlurm:
    """A controller whose every question takes a while; answers are given, or None for silence."""

    def __init__(self, takes_s: float, state: JobState | None) -> None:
        self.now, self.asked, self._takes_s, self._state = 0.0, 0, takes_s, state

    def clock(self) -> float:
        return self.now

    def jobs(self, ids: Iterable[int], expected: Mapping[int, int] | None = None) -> dict[int, Job]:
        self.asked += 1
        self.now += self._takes_s
        if self._state is None:
            raise SlurmUnavailableError("no answer")
        return {
            each: Job.of([HetComponent(job_id=each, leader_id=each, offset=0, state=self._state, source="squeue")])
            for each in ids
        }


@pytest.mark.parametrize(
    ("takes_s", "state", "in_a_minute"),
    [(10.0, None, 5), (3.0, JobState.RUNNING, 12), (0.0, JobState.RUNNING, 30), (0.0, JobState.PENDING, 6)],
)
def test_the_pause_between_questions_begins_when_one_has_ended(
    takes_s: float, state: JobState | None, in_a_minute: int
) -> None:
    slurm = SlowSlurm(takes_s, state)
    watcher = JobWatcher(cast("SlurmClient", slurm), interval_s=2.0, waiting_interval_s=10.0, clock=slurm.clock)
    while slurm.now < 60.0:
        for _ in range(6):
            watcher.poll([1, 2, 3])
        slurm.now += 0.5
    assert slurm.asked <= in_a_minute + 1
    asked = slurm.asked
    watcher.poll([1, 2, 3])
    watcher.ask_soon()
    watcher.poll([1, 2, 3])
    assert slurm.asked - asked in (1, 2)


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


def test_every_view_says_how_old_what_it_knows_is(slurm: FakeSlurm) -> None:
    """By a clock that does not begin at zero."""
    slurm.now = 1000.0
    slurm.queue, slurm.accounting = {1: job(1, "RUNNING"), 2: job(2, "COMPLETED"), 3: job(3, "RUNNING")}, False
    watch = watcher(slurm)
    assert [view.age_s for view in watch.poll([1, 2, 3]).values()] == [0.0, 0.0, 0.0]
    slurm.now = 1004.0
    assert [view.age_s for view in watch.poll([1, 2, 3]).values()] == [4.0, 4.0, 4.0]
    # Slurm has forgotten the first two, and of these only an end is still true
    del slurm.queue[1], slurm.queue[2]
    slurm.now = 1030.0
    views = watch.poll([1, 2, 3])
    assert [view.age_s for view in views.values()] == [30.0, 30.0, 0.0]
    assert [view.state for view in views.values()] == [JobState.UNKNOWN, JobState.COMPLETED, JobState.RUNNING]
    slurm.away, slurm.now = True, 1100.0
    views = watch.poll([1, 2, 3])
    assert [view.age_s for view in views.values()] == [100.0, 100.0, 70.0]
    assert [view.state for view in views.values()] == [JobState.UNKNOWN, JobState.COMPLETED, JobState.UNKNOWN]


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
