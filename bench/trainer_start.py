"""What it costs to start the trainer's ranks of a node: by a launcher that imports once and forks, and by torchrun.

Each rank imports the trainer, joins the others (gloo), and waits until all are there and memory was measured. Ways take
turns; of the rounds the one that took least counts, in seconds and in CPU seconds of the launcher and all ranks.
Memory is the proportional set size: pages that processes share are counted once. ``calls`` are system calls that name
a file, from a start of its own under strace. Writes ``bench/results/trainer_start.json``.

    python bench/trainer_start.py [--ranks 1 2 4 8] [--rounds 3]
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

from harness import ROOT, record, scratch

from hpcrl import procfs

WAYS = {
    "torchrun": ("torch.distributed.run", "--standalone", "--nproc-per-node={ranks}", "-m"),
    "launcher": ("hpcrl.trainer.launcher", "--ranks={ranks}"),
}
MIB = 1 << 20
LIMIT_S = 300.0


def rank() -> None:
    """What each rank runs."""
    import hpcrl.trainer.loop  # noqa: F401, PLC0415 - what is measured
    from hpcrl.trainer.parallel.mesh import distributed  # noqa: PLC0415

    directory = Path(os.environ["HPCRL_BENCH_START"])
    with distributed(timeout_s=LIMIT_S):
        (directory / f"ready-{os.environ['RANK']}").touch()
        wait_for([directory / "measured"])


def wait_for(paths: list[Path]) -> None:
    """Wait until all files are there."""
    deadline = time.monotonic() + LIMIT_S
    while not all(path.exists() for path in paths):
        if time.monotonic() > deadline:
            sys.exit(f"{paths} are not there after {LIMIT_S:g} s")
        time.sleep(0.005)


def start(way: str, ranks: int, *above: str) -> dict[str, float]:
    """One start: seconds until all ranks were together, CPU seconds, and MiB of memory then."""
    directory = scratch("trainer-start")
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'bench'}"}
    env["HPCRL_BENCH_START"] = str(directory)
    launch = [word.format(ranks=ranks) for word in WAYS[way]]
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    process = subprocess.Popen(
        [*above, sys.executable, "-m", *launch, "trainer_start"], env=env, stderr=subprocess.DEVNULL
    )
    try:
        wait_for([directory / f"ready-{number}" for number in range(ranks)])
        seconds = time.monotonic() - began
        pss = sum(proportional_bytes(pid) for pid in (process.pid, *(p.pid for p in procfs.descendants(process.pid))))
        (directory / "measured").touch()
        if process.wait(LIMIT_S):
            sys.exit(f"{way} ended with {process.returncode}")
    finally:
        process.kill()
        process.wait()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"seconds": seconds, "cpu_s": cpu_s, "pss_mib": pss / MIB}


def proportional_bytes(pid: int) -> int:
    """Memory of a process; what it shares is dealt out among those that share it."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
    found = re.search(r"^Pss: +(\d+) kB", text, re.MULTILINE)
    assert found is not None
    return int(found[1]) << 10


def file_calls(way: str, ranks: int) -> int:
    """System calls of a start that name a file."""
    counts = scratch("trainer-start-calls") / "counts"
    start(way, ranks, "strace", "-f", "--seccomp-bpf", "-qq", "-e", "trace=%file", "-c", "-o", str(counts))
    (total,) = (line.split() for line in counts.read_text(encoding="utf-8").splitlines() if line.endswith(" total"))
    return int(total[3])


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    rows = []
    for ranks in given.ranks:
        rounds = {way: [start(way, ranks)] for way in WAYS}
        for number in range(1, given.rounds):
            for way in list(WAYS)[:: 1 if number % 2 else -1]:
                rounds[way].append(start(way, ranks))
        for way, measured in rounds.items():
            row = {name: round(min(one[name] for one in measured), 2) for name in measured[0]}
            if shutil.which("strace"):
                row["calls"] = file_calls(way, ranks)
            rows.append({"way": way, "ranks": ranks, **row})
            print(rows[-1], flush=True)
    record("trainer_start", {"rounds": given.rounds, "rows": rows})


if __name__ == "__main__":
    if "HPCRL_BENCH_START" in os.environ:
        rank()
    else:
        main()
