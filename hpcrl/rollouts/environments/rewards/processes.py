"""Pool of processes of slow checkers. A process that takes too long or dies fails its rollout, and is replaced."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import msgspec
import psutil

from hpcrl.processes.daemon_threads import DaemonExecutor
from hpcrl.processes.interpreter import module_command
from hpcrl.rollouts.environments.outcomes import OutcomeError
from hpcrl.rollouts.environments.rewards import worker
from hpcrl.rollouts.environments.rewards.slow import SlowReward
from hpcrl.rollouts.environments.rewards.worker import (
    Answered,
    AnswerProblem,
    CheckAnswer,
    CheckReply,
    Failure,
    Made,
    MakeCheckers,
    Request,
    Score,
)

_START_S = 300.0
"""Timeout in seconds of a process's imports."""

_SANDBOXES = "hpcrl.sandboxes.daemon"


class CheckerError(Exception):
    """Raised where a checker gave no score; the message names it and says why."""


class CheckerTimeoutError(CheckerError):
    """Raised where a checker took longer than its ``timeout_s``; its process was ended."""


class _Process:
    """Process with all checkers."""

    def __init__(self, rewards: Sequence[SlowReward]) -> None:
        self._connection, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                module_command(sys.executable, "hpcrl.rollouts.environments.rewards.worker", str(theirs.fileno())),
                stdin=subprocess.DEVNULL,
                # its standard output goes into the log, and not among results
                stdout=2,
                pass_fds=(theirs.fileno(),),
            )
        weakref.finalize(self, _end, self._process)
        made = self.ask(MakeCheckers([each.model_dump(mode="json") for each in rewards], sys.path), timeout_s=_START_S)
        assert isinstance(made, Made)
        self.problems = made.problems

    def ask(self, question: Request, *, timeout_s: float) -> Answered:
        """Send a question and wait for its answer; without one, end the process and raise TimeoutError or EOFError."""
        self._connection.settimeout(timeout_s)
        try:
            worker.write_frame(self._connection, question)
            return worker.ANSWERS.decode(worker.read_frame(self._connection))
        except TimeoutError:
            self.close()
            raise
        except (OSError, EOFError, msgspec.DecodeError) as error:
            self.close()
            raise EOFError(f"its process ended with exit code {self._process.returncode}") from error

    @property
    def lives(self) -> bool:
        """Return whether the process has not ended."""
        return self._process.poll() is None

    def close(self) -> None:
        """End the process and what it has started."""
        _end(self._process)
        self._connection.close()


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        with contextlib.suppress(psutil.Error):
            for child in _descendants(psutil.Process(process.pid)):
                with contextlib.suppress(psutil.Error):
                    child.kill()
        process.kill()
        process.wait()


def _descendants(process: psutil.Process) -> list[psutil.Process]:
    """Return what a process has started, except sandboxes: their daemon ends with it, and removes their files."""
    found = []
    for child in process.children():
        with contextlib.suppress(psutil.Error):
            if _SANDBOXES not in child.cmdline():
                found += [child, *_descendants(child)]
    return found


class CheckerProcesses:
    """Judges replies in processes, at most ``limit`` of them; the others wait.

    Attributes
    ----------
    problems:
        Checkers that cannot be made: number, what is wrong and a hint of each.
    """

    def __init__(self, rewards: Sequence[SlowReward], *, limit: int) -> None:
        """Start the first process.

        Raises
        ------
        CheckerError
            It does not start.
        """
        self._rewards = tuple(rewards)
        self._limit = min(limit, len(os.sched_getaffinity(0)))
        self._threads = DaemonExecutor(self._limit, thread_name_prefix="checker")
        self._lock = threading.Lock()
        self._idle: list[_Process] = []
        self.problems: list[tuple[int, str, str]] = []
        if self._rewards:
            first = self._start()
            self.problems = list(first.problems)
            self._idle.append(first)

    async def score(self, checker: int, reply: str, answer: str, row: dict[str, Any]) -> float:
        """Let checker number ``checker`` judge a reply.

        Raises
        ------
        CheckerTimeoutError
            It took longer than its ``timeout_s``.
        CheckerError
            Its code raised, or its process died.
        OutcomeError
            It gave no finite number, or one out of its range.
        """
        question = CheckReply(checker, reply, answer, row)
        answered = await asyncio.get_running_loop().run_in_executor(self._threads, self._judge, question)
        if isinstance(answered, Score):
            return answered.score
        assert isinstance(answered, Failure)
        raise OutcomeError(answered.what) if answered.unusable else CheckerError(answered.what)

    def answer_problem(self, checker: int, answer: str) -> str:
        """Return why no reply can be compared with an answer; empty where one can. This blocks.

        Raises
        ------
        CheckerError
            The checker fails at the answer itself.
        """
        answered = self._judge(CheckAnswer(checker, answer))
        if isinstance(answered, Failure):
            raise CheckerError(answered.what)
        assert isinstance(answered, AnswerProblem)
        return answered.what

    def _judge(self, question: CheckReply | CheckAnswer) -> Score | Failure | AnswerProblem:
        """Judge in a thread that waits for the process."""
        process = self._next_idle() or self._start()
        reward = self._rewards[question.checker]
        try:
            answered = process.ask(question, timeout_s=reward.deadline_s)
        except TimeoutError:
            what = f"no score within timeout_s, {reward.timeout_s:g} s"
            if reward.deadline_s > reward.timeout_s:
                what = f"no score within {reward.deadline_s:g} s: its sandbox does not answer"
            raise CheckerTimeoutError(what) from None
        except EOFError as error:
            raise CheckerError(str(error)) from None
        with self._lock:
            self._idle.append(process)
        assert not isinstance(answered, Made)
        return answered

    def _next_idle(self) -> _Process | None:
        """Take an idle process; one that has ended meanwhile must not fail a rollout."""
        while True:
            with self._lock:
                process = self._idle.pop() if self._idle else None
            if process is None or process.lives:
                return process
            process.close()

    def _start(self) -> _Process:
        try:
            return _Process(self._rewards)
        except TimeoutError:
            raise CheckerError(f"the process of checkers was not ready within {_START_S:g} s") from None
        except EOFError as error:
            raise CheckerError(f"the process of checkers does not start: {error}") from None

    def close(self) -> None:
        """End idle processes; busy ones end with this process."""
        with self._lock:
            idle, self._idle = self._idle, []
        for process in idle:
            process.close()
