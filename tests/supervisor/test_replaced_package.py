"""An upgrade in place while a run is alive: what lives goes on, what starts later is new, and a person is told."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from supervisor_testing import end_everything, processes_of, wait_ended, wait_for, wait_running

import hpcrl
from hpcrl.processes import procfs
from hpcrl.runs.observe import observe
from hpcrl.runs.record import RunRecord
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.status import ComponentState, RunState
from hpcrl.submit.submission import cancel

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

PACKAGE = Path(hpcrl.__file__).parent
DATA = ("templates", "clusters", "recipes", "locks")
START = """
import sys
from pathlib import Path
import hpcrl
from supervisor_testing import start
assert Path(hpcrl.__file__).parent == Path(sys.argv[1]) / "hpcrl"
start(Path(sys.argv[2]), engine_policy={"restart": "on-failure", "max_restarts": 2})
"""
CHANGES = """
import sys
from pathlib import Path
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.start.snapshot import changes_since_submit
print("\\n".join(changes_since_submit(RunDir(Path(sys.argv[1])))))
"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A directory from which hpcrl is imported: a copy of the package beside its data."""
    path = tmp_path / "site"
    shutil.copytree(PACKAGE, path / "hpcrl", ignore=shutil.ignore_patterns("__pycache__", "_data"))
    for name in DATA:
        data = PACKAGE / "_data" / name if (PACKAGE / "_data").is_dir() else PACKAGE.parent / name
        (path / name).symlink_to(data)
    return path


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    """A runs root; what a failed test leaves running is ended."""
    path = tmp_path / "runs"
    yield path
    for run_dir in path.iterdir() if path.is_dir() else ():
        end_everything(RunDir(run_dir))


def python(site: Path, program: str, *arguments: object) -> str:
    """What a program prints whose hpcrl is the one of ``site``."""
    here = Path(__file__).parent
    path = os.pathsep.join(map(str, (site, here, here.parent)))
    command = [sys.executable, "-P", "-c", program, *map(str, arguments)]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def replace(site: Path) -> None:
    """Put another version in the place of the package, as an installer does; nothing of the old one stays."""
    new, old = site / "new", site / "old"
    shutil.copytree(site / "hpcrl", new, ignore=shutil.ignore_patterns("__pycache__"))
    text = (new / "__init__.py").read_text()
    (new / "__init__.py").write_text(text.replace(f'"{hpcrl.__version__}"', '"99.0"'))
    (site / "hpcrl").rename(old)
    new.rename(site / "hpcrl")
    shutil.rmtree(old)


def test_a_run_survives_another_version_in_the_place_of_its_package(root: Path, site: Path) -> None:
    python(site, START, site, root)
    run = RunDir(root / "run-1")
    before = wait_running(run).components[0]
    run_id = RunRecord.read(run).run_id
    environments = [procfs.read_environ(each.pid) for each in procfs.with_environ("HPCRL_RUN_ID", run_id)]
    assert any(str(site) in each.get("PYTHONPATH", "") for each in environments)
    assert python(site, CHANGES, run.path).strip() == ""
    replace(site)
    # the supervisor of the old version starts an engine by a guard of the new one
    assert before.pid is not None
    os.kill(before.pid, signal.SIGKILL)

    def is_back() -> bool:
        engine = observe(run).components[0]
        return engine.restarts == 1 and engine.state is ComponentState.READY

    wait_for(is_back, 30, "the restart")
    assert observe(run).state is RunState.RUNNING
    changes = python(site, CHANGES, run.path).splitlines()
    assert changes[0] == f"hpcrl is 99.0, it was {hpcrl.__version__}"
    assert any(line.startswith("files of hpcrl have changed") for line in changes)
    cancel(run, user="somebody")
    view = wait_ended(run)
    assert view.state is RunState.CANCELLED
    assert processes_of(run) == []
