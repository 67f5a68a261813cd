"""Responses of a model: rows to be read back, and a readable log, step by step."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from burnish.types import FloatArray, Group, IntArray, Prompt

ResponseRow = dict[str, Any]
"""A row of rollouts.jsonl or evaluations.jsonl: one response; ``rows`` writes its keys."""
READABLE = 512
"""Responses of a step in the readable log, in whole groups: a large rollout has megabytes."""


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
    are given per response, in the groups' order; they are None in a row if they were not given. The
    limit takes every group's first response, then every group's second, and so on; rows come in the
    groups' order.
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
        scored = None if learner_logprobs is None else _rounded(learner_logprobs[place])
        yield {
            "step": step,
            "group": group.index,
            "prompt_id": group.prompt.prompt_id,
            "prompt": group.prompt.text,
            "asked": _asked(group.prompt),
            "sample": completion.sample_index,
            "response": completion.text,
            "tokens": tokens,  # [C] as decoded, the end token included
            "logprobs": _rounded(completion.logprobs),  # [C] under the policy that sampled them
            "learner_logprobs": scored,
            "reward": _finite(grade.reward),
            "parts": {name: _finite(value) for name, value in grade.parts.items()},
            "status": str(grade.status),
            "advantage": None if advantages is None else _finite(advantages[place]),
            "finish": str(completion.finish),
            # The weights that sampled the first token; None if there are no tokens.
            "version": int(completion.versions[0]) if len(completion.versions) else None,
        }


def first_and_last(rows: Iterable[ResponseRow]) -> list[tuple[ResponseRow, ResponseRow]]:
    """The same prompt's same sample at the first and the last step that saw it, in the rows' order.

    Responses that were seen at one step only are left out.
    """
    seen: dict[tuple[str, int], list[ResponseRow]] = {}
    for row in rows:
        seen.setdefault((row["prompt_id"], row["sample"]), []).append(row)
    return [(same[0], same[-1]) for same in seen.values() if same[0]["step"] < same[-1]["step"]]


def _asked(prompt: Prompt) -> str:
    """The prompt without the chat template around it."""
    return prompt.text if prompt.asked is None else prompt.asked


def _rounded(values: FloatArray) -> list[float | None]:
    return [_finite(round(float(value), 4)) for value in values]


def _finite(value: float) -> float | None:
    """JSON has no NaN and no infinity."""
    return float(value) if math.isfinite(value) else None


def readable(step: int, groups: Sequence[Group], advantages: Sequence[float]) -> str:
    """One step as text; equal responses to a prompt are one line with their count."""
    lines = [f"step {step}"]
    given, written = iter(advantages), 0
    for number, group in enumerate(groups):
        written += len(group.grades)
        if number and written > READABLE:
            lines.append(f"  and {len(groups) - number} more prompts")
            break
        lines.append(f"  prompt {_asked(group.prompt)!r}")
        rows = Counter(
            (grade.reward, next(given), completion.text, _parts(grade.parts), grade.status)
            for completion, grade in zip(group.completions, group.grades, strict=True)
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
