"""Compares engines with what the trainer says of an adapter, until each process has shown that it computes with it."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from typing import Any

import msgspec

from hpcrl.errors import HandoffError
from hpcrl.rollouts.engines.client import EngineClient
from hpcrl.rollouts.engines.engine import Engine
from hpcrl.runs.events import EventWriter
from hpcrl.weights import HandoffStore
from hpcrl.weights.format.canary import Canary, judge_canary
from hpcrl.weights.read.adapters import CANARY
from hpcrl.weights.read.announced import open_version, read_companion

_log = logging.getLogger(__name__)

_TRIES = 8
"""Number of incomparable versions, which change too little, after which this is reported once for an engine."""


class CanaryCheck:
    """Asks engines for log-probabilities of the prompt that versions carry; nothing, where they carry none."""

    def __init__(self, store: HandoffStore, events: EventWriter, *, call_s: float) -> None:
        """Remember the store; an engine has ``call_s`` seconds for an answer."""
        self._store, self._events, self._call_s = store, events, call_s
        self._plain: dict[EngineClient, tuple[int, list[list[float]]]] = {}
        self._shown: dict[Engine, int] = {}
        self._unclear: Counter[tuple[str, int]] = Counter()

    async def before(self, engine: Engine, version: int) -> None:
        """Ask an engine that serves the model alone, before it loads ``version`` (EngineError: no answer)."""
        canary = await self._canary_of(engine, version)
        if canary is not None and engine.version >= 0 and await asyncio.to_thread(self._is_plain, engine.version):
            self._plain[engine.client] = engine.incarnation, await self._ask(engine, canary, engine.version)

    async def after(self, engine: Engine, version: int) -> None:
        """Compare an engine that has just loaded ``version`` with the trainer's reference values.

        Raises
        ------
        HandoffError
            It computes without the adapter, or with something else. It would go on to answer, and all rollouts be those
            of the start model.
        EngineError
            It does not answer.
        """
        canary = await self._canary_of(engine, version)
        if canary is None:
            return
        process, plain = self._plain.pop(engine.client, (-1, []))
        if process != engine.incarnation:
            plain = []
        found = await self._ask(engine, canary, version)
        for server, logprobs in enumerate(found):
            verdict = judge_canary(canary, logprobs, plain[server] if plain else None)
            data: dict[str, Any] = {"share": round(verdict.share, 4), "deviation": round(verdict.deviation, 4)}
            self._events.emit("engine.adapter_compared", engine=engine.name, version=version, server=server,
                              outcome=verdict.outcome, **data)  # fmt: skip
            if verdict.outcome == "ignored":
                raise HandoffError(
                    f"{engine.name} does not compute with the adapter of version {version}: its log-probabilities "
                    f"of {len(logprobs)} tokens show {verdict.share:.0%} of the change that the trainer computes, and "
                    f"an unrelated change of {verdict.deviation:.0%} of its size\n"
                    "    hint: check the engine's log for tensors that it did not load; an engine of another version "
                    "than this run's may have other names for them"
                )
            if verdict.outcome == "unclear":
                self._say_unclear(engine, version)
                return
        self._shown[engine] = engine.incarnation

    def _say_unclear(self, engine: Engine, version: int) -> None:
        """Count an unclear result; an event reports an engine that has not been shown to use the adapter."""
        process = engine.name, engine.incarnation
        self._unclear[process] += 1
        tries = self._unclear[process]
        _log.info("%s: version %d changes too little to be compared", engine.name, version)
        if tries == _TRIES:
            _log.warning("%s has not shown in %d versions that it computes with the adapter", engine.name, tries)
            self._events.emit("engine.adapter_unproven", engine=engine.name, version=version, tries=tries)

    async def _canary_of(self, engine: Engine, version: int) -> Canary | None:
        """Return the reference values for ``engine``; None where it has passed the check, or none are published."""
        if self._shown.get(engine) == engine.incarnation:
            return None
        return await asyncio.to_thread(self._read, version)

    def _read(self, version: int) -> Canary | None:
        try:
            handoff = open_version(self._store, version)
            if CANARY not in handoff.manifest.files:
                return None
            return msgspec.json.decode(read_companion(handoff, CANARY), type=Canary)
        except (HandoffError, OSError, msgspec.DecodeError) as error:
            _log.warning("the reference log-probabilities of version %d cannot be read: %s", version, error)
            return None

    def _is_plain(self, version: int) -> bool:
        try:
            return open_version(self._store, version).manifest.kind != "lora"
        except HandoffError:
            return False

    async def _ask(self, engine: Engine, canary: Canary, version: int) -> list[list[float]]:
        """Return the log-probabilities of the canary from each server, with a KV cache that no other version shares."""
        return [
            await server.prompt_logprobs(canary.token_ids, cache_salt=f"canary-{version}", timeout_s=self._call_s)
            for server in engine.client.servers
        ]
