import math

import pytest
import torch

from burnish.rl import ratios
from tests.rl.literals import close, t, value_and_grad


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
    close(ratios.accepted(w, low=0.5, high=2.0), [0, 1, 1, 1, 0])


def test_a_product_of_weights_is_0_where_one_of_them_is():
    close(ratios.product([t(0.5, 2.0)]), [0.5, 2.0])
    weights = t(0.5, 2.0, 0.0, math.inf), t(3.0, 1.0, math.inf, 0.0), t(1.0, 0.0, 2.0, 1.0)
    close(ratios.product(weights), [1.5, 0, 0, 0])
