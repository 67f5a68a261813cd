"""What a rollout's groups lose before anything is learned from them, counted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from reprlib import Repr

from burnish.errors import GraderError
from burnish.types import Completion, Grade, Group, Prompt, Status

SHOWN = 3
"""Messages that an error quotes."""
_SHORT = Repr()
_SHORT.maxstring = 80


def check_errors(groups: Sequence[Group], *, limit: float) -> None:
    """Raises once more than a share of ``limit`` of the grades are errors: the grader's own, or
    those of samples that the engine aborted.

    The error quotes each message with the first response, and its row, that it was said of.
    """
    graded = [
        (group.prompt, completion, grade)
        for group in groups
        for completion, grade in zip(group.completions, group.grades, strict=True)
    ]
    failed = [item for item in graded if _is_error(item[2])]
    if len(failed) <= limit * len(graded):
        return
    first: dict[str, tuple[Prompt, Completion]] = {}
    for prompt, completion, grade in failed:
        first.setdefault(grade.message or "no message", (prompt, completion))
    shown = [
        f"response {completion.sample_index} to {prompt.prompt_id} "
        f"({_SHORT.repr(completion.text)}, row {_SHORT.repr(prompt.reference)}): {message}"
        for message, (prompt, completion) in list(first.items())[:SHOWN]
    ]
    raise GraderError(
        f"{len(failed)} of {len(graded)} responses got no grade, more than a share of {limit:g}; "
        "mend what the messages name, or raise rollout.max_errors. "
        f"{'; '.join(shown)}{'; …' if len(first) > SHOWN else ''}"
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
