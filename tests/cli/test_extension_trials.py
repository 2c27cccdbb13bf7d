"""Extensions are tried before a submit, by the interpreters of the roles that import them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from start_models import write_tiny_model

import hpcrl as hpcrl_package
from hpcrl.cli.main import main

MODULE = """
import numpy as np
import torch
from hpcrl.trainer.token_loss import LossTerms, TokenLoss

print("imports may print")


class Plain(TokenLoss):
    def terms(self, tokens, log_ratio):
        return LossTerms(-tokens.advantages * tokens.logprobs, torch.zeros_like(log_ratio, dtype=torch.bool))


class Broken(Plain):
    def terms(self, tokens, log_ratio):
        return {}["nothing"]


def ranks(rewards, lengths, *, top=1.0):
    return top * (np.argsort(np.argsort(rewards)) - (len(rewards) - 1) / 2)


def short(rewards, lengths):
    return rewards[1:]


def divides(rewards, lengths):
    return (rewards - rewards.mean()) / rewards.std()
"""
Hpcrl = Callable[..., tuple[int, str]]


@pytest.fixture
def hpcrl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Hpcrl:
    """Return a function that runs a command with modules of extensions: exit code and output."""
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules/own_algorithm.py").write_text(MODULE)
    model = tmp_path / "model"
    model.mkdir()
    write_tiny_model(model)
    # the package that is tested, wherever it lies, is the one that roles import
    path = os.pathsep.join((str(tmp_path / "modules"), str(Path(hpcrl_package.__file__).parent.parent)))
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.setenv("HPCRL_RUNS_ROOT", str(tmp_path / "runs"))
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str, loss: str = "Plain", advantage: str = "ranks", more: tuple[str, ...] = ()) -> tuple:
        settings = (
            f"model.path={model}",
            f"algorithm.loss={{kind: custom, loss: 'own_algorithm:{loss}'}}",
            f"algorithm.advantage={{function: 'own_algorithm:{advantage}'}}",
            *more,
        )
        monkeypatch.setattr(
            sys, "argv", ["hpcrl", *arguments, *(part for each in settings for part in ("--set", each))]
        )
        code = 0
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
        out, err = capfd.readouterr()
        return code, out + err

    return call


def test_good_ones_are_good(hpcrl: Hpcrl) -> None:
    code, out = hpcrl("recipe", "check", "quickstart", more=("algorithm.advantage.parameters={top: 2}",))
    assert code == 0, out


def test_all_that_cannot_be_used_is_named_at_once(hpcrl: Hpcrl, tmp_path: Path) -> None:
    code, out = hpcrl("submit", "quickstart", loss="Broken", advantage="short")
    assert code == 2, out
    assert "--set: algorithm.loss: own_algorithm:Broken.terms raised KeyError: 'nothing'" in out
    assert "own_algorithm.py:" in out
    assert "--set: algorithm.advantage: own_algorithm:short returned (7,) for 8 rollouts" in out
    assert "hint: return one finite number for each rollout" in out
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"advantage": "divides"}, "own_algorithm:divides returned [nan"),
        ({"advantage": "rank"}, "'own_algorithm' has no function 'rank'"),
        ({"more": ("algorithm.advantage.parameters={tip: 1}",)}, "got an unexpected keyword argument 'tip'"),
        ({"more": ("algorithm.loss.needs=[whole_sequences]",)}, "set algorithm.loss.needs: []"),
        ({"more": ("algorithm.loss.needs=[reference]",)}, "[loss-has-reference]"),
        ({"more": ("handoff.sync={factory: 'own_algorithm:Sync'}",)}, "handoff.sync: 'own_algorithm' has no callable"),
        ({"more": ("sinks=[{name: a, sink: 'own_algorithm:Sink'}]",)}, "sinks.0: 'own_algorithm' has no callable"),
        ({"more": ("notify=[{name: a, notifier: 'own_algorithm:ranks'}]",)}, "notify.0: own_algorithm:ranks raised"),
        (
            {"more": ("sinks=[{name: a, sink: 'a:B'}, {name: a, sink: 'a:B'}]",)},
            "sinks.1.name: 'a' is used twice, here or in the cluster profile [unique-outlets]",
        ),
    ],
)
def test_what_is_wrong_is_reported(hpcrl: Hpcrl, settings: dict[str, object], said: str) -> None:
    code, out = hpcrl("recipe", "check", "quickstart", **settings)
    assert (code, said in out) == (2, True), out


def test_one_for_nodes_alone_is_left_alone(hpcrl: Hpcrl) -> None:
    more = ("algorithm.advantage.try_before_submit=false", "algorithm.loss.try_before_submit=false")
    assert hpcrl("recipe", "check", "quickstart", loss="Nowhere", advantage="nowhere", more=more)[0] == 0
