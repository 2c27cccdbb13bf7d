"""Opens a state that a power cut left, as the next attempt and every reader would, and says what is wrong with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from durable_scenarios import PIN, keep_rollout, publish, save
from handoff_lab import check_content, model_directory
from power_cut import Cut, marks_of

from hpcrl.checkpoints import CheckpointEntry, CheckpointLedger, CheckpointWriter
from hpcrl.checkpoints import pins as checkpoint_pins
from hpcrl.checkpoints.history import read_saved
from hpcrl.dock.columns import decode_columns
from hpcrl.dock.ledger.entries import read_entries
from hpcrl.dock.ledger.log import RolloutLog
from hpcrl.dock.ledger.payload import read_payload
from hpcrl.dock.ledger.replay import Replay
from hpcrl.dock.ledger.sealer import seal_ended_files
from hpcrl.errors import CheckpointError, FencedError, HandoffError
from hpcrl.storage.quarantine import list_asides
from hpcrl.weights import Handoff, HandoffStore, VersionCommitter
from hpcrl.weights.lifetime.collector import Collector
from hpcrl.weights.lifetime.leases import ReaderWatch
from hpcrl.weights.lifetime.pins import handoff_pins, read_pins
from hpcrl.weights.read.share import Pace
from hpcrl.weights.read.subscriber import ReaderSettings, Subscriber

Judge = Callable[[Path, Cut, Path], Iterator[str]]
"""Takes the directory, the moment of the cut, and a directory beside it; yields one sentence for each problem."""

_READER = ReaderSettings(pace=Pace(5.0, 1 << 20), streams=1)


def _claims(root: Path, cut: Cut, claim: Callable[[Path, int], Any]) -> Iterator[str]:
    """An older attempt than one that has claimed is still refused."""
    claimed = [int(number[0]) for number in marks_of(cut, "claimed")]
    if claimed and claimed[-1] > 1:
        try:
            claim(root, claimed[-1] - 1)
        except FencedError:
            return
        yield f"attempt {claimed[-1] - 1} may write again, though attempt {claimed[-1]} had claimed the store"


def judge_handoffs(root: Path, cut: Cut, other: Path) -> Iterator[str]:
    """Versions: readers first, then the next trainer and collector."""
    store = HandoffStore(root / "weights")
    promised: set[int] = set()
    for what, *versions in (mark for mark in cut.marks if isinstance(mark, list)):
        if what == "committed":
            promised.add(versions[0])
        elif what == "given up":
            promised.difference_update(versions)
    if torn := list(_readable(store)):
        yield from torn
        return
    yield from _claims(store.root, cut, VersionCommitter.claim)
    writer = VersionCommitter.claim(store.root, 9)
    for hidden in store.root.glob(".hidden-v*"):
        # somebody wants it after all, so the collector must restore it
        handoff_pins(store.root).add(int(hidden.name.removeprefix(".hidden-v")), reason=PIN, by="somebody")
    Collector(store, ReaderWatch(store.root, expiry_s=5.0), keep_last=99, settle_s=0.0, sleep=lambda _: None).collect()
    if lost := sorted(promised - set(store.versions())):
        yield f"versions {lost} had been published and are gone; there are {store.versions()}"
    yield from _readable(store)
    yield from _kept_aside(
        store.root,
        "v",
        cut,
        whole=lambda path: Handoff.open(path).verify(content=True),
        listed=store.versions(),
    )
    pins = read_pins(store.root)
    if list(marks_of(cut, "pinned")) and not list(marks_of(cut, "unpinned")) and 1 not in pins:
        yield "the pin of version 1 is gone"
    if list(marks_of(cut, "unpinned for good")) and 1 in pins:
        yield "version 1 is pinned again"
    if any(pin.reason != PIN for pin in pins.values()):
        yield f"a pin is torn: {pins}"
    following = (store.newest() or 0) + 1
    publish(writer, following, model_directory(other / "model"), words=10)
    if store.newest() != following:
        yield f"the next version, {following}, is not there"
    yield from _no_remains(store.root)


def _readable(store: HandoffStore) -> Iterator[str]:
    for version in store.versions():
        try:
            handoff = store.open(version)
            handoff.verify(content=True)
        except HandoffError as error:
            yield f"version {version} is listed and torn: {error}"
            return
    if store.versions():
        with Subscriber(store.root, None, _READER) as subscriber:
            try:
                loaded = subscriber.load_newest(check_content)
            except (HandoffError, AssertionError) as error:
                yield f"no version can be loaded of {store.versions()}: {error}"
                return
        # a delta may have lost what it needs only together with a promise; what counts is that nothing torn is taken
        for skipped in loaded.skipped:
            if "does not exist" not in skipped.reason:
                yield f"version {skipped.version} cannot be loaded: {skipped.reason}"


def _kept_aside(root: Path, prefix: str, cut: Cut, *, whole: Callable[[Path], Any], listed: list[int]) -> Iterator[str]:
    """What was withdrawn is kept, until it is let go; what is kept is whole."""
    kept: set[int] = set()
    withdrawn: set[int] = set()
    for what, *numbers in (mark for mark in cut.marks if isinstance(mark, list)):
        if what == "kept aside":
            kept.update(numbers)
            withdrawn.update(numbers)
        elif what == "let go":
            kept.difference_update(numbers)
            withdrawn.difference_update(numbers)
        elif what == "begin":
            withdrawn.discard(numbers[0])
    if back := sorted(withdrawn & set(listed)):
        yield f"{back} had been put aside and are back"
    asides = list_asides(root, prefix)
    if lost := sorted(kept - {aside.number for aside in asides} - set(listed)):
        yield f"{lost} had been put aside and are gone"
    for aside in asides:
        try:
            whole(aside.path)
        except (HandoffError, CheckpointError) as error:
            yield f"what was put aside is torn: {error}"


def judge_ledger(root: Path, cut: Cut, other: Path) -> Iterator[str]:
    """Entries: who resumes first, then the next trainer."""
    ledger = CheckpointLedger(root / "checkpoints")
    promised, allowed = _saves(cut)
    removed = {step for (step,) in marks_of(cut, "removed")}
    yield from _right(ledger, allowed)
    yield from _claims(ledger.root, cut, CheckpointWriter.claim)
    writer = CheckpointWriter.claim(ledger.root, 9)
    if lost := sorted(promised - set(ledger.steps())):
        yield f"the entries of steps {lost} had been saved and are gone; there are {ledger.steps()}"
    if back := sorted(removed & set(ledger.steps())):
        yield f"the entries of steps {back} had been removed and are back"
    yield from _right(ledger, allowed)
    yield from _kept_aside(
        ledger.root, "step-", cut, whole=lambda path: CheckpointEntry.open(path).verify(), listed=ledger.steps()
    )
    saved = {entry.step for entry in read_saved(ledger.root)}
    if unknown := sorted({step for step, _ in marks_of(cut, "committed")} - saved - set(ledger.steps())):
        yield f"nobody knows that steps {unknown} were ever saved"
    pins = checkpoint_pins.pins_of(ledger.root).all()
    if list(marks_of(cut, "pinned")) and (10 not in pins or pins[10].reason != PIN):
        yield f"the pin of step 10 is gone or torn: {pins}"
    following = max(ledger.steps(), default=0) + 10
    save(writer, following, 99)
    chosen = ledger.newest_verified()
    if chosen.entry is None or chosen.entry.step != following or chosen.skipped:
        yield f"the next entry, {following}, is not what a resume takes: {chosen.skipped}"
    yield from _no_remains(ledger.root)


def _saves(cut: Cut) -> tuple[set[int], dict[int, set[int]]]:
    """Steps that must be there, and for each step the saves that may be."""
    promised: set[int] = set()
    allowed: dict[int, set[int]] = {}
    for what, *rest in (mark for mark in cut.marks if isinstance(mark, list)):
        if what == "begin":
            step, number = rest
            allowed.setdefault(step, set()).add(number)
        elif what == "committed":
            step, number = rest
            promised.add(step)
            allowed[step] = {number}
        elif what == "given up":
            promised.difference_update(rest)
    return promised, allowed


def _right(ledger: CheckpointLedger, allowed: dict[int, set[int]]) -> Iterator[str]:
    """Every listed entry is whole, and of a save that counts."""
    for step in ledger.steps():
        try:
            entry = ledger.open(step)
            entry.verify()
        except CheckpointError as error:
            yield f"step {step} is listed and torn: {error}"
            continue
        if (number := _number(entry)) is not None and number not in allowed.get(step, set()):
            yield f"step {step} holds save {number}, what counts is {allowed.get(step)}"


def _number(entry: CheckpointEntry) -> int | None:
    text = entry.orchestrator_state()
    return int(text.split(b";")[0].split()[1]) if text.startswith(b"save ") else None


def _no_remains(root: Path) -> Iterator[str]:
    """The next writer needs no help to clean up."""
    hidden = [path.name for path in root.iterdir() if path.name.startswith((".removed-", ".staging-", ".hidden-"))]
    hidden += [str(path.relative_to(root)) for path in root.glob(".writer-*/*")]
    if hidden or len(list(root.glob(".writer-*"))) > 1:
        yield f"left over: {hidden}"


def judge_rollouts(root: Path, cut: Cut, other: Path) -> Iterator[str]:
    """The ledger of rollouts: who reads it first, and the orchestrator that goes on."""
    del other
    directory = root / "rollouts"
    promised = {tuple(name) for name in marks_of(cut, "finished")}
    taken = [int(step) for (step,) in marks_of(cut, "taken")]
    for reader in ("first", "next"):
        replay = Replay(read_entries(directory / "ledger"))
        yield from replay.problems
        held = {each.id: each for each in replay.rollouts}
        if lost := sorted(promised - set(held)):
            yield f"rollouts {lost} had finished, and the {reader} reader does not find them"
        for name, each in held.items():
            try:
                _, arrays = decode_columns(read_payload(directory / "payload", each.entry.payload))
            except (OSError, ValueError) as error:
                yield f"rollout {name} is in the ledger, and cannot be read: {error}"
                continue
            if set(arrays["tokens"].tolist()) != {10 * name[0] + name[1]}:
                yield f"rollout {name} has the columns of another"
        yield from _judge_turns(directory, replay, {tuple(name) for name in marks_of(cut, "turn")}, set(held))
        if taken and replay.step < taken[-1]:
            yield f"step {taken[-1]} had been taken, and the ledger ends at step {replay.step}"
        if reader == "first":
            log = RolloutLog(directory, attempt=9, restored=replay.step, limit_s=1.0)
            keep_rollout(log, 90, 0).result(10.0)
            seal_ended_files(log.ledger_dir, newest=f"{log.number:06d}.jsonl")
            log.close()
            promised.add((90, 0))


def _judge_turns(
    directory: Path, replay: Replay, promised: set[tuple[int, ...]], finished: set[tuple[int, int]]
) -> Iterator[str]:
    """Rollouts in progress have the turns that they had, and none that has finished is in progress."""
    for group, member, number in promised:
        if number >= len(replay.unfinished[group, member].turns if (group, member) in replay.unfinished else ()):
            yield f"turn {number} of rollout {group}/{member} had been saved, and is not found"
    for name, each in replay.unfinished.items():
        if name in finished:
            yield f"rollout {name} has finished, and is in progress"
        for turn in each.turns:
            try:
                _, arrays = decode_columns(read_payload(directory / "payload", turn.payload))
            except (OSError, ValueError) as error:
                yield f"turn {turn.turn} of rollout {name} is in the ledger, and cannot be read: {error}"
                continue
            if set(arrays["tokens"].tolist()) != {10 * name[0] + name[1]}:
                yield f"turn {turn.turn} of rollout {name} has the columns of another"


def judge_run_files(root: Path, cut: Cut, other: Path) -> Iterator[str]:
    """Files of a run directory."""
    from durable_runs import judge

    return judge(root, cut, other)


JUDGES: dict[str, Judge] = {
    "handoffs": judge_handoffs,
    "ledger": judge_ledger,
    "put_aside": judge_ledger,
    "torch_checkpoint": judge_ledger,
    "rollouts": judge_rollouts,
    "run_files": judge_run_files,
}
