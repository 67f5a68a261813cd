"""The optimizer is AdamW, its schedules are functions of the step, its scale is dynamic."""

import math

import pytest
import torch
from torch import nn

from burnish.learner import optim
from burnish.learner.optim import Optimizer, rate
from burnish.model.sorter import Sorter
from burnish.schema.recipe import TrainConfig


def rates(steps, **settings):
    train = TrainConfig(learning_rate=2.0, **settings)
    return [pytest.approx(rate(train, step)) for step in steps]


def test_schedules():
    assert rates([0, 5, 10**6]) == [2, 2, 2]
    assert rates([0, 1, 3, 4, 9], warmup_steps=4) == [0.5, 1, 2, 2, 2]
    linear = {"schedule": "linear", "decay_steps": 10}
    assert rates([0, 5, 10, 11], **linear) == [2, 1, 0, 0]
    assert rates([1, 2, 6, 10], **linear, warmup_steps=2) == [2, 2, 1, 0]
    assert rates([3, 9, 10], **linear, warmup_steps=10) == [0.8, 2, 2]  # it never falls


@pytest.mark.parametrize("clip_norm", [math.inf, 1e9, 0.01])
def test_steps_equal_torchs_adamw(clip_norm):
    ours, theirs = Sorter(5, 3, 4, seed=0), Sorter(5, 3, 4, seed=0)
    for model in (ours, theirs):
        model.bias = nn.Parameter(torch.ones(3))
    train = TrainConfig(learning_rate=1e-2, warmup_steps=2, clip_norm=clip_norm)
    optimizer = Optimizer(ours, train)
    plain = torch.optim.AdamW(
        theirs.parameters(), betas=(0.9, 0.95), weight_decay=0.0, foreach=False
    )
    for step in range(4):
        for model in (ours, theirs):
            model(torch.tensor([[1, 2, 3]])).pow(2).sum().add(model.bias.sum()).backward()
        norm = nn.utils.clip_grad_norm_(theirs.parameters(), clip_norm)
        assert optimizer.gradient_norm() == pytest.approx(norm.item(), rel=1e-6)
        for group in plain.param_groups:
            group["lr"] = 1e-2 * min(1, (step + 1) / 2)
        plain.step()
        plain.zero_grad()
        optimizer.step(step, optimizer.gradient_norm())
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        # clip_grad_norm_ adds 1e-6 to the norm.
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_low_precision_gradients_add_up_in_fp32():
    optimizer = Optimizer(Sorter(5, 3, 4, seed=0), TrainConfig(precision="bf16"))
    low, master = optimizer.policy.embedding, optimizer.masters.embedding
    assert (low.dtype, master.dtype) == (torch.bfloat16, torch.float32)
    optimizer.backward((256 * low).sum())
    assert low.grad is None
    for _ in range(3):
        optimizer.backward(low.sum())
    assert (master.grad == 259).all()  # in bfloat16, 256 + 1 is 256


def take(optimizer):
    """A step without a gradient."""
    for parameter in optimizer.masters.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step(0, 0.0)


def test_the_scale_halves_at_once_and_doubles_after_a_while(monkeypatch):
    monkeypatch.setattr(optim, "GROWTH_INTERVAL", 3)
    optimizer = Optimizer(Sorter(5, 3, 4, seed=0), TrainConfig(precision="fp16"))
    assert optimizer.scale == 2**16
    assert optimizer.shrink_scale()
    for _ in range(2):
        take(optimizer)
    assert optimizer.scale == 2**15
    take(optimizer)
    assert (optimizer.scale, optimizer.good_steps) == (2**16, 0)
    take(optimizer)
    optimizer.shrink_scale()
    assert optimizer.good_steps == 0
    while optimizer.shrink_scale():
        pass
    assert optimizer.scale == 1
    for precision in ("fp32", "bf16"):
        fixed = Optimizer(Sorter(5, 3, 4, seed=0), TrainConfig(precision=precision))
        assert not fixed.shrink_scale()
        take(fixed)
        assert (fixed.scale, fixed.good_steps) == (1, 0)
