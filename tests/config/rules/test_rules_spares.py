"""Where spare nodes can be asked for, and what they become in a plan."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcrl.config.load import load_cluster, load_recipe
from hpcrl.config.rules.spare_rules import SPARE_RULES
from hpcrl.config.rules.table import check_rules
from hpcrl.errors import ConfigError
from hpcrl.jobplan import make_plan

SIZES = ("trainer.nodes=2", "trainer.ranks=2", "engine.replicas=2")


def refusal(cluster: str, *settings: str) -> str:
    with pytest.raises(ConfigError) as caught:
        check_rules(load_recipe("quickstart", (*SIZES, *settings)), load_cluster(cluster))
    return str(caught.value)


def test_one_machine_has_no_spare_node() -> None:
    said = refusal("local", "trainer.nodes=1", "job.spare_nodes={trainer: 1}")
    assert "job.spare_nodes" in said
    assert "local is one machine without Slurm" in said
    assert "hint: leave job.spare_nodes out, or choose a Slurm site with --cluster" in said


def test_a_site_whose_nodes_cannot_ask_slurm(tmp_path: Path) -> None:
    text = (Path(__file__).parents[3] / "clusters" / "devcluster.yaml").read_text()
    assert "scontrol_on_nodes: true" in text
    path = tmp_path / "devcluster.yaml"
    path.write_text(text.replace("scontrol_on_nodes: true", "scontrol_on_nodes: false"))
    assert "capabilities.scontrol_on_nodes" in refusal(str(path), "job.spare_nodes={trainer: 1}")


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (("job.spare_nodes={decode: 1}",), "decode has no nodes of its own in this run"),
        (("job.spare_nodes={engine: 1}", "job.layout=elastic"), "each engine is a job of its own"),
        (
            ("job.spare_nodes={trainer: 1}", "engine.replicas=1", "job.layout=hetjob"),
            "the component of engine has 1 node: Slurm ends the whole job when any node goes down",
        ),
        (("job.spare_nodes={trainer: 1}", "engine.replicas=1"), "the component of engine has 1 node"),
        (("job.spare_nodes={trainer: 27}",), "31 nodes of partition"),
        (("job.spare_nodes={router: 1}",), "router"),
    ],
)
def test_refused_with_the_reason(settings: tuple[str, ...], says: str) -> None:
    assert says in refusal("devcluster", *settings)


@pytest.mark.parametrize(
    ("settings", "spares"),
    [
        (("job.spare_nodes={trainer: 1, engine: 2}", "job.layout=hetjob"), [1, 2]),
        (("job.spare_nodes={trainer: 1}", "engine.replicas=1", "job.layout=single"), [1]),
        (("job.spare_nodes={trainer: 1, engine: 1}", "engine.replicas=1"), [1, 1]),
        (("job.spare_nodes={trainer: 1, engine: 2}", "job.layout=single"), [3]),
        (("job.spare_nodes={trainer: 1}", "job.layout=elastic"), [1, 0]),
        (("job.spare_nodes={trainer: 0}", "engine.replicas=1", "job.layout=hetjob"), [0, 0]),
    ],
)
def test_spare_nodes_of_each_component(settings: tuple[str, ...], spares: list[int]) -> None:
    loaded, site = load_recipe("quickstart", (*SIZES, *settings)), load_cluster("devcluster")
    check_rules(loaded, site)
    layout = make_plan(loaded.value, site.value, "r", Path("/r")).layout
    assert [component.spares for component in layout.components] == spares
    assert layout.nodes == sum((c.nodes + c.spares) * c.jobs for c in layout.components)


@pytest.mark.parametrize(("spares", "segments"), [("{}", [6, 2]), ("{trainer: 3}", [3, 2]), ("{engine: 1}", [6, 1])])
def test_a_segment_divides_the_nodes_with_the_spare_ones(spares: str, segments: list[int]) -> None:
    """Slurm refuses another one."""
    settings = ("trainer.nodes=6", "trainer.ranks=6", "engine.nodes=2", "engine.replicas=3", "job.layout=hetjob")
    settings += ("engine.backend=vllm", f"job.spare_nodes={spares}")
    recipe, site = load_recipe("quickstart", settings).value, load_cluster("h200-28").value
    layout = make_plan(recipe, site, "r", Path("/r")).layout
    assert [component.segment for component in layout.components] == segments
    assert all(component.asked % component.segment == 0 for component in layout.components if component.segment)


def test_engines_are_those_of_both_sides() -> None:
    job = load_recipe("quickstart", ("job.spare_nodes={engine: 2, decode: 1}",)).value.job
    assert [job.spares_of(role) for role in ("trainer", "prefill", "decode", "engine")] == [0, 2, 1, 2]


def test_each_rule_has_a_case() -> None:
    """The names stand in the refusals above."""
    said = refusal("local", "trainer.nodes=1", "job.spare_nodes={trainer: 1}")
    said += refusal("devcluster", "job.spare_nodes={decode: 1}")
    said += refusal("devcluster", "job.spare_nodes={trainer: 1}", "engine.replicas=1", "job.layout=hetjob")
    missing = {rule.name for rule in SPARE_RULES if f"[{rule.name}]" not in said}
    assert missing == {"spares-need-scontrol"}
