"""Time that a page of runs takes to be written, and to open in a headless Chromium: ``python bench/page.py``.

A run of 10,000 steps with 64 marks is written by hand. *Seen* is when the plots of the first screen are drawn, *drawn*
when those of the next screen are, too; both count from the begin of the navigation. Others are drawn when a reader
comes near to them; *whole* are the milliseconds in which all of them are drawn at once, as before printing. The first
opening of a new Chromium reads its program from disk and is left out; the others are independent navigations.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / part) for part in ("tests/runs", "tests", "tools")]

from headless_chromium import chromium_page  # noqa: E402
from runs_testing import START_S, make_run, write_event, write_status, write_steps  # noqa: E402

from hpcrl.analysis.page.write_html import write_page  # noqa: E402
from hpcrl.runs.rundir import RunDir  # noqa: E402
from hpcrl.runs.status import RunState  # noqa: E402

RESULT = ROOT / "bench/results/page.json"
DRAW_WHOLE = (
    "(() => { const began = performance.now(); window.dispatchEvent(new Event('beforeprint'));"
    "return performance.now() - began; })()"
)
"""Draws all plots, as before printing; its value are the milliseconds."""


def long_run(root: Path, steps: int) -> RunDir:
    """Return a run that has completed, with an event of each version and a fault now and then."""
    run = make_run(root, "long", steps=steps)
    write_steps(run, steps, total=steps)
    write_status(run, RunState.COMPLETED)
    ended_s = START_S + 25 + 2.5 * steps
    for state, at in (("STARTING", START_S + 9), ("READY", START_S + 15), ("EXITED", ended_s)):
        for role in ("trainer", "engine"):
            facts = {"role": role, "replica": 0, "state": state}
            write_event(run, "component.state", time_s=at, writer="supervisor", **facts)
    for version in range(steps):
        at = START_S + 20 + 2.5 * version
        facts = {"version": version, "seconds": 0.4, "pause_s": 0.1}
        write_event(run, "engine.weights_updated", time_s=at, writer="orchestrator-0", engine="engine-0", **facts)
        if version % max(1, steps // 64) == 1:
            write_event(run, "engine.away", time_s=at, writer="orchestrator-0", engine="engine-0", why="killed")
            write_event(run, "engine.back", time_s=at + 2, writer="orchestrator-0", engine="engine-0")
    return run


async def open_times(path: Path, rounds: int, width: int) -> list[dict[str, float]]:
    """Return the milliseconds of each opening."""
    found = []
    async with chromium_page() as page:
        await page.look(width)
        for _ in range(rounds + 1):
            await page.open(path)
            marks = await page.evaluate("performance.getEntriesByType('mark').map((m) => [m.name, m.startTime])")
            whole_ms = await page.evaluate(DRAW_WHOLE)
            points = await page.evaluate(
                "[...document.querySelectorAll('.canvas')].reduce((sum, each) => sum + +each.dataset.points, 0)"
            )
            times = {name.removeprefix("hpcrl-"): ms for name, ms in marks}
            found.append(times | {"points": points, "whole": whole_ms})
            assert page.messages == [], page.messages
    return found[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=5)
    wanted = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        run = long_run(root, wanted.steps)
        started = time.monotonic()
        path = write_page([run], root / "report.html")
        written_s = time.monotonic() - started
        for width in (1280, 390):
            times = asyncio.run(open_times(path, wanted.rounds, width))
            rows.append(
                {
                    "steps": wanted.steps,
                    "width": width,
                    "bytes": path.stat().st_size,
                    "written_s": round(written_s, 2),
                    "seen_ms": round(median(each["seen"] for each in times)),
                    "seen_ms_most": round(max(each["seen"] for each in times)),
                    "drawn_ms": round(median(each["drawn"] for each in times)),
                    "whole_ms": round(median(each["whole"] for each in times)),
                    "points": times[0]["points"],
                }
            )
    for row in rows:
        print(json.dumps(row))
    RESULT.write_text(json.dumps({"rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
