"""What the ledger of a long run costs an orchestrator that starts again: CPU seconds and memory, by the steps so far.

Ledgers are written with 256 rollouts a step, in groups of 16, with some turns each, and a file of columns a step, of
which the last ten are there. A process of its own reads each and finds what waits. Writes
``bench/results/long_ledger.json``.

    python bench/long_ledger.py
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
from harness import record, scratch

from hpcrl.dock.ledger.entries import Begin, Entry, Finished, Kept, PayloadPlace, Taken, TurnSaved
from hpcrl.rollouts.ledger.ledger import RolloutLedger

GROUPS, MEMBERS = 16, 16


def write(directory: Path, steps: int, turns: int) -> int:
    """A ledger; returns its bytes."""
    for name in ("ledger", "payload"):
        (directory / name).mkdir(parents=True)
    path, encoder = directory / "ledger/000001.jsonl", msgspec.json.Encoder()
    with path.open("wb") as stream:

        def put(entry: Entry) -> None:
            stream.write(encoder.encode(entry) + b"\n")

        put(Begin(attempt=1, restored=0, time_s=0.0, believed={}))
        for step in range(1, steps + 1):
            place = PayloadPlace(f"000001-{step:06d}.columns", 0, 1, "0" * 32)
            about: dict[str, Any] = {"environment": "swe", "first_version": step - 1, "last_version": step - 1}
            for group in range((step - 1) * GROUPS, step * GROUPS):
                own = {**about, "group": group, "prompt_index": group, "tokens": 1000, "payload": place}
                for member in range(MEMBERS):
                    for turn in range(turns):
                        put(TurnSaved(member=member, turn=turn, **own))
                    put(Finished(member=member, reward=1.0, sampled_tokens=500, ended_s=1e9, **own))
                put(Kept(group=group))
            members = list(range(MEMBERS))
            put(Taken(step=step, groups=[(g, members) for g in range((step - 1) * GROUPS, step * GROUPS)]))
            if step > steps - 10:
                (directory / "payload" / place.file).touch()
    return path.stat().st_size


def read(directory: Path, steps: int) -> dict[str, float]:
    """What a start costs."""
    began, cpu = time.perf_counter(), time.process_time()
    ledger = RolloutLedger(directory, attempt=2, restored=steps, bound=8, limit_s=10.0, checkpoints=list)
    found = ledger.find(MEMBERS)
    assert (found.next_index, found.count) == (steps * GROUPS, steps * GROUPS * MEMBERS), found
    cpu_s, seconds = time.process_time() - cpu, time.perf_counter() - began
    ledger.close()
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20)
    return {"seconds": round(seconds, 1), "cpu_s": round(cpu_s, 1), "largest_gib": round(rss, 2)}


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    starts = ["1000x0", "10000x0", "1000x10"]
    parser.add_argument(
        "--starts", nargs="+", default=starts, metavar="STEPSxTURNS", help="turns saved of each rollout"
    )
    parser.add_argument("--limit-s", type=float, default=600.0, help="longest time of one start")
    parser.add_argument("--read", metavar="DIRECTORY", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    sizes = [tuple(map(int, start.split("x"))) for start in arguments.starts]
    if arguments.read:
        print(json.dumps(read(Path(arguments.read), sizes[0][0])))
        return
    rows = []
    for (steps, turns), start in zip(sizes, arguments.starts, strict=True):
        directory = scratch("ledger") / "rollouts"
        size = write(directory, steps, turns)
        command = [sys.executable, __file__, "--read", directory, "--starts", start]
        row: dict[str, Any] = {"steps": steps, "turns": turns, "ledger_gb": round(size / 1e9, 3)}
        try:
            done = subprocess.run(command, check=True, capture_output=True, timeout=arguments.limit_s)
            row |= json.loads(done.stdout)
        except subprocess.TimeoutExpired:
            row["longer_than_s"] = arguments.limit_s
        print(row, flush=True)
        rows.append(row)
        shutil.rmtree(directory)
    record("long_ledger", {"rollouts_per_step": GROUPS * MEMBERS, "starts": rows})


if __name__ == "__main__":
    main()
