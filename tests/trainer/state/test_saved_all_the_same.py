"""A checkpoint that is complete is good, whatever becomes of those that it makes superfluous."""

from types import SimpleNamespace

import pytest

from hpcrl.storage.files import FileRecord
from hpcrl.trainer.state import saver
from hpcrl.trainer.state.saver import CheckpointSaver


class Alone:
    """The only rank."""

    rank, size, group = 0, 1, None

    def on_leader(self, function, what):
        return function()

    def gather(self, own):
        return [own]


class Writer:
    """Commits, and fails at one of the two things that follow."""

    def __init__(self, fails, directory):
        self.fails, self.directory, self.committed, self.discarded = fails, directory, [], []

    def stage(self, step):
        """Nothing is made."""

    def staged(self, step):
        return self.directory

    def commit(self, **entry):
        self.committed.append(entry["step"])
        self.files = entry["files"]

    def collect_aside(self, step):
        if self.fails == "collect_aside":
            raise OSError(16, "Device or resource busy")

    def retain(self, *, keep_last, keep_every):
        if self.fails == "retain":
            raise OSError(16, "Device or resource busy")
        return [1, 2]

    def discard(self, step):
        self.discarded.append(step)


@pytest.mark.parametrize(("fails", "removed"), [("", [1, 2]), ("retain", []), ("collect_aside", [])])
def test_old_entries_that_cannot_be_removed_are_no_failure_of_the_save(monkeypatch, tmp_path, caplog, fails, removed):
    record, events = FileRecord(bytes=3, xxh3_128="0" * 32), []
    monkeypatch.setattr(saver, "write_state", lambda directory, state, group: {"__0_0.distcp": record})
    writer = Writer(fails, tmp_path)
    own = SimpleNamespace(
        _ranks=Alone(),
        _writer=writer,
        _config=SimpleNamespace(keep_last=2, keep_every_steps=None),
        _emit=lambda kind, **data: events.append((kind, data)),
        _failures=3,
    )
    own._write = lambda save, blocked_since: CheckpointSaver._write(own, save, blocked_since)
    own._failed = lambda save, error: events.append(("failed", error))
    save = SimpleNamespace(step=7, state={}, orchestrator_state=b"", started_at_s=0.0, blocked_s=0.5, error=None)
    CheckpointSaver._work(own, save, None)
    assert [(kind, data["step"], data["removed"]) for kind, data in events] == [
        ("trainer.checkpoint_saved", 7, removed)
    ]
    assert (writer.committed, writer.discarded, own._failures) == ([7], [], 0)
    assert writer.files == {"trainer/__0_0.distcp": record}
    assert [record.message for record in caplog.records] == (
        ["old checkpoints are not removed: [Errno 16] Device or resource busy"] if fails else []
    )
