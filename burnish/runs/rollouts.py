"""The readable log of a run: prompts, responses, rewards and advantages, step by step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from burnish.types import Group


def readable(step: int, groups: Sequence[Group], advantages: Sequence[float]) -> str:
    """One step as text; equal responses to a prompt are one line with their count."""
    lines = [f"step {step}"]
    position = 0
    for group in groups:
        lines.append(f"  prompt {group.prompt.text!r}")
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
                f"    {count:3d} × {text!r}  reward {reward:g} ({parts})"
                f"  advantage {advantage:+.4f}{note}"
            )
    return "\n".join(lines) + "\n"


def _parts(parts: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in parts.items())
