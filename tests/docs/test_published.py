"""Tables of docs have the figures that benches have recorded: published ones of planning, packed attention."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hpcrl.config.load import load_cluster, load_recipe
from hpcrl.models import load_facts
from hpcrl.planning.calibration.calibration_file import load_calibration
from hpcrl.planning.report import make_outlook

ROOT = Path(__file__).parents[2]
RESULTS = json.loads((ROOT / "bench/results/planner_published.json").read_text())
#: without those that no plan can express
CASES: list[dict[str, Any]] = [case for case in RESULTS["cases"] if case["predicted"] is not None]
DOCS = (ROOT / "docs/planning.md").read_text()
SUBJECTS = {
    "all": "all",
    "rl step": "whole steps",
    "training": "training",
    "serving": "engines",
    "weights": "hand-offs",
    "sizes": "sizes",
}

#: of the table of packed attention: what the bench says, and how it is written
PACKED_COLUMNS = (("tokens", "{:,}"), ("peak_mib", "{:.0f} MiB"), ("s", "{:.2f} s"))


def row(case: dict[str, Any]) -> str:
    numbers = f"{case['published']:,.4g} | {case['predicted']:,.4g} | {case['error']:+.0%}"
    note = "fitted" if case["fitted"] else "not of a recipe" if case["cannot"] else ""
    return f"| {case['what']} ({case['unit']}) | {numbers} | {note} |"


def test_every_case_is_in_the_docs() -> None:
    shown = [case for case in CASES if case["subject"] != "sizes"]
    assert len(shown) > 50
    assert [row(case) for case in shown if row(case) not in DOCS] == []


def test_shares_are_those_of_the_cases() -> None:
    for subject, name in SUBJECTS.items():
        errors = [abs(case["error"]) for case in CASES if not case["fitted"] and subject in ("all", case["subject"])]
        shares = [sum(error <= most for error in errors) / len(errors) for most in (0.1, 0.25, 0.5)]
        inside = [
            case["range"][0] <= case["published"] <= case["range"][1]
            for case in CASES
            if not case["fitted"] and subject in ("all", case["subject"]) and case["range"]
        ]
        in_range = sum(inside) / len(inside) if inside else None
        assert RESULTS["shares"][subject].get("in range") == in_range
        columns = [name, str(len(errors)), *(f"{share:.0%}" for share in shares)]
        columns.append("" if in_range is None else f"{in_range:.0%}")
        assert f"| {' | '.join(columns)} |" in DOCS


def test_what_moves_the_reference_run_is_what_the_bench_recorded() -> None:
    rows = [
        f"| {change} | {' | '.join(f'{minutes:.1f}' for minutes in figures)} |"
        for change, figures in RESULTS["reference_run_minutes_trainer_rollouts_step"].items()
    ]
    assert table(DOCS, "| assumption | trainer | rollouts | step (min) |") == rows


def test_the_record_is_of_the_planner_as_it_is() -> None:
    recipe, cluster = load_recipe("glm5_swe").value, load_cluster("h200-28").value
    ranges = make_outlook(recipe, cluster, load_calibration(), load_facts("GLM-5")).ranges
    trainer, _, step = RESULTS["reference_run_minutes_trainer_rollouts_step"]["as shipped"]
    # a plan has as many sequences as the KV cache holds, which moves the rollouts by less than one per cent
    assert 60 * trainer == pytest.approx(ranges["trainer side"].mid, rel=1e-3)
    assert 60 * step == pytest.approx(ranges["step"].mid, rel=1e-2)


def test_terms_of_the_reference_run_are_those_of_the_record() -> None:
    own, libraries = (RESULTS["reference_run_trainer_terms_s"][kernels] for kernels in ("triton", "libraries"))
    shown = {
        "sparse attention": ("compute.attention",),
        "scores of the indexer, and the choice": ("compute.indexer", "compute.choice"),
        "products of experts": ("compute.experts",),
        "other products": ("compute.linear",),
        "dispatch and combine": ("ep.all_to_all",),
        "kernels without products": ("compute.memory",),
    }
    for name, terms in shown.items():
        figures = [f"{sum(each.get(term, 0.0) for term in terms):.1f}" for each in (own, libraries)]
        assert f"| {name} | {' | '.join(figures)} |" in DOCS
    assert f"gathers and gradients, {own['fsdp.gather'] + own['fsdp.reduce_scatter']:.1f} in all" in DOCS


PREDICT = """
import json, sys
sys.path.insert(0, sys.argv[1])
from planning.published.table import all_cases
print(json.dumps({case.what: case.predicted for case in all_cases()}))
"""


def test_the_record_has_what_the_bench_predicts_now() -> None:
    command = [sys.executable, "-c", PREDICT, str(ROOT / "bench")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    now = json.loads(done.stdout)
    assert {case["what"]: case["predicted"] for case in RESULTS["cases"]} == {
        what: None if predicted is None else pytest.approx(predicted, rel=1e-3) for what, predicted in now.items()
    }


def test_every_prediction_that_rests_on_a_rate_has_a_range() -> None:
    for case in CASES:
        assert (case["range"] is None) == (case["subject"] == "sizes"), case["what"]
        if case["range"]:
            assert case["range"][0] < case["predicted"] < case["range"][1]


def test_packed_attention_is_what_the_bench_recorded() -> None:
    docs = (ROOT / "docs/training.md").read_text()
    rows = json.loads((ROOT / "bench/results/packed_attention.json").read_text())["rows"]

    def both(packed: dict[str, Any], padded: dict[str, Any], key: str, form: str) -> str:
        return ", ".join(form.format(each[key]) if key in each else "not tried" for each in (packed, padded))

    for packed, padded in zip(rows[::2], rows[1::2], strict=True):
        assert (packed["mix"], packed["way"], padded["way"]) == (padded["mix"], "packed", "padded")
        columns = [both(packed, padded, *column) for column in PACKED_COLUMNS]
        assert f"| {packed['mix']} | {' | '.join(columns)} |\n" in docs


def recorded(bench: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((ROOT / f"bench/results/{bench}.json").read_text())["rows"]
    return rows


def table(docs: str, heading: str) -> list[str]:
    """Rows of the table whose first line is ``heading``."""
    _, _, behind = docs.partition(f"{heading}\n")
    assert behind, f"there is no table {heading}"
    return [line for line in behind.split("\n\n")[0].splitlines() if not line.startswith(("| ---", "|---"))]


def test_memory_tools_are_what_the_bench_recorded() -> None:
    docs = (ROOT / "docs/training.md").read_text()
    rows = [
        f"| {row['tool']} | {row['memory_ratio']:.2f} | {row['time_ratio']:.2f} | "
        + (f"{row['planner_off_by']:+.1%}" if "planner_off_by" in row else "does not count it")
        + " |"
        for row in recorded("memory_tools")
    ]
    assert table(docs, "| tool | peak memory | time of a token | the planner is off by |") == rows


def test_the_planners_memory_is_what_the_bench_recorded() -> None:
    docs = (ROOT / "docs/planning-memory.md").read_text()
    rows = recorded("planner_memory")
    shown = []
    for row in rows:
        phase, peak = max(row["phases"].items(), key=lambda item: item[1]["measured"])
        shown.append(f"| {row['name']} | {phase} | {peak['measured'] / 1e6:.1f} MB | {row['off_by']:+.1%} |")
    assert table(docs, "| configuration | fullest in | measured | off by |") == shown
    worst = max(abs(row["off_by"]) for row in rows)
    assert f"Peaks of {len(rows)} configurations are off by {worst:.1%} at most" in " ".join(docs.split())


def test_peers_are_what_the_bench_recorded() -> None:
    docs = (ROOT / "docs/training.md").read_text()
    names = {"qwen3": "Qwen3", "qwen3_moe": "Qwen3-MoE", "deepseek_v3": "DeepSeek-V3"}
    cases: dict[tuple[str, int, bool], dict[str, dict[str, Any]]] = {}
    for row in recorded("trainer_peers"):
        cases.setdefault((row["model"], row["ep"], row["low_memory"]), {})[row["trainer"]] = row

    def beside(row: dict[str, Any] | None) -> str:
        if row is None:
            return "(has none)"
        return f"{row['hpcrl_speed']:.2f} ({row['hpcrl_cpu_speed']:.2f}), {row['hpcrl_memory']:.2f}"

    rows = [
        f"| {names[model]}{f', `ep` {ep}' if ep > 1 else ''} | {'low' if low else 'plain'} "
        f"| {beside(found.get('transformers'))} | {beside(found.get('torchtitan'))} |"
        for (model, ep, low), found in cases.items()
    ]
    heading = "| model | memory | compared with transformers: speed, memory | compared with torchtitan: speed, memory |"
    assert sorted(table(docs, heading)) == sorted(rows)


def test_the_docks_figures_are_what_the_benches_recorded() -> None:
    docs = (ROOT / "docs/rollouts.md").read_text()
    ways = ("memcpy", "embedded", "served", "mooncake", "TransferQueue, SimpleStorage", "TransferQueue, MooncakeStore")
    rows = [
        f"| {row['tokens'] // 1000}k tokens{', routes' if row['routes'] else ''} | "
        + " | ".join(f"{row[way]['gb_s']:.2f}" for way in (*ways, "whole shards"))
        + " |"
        for row in recorded("dock_peers")
    ]
    heading = "| rollout | memcpy in and out | warehouse, mapped | warehouse, by TCP | Mooncake, TCP | TransferQueue "
    assert table(docs, heading + "| its Mooncake | whole shards (before) |") == rows
    *_, shared = json.loads((ROOT / "bench/results/dock_peers.json").read_text())["shared_fetch"]
    for how in ("shared", "each for itself"):
        assert f"after {shared[how]['wall_s']:.2f} s, with {shared[how]['wire_bytes'] / 1e9:.2f} GB" in docs
        assert f"{shared[how]['cpu_s']:.2f} s" in docs
    figures = json.loads((ROOT / "bench/results/orchestrator_routes.json").read_text())
    assert f"{figures['routes_mb_s']:.0f} MB of routes a second were made durable" in docs
    assert f"with {figures['cpu_share']:.2f} of a processor and {figures['rss_mib']} MiB" in docs
    assert f"{figures['loop_lag_p99_ms']:.0f} ms late (p99), {figures['loop_lag_max_ms']:.0f} at most" in docs
