"""Power cuts: file operations of publish, checkpoint, collection and a run directory are recorded, and the states that
a cut at any of their moments could leave are opened by the real readers and the next writer.

The same as tests/durability with more states: by the rules of POSIX, of NFS (close to open), and of clients of a
parallel filesystem (tests/durability/power_cut.py says which). Then each fsync of the product is left out in turn,
and the table says what was lost first, or which other one had covered it. ``bench/results/power_cuts.json``.
"""

from __future__ import annotations

import argparse
import logging
import shutil
import sys
import time
from collections.abc import Sequence
from typing import Any

from campaign_paths import ROOT
from harness import record, scratch

sys.path[:0] = [str(ROOT / "tests" / room) for room in ("durability", ".", "checkpoints", "runs")]
import recording  # noqa: E402
from campaign import examine, sites  # noqa: E402
from recording import Operation  # noqa: E402

SCENARIOS = ("handoffs", "ledger", "put_aside", "run_files", "torch_checkpoint")
RULES = ("posix", "nfs", "clients")


def campaign(
    recordings: dict[str, Sequence[Operation]], *, limit: int, most: int | None, seed: int
) -> list[dict[str, Any]]:
    """States of all scenarios by all rules."""
    rows = []
    print(f"{'scenario':18}{'rules':9}{'operations':>11}{'cuts':>6}{'states':>9}{'different':>10}{'wrong':>6}{'s':>8}")
    for scenario, operations in recordings.items():
        for rules in RULES:
            began_s = time.monotonic()
            figures = examine(scenario, operations, rules=rules, limit=limit, most=most, seed=seed)
            row = {
                "scenario": scenario,
                "rules": rules,
                "operations": figures.operations,
                "cuts": figures.cuts,
                "states": figures.states,
                "different": figures.opened,
                "wrong": len(figures.problems),
                "seconds": round(time.monotonic() - began_s, 1),
            }
            cells = list(row.values())
            print("{:18}{:9}{:>11}{:>6}{:>9}{:>10}{:>6}{:>8}".format(*cells), flush=True)
            for problem in figures.problems[:5]:
                print(f"    {problem}")
            rows.append(row)
    return rows


def mutants(recordings: dict[str, Sequence[Operation]], *, seed: int) -> list[dict[str, Any]]:
    """What is lost without each fsync."""
    rows: list[dict[str, Any]] = []
    print(f"\n{'without the fsync of':75} lost first")
    for scenario, operations in recordings.items():
        for site in sorted(sites(operations)):
            if site.startswith("elsewhere"):
                continue
            problem = ""
            for rules in RULES:
                figures = examine(
                    scenario, operations, rules=rules, limit=16, most=400, seed=seed, without=(site,), first_only=True
                )
                problem = problem or next((f"{rules}: {problem}" for problem in figures.problems), "")
            problem = problem.replace(str(ROOT), "")
            rows.append({"scenario": scenario, "site": site, "found": bool(problem)})
            print(
                f"{scenario + ' ' + site:75} {problem[:160] or 'nothing: another one makes the same durable'}",
                flush=True,
            )
    return rows


def main() -> None:
    """Record, open, print, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--limit", type=int, default=500, help="most states of one moment")
    parser.add_argument("--most", type=int, help="most states that are opened of one scenario by one set of rules")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=SCENARIOS, help="one scenario")
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)  # what the code says about each state
    root = scratch("power-cuts")
    library = recording.build_recorder(root)
    chosen = (arguments.only,) if arguments.only else SCENARIOS
    recordings = {scenario: recording.record(library, scenario, root / scenario) for scenario in chosen}
    rows = campaign(recordings, limit=arguments.limit, most=arguments.most, seed=arguments.seed)
    without = mutants(recordings, seed=arguments.seed)
    wrong = sum(row["wrong"] for row in rows)
    total = {key: sum(row[key] for row in rows) for key in ("states", "different", "wrong")}
    print(f"\n{total}; of {len(without)} fsyncs {sum(row['found'] for row in without)} are missed alone")
    if not arguments.only:
        figures = {"seed": arguments.seed, "limit": arguments.limit, "total": total, "cuts": rows, "without": without}
        record("power_cuts", figures)
    shutil.rmtree(root)
    if wrong:
        sys.exit("something was lost or torn")


if __name__ == "__main__":
    main()
