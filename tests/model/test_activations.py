"""RMSNorm and SwiGLU by hand equal PyTorch's own, in values and gradients, and keep less."""

import pytest
import torch
from torch.nn import functional as F

from burnish.model import activations
from burnish.model.activations import RMSNorm, swiglu

EPS = 1e-5


def make(shape: tuple[int, ...], dtype: torch.dtype):
    """A norm whose weights differ, its input and the gradient of its output."""
    torch.manual_seed(0)
    norm = RMSNorm(shape[-1], EPS).to(dtype)
    with torch.no_grad():
        norm.weight.copy_(torch.rand(shape[-1]) + 0.5)
    x = (3 * torch.randn(shape) * torch.rand(shape[-1])).to(dtype).requires_grad_()
    return norm, x, torch.randn(shape).to(dtype)


def both(norm: RMSNorm, x: torch.Tensor, up: torch.Tensor):
    """(value, gradients of x and weight) by hand and by autograd through PyTorch's."""
    wrt = (x, norm.weight)
    theirs = F.rms_norm(x, norm.weight.shape, norm.weight, EPS)
    for y in (norm(x), theirs):
        yield y.detach(), *torch.autograd.grad(y, wrt, up)


@pytest.mark.parametrize("tile", [1, 33, 2**17])
@pytest.mark.parametrize("shape", [(7, 16), (5, 3, 8), (1, 16), (0, 16)], ids=str)
def test_norm_equals_pytorchs(shape: tuple[int, ...], tile: int, monkeypatch) -> None:
    monkeypatch.setattr(activations, "TILE", tile)
    for a, b in zip(*both(*make(shape, torch.float64)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_values_are_pytorchs_to_the_bit_whatever_the_precision(dtype: torch.dtype) -> None:
    (mine, *gradients), (theirs, *_) = both(*make((64, 576), dtype))
    assert torch.equal(mine, theirs)
    norm, x, up = make((64, 576), dtype)
    exact = norm.double(), x.detach().double().requires_grad_(), up.double()
    _, (_, *want) = both(*exact)
    for a, b in zip(gradients, want, strict=True):
        assert a.dtype == dtype
        scale = b.abs().max().item()
        torch.testing.assert_close(a.double(), b, rtol=torch.finfo(dtype).eps, atol=1e-6 * scale)


def test_values_do_not_depend_on_whether_gradients_are_wanted() -> None:
    norm, x, _ = make((9, 16), torch.bfloat16)
    with torch.no_grad():
        still = norm(x)
    assert torch.equal(still, norm(x))


def test_norm_keeps_its_input_alone_for_the_backward_pass() -> None:
    norm, x, _ = make((64, 576), torch.bfloat16)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        norm(x)
    known = (x.data_ptr(), norm.weight.data_ptr())
    assert sum(t.numel() for t in kept if t.data_ptr() not in known) == len(x)  # r


def plain(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [0, 1, 37])
def test_swiglu_equals_autograds(rows: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    gate_up = (4 * torch.randn(rows, 96)).to(dtype).requires_grad_()
    upstream = torch.randn(rows, 48).to(dtype)
    values = [function(gate_up) for function in (swiglu, plain)]
    gradients = [torch.autograd.grad(value, gate_up, upstream)[0] for value in values]
    assert torch.equal(*values)
    assert torch.equal(*gradients)


def test_swiglu_keeps_its_input_alone_for_the_backward_pass() -> None:
    gate_up = torch.randn(5, 8, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        swiglu(gate_up)
    assert [t.data_ptr() for t in kept] == [gate_up.data_ptr()]
