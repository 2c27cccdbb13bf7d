"""The part of a weight update that an engine's requests feel: wait until a version is read, freeze, exchange, go on.

The ranks of a wide replica (`hpcrl.rollouts.engines.replica_client`) compute each step together. So nothing of it is
frozen before all ranks have read and verified the version, no weights change before all ranks stand, and no rank goes
on before all have the version. Where one of them could not take it, the replica stays frozen: a rank with the new
weights would compute with the experts of one that has the old. The next attempt loads it everywhere, or the replica is
started again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

from hpcrl.rollouts.engines.client import EngineClient, EngineError

__all__ = ["begin", "exchange", "wait_staged"]

_log = logging.getLogger(__name__)

_RESUME_AT_EXIT_S = 1.0
_STAGED_S = 0.1


async def begin(client: EngineClient, *, limit_s: float) -> None:
    """Begin an update.

    An attempt that failed on some ranks of a wide replica has left its session on the others, and no rank has two.

    Raises
    ------
    EngineError
        It failed, or did not answer.
    """
    if len(client.servers) > 1:
        await client.control("/collective_rpc", {"method": "abandon_weight_update"}, timeout_s=limit_s)
    await client.control("/start_weight_update", timeout_s=limit_s)


async def exchange(
    client: EngineClient, info: dict[str, Any], version: int, *, pause: bool, in_place: bool, limit_s: float
) -> None:
    """Exchange the weights of an engine, with its requests frozen where ``pause``.

    Parameters
    ----------
    info:
        Of ``/update_weights``.
    version:
        What it serves afterwards.
    in_place:
        Whether weights are loaded now, and not only exchanged.
    limit_s:
        Longest time for each call.

    Raises
    ------
    EngineError
        It failed, or did not answer. An engine of one server goes on with what it has.
    """
    wide = len(client.servers) > 1
    freezing: asyncio.Task[Any] | None = None
    began = done = leaving = False
    try:
        if pause:
            freezing = await client.freeze(timeout_s=limit_s)
        began = True
        if in_place:
            await client.control("/update_weights", {"update_info": info}, timeout_s=limit_s)
        await client.control("/finish_weight_update", {"weight_version": str(version)}, timeout_s=limit_s)
        done = True
    except asyncio.CancelledError:
        leaving = True
        raise
    finally:
        if freezing is not None:
            freezing.cancel()
        if pause and wide and began and not done:
            _log.warning("%s stays frozen: not all of its ranks have version %d", client.name, version)
        elif pause:
            # whatever happened: an engine that stays paused answers nobody and looks healthy
            await _resume(client, limit_s=_RESUME_AT_EXIT_S if leaving else limit_s, quietly=wide and not done)


async def _resume(client: EngineClient, *, limit_s: float, quietly: bool) -> None:
    """Let requests go on. ``quietly``: an error has been raised already. Ranks refuse to go on while some of them have
    not stopped yet, and then stop later; the next attempt finds them so."""
    try:
        await client.control("/resume", timeout_s=limit_s)
    except EngineError as error:
        if not quietly:
            raise
        _log.warning("%s: after a pause that failed: %s", client.name, error)


async def wait_staged(client: EngineClient, path: str, *, limit_s: float, call_s: float) -> None:
    """Wait until all ranks of an engine have a version in memory, or cannot; the update says which.

    Where that is not known in time the update of one server waits for it, with requests frozen. A wide replica is not
    frozen for a version that one of its ranks does not have.

    Parameters
    ----------
    path:
        The version's directory.
    limit_s, call_s:
        Longest time for all of it, and for each call.

    Raises
    ------
    EngineError
        The engine went away; or, of a wide replica, a rank has not read it, and says why.
    """
    wide = len(client.servers) > 1
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        try:
            results = await _ask_workers(client, "staged_handoff", path, call_s)
        except EngineError as error:
            if error.unreachable or wide:
                raise
            _log.warning("%s does not say whether it has read %s: %s", client.name, path, error)
            return
        if all(result == "True" for result in results):
            if wide:
                await _check_staged(client, path, call_s)
            return
        await asyncio.sleep(_STAGED_S)
    if wide:
        raise EngineError(f"{client.name}: not all ranks have read {path} within {limit_s:g} s")


async def _check_staged(client: EngineClient, path: str, call_s: float) -> None:
    problems = await _ask_workers(client, "staged_problem", path, call_s)
    failed = [f"rank {rank}: {problem}" for rank, problem in enumerate(problems) if problem]
    if failed:
        others = f" (and {len(failed) - 1} other ranks)" if len(failed) > 1 else ""
        raise EngineError(f"{client.name}: {path} cannot be loaded: {failed[0]}{others}")


async def _ask_workers(client: EngineClient, method: str, path: str, call_s: float) -> list[str]:
    answer = await client.control("/collective_rpc", {"method": method, "args": [path]}, timeout_s=call_s)
    return [str(result) for result in answer.get("results", ())]
