"""Ranks of a trainer that is killed: one that asks, publishes and saves, and perhaps one that shares what it fetches.

Two ranks are of one context-parallel group on a node that is not the orchestrator's. They meet after each batch, as
ranks do in collectives. On request one of them dies while it holds the lock of a block that both want.
"""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from handoff_lab import model_directory, publish
from kill_harness import die_at_call

from hpcrl.checkpoints import CheckpointWriter
from hpcrl.dock.client import DockClient
from hpcrl.dock.ledger.entries import PayloadPlace
from hpcrl.dock.warehouse import reading
from hpcrl.dock.warehouse.sharing import Load, SharedBlocks, Sharing
from hpcrl.runs.role import RoleContext
from hpcrl.runs.rundir import RunDir
from hpcrl.weights import HandoffStore, VersionCommitter

SAVE_EVERY = 3
DEADLINE_S = 60.0
CALLS = 8
"""Of the filesystem, from the lock of a block to its end: at one of them, or (0) while it is received, a rank dies."""
_SHARED_BYTES = 1 << 28


class RankFiles(NamedTuple):
    """What one rank of an attempt says, and is told, by files.

    Attributes
    ----------
    node:
        What its node has as shared memory.
    fetched:
        A line a step whose batch it has.
    die:
        Exists: it is to die, at which of `CALLS`.
    held:
        ``+`` where it has taken a lock since then, ``-`` where it has given it back.
    """

    node: Path
    fetched: Path
    die: Path
    held: Path

    @classmethod
    def of(cls, run: RunDir, name: str) -> RankFiles:
        """Those of a rank of the newest attempt."""
        told = [run.path / f"{what}-{run.attempts()[-1]}-{name}" for what in ("fetched", "die", "held")]
        return cls(run.path.parent / "node", *told)


def lead(run: RunDir, url: str, step: int, *, far: bool, other: socket.socket | None) -> None:
    """Train for ever from ``step`` on; ``other`` leads to the rank that shares, where there is one."""
    attempt, store = run.attempts()[-1], HandoffStore(run.weights_dir)
    client = _client(run, url, "trainer", far=far)
    fetched = RankFiles.of(run, "trainer").fetched
    weights = VersionCommitter.claim(store.root, attempt)
    checkpoints = CheckpointWriter.claim(run.checkpoints_dir, attempt)

    def published(version: int) -> None:
        if version not in store.versions():
            publish(weights, version, model_directory(run.path / "start"), tensors=1, shards=1, words=1)
        client.published(version)

    with (run.path / "trained.jsonl").open("ab", buffering=0) as trained:
        published(step)
        while True:
            step += 1
            batch = client.batch(step, rank=0, world_size=1)
            _append(fetched, step)
            if other is not None and not other.recv(1):
                other = None  # it was killed, and the supervisor has not seen it yet
            ids = [list(rollout) for micro in batch.micro_batches for rollout in micro.rollouts]
            told = {"recalled": batch.stats.rollouts["turns_recalled"], "sources": dict(client.sources)}
            client.sources.clear()
            trained.write(json.dumps({"step": step, "rollouts": ids, **told}).encode() + b"\n")
            published(step)
            if step % SAVE_EVERY == 0:
                state = client.snapshot(step)
                checkpoints.stage(step)
                checkpoints.commit(step=step, world_size=1, files={}, orchestrator_state=state, started_at_s=0.0)
            if other is not None:
                other.send(b".")


def follow(run: RunDir, url: str, step: int, *, leader: socket.socket) -> None:
    """Fetch what the leader trains on, step by step, until it is gone."""
    client, fetched = _client(run, url, "sister", far=True), RankFiles.of(run, "sister").fetched
    while True:
        step += 1
        client.batch(step, rank=0, world_size=1)
        _append(fetched, step)
        leader.send(b".")
        if not leader.recv(1):
            signal.pause()


def _client(run: RunDir, url: str, name: str, *, far: bool) -> DockClient:
    files, sharing = RankFiles.of(run, name), None
    if far:
        reading._is_here = lambda directory: False
        files.node.mkdir(mode=0o700, exist_ok=True)
        sharing = Sharing(files.node, limit_bytes=_SHARED_BYTES)
        _die_on_request(files)
    credentials = RoleContext(run, attempt=run.attempts()[-1], role="trainer", replica=0, rank=0).credentials
    times = {"wait_timeout_s": DEADLINE_S, "connect_timeout_s": 20.0}
    return DockClient(url, credentials=credentials, sharing=sharing, **times)


def _die_on_request(files: RankFiles) -> None:
    """From now on this process looks for the request whenever it has taken the lock of a block."""
    fetch, take_room = SharedBlocks._fetch_if_elected, SharedBlocks._take_room
    asked: list[int] = []
    said = os.open(files.held, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def taking_room(self: SharedBlocks, fd: int, size: int) -> None:
        if not asked and files.die.exists():
            asked.append(int(files.die.read_text()))
            if asked[0]:
                die_at_call(asked[0])
        if asked:
            os.write(said, b"+")
        take_room(self, fd, size)

    def fetching(self: SharedBlocks, place: PayloadPlace, load: Load) -> bool:
        fetched = fetch(self, place, _half(load, asked))
        if asked:
            os.write(said, b"-")
        return fetched

    SharedBlocks._take_room = taking_room  # type: ignore[method-assign]
    SharedBlocks._fetch_if_elected = fetching  # type: ignore[method-assign]


def _half(load: Load, asked: list[int]) -> Callable[[PayloadPlace, memoryview], None]:
    def loading(place: PayloadPlace, memory: memoryview) -> None:
        load(place, memory)
        if asked == [0]:
            memory[len(memory) // 2 :] = bytes(len(memory) - len(memory) // 2)
            os.kill(os.getpid(), signal.SIGKILL)

    return loading


def _append(path: Path, step: int) -> None:
    with path.open("ab", buffering=0) as file:
        file.write(f"{step}\n".encode())
