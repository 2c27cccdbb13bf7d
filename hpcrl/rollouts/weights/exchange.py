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

from hpcrl.errors import HandoffError
from hpcrl.rollouts.engines.client import EngineClient, EngineError
from hpcrl.weights import HandoffStore
from hpcrl.weights.session import SESSION

__all__ = ["begin", "bytes_of", "exchange", "only_reads", "wait_staged"]

_log = logging.getLogger(__name__)

_RESUME_AT_EXIT_S = 1.0
_STAGED_S = 0.1
_HEALTH_S = 5.0


def bytes_of(store: HandoffStore, version: int) -> int:
    """Return the bytes that loading a version may take; 0 where it cannot be opened (the engine will say why)."""
    try:
        manifest = store.open(version).manifest
        return sum(store.open(needed).manifest.total_bytes for needed in (*manifest.needs, version))
    except HandoffError:
        return 0


async def only_reads(client: EngineClient, error: EngineError) -> bool:
    """Return whether an engine that has not read a version in time is well, but for that.

    A call that all ranks of a wide replica answer together, and that none answers, is something else: they wait for
    each other in it.
    """
    if not error.timed_out or (error.unreachable and len(client.servers) > 1):
        return False
    return await client.healthy(timeout_s=_HEALTH_S)


async def begin(client: EngineClient, *, limit_s: float, session: list[int] | None = None) -> None:
    """Begin an update; a session that an earlier attempt has left is ended.

    An attempt that failed on some ranks of a wide replica has left its session on the others, and no rank has two. An
    engine of one server has one where whoever began it went away, or did not wait for its answer.

    Parameters
    ----------
    session:
        The owner of the session, see `hpcrl.weights.session`.

    Raises
    ------
    EngineError
        It failed, or did not answer.
    """
    wide = len(client.servers) > 1
    body = None if session is None else {SESSION: session}
    if not wide:
        try:
            await client.control("/start_weight_update", body, timeout_s=limit_s)
        except EngineError as error:
            if error.unreachable:
                raise
            _log.warning("%s: a weight update that was begun earlier ends: %s", client.name, error)
        else:
            return
    await client.control("/collective_rpc", {"method": "abandon_weight_update"}, timeout_s=limit_s)
    await client.control("/start_weight_update", body, timeout_s=limit_s)


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
        finish = {"weight_version": str(version), **({SESSION: info[SESSION]} if SESSION in info else {})}
        await client.control("/finish_weight_update", finish, timeout_s=limit_s)
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

    Where an engine of one server cannot say it, its update waits for the version with requests frozen. A wide replica
    is not frozen for a version that one of its ranks does not have, and none is for a share that hangs.

    Parameters
    ----------
    path:
        The version's directory.
    limit_s, call_s:
        Longest time for all of it, and for each call.

    Raises
    ------
    EngineError
        The engine went away; it has not read the version in time (``timed_out``); or, of a wide replica, a rank cannot
        read it, and says why.
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
    raise EngineError(f"{client.name}: not all ranks have read {path} within {limit_s:g} s", timed_out=True)


async def _check_staged(client: EngineClient, path: str, call_s: float) -> None:
    problems = await _ask_workers(client, "staged_problem", path, call_s)
    failed = [f"rank {rank}: {problem}" for rank, problem in enumerate(problems) if problem]
    if failed:
        others = f" (and {len(failed) - 1} other ranks)" if len(failed) > 1 else ""
        raise EngineError(f"{client.name}: {path} cannot be loaded: {failed[0]}{others}")


async def _ask_workers(client: EngineClient, method: str, path: str, call_s: float) -> list[str]:
    answer = await client.control("/collective_rpc", {"method": method, "args": [path]}, timeout_s=call_s)
    return [str(result) for result in answer.get("results", ())]
