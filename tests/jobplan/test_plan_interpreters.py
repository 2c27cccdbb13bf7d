"""Which interpreter runs each role of a plan, and the packages that each must have."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from vllm_plan_testing import RUN_DIR, with_values

from hpcrl.config.load import load_cluster, load_recipe
from hpcrl.config.plan import Role
from hpcrl.errors import ConfigError
from hpcrl.jobplan import absolute_site_paths, check_packages, check_pythons, make_plan
from hpcrl.jobplan.groups import make_groups


def test_interpreters_by_role(tmp_path: Path) -> None:
    (tmp_path / "env" / "bin").mkdir(parents=True)
    link = tmp_path / "env" / "bin" / "python"
    link.symlink_to(sys.executable)
    site = absolute_site_paths(with_values("local", vllm_python="env/bin/python"), tmp_path)
    # the link itself: behind it is an interpreter without the environment's packages
    assert site.python_of("decode", backend="vllm") == str(link)
    assert site.python_of("engine", backend="embedded") is None
    # vllm-router comes with vLLM's environment, also in front of others
    assert site.python_of("router", backend="embedded") == str(link)
    assert site.python_of("trainer", backend="vllm") is None
    by_role = {"engine": "/e", "prefill": "/p", "trainer": "/t"}
    named = with_values("local", vllm_python="/v", python_by_role=by_role)
    assert [named.python_of(role, backend="vllm") for role in ("prefill", "decode", "trainer")] == ["/p", "/e", "/t"]
    groups = {g.role: g for g in make_groups(load_recipe("quickstart_vllm").value, named, "night-1")}
    assert (groups[Role.ENGINE].python, groups[Role.TRAINER].python) == ("/e", "/t")
    assert groups[Role.ORCHESTRATOR].python is None


def test_paths_in_containers_stay(tmp_path: Path) -> None:
    container = {"kind": "pyxis", "image": "/images/hpcrl.sqsh"}
    site = with_values("devcluster", container=container, vllm_python="opt/vllm/bin/python")
    assert absolute_site_paths(site, tmp_path).vllm_python == "opt/vllm/bin/python"


def test_a_missing_interpreter_is_named(tmp_path: Path) -> None:
    recipe = load_recipe("quickstart_vllm").value
    loaded = load_cluster("local")
    site = loaded.__class__(
        with_values("local", vllm_python=str(tmp_path / "none")), source=loaded.source, origins=loaded.origins
    )
    plan = make_plan(recipe, site.value, "night-1", RUN_DIR)
    with pytest.raises(ConfigError, match="bootstrap") as error:
        check_pythons(plan, site)
    assert str(tmp_path / "none") in str(error.value)


def test_an_interpreter_on_nodes_alone_is_not_missing() -> None:
    recipe = load_recipe("quickstart_vllm").value
    loaded = load_cluster("devcluster")
    site = loaded.__class__(
        with_values("devcluster", vllm_python="/only/on/nodes/python"), source=loaded.source, origins=loaded.origins
    )
    check_pythons(make_plan(recipe, site.value, "night-1", RUN_DIR), site)


def test_embedded_engines_in_a_pool_need_its_client(tmp_path: Path) -> None:
    """In their own environment, which is another than that of vLLM's engines."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 3\n")
    python.chmod(0o755)
    recipe = load_recipe("quickstart", ("engine.kv_store={segment_gib: 0.5}",))
    for role in ("store", "engine"):
        site = with_values("local", python_by_role={role: str(python)})
        with pytest.raises(ConfigError, match=r"engine\.kv_store: .* has no mooncake") as error:
            check_packages(recipe, make_plan(recipe.value, site, "n", RUN_DIR))
        assert "[store]'" in str(error.value)


def test_a_router_that_is_not_installed_is_a_finding(tmp_path: Path) -> None:
    """For the interpreter that will run it; where that cannot be seen, a note says so."""
    recipe = load_recipe("quickstart_vllm")
    # that of the tests: the router's package is in the environment of engines alone
    with pytest.raises(ConfigError, match=r"has no vllm_router") as error:
        check_packages(recipe, make_plan(recipe.value, with_values("local", vllm_python=sys.executable), "n", RUN_DIR))
    assert "python_by_role.router" in str(error.value)
    fake = tmp_path / "python"
    fake.write_text("#!/bin/sh\nexit 0\n")
    fake.chmod(0o755)
    installed = with_values("local", vllm_python=str(fake))
    assert check_packages(recipe, make_plan(recipe.value, installed, "n", RUN_DIR)) == []
    hidden = with_values("local", vllm_python="/only/on/nodes/python")
    assert "not visible here" in check_packages(recipe, make_plan(recipe.value, hidden, "n", RUN_DIR))[0]
    direct = load_recipe("quickstart_vllm", ["engine.router.kind=direct"])
    assert check_packages(direct, make_plan(direct.value, installed, "n", RUN_DIR)) == []


def test_weights_over_the_fabric_need_mooncake_on_both_sides(tmp_path: Path) -> None:
    recipe = load_recipe("quickstart", ("handoff.transport=fabric",))
    without, there = tmp_path / "without", tmp_path / "there"
    without.write_text("#!/bin/sh\nexit 3\n")
    there.write_text("#!/bin/sh\nexit 0\n")
    for python in (without, there):
        python.chmod(0o755)
    for role, other in (("engine", "trainer"), ("trainer", "engine")):
        site = with_values("local", python_by_role={role: str(without), other: str(there)})
        with pytest.raises(ConfigError, match=r"handoff\.transport: .* has no mooncake") as error:
            check_packages(recipe, make_plan(recipe.value, site, "n", RUN_DIR))
        assert f"python_by_role.{role}, or handoff.transport: share" in str(error.value)


def test_a_pool_of_rollouts_needs_its_package_where_it_is_written_and_read(tmp_path: Path) -> None:
    """And two ports above the orchestrator's, where files need one."""
    recipe = load_recipe("quickstart", ["rollouts.warehouse.backend=mooncake"])
    without, there = tmp_path / "without", tmp_path / "there"
    without.write_text("#!/bin/sh\nexit 3\n")
    there.write_text("#!/bin/sh\nexit 0\n")
    for python in (without, there):
        python.chmod(0o755)

    def checked(**pythons: Path) -> list[str]:
        site = with_values("local", python_by_role={role: str(path) for role, path in pythons.items()})
        return check_packages(recipe, make_plan(recipe.value, site, "n", RUN_DIR))

    assert checked(orchestrator=there, trainer=there) == []
    for role, other in (("orchestrator", "trainer"), ("trainer", "orchestrator")):
        with pytest.raises(ConfigError, match=r"has no mooncake") as error:
            checked(**{role: without, other: there})
        assert f"python_by_role.{role}, or backend: embedded" in str(error.value)
    files = load_recipe("quickstart")
    ports = [
        next(g.ports for g in make_plan(r.value, with_values("local"), "n", RUN_DIR).groups if g.role == "orchestrator")
        for r in (recipe, files, load_recipe("quickstart", ["rollouts.warehouse.directory=null"]))
    ]
    assert ports == [3, 2, 1]
