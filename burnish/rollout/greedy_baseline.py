"""ReMax's baseline: the reward of a greedy response to each prompt. The policy does not learn from
the greedy response itself."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from burnish.engine.protocol import Request
from burnish.randomness import Stream
from burnish.types import Completion, Grade, Group, Status

PART = "greedy"
"""Name of the grade's part that holds the reward of the greedy response to the same prompt."""
Responses = list[tuple[Completion, ...]]
"""For each request, its completions."""


class Greedy:
    """Samples one more response to each training prompt, with temperature 0."""

    def extend(
        self,
        requests: Sequence[Request],
        responses: Responses,
        complete: Callable[[list[Request]], Responses],
    ) -> Responses:
        """Sample a greedy response for each request with ``complete``, and return ``responses``
        with the greedy response appended to the responses of its request. If a request is not for
        training, such as for held-out prompts, return all responses unchanged."""
        if any(request.stream is not Stream.TRAIN for request in requests):
            return responses
        found = complete([_greedy(request) for request in requests])
        return [(*own, *greedy) for own, greedy in zip(responses, found, strict=True)]


def _greedy(request: Request) -> Request:
    params = replace(request.params, temperature=0.0, turn_temperatures=())
    return replace(request, request_id=f"{request.request_id}-greedy", n=1, params=params)


def has_greedy(group: Group) -> bool:
    """Return whether the last response of a group is the greedy baseline of the others: it has
    temperature 0, and the first response has a higher one."""
    *own, last = group.completions
    return bool(own) and last.params.temperature == 0 and own[0].params.temperature > 0


def add_costs(grade: Grade, others: Iterable[Grade]) -> Grade:
    """Return a copy of a grade whose cost (a judge's calls and tokens) includes the costs of the
    other grades."""
    total = Counter(grade.cost)
    for other in others:
        total.update(other.cost)
    return replace(grade, cost=dict(total))


def set_apart(group: Group) -> Group:
    """Return a graded group without its greedy response; a group without one is returned unchanged.

    The greedy reward is stored as the part `PART` of the other grades. The tokens of the greedy
    response and the cost of its grade are added to the first of the other responses. If the greedy
    response has no grade, the other grades become errors, because they have no baseline.
    """
    if not has_greedy(group):
        return group
    (*own, last), (*grades, greedy) = group.completions, group.grades
    if greedy.is_error:
        message = f"the greedy response has no grade: {greedy.message}"
        grades = [Grade(math.nan, {}, Status.ERROR, message, g.cost) for g in grades]
    else:
        grades = [replace(g, parts={**g.parts, PART: greedy.reward}) for g in grades]
    grades[0] = add_costs(grades[0], [greedy])
    own[0] = replace(own[0], continued=own[0].continued + int(last.sampled.sum()))
    return replace(group, completions=tuple(own), grades=tuple(grades))
