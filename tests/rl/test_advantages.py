import itertools
import math

import pytest
import torch

from burnish.rl import advantages
from burnish.rl.sequences import on_last_action, to_tokens
from tests.rl.literals import D, close, t

REWARDS = torch.tensor([1.0, 3.0, 5.0, 2.0, 2.0], dtype=D)
GROUPS = torch.tensor([7, 4, 7, 4, 7])  # group 7: rewards 1, 5, 2; group 4: rewards 3, 2


def test_raw_is_the_reward():
    close(advantages.raw(REWARDS, GROUPS), REWARDS)


def test_group_mean():
    # Means 8/3 and 5/2.
    close(advantages.group_mean(REWARDS, GROUPS), [-5 / 3, 0.5, 7 / 3, -0.5, -2 / 3])


def test_group_zscore_has_the_unbiased_std_and_adds_eps_to_it():
    # Group 7: squared deviations 25/9 + 49/9 + 4/9 = 78/9, over 2. Group 4: 1/4 + 1/4, over 1.
    std7, std4 = (78 / 18) ** 0.5, 0.5**0.5
    expected = [-5 / 3 / (std7 + 0.1), 0.5 / (std4 + 0.1), 7 / 3 / (std7 + 0.1)]
    expected += [-0.5 / (std4 + 0.1), -2 / 3 / (std7 + 0.1)]
    close(advantages.group_zscore(REWARDS, GROUPS, eps=0.1), expected)
    assert advantages.group_zscore(REWARDS, GROUPS).abs().max() < 2


def test_default_eps_of_the_zscore_is_1e_6():
    rewards = torch.tensor([0.0, 1e-6], dtype=D)  # std = 1e-6 / √2
    close(
        advantages.group_zscore(rewards, torch.zeros(2)),
        [-0.5 / (0.5**0.5 + 1), 0.5 / (0.5**0.5 + 1)],
    )


EQUAL = [0.7, 0.1, 100.1, -3.3, 1e-30, 1e30, 1e38]
"""Rewards whose float32 sums over 16 responses round, or overflow."""
BASELINES = {
    "group_mean": advantages.group_mean,
    "group_zscore": advantages.group_zscore,
    "group_zscore without eps": lambda r, g: advantages.group_zscore(r, g, eps=0.0),
    "leave_one_out": advantages.leave_one_out,
    "best_of_group": lambda r, g: advantages.best_of_group(r, g, centered=True),
}


@pytest.mark.parametrize("name", BASELINES)
@pytest.mark.parametrize("reward", EQUAL)
@pytest.mark.parametrize("dtype", [torch.float32, D])
def test_equal_rewards_teach_exactly_nothing(name, reward, dtype):
    rewards = torch.tensor([reward] * 16 + [0.0, 1.0], dtype=dtype)
    groups = torch.tensor([4] * 16 + [9] * 2)
    got = BASELINES[name](rewards, groups)
    assert got[:16].tolist() == [0.0] * 16
    assert got[17] > 0


def test_rewards_that_differ_in_the_last_bit_still_add_up_to_nothing():
    """The baseline is not rounded to the size of the rewards, only to that of their differences."""
    rewards = torch.tensor([100.1] * 15 + [100.2])
    expected = rewards.double() - rewards.double().mean()
    close(advantages.group_mean(rewards, torch.zeros(16)), expected.float(), atol=1e-8)
    rewards[15] = torch.nextafter(rewards[0], torch.tensor(200.0))
    assert advantages.group_mean(rewards, torch.zeros(16)).double().sum().abs() < 1e-9


@pytest.mark.parametrize("reward", EQUAL)
@pytest.mark.parametrize("dtype", [torch.float32, D])
def test_a_constant_batch_whitens_to_exactly_nothing(reward, dtype):
    x = torch.full((3, 7), reward, dtype=dtype)
    mask = torch.arange(7)[None] < torch.tensor([[7], [3], [1]])
    assert advantages.whiten(x, mask)[mask].tolist() == [0.0] * 11
    given = on_last_action(x[:, 0], mask)
    assert not advantages.reinforce_plus_plus(given, mask).any()
    groups = torch.zeros(3)
    assert not advantages.reinforce_plus_plus_baseline(x[:, 0], groups, mask).any()


def test_leave_one_out():
    # Group 7: 1 − 7/2, 5 − 3/2, 2 − 6/2. Group 4: 3 − 2, 2 − 3.
    close(advantages.leave_one_out(REWARDS, GROUPS), [-2.5, 1.0, 3.5, -1.0, -1.0])


def test_best_of_group():
    close(advantages.best_of_group(REWARDS, GROUPS), [0, 3, 5, 0, 0])
    close(advantages.best_of_group(REWARDS, GROUPS, centered=True), [0, 0.5, 7 / 3, 0, 0])
    ties = torch.tensor([-1.0, -1.0, -3.0], dtype=D)
    close(advantages.best_of_group(ties, torch.zeros(3)), [-1, -1, 0])


@pytest.mark.parametrize("name", ["group_mean", "group_zscore", "leave_one_out"])
def test_a_group_of_one_is_refused(name):
    with pytest.raises(ValueError, match=r"needs at least 2 .* group 9 has 1; drop"):
        getattr(advantages, name)(REWARDS[:3], torch.tensor([4, 9, 4]))


@pytest.mark.parametrize("name", ["raw", "best_of_group"])
def test_a_group_of_one_is_fine_without_a_baseline(name):
    close(getattr(advantages, name)(REWARDS[:1], GROUPS[:1]), [1.0])


# Over time. The mask has a hole, a row of one and an empty row.

MASK = torch.tensor([[1, 0, 1, 1], [1, 0, 0, 0], [0, 0, 0, 0]]).bool()
PACKED = torch.tensor([2, 0, 0, 1, 0, 0, 2, 2])  # row 0 at 1, 2, 4, 5; row 1 at 3; row 2 elsewhere
SLOTS = torch.tensor([[1, 2, 4, 5], [3, 0, 0, 0], [0, 6, 7, 0]])


def packed(x):
    """The padded [3, 4] as packed [8]; slots that no action uses hold nan."""
    flat = torch.full((8,), torch.nan, dtype=D)
    for row, column in MASK.nonzero():
        flat[SLOTS[row, column]] = x[row, column]
    return flat


def packed_mask():
    flat = torch.zeros(8, dtype=torch.bool)
    flat[SLOTS[MASK]] = True
    return flat


def check_both_layouts(fn, expected, *tokens):
    """fn(*tokens, mask, sequence_ids) equals expected [3, 4], padded and packed; 0 off the mask."""
    got = fn(*[torch.where(MASK, t, torch.nan) for t in tokens], MASK, None)
    close(got, expected)
    flat = fn(*map(packed, tokens), packed_mask(), PACKED)
    close(flat, torch.nan_to_num(packed(torch.as_tensor(expected, dtype=D))))


def test_whiten():
    x = torch.tensor([[1.0, 9.0, 3.0, 5.0], [7.0, 9.0, 9.0, 9.0], [9.0] * 4], dtype=D)
    # Actions 1, 3, 5, 7: mean 4, variance (9 + 1 + 1 + 9) / 3.
    scale = (20 / 3 + 1e-8) ** -0.5
    close(advantages.whiten(x, MASK)[MASK], torch.tensor([-3.0, -1, 1, 3], dtype=D) * scale)
    close(advantages.whiten(x, MASK, eps=1.0)[0, 0], -3 * (20 / 3 + 1) ** -0.5)


def test_whitening_one_action_is_refused():
    with pytest.raises(ValueError, match="at least 2 actions, got 1"):
        advantages.whiten(torch.ones(2, 2), torch.tensor([[1, 0], [0, 0]]))
    close(advantages.whiten(torch.tensor([1.0, 1.0]), torch.ones(2)), [0.0, 0.0])


def test_reinforce_plus_plus_whitens_the_returns_of_the_batch():
    rewards = torch.tensor([[0.0, 0, 0, 2.0], [4.0, 0, 0, 0], [0.0] * 4], dtype=D)
    # γ = ½: returns ½, 1, 2 and 4; mean 15/8, squared deviations sum to 1 + 4 + 16 + ¼ − 4 (15/8)².
    returns = torch.tensor([0.5, 1, 2, 4], dtype=D)
    variance = (returns.square().sum() - 4 * (15 / 8) ** 2) / 3
    expected = torch.zeros(3, 4, dtype=D)
    expected[MASK] = (returns - 15 / 8) / (variance + 1e-8).sqrt()
    check_both_layouts(
        lambda r, m, ids: advantages.reinforce_plus_plus(r, m, gamma=0.5, sequence_ids=ids),
        expected,
        rewards,
    )


def test_reinforce_plus_plus_default_does_not_discount():
    rewards = torch.tensor([[0.0, 0, 0, 2.0], [4.0, 0, 0, 0], [0.0] * 4], dtype=D)
    got = advantages.reinforce_plus_plus(rewards, MASK)
    scale = (3 * 0.25 + 2.25) / 3  # returns 2, 2, 2, 4
    close(got[1, 0], 1.5 / (scale + 1e-8) ** 0.5)


def test_reinforce_plus_plus_baseline_counts_a_response_once_per_action():
    rewards = torch.tensor([1.0, 3.0], dtype=D)
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]]).bool()
    # Centred −1, −1, −1, 1: mean −½, variance (3 ¼ + 9/4) / 3 = 1.
    got = advantages.reinforce_plus_plus_baseline(rewards, torch.zeros(2), mask)
    close(got, [[-0.5] * 3, [1.5, 0, 0]], atol=1e-7)
    ids = torch.tensor([0, 0, 1, 0])
    flat = advantages.reinforce_plus_plus_baseline(
        rewards, torch.zeros(2), torch.ones(4), sequence_ids=ids
    )
    close(flat, [-0.5, -0.5, 1.5, -0.5], atol=1e-7)


def gae_oracle(reward, value, gamma, lam, bootstrap):
    """One sequence of actions, as a double sum: A_t = Σ_l (γλ)^l δ_(t+l)."""
    following = [*value[1:], bootstrap]
    delta = [r + gamma * n - v for r, n, v in zip(reward, following, value, strict=True)]
    return [
        sum((gamma * lam) ** (k - t) * delta[k] for k in range(t, len(delta)))
        for t in range(len(delta))
    ]


@pytest.mark.parametrize("bootstrap", [None, [0.7, -0.3, 5.0]])
def test_gae_equals_the_sum_of_discounted_errors(bootstrap):
    rewards = torch.tensor([[1.0, 99, 2.0, 4.0], [3.0, 0, 0, 0], [0.0] * 4], dtype=D)
    values = torch.tensor([[0.5, 99, 1.5, -1.0], [2.0, 0, 0, 0], [0.0] * 4], dtype=D)
    after = [0.0] * 3 if bootstrap is None else bootstrap
    first = gae_oracle([1.0, 2.0, 4.0], [0.5, 1.5, -1.0], 0.9, 0.8, after[0])
    second = gae_oracle([3.0], [2.0], 0.9, 0.8, after[1])
    expected = torch.zeros(3, 4, dtype=D)
    expected[MASK] = torch.tensor([*first, *second], dtype=D)
    boot = None if bootstrap is None else torch.tensor(bootstrap, dtype=D)

    def run(r, v, m, ids):
        return advantages.gae(r, v, m, gamma=0.9, lam=0.8, bootstrap=boot, sequence_ids=ids)

    check_both_layouts(lambda *a: run(*a)[0], expected, rewards, values)
    returns = torch.where(MASK, expected + values, 0.0)
    check_both_layouts(lambda *a: run(*a)[1], returns, rewards, values)


def test_gae_with_lambda_and_gamma_one_is_return_minus_value():
    rewards = torch.tensor([[0.0, 0.0, 3.0]], dtype=D)
    values = torch.tensor([[1.0, 5.0, 2.0]], dtype=D)
    adv, returns = advantages.gae(rewards, values, torch.ones(1, 3))
    close(adv, [[2, -2, 1]])
    close(returns, [[3, 3, 3]])


def test_estimators_of_an_empty_pack_are_empty():
    nothing, ids = torch.zeros(0, dtype=D), torch.zeros(0, dtype=torch.long)
    assert advantages.gae(nothing, nothing, nothing, sequence_ids=ids)[0].tolist() == []
    assert advantages.vine(nothing, nothing, nothing, sequence_ids=ids).tolist() == []
    turns = (nothing, nothing, nothing)
    assert advantages.turn_mean(*turns, ids, sequence_ids=ids).tolist() == []
    assert advantages.turn_gae(*turns, nothing, sequence_ids=ids)[0].tolist() == []
    assert on_last_action(nothing, nothing, ids).tolist() == []


def test_estimators_of_an_empty_batch_are_empty():
    nothing = torch.zeros(2, 3, dtype=D)
    for got in (
        *advantages.gae(nothing, nothing, nothing),
        advantages.vine(nothing, nothing, nothing),
        advantages.turn_mean(nothing, nothing, nothing, torch.zeros(2, dtype=torch.long)),
        *advantages.turn_gae(nothing, nothing, nothing, nothing),
        on_last_action(torch.ones(2, dtype=D), nothing),
    ):
        close(got, nothing)


def test_vine_writes_the_gain_of_a_step_on_its_actions():
    # Response 1 has steps a = slots 0, 2 (slot 1 is the system's) and b = slot 3. With V(a) = 0.5,
    # V(b) = 0.75 and rewards 0, −0.1 | 1 (a KL in the reward; the last has the response's reward):
    # A(a) = −0.1 + 0.75 − 0.5 = 0.15, A(b) = 1 + 0 − 0.75 = 0.25. Response 2 is one step.
    nan = float("nan")
    rewards = torch.tensor([[0.0, 99, -0.1, 1.0], [3.0, 0, 0, 0], [0.0] * 4], dtype=D)
    values = torch.tensor([[0.5, nan, nan, 0.75], [2.0, nan, nan, 7], [nan] * 4], dtype=D)
    expected = torch.tensor([[0.15, 0, 0.15, 0.25], [1.0, 0, 0, 0], [0.0] * 4], dtype=D)

    def run(r, v, m, ids):
        return advantages.vine(r, v, m, sequence_ids=ids)

    check_both_layouts(run, expected, rewards, values)
    # Over a whole response the gains add up to the reward above the first value.
    steps = torch.tensor([0.15 + 0.25, 1.0], dtype=D)
    close(steps, [-0.1 + 1 - 0.5, 3 - 2])


def test_steps_of_equal_value_gain_exactly_nothing():
    values = torch.tensor([[0.1, 0.1, 0.1]], dtype=torch.float32)
    rewards = torch.tensor([[0.0, 0.0, 0.1]], dtype=torch.float32)
    assert advantages.vine(rewards, values, torch.ones(1, 3)).tolist() == [[0, 0, 0]]


def test_vine_needs_a_value_before_the_first_action():
    values = torch.tensor([[float("nan"), 1.0]])
    with pytest.raises(ValueError, match="before the first action"):
        advantages.vine(torch.ones(1, 2), values, torch.ones(1, 2))


# Over turns. Slots of five episodes: turns end at E, and . was inserted or is no token.
#   episode 0    a E . b E     group 7
#   episode 1    E . E . E     group 7
#   episode 2    . E . . .     group 7, not in the loss
#   episode 3    a a E . .     group 4
#   episode 4    E . . . .     group 4

ENDS = torch.tensor(
    [[0, 1, 0, 0, 1], [1, 0, 1, 0, 1], [0, 1, 0, 0, 0], [0, 0, 1, 0, 0], [1, 0, 0, 0, 0]]
).bool()
TURNS = torch.tensor(
    [[1, 1, 0, 1, 1], [1, 0, 1, 0, 1], [0, 0, 0, 0, 0], [1, 1, 1, 0, 0], [1, 0, 0, 0, 0]]
).bool()
EPISODE_GROUPS = torch.tensor([7, 7, 7, 4, 4])
NAN = float("nan")
TURN_REWARDS = torch.tensor(  # a KL in the reward lowers the first token by 0.25
    [[-0.25, 1.25, NAN, 0, 2], [0, NAN, 4, NAN, 2], [NAN, 6, NAN, NAN, NAN], [1, 1, 1, NAN, NAN],
     [1, NAN, NAN, NAN, NAN]],
    dtype=D,
)  # fmt: skip


def check_turns(fn, expected, *tokens):
    """fn(*tokens, ends, mask, sequence_ids) equals expected [5, 5], padded and packed by columns,
    so that the slots of an episode are not adjacent."""
    expected = torch.as_tensor(expected, dtype=D)
    close(fn(*tokens, ENDS, TURNS, None), expected)
    flat = [x.T.reshape(-1) for x in (*tokens, ENDS, TURNS)]
    close(fn(*flat, torch.arange(5).repeat(5)), expected.T.reshape(-1))


def test_turn_mean_compares_returns_at_the_same_turn():
    # γ = ½. Episode 0 has rewards 1, 2 and returns 2, 2; episode 1 has rewards 0, 4, 2 and returns
    # 2.5, 5, 2; episode 2 has the return 6. Group 7 has the mean 3.5 at turn 0, and 3.5 at turn 1,
    # which two episodes reached; only one reached turn 2. Group 4 has the returns 3 and 1.
    expected = [
        [-1.5, -1.5, 0, -1.5, -1.5], [-1, 0, 1.5, 0, 0], [0] * 5, [1, 1, 1, 0, 0], [-1, 0, 0, 0, 0]
    ]  # fmt: skip

    def run(rewards, ends, mask, ids):
        groups = EPISODE_GROUPS
        return advantages.turn_mean(rewards, ends, mask, groups, gamma=0.5, sequence_ids=ids)

    check_turns(run, expected, TURN_REWARDS)


def test_turn_mean_of_single_turns_is_the_group_mean():
    rewards = torch.tensor([[0.0, 1.0], [0.0, 3.0], [5.0, 99]], dtype=D)
    mask = torch.tensor([[1, 1], [1, 1], [1, 0]]).bool()
    ends = torch.tensor([[0, 1], [0, 1], [1, 0]]).bool()
    groups = torch.zeros(3, dtype=torch.long)
    got = advantages.turn_mean(rewards, ends, mask, groups, gamma=0.3)
    close(got, to_tokens(advantages.group_mean(t(1.0, 3.0, 5.0), groups), mask))


@pytest.mark.parametrize("reward", EQUAL)
def test_equal_turns_teach_exactly_nothing(reward):
    rewards = torch.full((16, 3), reward, dtype=torch.float32)
    full = torch.ones(16, 3).bool()
    got = advantages.turn_mean(rewards / 4, full, full, torch.zeros(16, dtype=torch.long))
    assert not got.any()


def test_turn_gae_is_gae_whose_actions_are_turns():
    # γ = λ = ½; values count only before the first token of a turn.
    # Episode 0: rewards 1, 2, values 0.5, 1: δ = 1 + ½ − ½ = 1 and 2 − 1 = 1; A = 1 + ¼, 1.
    # Episode 1: rewards 0, 4, 2, values 2, 0, 1: δ = 0 + 0 − 2, 4 + ½ − 0, 2 − 1;
    # A_2 = 1, A_1 = 4.5 + ¼ = 4.75, A_0 = −2 + 4.75 / 4. Episode 3: 3 − 7. Episode 4: 1 − 0.
    nan = NAN
    values = torch.tensor(
        [[0.5, 9, nan, 1, 9], [2, nan, 0, nan, 1], [nan] * 5, [7, 9, 9, nan, nan], [0, *[nan] * 4]],
        dtype=D,
    )
    first = -2 + 4.75 / 4
    expected = torch.tensor(
        [
            [1.25, 1.25, 0, 1, 1],
            [first, 0, 4.75, 0, 1],
            [0] * 5,
            [-4, -4, -4, 0, 0],
            [1, 0, 0, 0, 0],
        ],
        dtype=D,
    )
    before = torch.tensor([[0.5, 0.5, 0, 1, 1], [2, 0, 0, 0, 1], [0] * 5, [7, 7, 7, 0, 0], [0] * 5])

    def run(*given):
        *tokens, ids = given
        return advantages.turn_gae(*tokens, gamma=0.5, lam=0.5, sequence_ids=ids)

    check_turns(lambda *x: run(*x)[0], expected, TURN_REWARDS, values)
    check_turns(lambda *x: run(*x)[1], expected + before, TURN_REWARDS, values)


def test_turns_end_at_the_last_action():
    one = torch.ones(1, 2)
    with pytest.raises(ValueError, match="last action of each episode"):
        advantages.turn_mean(one, torch.tensor([[1, 0]]), one, torch.zeros(1))


# Between sequences and tokens


def test_to_tokens_and_last_action():
    per_sequence = torch.tensor([10.0, 20.0, 30.0], dtype=D)
    close(to_tokens(per_sequence, MASK), [[10, 0, 10, 10], [20, 0, 0, 0], [0] * 4])
    close(on_last_action(per_sequence, MASK), [[0, 0, 0, 10], [20, 0, 0, 0], [0] * 4])
    close(on_last_action(per_sequence, packed_mask(), PACKED), [0, 0, 0, 20, 0, 10, 0, 0])
    close(to_tokens(per_sequence, packed_mask(), PACKED), [0, 10, 0, 20, 10, 10, 0, 0])


def test_a_teacher_lifts_what_it_finds_likelier():
    """log 0.5 − log 0.25 = log 2 and log 0.1 − log 0.4 = −log 4; the slot outside gets 0."""
    own = torch.tensor([0.25, 0.4, 0.9]).log().requires_grad_()
    theirs = torch.tensor([0.5, 0.1, 0.3]).log()
    got = advantages.teacher(own, theirs, torch.tensor([True, True, False]))
    torch.testing.assert_close(got, torch.tensor([math.log(2), -math.log(4), 0.0]))
    assert not got.requires_grad


def test_the_teachers_advantage_descends_the_reverse_kl():
    """The policy gradient over all tokens, Σ_y π(y) A(y) ∇log π(y), is −∇KL(π ‖ π_teacher)."""
    logits = torch.tensor([0.3, -1.0, 0.8], dtype=torch.float64, requires_grad=True)
    theirs = torch.tensor([1.0, 0.2, -0.5], dtype=torch.float64).log_softmax(0)
    own = logits.log_softmax(0)
    (own.exp() * (own - theirs)).sum().backward(retain_graph=True)
    kl_gradient, logits.grad = logits.grad, None
    advantage = advantages.teacher(own, theirs, torch.ones(3, dtype=torch.bool))
    (own.exp().detach() * advantage * own).sum().backward()
    torch.testing.assert_close(logits.grad, -kl_gradient)


CENTERED = [-5 / 3, 0.5, 7 / 3, -0.5, -2 / 3]


# Estimators of 2025 and 2026


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


GROUP_ESTIMATORS = {
    "batch_std": advantages.batch_std,
    "pass_at_k": lambda r, g: advantages.pass_at_k(r, g, k=3),
    "max_at_k": lambda r, g: advantages.max_at_k(r, g, k=3),
    "maxrl": advantages.maxrl,
    "gdpo": lambda r, g: advantages.gdpo(r[:, None], g, weights=[1.0]),
    "opo": lambda r, g: advantages.opo(r, g, torch.arange(len(r))),
}


@pytest.mark.parametrize("name", GROUP_ESTIMATORS)
def test_equal_rewards_have_an_advantage_of_exactly_0(name):
    for reward in (0.7, 100.1, 1e-30, 1e30):
        rewards = torch.tensor([reward] * 16 + [0.0, 1.0])
        got = GROUP_ESTIMATORS[name](rewards, torch.tensor([4] * 16 + [9] * 2))
        assert got[:16].tolist() == [0.0] * 16
        assert got[17] > 0 or reward == 1e30  # of whose size the batch's std may be
    with pytest.raises(ValueError, match="at least 2 responses"):
        GROUP_ESTIMATORS[name](t(1, 2, 3), torch.tensor([0, 0, 1]))
