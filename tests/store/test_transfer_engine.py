"""A read over the transfer engine: what fails promptly is tried again, since a kept connection may be a dead one."""

from __future__ import annotations

import pytest

from hpcrl import mooncake
from hpcrl.mooncake import TransferEngine

pytest.importorskip("mooncake.engine", reason="the extra store is not installed")


class _Stale:
    """An engine that kept ``stale`` connections to a peer whose port another one has."""

    def __init__(self, stale: int) -> None:
        self.stale, self.reads = stale, 0

    def batch_transfer_async_read(self, endpoint: str, local: list[int], remote: list[int], sizes: list[int]) -> int:
        self.reads += 1
        return self.reads

    def transfer_check_status(self, transfer: int) -> int:
        return -1 if transfer <= self.stale else 1


def engine_over(stand_in: _Stale) -> TransferEngine:
    engine = TransferEngine("127.0.0.1", "tcp")
    for name in ("batch_transfer_async_read", "transfer_check_status"):
        assert callable(getattr(engine._engine, name))
    engine._engine = stand_in
    return engine


def test_kept_connections_to_a_peer_that_ended_are_used_up() -> None:
    stand_in = _Stale(3)
    engine_over(stand_in).read("127.0.0.1:1", [0], [0], [1])
    assert stand_in.reads == 4


def test_a_peer_that_is_away_is_given_up() -> None:
    stand_in = _Stale(1000)
    with pytest.raises(OSError, match="did not give 1 bytes"):
        engine_over(stand_in).read("127.0.0.1:1", [0], [0], [1])
    assert stand_in.reads == 8


def test_a_read_that_failed_late_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mooncake, "_PROMPT_S", -1.0)
    stand_in = _Stale(1)
    with pytest.raises(OSError, match="did not give"):
        engine_over(stand_in).read("127.0.0.1:1", [0], [0], [1])
    assert stand_in.reads == 1
