"""Pieces of 2025 and 2026, on numbers derived by hand."""

import itertools
import math

import pytest
import torch
from literals import D, close, t, value_and_grad

from burnish.rl import advantages, losses, reduce

REWARDS = torch.tensor([1.0, 3.0, 5.0, 2.0, 2.0], dtype=D)
GROUPS = torch.tensor([7, 4, 7, 4, 7])  # group 7: rewards 1, 5, 2; group 4: rewards 3, 2
CENTERED = [-5 / 3, 0.5, 7 / 3, -0.5, -2 / 3]


# Advantages


def test_batch_std_divides_by_the_std_of_all_advantages():
    # Squares: 25/9 + 1/4 + 49/9 + 1/4 + 4/9 = 55/6 around a mean of 0, over S − 1 = 4.
    std = (55 / 24) ** 0.5
    close(advantages.batch_std(REWARDS, GROUPS, eps=0.1), [x / (std + 0.1) for x in CENTERED])


def test_batch_std_of_rewards_is_that_of_trl():
    # Rewards: mean 13/5, squares 43 − 5 · (13/5)² = 9.2, over 4. TRL: rewards.std() + 1e-4.
    expected = [x / (2.3**0.5 + 1e-4) for x in CENTERED]
    close(advantages.batch_std(REWARDS, GROUPS, of="rewards", eps=1e-4), expected)


def test_pass_at_k_of_right_and_wrong():
    # N = 4, N⁻ = 3, k = 2: pass@2 = 1 − C(3,2) / C(4,2) = 1/2, σ = 1/2. Right: (1 − 1/2) / σ = 1.
    # Wrong: (1 − 1/2 − C(2,1) / C(3,1)) / σ = −1/3.
    got = advantages.pass_at_k(t(0, 1, 0, 0), torch.zeros(4), k=2, eps=0.0)
    close(got, [-1 / 3, 1, -1 / 3, -1 / 3])
    # N = 5, N⁻ = 2, k = 2: pass@2 = 1 − 1/10, σ = 0.3. Right: 1/3. Wrong: (0.1 − 1/4) / 0.3.
    got = advantages.pass_at_k(t(1, 0, 1, 1, 0), torch.zeros(5), k=2, eps=1e-6)
    right, wrong = 0.1 / (0.3 + 1e-6), -0.15 / (0.3 + 1e-6)
    close(got, [right, wrong, right, right, wrong])
    # k = 4 of N = 5: every set of 4 has a right one. Nothing is left to be learned.
    assert not advantages.pass_at_k(t(1, 0, 1, 1, 0), torch.zeros(5), k=4).any()


def test_pass_at_k_of_other_rewards_is_the_best_of_k():
    # Sets of 2 out of 0, 1, 3 have the best 1, 3, 3: mean 7/3, variance 8/9. With 0: (1 + 3) / 2.
    std = (8 / 9) ** 0.5
    got = advantages.pass_at_k(t(1, 3, 0), torch.zeros(3), k=2, eps=0.0)
    close(got, [-1 / 3 / std, 2 / 3 / std, -1 / 3 / std])


@pytest.mark.parametrize("k", [1, 2, 3, 6])
def test_pass_at_k_equals_a_count_of_all_sets(k):
    rewards = torch.tensor([2.0, -1.0, 2.0, 0.5, 0.0, 7.0, 0.5], dtype=D)
    best = {s: rewards[list(s)].max() for s in itertools.combinations(range(7), k)}
    values = torch.stack(list(best.values()))
    drawn = [torch.stack([v for s, v in best.items() if i in s]).mean() for i in range(7)]
    expected = (torch.stack(drawn) - values.mean()) / (values.std(correction=0) + 0.01)
    groups = torch.tensor([3] * 7 + [1] * 2)
    got = advantages.pass_at_k(torch.cat((rewards, t(0, 1))), groups, k=k, eps=0.01)
    close(got[:7], expected)
    # The other group has lost responses: its k is 1, a z-score with the biased std, 1/2.
    close(got[7:], [-0.5 / 0.51, 0.5 / 0.51])


def test_maxrl_divides_by_the_mean():
    # Means 8/3 and 5/2.
    close(advantages.maxrl(REWARDS, GROUPS, eps=0.0), [-5 / 8, 1 / 5, 7 / 8, -1 / 5, -1 / 4])
    # One right of four: (1 − 1/4) / (1/4) = 3, and −1. None right: 0.
    groups = torch.tensor([0] * 4 + [1] * 2)
    close(advantages.maxrl(t(0, 0, 1, 0, 0, 0), groups, eps=0.0), [-1, -1, 3, -1, 0, 0])
    with pytest.raises(ValueError, match=r"needs rewards of at least 0, got -1; shift"):
        advantages.maxrl(t(1, -1), torch.zeros(2))


PARTS = torch.tensor([[0.0, 3.0], [1.0, 1.0], [1.0, 0.0], [1.0, 4.0]], dtype=D)


def test_gdpo_normalises_each_part_and_then_the_batch():
    # First part: (0, 1) in z-scores ∓1/√2, (1, 1) is 0. Second: (3, 1) ±1/√2, (0, 4) ∓1/√2.
    # With weights 1 and 2: 1, −1, −2, 2 over √2; squares add up to 5, over S − 1 = 3.
    groups = torch.tensor([0, 0, 1, 1])
    got = advantages.gdpo(PARTS, groups, weights=[1.0, 2.0], eps=0.0)
    close(got, t(1, -1, -2, 2) / 2**0.5 / (5 / 3) ** 0.5)
    # TRL: the std of (0, 1) is 1/√2, of (3, 1) √2, of (0, 4) 2√2; to each 1e-4 is added.
    half, one, two = (0.5 / (0.5**0.5 + 1e-4), 1 / (2**0.5 + 1e-4), 2 / (8**0.5 + 1e-4))
    total = t(one - half, half - one, -two, two)
    got = advantages.gdpo(PARTS, groups, weights=[1.0, 1.0], eps=1e-4)
    close(got, total / (total.square().sum().div(3).sqrt() + 1e-4))


def test_opo_weighs_the_baseline_by_length():
    # Group 7, lengths 1, 3, 2: (1 + 15 + 4) / 6 = 10/3. Group 4, lengths 2, 4: (6 + 8) / 6 = 7/3.
    got = advantages.opo(REWARDS, GROUPS, torch.tensor([1, 2, 3, 4, 2]))
    close(got, [-7 / 3, 2 / 3, 5 / 3, -1 / 3, -4 / 3])
    assert not advantages.opo(t(0, 0), torch.zeros(2), torch.zeros(2, dtype=torch.long)).any()


def test_remax_subtracts_the_reward_of_the_greedy_response():
    close(advantages.remax(REWARDS, t(2, 0, 2, 0, 2)), [-1, 3, 3, 2, 0])


EQUAL = {
    "batch_std": advantages.batch_std,
    "pass_at_k": lambda r, g: advantages.pass_at_k(r, g, k=3),
    "max_at_k": lambda r, g: advantages.max_at_k(r, g, k=3),
    "maxrl": advantages.maxrl,
    "gdpo": lambda r, g: advantages.gdpo(r[:, None], g, weights=[1.0]),
    "opo": lambda r, g: advantages.opo(r, g, torch.arange(len(r))),
}


@pytest.mark.parametrize("name", EQUAL)
def test_equal_rewards_teach_exactly_nothing(name):
    for reward in (0.7, 100.1, 1e-30, 1e30):
        rewards = torch.tensor([reward] * 16 + [0.0, 1.0])
        got = EQUAL[name](rewards, torch.tensor([4] * 16 + [9] * 2))
        assert got[:16].tolist() == [0.0] * 16
        assert got[17] > 0 or reward == 1e30  # of whose size the batch's std may be
    with pytest.raises(ValueError, match="at least 2 responses"):
        EQUAL[name](t(1, 2, 3), torch.tensor([0, 0, 1]))


# Losses


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


# Reduction


def test_prompt_mean_weighs_prompts_alike():
    # Prompt 5 has responses of 3 and 1 tokens, prompt 2 one of 2; prompt 9 has no action.
    mask = torch.tensor([[1, 1, 0, 1], [1, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]])
    groups = torch.tensor([5, 2, 5, 9])
    a, b = 1 / 8, 1 / 4
    expected = [[a, a, 0, a], [b, b, 0, 0], [a, 0, 0, 0], [0, 0, 0, 0]]
    close(reduce.prompt_mean(mask, group_ids=groups), expected)
    ids = torch.tensor([1, 0, 0, 3, 2, 0, 1])
    packed = reduce.prompt_mean(
        torch.tensor([1, 1, 1, 0, 1, 1, 1]), group_ids=groups, sequence_ids=ids
    )
    close(packed, [b, a, a, 0, a, a, b])
