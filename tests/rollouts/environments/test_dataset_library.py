"""Directories and data sets of the hub, which the library ``datasets`` reads: with a stand-in, and the real one."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from dataset_testing import asked, make_dataset, questions, write_jsonl

from hpcrl.errors import ConfigError

SPLITS = {"split_column": "split", "held_out_values": ["test"]}


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """A stand-in of ``datasets``; the calls that it gets."""
    calls: list[tuple[Any, ...]] = []
    both = {"train": questions(30), "test": questions(40)[30:]}

    def torn() -> Iterator[dict[str, Any]]:
        yield from questions(3)
        raise OSError("cannot identify image file\x1b[1m")

    def load_dataset(name: str, subset: str | None, *, revision: str | None) -> dict[str, Any]:
        calls.append((name, subset, revision))
        if name == "org/torn":
            return {"train": torn()}
        if name == "nobody/nothing":
            raise ConnectionError("Couldn't reach the Hub\x1b[1m in offline mode")
        return both

    def load_from_disk(name: str) -> Any:
        calls.append((name,))
        return both if (Path(name) / "dataset_dict.json").exists() else questions(40)

    monkeypatch.setitem(
        sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset, load_from_disk=load_from_disk)
    )
    return calls


def sets(environment: Any) -> tuple[set[str], set[str]]:
    return {*asked(environment, "train", 90)}, {*asked(environment, "heldout", 90)}


def test_rows_that_the_library_cannot_decode(library: list[tuple[Any, ...]], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"datasets cannot read org/torn behind row 3: OSError: cannot .*\\x1b"):
        make_dataset(tmp_path, path=None, hub="org/torn")


def test_a_data_set_of_the_hub(library: list[tuple[Any, ...]], tmp_path: Path) -> None:
    environment = make_dataset(tmp_path, path=None, hub="org/sums", subset="main", revision="v1", **SPLITS)
    assert library == [("org/sums", "main", "v1")]
    train, held_out = sets(environment)
    assert (len(train), len(held_out), train & held_out) == (30, 10, set())


def test_splits_of_the_library_are_never_mixed(library: list[tuple[Any, ...]], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has the splits train, test\n    hint: set split_column: split"):
        make_dataset(tmp_path)


def test_what_the_library_cannot_load_is_reported(library: list[tuple[Any, ...]], tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        make_dataset(tmp_path, path=None, hub="nobody/nothing")
    text = str(caught.value)
    assert "environments.asked.hub: datasets cannot load nobody/nothing: ConnectionError: Couldn't reach" in text
    assert "\x1b" not in text
    assert "cache" in text


@pytest.mark.parametrize(("mark", "changes"), [("state.json", {}), ("dataset_dict.json", SPLITS)])
def test_what_was_saved_to_disk(
    library: list[tuple[Any, ...]], tmp_path: Path, mark: str, changes: dict[str, Any]
) -> None:
    (tmp_path / mark).write_text("{}")
    train, held_out = sets(make_dataset(tmp_path, **changes))
    assert library == [(str(tmp_path),)]
    assert (len(train | held_out), train & held_out) == (40, set())


def test_bad_rows_have_their_number(library: list[tuple[Any, ...]], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"row 1: column 'question' does not exist\n +hint: .*split, prompt, answer"):
        make_dataset(tmp_path, columns={"prompt": "question"}, **SPLITS)


@pytest.mark.skipif(importlib.util.find_spec("datasets") is None, reason="datasets is not installed (extra `datasets`)")
def test_the_real_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    (tmp_path / "data").mkdir()
    write_jsonl(tmp_path / "data/train.jsonl", questions(30))
    write_jsonl(tmp_path / "data/test.jsonl", questions(40)[30:])
    train, held_out = sets(make_dataset(tmp_path / "data", **SPLITS))
    assert (len(train), len(held_out), train & held_out) == (30, 10, set())
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="datasets cannot load"):
        make_dataset(tmp_path / "empty")
    saved = tmp_path / "saved"
    datasets.load_dataset(str(tmp_path / "data")).save_to_disk(str(saved))
    assert json.loads((saved / "dataset_dict.json").read_text())["splits"] == ["train", "test"]
    assert sets(make_dataset(saved, **SPLITS)) == (train, held_out)
