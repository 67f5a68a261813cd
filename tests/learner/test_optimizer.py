"""The optimizer is AdamW, its schedules are functions of the step, its scale is dynamic."""

import copy
import dataclasses
import math

import numpy as np
import pytest
import torch
from torch import nn

from burnish.learner import offload
from burnish.learner import optimizer as optim
from burnish.learner.optimizer import Optimizer, rate
from burnish.model import lora
from burnish.model.critic import Critic
from burnish.model.reward import RewardModel
from burnish.model.sorter import Sorter
from burnish.model.transformer import Transformer
from burnish.recipe.recipe import FP32_UNCHANGED, TrainConfig
from tests.learner.conftest import CONFIG, make_policy


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
    # Half of the fall from 2 to 0.2 · 2 is 1.2; half a cosine has fallen by 1/4 after a third.
    assert rates([0, 5, 10, 99], **linear, final_share=0.2) == [2, 1.2, 0.4, 0.4]
    cosine = {"schedule": "cosine", "decay_steps": 12}
    assert rates([0, 4, 6, 8, 12, 99], **cosine) == [2, 1.5, 1, 0.5, 0, 0]
    low = cosine | {"final_share": 0.2}
    assert rates([0, 4, 6, 8, 12, 99], **low) == [2, 1.6, 1.2, 0.8, 0.4, 0.4]
    assert rates([0, 2, 3, 6, 9, 12], **low, warmup_steps=3) == [2 / 3, 2, 2, 1.6, 0.8, 0.4]


def test_a_linear_schedule_to_0_is_bitwise_as_before():
    train = TrainConfig(learning_rate=3e-4, schedule="linear", decay_steps=97, warmup_steps=5)
    for step in range(120):
        falling = 1 - min(1.0, (step - 5) / 92)
        assert rate(train, step) == (3e-4 * (step + 1) / 5 if step < 5 else 3e-4 * falling)


def is_norm_or_bias(model, parameter):
    """By the modules' types, not by names."""
    own = [m.weight for m in model.modules() if isinstance(m, nn.RMSNorm)]
    own += [m.bias for m in model.modules() if getattr(m, "bias", None) is not None]
    return any(parameter is other for other in own)


def random_gradients(optimizer, random):
    for parameter in optimizer.masters.parameters():
        if parameter.requires_grad:
            gradient = torch.from_numpy(random.normal(size=tuple(parameter.shape)))
            parameter.grad = gradient.to(parameter.device, parameter.dtype)


def adapted():
    policy = make_policy(torch.float32)
    lora.learn(policy, TrainConfig(learn={"name": "lora", "rank": 2}), seed=5)
    return policy


def qwen3_and_qwen2():
    """Norms of queries and keys, biases, and a head of its own."""
    for family in ("qwen3", "qwen2"):
        config = dataclasses.replace(CONFIG, family=family, tied=False)
        yield Transformer(config).init_weights(3)


QWEN3, QWEN2 = qwen3_and_qwen2()
MODELS = {
    "llama": lambda: make_policy(torch.float32),
    "two layers": lambda: make_policy(torch.float32, layers=1),
    "qwen3": lambda: QWEN3,
    "qwen2": lambda: QWEN2,
    "lora": adapted,
    "critic": lambda: Critic(make_policy(torch.float32), shared=False),
    "value head": lambda: Critic(make_policy(torch.float32), shared=True),
    "reward model": lambda: RewardModel(make_policy(torch.float32), pad=None),
    "sorter": lambda: Sorter(5, 3, 4, seed=0),
}


@pytest.mark.parametrize("name", MODELS)
def test_steps_equal_adamw_in_float64(name):
    """With decay of everything but norms and biases, ε, clipping, warm-up and a cosine."""
    model = MODELS[name]()
    settings = {"weight_decay": 0.5, "eps": 1e-3, "learning_rate": 1e-2, "clip_norm": 0.7}
    schedule = {"schedule": "cosine", "warmup_steps": 2, "decay_steps": 6, "final_share": 0.3}
    optimizer = Optimizer(model, TrainConfig(**settings, **schedule))
    random = np.random.default_rng(0)
    learning = [p for p in model.parameters() if p.requires_grad]
    decays = [0.0 if is_norm_or_bias(model, p) else 0.5 for p in learning]
    frozen = {id(p): p.detach().clone() for p in model.parameters() if not p.requires_grad}
    first = [p.detach().double().numpy().copy() for p in learning]
    weights = [w.copy() for w in first]
    m, v = ([np.zeros_like(w) for w in weights] for _ in range(2))
    for step in range(8):
        random_gradients(optimizer, random)
        gradients = [p.grad.double().numpy().copy() for p in learning]
        norm = math.sqrt(sum((g**2).sum() for g in gradients))
        done = min(1.0, max(0, step - 2) / 4)
        height = 0.3 + 0.7 * (1 + math.cos(math.pi * done)) / 2
        lr = 1e-2 * ((step + 1) / 2 if step < 2 else height)
        for i, (gradient, decay) in enumerate(zip(gradients, decays, strict=True)):
            g = gradient * min(1, 0.7 / norm)
            m[i], v[i] = 0.9 * m[i] + 0.1 * g, 0.95 * v[i] + 0.05 * g**2
            mean, square = m[i] / (1 - 0.9 ** (step + 1)), v[i] / (1 - 0.95 ** (step + 1))
            weights[i] -= lr * decay * weights[i] + lr * mean / (np.sqrt(square) + 1e-3)
        assert optimizer.gradient_norm() == pytest.approx(norm, rel=1e-5)
        assert optimizer.step(step, optimizer.gradient_norm()) == pytest.approx(lr)
    for own, wanted in zip(learning, weights, strict=True):
        np.testing.assert_allclose(own.detach().numpy(), wanted, rtol=1e-5, atol=2e-6)
    assert all(torch.equal(p, frozen[id(p)]) for p in model.parameters() if not p.requires_grad)
    assert any(decays)
    moved = max(float(np.abs(w - b).max()) for w, b in zip(weights, first, strict=True))
    assert moved > 0.02


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["qwen2", "lora", "sorter"])
def test_without_decay_steps_are_bitwise_those_of_one_group(name, precision):
    """As before there was weight decay: one group, torch's ε, a decay of 0."""
    found = []
    for is_ours in (True, False):
        torch.manual_seed(0)
        model = adapted() if name == "lora" else MODELS[name]()
        model = model if name != "qwen2" else Transformer(QWEN2.config).init_weights(3)
        optimizer = Optimizer(model, TrainConfig(precision=precision))
        random = np.random.default_rng(0)
        if not is_ours:
            optimizer.adamw = torch.optim.AdamW(
                optimizer._learning, 1e-3, (0.9, 0.95), weight_decay=0.0, fused=True
            )
        for step in range(5):
            random_gradients(optimizer, random)
            optimizer.step(step, optimizer.gradient_norm())
        named = optimizer.masters.named_parameters()
        found.append({n: p.detach() for n, p in named if p.requires_grad})
    ours, theirs = found
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["qwen2", "lora", "critic"])
@pytest.mark.parametrize("size", [offload.SLICE, 256])
def test_steps_with_moments_in_main_memory_are_bitwise_the_same(
    name, precision, device, size, monkeypatch
):
    """With groups of both decays, parameters without gradients, a state that is loaded, and
    parameters of several slices."""
    monkeypatch.setattr(offload, "SLICE", size)
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    settings = {"weight_decay": 0.1, "learning_rate": 1e-2, "precision": precision}
    found = []
    for is_offloaded in (False, True):
        settings["offload"] = is_offloaded
        model = (adapted() if name == "lora" else copy.deepcopy(MODELS[name]())).to(device)
        optimizer = Optimizer(model, TrainConfig(**settings))
        random = np.random.default_rng(0)
        for step in range(5):
            random_gradients(optimizer, random)
            if step == 2:
                optimizer._learning[0].grad = None
            optimizer.step(step, optimizer.gradient_norm())
            tensors, numbers = optimizer.state()
            if step == 3:
                other = Optimizer(copy.deepcopy(model), TrainConfig(**settings))
                for key, value in other.state()[0].items():
                    value.copy_(tensors[key])
                other.load_numbers(numbers)
                optimizer = other
        tensors, _ = optimizer.state()
        places = {t.device.type for key, t in tensors.items() if key.startswith("exp_avg")}
        assert places == {"cpu" if is_offloaded else device}
        low = {f"low.{n}": p for n, p in optimizer.policy.named_parameters()}
        found.append({key: t.detach().cpu() for key, t in (tensors | low).items()})
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(found[0][key], found[1][key]) for key in found[0])


def test_slices_divide_a_tensor_evenly(monkeypatch):
    monkeypatch.setattr(offload, "SLICE", 256)
    found = [[(s.start, s.stop) for s in offload.slices(n)] for n in (0, 1, 256, 257, 600)]
    assert found[:3] == [[], [(0, 1)], [(0, 256)]]
    assert found[3:] == [[(0, 192), (192, 257)], [(0, 256), (256, 512), (512, 600)]]


def test_weight_decay_without_a_gradient_moves_nothing():
    """As in a warm-up of the critic, in which the policy gets no gradients."""
    model = make_policy(torch.float32)
    before = [p.detach().clone() for p in model.parameters()]
    Optimizer(model, TrainConfig(weight_decay=1.0)).step(0, 0.0)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_the_least_weight_decay_shrinks_and_less_is_refused():
    """The factor 1 − rate · decay of the accepted decays is below 1 in fp32."""
    for rate_ in (1e-2, 3e-5, 7e-7):
        with pytest.raises(ValueError, match="no effect at a learning_rate") as refused:
            TrainConfig(learning_rate=rate_, weight_decay=FP32_UNCHANGED / rate_)
        named = float(str(refused.value).partition("use weight_decay = ")[2].partition(" or")[0])
        model = Sorter(5, 3, 4, seed=0)
        before = model.encode.detach().clone()
        optimizer = Optimizer(model, TrainConfig(learning_rate=rate_, weight_decay=named))
        take(optimizer)
        assert (model.encode.abs() < before.abs()).float().mean() > 0.99


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
