"""Step values of VinePPO: the value before a step of a response is the mean reward of continuations
that are sampled from there.

A response is divided into steps; those of a multi-turn episode are its turns. From the beginning of
each step except the first, the engine samples K continuations. The value before the step is the
mean reward of the K complete responses, which the task grades like all others. The value before the
first step is the mean reward of the group's other responses: they are samples from the prompt, too,
and cost nothing.

A continuation of an episode has an environment of its own, in a new process: it is reset with the
row and the seed of the episode, and takes the recorded actions, before the policy plays on. So only
deterministic environments can be used.

A continuation without a grade, because the grader or its environment failed or the engine aborted
it, is left out of the mean and counted; `burnish.rollout.rollout.check_errors` limits their share.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np

from burnish.console.progress import begin
from burnish.console.text import counted
from burnish.engine.protocol import Request
from burnish.randomness import Stream
from burnish.recipe.objective.advantages import AnyAdvantage, Remax, Vine
from burnish.rollout.greedy_baseline import Greedy, add_costs
from burnish.types import Branch, Completion, Finish, Grade, Group, IntArray, Prompt, Status

BREAKS = {
    "lines": re.compile(r"\n\s*"),
    "sentences": re.compile(r"""[.!?]["')\]]*\s+|\n\s*"""),
}
"""Patterns of the text between two steps, by the setting ``steps``: the end of a step and the space
before the next one."""
Responses = list[tuple[Completion, ...]]
"""For each request, its completions."""


@dataclass(frozen=True)
class Branching:
    """Samples continuations from the beginning of each step of a response."""

    steps: int | str
    """Number of tokens of a step, a key of `BREAKS`, or "turns" for the turns of episodes."""
    continuations: int
    """Number of continuations of each step."""
    group_size: int
    """Number of responses per prompt."""
    decode: Callable[[IntArray], list[str]]
    """Converts token ids to one text per token."""

    def extend(
        self,
        requests: Sequence[Request],
        responses: Responses,
        complete: Callable[..., Responses],
    ) -> Responses:
        """Sample ``continuations`` from the beginning of each step except the first of each
        response; return the responses with the continuations as their ``branches``. If a request is
        not for training, such as for held-out prompts, return all responses unchanged.

        ``complete`` takes requests and a progress callback ``report``, and returns the completions
        of each request.
        """
        if any(request.stream is not Stream.TRAIN for request in requests):
            return responses
        positions = [list(map(self.starts, own)) for own in responses]
        further = [
            self._request(request, completion, start)
            for request, own, places in zip(requests, responses, positions, strict=True)
            for completion, starts in zip(own, places, strict=True)
            for start in starts
        ]
        doing, total = f"continuing {counted(len(further), 'step')}", sum(r.n for r in further)
        report = begin("generate", doing, total=total, unit="continuations")
        found = iter(complete(further, report=report))
        return [
            tuple(
                replace(c, branches=tuple(Branch(start, next(found)) for start in starts))
                for c, starts in zip(own, places, strict=True)
            )
            for own, places in zip(responses, positions, strict=True)
        ]

    def starts(self, completion: Completion) -> list[int]:
        """Return the index of the first token of each step except the first; an empty list for
        responses that will have no grade. A step begins with a sampled token: if its first token
        was inserted, with the next sampled one."""
        if completion.finish is Finish.ABORT or (completion.turns and completion.turns[-1].error):
            return []
        if self.steps == "turns":
            return [turn.start for turn in completion.turns[1:]]
        texts = self.decode(completion.token_ids)
        if isinstance(completion.stop, int):
            texts[-1] = ""  # the end token is part of the last step
        actions = np.flatnonzero(completion.sampled)
        places = np.searchsorted(actions, starts_of(texts, self.steps))
        return [int(actions[place]) for place in np.unique(places) if 0 < place < len(actions)]

    def _request(self, request: Request, completion: Completion, start: int) -> Request:
        """Build the request for the continuations of a response from token ``start``; those of an
        episode begin with its turns before this token. Their random draws differ from the draws of
        all other samples, steps and groups."""
        kept = ("token_ids", "logprobs", "versions", "sampled")
        streams: dict[str, Any] = {name: getattr(completion, name)[:start] for name in kept}
        turns = tuple(turn for turn in completion.turns if turn.start < start)
        sequences = tuple(one for one in completion.sequences if one.start <= start)
        begun = replace(completion, **streams, turns=turns, sequences=sequences, limit=None)
        sample = start * self.group_size + completion.sample_index
        return replace(
            request,
            request_id=f"{request.request_id}-{completion.sample_index}-{start}",
            n=self.continuations,
            stream=Stream.CONTINUATION,
            begun=begun,
            first=sample * self.continuations,
        )


Steps = Branching | Greedy | None
"""Samples additional responses after the responses of a rollout, to estimate values or a baseline;
None if the recipe's advantage needs none."""


def make_step_sampler(
    advantage: AnyAdvantage,
    group_size: int,
    decoder: Callable[[], Callable[[IntArray], list[str]]],
) -> Steps:
    """Return the sampler of additional responses that an advantage needs: `Greedy` for ReMax,
    `Branching` for VinePPO, otherwise None. ``decoder`` returns the function that converts token
    ids to one text per token; it is called only for VinePPO."""
    if isinstance(advantage, Remax):
        return Greedy()
    if not isinstance(advantage, Vine):
        return None
    return Branching(advantage.steps, advantage.continuations, group_size, decoder())


def starts_of(texts: Sequence[str], steps: int | str) -> list[int]:
    """Return the index of the first token of each step except the first, given the text of each
    token. ``steps`` is the number of tokens of a step, or a key of `BREAKS`.

    With `BREAKS`, a step begins with the token that contains the first character after a break.
    """
    if isinstance(steps, int):
        return list(range(steps, len(texts), steps))
    ends = np.cumsum([len(text) for text in texts])
    breaks = [found.end() for found in BREAKS[steps].finditer("".join(texts))]
    return [int(t) for t in np.searchsorted(ends, breaks, side="right") if t < len(texts)]


def valued(
    groups: Sequence[Group], grade: Callable[[list[tuple[Prompt, Completion]]], list[Grade]]
) -> list[Group]:
    """Grade the branches of all responses with ``grade``, and return the groups with the values of
    their steps instead of branches. Groups without branches are returned unchanged."""
    pairs = [
        (group.prompt, branched)
        for group in groups
        for completion in group.completions
        for branch in completion.branches or ()
        for branched in branch.completions
    ]
    grades = iter(grade(pairs) if pairs else ())
    return [_valued(group, grades) for group in groups]


def _valued(group: Group, branched: Iterator[Grade]) -> Group:
    """Return a group with the values of its steps instead of branches. ``branched`` yields the
    grades of the branches, in order. The value before a response's first step is the mean reward of
    the group's other responses."""
    if any(completion.branches is None for completion in group.completions):
        return group
    found = [_value(*pair, branched) for pair in group.graded]
    grades = tuple(grade for _, grade in found)
    for place, (completion, _) in enumerate(found):
        others = [g.reward for i, g in enumerate(grades) if i != place and not g.is_error]
        if others and len(completion.token_ids):
            assert completion.values is not None
            completion.values[np.argmax(completion.sampled)] = np.mean(others)
    return replace(group, completions=tuple(c for c, _ in found), grades=grades)


def _value(
    completion: Completion, grade: Grade, branched: Iterator[Grade]
) -> tuple[Completion, Grade]:
    """Return a completion with step values instead of branches, and its grade with the judge's
    costs of grading the branches added. The value of a step is the mean reward of its
    continuations; if none of them has a grade, the response's grade becomes an error."""
    values, tokens = np.full(len(completion.token_ids), np.nan, dtype=np.float32), 0
    count, errors = 0, list[str]()
    for start, completions in ((b.start, b.completions) for b in completion.branches or ()):
        grades = list(islice(branched, len(completions)))
        grade = add_costs(grade, grades)
        rewards = [own.reward for own in grades if not own.is_error]
        errors += [own.message or "no message" for own in grades if own.is_error]
        count += len(grades)
        tokens += sum(int(c.sampled[start:].sum()) for c in completions)
        if rewards:
            values[start] = np.mean(rewards)
        else:
            message = f"no continuation from token {start} has a grade: {grades[0].message}"
            grade = Grade(math.nan, {}, Status.ERROR, message, grade.cost)
    valued = replace(completion, branches=None, values=values, continued=tokens)
    return replace(valued, continuations=count, continuation_errors=tuple(errors)), grade


def describe_steps(groups: Sequence[Group]) -> dict[str, float]:
    """Compute ``steps_per_response``, the mean number of steps, ``continuation_errors``, the number
    of continuations without a grade, and ``continuation_tokens``, the number of tokens that were
    sampled for step values or greedy baselines. Metrics that do not apply are left out: the result
    is empty if the recipe samples neither."""
    completions = [c for group in groups for c in group.completions]
    counts = [np.isfinite(c.values).sum() for c in completions if c.values is not None]
    found = {"steps_per_response": float(np.mean(counts))} if counts else {}
    if counts:
        found["continuation_errors"] = float(sum(len(c.continuation_errors) for c in completions))
    continued = float(sum(c.continued for c in completions))
    return found | {"continuation_tokens": continued} if counts or continued else found
