"""16-bit products in float32, where a processor has none: the same numbers, and no warning."""

from __future__ import annotations

import pytest
import torch

from burnish.engine.native import cpu
from burnish.model import matmul

KINDS = [torch.bfloat16, torch.float16]


@pytest.fixture(params=KINDS, ids=str)
def narrow(request, monkeypatch):
    """A type of 16 bits that this processor is said not to multiply."""
    monkeypatch.setattr(
        matmul, "multiplies", lambda dtype, device: dtype.itemsize > 2 or device != "cpu"
    )
    monkeypatch.setattr(cpu, "multiplies", matmul.multiplies)
    return request.param


def drawn(*shape, dtype):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)


def test_float32_and_gpus_are_left_alone():
    assert matmul.multiplies(torch.float32, "cpu")
    assert matmul.multiplies(torch.float64, "cpu")
    assert matmul.multiplies(torch.bfloat16, "cuda")
    x = torch.ones(2, 2)
    assert matmul.widened(x)[0] is x


def test_a_linear_layer_is_float32s_rounded_and_so_are_its_gradients(narrow):
    x, weight = drawn(5, 7, dtype=narrow), drawn(3, 7, dtype=narrow)
    bias = drawn(3, dtype=narrow)
    given = [t.clone().requires_grad_() for t in (x, weight, bias)]
    exact = [t.double().requires_grad_() for t in (x, weight, bias)]
    out, wanted = matmul.linear(*given), torch.nn.functional.linear(*exact)
    assert out.dtype == narrow
    torch.testing.assert_close(out, wanted.to(narrow))
    out.sum().backward()
    wanted.sum().backward()
    for mine, theirs in zip(given, exact, strict=True):
        assert mine.grad.dtype == narrow
        torch.testing.assert_close(mine.grad, theirs.grad.to(narrow))


def test_a_product_is_float32s_rounded(narrow):
    a, b = drawn(5, 7, dtype=narrow), drawn(3, 7, dtype=narrow).T
    torch.testing.assert_close(matmul.product(a, b), (a.double() @ b.double()).to(narrow))


@pytest.mark.parametrize("heads", [2, 4])
def test_attention_is_that_of_float32(narrow, heads):
    q = drawn(1, 4, 5, 8, dtype=narrow)
    k = v = drawn(1, heads, 5, 8, dtype=narrow)
    wide = [x.float() for x in (q, k.repeat_interleave(4 // heads, 1))]
    wanted = torch.nn.functional.scaled_dot_product_attention(*wide, wide[1], is_causal=True)
    torch.testing.assert_close(matmul.attention(q, k, v, is_causal=True), wanted.to(narrow))


@pytest.mark.parametrize("rows", [1, 2, 7, 64, 65, 300])
@pytest.mark.parametrize("biased", [False, True])
def test_packed_weights_multiply_any_number_of_rows(rows, biased):
    x, weight = drawn(rows, 576, dtype=torch.float32), drawn(960, 576, dtype=torch.float32)
    bias = drawn(960, dtype=torch.float32) if biased else None
    wanted = torch.nn.functional.linear(
        x.double(), weight.double(), None if bias is None else bias.double()
    )
    layer = cpu.packed_linear(weight, bias)
    torch.testing.assert_close(layer(x).double(), wanted, rtol=1e-4, atol=1e-3)
    assert torch.equal(layer(x), layer(x.clone()))


def test_a_packed_weight_that_multiplies_wrongly_is_not_used(monkeypatch):
    weight = drawn(12, 8, dtype=torch.float32)
    monkeypatch.setattr(cpu, "_PACKED_WELL", {weight.shape: False})
    if hasattr(torch.ops.mkl, "_mkl_linear"):  # processors of x86 alone have it
        monkeypatch.setattr(torch.ops.mkl, "_mkl_linear", None)
    x = drawn(3, 8, dtype=torch.float32)
    wanted = torch.nn.functional.linear(x, weight)
    torch.testing.assert_close(cpu.packed_linear(weight, None)(x), wanted)


def test_the_engines_linear_layer_and_attention_are_float32s_rounded(narrow):
    x, weight, bias = drawn(5, 7, dtype=narrow), drawn(3, 7, dtype=narrow), drawn(3, dtype=narrow)
    out = cpu.packed_linear(weight, bias)(x)
    torch.testing.assert_close(out, matmul.linear(x, weight, bias))
    q, k = drawn(2, 2, 3, 8, dtype=narrow), drawn(2, 2, 16, 8, dtype=narrow)
    mask = torch.zeros(2, 1, 1, 16, dtype=narrow)
    mask[1, ..., 9:] = -torch.inf
    for some in (None, mask):
        out, total = cpu.flash_attention(q, k, k, some)
        scores = q.float() @ k.float().transpose(2, 3) / 8**0.5
        scores = scores if some is None else scores + some
        assert out.dtype == narrow
        torch.testing.assert_close(out, (scores.softmax(3) @ k.float()).to(narrow))
        torch.testing.assert_close(total, scores.logsumexp(3))
