"""Republishes KV events of an engine with the salt of each block in the field that Dynamo reads.

vLLM 0.32 says the ``cache_salt`` of a block in the ``extra_keys`` of the first block of its chain alone; Dynamo 1.6
reads a field ``cache_salt`` of each event, and takes blocks without it for blocks without salt. Salts are our policy
versions: a prefix that an older version computed would count as cached. So events pass through here on their way.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import msgspec

from hpcrl.storage.msgspec_types import decode_msgpack

_log = logging.getLogger(__name__)


class Salts:
    """Salt of each cached block of an engine, from its events."""

    def __init__(self) -> None:
        self._salts: dict[Any, str] = {}

    def __len__(self) -> int:
        return len(self._salts)

    def name(self, event: Any) -> Any:
        """Return an event of vLLM with the salt of its blocks; an unknown event is returned unchanged."""
        kind = event.get("type") if isinstance(event, dict) else None
        if kind == "BlockStored":
            parent = event.get("parent_block_hash")
            salt = self._salts.get(parent) if parent is not None else _own_salt(event.get("extra_keys"))
            if salt is not None:
                self._salts.update(dict.fromkeys(event["block_hashes"], salt))
                return {**event, "cache_salt": salt}
        elif kind == "BlockRemoved":
            for block in event["block_hashes"]:
                self._salts.pop(block, None)
        elif kind == "AllBlocksCleared":
            self._salts.clear()
        return event


def _own_salt(extra_keys: Any) -> str | None:
    """Read the salt from the keys of a first block: an adapter's name, pairs of other inputs, the salt, digests."""
    first = extra_keys[0] if extra_keys else None
    return next((key for key in reversed(first or ()) if isinstance(key, str)), None)


class SaltedEvents:
    """Receives the events of an engine and publishes them again. Belongs to one event loop.

    Attributes
    ----------
    endpoint:
        Address at which Dynamo subscribes to them.
    """

    def __init__(self, source: str) -> None:
        """Begin; the engine need not be there yet.

        Parameters
        ----------
        source:
            Address at which the engine publishes, ``tcp://host:port``.
        """
        # engines' environments have it, the control plane has not
        import zmq  # noqa: PLC0415
        import zmq.asyncio  # noqa: PLC0415

        self._source = source
        # a context has threads of its own: one for all engines
        context = zmq.asyncio.Context.instance()
        self._in, self._out = context.socket(zmq.SUB), context.socket(zmq.PUB)
        self._in.subscribe(b"")
        self._in.connect(source)
        port = self._out.bind_to_random_port("tcp://127.0.0.1")
        self.endpoint = f"tcp://127.0.0.1:{port}"
        self._salts = Salts()
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        while True:
            topic, number, payload = await self._in.recv_multipart()
            await self._out.send_multipart([topic, number, self._named(payload)])

    def _named(self, payload: bytes) -> bytes:
        try:
            time_s, events, *rest = decode_msgpack(payload)
            return msgspec.msgpack.encode([time_s, [self._salts.name(event) for event in events], *rest])
        except (msgspec.DecodeError, ValueError, TypeError, KeyError) as error:
            _log.warning("KV events of %s cannot be read: %s", self._source, error)
            return payload

    async def close(self) -> None:
        """Stop listening."""
        self._task.cancel()
        await asyncio.wait([self._task])
        self._in.close(linger=0)
        self._out.close(linger=0)
