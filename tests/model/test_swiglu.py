"""SwiGLU by hand equals autograd's to the bit, and keeps less."""

import pytest
import torch
from torch.nn import functional as F

from burnish.model.swiglu import swiglu


def plain(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [0, 1, 37])
def test_equals_autograds(rows: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    gate_up = (4 * torch.randn(rows, 96)).to(dtype).requires_grad_()
    upstream = torch.randn(rows, 48).to(dtype)
    values = [function(gate_up) for function in (swiglu, plain)]
    gradients = [torch.autograd.grad(value, gate_up, upstream)[0] for value in values]
    assert torch.equal(*values)
    assert torch.equal(*gradients)


def test_keeps_its_input_alone_for_the_backward_pass() -> None:
    gate_up = torch.randn(5, 8, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        swiglu(gate_up)
    assert [t.data_ptr() for t in kept] == [gate_up.data_ptr()]
