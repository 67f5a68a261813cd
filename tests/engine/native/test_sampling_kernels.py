"""The kernels that draw tokens on a GPU equal their plain version, and that equals the sampler.

They run on a GPU, or in Triton's interpreter (TRITON_INTERPRET=1).
"""

import os
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from burnish.engine.native import decoding, sampler
from burnish.engine.native.decoding import AHEAD, ENDS, Buffers, Rows

# The interpreter converts arrays of one element to numbers, and computes with infinite logits.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HAS_KERNELS = find_spec("triton") is not None and (
    torch.cuda.is_available() or bool(os.environ.get("TRITON_INTERPRET"))
)
SIZE, PAGES = 4, 8
FIELDS = len(decoding.EMPTY)


def state(count: int, vocab: int) -> Rows:
    """Rows with all kinds of limits; the last one is empty."""
    rows = Buffers(count, PAGES, torch.device(DEVICE)).rows(count)
    generator = torch.Generator().manual_seed(count)
    for field, empty in zip(rows, decoding.EMPTY, strict=False):
        field.fill_(empty)
    row = torch.arange(count)
    runs = row < count - 1
    rows.positions.copy_(row % 5 + 3)
    rows.slots.copy_(torch.where(runs, row, -1))
    rows.firsts.copy_(row * PAGES)
    rows.counts.copy_(torch.where(runs, row % 5 + 4, 0))
    rows.held.copy_(row % 3 - 1)
    rows.room.copy_(row % 4 + 1)
    rows.greedy.copy_(row % 7 == 2)
    rows.drawn.copy_(row % 2)
    rows.ends.copy_(torch.randint(-1, vocab, (count, ENDS), generator=generator))
    some = torch.randint(100, (count * PAGES,), generator=generator)
    rows.pages[: count * PAGES].copy_(some)
    rows.heat.copy_(torch.where(rows.greedy.cpu() > 0, 1.0, 0.5 + row % 3 / 2))
    rows.points.copy_(torch.rand(count, AHEAD, generator=generator, dtype=torch.float64))
    return rows


def logits_for(rows: int, vocab: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(vocab)
    return (3 * torch.randn(rows, vocab, generator=generator)).to(dtype).to(DEVICE)


def test_a_plain_draw_is_the_samplers() -> None:
    rows, logits = state(12, 700), logits_for(12, 700, torch.float32)
    rows.greedy.zero_()
    rows.held.clamp_(max=0)
    points = rows.points[torch.arange(12), rows.drawn.cpu()]
    limited = sampler.Limited({}, {})
    tokens, logprobs = sampler.sample_tokens(logits, points, rows.heat.clone(), limited)
    step = rows.drawn.clone()
    decoding.draw_plainly(logits, rows, SIZE)
    runs = torch.arange(11)
    assert torch.equal(rows.found[runs, step[:11].cpu()], tokens[:11])
    assert torch.equal(rows.logprobs[runs, step[:11].cpu()], logprobs[:11].double())


@pytest.mark.skipif(not HAS_KERNELS, reason="no GPU, and no Triton with TRITON_INTERPRET=1")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocab", [37, 256, 5000])
def test_kernels_draw_and_advance_as_the_plain_version(vocab: int, dtype: torch.dtype) -> None:
    from burnish.engine.native import sampling_kernels

    count = 24
    logits = logits_for(count, vocab, dtype)
    logits[1, 5], logits[4, 9] = torch.nan, torch.inf
    logits[6, : vocab // 2] = -torch.inf
    logits[7, 11] = 500  # the only likely token
    got, want = state(count, vocab), state(count, vocab)
    got.ends[7, 0] = want.ends[7, 0] = 11
    for _ in range(3):
        sampling_kernels.draw(logits, got, SIZE)
        decoding.draw_plainly(logits, want, SIZE)
    lost = torch.tensor([1, 4], device=DEVICE)
    for name, own, plain in zip(Rows._fields, got, want, strict=True):
        if name == "logprobs":
            torch.testing.assert_close(own, plain, rtol=0, atol=1e-5, equal_nan=True)
            assert own[lost].isnan().any(1).all()
        elif name in ("found", "tokens"):  # those of lost rows are arbitrary
            keep = torch.ones(count, dtype=torch.bool, device=DEVICE)
            keep[lost] = False
            assert torch.equal(own[keep], plain[keep]), name
        else:
            assert torch.equal(own, plain), name


@pytest.mark.skipif(not HAS_KERNELS, reason="no GPU, and no Triton with TRITON_INTERPRET=1")
def test_draws_follow_the_distribution() -> None:
    from burnish.engine.native import sampling_kernels

    count, vocab = (4096, 600) if DEVICE == "cuda" else (256, 300)
    rows = state(count, vocab)
    rows.counts.fill_(4)
    rows.room.fill_(100)
    rows.ends.fill_(-1)
    rows.greedy.zero_()
    rows.drawn.zero_()
    rows.heat.fill_(1)
    rows.points[:, 0].copy_((torch.arange(count) + 0.5) / count)
    logits = logits_for(1, vocab, torch.float32).expand(count, -1).contiguous()
    sampling_kernels.draw(logits, rows, SIZE)
    shares = torch.bincount(rows.found[:, 0], minlength=vocab) / count
    wanted = logits[0].softmax(0)
    assert (shares - wanted).abs().max() <= 1.01 / count
