"""An installed wheel works outside the checkout, with the core dependencies alone."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The ``hpcrl`` command of a wheel in an environment of its own.

    The dependencies come from this environment by a path file, torch and the like hidden.
    """
    directory = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(directory), str(ROOT)],
        check=True,
        capture_output=True,
    )
    (wheel,) = directory.glob("*.whl")
    environment = directory / "env"
    venv.create(environment)
    # by this environment's pip, and without compiling what is hardly imported: both were most of the time
    pip = [sys.executable, "-m", "pip", "--python", environment / "bin/python"]
    subprocess.run([*pip, "install", "-q", "--no-compile", "-c", ROOT / "constraints.txt", wheel], check=True)
    return environment / "bin/hpcrl"


@pytest.mark.slow
def test_wheel_lists_and_plans(installed: Path, tmp_path: Path) -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([installed, *arguments], cwd=tmp_path, capture_output=True, text=True, check=False)

    assert "quickstart" in run("recipe", "list").stdout
    assert "local" in run("cluster", "list").stdout
    plan = run("plan", "recipes/quickstart.yaml", "--commands")
    assert plan.returncode == 0, plan.stderr
    assert "hpcrl.trainer" in plan.stdout
    # the trainer's part is not installed: an error with the install command, no traceback
    warmup = run("warmup", "quickstart")
    assert warmup.returncode == 2
    # hpcrl is on no package index: the command names the wheel, and the interpreter that lacks the part
    assert f"{installed.parent / 'python'} -m pip install '" in warmup.stderr
    assert ".whl[trainer]'" in warmup.stderr
    assert "Traceback" not in warmup.stderr
