"""Schedules, AdamW and clipping against formulas."""

import math

import pytest
import torch
from torch import nn

from hpcrl.config.recipe import OptimizerConfig
from hpcrl.trainer.step.optim import clip_gradients, learning_rate, make_optimizer, set_learning_rate


def rates(total, **settings):
    config = OptimizerConfig(learning_rate=2.0, **settings)
    return [learning_rate(config, step, total) for step in range(1, total + 1)]


def test_schedules():
    assert rates(4) == [2.0] * 4
    assert rates(4, warmup_steps=2) == [1.0, 2.0, 2.0, 2.0]
    assert rates(4, schedule="linear") == pytest.approx([2.0, 1.5, 1.0, 0.5])
    assert rates(6, schedule="linear", warmup_steps=2) == pytest.approx([1.0, 2.0, 1.6, 1.2, 0.8, 0.4])
    assert rates(3, schedule="cosine") == pytest.approx([1 + math.cos(math.pi * i / 3) for i in range(3)])
    assert rates(2, warmup_steps=5) == pytest.approx([0.4, 0.8])


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_every_step_learns(schedule):
    for warmup in (0, 1, 9, 10, 30):
        assert all(0 < rate <= 2.0 for rate in rates(10, schedule=schedule, warmup_steps=warmup))


@pytest.mark.parametrize("step", [0, 5])
def test_steps_outside_are_refused(step):
    with pytest.raises(ValueError, match="between 1 and 4"):
        learning_rate(OptimizerConfig(), step, 4)


def test_adamw_by_hand():
    config = OptimizerConfig(learning_rate=0.1, weight_decay=0.3, beta1=0.8, beta2=0.95)
    matrix, vector = nn.Parameter(torch.tensor([[2.0]])), nn.Parameter(torch.tensor([2.0]))
    optimizer = make_optimizer([matrix, vector], config)
    expected = {"matrix": 2.0, "vector": 2.0}
    m = v = 0.0
    for step, (gradient, rate) in enumerate([(0.5, 0.1), (-2.0, 0.05), (0.1, 0.2)], 1):
        for parameter in (matrix, vector):
            parameter.grad = torch.full_like(parameter, gradient)
        set_learning_rate(optimizer, rate)
        optimizer.step()
        m, v = 0.8 * m + 0.2 * gradient, 0.95 * v + 0.05 * gradient**2
        update = m / (1 - 0.8**step) / (math.sqrt(v / (1 - 0.95**step)) + 1e-8)
        # norm weights are not decayed
        expected["matrix"] -= rate * (0.3 * expected["matrix"] + update)
        expected["vector"] -= rate * update
        assert matrix.item() == pytest.approx(expected["matrix"], rel=1e-5)
        assert vector.item() == pytest.approx(expected["vector"], rel=1e-5)


def parameters_with(*gradients):
    parameters = [nn.Parameter(torch.zeros(len(g))) for g in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = torch.tensor(gradient)
    return parameters


def test_clipping():
    parameters = parameters_with([3.0, 0.0], [4.0])
    assert clip_gradients(parameters, 10.0, None) == 5.0
    assert parameters[0].grad.tolist() == [3.0, 0.0]
    assert clip_gradients(parameters, 0.5, None) == 5.0
    assert torch.cat([p.grad for p in parameters]).tolist() == pytest.approx([0.3, 0.0, 0.4])


def test_large_gradients_do_not_overflow():
    assert clip_gradients(parameters_with([3e30, 4e30]), 1.0, None) == pytest.approx(5e30)


def test_small_gradients_are_not_lost():
    assert clip_gradients(parameters_with([3e-30, 4e-30]), 1.0, None) == pytest.approx(5e-30)


def test_the_norm_does_not_depend_on_how_gradients_are_cut():
    values = torch.randn(300_001, generator=torch.Generator().manual_seed(0))
    exact = values.double().square().sum().sqrt().item()
    for sizes in ([300_001], [1, 300_000], [1000, 1023, 1024, 1025, 295_929]):
        parts = [part.tolist() for part in values.split(sizes)]
        assert clip_gradients(parameters_with(*parts), 1e9, None) == pytest.approx(exact, rel=1e-7)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_bad_gradients_are_reported_and_left(bad):
    parameters = parameters_with([1.0, bad])
    assert not math.isfinite(clip_gradients(parameters, 1.0, None))
    assert parameters[0].grad[0].item() == 1.0
