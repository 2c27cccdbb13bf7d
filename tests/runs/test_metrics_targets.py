"""Targets for Prometheus: the address of a run is that of its newest attempt; files of other runs are removed."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import yaml
from runs_testing import Hpcrl, make_run, write_status

from hpcrl.network.credentials import TOKEN_FILE
from hpcrl.runs.monitoring.targets import ALERTS, target_of
from hpcrl.runs.role import Endpoints
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.status import ProcessId, RunState

ADDRESS = "10.0.0.7:26535"


def living_run(root: Path, name: str, *addresses: str) -> RunDir:
    """A run whose supervisor is this process, with an attempt for each address of its orchestrator."""
    run, supervisor = make_run(root, name), ProcessId.of(os.getpid())
    assert supervisor is not None
    for address in addresses:
        attempt = write_status(run, RunState.RUNNING, supervisor=supervisor)
        urls = {"engine": ["http://10.0.0.9:1"], "orchestrator": [f"http://{address}"]}
        Endpoints(urls=urls).write(run, attempt)
    return run


def test_the_address_is_that_of_the_newest_attempt(tmp_path: Path) -> None:
    run = living_run(tmp_path, "night", "10.0.0.7:1", ADDRESS)
    target = target_of(run)
    assert (target.address, target.labels["run"]) == (ADDRESS, "night")
    assert set(target.labels) == {"run", "recipe", "cluster"}
    # an attempt that begins has no address yet, and that of the one before is not its own
    write_status(run, RunState.STARTING, supervisor=ProcessId.of(os.getpid()))  # type: ignore[arg-type]
    assert target_of(run).address == ""


@pytest.mark.parametrize("content", [b"", b"{", b'{"urls": {}}', b'{"urls": {"orchestrator": []}}', b'{"urls": 7}'])
def test_endpoints_that_name_no_orchestrator_give_no_address(tmp_path: Path, content: bytes) -> None:
    run = living_run(tmp_path, "night", ADDRESS)
    Endpoints.path(run, 1).write_bytes(content)
    assert target_of(run).address == ""


def test_a_run_that_has_ended_has_no_address(tmp_path: Path) -> None:
    run = living_run(tmp_path, "night", ADDRESS)
    attempt = write_status(run, RunState.COMPLETED)
    Endpoints(urls={"orchestrator": [f"http://{ADDRESS}"]}).write(run, attempt)
    assert target_of(run).address == ""


def test_the_command_writes_a_file_for_each_run_and_removes_those_of_others(tmp_path: Path, hpcrl: Hpcrl) -> None:
    root, output = tmp_path / "runs", tmp_path / "prometheus"
    run, gone = living_run(root, "night", ADDRESS), living_run(root, "gone", "10.0.0.8:2")
    write_status(make_run(root, "ended"), RunState.COMPLETED)

    def written() -> dict[str, list[str]]:
        code, out, err = hpcrl("site", "metrics-targets", "-o", str(output), "--runs-root", str(root))
        assert code == 0
        assert f"rule_files: [{ALERTS}]" in err
        found = {path.stem: json.loads(path.read_text()) for path in (output / "targets").glob("*.json")}
        targets = {
            name: [address for group in groups for address in group["targets"]] for name, groups in found.items()
        }
        # the command names the runs that have an address, and no other has a job
        names = sorted(name for name, addresses in targets.items() if addresses)
        assert sorted(out.splitlines()) == [f"{name}: {targets[name][0]}" for name in names]
        jobs = yaml.safe_load((output / "scrape.yml").read_text())["scrape_configs"]
        assert sorted(job["job_name"] for job in jobs) == [f"hpcrl-{name}" for name in names]
        for job in jobs:
            name = job["job_name"].removeprefix("hpcrl-")
            assert job["authorization"]["credentials_file"] == str(root / name / TOKEN_FILE)
            assert job["file_sd_configs"] == [{"files": [str(output / f"targets/{name}.json")]}]
        return targets

    assert written() == {"night": [ADDRESS], "gone": ["10.0.0.8:2"], "ended": []}
    (output / "targets/kept.yml").write_text("[]")
    shutil.rmtree(gone.path)
    write_status(run, RunState.COMPLETED)
    assert written() == {"night": [], "ended": []}
    # files that it never writes are another one's
    assert (output / "targets/kept.yml").is_file()
