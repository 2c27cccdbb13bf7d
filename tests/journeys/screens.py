"""What a person types and sees: commands on a terminal of 80 columns, compared with golden screens.

A golden file holds a whole journey: each command after ``$``, and what the terminal showed. Times, ids, paths and
sizes of a run's files are replaced by words, nothing else; ``HPCRL_REWRITE_GOLDEN=1`` writes the files again.
"""

from __future__ import annotations

import difflib
import errno
import fcntl
import os
import pty
import re
import shlex
import signal
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Mapping
from pathlib import Path

from patience import patience

from hpcrl import __version__

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = Path(__file__).resolve().parent / "golden"
HPCRL = Path(sys.executable).with_name("hpcrl")
_LIMIT_S = 120.0

_UNIT = r"(?:s|ms|m|h|d|min|seconds?|minutes?|hours?|days?)"
#: what differs from time to time, and the word that stands for it
_VARIABLE = (
    (re.compile(r"\x1b\[[0-9;?]*[A-Za-z]"), ""),
    (re.compile(r"\b20\d{6}-\d{6}\b"), "DATE"),
    (re.compile(r"\b20\d\d-\d\d-\d\d[ T]\d\d:\d\d(?::\d\d)?(?:\.\d+)?Z?"), "DATE"),
    (re.compile(r"\b[0-9a-f]{32}\b"), "RUN-ID"),
    (re.compile(r"\bpid \d+"), "pid PID"),
    # how many rollouts had begun and failed when a run ended
    (
        re.compile(r"\b\d+ of \d+ rollouts failed \(\d+\.\d%\): \d+ raised"),
        "SOME of SOME rollouts failed (SHARE): SOME raised",
    ),
    (re.compile(r"(?m)(?<= )\d+% *$"), "SHARE"),
    (re.compile(r"\bjob \d+"), "job JOB"),
    (re.compile(r"(?<![\d:.])\d+:\d\d(?::\d\d)?(?![\d:])"), "TIME"),
    # of a checkpoint: rollouts are in it, as many as have just ended
    (re.compile(r"(?<![\w.])\d+\.\d MB\b"), "SIZE"),
    (re.compile(rf"(?<![\w.])\d+(?:\.\d+)? ?{_UNIT}(?![\w.])"), "TIME"),
)


def normal(screen: str, names: Mapping[str, str]) -> str:
    """A screen without what differs from time to time.

    Parameters
    ----------
    names:
        Words by what they stand for: paths, and numbers of jobs and processes that are known.
    """
    text = screen.replace("\r\n", "\n")
    for pattern, word in _VARIABLE:
        text = pattern.sub(word, text)
    # the longest first: one path may be the beginning of another
    for value in sorted(names, key=len, reverse=True):
        text = text.replace(value, names[value])
    text = text.replace(__version__, "VERSION")
    return "\n".join(_settled(line).rstrip() for line in text.split("\n"))


def _settled(line: str) -> str:
    """Columns as far apart in each run: a time is as wide as it is."""
    return re.sub(r"(?<=\S) {2,}", "  ", line) if "TIME" in line or "DATE" in line else line


class Journey:
    """One person, a home directory, and what was seen so far.

    Attributes
    ----------
    home, cwd:
        The person's home, and where they are.
    env:
        Of the commands.
    names:
        See `normal`.
    """

    def __init__(self, home: Path, **env: str) -> None:
        self.home = self.cwd = home
        home.mkdir(parents=True, exist_ok=True)
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("XDG_", "HPCRL_"))}
        self.env = {
            **kept,
            "HOME": str(home),
            "PATH": f"{HPCRL.parent}{os.pathsep}{os.environ['PATH']}",
            # no colours and no cursor: a screen is what stands on it
            "TERM": "dumb",
            "USER": "ada",
            "LOGNAME": "ada",
            **env,
        }
        self.names = {str(home): "~", str(ROOT): "HPCRL"}
        self._seen: list[str] = []

    def write(self, name: str, text: str) -> None:
        """The person writes a file, in an editor."""
        path = self.cwd / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        self._seen.append(f"(writes {name})\n{normal(text.rstrip(), self.names)}\n")

    def go(self, directory: Path) -> None:
        """The person goes elsewhere."""
        directory.mkdir(parents=True, exist_ok=True)
        self.cwd = directory
        self._seen.append(f"$ cd {normal(str(directory), self.names)}\n")

    def say(self, words: str) -> None:
        """What happens meanwhile."""
        self._seen.append(f"({words})\n")

    def type(self, command: str, *, answer: str = "", user: int | None = None) -> str:
        """One command on a terminal of 80 columns; returns what it showed, which is also remembered.

        Parameters
        ----------
        answer:
            What the person types when they are asked.
        user:
            Number of the user, where it is another one; then ``command`` is one of hpcrl, and no shell reads it.
        """
        shown, code = _on_terminal(command, cwd=self.cwd, env=self.env, answer=answer, user=user)
        ended = f"(exit code {code})\n" if code else ""
        who = "" if user is None else "(another user) "
        text = normal(shown, self.names).strip("\n")
        self._seen.append(f"{who}$ {normal(command, self.names)}\n{text}\n{ended}")
        return shown

    @property
    def text(self) -> str:
        """The journey so far."""
        return "\n".join(self._seen)

    def compare(self, name: str) -> None:
        """Compare with the golden file, or write it."""
        path = GOLDEN / f"{name}.txt"
        if os.environ.get("HPCRL_REWRITE_GOLDEN"):
            path.write_text(self.text)
        golden = path.read_text()
        difference = difflib.unified_diff(golden.splitlines(), self.text.splitlines(), "golden", "seen", lineterm="")
        assert self.text == golden, "\n".join(difference)


def _on_terminal(command: str, *, cwd: Path, env: Mapping[str, str], answer: str, user: int | None) -> tuple[str, int]:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    # what is typed ahead would be shown twice
    settings = termios.tcgetattr(theirs)
    settings[3] &= ~termios.ECHO
    termios.tcsetattr(theirs, termios.TCSANOW, settings)
    argv = ["bash", "-c", command]
    if user is not None:
        argv = [sys.executable, str(Path(__file__).with_name("as_user.py")), str(user), *shlex.split(command)[1:]]
    process = subprocess.Popen(
        argv,
        cwd=cwd,
        env=dict(env),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    timer = threading.Timer(_LIMIT_S * patience(), lambda: os.killpg(process.pid, signal.SIGKILL))
    timer.start()
    try:
        if answer:
            os.write(ours, answer.encode())
        shown = _read_all(ours)
        code = process.wait()
    finally:
        timer.cancel()
        os.close(ours)
    return shown, code


def _read_all(descriptor: int) -> str:
    """What a terminal shows until nobody has it open any more."""
    text = b""
    while True:
        try:
            part = os.read(descriptor, 65536)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            return text.decode()
        if not part:
            return text.decode()
        text += part
