"""Rollouts through TransferQueue, as ``bench/dock_peers.py`` carries them; runs in an environment that has it.

Producers and consumers are actors of a Ray of our own, the store is TransferQueue's: ``SimpleStorage`` with two units,
or ``MooncakeStore`` with a master that somebody else has started (its own start would end all masters of the machine).
A producer puts a window of rollouts in one call, a consumer gets them in one, which costs it less than one at a time.
Nothing of hpcrl is imported here.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

import psutil
import ray
import torch
import transfer_queue
from omegaconf import OmegaConf
from tensordict import TensorDict

PARTITION = "train"


def columns(tokens: int, count: int, *, routed: bool) -> TensorDict:
    """Rollouts of one length."""
    torch.manual_seed(tokens)
    values: dict[str, Any] = {
        "token_ids": torch.randint(0, 100_000, (count, tokens), dtype=torch.int32),
        "sampled": torch.ones((count, tokens), dtype=torch.uint8),
        "logprobs": -torch.rand((count, tokens)),
        "versions": torch.full((count, tokens), 3, dtype=torch.int32),
    }
    if routed:
        values["routed_experts"] = torch.randint(0, 256, (count, tokens, 78 * 8), dtype=torch.uint8)
        values["routed_present"] = torch.ones((count, tokens), dtype=torch.uint8)
    return TensorDict(values, batch_size=count)


@ray.remote(num_cpus=0)
class Consumer:
    def __init__(self) -> None:
        transfer_queue.init()

    def get(self, keys: list[str], tokens: int) -> None:
        """Have the columns of these, and give them up."""
        found = transfer_queue.kv_batch_get(keys=keys, partition_id=PARTITION)
        assert [len(each) for each in found["token_ids"]] == [tokens] * len(keys)
        transfer_queue.kv_clear(keys, PARTITION)


@ray.remote(num_cpus=0)
class Producer:
    def __init__(self, number: int, consumers: list[Any]) -> None:
        transfer_queue.init()
        self._number, self._consumers, self._made = number, consumers, 0

    def run(self, tokens: int, count: int, window: int, *, routed: bool) -> None:
        """Hand rollouts to the consumers, half a window at a time."""
        portion = max(1, window // 2)
        values, under_way = columns(tokens, portion, routed=routed), []
        for i in range(-(-count // portion)):
            if len(under_way) == 2:
                ray.get(under_way.pop(0))
            keys = [f"{self._number}-{self._made + j}" for j in range(portion)]
            self._made += portion
            transfer_queue.kv_batch_put(keys=keys, partition_id=PARTITION, fields=values)
            under_way.append(self._consumers[i % len(self._consumers)].get.remote(keys, tokens))
        ray.get(under_way)


def processor_s() -> float:
    """Processor time of this process and of all below it."""
    total = 0.0
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        try:
            total += sum(process.cpu_times()[:2])
        except psutil.NoSuchProcess:
            continue
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", choices=("SimpleStorage", "MooncakeStore"), required=True)
    parser.add_argument("--master", help="host:port of Mooncake's")
    parser.add_argument("--work", required=True, help="JSON: producers, consumers, window, rounds, sizes")
    arguments = parser.parse_args()
    work = json.loads(arguments.work)
    backend: dict[str, Any] = {"storage_backend": arguments.backend}
    if arguments.backend == "MooncakeStore":
        backend["MooncakeStore"] = {
            "auto_init": False,
            "metadata_server": "P2PHANDSHAKE",
            "master_server_address": arguments.master,
            "local_hostname": "127.0.0.1",
            "global_segment_size": 1 << 30,
            "local_buffer_size": 512 << 20,
        }
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False, object_store_memory=256 << 20)
    try:
        transfer_queue.init(OmegaConf.create({"backend": backend}))
        consumers = [Consumer.remote() for _ in range(work["consumers"])]
        each = work["consumers"] // work["producers"]
        producers = [Producer.remote(i, consumers[i * each : (i + 1) * each]) for i in range(work["producers"])]
        for tokens, routed, count in work["sizes"]:
            share = count // work["producers"]
            window = work["window"] // work["producers"]
            ray.get([producer.run.remote(tokens, window, window, routed=routed) for producer in producers])  # warm
            for _ in range(work["rounds"]):
                before, began = processor_s(), time.monotonic()
                ray.get([producer.run.remote(tokens, share, window, routed=routed) for producer in producers])
                found = {"wall_s": time.monotonic() - began, "cpu_s": processor_s() - before}
                print(json.dumps({"tokens": tokens, "routes": routed, **found}), flush=True)
    finally:
        ray.shutdown()
    sys.stdout.flush()


if __name__ == "__main__":
    main()
