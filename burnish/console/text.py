"""Formatting of counts and durations, and escaping of text for a terminal."""

from __future__ import annotations

PRINTED = "\n\t\u200d"
"""Characters that are not escaped although ``str.isprintable`` is false; the last joins emoji."""


def printable(text: str) -> str:
    """Escape control characters and other characters that can't be printed, so that model output
    can't control the terminal. Newlines, tabs and joined emoji are not changed."""
    return "".join(
        char if char in PRINTED or char.isprintable() else char.encode("unicode_escape").decode()
        for char in text
    )


def counted(number: int, noun: str) -> str:
    """Format a number with its noun, in the plural unless the number is 1: "1,000 steps"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def duration(seconds: float) -> str:
    """Format a number of seconds in the largest unit (days, hours, minutes) of which it is at least
    two, or else in seconds: "90 seconds", "2 minutes"."""
    for unit, size in (("day", 86_400), ("hour", 3_600), ("minute", 60)):
        if seconds >= 2 * size:
            return counted(round(seconds / size), unit)
    return counted(max(0, round(seconds)), "second")
