"""Messages between the daemon of sandboxes and its clients: frames of msgpack on a unix socket.

Names of files and arguments are bytes here, because a program can make names that are no text.
"""

from __future__ import annotations

import asyncio
import os
import struct
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from hpcrl.sandboxes.interface import (
    ExecResult,
    Patch,
    PatchEntry,
    SandboxError,
    SandboxEvictedError,
    SandboxFile,
    SandboxLimitError,
    SandboxLimits,
    SandboxLostError,
    SandboxStartError,
)

FORMAT_VERSION = 1
_LENGTH = struct.Struct(">I")
_MAX_BYTES = 1 << 30
"""Maximum bytes of a message; files of a work tree are in one."""

WireFile = tuple[bytes, bool, bool]
"""Content, executable, link."""
WirePatch = list[tuple[bytes, WireFile | None, WireFile | None]]


class _Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    pass


class HelloCall(_Message, frozen=True, tag="hello"):
    """First message of a connection."""

    secret: str
    format_version: int


class AddTreeCall(_Message, frozen=True, tag="add_tree"):
    """See `SandboxHost.add_tree`; either a directory or files."""

    directory: bytes
    files: dict[bytes, WireFile]


class DropTreeCall(_Message, frozen=True, tag="drop_tree"):
    """See `SandboxHost.drop_tree`."""

    tree: str


class DescribeCall(_Message, frozen=True, tag="describe"):
    """See `SandboxHost.describe`."""


class StartCall(_Message, frozen=True, tag="start"):
    """See `SandboxHost.start`."""

    image: str | None
    tree: str | None
    limits: SandboxLimits
    work_directory: str
    mounts: dict[str, str]
    env: dict[bytes, bytes]


class ExecCall(_Message, frozen=True, tag="exec"):
    """See `Sandbox.exec`."""

    sandbox: str
    argv: list[bytes]
    stdin: bytes
    timeout_s: float
    max_output: int
    cwd: bytes | None
    env: dict[bytes, bytes]


class PutCall(_Message, frozen=True, tag="put"):
    """See `Sandbox.put`."""

    sandbox: str
    files: dict[bytes, WireFile]


class GetCall(_Message, frozen=True, tag="get"):
    """See `Sandbox.get`."""

    sandbox: str
    paths: list[bytes]
    max_bytes: int


class DiffCall(_Message, frozen=True, tag="diff"):
    """See `Sandbox.diff`."""

    sandbox: str
    base: str
    max_bytes: int


class ApplyCall(_Message, frozen=True, tag="apply"):
    """See `Sandbox.apply`."""

    sandbox: str
    patch: WirePatch


class SnapshotCall(_Message, frozen=True, tag="snapshot"):
    """See `Sandbox.snapshot`."""

    sandbox: str


class KillCall(_Message, frozen=True, tag="kill"):
    """See `Sandbox.kill`."""

    sandbox: str


class CancelCall(_Message, frozen=True, tag="cancel"):
    """Give up another call of this connection; it still gets an answer."""

    number: int


AnyCall = (
    HelloCall
    | AddTreeCall
    | DropTreeCall
    | DescribeCall
    | StartCall
    | ExecCall
    | PutCall
    | GetCall
    | DiffCall
    | ApplyCall
    | SnapshotCall
    | KillCall
    | CancelCall
)


class SandboxCall(msgspec.Struct, frozen=True, array_like=True):
    """One call; its number is given once on a connection."""

    number: int
    what: AnyCall


ErrorKind = Literal["", "error", "start", "lost", "limit", "evicted"]


class CallAnswer(msgspec.Struct, frozen=True, array_like=True):
    """Answer to a call: a value, or the kind and the message of an error."""

    number: int
    value: msgspec.Raw = msgspec.Raw(b"\xc0")
    kind: ErrorKind = ""
    message: str = ""


CALLS = msgspec.msgpack.Decoder(SandboxCall)
ANSWERS = msgspec.msgpack.Decoder(CallAnswer)
_ENCODER = msgspec.msgpack.Encoder()
CallValue = ExecResult | Patch | dict[str, bytes] | dict[str, str] | str | None
"""Results of calls."""
_ERRORS: dict[str, type[SandboxError]] = {
    "start": SandboxStartError,
    "lost": SandboxLostError,
    "limit": SandboxLimitError,
    "evicted": SandboxEvictedError,
    "error": SandboxError,
}


def encode(message: SandboxCall | CallAnswer) -> bytes:
    """Return the frame of a message.

    Raises
    ------
    SandboxError
        It is too large.
    """
    data = _ENCODER.encode(message)
    if len(data) > _MAX_BYTES:
        raise SandboxError(f"a message to a sandbox has {len(data)} bytes; the maximum is {_MAX_BYTES}")
    return _LENGTH.pack(len(data)) + data


async def read_message(reader: asyncio.StreamReader) -> bytes | None:
    """Return the next message; None at the end of the connection, or where the next bytes are not a frame."""
    try:
        (size,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        return await reader.readexactly(size) if size <= _MAX_BYTES else None
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


def kind_of(error: SandboxError) -> ErrorKind:
    """Return the kind of an error in an answer."""
    kinds: dict[type[SandboxError], ErrorKind] = {
        SandboxStartError: "start",
        SandboxLostError: "lost",
        SandboxLimitError: "limit",
        SandboxEvictedError: "evicted",
    }
    return kinds.get(type(error), "error")


def error_of(answer: CallAnswer) -> SandboxError:
    """Return the error of an answer that has one."""
    return _ERRORS[answer.kind](answer.message)


def files_to_wire(files: Mapping[str, bytes | SandboxFile]) -> dict[bytes, WireFile]:
    """Return files as they are sent."""
    return {os.fsencode(path): _to_wire(file) for path, file in files.items()}


def file_from_wire(file: WireFile) -> SandboxFile:
    """Return a file that was sent."""
    return SandboxFile(file[0], executable=file[1], link=file[2])


def patch_to_wire(patch: Patch) -> WirePatch:
    """Return a patch as it is sent."""

    def optional(file: SandboxFile | None) -> WireFile | None:
        return None if file is None else _to_wire(file)

    return [(os.fsencode(each.path), optional(each.before), optional(each.after)) for each in patch.entries]


def patch_from_wire(sent: Sequence[tuple[bytes, WireFile | None, WireFile | None]]) -> Patch:
    """Return a patch that was sent."""
    return Patch(
        tuple(
            PatchEntry(os.fsdecode(path), *(None if file is None else file_from_wire(file) for file in (before, after)))
            for path, before, after in sent
        )
    )


def _to_wire(file: bytes | SandboxFile) -> WireFile:
    return (file.content, file.executable, file.link) if isinstance(file, SandboxFile) else (file, False, False)


def value_of(found: CallValue) -> msgspec.Raw:
    """Return the value of an answer."""
    sent: object = found
    if isinstance(found, Patch):
        sent = patch_to_wire(found)
    elif isinstance(found, dict):
        # names of files may be no text
        sent = {os.fsencode(name): value for name, value in found.items()}
    return msgspec.Raw(_ENCODER.encode(sent))
