"""State of decoding rows on a GPU, which draws and advances by itself for several steps.

Each row has the place of its next token, its limits and its random numbers. After each step, a row
that has not ended advances to its next token; a row that has ended attends to nothing and writes
nothing. The host reads the drawn tokens of all steps of a block at once. It writes the state of the
next block before that, and the rows go on from their last tokens, which only the GPU knows.

Legend: S rows, V vocabulary.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from burnish.engine.native.cache import upload
from burnish.engine.native.sampler import plain_weigh, search
from burnish.engine.native.sequence import ANY, DrawLimits
from burnish.engine.native.sequence import Sequence as Sample
from burnish.randomness import uniforms

AHEAD = 16
"""Maximum number of tokens per row in a block, which a GPU draws before the host reads them."""
ENDS = 8
"""Maximum number of end ids of a row that a GPU knows."""
GROUP = 8
"""Maximum number of rows whose shared pages are read together."""
EMPTY = (0, 0, -1, 0, 0, 0, 0, 0, 0, 0)
"""Fields of a padding row, which attends to nothing and writes nothing."""

Array = np.ndarray[Any, np.dtype[Any]]


class Rows(NamedTuple):
    """Tensors of the state: views of buffers whose addresses do not change."""

    tokens: Tensor
    """[S] the token to compute next."""
    positions: Tensor
    """[S] its position."""
    slots: Tensor
    """[S] its slot in the cache; −1 if the row has ended."""
    firsts: Tensor
    """[S] index of the row's first page in ``pages``."""
    counts: Tensor
    """[S] number of tokens that it attends to, 0 if the row has ended."""
    owns: Tensor
    """[S] number of its first tokens that the row shares with other rows (see ``items``)."""
    held: Tensor
    """[S] number of tokens that must follow before the row may draw an end id."""
    room: Tensor
    """[S] number of tokens that may follow."""
    greedy: Tensor
    """[S] whether the most likely token is selected."""
    drawn: Tensor
    """[S] number of tokens drawn since the host has written the state."""
    ends: Tensor
    """[S, ENDS] end ids, padded with −1."""
    items: Tensor
    """[S, 2 + GROUP] page tables of shared pages: see `cuda_kernels.PageTable`."""
    pages: Tensor
    """The concatenated pages of all rows."""
    heat: Tensor
    """[S] temperatures, 1 in greedy rows."""
    points: Tensor
    """[S, AHEAD] numbers in [0, 1) that select the tokens."""
    found: Tensor
    """[S, AHEAD] tokens drawn so far."""
    logprobs: Tensor
    """[S, AHEAD] their log-probabilities, NaN where the model overflowed."""


class Buffers:
    """Memory of the states of up to ``most`` rows with up to ``pages`` pages each."""

    def __init__(self, most: int, pages: int, device: torch.device) -> None:
        width = len(EMPTY) + ENDS + 2 + GROUP + pages
        self._integers = torch.zeros(most * width + 1, dtype=torch.int64, device=device)
        self._floats = torch.zeros(most * (1 + AHEAD), dtype=torch.float64, device=device)
        self._found = torch.zeros(most, AHEAD, dtype=torch.int64, device=device)
        self._logprobs = torch.zeros(most, AHEAD, dtype=torch.float64, device=device)

    def rows(self, count: int) -> Rows:
        """Return the state of this number of rows."""
        lists = count * ENDS, count * (2 + GROUP)
        sizes = [*[count] * len(EMPTY), *lists]
        *whole, pages = torch.split(self._integers, [*sizes, len(self._integers) - sum(sizes)])
        shapes = [*[(count,)] * len(EMPTY), (count, ENDS), (count, 2 + GROUP)]
        fields = (part.view(shape) for part, shape in zip(whole, shapes, strict=True))
        heat, points = self._floats[:count], self._floats[count : count * (1 + AHEAD)]
        drawn = self._found[:count], self._logprobs[:count]
        return Rows._make((*fields, pages, heat, points.view(count, AHEAD), *drawn))

    def write(self, integers: Array, floats: Array) -> None:
        """Overwrite the state by the arrays of `state_of`, without waiting for the device."""
        for target, numbers in ((self._integers, integers), (self._floats, floats)):
            target[: len(numbers)].copy_(upload(numbers, target.device))


def go_on(rows: Rows, tokens: Tensor, counts: Tensor) -> None:
    """Let the first rows of a new state go on from the ``tokens`` [n] that they have drawn last. Of
    rows that have ended, whose ``counts`` [n] in the old state are 0, nothing is computed."""
    count = len(tokens)
    rows.tokens[:count].copy_(tokens)
    rows.counts[:count].mul_(counts > 0)
    rows.slots[:count].masked_fill_(counts == 0, -1)


def is_drawn_ahead(limits: DrawLimits) -> bool:
    """Whether a GPU can draw several tokens within these limits: any token or the most likely one,
    with a few banned ids."""
    return limits._replace(greedy=False, banned=frozenset()) == ANY and len(limits.banned) <= ENDS


def state_of(
    samples: Sequence[Sample], rows: int, size: int, drawn: int = 0
) -> tuple[Array, Array, bool]:
    """Return the state of decoding samples as two flat arrays, of integers and of other numbers,
    with empty rows after the samples; and whether any of the samples share pages. ``size``: tokens
    per page. ``drawn``: number of tokens of each sample that the host has not read yet; `go_on`
    corrects the state of the samples that have fewer because they have ended."""
    count = len(samples)
    at = np.array([s.computed for s in samples]) + drawn
    lengths = np.array([len(s.pages) for s in samples])
    first = lengths.cumsum() - lengths
    pages = np.fromiter(chain.from_iterable(s.pages for s in samples), np.int64)
    items, owns = shared_items(samples, first, size)
    fields = np.tile(np.array(EMPTY)[:, None], rows)
    fields[:, :count] = (
        [s.tokens[s.computed] for s in samples],
        at,
        pages[first + at // size] * size + at % size,
        first,
        at + 1,
        owns,
        [max(0, s.held - drawn) for s in samples],
        [s.room - drawn for s in samples],
        [s.limits.greedy for s in samples],
        np.zeros(count),
    )
    ends = np.full((rows, ENDS), -1)
    for row, sample in enumerate(samples):
        known = sample.group.end_ids
        if known and len(known) <= ENDS:
            ends[row, : len(known)] = sorted(known)
    table = np.zeros((rows, 2 + GROUP), np.int64)
    if items:
        table[: len(items)] = items
    floats = np.ones(rows * (1 + AHEAD))
    floats[:count] = [s.group.request.params.temperature or 1.0 for s in samples]
    floats[rows : rows + count * AHEAD] = points_of(samples, drawn).ravel()
    parts = fields.ravel(), ends.ravel(), table.ravel(), pages
    return np.concatenate(parts), floats, bool(items)


def points_of(samples: Sequence[Sample], drawn: int = 0) -> Array:
    """Return the random numbers of the samples' next tokens, [samples, AHEAD], after ``drawn``
    tokens that the host has not read."""
    places = [
        (request.params.seed, *sample.key, request.position + len(sample.logprobs) + drawn)
        for sample in samples
        for request in [sample.group.request]
    ]
    seed, stream, group, number, position = np.array(places).T[..., None]
    return uniforms(seed, stream, group, number, position + np.arange(AHEAD))


def shared_items(
    samples: Sequence[Sample], first: Array, size: int
) -> tuple[list[list[int]], list[int]]:
    """Return the items of `cuda_kernels.PageTable`, and the number of shared tokens of each
    sample."""
    members: dict[int, list[int]] = defaultdict(list)
    for row, sample in enumerate(samples):
        if sample.prefix is not None and sample.prefix.pages:
            members[id(sample.prefix)].append(row)
    items, owns = list[list[int]](), [0] * len(samples)
    for rows in members.values():
        prefix = samples[rows[0]].prefix
        if len(rows) < 2 or prefix is None:
            continue
        tokens = len(prefix.pages) * size
        for start in range(0, len(rows), GROUP):
            some = rows[start : start + GROUP]
            padding = [-1] * (GROUP - len(some))
            items.append([int(first[rows[0]]), tokens, *some, *padding])
        for row in rows:
            owns[row] = tokens
    return items, owns


def draw_plainly(logits: Tensor, rows: Rows, size: int) -> None:
    """Draw a token for each row that has not ended, from logits [S, V], and advance the row.

    End ids of held rows are not drawn. The drawn token, its log-probability and the row's next
    place are written to the state. `sampling_kernels.draw` does the same.
    """
    wide = torch.promote_types(logits.dtype, torch.float32)
    heat, lanes = rows.heat.to(wide), torch.arange(len(logits), device=logits.device)
    runs, step = rows.counts > 0, rows.drawn.clamp(max=AHEAD - 1)
    peaks, sums = plain_weigh(logits, heat)
    totals = peaks.double() + sums.sum(1, dtype=torch.float64).log()
    allowed = logits.clone()
    for lane in ((rows.held > 0) & runs).nonzero()[:, 0].tolist():
        allowed[lane, rows.ends[lane][rows.ends[lane] >= 0]] = -torch.inf
    own, _ = plain_weigh(allowed, heat)
    weights = (allowed.to(wide) / heat[:, None] - own[:, None]).exp()
    lost = ~totals.isfinite()
    weights = weights.masked_fill(lost[:, None], 1)
    token = search(weights, rows.points[lanes, step][:, None])[0][:, 0]
    token = torch.where(rows.greedy > 0, allowed.argmax(1), token.clamp(max=logits.shape[1] - 1))
    chosen = (logits.gather(1, token[:, None])[:, 0].to(wide) / heat).double() - totals
    rows.found[lanes[runs], step[runs]] = token[runs]
    rows.logprobs[lanes[runs], step[runs]] = chosen.masked_fill(lost, torch.nan)[runs]
    is_end = (rows.ends == token[:, None]).any(1) & (rows.held <= 0)
    goes_on = runs & ~is_end & (rows.room > 1) & ~lost
    after = rows.positions + 1
    page = (rows.firsts + after // size).clamp(max=len(rows.pages) - 1)
    rows.slots.copy_(torch.where(goes_on, rows.pages[page] * size + after % size, -1))
    rows.counts.copy_(torch.where(goes_on, rows.counts + 1, 0))
    rows.tokens.copy_(torch.where(goes_on, token, rows.tokens))
    rows.positions.copy_(torch.where(goes_on, after, rows.positions))
    rows.drawn.add_(runs)
    rows.held.sub_(runs.long())
    rows.room.sub_(runs.long())
