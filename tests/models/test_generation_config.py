"""`generation_config.json` as published models have it, and damaged."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import GenerationConfig as Theirs

from hpcrl.models.generation_config import GenerationConfig


@pytest.mark.parametrize(
    "settings",
    [
        {"eos_token_id": [151329, 151336, 151338], "temperature": 1.0, "top_p": 0.95, "do_sample": True},
        {"eos_token_id": 7, "temperature": 0.6, "top_k": 20, "min_p": 0.05, "do_sample": True},
        {},
    ],
)
def test_what_transformers_writes_is_read(tmp_path: Path, settings: dict[str, object]) -> None:
    Theirs(**settings).save_pretrained(tmp_path)
    found = GenerationConfig.read(tmp_path)
    eos = settings.get("eos_token_id", [])
    assert list(found.eos_token_ids) == (eos if isinstance(eos, list) else [eos])
    for key in ("temperature", "top_p", "top_k", "min_p"):
        assert getattr(found, key) == settings.get(key), key


def test_no_file_says_nothing(tmp_path: Path) -> None:
    assert GenerationConfig.read(tmp_path) == GenerationConfig()
    (tmp_path / "generation_config.json").write_bytes(b'\xef\xbb\xbf{"eos_token_id": null, "temperature": 0}')
    assert GenerationConfig.read(tmp_path) == GenerationConfig(temperature=0.0)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{",
        "[" * 100_000,
        '{"eos_token_id": true}',
        '{"eos_token_id": "2"}',
        '{"eos_token_id": [1, [2]]}',
        '{"eos_token_id": 99999999999999999999}',
        '{"eos_token_id": -1}',
        '{"temperature": "hot"}',
        '{"temperature": NaN}',
        '{"temperature": -0.5}',
        '{"top_p": 1.5}',
        '{"top_k": 0.5}',
        '{"top_k": -2}',
        '{"min_p": []}',
        " " * (2 << 20),
    ],
)
def test_what_is_none_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ValueError, match=r"generation_config\.json"):
        GenerationConfig.read(tmp_path)
