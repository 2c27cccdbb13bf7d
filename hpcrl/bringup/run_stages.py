"""Stages that plan and run: the plan of the tiny run, its shape with probes, the run itself."""

from __future__ import annotations

import time
from typing import Any

from hpcrl.bringup.follow_run import end_open_run, follow_to_end
from hpcrl.bringup.limit_stages import without_interruption
from hpcrl.bringup.rollout_proof import prove_rollouts
from hpcrl.bringup.stage import Outcome, SiteBench, StageStoppedError, quoted
from hpcrl.bringup.tiny_recipe import RECIPE_FILE, engine_backend, make_model, tiny_settings, write_recipe
from hpcrl.config.cluster import SlurmCluster
from hpcrl.config.plan import Plan
from hpcrl.config.runs_root import absolute_path
from hpcrl.planning.calibration.calibration_file import load_calibration
from hpcrl.planning.report import find_facts, make_outlook
from hpcrl.planning.verdict import Verdict, judge
from hpcrl.runs.events import read_events
from hpcrl.runs.metrics import read_metrics
from hpcrl.runs.probe import collect
from hpcrl.runs.rundir import RunDir
from hpcrl.storage.msgspec_types import decode_json
from hpcrl.submit.prepare import PreparedRun, prepare
from hpcrl.submit.start import admit, make_and_submit

_LATE_S = 60.0
"""Timeout in seconds after the end of a run until its files are visible here."""


def tiny_inputs(bench: SiteBench) -> Any:
    """Return the inputs of the tiny run other than the profile."""
    cluster = bench.profile().value
    return [tiny_settings(bench, cluster), str(bench.runs_root(cluster))]


def plan_tiny_run(bench: SiteBench) -> Outcome:
    """Make the recipe and the start model, plan them as ``hpcrl plan`` does, and ask Slurm whether it would start."""
    cluster = bench.profile().value
    path = write_recipe(bench, cluster)
    prepared = _prepared(bench, cluster, programs=False)
    prepared.refuse(allow_unmade=True)
    make_model(prepared.resolved, path, cluster, bench.request.cwd, bench.say)
    prepared = _prepared(bench, cluster)
    plan = prepared.planned()
    verdict = _verdict(bench, prepared)
    admit(prepared, client=bench.client)
    backend = engine_backend(cluster)
    facts: dict[str, Any] = {
        "recipe": str(path),
        "model": prepared.resolved.model.path,
        "layout": plan.layout.kind,
        "backend": backend,
        "roles": {group.role.value: _places(group) for group in plan.groups},
        "processes": plan.processes,
        "verdict": verdict.document(),
    }
    warnings = list(verdict.unknown)
    if backend == "embedded":
        warnings.append(
            "engines are the embedded ones, on processors: the profile names no interpreter of vLLM\n"
            "    hint: vllm_python, of `hpcrl site install --role vllm`"
        )
    nodes = plan.layout.nodes
    summary = f"{plan.processes} processes of {len(plan.groups)} roles on {nodes} nodes ({plan.layout.kind})"
    return Outcome(summary=summary, warnings=tuple(warnings), facts={**facts, "notes": list(prepared.notes)})


def _places(group: Any) -> str:
    """Return how much of a role there is, in words."""
    return f"{group.replicas} x {group.ranks} ranks on {group.nodes} nodes"


def _verdict(bench: SiteBench, prepared: PreparedRun) -> Verdict:
    """Judge memory and times (StageStoppedError where something does not fit)."""
    recipe, cluster = prepared.resolved, prepared.profile
    assert isinstance(cluster, SlurmCluster)
    tables = [absolute_path(name, bench.request.cwd) for name in cluster.paths.tables]
    facts = find_facts(recipe)
    verdict = judge(make_outlook(recipe, cluster, load_calibration(None, tables), facts), facts)
    if verdict.short:
        text = "\n".join(f"  {line}" for line in verdict.short)
        raise StageStoppedError(
            f"the tiny run does not fit\n{text}\n"
            "    hint: correct the numbers of the node (memory_gib, gpu.memory_gib), or take another partition\n"
            "    hint: of a virtual cluster: hpcrl devcluster up --memory-mib 16000",
            commands=[f"hpcrl plan {quoted(bench.request.directory / RECIPE_FILE)} -c {quoted(bench.request.cluster)}"],
        )
    return verdict


def run_probe(bench: SiteBench) -> Outcome:
    """Send the shape of the tiny run with a small program in place of every rank (``job.payload=probe``)."""
    run, plan, seconds = _run(bench, "probe", "job.payload=probe")
    directory = run.attempt_dir(run.attempts()[-1]) / "probe"
    reports, _ = collect(directory, plan.processes, timeout_s=_LATE_S)
    facts = {
        "run": str(run.path),
        "seconds": seconds,
        "places": {f"{each.role} {each.replica}/{each.rank}": each.host for each in reports},
        "seen": decode_json((directory / "done").read_bytes(), dict[str, Any]),
    }
    return Outcome(summary=f"all {plan.processes} processes reported from where the plan has them", facts=facts)


def run_tiny(bench: SiteBench) -> Outcome:
    """Run it: trainer, engines and orchestrator, and then prove what became of each rollout."""
    run, _, seconds = _run(bench, "run")
    records, recipe = read_metrics(run), run.recipe()
    if len(records) != recipe.trainer.steps:
        raise StageStoppedError(
            f"{run.name} completed, and {len(records)} of {recipe.trainer.steps} steps are on record\n"
            "    hint: the shared filesystem may show files late; try again",
            commands=[f"hpcrl status {quoted(run.path)}"],
        )
    verdict = prove_rollouts(run)
    if verdict.problems:
        text = "\n".join(f"  {problem}" for problem in verdict.problems)
        raise StageStoppedError(
            f"hpcrl rollouts verify found errors in {run.name}\n{text}",
            commands=[f"hpcrl rollouts verify {quoted(run.path)}"],
        )
    backend = recipe.engine.backend
    facts = {
        "run": str(run.path),
        "seconds": seconds,
        "backend": backend,
        "steps": [
            {"step": each.step, "seconds": round(sum(each.phases_s.values()), 3), "reward": each.reward_mean}
            for each in records
        ],
        "versions": sorted({event.data["version"] for event in read_events(run, kind="engine.weights_updated")}),
        "rollouts": {"finished": verdict.finished, "trained": verdict.trained, "waiting": verdict.waiting},
    }
    summary = f"{len(records)} steps with engines of {backend}; {verdict.trained} rollouts trained, each once"
    return Outcome(summary=summary, warnings=tuple(verdict.notes), facts=facts)


def _prepared(
    bench: SiteBench, cluster: SlurmCluster, *settings: str, name: str | None = None, programs: bool = True
) -> PreparedRun:
    """Find out whether a run of the recipe would start; ``programs``: also try what roles execute."""
    request = bench.request
    recipe, profile = str(request.directory / RECIPE_FILE), bench.profile_file
    return prepare(
        recipe,
        profile,
        settings,
        environ=request.environ,
        cwd=request.cwd,
        name=name,
        root=lambda _: bench.runs_root(cluster),
        programs=programs,
    )


def _run(bench: SiteBench, kind: str, *settings: str) -> tuple[RunDir, Plan, float]:
    """Submit a run of the recipe and wait until it has completed; returns also the seconds since the submission.

    Whatever ends the wait ends the run.
    """
    cluster = bench.profile().value
    write_recipe(bench, cluster)
    name = time.strftime(f"first-run-{kind}-%Y%m%d-%H%M%S")
    # the plan stage has already tried the commands of the roles
    prepared = _prepared(bench, cluster, *settings, name=name, programs=False)
    plan = prepared.planned()
    admit(prepared, client=bench.client)
    started = time.monotonic()
    try:
        with without_interruption():
            # written first: a call that is killed now leaves a run that the next call ends
            bench.state.open_run = str(plan.run_dir)
            bench.keep()
            run = make_and_submit(prepared)
        bench.say(f"submitted {name} in {run.path}")
        follow_to_end(run, plan, wait_s=bench.request.wait_s, say=bench.say)
    finally:
        end_open_run(bench)
    return run, plan, round(time.monotonic() - started, 1)
