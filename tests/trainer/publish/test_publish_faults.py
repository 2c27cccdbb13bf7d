"""Publishing when things go wrong, for real: full disks, killed writers, ranks that fail, times that run out."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from patience import wait_for
from test_publish_kinds import change, load_model, make_publisher
from trainer_testing import run_ranks, tiny_arch, write_model_dir

from hpcrl.errors import DeadlineError, HandoffError
from hpcrl.storage import fence as fence_module
from hpcrl.trainer.parallel.mesh import distributed
from hpcrl.trainer.publish import version_writer as writer_module
from hpcrl.weights.store import HandoffStore


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return write_model_dir(tmp_path_factory.mktemp("faults") / "model", tiny_arch(hidden_size=64, vocab_size=3000))


@pytest.fixture
def small_disk(tmp_path):
    """A filesystem of 3 MiB: room for three versions of 0.96 MiB, or for few inodes."""
    path = tmp_path / "disk"
    path.mkdir()
    options = "size=3m,nr_inodes=60"
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", path], capture_output=True, check=False)
    if mounted.returncode != 0:
        pytest.skip(f"cannot mount a tmpfs: {mounted.stderr.decode().strip()}")
    yield path
    subprocess.run(["umount", path], check=True)


def fill(disk):
    """Leave half of what a version needs."""
    stat = os.statvfs(disk)
    (disk / "other").write_bytes(bytes(stat.f_bavail * stat.f_frsize - (400 << 10)))


def assert_only(root, *versions):
    """Nothing is there but these versions and the publisher's own directory, which is empty."""
    writer, *found = sorted(os.listdir(root))
    assert found == list(versions)
    assert writer.startswith(".writer-")
    assert os.listdir(root / writer) == []


def test_full_disk_is_seen_before_writing(small_disk, model_dir):
    store = HandoffStore(small_disk / "weights")
    with distributed(timeout_s=120) as parallel:
        model = load_model(model_dir, parallel)
        publisher = make_publisher(store.root, parallel, model_dir, overlap=False)
        publisher.publish(model, 1)
        fill(small_disk)
        with pytest.raises(HandoffError, match=r"needs [\d,]+ bytes in .*, the filesystem leaves [\d,]+\n.*hint"):
            publisher.publish(model, 2)
        assert_only(store.root, "v000001")
        store.open(1).verify(content=True)
        (small_disk / "other").unlink()
        publisher.publish(model, 2)
    assert store.versions() == [1, 2]
    store.open(2).verify(content=True)


def test_too_few_inodes_are_seen_before_writing(small_disk, model_dir):
    store = HandoffStore(small_disk / "weights")
    for i in range(50):
        (small_disk / f"file{i}").touch()
    with distributed(timeout_s=120) as parallel:
        publisher = make_publisher(store.root, parallel, model_dir, overlap=False)
        with pytest.raises(HandoffError, match="inodes"):
            publisher.publish(load_model(model_dir, parallel), 1)
    assert_only(store.root)


def test_disk_that_fills_up_meanwhile(small_disk, model_dir, monkeypatch):
    """The look for space passes, the preallocation does not; it says so at the next call, and the one after works."""
    store = HandoffStore(small_disk / "weights")
    real = writer_module.preallocate

    def late(*args):
        fill(small_disk)
        real(*args)

    with distributed(timeout_s=120) as parallel:
        model = load_model(model_dir, parallel)
        publisher = make_publisher(store.root, parallel, model_dir)
        publisher.publish(model, 1)
        publisher.wait()
        monkeypatch.setattr(writer_module, "preallocate", late)
        with pytest.raises(OSError, match="No space") as failure:  # noqa: PT012
            publisher.publish(model, 2)
            publisher.wait()
        assert failure.value.errno == errno.ENOSPC
        assert failure.value.filename is not None
        assert_only(store.root, "v000001")
        monkeypatch.setattr(writer_module, "preallocate", real)
        (small_disk / "other").unlink()
        publisher.publish(model, 2)
        publisher.wait()
    store.open(1).verify(content=True)
    store.open(2).verify(content=True)


def test_a_version_is_tried_again_until_the_disk_takes_it(small_disk, model_dir):
    """Said once with what the filesystem said and the space that there was; the training waits, and is not hung."""
    store, waited, words = HandoffStore(small_disk / "weights"), [], []
    with distributed(timeout_s=120) as parallel:
        model = load_model(model_dir, parallel)
        told = {"on_wait": lambda: waited.append(1), "on_refused": words.append}
        publisher = make_publisher(store.root, parallel, model_dir, told=told, retry_s=60.0, overlap=False)
        publisher.publish(model, 1)
        fill(small_disk)
        room = threading.Timer(2.5, (small_disk / "other").unlink)
        room.start()
        publisher.publish(model, 2)
        room.join()
    assert store.versions() == [1, 2]
    store.open(2).verify(content=True)
    (said,) = words
    assert said.startswith("version 2 cannot be written, trying again for 60 s: a version needs ")
    assert "the filesystem leaves 409,600 bytes and" in said
    assert waited


def test_what_stays_refused_is_given_up_with_the_reason(tmp_path, model_dir, monkeypatch):
    def refused(*_):
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), "model.safetensors")

    monkeypatch.setattr(writer_module, "preallocate", refused)
    with distributed(timeout_s=120) as parallel:
        publisher = make_publisher(tmp_path, parallel, model_dir, retry_s=0.5)
        publisher.publish(load_model(model_dir, parallel), 1)
        with pytest.raises(HandoffError) as failure:
            publisher.wait()
    said = str(failure.value)
    assert said.startswith("version 1 could not be written in ")
    assert "[Errno 122] Disk quota exceeded: 'model.safetensors'; the filesystem leaves " in said
    assert "handoff.retry_s" in said
    assert_only(tmp_path)


def test_what_cannot_pass_is_not_tried_again(tmp_path, model_dir, monkeypatch):
    tries = []

    def refused(*_):
        tries.append(1)
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(writer_module, "preallocate", refused)
    with distributed(timeout_s=120) as parallel:
        publisher = make_publisher(tmp_path, parallel, model_dir, retry_s=60.0)
        publisher.publish(load_model(model_dir, parallel), 1)
        with pytest.raises(PermissionError):
            publisher.wait()
    assert len(tries) == 1


def test_a_version_that_got_its_name_before_the_failure_is_taken_as_it_is(tmp_path, model_dir, monkeypatch):
    """The rename worked, what makes it durable did not: the next try finds the version, and does not refuse it."""
    real, failures = fence_module.fsync_dir, [1]

    def refused(path):
        if path == tmp_path and (tmp_path / "v000001").exists() and failures:
            failures.pop()
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        real(path)

    monkeypatch.setattr(fence_module, "fsync_dir", refused)
    published = []
    with distributed(timeout_s=120) as parallel:
        publisher = make_publisher(tmp_path, parallel, model_dir, retry_s=60.0)
        publisher.publish(load_model(model_dir, parallel), 1, published.append)
        publisher.wait()
    assert failures == []
    assert [(p.version, p.kind) for p in published] == [(1, "full")]
    HandoffStore(tmp_path).open(1).verify(content=True)


def refused_on_one_rank(rank, model_dir, root, failing):
    """The second rank is refused twice; all ranks try again together."""
    write, left = writer_module.write_units, [2]

    def refused(*args):
        if rank == failing and left[0]:
            left[0] -= 1
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return write(*args)

    words = []
    with distributed(timeout_s=120) as parallel:
        model = load_model(model_dir, parallel)
        writer_module.write_units = refused
        publisher = make_publisher(root, parallel, model_dir, told={"on_refused": words.append}, retry_s=60.0)
        publisher.publish(model, 1)
        publisher.wait()
    return words


def test_ranks_try_again_together(tmp_path, model_dir):
    first, second = run_ranks(2, refused_on_one_rank, model_dir, tmp_path, 1)
    assert "[Errno 116] Stale file handle" in first[0]  # rank 0 says what rank 1 met
    assert (len(first), second) == (1, [])
    HandoffStore(tmp_path).open(1).verify(content=True)


def fail_then_work(rank, model_dir, root, failing):
    """Version 1 works, 2 fails on one rank, 3 works; returns what was raised."""
    write = writer_module.write_units

    def broken(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with distributed(timeout_s=120) as parallel:
        model = load_model(model_dir, parallel)
        publisher = make_publisher(root, parallel, model_dir)
        publisher.publish(model, 1)
        publisher.wait()
        if rank == failing:
            writer_module.write_units = broken
        publisher.publish(model, 2)  # returns: the failure comes later
        seen = ""
        try:
            publisher.publish(model, 3)
        except Exception as error:  # noqa: BLE001
            seen = f"{type(error).__name__}: {error}"
        writer_module.write_units = write
        change(model, 0)
        publisher.publish(model, 3)
        publisher.wait()
        return seen


def test_failure_of_one_rank_surfaces_on_all_at_the_next_call(tmp_path, model_dir):
    first, second = run_ranks(2, fail_then_work, model_dir, tmp_path, 1)
    assert first == "PeerLostError: writing version 2 failed on trainer rank 1: OSError: [Errno 5] Input/output error"
    assert second == "OSError: [Errno 5] Input/output error"
    store = HandoffStore(tmp_path)
    assert_only(store.root, "v000001", "v000003")
    for version in (1, 3):
        store.open(version).verify(content=True)


def test_a_writer_that_hangs_is_not_waited_for_without_end(tmp_path, model_dir, monkeypatch):
    gate, write = threading.Event(), writer_module.write_units
    monkeypatch.setattr(writer_module, "write_units", lambda *args: gate.wait(30) and write(*args))
    with distributed(timeout_s=120) as parallel:
        model = load_model(model_dir, parallel)
        publisher = make_publisher(tmp_path, parallel, model_dir, publish_timeout_s=0.2)
        publisher.publish(model, 1)
        with pytest.raises(DeadlineError, match=r"version 1 is still being written .*\n.*hint"):
            publisher.publish(model, 2)
        gate.set()
        publisher.wait(30)
    assert HandoffStore(tmp_path).versions() == [1]


WRITER = """
import sys
from pathlib import Path

sys.path.insert(0, {tests!r})
import torch
from test_publish_kinds import change, load_model, make_publisher
from hpcrl.trainer.parallel.mesh import distributed
from hpcrl.weights.store import HandoffStore
torch.set_num_threads(1)
root, model_dir = Path({root!r}), Path({model!r})
store = HandoffStore(root)
attempt = int(sys.argv[1])
with distributed(timeout_s=60) as parallel:
    model = load_model(model_dir, parallel)
    for line in sys.stdin:
        publisher = make_publisher(
            root, parallel, model_dir, store.newest, attempt=attempt, delta_chain=3, delta_max_share=0.9
        )
        newest = store.newest() or 0
        publisher.output.withdraw_after(newest)
        print("begin", flush=True)
        for version in range(newest + 1, newest + 100):
            change(model, version)
            publisher.publish(model, version)
"""


@pytest.mark.campaign
def test_writer_killed_at_any_moment(tmp_path, model_dir):
    """kill -9 in the middle: what has a name is whole, and the next writer goes on after it."""
    rng = random.Random(0)
    store = HandoffStore(tmp_path / "weights")
    script = WRITER.format(tests=str(Path(__file__).parent), root=str(store.root), model=str(model_dir))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}

    with contextlib.ExitStack() as running:

        def start(attempt):
            writer = subprocess.Popen(
                [sys.executable, "-c", script, str(attempt)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env
            )
            running.callback(lambda: (writer.kill(), writer.wait(), writer.stdin.close(), writer.stdout.close()))
            return writer

        checked, writer = 0, start(1)
        for attempt in range(2, 6):
            following = start(attempt)  # imports while the one before writes
            writer.stdin.write(b"go\n")
            writer.stdin.flush()
            assert writer.stdout.readline() == b"begin\n"
            # a busy machine takes its time for the first one: each writer is killed beside or behind one of its own
            wait_for(lambda known=checked: len(store.versions()) > known, 60, "a version")
            time.sleep(rng.uniform(0.0, 1.0))
            writer.send_signal(signal.SIGKILL)
            writer.wait()
            versions = store.versions()
            assert versions == list(range(1, len(versions) + 1))
            for version in versions[checked:]:
                handoff = store.open(version)
                handoff.verify(content=True)
                assert set(handoff.manifest.needs) <= set(versions)
            checked, writer = len(versions), following
    assert checked > 3
