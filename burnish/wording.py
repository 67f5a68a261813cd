"""Numbers in sentences: counts with their noun, and spans of time."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """The number and its noun, which takes an s unless the number is 1."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def duration(seconds: float) -> str:
    """A span of time in the largest unit of which it has two, or in seconds."""
    for unit, size in (("day", 86_400), ("hour", 3_600), ("minute", 60)):
        if seconds >= 2 * size:
            return counted(round(seconds / size), unit)
    return counted(max(0, round(seconds)), "second")
