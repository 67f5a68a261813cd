"""A checksum of weights: 64 bits that depend on every byte and on its position.

    t_i = w_i + key_(i mod B)                                       w_i: the i-th 64-bit word
    s_b = Σ over block b of t_i · ⌊t_i / 2³²⌋                       B words are a block
    checksum = mix(mix(number of bytes) + hash(about) + Σ_b mix(s_b + b · golden))

All arithmetic is on 64-bit integers and wraps around, so the order of the sums does not matter and
every device computes the same checksum. The product makes all bits of the sum depend on a word's
high bits. (If words were only multiplied by keys, the highest bit of a word would affect the
highest bit of the sum alone, and swapping two words that differ in that bit could go unnoticed.)
The checksum detects torn, mixed-up and stale memory; it does not protect against an attacker. It
misses a change with a probability of about 2⁻³² at most.
"""

from __future__ import annotations

import hashlib
import warnings
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from burnish.randomness import GOLDEN, mix

if TYPE_CHECKING:
    from torch import Tensor

WORD = 8
"""Bytes per word."""
BLOCK = 1 << 15
"""Words per block."""
ON_CPU = 1 << 16
"""Words that a CPU thread processes at a time, few enough for its cache."""
ELSEWHERE = 1 << 23
"""Words that other devices process at a time; more than on a CPU, because each call costs more."""


def checksum(tensor: Tensor, about: str = "") -> int:
    """Compute the checksum of a tensor's bytes, in the order of its elements, on the tensor's
    device.

    The checksum also depends on the text ``about``, such as a name. Tensors with equal bytes have
    equal checksums, whatever their device, strides and dtype. A tensor that is not contiguous is
    copied first; the other temporary memory does not depend on the tensor's size.
    """
    import torch

    data = tensor.detach().reshape(-1).view(torch.uint8)
    if data.storage_offset() % WORD:  # words must be aligned
        data = data.clone()
    size, whole = len(data), len(data) // (WORD * BLOCK) * WORD * BLOCK
    sums, rest = _block_sums(data[:whole]), data[whole:]
    if len(rest):
        if len(rest) % WORD:  # the last word is filled with zeros
            rest = torch.cat([rest, rest.new_zeros(-len(rest) % WORD)])
        words = rest.view(torch.int64)
        sums.append(_products(words, *torch.empty_like(words.expand(2, -1))).sum()[None])
    return _combine(torch.cat(sums).cpu().numpy() if sums else np.zeros(0), size, about)


def checksum_of_bytes(data: Any, about: str = "") -> int:
    """Compute the checksum of ``data``, a bytes-like object such as a memoryview. It equals the
    `checksum` of a tensor with the same bytes and the same ``about``."""
    import torch

    flat = np.frombuffer(data, np.uint8)
    if flat.ctypes.data % WORD:
        flat = flat.copy()
    with warnings.catch_warnings():  # PyTorch warns about read-only memory; this only reads
        warnings.simplefilter("ignore", UserWarning)
        return checksum(torch.from_numpy(flat), about)


def _block_sums(data: Tensor) -> list[Tensor]:
    """Return the sums s_b of all blocks, as one or several tensors. The data must consist of whole
    blocks."""
    import torch

    if not len(data):
        return []
    blocks, on_cpu = data.view(torch.int64).view(-1, BLOCK), data.device.type == "cpu"
    rows = (ON_CPU * torch.get_num_threads() if on_cpu else ELSEWHERE) // BLOCK
    buffers = torch.empty_like(blocks[:rows].expand(2, -1, -1))
    parts = [blocks[first : first + rows] for first in range(0, len(blocks), rows)]
    return [_products(part, *buffers[:, : len(part)]).sum(dim=1) for part in parts]


def _products(words: Tensor, t: Tensor, high: Tensor) -> Tensor:
    """Compute t_i · ⌊t_i / 2³²⌋ of each word; write it to ``t`` and return it. ``high`` is a
    buffer."""
    import torch

    torch.add(words, _keys(str(words.device))[: words.shape[-1]], out=t)
    torch.bitwise_right_shift(t, 32, out=high)
    return t.mul_(high)


@lru_cache(maxsize=16)
def _keys(device: str) -> Tensor:
    """Return the keys: a fixed pseudo-random word for each position in a block."""
    import torch

    counted = np.arange(1, BLOCK + 1, dtype=np.uint64) * GOLDEN
    return torch.from_numpy(mix(counted).view(np.int64)).to(device)


def _combine(sums: Any, size: int, about: str) -> int:
    places = np.arange(1, len(sums) + 1, dtype=np.uint64) * GOLDEN
    total = np.add.reduce(mix(sums.astype(np.int64).view(np.uint64) + places), dtype=np.uint64)
    named = hashlib.blake2b(about.encode(), digest_size=8).digest()
    start = mix(np.asarray([size], np.uint64)) + np.frombuffer(named, "<u8")
    return int(mix(start + total)[0])
