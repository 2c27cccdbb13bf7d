"""The tiny run of a site: a recipe that extends the shipped `first_run`, and its start model."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from hpcrl.bringup.stage import SiteBench, StageStoppedError, quoted
from hpcrl.config.cluster import SlurmCluster
from hpcrl.config.cluster_slurm import NoContainer
from hpcrl.config.load import load_recipe
from hpcrl.config.recipe import Recipe
from hpcrl.jobplan import absolute_site_paths
from hpcrl.processes.interpreter import module_command
from hpcrl.storage.files import atomic_write

RECIPE_FILE = "first_run.yaml"
_SHIPPED = "first_run"
_EXPERTS = 8
"""Experts of a layer in the shipped recipe."""
_MODEL_S = 900.0
"""Maximum time in seconds of making the start model; most of it are imports."""
_END_S = 20.0
_LAST_LINES = 12


def engine_backend(cluster: SlurmCluster) -> str:
    """Return the backend of engines: vLLM where the profile names an interpreter for it."""
    named = cluster.vllm_python is not None and "engine" not in {str(role) for role in cluster.python_by_role}
    return "vllm" if named else "embedded"


def tiny_settings(bench: SiteBench, cluster: SlurmCluster) -> dict[str, Any]:
    """Return the settings of a site's recipe that extend the shipped one.

    Nodes whose driver shows GPUs (`check-job`) get a rank of the trainer on each, and NCCL; nodes without one, as
    those of a virtual cluster, one rank on processors.
    """
    seen: Mapping[str, int] = bench.facts("check-job").get("gpus", {})
    trainer, engine = (_gpus(cluster, seen, role) for role in ("trainer", "engine"))
    vllm = engine_backend(cluster) == "vllm"
    settings: dict[str, Any] = {
        "trainer": {"nodes": 1, "ranks": max(1, trainer)} | ({"dtype": "bfloat16"} if trainer else {}),
        "engine": {"backend": "embedded", "replicas": 1},
        "job": {"layout": "hetjob" if cluster.capabilities.hetjob else "single"},
    }
    if vllm:
        settings["engine"] = {
            "backend": "vllm",
            "replicas": 1,
            # eager: compiling takes longer than the whole run
            "vllm_args": {"enforce-eager": True},
            "kv_store": {"segment_gib": 0.25, "local_buffer_gib": 0.0625},
            **({"dtype": "bfloat16"} if engine else {"device": "cpu", "block_size": 32, "kv_cache_gib": 1}),
        }
        # experts are divided among the ranks of an engine, one on each GPU
        if engine > _EXPERTS:
            settings["model"] = {"warmup": {"num_experts": engine}}
    return settings


def _gpus(cluster: SlurmCluster, seen: Mapping[str, int], role: str) -> int:
    """Return the GPUs of a node of a role: what the driver showed, else what the profile says."""
    by_role = {str(key): partition for key, partition in cluster.placement.by_role.items()}
    partition = by_role.get(role, cluster.placement.default)
    said = cluster.partitions[partition].node.gpus
    return min(said, seen.get(partition, said))


def write_recipe(bench: SiteBench, cluster: SlurmCluster) -> Path:
    """Write the recipe of the tiny run into the directory of the first run; returns its file."""
    settings = tiny_settings(bench, cluster)
    digest = hashlib.sha256(yaml.safe_dump(_warmup(settings)).encode()).hexdigest()[:8]
    model = bench.runs_root(cluster) / f".hpcrl-first-run-model-{digest}"
    settings["model"] = {**settings.get("model", {}), "path": str(model)}
    path = bench.request.directory / RECIPE_FILE
    head = f"# The tiny run of `hpcrl site first-run {bench.request.cluster}`: its changes to the shipped recipe.\n"
    text = yaml.safe_dump({"extends": _SHIPPED, "name": "first_run", **settings}, sort_keys=False, allow_unicode=True)
    atomic_write(path, (head + text).encode())
    return path


def _warmup(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return all that decides the start model."""
    own = [f"model.warmup.{key}={value}" for key, value in settings.get("model", {}).get("warmup", {}).items()]
    recipe = load_recipe(_SHIPPED, own).value
    environments = [each.model_dump(mode="json") for each in recipe.environments]
    return {**recipe.model.model_dump(mode="json"), "environments": environments, "seed": recipe.seed}


def make_model(recipe: Recipe, file: Path, cluster: SlurmCluster, cwd: Path, say: Callable[[str], None]) -> None:
    """Make the start model as ``hpcrl warmup`` does, by the trainer's interpreter, unless it is there.

    Parameters
    ----------
    file:
        The file of the recipe, for the command that a person calls where this fails.

    Raises
    ------
    StageStoppedError
        The interpreter is not here, or could not make it.
    """
    target = Path(recipe.model.path)
    if (target / "config.json").is_file():
        return
    inside = not isinstance(cluster.container, NoContainer)
    named = None if inside else absolute_site_paths(cluster, cwd).python_of("trainer", backend="embedded")
    python = named or sys.executable
    by_hand = _by_hand(python, file, target.parent, cluster)
    if not Path(python).is_file():
        raise StageStoppedError(
            f"{python}, the interpreter of the trainer, is not on this machine, and makes the start model\n"
            "    hint: call the first run on a machine that sees it, or make the model on a node",
            commands=[by_hand],
        )
    say(f"making the start model in {target}")
    command = module_command(python, "hpcrl.trainer.warmup.make", "--output", str(target))
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    ) as process:
        try:
            words, _ = process.communicate(recipe.model_dump_json(), timeout=_MODEL_S)
            code = process.returncode
        except subprocess.TimeoutExpired:
            words, code = f"it did not end within {_MODEL_S:g} s", 1
        finally:
            _end(process)
    if code:
        last = "\n".join(f"    {line}" for line in words.strip().splitlines()[-_LAST_LINES:])
        inside_hint = "    hint: roles of this site run in containers: make it in one, as below\n" if inside else ""
        raise StageStoppedError(
            f"{python} could not make the start model; its last output:\n{last}\n{inside_hint}"
            "    hint: the environment of the trainer makes it: hpcrl site install --role trainer",
            commands=[by_hand],
        )


def _by_hand(python: str, file: Path, root: Path, cluster: SlurmCluster) -> str:
    """Return the command that makes the model where torch is: in the image of a site whose roles have one."""
    container = cluster.container
    if isinstance(container, NoContainer):
        return f"{quoted(python, '-m', 'hpcrl', 'warmup', file)}    # where torch is installed"
    words: list[str | Path] = [container.python, "-m", "hpcrl", "warmup", file]
    # the image sees neither the recipe nor the runs root by itself
    mounts = [f"{each}:{each}" for each in dict.fromkeys((file.parent, root))]
    if container.kind == "apptainer":
        binds = [word for mount in mounts for word in ("--bind", mount)]
        return quoted("apptainer", "exec", *binds, "--pwd", file.parent, container.image, *words)
    options = [f"--container-image={container.image}", f"--container-mounts={','.join(mounts)}"]
    partition = f"--partition={cluster.partition_name('trainer')}"
    return quoted("srun", "--nodes=1", "--ntasks=1", partition, *options, *words)


def _end(process: subprocess.Popen[str]) -> None:
    """End a process that may have ended; it removes what is half written."""
    process.terminate()
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
