"""An engine ends at SIGTERM, whatever it is doing."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from engine_helpers import embedded_command, publish, start_server, tensors_of
from patience import hold_reader, patience

from hpcrl.modeling.decoder import Decoder
from hpcrl.weights import HandoffStore

#: for what is left of it when nothing has to be waited for, on a machine that is not busy
LIMIT_S = 10.0


@pytest.mark.parametrize("file", ["model-00001-of-00002.safetensors", "manifest.json"])
def test_an_engine_ends_while_the_share_hangs(tiny: tuple[Path, Decoder], tmp_path: Path, file: str) -> None:
    """A FIFO in place of a file of the version: its read waits for ever."""
    path, model = tiny
    store = HandoffStore(tmp_path / "weights")
    version = publish(store, 1, path, tensors_of(model)).path
    (version / file).unlink()
    os.mkfifo(version / file)
    flags = ("--weight-transfer-root", str(store.root), "--weight-reader", "engine-0")
    server = start_server(embedded_command(*flags), path, model, tmp_path / "server.log")
    with ThreadPoolExecutor(1) as caller:
        try:
            server.ok("/init_weight_transfer_engine", {"init_info": {}})
            server.ok("/start_weight_update")
            reading = caller.submit(server.call, "/update_weights", {"update_info": {"path": str(version)}})
            held = hold_reader(version / file, 20.0)
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(LIMIT_S * patience()) == 0
            os.close(held)
            assert reading.exception(20.0) is not None or reading.result()[0] != 200
        finally:
            server.process.kill()
            server.process.wait()
