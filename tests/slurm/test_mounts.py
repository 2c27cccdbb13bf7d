"""Paths that would come apart among the mounts of a container are refused before anything is submitted."""

from __future__ import annotations

from pathlib import Path

import pytest
from plans import APPTAINER, CWD, PYXIS, allocations_for, plan_for

from hpcrl.errors import UsageError
from hpcrl.slurm.launch_arguments import launch_replica
from hpcrl.slurm.scripts import in_job_script, run_scripts

SITES = pytest.mark.parametrize("container", [PYXIS, APPTAINER], ids=["pyxis", "apptainer"])
NAMES = pytest.mark.parametrize("name", ["a,b", "a:b", "a\nb", "a\\b"])


@SITES
@NAMES
def test_working_directories(container: dict[str, object], name: str, tmp_path: Path, monkeypatch) -> None:
    plan, site = plan_for("quickstart", "devcluster", container=container)
    (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / name)
    for make in (
        lambda: run_scripts(plan, site, run_id="r", number=1),
        lambda: in_job_script(plan, site, run_id="r", run_dir=tmp_path),
        lambda: launch(plan, tmp_path / name),
    ):
        with pytest.raises(UsageError, match=r"the working directory is .* separates mounts"):
            make()


def launch(plan, cwd: Path):
    group = plan.groups[0]
    return launch_replica(plan, group, 0, allocations=allocations_for(plan), command=["python"], cwd=cwd)


@SITES
@NAMES
@pytest.mark.parametrize("what", ["runs root", "model.path", "secret", "paths.cache", "paths.scratch"])
def test_what_is_mounted_in_addition(container: dict[str, object], name: str, what: str) -> None:
    path, words, profile = f"/data/{name}/x", [], {}
    run_dir = Path(path) / "night-1" if what == "runs root" else Path("/runs/night-1")
    if what == "model.path":
        words = [f"model.path='{path}'" if "\n" not in name else "model.path=/data/a,b"]
    elif what == "secret":
        profile = {"secrets": {"HF_TOKEN": path}}
    elif what.startswith("paths."):
        site = plan_for("quickstart", "devcluster")[1]
        profile = {"paths": {**site.paths.model_dump(), what.removeprefix("paths."): path}}
    with pytest.raises(UsageError, match=rf"{what}.* separates mounts"):
        plan_for("quickstart", "devcluster", *words, run_dir=run_dir, container=container, **profile)


@NAMES
def test_without_a_container_any_name_will_do(name: str, tmp_path: Path, monkeypatch) -> None:
    plan, _ = plan_for("quickstart", "devcluster", run_dir=Path("/runs/a,b/c:d/night-1"))
    assert launch(plan, CWD / name).argv


@SITES
def test_conversations_of_a_supervised_run_are_mounted(container: dict[str, object]) -> None:
    example = str(Path(__file__).parents[2] / "docs/examples/conversations/recipe.yaml")
    words = ["sft.data=/shared/talks.jsonl", "sft.held_out_share=null", "sft.held_out_data=/shared/held-out.jsonl"]
    plan, _ = plan_for(example, "devcluster", *words, container=container)
    assert plan.container is not None
    names = ("talks.jsonl", "held-out.jsonl")
    assert {f"/shared/{name}:/shared/{name}:ro" for name in names} <= set(plan.container.mounts)
    with pytest.raises(UsageError, match=r"the data of sft.* separates mounts"):
        plan_for(example, "devcluster", "sft.data=/shared/a,b.jsonl", container=container)
