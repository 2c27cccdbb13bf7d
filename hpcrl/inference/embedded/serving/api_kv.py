"""KV blocks for other engines: those of this one that are cached, by their hashes."""

from __future__ import annotations

import asyncio

from aiohttp import web

from hpcrl.inference.embedded.engine.engine import Engine
from hpcrl.inference.embedded.kv.prefill import BLOCKS_PATH
from hpcrl.inference.embedded.kv.sealing import KEY_BYTES
from hpcrl.inference.embedded.serving.errors import bad_request

__all__ = ["KvApi"]


class KvApi:
    """The handler that prefill engines have for decode engines; who may ask is said by the door of the server.

    What is asked wrongly is an `ApiError`, which `hpcrl.inference.embedded.serving.errors` answers.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def routes(self) -> list[web.RouteDef]:
        return [web.post(BLOCKS_PATH, self.blocks)]

    async def blocks(self, http: web.Request) -> web.Response:
        """Hashes of consecutive blocks in, as many of the first of these blocks as are cached out, all of it binary."""
        data = await http.read()
        if not data or len(data) % KEY_BYTES:
            raise bad_request(f"the body must be hashes of {KEY_BYTES} bytes each, not {len(data)} bytes")
        keys = [data[i : i + KEY_BYTES] for i in range(0, len(data), KEY_BYTES)]
        cached = self._engine.cached
        blocks = await asyncio.wrap_future(self._engine.call(lambda: cached.read(keys)))
        sealed = b"".join(cached.format.seal(key, block) for key, block in zip(keys, blocks, strict=False))
        return web.Response(body=sealed, content_type="application/octet-stream")
