"""The pool of KV that all engines of a run share: objects in Mooncake Store, one for each block.

`hpcrl.store.join` has proved that this node can use the pool, and says where it is. Mooncake compares nothing of what
it moves (0.3.10 cut objects over TCP and said that all was well): blocks are sealed as those of a prefill engine are.
Their names are hashes in which is the salt of the weights' version, so nobody finds blocks of another version; they
leave the pool when it needs room. A pool that fails is left alone for a while: engines compute what they do not get.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hpcrl.errors import HpcrlError
from hpcrl.inference.embedded.kv.sealing import BlockFormat
from hpcrl.mooncake import load_client

__all__ = ["KvPool"]

_log = logging.getLogger(__name__)
_FETCH_S = 3.0
_AGAIN_S = 5.0
"""A pool that failed is left alone for so long."""
_MOST_QUEUED_BYTES = 64 << 20
"""Of blocks that are on their way into the pool; more are dropped."""


class KvPool:
    """One engine's share in the pool: it gives memory, puts what it computes, and gets what others have put."""

    def __init__(self, settings: Mapping[str, Any], host: str, form: BlockFormat) -> None:
        """Join.

        Parameters
        ----------
        settings:
            As `hpcrl.store.endpoints.engine_settings` makes them.
        host:
            Address of this node.

        Raises
        ------
        HpcrlError
            Mooncake is not installed or cannot be loaded, or the pool cannot be joined.
        """
        self._form, self._store = form, load_client().MooncakeDistributedStore()
        code = self._store.setup(
            host,
            settings["metadata_server"],
            settings["global_segment_size"],
            settings["local_buffer_size"],
            settings["protocol"],
            settings["device_name"],
            settings["master_server_address"],
            tenant_id=settings["tenant_id"],
        )
        if code != 0:
            raise HpcrlError(f"{host} cannot join the KV pool at {settings['master_server_address']}: code {code}")
        # calls block, and cannot be interrupted
        self._getter, self._putter = (ThreadPoolExecutor(1, thread_name_prefix=f"kv-pool-{i}") for i in ("get", "put"))
        self._lock, self._queued_bytes, self._again_s = threading.Lock(), 0, 0.0

    @classmethod
    def of_environment(cls, form: BlockFormat) -> KvPool | None:
        """The pool that `hpcrl.store.join` has left word of; None without one."""
        path = os.environ.get("MOONCAKE_CONFIG_PATH")
        return (
            None
            if path is None
            else cls(json.loads(Path(path).read_text()), os.environ.get("VLLM_HOST_IP", "127.0.0.1"), form)
        )

    def put_soon(self, blocks: Sequence[tuple[bytes, bytes]]) -> None:
        """Have blocks put, name and content of each, by a thread; they are dropped where it does not keep up."""
        size = sum(len(content) for _, content in blocks)
        with self._lock:
            if time.monotonic() < self._again_s or self._queued_bytes + size > _MOST_QUEUED_BYTES:
                return
            self._queued_bytes += size
        self._putter.submit(self._put, blocks, size)

    def _put(self, blocks: Sequence[tuple[bytes, bytes]], size: int) -> None:
        try:
            names = [key.hex() for key, _ in blocks]
            code = self._store.put_batch(names, [self._form.seal(key, content) for key, content in blocks])
            if code != 0:
                self._leave_alone(f"{len(blocks)} blocks cannot be put: code {code}")
        finally:
            with self._lock:
                self._queued_bytes -= size

    async def fetch(self, keys: Sequence[bytes]) -> list[bytes] | None:
        """The first of these blocks, as many as are in the pool; None where it failed, or gave something else."""
        if time.monotonic() < self._again_s:
            return []
        try:
            call = asyncio.get_running_loop().run_in_executor(self._getter, self._get, keys)
            return await asyncio.wait_for(call, _FETCH_S)
        except (OSError, ValueError) as error:
            self._leave_alone(str(error) or f"no answer within {_FETCH_S:g} s")
            return None

    def _get(self, keys: Sequence[bytes]) -> list[bytes]:
        names = [key.hex() for key in keys]
        there = self._store.batch_is_exist(names)
        if min(there) < 0:
            raise OSError(f"the master answered with code {min(there)}")
        count = next((i for i, found in enumerate(there) if not found), len(names))
        if not count:
            return []
        blocks: list[bytes] = []
        for key, sealed in zip(keys, self._store.get_batch(names[:count]), strict=False):
            if not sealed:
                break  # it made room meanwhile
            blocks += self._form.open([key], sealed)
        return blocks

    def _leave_alone(self, why: str) -> None:
        _log.warning("the KV pool is not used for %g s: %s", _AGAIN_S, why)
        self._again_s = time.monotonic() + _AGAIN_S

    def close(self) -> None:
        """Leave: what this engine gave to the pool is gone from it."""
        for threads in (self._putter, self._getter):
            threads.shutdown(cancel_futures=True)
        self._store.close()
