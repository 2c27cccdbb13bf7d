"""Rows of conversations: forms they come in, splits, and in which steps they are trained."""

from __future__ import annotations

import csv
import json
from collections import Counter
from pathlib import Path

import pytest
from supervised_lab import TALK, conversations, sft_recipe, write_lines
from trainer_testing import write_model_dir

from hpcrl.config.sft import SftColumns, SftConfig
from hpcrl.errors import ConfigError, UsageError
from hpcrl.trainer.supervised.order import ConversationOrder, run_steps, steps_of_epoch
from hpcrl.trainer.supervised.rows import ConversationReader
from hpcrl.trainer.supervised.trial import check_examples

ASKED = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]


def read(path: Path, **settings):
    reader = ConversationReader(SftConfig(data=str(path), **settings))
    return list(reader.read()), reader


@pytest.mark.parametrize(
    ("row", "columns"),
    [
        ({"messages": ASKED}, {}),
        ({"talk": ASKED}, {"messages": "talk"}),
        ({"prompt": "q", "completion": "a"}, {"prompt": "prompt"}),
        ({"ask": ASKED[:1], "say": ASKED[1:]}, {"prompt": "ask", "completion": "say"}),
        (
            {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
            {"messages": "conversations"},
        ),
    ],
)
def test_conversations_come_in_several_forms(tmp_path, row, columns):
    ((found,), _) = read(write_lines(tmp_path / "x.jsonl", [row]), columns=SftColumns(**columns))
    assert found.messages == ASKED
    assert found.place == "line 1"


def test_files_of_other_kinds(tmp_path):
    tools = [{"type": "function", "function": {"name": "get", "parameters": {}}}]
    with (tmp_path / "x.csv").open("w", newline="") as stream:
        csv.writer(stream).writerows(
            [["messages", "t"], [json.dumps(ASKED), json.dumps(tools)], [json.dumps(TALK), ""]]
        )
    found, _ = read(tmp_path / "x.csv", columns=SftColumns(tools="t"))
    assert [each.messages for each in found] == [ASKED, TALK]
    assert [each.tools for each in found] == [tools, []]
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    # every message has every key there
    rows = [{"messages": [{**message, "reasoning_content": None} for message in ASKED]}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "x.parquet")
    ((found_one,), _) = read(tmp_path / "x.parquet")
    assert found_one.messages == ASKED
    assert found_one.place == "row 1"


def test_a_system_message_is_put_in_front_where_there_is_none(tmp_path):
    found, _ = read(write_lines(tmp_path / "x.jsonl", [{"messages": ASKED}, {"messages": TALK}]), system="be kind")
    assert [each.messages[0]["content"] for each in found] == ["be kind", "be short"]


def test_splits_never_mix(tmp_path):
    rows = conversations(40)
    by_share, _ = read(write_lines(tmp_path / "x.jsonl", rows + rows), held_out_share=0.25)
    sides = Counter(each.held_out for each in by_share)
    assert 4 <= sides[True] <= 40
    told = {json.dumps(each.messages): each.held_out for each in by_share}
    assert all(told[json.dumps(each.messages)] == each.held_out for each in by_share)
    marked = [{**row, "split": ("train", "test", "other")[i % 3]} for i, row in enumerate(rows)]
    found, reader = read(write_lines(tmp_path / "y.jsonl", marked), split_column="split")
    assert (reader.train, reader.held_out, reader.other) == (14, 13, 13)
    assert len(found) == 27
    # the held-out row may come after those of the same conversation
    marked = [{**rows[0], "split": split} for split in ("train", "test", "train")] + [{**rows[1], "split": "train"}]
    found, reader = read(write_lines(tmp_path / "r.jsonl", marked), split_column="split")
    assert [each.held_out for each in found] == [True, False]
    assert reader.notes() == ["2 rows for training have the prompt of a held-out conversation, and are left out"]
    held_out = write_lines(tmp_path / "z.jsonl", rows[:3])
    found, reader = read(tmp_path / "x.jsonl", held_out_data=str(held_out))
    assert [each.held_out for each in found] == [True] * 3 + [False] * 74
    assert reader.notes() == ["6 rows for training have the prompt of a held-out conversation, and are left out"]


def test_replies_to_one_prompt_are_on_one_side(tmp_path):
    rows = [{"prompt": f"q {i}", "completion": f"a {n}"} for i in range(40) for n in range(3)]
    found, _ = read(write_lines(tmp_path / "x.jsonl", rows), columns=SftColumns(prompt="prompt"), held_out_share=0.25)
    sides = {each.messages[0]["content"]: each.held_out for each in found}
    assert 1 <= sum(sides.values()) <= 39
    assert all(each.held_out == sides[each.messages[0]["content"]] for each in found)
    # one file for each side
    held_out = write_lines(tmp_path / "h.jsonl", [{"prompt": "q 1", "completion": "another"}])
    found, reader = read(tmp_path / "x.jsonl", columns=SftColumns(prompt="prompt"), held_out_data=str(held_out))
    assert (len(found), reader.repeated) == (118, 3)
    # where no user speaks first, the reply decides
    said = [{"messages": [TALK[0], {"role": "assistant", "content": f"a {i}"}]} for i in range(40)]
    found, _ = read(write_lines(tmp_path / "s.jsonl", said), held_out_share=0.25)
    assert 1 <= sum(each.held_out for each in found) <= 39


def test_ten_bad_rows_are_named_and_no_more(tmp_path):
    with pytest.raises(ConfigError) as caught:
        read(write_lines(tmp_path / "x.jsonl", [{"text": "x"}] * 30))
    assert len(caught.value.findings) == 11
    assert {finding.key for finding in caught.value.findings} == {"sft.data"}
    assert "the rest was not checked" in str(caught.value)


@pytest.mark.parametrize(("rows", "kept", "size"), [(10, 10, 4), (10, 7, 4), (9, 9, 3), (1, 1, 8), (50, 49, 7)])
def test_every_epoch_trains_each_conversation_once(rows, kept, size):
    config = SftConfig(data="x", conversations_per_step=size, epochs=3)
    order = ConversationOrder(kept, rows, config, seed=1)
    steps = steps_of_epoch(rows, config)
    assert run_steps(1000, rows, config) == 3 * steps
    assert run_steps(2, rows, config) == 2
    epochs = [[order.rows(epoch * steps + step) for step in range(1, steps + 1)] for epoch in range(3)]
    for batches in epochs:
        assert sorted(row for batch in batches for row in batch) == list(range(kept))
        sizes = [len(batch) for batch in batches]
        assert max(sizes) <= size
        assert max(sizes) - min(sizes) <= 1
    assert order.epoch(steps) == 0
    assert order.epoch(steps + 1) == 1
    again = ConversationOrder(kept, rows, config, seed=1)
    assert again.rows(2 * steps + 1) == epochs[2][0]
    if kept > 10:
        assert epochs[0] != epochs[1]
        assert ConversationOrder(kept, rows, config, seed=2).rows(1) != epochs[0][0]
    unshuffled = ConversationOrder(kept, rows, config.model_copy(update={"shuffle": False}), seed=1)
    assert [row for step in range(1, steps + 1) for row in unshuffled.rows(step)] == list(range(kept))


def test_more_steps_than_conversations_are_refused():
    with pytest.raises(UsageError, match="2 of 10 conversations are left for the 3 steps"):
        ConversationOrder(2, 10, SftConfig(data="x", conversations_per_step=4), seed=0)


def test_a_trial_says_what_the_run_will_be(tmp_path):
    model_dir = write_model_dir(tmp_path / "model")
    data = write_lines(
        tmp_path / "x.jsonl",
        [*conversations(9), {"messages": [*ASKED[:1], {"role": "assistant", "content": "a" * 99}]}],
    )
    found = check_examples(sft_recipe(model_dir, data, steps=100, epochs=2))
    assert found["findings"] == []
    assert found["steps"] == 6
    assert found["notes"][0] == "10 conversations for training, 0 held out; 6 steps, 3 an epoch (2 epochs)"
    assert found["notes"][-1] == "conversations longer than sft.max_len (64): 1 are dropped and 0 truncated"
    cut = check_examples(sft_recipe(model_dir, data, steps=100, over_long="truncate"))
    assert cut["notes"][-1] == "conversations longer than sft.max_len (64): 0 are dropped and 1 truncated"
    recipe = sft_recipe(model_dir, data, steps=100, epochs=1)
    optimizer = recipe.trainer.optimizer.model_copy(update={"warmup_steps": 3})
    trainer = recipe.trainer.model_copy(update={"optimizer": optimizer})
    (problem,) = check_examples(recipe.model_copy(update={"trainer": trainer}))["findings"]
    assert problem["what"] == "3 warm-up steps in a run of 3 (sft.epochs)"
    (model_dir / "tokenizer.json").unlink()
    (problem,) = check_examples(sft_recipe(model_dir, data, steps=100))["findings"]
    assert problem["key"] == "model.path"
