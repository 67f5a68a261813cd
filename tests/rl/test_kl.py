import math

import torch

from burnish.rl import kl
from tests.rl.literals import D, close, t, value_and_grad

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
    rewards = torch.tensor([[0, 0, 10], [0, 0, 7]], dtype=D)  # 7: a turn that is not in the loss
    got = kl.penalised_rewards(rewards, penalty, mask, coefficient=0.5)
    close(got, [[-1.5, 0, 8.5], [0, 0, 7]])
    assert not got.requires_grad
