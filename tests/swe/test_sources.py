"""Rows of published data sets and task directories of Harbor become tasks."""

from __future__ import annotations

import asyncio
import json
import tarfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from bribes import BRIBES
from swe_lab import BAD, FAIL_TO_PASS, GOOD, PASS_TO_PASS, SOURCE, TESTS, TREE, changes, make_task, make_tree

from hpcrl.sandboxes import SandboxError, SandboxFile
from hpcrl.swe.diffs import make_diff
from hpcrl.swe.judging.judge import SweJudge
from hpcrl.swe.judging.prepared import PreparedTask, TaskPreparer, changes_of
from hpcrl.swe.judging.task_sandboxes import TaskSandboxes
from hpcrl.swe.sources import load_tasks
from hpcrl.swe.sources.task_images import locate_images
from hpcrl.swe.task import SweTaskError, read_tasks, write_tasks
from hpcrl.swe.trees import TreeError, read_tree, tree_bytes, tree_digest, write_tar

BENCH = {
    "instance_id": "own__lengths-1",
    "repo": "own/lengths",
    "base_commit": "abc",
    "problem_statement": "total is wrong",
    "patch": make_diff({SOURCE: BAD}, {SOURCE: GOOD}),
    "test_patch": make_diff({}, {"tests/test_more.py": TESTS}),
    "FAIL_TO_PASS": json.dumps(["tests/test_more.py::test_total"]),
    "PASS_TO_PASS": ["tests/test_more.py::test_parse"],
}
SMITH = {
    "instance_id": "own__lengths-2",
    "repo": "own/lengths",
    "patch": make_diff({SOURCE: GOOD}, {SOURCE: BAD}),
    "FAIL_TO_PASS": list(FAIL_TO_PASS),
    "PASS_TO_PASS": list(PASS_TO_PASS),
    "image_name": "",
}
R2E = {
    "repo_name": "lengths",
    "commit_hash": "abc",
    "docker_image": "",
    "problem_statement": "total is wrong",
    "expected_output_json": json.dumps({"test_total": "PASSED", "TotalTest.test_units": "PASSED", "test_x": "FAILED"}),
    "execution_result_content": json.dumps(
        {
            "test_file_names": ["test_1.py"],
            "test_file_codes": [TESTS],
            "old_commit_res_stdout": "= short test summary info =\nPASSED r2e_tests/test_1.py::TotalTest::test_units\n",
        }
    ),
}


def _write(tmp_path: Path, rows: list[Any], source: str) -> tuple[Path, Path]:
    trees = tmp_path / "trees"
    trees.mkdir()
    tree = {path: SandboxFile(text.encode()) for path, text in {**TREE, SOURCE: source}.items()}
    write_tar(trees / "own__lengths@abc.tar", tree)
    write_tar(trees / "own__lengths-2.tar", tree)
    write_tar(trees / "lengths@abc.tar", tree)
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path, trees


@pytest.mark.parametrize(
    ("kind", "row", "source"),
    [("swe-bench", BENCH, BAD), ("swe-gym", BENCH, BAD), ("swe-smith", SMITH, GOOD), ("r2e-gym", R2E, BAD)],
)
async def test_a_row_is_judged(
    sandboxes: TaskSandboxes, tools: bytes, tmp_path: Path, *, kind: str, row: dict[str, Any], source: str
) -> None:
    path, trees = _write(tmp_path, [row], source)
    loaded = load_tasks(path, kind, trees=trees)
    [task] = loaded.tasks
    (trees / "tools.zip").write_bytes(tools)
    mine = PreparedTask(*_fields(loaded.directory, task))
    right = {**mine.start, SOURCE: GOOD}
    judge = SweJudge(sandboxes)
    verdict = await judge.judge(mine, changes_of(mine.tree, right))
    assert verdict.reward == 1.0, verdict
    nothing = await judge.judge(mine, mine.start_patch)
    assert (nothing.reward, nothing.fail_to_pass, nothing.pass_to_pass, nothing.tampered) == (0.0, 0.0, 1.0, False)
    if kind != "r2e-gym":
        assert mine.solution is not None
        assert mine.solution[SOURCE] == GOOD


@pytest.mark.parametrize("name", ["equal to everything but under random names", "equal to everything"])
@pytest.mark.parametrize(
    ("kind", "row", "source"), [("swe-bench", BENCH, BAD), ("swe-smith", SMITH, GOOD), ("r2e-gym", R2E, BAD)]
)
async def test_code_that_looks_at_names_of_its_callers_gets_nothing(
    sandboxes: TaskSandboxes, tools: bytes, tmp_path: Path, *, kind: str, row: dict[str, Any], source: str, name: str
) -> None:
    path, trees = _write(tmp_path, [row], source)
    (trees / "tools.zip").write_bytes(tools)
    [task] = load_tasks(path, kind, trees=trees).tasks
    mine = PreparedTask(*_fields(trees, task))
    verdict = await SweJudge(sandboxes).judge(mine, changes(mine, BRIBES[name]))
    assert (verdict.reward, verdict.tampered) == (0.0, True), verdict


def _fields(directory: Path, task: Any) -> tuple[Any, ...]:
    """Return the fields of a prepared task that runs with the interpreter of this machine."""
    import msgspec

    own = msgspec.structs.replace(task, imports=("src",), python=make_task().python, timeout_s=60.0)
    one = TaskPreparer(directory).prepare(own)
    return one.task, one.tree, one.start, one.laid, one.solution, one.modules


@pytest.mark.parametrize(
    ("kind", "row", "what"),
    [
        ("swe-bench", {**BENCH, "FAIL_TO_PASS": "nothing"}, "FAIL_TO_PASS' is text, but not JSON"),
        ("swe-bench", {**BENCH, "FAIL_TO_PASS": [1]}, "not a list of texts"),
        ("swe-bench", {**BENCH, "FAIL_TO_PASS": []}, "FAIL_TO_PASS is empty"),
        ("swe-bench", {**BENCH, "problem_statement": None}, "problem_statement"),
        ("swe-bench", {**BENCH, "patch": "no diff"}, "not a unified diff"),
        ("swe-smith", {**SMITH, "patch": ""}, "'patch' is missing"),
        ("r2e-gym", {**R2E, "expected_output_json": "[]"}, "expected_output_json"),
        ("r2e-gym", {**R2E, "expected_output_json": '{"test_other": "PASSED"}'}, "test_other"),
        ("swe-bench", {**BENCH, "instance_id": "../up", "base_commit": "other", "repo": "x"}, "no row with a rep"),
    ],
)
def test_what_is_wrong_with_a_row_is_named(tmp_path: Path, kind: str, row: dict[str, Any], what: str) -> None:
    path, trees = _write(tmp_path, [row], BAD)
    with pytest.raises(SweTaskError, match=what):
        load_tasks(path, kind, trees=trees)


def test_rows_without_a_repository_are_counted(tmp_path: Path) -> None:
    path, trees = _write(tmp_path, [BENCH, {**BENCH, "instance_id": "other", "repo": "x/y"}], BAD)
    loaded = load_tasks(path, "swe-bench", trees=trees)
    assert len(loaded.tasks) == 1
    assert "1 rows have no repository" in loaded.notes[0]


def test_rows_of_another_runner_are_counted(tmp_path: Path) -> None:
    """Django's runner names tests ``test_a (module.Class)``, and SymPy's by the function alone."""
    django = {**BENCH, "instance_id": "django", "FAIL_TO_PASS": ["test_a (lengths.tests.LengthTest)"]}
    path, trees = _write(tmp_path, [BENCH, django, {**BENCH, "instance_id": "sympy", "PASS_TO_PASS": ["test_b"]}], BAD)
    loaded = load_tasks(path, "swe-bench", trees=trees)
    assert [task.id for task in loaded.tasks] == [BENCH["instance_id"]]
    assert "2 rows have tests that are not named as pytest does" in loaded.notes[0]
    assert "django with 'test_a (lengths.tests.LengthTest)'" in loaded.notes[0]
    path.write_text(json.dumps(django))
    with pytest.raises(SweTaskError, match="no row with ids of pytest"):
        load_tasks(path, "swe-bench", trees=trees)


def test_parquet_is_read(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    _, trees = _write(tmp_path, [], BAD)
    path = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.Table.from_pylist([BENCH]), path)
    assert load_tasks(path, "swe-bench", trees=trees).tasks[0].fail_to_pass == ("tests/test_more.py::test_total",)


def test_a_table_in_several_files_is_read(tmp_path: Path) -> None:
    """As a data set of the hub is downloaded: its benchmark lies next to its training rows."""
    _, trees = _write(tmp_path, [], BAD)
    data = tmp_path / "data"
    data.mkdir()
    (data / "README.md").write_text("rows\n")
    with pytest.raises(SweTaskError, match=r"data has no file with \.jsonl or \.parquet"):
        load_tasks(data, "swe-bench", trees=trees)
    rows = [{**BENCH, "instance_id": f"own__{name}"} for name in ("b", "a", "c")]
    for number, row in enumerate(rows):
        (data / f"train-0000{number}-of-00003.jsonl").write_text(json.dumps(row))
    assert [task.id for task in load_tasks(data, "swe-bench", trees=trees).tasks] == ["own__b", "own__a", "own__c"]
    (data / "train-00002-of-00003.jsonl").write_text("{")
    with pytest.raises(SweTaskError, match=r"train-00002-of-00003\.jsonl, line 1: it is not JSON"):
        load_tasks(data, "swe-bench", trees=trees)
    (data / "test-00000-of-00001.jsonl").write_text(json.dumps(BENCH))
    with pytest.raises(SweTaskError, match="several tables: test, train\n    hint: name a file"):
        load_tasks(data, "swe-bench", trees=trees)


def test_a_file_of_tasks_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    write_tasks(path, [make_task(), make_task(id="two")])
    assert list(read_tasks(path)) == [make_task(), make_task(id="two")]
    with path.open("a") as stream:
        stream.write('{"id": "x"}\n' + path.read_text().splitlines()[0] + "\n")
    with pytest.raises(SweTaskError, match=r"line 3(.|\n)*line 4: the id 'lengths-1' is that of line 1"):
        list(read_tasks(path))


def test_a_changed_tree_is_refused(tmp_path: Path) -> None:
    tree = {path: SandboxFile(text.encode()) for path, text in TREE.items()}
    write_tar(tmp_path / "a.tar", tree)
    assert read_tree(tmp_path / "a.tar", digest=tree_digest(tree)) == tree
    write_tar(tmp_path / "a.tar", {**tree, SOURCE: SandboxFile(b"other")})
    with pytest.raises(TreeError, match="its task was made with"):
        read_tree(tmp_path / "a.tar", digest=tree_digest(tree))


def test_a_tree_has_no_history(tmp_path: Path) -> None:
    """Commits after the base one may have the right patch, and agents read them."""
    tree = {"a.py": SandboxFile(b"1"), "vendor/.gitignore": SandboxFile(b"x")}
    history = {".git/objects/pack/one.pack": SandboxFile(b"patch"), "vendor/.git": SandboxFile(b"gitdir: ../.git/m")}
    write_tar(tmp_path / "a.tar", {**tree, **history})
    assert read_tree(tmp_path / "a.tar") == tree
    for name, file in {**tree, **history}.items():
        path = tmp_path / "b" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(file.content)
    assert read_tree(tmp_path / "b") == tree


def test_images_are_found_in_a_directory(tmp_path: Path) -> None:
    image = "ghcr.io/own/lengths:1.0"
    tasks = [make_task(image=image), make_task(id="other", image="missing"), make_task(id="plain")]
    with pytest.raises(SweTaskError, match=r"lengths-1 with ghcr(.|\n)*unpack it to DIR/ghcr.io__own__lengths__1.0"):
        locate_images(tasks[:2], backend="bubblewrap")
    place = tmp_path / "ghcr.io__own__lengths__1.0"
    place.mkdir()
    found, notes = locate_images(tasks, backend="bubblewrap", images=tmp_path)
    assert [task.image for task in found] == [str(place), ""]
    assert "1 tasks have no image that bubblewrap can use, and are left out: other with missing" in notes[0]
    assert [task.image for task in locate_images([make_task(image=str(place))], backend="bubblewrap")[0]] == [
        str(place)
    ]
    (tmp_path / "missing.sif").touch()
    found, notes = locate_images(tasks, backend="apptainer", images=tmp_path)
    assert [task.image for task in found] == [str(place), str(tmp_path / "missing.sif")]
    assert "apptainer needs an image for each task" in notes[0]
    assert [task.image for task in locate_images(tasks, backend="podman")[0]] == [image, "missing"]
    with pytest.raises(SweTaskError):
        locate_images([make_task(image="..")], backend="bubblewrap", images=tmp_path / "one")


def test_hard_links_of_a_tar_are_files(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"1")
    (tmp_path / "b").hardlink_to(tmp_path / "a")
    for name in ("ab", "ba"):
        with tarfile.open(tmp_path / f"{name}.tar", "w") as archive:
            for file in name:
                archive.add(tmp_path / file, f"./{file}")
        assert read_tree(tmp_path / f"{name}.tar") == {file: SandboxFile(b"1") for file in name}
    entry = tarfile.TarInfo("c")
    for kind, what in ((tarfile.LNKTYPE, "to 'nothing', which it has not"), (tarfile.FIFOTYPE, "neither a file")):
        entry.type, entry.linkname = kind, "nothing"
        with tarfile.open(tmp_path / "c.tar", "w") as archive:
            archive.addfile(entry)
        with pytest.raises(TreeError, match=what):
            read_tree(tmp_path / "c.tar")


def test_the_members_of_a_group_read_a_tree_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = {path: SandboxFile(text.encode()) for path, text in TREE.items()}
    names = ("one", "two", "three")
    for name in names:
        write_tar(tmp_path / f"{name}.tar", tree)
    read: list[str] = []
    waiting = threading.Barrier(4)

    def slowly(path: Path, **more: str) -> Any:
        read.append(path.stem)
        time.sleep(0.05)  # without the lock the others come meanwhile
        return read_tree(path, **more)

    monkeypatch.setattr("hpcrl.swe.judging.prepared.read_tree", slowly)
    preparer = TaskPreparer(tmp_path, max_kept_bytes=2 * sum(len(text) for text in TREE.values()))
    tasks = {name: make_task(tree=f"{name}.tar", bug="", solution="") for name in names}

    def prepare() -> PreparedTask:
        waiting.wait()
        return preparer.prepare(tasks["one"])

    with ThreadPoolExecutor(4) as pool:
        found = [each.result().tree for each in [pool.submit(prepare) for _ in range(4)]]
    assert read == ["one"]
    assert all(each is found[0] for each in found)
    # the one that was not used for the longest time is given up
    for name in ("two", "one", "three", "one", "two"):
        preparer.prepare(tasks[name])
    assert read == ["one", "two", "three", "two"]


async def test_a_tree_is_given_up_when_no_task_uses_it(sandboxes: TaskSandboxes, tools: bytes) -> None:
    size = tree_bytes(make_tree(tools, more="a"))
    own = TaskSandboxes(sandboxes._host, max_kept_bytes=size)
    first, second = (PreparedTask(make_task(), make_tree(tools, more=text), {}, {}, None, frozenset()) for text in "ab")
    async with own.using(first):
        name = await own.tree_name(first)
        assert set(await asyncio.gather(*(own.tree_name(first) for _ in range(4)))) == {name}
        async with own.using(second):
            await own.tree_name(second)
        assert await own.tree_name(first) == name, "it is in use"
        await (await own._host.start(tree=name)).kill()
    async with own.using(second):
        other = await own.tree_name(second)
    await (await own._host.start(tree=other)).kill()
    with pytest.raises(SandboxError, match="there is no tree"):
        await own._host.start(tree=name)
