"""The JSON schema that editors use accepts good recipes and refuses bad ones."""

from __future__ import annotations

import json
import sys
from typing import Any

import jsonschema
import pytest

from hpcrl.cli.main import main
from hpcrl.config.resources import list_recipes
from hpcrl.config.yamltree import parse_file


@pytest.fixture
def schema(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    monkeypatch.setattr(sys, "argv", ["hpcrl", "recipe", "schema"])
    with pytest.raises(SystemExit):
        main()
    schema = json.loads(capsys.readouterr().out)
    jsonschema.Draft202012Validator.check_schema(schema)
    return schema


def whole_recipes() -> list[str]:
    """Recipes that do not extend another: a schema sees one file."""
    return [name for name, path in list_recipes().items() if "extends" not in parse_file(path)[0]]


@pytest.mark.parametrize("name", whole_recipes())
def test_packaged_recipes_fit(schema: Any, name: str) -> None:
    tree, _ = parse_file(list_recipes()[name])
    jsonschema.validate(tree, schema)
    tree["trainer"]["stepz"] = 3
    with pytest.raises(jsonschema.ValidationError, match="stepz"):
        jsonschema.validate(tree, schema)


def test_settings_carry_their_meaning(schema: Any) -> None:
    assert "Optimizer steps" in schema["$defs"]["TrainerConfig"]["properties"]["steps"]["description"]


def test_an_editor_shows_what_each_key_means(schema: Any) -> None:
    """Also of inherited keys, of sections, and of what one value is chosen for."""
    shown = {(name, key): found.get("description") for name, key, found in properties(schema)}
    assert shown["Recipe", "trainer"] == "The trainer role."
    assert [place for place, meaning in shown.items() if not meaning and place[1] != "kind"] == []


def properties(schema: Any) -> list[tuple[str, str, Any]]:
    models = {"Recipe": schema, **schema["$defs"]}
    return [(name, key, found) for name, model in models.items() for key, found in model.get("properties", {}).items()]
