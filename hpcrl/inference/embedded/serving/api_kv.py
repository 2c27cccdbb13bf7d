"""KV blocks for other engines: those of this one that are cached, by their hashes."""

from __future__ import annotations

import asyncio

from aiohttp import web

from hpcrl.inference.embedded.engine.engine import Engine
from hpcrl.inference.embedded.kv.prefill import BLOCKS_PATH
from hpcrl.inference.embedded.kv.sealing import KEY_BYTES
from hpcrl.inference.embedded.serving.errors import bad_request


class KvApi:
    """The handler of prefill engines for decode engines; the server's gate authenticates them.

    What is asked wrongly is an `ApiError`, which `hpcrl.inference.embedded.serving.errors` answers.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def routes(self) -> list[web.RouteDef]:
        return [web.post(BLOCKS_PATH, self.blocks)]

    async def blocks(self, http: web.Request) -> web.Response:
        """Return the cached blocks, up to the first missing one, of the hashes in the body; both are binary."""
        data = await http.read()
        if not data or len(data) % KEY_BYTES:
            raise bad_request(f"the body must be hashes of {KEY_BYTES} bytes each, not {len(data)} bytes")
        keys = [data[i : i + KEY_BYTES] for i in range(0, len(data), KEY_BYTES)]
        cached = self._engine.cached
        blocks = await asyncio.wrap_future(self._engine.call(lambda: cached.read(keys)))
        sealed = b"".join(cached.format.seal(key, block) for key, block in zip(keys, blocks, strict=False))
        return web.Response(body=sealed, content_type="application/octet-stream")
