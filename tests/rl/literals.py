"""Literal numbers as tensors, and comparisons with them."""

import torch

D = torch.float64


def t(*values):
    return torch.tensor(values, dtype=D)


def close(got, expected, atol=1e-12):
    expected = torch.as_tensor(expected, dtype=got.dtype)
    torch.testing.assert_close(got, expected, rtol=0, atol=atol)


def value_and_grad(fn, x):
    x = x.clone().requires_grad_()
    y = fn(x)
    (grad,) = torch.autograd.grad(y.sum(), x)
    return y.detach(), grad
