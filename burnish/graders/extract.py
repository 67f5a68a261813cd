"""The answer in a response: each function returns its text, or None if there is no answer."""

from __future__ import annotations

import re
from collections.abc import Callable

_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?:\{|([-+]?[0-9](?:[0-9.,/]*[0-9])?))")
"""A box that is opened, or that holds a bare number; the word \\boxed alone is no box."""
_BRACES = re.compile(r"\\.|[{}]", re.DOTALL)
_NUMBER = re.compile(
    r"(?<![\w.])[-+]?[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?(?![0-9])"
    r"|(?:(?<![\w.)])[-+])?(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][-+]?[0-9]+|/[0-9]+)?",
    re.ASCII,
)


def answer_tags(response: str) -> str | None:
    """The answer in "… </think> <answer>ANSWER</answer>", strictly.

    The thinking is closed once, nothing but white space lies between it and the only pair of
    answer tags, and nothing but white space follows.
    """
    if any(response.count(tag) != 1 for tag in ("</think>", "<answer>", "</answer>")):
        return None
    tail = response[response.index("</think>") + len("</think>") :].strip()
    if not (tail.startswith("<answer>") and tail.endswith("</answer>")):
        return None
    return tail[len("<answer>") : -len("</answer>")].strip() or None


def boxed(response: str) -> str | None:
    r"""The answer in the last \boxed{ANSWER} or \fbox{ANSWER}; None if that box is not closed."""
    boxes = list(_BOX.finditer(response))
    if not boxes or boxes[-1][1]:
        return boxes[-1][1] if boxes else None
    begin, depth = boxes[-1].end(), 1
    for brace in _BRACES.finditer(response, begin):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return response[begin : brace.start()].strip() or None
    return None


def hashes(response: str) -> str | None:
    """The answer in the last line with "#### ANSWER", as GSM8K writes it."""
    _, mark, rest = response.rpartition("####")
    return (rest.strip().partition("\n")[0].strip() or None) if mark else None


def last_number(response: str) -> str | None:
    """The last number, whatever surrounds it: "60% of $1,200.50." gives 1,200.50."""
    found = _NUMBER.findall(response)
    return found[-1] if found else None


EXTRACTORS: dict[str, Callable[[str], str | None]] = {
    "r1_zero": answer_tags,
    "boxed": boxed,
    "hash": hashes,
    "last_number": last_number,
}
