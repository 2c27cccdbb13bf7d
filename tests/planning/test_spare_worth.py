"""What spare nodes are worth: node-hours in the queue against node-hours idle."""

from __future__ import annotations

import contextlib
import json
import math
import sys
from pathlib import Path

import pytest
import yaml

from hpcrl.cli.main import main
from hpcrl.config.cluster_slurm import ReliabilityConfig
from hpcrl.config.load import load_cluster, load_recipe
from hpcrl.jobplan import make_plan
from hpcrl.planning.spare_worth import SpareWorth, spare_worth

SIZES = ("trainer.nodes=12", "trainer.ranks=12", "engine.replicas=15", "job.layout=single", "job.time_limit_h=100")


def worth(*settings: str, **reliability: float) -> SpareWorth | None:
    recipe, site = load_recipe("quickstart", (*SIZES, *settings)).value, load_cluster("devcluster").value
    site = site.model_copy(update={"reliability": ReliabilityConfig(**reliability)})
    return spare_worth(make_plan(recipe, site, "r", Path("/r")), site)


def test_without_spare_nodes_there_is_nothing_to_say() -> None:
    assert worth() is None


def test_node_hours_of_requeues_against_those_of_spare_nodes() -> None:
    found = worth("job.spare_nodes={trainer: 1}", node_mtbf_h=648.0, queue_wait_h=2.0)
    assert found is not None
    assert (found.spares, found.nodes, found.mtbf_assumed, found.wait_assumed) == (1, 27, False, False)
    # 27 nodes of which each fails every 27 days: one failure a day, of 27 nodes that wait 2 h
    assert found.failures_per_day == pytest.approx(1.0)
    assert (found.saved_node_hours, found.cost_node_hours) == (pytest.approx(54.0), 24.0)
    assert found.pays
    assert found.break_even_wait_h == pytest.approx(24.0 / 27.0)
    # in 100 h the mean is 100 / 24; one failure is survived
    mean = 100.0 / 24.0
    assert found.more_failures == pytest.approx(1.0 - math.exp(-mean) * (1.0 + mean))
    assert "they pay (break-even: 0.889 h in the queue)" in " ".join(found.lines())
    assert "profile: 648 h between failures of a node" in found.lines()[0]


def test_assumed_numbers_are_marked() -> None:
    found = worth("job.spare_nodes={trainer: 1, engine: 1}", node_mtbf_h=6300.0, queue_wait_h=0.0)
    assert found is not None
    assert not found.pays
    assert (found.mtbf_assumed, found.wait_assumed) == (False, False)
    assumed = worth("job.spare_nodes={trainer: 1, engine: 1}")
    assert assumed is not None
    assert (assumed.mtbf_assumed, assumed.wait_assumed, assumed.wait_h) == (True, True, 1.0)
    assert "assumed 6,300 h between failures of a node" in assumed.lines()[0]
    assert "assumed 1 h in the queue after each" in assumed.lines()[0]


def test_the_plan_says_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    profile = yaml.safe_load((Path(__file__).parents[2] / "clusters" / "devcluster.yaml").read_text())
    profile["reliability"] = {"node_mtbf_h": 1000}
    path = tmp_path / "devcluster.yaml"
    path.write_text(yaml.safe_dump(profile))
    command = ["hpcrl", "plan", "quickstart", "--cluster", str(path)]
    for setting in ("engine.replicas=2", "job.layout=single", "job.spare_nodes={trainer: 1}"):
        command += ["--set", setting]

    def said(*more: str) -> str:
        monkeypatch.setattr(sys, "argv", [*command, *more])
        with contextlib.suppress(SystemExit):
            main()
        return capsys.readouterr().out

    assert "spares    1 of 4 nodes: one failure in 13.9 days (profile: 1,000 h between failures" in said()
    document = json.loads(said("--json"))
    assert document["forecast"]["spares"]["break_even_wait_h"] == pytest.approx(24.0 / (24.0 * 3 / 1000 * 3))
    assert document["layout"]["components"][0]["spares"] == 1
