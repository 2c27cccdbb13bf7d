"""Part of a weight update that affects an engine's requests: wait until a version is read, freeze, exchange, resume.

The ranks of a wide replica (`hpcrl.rollouts.engines.replica_client`) compute each step together. So no rank is frozen
before all ranks have read and verified the version, no weights change before all ranks are frozen, and no rank resumes
before all have the version. Where one of them could not load it, the replica stays frozen: otherwise a rank with new
weights would compute with the experts of a rank that has old ones. The next attempt loads the version everywhere, or
the replica is restarted.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import Any

from hpcrl.errors import HandoffError
from hpcrl.rollouts.engines.client import HEALTH_S, EngineClient, EngineError
from hpcrl.weights import Handoff, HandoffStore
from hpcrl.weights.format.manifest import OpenedVersion
from hpcrl.weights.read.announced import open_version
from hpcrl.weights.session import SESSION

_log = logging.getLogger(__name__)

_RESUME_AT_EXIT_S = 1.0
_STAGED_S = 0.1


def look_at(store: HandoffStore, version: int) -> tuple[int, bool]:
    """Return how many bytes loading a version may read, and whether it is not only announced.

    Where it cannot be opened there are 0 bytes, and the engine reports why.
    """
    size = 0
    opened: OpenedVersion | None = None
    with contextlib.suppress(HandoffError):
        opened = open_version(store, version)
        needed = [store.open(number).manifest.total_bytes for number in opened.manifest.needs]
        size = opened.manifest.total_bytes + sum(needed)
    return size, isinstance(opened, Handoff) or (opened is None and version in store.versions())


async def only_reads(client: EngineClient, error: EngineError) -> bool:
    """Return whether an engine that has not read a version in time is healthy otherwise.

    A call that all ranks of a wide replica answer together, and that none answers, does not count: the ranks wait for
    each other in it.
    """
    if not error.timed_out or (error.unreachable and len(client.servers) > 1):
        return False
    return await client.healthy(timeout_s=HEALTH_S)


async def begin(client: EngineClient, *, limit_s: float, session: list[int] | None = None) -> None:
    """Begin an update; a session that an earlier attempt has left is ended.

    An attempt that failed on some ranks of a wide replica has left its session on the others, and a rank can have only
    one. An engine of one server has a session where the process that began it died, or did not wait for the answer.

    Parameters
    ----------
    session:
        The owner of the session, see `hpcrl.weights.session`.

    Raises
    ------
    EngineError
        The engine failed, or did not answer.
    """
    wide = len(client.servers) > 1
    body = None if session is None else {SESSION: session}
    # usually no session is left over, so one engine is asked to start first; ranks of a wide replica would start on
    # some ranks and fail on others, so there a left-over session is abandoned first
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
        Body of ``/update_weights``.
    version:
        Version that it serves afterwards.
    in_place:
        Whether weights are loaded now, and not only exchanged.
    limit_s:
        Timeout in seconds of each call.

    Raises
    ------
    EngineError
        The engine failed, or did not answer. An engine of one server keeps its weights.
    """
    wide = len(client.servers) > 1
    freezing: asyncio.Task[Any] | None = None
    began = done = leaving = False
    try:
        if pause:
            # a task where the engine is paused and has not answered the call yet
            freezing = await client.freeze(timeout_s=limit_s)
        # from here on some ranks may have the new weights, also where the call fails
        began = True
        if in_place:
            await client.control("/update_weights", {"update_info": info}, timeout_s=limit_s)
        # the session is sent again, so that the engine refuses a late finish of an older orchestrator
        finish = {"weight_version": str(version), **({SESSION: info[SESSION]} if SESSION in info else {})}
        await client.control("/finish_weight_update", finish, timeout_s=limit_s)
        done = True
    except asyncio.CancelledError:
        # the process ends: the engine gets only a short time to resume
        leaving = True
        raise
    finally:
        if freezing is not None:
            freezing.cancel()
        if pause and wide and began and not done:
            # a rank with new weights would compute with the experts of one that has old weights
            _log.warning("%s stays frozen: not all of its ranks have version %d", client.name, version)
        elif pause:
            # in any case: a paused engine answers no request, and still reports to be healthy
            await _resume(client, limit_s=_RESUME_AT_EXIT_S if leaving else limit_s, quietly=wide and not done)


async def _resume(client: EngineClient, *, limit_s: float, quietly: bool) -> None:
    """Resume requests; with ``quietly``, log an error instead of raising it, because another one is raised already.

    Ranks refuse to resume while some of them have not paused yet. These pause later, and the next attempt finds them
    paused.
    """
    try:
        await client.control("/resume", timeout_s=limit_s)
    except EngineError as error:
        if not quietly:
            raise
        _log.warning("%s: after a pause that failed: %s", client.name, error)


async def wait_staged(
    client: EngineClient, path: str, *, limit_s: float, call_s: float, must_be_whole: bool = False
) -> None:
    """Wait until all ranks of an engine have a version in memory, or cannot; the update reports which.

    The update of an engine of one server without this call waits for the version with requests frozen. A wide replica
    is not frozen for a version that one of its ranks does not have, and no engine is while the shared filesystem hangs.

    Parameters
    ----------
    path:
        The version's directory.
    limit_s, call_s:
        Timeouts in seconds of the whole wait, and of each call.
    must_be_whole:
        Also an engine of one server that cannot read the version is an error, before its requests are frozen.

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
            # an engine without this call: its update waits for the version itself
            _log.warning("%s does not say whether it has read %s: %s", client.name, path, error)
            return
        if all(result == "True" for result in results):
            if wide or must_be_whole:
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
