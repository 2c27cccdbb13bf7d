"""Which connections are closed while they wait to be admitted."""

from __future__ import annotations

import asyncio

import pytest
from patience import patience

from hpcrl.network.connection_limits import PendingConnections


class Flood:
    """Opens connections that are numbered, and remembers which were closed."""

    def __init__(self, pending: PendingConnections) -> None:
        self.pending, self.closed = pending, list[int]()

    def open(self, number: int, address: str) -> None:
        self.pending.opened(number, address, lambda: self.closed.append(number))


async def test_the_oldest_of_the_busiest_address_makes_room() -> None:
    flood = Flood(PendingConnections(limit=4))
    flood.open(0, "owner")
    for number in range(1, 20):
        flood.open(number, "stranger")
    assert len(flood.pending) == 4
    assert flood.closed == list(range(1, 17))
    assert flood.pending.aborted == 16


async def test_an_admitted_connection_is_not_limited() -> None:
    flood = Flood(PendingConnections(limit=2))
    for number in range(100):
        flood.open(number, "owner")
        flood.pending.admitted(number)
    assert flood.closed == []
    assert len(flood.pending) == 0


async def test_a_deadline_closes_what_was_not_admitted() -> None:
    flood = Flood(PendingConnections(limit=100, deadline_s=0.05))
    for number in range(3):
        flood.open(number, "stranger")
    flood.pending.admitted(1)
    flood.pending.lost(2)
    async with asyncio.timeout(10 * patience()):
        while not flood.closed:
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)
    assert flood.closed == [0]
    assert len(flood.pending) == 0


@pytest.mark.parametrize("limit", [1, 3, 32, 256, 4096])
def test_three_turns_of_accepting_stay_below_the_limit(limit: int) -> None:
    pending = PendingConnections(limit=limit)
    assert 1 <= pending.backlog <= 128
    assert limit < 4 or 3 * pending.backlog < limit
