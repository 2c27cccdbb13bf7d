"""Ask engines to prove that they run the weights of the version that they report.

An engine is asked after each update, which includes each start, and at intervals. It answers for all processes that
hold its weights (`hpcrl.weights.proof`). Weights that could not be compared are neither proved nor wrong.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection
from typing import NamedTuple

import msgspec

from hpcrl.rollouts.engines.client import EngineClient, EngineError, EngineProtocolError
from hpcrl.rollouts.engines.engine import Engine
from hpcrl.runs.events import EventWriter
from hpcrl.weights import HandoffStore
from hpcrl.weights.proof import PROVE_WEIGHTS, WeightsProof

_log = logging.getLogger(__name__)

_FIRST_LOOK_S = 0.05
_LONGEST_LOOK_S = 1.0
_NAMED = 3
PROVE_AGAIN_S = 60.0
"""Seconds between two proofs of an engine that is not updated meanwhile."""


class WrongWeightsError(Exception):
    """Raised where an engine computes with other weights than those of the version that it reports."""


OnWrong = Callable[[Engine, int, WrongWeightsError], Awaitable[None]]


class _Finding(NamedTuple):
    """Statements of all processes of an engine. ``why`` is the reason why it is not proved; empty where it is."""

    wrong: list[str]
    compared: int
    why: str


class ProofCheck:
    """Compares engines with the store."""

    def __init__(self, store: HandoffStore, events: EventWriter, *, call_s: float, limit_s: float) -> None:
        """Remember the store.

        Parameters
        ----------
        call_s, limit_s:
            Timeouts of a call, and of a whole proof. A proof that takes longer shows nothing.
        """
        self._store, self._events = store, events
        self._call_s, self._limit_s = call_s, limit_s
        self._number = 0
        self._unproved: dict[str, tuple[int, str]] = {}

    async def watch(self, engines: list[Engine], loading: Collection[Engine], on_wrong: OnWrong) -> None:
        """Ask engines for proofs at intervals while no version is being loaded; never return.

        Parameters
        ----------
        engines:
            Engines of the pool; the list changes as they join and leave.
        loading:
            Engines that are loading a version now.
        on_wrong:
            Called with an engine that runs other weights, and its incarnation.
        """
        while True:
            await asyncio.sleep(PROVE_AGAIN_S)
            for engine in list(engines):
                version, incarnation = engine.version, engine.incarnation
                if not engine.serving or engine in loading:
                    continue
                try:
                    await engine.call(self.check(engine, version, -1))
                except EngineError as error:
                    _log.info("%s was not asked for a proof: %s", engine.name, error)
                except WrongWeightsError as error:
                    # an update that began meanwhile may have changed the compared weights, and has its own proof
                    if engine.version == version and engine not in loading:
                        await on_wrong(engine, incarnation, error)

    async def check(self, engine: Engine, version: int, before: int) -> bool:
        """Return whether ``engine`` has proved that it runs ``version``; False where nothing shows that it does or not.

        Parameters
        ----------
        before:
            Version that it ran before; -1 where that is unknown.

        Raises
        ------
        WrongWeightsError
            It runs something else.
        EngineError
            It went away.
        """
        self._number += 1
        try:
            async with asyncio.timeout(self._limit_s):
                other = await asyncio.to_thread(self._other, version) if before < 0 else before
        except TimeoutError:
            other = None
        paths = [str(self._store.path_of(version)), "" if other is None else str(self._store.path_of(other))]
        found = await self._ask(engine.client, [*paths, str(self._number)])
        if found.wrong:
            self._events.emit("engine.wrong_weights", engine=engine.name, version=version, tensors=found.wrong[:_NAMED])
            raise WrongWeightsError(
                f"computes with other weights than those of version {version}, which it reports to serve: "
                f"{len(found.wrong)} of {found.compared} tensors that were compared differ, {found.wrong[0]} first"
            )
        if found.why:
            self._say_unproved(engine, version, found.why)
        return not found.why

    def _other(self, version: int) -> int | None:
        """Return the version before, for engines whose previous version is unknown; None where there is none."""
        try:
            return max((other for other in self._store.versions() if other < version), default=None)
        except OSError:
            return None

    def _say_unproved(self, engine: Engine, version: int, why: str) -> None:
        """Report this once for each process of an engine and each reason."""
        said = engine.incarnation, why.replace(self._store.path_of(version).name, "")
        if self._unproved.get(engine.name) != said:
            self._unproved[engine.name] = said
            _log.warning("%s has not proved that it runs version %d: %s", engine.name, version, why)
            self._events.emit("engine.weights_unproved", engine=engine.name, version=version, why=why)

    async def _ask(self, client: EngineClient, args: list[str]) -> _Finding:
        deadline, pause_s = time.monotonic() + self._limit_s, _FIRST_LOOK_S
        while True:
            try:
                call = {"method": PROVE_WEIGHTS, "args": args}
                answer = await client.control("/collective_rpc", call, timeout_s=self._call_s)
                proofs = msgspec.convert(answer.get("results"), list[WeightsProof])
            except EngineError as error:
                if error.unreachable and not error.timed_out:
                    raise
                return _Finding([], 0, f"it does not answer: {error}")
            except (msgspec.ValidationError, EngineProtocolError) as error:
                return _Finding([], 0, f"its answer cannot be read: {error}")
            if any(proof.wrong for proof in proofs) or all(proof.state != "reading" for proof in proofs):
                return _finding(proofs)
            if time.monotonic() > deadline:
                return _Finding([], 0, f"the published tensors were not read within {self._limit_s:g} s")
            await asyncio.sleep(pause_s)
            pause_s = min(_LONGEST_LOOK_S, 2 * pause_s)


def _finding(proofs: list[WeightsProof]) -> _Finding:
    """Join the statements of processes: each may hold a part of the model, and each must prove something."""
    wrong = sorted({name for proof in proofs for name in proof.wrong})
    compared = len({name for proof in proofs for name in proof.compared})
    unknown = [proof.why for proof in proofs if proof.state == "unknown"]
    if wrong:
        return _Finding(wrong, compared, "")
    if not proofs or unknown:
        return _Finding([], compared, unknown[0] if unknown else "its answer names no process")
    if not all(proof.decisive for proof in proofs):
        return _Finding([], compared, "the tensors that it could compare are the same in the version before")
    return _Finding([], compared, "")
