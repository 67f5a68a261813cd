import math

import pytest
import torch

from burnish.rl import losses, reduce
from tests.rl.literals import D, close, t, value_and_grad

INF = math.inf


def test_reinforce():
    value, grad = value_and_grad(lambda x: losses.reinforce(x, t(2.0, -3.0)), t(-1.0, -0.5))
    close(value, [2.0, -1.5])
    close(grad, [-2.0, 3.0])


def test_unclipped():
    value, grad = value_and_grad(lambda x: losses.unclipped(x, t(2.0, -3.0)), t(1.5, 0.5))
    close(value, [-3.0, 1.5])
    close(grad, [-2.0, 3.0])


#           ratio, advantage, loss, gradient; clip at [0.9, 1.3]
CLIP_TABLE = [
    (1.0, 2.0, -2.0, -2.0),
    (1.2, 2.0, -2.4, -2.0),  # inside, not symmetric
    (1.5, 2.0, -2.6, 0.0),  # good and too likely already
    (0.5, 2.0, -1.0, -2.0),  # good but grown unlikely: always pushed back
    (0.95, -2.0, 1.9, 2.0),
    (0.5, -2.0, 1.8, 0.0),  # bad and unlikely already
    (1.5, -2.0, 3.0, 2.0),  # bad and grown likely: always pushed back
]


@pytest.mark.parametrize(("ratio", "advantage", "loss", "gradient"), CLIP_TABLE)
def test_clipped(ratio, advantage, loss, gradient):
    bounds = {"low": 0.1, "high": 0.3}
    value, grad = value_and_grad(lambda r: losses.clipped(r, t(advantage), **bounds), t(ratio))
    close(value, [loss])
    close(grad, [gradient])
    assert losses.is_clipped(t(ratio), t(advantage), **bounds).item() == (gradient == 0)


def test_infinite_bounds_take_a_side_away():
    good, bad = (t(1.5), t(2.0)), (t(0.5), t(-2.0))
    close(losses.clipped(*good, low=0.1, high=INF), [-3.0])
    close(losses.clipped(*bad, low=0.1, high=INF), [1.8])
    close(losses.clipped(*good, low=INF, high=0.3), [-2.6])
    close(losses.clipped(*bad, low=INF, high=0.3), [1.0])
    r, a = t(0.1, 9.0), t(-1.0, 1.0)
    close(losses.clipped(r, a, low=INF, high=INF), losses.unclipped(r, a))
    assert not losses.is_clipped(r, a, low=INF, high=INF).any()


def test_dual_clip_bounds_bad_tokens_alone():
    # A = −2, c = 3: the loss of a bad token stops at 6; a good token is as before.
    ratio, advantage = t(2.9, 3.1, 3.1, 0.5), t(-2.0, -2.0, 2.0, -2.0)
    value, grad = value_and_grad(
        lambda r: losses.clipped(r, advantage, low=0.1, high=0.3, dual=3.0), ratio
    )
    close(value, [5.8, 6.0, -2.6, 1.8])
    close(grad, [2.0, 0.0, 0.0, 0.0])
    assert losses.is_dual_clipped(ratio, advantage, dual=3.0).tolist() == [
        False,
        True,
        False,
        False,
    ]


def test_bounds_on_the_edge():
    assert not losses.is_clipped(t(1.5, 0.5), t(1.0, -1.0), low=0.5, high=0.5).any()
    assert not losses.is_clipped(t(9.0, 0.1), t(0.0, 0.0), low=0.5, high=0.5).any()
    assert not losses.is_dual_clipped(t(3.0, 4.0), t(-1.0, 0.0), dual=3.0).any()
    close(losses.clipped(t(2.0), t(1.0), low=0, high=0), [-1.0])
    close(losses.cispo(t(-1.0), t(2.0), t(1.0), cap=0.5, floor=0.5), [0.5])
    close(losses.value_loss(t(2.0), t(1.0), t(0.0), clip=0), [2.0])


def test_cispo_weighs_the_gradient_and_never_drops_it():
    ratio, advantage = t(0.2, 1.0, 7.0), t(1.0, -2.0, 3.0)

    def run(x, **bounds):
        return losses.cispo(x, ratio.clone().requires_grad_(), advantage, **bounds)

    value, grad = value_and_grad(lambda x: run(x, cap=5.0), t(-1.0, -1.0, -1.0))
    close(grad, [-0.2, 2.0, -15.0])
    close(value, [0.2, -2.0, 15.0])
    _, grad = value_and_grad(lambda x: run(x, cap=5.0, floor=0.5), t(-1.0, -1.0, -1.0))
    close(grad, [-0.5, 2.0, -15.0])


def test_value_loss_is_the_worse_of_clipped_and_unclipped():
    values, old = t(1.1, 2.0, 0.0, -2.0), t(1.0, 1.0, 1.0, 0.0)
    returns = t(2.0, 3.0, 3.0, -9.0)
    # Clip ½ moves 2.0 → 1.5, 0.0 → 0.5, −2.0 → −0.5.
    value, grad = value_and_grad(lambda v: losses.value_loss(v, old, returns, clip=0.5), values)
    close(value, [0.5 * 0.81, 0.5 * 2.25, 0.5 * 9.0, 0.5 * 8.5**2])
    close(grad, [-0.9, 0.0, -3.0, 0.0])
    plain = losses.value_loss(values, old, returns, clip=INF)
    close(plain, 0.5 * (values - returns) ** 2)


def test_the_entropy_coefficient_moves_by_delta_within_bounds():
    """Skywork-OR1's rule with TRL's bounds."""

    def adapted(coefficient, entropy):
        given = {"target": 0.5, "delta": 0.25, "low": 0.125, "high": 1.0}
        return losses.adapted_coefficient(coefficient, entropy, **given)

    assert adapted(0.25, 0.4) == adapted(0.25, 0.5) == 0.5
    assert adapted(0.5, 0.6) == 0.25
    assert adapted(0.9, 0.0) == 1.0
    assert adapted(0.25, 2.0) == 0.125


def test_entropy():
    logits = t(0.0, 0.0, 0.0, 0.0, 0.0, -INF, math.log(3), -INF).view(2, 4)
    close(losses.entropy(logits), [math.log(4), -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))])
    random = torch.randn(3, 5, dtype=D, requires_grad=True, generator=torch.manual_seed(0))
    assert torch.autograd.gradcheck(losses.entropy, random)


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def test_sapo_closes_softly():
    ratio, adv = t(1.0, 1.5, 1.5, 0.2), t(2.0, 2.0, -3.0, -1.0)
    value, grad = value_and_grad(lambda r: losses.sapo(r, adv, positive=1.0, negative=2.0), ratio)
    gates = [sigmoid(0.0), sigmoid(0.5), sigmoid(1.0), sigmoid(-1.6)]
    close(value, [-8 * gates[0], -8 * gates[1], 6 * gates[2], 2 * gates[3]])
    # −A · 4 σ (1 − σ), which is −A at ratio 1.
    close(grad, [-a * 4 * g * (1 - g) for a, g in zip(adv.tolist(), gates, strict=True)])
    assert grad[0] == -2


def test_gmpo_clips_tokens_and_takes_their_geometric_mean():
    # Response 0, A = 1: x = 0.6 (clipped to 0.4), −0.2: mean 0.1. Response 1, A = −2: x = −1
    # (clipped to −0.4), 0.3, 0.1: mean 0. A token that was clipped has no gradient.
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]]).bool()
    new = torch.tensor([[0.6, -0.2, 9.0], [-1.0, 0.3, 0.1]], dtype=D)
    adv = torch.tensor([[1.0], [-2.0]], dtype=D)
    weights = reduce.sequence_mean(mask)

    def loss(x):
        per_token = losses.gmpo(x, torch.zeros_like(x), adv, mask, low=0.4, high=0.4)
        return reduce.weighted_sum(per_token, weights)

    value, grad = value_and_grad(loss, new)
    first = math.exp(0.1)
    close(value, (-first + 2) / 2)
    close(grad, [[0, -first / 4, 0], [0, 1 / 3, 1 / 3]])
    slots = torch.tensor([3, 0, 4, 1, 5])  # packed: the responses' tokens in turn
    flat = losses.gmpo(
        *(x.expand(2, 3).reshape(-1)[slots] for x in (new, torch.zeros(2, 3), adv)),
        torch.ones(5),
        low=0.4,
        high=0.4,
        sequence_ids=torch.tensor([1, 0, 1, 0, 1]),
    )
    close(flat, [2, -first, 2, -first, 2])
    beyond = losses.is_beyond(new, adv, low=0.4, high=0.4)
    assert beyond[mask].tolist() == [True, False, True, False, False]


def test_dppo_masks_by_the_difference_of_probabilities():
    # From 0.5 to 0.8 is +0.3 > 0.2: a good token is masked, a bad one is not. From 0.5 to 0.2 it
    # is the other way round. From 0.01 to 0.1 the ratio is 10, but the difference only 0.09.
    new, old = t(0.8, 0.8, 0.2, 0.2, 0.1).log(), t(0.5, 0.5, 0.5, 0.5, 0.01).log()
    adv = t(1, -1, 1, -1, 1)
    value, grad = value_and_grad(lambda x: losses.dppo(x, old, adv, low=0.2, high=0.2), new)
    close(value, [0, 1.6 * math.log(0.8), -0.4 * math.log(0.2), 0, -10 * math.log(0.1)])
    close(grad, [0, 1.6, -0.4, 0, -10])
    value, grad = value_and_grad(lambda x: losses.dppo(x, old, adv, low=0.2, high=0.2, cap=2), new)
    close(grad, [0, 1.6, -0.4, 0, -2])


def test_dppo_masks_by_the_binary_kl():
    # KL(0.5 ‖ 0.8) = ½ log(0.5 / 0.8) + ½ log(0.5 / 0.2) = log 1.25 ≈ 0.2231; so is KL(0.5 ‖ 0.2).
    new, old = t(0.8, 0.2, 0.5).log(), t(0.5, 0.5, 0.5).log()
    close(
        losses.signed_divergence(new, old, divergence="kl"),
        [math.log(1.25), -math.log(1.25), 0],
    )
    for bound, kept in ((0.2, 0.0), (0.25, 1.0)):
        _, grad = value_and_grad(
            lambda x, b=bound: losses.dppo(x, old, t(1, -1, 1), low=b, high=b, divergence="kl"),
            new,
        )
        close(grad, [-1.6 * kept, 0.4 * kept, -1])


def test_dppo_pulls_back_by_the_squared_log_ratio():
    # 0.1 x² with x = log(0.8 / 0.5), on a masked token; its gradient is 0.2 x.
    new, old, x = t(0.8).log(), t(0.5).log(), math.log(1.6)
    value, grad = value_and_grad(
        lambda y: losses.dppo(y, old, t(1), low=0.2, high=0.2, kl=0.1), new
    )
    close(value, [0.1 * x * x])
    close(grad, [0.2 * x])
