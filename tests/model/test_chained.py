"""Linear layers whose inputs are computed again have the same gradients, bit for bit, and store
less.

Only a GPU computes inputs again, so these tests replace `fuses` of the module.
"""

import copy
import dataclasses
import weakref
from collections import Counter

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from burnish.model import activations, chained, lora, transformer
from burnish.model.activations import RMSNorm, swiglu
from burnish.model.critic import Critic
from burnish.model.transformer import Transformer, _Linear
from burnish.recipe.recipe import TrainConfig
from burnish.rollout.packing import pack
from tests.learner.conftest import (
    CONFIG,
    make_groups,
    make_learn_batch,
    make_learner,
    make_policy,
    masters,
)

LEARNS = {
    "all": ({"name": "all"}, 4, 2),
    "the last layer": ({"name": "layers", "last": 1}, 2, 1),
    # The first norm has no gradient, so it does not save its input.
    "an adapter": ({"name": "lora", "rank": 3}, 3, 2),
    "some modules": ({"name": "lora", "rank": 3, "modules": ["k_proj", "up_proj"]}, 3, 0),
}
"""What is trained, and how many outputs of norms and of SwiGLU two layers compute again."""


def set_gpu(monkeypatch, is_gpu=True):
    monkeypatch.setattr(chained, "fuses", lambda x: is_gpu)


@pytest.fixture
def calls(monkeypatch):
    """Counts how often norms and SwiGLU are computed."""
    found = Counter()

    def counted(name, function):
        def call(*given):
            found[name] += 1
            return function(*given)

        return call

    monkeypatch.setattr(RMSNorm, "forward", counted("norm", RMSNorm.forward))
    monkeypatch.setattr(transformer, "swiglu", counted("swiglu", swiglu))
    return found


def make_model(family, learn, *, recompute):
    """A float32 model, all of whose parameters are random: no bias and no B is 0."""
    model = Transformer(dataclasses.replace(CONFIG, family=family)).init_weights(3)
    lora.learn(model, TrainConfig(learn=learn, recompute=recompute), seed=7)
    random = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=random) / 8)
    return model


def gradients(model):
    """Gradients of a loss of log-probabilities, and of values that share the model."""
    critic, batch = Critic(model, shared=True), pack(make_groups())
    with torch.no_grad():
        critic.weight.fill_(0.3)
    measured, hidden = model.read(batch)
    loss = measured.logprobs.square().sum() + critic.values(hidden, batch).square().sum()
    loss.backward()
    named = [*model.named_parameters(), *critic.named_parameters()]
    return {name: p.grad for name, p in named if p.grad is not None}


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("learn", LEARNS)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_gradients_are_bitwise_the_same(family, learn, recompute, calls, monkeypatch):
    found, counts = [], []
    chosen, *more = LEARNS[learn]
    for is_gpu in (False, True):
        set_gpu(monkeypatch, is_gpu)
        calls.clear()
        found.append(gradients(make_model(family, chosen, recompute=recompute)))
        counts.append(calls.copy())
    stored, again = found
    assert stored.keys() == again.keys()
    for name, gradient in stored.items():
        assert torch.equal(again[name], gradient), name
        assert gradient.any(), name
    # A layer that is recomputed as a whole computes nothing a third time.
    norms, swiglus = (0, 0) if recompute else more
    assert counts[1] - counts[0] == +Counter(norm=norms, swiglu=swiglus)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("shared", [True, False])
def test_steps_with_a_critic_are_bitwise_the_same(shared, precision, monkeypatch):
    found = []
    for is_gpu in (False, True):
        set_gpu(monkeypatch, is_gpu)
        critic = {"shared": shared, "learning_rate": 1e-2}
        learner = make_learner(make_policy(torch.float32), critic=critic, precision=precision)
        learn = make_learn_batch(learner, pack(make_groups()))
        metrics = [learner.step(learn) for _ in range(2)]
        found.append((metrics, masters(learner), learner.state().tensors))
    (stored, *weights), (again, *others) = found
    assert stored == again
    for ours, theirs in zip(weights, others, strict=True):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def make_pair(name, *, adapter, bias):
    """A norm or SwiGLU, a linear layer after it, and their input."""
    torch.manual_seed(0)
    width, inner = (24, 24) if name == "norm" else (48, 24)
    first = RMSNorm(width, 1e-5) if name == "norm" else swiglu
    second = _Linear(inner, 16, bias=bias)
    with torch.no_grad():
        for parameter in second.parameters():
            parameter.normal_()
    if adapter:
        second.requires_grad_(False)
        a = {part: torch.randn(3, inner) for part in ("low", "high")}
        second.lora = lora.Lora({"low": 8, "high": 8}, 2.0, a)
    return first, second, torch.randn(5, width, requires_grad=True)


def watched(first, storages):
    """``first``, whose outputs' storages are added as weak references."""

    def call(x):
        out = first(x)
        storages.append(weakref.ref(out.untyped_storage()))
        return out

    return call


@pytest.mark.parametrize("adapter", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", ["norm", "swiglu"])
def test_the_input_is_freed_and_computed_once_more(name, bias, adapter, monkeypatch):
    first, second, x = make_pair(name, adapter=adapter, bias=bias)
    # As with tensor parallelism, the layer gets a view.
    second.register_forward_pre_hook(lambda module, given: (given[0].view_as(given[0]),))
    for is_gpu in (False, True):
        set_gpu(monkeypatch, is_gpu)
        storages = []
        out = chained.chained(watched(first, storages), second, x)
        assert [ref() is None for ref in storages] == [is_gpu]
        out.sum().backward(retain_graph=True)
        assert [ref() is None for ref in storages] == [is_gpu] * (1 + is_gpu)
        out.sum().backward()  # this releases the graph
        assert [ref() is None for ref in storages] == [True] * (1 + 2 * is_gpu)


@pytest.mark.parametrize("name", ["norm", "swiglu"])
def test_an_input_that_was_modified_is_an_error(name, monkeypatch):
    set_gpu(monkeypatch)
    first, second, x = make_pair(name, adapter=False, bias=False)
    out = chained.chained(first, second, x)
    x.detach().add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_without_a_gradient_nothing_is_hooked(monkeypatch):
    set_gpu(monkeypatch)
    first, second, x = make_pair("norm", adapter=True, bias=False)
    first.requires_grad_(False)
    storages = []
    out = chained.chained(watched(first, storages), second, x.detach())
    out.sum().backward()
    with torch.no_grad():
        chained.chained(watched(first, storages), second, x)
    assert len(storages) == 2


def test_hooks_of_the_caller_see_the_other_tensors(monkeypatch):
    """With hooks that copy all tensors saved elsewhere, the gradients are the same."""
    model = make_model("qwen3", {"name": "all"}, recompute=False)
    set_gpu(monkeypatch, is_gpu=False)
    expected = gradients(copy.deepcopy(model))
    set_gpu(monkeypatch)
    seen = []
    with saved_tensors_hooks(lambda t: seen.append(1) or t.clone(), lambda t: t):
        found = gradients(model)
    assert seen
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_cpu_stores_inputs():
    assert not chained.fuses(torch.ones(1))
    assert chained.fuses is activations.fuses
