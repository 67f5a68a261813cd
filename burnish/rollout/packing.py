"""From groups to packed batches: no padding, a group's prompt once, its responses after it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from burnish.errors import ConfigError
from burnish.types import Group, LearnBatch, PackedBatch

Arrays = dict[str, np.ndarray]


class Pack(NamedTuple):
    """A part of a batch that is a batch of its own, and the slots [n] it has in the whole."""

    batch: PackedBatch
    slots: Tensor

    @classmethod
    def whole(cls, batch: PackedBatch) -> Pack:
        return cls(batch, torch.arange(len(batch.tokens), device=batch.tokens.device))


def pack(groups: Sequence[Group], *, device: torch.device | str = "cpu") -> PackedBatch:
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
        name: torch.from_numpy(np.concatenate([arrays[name] for arrays in laid_out])).to(device)
        for name in laid_out[0]
    }
    offsets = torch.nn.functional.pad(joined.pop("segment_lengths").cumsum(0), (1, 0))
    return PackedBatch(**joined, segment_offsets=offsets)


def take(batch: PackedBatch, sequences: Tensor) -> Pack:
    """The given sequences (ids in rising order), each group of theirs after its prompt."""
    groups, new_group = torch.unique_consecutive(batch.group_ids[sequences], return_inverse=True)
    # Segments are numbered through: every group has its prompt's before its responses'.
    prompt_segments = batch.segment_is_prompt.nonzero().squeeze(1)[groups]
    response_segments = (~batch.segment_is_prompt).nonzero().squeeze(1)[sequences]
    segments = torch.cat((prompt_segments, response_segments)).sort().values
    lengths = batch.segment_offsets.diff()[segments]
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    is_prompt = batch.segment_is_prompt[segments]
    shift = (batch.segment_offsets[segments] - offsets[:-1]).repeat_interleave(lengths)
    slots = torch.arange(len(shift), device=shift.device) + shift
    place = torch.empty_like(batch.tokens)
    place[slots] = torch.arange(len(slots), device=slots.device)
    # A prompt carries the number of the response after it: as many as lie before it.
    owner = (~is_prompt).cumsum(0) - (~is_prompt).long()
    part = PackedBatch(
        tokens=batch.tokens[slots],
        positions=batch.positions[slots],
        predecessor=place[batch.predecessor[slots]],
        sequence_ids=owner.repeat_interleave(lengths),
        in_prompt=batch.in_prompt[slots],
        is_action=batch.is_action[slots],
        behavior_logprobs=batch.behavior_logprobs[slots],
        temperature=batch.temperature[slots],
        versions=batch.versions[slots],
        segment_offsets=offsets,
        segment_is_prompt=is_prompt,
        group_ids=new_group,
        rewards=batch.rewards[sequences],
    )
    return Pack(part, slots)


def train_batches(batch: PackedBatch, responses: int, *, count: int | None = None) -> list[Pack]:
    """The groups of a rollout, dealt out to ``count`` train batches that differ by a group at most.

    ``count`` is None if the batch was not planned; it then has as many as ``responses`` in each
    would fill. A batch holds whole groups, so there are never more batches than groups.
    """
    groups = int(batch.segment_is_prompt.sum())
    count = min(groups, count or -(-len(batch.rewards) // responses))
    if count == 1:
        return [Pack.whole(batch)]
    number = batch.group_ids * count // groups
    return [take(batch, (number == n).nonzero().squeeze(1)) for n in range(count)]


def take_streams(learn: LearnBatch, pack: Pack) -> LearnBatch:
    """The part of what to learn that goes with a pack's tokens."""
    streams = {k: v[pack.slots] for k, v in vars(learn).items() if isinstance(v, Tensor)}
    return replace(learn, batch=pack.batch, **streams)


def cut(
    batch: PackedBatch, *, sequences: int | None = None, tokens: int | None = None
) -> list[Pack]:
    """Packs of at most so many sequences, or so many tokens; neither: the batch as it is.

    A pack holds whole groups where they fit. A group that is too large alone is spread over packs
    that hold its prompt and some of its responses each.
    """
    limit, unit = (sequences, "sequences") if tokens is None else (tokens, "tokens")
    if limit is None:
        return [Pack.whole(batch)]
    lengths = batch.segment_offsets.diff()
    responses: list[int] = lengths[~batch.segment_is_prompt].tolist()
    prompts: list[int] = lengths[batch.segment_is_prompt].tolist()
    if tokens is None:
        responses, prompts = [1] * len(responses), [0] * len(prompts)
    parts: list[list[int]] = [[]]
    room = limit
    for group, prompt in enumerate(prompts):
        members = (batch.group_ids == group).nonzero().squeeze(1).tolist()
        whole = prompt + sum(responses[s] for s in members)
        opened = whole <= room
        if opened:
            room -= prompt
        for s in members:
            if not opened or responses[s] > room:
                if parts[-1]:
                    parts.append([])
                room, opened = limit - prompt, True
            if responses[s] > room:
                raise ConfigError(
                    f"train.micro_{unit} = {limit} is below prompt and response of a sequence, "
                    f"{prompt + responses[s]}; use at least that much"
                )
            parts[-1].append(s)
            room -= responses[s]
    device = batch.tokens.device
    return [take(batch, torch.tensor(part, device=device)) for part in parts if part]


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
