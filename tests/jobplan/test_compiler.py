"""Whether there is what compiles the trainer's layers is said at submit, as far as it is seen from there."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcrl.config.load import load_cluster, load_recipe
from hpcrl.errors import ConfigError
from hpcrl.jobplan import make_plan
from hpcrl.jobplan.packages import check_compiler

RUN_DIR = Path("/runs/night-1")


def check(cluster: str, *settings: str, recipe: str = "quickstart") -> list[str]:
    loaded, site = load_recipe(recipe, ["trainer.memory.compile=true", *settings]), load_cluster(cluster).value
    return check_compiler(loaded, make_plan(loaded.value, site, "n", RUN_DIR), site)


def test_a_missing_compiler_is_named_at_submit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(ConfigError, match=r"a C\+\+ compiler, and there is none \(g\+\+\)") as error:
        check("local")
    assert "or set trainer.memory.compile: false" in str(error.value)
    assert check("local", "trainer.memory.compile=false") == []
    monkeypatch.setenv("CXX", "other-cxx")
    (tmp_path / "other-cxx").write_text("#!/bin/sh\n")
    (tmp_path / "other-cxx").chmod(0o755)
    assert check("local") == []


def test_what_nodes_have_is_not_seen() -> None:
    loaded, site = load_recipe("quickstart", ["trainer.memory.compile=true"]), load_cluster("devcluster").value
    plan = make_plan(loaded.value, site, "n", RUN_DIR)
    without = tuple(component.model_copy(update={"gpus_per_node": 0}) for component in plan.layout.components)
    plan = plan.model_copy(update={"layout": plan.layout.model_copy(update={"components": without})})
    (note,) = check_compiler(loaded, plan, site)
    assert "a C++ compiler on its nodes was not checked" in note


def test_trainers_on_gpus_need_triton(tmp_path: Path) -> None:
    settings = ("trainer.memory.activation_checkpointing=full", "trainer.precision.fp8=null")
    loaded = load_recipe("glm5_swe", ["trainer.memory.compile=true", *settings])
    site = load_cluster("h200-28").value
    plan = make_plan(loaded.value, site, "n", RUN_DIR)
    for name, code in (("has", 0), ("lacks", 3), ("broken", 1)):
        (tmp_path / name).write_text(f"#!/bin/sh\nexit {code}\n")
        (tmp_path / name).chmod(0o755)

    def found(python: Path) -> list[str]:
        groups = tuple(group.model_copy(update={"python": str(python)}) for group in plan.groups)
        return check_compiler(loaded, plan.model_copy(update={"groups": groups}), site)

    assert found(tmp_path / "has") == []
    assert "lacks has no triton" in found(tmp_path / "lacks")[0]
    assert "could not be checked" in found(tmp_path / "broken")[0]
    assert "not visible here" in found(Path("/only/on/nodes/python"))[0]
