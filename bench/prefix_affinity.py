"""What session affinity does for the prefix cache: multi-turn rollouts, two real vLLM engines behind the real routers.

Groups of rollouts begin with a common prompt; each turn adds what the model said and what the environment answered, and
sends all of it again with the session of its group. The same rollouts run once with each policy, under a
salt of their own, so that no policy finds blocks of another. The hit rate is vLLM's own: prompt tokens found in its
prefix cache, of all that it was asked for, over both engines. The best possible one is that of a single cache that
forgets nothing. Writes ``bench/results/prefix_affinity.json``.

    HPCRL_VLLM_PYTHON=.venv-vllm/bin/python python bench/prefix_affinity.py
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from harness import record, scratch
from vllm_lab import Engine, make_arch, random_model, routed, started_engines, write_model

POLICIES = {
    "sticky_least_loaded": ("engine.router.policy=sticky_least_loaded",),
    "round_robin": ("engine.router.policy=round_robin",),
    "consistent_hash": ("engine.router.policy=consistent_hash",),
    "dynamo": ("engine.router.kind=dynamo",),
    # cache and load decide for each request
    "dynamo_without_sessions": ("engine.router.kind=dynamo", "engine.router.session_ttl_s=0"),
}
BLOCK = 32
PROMPT, SAID, ANSWERED = 480, 24, 72
"""Tokens: of the common prompt, of the model in a turn, of the environment after it."""


def tokens(rng: random.Random, count: int) -> list[int]:
    """Letters."""
    return [rng.randrange(7, 103) for _ in range(count)]


def rollout(router: Engine, *, salt: str, group: int, number: int, turns: int) -> tuple[list[float], int, int]:
    """Milliseconds of each turn; tokens asked for; tokens that one cache that forgets nothing would have had."""
    text = tokens(random.Random(group), PROMPT)
    own = random.Random(1000 * group + number)
    times, asked, known = [], 0, 0
    for turn in range(turns):
        began = time.perf_counter()
        choice = router.generate(
            text, session=f"{salt}-{group}", salt=salt, max_tokens=SAID, seed=number, ignore_eos=True
        )
        times.append(1e3 * (time.perf_counter() - began))
        asked += len(text)
        # of the turn before, all but its last sampled token has KV; of the first turn, what others of the group left
        before = PROMPT if number and not turn else len(text) - ANSWERED - 1 if turn else 0
        known += min(before, len(text) - 1) // BLOCK * BLOCK
        text = text + choice["token_ids"] + tokens(own, ANSWERED)
    return times, asked, known


def group_of_rollouts(router: Engine, *, salt: str, group: int, rollouts: int, turns: int) -> list[Any]:
    """The first begins alone for a turn's time, as nothing can be found before it was computed."""
    settings = {"salt": salt, "group": group, "turns": turns}
    with ThreadPoolExecutor(rollouts) as pool:
        futures = []
        for number in range(rollouts):
            futures.append(pool.submit(rollout, router, number=number, **settings))
            if not number:
                time.sleep(0.3)
        return [future.result() for future in futures]


def measure(engines: list[Engine], router: Engine, salt: str, sizes: argparse.Namespace) -> dict[str, float]:
    """Hit rate and times of one policy."""

    def sums() -> dict[str, float]:
        values = [engine.metrics() for engine in engines]
        return {name: sum(value[name] for value in values) for name in values[0]}

    before, began = sums(), time.perf_counter()
    with ThreadPoolExecutor(sizes.groups) as pool:
        done = pool.map(
            lambda group: group_of_rollouts(router, salt=salt, group=group, rollouts=sizes.rollouts, turns=sizes.turns),
            range(sizes.groups),
        )
        results = [result for group in done for result in group]
    seconds, after = time.perf_counter() - began, sums()
    queries = after["vllm:prefix_cache_queries_total"] - before["vllm:prefix_cache_queries_total"]
    hits = after["vllm:prefix_cache_hits_total"] - before["vllm:prefix_cache_hits_total"]
    first = "vllm:time_to_first_token_seconds"
    count = after[f"{first}_count"] - before[f"{first}_count"]
    assert queries == sum(asked for _, asked, _ in results), "requests of others"
    return {
        "hit_rate": round(hits / queries, 4),
        "best_possible": round(sum(known for _, _, known in results) / queries, 4),
        "computed_prompt_tokens": int(queries - hits),
        "prompt_tokens": int(queries),
        "seconds": round(seconds, 2),
        "turn_ms": round(statistics.median(t for times, _, _ in results for t in times), 1),
        "first_token_ms": round(1e3 * (after[f"{first}_sum"] - before[f"{first}_sum"]) / count, 1),
    }


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--groups", type=int, default=6)
    parser.add_argument("--rollouts", type=int, default=4)
    parser.add_argument("--turns", type=int, default=6)
    sizes = parser.parse_args()
    root = scratch("prefix-affinity")
    write_model(root / "model", random_model(make_arch(root / "model"), 0), torch.float32)
    figures: dict[str, Any] = {"load_average": round(os.getloadavg()[0], 1), **vars(sizes), "engines": 2}
    settings = ("engine.max_model_len=2048", f"engine.block_size={BLOCK}", "engine.max_num_seqs=32")
    settings += ("engine.router.kind=dynamo",)  # they say what is in their caches
    with started_engines(root / "model", root, *settings) as engines:
        for engine in engines:  # the first request of a process is slow
            engine.generate([7] * 40, max_tokens=4)
        for policy, chosen in POLICIES.items():
            with routed(engines, root, f"engine.block_size={BLOCK}", *chosen) as router:
                figures[policy] = measure(engines, router, policy, sizes)
            print(policy, figures[policy], flush=True)
    record("prefix_affinity", figures)


if __name__ == "__main__":
    main()
