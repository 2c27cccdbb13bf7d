"""Ledger of an evaluation: a group for each prompt, a member for each of its samples."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from hpcrl.dock.ledger.entries import Dropped, Entry, Kept, PayloadPlace, read_entries
from hpcrl.dock.ledger.log import RolloutLog
from hpcrl.dock.ledger.payload import read_payload
from hpcrl.dock.ledger.replay import Replay, State
from hpcrl.errors import CheckpointError
from hpcrl.rollouts.core.records import decode_rollout, encode_rollout, finished_entry
from hpcrl.rollouts.sampling.held_out import HeldOutRollout, HeldOutTask

_log = logging.getLogger(__name__)


class SampleLedger:
    """Samples that are done, of this attempt and of those before it."""

    def __init__(self, rollouts_dir: Path, tasks: Sequence[HeldOutTask], *, attempt: int, limit_s: float) -> None:
        """Read the samples of earlier attempts, and begin a file of entries.

        Parameters
        ----------
        tasks:
            All samples, those of a prompt in a row.
        limit_s:
            Maximum time in seconds of retries on a filesystem that refuses temporarily.

        Raises
        ------
        CheckpointError
            What is there cannot be read.
        OSError
            The filesystem refused.
        """
        self._log = RolloutLog(rollouts_dir, attempt=attempt, restored=0, limit_s=limit_s)
        try:
            self._replay = Replay(read_entries(self._log.ledger_dir))
        except ValueError as error:
            self._log.close()
            raise CheckpointError(f"the ledger of rollouts cannot be read: {error}") from error
        self._groups = self._numbered((task.environment.name, task.index) for task in tasks)
        self._left = dict.fromkeys(self._groups.values(), 0)
        for task in tasks:
            self._left[self._group(task)] += 1

    def _numbered(self, prompts: Iterable[tuple[str, int]]) -> dict[tuple[str, int], int]:
        """Return the number of each prompt's group: that of an earlier attempt, which may have had other prompts."""
        entries = [held.entry for held in self._replay.rollouts]
        known = {(entry.environment, entry.prompt_index): entry.group for entry in entries}
        taken = {entry.group for entry in entries}
        free = (number for number in itertools.count() if number not in taken)
        return {prompt: known[prompt] if prompt in known else next(free) for prompt in dict.fromkeys(prompts)}

    def _group(self, task: HeldOutTask) -> int:
        return self._groups[task.environment.name, task.index]

    def done(self, tasks: Sequence[HeldOutTask], *, stop_token_ids: Collection[int]) -> dict[int, HeldOutRollout]:
        """Return the samples that earlier attempts have done, by their position in ``tasks``."""
        found: dict[int, HeldOutRollout] = {}
        for position, task in enumerate(tasks):
            group = self._group(task)
            held = self._replay.find(group, task.sample)
            if held is None or held.state is not State.WAITING:
                continue
            try:
                rollout = decode_rollout(read_payload(self._log.payload_dir, held.entry.payload))
            except (OSError, ValueError) as error:
                _log.warning("rollout %d/%d is sampled again: %s", group, task.sample, error)
                again = Dropped(group=group, members=[task.sample], why="its columns cannot be read", again=True)
                self._log.append(again)
                continue
            # entries of earlier versions do not say it
            cut = held.entry.truncated
            cut = rollout.last_token not in stop_token_ids if cut is None else cut
            found[position] = HeldOutRollout(rollout, cut)
            self._left[group] -= 1
        return found

    async def finished(self, task: HeldOutTask, result: HeldOutRollout | Exception) -> None:
        """Write a sample; return when it is durable. A failed one is not written, and a resume repeats it."""
        group = self._group(task)
        if isinstance(result, HeldOutRollout):
            rollout = result.rollout

            def entry(place: PayloadPlace) -> Entry:
                return finished_entry(
                    rollout,
                    place,
                    group=group,
                    member=task.sample,
                    environment=task.environment.name,
                    prompt_index=task.index,
                    truncated=result.truncated,
                )

            await asyncio.wrap_future(self._log.finish(*encode_rollout(rollout), entry))
            self._left[group] -= 1
        if not self._left[group]:
            self._log.append(Kept(group=group))

    def close(self) -> None:
        """Finish pending writes and close the files."""
        self._log.close()
