"""Generated documentation is up to date, and every setting is documented."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "hpcrl"


def load_tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / f"tools/{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


generator, rooms = load_tool("generate_docs"), load_tool("draw_rooms")


@pytest.mark.parametrize("name", generator.GENERATED)
def test_up_to_date(name: str) -> None:
    assert (ROOT / name).read_text(encoding="utf-8") == generator.GENERATED[name](), "run `make docs`"


def test_every_setting_has_a_meaning() -> None:
    for line in generator.configuration().splitlines():
        if line.startswith("| `"):
            cells = [cell.strip() for cell in line.replace("\\|", "/").strip("|").split("|")]
            # the kind of an environment is explained by the heading of its section
            assert cells[-1] or cells[0].endswith(".kind`"), line


def test_the_picture_of_the_rooms_is_up_to_date() -> None:
    text = rooms.PAGE.read_text(encoding="utf-8")
    assert rooms.page(text) == text, "run `make docs`"
    assert text.count("\n  cli --> ") > 2


def test_every_room_has_its_place_in_the_picture() -> None:
    placed = [name for names in rooms.PLACES.values() for name in names]
    assert sorted(placed) == rooms.rooms()


def test_modules_that_the_architecture_names_are_there() -> None:
    """Paths in docs/architecture.md exist: a move of a module moves its name in the docs, too."""
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    names = set(re.findall(r"`(?:hpcrl/)?((?:[a-z_]+/)*[a-z_]+\.py)`", text))
    assert len(names) > 30
    assert {name for name in names if not any(PACKAGE.rglob(name)) and not (ROOT / name).exists()} == set()
