"""How fast is the simulator? A day of 28 to 10,000 nodes on one core; and does a sample of the engines say the same?"""

from __future__ import annotations

import argparse
import time
from typing import Any

from harness import record

from hpcrl.config.load import load_cluster, load_recipe
from hpcrl.planning.calibration.calibration_file import load_calibration
from hpcrl.simulation import Durations, Failures, Simulation, make_scenario
from hpcrl.simulation.inputs.from_plan import durations_from_plan
from hpcrl.simulation.results.result import SimulationResult, summarize
from planning.case_files import read_cases

SETTINGS = ("engine.max_num_seqs=1024",)


def simulated(
    nodes: int, *, days: float, sample: int | None, mtbf_h: float | None, planned: bool = False
) -> tuple[dict[str, float], SimulationResult]:
    """One simulation, with those of ``cases/simulator.yaml`` or of the planner; CPU seconds, and what came out."""
    recipe, cluster = load_recipe("glm5_swe", () if planned else SETTINGS).value, load_cluster("h200-28").value
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    scenario = make_scenario(
        recipe,
        cluster,
        durations_from_plan(recipe, cluster, load_calibration())
        if planned
        else Durations.model_validate(read_cases("simulator")["durations"]),
        nodes=nodes,
        days=days,
        failures=Failures(mtbf_h=mtbf_h),
        sample=sample,
    )
    simulation = Simulation(scenario)
    simulation.run()
    result = summarize(simulation)
    cpu_s = time.process_time() - began_cpu_s
    figures = {
        "cpu_s": cpu_s,
        "wall_s": time.perf_counter() - began_s,
        "simulated_hours": result.simulated_s / 3600,
        "engines": result.engines,
        "engines_simulated": result.engines_simulated,
        "merged_turns": result.merged_turns,
        "requests": simulation.tally.requests,
        "calls": simulation.clock.calls,
        "calls_per_cpu_s": simulation.clock.calls / cpu_s,
    }
    return figures, result


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Say what this part takes."""
    parser.add_argument("--nodes", default="28,2800,10000")
    parser.add_argument("--whole-nodes", type=int, default=280, help="size in which a sample is compared with all")
    parser.add_argument("--whole-days", type=float, default=0.1, help="0 compares nothing")


def run(arguments: argparse.Namespace) -> None:
    """Simulate, print and record."""
    sizes: dict[str, Any] = {}
    for nodes in map(int, arguments.nodes.split(",")):
        figures, _ = simulated(nodes, days=1.0, sample=None, mtbf_h=20_000.0)
        sizes[str(nodes)] = figures
        print(nodes, {name: round(value, 2) for name, value in figures.items()}, flush=True)
    figures, result = simulated(10_000, days=1.0, sample=None, mtbf_h=20_000.0, planned=True)
    planned = {**figures, "steps": result.steps}
    print("planner's durations", {name: round(value, 2) for name, value in planned.items()}, flush=True)
    comparison: dict[str, Any] = {}
    for name, sample in (("whole", 0), ("sample", 2)) if arguments.whole_days else ():
        _, result = simulated(arguments.whole_nodes, days=arguments.whole_days, sample=sample, mtbf_h=None)
        comparison[name] = {
            "engines_simulated": result.engines_simulated,
            "steps_per_minute": result.steps_per_minute,
            "waiting_share": result.phases["wait_batch"],
            "staleness_mean": result.staleness.mean,
            "engines_busy": result.engine.busy,
            "step_s_p90": result.step_s.p90,
        }
        print(name, {figure: round(value, 4) for figure, value in comparison[name].items()}, flush=True)
    record(
        "simulator_speed",
        {
            "recipe": "glm5_swe",
            "settings": SETTINGS,
            "a_day_of_nodes": sizes,
            "a_day_of_10000_nodes_with_durations_of_the_planner": planned,
            f"sample_of_{arguments.whole_nodes}_nodes": comparison,
        },
    )
