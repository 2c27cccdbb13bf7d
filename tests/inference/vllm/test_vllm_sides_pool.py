"""Real prefill and decode engines that both use a real Mooncake Store, and experts: all sources of rows in one.

Commands are those of a plan; vLLM carries KV by two connectors at once (`MultiConnector`).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from sides_rollouts import follow_rollouts, prompt_of, take
from vllm_fleet import Fleet

from hpcrl.config.plan import Role
from hpcrl.modeling.decoder import Decoder
from hpcrl.rollouts.core.counters import Counters
from hpcrl.rollouts.sampling.known_rows import KnownRows

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(2400)]

BLOCK = 32
SETTINGS = (
    "engine.replicas=1",
    "engine.kv_store={segment_gib: 0.125, local_buffer_gib: 0.0625}",
    "trainer.router_replay=true",
    "engine.prefill={replicas: 1, nodes: 1}",
    "engine.decode={replicas: 1, nodes: 1}",
)


@pytest.fixture(scope="module")
def fleet(tiny: tuple[Path, Decoder], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path_factory.mktemp("sides-pool") / "run", tiny, *SETTINGS)
    try:
        fleet.start(Role.STORE, timeout_s=120.0)
        fleet.start(Role.PREFILL, Role.DECODE)
        fleet.start(Role.ROUTER, timeout_s=120.0)
        take(fleet, 1, *tiny)  # a version that is a number, as in a run
        yield fleet
    finally:
        fleet.stop()


def hits(fleet: Fleet, side: Role) -> float:
    return fleet.servers[side, 0].metrics().get("vllm:external_prefix_cache_hits_total", 0.0)


def rows_of(counters: Counters) -> tuple[int, int, int]:
    return counters.rows_prefill, counters.rows_shared_prefix, counters.rows_unknown


def test_rows_come_from_prefill_from_other_rollouts_or_are_unknown(fleet: Fleet, tiny: tuple[Path, Decoder]) -> None:
    """Prompts that prefill computed, and one that it then has from the pool, for which it makes no rows."""
    counters = Counters()
    store = KnownRows(counters, block=BLOCK, limit_bytes=1 << 30, keep_versions=1)
    opening = prompt_of(170, 900)
    (first,) = follow_rollouts(fleet, tiny[1], opening, (1,), store)
    assert first.tolist() == [True] * (len(first) - 1) + [False]
    from_prefill, shared, unknown = rows_of(counters)
    assert from_prefill >= len(opening) - 1
    assert (shared, unknown) == (0, 0)

    for side in (Role.PREFILL, Role.DECODE):
        fleet.servers[side, 0].ok("/reset_prefix_cache")
    before = hits(fleet, Role.PREFILL)
    (second,) = follow_rollouts(fleet, tiny[1], opening, (2,), store)
    fetched = hits(fleet, Role.PREFILL) - before
    print(f"prefill had {fetched:.0f} tokens of the pool; rows of prefill, shared, unknown: {rows_of(counters)}")
    assert fetched >= len(opening) // BLOCK * BLOCK - BLOCK
    # what was in the pool comes from the rollout that computed it
    assert second.tolist() == [True] * (len(second) - 1) + [False]
    assert counters.rows_shared_prefix >= fetched
    assert counters.rows_unknown == 0

    for side in (Role.PREFILL, Role.DECODE):
        fleet.servers[side, 0].ok("/reset_prefix_cache")
    alone = Counters()
    (third,) = follow_rollouts(
        fleet, tiny[1], opening, (3,), KnownRows(alone, block=BLOCK, limit_bytes=1 << 30, keep_versions=1)
    )
    print(f"without another rollout: {rows_of(alone)} of {len(third) - 1}")
    # nobody is asked who does not know: these are counted, and no others
    assert len(opening) // BLOCK * BLOCK - BLOCK <= alone.rows_unknown <= len(opening)
    assert int((~third[:-1]).sum()) == alone.rows_unknown
    assert not third[: alone.rows_unknown].any()
