"""Packs groups into batches without padding: each group's prompt once, then its responses, then the
token sequences with prompts of their own. Also cuts batches into train batches and packs.

    prompt     a segment; the sequences after it, up to the next prompt, follow it
    sequence   a prompt and one response segment
    sample     one sequence or, if a chat template has rewritten an episode's history, several
    group      the samples of one data row, which share a baseline
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from burnish.errors import ConfigError, DataError
from burnish.types import (
    Completion,
    FloatArray,
    Grade,
    Group,
    IntArray,
    LearnBatch,
    PackedBatch,
)

STREAMS = {
    "tokens": np.int64,
    "is_action": np.bool_,
    "behavior_logprobs": np.float32,
    "temperature": np.float32,
    "versions": np.int64,
    "values": np.float32,
    "turn_rewards": np.float32,
}
"""Fields of a batch with one value per token, [N] or None, which are not computed from the lengths
of its segments, and their types."""
OPTIONAL: dict[str, Callable[[Completion], bool]] = {
    "values": lambda completion: completion.values is not None,
    "turn_rewards": lambda completion: bool(completion.turns),
}
"""Streams that a batch has only if they apply to one of its completions."""
PER_SAMPLE = ("lengths", "rewards", "parts")
"""Fields of a batch with one row per sample."""


_Streams = tuple[np.ndarray, ...]
"""The arrays of `STREAMS`, in that order."""


class _Segment(NamedTuple):
    """A prompt, or the response of one token sequence."""

    sample: int | None
    """Number of the sample in the batch; None for a prompt."""
    streams: _Streams


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
    """Concatenate groups to a packed batch on the CPU, each as prompt, response 1, response 2, …,
    followed by the sequences with prompts of their own, in the order of samples.

    ``parts`` names the parts of the grades that the batch must contain; raises a DataError if a
    grade lacks one. Only this function applies ``Prompt.scale``: rewards, parts (including a greedy
    reward), rewards of turns and step values of a group are multiplied by the same factor, after
    length penalties and before the advantage estimator.
    """
    sizes = torch.tensor([len(group.completions) for group in groups])
    firsts = pad(sizes.cumsum(0), (1, 0)).tolist()
    segments = [
        segment
        for group, first in zip(groups, firsts, strict=False)
        for segment in _segments(group, first)
    ]
    columns = zip(*(segment.streams for segment in segments), strict=True)
    completions = [completion for group in groups for completion in group.completions]
    left_out = {name for name, applies in OPTIONAL.items() if not any(map(applies, completions))}
    streams = {
        name: torch.from_numpy(np.concatenate(values).astype(kind))
        for (name, kind), values in zip(STREAMS.items(), columns, strict=True)
        if name not in left_out
    }
    shape = _lay_out(
        torch.tensor([len(segment.streams[0]) for segment in segments]),
        torch.tensor([segment.sample is None for segment in segments]),
        torch.tensor([s.sample for s in segments if s.sample is not None], dtype=torch.int64),
    )
    group_ids = torch.arange(len(groups)).repeat_interleave(sizes)
    lengths = torch.tensor([int(c.sampled.sum()) for c in completions])
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


def _segments(group: Group, first: int) -> Iterator[_Segment]:
    """Yield the segments of a group, whose first sample has the number ``first`` in the batch: the
    prompt, the responses that follow it, and then each prompt of a sequence's own with its
    response. The group's prompt is left out if no response follows it. Samples that begin with
    equal prompts of their own share one segment, as the first conversations of agents do."""
    streams = [_response_streams(group, *pair) for pair in group.graded]
    samples = list(enumerate(zip(group.completions, streams, strict=True), first))
    shared = [one for one in samples if not (c := one[1][0]).sequences or c.sequences[0].start]
    if shared:
        yield _Segment(None, _prompt_streams(group.prompt.token_ids))
    for number, (c, own) in shared:
        end = c.sequences[0].start if c.sequences else None
        yield _Segment(number, tuple(stream[:end] for stream in own))
    alike: dict[bytes, list[tuple[int, tuple[Completion, _Streams]]]] = {}
    for number, (c, own) in samples:
        if c.sequences and not c.sequences[0].start:
            alike.setdefault(c.sequences[0].prompt.tobytes(), []).append((number, (c, own)))
    for members in alike.values():
        yield _Segment(None, _prompt_streams(members[0][1][0].sequences[0].prompt))
        for number, (c, own) in members:
            end = c.sequences[1].start if len(c.sequences) > 1 else None
            yield _Segment(number, tuple(stream[:end] for stream in own))
    for number, (c, own) in samples:
        ends = [*(one.start for one in c.sequences[1:]), None]
        for one, end in zip(c.sequences, ends, strict=False):
            if one.start:
                yield _Segment(None, _prompt_streams(one.prompt))
                yield _Segment(number, tuple(stream[one.start : end] for stream in own))


def _prompt_streams(tokens: IntArray) -> _Streams:
    nothing, unknown = np.zeros(len(tokens)), np.full(len(tokens), np.nan)
    return tokens, nothing > 0, nothing, nothing + 1, nothing, unknown, unknown


def _response_streams(group: Group, c: Completion, grade: Grade) -> _Streams:
    """Return the arrays of `STREAMS` of a completion."""
    temperature = np.full(len(c.token_ids), c.params.temperature)
    for number, turn in enumerate(c.turns):
        temperature[turn.start : turn.end] = c.params.temperature_of(number)
    action = c.sampled & c.in_loss
    logprobs = np.where(action, c.logprobs, 0)
    values = np.full(len(c.token_ids), np.nan)
    if c.values is not None:
        values = _scale(group) * c.values
    rewards = _scale(group) * _turn_rewards(c, grade)
    return c.token_ids, action, logprobs, temperature, c.versions, values, rewards


def _turn_rewards(c: Completion, grade: Grade) -> FloatArray:
    """Return the reward of the turn that ends with each token, [C]; NaN for other tokens.

    A turn's reward is multiplied by ``Grade.turn_weight``; a turn without a reward has 0. The last
    turn also has the difference between the grade and the sum of these rewards: the reward of a
    grader or a reward model, and a length penalty. A response without turns counts as one turn.
    """
    rewards = np.full(len(c.token_ids), np.nan)
    actions = np.flatnonzero(c.sampled)
    given = [grade.turn_weight * (turn.reward or 0.0) for turn in c.turns]
    if len(actions):
        ends = np.array([turn.end for turn in c.turns] or [len(c.token_ids)])
        last = actions[np.searchsorted(actions, ends) - 1]  # the last sampled token of each turn
        rewards[last] = given or 0.0
        rewards[last[-1]] += grade.reward - sum(given)
    return rewards.astype(np.float32)


def _lay_out(lengths: Tensor, is_prompt: Tensor, samples: Tensor) -> dict[str, Tensor]:
    """Compute the fields of a batch that depend only on the ``lengths`` of its segments, on which
    segments are prompts, [segments] each, and on the ``samples`` of the others, [responses]; return
    these fields by name."""
    offsets = pad(lengths.cumsum(0), (1, 0))
    segment = torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths)
    slot = torch.arange(len(segment), device=lengths.device)
    within = slot - offsets[segment]
    in_prompt = is_prompt[segment]
    prompt_lengths = lengths[is_prompt][is_prompt.cumsum(0) - 1]
    prompt_ends = offsets[1:][is_prompt][is_prompt.cumsum(0) - 1]
    # The first token of a response follows the prompt's last; the prompt's first has its own slot.
    before_first = torch.where(in_prompt, slot, prompt_ends[segment] - 1)
    # A prompt has the sample of the response after it, whose number is that of responses before.
    place = (~is_prompt).cumsum(0) - (~is_prompt).long()
    owner = pad(samples, (0, 1))[place]
    return {
        "positions": torch.where(in_prompt, within, prompt_lengths[segment] + within),
        "predecessor": torch.where(within > 0, slot - 1, before_first),
        "sample_ids": owner[segment],
        "in_prompt": in_prompt,
        "segment_offsets": offsets,
        "segment_samples": owner,
        "segment_is_prompt": is_prompt,
    }


def take(batch: PackedBatch, samples: Tensor) -> Pack:
    """Return a pack with some samples of a batch and the prompts that they follow. ``samples`` are
    the numbers of the samples in the batch, from 0, in ascending order."""
    groups = torch.unique_consecutive(batch.group_ids[samples], return_inverse=True)[1]
    number = torch.full_like(batch.group_ids, -1)
    number[samples] = torch.arange(len(samples), device=number.device)
    is_prompt, own = batch.segment_is_prompt, number[batch.segment_samples]
    is_kept = ~is_prompt & (own >= 0)
    prompt = is_prompt.cumsum(0) - 1  # of each segment
    followed = torch.zeros_like(is_prompt)
    followed[prompt[is_kept]] = True
    segments = (is_kept | (is_prompt & followed[prompt])).nonzero().squeeze(1)
    lengths, is_prompt = batch.segment_offsets.diff()[segments], is_prompt[segments]
    shape = _lay_out(lengths, is_prompt, own[segments][~is_prompt])
    shift = batch.segment_offsets[segments] - shape["segment_offsets"][:-1]
    slots = Pack.whole(batch).slots[: int(lengths.sum())] + shift.repeat_interleave(lengths)
    given = {name: getattr(batch, name) for name in STREAMS}
    streams: dict[str, Any] = {k: v if v is None else v[slots] for k, v in given.items()}
    per_sample = {name: getattr(batch, name)[samples] for name in PER_SAMPLE}
    return Pack(PackedBatch(**streams, **shape, group_ids=groups, **per_sample), slots)


def first_token(batch: PackedBatch) -> Pack:
    """Return a pack that consists of the first prompt's first token. It has no samples and no
    actions, so it contributes nothing to a loss."""
    one, slots = torch.ones_like(batch.segment_offsets[:1]), Pack.whole(batch).slots[:1]
    given = {name: getattr(batch, name) for name in STREAMS}
    streams: dict[str, Any] = {k: v if v is None else v[slots] for k, v in given.items()}
    none = {name: getattr(batch, name)[:0] for name in ("group_ids", *PER_SAMPLE)}
    return Pack(PackedBatch(**streams, **_lay_out(one, one > 0, slots[:0]), **none), slots)


def train_batches(batch: PackedBatch, samples: int, *, count: int | None = None) -> list[Pack]:
    """Split a rollout into ``count`` train batches of consecutive whole groups; their numbers of
    groups differ by at most 1. There are never more batches than groups.

    If ``count`` is None, it is the number of the rollout's samples divided by ``samples`` (per
    train batch), rounded up; otherwise ``samples`` is not used.
    """
    groups = int(batch.group_ids[-1]) + 1
    count = min(groups, count or -(-len(batch.rewards) // samples))
    if count == 1:
        return [Pack.whole(batch)]
    number = batch.group_ids * count // groups
    return [take(batch, (number == n).nonzero().squeeze(1)) for n in range(count)]


def take_streams(learn: LearnBatch, pack: Pack) -> LearnBatch:
    """Return the part of a train batch that belongs to ``pack``, a pack of ``learn.batch``: the
    pack's batch, and of every per-token tensor [N] the values in the pack's slots [n]."""
    streams = {k: v[pack.slots] for k, v in vars(learn).items() if isinstance(v, Tensor)}
    return replace(learn, batch=pack.batch, **streams)


def cut(batch: PackedBatch, tokens: int | None, samples: int | None = None) -> list[Pack]:
    """Cut a batch into packs of at most ``tokens`` tokens or, if that is None, of at most
    ``samples`` samples. If both are None, the whole batch is one pack.

    A pack contains whole groups if they fit, and always whole samples. A group that is too large
    for one pack is split over several packs, each with the prompts of its samples. Raises a
    ConfigError if a sample and its prompts have more than ``tokens`` tokens.
    """
    limit = samples if tokens is None else tokens
    if limit is None:
        return [Pack.whole(batch)]
    lengths, owner = batch.segment_offsets.diff().tolist(), batch.segment_samples.tolist()
    own = [0] * len(batch.rewards)  # tokens of each sample without prompts
    prompts: list[dict[int, int]] = [{} for _ in own]  # lengths of the prompts that it follows
    last = 0
    for number, is_prompt in enumerate(batch.segment_is_prompt.tolist()):
        if is_prompt:
            last = number
            continue
        own[owner[number]] += lengths[number]
        prompts[owner[number]][last] = lengths[last]
    if tokens is None:
        own, prompts = [1] * len(own), [{}] * len(own)
    members: dict[int, list[int]] = {}
    for sample, group in enumerate(batch.group_ids.tolist()):
        members.setdefault(group, []).append(sample)
    parts: list[list[int]] = [[]]
    room, seen = limit, set[int]()
    for chosen in members.values():
        shared = {n: length for s in chosen for n, length in prompts[s].items()}
        if sum(shared.values()) + sum(own[s] for s in chosen) > room:
            parts.append([])
            room, seen = limit, set()
        for s in chosen:
            need = own[s] + sum(n for place, n in prompts[s].items() if place not in seen)
            if need > room:
                parts.append([])
                room, seen = limit, set()
                need = own[s] + sum(prompts[s].values())
            if need > room:
                raise ConfigError(
                    f"train.micro_tokens = {limit} is below the tokens of a sequence with its "
                    f"prompt, {need}; use at least that much"
                )
            parts[-1].append(s)
            room -= need
            seen |= prompts[s].keys()
    device = batch.tokens.device
    return [take(batch, torch.tensor(part, device=device)) for part in parts if part]
