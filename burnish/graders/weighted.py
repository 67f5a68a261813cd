"""Several rewards for each response: the reward is their weighted sum, and each is a part."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from burnish.graders.rewards import FULL, Outcome
from burnish.graders.tally import Items, Tally, as_grade
from burnish.types import Grade


class Scorer(Protocol):
    """A ``GraderPool`` or an ``InProcess`` grader."""

    def outcomes(self, items: Items, tally: Tally) -> list[Outcome]: ...

    def close(self) -> None: ...


class Member(NamedTuple):
    """One of the rewards."""

    name: str
    """Name of the part of the grade with this reward."""
    weight: float
    scorer: Scorer


class WeightedGrader:
    """A ``Grader`` that calls several rewards, one after the other, and combines their outcomes."""

    def __init__(self, members: Sequence[Member]) -> None:
        self.members = members

    def grade(self, items: Items) -> list[Grade]:
        tally = Tally(items, rewards=len(self.members))
        columns = [member.scorer.outcomes(items, tally) for member in self.members]
        return [as_grade(combine(self.members, row)) for row in zip(*columns, strict=True)]

    def close(self) -> None:
        for member in self.members:
            member.scorer.close()


def combine(members: Sequence[Member], outcomes: Sequence[Outcome]) -> Outcome:
    """Combine the outcomes of all rewards for one response.

    The reward is r = Σ_k w_k r_k. The parts are each r_k under its name, and the parts that reward
    k returned under "NAME_PART". The outcome is an error if a reward failed or two rewards have a
    part of the same name; otherwise the status is "timeout" or "unparsed" if a reward's is.

    If any reward returns "correct" as True or False, the response is correct if all of these are
    True. Otherwise it is correct if r ≥ Σ_k max(w_k, 0), both sums over the rewards that do not
    return "correct", and neither correct nor wrong if Σ_k max(w_k, 0) is 0.
    """
    pairs = list(zip(members, outcomes, strict=True))
    parts: dict[str, float] = {}
    for member, outcome in pairs:
        if outcome.status == "error":
            return outcome._replace(message=f"{member.name}: {outcome.message}")
        own = {f"{member.name}_{name}": value for name, value in outcome.parts.items()}
        if twice := parts.keys() & {member.name, *own}:
            said = f"{member.name}: the part {min(twice)} belongs to two rewards; rename one"
            return Outcome("error", math.nan, {}, said, cause="value")
        parts |= {member.name: outcome.reward} | own
    total = sum(member.weight * outcome.reward for member, outcome in pairs)
    status = next((s for s in ("timeout", "unparsed") for o in outcomes if o.status == s), "scored")
    return Outcome(status, total, parts, None, _is_correct(pairs))


def _is_correct(pairs: Sequence[tuple[Member, Outcome]]) -> bool | None:
    said = [o.correct for _, o in pairs if o.says_correct and o.correct is not None]
    if said:
        return all(said)
    counted = [(member.weight, o.reward) for member, o in pairs if not o.says_correct]
    most = sum(max(weight, 0.0) for weight, _ in counted)
    return sum(weight * reward for weight, reward in counted) >= FULL * most if most else None
