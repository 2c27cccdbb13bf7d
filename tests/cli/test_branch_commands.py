"""Rollouts with branches on screens, in exports and judged again: each turn once, behind what it was sampled with."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml
from thinking_lab import BEGINS_THINKING, CUT, write_thinking_tokenizer

from hpcrl.cli.main import main
from hpcrl.config.load import load_recipe
from hpcrl.dock.ledger.entries import Kept
from hpcrl.dock.ledger.log import RolloutLog
from hpcrl.models.tokenizer import ChatTokenizer
from hpcrl.rollouts.core.records import Rollout, encode_rollout, finished_entry
from hpcrl.rollouts.environments import Prompt
from hpcrl.rollouts.rendering import Parsed, Renderer
from hpcrl.rollouts.rescoring.stored import StoredReplies, UnknownRewardError
from hpcrl.rollouts.sampling.branches import Branches
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.views.rollouts import find_rollout, read_ledger

Command = Callable[..., str]
FIRST, SECOND = {"role": "user", "content": "one?"}, {"role": "user", "content": "two?"}
ANSWERS = ("<think>Hm.</think>1<|im_end|>", "<think>So.</think>2<|im_end|>")
BEGAN_S = 1e9


def make_rollout(renderer: Renderer, tokenizer: ChatTokenizer, *, declared: bool = False) -> Rollout:
    """Two questions; the second prompt has no earlier thinking. With ``declared`` the environment let it begin anew."""
    branches, messages = Branches(max_branches=4), []
    for question, answer in zip((FIRST, SECOND), ANSWERS, strict=True):
        messages.append(question)
        prompt = renderer.whole(messages, now=datetime.fromtimestamp(BEGAN_S)).token_ids
        branches.begin(np.array(prompt, np.int32), declared=declared and len(branches) > 0)
        ids = np.array(tokenizer.encode(answer), np.int32)
        turn = branches.turn(sampled=len(ids), wait_s=0.5, reply_s=2.0)
        branches.sampled(turn, ids, np.full(len(ids), -0.25, np.float32), np.full(len(ids), 2, np.int32))
        messages.append(renderer.message_of(Parsed(answer[18], answer[7:10])))
    made = branches.rollout(0, reward=1.0, parts={}, seconds=3.0, ended_s=BEGAN_S + 3.0, context_version=2)
    rollout = asyncio.run(made)
    assert rollout is not None
    return rollout


@pytest.fixture
def renderer(tmp_path: Path) -> Renderer:
    write_thinking_tokenizer(tmp_path / "model")
    return Renderer.of_model(tmp_path / "model", chat_format="qwen3", thinking="cut")


@pytest.fixture
def rollout(renderer: Renderer, tmp_path: Path, request: pytest.FixtureRequest) -> Rollout:
    """A rollout of two branches; the second one is declared where a test asks for that."""
    return make_rollout(renderer, ChatTokenizer(tmp_path / "model"), declared=getattr(request, "param", False))


@pytest.fixture
def run(tmp_path: Path, rollout: Rollout) -> RunDir:
    return write_run(tmp_path, rollout)


def write_run(tmp_path: Path, rollout: Rollout) -> RunDir:
    run = RunDir(tmp_path / "runs" / "mine")
    run.path.mkdir(parents=True)
    run.record_path.write_text("{}")
    settings = (f"model.path={tmp_path / 'model'}", f"model.chat={json.dumps(CUT)}")
    recipe = load_recipe("quickstart", settings).value
    run.recipe_path.write_text(yaml.safe_dump(recipe.model_dump(mode="json")))
    log = RolloutLog(run.rollouts_dir, attempt=1, restored=0, limit_s=5.0)
    numbers: dict[str, Any] = {"group": 0, "member": 0, "environment": "words", "prompt_index": 0}
    log.finish(*encode_rollout(rollout), lambda place: finished_entry(rollout, place, **numbers))
    log.append(Kept(group=0))
    log.close()
    return run


@pytest.fixture
def rollouts(run: RunDir, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    def call(command: str, *arguments: str) -> str:
        argv = ["hpcrl", "rollouts", command, "mine", *arguments, "--runs-root", str(run.path.parent)]
        monkeypatch.setattr(sys, "argv", argv)
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capfd.readouterr()
        assert not ended.value.code, err
        return out

    return call


def test_each_turn_is_shown_after_its_prompt(rollouts: Command, rollout: Rollout) -> None:
    lines = rollouts("show", "0/0").splitlines()
    assert rollout.shared is not None
    shared, said = int(rollout.shared[1]), rollout.turns[1].said
    assert "branches        2" in lines
    assert f"turn 1 (branch 1): said, {rollout.turns[0].said} tokens, after 0.5 s" in lines
    begin = lines.index(f"turn 2 (branch 2, behind {shared} tokens of before): said, {said} tokens, after 0.5 s")
    sampled = next(at for at, line in enumerate(lines) if line.startswith("turn 2: sampled"))
    # of the first answer without its thinking, and the question behind it
    assert any("two?" in line for line in lines[begin:sampled])
    assert not any("Hm." in line for line in lines[begin:])
    assert any("So." in line for line in lines[sampled:])
    assert "mean log-probability -0.250" in lines[sampled]


@pytest.mark.parametrize("rollout", [False, True], indirect=True)
def test_a_declared_branch_is_marked(rollouts: Command, rollout: Rollout) -> None:
    assert rollout.shared is not None
    declared, behind = bool(rollout.turns[1].declared), f"behind {int(rollout.shared[1])} tokens of before"
    shown, row = rollouts("show", "0/0"), json.loads(rollouts("show", "0/0", "--json"))
    assert f"turn 2 (branch 2, {'declared, ' if declared else ''}{behind}): said" in shown
    assert shown.count("declared") == declared
    assert [turn[6] for turn in row["turns"]] == [0, int(declared)]


def test_verify_and_the_list_know_branches(rollouts: Command) -> None:
    assert "nothing was lost" in rollouts("verify")
    (item,) = json.loads(rollouts("ls", "--json"))["rollouts"]
    assert item["branches"] == 2


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_an_export_says_where_sequences_begin(rollouts: Command, rollout: Rollout, tmp_path: Path, form: str) -> None:
    path = tmp_path / f"all.{form}"
    rollouts("export", "-o", str(path))
    (row,) = pq.read_table(path).to_pylist() if form == "parquet" else [json.loads(path.read_text())]
    assert rollout.starts is not None
    assert rollout.shared is not None
    assert (row["starts"], row["shared"]) == (rollout.starts.tolist(), rollout.shared.tolist())
    assert (row["token_ids"], row["branches"]) == (rollout.token_ids.tolist(), 2)
    assert [turn[4:] for turn in row["turns"]] == [[0, 0, 0], [1, row["shared"][1], 0]]
    # what both begin with is in the text once
    assert row["text"].count("one?") == 1
    assert [row["text"].count(text) for text in ("Hm.", "So.", "two?")] == [1, 1, 1]


def test_a_thought_that_a_shared_prompt_has_begun_is_one(tmp_path: Path) -> None:
    """The same prompt twice: nothing of it is said again, and what it ends with begins both thoughts."""
    write_thinking_tokenizer(tmp_path / "model", BEGINS_THINKING)
    renderer, tokenizer = Renderer.of_model(tmp_path / "model", chat_format="qwen3"), ChatTokenizer(tmp_path / "model")
    branches, prompt = Branches(max_branches=4), renderer.opening([FIRST])
    for answer in ("Hm.</think>1<|im_end|>", "So.</think>2<|im_end|>"):
        branches.begin(np.array(prompt, np.int32))
        ids = np.array(tokenizer.encode(answer), np.int32)
        turn = branches.turn(sampled=len(ids), wait_s=0.5, reply_s=2.0)
        branches.sampled(turn, ids, np.zeros(len(ids), np.float32), np.zeros(len(ids), np.int32))
    made = branches.rollout(0, reward=1.0, parts={}, seconds=3.0, ended_s=BEGAN_S + 3.0, context_version=0)
    rollout = asyncio.run(made)
    assert rollout is not None
    assert [(turn.said, turn.shared) for turn in rollout.turns] == [(len(prompt), 0), (0, len(prompt))]
    run = write_run(tmp_path, rollout)
    replies = StoredReplies(run, renderer).read(find_rollout(read_ledger(run), "0/0"), Prompt("train", 0, (FIRST,)))
    assert [(reply.text, reply.thinking) for reply in replies] == [("1", "Hm."), ("2", "So.")]


def test_replies_are_read_for_other_judges(run: RunDir, renderer: Renderer) -> None:
    held = find_rollout(read_ledger(run), "0/0")
    replies = StoredReplies(run, renderer).read(held, Prompt("train", 0, (FIRST,)))
    found = [(reply.text, reply.thinking, reply.finished) for reply in replies]
    assert found == [("1", "Hm.", True), ("2", "So.", True)]
    with pytest.raises(UnknownRewardError, match="gives another prompt now"):
        StoredReplies(run, renderer).read(held, Prompt("train", 0, (SECOND,)))
