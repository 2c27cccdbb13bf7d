"""What the orchestrator and the process of an environment say to each other: msgpack, each message behind its length.

A call has a number. A rollout is a call, too: between its begin and its end the environment speaks to the policy. What
a `Prompt` carries in ``data`` stays in the process that made it: a rollout is begun by the number of its prompt.
"""

from __future__ import annotations

from typing import Any

import msgspec

from hpcrl.rollouts.environments.base import CallStatus, Reply, ToolCall

__all__ = [
    "HEADER_BYTES",
    "MAX_MESSAGE_BYTES",
    "Answer",
    "AskDemonstration",
    "AskPrompt",
    "Begin",
    "Build",
    "Built",
    "Call",
    "Cancel",
    "Ended",
    "Failed",
    "FromChild",
    "Messages",
    "NotBuilt",
    "Ping",
    "Refused",
    "Said",
    "Say",
    "ToChild",
    "Unusable",
    "decode_from_child",
    "decode_to_child",
    "frame",
    "length_of",
]

HEADER_BYTES = 4
MAX_MESSAGE_BYTES = 1 << 28

Messages = list[dict[str, Any]]


class _Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    pass


class Build(_Message, frozen=True):
    """The first message: make the environment; ``path`` is where modules are looked for."""

    factory: str
    args: dict[str, Any]
    path: list[str]


class AskPrompt(_Message, frozen=True):
    """The messages and the tools of a prompt."""

    call: int
    split: str
    index: int


class AskDemonstration(_Message, frozen=True):
    """A conversation for the warm-up, and the state of the random generator after it."""

    call: int
    split: str
    index: int
    correct: bool
    rng_state: Any


class Begin(_Message, frozen=True):
    """Begin the rollout of a prompt."""

    call: int
    split: str
    index: int
    seed: int


class Call(_Message, frozen=True):
    """See `hpcrl.rollouts.environments.ToolCall`."""

    name: str
    arguments: dict[str, Any]
    id: str
    status: CallStatus
    raw: str
    span: tuple[int, int] | None
    error: str


class Said(_Message, frozen=True):
    """What the policy replied."""

    call: int
    text: str
    finished: bool
    thinking: str = ""
    calls: tuple[Call, ...] = ()
    tokens: int | None = None

    @classmethod
    def of(cls, call: int, reply: Reply) -> Said:
        """Make the message of a reply."""
        calls = tuple(Call(c.name, dict(c.arguments), c.id, c.status, c.raw, c.span, c.error) for c in reply.calls)
        return cls(call, reply.text, reply.finished, reply.thinking, calls, reply.tokens)

    @property
    def reply(self) -> Reply:
        """The reply that it was made of."""
        calls = tuple(ToolCall(c.name, c.arguments, c.id, c.status, c.raw, c.span, c.error) for c in self.calls)
        return Reply(self.text, self.finished, self.thinking, calls, self.tokens)


class Refused(_Message, frozen=True):
    """The policy cannot reply to that; a ``ValueError`` of the environment's."""

    call: int
    message: str


class Cancel(_Message, frozen=True):
    """Nobody waits for this call any more."""

    call: int


class Ping(_Message, frozen=True):
    """Does the event loop turn?"""

    call: int


class Built(_Message, frozen=True):
    """The environment is there; ``notes`` are sentences on what is odd about it."""

    notes: list[str] = []


class NotBuilt(_Message, frozen=True):
    """It cannot be made: what is wrong, and a hint; of each setting that is wrong, where that is known."""

    what: str
    hint: str
    settings: list[tuple[str, str, str]] = []


class Answer(_Message, frozen=True):
    """The answer to a call that is no rollout."""

    call: int
    value: Any


class Say(_Message, frozen=True):
    """The environment says something to the policy, and waits for its reply."""

    call: int
    messages: Messages


class Ended(_Message, frozen=True):
    """A rollout has ended; parts that are no finite numbers are in ``refused``, with what they were."""

    call: int
    reward: float
    parts: dict[str, float]
    refused: dict[str, str] = {}


class Unusable(_Message, frozen=True):
    """A rollout has ended with a reward that cannot be used: what it was, and where the rollout is defined."""

    call: int
    message: str
    place: str


class Failed(_Message, frozen=True):
    """The environment's code raised: type, text, and its own frames, one a line."""

    call: int
    kind: str
    message: str
    frames: str


ToChild = Build | AskPrompt | AskDemonstration | Begin | Said | Refused | Cancel | Ping
FromChild = Built | NotBuilt | Answer | Say | Ended | Unusable | Failed

_encoder = msgspec.msgpack.Encoder()
_to_child: msgspec.msgpack.Decoder[ToChild] = msgspec.msgpack.Decoder(ToChild)
_from_child: msgspec.msgpack.Decoder[FromChild] = msgspec.msgpack.Decoder(FromChild)


def frame(message: ToChild | FromChild) -> bytes:
    """A message behind its length (ValueError where it is larger than any may be)."""
    data = _encoder.encode(message)
    if len(data) > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {len(data)} bytes; {MAX_MESSAGE_BYTES} at most")
    return len(data).to_bytes(HEADER_BYTES, "big") + data


def length_of(header: bytes) -> int:
    """Bytes of the message behind ``header`` (ValueError where no message is that large)."""
    length = int.from_bytes(header, "big")
    if length > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {length} bytes; {MAX_MESSAGE_BYTES} at most")
    return length


def decode_to_child(data: bytes) -> ToChild:
    """A message for the environment (msgspec.DecodeError where it is none)."""
    return _to_child.decode(data)


def decode_from_child(data: bytes) -> FromChild:
    """A message of the environment (msgspec.DecodeError where it is none)."""
    return _from_child.decode(data)
