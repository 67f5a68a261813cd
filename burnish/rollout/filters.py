"""Samples and groups that a rollout loses before anything is learned from it, counted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from reprlib import Repr

from burnish.errors import GraderError
from burnish.types import Group

SHOWN = 3
"""Messages that an error quotes."""
_SHORT = Repr()
_SHORT.maxstring = 80


def check_errors(groups: Sequence[Group], *, limit: float) -> None:
    """Raises once more than a share of ``limit`` of the grades are errors: the grader's own, or
    those of samples that the engine aborted.

    The error quotes each message with the first response, and its row, that it was said of.
    """
    first: dict[str, str] = {}
    failed = total = 0
    for group in groups:
        row = _SHORT.repr(group.prompt.reference)
        for completion, grade in zip(group.completions, group.grades, strict=True):
            total += 1
            failed += grade.is_error
            said = grade.message or "no message"
            if grade.is_error and said not in first:
                text = _SHORT.repr(completion.text)
                name = f"response {completion.sample_index} to {group.prompt.prompt_id}"
                first[said] = f"{name} ({text}, row {row}): {said}"
    if failed > limit * total:
        raise GraderError(
            f"{failed} of {total} responses got no grade, more than a share of {limit:g}; "
            "mend what the messages name, or raise rollout.max_errors. "
            f"{'; '.join(list(first.values())[:SHOWN])}{'; …' if len(first) > SHOWN else ''}"
        )


def drop_errors(groups: Sequence[Group]) -> tuple[list[Group], dict[str, float]]:
    """The groups without samples whose grade is an error (the grader's, or of a sample that the
    engine aborted), and how many samples and groups left.

    A group that has fewer than two samples left has no statistics and goes as a whole; its good
    samples count as dropped too. A group keeps its index.
    """
    kept = []
    for group in groups:
        good = [k for k, grade in enumerate(group.grades) if not grade.is_error]
        if len(good) == len(group.grades):
            kept.append(group)
        elif len(good) >= 2:
            completions = tuple(group.completions[k] for k in good)
            grades = tuple(group.grades[k] for k in good)
            kept.append(replace(group, completions=completions, grades=grades))
    samples = sum(len(g.grades) for g in groups) - sum(len(g.grades) for g in kept)
    return kept, {
        "rollout/dropped_samples": float(samples),
        "rollout/dropped_groups": float(len(groups) - len(kept)),
    }
