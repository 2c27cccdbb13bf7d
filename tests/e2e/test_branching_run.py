"""A whole run whose rollouts branch: a model that thinks, a template that cuts thinking, and replayed experts."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import end_all
from lab import Lab, steps
from thinking_lab import BEGINS_THINKING, write_thinking_tokenizer

from hpcrl.dock.ledger.payload import read_payload
from hpcrl.modeling.hf import published_tensors
from hpcrl.modeling.spec import build_model
from hpcrl.models.arch import Qwen3MoeArch
from hpcrl.rollouts.core.records import decode_rollout
from hpcrl.runs.views.rollouts import read_ledger
from hpcrl.storage.files import write_json
from hpcrl.trainer.publish.publisher import tensor_bytes
from hpcrl.weights.format.shard import write_shard

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = 3
ENVIRONMENT = """\
from hpcrl.rollouts.environments import Outcome, Prompt

QUESTIONS = ("And?", "So?", "Why?")


class Talk:
    name = "talk"

    def prompt(self, split, index):
        return Prompt(split=split, index=index, messages=({"role": "user", "content": f"Talk {split} {index}."},))

    async def rollout(self, prompt, policy):
        messages, said = prompt.messages, 0
        for question in (*QUESTIONS, None):
            reply = await policy.reply(messages)
            said += len(reply.text) % 7
            if not reply.finished or question is None:
                break
            messages = ({"role": "user", "content": question},)
        return Outcome(reward=float(said))

    def demonstration(self, prompt, *, correct, rng):
        raise NotImplementedError
"""


def write_model(path: Path) -> Path:
    """Random weights, near to a model that finds all tokens alike: each turn has a thought, and most have an end."""
    size = write_thinking_tokenizer(path, BEGINS_THINKING)
    arch = Qwen3MoeArch(
        vocab_size=-(-size // 8) * 8,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        moe_intermediate_size=24,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=2048,
        eos_token_id=json.loads((path / "generation_config.json").read_text())["eos_token_id"][0],
    )
    model = build_model(arch, device="cpu")
    model.init_weights(torch.Generator().manual_seed(1), std=0.02)
    tensors = [tensor_bytes(name, tensor, torch.float32) for name, tensor in published_tensors(model, model.adapter)]
    write_shard(path / "model.safetensors", tensors)
    write_json(path / "config.json", arch.to_hf_config())
    return path


@pytest.fixture
def thinking_lab(tmp_path: Path) -> Iterator[Lab]:
    (tmp_path / "talking.py").write_text(ENVIRONMENT)
    lab = Lab(tmp_path, write_model(tmp_path / "model"))
    lab.env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(tmp_path), lab.env.get("PYTHONPATH")]))
    yield lab
    end_all(lab)


def test_a_run_whose_rollouts_branch_trains_each_turn_once(thinking_lab: Lab) -> None:
    run = thinking_lab.submit(
        "branching",
        "model.warmup=null",
        "model.chat={thinking: cut}",
        "environments=[{name: talk, kind: custom, factory: 'talking:Talk'}]",
        f"trainer.steps={STEPS}",
        "trainer.router_replay=true",
        "trainer.micro_batch_tokens=2048",
        "rollouts.rollouts_per_step=16",
        "rollouts.group_size=4",
        "rollouts.max_in_flight=32",
        "rollouts.sampling.max_new_tokens=160",
        "engine.max_model_len=1024",
        "engine.return_routed_experts=true",
        "evaluation.every_steps=0",
        to_end=True,
    )
    found = steps(run)
    assert sorted(found) == list(range(1, STEPS + 1))
    for record in found.values():
        assert 1.0 < record.branches_mean <= record.branches_max <= 4
        assert record.prefix_repeated_tokens > 0
        assert record.sampled_tokens < record.tokens
        # experts are known of all but the last tokens of sequences, also where they were copied with a prefix
        assert record.unknown_routing.keys() == {"last"}
        assert record.replayed_share is not None
        assert record.replayed_share > 0.9
        # positions restart, and attention does not cross: what the engine computed is what the trainer computes
        assert record.mismatch_kl_by_lag.get("0", 0.0) < 1e-6
    assert found[STEPS].rollouts["branched"] > 0
    assert found[STEPS].rollouts["dropped_environment"] == 0
    verdict = json.loads(thinking_lab.hpcrl("rollouts", "verify", "branching", "--json").stdout)
    assert (verdict["problems"], verdict["trained"], verdict["compared"]) == ([], 16 * STEPS, STEPS)
    sequences: Counter[int] = Counter()
    for held in read_ledger(run).rollouts:
        rollout = decode_rollout(read_payload(run.rollouts_dir / "payload", held.entry.payload))
        sequences[len(rollout.lengths)] += 1
        assert held.entry.sequences == len(rollout.lengths)
        # a turn is sampled in one place
        assert rollout.sampled_tokens == sum(turn.sampled for turn in rollout.turns)
        assert np.all(rollout.sampled[np.cumsum([0, *rollout.lengths[:-1]])] == 0)
        assert max(rollout.lengths) <= 1024
    assert len(sequences) > 1
