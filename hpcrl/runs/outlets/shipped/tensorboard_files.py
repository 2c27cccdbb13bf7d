"""Read TensorBoard's event files.

A file has records of TensorFlow's format (https://www.tensorflow.org/tutorials/load_data/tfrecord): the length of the
data, a checksum of it, the data, another checksum. The data are an ``Event`` of TensorBoard's protocol buffers.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hpcrl.runs.outlets.curves import curve_name
from hpcrl.runs.outlets.interface import Stored
from hpcrl.runs.outlets.shipped.library import import_library

_HEAD = struct.Struct("<QI")
_CHECKSUM_BYTES = 4
_STEP, _VERSION = curve_name("tokens"), curve_name("heldout_count")
"""Curves that each step has, and each held-out evaluation."""


def shown_by_tensorboard(directory: Path, messages: Any) -> Stored:
    """Return the last step and the last evaluated version that TensorBoard shows of the files of a directory.

    As in TensorBoard, a start of a session drops later steps of the files before it.

    Parameters
    ----------
    messages:
        The module ``tensorboardX.proto.event_pb2``.
    """
    steps, versions = {0}, {-1}
    for path in sorted(directory.glob("*.tfevents.*")):
        for event in _events(path.read_bytes(), messages):
            if event.session_log.status == messages.SessionLog.START:
                steps = {step for step in steps if step < event.step} | {0}
                versions = {version for version in versions if version < event.step}
            tags = {value.tag for value in event.summary.value}
            if _STEP in tags:
                steps.add(event.step)
            if _VERSION in tags:
                versions.add(event.step)
    return Stored(max(steps), max(versions))


def _events(data: bytes, messages: Any) -> Iterator[Any]:
    """Go through the events of a file, up to a record that is cut or damaged."""
    damaged = import_library("google.protobuf.message", "tensorboardX").DecodeError
    position = 0
    while position + _HEAD.size <= len(data):
        length, _ = _HEAD.unpack_from(data, position)
        start = position + _HEAD.size
        position = start + length + _CHECKSUM_BYTES
        if not length or position > len(data):
            return
        try:
            event = messages.Event.FromString(data[start : start + length])
        except damaged:
            return
        yield event
