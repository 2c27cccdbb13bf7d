"""What the surroundings refuse, and questions that nobody answers: one message, a documented exit code."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

HPCRL = Path(sys.executable).with_name("hpcrl")
#: nobody may make a directory there, not even root
FORBIDDEN = Path("/sys/hpcrl-test")


def hpcrl(*arguments: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [HPCRL, *arguments],
        cwd=cwd,
        env={**os.environ, **env},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ("render", "quickstart", "--cluster", "devcluster", "--output", str(FORBIDDEN)),
        ("warmup", "quickstart", "--output", str(FORBIDDEN)),
    ],
    ids=["render", "warmup"],
)
def test_a_directory_that_is_refused_is_one_message(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    # at once: nobody waits for torch to be imported
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')\n")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    result = hpcrl(*arguments, cwd=tmp_path, PYTHONPATH=path)
    assert result.returncode == 2
    assert str(FORBIDDEN.parent) in result.stderr
    assert "hint:" in result.stderr
    assert "Traceback" not in result.stderr


def test_output_that_a_full_disk_refuses_is_one_message(tmp_path: Path) -> None:
    with Path("/dev/full").open("w") as full:
        result = subprocess.run(
            [HPCRL, "recipe", "show", "quickstart"],
            cwd=tmp_path,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert result.returncode == 2
    assert result.stderr.startswith("hpcrl: the output could not be written: no space is left on the device\n")
    assert "Traceback" not in result.stderr


def test_a_question_without_a_terminal_names_the_option(tmp_path: Path) -> None:
    home = tmp_path / "clusters"
    shared = home / "dev/shared"
    shared.mkdir(parents=True)
    (shared / "work").touch()
    result = hpcrl("devcluster", "down", "--home", str(home), cwd=tmp_path)
    assert result.returncode == 2
    assert "--yes" in result.stderr
    assert (shared / "work").exists()


@pytest.mark.slow
def test_an_interrupted_warmup_leaves_nothing_and_says_so(tmp_path: Path) -> None:
    """Ctrl-C as a terminal sends it: to the command and to the process that trains."""
    output, (controller, terminal) = tmp_path / "model", pty.openpty()
    command = [HPCRL, "warmup", "quickstart", "--output", output]
    with subprocess.Popen(
        command, cwd=tmp_path, stdin=terminal, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stderr is not None
        first = process.stderr.readline()
        assert first.startswith("warm-up step"), first
        assert list(tmp_path.iterdir()), "nothing is being written yet"
        os.killpg(process.pid, signal.SIGINT)
        said = process.stderr.read()
        assert process.wait(60) == 130
    assert said.splitlines()[-1] == f"interrupted; {output} was not written"
    assert "Traceback" not in said
    deadline = time.monotonic() + 120
    while list(tmp_path.iterdir()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not list(tmp_path.iterdir())
    os.close(controller)
    os.close(terminal)
