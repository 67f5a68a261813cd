"""Packed attention equals attention under a dense mask, in values and gradients."""

from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from burnish.model import attention, kernels
from burnish.model.attention import (
    EfficientPackedAttention,
    FlashPackedAttention,
    PackedAttention,
    causal,
    packed,
)
from burnish.model.transformer import ModelConfig, Transformer
from burnish.rollout.packing import pack
from tests.conftest import make_group

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


def draw(n: int, heads: int, dtype: torch.dtype = torch.float64, width: int = 8) -> Tensor:
    return torch.randn(n, heads, width, dtype=torch.float64).to(dtype).requires_grad_()


WAYS = ["mask", "two calls", "row by row"]
"""How a block attends to prompt and own past: through one mask if it is short, by a call for each
if it is long, and by plain products on a device that has no kernel."""


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(kernels, "MASKED", 512 if request.param == "mask" else 2)
    monkeypatch.setattr(kernels, "SCORES", 100)
    monkeypatch.setattr(attention, "SHORT", 512 if request.param == "mask" else 0)
    if request.param == "row by row":
        monkeypatch.setattr(kernels, "forward", lambda q, k, v, seen: kernels.rowwise(q, k, v))
        monkeypatch.setattr(
            kernels, "backward", lambda *given, seen: kernels.rowwise_backward(*given)
        )
    return str(request.param)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("groups", PACKS.values(), ids=PACKS.keys())
def test_equals_dense_mask(groups: list[tuple[int, list[int]]], kv_heads: int, way: str) -> None:
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


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_gradients_by_differences(kv_heads: int, way: str) -> None:
    torch.manual_seed(0)
    offsets, is_prompt = layout([(2, [1, 3])])
    inputs = draw(6, 2), draw(6, kv_heads), draw(6, kv_heads)
    attend = PackedAttention(offsets, is_prompt)
    assert torch.autograd.gradcheck(lambda q, k, v: attend(0, q, k, v), inputs)


@pytest.mark.parametrize("groups", [[(40, [600, 530, 30])], [(700, [520]), (3, [513, 512])]])
def test_long_responses_equal_a_dense_mask(groups: list[tuple[int, list[int]]]) -> None:
    """Beyond the length up to which a mask is used, beside shorter ones in the same pack."""
    torch.manual_seed(0)
    offsets, is_prompt = layout(groups)
    n = int(offsets[-1])
    segment = torch.arange(len(is_prompt)).repeat_interleave(offsets.diff())
    prompt = torch.where(is_prompt, torch.arange(len(is_prompt)), 0).cummax(0).values
    same = (segment[:, None] == segment) | (prompt[segment][:, None] == segment)
    inputs = draw(n, 2), draw(n, 1), draw(n, 1)
    upstream = torch.randn(n, 2, 8, dtype=torch.float64)
    attend = PackedAttention(offsets, is_prompt)
    got, want = attend(0, *inputs), dense(*inputs, same.tril())
    torch.testing.assert_close(got, want, rtol=0, atol=1e-10)
    found = torch.autograd.grad(got, inputs, upstream)
    for g, w in zip(found, torch.autograd.grad(want, inputs, upstream), strict=True):
        torch.testing.assert_close(g, w, rtol=0, atol=1e-10)
    again = torch.autograd.grad(attend(0, *inputs), inputs, upstream)
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))


def kept_bytes(
    groups: list[tuple[int, list[int]]], dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> int:
    """Bytes that the backward pass of a policy keeps, each storage once."""
    config = ModelConfig(vocab_size=32, n_layers=3, d_model=16, n_heads=2, d_ff=16, n_kv_heads=1)
    model = Transformer(config).init_weights(0).to(device, dtype).learn()
    made = [
        make_group(i, [1] * p, [[2] * n for n in r], [0.0] * len(r))
        for i, (p, r) in enumerate(groups)
    ]
    found: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        found[storage.data_ptr()] = storage.nbytes()
        return tensor

    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        measured = model.score(pack(made).to(device))
    held = sum(size for pointer, size in found.items() if pointer not in weights)
    measured.logprobs.sum().backward()
    return held


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_grows_with_the_length(dtype: torch.dtype) -> None:
    """Twice the tokens keep twice the bytes; a mask of 4,096 × 4,160 would be 68 MB a layer."""
    short, long = (kept_bytes([(64, [n])], dtype) for n in (2048, 4096))
    assert 1.9 < long / short < 2.1


def test_memory_counts_a_prompt_once() -> None:
    """Eight responses of 8 tokens after 1,024: the prompt's keys and values are not kept for each
    of them, so that the pack keeps as much as one response of 64 tokens."""
    shared, alone = (kept_bytes([(1024, lengths)]) for lengths in ([8] * 8, [64]))
    assert shared < 1.1 * alone


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 1e-5), (torch.bfloat16, 5e-2)])
def test_other_precisions(dtype: torch.dtype, atol: float, way: str) -> None:
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
        context = flash._context.index[ends[i] : ends[i + 1]].tolist()
        for slot in range(start, stop):  # aligned to the ends: the last query sees all
            seen = context[: len(context) - (stop - 1 - slot)]
            assert seen == mask[slot].nonzero().squeeze(1).tolist()
    longest = offsets.diff().max().item(), max(b - a for a, b in pairwise(ends))
    assert flash._arguments[2:] == longest


ON_GPU = {
    "flash": (torch.bfloat16, 8, FlashPackedAttention, 5e-2),
    "efficient": (torch.float32, 8, EfficientPackedAttention, 1e-5),
    "efficient, of another width": (torch.float32, 6, EfficientPackedAttention, 1e-5),
    "efficient, 16 bits": (torch.float16, 6, EfficientPackedAttention, 1e-2),
    "row by row": (torch.float64, 8, PackedAttention, 1e-10),
}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="kernels of a GPU need one")
@pytest.mark.parametrize("kind", ON_GPU)
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("groups", PACKS.values(), ids=PACKS.keys())
def test_a_gpu_equals_dense_mask(
    groups: list[tuple[int, list[int]]], kv_heads: int, kind: str
) -> None:
    torch.manual_seed(0)
    dtype, width, wanted, atol = ON_GPU[kind]
    offsets, is_prompt = layout(groups)
    n = int(offsets[-1])
    low = [draw(n, h, dtype, width) for h in (4, kv_heads, kv_heads)]
    high = [x.detach().double().requires_grad_() for x in low]
    on_gpu = [x.detach().cuda().requires_grad_() for x in low]
    attend = packed(offsets.cuda(), is_prompt.cuda(), dtype, width)
    assert isinstance(attend, wanted)
    up = torch.randn(n, 4, width, dtype=torch.float64).to(dtype)
    got, want = attend(0, *on_gpu), dense(*high, dense_mask(offsets, is_prompt))
    torch.testing.assert_close(got.double().cpu(), want, rtol=0, atol=atol)
    found = torch.autograd.grad(got, on_gpu, up.cuda())
    for g, w in zip(found, torch.autograd.grad(want, high, up.double()), strict=True):
        torch.testing.assert_close(g.double().cpu(), w, rtol=atol, atol=atol)


@pytest.fixture
def deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in a run: gathers of repeated rows add up their gradients in a fixed order."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="kernels of a GPU need one")
@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("kind", ON_GPU)
@pytest.mark.parametrize("groups", PACKS.values(), ids=PACKS.keys())
def test_a_gpu_repeats_bit_for_bit(groups: list[tuple[int, list[int]]], kind: str) -> None:
    torch.manual_seed(0)
    dtype, width, _, _ = ON_GPU[kind]
    offsets, is_prompt = layout(groups)
    given = [draw(int(offsets[-1]), h, dtype, width).detach().cuda() for h in (4, 2, 2)]
    given = [x.requires_grad_() for x in given]
    attend = packed(offsets.cuda(), is_prompt.cuda(), dtype, width)
    up = torch.randn(given[0].shape, dtype=torch.float64).to(dtype).cuda()
    first, again = (torch.autograd.grad(attend(0, *given), given, up) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="kernels of a GPU need one")
def test_memory_of_a_gpu_grows_with_the_length() -> None:
    """In float32, peak memory of forward and backward pass beyond the weights."""
    peaks = []
    for n in (2048, 4096):
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        kept_bytes([(64, [n, 8])], device="cuda")
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert 1.5 < peaks[1] / peaks[0] < 2.1
