"""Protocol of the orchestrator and the process of an environment: msgpack messages, each preceded by its length.

A call has a number. A rollout is a call as well: between its begin and its end the environment exchanges messages with
the policy. The ``data`` of a `Prompt` stays in the process that made it: a rollout is started by the number of its
prompt.
"""

from __future__ import annotations

from typing import Any

import msgspec

from hpcrl.rollouts.environments.base import CallStatus, Reply, ToolCall

HEADER_BYTES = 4
MAX_MESSAGE_BYTES = 1 << 28

Messages = list[dict[str, Any]]


class _Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    pass


class Build(_Message, frozen=True):
    """First message: build the environment; ``path`` is the search path of modules."""

    factory: str
    args: dict[str, Any]
    path: list[str]


class AskPrompt(_Message, frozen=True):
    """Request for the messages and the tools of a prompt."""

    call: int
    split: str
    index: int


class AskDemonstration(_Message, frozen=True):
    """Request for a conversation for the warm-up, and the state of the random generator after it."""

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
    """Reply of the policy."""

    call: int
    text: str
    finished: bool
    thinking: str = ""
    calls: tuple[Call, ...] = ()
    tokens: int | None = None
    context: int | None = None
    room: int | None = None
    fits: bool = True

    @classmethod
    def of(cls, call: int, reply: Reply) -> Said:
        """Make the message of a reply."""
        calls = tuple(Call(c.name, dict(c.arguments), c.id, c.status, c.raw, c.span, c.error) for c in reply.calls)
        sizes = reply.tokens, reply.context, reply.room
        return cls(call, reply.text, reply.finished, reply.thinking, calls, *sizes, reply.fits)

    @property
    def reply(self) -> Reply:
        """Return the reply that this message was made of."""
        calls = tuple(ToolCall(c.name, c.arguments, c.id, c.status, c.raw, c.span, c.error) for c in self.calls)
        sizes = self.tokens, self.context, self.room
        return Reply(self.text, self.finished, self.thinking, calls, *sizes, self.fits)


class Refused(_Message, frozen=True):
    """Message that the policy cannot reply; it becomes a ``ValueError`` of the environment."""

    call: int
    message: str


class Opened(_Message, frozen=True):
    """The endpoint of a rollout is there: see `hpcrl.rollouts.environments.PolicyEndpoint`."""

    call: int
    url: str
    key: str
    model: str


class Cancel(_Message, frozen=True):
    """Message that the result of a call is not needed any more."""

    call: int


class Ping(_Message, frozen=True):
    """Does the event loop turn?"""

    call: int


class Built(_Message, frozen=True):
    """Message that the environment is built; ``notes`` are warnings, a sentence each."""

    notes: list[str] = []


class NotBuilt(_Message, frozen=True):
    """Message that the environment cannot be built: problem and hint, for each wrong setting where known."""

    what: str
    hint: str
    settings: list[tuple[str, str, str]] = []


class Answer(_Message, frozen=True):
    """Answer to a call that is not a rollout."""

    call: int
    value: Any


class Say(_Message, frozen=True):
    """Messages of the environment to the policy; it waits for the reply (see `Policy.reply`)."""

    call: int
    messages: Messages
    anew: bool = False
    within: int | None = None


class Open(_Message, frozen=True):
    """A rollout wants an endpoint for a program, and waits for it."""

    call: int


class Close(_Message, frozen=True):
    """The program has ended: the endpoint is not needed any more."""

    call: int


class Ended(_Message, frozen=True):
    """Message that a rollout has ended; ``refused`` has the parts that are not finite numbers, with their values."""

    call: int
    reward: float
    parts: dict[str, float]
    refused: dict[str, str] = {}


class Unusable(_Message, frozen=True):
    """Message that a rollout ended with an unusable reward: its value, and where the rollout is defined."""

    call: int
    message: str
    place: str


class Failed(_Message, frozen=True):
    """Message that the environment's code raised: type, text, and its own frames, one a line."""

    call: int
    kind: str
    message: str
    frames: str


ToChild = Build | AskPrompt | AskDemonstration | Begin | Said | Opened | Refused | Cancel | Ping
FromChild = Built | NotBuilt | Answer | Say | Open | Close | Ended | Unusable | Failed

_encoder = msgspec.msgpack.Encoder()
_to_child: msgspec.msgpack.Decoder[ToChild] = msgspec.msgpack.Decoder(ToChild)
_from_child: msgspec.msgpack.Decoder[FromChild] = msgspec.msgpack.Decoder(FromChild)


def encode_message(message: ToChild | FromChild) -> bytes:
    """Return the encoded message.

    Raises
    ------
    ValueError
        The message is larger than the maximum.
    """
    data = _encoder.encode(message)
    if len(data) > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {len(data)} bytes; {MAX_MESSAGE_BYTES} at most")
    return data


def frame(message: ToChild | FromChild) -> bytes:
    """Return the encoded message, preceded by its length (ValueError where it is larger than the maximum)."""
    data = encode_message(message)
    return len(data).to_bytes(HEADER_BYTES, "big") + data


def length_of(header: bytes) -> int:
    """Return the length in bytes of the message after ``header`` (ValueError above the maximum)."""
    length = int.from_bytes(header, "big")
    if length > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {length} bytes; {MAX_MESSAGE_BYTES} at most")
    return length


def decode_to_child(data: bytes) -> ToChild:
    """Return a message for the environment.

    Raises
    ------
    msgspec.DecodeError
        The data is not such a message.
    """
    return _to_child.decode(data)


def decode_from_child(data: bytes) -> FromChild:
    """Return a message of the environment.

    Raises
    ------
    msgspec.DecodeError
        The data is not such a message.
    """
    return _from_child.decode(data)
