"""From groups to one packed batch: no padding, a group's prompt once, its responses after it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from burnish.types import Group, PackedBatch

Arrays = dict[str, np.ndarray]


def pack(groups: Sequence[Group]) -> PackedBatch:
    """Lays the groups out one after the other, each as prompt, response 1, response 2, …"""
    laid_out = []
    slots = sequences = 0
    for number, group in enumerate(groups):
        arrays = _lay_out(group)
        arrays["predecessor"] += slots
        arrays["sequence_ids"] += sequences
        arrays["group_ids"] += number
        laid_out.append(arrays)
        slots += len(arrays["tokens"])
        sequences += len(group.completions)
    joined = {
        name: torch.from_numpy(np.concatenate([arrays[name] for arrays in laid_out]))
        for name in laid_out[0]
    }
    offsets = torch.nn.functional.pad(joined.pop("segment_lengths").cumsum(0), (1, 0))
    return PackedBatch(**joined, segment_offsets=offsets)


def slice_groups(batch: PackedBatch, first: int, end: int) -> tuple[PackedBatch, slice]:
    """The groups first … end − 1 as a batch of their own, and the slots they had."""
    chosen = (batch.group_ids >= first) & (batch.group_ids < end)
    sequences = chosen.nonzero().squeeze(1)
    s = slice(int(sequences[0]), int(sequences[-1]) + 1)
    slots = chosen[batch.sequence_ids].nonzero().squeeze(1)
    n = slice(int(slots[0]), int(slots[-1]) + 1)
    inside = (batch.segment_offsets >= n.start) & (batch.segment_offsets <= n.stop)
    return PackedBatch(
        tokens=batch.tokens[n],
        positions=batch.positions[n],
        predecessor=batch.predecessor[n] - n.start,
        sequence_ids=batch.sequence_ids[n] - s.start,
        in_prompt=batch.in_prompt[n],
        is_action=batch.is_action[n],
        behavior_logprobs=batch.behavior_logprobs[n],
        temperature=batch.temperature[n],
        versions=batch.versions[n],
        segment_offsets=batch.segment_offsets[inside] - n.start,
        segment_is_prompt=batch.segment_is_prompt[inside[:-1] & inside[1:]],
        group_ids=batch.group_ids[s] - first,
        rewards=batch.rewards[s],
    ), n


def _lay_out(group: Group) -> Arrays:
    """One group's slots, numbered from 0."""
    prompt, responses = group.prompt.token_ids, group.completions
    start = len(prompt)
    lengths = np.array([start, *(len(c.token_ids) for c in responses)])
    segment = np.repeat(np.arange(len(lengths)), lengths)
    slot = np.arange(len(segment))
    within = slot - (np.cumsum(lengths) - lengths)[segment]
    in_prompt = segment == 0
    # A response's first token follows the prompt's last; the prompt's first has no predecessor.
    before_first = np.where(in_prompt, slot, start - 1)
    nothing = np.zeros(start)

    def stream(before: np.ndarray, *after: np.ndarray) -> np.ndarray:
        return np.concatenate([before, *after])

    return {
        "tokens": stream(prompt, *(c.token_ids for c in responses)).astype(np.int64),
        "positions": np.where(in_prompt, within, start + within),
        "predecessor": np.where(within > 0, slot - 1, before_first),
        "sequence_ids": np.maximum(segment - 1, 0),
        "in_prompt": in_prompt,
        "is_action": stream(nothing > 0, *(c.sampled for c in responses)),
        "behavior_logprobs": stream(nothing, *(c.logprobs for c in responses)).astype(np.float32),
        "temperature": stream(
            nothing + 1, *(np.full(len(c.token_ids), c.params.temperature) for c in responses)
        ).astype(np.float32),
        "versions": stream(nothing, *(c.versions for c in responses)).astype(np.int64),
        "segment_lengths": lengths,
        "segment_is_prompt": np.arange(len(lengths)) == 0,
        "group_ids": np.zeros(len(responses), dtype=np.int64),
        "rewards": group.rewards,
    }
