"""Each column of Slurm's answers goes where it belongs, and what says nothing is nothing."""

from __future__ import annotations

import json
from typing import Any

import pytest
from msgspec.structs import asdict

from hpcrl.slurm import parse
from hpcrl.slurm.records import ExitStatus, HetComponent
from hpcrl.slurm.states import JobState

HISTORY = {
    "JobID": "700+2",
    "JobIDRaw": "709",
    "State": "FAILED",
    "Reason": "NonZeroExitCode",
    "NodeList": "n[1-2]",
    "JobName": "name",
    "Comment": "comment",
    "Partition": "partition",
    "Submit": "11",
    "Start": "12",
    "End": "13",
    "TimelimitRaw": "14",
    "UID": "15",
    "ExitCode": "3:9",
}
ENDED = HetComponent(
    job_id=709,
    leader_id=700,
    offset=2,
    state=JobState.FAILED,
    source="sacct",
    name="name",
    comment="comment",
    partition="partition",
    reason="NonZeroExitCode",
    nodes="n[1-2]",
    submit_time_s=11.0,
    start_time_s=12.0,
    end_time_s=13.0,
    time_limit_s=14 * 60.0,
    user_id=15,
    exit=ExitStatus(3, 9),
)


def history(**cells: str) -> str:
    row = {**HISTORY, **cells}
    return parse.SEPARATOR.join(row[name] for name in parse.SACCT_FORMAT.split(","))


def test_every_column_of_the_history_is_read() -> None:
    assert parse.parse_sacct(history()) == [ENDED]


@pytest.mark.parametrize(
    ("cells", "changed"),
    [
        ({"JobID": "700"}, {"offset": 0}),
        # without a number of its own, that of the component is known by its place
        ({"JobIDRaw": ""}, {"job_id": 702}),
        ({"UID": ""}, {"user_id": None}),
        ({"TimelimitRaw": "UNLIMITED"}, {"time_limit_s": None}),
        ({"TimelimitRaw": "0"}, {"time_limit_s": 0.0}),
        (
            {"Start": "Unknown", "End": "None", "Submit": ""},
            dict.fromkeys(("start_time_s", "end_time_s", "submit_time_s")),
        ),
        (
            {"Reason": "None", "NodeList": "None assigned", "Comment": "(null)"},
            dict.fromkeys(("reason", "nodes", "comment"), ""),
        ),
        ({"State": "CANCELLED by 15"}, {"state": JobState.CANCELLED}),
        ({"ExitCode": "0:0"}, {"exit": ExitStatus(0, 0)}),
    ],
)
def test_cells_of_the_history(cells: dict[str, str], changed: dict[str, Any]) -> None:
    (found,) = parse.parse_sacct(history(**cells))
    assert asdict(found) == {**asdict(ENDED), **changed}


@pytest.mark.parametrize("job_id", ["700.batch", "700_3", "700+2.0", "", "x", "700+"])
def test_steps_and_arrays_of_the_history_are_left_out(job_id: str) -> None:
    assert parse.parse_sacct(history(JobID=job_id)) == []
    assert parse.parse_sacct(f"{history(JobID=job_id)}\n{history()}") == [ENDED]


def queue(**cells: str) -> str:
    row = {"JobID": "7", "HetJobID": "N/A", "HetJobOffset": "N/A", "State": "RUNNING", **cells}
    names = [item.partition(":")[0] for item in parse.SQUEUE_FORMAT.split(",")]
    return "".join(f"{row.get(name, 'N/A'):<24}{parse.SEPARATOR}" for name in names)


def test_columns_of_the_queue_are_wide_enough() -> None:
    """What is cut would be read as something else."""
    widths = dict(item.removesuffix(parse.SEPARATOR).split(":") for item in parse.SQUEUE_FORMAT.split(","))
    needed = {"JobID": 10, "HetJobID": 10, "State": 20, "Comment": 128, "NodeList": 2048, "UserID": 10, "exit_code": 10}
    assert all(int(widths[name]) > width for name, width in needed.items())


@pytest.mark.parametrize(("length", "known"), [(4095, True), (4096, False)])
def test_a_list_of_nodes_that_was_cut_is_not_read(length: int, known: bool) -> None:
    nodes = "n" * length
    (found,) = parse.parse_squeue(queue(NodeList=nodes))
    assert found.nodes == (nodes if known else "")


def test_a_place_in_a_job_counts_only_where_it_is_one_of_several() -> None:
    (plain,) = parse.parse_squeue(queue(HetJobOffset="3"))
    assert (plain.leader_id, plain.offset) == (7, 0)
    (part,) = parse.parse_squeue(queue(HetJobID="5", HetJobOffset="2"))
    assert (part.leader_id, part.offset) == (5, 2)


def from_json(**job: Any) -> HetComponent:
    (found,) = parse.parse_squeue_json(json.dumps({"jobs": [{"job_id": 7, **job}]}))
    return found


@pytest.mark.parametrize(
    ("job", "end_s"),
    [
        ({"job_state": "RUNNING", "time_limit": 5}, 900.0),
        # Slurm says of a job without a limit that it ends in a year
        ({"job_state": "RUNNING"}, None),
        ({"job_state": "COMPLETED"}, 900.0),
    ],
)
def test_the_end_of_a_job_without_a_limit_is_not_known_while_it_runs(job: dict[str, Any], end_s: float | None) -> None:
    assert from_json(end_time=900, **job).end_time_s == end_s


def test_an_array_in_json_is_left_out() -> None:
    text = json.dumps({"jobs": [{"job_id": 7, "array_job_id": 5}, {"job_id": 8, "array_job_id": 0}]})
    assert [found.job_id for found in parse.parse_squeue_json(text)] == [8]


def test_comments_in_json_may_be_nested() -> None:
    assert from_json(comment={"job": "hpcrl:t", "system": "x"}).comment == "hpcrl:t"
    assert from_json(comment=["x"]).comment == ""


@pytest.mark.parametrize(
    ("value", "restarts"), [(0, 0), (2, 2), (True, None), ("2", None), ({"set": False, "number": 2}, None)]
)
def test_numbers_in_json(value: Any, restarts: int | None) -> None:
    assert from_json(restart_cnt=value).restarts == restarts


def test_the_first_value_of_a_setting_counts() -> None:
    found = parse.parse_config("A = 1\nB=(null)\nno setting\n  C  =  x = y  \nA = 2\n")
    assert found == {"A": "1", "B": "", "C": "x = y"}


def test_a_node_that_says_little() -> None:
    (record,) = parse.parse_oneliner("NodeName=n1")
    node = parse.parse_node(record)
    assert (node.name, node.address, node.cpus, node.memory_mib, node.gres) == ("n1", "n1", 0, 0, "")
    assert (node.partitions, node.reason, node.daemon_since_s, node.states) == ((), "", None, frozenset())


def test_the_last_start_of_several_components_is_the_start() -> None:
    text = "sbatch: Job 1 to start at 100 using 8\nsbatch: Job 2 to start at 300 using 8\nsbatch: done\n"
    found = parse.parse_start_estimate(text)
    assert found.start_time_s == 300.0
    assert found.text == "Job 1 to start at 100 using 8; Job 2 to start at 300 using 8; done"
    assert parse.parse_start_estimate("nothing").start_time_s is None


@pytest.mark.parametrize(
    ("text", "version"), [("slurm-wlm 22.05.8", (22, 5)), ("slurm 23.11.10-1", (23, 11)), ("25.5", (25, 5))]
)
def test_versions(text: str, version: tuple[int, int]) -> None:
    assert parse.parse_version(text) == version
