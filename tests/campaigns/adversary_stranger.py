"""What another user of the machine tries: run as a uid of its own by ``adversary.py``, which judges the answers.

Nothing but the standard library, because a stranger cannot import what is ours. Reads a JSON object from the standard
input (what a stranger could know of the run), writes one JSON object a line: ``point`` of docs/trust.md, ``what`` was
tried, ``got`` (what came of it), and for a server ``port``, ``status``.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TIMEOUT_S = 5.0
GENERATE = {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 1}, "cache_salt": "0"}
#: what changes a run, or tells something about it; the first is no path of any server
CALLS: tuple[tuple[str, str, Any], ...] = (
    ("GET", "/no-such-path", None),
    ("GET", "/metrics", None),
    ("GET", "/v1/models", None),
    ("GET", "/weight_info", None),
    ("GET", "/server_info", None),
    ("POST", "/pause?mode=keep", {}),
    ("POST", "/resume", {}),
    ("POST", "/sleep", {}),
    ("POST", "/reset_prefix_cache", {}),
    ("POST", "/abort_requests", {}),
    ("POST", "/collective_rpc", {"method": "shutdown"}),
    ("POST", "/init_weight_transfer_engine", {"init_info": {"root": "/tmp", "reader": "stranger"}}),
    ("POST", "/start_weight_update", {}),
    ("POST", "/update_weights", {"update_info": {"version": 999}}),
    ("POST", "/finish_weight_update", {"weight_version": "999"}),
    ("POST", "/inference/v1/generate", GENERATE),
    ("POST", "/v1/completions", {"model": "x", "prompt": [5, 6], "max_tokens": 1}),
    ("GET", "/dock/batch/{step}?rank=0&world_size=1&wait_s=0", None),
    ("GET", "/dock/batch/{step}?rank=0&world_size=97&wait_s=0", None),
    ("POST", "/dock/published/999", None),
    ("POST", "/dock/snapshot/{step}", None),
    ("POST", "/dock/finish/{step}", None),
    ("POST", "/dock/evaluate/00000000000000000000000000000000?set=%7B%22name%22%3A%22x%22%7D&seed=0", None),
    ("GET", "/segments/v000001/model.safetensors/0", None),
    ("GET", "/workers", None),
    ("POST", "/remove_worker?url=http://127.0.0.1:1", None),
    ("POST", "/flush_cache", None),
)


def say(point: str, what: str, got: str, **more: Any) -> None:
    print(json.dumps({"point": point, "what": what, "got": got, **more}), flush=True)


def listening(uid: int) -> Iterator[tuple[str, int]]:
    """Addresses where processes of a user listen: the kernel shows them to everybody."""
    for family, table in ((socket.AF_INET, "/proc/net/tcp"), (socket.AF_INET6, "/proc/net/tcp6")):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] != "0A" or int(fields[7]) != uid:
                continue
            address, port = fields[1].split(":")
            packed = b"".join(bytes.fromhex(address[i : i + 8])[::-1] for i in range(0, len(address), 8))
            yield socket.inet_ntop(family, packed), int(port, 16)


def request(address: tuple[str, int], method: str, path: str, body: Any, headers: dict[str, str]) -> str:
    """The status of the answer, or what there was in its place."""
    connection = http.client.HTTPConnection(*address, timeout=TIMEOUT_S)
    data = None if body is None else json.dumps(body)
    try:
        connection.request(method, path, body=data, headers={"content-type": "application/json", **headers})
        return str(connection.getresponse().status)
    except (OSError, http.client.HTTPException) as error:
        return f"{type(error).__name__}: {error}"[:80]
    finally:
        connection.close()


def servers(known: dict[str, Any]) -> None:
    """Every call to every port of the run, without a token and with wrong ones."""
    ports = set(known["ports"])
    guesses = {
        "no token": {},
        "a guessed token": {"authorization": "Bearer " + "0" * 64},
        "an empty token": {"authorization": "Bearer "},
        "the run id as token": {"authorization": f"Bearer {known['run_id']}", "x-hpcrl-attempt": "1"},
    }
    for host, port in sorted(set(listening(known["uid"]))):
        if port not in ports:
            continue
        address = ({"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host), port)
        speaks_http = True
        for name, headers in guesses.items():
            for method, form, body in CALLS if speaks_http else ():
                path = form.format(step=known["step"])
                got = request(address, method, path, body, headers)
                say("servers", f"{method} {path} with {name}", got, port=port)
                speaks_http = got.isdecimal()
                if not speaks_http:
                    break  # or it does not answer: once is enough


def files(known: dict[str, Any]) -> None:
    """Reading and writing what the run has on disk."""
    for name in known["paths"]:
        path = Path(name)
        try:
            os.listdir(path) if known["paths"][name] == "directory" else path.read_bytes()
            say("files", f"read {name}", "done")
        except OSError as error:
            say("files", f"read {name}", type(error).__name__)
        target = path / "stranger" if known["paths"][name] == "directory" else path
        try:
            with target.open("ab") as stream:
                stream.write(b"stranger\n")
            say("files", f"write {target}", "done")
        except OSError as error:
            say("files", f"write {target}", type(error).__name__)


def processes(known: dict[str, Any]) -> None:
    """What `ps` shows of the run's processes, and what only their owner may see."""
    for pid in known["pids"]:
        base = Path(f"/proc/{pid}")
        with contextlib.suppress(OSError):
            say("processes", f"command line of {pid}", "seen", text=(base / "cmdline").read_text().replace("\0", " "))
        for name in ("environ", "mem", "maps", "cwd"):
            try:
                os.readlink(base / name) if name == "cwd" else (base / name).open("rb").read(1)
                say("processes", f"{name} of {pid}", "done")
            except OSError as error:
                say("processes", f"{name} of {pid}", type(error).__name__)


def shared_memory(known: dict[str, Any]) -> None:
    """The caches of weights in shared memory: reading, replacing, adding."""
    for base in map(Path, known["cache_directories"]):
        for what, act in {
            "list": lambda b=base: os.listdir(b),
            "add to": lambda b=base: (b / "stranger").write_bytes(b"x"),
            "rename": lambda b=base: os.rename(b, b.with_name(b.name + "-stolen")),
            "replace": lambda b=base: os.rmdir(b),
        }.items():
            try:
                act()
                say("node cache", f"{what} {base}", "done")
            except OSError as error:
                say("node cache", f"{what} {base}", type(error).__name__)


def jobs(known: dict[str, Any]) -> None:
    """A job of ours with the name and the comment of the run; ends by itself."""
    if not known["slurm"]:
        return
    environment = {**os.environ, **known["slurm"]}
    command = [
        "sbatch",
        f"--job-name=hpcrl-{known['run']}",
        f"--comment={known['comment']}",
        "--time=5",
        "--nodes=1",
        "--output=/dev/null",
        "--chdir=/tmp",
        "--wrap=sleep 240",
    ]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    say("jobs", "submit a job with the run's name and comment", (result.stdout + result.stderr).strip())
    for job in known["jobs"]:
        result = subprocess.run(
            ["scancel", str(job)], env=environment, capture_output=True, text=True, timeout=60, check=False
        )
        got = (result.stdout + result.stderr).strip() or f"exit code {result.returncode}"
        say("jobs", f"cancel job {job}", got, code=result.returncode)


def main() -> None:
    known = json.load(sys.stdin)
    for act in (servers, files, processes, shared_memory, jobs):
        act(known)


if __name__ == "__main__":
    main()
