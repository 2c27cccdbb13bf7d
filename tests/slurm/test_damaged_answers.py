"""Answers of Slurm's commands with any damage: an error of ours at most, and nothing unknown is an end or a success."""

from __future__ import annotations

import contextlib
import json
import random
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
from damaged_json import damaged

from hpcrl.sites.site_facts import read_site_facts
from hpcrl.slurm import parse
from hpcrl.slurm.client import SlurmClient
from hpcrl.slurm.command import CommandResult
from hpcrl.slurm.errors import SlurmAnswerError, SlurmError
from hpcrl.slurm.hostlist import expand_hostlist
from hpcrl.slurm.records import Job

FACTS = Path(__file__).parent / "facts/slurm-24.11"
ENDS = {"COMPLETED", "CANCELLED", "REVOKED", "FAILED", "BOOT_FAIL", "DEADLINE", "TIMEOUT", "PREEMPTED"}
ENDS |= {"OUT_OF_MEMORY", "NODE_FAIL", "LAUNCH_FAILED", "RECONFIG_FAIL"}
SEPARATOR = "\x1f"
JOB = (
    "JobId=7 JobName=run UserId=ada(1000) GroupId=ada(1000) MCS_label=N/A Priority=1 JobState=RUNNING Reason=None "
    "ExitCode=0:0 TimeLimit=1-00:00:00 NodeList=n[1-2] Comment=hpcrl:t\n"
)
RESERVATION = "ReservationName=m StartTime=1795660980 Nodes=n[1-2] NodeCnt=2 Flags=MAINT Users=root State=ACTIVE\n"
PARTITIONS = "PartitionName=gpu AllowAccounts=ALL Default=YES MaxTime=1-00:00:00 Nodes=cap-[001-006] State=UP\n"
SACCT = SEPARATOR.join(
    ["7+0", "7", "RUNNING", "None", "n1", "run", "hpcrl:t", "p", "10", "20", "Unknown", "90", "1000", "0:0"]
)
TEXTS = {
    "squeue": (FACTS / "squeue.txt").read_text(),
    "json": (FACTS / "squeue.json").read_text(),
    "sacct": f"{SACCT}\n{SACCT.replace('7+0', '7+1').replace('RUNNING', 'COMPLETED')}\n",
    "node": (FACTS / "nodes.txt").read_text(),
    "config": (FACTS / "config.txt").read_text(),
    "job": JOB,
    "reservation": RESERVATION,
    "partition": PARTITIONS,
    "sbatch": "7;alpha\n",
}
PIECES = ["", "\n", SEPARATOR, "=", "State=", "(null)", "N/A", "9" * 5000, "-1", "1e999", "\u0663", "\u00b2", "\ufffd"]
PIECES += [
    "n[1-999999999999]",
    "n[[1]",
    "]",
    "gpu:9999999999999G",
    "\0",
    "\x1b[2J",
    "999999999-00:00:00",
    "JobId=",
    "+",
]


def spoiled(dice: random.Random, text: str) -> str:
    """The text with some pieces removed, doubled, put in, or cut off."""
    for _ in range(dice.randint(1, 4)):
        start = dice.randrange(len(text) + 1)
        end = min(len(text), start + dice.choice([0, 1, 3, 10, 60]))
        what = dice.random()
        if what < 0.6:
            text = text[:start] + dice.choice(PIECES) + text[end:]
        elif what < 0.8:
            text = text[:end] + text[start:]
        elif what < 0.9:
            text = text[:start]
        else:
            text = text.replace(dice.choice(["RUNNING", "State", "1", "gpu", "COMPLETED"]), dice.choice(PIECES))
    return text


class Damaged:
    """Slurm's commands, one of which answers with damage."""

    def __init__(self, dice: random.Random) -> None:
        self.texts, self.columns, self.now = dict(TEXTS), dice.random() < 0.5, 0.0
        self.kind = dice.choice(list(TEXTS))
        if self.kind == "json" and dice.random() < 0.8:
            document = json.loads(TEXTS["json"])
            first = {"jobs": document["jobs"][:2]}
            self.texts["json"] = damaged(dice, json.dumps(first).encode()).decode(errors="replace")
        else:
            self.texts[self.kind] = spoiled(dice, TEXTS[self.kind])

    def __call__(self, argv: Sequence[str], *, env: Mapping[str, str], timeout_s: float) -> CommandResult:
        kind = argv[3] if argv[1:3] == ["--oneliner", "show"] else "config" if argv[0] == "scontrol" else argv[0]
        if kind == "squeue" and any(word.startswith("--name") for word in argv):
            return CommandResult(0, "", "")
        if kind == "squeue" and not self.columns:
            if "--json" not in argv:
                return CommandResult(1, "", "squeue: error: Invalid job format specification")
            kind = "json"
        return CommandResult(0, self.texts[kind], "")

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def _check(seed: int) -> None:
    slurm = Damaged(random.Random(seed))
    client = SlurmClient(run=slurm, clock=slurm.clock, sleep=slurm.sleep)
    said = "".join(slurm.texts[kind] for kind in ("squeue", "json", "sacct", "job")).upper()
    jobs: dict[int, Job] = {}
    questions: list[Callable[[], object]] = [
        lambda: jobs.update(client.jobs([1, 4, 7, 8, 99])),
        lambda: client.details(7),
        client.nodes,
        lambda: client.show("reservation"),
        lambda: read_site_facts(client),
        lambda: client.submit(Path("script"), name="run", token="t"),
    ]
    for ask in questions:
        with contextlib.suppress(SlurmError):
            ask()
    assert 99 not in jobs, f"seed {seed}: nobody knows this job"
    for job in jobs.values():
        assert isinstance(job.nodes, list), seed
        assert not job.state.ended or any(end in said for end in ENDS), seed
    for node in (record for record in slurm.texts["node"].split("\n") if record.startswith("NodeName=")):
        for record in parse.parse_oneliner(node):
            assert parse.parse_node(record).usable is False or "State=" in node, seed


@pytest.mark.parametrize("part", range(4))
def test_damaged_answers_are_errors_of_hpcrl(part: int) -> None:
    for seed in range(40 * part, 40 * part + 40):
        _check(seed)


@pytest.mark.campaign
def test_any_damaged_answer_is_an_error_of_hpcrl() -> None:
    seed, until = time.time_ns(), time.monotonic() + 30.0
    print(f"seed {seed}")
    while time.monotonic() < until:
        _check(seed)
        seed += 1


@pytest.mark.parametrize("seed", range(40))
def test_a_state_that_is_not_known_is_not_an_end(seed: int) -> None:
    """The words of all states are spoiled by a letter: whoever reads them knows none, and says so."""
    dice = random.Random(seed)
    word = dice.choice(sorted(ENDS))
    place = dice.randrange(len(word))
    text = SACCT.replace("RUNNING", f"{word[:place]}{dice.choice('xq#~')}{word[place:]}", 1)
    jobs = Job.of(parse.parse_sacct(text))
    assert not jobs.state.ended
    assert jobs.state.value == "UNKNOWN"


@pytest.mark.parametrize(
    "job",
    [
        '{"job_id": 1e300, "job_state": 7}',
        '{"job_id": 1, "job_state": 7}',
        '{"job_id": 1, "exit_code": {"return_code": 1e999}}',
        f'{{"job_id": {"[" * 50_000}{"]" * 50_000}}}',
    ],
    ids=range(4),
)
def test_json_that_no_job_has(job: str) -> None:
    try:
        found = parse.parse_squeue_json(f'{{"jobs": [{job}]}}')
    except SlurmAnswerError:
        return
    assert [each.state.value for each in found] == ["UNKNOWN"]


def test_a_number_of_many_digits_is_none() -> None:
    digits = "9" * 5000
    (found,) = parse.parse_sacct(SACCT.replace("0:0", f"{digits}:0").replace("90", digits))
    assert (found.exit, found.time_limit_s) == (None, None)
    assert parse.parse_sacct(SACCT.replace("7+0", digits)) == []
    assert parse.parse_duration(f"{digits}:00") is None
    with pytest.raises(ValueError, match="malformed"):
        expand_hostlist(f"n[1-{digits}]")
