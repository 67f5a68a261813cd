"""Length penalties against hand-derived numbers."""

import numpy as np
import pytest

from burnish.graders.length import PENALTIES, GradedResponses
from burnish.recipe.length import AnyPenalty


def change(name, rewards, lengths, *, right=None, inserted=0, counted=True, **settings):
    """Rewards of 1 are right unless ``right`` says otherwise."""
    rewards = np.array(rewards, dtype=float)
    given = GradedResponses(
        rewards,
        rewards >= 1 if right is None else np.array(right),
        np.array(lengths, dtype=float),
        np.zeros_like(rewards) + inserted,
        np.full(rewards.shape, True) & counted,
    )
    return PENALTIES[name](given, limit=100, **settings).tolist()


def test_dapos_soft_penalty_falls_linearly_over_the_buffer():
    # Nothing up to 100 − 20 = 80 tokens; 85 is a quarter of the way, 95 three quarters.
    found = change("overlong", [1, 0, 1, 1, 0], [10, 80, 85, 95, 100], buffer=20, coefficient=1.0)
    assert found == pytest.approx([0, 0, -0.25, -0.75, -1])
    assert change("overlong", [1], [90], buffer=20, coefficient=0.5) == pytest.approx([-0.25])


def test_a_response_truncated_at_the_limit_pays_in_full_whatever_was_inserted():
    # 100 tokens in all, of which 15 were inserted: 85 sampled ones are the most there can be.
    settings = {"buffer": 20, "coefficient": 1.0}
    assert change("overlong", [0, 0], [85, 70], inserted=15, **settings) == pytest.approx(
        [-1, -0.25]
    )
    assert change("overlong", [0], [85], **settings) == pytest.approx([-0.25])


def test_statistics_leave_out_responses_that_do_not_count():
    # The last response is a greedy baseline: it pays by the statistics of the others.
    kept = np.array([True, True, True, False])
    found = change("among_correct", [1, 0, 1, 1], [10, 99, 30, 20], counted=kept, coefficient=0.2)
    assert found == pytest.approx([-0.2 * (1 - 0.7310585786), 0, -0.2 * 0.7310585786, -0.1])
    found = change("solve_rate", [1, 0, 0, 1], [10, 20, 40, 100], counted=kept, coefficient=0.3)
    assert found == pytest.approx([-0.01, -0.02, -0.04, -0.1])  # 0.3 × 1/3 × |y| / 100


def test_the_task_says_which_responses_are_right():
    right = [True, False]  # rewards of a reward model say nothing
    assert change("among_correct", [0.2, 3.0], [5, 5], right=right, coefficient=0.2) == [-0.1, 0]
    found = change("solve_rate", [0.2, 3.0], [10, 10], right=right, coefficient=0.2)
    assert found == pytest.approx([-0.01, -0.01])


def test_l1_exact_charges_each_token_away_from_the_target():
    # 0.01 × |50 − 40|, |50 − 50|, |50 − 90|; right and wrong answers alike.
    found = change("target", [1, 1, 0], [40, 50, 90], tokens=50, coefficient=0.01)
    assert found == pytest.approx([-0.1, 0, -0.4])


def test_l1_max_scales_the_reward_by_the_room_that_is_left():
    # The factor 0.01 (50 − |y|) + 0.5, clipped: 10 -> 0.9, 50 -> 0.5, 100 -> 0, 0 -> 1.
    found = change(
        "at_most", [1, 1, 1, 1, 0], [10, 50, 100, 0, 10], tokens=50, coefficient=0.01, delta=0.5
    )
    assert found == pytest.approx([-0.1, -0.5, -1, 0, 0])
    # A factor would make a bad reward better; it stays.
    held = change("at_most", [-1.0], [100], tokens=50, coefficient=0.01, delta=0.5)
    assert held == pytest.approx([0])


def test_among_correct_answers_the_shorter_lose_less():
    # Right answers have 10 and 30 tokens: mean 20, std 10, so −1 and +1; σ(1) = 0.7310585786.
    found = change("among_correct", [1, 0, 1], [10, 99, 30], coefficient=0.2)
    assert found == pytest.approx([-0.2 * (1 - 0.7310585786), 0, -0.2 * 0.7310585786])
    # A single right answer, or equal lengths: σ(0) = 1/2.
    assert change("among_correct", [0, 1], [7, 50], coefficient=0.2) == pytest.approx([0, -0.1])
    assert change("among_correct", [0, 0.5], [7, 50], coefficient=0.2) == [0, 0]


def test_tokens_cost_more_where_the_group_is_often_right():
    # Three of four right: 0.2 × 0.75 × |y| / 100; none right: max(0, 1/4) in the place of 0.75.
    found = change("solve_rate", [1, 1, 0, 1], [10, 20, 40, 100], coefficient=0.2)
    assert found == pytest.approx([-0.015, -0.03, -0.06, -0.15])
    none = change("solve_rate", [0, 0, 0, 0], [10, 20, 40, 100], coefficient=0.2)
    assert none == pytest.approx([-0.005, -0.01, -0.02, -0.05])


def test_every_penalty_of_a_recipe_has_its_function():
    sections = AnyPenalty.__origin__.__args__
    assert {section.model_fields["name"].default for section in sections} == {"none", *PENALTIES}
