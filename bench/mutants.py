"""Whether tests see small wrong changes: samples mutants of rooms that decide numbers and fates, and runs their tests.

    python bench/mutants.py --count 200 --seed 1                # minutes to hours; `make test-mutants`
    python bench/mutants.py --rooms trainer,dock --minutes 10   # what can be tried in this time
    python bench/mutants.py --near --resume verdicts.jsonl      # begin at once, and continue what was interrupted
    python bench/mutants.py --list                              # how many mutants each room has

A mutant is one wrong expression or statement (`mutation.operators`). First each file of a room's tests runs once, and
it is noted which functions each test executes; a mutant is tried with the tests that execute the function that it
changes, then with the other tests of their files. With ``--near`` nothing is recorded: files of tests are tried in the
order of `mutation.nearness`, the nearest first, and a test that fails counts if it passes without the mutant. That
costs less for few mutants of each room, and more for one that no test sees. Everything happens in a copy of the
checkout, and in processes that see no others: a wrong change of what ends processes could end any.
`mutation/equivalent.txt` lists mutants that change nothing that anybody could see, each with the reason; they are not
counted.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from mutation import trials
from mutation.near_tests import NearTests
from mutation.operators import Mutant, mutants_of
from mutation.verdicts import Verdicts

#: `harness` is not imported: it imports hpcrl, which children import from the copy
ROOT = Path(__file__).resolve().parent.parent

#: what each room is made of, and the tests that are its own
ROOMS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "trainer": (
        ("hpcrl/trainer/step", "hpcrl/trainer/batch", "hpcrl/trainer/parallel", "hpcrl/trainer/state"),
        (
            "tests/trainer/step",
            "tests/trainer/batch",
            "tests/trainer/parallel",
            "tests/trainer/state",
            "tests/trainer/memory",
            "tests/trainer/supervised",
            "tests/trainer",
        ),
    ),
    "modeling": (
        ("hpcrl/modeling",),
        (
            "tests/modeling",
            "tests/trainer/batch",
            "tests/trainer/memory",
            "tests/trainer/parallel",
            "tests/trainer/step/test_freeze.py",
            "tests/trainer/step/test_muon.py",
            "tests/trainer/step/test_router_replay.py",
            "tests/trainer/step/test_step_by_hand.py",
            "tests/trainer/test_adapters_trained.py",
            "tests/trainer/test_families.py",
        ),
    ),
    "dock": (
        ("hpcrl/dock",),
        (
            "tests/dock",
            "tests/rollouts/batches",
            "tests/rollouts/test_ledger_restore.py",
            "tests/rollouts/test_sample_ledger.py",
            "tests/rollouts/test_saved_turns.py",
            "tests/rollouts/test_branching_rollouts.py",
            "tests/trainer/step/test_branches_by_hand.py",
            "tests/trainer/test_shared_fetch.py",
        ),
    ),
    "weights": (
        ("hpcrl/weights",),
        (
            "tests/weights",
            "tests/inference/test_adapters.py",
            "tests/jobplan/test_language_model.py",
            "tests/modeling/test_mxfp4.py",
            "tests/modeling/test_stored_weights.py",
            "tests/inference/test_proof.py",
            "tests/rollouts/weights",
            "tests/trainer/publish",
            "tests/trainer/state/test_wrapped_export.py",
        ),
    ),
    "checkpoints": (("hpcrl/checkpoints",), ("tests/checkpoints", "tests/trainer/state")),
    "sampling": (
        ("hpcrl/rollouts/sampling", "hpcrl/rollouts/batches"),
        (
            "tests/rollouts/sampling",
            "tests/rollouts/batches",
            "tests/rollouts/gateway",
            "tests/rollouts/rendering/test_tool_conversation.py",
            "tests/rollouts",
        ),
    ),
    "engine": (("hpcrl/inference/embedded/engine", "hpcrl/inference/embedded/kv"), ("tests/inference/embedded",)),
    "recovery": (
        ("hpcrl/supervisor/recovery",),
        ("tests/supervisor/recovery", "tests/supervisor/launch", "tests/supervisor"),
    ),
    "slurm": (
        ("hpcrl/slurm",),
        (
            "tests/slurm",
            "tests/runs/test_slurm_away.py",
            "tests/submit/test_hidden_jobs.py",
            "tests/supervisor/recovery/test_batch_node_watch.py",
            "tests/supervisor/test_privacy.py",
        ),
    ),
    "gate": (
        ("hpcrl/network/auth.py", "hpcrl/network/credentials.py"),
        ("tests/test_gate.py", "tests/test_serving.py", "tests/inference/test_access.py"),
    ),
}
#: kernels and clients of devices and services that are not here
LEFT_OUT = ("triton", "cudnn", "flash_mla", "deep_gemm", "deepep", "mooncake", "scaled_mm", "cuda", "pool_master")
EQUIVALENT = Path(__file__).parent / "mutation/equivalent.txt"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200, help="mutants to try, as many of each room")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rooms", default=",".join(ROOMS), help="some of: %(default)s")
    parser.add_argument("--minutes", type=float, default=0.0, help="begin nothing after so long; 0: no limit")
    parser.add_argument("--box", type=float, default=120.0, help="seconds that the tests of one mutant may take")
    parser.add_argument("--cache", type=Path, help="directory that keeps what tests execute, for the next time")
    parser.add_argument("--near", action="store_true", help="record nothing; try the nearest files of tests first")
    parser.add_argument("--resume", type=Path, help="file of verdicts: those that it has are not tried again")
    parser.add_argument("--only", default="", help="mutants whose name has this text, all of them")
    parser.add_argument("--list", action="store_true", help="count the mutants, and run nothing")
    parser.add_argument("--output", type=Path, help="in place of bench/results/mutants.json")
    arguments = parser.parse_args()
    rooms = arguments.rooms.split(",")
    known = {room: all_mutants(room) for room in rooms}
    if arguments.list:
        for name in sorted(stale()):
            print(f"no such mutant, in {EQUIVALENT.name}: {name}")
        for room, mutants in known.items():
            print(f"{room:14}{len(mutants):6}  {dict(Counter(mutant.kind for mutant in mutants).most_common())}")
        return
    alone()
    with tempfile.TemporaryDirectory(prefix="hpcrl-mutants-") as scratch:
        campaign(known, arguments, Path(scratch))


def all_mutants(room: str) -> list[Mutant]:
    """Return the mutants of a room, without those that are known to change nothing."""
    known = equivalent()
    return [mutant for mutant in mutants_in(room) if one_line(mutant.name) not in known]


def stale() -> set[str]:
    """Return the names in the list of equivalent mutants that no room has: the code was changed or moved since."""
    return equivalent() - {one_line(mutant.name) for room in ROOMS for mutant in mutants_in(room)}


def mutants_in(room: str) -> list[Mutant]:
    """Return all mutants of a room."""
    for place in (*ROOMS[room][0], *ROOMS[room][1]):
        assert (ROOT / place).exists(), f"room {room}: {place} does not exist"
    found = []
    for place in ROOMS[room][0]:
        files = [ROOT / place] if place.endswith(".py") else sorted((ROOT / place).rglob("*.py"))
        for path in files:
            name = path.relative_to(ROOT).as_posix()
            if not any(word in name for word in LEFT_OUT):
                found += list(mutants_of(name, path.read_text(encoding="utf-8")))
    return found


def equivalent() -> set[str]:
    """Read the names of mutants that change nothing; the indented line after a name is the reason."""
    lines = EQUIVALENT.read_text(encoding="utf-8").splitlines() if EQUIVALENT.exists() else []
    return {line for line in lines if line.strip() and not line.startswith((" ", "#"))}


def one_line(name: str) -> str:
    return " ".join(name.split())


def sample(known: dict[str, list[Mutant]], count: int, seed: int) -> list[tuple[str, Mutant]]:
    """Choose as many of each room and of each kind, at most one of a line; room by room: tests are recorded once.

    The order is of digests: a change of the code or of the list of equivalent mutants replaces those mutants alone.
    """
    chosen: list[tuple[str, Mutant]] = []
    for room, mutants in known.items():
        of_kind: Counter[str] = Counter()
        places: dict[Mutant, int] = {}
        for mutant in sorted(mutants, key=lambda each: hashlib.sha256(f"{seed} {each.name}".encode()).digest()):
            of_kind[mutant.kind] += 1
            places[mutant] = of_kind[mutant.kind]
        order = sorted(places, key=places.__getitem__)
        one_each = {(mutant.path, mutant.line): mutant for mutant in reversed(order)}
        kept = [mutant for mutant in order if one_each[mutant.path, mutant.line] is mutant]
        chosen += [(room, mutant) for mutant in kept[: -(-count // len(known))]]
    return chosen


def alone() -> None:
    """Go on in a namespace of processes, so that nothing outside of it can be ended.

    Its first process waits for all others: what tests have killed the parent of would stay a zombie, and tests wait
    until processes are gone.
    """
    if os.getpid() == 1:
        child = os.fork()
        while child:
            pid, status = os.wait()
            if pid == child:
                sys.exit(os.waitstatus_to_exitcode(status) & 0xFF)
        return
    if os.environ.get("HPCRL_MUTANTS_ALONE"):
        return
    unshare = shutil.which("unshare")
    words = ["--pid", "--fork", "--mount-proc", "--kill-child"]
    if unshare is None or os.system(f"{unshare} {' '.join(words)} true 2>/dev/null"):
        print("mutants run only where processes can be kept apart (unshare --pid), as root", file=sys.stderr)
        sys.exit(1)
    os.environ["HPCRL_MUTANTS_ALONE"] = "1"
    os.execv(unshare, [unshare, *words, sys.executable, *sys.argv])


def campaign(known: dict[str, list[Mutant]], arguments: argparse.Namespace, scratch: Path) -> None:
    """Try mutants room by room, print what became of each, and write the result."""
    began_s = time.monotonic()
    until_s = began_s + 60 * arguments.minutes if arguments.minutes else float("inf")
    tree = trials.copied_tree(ROOT, scratch / "tree")
    if arguments.only:
        tried = [(room, each) for room, mutants in known.items() for each in mutants if arguments.only in each.name]
    else:
        tried = sample(known, arguments.count, arguments.seed)
    trials.import_once()
    recorded: dict[str, trials.Tests] = {}
    near = NearTests(tree, scratch, arguments.box)
    verdicts = Verdicts(arguments.resume, tree)
    rows: list[dict[str, object]] = []
    for room, mutant in tried:
        row = verdicts.of(one_line(mutant.name), mutant.start)
        if row is None:
            if time.monotonic() < until_s and not arguments.near and room not in recorded:
                recorded[room] = recorded_tests(room, tree, scratch, arguments.cache)
            if time.monotonic() > until_s:
                break
            if arguments.near:
                verdict, by, seconds = near.judge(mutant, files_of(ROOMS[room][1], tree))
            else:
                verdict, by, seconds = judge(mutant, recorded[room], tree, scratch, arguments.box)
            name = one_line(mutant.name)
            print(f"{verdict:13}{seconds:6.1f} s  {mutant.path}:{mutant.line} {name[:200]}  {by}", flush=True)
            row = {"room": room, "verdict": verdict, "name": name, "line": mutant.line, "by": by}
            verdicts.add(mutant.start, row)
        rows.append(row)
        report(rows, arguments, time.monotonic() - began_s)
    print(f"{len(rows)} of {len(tried)} mutants tried")


def recorded_tests(room: str, tree: Path, scratch: Path, cache: Path | None) -> trials.Tests:
    """Learn what the tests of a room execute, or read that where neither hpcrl nor the file of tests was changed."""
    tests, product = trials.Tests(), trials.digest_of(sorted((tree / "hpcrl").rglob("*.py")))
    # files that belong to several rooms are recorded once
    cache = scratch / "recorded" if cache is None else cache
    for file in files_of(ROOMS[room][1], tree):
        kept = cache / f"{product}-{trials.digest_of([tree / file])}.json"
        if not kept.exists():
            of_file = trials.Tests()
            trial = trials.record(tree, file, scratch, of_file, 300.0)
            print(f"recorded     {trial.seconds:6.1f} s  {file}", flush=True)
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.write_text(of_file.to_json(), encoding="utf-8")
        else:
            of_file = trials.Tests.from_json(kept.read_text(encoding="utf-8"))
        tests.add(of_file)
    for name in sorted(tests.failing):
        print(f"fails without a mutant, left out: {name}")
    return tests


def files_of(places: Sequence[str], tree: Path) -> list[str]:
    """Return the files of tests: of a folder those in it and below, of one whose rooms stand before it those in it."""
    found: dict[str, None] = {}
    for place in places:
        path = tree / place
        within = any(other != place and other.startswith(f"{place}/") for other in places)
        files = [path] if path.is_file() else sorted(path.glob("test_*.py") if within else path.rglob("test_*.py"))
        found |= {file.relative_to(tree).as_posix(): None for file in files}
    return list(found)


def judge(mutant: Mutant, tests: trials.Tests, tree: Path, scratch: Path, box_s: float) -> tuple[str, str, float]:
    """Try one mutant; the tree is as it was afterwards."""
    chosen = tests.of(mutant)
    if not chosen:
        return "not executed", "", 0.0
    order, expected_s = [], 0.0
    for name in tests.with_their_files(chosen):
        expected_s += tests.seconds[name]
        if order and expected_s > box_s / 2:
            break
        order.append(name)
    with trials.changed(mutant, tree):
        trial = trials.run(tree, order, scratch, max(30.0, box_s))
    if trial.code is None:
        return "stopped", "", trial.seconds
    return ("survived" if trial.code == 0 else "caught"), trial.failed, trial.seconds


def report(rows: list[dict[str, object]], arguments: argparse.Namespace, seconds: float) -> None:
    """Write what is known so far: a campaign that is cut short has its result."""
    counts = Counter(str(row["verdict"]) for row in rows)
    caught = counts["caught"] + counts["stopped"]
    figures = {
        "date": time.strftime("%Y-%m-%d"),
        "seed": arguments.seed,
        "mutants": len(rows),
        "caught": caught,
        "share_caught": round(caught / len(rows), 4),
        "verdicts": dict(counts),
        "rooms": {
            room: f"{sum(r['room'] == room and r['verdict'] in ('caught', 'stopped') for r in rows)} of {n}"
            for room, n in Counter(str(row["room"]) for row in rows).items()
        },
        "seconds": round(seconds),
        "survivors": [row for row in rows if row["verdict"] in ("survived", "not executed")],
    }
    path = arguments.output or ROOT / "bench/results/mutants.json"
    path.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
