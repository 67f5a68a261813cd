"""A checksum of weights: 64 bits that depend on every byte and on its place.

    t_i = w_i + key_(i mod B)                                       w_i: the i-th 64-bit word
    s_b = Σ over block b of t_i · ⌊t_i / 2³²⌋                       B words are a block
    checksum = mix(mix(number of bytes) + hash(about) + Σ_b mix(s_b + b · golden))

All arithmetic is on 64-bit integers and wraps around, so the order of the sums does not matter, and
every device finds the same checksum. The product lets a word's high bits act on all bits of the
sum: multiples of a word alone would leave its highest bit where it is, and two words that differ in
that bit could change places unseen. It guards against torn, mixed-up and stale memory, not against
an attacker. A change is missed with a probability of about 2⁻³² at most.
"""

from __future__ import annotations

import hashlib
import warnings
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from burnish.draws import GOLDEN, mix

if TYPE_CHECKING:
    from torch import Tensor

WORD = 8
"""Bytes."""
BLOCK = 1 << 15
"""Words of a block."""
ON_CPU = 1 << 16
"""Words that a thread works on at once, few enough for its cache."""
ELSEWHERE = 1 << 23
"""Words that another device works on at once, where each call costs more."""


def checksum(tensor: Tensor, about: str = "") -> int:
    """The checksum of a tensor's bytes in the order of its elements, computed on its device.

    ``about`` is a text that the checksum depends on, too, such as a name. Tensors with equal bytes
    have equal checksums, whatever their device, their strides and their types. A tensor that is not
    contiguous is copied first; other memory that it takes does not depend on the size.
    """
    import torch

    data = tensor.detach().reshape(-1).view(torch.uint8)
    if data.storage_offset() % WORD:  # words begin at multiples of their size
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
    """The same for a buffer of this process's memory."""
    import torch

    flat = np.frombuffer(data, np.uint8)
    if flat.ctypes.data % WORD:
        flat = flat.copy()
    with warnings.catch_warnings():  # memory may be read-only, and is only read
        warnings.simplefilter("ignore", UserWarning)
        return checksum(torch.from_numpy(flat), about)


def _block_sums(data: Tensor) -> list[Tensor]:
    """The sums of whole blocks."""
    import torch

    if not len(data):
        return []
    blocks, on_cpu = data.view(torch.int64).view(-1, BLOCK), data.device.type == "cpu"
    rows = (ON_CPU * torch.get_num_threads() if on_cpu else ELSEWHERE) // BLOCK
    room = torch.empty_like(blocks[:rows].expand(2, -1, -1))
    parts = [blocks[first : first + rows] for first in range(0, len(blocks), rows)]
    return [_products(part, *room[:, : len(part)]).sum(dim=1) for part in parts]


def _products(words: Tensor, t: Tensor, high: Tensor) -> Tensor:
    """t_i · ⌊t_i / 2³²⌋ of each word, in the memory of ``t``."""
    import torch

    torch.add(words, _keys(str(words.device))[: words.shape[-1]], out=t)
    torch.bitwise_right_shift(t, 32, out=high)
    return t.mul_(high)


@lru_cache(maxsize=16)
def _keys(device: str) -> Tensor:
    """A fixed random word for each place in a block."""
    import torch

    counted = np.arange(1, BLOCK + 1, dtype=np.uint64) * GOLDEN
    return torch.from_numpy(mix(counted).view(np.int64)).to(device)


def _combine(sums: Any, size: int, about: str) -> int:
    places = np.arange(1, len(sums) + 1, dtype=np.uint64) * GOLDEN
    total = np.add.reduce(mix(sums.astype(np.int64).view(np.uint64) + places), dtype=np.uint64)
    named = hashlib.blake2b(about.encode(), digest_size=8).digest()
    start = mix(np.asarray([size], np.uint64)) + np.frombuffer(named, "<u8")
    return int(mix(start + total)[0])
