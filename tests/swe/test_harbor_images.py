"""Harbor tasks whose files are in their image, without a tree: sandboxes have these files, or the task is refused."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcrl.swe.image_tree import find_in_image, read_image_tree
from hpcrl.swe.judging.judge import SweJudge
from hpcrl.swe.judging.prepared import PreparedTask, TaskPreparer, changes_of
from hpcrl.swe.judging.task_sandboxes import TaskSandboxes
from hpcrl.swe.sources import load_tasks
from hpcrl.swe.sources.task_images import locate_images
from hpcrl.swe.task import SweTask, SweTaskError
from hpcrl.swe.trees import TreeError, read_tree

IMAGE = "own/answers:1"
SETTINGS = f"""[environment]
docker_image = "{IMAGE}"
"""
SCRIPT = """read answer < answer.txt
[[ $answer = 7 && -x run/me ]] && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt
"""


def write_task(directory: Path, settings: str = SETTINGS) -> Path:
    """A task directory without a tree."""
    (directory / "tests").mkdir(parents=True)
    (directory / "task.toml").write_text(settings)
    (directory / "instruction.md").write_text("Write 7 to answer.txt.")
    (directory / "tests/test.sh").write_text(SCRIPT)
    return directory


def write_image(images: Path, *programs: str, work: str = "app") -> Path:
    """A root filesystem with a work directory, and with programs of this machine and their libraries."""
    image = images / "own__answers__1"
    (image / work / "run").mkdir(parents=True)
    (image / work / "answer.txt").write_text("6\n")
    (image / work / "run/me").write_text("#!/bin/sh\n")
    (image / work / "run/me").chmod(0o755)
    for name in programs:
        program = shutil.which(name, path="/usr/bin:/bin")
        if program is None:
            pytest.skip(f"there is no {name}")
        listed = subprocess.run(["ldd", program], capture_output=True, text=True, check=False).stdout
        for source in [f"/bin/{name}", *re.findall(r"(/\S+) \(0x", listed)]:
            place = image / source.lstrip("/")
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(program if source == f"/bin/{name}" else source, place)
    return image


def located(tmp_path: Path, backend: str = "bubblewrap") -> tuple[list[SweTask], list[str]]:
    loaded = load_tasks(tmp_path / "tasks", "harbor")
    return locate_images(loaded.tasks, backend=backend, images=tmp_path / "images")


def prepared(tmp_path: Path) -> PreparedTask:
    [task], notes = located(tmp_path)
    assert notes == []
    return TaskPreparer(tmp_path / "tasks").prepare(task)


@pytest.fixture
def open_directory() -> Iterator[Path]:
    """A directory that every user may enter, as pytest's are not: sandboxes of root have another user's rights."""
    with tempfile.TemporaryDirectory(dir="/tmp") as path:
        Path(path).chmod(0o755)
        yield Path(path)


async def test_the_agent_and_the_judge_have_the_files_of_the_image(
    sandboxes: TaskSandboxes, open_directory: Path
) -> None:
    write_task(open_directory / "tasks/one")
    write_image(open_directory / "images", "bash", "mkdir", "cat")
    mine = prepared(open_directory)
    sandbox = await sandboxes.start(mine)
    try:
        found = await sandbox.exec(
            ["/bin/bash", "-c", "cat answer.txt; echo 7 > answer.txt; [[ -x run/me ]] && echo x"]
        )
        assert found.text == "6\nx\n"
        patch = await sandbox.diff(await sandboxes.tree_name(mine))
    finally:
        await sandbox.kill()
    # the change alone, and not every file of the image
    assert patch.paths == ("answer.txt",)
    judge = SweJudge(sandboxes)
    assert (await judge.judge(mine, mine.start_patch)).reward == 0.0
    assert (await judge.judge(mine, patch)).reward == 1.0
    assert (await judge.judge(mine, changes_of(mine.tree, {"answer.txt": "8"}))).reward == 0.0


def test_each_image_has_a_tree_of_its_own(tmp_path: Path) -> None:
    """Trees are kept by their names, and tasks without one have none."""
    preparer = TaskPreparer(tmp_path)
    for number in range(2):
        write_task(tmp_path / f"tasks/{number}", SETTINGS.replace("answers:1", f"answers:{number}"))
        image = tmp_path / f"images/own__answers__{number}/app"
        image.mkdir(parents=True)
        (image / "answer.txt").write_text(str(number))
    found = [preparer.prepare(task).tree["answer.txt"].content for task in located(tmp_path)[0]]
    assert found == [b"0", b"1"]


@pytest.mark.parametrize(
    ("backend", "hint"),
    [
        ("bubblewrap", "name the directory of its files in it .environment.workdir., or make an empty directory tree"),
        ("apptainer", "unpack the image to a directory, name"),
        ("docker", "`docker create own/answers:1`, then `docker cp CONTAINER:/app TASK/tree`"),
        ("podman", "`podman create own/answers:1`"),
    ],
)
def test_a_task_whose_files_cannot_be_read_is_left_out_by_name(tmp_path: Path, backend: str, hint: str) -> None:
    write_task(tmp_path / "tasks/one")
    write_image(tmp_path / "images", work="elsewhere")
    with pytest.raises(SweTaskError, match=f"no task has files that hpcrl can read: one with .*and /app.*\n.*{hint}"):
        located(tmp_path, backend)
    whole = write_task(tmp_path / "tasks/two")
    (whole / "tree").mkdir()
    found, [note] = located(tmp_path, backend)
    assert [task.id for task in found] == ["two"]
    assert "1 tasks have no tree, and their images no files that hpcrl can read; they are left out: one with" in note
    # an empty tree is meant
    assert TaskPreparer(tmp_path / "tasks").prepare(found[0]).tree == {}


def test_a_file_of_apptainer_is_not_a_directory_with_files(tmp_path: Path) -> None:
    write_task(tmp_path / "tasks/one")
    (tmp_path / "images").mkdir()
    (tmp_path / "images/own__answers__1.sif").touch()
    with pytest.raises(SweTaskError, match="unpack the image to a directory"):
        located(tmp_path, "apptainer")


def test_a_local_directory_is_not_the_image_of_docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own/answers:1/app").mkdir(parents=True)
    write_task(tmp_path / "tasks/one")
    with pytest.raises(SweTaskError, match="docker cp"):
        located(tmp_path, "docker")


def test_links_of_an_image_lead_to_its_own_directories(tmp_path: Path) -> None:
    image = tmp_path / "image"
    (image / "srv/code").mkdir(parents=True)
    (image / "srv/code/a.txt").write_text("a")
    (image / "app").symlink_to("/srv/here")
    (image / "srv/here").symlink_to("../../../srv/code")
    assert find_in_image(image, "/app") == image / "srv/code"
    assert read_image_tree(image, "/app/.")["a.txt"].content == b"a"
    # the same path is there on this machine, and not in the image
    (image / "out").symlink_to(tmp_path)
    (image / "round").symlink_to("round")
    for path in ("/out", "/round", "/srv/code/a.txt", "/missing"):
        assert find_in_image(image, path) is None
        with pytest.raises(TreeError, match="is not a directory with"):
            read_image_tree(image, path)


def test_what_cannot_be_read_of_an_image_is_not_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests may run as root, who may read everything: the error of another user's is made."""
    image = write_image(tmp_path / "images")

    def refuse(*_: object) -> bytes:
        raise PermissionError(13, "Permission denied", str(image / "app/answer.txt"))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(TreeError, match=r"answer.txt cannot be read: Permission denied"):
        read_tree(image / "app")
    monkeypatch.undo()
    monkeypatch.setattr("os.scandir", refuse)
    with pytest.raises(TreeError, match="cannot be read: Permission denied"):
        read_tree(image / "app")


@pytest.mark.parametrize(
    ("dockerfile", "directory"),
    [
        ("FROM debian\nWORKDIR /srv/code\n", "/srv/code"),
        ("FROM debian\nworkdir  /srv\nWORKDIR 'code'\nRUN true\n", "/srv/code"),
        ("FROM a AS b\nWORKDIR /other\nFROM debian\nCOPY --from=b /x /x\n", "/app"),
        ("FROM debian\nWORKDIR $HOME/x\n", "/app"),
        ("FROM debian\nWORKDIR /\n", "/app"),
        (None, "/app"),
    ],
)
def test_the_work_directory_is_that_of_the_dockerfile(tmp_path: Path, dockerfile: str | None, directory: str) -> None:
    task = write_task(tmp_path / "one")
    (task / "environment").mkdir()
    if dockerfile is not None:
        (task / "environment/Dockerfile").write_text(dockerfile)
    assert load_tasks(tmp_path, "harbor").tasks[0].directory == directory
    (task / "task.toml").write_text(f'{SETTINGS}workdir = "/mine"\n')
    assert load_tasks(tmp_path, "harbor").tasks[0].directory == "/mine"


def test_a_dockerfile_alone_is_refused(tmp_path: Path) -> None:
    task = write_task(tmp_path / "one", "")
    assert load_tasks(tmp_path, "harbor").tasks[0].tree == ""
    (task / "environment").mkdir()
    (task / "environment/Dockerfile").write_text("FROM debian\n")
    with pytest.raises(SweTaskError, match="environment/Dockerfile, which hpcrl does not build"):
        load_tasks(tmp_path, "harbor")
    (task / "tree").mkdir()
    assert load_tasks(tmp_path, "harbor").tasks[0].tree == "one/tree"
