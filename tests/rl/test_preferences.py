import math

import torch

from burnish.rl.preferences import bradley_terry


def test_bradley_terry():
    """−log σ(0) = log 2; −log σ(log 3) = log 4/3, with gradient −σ(−log 3) = −1/4."""
    chosen = torch.tensor([0.5, math.log(3), 800.0], requires_grad=True)
    got = bradley_terry(chosen, torch.tensor([0.5, 0.0, -800.0]))
    torch.testing.assert_close(got, torch.tensor([math.log(2), math.log(4 / 3), 0.0]))
    got.sum().backward()
    torch.testing.assert_close(chosen.grad, torch.tensor([-0.5, -0.25, 0.0]))
