"""KV of prompts from the prefill engine that computed them, over its own HTTP server.

A decode engine requests blocks by their hashes, which include salt and tokens. Blocks that it does not get, for
whatever reason, it computes itself; that is counted, and logged if something went wrong.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import aiohttp

from hpcrl.inference.embedded.kv.sealing import BlockFormat

BLOCKS_PATH = "/hpcrl/kv_blocks"
_FETCH_S = 10.0
"""Timeout in seconds for the KV of a prompt; computing it takes seconds at most with this engine's small models."""
_log = logging.getLogger(__name__)


async def fetch_from_prefill(
    session: aiohttp.ClientSession, address: tuple[str, int], keys: Sequence[bytes], form: BlockFormat
) -> list[bytes] | None:
    """Return the first of these blocks that another engine has.

    Parameters
    ----------
    session:
        Session with the token of the run.
    address:
        Host and port of the engine.

    Returns
    -------
    list of bytes or None
        None if it did not answer in time, refused, or sent anything but these blocks.
    """
    host, port = address
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}{BLOCKS_PATH}"
    try:
        timeout = aiohttp.ClientTimeout(total=_FETCH_S)
        async with session.post(url, data=b"".join(keys), timeout=timeout, allow_redirects=False) as answer:
            answer.raise_for_status()
            data, most = bytearray(), len(keys) * form.sealed_bytes
            async for piece in answer.content.iter_any():
                data += piece
                if len(data) > most:
                    raise ValueError(f"more than the {most} bytes of {len(keys)} blocks came")
            return form.open(keys, bytes(data))
    except (aiohttp.ClientError, OSError, ValueError) as error:
        _log.warning(
            "a prompt is computed here, because its KV could not be fetched from %s: %s", url, error or type(error)
        )
        return None
