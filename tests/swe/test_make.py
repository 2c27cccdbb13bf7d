"""The generator on a package of its own: tasks that the judge accepts, equal for equal seeds."""

from __future__ import annotations

import hashlib
import http.server
import io
import json
import tarfile
import threading
from pathlib import Path

import pytest
from pytest_wheels import installed_wheels
from swe_lab import GOOD, PYTHON, TESTS

from hpcrl.errors import UsageError
from hpcrl.swe.judging.judge import SweJudge
from hpcrl.swe.judging.prepared import TaskPreparer
from hpcrl.swe.judging.task_sandboxes import TaskSandboxes
from hpcrl.swe.making import maker as module
from hpcrl.swe.making import measuring
from hpcrl.swe.making.maker import SetSettings, TaskSetMaker
from hpcrl.swe.making.packages import PinnedFile, SourcePackage, fetch_package
from hpcrl.swe.task import read_tasks

FLAKY = TESTS + "\n\ndef test_of_the_moment():\n    import os\n    assert os.urandom(1)[0] < 128\n"
SETTINGS = SetSettings(
    tasks=10, seed=3, packages=("lengths",), held_out_share=0.6, held_out_packages=(), python=str(PYTHON)
)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with a package and the installed pytest, which are what is pinned."""
    directory = tmp_path / "cache"
    directory.mkdir()
    path = directory / "lengths-1.0.tar.gz"
    files = {"src/lengths/__init__.py": GOOD, "tests/test_lengths.py": FLAKY, "docs/index.rst": "Lengths\n"}
    with tarfile.open(path, "w:gz") as archive:
        for name, text in files.items():
            entry = tarfile.TarInfo(f"lengths-1.0/{name}")
            entry.size = len(text.encode())
            archive.addfile(entry, io.BytesIO(text.encode()))
    [wheel] = installed_wheels(directory)

    def pinned(file: Path) -> PinnedFile:
        return PinnedFile(
            file.name.split("-", maxsplit=1)[0], "1.0", file.name, hashlib.sha256(file.read_bytes()).hexdigest()
        )

    package = SourcePackage(pinned(path), ("src/lengths",), ("tests",), ("src",))
    monkeypatch.setattr(module, "pinned_packages", lambda: {"lengths": package})
    monkeypatch.setattr(module, "pinned_tools", lambda: [pinned(wheel)])
    # a test that passes by chance passes three times in a row too often
    monkeypatch.setattr(measuring, "_RUNS", 16)
    return directory


def _maker(sandboxes: TaskSandboxes, out: Path, cache: Path, workers: int = 1) -> TaskSetMaker:
    return TaskSetMaker(sandboxes, SETTINGS, out, cache=cache, workers=workers, index="file:///nowhere/", offline=True)


@pytest.mark.slow
async def test_a_set_is_made_and_judged(sandboxes: TaskSandboxes, cache: Path, tmp_path: Path) -> None:
    made = await _maker(sandboxes, tmp_path / "one", cache).make()
    assert len(made.tasks) == 10
    assert {task.split for task in made.tasks} == {"train", "heldout"}
    assert all(
        "test_of_the_moment" not in test for task in made.tasks for test in task.fail_to_pass + task.pass_to_pass
    )
    tasks = list(read_tasks(tmp_path / "one/tasks.jsonl"))
    assert tasks == made.tasks
    preparer, judge = TaskPreparer(tmp_path / "one"), SweJudge(sandboxes)
    for task in tasks:
        prepared = preparer.prepare(task)
        solution = prepared.solution_patch
        assert solution is not None
        assert (await judge.judge(prepared, solution)).reward == 1.0
        nothing = await judge.judge(prepared, prepared.start_patch)
        assert (nothing.reward, nothing.tampered) == (0.0, False)
        assert nothing.fail_to_pass < 1.0
        assert task.fail_to_pass[0] in task.instruction
    # equal for another number of workers, and a second call makes nothing again
    again = await _maker(sandboxes, tmp_path / "two", cache, workers=3).make()
    assert again.tasks == made.tasks
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "one/parts").iterdir()}
    assert (await _maker(sandboxes, tmp_path / "one", cache).make()).tasks == made.tasks
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "one/parts").iterdir()} == before


async def test_other_settings_need_another_directory(sandboxes: TaskSandboxes, cache: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="not empty"):
        await _maker(sandboxes, tmp_path, cache).make()


def test_a_file_that_is_not_the_pinned_one_is_refused(tmp_path: Path) -> None:
    pinned = PinnedFile("a", "1", "a-1.tar.gz", hashlib.sha256(b"right").hexdigest())
    with pytest.raises(UsageError, match="not in"):
        fetch_package(pinned, tmp_path, offline=True)
    (tmp_path / "a-1.tar.gz").write_bytes(b"wrong")
    with pytest.raises(UsageError, match="hash differs"):
        fetch_package(pinned, tmp_path, offline=True)


@pytest.mark.parametrize("as_json", [False, True])
def test_a_file_is_fetched_from_an_index(tmp_path: Path, as_json: bool) -> None:
    """By links relative to its page, in HTML or JSON."""
    link = "../../files/a-1.tar.gz"
    page = f'<a href="{link}#sha256=0">a-1.tar.gz</a>'
    if as_json:
        page = json.dumps({"files": [{"filename": "a-1.tar.gz", "url": link}]})

    class Index(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = {"/simple/a/": page.encode(), "/files/a-1.tar.gz": b"right"}.get(self.path)
            self.send_response(200 if found else 404)
            self.send_header("Content-Type", "application/json" if as_json else "text/html")
            self.end_headers()
            self.wfile.write(found or b"")

        def log_message(self, *args: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Index) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        index = f"http://127.0.0.1:{server.server_port}/simple"
        try:
            right = PinnedFile("a", "1", "a-1.tar.gz", hashlib.sha256(b"right").hexdigest())
            assert fetch_package(right, tmp_path / "cache", index=index).read_bytes() == b"right"
            other = PinnedFile("a", "1", "a-1.tar.gz", hashlib.sha256(b"other").hexdigest())
            with pytest.raises(UsageError, match="another a-1"):
                fetch_package(other, tmp_path / "other", index=index)
            with pytest.raises(UsageError, match="cannot be fetched"):
                fetch_package(PinnedFile("b", "1", "b-1.tar.gz", "0"), tmp_path / "other", index=index)
        finally:
            server.shutdown()
            thread.join()
