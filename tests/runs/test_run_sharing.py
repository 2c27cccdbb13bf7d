"""Bundles and shared runs: what is in them, and that no secret is."""

from __future__ import annotations

import errno
import grp
import json
import os
import stat
import struct
import tarfile
from pathlib import Path
from typing import Any

import pytest
from runs_testing import make_run, write_steps

from hpcrl.errors import UsageError
from hpcrl.runs.events import EventWriter
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.sharing.group_access import close_to_group, find_leaks, open_to_group, shared_group
from hpcrl.runs.sharing.run_bundle import write_run_bundle
from hpcrl.runs.sharing.secret_scan import SecretScan
from hpcrl.runs.start.privacy import protect

HUB = "hf_" + "a1B2" * 9
GROUP = grp.getgrgid(os.getegid()).gr_name


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    found = make_run(tmp_path / "runs")
    if not found.attempts():
        found.start_attempt()
    writer = EventWriter(found, attempt=1, writer="supervisor")
    writer.emit("run.state", state="RUNNING")
    writer.close()
    log = found.log_path(1, "trainer", 0)
    log.parent.mkdir(parents=True)
    log.write_text("x" * 400_000 + f"\nloading with {HUB}\nthe end\n")
    found.rollouts_dir.mkdir(exist_ok=True)
    for name in ("steps-000001-000100.jsonl", "steps-000001-000100.jsonl.gz"):  # of an earlier version, and of this one
        (found.rollouts_dir / name).write_text("older rollouts")
    for step in range(101, 109):
        (found.rollouts_dir / f"step-{step:06d}.jsonl").write_text('{"text": "a reply"}\n' * 5)
    (found.weights_dir / "v000001").mkdir(parents=True)
    (found.weights_dir / "v000001" / "model.safetensors").write_bytes(b"tensors" * 1000)
    (found.checkpoints_dir / "step-000001").mkdir(parents=True)
    (found.checkpoints_dir / "step-000001" / "state.json").write_text("{}")
    return found


def contents(path: Path) -> dict[str, bytes]:
    with tarfile.open(path) as tar:
        return {each.name: tar.extractfile(each).read() for each in tar}  # type: ignore[union-attr]


def test_a_bundle_explains_a_run_and_opens_nothing(run: RunDir, tmp_path: Path) -> None:
    token = (run.path / "token").read_text()
    (run.events_dir / "0001-odd.jsonl").write_text(f'{{"header": "{token}"}}\n')
    made = write_run_bundle(run, tmp_path / "b.tar.gz", max_bytes=1 << 20)
    files = contents(made.path)
    names = {name.partition("/")[2] for name in files}
    assert {"recipe.yaml", "cluster.yaml", "plan.json", "run.json", "why.json", "MANIFEST.json"} <= names
    assert {f"rollouts/step-{step:06d}.jsonl" for step in range(104, 109)} <= names
    assert not [name for name in names if name.startswith("rollouts/steps-")]
    assert not [name for name in names if name.startswith(("weights", "checkpoints", "token"))]
    everything = b"".join(files.values())
    assert token.encode() not in everything
    assert HUB.encode() not in everything
    log = files["run-1/attempts/0001/logs/trainer/0-0.log"]
    assert log == b"loading with [secret]\nthe end\n"
    manifest = json.loads(files["run-1/MANIFEST.json"])
    assert manifest["redacted"] == {
        "attempts/0001/logs/trainer/0-0.log": ["a token of the Hugging Face hub"],
        "events/0001-odd.jsonl": ["the token of the run"],
    }
    assert stat.S_IMODE(made.path.stat().st_mode) == 0o600
    with pytest.raises(UsageError, match="exists"):
        write_run_bundle(run, made.path, max_bytes=1 << 20)


def test_the_end_of_a_log_does_not_begin_within_a_key(run: RunDir, tmp_path: Path) -> None:
    """Lines of a private key do not look like one."""
    lines = "\n".join("Q1w2E3r4" * 8 for _ in range(40))
    key = f"-----BEGIN PRIVATE KEY-----\n{lines}\n-----END PRIVATE KEY-----\n"
    rest = 262_144 - len(key) // 2
    run.log_path(1, "trainer", 0).write_text("before\n" * 100 + key + "an ordinary line\n" * (rest // 17 + 1))
    files = contents(write_run_bundle(run, tmp_path / "b.tar.gz", max_bytes=1 << 20).path)
    (log,) = [data for name, data in files.items() if "trainer" in name and name.endswith(".log")]
    assert b"Q1w2E3r4" not in log
    assert b"PRIVATE KEY" not in log
    assert log.startswith(b"an ordinary line\n")


def test_a_bundle_has_changes_of_the_code_that_are_not_committed(run: RunDir, tmp_path: Path) -> None:
    place = run.snapshots_dir / "0001"
    place.mkdir(parents=True)
    (place / "hpcrl.diff").write_text(f"+token = '{HUB}'\n")
    files = contents(write_run_bundle(run, tmp_path / "b.tar.gz", max_bytes=1 << 20).path)
    assert files["run-1/snapshots/0001/hpcrl.diff"] == b"+token = '[secret]'\n"


def test_a_bundle_has_a_size(run: RunDir, tmp_path: Path) -> None:
    (run.events_dir / "0001-huge.jsonl").write_text("{}\n" * 100_000)
    made = write_run_bundle(run, tmp_path / "b.tar.gz", max_bytes=100_000, rollouts=0)
    files = contents(made.path)
    assert made.left_out == ["events/0001-huge.jsonl"]
    assert sum(map(len, files.values())) < 110_000
    assert not [name for name in files if "rollouts" in name]
    assert list(tmp_path.glob(".b.tar.gz*")) == []


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (HUB, "a token of the Hugging Face hub"),
        ("-----BEGIN OPENSSH PRIVATE KEY-----", "a private key"),
        ("key=sk-" + "Ab3" * 10, "a key of an AI service"),
        ("ghp_" + "a" * 36, "a token of GitHub"),
        ("AKIA" + "A1" * 8, "a key of AWS"),
        ("https://hooks.slack.com/services/T000/B000/" + "a" * 24, "a token of Slack"),
        ("postgres://me:word@host/db", "a password in a URL"),
        ("Authorization: Bearer " + "a" * 30, "a bearer token"),
        ("WANDB_API_KEY=" + "0a" * 20, "a variable with a secret"),
    ],
)
def test_forms_of_secrets(text: str, kind: str) -> None:
    assert [found for found, _ in SecretScan().kinds(f"before {text} after\n".encode())] == [kind]


@pytest.mark.parametrize(
    "text", ["stop_token: </s>", "max_new_tokens=4096", "http://host:8000/v1", "task-1234567890abcdefghij", "a@b.org"]
)
def test_ordinary_text_is_none(text: str) -> None:
    assert list(SecretScan().kinds(text.encode())) == []


def test_a_secret_on_the_edge_of_a_chunk_is_found_once(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"y" * ((4 << 20) - 11) + b"\n" + HUB.encode() + b"\n")
    assert [(each.kind, each.line) for each in SecretScan().file(path)] == [("a token of the Hugging Face hub", 2)]


def modes(run: RunDir) -> dict[str, int]:
    found = {".": run.path, **{str(path.relative_to(run.path)): path for path in run.path.rglob("*")}}
    return {name: stat.S_IMODE(path.lstat().st_mode) for name, path in found.items() if not path.is_symlink()}


def test_a_shared_run_is_readable_but_for_its_token(run: RunDir) -> None:
    before = modes(run)
    run.log_path(1, "trainer", 0).write_text("no secret\n")
    assert list(find_leaks(run)) == []
    assert open_to_group(run, GROUP).entries > 10
    after = modes(run)
    assert after["."] == 0o2750
    assert after["recipe.yaml"] & 0o777 == 0o640
    assert after["attempts/0001"] == 0o2750
    assert after["weights/v000001/model.safetensors"] & 0o777 == 0o640
    assert after["token"] == before["token"] == 0o600
    # an attempt that begins does not close it
    assert shared_group(run) == GROUP
    protect(run, shared_group(run) or run.cluster().files.group)
    assert modes(run)["."] == 0o2750
    assert close_to_group(run) > 10
    assert all(mode & 0o077 == 0 for mode in modes(run).values())
    assert shared_group(run) is None


def test_a_closed_run_stays_closed_for_what_is_written_later(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is closed, there may be no setfacl."""
    monkeypatch.setenv("PATH", "/nowhere")
    # user, group, the group by its number, mask, others
    entries = [(1, 7, -1), (4, 5, -1), (8, 5, os.getegid()), (16, 5, -1), (32, 0, -1)]
    acl = struct.pack("<I", 2) + b"".join(struct.pack("<HHi", *entry) for entry in entries)
    try:
        os.setxattr(run.events_dir, "system.posix_acl_default", acl)
    except OSError as error:
        if error.errno != errno.EOPNOTSUPP:
            raise
        pytest.skip("the filesystem has no access lists")
    close_to_group(run)
    with pytest.raises(OSError, match="No data available"):
        os.getxattr(run.events_dir, "system.posix_acl_default")
    previous = os.umask(0o077)
    try:
        (run.events_dir / "0010.jsonl").write_text("")
    finally:
        os.umask(previous)
    assert stat.S_IMODE((run.events_dir / "0010.jsonl").stat().st_mode) == 0o600


def test_a_run_with_secrets_is_not_shared(run: RunDir) -> None:
    (leak,) = find_leaks(run)
    assert (leak.kind, leak.path.name, leak.line) == ("a token of the Hugging Face hub", "0-0.log", 2)
    with pytest.raises(UsageError, match="there is no group"):
        open_to_group(run, "no-such-group-here")
    assert shared_group(run) is None


def test_the_commands(run: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    from hpcrl.cli.keeping import bundle, share

    with pytest.raises(UsageError, match=r"nothing was changed\n.*0-0\.log:2: a token"):
        share(str(run.path), group=GROUP, undo=False, dry_run=False, root=None)
    assert HUB not in capsys.readouterr().err
    monkeypatch.chdir(tmp_path)
    bundle(str(run.path), output=None, max_mib=1, no_rollouts=False, root=None)
    out, err = capsys.readouterr()
    assert out.strip() == "run-1.bundle.tar.gz"
    assert "no page: run-1 has no step yet" in err
    write_steps(run, 3)
    bundle(str(run.path), output=tmp_path / "whole", max_mib=16, no_rollouts=False, root=None)
    files = contents(tmp_path / "whole")
    assert files["run-1/metrics/0001.jsonl"].count(b"\n") == 3
    page = files["run-1/report.html"]
    assert b"<html" in page
    assert b"reward-env" in page
