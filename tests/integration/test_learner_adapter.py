"""The learner of an adapter: only the adapter learns, is copied, is saved, and changes weights."""

import copy

import pytest
import torch

from burnish.engine.native.engine import NativeEngine
from burnish.engine.settings import EngineSettings
from burnish.errors import EngineError
from burnish.model import lora
from burnish.recipe.recipe import TrainConfig
from burnish.rollout.packing import take_streams, train_batches
from tests.learner.conftest import make_learn_batch, make_learner, make_policy

KEPT = {"kl": {"name": "k3", "coefficient": 0.3}, "entropy_coefficient": 0.1}
LEARN = {"name": "lora", "rank": 3, "alpha": 6}


def adapted(dtype=torch.float32, *, moved=0.0, **chosen):
    policy = make_policy(dtype)
    lora.learn(policy, TrainConfig(learn=LEARN | chosen), seed=5)
    random = torch.Generator().manual_seed(2)
    for _, b in lora.adapter_of(policy).pairs.values():
        b.copy_(moved * torch.randn(b.shape, generator=random, dtype=torch.float64))
    return policy


@pytest.mark.parametrize("chosen", [{}, {"last": 1, "modules": ["q_proj", "up_proj"]}], ids=str)
@pytest.mark.parametrize("split", [{"micro_tokens": 20}, {"batch": 5}], ids=str)
def test_any_split_is_the_whole_batch(split, chosen, batch):
    whole, parts = (
        make_learner(adapted(torch.float64, moved=0.2, **chosen), KEPT, **some)
        for some in ({}, split)
    )
    learn = make_learn_batch(whole, batch)
    make_learn_batch(parts, batch)
    assert (whole._rollout.lower is not None) == bool(chosen)
    whole._accumulate(learn)
    for part in train_batches(batch, parts.train.batch):
        parts._accumulate(take_streams(learn, part))
    ours, theirs = (
        {name: p.grad for name, p in learner.policy.named_parameters() if p.requires_grad}
        for learner in (parts, whole)
    )
    for name, gradient in theirs.items():
        torch.testing.assert_close(ours[name], gradient, rtol=0, atol=1e-12)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_only_the_adapter_has_masters_copies_and_a_place_in_checkpoints(precision, batch):
    settings = {"precision": precision, "log_kl": True}
    learner = make_learner(adapted(), KEPT, **settings)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    low = dict(learner.policy.named_parameters())
    for name, master in learner.optimizer.masters.named_parameters():
        is_adapter = ".lora." in name
        assert master.dtype == (torch.float32 if is_adapter else dtype)
        assert is_adapter or master.data_ptr() == low[name].data_ptr()
    assert learner.reference is learner.initial
    base = [p for name, p in low.items() if ".lora." not in name]
    assert all(a is b for a, b in zip(learner.reference.parameters(), base, strict=True))
    for name, p in learner.previous.named_parameters():
        assert (p is low[name]) != (".lora." in name)
    before = {name: p.clone() for name, p in low.items()}
    for _ in range(2):
        learner.step(make_learn_batch(learner, batch))
    changed = {name for name, p in low.items() if not torch.equal(p, before[name])}
    assert changed == {name for name in low if ".lora." in name}
    state = learner.state()
    assert all(".lora." in name for name in state.tensors)
    fresh = make_learner(adapted(), KEPT, **settings)
    fresh.load_state(state)
    first, second = (one.step(make_learn_batch(one, batch)) for one in (learner, fresh))
    assert first == second


def test_an_adapter_that_was_given_is_not_the_reference(batch):
    """The reference is the model without it; the initial policy has it."""
    learner = make_learner(adapted(moved=0.3), KEPT, log_kl=True)
    scores = learner.score(batch)
    initial = learner._rollout.others["initial"][1]
    assert torch.equal(initial, learner.output(batch).logprobs)
    plain = make_learner(make_policy(torch.float32)).output(batch).logprobs
    assert torch.equal(scores.reference, plain)
    assert (initial - plain).abs().max() > 0.01


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_reference_that_is_an_average_averages_the_factors(precision, batch):
    """A and B each, from the base model: B from 0, also if the policy has an adapter. A state that
    is loaded goes on bit for bit."""
    objective = {"kl": {"name": "k3", "coefficient": 0.3, "ema": 0.75}}
    settings = {"precision": precision, "log_kl": True}
    learner = make_learner(adapted(moved=0.3), objective, **settings)
    plain = make_learner(make_policy(torch.float32), precision=precision).output(batch).logprobs
    assert torch.equal(learner.score(batch).reference, plain)
    masters = dict(learner.optimizer.masters.named_parameters())
    learned = [name for name in masters if ".lora." in name]
    want = {n: masters[n].detach().double() * (".lora.a." in n) for n in learned}
    for _ in range(3):
        learner.step(make_learn_batch(learner, batch))
        want = {n: 0.75 * want[n] + 0.25 * masters[n].detach().double() for n in learned}
    state = learner.state()
    for name in learned:
        own = state.tensors[f"policy.reference.{name}"]
        torch.testing.assert_close(own.double(), want[name], rtol=0, atol=1e-6)
    assert (learner.score(batch).reference - plain)[batch.is_action].abs().max() > 1e-3
    own = dict(learner.policy.named_parameters())
    for name, weight in learner.reference.named_parameters():
        assert (weight is own[name]) == (name not in learned)
    fresh = make_learner(adapted(moved=0.3), objective, **settings)
    fresh.load_state(state)
    first, second = (one.step(make_learn_batch(one, batch)) for one in (learner, fresh))
    assert first == second
    for name, weight in learner.reference.named_parameters():
        assert torch.equal(weight, dict(fresh.reference.named_parameters())[name])


@pytest.mark.parametrize(("precision", "limit"), [("fp32", 1e-5), ("bf16", 0.2)])
def test_the_engine_gets_merged_weights_and_only_those(precision, limit, batch):
    policy = adapted()
    base = make_policy(torch.float32).to({"fp32": torch.float32, "bf16": torch.bfloat16}[precision])
    engine = NativeEngine(copy.deepcopy(base), None, EngineSettings(kv_bytes=1 << 20))
    learner = make_learner(policy, precision=precision)
    engine.load(learner.weights())  # B = 0: nothing changes
    for name, view in engine._model.exchange().items():
        assert torch.equal(view, base.exchange()[name])
    for _ in range(3):
        learner.step(make_learn_batch(learner, batch))
    weights = learner.weights()
    assert weights.is_partial
    assert set(weights.tensors) == {f"{name}.weight" for name in lora.adapter_of(policy).pairs}
    engine.load(weights)
    gap = torch.tensor(engine.probe()) - torch.tensor(learner.policy.probe())
    assert gap.abs().max() < limit
    moved = torch.tensor(base.probe()) - torch.tensor(learner.policy.probe())
    assert moved.abs().max() > 2 * limit


def test_a_part_of_the_weights_is_refused_where_it_would_make_a_mixture():
    whole, some = (make_learner(policy).weights() for policy in (make_policy(), adapted()))
    engine = NativeEngine(make_policy(torch.float32), None, EngineSettings(kv_bytes=1 << 20))
    name, *others = some.tensors
    before = engine.probe()
    unknown = {**some.tensors, "model.other.weight": some.tensors[name]}
    with pytest.raises(EngineError, match=r"not expected model.other.weight.*version 0 stays"):
        engine.load(some._replace(version=1, tensors=unknown))
    with pytest.raises(EngineError, match=r"missing .*version 0 stays"):
        engine.load(some._replace(version=1, is_partial=False))
    assert engine.probe() == before
    engine.load(some._replace(version=1))
    fewer = {name: some.tensors[name] for name in others}
    with pytest.raises(EngineError, match=rf"missing {name}.*version 1 stays"):
        engine.load(some._replace(version=2, tensors=fewer))
    engine.load(whole._replace(version=3))
    with pytest.raises(EngineError, match=r"missing .*version 3 stays"):
        engine.load(some._replace(version=4))
