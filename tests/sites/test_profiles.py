"""Profiles and what a living Slurm says: facts of a real one (22.05), drafts, differences."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpcrl.cli import sites
from hpcrl.cli.main import main
from hpcrl.config.cluster import CLUSTER_KINDS, SlurmCluster
from hpcrl.config.load import load_cluster
from hpcrl.config.rules.table import check_cluster
from hpcrl.errors import ConfigError
from hpcrl.sites.gpu_models import gpu_model
from hpcrl.sites.profile_check import Severity, check_profile
from hpcrl.sites.profile_draft import draft_profile
from hpcrl.sites.site_facts import PartitionFacts, Shape, SiteFacts, read_site_facts

FACTS = Path(__file__).parents[1] / "slurm" / "facts"


class Recorded:
    """A Slurm that said once what it says now."""

    def __init__(self, directory: Path, **changes: str) -> None:
        self._directory, self._changes = directory, changes

    def config(self) -> dict[str, str]:
        lines = [
            line.split("=", 1) for line in (self._directory / "config.txt").read_text().splitlines() if "=" in line
        ]
        return {key.strip(): value.strip().replace("(null)", "") for key, value in lines} | self._changes

    def show(self, kind: str, name: str | None = None) -> list[dict[str, str]]:
        lines = (self._directory / f"{kind}s.txt").read_text().splitlines()
        pattern = re.compile(r" +(?=[A-Z][A-Za-z0-9_/:]*=)")
        return [dict(pair.split("=", 1) for pair in pattern.split(line.strip())) for line in lines]


RECORDED = Recorded(FACTS / "slurm-22.05")


def facts(**changes: Any) -> SiteFacts:
    return replace(read_site_facts(RECORDED), **changes)


def partition(**changes: Any) -> PartitionFacts:
    (found,) = facts().partitions
    return replace(found, **changes)


def profile(**changes: Any) -> SlurmCluster:
    """The packaged profile of the virtual cluster, cut to the four recorded nodes."""
    data = load_cluster("devcluster").value.model_dump()
    data["partitions"]["gpu"]["nodes"] = 4
    for key, value in changes.items():
        node = data
        *parents, last = key.split("__")
        for parent in parents:
            node = node[parent]
        node[last] = value
    value = CLUSTER_KINDS["slurm"].model_validate(data)
    assert isinstance(value, SlurmCluster)
    return value


def test_facts_of_a_real_slurm() -> None:
    assert facts() == SiteFacts(
        cluster="sites",
        version=(22, 5),
        partitions=(
            PartitionFacts(
                name="gpu",
                up=True,
                is_default=True,
                nodes=((Shape(8, "h200", 8, 2000), 4),),
                usable=4,
                max_time_h=None,
                accounts=(),
                qos=(),
                shares_always=False,
            ),
        ),
        has_gpus=True,
        hetjob=True,
        requeue=True,
        accounting=False,
        segment=False,
        preempts_unwarned=False,
    )


@pytest.mark.parametrize(
    ("changes", "name", "value"),
    [
        ({"AccountingStorageType": "accounting_storage/slurmdbd"}, "accounting", True),
        ({"PreemptType": "preempt/qos"}, "preempts_unwarned", True),
        ({"PreemptType": "preempt/qos", "PreemptParameters": "send_user_signal,x"}, "preempts_unwarned", False),
        ({"PreemptType": "preempt/qos", "SlurmctldParameters": "preempt_send_user_signal"}, "preempts_unwarned", False),
        ({"SLURM_VERSION": "24.05.1", "TopologyPlugin": "topology/block"}, "segment", True),
        ({"SLURM_VERSION": "23.11.4", "TopologyPlugin": "topology/block"}, "segment", False),
        ({"SchedulerType": "sched/builtin"}, "hetjob", False),
        ({"JobRequeue": "0"}, "requeue", False),
        ({"GresTypes": ""}, "has_gpus", False),
        ({"SLURM_VERSION": "25.11.0-0rc1"}, "version", (25, 11)),
    ],
)
def test_capabilities_are_found(changes: dict[str, str], name: str, value: object) -> None:
    assert getattr(read_site_facts(Recorded(FACTS / "slurm-22.05", **changes)), name) == value


def test_draft_of_a_real_slurm_is_a_profile_that_fits_it(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(draft_profile(facts(), "mine", runs_root="/shared/it's runs", fabric="ethernet", python="/p"))
    loaded = load_cluster(str(path))
    check_cluster(loaded)
    assert isinstance(loaded.value, SlurmCluster)
    assert loaded.value.paths.runs_root == "/shared/it's runs"
    assert [f.code for f in check_profile(loaded.value, facts())] == []


def test_draft_without_what_only_a_person_knows_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(draft_profile(facts(), "mine", runs_root="/shared", python="/p"))
    with pytest.raises(ConfigError, match=r"fabric.*still to be filled in \('CHANGE_ME'\)"):
        load_cluster(str(path))


def test_draft_of_mixed_partitions(tmp_path: Path) -> None:
    cpu = partition(
        name="all", nodes=((Shape(0, None, 64, 257000), 9), (Shape(4, "a100", 64, 512000), 2)), max_time_h=12.0
    )
    odd = partition(name="00-gpu", is_default=False, accounts=("a", "b"))
    path = tmp_path / "mine.yaml"
    text = draft_profile(
        facts(partitions=(cpu, odd)), "mine", runs_root="/shared", fabric="infiniband", python="/shared/bin/python"
    )
    path.write_text(text)
    value = load_cluster(str(path)).value
    assert isinstance(value, SlurmCluster)
    assert value.placement.default == "00-gpu"
    assert value.limits.time_limit_h == 12
    assert value.partitions["all"].node.memory_gib == 250.9
    assert "nodes differ" in text
    assert "one of a, b" in text


@pytest.mark.parametrize(
    ("changed", "found", "code", "severity"),
    [
        ({}, {"partitions": ()}, "partition-missing", "error"),
        ({}, {"partitions": (partition(up=False),)}, "partition-down", "warning"),
        ({"partitions__gpu__nodes": 5}, {}, "nodes-missing", "error"),
        ({}, {"partitions": (partition(usable=3),)}, "nodes-down", "warning"),
        ({}, {"partitions": (partition(max_time_h=4.0),)}, "time-limit", "error"),
        ({"partitions__gpu__account": "x"}, {"partitions": (partition(accounts=("y",)),)}, "account-refused", "error"),
        ({"partitions__gpu__qos": "x"}, {"partitions": (partition(qos=("y",)),)}, "qos-refused", "error"),
        ({}, {"partitions": (partition(shares_always=True),)}, "no-exclusive", "error"),
        ({"partitions__gpu__node__cpus": 16}, {}, "node-smaller", "error"),
        ({"partitions__gpu__node__memory_gib": 4.0}, {}, "node-smaller", "error"),
        ({"partitions__gpu__node__gpus": 4}, {}, "node-larger", "note"),
        (
            {},
            {"partitions": (partition(nodes=((Shape(4, "h200", 8, 2000), 3), (Shape(8, "h200", 8, 2000), 1))),)},
            "nodes-differ",
            "warning",
        ),
        ({"partitions__gpu__node__gpu_type": "h100"}, {}, "gpu-type", "error"),
        ({"gres": "none"}, {}, "gres-not-asked", "error"),
        ({}, {"has_gpus": False}, "gres-unknown", "error"),
        ({}, {"hetjob": False}, "no-hetjob", "error"),
        ({}, {"requeue": False}, "no-requeue", "error"),
        ({"capabilities__segment": True}, {}, "no-segment", "error"),
        ({"capabilities__accounting": True}, {}, "no-accounting", "warning"),
        ({}, {"preempts_unwarned": True}, "preempts-unwarned", "note"),
        ({}, {"accounting": True}, "unused-accounting", "note"),
        ({}, {"version": (21, 8)}, "slurm-old", "warning"),
    ],
)
def test_differences(changed: dict[str, Any], found: dict[str, Any], code: str, severity: str) -> None:
    (finding,) = check_profile(profile(**changed), facts(**found))
    assert (finding.code, finding.severity) == (code, severity)
    assert finding.hint


def test_errors_come_first() -> None:
    found = check_profile(profile(gres="none"), facts(accounting=True, version=(21, 8)))
    assert [finding.severity for finding in found] == [Severity.ERROR, Severity.WARNING, Severity.NOTE]


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["hpcrl", *arguments])
    monkeypatch.setattr(sites, "_slurm", lambda: RECORDED)
    with pytest.raises(SystemExit) as exit_info:
        main()
    return int(exit_info.value.code or 0)


def test_init_and_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(monkeypatch, "cluster", "init", "mine", "--runs-root", "/shared", "--fabric", "ethernet") == 0
    assert capsys.readouterr().out.strip() == "clusters/mine.yaml"
    assert run(monkeypatch, "cluster", "check", "mine") == 0
    assert "0 errors" in capsys.readouterr().out
    assert run(monkeypatch, "cluster", "init", "mine") == 2
    assert "exists already" in capsys.readouterr().err
    path = tmp_path / "clusters/mine.yaml"
    path.write_text(path.read_text().replace("nodes: 4", "nodes: 5"))
    assert run(monkeypatch, "cluster", "check", "mine", "--json") == 1
    answer = json.loads(capsys.readouterr().out)
    (finding,) = answer["findings"]
    assert (finding["code"], finding["severity"]) == ("nodes-missing", "error")
    assert re.fullmatch(r"clusters/mine.yaml:\d+", finding["where"])


def test_list_survives_a_draft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(monkeypatch, "cluster", "init", "mine") == 0
    capsys.readouterr()
    assert run(monkeypatch, "cluster", "ls", "--json") == 0
    rows = {row["name"]: row["description"] for row in json.loads(capsys.readouterr().out)}
    assert "not valid" in rows["mine"]
    assert "Slurm cluster" in rows["devcluster"]


def test_draft_knows_gpus_of_data_sheets(tmp_path: Path) -> None:
    """And a plan on it lacks nothing of a GPU; the numbers are those of the packaged site."""
    named = partition(nodes=((Shape(8, "nvidia_h200", 192, 2063000), 4),))
    path = tmp_path / "mine.yaml"
    path.write_text(draft_profile(facts(partitions=(named,)), "mine", runs_root="/s", fabric="infiniband", python="/p"))
    drafted, packaged = load_cluster(str(path)).value, load_cluster("h200-28").value
    assert isinstance(drafted, SlurmCluster)
    assert isinstance(packaged, SlurmCluster)
    (part,) = drafted.partitions.values()
    assert part.node.gpu == packaged.partitions["gpu"].node.gpu
    assert {str(role): python for role, python in drafted.python_by_role.items()} == dict.fromkeys(
        ("trainer", "orchestrator", "engine"), "/p"
    )


@pytest.mark.parametrize(
    ("gpu_type", "name"),
    [
        ("h100", "NVIDIA H100 SXM"),
        ("nvidia_h100_80gb_hbm3", "NVIDIA H100 SXM"),
        ("nvidia_h100_pcie", "NVIDIA H100 PCIe"),
        ("H200", "NVIDIA H200 SXM"),
        ("h20", "NVIDIA H20"),
        ("a100-sxm4-40gb", "NVIDIA A100 40 GB SXM"),
        ("a100", "NVIDIA A100 80 GB SXM"),
        ("gb200", "NVIDIA GB200"),
        ("b200", "NVIDIA B200 SXM"),
        ("mi300x", None),
        ("graph100", None),
        (None, None),
    ],
)
def test_types_of_gpus(gpu_type: str | None, name: str | None) -> None:
    found = gpu_model(gpu_type)
    assert (None if found is None else found.name) == name


def test_draft_without_an_interpreter_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(draft_profile(facts(), "mine", runs_root="/shared", fabric="ethernet"))
    with pytest.raises(ConfigError, match=r"python_by_role\.trainer: is still to be filled in"):
        load_cluster(str(path))
