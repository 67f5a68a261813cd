"""Responses of a model: rows to be read back, and a readable log, step by step."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypedDict, cast

from burnish.errors import RunError
from burnish.runs.metrics import iterate_rows
from burnish.types import FloatArray, Group, IntArray, Prompt


class ResponseRow(TypedDict):
    """A row of rollouts.jsonl or evaluations.jsonl: one response."""

    step: int
    group: int
    prompt_id: str
    prompt: str
    asked: str
    """The prompt without the chat template around it."""
    sample: int
    response: str
    tokens: list[str]
    """As decoded, the end token included; their length is C."""
    logprobs: list[float | None]
    """[C] under the policy that sampled the tokens; None where a value was not finite."""
    learner_logprobs: list[float | None] | None
    """[C] under the learner before its first step on them; None if it did not score them then."""
    reward: float | None
    parts: dict[str, float | None]
    status: str
    advantage: float | None
    """None for validation."""
    finish: str
    version: int | None
    """The weights that sampled the first token; None if there are no tokens."""


def rows(
    step: int,
    groups: Sequence[Group],
    *,
    decode: Callable[[IntArray], list[str]],
    advantages: Sequence[float] | None = None,
    learner_logprobs: Sequence[FloatArray] | None = None,
    limit: int | None = None,
) -> Iterator[ResponseRow]:
    """A step's responses as rows, at most ``limit`` of them.

    ``decode`` turns token ids into one string each. ``advantages`` and ``learner_logprobs`` [C]
    are given per response, in the groups' order. The limit takes every group's first response,
    then every group's second, and so on; rows come in the groups' order.
    """
    ranked = [(k, g) for g, group in enumerate(groups) for k in range(len(group.completions))]
    chosen = set(sorted(ranked)[:limit])
    for place, (k, g) in enumerate(ranked):
        if (k, g) not in chosen:
            continue
        group = groups[g]
        completion, grade = group.completions[k], group.grades[k]
        tokens = decode(completion.token_ids)
        assert len(tokens) == len(completion.token_ids)
        yield ResponseRow(
            step=step,
            group=group.index,
            prompt_id=group.prompt.prompt_id,
            prompt=group.prompt.text,
            asked=asked(group.prompt),
            sample=completion.sample_index,
            response=completion.text,
            tokens=tokens,
            logprobs=_rounded(completion.logprobs),
            learner_logprobs=(
                None if learner_logprobs is None else _rounded(learner_logprobs[place])
            ),
            reward=_finite(grade.reward),
            parts={name: _finite(value) for name, value in grade.parts.items()},
            status=str(grade.status),
            advantage=None if advantages is None else _finite(advantages[place]),
            finish=str(completion.finish),
            version=int(completion.versions[0]) if len(completion.versions) else None,
        )


def asked(prompt: Prompt) -> str:
    """The prompt without the chat template around it."""
    return prompt.text if prompt.asked is None else prompt.asked


def read(path: Path, reach: int | None = None) -> Iterator[ResponseRow]:
    """The rows of rollouts.jsonl or evaluations.jsonl; none where there is no file.

    reach: how many bytes are read at each end of the file, None for all of it.
    """
    for number, row in enumerate(iterate_rows(path, reach), 1):
        missing = ResponseRow.__annotations__.keys() - row.keys()
        if missing:
            lacks = ", ".join(sorted(missing))
            raise RunError(f"{path}, line {number}, is not a rollout: it lacks {lacks}")
        yield cast(ResponseRow, row)


def _rounded(values: FloatArray) -> list[float | None]:
    return [_finite(round(float(value), 4)) for value in values]


def _finite(value: float) -> float | None:
    """JSON has no NaN and no infinity."""
    return float(value) if math.isfinite(value) else None


READABLE = 512
"""Responses of a step in the readable log, in whole groups: a large rollout has megabytes."""


def readable(step: int, groups: Sequence[Group], advantages: Sequence[float]) -> str:
    """One step as text; equal responses to a prompt are one line with their count."""
    lines = [f"step {step}"]
    position = 0
    for number, group in enumerate(groups):
        if position and position + len(group.grades) > READABLE:
            lines.append(f"  and {len(groups) - number} more prompts")
            break
        lines.append(f"  prompt {asked(group.prompt)!r}")
        given = advantages[position : position + len(group.grades)]
        position += len(group.grades)
        rows = Counter(
            (grade.reward, advantage, completion.text, _parts(grade.parts), grade.status)
            for completion, grade, advantage in zip(
                group.completions, group.grades, given, strict=True
            )
        )
        for (reward, advantage, text, parts, status), count in sorted(rows.items(), reverse=True):
            note = "" if status == "scored" else f"  [{status}]"
            lines.append(
                f"    {count:3d} × {text!r}  reward {reward:zg} ({parts})"
                f"  advantage {advantage:+z.4f}{note}"
            )
    return "\n".join(lines) + "\n"


def _parts(parts: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:zg}" for name, value in parts.items())
