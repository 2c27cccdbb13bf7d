"""`hpcrl model get` against a hub on loopback: what is cut goes on, what is damaged is not kept."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hub_server import COMMIT, Hub, serve_hub
from start_models import write_tiny_model

pytest.importorskip("huggingface_hub")

from hpcrl.errors import UsageError
from hpcrl.models.fetch import SOURCE, FetchedModel, fetch_model, read_source, stage_of
from hpcrl.models.hub import HubId
from hpcrl.models.installed import list_models
from hpcrl.models.remote import FetchError

MODEL = HubId("owner/model")
WEIGHTS = "model.safetensors"


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    """A hub with a small whole model, some bytes of it random, and copies in other formats."""
    source = write_tiny_model(tmp_path / "published")
    with serve_hub() as hub:
        hub.files = {path.name: path.read_bytes() for path in source.iterdir()}
        hub.files |= {"pytorch_model.bin": b"pickle", "original/model.pth": b"x", ".gitattributes": b"*"}
        hub.files["noise.bin.json"] = b"{}"
        hub.large = {WEIGHTS}
        yield hub


@pytest.fixture
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """`huggingface_hub` waits between its own tries, and keeps bytes of a connection by ten million."""
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda _: None)
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 256)


def fetch(hub: Hub, target: Path, model: HubId = MODEL, **options: Any) -> FetchedModel:
    return fetch_model(model, target, endpoint=hub.url, **options)


def content(path: Path) -> dict[str, bytes]:
    return {each.name: each.read_bytes() for each in path.iterdir() if each.name != SOURCE}


def whole(hub: Hub) -> dict[str, bytes]:
    others = ("pytorch_model.bin", "original/model.pth", ".gitattributes")
    return {name: data for name, data in hub.files.items() if name not in others}


def test_a_model_comes_whole_and_once(hub: Hub, tmp_path: Path) -> None:
    target, lines = tmp_path / "models/owner/model", list[str]()
    fetched = fetch(hub, target, report=lines.append)
    assert content(target) == whole(hub)
    assert fetched.commit == COMMIT
    assert fetched.received == fetched.bytes == sum(map(len, whole(hub).values()))
    assert fetched.left_out == (".gitattributes", "original/model.pth", "pytorch_model.bin")
    assert len(lines) == len(whole(hub))
    source = read_source(target)
    assert source is not None
    assert (source["id"], source["commit"]) == ("owner/model", COMMIT)
    assert source["files"][WEIGHTS] == hashlib.sha256(hub.files[WEIGHTS]).hexdigest()
    assert [each.name for each in target.parent.iterdir()] == ["model"]
    asked = len(hub.asked)
    assert fetch(hub, target).received == 0
    assert len(hub.asked) == asked
    (found,) = list_models(tmp_path / "models")
    assert (found.name, found.family, found.commit, found.state) == ("owner/model", "qwen3_moe", COMMIT, "whole")


def test_the_token_goes_to_the_hub_alone(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large files come from a store elsewhere, to which the hub leads."""
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    fetch(hub, tmp_path / "model")
    assert {who for who, token in hub.tokens if token} == {"hub"}
    assert ("store", "") in hub.tokens
    assert ("hub", "Bearer hf_secret") in hub.tokens


def test_what_is_left_out_comes_when_it_is_asked_for(hub: Hub, tmp_path: Path) -> None:
    fetched = fetch(hub, tmp_path / "model", include=["original/*"])
    assert (tmp_path / "model/original/model.pth").read_bytes() == b"x"
    assert fetched.left_out == (".gitattributes", "pytorch_model.bin")


def test_a_cut_connection_continues_where_it_was(hub: Hub, tmp_path: Path, no_pauses: None) -> None:
    hub.cut_after, hub.cuts = 1000, 2
    fetch(hub, tmp_path / "model", jobs=1)
    assert content(tmp_path / "model") == whole(hub)
    assert any(given.startswith("bytes=") for _, given in hub.asked)


def test_the_next_call_continues_where_a_download_ended(hub: Hub, tmp_path: Path, no_pauses: None) -> None:
    target = tmp_path / "models/owner/model"
    hub.files[WEIGHTS] = bytes(range(256)) * 64
    hub.ends_at = 4321
    with pytest.raises(FetchError, match="cannot be reached"):
        fetch(hub, target, jobs=1)
    assert not target.exists()
    assert [(each.name, each.state) for each in list_models(tmp_path / "models")] == [("owner/model", "unfinished")]
    (part,) = stage_of(target).glob(f"{WEIGHTS}.*.part")
    size = part.stat().st_size
    assert size == 4321 // 256 * 256
    hub.ends_at, hub.asked = None, []
    fetched = fetch(hub, target)
    assert hub.asked == [(WEIGHTS, f"bytes={size}-")]
    assert fetched.received == len(hub.files[WEIGHTS]) - size
    assert content(target) == whole(hub)


def test_a_proxy_that_begins_at_the_first_byte_is_borne(hub: Hub, tmp_path: Path, no_pauses: None) -> None:
    hub.cut_after, hub.cuts, hub.whole = 700, 3, True
    fetch(hub, tmp_path / "model", jobs=1)
    assert content(tmp_path / "model") == whole(hub)


@pytest.mark.parametrize("name", [WEIGHTS, "config.json"])
def test_other_bytes_than_are_listed_are_not_kept(hub: Hub, tmp_path: Path, name: str) -> None:
    target = tmp_path / "model"
    hub.wrong = {name}
    with pytest.raises(FetchError, match="has other bytes than the hub lists") as caught:
        fetch(hub, target)
    assert name in str(caught.value)
    assert not target.exists()
    assert not list(stage_of(target).glob(f"{name}*"))
    hub.wrong = set()
    fetch(hub, target)
    assert content(target) == whole(hub)


def test_what_was_damaged_on_the_disk_comes_anew(hub: Hub, tmp_path: Path, no_pauses: None) -> None:
    target = tmp_path / "model"
    hub.files[WEIGHTS] = bytes(range(256)) * 64
    hub.ends_at = 4321
    with pytest.raises(FetchError):
        fetch(hub, target, jobs=1)
    (part,) = stage_of(target).glob(f"{WEIGHTS}.*.part")
    part.write_bytes(b"\xff" + part.read_bytes()[1:])
    hub.ends_at = None
    fetch(hub, target)
    assert content(target) == whole(hub)


def test_a_newer_commit_is_not_mixed_with_what_came_of_an_older_one(hub: Hub, tmp_path: Path, no_pauses: None) -> None:
    target = tmp_path / "model"
    hub.files[WEIGHTS] = bytes(range(256)) * 64
    hub.ends_at = 4321
    with pytest.raises(FetchError):
        fetch(hub, target, jobs=1)
    hub.ends_at, hub.commit = None, "f" * 40
    hub.files[WEIGHTS] = bytes(reversed(hub.files[WEIGHTS]))
    del hub.files["noise.bin.json"]
    fetch(hub, target)
    assert content(target) == whole(hub)
    hub.commit = "e" * 40
    with pytest.raises(UsageError, match=r"is owner/model at commit f{12}, not owner/model at e{12}"):
        fetch(hub, target)


@pytest.mark.parametrize(
    ("refusal", "model", "says"),
    [
        ((403, "GatedRepo"), MODEL, "owner/model is gated, and you may not read it"),
        ((404, "RepoNotFound"), MODEL, "there is no model owner/model on the hub, or it is private"),
        ((401, ""), MODEL, "the hub refuses owner/model to you (HTTP 401)"),
        ((403, ""), MODEL, "the hub refuses owner/model to you (HTTP 403)"),
        ((500, ""), MODEL, "the hub answers HTTP 500 for owner/model"),
        (None, HubId("owner/model", "v9"), "owner/model has no revision 'v9'"),
        (None, HubId("owner/other"), "there is no model owner/other"),
    ],
)
@pytest.mark.usefixtures("no_pauses")
def test_refusals_are_distinguished(
    hub: Hub, tmp_path: Path, *, refusal: tuple[int, str] | None, model: HubId, says: str
) -> None:
    hub.refusal = refusal
    with pytest.raises((UsageError, FetchError)) as caught:
        fetch(hub, tmp_path / "model", model)
    assert says in str(caught.value)
    assert "hint: " in str(caught.value)
    assert list(tmp_path.glob(".*")) == []


def test_a_hub_that_is_not_there_is_reported(tmp_path: Path, no_pauses: None) -> None:
    with serve_hub() as gone:
        url = gone.url
    with pytest.raises(FetchError, match="the hub cannot be reached for owner/model"):
        fetch_model(MODEL, tmp_path / "model", endpoint=url)


def test_a_tag_is_a_revision(hub: Hub, tmp_path: Path) -> None:
    fetch(hub, tmp_path / "model@v1", HubId("owner/model", "v1"))
    assert content(tmp_path / "model@v1") == whole(hub)


def test_names_that_lead_outside_are_refused(hub: Hub, tmp_path: Path) -> None:
    hub.files["../evil.json"] = b"{}"
    with pytest.raises(FetchError, match="is not a file of a directory"):
        fetch(hub, tmp_path / "model")


@pytest.mark.parametrize(
    "change",
    [
        *({"blobId": "../../evil"}, {"blobId": None}, {"size": None}, {"size": -1}),
        {"lfs": {"sha256": "/x", "size": 1, "pointerSize": 1}},
    ],
)
def test_a_list_that_cannot_be_compared_with_is_refused(hub: Hub, tmp_path: Path, change: dict[str, Any]) -> None:
    hub.listed["config.json"] = change
    with pytest.raises(FetchError, match=r"config\.json of owner/model without a size and a digest"):
        fetch(hub, tmp_path / "model")
    hub.listed["config.json"] = {"lfs": {"size": 1}}
    with pytest.raises(FetchError, match="what the hub answers for owner/model cannot be read"):
        fetch(hub, tmp_path / "model")
    assert hub.asked == []


def test_a_directory_of_others_is_left_alone(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/notes").write_text("mine")
    with pytest.raises(UsageError, match="`hpcrl model get` did not make it"):
        fetch(hub, tmp_path / "model")
    assert [each.name for each in (tmp_path / "model").iterdir()] == ["notes"]


def test_no_room_is_reported_before_anything_comes(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 9, 1))  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match=r"owner/model needs .* GB more, and .* has 0\.0 GB free"):
        fetch(hub, tmp_path / "model")
    assert hub.asked == []


def test_a_disk_that_fills_up_keeps_what_came(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hpcrl.models import fetch as module

    def full(self: Any, data: bytes) -> int:
        if self._file.name == WEIGHTS:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(self, data)

    write = module._Received.write
    monkeypatch.setattr(module._Received, "write", full)
    with pytest.raises(OSError, match="No space left") as caught:
        fetch(hub, tmp_path / "model", jobs=1)
    # the command line makes a message with a hint of it, which names the file
    assert caught.value.errno == errno.ENOSPC
    assert WEIGHTS in str(caught.value.filename)
    monkeypatch.undo()
    fetch(hub, tmp_path / "model")
    assert content(tmp_path / "model") == whole(hub)


def test_two_at_a_time_are_one(hub: Hub, tmp_path: Path) -> None:
    target, outcome = tmp_path / "model", list[FetchedModel]()
    hub.held.clear()
    first = threading.Thread(target=lambda: outcome.append(fetch(hub, target)))
    first.start()
    while not hub.asked:
        first.join(0.01)
        assert first.is_alive()
    with pytest.raises(UsageError, match=rf"process {os.getpid()} on .* fetches owner/model into"):
        fetch(hub, target)
    hub.held.set()
    first.join()
    assert outcome[0].path == target
    assert content(target) == whole(hub)


def test_ctrl_c_keeps_what_came(hub: Hub, tmp_path: Path) -> None:
    """The command line as a user has it; the second call goes on."""
    hub.files[WEIGHTS] = bytes(range(256)) * 64
    hub.cut_after = 700
    hub.held.clear()
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_TELEMETRY": "1", "HOME": str(tmp_path)}
    command = [sys.executable, "-m", "hpcrl", "model", "get", "owner/model", "-j", "1"]
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True)
    while not hub.asked:
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    hub.held.set()
    said = process.communicate()[1]
    assert process.returncode == 130, said
    assert "interrupted; received files are kept" in said
    assert "Traceback" not in said
    again = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stderr
    assert f"owner/model at commit {COMMIT[:12]}" in again.stdout
    assert content(tmp_path / "models/owner/model") == whole(hub)
    (found,) = list_models(tmp_path / "models")
    assert (found.name, found.state) == ("owner/model", "whole")
