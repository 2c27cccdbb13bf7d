"""Training and held-out tasks of a stream of tasks, by what they ask."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Iterable
from typing import Any

MAX_LOOKED_AT = 100_000
"""Maximum number of further tasks that are read of an unlimited stream to find one."""
_SAMPLED = 64
"""First tasks that decide what distinguishes questions."""
_NOT_ASKED = ("idx", "id", "name", "description", "timeout", "resources")
"""Fields of a task that do not change what it asks."""


class EmptySplitError(Exception):
    """A split has no task: the setting that decides that, the problem, and a hint."""

    def __init__(self, key: str, what: str, hint: str) -> None:
        super().__init__(what)
        self.key, self.hint = key, hint


def identity(question: dict[str, Any], *, by_prompt: bool) -> bytes:
    """Return a digest of what a task asks; equal ones are in one split.

    Parameters
    ----------
    by_prompt:
        Of the prompt alone. Otherwise of all fields, because the prompts of all tasks are the same.
    """
    names = ("prompt", "system_prompt") if by_prompt else tuple(name for name in question if name not in _NOT_ASKED)
    text = json.dumps({name: question.get(name) for name in names}, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).digest()


class TaskSplits:
    """Tasks by split and index. Tasks are taken from the stream when they are needed, in its order."""

    def __init__(
        self,
        tasks: Iterable[Any],
        question: Callable[[Any], dict[str, Any]],
        *,
        share: float,
        held_out: Iterable[Any] | None = None,
        finite: bool,
    ) -> None:
        """Take tasks.

        Parameters
        ----------
        question:
            Gives the fields of a task.
        share:
            Share of the questions that is held out; not used where ``held_out`` is given.
        held_out:
            Held-out tasks. Training tasks that ask the same are left out.
        finite:
            The stream has an end. Then all tasks are read here.

        Raises
        ------
        EmptySplitError
            One split has no task.
        """
        self._stream, self._question, self._share = iter(tasks), question, share
        self._found: dict[str, list[Any]] = {"train": [], "heldout": []}
        self._ended, self._lock = False, threading.Lock()
        self._broken = ""
        self.left_out = 0
        first = self._first()
        prompts = {json.dumps(question(task).get("prompt"), default=str) for task in first}
        self._by_prompt = len(prompts) > 1
        self._held_out: set[bytes] | None = None
        if held_out is not None:
            self._found["heldout"] = list(held_out)
            self._held_out = {self._identity(task) for task in self._found["heldout"]}
        for task in first:
            self._put(task)
        if finite:
            for task in self._stream:
                self._put(task)
            self._ended = True
            if held_out is None:
                self._fill_empty()
        for split, found in self._found.items():
            if not found and (self._ended or self._pull(split, 1) is None):
                key = "held_out_args" if held_out is not None and split == "heldout" else "held_out_share"
                what = "training" if split == "train" else "held-out"
                hint = "give more tasks, another held_out_share, or held_out_args"
                raise EmptySplitError(key, f"there is no {what} task among {len(first)} or more", hint)

    def _first(self) -> list[Any]:
        found: list[Any] = []
        for task in self._stream:
            found.append(task)
            if len(found) == _SAMPLED:
                break
        return found

    def _identity(self, task: Any) -> bytes:
        return identity(self._question(task), by_prompt=self._by_prompt)

    def _put(self, task: Any) -> None:
        digest = self._identity(task)
        if self._held_out is not None:
            if digest in self._held_out:
                self.left_out += 1
            else:
                self._found["train"].append(task)
            return
        fraction = int.from_bytes(digest[:8], "big") / 2**64
        self._found["heldout" if fraction < self._share else "train"].append(task)

    def _fill_empty(self) -> None:
        """Give a split without a task, as a share of few questions may be, the question that is nearest to it."""
        for split, other, nearest in (("heldout", "train", min), ("train", "heldout", max)):
            digests = [self._identity(task) for task in self._found[other]]
            if not self._found[split] and len(set(digests)) > 1:
                moved = nearest(digests)
                both = list(zip(self._found[other], digests, strict=True))
                self._found[split] = [task for task, digest in both if digest == moved]
                self._found[other] = [task for task, digest in both if digest != moved]

    def _pull(self, split: str, count: int) -> Any | None:
        """Read on until a split has ``count`` tasks; None where the stream ends before that."""
        found = self._found[split]
        looked_at = 0
        while len(found) < count:
            task = self._next()
            looked_at += 1
            if task is None or looked_at > MAX_LOOKED_AT:
                self._ended = task is None
                return None
            self._put(task)
        return found[count - 1]

    def _next(self) -> Any | None:
        """Return the next task of the stream, None at its end; a generator that has raised only looks as if it had one.

        Raises
        ------
        RuntimeError
            It raised earlier.
        """
        if self._broken:
            raise RuntimeError(f"the tasks cannot be read on: {self._broken}")
        try:
            return next(self._stream, None)
        except Exception as error:
            self._broken = f"{type(error).__name__}: {error}"
            raise

    def task(self, split: str, index: int) -> Any:
        """Return a task; those of a finite stream repeat."""
        with self._lock:
            found = self._found[split]
            endless = not self._ended and not (split == "heldout" and self._held_out is not None)
            if endless and index >= len(found) and self._pull(split, index + 1) is None and not self._ended:
                raise RuntimeError(f"no further task for {split} among {MAX_LOOKED_AT}")
            return found[index % len(found)]

    def counts(self) -> dict[str, int]:
        """Return how many tasks of each split have been read."""
        return {split: len(found) for split, found in self._found.items()}
