"""Numbers in sentences, spans of time, and text that is safe to print."""

from __future__ import annotations

PRINTED = "\n\t\u200d"
"""Characters that are printed though they are not "printable"; the last one joins emoji."""


def printable(text: str) -> str:
    """Spells control characters out: what a model writes must not steer a terminal."""
    return "".join(
        char if char in PRINTED or char.isprintable() else char.encode("unicode_escape").decode()
        for char in text
    )


def counted(number: int, noun: str) -> str:
    """The number and its noun, which takes an s unless the number is 1."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def duration(seconds: float) -> str:
    """A span of time in the largest unit of which it has two, or in seconds."""
    for unit, size in (("day", 86_400), ("hour", 3_600), ("minute", 60)):
        if seconds >= 2 * size:
            return counted(round(seconds / size), unit)
    return counted(max(0, round(seconds)), "second")
