"""The stages of a first run, in their order."""

from __future__ import annotations

from hpcrl.bringup.run_stages import plan_tiny_run, run_probe, run_tiny, tiny_inputs
from hpcrl.bringup.site_stages import ask_the_nodes, check_site, describe_site, queues_of_check
from hpcrl.bringup.stage import BringupStage

STAGES: tuple[BringupStage, ...] = (
    BringupStage(
        name="init",
        what="the profile is there; drafted from Slurm where it is not",
        run=describe_site,
        limit_s=60.0,
    ),
    BringupStage(
        name="check",
        what="the profile against its rules, the running Slurm and the runs root",
        run=check_site,
        limit_s=120.0,
    ),
    BringupStage(
        name="check-job",
        what="what only nodes can tell: interpreters, GPUs, network, limits, shared filesystem",
        run=ask_the_nodes,
        # the longest answer of a node may become visible late
        limit_s=120.0,
        queues=queues_of_check,
        inputs=lambda bench: [bench.request.nodes, str(bench.runs_root(bench.profile().value))],
    ),
    BringupStage(
        name="plan",
        what="the tiny run planned, its start model made, and Slurm asked whether it would start",
        run=plan_tiny_run,
        limit_s=1500.0,
        inputs=tiny_inputs,
    ),
    BringupStage(
        name="probe",
        what="the shape of the tiny run with a small program in place of every rank",
        run=run_probe,
        # the time limit of its job, and a margin
        limit_s=2400.0,
        queues=lambda bench: 1,
        inputs=tiny_inputs,
    ),
    BringupStage(
        name="run",
        what="two steps of all roles on two nodes, and proof of what became of each rollout",
        run=run_tiny,
        limit_s=2700.0,
        queues=lambda bench: 1,
        inputs=tiny_inputs,
    ),
)
"""Stages in their order. The report comes last, after every outcome, and is not a stage."""
