"""How long a trainer's rank waits for its batch: asked for when the step before is trained, and asked for ahead.

The batch is one of the reference run's size for a rank: 131,072 tokens in 8 rollouts, with the experts of all layers as
engines say them (78 layers × 8 of 256: 82 MB), or without. A process of its own builds batches and serves them, with
the orchestrator's own batch server and HTTP; rollouts are always there, so what is waited for is building, sending and
decoding. The rank's step is a sleep, as a device computes without the host. Ways take turns, one run of steps each.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing as mp
import os
import socket
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from harness import OtherLoad, record

from hpcrl.config.recipe import Recipe
from hpcrl.dock.ahead import BatchFetcher
from hpcrl.dock.client import DockClient
from hpcrl.dock.columns import encode_columns
from hpcrl.dock.ledger.payload import PayloadWriter
from hpcrl.dock.routes import RoutedExperts
from hpcrl.dock.warehouse.embedded import EmbeddedWarehouse
from hpcrl.dock.warehouse.interface import Location
from hpcrl.models.arch import arch_from_config
from hpcrl.models.known import find_config
from hpcrl.network.auth import Gate
from hpcrl.rollouts.batches.columns import RolloutColumns
from hpcrl.rollouts.batches.http import serve_dock
from hpcrl.rollouts.batches.server import BatchServer
from hpcrl.rollouts.core.consumed_files import RolloutFiles
from hpcrl.rollouts.core.counters import Counters
from hpcrl.rollouts.core.records import Group, Rollout, StoredRollout, encode_rollout
from hpcrl.trainer.batch.tensors import TokenBatch

TOKENS, ROLLOUTS = 131_072, 8
LAYERS, EXPERTS, CHOSEN = 78, 256, 8
ARCH = arch_from_config(json.loads(find_config("GLM-5").read_text()))
MARK = "HPCRL_BENCH_BATCH_AHEAD"


def rollouts(step: int, *, routed: bool) -> list[Rollout]:
    """Those of one group, of equal length, sampled but for a prompt of a tenth."""
    rng, length = np.random.default_rng(step), TOKENS // ROLLOUTS

    def rollout(member: int) -> Rollout:
        sampled = (np.arange(length) >= length // 10).astype(np.uint8)
        routes = None
        if routed:
            # distinct experts of each token, as a router chooses them
            first = rng.integers(0, EXPERTS, (length, LAYERS, 1), dtype=np.uint8)
            experts = first + np.arange(0, EXPERTS, EXPERTS // CHOSEN, dtype=np.uint8)
            routes = RoutedExperts.of(experts, np.ones(length, np.uint8))
        return Rollout(
            member=member,
            token_ids=rng.integers(0, 100_000, length).astype(np.int32),
            sampled=sampled,
            logprobs=(-rng.random(length) * sampled).astype(np.float32),
            versions=np.full(length, step - 1, np.int32),
            reward=float(member % 2),
            parts={},
            seconds=1.0,
            routed_experts=routes,
        )

    return [rollout(i) for i in range(ROLLOUTS)]


def stored(payload: Path, warehouse: EmbeddedWarehouse, *, routed: bool) -> list[Group]:
    """The same, on disk and in memory, as the ledger leaves them."""
    payload.mkdir()
    writer, kept = PayloadWriter(payload, 1), []
    for rollout in rollouts(1, routed=routed):
        block = encode_columns(*encode_rollout(rollout))
        place = writer.write([block])[0]
        warehouse.put(place, block)
        kept.append(StoredRollout.of(rollout, place))
    return [Group(index=1, environment="bench", prompt_index=1, rollouts=kept)]


class Ready:
    """In place of the scheduler and of its journal: rollouts of the next step are always finished."""

    def __init__(self, groups: list[Group]) -> None:
        self.account = SimpleNamespace(step=0)
        self._groups = groups

    async def wait_batch(self) -> None:
        """They are there."""

    def take_batch(self) -> list[Group]:
        self.account.step += 1
        return self._groups

    async def taken(self, step: int, groups: list[Group]) -> None:
        """Nothing is written down."""

    def settle(self, step: int) -> None:
        """Nothing is kept."""

    def trained(self, step: int) -> None:
        """Nothing is released: each step takes the same rollouts."""


class Served:
    """What `serve_dock` asks for."""

    stopping = False

    def __init__(self, server: BatchServer) -> None:
        self.batch = server.batch
        self._server = server

    async def trained(self, step: int) -> None:
        self._server.trained(step)


def serve(port: int, directory: str, *, routed: bool) -> None:
    """The orchestrator's side, in a process of its own, until it is ended."""

    async def main() -> None:
        recipe = Recipe.model_validate(
            {
                "name": "bench",
                "model": {"path": "GLM-5"},
                "environments": [{"name": "bench", "kind": "words"}],
                "trainer": {"steps": 1000, "micro_batch_tokens": TOKENS},
            }
        )
        payload, memory = Path(directory) / "payload", EmbeddedWarehouse(Path("/dev/shm"), limit_bytes=1 << 30)
        ready: Any = Ready(stored(payload, memory, routed=routed))
        location = Location(str(memory.directory))
        server = BatchServer(
            recipe=recipe,
            scheduler=ready,
            journal=ready,
            counters=Counters(),
            gauges=dict,
            columns=RolloutColumns(payload, lambda: location, decode=lambda ids: f"{len(ids)} tokens"),
            files=RolloutFiles.claim(Path(directory) / "rollouts", 1),
            spawn=asyncio.create_task,
        )
        async with serve_dock(Served(server), Gate("dock", None), host="127.0.0.1", port=port):  # type: ignore[arg-type]
            await asyncio.Event().wait()

    asyncio.run(main())


@dataclass
class Waits:
    """Seconds a step: for the batch, and for the host tensors of its micro-batches."""

    batch: list[float]
    tensors: list[float]


def train(client: DockClient, steps: range, *, ahead: bool, step_s: float, last: int) -> Waits:
    """What a rank does; the first step is left out, as nobody could have asked for its batch ahead."""
    fetcher = BatchFetcher(client, rank=0, world_size=1, last_step=last)
    waits = Waits([], [])
    for step in steps:
        began = time.monotonic()
        shard = fetcher.take(step) if ahead else client.batch(step, rank=0, world_size=1)
        came = time.monotonic()
        for micro_batch in shard.micro_batches:
            TokenBatch.from_wire(micro_batch, ARCH)
        if step > steps[0]:
            waits.batch.append(came - began)
            waits.tensors.append(time.monotonic() - came)
        time.sleep(step_s)
    fetcher.close()
    return waits


def measure(*, routed: bool, steps: int, rounds: int, step_s: float) -> dict[str, Any]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    found = {"ahead": Waits([], []), "asked when wanted": Waits([], [])}
    with tempfile.TemporaryDirectory(prefix="hpcrl-batch-ahead-") as directory:
        process = mp.get_context("spawn").Process(target=serve, args=(port, directory), kwargs={"routed": routed})
        process.start()
        try:
            client = DockClient(f"http://127.0.0.1:{port}", wait_timeout_s=120.0)
            first = 1
            for _ in range(rounds):
                for way, waits in found.items():
                    run = range(first, first + steps)
                    got = train(client, run, ahead=way == "ahead", step_s=step_s, last=run[-1])
                    waits.batch += got.batch
                    waits.tensors += got.tensors
                    first = run.stop
        finally:
            process.terminate()
            process.join(10.0)
    rows: dict[str, Any] = {"routed": routed, "step_s": step_s, "steps": len(found["ahead"].batch)}
    for way, waits in found.items():
        rows[way] = {
            "wait_s": statistics.median(waits.batch),
            "wait_s_max": max(waits.batch),
            "tensors_s": statistics.median(waits.tensors),
        }
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6, help="of a run; the first one does not count")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each way")
    parser.add_argument("--step-s", type=float, default=3.0, help="how long a step trains, in seconds")
    arguments = parser.parse_args()
    print(f"{'routes':>6} {'way':>18} {'wait (s)':>9} {'longest':>8} {'tensors (s)':>11}")
    rows = []
    os.environ[MARK] = "1"
    with OtherLoad(MARK) as load:
        for routed in (False, True):
            row = measure(routed=routed, steps=arguments.steps, rounds=arguments.rounds, step_s=arguments.step_s)
            rows.append(row)
            for way in ("ahead", "asked when wanted"):
                got = row[way]
                print(f"{routed!s:>6} {way:>18} {got['wait_s']:9.3f} {got['wait_s_max']:8.3f} {got['tensors_s']:11.3f}")
    record("batch_ahead", {"rows": rows, "tokens": TOKENS, "other_load": load.share})


if __name__ == "__main__":
    main()
