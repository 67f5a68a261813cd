"""The fast path against the plain one, and decoding attention against one row at a time."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from torch.nn import functional as F

from burnish.engine.native import cpu, cpu_kernels
from burnish.engine.native.cache import Cache, TokenRun
from burnish.engine.native.cpu import numbers
from burnish.engine.native.plain import causal_attention
from burnish.errors import EngineError
from burnish.model.attention import causal
from burnish.model.transformer import Rope, rotate, rotation

pytestmark = pytest.mark.skipif(tiny.DEVICE != "cpu", reason="the packed path is the CPU's")


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_flash_equals_plain(dtype: torch.dtype, atol: float) -> None:
    torch.manual_seed(0)
    q = torch.randn(5, 2, 3, 16).to(dtype)
    k, v = torch.randn(2, 5, 24, 2, 16).to(dtype).transpose(2, 3)
    beyond = torch.arange(24)[None] >= torch.tensor([1, 5, 23, 24, 16])[:, None]
    mask = torch.zeros(5, 24, dtype=dtype).masked_fill(beyond, -torch.inf)[:, None, None]
    for added in (mask, None):
        fast, plain = (
            cpu.flash_attention(q, k, v, added),
            tiny.plain_attention(q, k, v, added),
        )
        for got, want in zip(fast, plain, strict=True):
            torch.testing.assert_close(got.float(), want.float(), atol=atol, rtol=atol)


def test_causal_attention_goes_on_from_a_position() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(9, 4, 8), torch.randn(9, 2, 8), torch.randn(9, 2, 8)
    whole = causal([9])(0, q, k, v)
    torch.testing.assert_close(causal_attention(q[6:], k, v, 6), whole[6:])


def test_prompts_are_read_once_for_a_group_if_that_spares_enough(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However they are read, the responses are the same."""
    some = [
        tiny.request("short", 13, n=4, group=0, max_tokens=5),
        tiny.request("long", 41, n=2, group=1, max_tokens=5),
        tiny.request("alone", 41, n=1, group=2, seed=2, max_tokens=5),
    ]
    # Full pages of the prompts, times the samples that need not read them.
    of_short, of_long = 3 * (4 - 1), 10 * (2 - 1)
    unshared = tiny.finish(tiny.engine(), some)
    for pages, expected in [
        (of_short, {("short", 3), ("long", 10)}),
        (of_short + 1, {("long", 10)}),
        (of_long + 1, set()),
    ]:
        monkeypatch.setattr(cpu, "SHARED_NUMBERS", pages * 4 * 4 * tiny.WIDTH)
        shared = record_shared(monkeypatch)
        tiny.assert_same(tiny.finish(tiny.engine(), some), unshared)
        assert {(run.sequence.group.request.request_id, run.shared) for run in shared} == expected


def record_shared(monkeypatch: pytest.MonkeyPatch) -> list[TokenRun]:
    """The runs of each step that share pages, from now on."""
    shared, plain = [], cpu.share_prompts

    def recorded(runs: Any, cache: Any) -> None:
        plain(runs, cache)
        shared.extend(run for run in runs if run.shared)

    monkeypatch.setattr(cpu, "share_prompts", recorded)
    return shared


# Kernels are compiled anew for bfloat16, which takes a minute.
NARROW = pytest.param(torch.bfloat16, marks=pytest.mark.slow)
BOTH = pytest.mark.parametrize("dtype", [torch.float32, NARROW])


def ulps(dtype: torch.dtype) -> dict[str, float]:
    """Two units in the last place."""
    return {"rtol": 2 * torch.finfo(dtype).eps, "atol": 2e-7}


@BOTH
def test_norm_adds_and_normalises(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, more = torch.randn(2, 5, 48).to(dtype)
    weight, out, sums = torch.rand(48) + 0.5, torch.empty_like(x), x.clone()
    cpu_kernels.norm(numbers(sums), numbers(more), weight.numpy(), np.float32(1e-5), numbers(out))
    assert torch.equal(sums, x + more)
    want = F.rms_norm((x + more).float(), (48,), weight, 1e-5).to(dtype)
    torch.testing.assert_close(out, want, **ulps(dtype))


@BOTH
def test_gate(dtype: torch.dtype) -> None:
    both = torch.linspace(-100, 100, 2 * 7 * 30).view(7, 60).to(dtype)
    out = torch.empty(7, 30, dtype=dtype)
    cpu_kernels.gate(numbers(both), numbers(out))
    gate, up = both.chunk(2, -1)
    torch.testing.assert_close(out, F.silu(gate) * up, rtol=4 * torch.finfo(dtype).eps, atol=1e-30)


@BOTH
def test_turn_rotates_as_the_model_and_writes_the_pages(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    qkv = torch.randn(6, 4 + 2 + 2, 16).to(dtype)
    turn = rotation(Rope(), torch.arange(3, 9), 16, dtype)
    want, v = rotate(qkv[:, :6], turn), qkv[:, 6:].clone()
    pages, slots = torch.zeros(2, 20, 2 * 16, dtype=dtype), np.array([19, 0, 7, 3, 4, 11])
    keys, values = numbers(pages)
    cos, sin = (numbers(x.flatten(1)) for x in turn)
    cpu_kernels.turn(numbers(qkv.flatten(1)), cos, sin, slots, keys, values)
    torch.testing.assert_close(qkv[:, :6], want, **ulps(dtype))
    torch.testing.assert_close(pages[0, slots].view(6, 2, 16), qkv[:, 4:6], rtol=0, atol=0)
    assert torch.equal(pages[1, slots].view(6, 2, 16), v)


@BOTH
def test_decode_reads_pages_where_they_lie(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    length, size, width = np.array([13, 9, 8, 1]), 4, 8
    tables = [[5, 0, 9, 3], [2, 7, 4], [1, 6], [8]]
    qkv = torch.randn(4, 8 * width).to(dtype)
    pages = torch.randn(2, 10 * size, 2 * width).to(dtype)
    first = np.cumsum([0, *map(len, tables)])[:-1]
    for threads in (1, 2, 3):
        out, totals = torch.empty(4, 4 * width, dtype=dtype), torch.empty(4, 4)
        cpu_kernels.decode_kernel(width, 2, size)(
            numbers(qkv),
            *numbers(pages),
            np.concatenate(tables),
            first,
            length,
            numbers(out),
            totals.numpy(),
            np.float32(width**-0.5),
            threads,
        )
        for row, (table, n) in enumerate(zip(tables, length, strict=True)):
            slots = [page * size + i for page in table for i in range(size)][:n]
            k, v = pages[:, slots].view(2, 1, n, 2, width).transpose(2, 3)
            queries = qkv[row, : 4 * width].view(1, 2, 2, width)
            want, total = tiny.plain_attention(queries, k, v, None)
            torch.testing.assert_close(out[row], want.flatten(), **ulps(dtype) | {"atol": 1e-6})
            torch.testing.assert_close(totals[row], total.flatten(), rtol=1e-6, atol=1e-6)


@BOTH
def test_what_is_not_a_number_stays_so(dtype: torch.dtype) -> None:
    both = torch.tensor([[1.0, torch.nan, torch.inf, -torch.inf]] * 2).to(dtype)
    out = torch.empty(2, 2, dtype=dtype)
    cpu_kernels.gate(numbers(both), numbers(out))
    gate, up = both.chunk(2, -1)
    torch.testing.assert_close(out, F.silu(gate) * up, equal_nan=True)


def test_an_fp32_head_stays_fp32() -> None:
    model = tiny.model(fp32_head=True).to(torch.bfloat16)
    hidden = torch.randn(3, 32, dtype=torch.bfloat16)
    logits = cpu.Cpu(model, Cache(model, kv_bytes=0, size=4)).logits(hidden)
    assert logits.dtype is torch.float32
    torch.testing.assert_close(logits, model.logits(hidden))


TWICE = """
import hashlib
import numpy as np
from burnish.engine.native import cpu_kernels

draw = np.random.default_rng(0).standard_normal
some = [draw(size, np.float32) for size in ((3, 15 * 64), (80, 192), (80, 192), (3, 576), (3, 9))]
pages, first, length = np.arange(5), np.zeros(3, np.int64), np.array([1, 40, 77])
decode = cpu_kernels.decode_kernel(64, 3, 16)
decode(*some[:3], pages, first, length, *some[3:], np.float32(0.125), 1)
print(hashlib.sha256(some[3].tobytes() + some[4].tobytes()).hexdigest())
"""


@pytest.mark.slow
def test_a_kernel_just_compiled_gives_the_numbers_of_the_one_on_disk(tmp_path):
    there = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    first, again = (
        subprocess.run([sys.executable, "-c", TWICE], env=there, capture_output=True, check=True)
        for _ in range(2)
    )
    assert len(first.stdout) > 64
    assert first.stdout == again.stdout


def test_a_kernel_that_can_not_be_compiled_says_so():
    lost = cpu_kernels.rows_kernel("lost")(_doubled)
    with pytest.raises(EngineError, match=r"kernel lost can't be compiled: (?s:.*)KeyError.*lost"):
        lost(np.ones(3))


def _doubled(x):
    x *= 2
