"""The kernels of a decoding step's layers equal the operations of the model.

They run on a GPU, or in Triton's interpreter (TRITON_INTERPRET=1).
"""

import os
from importlib.util import find_spec

import pytest
import tiny
import torch
from replay import Interpreted, ahead, one_by_one
from torch.nn import functional as F

if not find_spec("triton") or not (torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET")):
    pytest.skip("no GPU, and no Triton with TRITON_INTERPRET=1", allow_module_level=True)

from burnish.engine.native import layer_kernels
from burnish.model.activations import RMSNorm, swiglu
from burnish.model.transformer import Rope, rotate, rotation

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TYPES = [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)]
# The interpreter converts arrays of one element to numbers, and subtracts infinite maxima.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]


def random(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (scale * torch.randn(shape, generator=generator)).to(DEVICE, dtype)


@pytest.mark.parametrize(("dtype", "atol"), TYPES, ids=str)
@pytest.mark.parametrize("width", [48, 576, 3000])
@pytest.mark.parametrize("adds", [False, True])
def test_a_residual_connection_and_its_norm(
    adds: bool, width: int, dtype: torch.dtype, atol: float
) -> None:
    x, change = random(5, width, dtype=dtype), random(1, 5, width, dtype=dtype)[0]
    norm = RMSNorm(width, 1e-5).to(DEVICE, dtype)
    norm.weight.data = random(width, dtype=dtype)
    summed = x + change if adds else x.clone()
    got = layer_kernels.add_norm(x, change if adds else None, norm.weight, 1e-5)
    if DEVICE == "cuda" or dtype == torch.float32:  # the interpreter truncates to bf16
        assert torch.equal(x, summed)
    torch.testing.assert_close(got, norm(summed), rtol=atol, atol=atol)


@pytest.mark.parametrize(("dtype", "atol"), TYPES, ids=str)
@pytest.mark.parametrize(("queries", "keys", "width"), [(9, 3, 64), (4, 4, 16), (5, 1, 24)])
@pytest.mark.parametrize("normed", [False, True])
def test_heads_are_rotated_and_placed(
    normed: bool, queries: int, keys: int, width: int, dtype: torch.dtype, atol: float
) -> None:
    rows, most = 4, 50
    qkv = random(rows, queries + 2 * keys, width, dtype=dtype)
    cos, sin = rotation(Rope(), torch.arange(most, device=DEVICE), width, dtype)
    positions = torch.tensor([3, 49, 0, 17], device=DEVICE)
    slots = torch.tensor([8, 2, -1, 5], device=DEVICE)
    pools = torch.full((2, 10, keys, width), 7.0, device=DEVICE, dtype=dtype)
    q, k, v = qkv.split([queries, keys, keys], 1)
    norms = None
    if normed:
        norms = random(width, dtype=dtype), random(1, width, dtype=dtype)[0], 1e-5
        q, k = (F.rms_norm(x, (width,), w, 1e-5) for x, w in zip((q, k), norms, strict=False))
    turn = rotation(Rope(), positions, width, dtype)
    turned = cos.squeeze(1), sin.squeeze(1)
    want = rotate(q, turn), rotate(k, turn), v.clone()
    got = layer_kernels.place_heads(qkv, turned, norms, *pools, positions, slots)
    own = qkv.split([queries, keys, keys], 1)
    for found, wanted in zip((got, *own[1:]), want, strict=True):
        torch.testing.assert_close(found, wanted, rtol=atol, atol=atol)
    real = slots >= 0
    assert torch.equal(pools[0, slots[real]], own[1][real])
    assert torch.equal(pools[1, slots[real]], v[real])
    untouched = [slot for slot in range(10) if slot not in slots.tolist()]
    assert bool((pools[:, untouched] == 7).all())


@pytest.mark.parametrize(("dtype", "atol"), TYPES, ids=str)
@pytest.mark.parametrize(("count", "size"), [(7, 40), (130, 576), (33, 2304)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_products_of_a_single_row(
    has_bias: bool, count: int, size: int, dtype: torch.dtype, atol: float
) -> None:
    x, weight = random(1, size, dtype=dtype), random(count, size, dtype=dtype, scale=size**-0.5)
    bias = random(count, dtype=dtype) if has_bias else None
    want = F.linear(*(t.double() for t in (x, weight)), None if bias is None else bias.double())
    got = layer_kernels.multiply_single(x, weight, bias)
    torch.testing.assert_close(got.double(), want, rtol=atol, atol=atol)


@pytest.mark.parametrize(("dtype", "atol"), TYPES, ids=str)
@pytest.mark.parametrize(("count", "size"), [(6, 40), (130, 2304)])
def test_a_gated_product_of_a_single_row(
    count: int, size: int, dtype: torch.dtype, atol: float
) -> None:
    x, weight = random(1, size, dtype=dtype), random(2 * count, size, dtype=dtype, scale=size**-0.5)
    want = swiglu(F.linear(x, weight))
    got = layer_kernels.gate_single(x, weight)
    torch.testing.assert_close(got, want, rtol=atol, atol=atol)


@pytest.mark.skipif(DEVICE == "cuda", reason="test_cuda runs the kernels")
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_an_engine_with_these_kernels_samples_the_same_tokens(family: str) -> None:
    """Groups that share pages, rows of different lengths, and a row alone at the end."""
    own = tiny.model(family=family, d_model=64)
    for name, parameter in own.named_parameters():
        if name.endswith("bias") or "norm" in name:
            parameter.data += 0.3 * torch.randn(parameter.shape)
    given = [
        tiny.request("a", 9, 2, max_tokens=3),
        tiny.request("b", 5, max_tokens=6, group=1, stop_ids=(7,), temperature=0.6),
    ]
    engine, steps = ahead(Interpreted, own=own, tokens=1024)
    tiny.assert_same(tiny.finish(one_by_one(own=own), given), tiny.finish(engine, given))
    assert (1, False) in engine._backend._bodies
    assert any(shares for _, shares in engine._backend._bodies)
    assert max(steps) > 1
