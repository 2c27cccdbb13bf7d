"""KV blocks on a disk: as many as there is room for, and only as long as the engine lives."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
from patience import wait_for

from hpcrl.inference.vllm.disk_tier import trim

#: an engine that writes blocks where it is told to, and says so
ENGINE = """
import json, os, sys, time
root = json.loads(sys.argv[1])["root_dir"]
os.makedirs(f"{root}/abc/01_g0")
for i in range(20):
    with open(f"{root}/abc/01_g0/{i:02}.bin", "wb") as stream:
        stream.write(bytes(1000))
    os.utime(stream.name, (i, i))
print(os.getpid(), root, flush=True)
sys.stdin.read()
"""


def test_the_oldest_blocks_go_and_room_is_made_for_more(tmp_path: Path) -> None:
    blocks = [tmp_path / f"{i % 3:03}" / f"{i:02}.bin" for i in range(10)]
    for i, block in enumerate(blocks):
        block.parent.mkdir(exist_ok=True)
        block.write_bytes(bytes(100))
        os.utime(block, (1000 + i, 1000 + i))
    assert trim(tmp_path, 1000) == 1000
    assert trim(tmp_path, 800) == 700
    assert [block.exists() for block in blocks] == [False] * 3 + [True] * 7
    assert trim(tmp_path / "not there", 1) == 0


def test_an_engine_has_a_bounded_directory_of_its_own(tmp_path: Path) -> None:
    flags = ["--limit-bytes", "10000", "--look-s", "0.1", "--place", "@kv-disk@"]
    command = [sys.executable, "-m", "hpcrl.inference.vllm.disk_tier", *flags, "--"]
    command += [sys.executable, "-c", ENGINE, '{"root_dir": "@kv-disk@"}']
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as engine:
        assert engine.stdout is not None
        assert engine.stdin is not None
        pid, root = engine.stdout.readline().split()
        # it has become the engine: whoever watches or ends it knows its number
        assert int(pid) == engine.pid
        assert Path(root).parent == tmp_path

        def left() -> list[str]:
            return sorted(path.name for path in Path(root).rglob("*.bin"))

        wait_for(lambda: len(left()) <= 10, 20, "old blocks to go")
        assert left()[-1] == "19.bin"
        assert len(left()) == 9
        (helper,) = psutil.Process(engine.pid).children()
        engine.stdin.close()
    wait_for(lambda: not helper.is_running(), 20, "the end of the helper")
