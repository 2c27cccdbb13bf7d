"""The report on limits: it says what it saw, also where a limit does not hold."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from sandbox_lab import PACKAGES, USER, skip_without_bubblewrap, user_python
from typer.testing import CliRunner

from hpcrl.cli.main import app
from hpcrl.sandboxes import SandboxLimits, limits_report
from hpcrl.sandboxes.client import SandboxClient


@pytest.mark.parametrize("who", ["root", "user"])
async def test_all_limits_hold_here(who: str, monkeypatch: pytest.MonkeyPatch) -> None:
    skip_without_bubblewrap()
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(PACKAGES))
    as_root = os.geteuid() == 0
    if who == "root" and not as_root:
        pytest.skip("needs root")
    options = {"user": USER, "python": user_python()} if as_root and who == "user" else {}
    report = await limits_report.limits_report(**options)
    assert report.problem == ""
    assert [check for check in report.checks if not check.held] == []
    assert report.held
    how = {check.limit: check.how for check in report.checks}
    assert how["memory in sum"].startswith("cgroup v" if as_root and who == "root" else ("watcher", "cgroup v2"))
    assert how["memory of all sandboxes"].startswith(("cgroup v", "watcher, 320 MiB: "))
    assert len(how) == 17


async def test_broken_limits_are_told(host: SandboxClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sandboxes that are larger than they should be."""
    wide = SandboxLimits(cpu_s=20, network="host")
    start = host.start
    monkeypatch.setattr(host, "start", lambda limits: start(limits=wide))
    found = {}
    for name in ("memory in sum", "processes", "bytes of /tmp", "number of files", "open files", "network"):
        found[name] = await limits_report._checked(host, name, limits_report._CHECKS[name])
    assert [name for name, check in found.items() if check.held] == []
    assert "6 processes with 80 MiB each lived within 256 MiB" in found["memory in sum"].how
    assert found["open files"].how == "RLIMIT_NOFILE: 509 of 64"
    assert "connected,connected" in found["network"].how


async def test_the_report_says_where_sandboxes_share_no_limit(
    host: SandboxClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits_report, "_NODE_S", 1.0)
    name = "memory of all sandboxes"
    found = await limits_report._checked(host, name, limits_report._CHECKS[name])
    assert not found.held
    assert found.how == "no limit: 0 of 10 sandboxes with 48 MiB each were ended, 10 worked on"


async def test_an_attempt_that_fails_counts_as_broken(host: SandboxClient) -> None:
    async def check(client: SandboxClient, sandbox: object) -> tuple[bool, str]:
        return True, str(limits_report._number(dataclasses.replace(await host_result(host), out=b"Traceback")))

    found = await limits_report._checked(host, "name", check)
    assert (found.held, found.how) == (False, "the attempt itself failed: exit code 0: Traceback")


async def host_result(host: SandboxClient) -> limits_report.ExecResult:
    return await (await host.start()).exec(["true"])


def test_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lines and its JSON, from reports of any kind."""
    bad = limits_report.LimitCheck("processes", False, "fork was refused after 200")
    good = limits_report.LimitCheck("network", True, "reached nothing")
    for report, code, lines in (
        (limits_report.LimitsReport("", (good,)), 0, ["network  holds  reached nothing"]),
        (
            limits_report.LimitsReport("", (good, bad)),
            1,
            ["network    holds  reached nothing", "processes  NOT HELD  fork was refused after 200"],
        ),
        (limits_report.LimitsReport("no bwrap"), 1, ["no sandbox starts here: no bwrap"]),
    ):

        async def made(report: limits_report.LimitsReport = report) -> limits_report.LimitsReport:
            return report

        monkeypatch.setattr(limits_report, "limits_report", made)
        shown = CliRunner().invoke(app, ["env", "sandbox"])
        assert (shown.exit_code, shown.stdout.splitlines()) == (code, lines)
        document = json.loads(CliRunner().invoke(app, ["env", "sandbox", "--json"]).stdout)
        assert document["held"] == report.held
        assert document["problem"] == report.problem
        assert document["checks"] == [dataclasses.asdict(check) for check in report.checks]


def test_a_node_without_bubblewrap(tmp_path: Path) -> None:
    """The command says so, with a hint."""
    (tmp_path / "bwrap").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "bwrap").chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    shown = subprocess.run(
        [sys.executable, "-m", "hpcrl", "env", "sandbox"], capture_output=True, text=True, check=False, env=environment
    )
    assert shown.returncode == 1
    assert shown.stdout.startswith(f"no sandbox starts here: {tmp_path}/bwrap is version unknown, which is too old")
    assert "hint: install the package `bubblewrap`, 0.8 or newer" in shown.stdout
