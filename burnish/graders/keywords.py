"""Whether a response holds the words it was asked for, and whether it uses them in a sentence.

Two rewards, by name: "inclusion" asks that the words appear, "use" that they stand in sentences.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

QUOTES = "\"'`“”„‟‘’‚‛«»"
MOST_USES = 2
"""How often a response may use one word."""
_PUNCTUATION = r"(?:[\W_]+(?:and[\W_]+)*)?"
"""Nothing, or punctuation with "and" here and there."""


def inclusion(response: str, keywords: Sequence[str]) -> dict[str, float]:
    """inclusion = 1 if every keyword appears, case aside; fraction: how many of them do.

    Whole words count: "red" is not in "reduced".
    """
    if isinstance(keywords, str) or not keywords or not all(keywords):
        raise ValueError(f"keywords must be a list of at least one word, got {keywords!r}")
    text = plain(response)
    found = sum(re.search(_pattern(word), text) is not None for word in keywords)
    every, fraction = float(found == len(keywords)), found / len(keywords)
    return {"reward": every, "inclusion": every, "fraction": fraction}


def use(response: str, keywords: Sequence[str]) -> dict[str, float]:
    """reward = 1 if every keyword is used and none comes more than twice; used: the share used.

    A keyword is used if it appears outside a list. A list is three or more keywords, or two with a
    comma, a colon or quotation marks, with nothing but punctuation and "and" between them: "the
    red apple" uses both of its words, "red, apple" uses neither.
    """
    parts = inclusion(response, keywords)
    words = {plain(word) for word in keywords}
    outside: set[str] = set()
    uses: Counter[str] = Counter()
    for run, used_words in _runs(plain(response), words):
        uses.update(used_words)
        if not _is_list(run, used_words):
            outside.update(used_words)
    used = len(outside) / len(words)
    earned = used == 1 and max(uses.values()) <= MOST_USES
    return parts | {"reward": float(earned), "used": used}


def _runs(text: str, words: set[str]) -> Iterator[tuple[re.Match[str], list[str]]]:
    """Words that follow each other with nothing but punctuation and "and" between them."""
    word = "|".join(_pattern(word) for word in sorted(words, key=len, reverse=True))
    for run in re.finditer(rf"(?:{word})(?:{_PUNCTUATION}(?:{word}))*", text):
        yield run, re.findall(word, run[0])


def _is_list(run: re.Match[str], words: Sequence[str]) -> bool:
    if len(words) != 2:
        return len(words) > 2
    around = run.string[: run.start()][-1:], run.string[run.end() :][:1]
    between = run[0][len(words[0]) : -len(words[1])]
    quoted = all(side and side in QUOTES for side in around)
    return quoted or any(mark in f",:{QUOTES}" for mark in between)


def lists(response: str, keywords: Sequence[str]) -> bool:
    """Whether keywords stand side by side as in a list: a measure that no reward is made of.

    It reads the text word by word and takes more for a list than the reward "use" refuses: also
    "or", and any punctuation between two keywords.
    """
    wanted = {plain(word) for word in keywords}
    side_by_side, marked = 0, False
    for token in re.findall(r"\w+|[^\w\s]", plain(response)):
        if token in wanted:
            side_by_side += 1
            if side_by_side > 2 or (side_by_side == 2 and marked):
                return True
        elif token[0].isalnum() and token not in ("and", "or"):
            side_by_side, marked = 0, False
        elif side_by_side and not token[0].isalnum():
            marked = True
    return False


def _graded(
    score: Callable[..., dict[str, float]], response: str, row: Mapping[str, Any]
) -> dict[str, float]:
    """A built-in reward: reads the row's keywords."""
    if "keywords" not in row:
        raise ValueError("this reward needs rows with a field keywords, a list of words")
    parts = score(response, row["keywords"])
    return parts | {"listed": float(lists(response, row["keywords"]))}


REWARDS = {"inclusion": partial(_graded, inclusion), "use": partial(_graded, use)}


def _pattern(word: str) -> str:
    return rf"(?<!\w){re.escape(plain(word))}(?!\w)"


def plain(text: str) -> str:
    return unicodedata.normalize("NFC", text).casefold()
