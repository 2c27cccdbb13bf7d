"""Changes of an agent that count, and those that do not."""

from __future__ import annotations

import pytest

from hpcrl.sandboxes import Patch, PatchEntry, SandboxFile
from hpcrl.swe.judging.paths import counted_changes

COUNT = ["src/lengths/__init__.py", "lib/data.json", "README.md", "src/testing/tools.py", "src/json_tools.py"]
REFUSED = [
    *("tests/test_a.py", "src/tests/helper.py", "Tests/data.txt", "test_a.py", "src/a_test.py", "conftest.py"),
    *("src/Conftest.py", "pytest.ini", "pyproject.toml", "setup.cfg", "tox.ini", "src/sitecustomize.py", "paid.pth"),
    *(".git/config", ".hpcrl/tools.zip", "src/lengths/__pycache__/a.pyc", "src/lengths/fast.so", "x.egg-info/PKG-INFO"),
    *("/etc/passwd", "../up.py", "src/../../up.py", "src/pytest.py", "random.py", "src/packaging/__init__.py"),
    *("checks/judged.py", "new\nline.py"),
]


def _split(entry: PatchEntry) -> tuple[Patch, dict[str, str]]:
    return counted_changes(
        Patch((entry,)), test_files=["checks/judged.py"], roots=["src", "."], modules={"lengths", "src"}
    )


@pytest.mark.parametrize("path", COUNT)
def test_source_code_counts(path: str) -> None:
    assert _split(PatchEntry(path, None, SandboxFile(b"x"))) == (
        Patch((PatchEntry(path, None, SandboxFile(b"x")),)),
        {},
    )


@pytest.mark.parametrize("path", REFUSED)
def test_tests_and_configuration_do_not(path: str) -> None:
    kept, refused = _split(PatchEntry(path, None, SandboxFile(b"x")))
    assert not kept.entries
    assert refused[path]


def test_links_do_not_in_either_direction() -> None:
    file, link = SandboxFile(b"x"), SandboxFile(b"tests", link=True)
    for before, after in ((None, link), (file, link), (link, file), (link, None)):
        assert not _split(PatchEntry("src/lengths/a.py", before, after))[0].entries


def test_a_module_of_the_repository_may_be_changed_whatever_its_name() -> None:
    entry = PatchEntry("src/packaging/new.py", None, SandboxFile(b"x"))
    kept, _ = counted_changes(Patch((entry,)), test_files=[], roots=["src"], modules={"packaging"})
    assert kept.entries == (entry,)
