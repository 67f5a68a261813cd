"""Pieces of 2025 and 2026 against the formulas of their papers and of other libraries.

The formulas are written out once more here, in numpy and float64, response by response, as the
paper or the library has them, and are compared on random numbers.
"""

import itertools
import math

import numpy as np
import pytest
import torch

from burnish.rl import advantages, losses, ratios, reduce
from burnish.rl.sequences import to_tokens
from tests.rl.literals import value_and_grad

RNG = np.random.default_rng(19)
GROUPS = np.array([3, 3, 3, 3, 8, 8, 8, 5, 5, 5, 5, 5])
S, T = len(GROUPS), 6
LENGTHS = np.array([6, 2, 5, 1, 3, 3, 6, 4, 2, 6, 1, 5])
MASK = np.arange(T) < LENGTHS[:, None]
SCORES = RNG.normal(size=S)
RIGHT = np.array([0, 1, 0, 0, 1, 1, 1, 0, 0, 0, 0, 0.0])  # group 8 is all right, group 5 all wrong
OLD = np.log(RNG.uniform(0.05, 0.95, size=(S, T)))
NEW = np.minimum(OLD + RNG.normal(scale=0.5, size=(S, T)), -1e-3)
RATIO = np.exp(NEW - OLD)
A = RNG.normal(size=S)[:, None]


def t(x):
    return torch.from_numpy(np.asarray(x, dtype=np.float64))


def close(got, expected):
    np.testing.assert_allclose(np.asarray(got), expected, rtol=1e-10, atol=1e-12)


def by_group(function, *streams):
    """The function of each group's own values, put back in place."""
    result = np.empty(S)
    for name in np.unique(GROUPS):
        own = name == GROUPS
        result[own] = function(*(x[own] for x in streams))
    return result


def check_loss(function, expected, gradient):
    """Values and gradients with respect to the policy's log-probabilities, over actions."""
    value, grad = value_and_grad(function, t(NEW))
    close(value.numpy()[MASK], np.broadcast_to(expected, (S, T))[MASK])
    close(grad.numpy()[MASK], gradient[MASK])


# Advantages


def test_maxrl_is_skyrls_and_the_authors():
    # compute_maxrl_advantage: (score − mean) / (mean + 1e-6), whatever the mean.
    expected = by_group(lambda r: (r - r.mean()) / (r.mean() + 1e-6), RIGHT)
    close(advantages.maxrl(t(RIGHT), t(GROUPS)), expected)
    # The paper, K of N right: N / K − 1 for a right response, −1 for a wrong one, 0 if K = 0.
    paper = by_group(lambda r: r * len(r) / max(r.sum(), 1) - (r.sum() > 0), RIGHT)
    close(advantages.maxrl(t(RIGHT), t(GROUPS), eps=0.0), paper)


def test_batch_std_is_that_of_trl_and_of_scalerl():
    centered = by_group(lambda r: r - r.mean(), SCORES)
    got = advantages.batch_std(t(SCORES), t(GROUPS), of="rewards", eps=1e-4)
    close(got, centered / (SCORES.std(ddof=1) + 1e-4))  # TRL, scale_rewards = "batch"
    got = advantages.batch_std(t(SCORES), t(GROUPS), eps=1e-6)
    close(got, centered / (np.sqrt((centered**2).sum() / (S - 1)) + 1e-6))  # ScaleRL's A_std


def zscores(part, eps):
    return by_group(lambda r: (r - r.mean()) / (r.std(ddof=1) + eps), part)


def test_gdpo_is_trls_over_responses_and_verls_over_tokens():
    parts, weights = RNG.normal(size=(S, 3)), [1.0, 0.5, 2.0]
    total = sum(w * zscores(p, 1e-4) for w, p in zip(weights, parts.T, strict=True))
    trl = (total - total.mean()) / (total.std(ddof=1) + 1e-4)
    close(advantages.gdpo(t(parts), t(GROUPS), weights=weights, eps=1e-4), trl)
    # verl, masked_whiten: the same sum (ε = 1e-6) on each token, over the unbiased variance + 1e-8.
    total = sum(w * zscores(p, 1e-6) for w, p in zip(weights, parts.T, strict=True))
    tokens = np.repeat(total, LENGTHS)
    verl = (tokens - tokens.mean()) / np.sqrt(tokens.var(ddof=1) + 1e-8)
    mask = torch.from_numpy(MASK)
    got = advantages.whiten(to_tokens(t(total), mask), mask)
    close(got[mask], verl)


def test_opo_is_verls():
    expected = by_group(lambda r, n: r - (n * r).sum() / n.sum(), SCORES, LENGTHS)
    close(advantages.opo(t(SCORES), t(GROUPS), torch.from_numpy(LENGTHS)), expected)


def paper_pass_at_k(rewards, k, eps):
    n, wrong = len(rewards), int((rewards == 0).sum())
    mean = 1 - math.comb(wrong, k) / math.comb(n, k)
    std = math.sqrt(mean * (1 - mean))
    if wrong == 0:
        return np.zeros(n)
    lost = math.comb(wrong - 1, k - 1) / math.comb(n - 1, k - 1)
    return np.where(rewards == 1, 1 - mean, 1 - mean - lost) / (std + eps)


@pytest.mark.parametrize("k", [1, 2])
def test_pass_at_k_is_the_analytical_form_of_pass_at_k_training(k):
    expected = by_group(lambda r: paper_pass_at_k(r, k, 1e-6), RIGHT)
    close(advantages.pass_at_k(t(RIGHT), t(GROUPS), k=k, eps=1e-6), expected)


def without_one(rewards, k):
    """PKPO's estimator with the baseline of k − 1: a sum over all sets of k, over their number."""
    result = np.zeros(len(rewards))
    for chosen in itertools.combinations(range(len(rewards)), k):
        for i in chosen:
            others = [rewards[j] for j in chosen if j != i]
            result[i] += max(rewards[i], *others) - max(others)
    return result / math.comb(len(rewards), k)


@pytest.mark.parametrize("k", [2, 3])
def test_max_at_k_is_that_of_pkpo(k):
    for rewards in (SCORES, RIGHT, np.round(SCORES)):
        expected = by_group(lambda r: without_one(r, k), rewards)
        close(advantages.max_at_k(t(rewards), t(GROUPS), k=k), expected)


def test_max_at_k_of_whole_groups_is_verls_grpo_passk():
    # verl: the best response gets (best − second best) / (std + 1e-6), the others get 0. The
    # groups have 4, 3 and 5 responses; k is cut to what a group has.
    def verl(r):
        second, first = np.sort(r)[-2:]
        return np.where(r == first, first - second, 0.0) / (r.std(ddof=1) + 1e-6)

    got = advantages.max_at_k(t(SCORES), t(GROUPS), k=5, eps=1e-6)
    close(got, by_group(verl, SCORES))
    assert not advantages.max_at_k(t([0.3] * 4), torch.zeros(4), k=4, eps=1e-6).any()


def test_remax_is_verls_without_a_kl():
    # verl: the return from each token on, minus the greedy reward; with one reward at the end, the
    # return is that reward everywhere.
    greedy = by_group(lambda r: np.full(len(r), r.mean().round(2)), SCORES)
    close(advantages.remax(t(SCORES), t(greedy)), SCORES - greedy)


# Losses


def test_sapo_is_verls_and_trls():
    tau = np.where(A > 0, 1.0, 1.05)
    gate = 1 / (1 + np.exp(-tau * (RATIO - 1)))
    # d(4 σ / τ)/d log π = 4 σ (1 − σ) ρ.
    check_loss(
        lambda x: losses.sapo(ratios.token_ratio(x, t(OLD)), t(A), positive=1.0, negative=1.05),
        -A * gate * 4 / tau,
        -A * 4 * gate * (1 - gate) * RATIO,
    )


def test_gmpo_is_verls_and_trls():
    # sign(A) · min(sign(A) x, sign(A) clip(x, −low, high)), then exp of the mean over a response.
    low, high = 0.3, 0.4
    x, sign = NEW - OLD, np.sign(A)
    kept = sign * np.minimum(sign * x, sign * np.clip(x, -low, high))
    weight = np.exp((kept * MASK).sum(1, keepdims=True) / LENGTHS[:, None])
    value = (-A * weight).mean()
    # Each token's clipped log-ratio counts 1 / |y_i| in the mean, a clipped one has no gradient.
    gradient = -A * weight * (kept == x) * MASK / LENGTHS[:, None] / S
    mask = torch.from_numpy(MASK)

    def loss(new):
        per_token = losses.gmpo(new, t(OLD), t(A).expand(S, T), mask, low=low, high=high)
        return reduce.weighted_sum(per_token, reduce.sequence_mean(mask))

    got, grad = value_and_grad(loss, t(NEW))
    close(got, value)
    close(grad, gradient)
    assert (kept != x)[MASK].sum() > 5


def test_dppo_by_tv_is_verls_and_prime_rls():
    p, q = np.exp(NEW), np.exp(OLD)
    keep = np.where(A > 0, p - q <= 0.1, p - q >= -0.15)
    weight = np.minimum(RATIO, 1.4)
    bounds = {"low": 0.15, "high": 0.1}
    check_loss(
        lambda x: losses.dppo(x, t(OLD), t(A), cap=1.4, **bounds),
        -A * weight * NEW * keep,
        -A * weight * keep,
    )
    # prime-rl: −keep A ρ + τ (log ρ)², no cap; its gradient has ρ ∇ log π and 2 τ log ρ ∇ log π.
    _, grad = value_and_grad(
        lambda x: losses.dppo(x, t(OLD), t(A), cap=math.inf, kl=1e-3, **bounds), t(NEW)
    )
    close(grad, -A * RATIO * keep + 2e-3 * (NEW - OLD))
    assert 5 < (~keep)[MASK].sum() < MASK.sum() - 5


def test_dppo_by_kl_is_verls():
    p, q = np.exp(NEW), np.exp(OLD)
    binary = q * (OLD - NEW) + (1 - q) * np.log((1 - q + 1e-8) / (1 - p + 1e-8))
    keep = np.where(A > 0, (binary <= 0.05) | (p <= q), (binary <= 0.04) | (p >= q))
    weight = np.minimum(RATIO, 20)
    check_loss(
        lambda x: losses.dppo(x, t(OLD), t(A), low=0.04, high=0.05, divergence="kl"),
        -A * weight * NEW * keep,
        -A * weight * keep,
    )
    assert 5 < (~keep)[MASK].sum() < MASK.sum() - 5


def test_the_objective_of_scalerl():
    # TRL's ScaleRLTrainer: −min(ρ, 5) A / ((A_std + ε) Σ_g |y|) log π, added up; the paper divides
    # by the number of prompts, too. A_std is the batch's, which TRL keeps as a running mean.
    centered = by_group(lambda r: r - r.mean(), SCORES)
    scaled = centered / (np.sqrt((centered**2).sum() / (S - 1)) + 1e-6)
    tokens = by_group(lambda n: np.full(len(n), n.sum()), LENGTHS)
    each = -np.minimum(RATIO, 5) * (scaled / tokens / 3)[:, None] * MASK
    mask = torch.from_numpy(MASK)

    def loss(new):
        found = advantages.batch_std(t(SCORES), t(GROUPS))[:, None]
        per_token = losses.cispo(new, ratios.token_ratio(new, t(OLD)), found, cap=5.0)
        weights = reduce.prompt_mean(mask, group_ids=torch.from_numpy(GROUPS))
        return reduce.weighted_sum(per_token, weights)

    got, grad = value_and_grad(loss, t(NEW))
    close(got, (each * NEW).sum())
    close(grad, each)


# Importance


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_importance_is_truncated_and_masked_as_in_trl(level):
    gap = (NEW - OLD) * MASK
    weight = np.exp(gap if level == "token" else np.broadcast_to(gap.sum(1, keepdims=True), (S, T)))
    mask = torch.from_numpy(MASK)
    got = ratios.importance_ratio(t(NEW), t(OLD), mask, level=level)
    close(ratios.truncate(got, high=2.0)[mask], np.minimum(weight, 2)[MASK])
    expected = np.where((weight >= 0.5) & (weight <= 2), weight, 0)[MASK]  # IcePop has both bounds
    close(ratios.keep_between(got, low=0.5, high=2.0)[mask], expected)
    assert 0 < (expected == 0).sum() < MASK.sum()
