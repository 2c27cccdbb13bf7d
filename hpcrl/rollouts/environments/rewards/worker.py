"""Process of slow checkers: ``python -P -m hpcrl.rollouts.environments.rewards.worker FD``.

It reads msgpack messages from a socket, each preceded by its length: first the configurations of the checkers and the
search path of modules, then one reply at a time. Its standard output goes into the log.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import sys
import traceback
from typing import Any

import msgspec

from hpcrl.processes.procfs import die_with_parent
from hpcrl.rollouts.environments.outcomes import OutcomeError, plain_text
from hpcrl.rollouts.environments.rewards.made import CheckerNotMadeError
from hpcrl.rollouts.environments.rewards.slow import SlowReward, make_check

_HEADER_BYTES = 4
_MAX_MESSAGE = 4000
"""Maximum number of characters of a message of an exception."""
_MEMORY_BYTES = 4 << 30
"""Maximum address space of a process of simple checkers; others may load libraries with threads for each CPU."""
_BOUNDED = ("regex", "format", "math", "json_schema")
_FRAMES = 3
"""Maximum number of frames of an exception that are named: the innermost ones."""
_OURS = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")


class MakeCheckers(msgspec.Struct, frozen=True, tag=True):
    """First message to a process of checkers.

    Attributes
    ----------
    rewards:
        Configurations, as JSON.
    path:
        Search path of modules.
    """

    rewards: list[dict[str, Any]]
    path: list[str]


class CheckReply(msgspec.Struct, frozen=True, tag=True):
    """Judge a reply with one of the checkers."""

    checker: int
    reply: str
    answer: str
    row: dict[str, Any]


class CheckAnswer(msgspec.Struct, frozen=True, tag=True):
    """Request to check an answer of a row; the reply is an `AnswerProblem`."""

    checker: int
    answer: str


class AnswerProblem(msgspec.Struct, frozen=True, tag=True):
    """Reason why no reply can be compared with an answer; empty where one can."""

    what: str


class Made(msgspec.Struct, frozen=True, tag=True):
    """Reply that the checkers exist, except those of ``problems``: number, problem and hint of each."""

    problems: list[tuple[int, str, str]]


class Score(msgspec.Struct, frozen=True, tag=True):
    """Score of a checker."""

    score: float


class Failure(msgspec.Struct, frozen=True, tag=True):
    """Reply that a checker raised, or returned something that is not a score (``unusable``)."""

    what: str
    unusable: bool


Request = MakeCheckers | CheckReply | CheckAnswer
Answered = Made | Score | Failure | AnswerProblem
ANSWERS: msgspec.msgpack.Decoder[Answered] = msgspec.msgpack.Decoder(Answered)
_REQUESTS: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)


def write_frame(connection: socket.socket, message: msgspec.Struct) -> None:
    """Send a message behind its length."""
    data = msgspec.msgpack.encode(message)
    connection.sendall(len(data).to_bytes(_HEADER_BYTES, "big") + data)


def read_frame(connection: socket.socket) -> bytes:
    """Return the next message (EOFError at the end)."""
    return _read(connection, int.from_bytes(_read(connection, _HEADER_BYTES), "big"))


def _read(connection: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        piece = connection.recv(count - len(data))
        if not piece:
            raise EOFError("the connection is closed")
        data += piece
    return bytes(data)


def _described(error: BaseException) -> str:
    """Return type, message and innermost frames of an exception, whatever its own methods do."""
    try:
        message = str(error)
    except BaseException as other:  # noqa: BLE001 - foreign code: __str__ may raise anything
        message = f"(its message cannot be shown: {type(other).__name__})"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(_OURS)]
    places = "".join(f" at {each.filename}:{each.lineno} in {each.name}" for each in frames[-1 : -_FRAMES - 1 : -1])
    return plain_text(f"{type(error).__name__}: {message}{places}", _MAX_MESSAGE)


def _serve(connection: socket.socket) -> None:
    request = _REQUESTS.decode(read_frame(connection))
    assert isinstance(request, MakeCheckers)
    sys.path[:] = request.path
    if all(reward["kind"] in _BOUNDED for reward in request.rewards):
        # the reply of a policy must not fill the memory of the node before the deadline
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    checks, problems = [], []
    for number, reward in enumerate(request.rewards):
        try:
            checks.append(make_check(_reward(reward)))
        except CheckerNotMadeError as error:
            problems.append((number, plain_text(error.what, _MAX_MESSAGE), error.hint))
    write_frame(connection, Made(problems))
    while True:
        request = _REQUESTS.decode(read_frame(connection))
        assert not isinstance(request, MakeCheckers)
        answer: Answered
        check = checks[request.checker]
        try:
            if isinstance(request, CheckAnswer):
                answer = AnswerProblem(check.answer_problem(request.answer))
            else:
                answer = Score(check.score(request.reply, request.answer, request.row))
        except OutcomeError as error:
            answer = Failure(plain_text(str(error), _MAX_MESSAGE), unusable=True)
        except BaseException as error:  # noqa: BLE001 - foreign code, sys.exit() as well: it costs one rollout
            answer = Failure(_described(error), unusable=False)
        write_frame(connection, answer)


def _reward(value: dict[str, Any]) -> SlowReward:
    from pydantic import TypeAdapter  # noqa: PLC0415

    adapter: TypeAdapter[SlowReward] = TypeAdapter(SlowReward)
    return adapter.validate_json(msgspec.json.encode(value))


def main(fd: int) -> None:
    """Serve until the socket is closed."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.set_inheritable(fd, False)
    with socket.socket(fileno=fd) as connection:
        try:
            _serve(connection)
        except (EOFError, ConnectionError):
            return


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    main(int(sys.argv[1]))
    sys.stdout.flush()
    # threads that a function left behind do not keep the process
    os._exit(0)
