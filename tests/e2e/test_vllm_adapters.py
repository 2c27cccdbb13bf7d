"""A run that trains adapters of attention and experts; a real vLLM engine merges them while requests go on."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import yaml
from lab import HPCRL, ROOT, Lab, events, steps
from vllm_environment import VLLM_PYTHON

from hpcrl.runs.rundir import RunDir

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.vllm, pytest.mark.campaign, pytest.mark.timeout(2400)]

STEPS = 3
SETTINGS = (
    f"trainer.steps={STEPS}",
    "trainer.lora={rank: 8, alpha: 16}",
    "trainer.optimizer.learning_rate=5e-3",
    "rollouts.rollouts_per_step=16",
    "evaluation.every_steps=0",
    "evaluation.prompts=8",
    "engine.replicas=1",
    "engine.kv_store=null",
    "orchestrator.wait_timeout_s=1200",
)


def test_vllm_computes_with_the_adapters_that_are_trained(tmp_path: Path, vllm_start_model: Path) -> None:
    lab = Lab(tmp_path, vllm_start_model)
    site = {"name": "site", "kind": "local", "paths": {"runs_root": str(lab.runs_root)}}
    site |= {"limits": {"start_timeout_s": 900, "stop_timeout_s": 20}, "vllm_python": str(VLLM_PYTHON)}
    profile = tmp_path / "site.yaml"
    profile.write_text(yaml.safe_dump(site))
    sets = tuple(part for s in (f"model.path={lab.model}", *SETTINGS) for part in ("--set", s))
    command = [HPCRL, "submit", "quickstart_vllm", "-c", str(profile), "--name", "adapters", "--follow", *sets]
    subprocess.run(command, cwd=ROOT, env=lab.env, check=True, capture_output=True, timeout=1800)
    run = RunDir(lab.runs_root / "adapters")
    records = steps(run)
    assert list(records) == list(range(1, STEPS + 1))
    compared = [event.data for event in events(run, "engine.adapter_compared")]
    assert compared
    assert compared[-1]["outcome"] == "applied"
    assert compared[-1]["share"] == pytest.approx(1.0, abs=0.05)
    # what adapters change of the base stays with the worker, and the last was merged into that
    log = run.log_path(1, "engine", 0).read_text()
    stays = [int(number) for number in re.findall(r"(\d+) bytes of a base stay", log)]
    assert stays[0] < stays[-1]
    # tokens of the version that is trained agree with the trainer
    assert max(r.mismatch_kl_by_lag["0"] for r in records.values() if "0" in r.mismatch_kl_by_lag) < 1e-3
