"""Trials of the fabric in full: a fault at a random transfer, or the kill of a writer, while a reader pulls.

    python tests/campaigns/fabric_kills.py --trials 10000 [--append] [--directory /dev/shm]

``--append`` adds to the figures of an earlier run with other seeds.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from campaign_paths import ROOT
from harness import record

sys.path.insert(0, str(ROOT / "tests"))

from fabric_trials import FabricTrials

NAME = "fabric_kills"
SOME = 250
"""Trials of one store: numbers of versions stay small."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=10_000)
    parser.add_argument("--kill-every", type=int, default=50, help="kill the process of a writer once in so many")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin nothing after so many")
    parser.add_argument("--directory", type=Path, help="where; a temporary directory by default")
    parser.add_argument("--append", action="store_true")
    arguments = parser.parse_args()
    path = ROOT / "bench/results" / f"{NAME}.json"
    before = json.loads(path.read_text()) if arguments.append and path.exists() else {}
    counts: Counter[str] = Counter(before.get("counts", {}))
    problems = list(before.get("problems", []))
    goal, started = counts["trials"] + arguments.trials, time.monotonic()
    scratch = Path(tempfile.mkdtemp(prefix="hpcrl-fabric-kills-", dir=arguments.directory))
    try:
        while counts["trials"] < goal and time.monotonic() - started < arguments.seconds:
            seed = counts["trials"]
            trials = FabricTrials(scratch / str(seed), seed=seed)
            while trials.counts["trials"] < min(SOME, goal - seed) and time.monotonic() - started < arguments.seconds:
                if trials.counts["trials"] % arguments.kill_every == arguments.kill_every - 1:
                    trials.kill()
                else:
                    trials.trial()
            trials.close()
            counts += trials.counts
            problems += trials.problems
            shutil.rmtree(scratch / str(seed), ignore_errors=True)
            print(json.dumps(counts), flush=True)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    seconds = before.get("seconds", 0.0) + time.monotonic() - started
    record(NAME, {"counts": dict(sorted(counts.items())), "problems": problems, "seconds": round(seconds, 1)})
    os._exit(1 if problems else 0)  # threads of the engines would be waited for


if __name__ == "__main__":
    main()
