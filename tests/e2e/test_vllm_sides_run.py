"""A whole run with prefill and decode as engines of their own, behind the real router that leads between them, whose
experts the trainer takes again."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import yaml
from lab import HPCRL, ROOT, Lab, events, processes, steps
from vllm_environment import VLLM_PYTHON

from hpcrl.config.load import load_recipe
from hpcrl.runs.rundir import RunDir

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.vllm, pytest.mark.timeout(1200)]

STEPS = 5


def test_a_run_with_prefill_and_decode(tmp_path: Path) -> None:
    lab = Lab(tmp_path, tmp_path / "model")
    command = [HPCRL, "warmup", "quickstart_vllm", "--output", lab.model, "--set", "model.warmup.steps=60"]
    subprocess.run(command, cwd=ROOT, env=lab.env, check=True, capture_output=True, timeout=1200)
    profile = tmp_path / "site.yaml"
    site = {"name": "site", "kind": "local", "paths": {"runs_root": str(lab.runs_root)}}
    site |= {"limits": {"start_timeout_s": 900, "stop_timeout_s": 20}, "vllm_python": str(VLLM_PYTHON)}
    profile.write_text(yaml.safe_dump(site))
    settings = (
        f"model.path={lab.model}",
        f"trainer.steps={STEPS}",
        "evaluation.every_steps=0",
        "evaluation.prompts=8",
        "orchestrator.wait_timeout_s=1200",
        "engine.replicas=1",
        "engine.kv_store=null",
        "engine.prefill={replicas: 1, nodes: 1}",
        "engine.decode={replicas: 1, nodes: 1}",
        "engine.return_routed_experts=true",
        "trainer.router_replay=true",
    )
    sets = [part for s in settings for part in ("--set", s)]
    command = [HPCRL, "submit", "quickstart_vllm", "-c", str(profile), "--name", "sides", "--follow", *sets]
    result = subprocess.run(command, cwd=ROOT, env=lab.env, capture_output=True, text=True, check=False, timeout=2400)
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"

    run = RunDir(lab.runs_root / "sides")
    records = steps(run)
    assert list(records) == list(range(1, STEPS + 1))
    assert {event.data["engine"] for event in events(run, "router.engine_added")} == {"prefill-0", "decode-0"}
    updates = [event.data for event in events(run, "engine.weights_updated")]
    assert {update["engine"] for update in updates} == {"prefill-0", "decode-0"}
    assert max(update["version"] for update in updates) == STEPS
    # also not at the end, when prompts were computed for rollouts that nobody wants any more
    assert events(run, "engine.away") == []
    counters = records[STEPS].rollouts
    assert {counters[name] for name in ("dropped_engine", "dropped_environment", "dropped_group")} == {0}
    # prompts that prefill has computed are those of the version that decode samples with
    fresh = [r.mismatch_kl_by_lag["0"] for r in records.values() if "0" in r.mismatch_kl_by_lag]
    assert fresh
    assert max(fresh) < 1e-5
    # experts of every token but the last of a rollout are replayed, whichever of the two has computed it
    rollouts = load_recipe("quickstart_vllm").value.rollouts.rollouts_per_step
    for record in records.values():
        last = rollouts / record.tokens
        assert record.unknown_routing == pytest.approx({"last": last})
        assert record.replayed_share == pytest.approx(1 - last)
    assert counters["rows_unknown"] == 0
    assert processes(run) == []
