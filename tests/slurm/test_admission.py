"""What stands against a run before it is submitted: nodes, limits of partitions, and what sbatch itself refuses."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from fake_slurm import FakeSlurm
from plans import plan_for

from hpcrl.config.plan import Plan
from hpcrl.errors import UsageError
from hpcrl.slurm.admission import check_admission, needed_nodes, obstacles
from hpcrl.slurm.command import CommandResult
from hpcrl.slurm.errors import SlurmUnavailableError

PLAN, CLUSTER = plan_for("quickstart", "devcluster")
NODES = 2
"""That the plan needs at once, in partition gpu."""


class Site:
    """Slurm's answers to what is asked before a submit; ``tested`` are the scripts that sbatch was shown."""

    def __init__(self, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        self.nodes = [("n1", "IDLE", "gpu", ""), ("n2", "IDLE", "gpu,all", "")]
        self.partition: str | None = "PartitionName=gpu MaxTime=UNLIMITED MaxNodes=UNLIMITED State=UP"
        self.refusal = ""
        self.tested: list[str] = []
        slurm.scontrol, slurm.sbatch = self.scontrol, self.sbatch  # type: ignore[attr-defined, method-assign]
        self.client = slurm.client()
        monkeypatch.chdir(tmp_path)

    def scontrol(self, argv: list[str]) -> CommandResult:
        if argv[2] == "node":
            rows = [f"NodeName={n} State={s} Partitions={p} Reason={r}\n" for n, s, p, r in self.nodes]
            return CommandResult(0, "".join(rows), "")
        if self.partition is None:
            return CommandResult(1, "", "Partition gpu not found")
        return CommandResult(0, self.partition + "\n", "")

    def sbatch(self, argv: Sequence[str]) -> CommandResult:
        assert argv[0] == "--test-only"
        self.tested.append(Path(argv[1]).read_text())
        if self.refusal:
            return CommandResult(1, "", self.refusal)
        return CommandResult(0, "", "sbatch: Job 7 to start at 2026-11-27T03:00:00 using 8 processors on nodes n1")

    def obstacles(self, plan: Plan = PLAN) -> list[str]:
        return obstacles(plan, CLUSTER, self.client)


@pytest.fixture
def site(slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Site:
    return Site(slurm, monkeypatch, tmp_path)


def test_nothing_stands_against_a_run_for_which_there_is_room(site: Site) -> None:
    assert [need.nodes for need in needed_nodes(PLAN)] == [NODES]
    assert site.obstacles() == []
    assert len(site.tested) == 1
    assert "#SBATCH" in site.tested[0]
    check_admission(PLAN, CLUSTER, site.client)


def test_a_partition_with_too_few_nodes(site: Site) -> None:
    site.nodes = [("n1", "IDLE", "gpu", ""), ("n2", "IDLE", "all", "")]
    assert site.obstacles() == ["the run needs 2 nodes of partition gpu at once, which has 1"]
    assert site.tested == [], "Slurm would only say the same"


def test_nodes_that_are_not_usable_are_named_with_the_reason(site: Site) -> None:
    site.nodes[1] = ("n2", "DOWN+DRAIN", "gpu", "no fan [root@2026-11-01T00:00:00]")
    said = "the run needs 2 nodes of partition gpu at once, which has 2, 1 of them usable (n2 DOWN+DRAIN: no fan)"
    assert site.obstacles() == [said]
    site.nodes[1] = ("n2", "DOWN", "gpu", "")
    assert site.obstacles() == [
        "the run needs 2 nodes of partition gpu at once, which has 2, 1 of them usable (n2 DOWN)"
    ]


@pytest.mark.parametrize(("away", "more"), [(4, ""), (5, " and 1 more"), (9, " and 5 more")])
def test_of_many_nodes_four_are_named(site: Site, away: int, more: str) -> None:
    site.nodes = [("n0", "IDLE", "gpu", ""), *((f"a{i}", "DOWN", "gpu", "") for i in range(away))]
    (said,) = site.obstacles()
    assert said.endswith(f"1 of them usable (a0 DOWN, a1 DOWN, a2 DOWN, a3 DOWN{more})")


def test_a_partition_that_is_not_there_is_sbatchs_to_tell(site: Site) -> None:
    site.nodes, site.partition = [("n1", "IDLE", "other", "")], None
    site.refusal = (
        "sbatch: error: invalid partition specified: gpu\nsbatch: error: allocation failure: Invalid partition"
    )
    assert site.obstacles() == ["Slurm refuses job main: invalid partition specified: gpu; Invalid partition"]


@pytest.mark.parametrize(("limit", "ok"), [("1-00:00:00", True), ("23:59:00", False), ("UNLIMITED", True)])
def test_the_longest_time_of_a_partition(site: Site, limit: str, ok: bool) -> None:
    assert PLAN.time_limit_s == 24 * 3600
    site.partition = f"PartitionName=gpu MaxTime={limit} State=UP"
    found = site.obstacles()
    if ok:
        assert found == []
    else:
        assert len(found) == 1
        assert found[0].startswith("the run asks for 24 h (job.time_limit_h")
        assert found[0].endswith("and partition gpu gives 23.9833 h (MaxTime)")
        assert site.tested == []


@pytest.mark.parametrize(
    ("most", "found"),
    [("2", []), ("1", ["a job of the run needs 2 nodes, and partition gpu gives a job 1 (MaxNodes)"])],
)
def test_the_largest_job_of_a_partition(site: Site, most: str, found: list[str]) -> None:
    site.partition = f"PartitionName=gpu MaxNodes={most} State=UP"
    assert site.obstacles() == found


def test_a_partition_that_is_closed(site: Site) -> None:
    site.partition = "PartitionName=gpu State=DRAIN"
    assert site.obstacles() == ["partition gpu is DRAIN"]
    site.partition = "PartitionName=gpu"  # it does not say
    assert site.obstacles() == []
    site.partition = "PartitionName=other MaxNodes=1 MaxTime=1:00 State=DOWN"  # of another one
    assert site.obstacles() == []


def test_all_reasons_are_reported_at_once(site: Site) -> None:
    site.nodes, site.partition = site.nodes[:1], "PartitionName=gpu MaxNodes=1 MaxTime=1:00 State=DOWN"
    assert len(site.obstacles()) == 4
    with pytest.raises(UsageError) as caught:
        check_admission(PLAN, CLUSTER, site.client)
    lines = str(caught.value).splitlines()
    assert lines[0].endswith("nothing was submitted")
    assert lines[1:5] == [f"  {reason}" for reason in site.obstacles()]
    assert [line.split(":")[0].strip() for line in lines[5:]] == ["hint", "hint"]


def test_each_kind_of_job_is_shown_to_sbatch_once(site: Site) -> None:
    """Replicas of a role are alike."""
    site.nodes = [(f"n{i}", "IDLE", "gpu", "") for i in range(9)]
    elastic, _ = plan_for("quickstart", "devcluster", "job.layout=elastic", "engine.replicas=5", "job.min_replicas=2")
    site.refusal = "sbatch: error: QOSMaxJobs"
    assert site.obstacles(elastic) == ["Slurm refuses job main: QOSMaxJobs", "Slurm refuses job engine-0: QOSMaxJobs"]
    assert len(site.tested) == 2


def test_an_elastic_run_needs_the_nodes_of_its_trainer_and_of_the_least_replicas(site: Site) -> None:
    elastic, _ = plan_for("quickstart", "devcluster", "job.layout=elastic", "engine.replicas=5", "job.min_replicas=2")
    assert [(need.partition, need.nodes) for need in needed_nodes(elastic)] == [("gpu", 1 + 2)]
    few, _ = plan_for("quickstart", "devcluster", "job.layout=elastic", "engine.replicas=1")
    assert [need.nodes for need in needed_nodes(few)] == [1 + 1]


def test_components_that_share_nodes_count_once(site: Site) -> None:
    apart, _ = plan_for("quickstart", "devcluster", "job.layout=hetjob")
    assert [need.nodes for need in needed_nodes(apart)] == [2]
    shared = tuple(
        each.model_copy(update={"exclusive": False, "nodes": 1 + i}) for i, each in enumerate(apart.layout.components)
    )
    layout = apart.layout.model_copy(update={"components": shared})
    assert [need.nodes for need in needed_nodes(apart.model_copy(update={"layout": layout}))] == [2]


def test_a_slurm_that_does_not_answer_is_not_an_obstacle(site: Site, slurm: FakeSlurm) -> None:
    slurm.away = True
    with pytest.raises(SlurmUnavailableError):
        site.obstacles()
