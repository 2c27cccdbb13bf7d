"""Profile of a rank while it trains, on request: torch's profiler over whole steps, and a snapshot of CUDA memory.

`hpcrl.runs.profile_request` has the files. Everything happens between two steps. Nothing here fails a step: an error
becomes the answer and an event.
"""

from __future__ import annotations

import gzip
import logging
import shutil
import time
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from hpcrl.runs.profile_request import (
    SNAPSHOT,
    TRACE,
    ProfileAnswer,
    ProfileRequest,
    profile_dir,
    read_profile_request,
    request_path,
)
from hpcrl.runs.role import RoleContext
from hpcrl.storage import lost_replies
from hpcrl.storage.disk_space import find_shortage

_log = logging.getLogger(__name__)
_SNAPSHOT_ENTRIES = 200_000
"""Maximum number of allocations and frees that a memory snapshot has the stacks of; older ones are left out."""
Emit = Callable[..., None]


class StepProfiler:
    """Profiles this rank when it is asked to.

    Parameters
    ----------
    context:
        Run and attempt.
    rank:
        Number of this rank in the trainer.
    device:
        Its device.
    emit:
        Records an event of this rank.
    on_work:
        Called before a profile is started or written, which may take seconds.
    """

    def __init__(
        self, context: RoleContext, rank: int, device: torch.device, *, emit: Emit, on_work: Callable[[], None]
    ) -> None:
        self._context, self._rank, self._device = context, rank, device
        self._emit, self._on_work = emit, on_work
        self._recording: _Recording | None = None
        self._request: ProfileRequest | None = None
        self._answered = ""

    def span(self, name: str) -> AbstractContextManager[Any]:
        """Return the context in which a phase of the step runs: in a profile it has its name."""
        return nullcontext() if self._recording is None else _named_span(name)

    def between_steps(self, step: int, requested: Collection[int] | None) -> None:
        """Begin, continue, end or drop a profile after ``step``, as requests ask.

        Parameters
        ----------
        requested:
            Ranks for which there is a request; None where that is unknown, and nothing is begun or dropped.
        """
        wanted = self._recording is not None if requested is None else self._rank in requested
        if not wanted and self._recording is None:
            return
        try:
            if self._recording is None:
                self._begin(step)
            elif not wanted:
                self._drop("the request was withdrawn")
            elif self._recording.next_step(step):
                self._finish()
        except Exception as error:  # noqa: BLE001 - a profile must not fail a step
            self._fail(error)

    def end(self) -> None:
        """End the profile of a trainer that makes no more steps; it has the steps until now."""
        if self._recording is None:
            return
        try:
            if self._recording.last:
                self._recording.notes.append("the run has no more steps")
                self._finish()
            else:
                self._answer(self._recording.request, ProfileAnswer(problem="the run has no more steps"))
                self._drop("the run has no more steps")
        except Exception as error:  # noqa: BLE001 - a profile must not fail a run
            self._fail(error)

    def _begin(self, step: int) -> None:
        request = read_profile_request(request_path(self._context.run, self._context.attempt, self._rank))
        if request is None or request.id == self._answered:
            return
        self._request = request
        directory = profile_dir(self._context.run, self._context.attempt, request.id)
        # the trace is written whole before it is compressed
        lack = find_shortage(directory, size=2 * request.most_bytes, files=4)
        if lack is not None:
            self._answer(request, ProfileAnswer(problem=f"there is too little room for a profile: {lack}"))
            return
        self._on_work()
        self._recording = _Recording(request, directory, self._device, step)
        self._recording.start()
        self._emit("trainer.profiling", rank=self._rank, after_step=step, steps=request.steps, by=request.by)

    def _finish(self) -> None:
        recording = self._recording
        assert recording is not None
        self._on_work()
        answer = recording.finish()
        self._recording = None
        self._answer(recording.request, answer)

    def _answer(self, request: ProfileRequest, answer: ProfileAnswer) -> None:
        self._request, self._answered = None, request.id
        run, attempt = self._context.run, self._context.attempt
        answer.write(profile_dir(run, attempt, request.id))
        request_path(run, attempt, self._rank).unlink(missing_ok=True)
        if answer.problem:
            self._emit("trainer.profile_failed", rank=self._rank, problem=answer.problem)
        else:
            self._emit("trainer.profiled", rank=self._rank, first=answer.first, last=answer.last, held_s=answer.held_s)

    def _drop(self, why: str) -> None:
        """Stop recording and remove what was recorded."""
        recording, self._recording, self._request = self._recording, None, None
        assert recording is not None
        _log.info("the profile is dropped: %s", why)
        recording.stop()
        if recording.request.id != self._answered:
            shutil.rmtree(recording.directory, ignore_errors=True)

    def _fail(self, error: Exception) -> None:
        """Report an error of the profiler; the training continues."""
        _log.warning("the profile failed", exc_info=error)
        recording, self._recording = self._recording, None
        problem = f"{type(error).__name__}: {error}"
        try:
            if self._request is None:
                # a request that cannot be read must not be tried after each step
                request_path(self._context.run, self._context.attempt, self._rank).unlink(missing_ok=True)
                self._emit("trainer.profile_failed", rank=self._rank, problem=problem)
            else:
                self._answer(self._request, ProfileAnswer(problem=problem))
        except Exception:  # noqa: BLE001 - the filesystem that refused the profile may refuse its answer
            _log.warning("the failure of the profile could not be reported", exc_info=True)
            with suppress(Exception):
                self._emit("trainer.profile_failed", rank=self._rank, problem=problem)
        if recording is not None:
            with suppress(Exception):
                recording.stop()


def _named_span(name: str) -> AbstractContextManager[Any]:
    span: AbstractContextManager[Any] = record_function(name)
    return span


class _Recording:
    """A profile that is being recorded."""

    def __init__(self, request: ProfileRequest, directory: Path, device: torch.device, step: int) -> None:
        self.request, self.directory, self._device = request, directory, device
        self.first, self.last = step + 1, 0
        self.notes: list[str] = []
        self._held_s = 0.0
        self._deadline = time.monotonic() + request.limit_s
        activities = [ProfilerActivity.CPU]
        self._cuda = device.type == "cuda"
        if self._cuda:
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(activities=activities, profile_memory=request.memory)
        self._started = False
        self._step_span: AbstractContextManager[Any] = nullcontext()

    def start(self) -> None:
        """Start to record."""
        begin = time.monotonic()
        self._started = True
        if self.request.memory and self._cuda:
            torch.cuda.memory._record_memory_history(max_entries=_SNAPSHOT_ENTRIES)
        elif self.request.memory:
            self.notes.append(
                f"no snapshot of memory: the device of the rank is {self._device.type}; allocations are in the trace"
            )
        self._profile.start()
        self._open_step(self.first)
        self._held_s += time.monotonic() - begin

    def _open_step(self, step: int) -> None:
        self._step_span = _named_span(f"step {step}")
        self._step_span.__enter__()

    def _close_step(self) -> None:
        span, self._step_span = self._step_span, nullcontext()
        span.__exit__(None, None, None)

    def next_step(self, step: int) -> bool:
        """Record that ``step`` has ended; return whether the profile has all that it shall have."""
        self._close_step()
        self.last = step
        if step - self.first + 1 >= self.request.steps:
            return True
        if time.monotonic() >= self._deadline:
            self.notes.append(f"ended early: the record has lasted for {self.request.limit_s:g} s")
            return True
        self._open_step(step + 1)
        return False

    def stop(self) -> None:
        """Stop to record, where that was started."""
        if not self._started:
            return
        self._started = False
        try:
            self._close_step()
            self._profile.stop()
        finally:
            if self.request.memory and self._cuda:
                torch.cuda.memory._record_memory_history(enabled=None)

    def finish(self) -> ProfileAnswer:
        """Stop, write what was recorded, and return the answer."""
        begin = time.monotonic()
        files = []
        if self.request.memory and self._cuda:
            files += self._write_snapshot()
        self.stop()
        files += self._write_trace()
        self._held_s += time.monotonic() - begin
        return ProfileAnswer(
            problem="" if files else "; ".join(self.notes),
            first=self.first if files else 0,
            last=self.last if files else 0,
            device=self._device.type,
            files=files,
            notes=self.notes,
            held_s=self._held_s,
        )

    def _write_trace(self) -> list[str]:
        raw = self.directory / ".trace.json"
        try:
            self._profile.export_chrome_trace(str(raw))
            if self._too_large(raw, "the trace"):
                return []
            temporary = self.directory / f".{TRACE}"
            with open(raw, "rb") as source, gzip.open(temporary, "wb", compresslevel=1) as target:
                shutil.copyfileobj(source, target, 1 << 20)
            lost_replies.replace(temporary, self.directory / TRACE)
        finally:
            raw.unlink(missing_ok=True)
        return [TRACE]

    def _write_snapshot(self) -> list[str]:
        path = self.directory / f".{SNAPSHOT}"
        try:
            dump: Any = torch.cuda.memory._dump_snapshot
            dump(str(path))
            if self._too_large(path, "the snapshot of memory"):
                return []
            lost_replies.replace(path, self.directory / SNAPSHOT)
        finally:
            path.unlink(missing_ok=True)
        return [SNAPSHOT]

    def _too_large(self, path: Path, what: str) -> bool:
        size = path.stat().st_size
        if size <= self.request.most_bytes:
            return False
        self.notes.append(f"{what} has {size / 1e6:,.0f} MB, more than {self.request.most_bytes / 1e6:,.0f} MB")
        return True
