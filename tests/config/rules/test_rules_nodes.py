"""Rules about nodes count those of the roles that a run has."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcrl.config.cluster import SlurmCluster
from hpcrl.config.load import load_cluster, load_recipe
from hpcrl.config.node_demands import demands
from hpcrl.config.rules.table import check_rules
from hpcrl.errors import ConfigError


def test_an_evaluation_needs_no_nodes_of_a_trainer(tmp_path: Path) -> None:
    text = (Path(__file__).parents[3] / "clusters/h200-28.yaml").read_text(encoding="utf-8")
    assert text.count("nodes: 28") == 1
    path = tmp_path / "h200-28.yaml"
    path.write_text(text.replace("nodes: 28", "nodes: 16"), encoding="utf-8")
    site = load_cluster(str(path))
    assert isinstance(site.value, SlurmCluster)
    with pytest.raises(
        ConfigError, match=r"28 nodes of partition .* \(trainer 12 \+ engine.prefill 8 \+ engine.decode 8\)"
    ):
        check_rules(load_recipe("glm5_swe", ()), site)
    evaluation = load_recipe("glm5_swe", ("job.payload=evaluation",))
    assert [demand.role.value for demand in demands(evaluation.value, site.value)] == ["prefill", "decode"]
    check_rules(evaluation, site)
