"""Tab: what bash gets from the command for the words that a person has typed."""

from __future__ import annotations

import contextlib
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hpcrl.cli.main import main

Tab = Callable[[str], list[str]]


@pytest.fixture
def tab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Tab:
    """Words as bash breaks them, the last one being typed; in a directory with a recipe and a profile."""
    (tmp_path / "recipes").mkdir()
    (tmp_path / "clusters").mkdir()
    for name in ("mine.yaml", "recipes/other.yaml", "clusters/site.yaml", "notes.txt"):
        (tmp_path / name).write_text("{}")
    monkeypatch.chdir(tmp_path)

    def call(line: str) -> list[str]:
        words = ["" if word == "''" else word for word in shlex.split(line, posix=False)]
        monkeypatch.setenv("_HPCRL_COMPLETE", "complete_bash")
        monkeypatch.setenv("COMP_WORDS", "\n".join(words))
        monkeypatch.setenv("COMP_CWORD", str(len(words) - 1))
        monkeypatch.setattr(sys, "argv", ["hpcrl"])
        with contextlib.suppress(SystemExit):
            main()
        return capsys.readouterr().out.split()

    return call


def test_recipes_are_packaged_ones_and_files(tab: Tab) -> None:
    offered = tab("hpcrl submit ''")
    assert {"quickstart", "glm5_swe", "mine.yaml", "recipes/other.yaml"} <= set(offered)
    assert not {"notes.txt", "clusters/site.yaml"} & set(offered)
    assert tab("hpcrl submit recipes/o") == ["recipes/other.yaml"]
    assert tab("hpcrl render quickstart_v") == ["quickstart_vllm"]


def test_clusters(tab: Tab) -> None:
    assert {"local", "devcluster", "site", "clusters/site.yaml"} <= set(tab("hpcrl submit quickstart --cluster ''"))
    assert tab("hpcrl ls -c dev") == ["devcluster"]


def test_roles_and_states(tab: Tab) -> None:
    assert tab("hpcrl logs run-1 --role s") == ["store", "supervisor"]
    assert tab("hpcrl ls --state f") == ["failed"]
    assert tab("hpcrl ls --state CA") == ["CANCELLED"]


def test_settings_and_their_values(tab: Tab) -> None:
    assert tab("hpcrl submit quickstart --set trainer.st") == ["trainer.steps="]
    assert "environments.0.name=" in tab("hpcrl submit quickstart --set environments.0.")
    layouts = ["job.layout=single", "job.layout=hetjob", "job.layout=elastic", "job.layout=null"]
    assert set(tab("hpcrl submit quickstart --set job.lay")) & set(layouts)
    # bash breaks words at "=", and replaces what is behind it alone
    assert "elastic" in tab("hpcrl submit quickstart --set job.layout =")
    assert tab("hpcrl submit quickstart --set job.layout = ela") == ["elastic"]
    assert tab("hpcrl submit quickstart --set trainer.tensorboard = x") == []


def test_after_a_setting_with_a_value_the_next_word_is_completed(tab: Tab) -> None:
    assert tab("hpcrl submit quickstart --set job.layout = single --set trainer.st") == ["trainer.steps="]
