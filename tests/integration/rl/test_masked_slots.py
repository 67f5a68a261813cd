"""What slots outside the mask hold never matters: not to a loss, and not to its gradient."""

import itertools
import math

import pytest
import torch

from burnish import grpo
from burnish.learner.program import compile
from burnish.recipe.objective.objective import ObjectiveConfig
from burnish.rl import advantages, kl, losses, ratios, reduce
from burnish.rl.sequences import on_last_action
from burnish.rollout.packing import Pack, pack
from burnish.types import Measured, Scores

D = torch.float64
FILLS = [math.nan, math.inf, -math.inf, 1e4, -1e4]
"""The last two overflow in a ratio or a KL."""
MASK = torch.tensor([[1, 1, 0, 1], [1, 0, 0, 0], [0, 0, 0, 0]]).bool()
ENDS = torch.tensor([[0, 1, 0, 1], [1, 0, 0, 0], [0, 0, 0, 0]]).bool()
"""The last tokens of turns."""
NAMES = ("new", "old", "reference", "advantages", "values", "returns")


def streams(fill, which=NAMES):
    """Random [3, 4] by name; those in ``which`` hold ``fill`` outside the mask."""
    drawn = torch.randn(len(NAMES), 3, 4, dtype=D, generator=torch.manual_seed(0))
    return {
        name: torch.where(MASK, x, fill) if name in which else torch.where(MASK, x, 0.0)
        for name, x in zip(NAMES, drawn, strict=True)
    }


def token_ratio(s, new):
    return ratios.token_ratio(new, s["old"])


def sequence_ratio(s, new):
    return ratios.sequence_ratio(new, s["old"], MASK)


def importance(s, level):
    weights = ratios.importance_ratio(s["old"], s["reference"], MASK, level=level)
    return ratios.truncate(weights, high=2.0)


LOSSES = {
    "reinforce": lambda s, new: losses.reinforce(new, s["advantages"]),
    "value": lambda s, new: losses.value_loss(new, s["values"], s["returns"], clip=0.2),
    "k1": lambda s, new: kl.k1(new, s["reference"]),
    "k2": lambda s, new: kl.k2(new, s["reference"]),
    "k3": lambda s, new: kl.k3(new, s["reference"]),
    "capped k3": lambda s, new: kl.k3(new, s["reference"], cap=10.0),
    "gmpo": lambda s, new: losses.gmpo(new, s["old"], s["advantages"], MASK, low=0.4, high=0.4),
    "dppo": lambda s, new: losses.dppo(
        new, s["old"], s["advantages"], low=0.2, high=0.2, divergence="kl", kl=0.1
    ),
}
for ratio in (token_ratio, sequence_ratio):
    LOSSES |= {
        f"{ratio.__name__}, unclipped": lambda s, new, ratio=ratio: losses.unclipped(
            ratio(s, new), s["advantages"]
        ),
        f"{ratio.__name__}, clipped": lambda s, new, ratio=ratio: losses.clipped(
            ratio(s, new), s["advantages"], low=0.2, high=0.2
        ),
        f"{ratio.__name__}, dual": lambda s, new, ratio=ratio: losses.clipped(
            ratio(s, new), s["advantages"], low=0.2, high=math.inf, dual=3.0
        ),
        f"{ratio.__name__}, cispo": lambda s, new, ratio=ratio: losses.cispo(
            new, ratio(s, new), s["advantages"], cap=5.0
        ),
        f"{ratio.__name__}, sapo": lambda s, new, ratio=ratio: losses.sapo(
            ratio(s, new), s["advantages"], positive=1.0, negative=1.05
        ),
    }
for level in ("token", "sequence", "geometric"):
    LOSSES[f"importance per {level}"] = lambda s, new, level=level: (
        importance(s, level) * losses.unclipped(token_ratio(s, new), s["advantages"])
    )


def value_and_gradient(loss, given, weights):
    new = given["new"].clone().requires_grad_()
    value = reduce.weighted_sum(loss(given, new), weights)
    value.backward()
    return value.detach(), new.grad


@pytest.mark.parametrize("name", LOSSES)
def test_losses_and_gradients(name):
    weights = reduce.sequence_mean(MASK)  # every reduction is 0 outside the mask
    value, gradient = value_and_gradient(LOSSES[name], streams(0.0), weights)
    assert gradient[MASK].any()
    for fill, which in itertools.product(FILLS, (NAMES, *[(one,) for one in NAMES])):
        got = value_and_gradient(LOSSES[name], streams(fill, which), weights)
        assert torch.equal(got[0], value)
        assert torch.equal(got[1], gradient)


@pytest.mark.parametrize("fill", FILLS)
def test_entropy(fill):
    logits = torch.randn(3, 4, 5, dtype=D, generator=torch.manual_seed(0))
    logits[0, 0, 1] = -math.inf  # a token that can't be drawn
    logits = torch.where(MASK[..., None], logits, fill).requires_grad_()
    loss = -losses.entropy(logits)
    reduce.weighted_sum(loss, reduce.token_mean(MASK)).backward()
    assert not logits.grad[~MASK].any()
    assert logits.grad[MASK].isfinite().all()


@pytest.mark.parametrize("fill", FILLS)
def test_advantages(fill):
    rewards = torch.tensor([1.0, 0.0, 5.0], dtype=D)

    def all_of(s):
        estimate = advantages.gae(s["advantages"], s["values"], MASK, gamma=0.9, lam=0.8)
        placed = on_last_action(rewards, MASK)
        penalised = kl.penalised_rewards(placed, s["reference"], MASK, coefficient=0.1)
        whitened = advantages.whiten(s["advantages"], MASK)[MASK]
        credit = advantages.turn_mean(s["advantages"], ENDS, MASK, torch.zeros(3))
        turns = advantages.turn_gae(s["advantages"], s["values"], ENDS, MASK)
        own = advantages.reinforce_plus_plus(s["values"], MASK)
        return *estimate, whitened, penalised[MASK], own, credit, *turns

    for got, expected in zip(all_of(streams(fill)), all_of(streams(0.0)), strict=True):
        assert torch.equal(got, expected)


def test_what_is_not_finite_inside_the_mask_shows():
    given = streams(0.0)
    for name in ("old", "advantages"):
        broken = given | {name: given[name].clone()}
        broken[name][0, 0] = math.nan
        for loss in ("token_ratio, clipped", "token_ratio, cispo"):
            value, _ = value_and_gradient(LOSSES[loss], broken, reduce.token_mean(MASK))
            assert value.isnan()


SETTINGS = [
    {"loss": loss, "ratio": ratio, "kl": estimator, "importance": correction}
    for loss, ratio, estimator, correction in itertools.product(
        ("reinforce", "unclipped", "clip", "cispo", "gmpo", "dppo"),
        ("token", "sequence"),
        ("none", "k3"),
        ("none", "truncate"),
    )
]


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda s: " ".join(s.values()))
def test_whole_objectives(setting, two_groups):
    dual = {"loss": {"name": "clip", "dual": 1.5}} if setting["loss"] == "clip" else {}
    program = compile(ObjectiveConfig(**setting | dual, entropy_coefficient=0.1))
    batch = pack(two_groups)
    action = batch.is_action
    noise = 0.3 * torch.randn(4, len(action), generator=torch.manual_seed(0))

    def run(fill):
        new, old, reference, behavior = (torch.where(action, x, fill) for x in noise)
        scored = pack(two_groups)
        scored.behavior_logprobs.copy_(behavior)
        scores = Scores(old, None if setting["kl"] == "none" else reference)
        advantages = torch.where(action, program.advantages(scored, scores), fill)
        (learn,) = program.batches(scored, advantages, scores, [Pack.whole(scored)])
        if learn.importance is not None:
            learn.importance[~action] = fill
        new.requires_grad_()
        entropy = torch.where(action, torch.where(action, new, 0.0).square(), fill)
        loss = program.token_loss(Measured(new, entropy), learn)
        total = reduce.weighted_sum(loss, learn.loss_weight)
        total.backward()
        metrics = program.metrics(Measured(new.detach(), entropy.detach()), learn)
        return total.detach(), new.grad, metrics

    value, gradient, metrics = run(0.0)
    for fill in (math.nan, math.inf):
        got = run(fill)
        assert torch.equal(got[0], value)
        assert torch.equal(got[1], gradient)
        assert got[2] == metrics


@pytest.mark.parametrize("loss_type", ["no_baseline", "reinforce_with_baseline", "grpo_clip"])
@pytest.mark.parametrize("fill", FILLS)
def test_the_published_functions(loss_type, fill):
    def run(fill):
        given = streams(fill)
        new = given["new"].clone().requires_grad_()
        loss, _ = grpo.grpo_microbatch_train_step(
            new,
            MASK,
            2,
            loss_type,
            raw_rewards=given["advantages"],
            advantages=given["advantages"],
            old_log_probs=given["old"],
            cliprange=0.2,
        )
        supervised = given["new"].clone().requires_grad_()
        grpo.sft_microbatch_train_step(supervised, MASK, 2)
        return loss, new.grad, supervised.grad

    for got, expected in zip(run(fill), run(0.0), strict=True):
        assert torch.equal(got, expected)
