"""The trainer beside its peers on the same tiny models: torchtitan's own trainer, and transformers under FSDP2.

    python bench/trainer_peers.py --torchtitan PYTHON [--models qwen3 …]

Some 12 minutes for all models on two processors without other work. What was recorded before of cases that are not
asked for stays in the file; a trainer that fails is named, and the others go on.

All train the same sequences on two gloo ranks, one thread each, in float32, with AdamW and clipping: plain, and with
what saves memory (every layer computed again; logits in pieces, where the trainer has that). One start of each takes
the peak of resident memory in its second step, beside what the process had before it built the model, with a malloc
that returns what is freed; then it times steps with malloc as it is by itself. Of all steps the one that took least
counts, in seconds and in CPU seconds, because other work on the machine only ever adds to either; the medians are
recorded beside them. With ``--rounds`` trainers take turns several times. torchtitan wants an interpreter of its own:
``pip install torch==2.13.0 torchtitan==0.3.0 triton``; without one it is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from harness import ROOT, record, scratch

RANKS = 2
SEQUENCES, TOKENS = 4, 512
MODELS = ("qwen3", "qwen3_moe", "deepseek_v3")
#: model, ranks that share experts (a peer that cannot is left out), low memory
CASES = [(model, 1, low) for low in (True, False) for model in MODELS] + [
    ("qwen3_moe", 2, True),
    ("deepseek_v3", 2, True),
]
#: of a start; without other work one takes some 35 seconds
START_S = 900

Row = dict[str, Any]


class TrainerFailedError(Exception):
    """A trainer of the bench did not come to its end."""


def start(python: Path, script: str, case: dict[str, Any]) -> list[dict[str, Any]]:
    """One start of a trainer; what each rank measured.

    Raises
    ------
    TrainerFailedError
        It failed, or took too long.
    """
    out = scratch("peers") / "rank"
    command: list[str | Path] = [
        python,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={RANKS}",
        script,
    ]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'bench'}"}
    env["HPCRL_BENCH_CASE"] = json.dumps({**case, "out": str(out)})
    pipe, cwd = subprocess.PIPE, ROOT / "bench/peers"
    # a session of its own, so that its ranks can be ended with it
    with subprocess.Popen(
        command, cwd=cwd, env=env, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    ) as run:
        try:
            errors = run.communicate(timeout=START_S)[1]
        except subprocess.TimeoutExpired:
            os.killpg(run.pid, signal.SIGKILL)
            raise TrainerFailedError(f"{script} took more than {START_S} s") from None
    if run.returncode:
        raise TrainerFailedError(f"{script} failed:\n{errors[-4000:]}")
    return [json.loads(out.with_name(f"rank.{rank}").read_text()) for rank in range(RANKS)]


def measure(peers: dict[str, Path], case: dict[str, Any], rounds: int, turn: int) -> dict[str, Row | str]:
    """Each trainer's figures: of seconds the least and the median of all steps, of memory the median of starts.

    A text where it failed. The order turns with ``turn`` and with rounds, so that none is always the first.
    """
    found: dict[str, list[list[dict[str, Any]]]] = {name: [] for name in peers}
    failed: dict[str, str] = {}
    for number in range(turn, turn + rounds):
        for name in list(peers)[number % len(peers) :] + list(peers)[: number % len(peers)]:
            try:
                found[name].append(start(peers[name], f"with_{name}.py", case))
            except TrainerFailedError as error:
                failed[name] = str(error)
    return {name: failed[name] if name in failed else summary(starts) for name, starts in found.items()}


def summary(starts: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """Of the starts of one trainer: seconds of the slowest rank, CPU seconds of all ranks, peak of the largest."""
    step_s = [max(step) for ranks in starts for step in zip(*(rank["step_s"] for rank in ranks), strict=True)]
    cpu_s = [sum(step) for ranks in starts for step in zip(*(rank["cpu_s"] for rank in ranks), strict=True)]
    return {
        "parameters": starts[0][0]["parameters"],
        "peak_mib": statistics.median(max(rank["peak_mib"] for rank in ranks) for ranks in starts),
        "step_s": min(step_s),
        "step_s_median": statistics.median(step_s),
        "cpu_s": min(cpu_s),
        "cpu_s_median": statistics.median(cpu_s),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--torchtitan", type=Path, metavar="PYTHON", help="an interpreter that has torchtitan")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS, help="which to train; all of them")
    parser.add_argument("--memory", nargs="+", choices=("low", "plain"), default=("low", "plain"), help="and how; both")
    parser.add_argument("--rounds", type=int, default=1, help="starts of each trainer, which take turns")
    parser.add_argument("--steps", type=int, default=3, help="timed steps of a start")
    arguments = parser.parse_args()
    if arguments.torchtitan and not arguments.torchtitan.is_file():
        parser.error(f"--torchtitan: there is no {arguments.torchtitan}")
    failures, began = 0, time.monotonic()
    for turn, (model, ep, low_memory) in enumerate(CASES):
        if model not in arguments.models or ("low" if low_memory else "plain") not in arguments.memory:
            continue
        peers = {"hpcrl": Path(sys.executable)}
        if ep == 1:
            peers["transformers"] = Path(sys.executable)
        if arguments.torchtitan:
            peers["torchtitan"] = arguments.torchtitan
        case = {"model": model, "ep": ep, "low_memory": low_memory}
        sizes = {"sequences": SEQUENCES, "tokens": TOKENS, "steps": arguments.steps}
        found = measure(peers, case | sizes, arguments.rounds, turn)
        for name, got in found.items():
            if isinstance(got, str):
                failures += 1
                print(f"{model} ep {ep} {name}: {got}", file=sys.stderr, flush=True)
        measured = {name: got for name, got in found.items() if not isinstance(got, str)}
        # without ours there is nothing to be compared with
        if "hpcrl" in measured:
            settings = {"rounds": arguments.rounds, "steps": arguments.steps}
            keep([{**case, "trainer": name, **row, **settings} for name, row in compared(measured).items()])
    print(f"{time.monotonic() - began:.0f} s")
    if failures:
        sys.exit(f"{failures} of the trainers failed")


def compared(found: dict[str, Row]) -> dict[str, Row]:
    """With the speed and the memory of ours beside each: above 1 ours is the faster, below 1 it needs less."""
    own, rows = found["hpcrl"], {}
    for name, got in found.items():
        row = dict(got)
        row["tokens_s"] = RANKS * SEQUENCES * TOKENS / got["step_s"]
        row["hpcrl_speed"] = got["step_s"] / own["step_s"]
        row["hpcrl_cpu_speed"] = got["cpu_s"] / own["cpu_s"]
        row["hpcrl_memory"] = own["peak_mib"] / got["peak_mib"]
        rows[name] = row
    return rows


def keep(rows: list[Row]) -> None:
    """Print and record the rows of a case in place of those that were recorded of it before, at once: a run is long."""
    path = ROOT / "bench/results/trainer_peers.json"
    old = json.loads(path.read_text())["rows"] if path.is_file() else []
    cases = [(row["model"], row["ep"], row["low_memory"]) for row in rows]
    for row in rows:
        print(
            f"{row['model']:12} ep {row['ep']} {'low' if row['low_memory'] else 'plain':5} {row['trainer']:12}"
            f" {row['tokens_s']:7.0f} tokens/s {row['cpu_s']:6.2f} CPU s/step {row['peak_mib']:6.0f} MiB"
            f"   hpcrl: {row['hpcrl_speed']:.2f} x speed ({row['hpcrl_cpu_speed']:.2f} by CPU time),"
            f" {row['hpcrl_memory']:.2f} x memory",
            flush=True,
        )
    others = [row for row in old if (row["model"], row["ep"], row["low_memory"]) not in cases]
    merged = sorted(others + rows, key=lambda row: CASES.index((row["model"], row["ep"], row["low_memory"])))
    record("trainer_peers", {"ranks": RANKS, "sequences": SEQUENCES, "tokens": TOKENS, "rows": merged})


if __name__ == "__main__":
    main()
