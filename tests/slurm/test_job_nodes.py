"""Which nodes of a job with spare ones roles use, and which are left when some are lost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from plans import CWD, plan_for
from srun_stand_in import write_srun

from hpcrl.config.plan import Plan, Role
from hpcrl.errors import HpcrlError
from hpcrl.slurm.client import SlurmClient
from hpcrl.slurm.command import CommandResult
from hpcrl.slurm.hostlist import expand_hostlist
from hpcrl.slurm.job_nodes import DID_NOT_ANSWER, REMOVED, JobNodes, TooFewNodesError
from hpcrl.slurm.launch_arguments import launch_replica
from hpcrl.supervisor.launch.step_launcher import StepLauncher
from hpcrl.supervisor.launch.survey import NodesSilentError

TWO_BY_TWO = ("trainer.ranks=2", "trainer.nodes=2", "engine.replicas=2")
HETJOB = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NODELIST_HET_GROUP_0": "n[001-003]",
    "SLURM_JOB_NODELIST_HET_GROUP_1": "n[004-007]",
}
SINGLE = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[001-007]"}


class Controller(SlurmClient):
    """A Slurm that has one job, and nodes that may be down."""

    def __init__(self, *lists: str, down: Sequence[str] = ()) -> None:
        super().__init__(run=self.answer)
        self.lists, self.down, self.silent = list(lists), set(down), False

    def answer(self, argv: Sequence[str], *, env: Mapping[str, str], timeout_s: float) -> CommandResult:
        if self.silent:
            return CommandResult(1, "", "Unable to contact slurm controller (connect failure)")
        kind, name = argv[3], argv[4] if len(argv) > 4 else ""
        if kind == "job":
            parts = [f"HetJobId=7 HetJobOffset={i} " if len(self.lists) > 1 else "" for i in range(len(self.lists))]
            lines = [
                f"JobId={7 + i} {part}JobState=RUNNING NodeList={nodes}"
                for i, (part, nodes) in enumerate(zip(parts, self.lists, strict=True))
            ]
        else:
            names = name.split(",") if name else [node for nodes in self.lists for node in expand_hostlist(nodes)]
            states = {node: "DOWN" if node in self.down else "ALLOCATED" for node in names}
            numbers = {node: int(node[1:]) for node in names}
            lines = [f"NodeName={node} NodeAddr=10.1.0.{numbers[node]} State={states[node]}" for node in names]
        return CommandResult(0, "\n".join(lines), "")


def plan(layout: str = "hetjob", spares: str = "{trainer: 1, engine: 2}") -> Plan:
    return plan_for("quickstart", "devcluster", *TWO_BY_TWO, f"job.layout={layout}", f"job.spare_nodes={spares}")[0]


def used(nodes: JobNodes) -> list[tuple[str, ...]]:
    return [allocation.hosts for _, allocation in sorted(nodes.allocations().items())]


def test_roles_use_the_first_healthy_nodes_of_each_component() -> None:
    nodes = JobNodes(plan(), HETJOB, Controller())
    assert used(nodes) == [("n001", "n002"), ("n004", "n005")]
    assert nodes.idle() == ["n003", "n006", "n007"]
    # Slurm numbers the tasks of a step in its own order, so a spare node comes behind the ones that are left
    assert nodes.lose({"n001": "gone", "n005": "gone"}) == {"n001": "gone", "n005": "gone"}
    assert used(nodes) == [("n002", "n003"), ("n004", "n006")]
    assert nodes.idle() == ["n007"]


def test_spare_nodes_of_one_component_help_no_other() -> None:
    nodes = JobNodes(plan(), HETJOB, Controller())
    nodes.lose({"n002": "gone"})
    assert nodes.enough_without(["n004", "n007"])
    assert not nodes.enough_without(["n001"])
    nodes.lose({"n003": "gone"})
    assert not nodes.enough_without(())
    with pytest.raises(TooFewNodesError, match="1 nodes are left of component 0, which needs 2; lost are n002, n003"):
        nodes.allocations()


def test_one_allocation_has_one_stock_of_spare_nodes() -> None:
    nodes = JobNodes(plan("single"), SINGLE, Controller())
    nodes.lose({"n001": "gone", "n003": "gone", "n006": "gone"})
    assert used(nodes) == [("n002", "n004", "n005", "n007")]
    assert nodes.idle() == []
    assert not nodes.enough_without(["n007"])


def test_a_lost_node_is_news_once_and_stays_lost() -> None:
    nodes = JobNodes(plan(), HETJOB, Controller())
    assert nodes.lose({"n002": "gone", "other": "of another job"}) == {"n002": "gone"}
    assert nodes.lose({"n002": "again"}) == {}
    assert nodes.take_news() == {"n002": "gone"}
    assert nodes.take_news() == {}
    assert nodes.lost == {"n002": "gone"}


def test_slurm_says_which_nodes_it_removed_from_the_job() -> None:
    slurm = Controller("n[001,003]", "n[004-007]", down=["n007"])
    nodes = JobNodes(plan(), HETJOB, slurm)
    # one that Slurm calls down but has not removed yet is no place for a role either
    assert nodes.look() == {"n002": REMOVED, "n007": "the node went down"}
    assert used(nodes) == [("n001", "n003"), ("n004", "n005")]
    slurm.lists = ["n[001-003]", "n[004-007]"]
    slurm.down = set()
    assert nodes.look() == {}  # it came back, but steps of this job start there no more
    assert used(nodes) == [("n001", "n003"), ("n004", "n005")]


def test_steps_overlap_once_a_node_is_lost() -> None:
    """Slurm may not have ended the step of before, or count its GPUs as taken."""
    nodes = JobNodes(plan(), HETJOB, Controller())
    assert not nodes.steps_overlap
    nodes.lose({"n005": DID_NOT_ANSWER})
    assert nodes.steps_overlap


@pytest.mark.parametrize("role", [Role.TRAINER, Role.ENGINE])
def test_a_step_overlaps_with_one_that_slurm_has_not_ended(role: Role) -> None:
    wanted = plan()
    found = JobNodes(wanted, HETJOB, Controller()).allocations()
    argv = [
        launch_replica(wanted, wanted.group(role), 0, command=["x"], cwd=CWD, allocations=found, overlap=overlap).argv
        for overlap in (False, True)
    ]
    assert [word for word in argv[1] if word not in argv[0]] == ["--overlap"]
    beside = wanted.group(Role.ORCHESTRATOR)
    argv = [
        launch_replica(wanted, beside, 0, command=["x"], cwd=CWD, allocations=found, overlap=overlap).argv
        for overlap in (False, True)
    ]
    assert argv[0] == argv[1]


def test_a_slurm_that_does_not_answer_takes_no_node() -> None:
    slurm = Controller("n[001-003]", "n[004-007]")
    nodes = JobNodes(plan(), HETJOB, slurm)
    slurm.silent = True
    assert nodes.look() == {}
    slurm.silent, slurm.lists = False, ["", ""]  # a job that waits has no nodes
    assert nodes.look() == {}
    assert nodes.idle() == ["n003", "n006", "n007"]


def test_the_batch_node_is_watched_from_a_spare_node() -> None:
    nodes = JobNodes(plan(), HETJOB, Controller())
    assert nodes.other_than("n001") == (0, "n003")
    nodes.lose({"n003": "gone", "n006": "gone", "n007": "gone"})
    assert nodes.other_than("n001") == (1, "n005")


def test_more_nodes_than_the_plan_asks_for_are_refused_and_fewer_spare_ones_taken() -> None:
    nodes = JobNodes(plan(), {**HETJOB, "SLURM_JOB_NODELIST_HET_GROUP_0": "n[001-002]"}, Controller())
    assert nodes.idle() == ["n006", "n007"]
    with pytest.raises(HpcrlError, match="HET_GROUP_0 has 1 nodes, the plan 2"):
        JobNodes(plan(), {**HETJOB, "SLURM_JOB_NODELIST_HET_GROUP_0": "n001"}, Controller())


# -- nodes that Slurm does not call down yet


def launcher(tmp_path: Path, answering: Sequence[str]) -> tuple[StepLauncher, Plan]:
    wanted, site = plan_for(
        "quickstart", "devcluster", *TWO_BY_TWO, "job.layout=single", "job.spare_nodes={trainer: 1, engine: 2}"
    )
    partition = site.partitions["all"] if "all" in site.partitions else next(iter(site.partitions.values()))
    name = next(key for key, value in site.partitions.items() if value is partition)
    node = partition.node.model_copy(update={"interface": "net0"})
    limits = site.limits.model_copy(update={"start_timeout_s": 5.0})
    changes = {"partitions": {name: partition.model_copy(update={"node": node})}, "limits": limits}
    site = site.model_copy(update=changes)
    path = write_srun(tmp_path, {node: f"10.1.0.{int(node[1:])}" for node in answering})
    client = Controller("n[001-007]")
    nodes = JobNodes(wanted, SINGLE, client)
    return StepLauncher(site, environ={**SINGLE, "PATH": path}, client=client, nodes=nodes), wanted


def test_a_spare_node_replaces_one_on_which_no_step_starts(tmp_path: Path) -> None:
    steps, wanted = launcher(tmp_path, ["n001", "n002", "n004", "n005", "n006", "n007"])
    placed = steps.place(wanted)
    assert placed[Role.TRAINER, 0].nodes == ("n001", "n002")
    assert [placed[Role.ENGINE, i].nodes for i in (0, 1)] == [("n004",), ("n005",)]
    assert steps.nodes is not None
    assert steps.nodes.take_news() == {"n003": DID_NOT_ANSWER}
    assert steps.silent_nodes() == []


def test_where_too_many_are_silent_no_node_is_blamed(tmp_path: Path) -> None:
    steps, wanted = launcher(tmp_path, ["n001", "n002", "n003"])
    assert steps.nodes is not None
    steps.nodes.lose({"n005": "gone", "n006": "gone", "n007": "gone"})
    with pytest.raises(NodesSilentError):
        steps.place(wanted)
    assert steps.nodes.take_news().keys() == {"n005", "n006", "n007"}
    assert steps.silent_nodes() == ["n004"]
