"""The fast path against the plain one, and decoding attention against one row at a time."""

from __future__ import annotations

import pytest
import tiny
import torch

from burnish.engine import kernels
from burnish.model.attention import causal


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_flash_equals_plain(dtype: torch.dtype, atol: float) -> None:
    torch.manual_seed(0)
    q = torch.randn(5, 2, 3, 16).to(dtype)
    k, v = torch.randn(2, 5, 24, 2, 16).to(dtype).transpose(2, 3)
    beyond = torch.arange(24)[None] >= torch.tensor([1, 5, 23, 24, 16])[:, None]
    mask = torch.zeros(5, 24, dtype=dtype).masked_fill(beyond, -torch.inf)[:, None, None]
    for added in (mask, None):
        fast, plain = (
            kernels.flash_attention(q, k, v, added),
            kernels.plain_attention(q, k, v, added),
        )
        for got, want in zip(fast, plain, strict=True):
            torch.testing.assert_close(got.float(), want.float(), atol=atol, rtol=atol)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_packed_equals_plain(family: str, tied: bool) -> None:
    model = tiny.model(family=family, tied=tied).to(torch.bfloat16)
    packed = kernels.PackedTransformer(model)
    tokens, positions = torch.arange(20), torch.arange(20)
    with torch.no_grad():
        want = model(tokens, positions, causal([20]))
        got = packed(tokens, positions, causal([20]))
        torch.testing.assert_close(got, want, atol=0.1, rtol=0.05)
        logits, plain = packed.logits(want), model.logits(want)
    assert logits.shape == plain.shape
    torch.testing.assert_close(logits, plain, atol=0.1, rtol=0.05)


def test_an_fp32_head_stays_fp32() -> None:
    model = tiny.model(fp32_head=True).to(torch.bfloat16)
    hidden = torch.randn(3, 32, dtype=torch.bfloat16)
    logits = kernels.PackedTransformer(model).logits(hidden)
    assert logits.dtype is torch.float32
    torch.testing.assert_close(logits, model.logits(hidden))


def test_causal_attention_goes_on_from_a_position() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(9, 4, 8), torch.randn(9, 2, 8), torch.randn(9, 2, 8)
    whole = causal([9])(0, q, k, v)
    torch.testing.assert_close(kernels.causal_attention(q[6:], k, v, 6), whole[6:])
