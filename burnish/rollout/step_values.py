"""Responses that go on from the steps of a response; their mean reward is the value of a step.

A response is cut into steps. From the beginning of each step but the first, the engine samples K
continuations. The value before a step is the mean reward of the K whole responses, which the task
grades as it grades any other. The value before the first step is the mean reward of the group's
other responses: they are samples from the prompt, too, and cost nothing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np

from burnish.draws import Stream
from burnish.engine.protocol import Request
from burnish.pieces.advantages import Remax, Vine
from burnish.progress import begin
from burnish.rollout.greedy import Greedy, add_costs
from burnish.schema.recipe import Recipe
from burnish.types import Branch, Completion, Finish, Grade, Group, IntArray, Prompt, Status
from burnish.wording import counted

BREAKS = {
    "lines": re.compile(r"\n\s*"),
    "sentences": re.compile(r"""[.!?]["')\]]*\s+|\n\s*"""),
}
"""The end of a step, and the space before the next one."""
Responses = list[tuple[Completion, ...]]
"""The completions of each request."""


@dataclass(frozen=True)
class Branching:
    steps: int | str
    """Tokens of a step, or a key of ``BREAKS``."""
    continuations: int
    group_size: int
    decode: Callable[[IntArray], list[str]]
    """Token ids to a text each."""

    def extend(
        self,
        requests: Sequence[Request],
        responses: Responses,
        complete: Callable[..., Responses],
    ) -> Responses:
        """The responses of the requests with their branches; held-out responses get none.

        ``complete`` gives the completions of requests, and takes a ``report``.
        """
        if any(request.stream is not Stream.TRAIN for request in requests):
            return responses
        asked = [list(map(self.starts, own)) for own in responses]
        further = [
            self._request(request, completion, start)
            for request, own, places in zip(requests, responses, asked, strict=True)
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
            for own, places in zip(responses, asked, strict=True)
        ]

    def starts(self, completion: Completion) -> list[int]:
        """The first token of each step but the first; a token that the system put there begins
        none."""
        if completion.finish is Finish.ABORT:
            return []
        texts = self.decode(completion.token_ids)
        if isinstance(completion.stop, int):
            texts[-1] = ""  # the end token is part of the last step
        actions = np.flatnonzero(completion.sampled)
        places = np.searchsorted(actions, starts_of(texts, self.steps))
        return [int(actions[place]) for place in np.unique(places) if 0 < place < len(actions)]

    def _request(self, request: Request, completion: Completion, start: int) -> Request:
        """Draws are apart from those of all other samples, steps and groups."""
        kept = ("token_ids", "logprobs", "versions", "sampled")
        begun = replace(completion, **{name: getattr(completion, name)[:start] for name in kept})
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
"""Samples more after the responses, to value them; None if a recipe needs no such samples."""


def branching(recipe: Recipe, decoder: Callable[[], Callable[[IntArray], list[str]]]) -> Steps:
    """``decoder`` gives the function from token ids to texts."""
    piece = recipe.objective.advantage
    if isinstance(piece, Remax):
        return Greedy()
    if not isinstance(piece, Vine):
        return None
    return Branching(piece.steps, piece.continuations, recipe.rollout.group_size, decoder())


def starts_of(texts: Sequence[str], steps: int | str) -> list[int]:
    """The first token of each step but the first, by the tokens' texts.

    A step begins with the token that holds the first character after a break.
    """
    if isinstance(steps, int):
        return list(range(steps, len(texts), steps))
    ends = np.cumsum([len(text) for text in texts])
    breaks = [found.end() for found in BREAKS[steps].finditer("".join(texts))]
    return [int(t) for t in np.searchsorted(ends, breaks, side="right") if t < len(texts)]


def valued(
    groups: Sequence[Group], grade: Callable[[list[tuple[Prompt, Completion]]], list[Grade]]
) -> list[Group]:
    """The groups with the values of their steps, for which ``grade`` grades the branches."""
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
    """``branched`` are the grades of the group's branches, in order."""
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
    """The completion with values in the place of its branches, and its grade, which has the costs
    of the branches' grades, too: an error if no continuation of one of its steps has a grade."""
    values, tokens = np.full(len(completion.token_ids), np.nan, dtype=np.float32), 0
    for start, completions in ((b.start, b.completions) for b in completion.branches or ()):
        grades = list(islice(branched, len(completions)))
        grade = add_costs(grade, grades)
        rewards = [own.reward for own in grades if not own.is_error]
        tokens += sum(int(c.sampled[start:].sum()) for c in completions)
        if rewards:
            values[start] = np.mean(rewards)
        else:
            told = f"no continuation from token {start} has a grade: {grades[0].message}"
            grade = Grade(math.nan, {}, Status.ERROR, told, grade.cost)
    return replace(completion, branches=None, values=values, continued=tokens), grade


def describe_steps(groups: Sequence[Group]) -> dict[str, float]:
    """The steps of a rollout, and the tokens that were sampled to value responses, in figures."""
    completions = [c for group in groups for c in group.completions]
    counts = [np.isfinite(c.values).sum() for c in completions if c.values is not None]
    found = {"steps_per_response": float(np.mean(counts))} if counts else {}
    continued = float(sum(c.continued for c in completions))
    return found | {"continuation_tokens": continued} if counts or continued else found
