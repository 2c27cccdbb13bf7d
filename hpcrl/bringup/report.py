"""The report of a first run: what was tried, how long it took, what was found, and what comes next."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from hpcrl import __version__
from hpcrl.bringup.records import StageRecord, StageStatus
from hpcrl.bringup.stage import BringupStage, SiteBench
from hpcrl.processes import procfs
from hpcrl.storage.files import atomic_write, write_json

REPORT_FORMAT = 1
_TEXT, _JSON = "report.md", "report.json"


def write_first_run_report(bench: SiteBench, stages: Sequence[BringupStage]) -> Path:
    """Write the report into the directory of the first run; returns the file for people."""
    document = report_document(bench, stages)
    directory = bench.request.directory
    write_json(directory / _JSON, document)
    atomic_write(directory / _TEXT, ("\n".join(_lines(document)) + "\n").encode())
    return directory / _TEXT


def report_document(bench: SiteBench, stages: Sequence[BringupStage]) -> dict[str, Any]:
    """Return the report as a JSON document."""
    rows = []
    for stage in stages:
        record = bench.state.stages.get(stage.name)
        rows.append({"name": stage.name, "what": stage.what} | (_row(record) if record else {"status": "not begun"}))
    left_out = [row["name"] for row in rows if row["status"] == StageStatus.LEFT_OUT]
    passed = all(row["status"] in (StageStatus.OK, StageStatus.WARNING, StageStatus.LEFT_OUT) for row in rows)
    return {
        "format_version": REPORT_FORMAT,
        "cluster": bench.request.cluster,
        "result": "passed" if passed else "not passed",
        "left_out": left_out,
        "written_at": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "versions": {
            "hpcrl": __version__,
            "python": platform.python_version(),
            "slurm": bench.facts("check").get("slurm", ""),
            "system": platform.platform(),
        },
        "host": procfs.hostname(),
        "profile": bench.facts("init").get("profile", ""),
        "profile_sha256": next((row["profile"] for row in reversed(rows) if row.get("profile")), ""),
        "stages": rows,
        "next": _next(bench, rows),
    }


def _row(record: StageRecord) -> dict[str, Any]:
    return {name: value for name, value in msgspec.to_builtins(record).items() if name != "digest"}


def _next(bench: SiteBench, rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return the commands that come next."""
    for row in rows:
        if row["status"] in ("not begun", StageStatus.INTERRUPTED):
            return [bench.request.way_on]
        if row["status"] == StageStatus.STOPPED:
            return list(row["ways_on"])
    return [f"hpcrl submit quickstart -c {bench.request.cluster} --follow", "hpcrl recipe ls"]


def _lines(document: dict[str, Any]) -> Iterator[str]:
    """Return the document as lines of Markdown."""
    yield f"# First run on {document['cluster']}: {document['result']}"
    yield ""
    if document["left_out"]:
        yield f"Not checked, because of `--from`: {', '.join(document['left_out'])}."
        yield ""
    versions = ", ".join(f"{name} {value}" for name, value in document["versions"].items() if value)
    yield f"- written: {document['written_at']}, on {document['host']}"
    yield f"- versions: {versions}"
    yield f"- profile: {document['profile'] or 'not read'}, SHA-256 {document['profile_sha256'] or 'not known'}"
    yield ""
    yield "| stage | result | seconds | what was found |"
    yield "| --- | --- | --- | --- |"
    for row in document["stages"]:
        seconds = f"{row['seconds']:.1f}" if row.get("seconds") else ""
        yield f"| {row['name']} | {row['status']} | {seconds} | {_cell(row.get('summary', row['what']))} |"
    for row in document["stages"]:
        yield from _details(row)
    yield ""
    yield "## Next"
    yield ""
    for command in document["next"]:
        yield f"    {command}"


def _details(row: dict[str, Any]) -> Iterator[str]:
    """Return what a stage found, in lines."""
    if not any(row.get(name) for name in ("message", "warnings", "facts")):
        return
    yield ""
    yield f"## {row['name']}"
    yield ""
    if row.get("message"):
        yield from (f"    {line}" for line in row["message"].splitlines())
        yield ""
    for warning in row.get("warnings", ()):
        first, *rest = warning.splitlines()
        yield f"- warning: {first}"
        yield from (f"  {line.strip()}" for line in rest)
    for name, value in row.get("facts", {}).items():
        yield f"- {name}: {value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
