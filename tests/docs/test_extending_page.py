"""docs/extending.md: its code is that of the example package, and its recipes are read."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from installed_extensions import install_extensions

from hpcrl.config.load import load_recipe
from hpcrl.extend import KINDS, extension_path, import_object

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "docs/examples/extension"
PAGE = (ROOT / "docs/extending.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def points() -> dict[str, str]:
    table = (EXAMPLE / "pyproject.toml").read_text().partition('"hpcrl.extensions"]\n')[2].partition("\n\n")[0]
    return dict(re.findall(r'^"(.+)" = "(.+)"$', table, re.MULTILINE))


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Install the example."""
    monkeypatch.syspath_prepend(str(EXAMPLE))
    monkeypatch.syspath_prepend(str(install_extensions(tmp_path / "installed", {}, points())))
    yield
    for name in [name for name in sys.modules if name.startswith("hpcrl_lab_example")]:
        del sys.modules[name]


def test_code_is_that_of_the_package() -> None:
    sources = "\n\n\n".join(path.read_text() for path in sorted((EXAMPLE / "hpcrl_lab_example").glob("*.py")))
    for block in blocks("python"):
        for part in block.strip().split("\n\n\n"):
            assert part in sources, part
    (table,) = blocks("toml")
    assert dict(re.findall(r'^"(.+)" = "(.+)"$', table, re.MULTILINE)) == points()


def test_there_is_one_of_each_kind(package: None) -> None:
    found = {name.partition(".")[0] for name in points()}
    assert found == set(KINDS)
    for name in points():
        kind, _, own = name.partition(".")
        import_object(extension_path(kind, own))  # type: ignore[arg-type]


def test_recipes_are_read(package: None, tmp_path: Path) -> None:
    pieces = blocks("yaml")
    assert len(pieces) == 6
    for number, piece in enumerate(pieces):
        recipe = tmp_path / f"piece{number}.yaml"
        recipe.write_text(f"extends: quickstart\nname: piece{number}\n{piece}")
        written = yaml.safe_load(piece)
        resolved = load_recipe(str(recipe)).value.model_dump(mode="json")
        for key in written:
            assert resolved[key] != load_recipe("quickstart").value.model_dump(mode="json")[key]
    assert load_recipe(str(EXAMPLE / "recipe.yaml")).value.environments[0].kind == "custom"
