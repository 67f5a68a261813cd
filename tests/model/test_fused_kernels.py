"""The fused kernels equal the plain versions beside them, in values and gradients.

They run on a GPU, or in Triton's interpreter (TRITON_INTERPRET=1).
"""

import os
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

if not find_spec("triton") or not (torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET")):
    pytest.skip("no GPU, and no Triton with TRITON_INTERPRET=1", allow_module_level=True)

from burnish.model import (
    activations,
    chained,
    elementwise_kernels,
    gather,
    logprobs,
    softmax_kernels,
    transformer,
)
from burnish.model.logprobs import token_logprobs
from burnish.model.transformer import ModelConfig, Rope, Transformer

# The interpreter converts arrays of one element to numbers.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CLOSE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
DTYPES = pytest.mark.parametrize("dtype", list(CLOSE), ids=str)


@pytest.fixture(autouse=True)
def fused(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (activations, chained, gather, logprobs, transformer):
        monkeypatch.setattr(module, "fuses", lambda x: x.dtype.itemsize <= 4)


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, device=DEVICE, dtype=torch.float64).to(dtype)


def assert_near(got: Tensor, want: Tensor) -> None:
    """Relative to the largest element, as bf16 rounds."""
    close = CLOSE[got.dtype]
    scale = max(1.0, want.abs().max().item()) if want.numel() else 1.0
    torch.testing.assert_close(got.double(), want.double(), rtol=0, atol=close * scale)


@DTYPES
@pytest.mark.parametrize(("rows", "width"), [(3, 48), (2, 1500), (0, 8)])
def test_swiglu(rows: int, width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    gate_up, up = draw(rows, 2 * width, dtype=dtype) * 4, draw(rows, width, dtype=dtype)
    exact = gate_up.double().requires_grad_()
    gate, other = exact.chunk(2, dim=-1)
    want = F.silu(gate) * other
    assert_near(activations.swiglu(gate_up), want)
    (gradient,) = torch.autograd.grad(want, exact, up.double())
    mine = gate_up.clone().requires_grad_()
    assert_near(torch.autograd.grad(activations.swiglu(mine), mine, up)[0], gradient)


@DTYPES
@pytest.mark.parametrize(("heads", "width"), [((9, 3, 3), 64), ((2, 2, 2), 6), ((4, 1, 1), 16)])
def test_rotation(heads: tuple[int, ...], width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    qkv = draw(5, sum(heads), width, dtype=dtype)
    positions = torch.tensor([0, 3, 1, 100, 7], device=DEVICE)
    turn = transformer.rotation(Rope(), positions, width, dtype)
    exact = qkv.double().requires_grad_()
    wide = turn[0].double(), turn[1].double()
    q, k, v = exact.split(list(heads), dim=1)
    want = [transformer.rotate(q, wide), transformer.rotate(k, wide), v]
    mine = qkv.clone().requires_grad_()
    got = transformer.rotate_qkv(mine, turn, list(heads))
    ups = [draw(*x.shape, dtype=dtype) for x in got]
    for a, b in zip(got, want, strict=True):
        assert_near(a, b)
    (gradient,) = torch.autograd.grad(want, exact, [up.double() for up in ups])
    assert_near(torch.autograd.grad(got, mine, ups)[0], gradient)


@DTYPES
@pytest.mark.parametrize("index", [[0, 1, 2, 3, 4], [4, 1, 1, 0, 4, 4], [], [2] * 9])
def test_gathered_rows(index: list[int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, places = draw(5, 3, 8, dtype=dtype), torch.tensor(index, device=DEVICE, dtype=torch.long)
    up = draw(len(index), 3, 8, dtype=dtype)
    mine = x.clone().requires_grad_()
    got = gather.RowGather(places, 5)(mine)
    assert torch.equal(got, x[places])
    want = torch.zeros_like(x, dtype=torch.float64).index_add_(0, places, up.double())
    assert_near(torch.autograd.grad(got, mine, up)[0], want)


@DTYPES
@pytest.mark.parametrize("has_entropy", [True, False])
@pytest.mark.parametrize("size", [37, 300])
def test_log_probabilities(
    size: int, has_entropy: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(softmax_kernels, "READ", 64)
    monkeypatch.setattr(softmax_kernels, "WRITE", 64)
    for chunk in ("CHUNK", "GPU_CHUNK"):
        monkeypatch.setattr(logprobs, chunk, 4)
    torch.manual_seed(0)
    config = ModelConfig(vocab_size=size, n_layers=1, d_model=16, n_heads=2, d_ff=16)
    model = Transformer(config).init_weights(0).to(DEVICE)
    with torch.no_grad():
        model.embed.weight.mul_(50)
    model.to(dtype)
    n = 7
    hidden, tokens = draw(n, 16, dtype=dtype), torch.randint(size, (n,), device=DEVICE)
    slots, heat = torch.arange(n, device=DEVICE), torch.rand(n, device=DEVICE) + 0.5
    mine = hidden.clone().requires_grad_()
    got = token_logprobs(model, mine, tokens, slots, slots, heat)
    # The oracle has logits of the same precision, which both round alike.
    weight = model.embed.weight.detach()
    logits = (hidden @ weight.T).double().requires_grad_()
    logp = (logits / heat[:, None].double()).log_softmax(-1)
    want = logp[slots, tokens], -(logp.exp() * logp).sum(-1)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=2e-5)
    count = 1 + has_entropy
    ups = [draw(n) for _ in range(count)]
    (to_logits,) = torch.autograd.grad(want[:count], logits, [up.double() for up in ups])
    expected = to_logits @ weight.double(), to_logits.T @ hidden.double()
    found = torch.autograd.grad(got[:count], (mine, model.embed.weight), ups)
    for a, b in zip(found, expected, strict=True):
        assert_near(a, b)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_logits_that_overflow_are_not_lost() -> None:
    logits = draw(4, 100)
    logits[1, 7], logits[2, 3], logits[3, 5] = torch.nan, torch.inf, -torch.inf
    out = tuple(draw(4) for _ in range(4))
    ones = torch.ones(4, device=DEVICE)
    softmax_kernels.moments(logits, ones, torch.zeros(4, device=DEVICE).long(), out)
    total = out[0] + out[1].log()
    assert total.isfinite().tolist() == [True, False, False, True]
    assert out[2].isfinite().tolist() == [True, False, False, True]


def test_rows_are_added_in_order() -> None:
    x = draw(6, 5000)
    order = torch.tensor([5, 0, 3], device=DEVICE)
    got = elementwise_kernels.add_rows(x, order, torch.tensor([0, 2, 2, 3], device=DEVICE))
    assert torch.equal(got, torch.stack([x[5] + x[0], torch.zeros_like(x[0]), x[3]]))
