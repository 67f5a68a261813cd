"""The greedy response to each prompt: its reward is ReMax's baseline, and nobody learns from it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from burnish.draws import Stream
from burnish.engine.protocol import Request
from burnish.types import Completion, Grade, Group, Status

PART = "greedy"
"""The part of a grade that is the reward of the greedy response to the same prompt."""
Responses = list[tuple[Completion, ...]]
"""The completions of each request."""


class Greedy:
    """Adds a greedy response to the responses of each request."""

    def extend(
        self,
        requests: Sequence[Request],
        responses: Responses,
        complete: Callable[[list[Request]], Responses],
    ) -> Responses:
        """The responses, each request's greedy one last; held-out requests get none."""
        if any(request.stream is not Stream.TRAIN for request in requests):
            return responses
        found = complete([_greedy(request) for request in requests])
        return [(*own, *greedy) for own, greedy in zip(responses, found, strict=True)]


def _greedy(request: Request) -> Request:
    params = replace(request.params, temperature=0.0)
    return replace(request, request_id=f"{request.request_id}-greedy", n=1, params=params)


def has_greedy(group: Group) -> bool:
    """Whether the last response is the greedy baseline of the others."""
    *own, last = group.completions
    return bool(own) and last.params.temperature == 0 and own[0].params.temperature > 0


def add_costs(grade: Grade, others: Iterable[Grade]) -> Grade:
    """The grade with what the judge's calls for the other grades cost, added to its own cost."""
    total = Counter(grade.cost)
    for other in others:
        total.update(other.cost)
    return replace(grade, cost=dict(total))


def set_apart(group: Group) -> Group:
    """A graded group without its greedy response, if it has one beside others: the reward becomes a
    part of the other grades, its tokens count as continued from the first response, and the cost of
    its grade is added to the first grade.

    If the greedy response has no grade, the others are errors, too: they have no baseline.
    """
    if not has_greedy(group):
        return group
    (*own, last), (*grades, greedy) = group.completions, group.grades
    if greedy.is_error:
        told = f"the greedy response has no grade: {greedy.message}"
        grades = [Grade(math.nan, {}, Status.ERROR, told, g.cost) for g in grades]
    else:
        grades = [replace(g, parts={**g.parts, PART: greedy.reward}) for g in grades]
    grades[0] = add_costs(grades[0], [greedy])
    own[0] = replace(own[0], continued=own[0].continued + int(last.sampled.sum()))
    return replace(group, completions=tuple(own), grades=tuple(grades))
