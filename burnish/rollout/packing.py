"""Packs groups into batches without padding: each group's prompt once, then its responses. Also
cuts batches into train batches and packs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from burnish.errors import ConfigError, DataError
from burnish.types import FloatArray, Group, LearnBatch, PackedBatch

STREAMS = {
    "tokens": np.int64,
    "is_action": np.bool_,
    "behavior_logprobs": np.float32,
    "temperature": np.float32,
    "versions": np.int64,
    "values": np.float32,
}
"""Fields of a batch with one value per token, [N] or None, which are not computed from the lengths
of its segments, and their types."""
PER_RESPONSE = ("lengths", "rewards", "parts")
"""Fields of a batch with one row per response."""


class Pack(NamedTuple):
    """A part of a batch, as a batch of its own, and the slots [n] of its tokens in the whole
    batch."""

    batch: PackedBatch
    slots: Tensor

    @classmethod
    def whole(cls, batch: PackedBatch) -> Pack:
        """Return the whole batch as one pack."""
        return cls(batch, torch.arange(len(batch.tokens), device=batch.tokens.device))


def pack(groups: Sequence[Group], parts: Sequence[str] = ()) -> PackedBatch:
    """Concatenate groups to a packed batch on the CPU, each as prompt, response 1, response 2, …

    ``parts`` names the parts of the grades that the batch must contain; raises a DataError if a
    grade lacks one. Only this function applies ``Prompt.scale``: rewards, parts (including a greedy
    reward) and step values of a group are multiplied by the same factor, after length penalties and
    before the advantage estimator.
    """
    segments = [segment for group in groups for segment in _segments(group)]
    streams = {
        name: torch.from_numpy(np.concatenate(values).astype(kind))
        for (name, kind), values in zip(STREAMS.items(), zip(*segments, strict=True), strict=True)
        if name != "values" or _has_values(groups)
    }
    sizes = torch.tensor([len(group.completions) for group in groups])
    is_prompt = torch.zeros(len(segments), dtype=torch.bool)
    is_prompt[pad((sizes + 1).cumsum(0), (1, 0))[:-1]] = True
    shape = _lay_out(torch.tensor([len(tokens) for tokens, *_ in segments]), is_prompt)
    group_ids = torch.arange(len(groups)).repeat_interleave(sizes)
    lengths = torch.tensor([int(c.sampled.sum()) for group in groups for c in group.completions])
    rewards = np.concatenate([_scale(group) * group.rewards for group in groups])
    graded = np.concatenate([_scale(group) * _parts(group, parts) for group in groups])
    return PackedBatch(
        **streams,
        **shape,
        group_ids=group_ids,
        lengths=lengths,
        rewards=torch.from_numpy(rewards),
        parts=torch.from_numpy(graded),
    )


def _scale(group: Group) -> np.float32:
    return np.float32(group.prompt.scale)


def _parts(group: Group, names: Sequence[str]) -> FloatArray:
    """Return the named parts of a group's grades, [G, K]; raise a DataError if one is missing."""
    for grade in group.grades:
        for name in names:
            if name not in grade.parts:
                raise DataError(
                    f"objective.advantage reads the part {name!r} of every grade, and a grade of "
                    f"{group.prompt.prompt_id} has {', '.join(sorted(grade.parts)) or 'none'}; "
                    "name parts that the task's grades have"
                )
    rows = [[grade.parts[name] for name in names] for grade in group.grades]
    return np.array(rows, dtype=np.float32).reshape(len(rows), len(names))


def _segments(group: Group) -> Iterator[tuple[np.ndarray, ...]]:
    """Yield the arrays of `STREAMS`, in that order, for the prompt and then for each response."""
    prompt = group.prompt.token_ids
    nothing = np.zeros(len(prompt))
    yield prompt, nothing > 0, nothing, nothing + 1, nothing, nothing + np.nan
    for c in group.completions:
        temperature = np.full(len(c.token_ids), c.params.temperature)
        action = c.sampled & c.in_loss
        logprobs = np.where(action, c.logprobs, 0)
        values = np.full(len(c.token_ids), np.nan)
        if c.values is not None:
            values = _scale(group) * c.values
        yield c.token_ids, action, logprobs, temperature, c.versions, values


def _has_values(groups: Sequence[Group]) -> bool:
    return any(c.values is not None for group in groups for c in group.completions)


def _lay_out(lengths: Tensor, is_prompt: Tensor) -> dict[str, Tensor]:
    """Compute the fields of a batch that depend only on the ``lengths`` of its segments and on
    which segments are prompts, [segments] each; return these fields by name."""
    offsets = pad(lengths.cumsum(0), (1, 0))
    segment = torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths)
    slot = torch.arange(len(segment), device=lengths.device)
    within = slot - offsets[segment]
    in_prompt = is_prompt[segment]
    prompt_lengths = lengths[is_prompt][is_prompt.cumsum(0) - 1]
    prompt_ends = offsets[1:][is_prompt][is_prompt.cumsum(0) - 1]
    # The first token of a response follows the prompt's last; the prompt's first has its own slot.
    before_first = torch.where(in_prompt, slot, prompt_ends[segment] - 1)
    # A prompt has the id of the response after it, which is the number of responses before it.
    owner = (~is_prompt).cumsum(0) - (~is_prompt).long()
    return {
        "positions": torch.where(in_prompt, within, prompt_lengths[segment] + within),
        "predecessor": torch.where(within > 0, slot - 1, before_first),
        "sequence_ids": owner[segment],
        "in_prompt": in_prompt,
        "segment_offsets": offsets,
        "segment_is_prompt": is_prompt,
    }


def take(batch: PackedBatch, sequences: Tensor) -> Pack:
    """Return a pack with some responses of a batch and the prompts of their groups. ``sequences``
    are the numbers of the responses in the batch, from 0, in ascending order."""
    groups, new_group = torch.unique_consecutive(batch.group_ids[sequences], return_inverse=True)
    # In the order of segments, each prompt comes before the responses of its group.
    prompt_segments = batch.segment_is_prompt.nonzero().squeeze(1)[groups]
    response_segments = (~batch.segment_is_prompt).nonzero().squeeze(1)[sequences]
    segments = torch.cat((prompt_segments, response_segments)).sort().values
    lengths = batch.segment_offsets.diff()[segments]
    shape = _lay_out(lengths, batch.segment_is_prompt[segments])
    shift = batch.segment_offsets[segments] - shape["segment_offsets"][:-1]
    slots = Pack.whole(batch).slots[: int(lengths.sum())] + shift.repeat_interleave(lengths)
    given = {name: getattr(batch, name) for name in STREAMS}
    streams: dict[str, Any] = {k: v if v is None else v[slots] for k, v in given.items()}
    per_response = {name: getattr(batch, name)[sequences] for name in PER_RESPONSE}
    return Pack(PackedBatch(**streams, **shape, group_ids=new_group, **per_response), slots)


def first_token(batch: PackedBatch) -> Pack:
    """Return a pack that consists of the first prompt's first token. It has no responses and no
    actions, so it contributes nothing to a loss."""
    one, slots = torch.ones_like(batch.segment_offsets[:1]), Pack.whole(batch).slots[:1]
    given = {name: getattr(batch, name) for name in STREAMS}
    streams: dict[str, Any] = {k: v if v is None else v[slots] for k, v in given.items()}
    none = {name: getattr(batch, name)[:0] for name in ("group_ids", *PER_RESPONSE)}
    return Pack(PackedBatch(**streams, **_lay_out(one, one > 0), **none), slots)


def train_batches(batch: PackedBatch, responses: int, *, count: int | None = None) -> list[Pack]:
    """Split a rollout into ``count`` train batches of consecutive whole groups; their numbers of
    groups differ by at most 1. There are never more batches than groups.

    If ``count`` is None, it is the number of the rollout's responses divided by ``responses`` (per
    train batch), rounded up; otherwise ``responses`` is not used.
    """
    groups = int(batch.segment_is_prompt.sum())
    count = min(groups, count or -(-len(batch.rewards) // responses))
    if count == 1:
        return [Pack.whole(batch)]
    number = batch.group_ids * count // groups
    return [take(batch, (number == n).nonzero().squeeze(1)) for n in range(count)]


def take_streams(learn: LearnBatch, pack: Pack) -> LearnBatch:
    """Return the part of a train batch that belongs to ``pack``, a pack of ``learn.batch``: the
    pack's batch, and of every per-token tensor [N] the values in the pack's slots [n]."""
    streams = {k: v[pack.slots] for k, v in vars(learn).items() if isinstance(v, Tensor)}
    return replace(learn, batch=pack.batch, **streams)


def cut(batch: PackedBatch, tokens: int | None, sequences: int | None = None) -> list[Pack]:
    """Cut a batch into packs of at most ``tokens`` tokens or, if that is None, of at most
    ``sequences`` responses. If both are None, the whole batch is one pack.

    A pack contains whole groups if they fit. A group that is too large for one pack is split over
    several packs, each with its prompt and some of its responses. Raises a ConfigError if a prompt
    and one response have more than ``tokens`` tokens.
    """
    limit = sequences if tokens is None else tokens
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
        if prompt + sum(responses[s] for s in members) > room:
            parts.append([])
            room = limit
        room -= prompt
        for s in members:
            if responses[s] > room:
                parts.append([])
                room = limit - prompt
            if responses[s] > room:
                raise ConfigError(
                    f"train.micro_tokens = {limit} is below prompt and response of a sequence, "
                    f"{prompt + responses[s]}; use at least that much"
                )
            parts[-1].append(s)
            room -= responses[s]
    device = batch.tokens.device
    return [take(batch, torch.tensor(part, device=device)) for part in parts if part]
