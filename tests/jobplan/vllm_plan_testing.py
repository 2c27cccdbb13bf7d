"""What tests of plans of engines share: groups of a recipe on a site, and words of their commands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hpcrl.config.cluster import CLUSTER_KINDS, ClusterProfile
from hpcrl.config.load import load_cluster, load_recipe
from hpcrl.config.plan import Role, RoleGroup
from hpcrl.jobplan.groups import make_groups

RUN_DIR = Path("/runs/night-1")
#: a rank on each GPU of a node
WIDE = ("engine.device=auto", "engine.kv_store=null")
SIDES = ("engine.prefill={replicas: 2, nodes: 1}", "engine.decode={replicas: 1, nodes: 1}", "engine.replicas=1")
EMBEDDED_SIDES = (*SIDES, "engine.backend=embedded", "engine.kv_store=null", "engine.vllm_args={}")


def groups_of(recipe: str, cluster: str, *overrides: str, **profile: Any) -> dict[Role, RoleGroup]:
    site = with_values(cluster, **profile)
    return {group.role: group for group in make_groups(load_recipe(recipe, overrides).value, site, "night-1")}


def with_values(cluster: str, **profile: Any) -> ClusterProfile:
    site = load_cluster(cluster).value
    return CLUSTER_KINDS[site.kind].model_validate({**site.model_dump(), **profile})


def flags_of(group: RoleGroup) -> dict[str, str | bool]:
    """Flags with their values; True for those without."""
    flags: dict[str, str | bool] = {}
    words = list(group.command)
    for word, after in zip(words, [*words[1:], "--"], strict=True):
        if word.startswith("--"):
            flags[word[2:]] = True if after.startswith("--") else after
    return flags


def words_after(group: RoleGroup, program: str) -> list[str]:
    """The words of one of the programs that a command runs one after the other."""
    words = list(group.command)
    words = words[words.index(program) + 1 :]
    return words[: words.index("--")] if "--" in words else words
