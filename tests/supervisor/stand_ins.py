"""Stand-in roles: small programs that behave, misbehave, and start grandchildren that do not want to die.

Run as ``python stand_ins.py BEHAVIOUR``; the environment says who it is, as for a real role.
"""

from __future__ import annotations

import http.server
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

_STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"


def start_escapees() -> None:
    """Two grandchildren that ignore SIGTERM: one in a session of its own, one forked twice (parent gone)."""
    subprocess.Popen([sys.executable, "-S", "-c", _STUBBORN], start_new_session=True)
    twice = (
        f"import subprocess, sys; subprocess.Popen([sys.executable, '-S', '-c', {_STUBBORN!r}], start_new_session=True)"
    )
    subprocess.run([sys.executable, "-S", "-c", twice], check=True)
    # and one without the run's mark in its environment
    subprocess.Popen([sys.executable, "-S", "-c", _STUBBORN], env={"ESCAPEE_OF": os.environ["HPCRL_RUN_ID"]})


def say_ready() -> None:
    directory = Path(os.environ["HPCRL_RUN_DIR"], "attempts", f"{int(os.environ['HPCRL_ATTEMPT']):04d}", "ready")
    path = directory / f"{os.environ['HPCRL_ROLE']}-{os.environ['HPCRL_REPLICA']}.json"
    path.write_text("{}")


def say_progress(phase: str) -> None:
    directory = Path(os.environ["HPCRL_RUN_DIR"], "attempts", f"{int(os.environ['HPCRL_ATTEMPT']):04d}", "progress")
    directory.mkdir(exist_ok=True)
    path = directory / f"{os.environ['HPCRL_ROLE']}-{os.environ['HPCRL_REPLICA']}.json"
    path.write_text(f'{{"time_s": {time.time()}, "phase": "{phase}", "longest_s": {{"forward_backward": 0.1}}}}')


def leave_things() -> None:
    """What vLLM and torch leave: a socket in TMPDIR, and shared memory with a name that says nothing."""
    import mmap
    import socket
    import tempfile

    socket.socket(socket.AF_UNIX).bind(f"{tempfile.gettempdir()}/ipc")
    path = f"/dev/shm/psm_{os.environ['HPCRL_RUN_ID'][:8]}"
    with open(path, "w+b") as stream:
        stream.truncate(4096)
        globals()["kept"] = mmap.mmap(stream.fileno(), 4096)


def save() -> None:
    """A checkpoint that takes a second, then a failure; a second life begins where it ended."""
    time.sleep(0.5)
    step = int(os.environ["HPCRL_ATTEMPT"])
    directory = Path(os.environ["HPCRL_RUN_DIR"], "checkpoints", f"step-{step:06d}")
    if step < 3:
        directory.mkdir(parents=True)
    _fail("ValueError", f"attempt {step} failed")


def fill() -> None:
    """Take all space of the run's filesystem, and fail of it: also at saying why."""
    with open(Path(os.environ["HPCRL_RUN_DIR"], "filler"), "wb", buffering=0) as stream:
        size = 1 << 16
        while size:
            try:
                stream.write(bytes(size))
            except OSError:
                size //= 2
    time.sleep(3.0)  # the supervisor finds out meanwhile that it can write nothing
    _fail("OSError", "[Errno 28] No space left on device")


def serve(host: str, port: int, *, noted: bool = False) -> None:
    """Answer all requests; with ``noted``, write their paths into a file of the run."""
    asked = Path(os.environ["HPCRL_RUN_DIR"], "asked.txt")

    class Health(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            if noted:
                with asked.open("a") as stream:
                    stream.write(f"{self.path}\n")

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.HTTPServer((host, port), Health)
    threading.Thread(target=server.serve_forever, daemon=True).start()


def main() -> None:
    behaviour, host, port = sys.argv[1], sys.argv[2], int(sys.argv[3])
    print(f"{os.environ['HPCRL_ROLE']} behaves: {behaviour}", flush=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    match behaviour:
        case "hang":
            time.sleep(600)
        case "crash":
            print("Traceback (most recent call last):\nZeroDivisionError: stand-in", file=sys.stderr, flush=True)
            sys.exit(3)
        case "serve":
            start_escapees()
            serve(host, port)
            time.sleep(600)
        case "serve-stubborn":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            serve(host, port)
            while True:
                time.sleep(600)
        case "serve-ranks":
            serve(host, port)
            time.sleep(1.5)
            serve(host, port + 1)
            time.sleep(600)
        case "work":
            start_escapees()
            say_ready()
            time.sleep(600)
        case "finish":
            say_ready()
            time.sleep(0.3)
        case "early":
            say_ready()
            sys.exit(0)
        case _:
            misbehave(behaviour, host, port)


def misbehave(behaviour: str, host: str, port: int) -> None:
    match behaviour:
        case "crash-soon":
            serve(host, port)
            time.sleep(1.0)
            print("Traceback (most recent call last):\nZeroDivisionError: stand-in", file=sys.stderr, flush=True)
            sys.exit(3)
        case "serve-noted":
            serve(host, port, noted=True)
            time.sleep(600)
        case "leave":
            leave_things()
            serve(host, port)
            time.sleep(600)
        case "spin":
            say_ready()
            say_progress("forward_backward")
            while True:
                pass
        case "checkpoint":
            say_ready()
            save()
        case "early-serve":
            serve(host, port)
            time.sleep(0.5)
        case "record":
            say_ready()
            _fail("ValueError", "the loss is not finite")
        case "record-and-hang":
            say_ready()
            _record_failure("ValueError", "the loss is not finite")
            time.sleep(600)
        case "fill":
            say_ready()
            if os.environ["HPCRL_ATTEMPT"] == "1":
                fill()
            time.sleep(0.3)
        case "peer-lost":
            say_ready()
            _watch_peer()


def _watch_peer() -> None:
    """Fail as a role does whose engine went away."""
    import json
    import urllib.request

    attempt = Path(os.environ["HPCRL_RUN_DIR"], "attempts", f"{int(os.environ['HPCRL_ATTEMPT']):04d}")
    (url,) = json.loads((attempt / "endpoints.json").read_text())["urls"]["engine"]
    while True:
        try:
            with urllib.request.urlopen(url, timeout=1):
                time.sleep(0.02)
        except OSError as error:
            _fail("PeerLostError", str(error), secondary=True)


def _fail(error: str, message: str, *, secondary: bool = False) -> None:
    _record_failure(error, message, secondary=secondary)
    sys.exit(1)


def _record_failure(error: str, message: str, *, secondary: bool = False) -> None:
    import json

    env = os.environ
    record = {
        "time_s": time.time(),
        "role": env["HPCRL_ROLE"],
        "replica": int(env["HPCRL_REPLICA"]),
        "rank": 0,
        "error": error,
        "message": message,
        "traceback": f"Traceback (most recent call last):\n  ...\n{error}: {message}\n",
        "secondary": secondary,
    }
    directory = Path(env["HPCRL_RUN_DIR"], "attempts", f"{int(env['HPCRL_ATTEMPT']):04d}", "failures")
    (directory / f"{env['HPCRL_ROLE']}-0.json").write_text(json.dumps(record))


if __name__ == "__main__":
    main()
