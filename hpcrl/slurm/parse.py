"""Reading what Slurm's commands say, from 22.05 to 25.11.

What drifts between versions: in JSON a state is a word or (23.11) a list; a number is plain or
``{"set", "infinite", "number"}``; an exit code is a wait status or a nest of those; nothing is ``null``, ``{}``,
``""`` or absent. Columns are stable, which is why the client asks for columns first.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from hpcrl.slurm.errors import SlurmAnswerError
from hpcrl.slurm.node_states import parse_node_state
from hpcrl.slurm.records import ExitStatus, HetComponent, Node, StartEstimate
from hpcrl.slurm.states import JobState, parse_state

SEPARATOR = "\x1f"
"""Separator of columns: a character that does not occur in names and comments."""

_SQUEUE_COLUMNS = {
    # name for --Format: width. Longer values are cut, so widths are generous
    "JobID": 20,
    "HetJobID": 20,
    "HetJobOffset": 12,
    "State": 24,
    "Reason": 128,
    "NodeList": 4096,
    "Name": 256,
    "Comment": 512,
    "Partition": 256,
    "SubmitTime": 24,
    "StartTime": 24,
    "EndTime": 24,
    "TimeLimit": 24,
    "RestartCnt": 12,
    "exit_code": 16,
    "UserID": 16,
}
SQUEUE_FORMAT = ",".join(f"{name}:{width}{SEPARATOR}" for name, width in _SQUEUE_COLUMNS.items())
_SACCT_COLUMNS = (
    "JobID",
    "JobIDRaw",
    "State",
    "Reason",
    "NodeList",
    "JobName",
    "Comment",
    "Partition",
    "Submit",
    "Start",
    "End",
    "TimelimitRaw",
    "UID",
    "ExitCode",
)
SACCT_FORMAT = ",".join(_SACCT_COLUMNS)

_NOTHING = frozenset({"", "N/A", "NONE", "(NULL)", "UNKNOWN", "INVALID", "NOT_SET", "NONE ASSIGNED"})


# -- columns -----------------------------------------------------------------------------------------------------


def parse_squeue(text: str) -> list[HetComponent]:
    """Return the rows of ``squeue --noheader --Format`` with `SQUEUE_FORMAT`; job arrays are left out."""
    return [c for row in _rows(text, tuple(_SQUEUE_COLUMNS)) if (c := _squeue_component(row)) is not None]


def _squeue_component(row: Mapping[str, str]) -> HetComponent | None:
    job_id = _int(row["JobID"])
    if job_id is None:
        return None
    leader = _int(row["HetJobID"])
    return HetComponent(
        job_id=job_id,
        leader_id=leader or job_id,
        offset=_int(row["HetJobOffset"]) or 0 if leader else 0,
        state=parse_state(row["State"]),
        source="squeue",
        name=row["Name"],
        comment=_word(row["Comment"]),
        partition=row["Partition"],
        reason=_word(row["Reason"]),
        # a truncated list could name other nodes
        nodes=_word(row["NodeList"]) if len(row["NodeList"]) < _SQUEUE_COLUMNS["NodeList"] else "",
        submit_time_s=_time(row["SubmitTime"]),
        start_time_s=_time(row["StartTime"]),
        end_time_s=_time(row["EndTime"]),
        time_limit_s=parse_duration(row["TimeLimit"]),
        restarts=_int(row["RestartCnt"]),
        user_id=_int(row["UserID"]),
        exit=_exit(row["exit_code"]),
    )


def parse_sacct(text: str) -> list[HetComponent]:
    """Return rows of ``sacct --parsable2 --noheader --allocations`` with `SACCT_FORMAT`, without steps and arrays.

    A job that lost a node (``--no-kill``) has a row for the time before, which says nothing about its end.
    """
    rows = [row for row in _rows(text, _SACCT_COLUMNS) if not row["State"].startswith("RESIZING")]
    return [c for row in rows if (c := _sacct_component(row)) is not None]


def _sacct_component(row: Mapping[str, str]) -> HetComponent | None:
    first, plus, second = row["JobID"].partition("+")
    leader, offset = _int(first), _int(second) if plus else 0
    if leader is None or offset is None:
        return None
    minutes = _int(row["TimelimitRaw"])
    return HetComponent(
        job_id=_int(row["JobIDRaw"]) or leader + offset,
        leader_id=leader,
        offset=offset,
        state=parse_state(row["State"]),
        source="sacct",
        name=row["JobName"],
        comment=_word(row["Comment"]),
        partition=row["Partition"],
        reason=_word(row["Reason"]),
        nodes=_word(row["NodeList"]),
        submit_time_s=_time(row["Submit"]),
        start_time_s=_time(row["Start"]),
        end_time_s=_time(row["End"]),
        time_limit_s=None if minutes is None else 60.0 * minutes,
        user_id=_int(row["UID"]),
        exit=_exit(row["ExitCode"]),
    )


def _rows(text: str, columns: tuple[str, ...]) -> Iterable[dict[str, str]]:
    for line in text.split("\n"):
        cells = [cell.strip() for cell in line.split(SEPARATOR)]
        # squeue ends each row with a separator, sacct does not. A row of another shape (a job name with a line break)
        # is ignored: its job stays unknown
        if len(cells) - (cells[-1] == "") == len(columns) or len(cells) == len(columns):
            yield dict(zip(columns, cells, strict=False))


# -- JSON --------------------------------------------------------------------------------------------------------


def parse_squeue_json(text: str) -> list[HetComponent]:
    """Return the jobs of ``squeue --json``, any data version.

    Raises
    ------
    SlurmAnswerError
        The text is not JSON, or has no list of jobs.
    """
    try:
        jobs = msgspec.json.decode(text)["jobs"]
        return [_json_component(job) for job in jobs or () if not _number(job.get("array_job_id"))]
    # this includes numbers too long for an integer, excessive nesting, and half of a surrogate pair
    except (
        msgspec.DecodeError,
        KeyError,
        TypeError,
        AttributeError,
        ValueError,
        OverflowError,
        RecursionError,
    ) as error:
        raise SlurmAnswerError(f"squeue --json: cannot read the answer ({error}): {text[:200]!r}") from error


def _json_component(job: Mapping[str, Any]) -> HetComponent:
    job_id = _number(job["job_id"])
    if job_id is None:
        raise KeyError("job_id")
    leader = _number(job.get("het_job_id"))
    minutes = _number(job.get("time_limit"))
    restarts = _number(job.get("restart_cnt"))
    state = parse_state(job.get("job_state"))
    # for a running job without a time limit Slurm reports an end in a year
    has_end = minutes is not None or state is not JobState.RUNNING
    user_id = _number(job.get("user_id"))
    return HetComponent(
        job_id=int(job_id),
        leader_id=int(leader or job_id),
        offset=int(_number(job.get("het_job_offset")) or 0) if leader else 0,
        state=state,
        source="squeue",
        name=_text(job.get("name")),
        comment=_text(job.get("comment")),
        partition=_text(job.get("partition")),
        reason=_word(_text(job.get("state_reason"))),
        nodes=_word(_text(job.get("nodes"))),
        submit_time_s=_number(job.get("submit_time")) or None,
        start_time_s=_number(job.get("start_time")) or None,
        end_time_s=(_number(job.get("end_time")) or None) if has_end else None,
        time_limit_s=None if minutes is None else 60.0 * minutes,
        restarts=None if restarts is None else int(restarts),
        user_id=None if user_id is None else int(user_id),
        exit=_json_exit(job.get("exit_code")),
    )


def _number(value: Any) -> float | None:
    """Return a plain number or ``{"set", "infinite", "number"}``; None for unset, infinite and everything else."""
    if isinstance(value, Mapping):
        if value.get("infinite") or not value.get("set", True):
            return None
        return _number(value.get("number"))
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value


def _text(value: Any) -> str:
    """Return a string; sacct and some versions nest comments as ``{"job": …}``."""
    if isinstance(value, Mapping):
        value = value.get("job")
    return value if isinstance(value, str) else ""


def _json_exit(value: Any) -> ExitStatus | None:
    if isinstance(value, Mapping) and "return_code" in value:
        signal = value.get("signal")
        number = signal.get("id", signal.get("signal_id")) if isinstance(signal, Mapping) else signal
        return ExitStatus(int(_number(value["return_code"]) or 0), int(_number(number) or 0))
    status = _number(value)
    return None if status is None else _wait_status(int(status))


# -- scontrol ----------------------------------------------------------------------------------------------------


_RECORD = re.compile(r"(JobId|NodeName|PartitionName|ReservationName|StepId|FrontendName|LicenseName)=")
"""Beginning of a line that is a record."""
_KEY = re.compile(r"(?:^| +)([A-Z][A-Za-z0-9_/:]*)=")
_BEHIND_NAME = re.compile(r" +(?=UserId=\S+\(\d+\) +GroupId=\S+\(\d+\) +MCS_label=)")
"""Text after the name of a job. A name is free text that may look like keys and values: the last match counts."""
_NODE_REASON = re.compile(r" +Reason=(.*\[[^\s\[\]]+@[^\s\[\]]+\])")
"""Reason why a node is out of use, in free text, up to the user and time of the entry."""


def parse_oneliner(text: str) -> list[dict[str, str]]:
    """Return the records of ``scontrol --oneliner show …``: one a line, ``Key=Value`` with spaces allowed in values.

    Reasons, comments and names are free text, which may look like a key or like a new line. The first value of a key
    counts, because free text, except for the name of a job, follows the keys that are read here. A line that does not
    begin a record continues the line before.
    """
    lines: list[str] = []
    for line in text.split("\n"):
        if _RECORD.match(line):
            lines.append(line)
        elif lines:
            lines[-1] += f" {line}"
    return [_record(line.strip()) for line in lines]


def _record(line: str) -> dict[str, str]:
    record: dict[str, str] = {}
    if (name := re.search(r" JobName=", line)) and (ways := list(_BEHIND_NAME.finditer(line, name.end()))):
        record["JobName"] = line[name.end() : ways[-1].start()]
        line = line[: name.start()] + line[ways[-1].start() :]
    elif line.startswith("NodeName=") and (reason := _NODE_REASON.search(line)):
        record["Reason"] = reason[1]
        line = line[: reason.start()] + line[reason.end() :]
    keys = list(_KEY.finditer(line))
    ends = [*(key.start() for key in keys[1:]), len(line)]
    for key, end in zip(keys, ends, strict=True):
        record.setdefault(key[1], line[key.end() : end])
    return record


def parse_config(text: str) -> dict[str, str]:
    """Return the settings of ``scontrol show config``; ``(null)`` becomes "". The first value of a key counts."""
    config: dict[str, str] = {}
    for line in text.splitlines():
        key, equals, value = line.partition("=")
        if equals:
            config.setdefault(key.strip(), "" if value.strip() == "(null)" else value.strip())
    return config


def parse_node(record: Mapping[str, str]) -> Node:
    """Return a node from its record of ``scontrol --oneliner show node``."""
    return Node(
        name=record["NodeName"],
        address=record.get("NodeAddr", record["NodeName"]),
        states=parse_node_state(record.get("State", "")),
        cpus=_int(record.get("CPUTot", "")) or 0,
        memory_mib=_int(record.get("RealMemory", "")) or 0,
        gres=_word(record.get("Gres", "")),
        partitions=tuple(part for part in record.get("Partitions", "").split(",") if part),
        reason=_word(record.get("Reason", "")),
        daemon_since_s=_time(record.get("SlurmdStartTime", "")),
    )


def parse_start_estimate(text: str) -> StartEstimate:
    """Return the estimate in the lines of ``sbatch --test-only``.

    The time is that of the last line; there may be one line per component.
    """
    times = re.findall(r"to start at (\S+)", text)
    words = "; ".join(line.removeprefix("sbatch: ") for line in text.strip().splitlines())
    return StartEstimate(_time(times[-1]) if times else None, words)


def parse_version(text: str) -> tuple[int, int]:
    """Return the major version of ``sbatch -V``: ``slurm-wlm 22.05.8`` is (22, 5).

    Raises
    ------
    SlurmAnswerError
        The text contains no version.
    """
    match = re.search(r"([0-9]{1,9})\.([0-9]{1,9})", text)
    if match is None:
        raise SlurmAnswerError(f"no version in {text!r}")
    return int(match.group(1)), int(match.group(2))


# -- cells -------------------------------------------------------------------------------------------------------


def _word(text: str) -> str:
    return "" if text.upper() in _NOTHING else text


_DIGITS = re.compile(r"[0-9]{1,18}")
"""A number of Slurm. A longer one is invalid, and Python refuses to read very long ones."""


def _int(text: str) -> int | None:
    return int(text) if _DIGITS.fullmatch(text) else None


def _time(text: str) -> float | None:
    """Return seconds since the epoch (requested by ``SLURM_TIME_FORMAT=%s``)."""
    return float(seconds) if (seconds := _int(text)) else None


def parse_duration(text: str) -> float | None:
    """Return ``[days-]hours:minutes:seconds`` or ``minutes:seconds`` in seconds; None for no limit."""
    match = re.fullmatch(r"(?:([0-9]{1,9})-)?(?:([0-9]{1,9}):)?([0-9]{1,9}):([0-9]{1,9})", text)
    if match is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def _exit(text: str) -> ExitStatus | None:
    """Return the exit status in ``code:signal`` or in a wait status."""
    code, colon, signal = text.partition(":")
    if (number := _int(code)) is None:
        return None
    return ExitStatus(number, _int(signal) or 0) if colon else _wait_status(number)


def _wait_status(status: int) -> ExitStatus:
    return ExitStatus(status >> 8 & 0xFF, status & 0x7F)
