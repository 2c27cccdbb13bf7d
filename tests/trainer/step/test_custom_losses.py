"""A loss of the user's own: what is refused when it is made, its measurements, its trial."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from trainer_testing import Rollouts, make_recipe, run_ranks, write_model_dir

from hpcrl.config.algorithm import AlgorithmConfig, CustomLossConfig
from hpcrl.errors import ConfigError
from hpcrl.extend import ExtensionError
from hpcrl.models.arch import load_arch
from hpcrl.trainer.extension_trial import check_loss
from hpcrl.trainer.parallel.mesh import distributed
from hpcrl.trainer.step.losses import TrainedTokens, make_loss, policy_loss
from hpcrl.trainer.step.metrics import TokenSums
from hpcrl.trainer.step.policy import TrainerPolicy

LOSSES = """
import torch
from pydantic import BaseModel, ConfigDict, PositiveFloat
from hpcrl.trainer.token_loss import LossTerms, TokenLoss


class Settings(BaseModel):
    model_config = ConfigDict(extra="forbid")
    scale: PositiveFloat = 1.0


class Plain(TokenLoss):
    Parameters = Settings
    metrics = ("gain", "late")

    def terms(self, tokens, log_ratio):
        gain = self.parameters.scale * tokens.advantages * tokens.logprobs
        nothing = torch.zeros_like(log_ratio, dtype=torch.bool)
        late = torch.where(tokens.sequences > 0, 2.0, float("nan"))
        return LossTerms(-gain, nothing, {"gain": gain.detach(), "late": late})


class Centred(TokenLoss):
    \"\"\"Each term depends on the mean of all tokens.\"\"\"

    def terms(self, tokens, log_ratio):
        loss = (log_ratio - log_ratio.mean()) ** 2 if len(log_ratio) else log_ratio
        return LossTerms(loss, torch.zeros_like(log_ratio, dtype=torch.bool))


class WholeCentred(Centred):
    needs = frozenset({"whole_sequences"})


class Taught(TokenLoss):
    needs = frozenset({"teacher"})
    metrics = ("scored", "teacher")

    def terms(self, tokens, log_ratio):
        scored = tokens.teacher_logprobs.isfinite()
        apart = torch.where(scored, tokens.teacher_logprobs, 0.0) - tokens.logprobs.detach()
        loss = -torch.where(scored, apart, 0.0) * tokens.logprobs
        return LossTerms(loss, ~scored, {"scored": scored.float(), "teacher": tokens.teacher_logprobs})


class Summed(Plain):
    def terms(self, tokens, log_ratio):
        terms = super().terms(tokens, log_ratio)
        return terms._replace(loss=terms.loss.sum())


class Silent(Plain):
    def terms(self, tokens, log_ratio):
        return super().terms(tokens, log_ratio)._replace(metrics={})


class Detached(Plain):
    def terms(self, tokens, log_ratio):
        terms = super().terms(tokens, log_ratio)
        return terms._replace(loss=terms.loss.detach())


class Raising(Plain):
    def terms(self, tokens, log_ratio):
        raise ZeroDivisionError("no tokens")


class Named(Plain):
    metrics = ("Gain!",)


class Infinite(Plain):
    def terms(self, tokens, log_ratio):
        terms = super().terms(tokens, log_ratio)
        return terms._replace(loss=terms.loss / 0)


def number():
    return 1
"""


class OneRank:
    """The collectives of a trainer of one rank."""

    def max(self, value: int) -> int:
        return value

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        return values


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., CustomLossConfig]:
    """Settings of a loss of a module that can be imported."""
    (tmp_path / "my_own_losses.py").write_text(LOSSES)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_own_losses", raising=False)

    def made(name: str, **settings: Any) -> CustomLossConfig:
        path = name if ":" in name else f"my_own_losses:{name}"
        return CustomLossConfig(kind="custom", loss=path, **settings)

    return made


@pytest.mark.parametrize(
    ("name", "settings", "said", "hint"),
    [
        ("no_such_module:Loss", {}, "module 'no_such_module' cannot be imported", "PYTHONPATH"),
        ("Plan", {}, "'my_own_losses' has no class 'Plan'", "it has Settings, Plain"),
        ("number", {}, "my_own_losses:number is not a loss", "TokenLoss"),
        ("Plain", {"parameters": {"scale": -1}}, "Input should be greater than 0", "algorithm.loss.parameters"),
        ("Plain", {"parameters": {"scal": 1}}, "scal\n  Extra inputs are not permitted", "algorithm.loss.parameters"),
        ("Plain", {"needs": ("whole_sequences",)}, "declares needs []", r"algorithm.loss.needs: \[\]"),
        ("WholeCentred", {}, "declares needs [whole_sequences]", r"algorithm.loss.needs: \[whole_sequences\]"),
        ("Named", {}, "has a metric that is called 'Gain!'", "lower-case"),
        ("token_mean", {}, "no installed package registers loss.token_mean", "package.module:Name"),
    ],
)
def test_what_cannot_be_made_is_refused(config, name: str, settings: dict[str, Any], said: str, hint: str) -> None:
    named = CustomLossConfig(kind="custom", loss=name) if name == "token_mean" else config(name, **settings)
    with pytest.raises(ExtensionError) as caught:
        make_loss(named)
    assert said in caught.value.what
    assert re.search(hint, caught.value.hint)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Summed", "my_own_losses:Summed.terms returned loss () for 12 tokens"),
        ("Silent", "returned the metrics []"),
        ("Detached", "has no gradient"),
        ("Raising", r"(?s)raised ZeroDivisionError: no tokens\n.*my_own_losses.py:\d+ in terms"),
        ("Infinite", "has no finite loss and gradient"),
        ("Centred", "gives a token another gradient where other tokens are left out"),
    ],
)
def test_a_trial_computes_it(config, name: str, said: str) -> None:
    with pytest.raises(ExtensionError, match=said if "\\" in said else re.escape(said)):
        check_loss(config(name))


def test_a_trial_of_a_good_one_says_nothing(config) -> None:
    check_loss(config("Plain"))
    check_loss(config("Taught", needs=("teacher",)))
    check_loss(config("WholeCentred", needs=("whole_sequences",)))


def test_its_measurements_are_means_over_tokens_that_have_them(config) -> None:
    loss = make_loss(config("Plain", parameters={"scale": 3.0}))
    logprobs = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    tokens = TrainedTokens(logprobs, logprobs.detach(), torch.tensor([1.0, 1.0, 2.0]), torch.tensor([0, 1, 1]), 2)
    found = policy_loss(tokens, loss, total_tokens=3)
    assert found.loss.item() == pytest.approx(3.0 * (1 + 2 + 6) / 3)
    sums = TokenSums(1, loss_metrics=loss.metrics)
    version = torch.ones(3, dtype=torch.int64)
    sums.add(found, torch.zeros(3), version, version)
    metrics = sums.reduce(OneRank())  # type: ignore[arg-type]
    assert metrics.loss_metrics == {"gain": pytest.approx(-9.0), "late": pytest.approx(2.0)}


def steps_of(rank: int, model_dir: Path, modules: Path) -> list[tuple[float, dict[str, float], list[float]]]:
    """Loss, measurements and gradients of one step, with all logits at once and with some tokens at a time."""
    sys.path.insert(0, str(modules))
    loss = CustomLossConfig(kind="custom", loss="my_own_losses:Plain", parameters={"scale": 2.0})
    found = []
    with distributed(timeout_s=120) as parallel:
        for chunk in (None, 5):
            recipe = make_recipe(model_dir, steps=9, memory={"lm_head_chunk_tokens": chunk})
            recipe = recipe.model_copy(update={"algorithm": AlgorithmConfig(loss=loss)})
            policy = TrainerPolicy(recipe, load_arch(model_dir), parallel, model_dir=model_dir)
            shard = Rollouts(1).shard(parallel.data.rank, parallel.data.size)
            metrics = policy.forward_backward(shard).reduce(parallel.world)
            gradients = [parameter.grad.full_tensor().norm().item() for parameter in policy.model.parameters()]
            found.append((metrics.loss, metrics.loss_metrics, gradients))
    return found


def test_a_step_trains_with_it(config, tmp_path: Path) -> None:
    """On two ranks its loss is the mean that its own measurement says, logits in pieces or not."""
    ranks = run_ranks(2, steps_of, write_model_dir(tmp_path / "model"), tmp_path)
    assert ranks[0] == ranks[1]
    for loss, measured, gradients in ranks[0]:
        assert set(measured) == {"gain", "late"}
        assert measured["late"] == 2.0
        assert loss == pytest.approx(-measured["gain"], rel=1e-5)
        assert loss != 0
        assert gradients == pytest.approx(ranks[0][0][2], rel=1e-4)


def taught_steps(rank: int, model_dir: Path, modules: Path, cp: int) -> tuple[dict[str, float], list[float]]:
    """Measurements of a step of which some rollouts have a teacher's scores, and these scores."""
    sys.path.insert(0, str(modules))
    loss = CustomLossConfig(kind="custom", loss="my_own_losses:Taught", needs=("teacher",))
    recipe = make_recipe(model_dir, steps=9, memory={"lm_head_chunk_tokens": 3}, parallelism={"cp": cp})
    recipe = recipe.model_copy(update={"algorithm": AlgorithmConfig(loss=loss)})
    with distributed(timeout_s=120, parallelism=recipe.trainer.parallelism) as parallel:
        policy = TrainerPolicy(recipe, load_arch(model_dir), parallel, model_dir=model_dir)
        shard = Rollouts(1, count=6).shard(parallel.data.rank, parallel.data.size)
        scores, micro_batches = list[float](), []
        for micro_batch in shard.micro_batches:
            teacher = np.full(len(micro_batch.token_ids), np.nan, np.float32)
            starts = micro_batch.cu_seqlens.tolist()
            for begin, end in zip(starts[:-1:2], starts[1::2], strict=False):  # every other rollout
                teacher[begin:end] = -0.5 - 0.01 * np.arange(end - begin)
            scores += teacher[micro_batch.loss_mask != 0].tolist()
            micro_batches.append(msgspec.structs.replace(micro_batch, teacher_logprobs=teacher))
        shard = msgspec.structs.replace(shard, micro_batches=micro_batches)
        return policy.forward_backward(shard).reduce(parallel.world).loss_metrics, scores


@pytest.mark.parametrize("cp", [1, 2])
def test_scores_of_a_teacher_reach_the_loss_that_needs_them(config, tmp_path: Path, cp: int) -> None:
    found = run_ranks(2, taught_steps, write_model_dir(tmp_path / "model"), tmp_path, cp)
    # ranks that share a context have the same rollouts
    scores = np.array([score for _, own in found[: 2 // cp] for score in own])
    known = scores[np.isfinite(scores)]
    assert 0 < len(known) < len(scores)
    for measured, _ in found:
        assert measured["scored"] == pytest.approx(len(known) / len(scores))
        assert measured["teacher"] == pytest.approx(known.mean(), rel=1e-5)


def test_settings_of_other_losses_are_refused_unless_they_say_nothing() -> None:
    """Recipes of earlier versions have the settings of all losses, at their defaults."""
    before = {"kind": "gspo", "mask_low": 0.2, "kl_tau": 1e-3, "ratio_high": 5.0, "clip_low": 0.1, "clip_high": 0.28}
    loss = AlgorithmConfig.model_validate({"loss": before}).loss
    assert loss.model_dump() == {"kind": "gspo", "clip_low": 0.1, "clip_high": 0.28}
    assert AlgorithmConfig.model_validate({"loss": {"kl_tau": 0.5}}).loss.kind == "masked_ratio"
    with pytest.raises(ValueError, match="has no effect on the loss 'gspo'"):
        AlgorithmConfig.model_validate({"loss": {**before, "kl_tau": 0.5}})


def test_the_line_of_a_setting_without_effect_is_named() -> None:
    from hpcrl.config.load import load_recipe

    with pytest.raises(ConfigError) as caught:
        load_recipe("quickstart", ["algorithm.loss.kind=tis", "algorithm.loss.kl_tau=0.5", "algorithm.loss.clip_low=1"])
    assert [(each.key, each.what) for each in caught.value.findings] == [
        ("algorithm.loss.kl_tau", "has no effect on the loss 'tis'"),
        ("algorithm.loss.clip_low", "has no effect on the loss 'tis'"),
    ]
