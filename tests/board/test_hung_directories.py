"""A filesystem that hangs holds the threads of its own directory of runs, and no page about others waits for it."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path

import pytest
from board_lab import client_of_board
from patience import patience
from runs_testing import make_run, write_log, write_status, write_steps

from hpcrl.board import reading_pools
from hpcrl.board.reading_pools import THREADS, ReadingPools, SilentPlaceError
from hpcrl.runs.status import RunState


async def test_a_hung_directory_delays_no_page_about_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading_pools, "PATIENCE_S", 5.0 * patience())
    for root in ("well", "ill"):
        run = make_run(tmp_path / root, root)
        write_log(run, "a line\n", attempt=write_status(run, RunState.COMPLETED))
        write_steps(run, 3)
    status = tmp_path / "ill/ill/status.json"
    async with client_of_board(tmp_path / "well", tmp_path / "ill") as client:
        assert (await client.get("/run/ill"))[0] == 200
        status.unlink()
        os.mkfifo(status)  # opening it hangs, as a file of a mount does whose server is away
        hung = [asyncio.create_task(client.get("/run/ill")) for _ in range(12)]
        try:
            for page in ("", "/logs", "/nodes"):
                code, html, _ = await client.get(f"/run/well{page}")
                assert code == 200, html
            code, html, _ = await client.get("/")
            assert code == 200
            assert '<a href="/run/well"' in html
            assert f"<code>{tmp_path / 'ill'}</code> does not answer" in html
            code, html, _ = await client.get("/run/ill/logs")
            assert code == 503
            assert "does not answer" in html
            assert (await client.get("/run/well"))[0] == 200
        finally:
            # whoever waits for a writer gets one, and reads an empty file
            while not all(each.done() for each in hung):
                os.close(os.open(status, os.O_RDWR | os.O_NONBLOCK))
                await asyncio.sleep(0.05)
        status.unlink()
        write_status(run, RunState.COMPLETED)
        assert (await client.get("/run/ill"))[0] == 200


def test_a_place_is_asked_again_when_one_of_its_threads_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading_pools, "PATIENCE_S", 0.0)
    pools, go_on = ReadingPools(), [threading.Event() for _ in range(THREADS)]
    calls = [pools.submit("here", each.wait) for each in go_on]
    with pytest.raises(SilentPlaceError):
        pools.wait(calls[0])
    with pytest.raises(SilentPlaceError):
        pools.submit("here", go_on[0].set)
    assert pools.submit("there", lambda: 7).result() == 7
    go_on[0].set()
    calls[0].result()
    while True:  # the thread ends a moment later
        try:
            assert pools.submit("here", lambda: 7).result() == 7
            break
        except SilentPlaceError:
            continue
    go_on[1].set()
