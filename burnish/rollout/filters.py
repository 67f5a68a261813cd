"""What a rollout's groups lose before anything is learned from them, counted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from burnish.errors import GraderError
from burnish.types import Grade, Group, Status

SHOWN = 3
"""Messages that an error quotes."""


def check_errors(groups: Sequence[Group], *, limit: float) -> None:
    """Raises once more than a share of ``limit`` of the grades are errors of the grader itself."""
    grades = [grade for group in groups for grade in group.grades]
    errors = [grade for grade in grades if _is_error(grade)]
    if len(errors) > limit * len(grades):
        messages = list(dict.fromkeys(grade.message or "no message" for grade in errors))
        shown = "; ".join(messages[:SHOWN])
        raise GraderError(
            f"the reward failed on {len(errors)} of {len(grades)} responses, more than a share of "
            f"{limit:g}: {shown}{'; …' if len(messages) > SHOWN else ''}"
        )


def drop_errors(groups: Sequence[Group]) -> tuple[list[Group], dict[str, float]]:
    """The groups without samples whose grade is an error (the grader's, or of a sample that the
    engine aborted), and how many samples and groups left.

    A group that has fewer than two samples left has no statistics and goes as a whole; its good
    samples count as dropped too. A group keeps its index.
    """
    kept = []
    for group in groups:
        pairs = [
            (completion, grade)
            for completion, grade in zip(group.completions, group.grades, strict=True)
            if not _is_error(grade)
        ]
        if len(pairs) == len(group.grades):
            kept.append(group)
        elif len(pairs) >= 2:
            completions, grades = zip(*pairs, strict=True)
            kept.append(replace(group, completions=completions, grades=grades))
    samples = sum(len(g.grades) for g in groups) - sum(len(g.grades) for g in kept)
    return kept, {
        "rollout/dropped_samples": float(samples),
        "rollout/dropped_groups": float(len(groups) - len(kept)),
    }


def _is_error(grade: Grade) -> bool:
    return grade.status is Status.ERROR
