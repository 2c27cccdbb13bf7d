"""The small role of a check: its step prints, hides its guard, or is silent, and the finding says so."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from msgspec.structs import replace
from test_node_findings import GOOD

from hpcrl.config.cluster import SlurmCluster
from hpcrl.config.load import load_cluster
from hpcrl.sites.node_findings import node_findings
from hpcrl.sites.profile_check import CheckFinding, Severity
from hpcrl.sites.step_check import StepReport, check_step


def finding(report: StepReport) -> CheckFinding | None:
    site = load_cluster("h200-28").value
    assert isinstance(site, SlurmCluster)
    found = list(node_findings(site, site.placement.default, [replace(GOOD, step=report)]))
    assert len(found) <= 1
    return found[0] if found else None


def step(program: str) -> list[str]:
    """In place of srun: a program that is given the command of the guard."""
    return ["env", "SLURM_PROCID=0", "SLURM_NODEID=0", "SLURMD_NODENAME=n1", "sh", "-c", program, "sh"]


async def test_a_step_that_prints_is_noise(tmp_path: Path) -> None:
    report = await check_step(tmp_path, os.environ, step=step('echo "Welcome to n1"; exec "$@"'), timeout_s=30.0)
    assert report == StepReport("", ["Welcome to n1"])
    found = finding(report)
    assert found is not None
    assert (found.code, found.severity) == ("step-noise", Severity.NOTE)
    assert "Welcome to n1" in found.what


async def test_a_good_step_is_not_a_finding(tmp_path: Path) -> None:
    report = await check_step(tmp_path, os.environ, step=step('exec "$@"'), timeout_s=30.0)
    assert (report, finding(report)) == (StepReport(), None)


@pytest.mark.parametrize(
    ("program", "timeout_s"),
    [("echo refused; exit 1", 30.0), ("exec sleep 60", 0.5), ('"$@" >/dev/null', 3.0)],
    ids=["ends at once", "never begins", "its output is lost"],
)
async def test_a_role_that_is_not_seen_is_an_error(program: str, timeout_s: float, tmp_path: Path) -> None:
    report = await check_step(tmp_path, os.environ, step=step(program), timeout_s=timeout_s)
    assert report.problem
    found = finding(report)
    assert found is not None
    assert (found.code, found.severity) == ("step-silent", Severity.ERROR)
    assert ("refused" in found.what) == ("refused" in program)


def test_the_report_passes_through_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    report = StepReport("why", ["a\nb", '"c"', "\u00e9"])
    for name, value in report.to_env().items():
        monkeypatch.setenv(name, value)
    assert StepReport.from_env() == report
