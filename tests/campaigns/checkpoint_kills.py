"""Kill trials of the checkpoint ledger: SIGKILL at a random moment of save, replace, retain or prune.

``--trials`` are cheap ones without torch (`tests/checkpoints/kill_trials.py` says what must hold); ``--dcp`` are
trials with real ranks that save a sharded model with torch's distributed checkpoint in the background, where after
each kill the newest entry is loaded and compared. Both counts go to ``bench/results/checkpoint_kills.json``; with
``--add`` on top of what is there, so that a long count can be made in parts (each with another ``--seed``).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import socket
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from tempfile import mkdtemp
from types import SimpleNamespace
from typing import Any

import torch
from campaign_paths import ROOT
from harness import record
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.fsdp import fully_shard

from hpcrl.checkpoints import CheckpointLedger, CheckpointWriter
from hpcrl.config.recipe import CheckpointConfig
from hpcrl.trainer.parallel.mesh import distributed
from hpcrl.trainer.state.saver import CheckpointSaver

sys.path.insert(0, str(ROOT / "tests" / "checkpoints"))
from kill_trials import failures, fork, run_trials

TRIALS_PER_LEDGER = 50
RANKS = 2
_LONGEST_S = 1.5
_LATE_SHARE = 0.7
"""Of trials that wait for a first save: the others are killed while ranks meet, claim, or save for the first time."""
RESULT = ROOT / "bench/results/checkpoint_kills.json"


def ledger_trials(root: Path, trials: int, jobs: int, seed: int) -> Counter[str]:
    """Trials in portions, each with a ledger and a reader of its own; ``jobs`` portions at a time."""
    total: Counter[str] = Counter()
    portions = [min(TRIALS_PER_LEDGER, trials - first) for first in range(0, trials, TRIALS_PER_LEDGER)]
    with ProcessPoolExecutor(jobs) as pool:
        for counts in pool.map(
            run_trials,
            [root / str(i) for i in range(len(portions))],
            portions,
            [seed + i for i in range(len(portions))],
        ):
            total.update(counts)
    return total


def save_for_ever(rank: int, port: int, root: Path, attempt: int) -> None:
    """A rank of a trainer whose parameters and moments all have the value of the step."""
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(RANKS), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    with distributed(timeout_s=60) as parallel:
        model = nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 64))
        fully_shard(model, mesh=parallel.mesh.sharding)
        optimizer = torch.optim.AdamW(model.parameters())
        writer = parallel.world.on_leader(lambda: CheckpointWriter.claim(root, attempt), "claiming")
        saver = CheckpointSaver(writer, parallel.world, CheckpointConfig(keep_last=2), lambda kind, **data: None)
        policy: Any = SimpleNamespace(model=model, optimizer=optimizer)
        step = parallel.world.on_leader(lambda: max(writer.ledger.steps(), default=0), "listing")
        while True:
            step += 1
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(float(step))
            saver.start(policy, step, orchestrator_state=str(step).encode)
            with torch.no_grad():  # the next step changes the weights while they are written
                for parameter in model.parameters():
                    parameter.fill_(-1.0)
            if saver.wait(60.0) is not None:
                raise AssertionError("a save failed")


def loads_whole(root: Path) -> int | None:
    """Load the newest entry without ranks; its step, or None where there is none. AssertionError where it is mixed."""
    choice = CheckpointLedger(root).newest_verified()
    assert not choice.skipped, choice.skipped
    if choice.entry is None:
        return None
    model = nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 64))
    state: dict[str, Any] = {"model": dict(model.state_dict()), "step": torch.tensor(0)}
    load(state, storage_reader=FileSystemReader(choice.entry.trainer_dir), no_dist=True)
    step = choice.entry.step
    assert int(state["step"]) == step
    assert choice.entry.orchestrator_state() == str(step).encode()
    for name, tensor in state["model"].items():
        assert bool((tensor == float(step)).all()), name
    return step


def dcp_trials(root: Path, trials: int, seed: int) -> Counter[str]:
    """Kill all ranks, or one of them and then the others, and load what is there."""
    rng, counts, newest = random.Random(seed), Counter[str](), 0
    root.mkdir()
    for number in range(trials):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        pids = [fork(save_for_ever, rank, port, root, number + 1) for rank in range(RANKS)]
        # ranks need a while to meet; then a random moment of the saves
        deadline = time.monotonic() + 60.0
        while not list(root.glob(f".writer-{number + 1:06d}-*")) and time.monotonic() < deadline:
            time.sleep(0.01)
        late = rng.random() < _LATE_SHARE
        while late and max(CheckpointLedger(root).steps(), default=0) <= newest and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(rng.uniform(0.0, _LONGEST_S))
        rng.shuffle(pids)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            time.sleep(rng.choice([0.0, 0.0, 0.05]))
        for pid in pids:
            os.waitpid(pid, 0)
        counts.update({"trials": 1, "! torn or mixed": 0, "! went back": 0})
        try:
            step = loads_whole(root)
        except AssertionError as error:
            print(f"trial {number}: {error}")
            counts["! torn or mixed"] += 1
            continue
        counts["! went back"] += (step or 0) < newest
        counts["commits"] += (step or 0) - newest
        newest = max(newest, step or 0)
    return counts


def main() -> None:
    """Run the trials and record the counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=3400)
    parser.add_argument("--dcp", type=int, default=100)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--add", action="store_true")
    parser.add_argument("--directory", type=Path, help="where ledgers lie; a disk, or memory for more kills a second")
    arguments = parser.parse_args()
    root = Path(mkdtemp(prefix="hpcrl-kills-", dir=arguments.directory))
    made = {
        "ledger": ledger_trials(root / "ledger", arguments.trials, arguments.jobs, arguments.seed),
        "dcp": dcp_trials(root / "dcp", arguments.dcp, arguments.seed),
    }
    # read only now: another part may have been added meanwhile
    before: dict[str, Any] = json.loads(RESULT.read_text()) if arguments.add else {}
    result: dict[str, Any] = {"seeds": [*before.get("seeds", []), arguments.seed]}
    for name, counts in made.items():
        print(name, dict(counts))
        counts.update(before.get(name, {}))
        result[name] = {key: counts[key] for key in sorted(counts)}
    record("checkpoint_kills", result)
    shutil.rmtree(root)
    if any(failures(Counter(result[name])) for name in ("ledger", "dcp")):
        sys.exit("an entry was torn or lost")


if __name__ == "__main__":
    main()
