"""Hand-off trials in full: publisher and collector killed at random points while readers load.

    python tests/campaigns/handoff_kills.py --trials 10000 [--append] [--directory /dev/shm]

``--append`` adds to the figures of an earlier run with other seeds, for machines where one run may not take as long.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from campaign_paths import ROOT
from harness import record

sys.path.insert(0, str(ROOT / "tests"))

from handoff_trials import HandoffTrials
from kill_harness import Say, fork_child

NAME = "handoff_kills"
SOME = 250
"""Trials of one store: numbers of versions and events stay small."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=1e9, help="begin nothing after so many")
    parser.add_argument("--workers", type=int, default=2, help="stores at a time")
    parser.add_argument("--directory", type=Path, help="where; a temporary directory by default")
    parser.add_argument("--append", action="store_true")
    arguments = parser.parse_args()
    path = ROOT / "bench/results" / f"{NAME}.json"
    before = json.loads(path.read_text()) if arguments.append and path.exists() else {}
    counts: Counter[str] = Counter(before.get("counts", {}))
    problems = list(before.get("problems", []))
    goal = counts["trials"] + arguments.trials
    seed = counts["trials"]
    started = time.monotonic()
    scratch = Path(tempfile.mkdtemp(prefix="hpcrl-handoff-kills-", dir=arguments.directory))

    def left_s() -> float:
        return arguments.seconds - (time.monotonic() - started)

    def work(say: Say, seed: int, some: int) -> None:
        trials = HandoffTrials(scratch / str(seed), seed=seed)
        try:
            while trials.counts["trials"] < some and left_s() > 0:
                trials.trial()
        finally:
            trials.close()
        say(json.dumps([trials.counts, trials.problems]))

    while counts["trials"] < goal and left_s() > 0:
        some = min(SOME, -(-(goal - counts["trials"]) // arguments.workers))
        children = []
        for _ in range(arguments.workers):
            seed += SOME
            children.append(fork_child(lambda say, seed=seed, some=some: work(say, seed, some)))
        for child in children:
            outcome = child.wait(timeout_s=3600.0)
            found, wrong = json.loads(outcome.lines[-1])
            counts.update(found)
            problems += wrong
            for problem in wrong:
                print(problem, flush=True)
        print(f"{counts['trials']} trials, {counts['torn']} torn, {counts['lost']} lost", flush=True)
    shutil.rmtree(scratch, ignore_errors=True)
    seconds = before.get("seconds", 0.0) + time.monotonic() - started
    record(NAME, {"counts": dict(counts), "problems": problems[:20], "seconds": round(seconds, 1)})


if __name__ == "__main__":
    main()
