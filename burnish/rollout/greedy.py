"""The greedy response to each prompt: its reward is ReMax's baseline, and nobody learns from it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
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


def set_apart(group: Group) -> Group:
    """A graded group without its greedy response, if it has one beside others: the reward becomes a
    part of the other grades, and its tokens count as continued from the first response.

    If the greedy response has no grade, the others are errors, too: they have no baseline.
    """
    if not has_greedy(group):
        return group
    (*own, last), (*grades, greedy) = group.completions, group.grades
    if greedy.is_error:
        told = f"the greedy response has no grade: {greedy.message}"
        grades = [Grade(math.nan, status=Status.ERROR, message=told)] * len(own)
    else:
        grades = [replace(g, parts={**g.parts, PART: greedy.reward}) for g in grades]
    own[0] = replace(own[0], continued=own[0].continued + int(last.sampled.sum()))
    return replace(group, completions=tuple(own), grades=tuple(grades))
