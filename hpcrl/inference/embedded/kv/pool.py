"""The pool of KV that all engines of a run share: objects in Mooncake Store, one for each block.

`hpcrl.store.join` has proved that this node can use the pool, and configures it. Mooncake does not verify the data
that it moves (0.3.10 truncated objects over TCP and reported success): blocks are sealed as those of a prefill engine
are. Their names are hashes that include the salt of the weights' version, so that blocks of another version are not
found; they leave the pool when it needs room. A pool that fails is not used for a while: engines compute what they do
not get. Failures are counted by kind (`PoolFailure`), and the first of each kind is logged.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeVar

from hpcrl.errors import HpcrlError
from hpcrl.inference.embedded.kv.sealing import BlockFormat
from hpcrl.inference.kv_failures import PoolFailure
from hpcrl.mooncake import load_client
from hpcrl.processes.daemon_threads import DaemonExecutor

_T = TypeVar("_T")
_log = logging.getLogger(__name__)
_FETCH_S = 3.0
_AGAIN_S = 5.0
"""Seconds in which a pool that failed is not used."""
_MOST_QUEUED_BYTES = 64 << 20
"""Maximum bytes of blocks that are on their way into the pool; more are dropped."""


_NO_ROOM, _TRANSFER_FAILED = -200, -800
"""Values of Mooncake's ``ErrorCode``: no segment has room for an object; its bytes did not reach, or leave, one."""


class _PoolError(Exception):
    def __init__(self, kind: PoolFailure, why: str) -> None:
        super().__init__(why)
        self.kind = kind


class KvPool:
    """One engine's share in the pool: it gives memory, puts what it computes, and gets what others have put."""

    def __init__(
        self, settings: Mapping[str, Any], host: str, form: BlockFormat, *, failed: Callable[[str], None]
    ) -> None:
        """Join.

        Parameters
        ----------
        settings:
            Result of `hpcrl.store.endpoints.engine_settings`.
        host:
            Address of this node.
        failed:
            Called with the kind of each failed call, from any thread, one at a time.

        Raises
        ------
        HpcrlError
            Mooncake is not installed or cannot be loaded, or the pool cannot be joined.
        """
        self._form, self._failed, self._store = form, failed, load_client().MooncakeDistributedStore()
        # all blocks of a call are in the local buffer together, and it cannot be filled to its last byte
        self._most_blocks = max(1, settings["local_buffer_size"] // 2 // form.sealed_bytes)
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
        self._getter, self._putter = (DaemonExecutor(1, thread_name_prefix=f"kv-pool-{i}") for i in ("get", "put"))
        self._lock, self._queued_bytes = threading.Lock(), 0
        self._gets_again_s = self._puts_again_s = 0.0
        self._told: set[PoolFailure] = set()

    @classmethod
    def of_environment(cls, form: BlockFormat, failed: Callable[[str], None]) -> KvPool | None:
        """Return the pool that `hpcrl.store.join` configured in the environment; None without one."""
        path = os.environ.get("MOONCAKE_CONFIG_PATH")
        if path is None:
            return None
        host = os.environ.get("VLLM_HOST_IP", "127.0.0.1")
        return cls(json.loads(Path(path).read_text()), host, form, failed=failed)

    def put_soon(self, blocks: Sequence[tuple[bytes, bytes]]) -> None:
        """Queue blocks, name and content of each, for a thread that puts them; drop them if it does not keep up."""
        size = sum(len(content) for _, content in blocks)
        with self._lock:
            if time.monotonic() < self._puts_again_s or self._queued_bytes + size > _MOST_QUEUED_BYTES:
                return
            self._queued_bytes += size
        self._putter.submit(self._put, blocks, size)

    def _put(self, blocks: Sequence[tuple[bytes, bytes]], size: int) -> None:
        try:
            for some in self._parts(blocks):
                names = [key.hex() for key, _ in some]
                code = self._store.put_batch(names, [self._form.seal(key, content) for key, content in some])
                if code != 0:
                    kinds = {_NO_ROOM: PoolFailure.FULL, _TRANSFER_FAILED: PoolFailure.SEGMENT}
                    self._note(kinds.get(code, PoolFailure.MASTER), f"{len(some)} blocks cannot be put: code {code}")
                    # if room was missing, later calls may succeed; but the rest of this sequence needs these blocks
                    if code != _NO_ROOM:
                        self._puts_again_s = time.monotonic() + _AGAIN_S
                    return
        finally:
            with self._lock:
                self._queued_bytes -= size

    async def fetch(self, keys: Sequence[bytes]) -> list[bytes] | None:
        """Return the first of these blocks that are in the pool; None if it failed or gave other bytes."""
        if time.monotonic() < self._gets_again_s:
            return []
        begun = threading.Event()
        try:
            call = asyncio.get_running_loop().run_in_executor(self._getter, self._get, keys, begun)
            async with asyncio.timeout(_FETCH_S):
                return await call
        except TimeoutError:
            kind = PoolFailure.TIMEOUT if begun.is_set() else PoolFailure.BEHIND
            self._note(kind, f"no answer within {_FETCH_S:g} s")
        except _PoolError as error:
            self._note(error.kind, str(error))
            if error.kind is PoolFailure.SEGMENT:
                return None  # only one engine's memory fails; others can still be read
        self._gets_again_s = self._puts_again_s = time.monotonic() + _AGAIN_S
        return None

    def _get(self, keys: Sequence[bytes], begun: threading.Event) -> list[bytes]:
        begun.set()
        there = self._are_there(keys)
        keys = keys[: next((i for i, found in enumerate(there) if not found), len(there))]
        blocks: list[bytes] = []
        for some in self._parts(keys):
            for key, sealed in zip_longest(some, self._store.get_batch([key.hex() for key in some])):
                if not sealed:
                    if not self._are_there([key])[0]:
                        return blocks  # the pool has dropped the block meanwhile, or its master a dead engine
                    raise _PoolError(PoolFailure.SEGMENT, "a block is listed, but its holder does not send it")
                try:
                    blocks += self._form.open([key], sealed)
                except ValueError as error:
                    raise _PoolError(PoolFailure.DAMAGED, str(error)) from error
        return blocks

    def _are_there(self, keys: Sequence[bytes]) -> list[bool]:
        codes = self._store.batch_is_exist([key.hex() for key in keys])
        if min(codes) < 0:
            raise _PoolError(PoolFailure.MASTER, f"its master answered with code {min(codes)}")
        return [code > 0 for code in codes]

    def _parts(self, all_of_them: Sequence[_T]) -> Iterator[Sequence[_T]]:
        """Yield the parts that go in one call each."""
        return (all_of_them[i : i + self._most_blocks] for i in range(0, len(all_of_them), self._most_blocks))

    def _note(self, kind: PoolFailure, why: str) -> None:
        with self._lock:
            self._failed(kind)
            first = kind not in self._told
            self._told.add(kind)
        if first:
            _log.warning("the KV pool failed (%s): %s; more of this kind are only counted", kind, why)

    def close(self) -> None:
        """Leave: what this engine gave to the pool is gone from it."""
        for threads in (self._putter, self._getter):
            threads.shutdown(cancel_futures=True)
        self._store.close()
