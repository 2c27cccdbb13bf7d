"""A file server does what it is asked, and its answer is lost: what follows must be as if it had come.

Each scenario runs once as it is, and then once for each of its calls that change a name, with the answer to that call
lost: the client asks again, and hears ENOENT or EEXIST. The directory must then look as after the first run.
"""

from __future__ import annotations

import ast
import errno
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from handoff_lab import model_directory, publish

from hpcrl.runs.rundir import RunDir
from hpcrl.runs.start.claim import claimed
from hpcrl.storage import lost_replies
from hpcrl.storage.fence import Fence
from hpcrl.storage.files import NumberedDirectories, StagedDirectory, atomic_create, atomic_write
from hpcrl.storage.quarantine import collect_asides, list_asides, put_aside, take_back
from hpcrl.weights import HandoffStore, VersionCommitter
from hpcrl.weights.lifetime.collector import Collector
from hpcrl.weights.lifetime.leases import ReaderWatch
from hpcrl.weights.lifetime.pins import read_pins

_LOST = {
    "rename": errno.ENOENT,
    "replace": errno.ENOENT,
    "link": errno.EEXIST,
    "mkdir": errno.EEXIST,
    "unlink": errno.ENOENT,
    "rmdir": errno.ENOENT,
}


@contextmanager
def losing(number: int) -> Iterator[list[str]]:
    """Lose the answer to the call of that number that worked (-1: to none); gives the names of all that worked."""
    worked: list[str] = []
    real = {name: getattr(os, name) for name in _LOST}

    def changed(name: str) -> Callable[..., None]:
        def call(*arguments: Any, **options: Any) -> None:
            real[name](*arguments, **options)
            worked.append(name)
            if len(worked) - 1 == number:
                raise OSError(_LOST[name], os.strerror(_LOST[name]), str(arguments[0]))

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in _LOST:
            patch.setattr(os, name, changed(name))
        yield worked


def tree(root: Path) -> dict[str, bytes]:
    """All files below a directory with their contents; names drawn by lot, and times, are left out."""
    found = {}
    for path in sorted(root.rglob("*")):
        name = re.sub(r"[0-9a-f]{32}|(?<=-)[0-9a-f]{8}(?![0-9a-f])", "x", str(path.relative_to(root)))
        text = b"" if path.is_dir() else path.read_bytes()
        found[name] = re.sub(rb'"(created_at_s|time_s)": ?[0-9.e+]+|"token": ?"[^"]*"', b"", text)
    return found


def files(root: Path) -> None:
    atomic_write(root / "a.json", b"one")
    atomic_write(root / "a.json", b"two")
    atomic_create(root / "b.json", b"mine")
    with pytest.raises(FileExistsError):
        atomic_create(root / "b.json", b"yours")
    stage = StagedDirectory(root / "model", token="t")
    stage.create()
    (stage.path / "x").write_bytes(b"x")
    stage.commit()
    numbered = NumberedDirectories(root, "n")
    numbered.path_of(1).mkdir(exist_ok=True)
    (numbered.path_of(1) / "y").write_bytes(b"y")
    numbered.remove(1)
    assert numbered.numbers() == []


def entry(fence: Fence, name: str, content: str, *, replace: bool = True) -> None:
    (fence.create(name) / "x").write_text(content)
    fence.commit(name, replace=replace)


def fenced(root: Path) -> None:
    fence = Fence.claim(root, 1)
    for name, content in (("step-000001", "old"), ("step-000002", "2"), ("step-000001", "new")):
        entry(fence, name, content)
    with pytest.raises(FileExistsError):
        entry(fence, "step-000002", "other", replace=False)
    assert fence.hide("step-000002")
    assert not fence.hide("step-000002")
    fence.restore("step-000002")
    assert put_aside(fence, "step-000001")
    assert not put_aside(fence, "step-000001")
    entry(fence, "step-000001", "third")
    entry(fence, "step-000003", "3")
    assert put_aside(fence, "step-000003")
    (aside, *_) = list_asides(root, "step-")
    take_back(fence, aside)
    assert (root / "step-000001" / "x").read_text() == "new"
    assert collect_asides(root, "step-", up_to=9) == [3]
    assert fence.hide("step-000002")
    newer = Fence.claim(root, 2)
    assert (root / "step-000002" / "x").read_text() == "2"
    entry(newer, "step-000004", "4")


def versions(root: Path) -> None:
    model = model_directory(root / "model")
    writer = VersionCommitter.claim(root / "weights", 1)
    for version in (1, 2, 3):
        publish(writer, version, model, words=10)
    writer.remove(2)
    assert writer.withdraw_after(1) == [3]
    publish(writer, 3, model, words=10)
    store = HandoffStore(root / "weights")
    collector = Collector(store, ReaderWatch(store.root, expiry_s=60.0), keep_last=1, settle_s=0.0)
    assert collector.collect().removed == [1]
    assert store.versions() == [3]
    assert read_pins(root / "weights") == {}


def attempts(root: Path) -> None:
    run = RunDir(root / "run")
    run.path.mkdir(exist_ok=True)
    with claimed(run, user="me"):
        pass


@pytest.mark.parametrize("scenario", [files, fenced, versions, attempts])
def test_an_answer_that_is_lost_changes_nothing(tmp_path: Path, scenario: Callable[[Path], None]) -> None:
    (tmp_path / "whole").mkdir()
    with losing(-1) as calls:
        scenario(tmp_path / "whole")
    expected = tree(tmp_path / "whole")
    assert {"rename", "mkdir", "unlink", "rmdir"} & set(calls)
    wrong = []
    for number, name in enumerate(calls):
        root = tmp_path / f"lost-{number}"
        root.mkdir()
        try:
            with losing(number):
                scenario(root)
        except BaseException as error:  # noqa: BLE001 - all of them are listed
            wrong.append(f"call {number} ({name}): {error!r}")
        else:
            if (found := tree(root)) != expected:
                wrong.append(f"call {number} ({name}) left {sorted(found.items() ^ expected.items())}")
        shutil.rmtree(root)
    assert not wrong, "\n".join(wrong)


def test_a_name_that_was_never_there_is_still_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        lost_replies.rename(tmp_path / "no", tmp_path / "other")
    (tmp_path / "a").write_text("a")
    (tmp_path / "b").write_text("b")
    with pytest.raises(FileExistsError):
        lost_replies.link(tmp_path / "a", tmp_path / "b")
    with pytest.raises(FileNotFoundError):
        lost_replies.rename(tmp_path / "a", tmp_path / "nowhere" / "a")
    (tmp_path / "full" / "x").mkdir(parents=True)
    with pytest.raises(FileExistsError):
        lost_replies.make_own_directory(tmp_path / "full")
    assert [lost_replies.unlink(tmp_path / "a"), lost_replies.unlink(tmp_path / "a")] == [True, False]
    lost_replies.remove_tree(tmp_path / "not there")


_OF_ONE_NODE = {
    "hpcrl/storage/lost_replies.py": "these functions themselves",
    "hpcrl/storage/shm_directories.py": "shared memory of a node",
    "hpcrl/supervisor/process/leftovers.py": "shared memory of a node",
    "hpcrl/supervisor/launch/role_spy.py": "a copy of it runs alone on a node, and its errors are answers",
    "hpcrl/dock/warehouse/sharing.py": "shared memory of a node",
    "hpcrl/dock/warehouse/embedded.py": "shared memory of a node",
    "hpcrl/weights/read/cache_room.py": "shared memory of a node",
    "hpcrl/weights/read/nodecache.py": "shared memory of a node",
    "hpcrl/weights/visibility.py": "a rename that must fail",
    "hpcrl/sandboxes/node_memory.py": "shared memory of a node",
    "hpcrl/sandboxes/trees.py": "the temporary directory of a node",
}


def test_names_on_a_share_are_changed_by_these_functions() -> None:
    package = Path(lost_replies.__file__).parents[1]
    found = set()
    for path in sorted(package.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            owner, name = ast.unparse(node.func.value), node.func.attr
            of_os = owner == "os" and name in ("rename", "replace", "link")
            if of_os or (name == "rename" and owner != "lost_replies"):
                found.add(f"hpcrl/{path.relative_to(package)}")
    assert found == _OF_ONE_NODE.keys(), "use hpcrl.storage.lost_replies"
