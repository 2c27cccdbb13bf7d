"""What each stage of `hpcrl site first-run` says of a site that is not as it should be."""

from __future__ import annotations

import os
import shlex
import stat
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from start_models import write_tiny_model
from test_node_findings import GOOD
from test_profiles import RECORDED

from hpcrl.bringup import run_stages, site_stages, stage, tiny_recipe
from hpcrl.bringup.node_jobs import NodeAnswers
from hpcrl.bringup.records import FirstRunState, StageRecord, StageStatus
from hpcrl.bringup.stage import FirstRunRequest, SiteBench, StageStoppedError
from hpcrl.bringup.tiny_recipe import RECIPE_FILE, make_model, tiny_settings, write_recipe
from hpcrl.config.cluster import SlurmCluster
from hpcrl.config.load import load_cluster, load_recipe
from hpcrl.config.rules.table import check_rules
from hpcrl.errors import ConfigError, UsageError
from hpcrl.planning.verdict import Verdict
from hpcrl.sites.check_job import JobReport
from hpcrl.sites.network_check import NetworkReport
from hpcrl.sites.profile_check import CheckFinding, Severity

#: of the recorded Slurm
PROFILE = """
extends: devcluster
name: mine
vllm_python: null
paths: {{runs_root: {runs_root}}}
partitions: {{gpu: {{nodes: 4, node: {{memory_gib: 1.9}}}}}}
"""


class Site:
    """A directory with a profile, and a bench on it."""

    def __init__(self, tmp_path: Path, **options: Any) -> None:
        self.place = tmp_path
        self.runs_root = tmp_path / "runs"
        self.profile = tmp_path / "mine.yaml"
        self.write()
        self.said: list[str] = []
        self.state = FirstRunState(cluster=str(self.profile))
        request = FirstRunRequest(
            cluster=str(self.profile), directory=tmp_path / "first", cwd=tmp_path, environ={}, command="again"
        )
        request.directory.mkdir()
        self.bench = SiteBench(replace(request, **options), self.state, self.said.append)

    def write(self, more: str = "", **values: Any) -> None:
        values = {"runs_root": self.runs_root, **values}
        self.profile.write_text(PROFILE.format(**values) + more)

    def found(self, stage_name: str, **facts: Any) -> None:
        self.state.stages[stage_name] = StageRecord(status=StageStatus.OK, facts=facts)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HPCRL_RUNS_ROOT", raising=False)
    monkeypatch.setattr(stage, "reachable_slurm", lambda: RECORDED)
    return Site(tmp_path)


def stopped(call: Any, bench: SiteBench) -> StageStoppedError:
    with pytest.raises(StageStoppedError) as caught:
        call(bench)
    return caught.value


# -- init -------------------------------------------------------------------------------------------------------------


def drafting(site: Site, **options: Any) -> SiteBench:
    return SiteBench(replace(site.bench.request, cluster="fresh", **options), site.state, site.said.append)


def test_a_draft_with_all_that_only_a_person_knows_continues(site: Site) -> None:
    bench = drafting(
        site, runs_root=str(site.runs_root), fabric="ethernet", python=sys.executable, vllm_python="/shared/vllm/python"
    )
    outcome = site_stages.describe_site(bench)
    assert outcome.facts == {"profile": "clusters/fresh.yaml", "drafted": True}
    profile = load_cluster("clusters/fresh.yaml").value
    assert profile.vllm_python == "/shared/vllm/python"
    assert {str(role) for role in profile.python_by_role} == {"trainer", "orchestrator"}
    # the same command goes on; another one is told that it changed nothing
    assert site_stages.describe_site(bench).warnings == ()
    other = SiteBench(
        replace(bench.request, runs_root="/elsewhere", fabric="roce", python="/p", vllm_python="/v"), site.state, print
    )
    (warning,) = site_stages.describe_site(other).warnings
    assert "differs from --runs-root, --fabric, --python, --vllm-python: these options changed nothing" in warning


def test_a_draft_with_change_me_stops_and_names_the_lines(site: Site) -> None:
    error = stopped(site_stages.describe_site, drafting(site))
    assert "partitions.gpu.node.fabric.kind: is still to be filled in" in str(error)
    assert "paths.runs_root: is still to be filled in" in str(error)
    assert "hint: fill in what the file lacks" in str(error)
    assert error.commands[0].endswith(" clusters/fresh.yaml")
    # the file stays for the person who fills it in
    assert (site.place / "clusters/fresh.yaml").is_file()


@pytest.mark.parametrize("name", ["-x", "..", "a b", "moon;rm", ""])
def test_what_is_not_a_name_is_drafted_nowhere(site: Site, name: str) -> None:
    bench = SiteBench(replace(site.bench.request, cluster=name), site.state, site.said.append)
    with pytest.raises(UsageError, match="cannot be the name of a profile"):
        site_stages.describe_site(bench)
    assert not (site.place / "clusters").exists()


def test_a_file_that_is_not_there_is_not_drafted(site: Site) -> None:
    bench = SiteBench(replace(site.bench.request, cluster="clusters/other.yaml"), site.state, site.said.append)
    error = stopped(site_stages.describe_site, bench)
    assert "clusters/other.yaml: no such file" in str(error)


def test_a_machine_without_slurm_has_another_way(site: Site) -> None:
    site.profile.write_text("extends: local\nname: mine\n")
    error = stopped(site_stages.describe_site, site.bench)
    assert "is of a machine without Slurm" in str(error)
    assert error.commands == ("hpcrl submit quickstart --follow    # the loop on this machine",)


# -- check ------------------------------------------------------------------------------------------------------------


def test_a_good_profile_passes_the_check(site: Site) -> None:
    outcome = site_stages.check_site(site.bench)
    assert outcome.facts["slurm"] == "22.05"
    assert outcome.warnings == ()
    # nothing is left
    assert list(site.runs_root.iterdir()) == []


def test_a_partition_that_does_not_exist_stops(site: Site) -> None:
    site.write("placement: {default: moon}\n")
    site.profile.write_text(site.profile.read_text().replace("partitions: {gpu:", "partitions: {gpu: null, moon:"))
    raw = yaml.safe_load(site.profile.read_text())
    gpu = load_cluster("devcluster").value.model_dump(mode="json")["partitions"]["gpu"]
    raw["partitions"] = {"moon": {**gpu, "nodes": 4}, "gpu": {**gpu, "nodes": 4}}
    site.profile.write_text(yaml.safe_dump(raw))
    error = stopped(site_stages.check_site, site.bench)
    assert "Slurm has no partition 'moon' that you may see (it has: gpu) [partition-missing]" in str(error)
    assert "hint: correct its name" in str(error)
    assert error.commands[0].startswith(f"hpcrl cluster check {site.profile}")


def test_a_profile_that_is_wrong_in_itself_stops(site: Site) -> None:
    site.write("limits: {time_limit_h: -1}\n")
    with pytest.raises(ConfigError, match="time_limit_h"):
        site_stages.check_site(site.bench)


@pytest.mark.parametrize("path", ["/proc/hpcrl/runs", "file/below"])
def test_a_runs_root_that_refuses_stops(site: Site, path: str) -> None:
    (site.place / "file").write_text("")
    site.write(runs_root=path)
    error = stopped(site_stages.check_site, site.bench)
    assert f"the runs root (paths.runs_root of {site.profile}) cannot be written" in str(error)
    assert "hint: correct the path, or its rights" in str(error)


def test_a_runs_root_that_hangs_stops() -> None:
    wait = threading.Event()
    try:
        with pytest.raises(
            StageStoppedError, match=r"the mount did not answer within 0\.1 s\n    hint: its mount hangs"
        ):
            site_stages.within(0.1, lambda: wait.wait(60), "the mount")
    finally:
        wait.set()


# -- check-job --------------------------------------------------------------------------------------------------------


def test_an_interpreter_without_vllm_stops_at_the_nodes(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    what = "n1: /shared/vllm/python (vllm) has no vLLM, which it needs"
    found = [
        CheckFinding("imports", Severity.ERROR, "vllm_python", what, "pip install it"),
        CheckFinding("open-files", Severity.WARNING, "partitions.gpu.node", "few files", "set LimitNOFILE"),
    ]
    report = JobReport([GOOD], NetworkReport(skipped="there is one node"))
    monkeypatch.setattr(site_stages, "ask_nodes", lambda *_, **__: NodeAnswers(found, {"gpu": report}))
    error = stopped(site_stages.ask_the_nodes, site.bench)
    assert "1 error\n" in str(error)
    assert f"vllm_python: {what} [imports]\n    hint: pip install it" in str(error)
    assert "few files" not in str(error)
    assert error.facts["gpus"] == {"gpu": 8}
    monkeypatch.setattr(site_stages, "ask_nodes", lambda *_, **__: NodeAnswers(found[1:], {"gpu": report}))
    outcome = site_stages.ask_the_nodes(site.bench)
    assert outcome.status is StageStatus.WARNING
    assert "few files [open-files]\n    hint: set LimitNOFILE" in outcome.warnings[0]


# -- the tiny run -----------------------------------------------------------------------------------------------------


def test_nodes_without_a_driver_run_on_processors(site: Site) -> None:
    cluster = site.bench.profile().value
    assert tiny_settings(site.bench, cluster)["trainer"] == {"nodes": 1, "ranks": 8, "dtype": "bfloat16"}
    site.found("check-job", gpus={"gpu": 0})
    settings = tiny_settings(site.bench, cluster)
    assert settings["trainer"] == {"nodes": 1, "ranks": 1}
    assert settings["engine"] == {"backend": "embedded", "replicas": 1}
    with_vllm = cluster.model_copy(update={"vllm_python": "/shared/vllm/python"})
    engine = tiny_settings(site.bench, with_vllm)["engine"]
    assert (engine["backend"], engine["device"]) == ("vllm", "cpu")
    single = cluster.capabilities.model_copy(update={"hetjob": False})
    assert tiny_settings(site.bench, cluster.model_copy(update={"capabilities": single}))["job"] == {"layout": "single"}


@pytest.mark.parametrize("name", ["h200-28", "roce-h100", "pyxis-site", "devcluster"])
@pytest.mark.parametrize("vllm", [False, True], ids=["embedded", "vllm"])
@pytest.mark.parametrize("gpus", [0, 8])
def test_the_recipe_of_a_site_holds_all_rules(site: Site, name: str, vllm: bool, gpus: int) -> None:
    profile = load_cluster(name)
    assert isinstance(profile.value, SlurmCluster)
    cluster = profile.value.model_copy(update={"vllm_python": "/shared/vllm/python" if vllm else None})
    site.found("check-job", gpus=dict.fromkeys(cluster.partitions, gpus))
    recipe = load_recipe(str(write_recipe(site.bench, cluster)))
    check_rules(recipe, replace(profile, value=cluster))
    assert recipe.value.engine.backend == ("vllm" if vllm else "embedded")
    assert recipe.value.trainer.ranks == max(1, gpus)
    assert recipe.value.trainer.nodes + recipe.value.engine_nodes == 2
    assert Path(recipe.value.model.path).is_relative_to(site.bench.runs_root(cluster))


def test_sixteen_gpus_have_an_expert_each(site: Site) -> None:
    cluster = site.bench.profile().value
    node = cluster.partitions["gpu"].node.model_copy(update={"gpus": 16})
    partitions = {"gpu": cluster.partitions["gpu"].model_copy(update={"node": node})}
    cluster = cluster.model_copy(update={"partitions": partitions, "vllm_python": "/shared/vllm/python"})
    recipe = load_recipe(str(write_recipe(site.bench, cluster))).value
    assert recipe.model.warmup is not None
    assert recipe.model.warmup.num_experts == 16
    eight = load_recipe(str(write_recipe(site.bench, site.bench.profile().value))).value
    # another model has another place
    assert recipe.model.path != eight.model.path


def interpreter(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def make(site: Site, python: Path) -> None:
    site.write(f"python_by_role: {{trainer: {python}}}\n")
    cluster = site.bench.profile().value
    file = write_recipe(site.bench, cluster)
    make_model(load_recipe(str(file)).value, file, cluster, site.place, site.said.append)


def test_an_interpreter_that_cannot_make_the_model_is_quoted(site: Site) -> None:
    python = interpreter(site.place / "python", "echo no torch here; exit 3")
    with pytest.raises(
        StageStoppedError, match=r"python could not make the start model; its last output:\n    no torch here"
    ) as caught:
        make(site, python)
    # the command finds the recipe from wherever it is called
    file = site.bench.request.directory / RECIPE_FILE
    assert caught.value.commands == (f"{python} -m hpcrl warmup {file}    # where torch is installed",)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("apptainer", ["apptainer", "exec", "--bind", "{place}:{place}", "--bind", "{root}:{root}", "--pwd"]),
        ("pyxis", ["srun", "--nodes=1", "--ntasks=1", "--partition=gpu", "--container-image=/images/hpcrl.sqsh"]),
    ],
)
def test_the_model_of_a_site_with_containers_is_made_in_the_image(
    site: Site, kind: str, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The login node has no torch; the command that is printed makes the model of this recipe in the image."""
    monkeypatch.setattr(sys, "executable", str(interpreter(site.place / "login", "echo no torch here; exit 3")))
    image = "/images/hpcrl.sqsh"
    site.write(f"container: {{kind: {kind}, image: {image}, python: /opt/hpcrl/trainer/bin/python}}\n")
    cluster = site.bench.profile().value
    file = write_recipe(site.bench, cluster)
    with pytest.raises(StageStoppedError, match="roles of this site run in containers") as caught:
        make_model(load_recipe(str(file)).value, file, cluster, site.place, site.said.append)
    command = shlex.split(caught.value.commands[0])
    place, root = str(file.parent), str(site.bench.runs_root(cluster))
    assert command[: len(words)] == [word.format(place=place, root=root) for word in words]
    assert command[-5:] == ["/opt/hpcrl/trainer/bin/python", "-m", "hpcrl", "warmup", str(file)]
    assert image in command or f"--container-image={image}" in command
    if kind == "pyxis":
        assert f"--container-mounts={place}:{place},{root}:{root}" in command


def test_an_interpreter_that_is_not_here_is_named(site: Site) -> None:
    with pytest.raises(StageStoppedError, match="moon/python, the interpreter of the trainer, is not on this machine"):
        make(site, site.place / "moon/python")


def test_an_interpreter_that_hangs_is_ended(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny_recipe, "_MODEL_S", 4.0)
    python = interpreter(site.place / "python", f"echo $$ > {site.place}/pid; exec sleep 60")
    with pytest.raises(StageStoppedError, match="it did not end within 4 s"):
        make(site, python)
    pid = int((site.place / "pid").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_run_that_is_too_large_for_its_nodes_is_not_a_plan(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.found("check-job", gpus={"gpu": 0})
    monkeypatch.setattr(run_stages, "make_model", lambda recipe, *_: make_tiny_model(Path(recipe.model.path)))
    monkeypatch.setattr(run_stages, "judge", lambda *_: Verdict(short=("trainer host: 4.3 GiB short",)))
    error = stopped(run_stages.plan_tiny_run, site.bench)
    assert "the tiny run does not fit\n  trainer host: 4.3 GiB short\n    hint: correct the numbers" in str(error)
    assert error.commands[0] == f"hpcrl plan {site.bench.request.directory / RECIPE_FILE} -c {site.profile}"


def test_a_plan_that_slurm_would_not_start_is_none(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise UsageError("Slurm could not start this run now")

    site.found("check-job", gpus={"gpu": 0})
    monkeypatch.setattr(run_stages, "make_model", lambda recipe, *_: make_tiny_model(Path(recipe.model.path)))
    monkeypatch.setattr(run_stages, "admit", refuse)
    with pytest.raises(UsageError, match="could not start"):
        run_stages.plan_tiny_run(site.bench)
    monkeypatch.setattr(run_stages, "admit", lambda *_, **__: None)
    outcome = run_stages.plan_tiny_run(site.bench)
    assert outcome.facts["layout"] == "hetjob"
    assert outcome.facts["backend"] == "embedded"
    assert "engines are the embedded ones" in "".join(outcome.warnings)
    assert outcome.summary == "3 processes of 3 roles on 2 nodes (hetjob)"


def make_tiny_model(path: Path) -> None:
    write_tiny_model(path)
