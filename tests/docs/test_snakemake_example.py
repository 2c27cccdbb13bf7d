"""docs/examples/snakemake: Snakemake submits two runs, waits for them, and finds the better one."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import start_models
import yaml
from patience import patience
from typer.main import get_command

from hpcrl.cli.main import app
from hpcrl.runs.run_progress import read_evaluations
from hpcrl.runs.rundir import RunDir

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "docs/examples/snakemake"
ENVIRONMENT = ROOT / ".snakemake-env"
SETTINGS = {
    "trainer.steps": 3,
    "rollouts.rollouts_per_step": 16,
    "rollouts.group_size": 4,
    "evaluation.every_steps": 0,
    "evaluation.prompts": 8,
}


def test_commands_and_options_of_the_example_exist() -> None:
    text = (EXAMPLE / "Snakefile").read_text()
    found = re.findall(r"(?<!#)hpcrl ([a-z]+)", "\n".join(line for line in text.splitlines() if line[:1] != "#"))
    assert {"submit", "wait", "status", "compare", "ls"} <= set(found)
    commands: Any = get_command(app)
    assert set(found) <= set(commands.commands)
    options = {option for name in found for each in commands.commands[name].params for option in each.opts}
    assert set(re.findall(r"--[a-z]+", re.sub(r"(?m)^#.*", "", text))) <= options
    assert set(re.findall(r"config\[\"?(\w+)", text)) == set(yaml.safe_load((EXAMPLE / "config.yaml").read_text()))


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.skipif(
    not (ENVIRONMENT / "hpcrl-bootstrap").is_file(), reason="Snakemake is not there (tools/bootstrap.py --snakemake)"
)
def test_snakemake_trains_and_compares(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    given = os.environ.get("HPCRL_TEST_MODEL")
    model = Path(given) if given else start_models.small_model(tmp_path_factory)
    place = tmp_path / "work"
    shutil.copytree(EXAMPLE, place)
    config = yaml.safe_load((place / "config.yaml").read_text())
    config["set"] = {**SETTINGS, "model.path": str(model)}
    (place / "config.yaml").write_text(yaml.safe_dump(config))
    command = tmp_path / "bin/hpcrl"
    command.parent.mkdir()
    # Snakemake's Python must not find the packages of this one
    command.write_text(f'#!/bin/sh\nPYTHONPATH="{ROOT}" exec "{sys.executable}" -P -m hpcrl "$@"\n')
    command.chmod(0o755)
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    env |= {
        "PATH": f"{command.parent}:{ENVIRONMENT / 'bin'}:{env['PATH']}",
        "HPCRL_RUNS_ROOT": str(tmp_path / "runs"),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }

    def snakemake(*arguments: str) -> str:
        words = [ENVIRONMENT / "bin/snakemake", "--cores", "1", *arguments]
        limit_s = 240.0 * patience()
        done = subprocess.run(words, cwd=place, env=env, capture_output=True, text=True, check=False, timeout=limit_s)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    try:
        # interrupted after the submits: what is there is not submitted again
        snakemake("--until", "submit")
        shutil.rmtree(place / "submitted")
        snakemake()
    finally:
        _end_runs(tmp_path / "runs")
    runs = [RunDir(tmp_path / "runs" / f"rates-{rate}") for rate in config["rates"]]
    assert [run.attempts() for run in runs] == [[1], [1]]
    rewards = {run.name: read_evaluations(run)[-1].reward for run in runs}
    best = json.loads((place / "best.json").read_text())
    assert best["run"] in rewards
    assert best["heldout"] == rewards[best["run"]] == max(rewards.values())
    assert "rates-3e-4" in (place / "comparison.txt").read_text()
    assert "Nothing to be done" in snakemake()


def _end_runs(root: Path) -> None:
    for process in psutil.process_iter():
        try:
            if process.environ().get("HPCRL_RUN_DIR", "").startswith(str(root)):
                process.kill()
        except psutil.Error:
            continue
