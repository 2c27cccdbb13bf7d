"""``hpcrl board``: what it prints, how it ends, what it refuses."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from http.client import HTTPConnection
from pathlib import Path

import pytest
from runs_testing import make_run, write_steps


def start(*words: str) -> subprocess.Popen[str]:
    """The command as on a login node, which has no torch."""
    code = "import sys; sys.modules['torch'] = None; from hpcrl.cli.main import main; sys.argv[0] = 'hpcrl'; main()"
    return subprocess.Popen(
        [sys.executable, "-c", code, "board", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_prints_a_link_and_ends_cleanly(tmp_path: Path, number: signal.Signals) -> None:
    run = make_run(tmp_path, "mine")
    write_steps(run, 3)
    before = sorted((str(path), path.stat().st_mtime_ns) for path in run.path.rglob("*"))
    process = start("--runs-root", str(tmp_path))
    try:
        assert process.stdout is not None
        link = process.stdout.readline().strip()
        found = re.fullmatch(r"http://127\.0\.0\.1:(\d+)(/\?token=[\w-]{43})", link)
        assert found is not None, process.stderr.read() if process.stderr is not None else link
        port, path = int(found[1]), found[2]
        rest = [process.stdout.readline() for _ in range(4)]
        assert f"ssh -N -L {port}:127.0.0.1:{port} " in "".join(rest)
        # one connection that is kept open, as a browser does, and one that sends nothing
        silent, open_one = HTTPConnection("127.0.0.1", port), HTTPConnection("127.0.0.1", port)
        silent.connect()
        open_one.request("GET", path)
        answer = open_one.getresponse()
        assert answer.status == 200
        answer.read()
        cookie = answer.headers["Set-Cookie"].partition(";")[0]
        open_one.request("GET", "/run/mine", headers={"Cookie": cookie})
        assert open_one.getresponse().read().count(b'id="data"') == 1
        process.send_signal(number)
        out, err = process.communicate(timeout=120)
        silent.close()
        open_one.close()
    finally:
        process.kill()
        process.communicate()
    assert (process.returncode, out, err) == (0, "", "the board has ended\n")
    assert sorted((str(path), path.stat().st_mtime_ns) for path in run.path.rglob("*")) == before


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--runs-root", "/no/such/place"], "is not a directory"),
        (["--host", "0.0.0.0"], "--allow-remote"),
        (["--host", "::", "--port", "1"], "--allow-remote"),
        (["--host", "nowhere.invalid"], "--allow-remote"),
        (["--host", "nowhere.invalid", "--allow-remote"], "cannot listen on nowhere.invalid"),
    ],
)
def test_bad_input_ends_in_one_message(words: list[str], message: str) -> None:
    process = start(*words)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 2
    assert out == ""
    assert message in err
    assert "Traceback" not in err
    assert "hint" in err or "not a directory" in err


def test_another_address_comes_with_a_warning(tmp_path: Path) -> None:
    process = start("--runs-root", str(tmp_path), "--host", "0.0.0.0", "--allow-remote")
    try:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("warning: ")
        assert process.stdout.readline().startswith("http://")
    finally:
        process.terminate()
        process.communicate(timeout=120)
    assert process.returncode == 0
