"""PPO with a critic: targets, gradients, splits, warm-up, and state."""

import dataclasses

import pytest
import torch

from burnish.errors import BurnishError, ConfigError
from burnish.learner.program import compile, critic_metrics
from burnish.learner.protocol import LearnerState
from burnish.recipe.critic import CriticConfig
from burnish.recipe.objective.objective import ObjectiveConfig
from burnish.rollout.packing import Pack, pack
from burnish.types import Measured, Scores
from tests.learner.conftest import make_groups, make_learn_batch, make_learner, make_policy

BODIES = [{"shared": True, "coefficient": 0.3}, {"shared": False}]


def stir(learner):
    """Moves the value head away from 0, so that gradients reach the body."""
    with torch.no_grad():
        random = torch.Generator().manual_seed(7)
        learner.critic.weight.normal_(generator=random)
        learner.critic.bias.fill_(0.1)


def grads(module):
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


def test_targets_and_advantages_of_a_program(two_groups):
    """Rewards 1, 0 and 2, 3, 7 come with the last of 2, 1 and 3, 1, 2 tokens. Each V is 0.5."""
    batch = pack(two_groups)
    program = compile(ObjectiveConfig(advantage={"name": "gae"}), CriticConfig())
    scores = Scores(values=torch.where(batch.is_action, 0.5, 0.0))
    advantages = program.advantages(batch, scores)
    (learn,) = program.batches(batch, advantages, scores, [Pack.whole(batch)])
    # With γ = λ = 1 a token's return is its response's reward, and A = R − V.
    returns = [1, 1, 0, 2, 2, 2, 3, 7, 7]
    assert learn.returns[batch.is_action].tolist() == returns
    assert learn.advantages[batch.is_action].tolist() == [r - 0.5 for r in returns]
    assert torch.equal(learn.old_values, scores.values)
    assert program.passes(1) == ["values"]
    # Mean of R − V over actions: 25/9 − 0.5; whitening moves it to 0, and the targets stay.
    white = compile(ObjectiveConfig(advantage={"name": "gae", "whiten": True}), CriticConfig())
    found = white.advantages(batch, scores)
    acted = torch.tensor([r - 25 / 9 for r in returns])
    torch.testing.assert_close(found[batch.is_action], acted / acted.std())
    assert found[~batch.is_action].abs().max() == 0
    (learn,) = white.batches(batch, found, scores, [Pack.whole(batch)])
    assert learn.returns[batch.is_action].tolist() == returns


def test_one_step_ahead_with_gamma_and_lambda(two_groups):
    """The first response: V = 0.5, r = 0 then 1, γ = 0.9, λ = 0.5. δ_2 = 1 − 0.5 = 0.5, δ_1 = 0 +
    0.45 − 0.5 = −0.05, A_1 = −0.05 + 0.45 · 0.5 = 0.175; R = A + V."""
    batch = pack(two_groups)
    piece = {"name": "gae", "gamma": 0.9, "lam": 0.5}
    program = compile(ObjectiveConfig(advantage=piece), CriticConfig())
    scores = Scores(values=torch.where(batch.is_action, 0.5, 0.0))
    advantages, returns = program._estimate(batch, scores)
    torch.testing.assert_close(advantages[batch.is_action][:2], torch.tensor([0.175, 0.5]))
    torch.testing.assert_close(returns[batch.is_action][:2], torch.tensor([0.675, 1.0]))


def test_value_metrics_of_a_program(two_groups):
    """V_old = 0, V = 0.1 everywhere, R = 1, 1, 0, 2, 2, 2, 3, 7, 7. With a clip of 0.05 a value
    may reach 0.05: error R − 0.05, where R > 0; where R = 0 the unclipped error 0.1 is worse."""
    batch = pack(two_groups)
    objective = ObjectiveConfig(advantage="gae", reduction="token_mean")
    program = compile(objective, CriticConfig(clip=0.05))
    scores = Scores(values=torch.zeros(len(batch.tokens)))
    (learn,) = program.batches(
        batch, program.advantages(batch, scores), scores, [Pack.whole(batch)]
    )
    values = torch.where(batch.is_action, 0.1, 0.0)
    metrics = critic_metrics(program.critic, values, learn)
    errors = [r - 0.05 if r else 0.1 for r in (1, 1, 0, 2, 2, 2, 3, 7, 7)]
    assert metrics["train/value_loss"] == pytest.approx(sum(e * e / 2 for e in errors) / 9)
    assert metrics["train/value_clip_fraction"] == pytest.approx(8 / 9)
    assert metrics["train/explained_variance"] == 0


@pytest.mark.parametrize("critic", BODIES, ids=str)
def test_the_first_gradient_by_hand(critic, batch):
    """V = V_old = 0, so that L = c Σ w_t ½ R_t², ∂L/∂b = −c Σ w_t R_t and ∂L/∂w = −c Σ w_t R_t h_t;
    the body has no gradient from it, since w is 0."""
    learner = make_learner(make_policy(), critic=critic)
    learn = make_learn_batch(learner, batch, moved=0.0)
    *_, values, _ = learner._accumulate(learn)
    assert values.abs().max() == 0
    hidden = learner.policy.hidden(batch).detach()[batch.predecessor]
    pull = -critic.get("coefficient", 1.0) * learn.loss_weight * batch.rewards[batch.sample_ids]
    pull = torch.where(batch.is_action, pull.double(), 0.0)
    torch.testing.assert_close(learner.critic.bias.grad, pull.sum()[None], rtol=1e-6, atol=0)
    torch.testing.assert_close(learner.critic.weight.grad, pull @ hidden, rtol=0, atol=1e-7)
    body = {} if critic["shared"] else grads(learner.critic.body)
    assert all(gradient.abs().max() == 0 for gradient in body.values())


def test_a_shared_body_gets_the_sum_of_both_gradients(batch):
    """∂(L + c L_V) of the policy's weights, from two graphs of their own."""
    learner = make_learner(make_policy(), critic=BODIES[0])
    stir(learner)
    learn = make_learn_batch(learner, batch)
    learner._accumulate(learn)
    got = {name: gradient.clone() for name, gradient in grads(learner.policy).items()}
    want = {name: torch.zeros_like(gradient) for name, gradient in got.items()}
    for loss in (
        lambda: learner.program.token_loss(learner.policy.score(batch), learn),
        lambda: 0.3 * 0.5 * (learner.critic.score(learner.policy, batch) - learn.returns) ** 2,
    ):
        learner.policy.zero_grad()
        (learn.loss_weight * loss()).sum().backward()
        for name, gradient in grads(learner.policy).items():
            want[name] += gradient
    for name in got:
        torch.testing.assert_close(got[name], want[name], rtol=0, atol=1e-12)


@pytest.mark.parametrize("layers", [None, 1])
@pytest.mark.parametrize("critic", BODIES, ids=str)
def test_any_split_is_the_whole_batch(critic, layers, batch):
    whole, parts = (
        make_learner(make_policy(layers=layers), critic=critic, **split)
        for split in ({}, {"micro_tokens": 17})
    )
    for learner in (whole, parts):
        stir(learner)
    learn = make_learn_batch(whole, batch)
    parts._rollout = whole._rollout
    outcomes = [learner._accumulate(learn) for learner in (whole, parts)]
    torch.testing.assert_close(*(values for _, values, _ in outcomes), rtol=0, atol=1e-10)
    assert outcomes[0][2].item() == pytest.approx(outcomes[1][2].item(), abs=1e-10)
    for model in ("policy", "critic"):
        a, b = (grads(getattr(learner, model)) for learner in (whole, parts))
        assert a.keys() == b.keys()
        for name in a:
            torch.testing.assert_close(a[name], b[name], rtol=0, atol=1e-10)
    # A body of its own learns where the policy's does, and there alone.
    if layers and not critic["shared"]:
        assert set(grads(whole.critic.body)) == set(grads(whole.policy))


@pytest.mark.parametrize("critic", BODIES, ids=str)
def test_a_critic_learns_alone_first(critic, batch):
    settings = critic | {"warmup_rollouts": 2, "learning_rate": 1e-2, "clip": 100}
    learner = make_learner(make_policy(torch.float32), critic=settings)
    start, losses = learner.weights().tensors, []
    for number in range(3):
        learner.begin(number)
        learn = make_learn_batch(learner, batch, moved=0.0)
        before = learner.critic.weight.clone()
        metrics = learner.step(learn)
        losses.append(metrics["train/value_loss"])
        now = learner.weights().tensors
        is_still = all(torch.equal(now[name], start[name]) for name in start)
        assert is_still == (number < 2) == (metrics["train/grad_norm"] == 0)
        assert not torch.equal(before, learner.critic.weight)
        assert metrics["train/critic_grad_norm"] > 0
    assert losses[0] > losses[1] > losses[2]
    assert learner.version == 3


def test_the_sampler_gets_the_policy_alone(batch):
    plain = make_learner(make_policy(torch.float32))
    for critic in BODIES:
        learner = make_learner(make_policy(torch.float32), critic=critic)
        assert learner.weights().tensors.keys() == plain.weights().tensors.keys()


@pytest.mark.parametrize("critic", BODIES, ids=str)
def test_a_step_that_is_not_finite_moves_neither(critic, batch):
    learner = make_learner(make_policy(torch.float32), critic=critic, max_skipped=1)
    learn = make_learn_batch(learner, batch, moved=0.0)
    learn = dataclasses.replace(learn, returns=learn.returns * torch.nan)
    before = {name: tensor.clone() for name, tensor in learner.state().tensors.items()}
    with pytest.raises(BurnishError, match="not finite"):
        learner.step(learn)
    assert all(torch.equal(x, before[name]) for name, x in learner.state().tensors.items())


STATES = [
    {"schedule": "cosine", "decay_steps": 9, "final_share": 0.1, "weight_decay": 0.3},
    {"precision": "bf16", "micro_tokens": 30, "layers": 1},
    {"precision": "fp16", "log_kl": True},
]


@pytest.mark.parametrize("critic", BODIES, ids=str)
@pytest.mark.parametrize("train", STATES, ids=str)
def test_a_loaded_state_goes_on_bit_for_bit(train, critic, batch):
    """Saved after 1 rollout, in the middle of the warm-up."""
    settings = critic | {"warmup_rollouts": 2, "learning_rate": 1e-2}
    train = dict(train)
    layers = train.pop("layers", None)

    def make():
        return make_learner(make_policy(torch.float32, layers=layers), critic=settings, **train)

    def run(learner, steps):
        rows = []
        for number in steps:
            learner.begin(number)
            rows.append(learner.step(make_learn_batch(learner, batch)))
        return rows

    torch.use_deterministic_algorithms(True)
    try:
        never, killed, resumed = make(), make(), make()
        rows = run(never, range(4))
        run(killed, range(1))
        tensors, numbers = killed.state()
        resumed.load_state(
            LearnerState({name: x.clone() for name, x in tensors.items()}, dict(numbers))
        )
        assert run(resumed, range(1, 4)) == rows[1:]
    finally:
        torch.use_deterministic_algorithms(False)
    a, b = never.state(), resumed.state()
    assert a.numbers == b.numbers
    assert all(torch.equal(x, b.tensors[name]) for name, x in a.tensors.items())
    names = {name for name in a.tensors if name.startswith("critic.")}
    assert "critic.exp_avg.weight" in names
    # Weights that never change are the policy's, and are saved once.
    learns = {name for name, p in never.critic.named_parameters() if p.requires_grad}
    assert {name for name in names if ".master." in name} == {f"critic.master.{n}" for n in learns}


def test_a_critic_and_its_objective_need_each_other():
    for objective, critic in (({}, CriticConfig()), ({"advantage": "gae"}, None)):
        with pytest.raises(ConfigError, match="needs a critic, and no other"):
            compile(ObjectiveConfig(**objective), critic)


def test_a_program_without_a_critic_has_no_value_terms(two_groups):
    batch = pack(two_groups)
    values = {"name": "gae", "values": lambda batch: batch.positions.float()}
    program = compile(ObjectiveConfig(advantage=values))
    assert program.passes(1) == []
    found = program.advantages(batch, Scores())
    (learn,) = program.batches(batch, found, Scores(), [Pack.whole(batch)])
    assert learn.returns is None
    zeros = torch.zeros(len(batch.tokens))
    assert "train/value_loss" not in program.metrics(Measured(zeros, zeros), learn)


def test_a_critic_explains_what_it_has_learned():
    """On one batch, again and again. A response's first value can't tell it from the rest of its
    group, so not all of the variance can be explained."""
    batch = pack(make_groups())
    critic = {"learning_rate": 1e-2, "clip": 100, "warmup_rollouts": 40}
    learner = make_learner(make_policy(torch.float32), critic=critic)
    rows = []
    for number in range(40):
        learner.begin(number)
        rows.append(learner.step(make_learn_batch(learner, batch, moved=0.0)))
    assert rows[0]["train/explained_variance"] == 0
    assert rows[-1]["train/explained_variance"] > 0.5
