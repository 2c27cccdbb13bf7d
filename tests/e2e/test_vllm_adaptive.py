"""The adaptive limit on a real vLLM engine whose KV holds a few requests: the queue goes, the steps do not."""

from __future__ import annotations

import subprocess
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import yaml
from lab import HPCRL, ROOT, Lab, events, last_step, wait_gone, wait_step
from patience import wait_for
from vllm_environment import VLLM_PYTHON

from hpcrl.runs.fleet import FleetView
from hpcrl.runs.rundir import RunDir

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.vllm, pytest.mark.nightly, pytest.mark.timeout(2400)]

MOST, GROUP = 96, 8
SETTINGS = (
    "trainer.steps=100000",
    "evaluation.every_steps=0",
    "engine.replicas=1",
    "engine.kv_store=null",
    # room for eight requests or so
    "engine.vllm_args.num-gpu-blocks-override=16",
    f"rollouts.max_in_flight={MOST}",
    "rollouts.adaptive_concurrency.enabled=true",
    "orchestrator.wait_timeout_s=1200",
)


def test_the_limit_comes_down_to_what_the_cache_holds(tmp_path: Path, vllm_start_model: Path, capsys: Any) -> None:
    lab = Lab(tmp_path, vllm_start_model)
    site = {"name": "site", "kind": "local", "paths": {"runs_root": str(lab.runs_root)}}
    site |= {"limits": {"start_timeout_s": 900, "stop_timeout_s": 20}, "vllm_python": str(VLLM_PYTHON)}
    profile = tmp_path / "site.yaml"
    profile.write_text(yaml.safe_dump(site))
    sets = tuple(part for s in (f"model.path={lab.model}", *SETTINGS) for part in ("--set", s))
    command = [HPCRL, "submit", "quickstart_vllm", "-c", str(profile), "--name", "narrow", *sets]
    subprocess.run(command, cwd=ROOT, env=lab.env, check=True, capture_output=True, timeout=1200)
    run = RunDir(lab.runs_root / "narrow")
    looks: dict[float, tuple[int, int]] = {}

    def look() -> tuple[int, int]:
        """The limit, and how many requests wait at the engine; each look of the orchestrator counts once."""
        view = FleetView.read(run, 1)
        if view is None or not view.engines or view.engines[0].waiting is None:
            return MOST, MOST
        looks[view.time_s] = view.limit, view.engines[0].waiting
        return looks[view.time_s]

    try:
        wait_step(run, 1, 900)
        wait_for(lambda: look()[0] <= MOST // 3, 300, "lower limit")
        # what was sent before is still in the queue
        wait_for(lambda: look()[1] < GROUP, 300, "end of the queue")
        early = set(looks.values())
        looks.clear()
        step = last_step(run)
        wait_for(lambda: look() and len(looks) >= 5 and last_step(run) >= step + 5, 300, "five steps", every_s=0.5)
    finally:
        lab.hpcrl("cancel", run.name, "--yes", check=False)
        lab.wait_end(run, 120)
    wait_gone(run)
    cuts = [event.data for event in events(run, "rollouts.limit_cut")]
    late = list(looks.values())
    with capsys.disabled():
        print(f"\n{len(cuts)} cuts; limit and waiting requests, early: {early}, late: {late}")
    assert cuts
    assert max(limit for limit, _ in late) < MOST // 2
    # a group that just came may wait for a moment
    assert mean(count for _, count in late) < GROUP
