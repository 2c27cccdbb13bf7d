"""What a trainer says of its saves, what it waits for, and what a save that fails leaves: without a model."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import xxhash

from hpcrl.checkpoints import CheckpointLedger, CheckpointWriter
from hpcrl.config.recipe import CheckpointConfig
from hpcrl.errors import CheckpointError, DeadlineError, FencedError
from hpcrl.storage.files import FileRecord
from hpcrl.trainer.state import saver as savers
from hpcrl.trainer.state.saver import CheckpointSaver

DATA = b"the weights"


class OneRank:
    """Stands in for `Ranks` of one process."""

    rank, size, group = 0, 1, "its group"

    def on_leader(self, action: Callable[[], Any], what: str) -> Any:
        return action()

    def all_succeed(self, action: Callable[[], Any], what: str) -> list[Any]:
        return [action()]

    def gather(self, value: Any) -> list[Any]:
        return [value]


class Scene:
    """A saver whose state is written by ``write``, and a clock that goes on by a second with each copy and write."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch, **config: Any) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.now, self.copied, self.groups = 1000.0, 0, list[dict[str, Any]]()
        self.shortage: Callable[..., str | None] = lambda directory, *, size, files: None
        self.before_write: Callable[[], object] = lambda: None
        self.writer = CheckpointWriter.claim(root, 1)
        clock = SimpleNamespace(time=lambda: 1e6 + self.now, monotonic=lambda: self.now)
        replaced: dict[str, Any] = {
            "dist": SimpleNamespace(new_group=lambda **how: self.groups.append(how)),
            "Ranks": lambda group: OneRank(),
            "time": clock,
            "trainer_state": lambda model, optimizer, step, base: {"step": step, "base": base},
            "copy_to_host": self._copy,
            "state_bytes": lambda state: 10_000_000,
            "write_state": self._write,
            "find_shortage": self._find_shortage,
        }
        for name, value in replaced.items():
            monkeypatch.setattr(savers, name, value)
        monkeypatch.setattr("hpcrl.checkpoints.writer.time", clock)
        ranks: Any = OneRank()
        emit: Any = lambda kind, **data: self.events.append((kind, data))  # noqa: E731
        self.saver = CheckpointSaver(self.writer, ranks, CheckpointConfig(**config), emit)

    def _find_shortage(self, directory: Path, *, size: int, files: int) -> str | None:
        return self.shortage(directory, size=size, files=files)

    def _copy(self, state: dict[str, Any]) -> dict[str, Any]:
        self.copied += 1
        self.now += 1.0
        return dict(state)

    def _write(self, directory: Path, state: dict[str, Any], group: object) -> dict[str, FileRecord]:
        assert group == OneRank.group
        self.before_write()
        self.now += 10.0
        (directory / "0.distcp").write_bytes(DATA)
        return {"0.distcp": FileRecord(len(DATA), xxhash.xxh3_128_hexdigest(DATA))}

    def start(self, step: int) -> None:
        policy: Any = SimpleNamespace(model=None, optimizer=None, base="start model", reference=None)
        self.saver.start(policy, step, orchestrator_state=lambda: b"rollouts %d" % step)

    def save(self, *steps: int) -> Exception | None:
        for step in steps:
            self.start(step)
            error = self.saver.wait(60.0)
        return error

    @property
    def ledger(self) -> CheckpointLedger:
        return self.writer.ledger


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(tmp_path, monkeypatch)


def test_an_asynchronous_save_blocks_training_for_the_copy(scene: Scene) -> None:
    assert scene.save(4) is None
    assert scene.events == [("trainer.checkpoint_saved", {"step": 4, "seconds": 11.0, "blocked_s": 1.0, "removed": []})]
    entry = scene.ledger.open(4)
    entry.verify()
    found = entry.manifest
    assert (found.save_s, found.blocked_s, found.world_size) == (11.0, 1.0, 1)
    assert entry.orchestrator_state() == b"rollouts 4"
    assert scene.copied == 1


def test_a_save_in_between_blocks_the_training_for_all_of_it_and_copies_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene(tmp_path, monkeypatch, mode="sync")
    scene.start(4)
    assert scene.ledger.steps() == [4]  # complete on return
    assert scene.events == [
        ("trainer.checkpoint_saved", {"step": 4, "seconds": 10.0, "blocked_s": 10.0, "removed": []})
    ]
    assert (scene.ledger.open(4).manifest.blocked_s, scene.copied) == (10.0, 0)


def test_a_group_of_its_own_waits_as_long_as_a_save_may_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(tmp_path, monkeypatch, save_timeout_s=77.0)
    (how,) = scene.groups
    assert (how["backend"], how["timeout"]) == ("gloo", timedelta(seconds=77.0))


def test_what_need_not_be_kept_goes_with_each_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(tmp_path, monkeypatch, keep_last=1, keep_every_steps=4)
    scene.save(2, 4, 6, 8)
    assert [data["removed"] for _, data in scene.events] == [[], [2], [], [6]]
    assert scene.ledger.steps() == [4, 8]


def test_what_was_put_aside_goes_when_the_run_has_come_as_far(scene: Scene) -> None:
    scene.save(2, 4)
    scene.writer.put_aside_after(2)
    scene.save(3)
    assert len(list(scene.writer.root.glob("put-aside/*/step-000004"))) == 1
    scene.save(5)
    assert list(scene.writer.root.glob("put-aside/*/step-000004")) == []


def test_old_entries_that_cannot_be_removed_are_a_warning(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object, **__: object) -> list[int]:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(CheckpointWriter, "retain", refuse)
    assert scene.save(2) is None
    assert scene.events[0][1]["removed"] == []
    assert "old checkpoints are not removed" in caplog.text


# -- failures


def refusing(text: str) -> Callable[[], object]:
    def refuse() -> None:
        raise OSError(28, text)

    return refuse


def test_saves_that_fail_in_a_row_are_counted_until_one_succeeds(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    scene.before_write = refusing("full")
    assert isinstance(scene.save(2, 4), OSError)
    scene.before_write = lambda: None
    assert scene.save(5, 6) is None
    scene.before_write = refusing("full")
    scene.save(8)
    failed = [data for kind, data in scene.events if kind == "trainer.checkpoint_failed"]
    assert failed == [
        {"step": step, "reason": "OSError: [Errno 28] full", "failures_in_a_row": row, "newest": newest}
        for step, row, newest in ((2, 1, None), (4, 2, None), (8, 1, 6))
    ]
    assert caplog.text.count("the checkpoint of step 2 failed: [Errno 28] full") == 1
    # nothing of it is left, and the training can go on
    assert scene.ledger.steps() == [5, 6]
    assert list(scene.writer.root.glob(".writer-*/*")) == []


def test_a_save_for_which_there_is_no_room_is_not_begun(scene: Scene) -> None:
    asked = list[tuple[Path, int, int]]()

    def shortage(directory: Path, *, size: int, files: int) -> str:
        asked.append((directory, size, files))
        return "7 bytes more"

    scene.shortage = shortage
    error = scene.save(2)
    assert isinstance(error, CheckpointError)
    assert str(error).startswith("the next checkpoint needs 7 bytes more\n    hint: free space there")
    assert (scene.events[0][0], scene.copied, scene.ledger.steps()) == ("trainer.checkpoint_failed", 0, [])
    ((directory, size, files),) = asked
    assert directory == scene.writer.root
    # the state and the orchestrator's, and some more
    assert 10_000_000 + 10 < size < 1.2 * 10_000_000
    assert 5 <= files < 20
    scene.shortage = lambda directory, *, size, files: None
    assert scene.save(4) is None


def test_a_filesystem_that_cannot_be_asked_for_room_is_a_save_that_failed(scene: Scene) -> None:
    def fails(directory: Path, *, size: int, files: int) -> str:
        raise OSError(5, "Input/output error")

    scene.shortage = fails
    assert "Input/output error" in str(scene.save(2))


def test_an_orchestrator_that_does_not_answer_is_an_error_of_the_training(scene: Scene) -> None:
    policy: Any = SimpleNamespace(model=None, optimizer=None, base="", reference=None)

    def fails() -> bytes:
        raise ConnectionError("gone")

    with pytest.raises(ConnectionError, match="gone"):
        scene.saver.start(policy, 2, orchestrator_state=fails)
    assert scene.events == []


def test_a_newer_attempt_ends_the_older_one(scene: Scene) -> None:
    """As the reason, whatever failed because of it."""

    def and_a_newer_comes() -> None:
        CheckpointWriter.claim(scene.writer.root, 2)

    scene.before_write = and_a_newer_comes
    scene.start(2)
    with pytest.raises(FencedError):
        scene.saver.wait(60.0)
    assert scene.events[0][0] == "trainer.checkpoint_failed"
    assert scene.events[0][1]["reason"].startswith("FencedError")


# -- waiting


class Hanging:
    """A write that ends when it is let."""

    def __init__(self, scene: Scene) -> None:
        self.begun, self.let = threading.Event(), threading.Event()
        scene.before_write = self.hang

    def hang(self) -> None:
        self.begun.set()
        assert self.let.wait(60.0)


def test_a_save_that_hangs_is_an_error_of_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(tmp_path, monkeypatch, save_timeout_s=0.05)
    hanging = Hanging(scene)
    scene.start(2)
    assert hanging.begun.wait(60.0)
    # a process that fails meanwhile ends all the same
    assert [thread.daemon for thread in threading.enumerate() if thread.name == "save-2"] == [True]
    hint = r"the save of step 2 did not end within 0\.05 s\n    hint: .*checkpoint\.save_timeout_s"
    with pytest.raises(DeadlineError, match=hint):
        scene.start(4)
    with pytest.raises(DeadlineError, match=r"within 0\.01 s"):
        scene.saver.wait(0.01)
    scene.saver.leave(0.01)  # who fails anyway does not fail of it
    hanging.let.set()
    scene.saver.leave(60.0)
    assert scene.ledger.steps() == [2]
    assert scene.saver.wait(60.0) is None


def test_one_save_after_the_other(scene: Scene) -> None:
    hanging = Hanging(scene)
    scene.start(2)
    assert hanging.begun.wait(60.0)
    threading.Timer(0.05, hanging.let.set).start()
    scene.start(4)
    assert scene.events[0] == (
        "trainer.checkpoint_saved",
        {"step": 2, "seconds": 11.0, "blocked_s": 1.0, "removed": []},
    )
    scene.saver.wait(60.0)
    assert scene.ledger.steps() == [2, 4]


def test_without_a_save_there_is_nothing_to_wait_for(scene: Scene) -> None:
    assert scene.saver.wait(0.0) is None
    scene.saver.leave(0.0)


def test_memory_of_a_save_that_has_ended_is_free(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    for failing in (False, True):
        scene.before_write = refusing("full") if failing else lambda: None
        scene.save(3 + failing)
        last: Any = scene.saver._last
        assert (last.state, last.orchestrator_state) == ({}, b"")
