"""The installed vLLM's own parser, asked as a submit asks it."""

from __future__ import annotations

from pathlib import Path

import pytest
from vllm_environment import VLLM_PYTHON

from hpcrl.config.load import load_cluster, load_recipe
from hpcrl.config.plan import Plan, Role
from hpcrl.errors import ConfigError
from hpcrl.jobplan import check_engine_flags, make_plan

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1800)]

ENGINES = (Role.ENGINE, Role.PREFILL, Role.DECODE)


def plan_with_vllm(recipe: str, cluster: str, *overrides: str) -> Plan:
    loaded, site = load_recipe(recipe, overrides).value, load_cluster(cluster).value
    own = site.model_copy(update={"vllm_python": str(VLLM_PYTHON)})
    return make_plan(loaded, own, "night-1", Path("/runs/night-1"))


#: recipe, site and settings
RENDERED = (
    ("quickstart_vllm", "local", ()),
    ("glm5_swe", "h200-28", ("engine.memory.kv_offload_gib=400", "engine.memory.kv_offload_disk_gib=2000")),
    # KV goes from prefill to decode by Mooncake, and through the pool
    ("glm5_swe", "h200-28", ("engine.kv_transfer=mooncake", "engine.kv_store={segment_gib: 931}")),
)


def test_vllm_takes_what_we_render() -> None:
    """Wide replicas too: vLLM checks the flags of its data-parallel ranks against each other. All engines in one plan:
    an interpreter is asked once, because loading vLLM takes longer than all else."""
    plans = [plan_with_vllm(recipe, cluster, *overrides) for recipe, cluster, overrides in RENDERED]
    engines = [group for plan in plans for group in plan.groups if group.role in ENGINES]
    assert [group.role for group in engines] == [Role.ENGINE, *(Role.PREFILL, Role.DECODE) * 2]
    whole = plans[0].model_copy(update={"groups": tuple(engines)})
    assert check_engine_flags(load_recipe("quickstart_vllm"), whole) == []


def test_a_flag_that_vllm_does_not_know_is_refused_before_a_job_is_queued() -> None:
    """Whichever of the engines has it."""
    override = "engine.decode.vllm_args.enforce-eagerly=true"
    with pytest.raises(ConfigError, match=r"vLLM refuses flags of decode: .*enforce-eagerly"):
        check_engine_flags(load_recipe("glm5_swe", [override]), plan_with_vllm("glm5_swe", "h200-28", override))
