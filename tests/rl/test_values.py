import pytest

from burnish.rl.values import explained_variance, is_value_clipped
from tests.rl.literals import t


def test_explained_variance():
    """R = 0, 1, 2, 3: mean 1.5, Var = 1.25. V = 0, 1, 1, 2: R − V = 0, 0, 1, 1, Var = 0.25."""
    returns = t(0, 1, 2, 3)
    assert explained_variance(t(0, 1, 1, 2), returns).item() == pytest.approx(1 - 0.25 / 1.25)
    assert explained_variance(returns, returns) == 1
    assert explained_variance(t(9, 9, 9, 9), returns) == 0  # a constant, wherever it is
    assert explained_variance(-returns, returns) == 1 - 4  # R − V = 2 R
    assert explained_variance(returns, t(2, 2, 2, 2)) is None


def test_the_clip_is_in_force_where_it_makes_the_error_larger():
    """V_old = 0, clip 0.5. V = 1 towards R = 2 is held back (error 1.5 for 1); V = 1 away from
    R = −2 is not (the error 3 is worse than 2.5); V = 0.4 is inside."""
    found = is_value_clipped(t(1, 1, 0.4), t(0, 0, 0), t(2, -2, 2), clip=0.5)
    assert found.tolist() == [True, False, False]
