import math

import pytest
import torch
from literals import D, close, t, value_and_grad

from burnish.rl import kl, losses, ratios

INF = math.inf


# Ratios


def test_token_ratio_is_the_exponential_of_the_difference():
    value, grad = value_and_grad(lambda x: ratios.token_ratio(x, t(-2.0, -1.0)), t(-1.0, -3.0))
    close(value, [math.e, math.exp(-2)])
    close(grad, [math.e, math.exp(-2)])  # of the numerator: positive, unlike a quotient of logs


MASK = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0]]).bool()
NEW = t(-1.0, -2.0, 5.0, -3.0, 7.0, 7.0, 7.0, 7.0, 7.0).view(3, 3)
OLD = t(-1.5, -2.1, 0.0, -2.0, 0.0, 0.0, 0.0, 0.0, 0.0).view(3, 3)


def test_sequence_ratio_is_the_geometric_mean_with_token_gradients():
    value, grad = value_and_grad(lambda x: ratios.sequence_ratio(x, OLD, MASK), NEW)
    first, second = math.exp((0.5 + 0.1) / 2), math.exp(-1.0)
    close(value, [[first, first, 1], [second, 1, 1], [1, 1, 1]])
    close(grad, [[first, first, 0], [second, 0, 0], [0, 0, 0]])


def test_sequence_ratio_packed_equals_padded():
    ids = torch.tensor([0, 1, 0])
    new, old = t(-1.0, -3.0, -2.0), t(-1.5, -2.0, -2.1)

    def run(x):
        return ratios.sequence_ratio(x, old, torch.ones(3), sequence_ids=ids)

    value, grad = value_and_grad(run, new)
    first, second = math.exp(0.3), math.exp(-1.0)
    close(value, [first, second, first])
    close(grad, [first, second, first])


@pytest.mark.parametrize(
    ("level", "first"),
    [
        ("token", [math.exp(0.5), math.exp(0.1)]),
        ("sequence", [math.exp(0.6)] * 2),
        ("geometric", [math.exp(0.3)] * 2),
    ],
)
def test_importance_ratio(level, first):
    weights = ratios.importance_ratio(NEW, OLD, MASK, level=level)
    close(weights, [[*first, 1], [math.exp(-1), 1, 1], [1, 1, 1]])
    ids = torch.tensor([0, 1, 0])
    flat = ratios.importance_ratio(
        t(-1.0, -3.0, -2.0), t(-1.5, -2.0, -2.1), torch.ones(3), level=level, sequence_ids=ids
    )
    close(flat, [first[0], math.exp(-1), first[1]])


def test_importance_is_per_token_by_default_and_has_no_gradient():
    new = NEW.clone().requires_grad_()
    weights = ratios.importance_ratio(new, OLD, MASK)
    assert not weights.requires_grad
    close(weights[0, 0], math.exp(0.5))


def test_truncate_and_keep_between():
    w = t(0.1, 0.5, 1.0, 2.0, 3.0)
    close(ratios.truncate(w, high=2.0), [0.1, 0.5, 1, 2, 2])
    close(ratios.truncate(w, low=0.5, high=2.0), [0.5, 0.5, 1, 2, 2])
    close(ratios.keep_between(w, low=0.5, high=2.0), [0, 0.5, 1, 2, 0])


# Objectives


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


def test_entropy():
    logits = t(0.0, 0.0, 0.0, 0.0, 0.0, -INF, math.log(3), -INF).view(2, 4)
    close(losses.entropy(logits), [math.log(4), -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))])
    random = torch.randn(3, 5, dtype=D, requires_grad=True, generator=torch.manual_seed(0))
    assert torch.autograd.gradcheck(losses.entropy, random)


# KL

LOGITS = torch.tensor([0.3, -1.0, 0.8, 0.1], dtype=D)
REFERENCE = torch.log_softmax(torch.tensor([0.0, 0.5, -0.5, 1.0], dtype=D), 0)


def expectation(estimator):
    """E over tokens that π samples of the estimator, with the gradient that sampling would give."""
    logits = LOGITS.clone().requires_grad_()
    logprobs = torch.log_softmax(logits, 0)
    value = (logprobs.exp().detach() * estimator(logprobs, REFERENCE)).sum()
    (grad,) = torch.autograd.grad(value, logits)
    return value.detach(), grad


def divergence(forward):
    logits = LOGITS.clone().requires_grad_()
    logprobs = torch.log_softmax(logits, 0)
    p, q = (logprobs, REFERENCE) if forward else (REFERENCE, logprobs)
    value = (p.exp() * (p - q)).sum()
    (grad,) = torch.autograd.grad(value, logits)
    return value.detach(), grad


def test_k1_and_k3_estimate_the_kl_and_k2_and_k3_have_the_stated_gradients():
    true, true_grad = divergence(forward=True)
    _, reverse_grad = divergence(forward=False)
    (v1, g1), (_, g2), (v3, g3) = map(expectation, (kl.k1, kl.k2, kl.k3))
    close(v1, true)
    close(v3, true)
    close(g1, torch.zeros(4))
    close(g2, true_grad)
    close(g3, reverse_grad)


def test_kl_values():
    new, ref = t(-1.0, -3.0), t(-2.0, -1.0)
    close(kl.k1(new, ref), [1.0, -2.0])
    close(kl.k2(new, ref), [0.5, 2.0])
    close(kl.k3(new, ref), [math.exp(-1) + 1 - 1, math.exp(2) - 2 - 1])
    value, grad = value_and_grad(lambda x: kl.k3(x, ref, cap=4.0), new)
    close(value, [math.exp(-1), 4.0])
    close(grad, [1 - math.exp(-1), 0.0])


def test_penalised_rewards():
    mask = torch.tensor([[1, 0, 1], [0, 0, 0]])
    penalty = torch.full((2, 3), 3.0, dtype=D, requires_grad=True)
    got = kl.penalised_rewards(t(10.0, 20.0), penalty, mask, coefficient=0.5)
    close(got, [[-1.5, 0, 8.5], [0, 0, 0]])
    assert not got.requires_grad
    ids = torch.tensor([0, 1, 0])
    flat = kl.penalised_rewards(
        t(10.0, 20.0), t(1.0, 2.0, 3.0), torch.ones(3), coefficient=0.5, sequence_ids=ids
    )
    close(flat, [-0.5, 19.0, 8.5])
