"""Kill trials of the ledger of rollouts: SIGKILL at random moments for the orchestrator, a rank of the trainer, one
that holds the lock of a block which ranks of its node share, an engine, all of a run, or the warehouse of rollouts (its
server, its files, or their content), in turns. With ``--backend mooncake`` rollouts are in Mooncake Store, and its
master is killed in place of that lock and of the warehouse.

Half of the rollouts have several turns, and go on with the next one. After each kill the ledger is read as
``hpcrl rollouts verify`` reads it and compared with what the trainer says it trained
(`tests/rollouts/ledger_trials.py`); the next attempt goes on from the newest checkpoint. Counts go to
``bench/results/rollout_kills.json``; with ``--add`` on top of what is there.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from campaign_paths import ROOT
from harness import record

TESTS = ROOT / "tests"
KILLS_PER_RUN = 20
RESULT = ROOT / "bench/results/rollout_kills.json"


def trials(root: str, kills: int, seed: int, kinds: list[str], backend: str) -> dict[str, int]:
    """One run; in a process of its own, where the tests' harness may shadow that of the benches."""
    sys.modules.pop("harness", None)
    sys.path[:0] = [str(TESTS / "rollouts"), str(TESTS)]
    from ledger_trials import KINDS, run_trials

    if unknown := set(kinds) - set(KINDS[backend]):
        raise SystemExit(f"no kind of kill is called {', '.join(unknown)}; there are {', '.join(KINDS[backend])}")
    return run_trials(Path(root) / str(seed), kills, seed, kinds, backend)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kinds", nargs="*", default=[], help="of kills; all by default")
    parser.add_argument("--backend", choices=("embedded", "mooncake"), default="embedded", help="of the warehouse")
    parser.add_argument("--add", action="store_true", help="add to the recorded counts")
    arguments = parser.parse_args()
    total: Counter[str] = Counter()
    portions = [min(KILLS_PER_RUN, arguments.kills - first) for first in range(0, arguments.kills, KILLS_PER_RUN)]
    with TemporaryDirectory(prefix="rollout-kills-") as root, ProcessPoolExecutor(arguments.jobs) as pool:
        seeds = range(arguments.seed, arguments.seed + len(portions))
        work = partial(trials, kinds=arguments.kinds, backend=arguments.backend)
        for counts in pool.map(work, [root] * len(portions), portions, seeds):
            total.update(counts)
            print(dict(total), flush=True)
    if arguments.add and RESULT.exists():
        before = json.loads(RESULT.read_text())["counts"]
        total.update(before)
    record("rollout_kills", {"counts": dict(total)})
    sys.exit(total["problems"] > 0)


if __name__ == "__main__":
    main()
