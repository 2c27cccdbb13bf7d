"""Text that was pickled, packed by zlib and written in base64, as LiveCodeBench has its private tests.

Nothing is unpickled: a pickle is a program, and that of a file of others may call anything. The pickle of a text has at
most five steps, none of which calls something, so these are read and every other pickle is refused.
"""

from __future__ import annotations

import base64
import binascii
import pickletools
import re
import zlib
from typing import Final

_MAX_BYTES: Final = 256 << 20
"""Maximum bytes of the unpacked text: a few kilobytes can be packed gigabytes."""
_HEADS: Final = ("eJ", "eN", "eA", "eF")
"""First two letters of zlib's header in base64, by its levels of compression."""
_BASE64: Final = re.compile(r"[A-Za-z0-9+/\r\n]+={0,2}\s*")
_TEXTS: Final = ("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "UNICODE")
_AROUND: Final = ("PROTO", "FRAME", "MEMOIZE", "BINPUT", "LONG_BINPUT", "PUT")
"""Steps that add nothing to a text: the version, the length, and that the text may be used again."""
_MAX_STEPS: Final = 5


class UnpackError(ValueError):
    """Raised where packed text cannot be read; the message is the end of a sentence."""


def is_packed(text: str) -> bool:
    """Return whether a text is something packed by zlib, in base64."""
    return text.startswith(_HEADS) and _BASE64.fullmatch(text) is not None


def unpacked_text(text: str) -> str:
    """Return the text that was pickled and packed.

    Raises
    ------
    UnpackError
        It is damaged or too large, or holds anything but a text.
    """
    try:
        unpacker = zlib.decompressobj()
        data = unpacker.decompress(base64.b64decode(text), _MAX_BYTES)
    except (binascii.Error, zlib.error) as error:
        raise UnpackError(f"cannot be unpacked: {error}") from None
    if unpacker.unconsumed_tail:
        raise UnpackError(f"has more than {_MAX_BYTES >> 20} MiB when it is unpacked")
    if not unpacker.eof or unpacker.unused_data:
        raise UnpackError("cannot be unpacked: it is cut off, or has something behind its end")
    return _pickled_text(data)


def _pickled_text(data: bytes) -> str:
    """Return the text whose pickle this is (`UnpackError` for any other pickle)."""
    found: str | None = None
    try:
        for count, (step, value, place) in enumerate(pickletools.genops(data), 1):
            if step.name in _TEXTS and found is None:
                found = value
            elif step.name == "STOP" and found is not None and place == len(data) - 1:
                return found
            elif step.name not in _AROUND or count >= _MAX_STEPS:
                raise UnpackError(f"is a pickle of something else than text ({step.name}), which is never loaded")
    except UnpackError:
        raise
    except Exception as error:  # noqa: BLE001 - damaged pickles raise errors of many kinds
        raise UnpackError(f"is not a pickle: {error}") from None
    raise UnpackError("is not a pickle: it has no end")
