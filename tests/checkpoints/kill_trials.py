"""Trials in which the writer of a ledger is killed, or stopped and overtaken, at a random moment.

A trial forks a writer that saves, replaces, retains and prunes without end. After a random time it is killed with
SIGKILL; in some trials it is stopped with SIGSTOP instead, a newer writer saves, and the old one is woken up. All
along a reader chooses the newest entry, compares it with its manifest and reads all of its files.

What must hold:

- the reader never gets an entry that is torn or mixed of two saves, and always gets one once there was one;
- after a kill nothing is gone that was committed and that no rule had given up;
- the next writer needs no help and leaves nothing hidden behind;
- a writer that was overtaken changes nothing any more.
"""

from __future__ import annotations

import os
import random
import select
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
from ledger_testing import hidden, write_files

from hpcrl.checkpoints import CheckpointEntry, CheckpointLedger, CheckpointWriter
from hpcrl.checkpoints.pins import pin, pins_of
from hpcrl.checkpoints.retention import removable_steps
from hpcrl.errors import CheckpointError, FencedError

KEEP_LAST, KEEP_EVERY = 2, 5
FENCED = 42
MUST_BE_ZERO = (
    "! torn reads",
    "! nothing to choose",
    "! lost a committed entry",
    "! a damaged entry is listed",
    "! leftovers",
    "! zombie was not fenced off",
    "! zombie changed something",
)
_LONGEST_S = 0.12
_ZOMBIE_SHARE = 0.15
_LATE_SHARE = 0.5


class Report:
    """What a writer says about itself, in a pipe that outlives it: one line, one ``write``."""

    def __init__(self) -> None:
        self.read_fd, self.write_fd = os.pipe()

    def say(self, *words: object) -> None:
        os.write(self.write_fd, msgspec.json.encode(words) + b"\n")

    def heard(self) -> list[Any]:
        os.close(self.write_fd)
        with os.fdopen(self.read_fd, "rb") as stream:
            return [msgspec.json.decode(line) for line in stream]


def content(step: int, save: str, size: int) -> bytes:
    """Bytes that say of which save they are, from end to end."""
    word = f"step {step} save {save};".encode()
    return word * max(1, size // len(word))


def save_once(writer: CheckpointWriter, step: int, rng: random.Random) -> None:
    name = f"{writer.attempt}-{rng.getrandbits(32)}"
    data = content(step, name, rng.choice([10, 1000, 300_000]))
    staged = writer.stage(step)
    try:
        records = write_files(staged, data, rng.randint(1, 4))
    except FileNotFoundError:
        writer.fence.check()
        raise
    writer.commit(
        step=step, world_size=1, files=records, orchestrator_state=content(step, name, 50), started_at_s=time.time()
    )


def write_for_ever(root: Path, attempt: int, rng: random.Random, report: Report, people: bool) -> None:
    """A writer: claims, then saves, replaces and retains until it is killed or fenced off.

    With ``people`` it also does what persons do (pin, prune), which no fence holds up.
    """
    writer = CheckpointWriter.claim(root, attempt)
    ledger = writer.ledger
    while True:
        steps = ledger.steps()
        # now and then the step that is there already: it is replaced
        replaces = bool(steps) and rng.random() < 0.25
        step = steps[-1] if replaces else (steps or [0])[-1] + 1
        save_once(writer, step, rng)
        report.say("committed", step)
        if people and rng.random() < 0.2:
            chosen = rng.choice(ledger.steps())
            report.say("pinned" if chosen not in pins_of(root).numbers() else "unpinned", chosen)
            if chosen in pins_of(root).numbers():
                pins_of(root).remove(chosen)
            else:
                pin(ledger, chosen, reason="trial", by="trial")
        doomed = removable_steps(
            ledger.steps(),
            whole=ledger.whole_steps(KEEP_LAST),
            pinned=pins_of(root).numbers(),
            keep_last=KEEP_LAST,
            keep_every=KEEP_EVERY,
        )
        report.say("given up", *doomed)
        if not people or rng.random() < 0.7:
            writer.retain(keep_last=KEEP_LAST, keep_every=KEEP_EVERY)
        else:
            for step in doomed:
                ledger.remove(step)


def read_for_ever(root: Path, report: Report) -> None:
    """A reader: chooses and reads until it is killed; says what it found."""
    ledger, seen = CheckpointLedger(root), False
    while True:
        entry = ledger.newest_verified().entry
        if entry is None:
            if seen and not comes_back(ledger):
                report.say("nothing")
            continue
        seen = True
        report.say("torn" if torn(ledger, entry) else "good")


def comes_back(ledger: CheckpointLedger) -> bool:
    """Whether there is something again soon: the only entry may be between the two renames of a replacement.

    Where the writer was killed there, the next claim brings it back.
    """
    deadline = time.monotonic() + 60.0
    while time.monotonic() < deadline:
        if ledger.newest_verified().entry is not None:
            return True
    return False


def torn(ledger: CheckpointLedger, entry: CheckpointEntry) -> bool:
    """Whether the files of a chosen entry are not of one save. One that was given up meanwhile is not torn."""
    try:
        texts = {(entry.path / name).read_bytes().split(b";")[0] for name in entry.manifest.files}
        ends = {(entry.path / name).read_bytes().split(b";")[-2] for name in entry.manifest.files}
    except (FileNotFoundError, IndexError):
        texts = ends = set()
    if len(texts | ends) == 1:
        return False
    try:  # replaced or removed while it was read: whoever reads an old one may see that, and asks again
        return ledger.open(entry.step).manifest == entry.manifest
    except CheckpointError:
        return False


def fork(work: Any, *arguments: Any) -> int:
    """Run ``work`` in a child; the exit code says how it ended."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        work(*arguments)
        code = 0
    except FencedError:
        code = FENCED
    except BaseException:  # noqa: BLE001 - a child must not return into the parent's code
        import traceback

        traceback.print_exc()
    finally:
        os._exit(code)


def trial(root: Path, number: int, rng: random.Random) -> Counter[str]:
    """One writer's life and end; counts of what must be zero begin with ``!``."""
    counts: Counter[str] = Counter(trials=1)
    before = set(CheckpointLedger(root).steps())
    report = Report()
    zombie = rng.random() < _ZOMBIE_SHARE
    pid = fork(write_for_ever, root, 2 * number + 1, random.Random(rng.random()), report, not zombie)
    if rng.random() < _LATE_SHARE:
        # it has claimed and saved once: what is hit is replacing, retaining, pruning or a later save
        select.select([report.read_fd], [], [], 10.0)
    time.sleep(rng.uniform(0.0, _LONGEST_S))
    os.kill(pid, signal.SIGSTOP if zombie else signal.SIGKILL)
    if zombie:
        _wait_stopped(pid)
        counts["zombies"] += 1
    else:
        os.waitpid(pid, 0)
    missing = before - set(CheckpointLedger(root).steps())
    # the next writer recovers without help
    writer = CheckpointWriter.claim(root, 2 * number + 2)
    if zombie:
        save_once(writer, (writer.ledger.steps() or [0])[-1] + 1, rng)
        kept = sorted(str(path) for path in root.rglob("*"))
        os.kill(pid, signal.SIGCONT)
        _, status = os.waitpid(pid, 0)
        code = os.waitstatus_to_exitcode(status)
        if code != FENCED:
            print(f"trial {number}: the zombie ended with {code}", file=sys.stderr)
        counts["! zombie was not fenced off"] += code != FENCED
        counts["! zombie changed something"] += sorted(str(p) for p in root.rglob("*")) != kept
    heard = report.heard()
    given_up = {step for what, *steps in heard if what == "given up" for step in steps}
    committed = {steps[0] for what, *steps in heard if what == "committed"}
    counts["commits"] += len([1 for what, *_ in heard if what == "committed"])
    for step in (before | committed) - given_up:
        try:
            writer.ledger.open(step).verify()
            counts["put back"] += step in missing
        except CheckpointError:
            counts["! lost a committed entry"] += 1
    choice = writer.ledger.newest_verified()
    counts["! a damaged entry is listed"] += len(choice.skipped)
    counts["! leftovers"] += len(hidden(root))
    return counts


def run_trials(root: Path, trials: int, seed: int) -> Counter[str]:
    """So many trials, with a reader all along."""
    rng, total = random.Random(seed), Counter[str]()
    root.mkdir(parents=True, exist_ok=True)
    report = Report()
    reader = fork(read_for_ever, root, report)
    said: list[Any] = []
    try:
        for number in range(trials):
            total.update(trial(root, number, rng))
            said += _drain(report)
    finally:
        os.kill(reader, signal.SIGKILL)
        os.waitpid(reader, 0)
    said += report.heard()
    words = Counter(word for (word, *_) in said)
    total["reads"] += words["good"]
    total["! torn reads"] += words["torn"]
    total["! nothing to choose"] += words["nothing"]
    for name in MUST_BE_ZERO:
        total[name] += 0  # on record even where it never came up
    return total


def failures(counts: Counter[str]) -> dict[str, int]:
    """What must not have happened, and did."""
    return {name: count for name, count in counts.items() if name.startswith("!") and count}


def _drain(report: Report) -> list[Any]:
    """What was said so far: a pipe that is full would stop the reader."""
    os.set_blocking(report.read_fd, False)
    try:
        data = b""
        while part := os.read(report.read_fd, 1 << 16):
            data += part
    except BlockingIOError:
        pass
    finally:
        os.set_blocking(report.read_fd, True)
    # lines are short and written whole
    return [msgspec.json.decode(line) for line in data.splitlines()]


def _wait_stopped(pid: int) -> None:
    os.waitpid(pid, os.WUNTRACED)
