"""A teacher scores finished rollouts: what it says is in advantages, what it does wrong costs rollouts and no run."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from aiohttp import web
from harness import make_recipe, make_run, running
from stub_engine import StubEngine

from hpcrl.config.distillation import TeacherConfig
from hpcrl.dock.columns import encode_columns
from hpcrl.errors import HpcrlError, RunFailedError
from hpcrl.models.character_tokenizer import write_character_tokenizer
from hpcrl.rollouts.core.records import Rollout, decode_rollout, encode_rollout
from hpcrl.rollouts.distillation import teacher as module
from hpcrl.rollouts.distillation.teacher import Teacher, TeacherError
from hpcrl.rollouts.distillation.vocabulary import Probe
from hpcrl.runs.rollout_failures import FailureCause


class StubTeacher:
    """A server that finds each token as likely as its id says, and can do everything wrong."""

    def __init__(self, tokenizer: Path) -> None:
        self.probe = Probe.of_model(tokenizer)
        self.answers: list[Any] = []
        """What the next requests for scores get in place of an answer: a status, a body or a delay in seconds."""
        self.headers: list[dict[str, str]] = []
        self.asked = 0
        self.prompts: list[list[int]] = []
        self.models: list[dict[str, Any]] = [{"id": "big", "max_model_len": 100_000}]
        self.shift = 0
        self.url = ""

    async def list_models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": self.models})

    async def complete(self, http: web.Request) -> web.Response:
        request = await http.json()
        self.headers.append(dict(http.headers))
        assert request["model"] == "big"
        prompt = request["prompt"]
        if isinstance(prompt, str):
            ids = self.probe._tokenizer.encode(prompt, add_special_tokens=False).ids
            return web.json_response({"choices": [{"prompt_token_ids": [i + self.shift for i in ids]}]})
        self.asked += 1
        self.prompts.append(prompt)
        answer = self.answers.pop(0) if self.answers else None
        match answer:
            case int():
                return web.Response(status=answer, text="not now")
            case float():
                await asyncio.sleep(answer)
            case str():
                return web.Response(text=answer, content_type="application/json")
        scores = [None, *({str(token): {"logprob": likely(token)}} for token in prompt[1:])]
        return web.json_response({"choices": [{"prompt_logprobs": scores}]})


def likely(token: int) -> float:
    return -0.01 * (token + 1)


@contextlib.asynccontextmanager
async def teaching(directory: Path) -> AsyncIterator[StubTeacher]:
    write_character_tokenizer(directory)
    stub = StubTeacher(directory)
    app = web.Application()
    app.add_routes([web.get("/v1/models", stub.list_models), web.post("/v1/completions", stub.complete)])
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    stub.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield stub
    finally:
        await runner.cleanup()


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_FIRST_PAUSE_S", 0.01)


def distilled(stub: StubTeacher, *, reward_weight: float = 1.0, **teacher: Any) -> dict[str, Any]:
    own = {"teacher": {"url": stub.url, **teacher}, "coefficient": 0.5, "reward_weight": reward_weight}
    return {"algorithm": {"distillation": own}}


def rollout(count: int = 4) -> Rollout:
    sampled = np.array([0, *[1] * (count - 1)], np.uint8)
    return Rollout(
        member=0,
        token_ids=np.arange(10, 10 + count, dtype=np.int32),
        sampled=sampled,
        logprobs=np.where(sampled != 0, np.float32(-0.5), np.float32(0)),
        versions=np.zeros(count, np.int32),
        reward=1.0,
        parts={},
        seconds=1.0,
    )


@pytest.mark.parametrize("reward_weight", [1.0, 0.0])
async def test_advantages_have_what_the_teacher_finds_likelier(tmp_path: Path, reward_weight: float) -> None:
    async with teaching(tmp_path / "model") as stub:
        run = make_run(tmp_path, **distilled(stub, reward_weight=reward_weight))
        async with running(run, StubEngine()) as loop:
            shard = await loop.batch(1)
            rollouts = {
                (group.index, each.member): each.reward for group in loop.last_groups() for each in group.rollouts
            }
            groups = {group.index: [each.reward for each in group.rollouts] for group in loop.last_groups()}
            counters = loop.parts.counters
            assert counters.teacher_requests >= len(rollouts)
            assert counters.teacher_retries == 0
        total, tokens = 0.0, 0
        for batch in shard.micro_batches:
            for i, name in enumerate(batch.rollouts):
                part = slice(batch.cu_seqlens[i], batch.cu_seqlens[i + 1])
                mask = batch.loss_mask[part] != 0
                rewards = np.array(groups[name[0]])
                own = (rollouts[name] - rewards.mean()) / (rewards.std() + 1e-6) if rewards.std() else 0.0
                teacher = np.array([likely(int(token)) for token in batch.token_ids[part]])
                apart = teacher - batch.logprobs[part]
                wanted = np.where(mask, reward_weight * own + 0.5 * apart, 0.0)
                np.testing.assert_allclose(batch.advantages[part], wanted, rtol=1e-4, atol=1e-5)
                total, tokens = total - apart[mask].sum(), tokens + mask.sum()
        assert shard.stats.teacher_kl == pytest.approx(total / tokens, rel=1e-4)
        # the token of the run is for its own servers
        assert not any(key.lower() in ("authorization", "x-hpcrl-token") for each in stub.headers for key in each)


async def test_each_sequence_of_a_rollout_is_scored_by_itself(tmp_path: Path) -> None:
    """The teacher sees what the policy saw, and says nothing of what was sampled before a branch."""
    own = msgspec.structs.replace(
        rollout(9),
        sampled=np.array([0, 1, 1, 0, 0, 0, 1, 1, 1], np.uint8),
        starts=np.array([0, 4], np.int32),
        shared=np.array([0, 2], np.int32),
    )
    async with teaching(tmp_path / "model") as stub:
        teacher = Teacher(TeacherConfig(url=stub.url, model="big"))
        scored = await teacher.scored(own)
        await teacher.aclose()
    assert stub.prompts == [[10, 11, 12, 13], [14, 15, 16, 17, 18]]
    wanted = [likely(token) if flag else 0.0 for token, flag in zip(own.token_ids.tolist(), own.sampled, strict=True)]
    assert scored.teacher_logprobs is not None
    np.testing.assert_allclose(scored.teacher_logprobs, wanted, rtol=1e-5)


def test_scores_are_kept_with_the_rollout() -> None:
    own = rollout()
    scored = msgspec.structs.replace(own, teacher_logprobs=np.array([0, -1, -2, -3], np.float32))
    about, arrays = encode_rollout(scored)
    assert arrays["teacher_logprobs"].tolist() == [0, -1, -2, -3]
    assert scored.teacher_divergence == pytest.approx(-1.5 + 6)
    assert own.teacher_divergence is None
    back = decode_rollout(b"".join(bytes(part) for part in encode_columns(about, arrays)))
    assert back.teacher_logprobs is not None
    assert back.teacher_logprobs.tolist() == [0, -1, -2, -3]


DAMAGED = {
    "too few": '{"choices": [{"prompt_logprobs": [null, {"11": {"logprob": -1}}]}]}',
    "not finite": '{"choices": [{"prompt_logprobs": [null, {"11": {"logprob": -1e999}}, {"12": {"logprob": -1}}, '
    '{"13": {"logprob": -1}}]}]}',
    "above one": '{"choices": [{"prompt_logprobs": [null, {"11": {"logprob": 2.0}}, {"12": {"logprob": -1}}, '
    '{"13": {"logprob": -1}}]}]}',
    "other tokens": '{"choices": [{"prompt_logprobs": [null, {"7": {"logprob": -1}}, {"12": {"logprob": -1}}, '
    '{"13": {"logprob": -1}}]}]}',
    "no scores": '{"choices": [{"text": "x"}]}',
    "no choice": '{"choices": []}',
    "no answer": "<html>",
}


@pytest.mark.parametrize("name", DAMAGED)
async def test_an_answer_that_cannot_be_used_is_asked_for_again_and_then_refused(tmp_path: Path, name: str) -> None:
    async with teaching(tmp_path) as stub:
        teacher = Teacher(TeacherConfig(url=stub.url, model="big"))
        stub.answers = [DAMAGED[name]]
        found = await teacher.scored(rollout())
        assert found.teacher_logprobs is not None
        assert found.teacher_logprobs.tolist() == pytest.approx([0.0, likely(11), likely(12), likely(13)])
        stub.answers = [DAMAGED[name]] * 3
        with pytest.raises(TeacherError, match="3 answers of the teacher could not be used"):
            await teacher.scored(rollout())
        await teacher.aclose()


async def test_a_teacher_that_is_away_is_waited_for_until_the_deadline(tmp_path: Path) -> None:
    async with teaching(tmp_path) as stub:
        stub.answers = [503, 500, 429]
        teacher = Teacher(TeacherConfig(url=stub.url, model="big", deadline_s=20.0))
        assert (await teacher.scored(rollout())).teacher_logprobs is not None
        assert stub.asked == 4
        stub.answers = [400]
        with pytest.raises(TeacherError, match="answered 400: not now"):
            await teacher.scored(rollout())
        await teacher.aclose()
        # of one that answers no more, and of one that is not there
        for url in (stub.url, "http://127.0.0.1:9"):
            stub.answers = [30.0]
            gone = Teacher(TeacherConfig(url=url, model="big", deadline_s=0.2))
            with pytest.raises(TeacherError, match=r"no log-probabilities within 0.2 s .*deadline_s"):
                await gone.scored(rollout())
            await gone.aclose()


async def test_a_rollout_without_scores_is_dropped_and_counted(tmp_path: Path) -> None:
    async with teaching(tmp_path / "model") as stub:
        stub.answers = [400] * 2
        async with running(make_run(tmp_path, **distilled(stub)), StubEngine()) as loop:
            await loop.batch(1)
            (found,) = loop.orchestrator._failures.report()
            assert found.failed == {FailureCause.TEACHER.value: 2}
            assert "answered 400" in found.first[FailureCause.TEACHER.value].what
            assert loop.parts.counters.dropped_environment == 2


async def test_a_teacher_with_another_tokenizer_or_a_short_context_is_refused(tmp_path: Path) -> None:
    async with teaching(tmp_path / "model") as stub:
        probe = stub.probe

        async def check(**changes: Any) -> None:
            teacher = Teacher(TeacherConfig(url=stub.url, **changes))
            try:
                await teacher.check(probe, max_model_len=512, timeout_s=10.0)
            finally:
                await teacher.aclose()

        await check()
        with pytest.raises(RunFailedError, match=r"does not serve 'small'; it serves 'big'"):
            await check(model="small")
        stub.models[0]["max_model_len"] = 512
        with pytest.raises(RunFailedError, match="has a context of 512 tokens, and it needs one of 513"):
            await check()
        stub.models[0]["max_model_len"], stub.shift = 513, 1
        with pytest.raises(RunFailedError, match=r"has another tokenizer: for the text .* the policy has (\d+)"):
            await check()


async def test_the_run_ends_where_the_teacher_does_not_fit(tmp_path: Path) -> None:
    async with teaching(tmp_path / "model") as stub:
        stub.shift = 1
        with pytest.raises(HpcrlError, match="another tokenizer"):
            async with running(make_run(tmp_path, **distilled(stub)), StubEngine()) as loop:
                await loop.batch(1)


def test_a_probe_covers_the_vocabulary(tmp_path: Path) -> None:
    write_character_tokenizer(tmp_path)
    probe = Probe.of_model(tmp_path)
    texts = list(probe.texts(50))
    assert all(len(ids) <= 50 for _, ids in texts)
    vocabulary = probe._tokenizer.get_vocab()
    seen = {token_id for _, ids in texts for token_id in ids}
    unseen = {token for token, token_id in vocabulary.items() if token_id not in seen}
    assert unseen <= {"<|unk|>"}


@pytest.mark.parametrize("url", ["node:8000", "ftp://node", "http://", "http://a b"])
def test_urls_are_checked(url: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="url"):
        make_recipe(tmp_path, algorithm={"distillation": {"teacher": {"url": url}}})
