"""The embedded engine as the teacher of a distillation: its scores are those of its model."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_helpers import Server, forward

from hpcrl.config.distillation import TeacherConfig
from hpcrl.errors import RunFailedError
from hpcrl.rollouts.core.records import Rollout
from hpcrl.rollouts.distillation.teacher import Teacher
from hpcrl.rollouts.distillation.vocabulary import Probe


async def test_a_teacher_scores_what_was_sampled(contract_server: Server) -> None:
    ids = np.array([5, 9, 40, 41, 60, 7], np.int32)
    sampled = np.array([0, 0, 1, 1, 0, 1], np.uint8)
    zeros = np.zeros(6, np.float32)
    rollout = Rollout(
        member=0,
        token_ids=ids,
        sampled=sampled,
        logprobs=zeros,
        versions=zeros.astype(np.int32),
        reward=0.0,
        parts={},
        seconds=0.0,
    )
    teacher = Teacher(TeacherConfig(url=contract_server.url))
    await teacher.check(Probe.of_model(contract_server.model_dir), max_model_len=256, timeout_s=30.0)
    found = (await teacher.scored(rollout)).teacher_logprobs
    await teacher.aclose()
    rows, _ = forward(contract_server.model, ids.tolist())
    all_tokens = [0.0, *rows[:-1].gather(1, torch.from_numpy(ids[1:].astype(np.int64))[:, None])[:, 0].tolist()]
    wanted = np.where(sampled != 0, all_tokens, 0.0)
    assert found is not None
    np.testing.assert_allclose(found, wanted, atol=1e-3)


async def test_another_tokenizer_is_refused(contract_server: Server, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((contract_server.model_dir / name).read_bytes())
    path = tmp_path / "tokenizer.json"
    value = json.loads(path.read_text())
    vocabulary = value["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    path.write_text(json.dumps(value))
    teacher = Teacher(TeacherConfig(url=contract_server.url))
    with pytest.raises(RunFailedError, match=r"another tokenizer: for the text '[ab]'"):
        await teacher.check(Probe.of_model(tmp_path), max_model_len=256, timeout_s=30.0)
    await teacher.aclose()
