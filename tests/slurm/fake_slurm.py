"""Slurm's commands as methods of an object; tests/devcluster has the real ones."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence

from hpcrl.slurm import parse
from hpcrl.slurm.client import SlurmClient
from hpcrl.slurm.command import CommandResult


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
