"""What reports of nodes mean for a profile."""

from __future__ import annotations

import msgspec
import pytest

from hpcrl.config.cluster import SlurmCluster
from hpcrl.config.load import load_cluster
from hpcrl.sites.library_probe import LibraryAnswer, LibraryQuestion
from hpcrl.sites.node_findings import node_findings
from hpcrl.sites.node_report import NodeReport
from hpcrl.sites.profile_check import Severity

GOOD = NodeReport(
    host="n1",
    memlock_bytes=-1,
    open_files=1 << 20,
    shm_bytes=1 << 40,
    has_scontrol=True,
    busy_ports=[],
    looked_at_ports=200,
    ephemeral_first=32768,
    has_interface=True,
    missing_nics=[],
    scratch_problem="",
    cache_problem="",
    gpus=8,
    c_compiler=True,
    cxx_compiler=True,
    clock_ahead_s=0.0,
    visible_s=0.1,
    negative_lag_s=0.0,
)


@pytest.fixture(scope="module")
def site() -> SlurmCluster:
    profile = load_cluster("h200-28").value
    assert isinstance(profile, SlurmCluster)
    return profile


def codes(site: SlurmCluster, *reports: NodeReport) -> dict[str, Severity]:
    return {f.code: f.severity for f in node_findings(site, site.placement.default, list(reports))}


def test_good_nodes_give_no_finding(site: SlurmCluster) -> None:
    assert codes(site, GOOD, GOOD) == {}


@pytest.mark.parametrize(
    ("change", "code", "severity"),
    [
        ({"memlock_bytes": 65536}, "memlock", Severity.ERROR),
        ({"open_files": 1024}, "open-files", Severity.WARNING),
        ({"shm_bytes": 64 << 20}, "small-shm", Severity.WARNING),
        ({"has_scontrol": False}, "no-scontrol", Severity.ERROR),
        ({"busy_ports": list(range(50))}, "ports-taken", Severity.WARNING),
        ({"ephemeral_first": 20500}, "ports-ephemeral", Severity.WARNING),
        ({"has_interface": False}, "no-interface", Severity.ERROR),
        ({"address_problem": "interface lo of node n1 has no address"}, "no-address", Severity.ERROR),
        ({"unreached": {"n2": "no connection to 10.9.0.2:20000"}}, "unreachable", Severity.ERROR),
        ({"missing_nics": ["mlx5_3"]}, "no-nic", Severity.ERROR),
        ({"scratch_problem": "Permission denied"}, "no-scratch", Severity.ERROR),
        ({"gpus": None}, "no-driver", Severity.WARNING),
        ({"gpus": 7}, "gpus-missing", Severity.ERROR),
        ({"c_compiler": False}, "no-compiler", Severity.WARNING),
        ({"clock_ahead_s": -30.0}, "clock", Severity.WARNING),
        ({"visible_s": None, "negative_lag_s": None}, "not-shared", Severity.ERROR),
        ({"negative_lag_s": 58.0}, "name-lag", Severity.NOTE),
        ({"negative_lag_s": None}, "name-lag", Severity.NOTE),
    ],
)
def test_what_is_wrong_has_a_code(change: dict[str, object], code: str, severity: Severity, site: SlurmCluster) -> None:
    found = node_findings(site, site.placement.default, [msgspec.structs.replace(GOOD, **change), GOOD])
    assert [(f.code, f.severity) for f in found] == [(code, severity)]
    assert "n1" in found[0].what
    assert found[0].hint


def test_the_same_on_many_nodes_is_reported_once_and_errors_first(site: SlurmCluster) -> None:
    bad = msgspec.structs.replace(GOOD, open_files=1024, has_scontrol=False)
    many = [msgspec.structs.replace(bad, host=f"n{i}") for i in range(20)]
    assert list(codes(site, *many)) == ["no-scontrol", "open-files"]


def test_where_there_are_no_gpus_another_compiler_is_wanted(site: SlurmCluster) -> None:
    partition = site.partitions[site.placement.default]
    node = partition.node.model_copy(update={"gpus": 0})
    plain = partition.model_copy(update={"node": node})
    changed = site.model_copy(update={"partitions": {**site.partitions, site.placement.default: plain}})
    report = msgspec.structs.replace(GOOD, c_compiler=False)
    assert codes(changed, report) == {}
    assert codes(changed, msgspec.structs.replace(report, cxx_compiler=False)) == {"no-compiler": Severity.NOTE}


def test_a_compiler_that_triton_has_tried_or_an_image_has_is_not_looked_for_again(site: SlurmCluster) -> None:
    report = msgspec.structs.replace(GOOD, c_compiler=False)
    asked = LibraryQuestion(python="/t", roles=("trainer",), library="Triton", needed=True, gpus=True)
    triton = LibraryAnswer(question=asked, version="3.7.1", distribution="triton", python_version="3.11.7")
    # by CC, which is of the role alone
    assert codes(site, msgspec.structs.replace(report, libraries=[triton])) == {}
    failed = msgspec.structs.replace(triton, build_problem="neither gcc nor clang is on PATH, and CC is not set")
    assert codes(site, msgspec.structs.replace(report, libraries=[failed])) == {"no-compiler": Severity.ERROR}
    absent = msgspec.structs.replace(triton, question=msgspec.structs.replace(asked, needed=False), kind="absent")
    assert codes(site, msgspec.structs.replace(report, libraries=[absent])) == {"no-compiler": Severity.WARNING}
    # nodes whose driver is missing have that finding
    assert codes(site, msgspec.structs.replace(report, gpus=None)) == {"no-driver": Severity.WARNING}
    image = load_cluster("pyxis-site").value
    assert isinstance(image, SlurmCluster)
    inside = site.model_copy(update={"container": image.container})
    assert codes(inside, report) == {}


def test_nodes_with_gpus_want_a_disk_for_what_is_compiled(site: SlurmCluster) -> None:
    """A drafted profile names none; nodes without a driver compile nothing of that kind."""
    bare = site.model_copy(update={"paths": site.paths.model_copy(update={"scratch": None})})
    assert codes(bare, GOOD) == {"scratch-unset": Severity.WARNING}
    assert "scratch-unset" not in codes(bare, msgspec.structs.replace(GOOD, gpus=None))


def test_one_node_cannot_tell_about_names(site: SlurmCluster) -> None:
    assert codes(site, msgspec.structs.replace(GOOD, visible_s=None, negative_lag_s=None)) == {}
