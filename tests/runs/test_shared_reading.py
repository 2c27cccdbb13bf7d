"""A shared run is read by another user of the group, in a process with that user's id, and by no user outside of it."""

from __future__ import annotations

import grp
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from runs_testing import Hpcrl, make_run, write_log, write_status, write_steps

from hpcrl.runs.rundir import RunDir
from hpcrl.runs.start.privacy import protect
from hpcrl.runs.status import RunState

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
UID = 54_321
"""No user of this machine; its own group has the same number."""
FILES = ("weights/v000001/model.safetensors", "rollouts/step-000001.jsonl", "token", "submitit/1_0.pkl")
READER = """
import contextlib, errno, io, json, os, sys
from pathlib import Path

from hpcrl.cli.main import main

path, uid, groups, files = Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3]), json.loads(sys.argv[4])


def called(*words):
    out, err, code = io.StringIO(), io.StringIO(), 0
    sys.argv = ["hpcrl", *words]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
    return [code, out.getvalue(), err.getvalue()]


def read():
    return {"status": called("status", str(path), "--json"), "logs": called("logs", str(path), "--role", "trainer")}


def attempt(act):
    try:
        return act()
    except OSError as error:
        return errno.errorcode[error.errno]


# with root's rights first: what commands import late may lie where others may not enter
read()
os.setgroups(groups)
os.setresgid(uid, uid, uid)
os.setresuid(uid, uid, uid)
found = {"files": {name: attempt(lambda: (path / name).read_bytes().decode()) for name in files}}
found["written"] = [
    attempt(lambda: str((path / "events/0009-mine.jsonl").write_text("{}"))),
    attempt(lambda: str((path / "recipe.yaml").open("a"))),
    attempt(lambda: str((path / "plan.json").unlink())),
]
print(json.dumps({**found, **read()}))
"""


@pytest.fixture
def group() -> grp.struct_group:
    """A group of this machine that is not root's."""
    found = next((each for each in grp.getgrall() if each.gr_gid not in (0, UID)), None)
    if found is None:
        pytest.skip("this machine has no other group")
    return found


@pytest.fixture
def run() -> Iterator[RunDir]:
    """A run with three steps, below a directory that others may enter: directories of tests are their user's alone."""
    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o711)
        # as processes of a run, which write for their user alone
        previous = os.umask(0o077)
        try:
            yield written_run(Path(directory))
        finally:
            os.umask(previous)


def written_run(root: Path) -> RunDir:
    run = make_run(root, "night")
    protect(run, None)
    attempt = write_status(run, RunState.COMPLETED)
    write_steps(run, 3, attempt=attempt)
    write_log(run, "trained three steps\n", role="trainer", attempt=attempt)
    for name, text in zip(FILES, ("tensors", "a reply", None, "a pickle"), strict=True):
        if text is not None:
            (run.path / name).parent.mkdir(parents=True, exist_ok=True)
            (run.path / name).write_text(text)
    return run


def read_as(run: RunDir, *groups: int) -> dict[str, Any]:
    """Return what a user of some groups can read of a run, and what comes of its writing there."""
    with tempfile.TemporaryDirectory() as home:
        Path(home).chmod(0o777)
        env = {**os.environ, "HOME": home, "XDG_STATE_HOME": f"{home}/state", "XDG_CONFIG_HOME": f"{home}/config"}
        words = [sys.executable, "-c", READER, str(run.path), str(UID), json.dumps(groups), json.dumps(FILES)]
        done = subprocess.run(words, env=env, cwd="/", capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_a_user_of_the_group_reads_a_shared_run(run: RunDir, group: grp.struct_group, hpcrl: Hpcrl) -> None:
    closed = dict.fromkeys(FILES, "EACCES")
    before = read_as(run, group.gr_gid)
    assert before["files"] == closed
    assert before["status"][0] != 0

    assert hpcrl("share", str(run.path), "--group", group.gr_name)[0] == 0
    found = read_as(run, group.gr_gid)
    code, out, err = found["status"]
    assert (code, err) == (0, "")
    assert json.loads(out)["state"] == "COMPLETED"
    assert json.loads(out)["progress"]["steps"] == 3
    assert found["logs"][0] == 0
    assert "trained three steps" in found["logs"][1]
    # the token opens the servers of a run, and pickles are executed by its owner's jobs
    assert found["files"] == {**closed, FILES[0]: "tensors", FILES[1]: "a reply"}
    # reading alone
    assert found["written"] == ["EACCES"] * 3

    # a user of other groups, and the same one after the end of the sharing
    other = read_as(run)
    assert other["files"] == closed
    assert other["status"][0] != 0
    assert hpcrl("share", str(run.path), "--undo")[0] == 0
    after = read_as(run, group.gr_gid)
    assert after["files"] == closed
    assert after["status"][0] != 0
