"""Time that pages of a board take to open in a headless Chromium: ``python bench/board.py``.

100 runs of 40 steps and one of 10,000 steps with 64 marks are written by hand. *Shown* is when the list is there,
*seen* when the plots of the first screen are drawn, *drawn* when those of the next screen are, too; all count from the
begin of the navigation. Others are drawn when a reader comes near to them; *whole* are the milliseconds in which all of
them are drawn at once, as before printing. *First* is the first page with plots that a browser ever opens of a board
that was just started: the browser compiles the plotting program, and the board reads all files of the run. *Cold* is
the first opening of the run after two openings of another one. Others are later openings, the median. Processor time of
the server for an answer does not depend on what else the machine does; the other figures do.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / part) for part in ("tests/runs", "tests/board", "tests", "tools", "bench")]

from board_lab import served  # noqa: E402
from headless_chromium import chromium_page  # noqa: E402
from page import DRAW_WHOLE, long_run  # noqa: E402
from runs_testing import make_run, write_status, write_steps  # noqa: E402

from hpcrl.board.board_state import Board  # noqa: E402
from hpcrl.board.run_page import run_page  # noqa: E402
from hpcrl.runs.status import RunState  # noqa: E402

RESULT = ROOT / "bench/results/board.json"
_MARKS = "performance.getEntriesByType('mark').map((m) => [m.name.replace('hpcrl-', ''), m.startTime])"
_WELCOMED = "location.search === '' && document.documentElement?.dataset.state === 'drawn'"


def answer_cpu(root: Path, key: str) -> dict[str, int]:
    """Return the processor time of an answer in milliseconds: the first of a board, and a later one."""
    board = Board([str(root)])
    board.warm()
    found = {}
    for name in ("cold_answer_cpu_ms", "answer_cpu_ms"):
        began = time.process_time()
        run_page(board, key, board.keys.find(key), "")
        found[name] = round(1000 * (time.process_time() - began))
    return found


def many_runs(root: Path, count: int) -> None:
    """Write runs that have ended."""
    for number in range(count):
        run = make_run(root, f"run-{number:03d}")
        write_steps(run, 40)
        write_status(run, RunState.COMPLETED)


async def open_times(page: Any, url: str, rounds: int) -> list[dict[str, float]]:
    """Return the milliseconds of each opening."""
    found = []
    for _ in range(rounds):
        await page.open(url)
        found.append({name: round(ms) for name, ms in await page.evaluate(_MARKS)})
    return found


async def measure_board(root: Path, rounds: int, width: int, steps: int) -> list[dict[str, Any]]:
    rows = []
    async with chromium_page() as page:
        await page.look(width)
        # a page with plots of another board, for the browser's own copy of the plotting program
        async with served(root / "many") as board:
            await page.open(board.link, _WELCOMED)
            await page.open(f"{board.url}/run/run-000")
            times = await open_times(page, f"{board.url}/", rounds)
            rows.append({"page": "list of 100 runs", "width": width, "shown_ms": middle(times, "shown")})
        row: dict[str, Any] = {"page": f"run of {steps} steps", "width": width}
        # the browser keeps a compiled program for each port
        for name, before in (("first", ()), ("cold", ("short", "short"))):
            async with served(root / "long") as board:
                board.board.warm()
                await page.open(board.link, _WELCOMED)
                for other in before:
                    await page.open(f"{board.url}/run/{other}")
                (opened,) = await open_times(page, f"{board.url}/run/long", 1)
                row |= {f"{name}_seen_ms": opened["seen"], f"{name}_drawn_ms": opened["drawn"]}
                times = await open_times(page, f"{board.url}/run/long", rounds)
                whole = round(await page.evaluate(DRAW_WHOLE))
        row |= {"seen_ms": middle(times, "seen"), "drawn_ms": middle(times, "drawn"), "whole_ms": whole}
        rows.append(row | answer_cpu(root / "long", "long"))
        # the list lets the browser fetch the plotting program in advance, also when its board has ended meanwhile
        messages = [message for message in page.messages if "ERR_CONNECTION_REFUSED" not in message]
        assert messages == [], messages
    return rows


def middle(times: list[dict[str, float]], name: str) -> int:
    return round(median(each[name] for each in times))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    wanted = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        os.environ["XDG_STATE_HOME"] = str(root / "state")
        (root / "long").mkdir()
        long_run(root / "long", wanted.steps)
        short = make_run(root / "long", "short")
        write_steps(short, 40)
        write_status(short, RunState.COMPLETED)
        many_runs(root / "many", wanted.runs)
        for width in (1280, 390):
            rows += asyncio.run(measure_board(root, wanted.rounds, width, wanted.steps))
    load = round(os.getloadavg()[0], 1)
    for row in rows:
        print(json.dumps(row))
    print(f"load of the machine in the last minute: {load} on {os.cpu_count()} processors")
    RESULT.write_text(json.dumps({"rows": rows, "load": load, "processors": os.cpu_count()}, indent=2) + "\n")


if __name__ == "__main__":
    main()
