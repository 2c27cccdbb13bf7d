"""A program that takes Docker's and Apptainer's command lines and runs programs on this machine, without any wall.

``FAKE_CONTAINERS`` is a directory; a container is a directory in it, which stands for the work tree.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

STORE = Path(os.environ["FAKE_CONTAINERS"])


def main(words: list[str]) -> int:
    """Carry out one command line."""
    with (STORE / "log").open("a") as stream:
        stream.write(f"{words}\n")
    match words:
        case ["run", *_]:
            if words[-1] != "image":
                return 125
            name = words[words.index("--name") + 1]
            (STORE / name).mkdir()
            sys.stdin.read()
            shutil.rmtree(STORE / name)
            return 0
        case ["instance", "start", *_]:
            (STORE / words[-1]).mkdir()
            return 0
        case ["kill", _, _, name] | ["instance", "stop", _, _, name]:
            return _signal_all(name)
        case ["exec", *rest]:
            return _exec(rest)
    return 64


def _exec(words: list[str]) -> int:
    variables = {"PATH": os.environ["PATH"]}
    cwd = "/"
    while words[0].startswith("--"):
        option = words.pop(0)
        if option in ("--workdir", "--pwd"):
            cwd = words.pop(0)
        elif option == "--env":
            name, _, value = words.pop(0).partition("=")
            variables[name] = value
    name = words.pop(0).removeprefix("instance://")
    root = STORE / name
    if not root.is_dir():
        print("Error: no such container", file=sys.stderr)
        return 1
    if words[-1] == "kill -9 -1":
        return _signal_all(name)
    argv = [word.replace("/work", str(root)) for word in words]
    try:
        process = subprocess.Popen(argv, cwd=cwd.replace("/work", str(root)), env=variables, start_new_session=True)
    except FileNotFoundError:
        print(f"{argv[0]}: not found", file=sys.stderr)
        return 127
    (STORE / f"{name}.{process.pid}").touch()
    rc = process.wait()
    return 128 - rc if rc < 0 else rc


def _signal_all(name: str) -> int:
    for path in STORE.glob(f"{name}.*"):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(int(path.suffix[1:]), signal.SIGKILL)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
