"""Extract the answer from a response. Each function returns the answer's text, or None."""

from __future__ import annotations

import re
from collections.abc import Callable

_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?:\{|([-+]?[0-9](?:[0-9.,/]*[0-9])?))")
r"""Matches \boxed{ or \fbox{ up to the brace, or a whole box around a bare number: \boxed 5."""
_BRACES = re.compile(r"\\.|[{}]", re.DOTALL)
_NUMBER = re.compile(
    r"(?<![\w.])[-+]?[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?(?![0-9])"
    r"|(?:(?<![\w.)])[-+])?(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][-+]?[0-9]+|/[0-9]+)?",
    re.ASCII,
)


def answer_tags(response: str) -> str | None:
    """Return the answer in "… </think> <answer>ANSWER</answer>", or None.

    The result is None unless each of the three tags appears exactly once, only white space stands
    between </think> and <answer> and after </answer>, and the answer is not empty.
    """
    if any(response.count(tag) != 1 for tag in ("</think>", "<answer>", "</answer>")):
        return None
    tail = response[response.index("</think>") + len("</think>") :].strip()
    if not (tail.startswith("<answer>") and tail.endswith("</answer>")):
        return None
    return tail[len("<answer>") : -len("</answer>")].strip() or None


def boxed(response: str) -> str | None:
    r"""Return the content of the last box: \boxed{ANSWER}, \fbox{ANSWER} or \boxed 5.

    Return None if the response has no box, or if its last box is empty or not closed. Without
    braces, only a number is a box's content.
    """
    boxes = list(_BOX.finditer(response))
    if not boxes or boxes[-1][1]:
        return boxes[-1][1] if boxes else None
    begin, depth = boxes[-1].end(), 1
    for brace in _BRACES.finditer(response, begin):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return response[begin : brace.start()].strip() or None
    return None


def hash_answer(response: str) -> str | None:
    """Return the first line of text after the last "####", where GSM8K writes the answer.

    Return None if the response has no "####", or no text after the last one.
    """
    _, mark, rest = response.rpartition("####")
    return (rest.strip().partition("\n")[0].strip() or None) if mark else None


def last_number(response: str) -> str | None:
    """Return the last number as it is written: "60% of $1,200.50." gives "1,200.50".

    Return None if the response has no number.
    """
    found = _NUMBER.findall(response)
    return found[-1] if found else None


EXTRACTORS: dict[str, Callable[[str], str | None]] = {
    "r1_zero": answer_tags,
    "boxed": boxed,
    "hash": hash_answer,
    "last_number": last_number,
}
