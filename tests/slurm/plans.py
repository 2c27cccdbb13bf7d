"""Plans for the tests of this directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hpcrl.config.cluster import CLUSTER_KINDS, SlurmCluster
from hpcrl.config.load import load_cluster, load_recipe
from hpcrl.config.plan import Plan
from hpcrl.config.rules.table import check_rules
from hpcrl.jobplan import absolute_paths, make_plan
from hpcrl.slurm.launch_arguments import Allocation

CWD = Path("/home/ada/project")


def plan_for(
    recipe: str, cluster: str, *overrides: str, run_dir: Path = Path("/runs/night-1"), **profile: Any
) -> tuple[Plan, SlurmCluster]:
    """The plan of a packaged recipe on a packaged profile, and the profile with other values."""
    loaded, site = load_recipe(recipe, overrides), load_cluster(cluster)
    check_rules(loaded, site)
    data = {**site.value.model_dump(), **profile}
    value = CLUSTER_KINDS["slurm"].model_validate(data)
    assert isinstance(value, SlurmCluster)
    return make_plan(absolute_paths(loaded.value, CWD), value, run_dir.name, run_dir), value


def allocations_for(plan: Plan) -> dict[tuple[int, int], Allocation]:
    """Made-up nodes; jobs of an elastic plan beside the first have ids."""
    found, number = {}, 1
    for index, component in enumerate(plan.layout.components):
        for job in range(component.jobs):
            hosts = tuple(f"n{number + i:03d}" for i in range(component.nodes))
            other = plan.layout.kind == "elastic" and index > 0
            found[index, job] = Allocation(hosts, f"{700 + index}{job}" if other else None)
            number += component.nodes
    return found


APPTAINER = {"kind": "apptainer", "image": "/images/hpcrl.sif", "mounts": ("/data:/data:ro",), "mount_home": True}
PYXIS = {"kind": "pyxis", "image": "/images/hpcrl.sqsh", "mounts": ("/data:/data:ro",)}
