"""The reference run in small: all of its parts together learn, lose a node, and go on learning."""

from __future__ import annotations

import os
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import start_models
from exercise_tasks import make_exercises
from reference_sizes import FEW, LEARNED, LIMITS, POOL
from rollout_lines import times_trained
from slurm_lab import SlurmLab, events, wait_saved
from virtual_site import virtual_site
from vllm_environment import VLLM_PYTHON

from hpcrl.config.recipe import Recipe
from hpcrl.network.credentials import Credentials
from hpcrl.runs.metrics import StepRecord, read_metrics
from hpcrl.runs.role import Endpoints
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.status import RunStatus
from hpcrl.weights.store import HandoffStore

#: with the real router, which comes with vLLM's environment
pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.campaign, pytest.mark.vllm, pytest.mark.timeout(3600)]

RECIPE = "glm5_swe_small"
#: as in the reference run, less what its sizes change
MEMORY = {
    "activation_checkpointing": "full",
    "activation_offload": True,
    "optimizer_offload": True,
    "lm_head_chunk_tokens": 64,
}
KILLED_AFTER = 5


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The setting of the recipe that names the tasks."""
    return f"environments.0.tasks={make_exercises(tmp_path_factory.mktemp('exercises'), tasks=512)}"


@pytest.fixture(scope="module")
def small_model(tmp_path_factory: pytest.TempPathFactory, tasks: str) -> Path:
    """The start model of the recipe; ``HPCRL_TEST_REFERENCE_MODEL`` names one that is there already."""
    if given := os.environ.get("HPCRL_TEST_REFERENCE_MODEL"):
        return Path(given)
    return start_models.start_model(tmp_path_factory, "reference", recipe=RECIPE, settings=[tasks])


@pytest.fixture
def lab(request: pytest.FixtureRequest, tmp_path: Path, small_model: Path) -> Iterator[SlurmLab]:
    """A lab on a cluster with two nodes more than the run has, so that it can go on without one that was lost."""
    for cluster in virtual_site("reference", nodes=request.param + 2):
        lab = SlurmLab(tmp_path, small_model, cluster, vllm_python=str(VLLM_PYTHON), limits=LIMITS)
        yield lab
        lab.end_all()


def nodes_of(run: RunDir) -> dict[str, list[str]]:
    """Nodes by role, of the newest attempt."""
    status = RunStatus.read(run)
    assert status is not None
    found: dict[str, list[str]] = {}
    for component in status.components:
        found.setdefault(component.role, []).extend(component.nodes)
    return found


def kv_of_others(run: RunDir) -> dict[str, float]:
    """What engines of the newest attempt have of others: tokens whose KV decode asked prefill for and got, tokens that
    prefill got from the pool, and how often something went wrong."""
    attempt, totals = run.attempts()[-1], dict.fromkeys(("asked", "prefill", "pool", "failed"), 0.0)
    headers = Credentials.of_run(run.path, attempt).headers
    for role in ("prefill", "decode"):
        for member in Endpoints.read(run, attempt).fixed(role):
            request = urllib.request.Request(f"{member.url}/metrics", headers=headers)
            with urllib.request.urlopen(request, timeout=30) as text:
                samples = [line.rpartition(" ") for line in text.read().decode().splitlines()]
            for sample, _, value in samples:
                if sample.startswith("hpcrl_engine_kv_fetch_failures_total{"):
                    totals["failed"] += float(value)
                elif sample.startswith("hpcrl_engine_kv_fetched_tokens_total{"):
                    totals["pool" if 'source="pool"' in sample else "prefill"] += float(value)
                elif role == "decode" and sample.startswith("vllm:external_prefix_cache_queries_total{"):
                    totals["asked"] += float(value)
    return totals


def said(run: RunDir) -> str:
    """What the first orchestrator has written into its log."""
    return run.log_path(1, "orchestrator", 0).read_text()


def lost_replies(log: str) -> int:
    """Of how many answers the rows went away with a decode engine, killed between its answer and their fetch. Which
    ones die before the orchestrator does when a node goes down is Slurm's to choose."""
    return len(re.findall(r"experts of an answer are unknown: decode-\d+: \S+ failed", log))


def check_replay(records: list[StepRecord], recipe: Recipe, lost: int) -> None:
    """Where experts are replayed, those of every token but the last of a rollout, whichever engine computed it; and
    but those of so many ``lost`` answers."""
    assert {record.replayed_share is not None for record in records} == {recipe.trainer.router_replay}
    if recipe.trainer.router_replay:
        last = [recipe.rollouts.rollouts_per_step / record.tokens for record in records]
        unknown = [dict(record.unknown_routing) for record in records]
        assert [shares.pop("last") for shares in unknown] == last
        assert sum(map(bool, unknown)) <= lost
        others = [sum(shares.values()) for shares in unknown]
        tokens = sum(share * record.tokens for share, record in zip(others, records, strict=True))
        assert tokens <= lost * recipe.engine.max_model_len
        known = [1 - share - other for share, other in zip(last, others, strict=True)]
        assert [record.replayed_share for record in records] == pytest.approx(known)
        assert records[-1].rollouts["rows_unknown"] == 0


@pytest.mark.parametrize(
    ("lab", "settings", "steps"),
    [
        pytest.param(7, FEW, 12, id="7 nodes"),
        pytest.param(28, (), 40, id="28 nodes", marks=pytest.mark.nightly),
    ],
    indirect=["lab"],
)
def test_all_parts_learn_lose_a_node_and_go_on(
    lab: SlurmLab, tasks: str, settings: tuple[str, ...], steps: int, capsys: Any
) -> None:
    own = (
        tasks,
        f"model.path={lab.model}",
        f"trainer.steps={steps}",
        "checkpoint.every_steps=5",
        "evaluation.every_steps=0",
    )
    own = (*own, POOL, "checkpoint.every_steps=5", "evaluation.every_steps=0", "orchestrator.wait_timeout_s=1800")
    run = lab.submit("reference", *own, *settings, recipe=RECIPE, small=False)
    recipe = run.recipe()
    wait_saved(run, KILLED_AFTER, 900.0)
    first = nodes_of(run)
    sides = {"prefill": recipe.engine.prefill, "decode": recipe.engine.decode}
    replicas = {role: side.replicas for role, side in sides.items() if side is not None}
    assert {role: len(first[role]) for role in ("trainer", *sides)} == {"trainer": recipe.trainer.nodes, **replicas}
    assert first["router"] == first["orchestrator"] == first["trainer"][:1]
    kv = kv_of_others(run)
    lost, before = first["decode"][-1], said(run)
    lab.cluster.kill_node(lost)
    try:
        lab.wait_state(run, ["REQUEUED", "PENDING", "STARTING"], 120)
        ended = lab.wait_state(run, ["COMPLETED", "FAILED", "LOST", "CANCELLED"], timeout_s=1800)
    finally:
        lab.cluster.revive_node(lost)
    why = lab.hpcrl("why", run.name, "--events").stdout
    assert (ended["state"], ended["attempt"]) == ("COMPLETED", 2), why
    assert lost not in {node for nodes in nodes_of(run).values() for node in nodes}
    assert f"node {lost} went down" in why

    # what ran was all of it together
    for ready in events(run, "trainer.ready"):
        ranks = recipe.trainer.ranks
        assert ready.data["mesh"] == {"dp_replicate": 1, "dp_shard": ranks // 4, "cp": 4, "ep": 8}
        assert ready.data["memory"] == MEMORY
    newest = HandoffStore(run.weights_dir).open(steps).manifest
    assert {tensor.dtype for tensor in newest.tensors.values()} >= {"float8_e4m3fn", "bfloat16"}
    added = {event.data["engine"] for event in events(run, "router.engine_added")}
    assert added == {f"{role}-{replica}" for role, count in replicas.items() for replica in range(count)}
    # prompts were computed by prefill, which had what decode has sampled before of the pool
    assert kv["prefill"] >= 0.9 * kv["asked"] > 0
    assert kv["pool"] > 0

    # nothing was lost or trained twice
    records = read_metrics(run)
    assert [record.step for record in records] == list(range(1, steps + 1))
    used = times_trained(run)
    assert max(used.values()) == 1
    assert len(used) == steps * recipe.rollouts.rollouts_per_step
    check_replay(records, recipe, lost_replies(said(run).removeprefix(before)))
    (kept,) = [event.data["step"] for event in events(run, "trainer.restored")]
    assert kept >= KILLED_AFTER

    # and it learned, before and after
    before, after = (event.data["reward"] for event in events(run, "evaluation"))
    rewards = [record.reward_mean for record in records]
    early, at_loss, late = (sum(part) / len(part) for part in (rewards[:4], rewards[kept - 4 : kept], rewards[-4:]))
    seconds = sorted(sum(record.phases_s.values()) for record in records)[steps // 2]
    with capsys.disabled():
        print(f"\ntokens whose KV others had: {kv}")
        print(f"held-out reward {before:.3f} -> {after:.3f}; of batches {early:.3f}, {at_loss:.3f}, {late:.3f}")
        print(f"mismatch {[round(r.mismatch_kl, 4) for r in records[::10]]}, a step {seconds:.1f} s")
    assert after >= before + LEARNED
    lab.wait_empty()
