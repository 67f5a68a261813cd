"""Packed attention equals attention under a dense mask, in values and gradients."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from burnish.model.attention import FlashPackedAttention, PackedAttention, causal, packed

PACKS = {
    "one group": [(5, [3, 4, 3])],
    "uneven responses": [(7, [1, 12, 2, 12, 9]), (1, [4])],
    "prompts of other lengths": [(6, [2, 2]), (3, [5, 1]), (6, [3])],
    "a prompt alone": [(4, []), (2, [3])],
    "an empty response": [(4, [0, 3])],
    "an empty prompt": [(0, [2, 3]), (2, [2])],
}


def layout(groups: list[tuple[int, list[int]]]) -> tuple[Tensor, Tensor]:
    lengths, is_prompt = [], []
    for prompt, responses in groups:
        lengths += [prompt, *responses]
        is_prompt += [True, *[False] * len(responses)]
    return torch.tensor([0, *lengths]).cumsum(0), torch.tensor(is_prompt)


def dense_mask(offsets: Tensor, is_prompt: Tensor) -> Tensor:
    """[N, N]: by the definition, slot by slot."""
    n = int(offsets[-1])
    segment = [int((offsets[1:] <= t).sum()) for t in range(n)]
    prompt_of = [int(is_prompt[: i + 1].nonzero()[-1]) for i in range(len(is_prompt))]
    mask = torch.zeros(n, n, dtype=torch.bool)
    for t in range(n):
        for s in range(t + 1):
            mask[t, s] = segment[s] in (segment[t], prompt_of[segment[t]])
    return mask


def dense(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    repeat = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
    weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v)


def draw(n: int, heads: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(n, heads, 8, dtype=torch.float64).to(dtype).requires_grad_()


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("groups", PACKS.values(), ids=PACKS.keys())
def test_equals_dense_mask(groups: list[tuple[int, list[int]]], kv_heads: int) -> None:
    torch.manual_seed(0)
    offsets, is_prompt = layout(groups)
    n = int(offsets[-1])
    inputs = draw(n, 4), draw(n, kv_heads), draw(n, kv_heads)
    upstream = torch.randn(n, 4, 8, dtype=torch.float64)
    got = PackedAttention(offsets, is_prompt)(0, *inputs)
    want = dense(*inputs, dense_mask(offsets, is_prompt))
    torch.testing.assert_close(got, want, rtol=0, atol=1e-10)
    for g, w in zip(
        torch.autograd.grad(got, inputs, upstream),
        torch.autograd.grad(want, inputs, upstream),
        strict=True,
    ):
        torch.testing.assert_close(g, w, rtol=0, atol=1e-10)


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 1e-5), (torch.bfloat16, 5e-2)])
def test_other_precisions(dtype: torch.dtype, atol: float) -> None:
    torch.manual_seed(0)
    offsets, is_prompt = layout(PACKS["uneven responses"])
    n = int(offsets[-1])
    low = draw(n, 4, dtype), draw(n, 2, dtype), draw(n, 2, dtype)
    high = [x.detach().double().requires_grad_() for x in low]
    got = PackedAttention(offsets, is_prompt)(0, *low)
    want = dense(*high, dense_mask(offsets, is_prompt))
    torch.testing.assert_close(got.double(), want, rtol=0, atol=atol)
    for g, w in zip(
        torch.autograd.grad(got.sum(), low), torch.autograd.grad(want.sum(), high), strict=True
    ):
        torch.testing.assert_close(g.double(), w, rtol=atol, atol=atol)


def test_causal_is_one_sequence_after_another() -> None:
    torch.manual_seed(0)
    lengths = [4, 1, 9, 4]
    inputs = draw(18, 4), draw(18, 2), draw(18, 2)
    got = causal(lengths)(0, *inputs)
    alone = [
        causal([n])(0, *parts)
        for n, *parts in zip(lengths, *(x.split(lengths) for x in inputs), strict=True)
    ]
    torch.testing.assert_close(got, torch.cat(alone), rtol=0, atol=1e-12)


def test_shared_prompt_equals_repeated_prompt() -> None:
    torch.manual_seed(0)
    prompt, responses = 5, [3, 6]
    offsets, is_prompt = layout([(prompt, responses)])
    q, k, v = draw(14, 4), draw(14, 2), draw(14, 2)
    shared = PackedAttention(offsets, is_prompt)(0, q, k, v)
    slots = [*range(5), 5, 6, 7, *range(5), *range(8, 14)]
    repeated = causal([8, 11])(0, q[slots], k[slots], v[slots])
    torch.testing.assert_close(shared[:8], repeated[:8], rtol=0, atol=1e-12)
    torch.testing.assert_close(shared[8:], repeated[13:], rtol=0, atol=1e-12)


@pytest.mark.parametrize("groups", PACKS.values(), ids=PACKS.keys())
def test_flash_reads_the_prompt_and_the_segment(groups: list[tuple[int, list[int]]]) -> None:
    offsets, is_prompt = layout(groups)
    flash = FlashPackedAttention(offsets, is_prompt)
    ends, mask = flash._arguments[1].tolist(), dense_mask(offsets, is_prompt)
    for i, (start, stop) in enumerate(
        zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)
    ):
        context = flash._context[ends[i] : ends[i + 1]].tolist()
        for slot in range(start, stop):  # aligned to the ends: the last query sees all
            seen = context[: len(context) - (stop - 1 - slot)]
            assert seen == mask[slot].nonzero().squeeze(1).tolist()
    longest = offsets.diff().max().item(), max(b - a for a, b in pairwise(ends))
    assert flash._arguments[2:] == longest


@pytest.mark.skipif(not torch.cuda.is_available(), reason="flash attention needs a GPU")
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("groups", PACKS.values(), ids=PACKS.keys())
def test_flash_equals_dense_mask(groups: list[tuple[int, list[int]]], kv_heads: int) -> None:
    torch.manual_seed(0)
    offsets, is_prompt = layout(groups)
    n = int(offsets[-1])
    low = [draw(n, h, torch.bfloat16) for h in (4, kv_heads, kv_heads)]
    high = [x.detach().double().requires_grad_() for x in low]
    on_gpu = [x.detach().cuda().requires_grad_() for x in low]
    attend = packed(offsets.cuda(), is_prompt.cuda(), torch.bfloat16, 8)
    assert isinstance(attend, FlashPackedAttention)
    got, want = attend(0, *on_gpu), dense(*high, dense_mask(offsets, is_prompt))
    torch.testing.assert_close(got.double().cpu(), want, rtol=0, atol=5e-2)
    grads = torch.autograd.grad(got.sum(), on_gpu), torch.autograd.grad(want.sum(), high)
    for g, w in zip(*grads, strict=True):
        torch.testing.assert_close(g.double().cpu(), w, rtol=5e-2, atol=5e-2)
