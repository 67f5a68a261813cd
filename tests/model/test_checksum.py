"""The checksum of weights: every byte counts, and so does its place."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

import numpy as np
import pytest
import torch
from torch import Tensor

from burnish.model import checksum as module
from burnish.model.checksum import BLOCK, WORD, checksum, checksum_of_bytes

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8)
LENGTHS = (0, 1, 7, 8, 9, 1000, 8 * BLOCK - 1, 8 * BLOCK, 8 * BLOCK + 1, 24 * BLOCK + 5)
"""Bytes, around the ends of words and blocks."""


def random_bytes(size: int, seed: int = 0) -> Tensor:
    drawn = np.random.default_rng(seed).integers(0, 256, size, np.uint8)
    return torch.from_numpy(drawn)


def plain(data: bytes, about: str = "") -> int:
    """The definition, word by word, in Python's integers."""
    import hashlib

    def mix(x: int) -> int:
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & full
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & full
        return x ^ (x >> 31)

    full, golden = 2**64 - 1, 0x9E3779B97F4A7C15
    padded = data + bytes(-len(data) % WORD)
    words = [int.from_bytes(padded[i : i + WORD], "little") for i in range(0, len(padded), WORD)]
    total = 0
    for block, first in enumerate(range(0, len(words), BLOCK)):
        found = 0
        for place, word in enumerate(words[first : first + BLOCK]):
            t = (word + mix((place + 1) * golden & full)) & full
            high = t >> 32
            found += t * (high - 2**32 if high >= 2**31 else high)
        total += mix((found + (block + 1) * golden) & full)
    named = int.from_bytes(hashlib.blake2b(about.encode(), digest_size=8).digest(), "little")
    return mix((mix(len(data)) + named + total) & full)


@pytest.mark.parametrize("size", LENGTHS)
def test_it_is_what_its_definition_says(size: int) -> None:
    data = random_bytes(size)
    assert checksum(data, "a") == plain(data.numpy().tobytes(), "a")
    assert checksum_of_bytes(data.numpy().tobytes(), "a") == checksum(data, "a")
    assert 0 <= checksum(data) < 2**64


def changes(tensor: Tensor, rng: np.random.Generator) -> Iterator[tuple[str, Tensor]]:
    """Tensors of the same shape and type that differ, each with a name for the difference."""
    data = tensor.reshape(-1).view(torch.uint8)
    for place in rng.integers(0, len(data), 40):
        other = data.clone()
        other[place] ^= 1 << int(rng.integers(8))
        yield f"a bit of byte {place}", other
    for kind in (torch.int16, torch.int32, torch.int64):
        words = data.view(kind)
        for _ in range(40):
            i, j = rng.integers(0, len(words), 2)
            if words[i] != words[j]:
                other = words.clone()
                other[[i, j]] = other[[j, i]]
                yield f"words {i} and {j} as {kind}", other.view(torch.uint8)
    rows = tensor.clone()
    for i, j in rng.integers(0, len(rows), (40, 2)):
        if not torch.equal(rows[i], rows[j]):
            other = rows.clone()
            other[[i, j]] = other[[j, i]]
            yield f"rows {i} and {j}", other.reshape(-1).view(torch.uint8)
    half = len(data) // 2
    yield "halves", torch.cat([data[half:], data[:half]])
    yield "reversed words", data.view(torch.int64).flip(0).view(torch.uint8)
    yield "rotated by a word", data.view(torch.int64).roll(1).view(torch.uint8)
    yield "rotated by a byte", data.roll(1)
    yield "transposed", tensor.T.contiguous().reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(16, 24), (40, 8000)])
def test_any_change_of_bytes_or_places_changes_it(
    dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    """Normal weights, and weights of few values, of which most rows have equal sums."""
    rng, torch_rng = np.random.default_rng(1), torch.Generator().manual_seed(1)
    normal = (torch.randn(shape, generator=torch_rng) * 20).to(dtype)
    few = torch.randint(-1, 2, shape, generator=torch_rng).to(dtype)
    for tensor in (normal, few):
        own, seen = checksum(tensor), 0
        for what, other in changes(tensor, rng):
            if not torch.equal(other, tensor.reshape(-1).view(torch.uint8)):
                assert checksum(other) != own, what
                seen += 1
        assert seen > 100


def test_words_that_differ_in_one_bit_change_places_seen() -> None:
    """Also the highest bit, which a multiple of a word would leave where it is."""
    for bit in range(64):
        words = torch.zeros(300, dtype=torch.int64)
        flipped = -(2**63) if bit == 63 else 1 << bit
        sums = set()
        for place in range(0, len(words), 10):
            other = words.clone()
            other[place] = flipped
            sums.add(checksum(other))
        assert len(sums) == 30, bit


def test_whole_blocks_that_change_places_are_seen() -> None:
    blocks = random_bytes(4 * BLOCK * WORD).view(4, BLOCK * WORD)
    own = checksum(blocks)
    for i, j in combinations(range(4), 2):
        other = blocks.clone()
        other[[i, j]] = other[[j, i]]
        assert checksum(other) != own
    assert checksum(torch.zeros(8)) != checksum(torch.zeros(9))


def test_names_shapes_and_types_count_where_they_are_told() -> None:
    tensor = torch.zeros(6)
    told = ["w float32 (6,)", "v float32 (6,)", "w int32 (6,)", "w float32 (2, 3)", ""]
    assert len({checksum(tensor, about) for about in told}) == len(told)


def test_equal_bytes_have_equal_sums_in_any_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(300, 257)
    own = checksum(tensor)
    assert checksum(tensor.T.contiguous().T) == own  # other strides
    assert checksum(torch.cat([tensor, tensor])[300:]) == own  # inside of another
    assert checksum(tensor.view(torch.int32)) == own
    assert checksum(torch.cat([torch.ones(1), tensor.reshape(-1)])[1:]) == own
    assert checksum(tensor[:1].expand(3, -1)) == checksum(tensor[:1].repeat(3, 1))
    shifted = torch.empty(tensor.numel() * 4 + 4, dtype=torch.uint8)[4:]
    shifted.copy_(tensor.reshape(-1).view(torch.uint8))
    assert checksum_of_bytes(shifted.numpy()) == own  # at an odd address
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            assert checksum(tensor) == own
    finally:
        torch.set_num_threads(before)
    monkeypatch.setattr(module, "ON_CPU", BLOCK)
    assert checksum(tensor) == own


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU is here")
@pytest.mark.parametrize("size", LENGTHS)
def test_a_gpu_finds_the_same(size: int) -> None:
    data = random_bytes(size)
    assert checksum(data.cuda()) == checksum(data)
