"""The trainer of a supervised run, without a supervisor: losses, order, restarts, versions, bad data."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from supervised_lab import begin_attempt, conversations, sft_recipe, write_lines
from trainer_testing import run_ranks, write_model_dir, write_recipe

from hpcrl.checkpoints.ledger import CheckpointLedger
from hpcrl.config.lora import LoraConfig
from hpcrl.errors import CheckpointError, ConfigError, UsageError
from hpcrl.models.tokenizer import ChatTokenizer
from hpcrl.runs.events import read_events
from hpcrl.runs.metrics import read_metrics
from hpcrl.runs.role import RoleContext
from hpcrl.runs.rundir import RunDir
from hpcrl.trainer.supervised.batches import DataPosition, rendered_directory
from hpcrl.trainer.supervised.loop import train_supervised
from hpcrl.trainer.supervised.masks import ConversationRenderer
from hpcrl.weights.store import HandoffStore


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return write_model_dir(tmp_path_factory.mktemp("sft") / "model")


@pytest.fixture
def data(tmp_path):
    return write_lines(tmp_path / "talks.jsonl", conversations(10))


def run_to(run: RunDir, recipe, steps: int):
    trainer = recipe.trainer.model_copy(update={"steps": steps})
    write_recipe(run, recipe.model_copy(update={"trainer": trainer}))
    train_supervised(begin_attempt(run))
    return read_metrics(run)


def weights(run: RunDir, version: int):
    path = HandoffStore(run.weights_dir).open(version).path
    return {name: tensor for file in path.glob("*.safetensors") for name, tensor in load_file(file).items()}


def test_the_first_loss_is_that_of_transformers(tmp_path, model_dir, data):
    transformers = pytest.importorskip("transformers")
    run = RunDir(tmp_path / "run")
    # all ten in one step
    (record,) = run_to(run, sft_recipe(model_dir, data, steps=1, conversations_per_step=10), 1)
    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    renderer = ConversationRenderer(ChatTokenizer(model_dir))
    total, count = 0.0, 0
    for row in conversations(10):
        (sequence,) = renderer.render(row["messages"])
        labels = [token if flag else -100 for token, flag in zip(sequence.ids, sequence.said, strict=True)]
        with torch.no_grad():
            found = model(input_ids=torch.tensor([sequence.ids]), labels=torch.tensor([labels]))
        total += float(found.loss) * sum(sequence.said)
        count += sum(sequence.said)
    assert record.sampled_tokens == count
    assert record.loss == pytest.approx(total / count, rel=1e-5)
    assert record.mismatch_kl == 0.0
    # the last version is a model directory
    version = HandoffStore(run.weights_dir).open(1)
    trained = transformers.AutoModelForCausalLM.from_pretrained(version.path, dtype=torch.float32)
    (sequence,) = renderer.render(conversations(1)[0]["messages"])
    with torch.no_grad():
        ids = torch.tensor([sequence.ids])
        assert float(trained(input_ids=ids, labels=ids).loss) < float(model(input_ids=ids, labels=ids).loss)


def test_a_resumed_run_is_the_same_bit_by_bit(tmp_path, model_dir, data):
    recipe = sft_recipe(model_dir, data, steps=7)
    whole, parts = RunDir(tmp_path / "whole"), RunDir(tmp_path / "parts")
    wanted = run_to(whole, recipe, 7)
    run_to(parts, recipe, 4)
    # what the data file says now does not matter any more
    write_lines(data, conversations(3))
    found = run_to(parts, recipe, 7)
    assert [r.loss for r in found] == [r.loss for r in wanted]
    assert [r.rollouts_digest for r in found] == [r.rollouts_digest for r in wanted]
    left, right = weights(whole, 7), weights(parts, 7)
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)
    assert HandoffStore(whole.weights_dir).versions() == [7]
    position = DataPosition.decode(CheckpointLedger(parts.checkpoints_dir).open(4).orchestrator_state())
    assert (position.step, position.epoch) == (4, 1)


def test_other_data_under_a_checkpoint_is_refused(tmp_path, model_dir, data):
    recipe = sft_recipe(model_dir, data, steps=4)
    run = RunDir(tmp_path / "run")
    run_to(run, recipe, 2)
    for file in rendered_directory(run.path).iterdir():
        file.unlink()
    rendered_directory(run.path).rmdir()
    write_lines(data, conversations(9))
    with pytest.raises(CheckpointError, match=r"other batches.*digest"):
        run_to(run, recipe, 4)


def rank_train(rank, run_path, attempt):
    run = RunDir(run_path)
    train_supervised(RoleContext(run, attempt=attempt, role="trainer", replica=0, rank=rank))


def test_two_ranks_train_on_the_batches_of_one(tmp_path, model_dir, data):
    one, two = RunDir(tmp_path / "one"), RunDir(tmp_path / "two")
    options = {"held_out_share": 0.3, "evaluate_every_steps": 2}
    wanted = run_to(one, sft_recipe(model_dir, data, steps=3, **options), 3)
    write_recipe(two, sft_recipe(model_dir, data, steps=3, ranks=2, **options))
    run_ranks(2, rank_train, two.path, begin_attempt(two).attempt)
    found = read_metrics(two)
    assert [r.loss for r in found] == pytest.approx([r.loss for r in wanted], rel=1e-4)
    assert [r.sampled_tokens for r in found] == [r.sampled_tokens for r in wanted]
    assert found[0].held_out_loss is None
    assert [r.held_out_loss for r in found[1:]] == pytest.approx([r.held_out_loss for r in wanted[1:]], rel=1e-4)


def test_adapters_learn_conversations(tmp_path, model_dir, data):
    recipe = sft_recipe(model_dir, data, steps=12)
    trainer = recipe.trainer.model_copy(update={"lora": LoraConfig(rank=4, alpha=8)})
    recipe = recipe.model_copy(update={"trainer": trainer})
    run = RunDir(tmp_path / "run")
    run_to(run, recipe, 6)
    found = run_to(run, recipe, 12)
    assert found[-1].loss < found[0].loss
    assert HandoffStore(run.weights_dir).open(12).manifest.kind == "lora"


def test_epochs_end_the_run(tmp_path, model_dir, data):
    run = RunDir(tmp_path / "run")
    found = run_to(run, sft_recipe(model_dir, data, steps=100, epochs=2), 100)
    # ten conversations, four a step: three steps an epoch
    assert [r.step for r in found] == [1, 2, 3, 4, 5, 6]
    tokens = [r.sampled_tokens for r in found]
    assert sum(tokens[:3]) == sum(tokens[3:])
    assert HandoffStore(run.weights_dir).versions() == [6]
    # a restart of a run that has done all of it does nothing
    train_supervised(begin_attempt(run))
    assert len(read_metrics(run)) == 6


def test_thirty_conversations_are_learned(tmp_path, model_dir):
    # all have one answer, which those that are held out have, too
    rows = [[row["messages"][0], {"role": "assistant", "content": "yes"}] for row in conversations(30)]
    data = write_lines(tmp_path / "talks.jsonl", [{"messages": messages} for messages in rows])
    run = RunDir(tmp_path / "run")
    found = run_to(run, sft_recipe(model_dir, data, steps=60, held_out_share=0.2, evaluate_every_steps=20), 60)
    assert found[0].loss > 3.0
    assert np.mean([r.loss for r in found[-3:]]) < 0.7
    events = [event for event in read_events(run) if event.kind == "trainer.held_out_loss"]
    assert [event.data["step"] for event in events] == [0, 20, 40, 60]
    assert events[-1].data["loss"] < events[0].data["loss"]
    assert all(math.isfinite(event.data["loss"]) for event in events)


def refused(tmp_path, model_dir, text, **sft) -> str:
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    run = RunDir(tmp_path / "run")
    with pytest.raises(ConfigError) as caught:
        run_to(run, sft_recipe(model_dir, path, steps=2, **sft), 2)
    assert not rendered_directory(run.path).exists()
    assert not [path for path in run.path.iterdir() if "sft" in path.name]
    return str(caught.value)


GOOD = '{"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}\n'


@pytest.mark.parametrize(
    ("text", "sft", "words"),
    [
        (GOOD + "{nonsense\n", {}, "bad.jsonl, line 2: no JSON"),
        (GOOD + '{"text": "x"}\n', {}, "line 2: it has no column 'messages'; it has text"),
        (GOOD + '{"messages": [{"role": "user", "content": "x"}]}\n', {}, "line 2: no message has the role assistant"),
        (GOOD + '{"messages": []}\n', {}, "line 2: messages is empty"),
        (GOOD + '{"messages": [{"role": "robot", "content": "x"}]}\n', {}, "line 2: message 0: its role is 'robot'"),
        (GOOD.replace('"y"', '""'), {}, "line 1: a message of the assistant is empty"),
        (GOOD.replace('"y"', '"y", "weight": 0.5'), {}, "line 1: the weight of a message is 0.5"),
        (GOOD.replace('"y"', '"y", "weight": 0'), {}, "line 1: all messages of the assistant have the weight 0"),
        ("", {}, "has no conversation to train on"),
        (GOOD, {"max_len": 4}, "none of 1 conversations has at most 4 tokens; the longest has"),
        (GOOD, {"held_out_share": 0.000001}, "no conversation of .* is held out"),
        (GOOD, {"columns": {"prompt": "question"}}, "set sft.columns.prompt"),
    ],
)
def test_bad_data_is_named(tmp_path, model_dir, text, sft, words):
    found = refused(tmp_path, model_dir, text, **sft)
    assert re.search(words, found), found


def test_too_few_for_an_epoch(tmp_path, model_dir, data):
    recipe = sft_recipe(model_dir, data, steps=2, conversations_per_step=1, max_len=13)
    with pytest.raises(UsageError, match="conversations are left for the 10 steps"):
        run_to(RunDir(tmp_path / "run"), recipe, 2)
