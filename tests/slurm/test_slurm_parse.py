"""What Slurm says, in the shapes of several versions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from hpcrl.sites.site_facts import read_site_facts
from hpcrl.slurm import parse
from hpcrl.slurm.errors import SlurmAnswerError
from hpcrl.slurm.hostlist import expand_hostlist
from hpcrl.slurm.records import ExitStatus, HetComponent, Job
from hpcrl.slurm.states import JobState

#: a heterogeneous job as `squeue --json` of 22.05 says it (captured, shortened)
JSON_2205: dict[str, Any] = {
    "job_id": 2,
    "het_job_id": 1,
    "het_job_id_set": "1-2",
    "het_job_offset": 1,
    "array_job_id": 0,
    "job_state": "FAILED",
    "state_reason": "NonZeroExitCode",
    "name": "foo",
    "comment": "hpcrl:x1",
    "partition": "gpu",
    "nodes": "dev-[003-005]",
    "submit_time": 1795265370,
    "start_time": 1795265371,
    "end_time": 1795265671,
    "time_limit": 5,
    "restart_cnt": 1,
    "exit_code": 768,
    "user_id": 1001,
}


def number(value: int) -> dict[str, Any]:
    return {"set": True, "infinite": False, "number": value}


#: the same by the shapes of 23.11 and later: lists of states, numbers that say whether they are set
JSON_2311: dict[str, Any] = JSON_2205 | {
    "het_job_id": number(1),
    "het_job_offset": number(1),
    "array_job_id": number(0),
    "job_state": ["FAILED"],
    "submit_time": number(1795265370),
    "start_time": number(1795265371),
    "end_time": number(1795265671),
    "time_limit": number(5),
    "exit_code": {
        "status": ["ERROR"],
        "return_code": number(3),
        "signal": {"id": {"set": False, "infinite": False, "number": 0}, "name": ""},
    },
}

EXPECTED = HetComponent(
    job_id=2,
    leader_id=1,
    offset=1,
    state=JobState.FAILED,
    source="squeue",
    name="foo",
    comment="hpcrl:x1",
    partition="gpu",
    reason="NonZeroExitCode",
    nodes="dev-[003-005]",
    submit_time_s=1795265370,
    start_time_s=1795265371,
    end_time_s=1795265671,
    time_limit_s=300,
    restarts=1,
    user_id=1001,
    exit=ExitStatus(3, 0),
)


def row(*cells: str) -> str:
    """A line of `squeue --Format`: padded cells, a separator after each."""
    return "".join(f"{cell:<24}{parse.SEPARATOR}" for cell in cells)


SQUEUE = row(
    *("2", "1", "1", "FAILED", "NonZeroExitCode", "dev-[003-005]", "foo", "hpcrl:x1", "gpu"),
    *("1795265370", "1795265371", "1795265671", "5:00", "1", "768", "1001"),
)


@pytest.mark.parametrize("job", [JSON_2205, JSON_2311], ids=["22.05", "23.11"])
def test_json_shapes(job: dict[str, Any]) -> None:
    assert parse.parse_squeue_json(json.dumps({"jobs": [job]})) == [EXPECTED]


def test_columns() -> None:
    assert parse.parse_squeue(f"{SQUEUE}\n") == [EXPECTED]


@pytest.mark.parametrize(
    "nothing", [None, {}, "", 0, {"set": False, "infinite": False, "number": 0}, {"infinite": True}]
)
def test_nothing_in_json(nothing: Any) -> None:
    keys = ("het_job_id", "het_job_offset", "array_job_id", "comment", "submit_time", "start_time", "end_time", "nodes")
    job = JSON_2311 | dict.fromkeys(keys, nothing)
    (found,) = parse.parse_squeue_json(json.dumps({"jobs": [job]}))
    assert (found.job_id, found.leader_id, found.offset) == (2, 2, 0)
    assert (found.comment, found.nodes, found.start_time_s) == ("", "", None)


@pytest.mark.parametrize("missing", sorted(set(JSON_2205) - {"job_id"}))
def test_absent_keys_in_json(missing: str) -> None:
    job = {key: value for key, value in JSON_2205.items() if key != missing}
    (found,) = parse.parse_squeue_json(json.dumps({"jobs": [job]}))
    assert found.job_id == 2
    assert (found.state is JobState.UNKNOWN) == (missing == "job_state")


def test_unlimited_time_in_json() -> None:
    job = JSON_2311 | {"time_limit": {"set": True, "infinite": True, "number": 0}}
    (found,) = parse.parse_squeue_json(json.dumps({"jobs": [job]}))
    assert found.time_limit_s is None


def test_killed_by_a_signal() -> None:
    code = {"status": ["SIGNALED"], "return_code": number(0), "signal": {"id": number(9), "name": "KILL"}}
    for exit_code, expected in ((code, ExitStatus(0, 9)), (9, ExitStatus(0, 9)), (number(256), ExitStatus(1, 0))):
        (found,) = parse.parse_squeue_json(json.dumps({"jobs": [JSON_2205 | {"exit_code": exit_code}]}))
        assert found.exit == expected


@pytest.mark.parametrize(
    "text", ["", "[]", "slurm_load_jobs error", '{"jobs": [{}]}', '{"jobs": [3]}', '{"x": 1}', "\x00"]
)
def test_unreadable_json(text: str) -> None:
    with pytest.raises(SlurmAnswerError):
        parse.parse_squeue_json(text)


def test_no_jobs_in_json() -> None:
    assert parse.parse_squeue_json('{"jobs": null}') == []
    assert parse.parse_squeue_json('{"jobs": []}') == []


def test_plain_job_and_others_rows() -> None:
    plain = row(
        "7",
        "N/A",
        "N/A",
        "PENDING",
        "Resources",
        "",
        "a | b",
        "(null)",
        "gpu",
        "1",
        "N/A",
        "N/A",
        "UNLIMITED",
        "0",
        "0",
        "0",
    )
    array = row("9_[1-4]", *["N/A"] * 15)
    (found,) = parse.parse_squeue(f"{plain}\nsomebody's name\nwith breaks\n{array}\n")
    assert (found.job_id, found.leader_id, found.offset, found.name) == (7, 7, 0, "a | b")
    assert (found.nodes, found.comment, found.start_time_s, found.time_limit_s) == ("", "", None, None)


def test_sacct() -> None:
    def line(*cells: str) -> str:
        return parse.SEPARATOR.join(cells)

    text = "\n".join(
        [
            line(
                "700+0",
                "700",
                "CANCELLED by 0",
                "None",
                "n1",
                "j",
                "hpcrl:t",
                "p",
                "10",
                "20",
                "30",
                "90",
                "1001",
                "0:15",
            ),
            # the time before the job lost a node and went on
            line("700+1", "701", "RESIZING", *[""] * 11),
            line(
                "700+1", "701", "NODE_FAIL", "", "n[2-3]", "j", "", "p", "10", "Unknown", "None", "UNLIMITED", "", "1:0"
            ),
            line("700+0.batch", "700.batch", "CANCELLED", *[""] * 11),
            line("8_1", "9", "COMPLETED", *[""] * 11),
            "",
        ]
    )
    job = Job.of(parse.parse_sacct(text))
    assert (job.job_id, job.state) == (700, JobState.NODE_FAIL)
    first, second = job.components
    assert (first.state, first.exit, first.time_limit_s, first.comment) == (
        JobState.CANCELLED,
        ExitStatus(0, 15),
        5400,
        "hpcrl:t",
    )
    assert (first.user_id, second.user_id) == (1001, None)
    assert (second.job_id, second.start_time_s, second.end_time_s, second.time_limit_s) == (701, None, None, None)
    assert job.nodes == ["n1", "n2", "n3"]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("5:00", 300), ("1:00:00", 3600), ("1-00:00:00", 86400), ("UNLIMITED", None), ("INVALID", None), ("", None)],
)
def test_durations(text: str, seconds: float | None) -> None:
    cells = [cell.strip() for cell in SQUEUE.split(parse.SEPARATOR)][:-1]
    cells[12] = text
    assert parse.parse_squeue(row(*cells))[0].time_limit_s == seconds


def test_nodes_of_scontrol() -> None:
    text = (
        "NodeName=dev-001 Arch=x86_64 CPUTot=96 Gres=gpu:h200:8 NodeAddr=127.20.0.1 NodeHostName=localhost "
        "OS=Linux 6.1 #1 SMP @0  RealMemory=2000000 State=DOWN*+DRAIN Partitions=gpu,urgent  "
        "Reason=not responding, see ticket [root@2026-11-21T12:49:29]\n"
        "NodeName=dev-002 State=IDLE Gres=(null)\n"
    )
    first, second = map(parse.parse_node, parse.parse_oneliner(text))
    assert first.states == {"DOWN", "NOT_RESPONDING", "DRAIN"}
    assert not first.usable
    assert (first.address, first.cpus, first.memory_mib, first.gres) == ("127.20.0.1", 96, 2_000_000, "gpu:h200:8")
    assert first.partitions == ("gpu", "urgent")
    assert first.reason == "not responding, see ticket [root@2026-11-21T12:49:29]"
    assert second.usable
    assert (second.address, second.gres) == ("dev-002", "")


#: state, whether jobs can run there by and by, whether what ran there is lost: sinfo(1), and real Slurm 22.05
STATES = [
    ("IDLE", True, False),
    ("MIXED", True, False),
    ("ALLOCATED", True, False),
    ("idle", True, False),
    ("mix-", True, False),
    ("IDLE+PLANNED", True, False),
    ("ALLOCATED+COMPLETING", True, False),
    ("IDLE+MAINTENANCE", True, False),
    ("IDLE$", True, False),
    ("IDLE+RESERVED", True, False),
    ("RESERVED", True, False),
    ("IDLE+CLOUD", True, False),
    ("IDLE+CLOUD~", True, False),
    ("idle~", True, False),
    ("IDLE+POWERED_DOWN", True, False),
    ("IDLE+CLOUD+NOT_RESPONDING+POWERED_DOWN", True, False),
    ("IDLE+CLOUD+NOT_RESPONDING+POWERING_UP", True, False),
    ("MIXED#*", True, False),
    ("ALLOCATED+CLOUD+POWERING_UP", True, False),
    ("IDLE+POWERING_DOWN", True, False),
    ("IDLE%", True, False),
    ("MIXED!", True, False),
    ("IDLE+DYNAMIC_NORM", True, False),
    ("IDLE*", False, True),
    ("MIXED+PLANNED+NOT_RESPONDING", False, True),
    ("DOWN", False, True),
    ("DOWN*", False, True),
    ("down~", False, True),
    ("DOWN+CLOUD+POWERED_DOWN+NOT_RESPONDING", False, True),
    ("DOWN+MAINTENANCE", False, True),
    ("FAIL", False, True),
    ("FAILING", False, True),
    ("IDLE+DRAIN", False, False),
    ("MIXED+DRAIN", False, False),
    ("DRAINING", False, False),
    ("drng", False, False),
    ("DRAINED", False, False),
    ("IDLE+CLOUD+DRAIN+POWERED_DOWN", False, False),
    ("IDLE+DRAIN+MAINTENANCE", False, False),
    ("IDLE+INVALID_REG", False, False),
    ("inval", False, False),
    ("ALLOCATED@", False, False),
    ("FUTURE", False, False),
    ("UNKNOWN", False, False),
    ("", False, False),
]


@pytest.mark.parametrize(("state", "usable", "down"), STATES)
def test_every_reader_of_node_states_says_the_same(state: str, usable: bool, down: bool) -> None:
    record = {"NodeName": "n", "State": state, "Partitions": "gpu", "CPUTot": "8", "RealMemory": "1", "Gres": "gpu:8"}

    class Site:
        def config(self) -> dict[str, str]:
            return {"SLURM_VERSION": "22.05.8"}

        def show(self, kind: str, name: str | None = None) -> list[dict[str, str]]:
            return [record] if kind == "node" else [{"PartitionName": "gpu", "State": "UP"}]

    node = parse.parse_node(record)
    assert (node.usable, node.down) == (usable, down)
    assert read_site_facts(Site()).partitions[0].usable == usable


def test_other_answers() -> None:
    assert parse.parse_version("slurm-wlm 22.05.8\n") == (22, 5)
    assert parse.parse_version("slurm 25.11.0-0rc1") == (25, 11)
    with pytest.raises(SlurmAnswerError):
        parse.parse_version("sbatch: command line tool")
    config = parse.parse_config(
        "Configuration data as of 2026\nAccountingStorageType   = (null)\nA = b = c\n\nSlurmctld(primary) at vm is UP\n"
    )
    assert config == {"AccountingStorageType": "", "A": "b = c"}
    estimate = parse.parse_start_estimate(
        "sbatch: Job 3 to start at 1795265375 using 480 processors on nodes dev-[006-008] in partition gpu\n"
    )
    assert estimate.start_time_s == 1795265375
    assert estimate.text.startswith("Job 3")
    assert parse.parse_start_estimate("nothing").start_time_s is None


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("h200-[001-003,007]", ["h200-001", "h200-002", "h200-003", "h200-007"]),
        ("a1,b[2-3],c", ["a1", "b2", "b3", "c"]),
        ("r[1-2]n[9-10]", ["r1n9", "r1n10", "r2n9", "r2n10"]),
        ("n[08-11]x", ["n08x", "n09x", "n10x", "n11x"]),
        ("n[1-2],", ["n1", "n2"]),
        ("(null)", []),
        ("", []),
    ],
)
def test_hostlists(text: str, names: list[str]) -> None:
    assert expand_hostlist(text) == names


MALFORMED = ["n[1-2", "n1-2]", "n[a-b]", "n[[1]]", "n[1-]", "n[3-1]", "n[1-70000]", "n[1-99999999999999999999]"]
MALFORMED += ["n[1-60000]m[1-60000]o[1-60000]"]


@pytest.mark.parametrize("text", MALFORMED)
def test_malformed_hostlists(text: str) -> None:
    with pytest.raises(ValueError, match="malformed"):
        expand_hostlist(text)


# -- captured: facts/README.md says of what -------------------------------------------------------------------------

CAPTURED = pytest.mark.parametrize("directory", ["slurm-24.11", "slurm-25.05"])
FACTS = Path(__file__).parent / "facts"


@CAPTURED
def test_newer_slurms_say_the_same_in_json_and_in_columns(directory: str) -> None:
    text = (FACTS / directory / "squeue.json").read_text()
    jobs = {job["job_id"]: job for job in json.loads(text)["jobs"]}
    # the shapes that are new since 23.11: structured nodes, lists of states and flags
    assert jobs[1]["job_resources"]["nodes"]["allocation"][0]["name"] == "cap-001"
    assert jobs[6]["job_state"] == ["CANCELLED", "COMPLETING"]
    by_json = {component.job_id: component for component in parse.parse_squeue_json(text)}
    columns = parse.parse_squeue((FACTS / directory / "squeue.txt").read_text())
    by_columns = {component.job_id: component for component in columns}
    assert sorted(by_json) == list(range(1, 9))
    for job_id, component in by_json.items():
        # of the reason JSON has the word, columns sometimes a sentence
        assert component == replace(by_columns[job_id], reason=component.reason)
    states = {job_id: component.state for job_id, component in by_json.items()}
    assert states == {
        1: JobState.RUNNING,
        2: JobState.RUNNING,
        3: JobState.RUNNING,
        4: JobState.FAILED,
        5: JobState.FAILED,
        # their nodes are not free yet, and they are not over
        6: JobState.COMPLETING,
        7: JobState.COMPLETING,
        8: JobState.PENDING,
    }
    assert [by_json[job_id].exit for job_id in (4, 5)] == [ExitStatus(3, 0), ExitStatus(0, 9)]
    assert [(by_json[job_id].leader_id, by_json[job_id].offset) for job_id in (1, 2)] == [(1, 0), (1, 1)]
    assert by_json[8].reason == "Resources"


@CAPTURED
def test_nodes_of_newer_slurms(directory: str) -> None:
    nodes = [parse.parse_node(r) for r in parse.parse_oneliner((FACTS / directory / "nodes.txt").read_text())]
    assert [node.name for node in nodes] == [f"cap-00{i}" for i in range(1, 7)]
    # marks behind the state have become words
    assert {"DRAIN", "IDLE"} <= nodes[5].states
    assert nodes[5].reason.startswith("bad fan, ask 'ops'")
    assert (nodes[0].cpus, nodes[0].memory_mib, nodes[0].gres) == (4, 2000, "gpu:h200:2")
    assert nodes[0].address.startswith("127.")
    assert nodes[0].daemon_since_s is not None
    config = parse.parse_config((FACTS / directory / "config.txt").read_text())
    assert config["AccountingStorageType"] == ""  # accounting_storage/none until 23.02
    assert parse.parse_version(config["SLURM_VERSION"]) == parse.parse_version(directory)
