"""Rollouts of a run as rows and documents, by its ledger; and whether each was used exactly once."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec

from hpcrl.dock.columns import decode_columns
from hpcrl.dock.ledger.digest import digest_of
from hpcrl.dock.ledger.entries import TurnSaved, ledger_files, read_entries, whole_bytes
from hpcrl.dock.ledger.payload import read_payload
from hpcrl.dock.ledger.replay import Held, Replay, State
from hpcrl.errors import RunDirError, UsageError
from hpcrl.runs.consumed import ConsumedRollouts
from hpcrl.runs.events import read_events
from hpcrl.runs.metrics import read_metrics
from hpcrl.runs.rundir import RunDir
from hpcrl.storage.sealed_files import content_bytes

_KEPT_STEPS = 8
"""Number of steps whose readable lines are cached: rollouts of a group come one after the other."""


class RolloutItem(msgspec.Struct, frozen=True, kw_only=True):
    """Finished rollout.

    Attributes
    ----------
    id:
        ``GROUP/MEMBER``.
    reward:
        None where it was not finite: earlier versions took such a reward.
    tokens, sampled_tokens:
        Of all sequences, and those that the policy sampled.
    first_version, last_version:
        Version of the first sampled token, and highest version of sampled tokens.
    state:
        ``waiting``, ``trained`` or ``dropped``.
    step:
        Step of the batch that trained it, or that made it too old; None for others.
    staleness:
        Steps between its first token and the policy that trained on it; None where it was not trained.
    why:
        It was dropped.
    branches:
        Sequences that it has.
    """

    id: str
    environment: str
    prompt_index: int
    reward: float | None
    tokens: int
    sampled_tokens: int
    first_version: int
    last_version: int
    ended_s: float
    state: str
    step: int | None
    staleness: int | None
    why: str
    branches: int = 1


class LedgerVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """Verdict on a ledger.

    Attributes
    ----------
    finished, trained, waiting:
        Numbers of rollouts.
    steps:
        Steps that were taken and not undone.
    unfinished, turns:
        Rollouts in progress with saved turns, and the number of these turns.
    dropped:
        Rollouts by the reason.
    compared:
        Steps of which the trainer's own record was compared with the ledger.
    from_disk:
        Number of rollouts that a rank read from the shared filesystem instead of memory.
    notes:
        Missing files that prove nothing.
    problems:
        Contradictions to the rule that each rollout is in one batch or was dropped.
    """

    finished: int
    trained: int
    waiting: int
    steps: int
    attempts: int
    unfinished: int
    turns: int
    dropped: dict[str, int]
    compared: int
    from_disk: int
    notes: list[str]
    problems: list[str]


def read_ledger(run: RunDir) -> Replay:
    """Return the ledger of a run.

    Raises
    ------
    UsageError
        The run has no ledger.
    RunDirError
        The ledger cannot be read.
    """
    directory = run.rollouts_dir / "ledger"
    if not ledger_files(directory):
        raise UsageError(
            f"{run.name} has no ledger of rollouts ({directory})\n"
            "    hint: a run has one as soon as its orchestrator has started; those of earlier versions have none"
        )
    try:
        return Replay(read_entries(directory))
    except (ValueError, OSError) as error:
        raise RunDirError(f"the ledger of rollouts cannot be read: {error}") from error


def rollout_items(rollouts: Iterable[Held]) -> list[RolloutItem]:
    """Return rows of finished rollouts, in the same order."""
    return [_item(held) for held in rollouts]


def _item(held: Held) -> RolloutItem:
    entry = held.entry
    trained = held.state is State.TRAINED and held.step is not None
    return RolloutItem(
        id=f"{entry.group}/{entry.member}",
        environment=entry.environment,
        prompt_index=entry.prompt_index,
        reward=entry.reward,
        tokens=entry.tokens,
        sampled_tokens=entry.sampled_tokens,
        first_version=entry.first_version,
        last_version=entry.last_version,
        ended_s=entry.ended_s,
        state=held.state.value,
        step=held.step,
        staleness=(held.step or 0) - 1 - held.version if trained else None,
        why=held.why,
        branches=entry.sequences,
    )


def choose_rollouts(
    replay: Replay, *, environment: str | None = None, state: str | None = None, step: int | None = None
) -> list[Held]:
    """Return the finished rollouts of an environment, in a state, or of the batch of a step; None: of any.

    Raises
    ------
    UsageError
        The state does not exist, or no rollout belongs to that environment.
    """
    states = [each.value for each in State]
    if state is not None and state not in states:
        raise UsageError(f"there is no state {state!r}\n    hint: {', '.join(states)}")
    rollouts = replay.rollouts
    names = sorted({held.entry.environment for held in rollouts})
    if environment is not None and names and environment not in names:
        raise UsageError(f"no rollout has the environment {environment!r}\n    hint: there are {', '.join(names)}")
    return [
        held
        for held in rollouts
        if environment in (None, held.entry.environment)
        and state in (None, held.state.value)
        and (step is None or (held.state is State.TRAINED and held.step == step))
    ]


def find_rollout(replay: Replay, name: str) -> Held:
    """Return the rollout ``GROUP/MEMBER``; the last one of several attempts of one member.

    Raises
    ------
    UsageError
        There is none.
    """
    found = [held for held in replay.rollouts if f"{held.entry.group}/{held.entry.member}" == name]
    if not found:
        raise UsageError(
            f"no rollout {name!r} has finished\n    hint: hpcrl rollouts ls shows their names: GROUP/MEMBER"
        )
    return found[-1]


class ConsumedLines:
    """Readable lines of the rollouts of a step, by group and member; the steps requested last are cached."""

    def __init__(self, run: RunDir) -> None:
        self._consumed = ConsumedRollouts(run.rollouts_dir)
        self._steps: dict[int, dict[tuple[int, int], dict[str, Any]]] = {}

    def of(self, held: Held) -> dict[str, Any]:
        """Return the line of a rollout; an empty one where there is none, or it cannot be read."""
        if held.state is not State.TRAINED or held.step is None:
            return {}
        if held.step not in self._steps:
            if len(self._steps) >= _KEPT_STEPS:
                del self._steps[next(iter(self._steps))]
            self._steps[held.step] = {key: line for key, line in self._lines(held.step) if key is not None}
        return self._steps[held.step].get(held.id, {})

    def _lines(self, step: int) -> Iterator[tuple[tuple[int, int] | None, dict[str, Any]]]:
        try:
            lines = self._consumed.of(step)
        except OSError:
            return
        for line in lines:
            yield parsed_line(line)


def parsed_line(line: bytes) -> tuple[tuple[int, int] | None, dict[str, Any]]:
    """Return group and member of a consumed rollout's line, and its fields; None where it is not such a line."""
    try:
        value = json.loads(line)
        return (int(value["group"]), int(value["member"])), value
    except (ValueError, LookupError, TypeError, RecursionError):
        return None, {}


def rollout_details(run: RunDir, held: Held, consumed: ConsumedLines | None = None) -> dict[str, Any]:
    """Return all details of one rollout: its row, and ``columns`` and ``turns`` as long as they are on disk.

    Columns are kept as long as a checkpoint may need them. Where they are gone, ``text`` is the stored text of a
    trained rollout, the middle of which may be left out. A trained rollout has an ``advantage``.
    """
    line = (consumed or ConsumedLines(run)).of(held)
    document: dict[str, Any] = msgspec.to_builtins(_item(held))
    try:
        about, arrays = decode_columns(read_payload(run.rollouts_dir / "payload", held.entry.payload))
        document |= {key: value for key, value in msgspec.msgpack.decode(about).items() if key != "reward"}
        document["columns"] = arrays
    except FileNotFoundError:
        document["problem"] = "its tokens are no longer kept: no checkpoint needs them"
    except (OSError, ValueError) as error:
        document["problem"] = str(error)
    kept = ("text", "advantage") if "columns" in document else ("text", "turns", "parts", "seconds", "advantage")
    return document | {key: line[key] for key in kept if key in line}


def verify_rollouts(run: RunDir, *, content: bool = True) -> LedgerVerdict:
    """Verify that each finished rollout is in exactly one batch, was dropped for a reason, or waits.

    The ledger is compared with itself, with the files of consumed rollouts, with the trainer's record of each step, and
    (``content``) with the columns of rollouts that wait or are in progress.

    Raises
    ------
    UsageError, RunDirError
        As in `read_ledger`.
    """
    # read before the ledger: if the run continues meanwhile, the ledger has all of their steps
    records = read_metrics(run)
    replay = read_ledger(run)
    rollouts = replay.rollouts
    problems: list[str] = list(replay.problems)
    notes: list[str] = []
    by_step: dict[int, set[tuple[int, int]]] = {}
    for held in rollouts:
        if held.state is State.TRAINED and held.step is not None:
            by_step.setdefault(held.step, set()).add(held.id)
    consumed, missing = ConsumedRollouts(run.rollouts_dir), 0
    for step in range(1, replay.step + 1):
        if step not in by_step:
            problems.append(f"step {step} was taken, and no rollout is in it")
            continue
        try:
            keys = [parsed_line(line)[0] for line in consumed.of(step)]
        except OSError as error:
            problems.append(f"the file of consumed rollouts of step {step} cannot be read: {error}")
            continue
        if None in keys:
            number = keys.index(None) + 1
            problems.append(f"the file of consumed rollouts of step {step} cannot be read: line {number} is damaged")
            continue
        lines = {key for key in keys if key is not None}
        if not lines:
            missing += 1
        elif lines != by_step[step]:
            odd = ", ".join(f"{group}/{member}" for group, member in sorted(lines ^ by_step[step])[:5])
            # the newest step is in the ledger before its file is written: the file may be that of an earlier attempt
            (notes if step == replay.step else problems).append(f"step {step}: batch and ledger differ in {odd}")
    if missing:
        notes.append(f"{missing} steps have no file of consumed rollouts (the file is informational and may be lost)")
    digests = {record.step: record.rollouts_digest for record in records if record.rollouts_digest is not None}
    compared = sorted(digests.keys() & by_step.keys())
    problems += [
        f"step {step}: the trainer recorded other rollouts than the ledger"
        for step in compared
        if digests[step] != digest_of(by_step[step])
    ]
    if unseen := replay.step - len(compared):
        notes.append(f"of {unseen} steps the trainer has not recorded which rollouts they were trained on")
    trained = max((record.step for record in records), default=0)
    if trained > replay.step:
        problems.append(f"step {trained} was trained, and the ledger knows steps up to {replay.step}")
    newest = ledger_files(run.rollouts_dir / "ledger")[-1]
    whole = whole_bytes(newest)  # before the size: a run in progress adds entries
    if torn := content_bytes(newest) - whole:
        notes.append(
            f"{torn} bytes at the end of {newest.name} are incomplete or still being written, and were never used"
        )
    waiting = [held for each in replay.waiting().values() for held in each]
    turns = [turn for each in replay.unfinished.values() for turn in each.turns]
    problems += _unreadable(run, waiting, turns) if content else ()
    return LedgerVerdict(
        unfinished=len(replay.unfinished),
        turns=len(turns),
        finished=len(rollouts),
        trained=sum(map(len, by_step.values())),
        waiting=len(waiting),
        steps=replay.step,
        attempts=replay.attempts,
        dropped=dict(sorted(Counter(held.why for held in rollouts if held.state is State.DROPPED).items())),
        compared=len(compared),
        from_disk=sum(
            int(event.data.get("rollouts") or 0) for event in read_events(run, kind="rollouts.read_from_disk")
        ),
        notes=notes,
        problems=problems,
    )


def _unreadable(run: RunDir, waiting: Sequence[Held], turns: Sequence[TurnSaved]) -> Iterator[str]:
    """Yield a sentence for each column that a restore needs and that cannot be read."""
    places = [(f"rollout {each.entry.group}/{each.entry.member} waits", each.entry.payload) for each in waiting]
    places += [(f"turn {each.turn} of rollout {each.group}/{each.member} was saved", each.payload) for each in turns]
    for what, place in places:
        try:
            read_payload(run.rollouts_dir / "payload", place)
        except (OSError, ValueError) as error:
            yield f"{what}, and cannot be read: {error}"
