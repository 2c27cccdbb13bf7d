"""Generated documentation is up to date, and every setting is documented."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


def load_generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_docs", ROOT / "tools/generate_docs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


generator = load_generator()


@pytest.mark.parametrize("name", generator.GENERATED)
def test_up_to_date(name: str) -> None:
    assert (ROOT / name).read_text(encoding="utf-8") == generator.GENERATED[name](), "run `make docs`"


def test_every_setting_has_a_meaning() -> None:
    for line in generator.configuration().splitlines():
        if line.startswith("| `"):
            cells = [cell.strip() for cell in line.replace("\\|", "/").strip("|").split("|")]
            # the kind of an environment is explained by the heading of its section
            assert cells[-1] or cells[0].endswith(".kind`"), line
