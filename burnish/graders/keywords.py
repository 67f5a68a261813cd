"""Whether a response holds the words it was asked for, and whether it uses them in a sentence.

Two rewards, by name: "inclusion" asks that the words appear, "use" that they stand in sentences.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, Literal

Match = Literal["word", "substring"]
QUOTES = "\"'`“”„‟‘’‚‛«»"
MOST_USES = 2
"""How often a response may use one word."""
_ONLY_PUNCTUATION = re.compile(r"(?:[\W_]+(?:and[\W_]+)*)?")
Hit = tuple[int, int, str]
"""Where a keyword begins and ends in a text, and the keyword."""


def inclusion(response: str, keywords: Sequence[str], match: Match = "word") -> dict[str, float]:
    """inclusion = 1 if every keyword appears, case aside; fraction: how many of them do.

    match: "word" wants whole words ("red" is not in "reduced"), "substring" takes any place.
    """
    if isinstance(keywords, str) or not keywords or not all(keywords):
        raise ValueError(f"keywords must be a list of at least one word, got {keywords!r}")
    text = plain(response)
    found = sum(_pattern(word, match).search(text) is not None for word in keywords)
    every, fraction = float(found == len(keywords)), found / len(keywords)
    return {"reward": every, "inclusion": every, "fraction": fraction}


def use(response: str, keywords: Sequence[str], match: Match = "word") -> dict[str, float]:
    """reward = 1 if every keyword is used and none comes more than twice; used: the share used.

    A keyword is used if it appears outside a list. A list is three or more keywords, or two with a
    comma, a colon or quotation marks, with nothing but punctuation and "and" between them: "the
    red apple" uses both of its words, "red, apple" uses neither.
    """
    parts = inclusion(response, keywords, match)
    text, outside, uses = plain(response), set(), Counter[str]()
    for run in _runs(text, keywords, match):
        words = [word for *_, word in run]
        uses.update(words)
        if not _is_list(text, run):
            outside.update(words)
    used = len(outside) / len(set(keywords))
    earned = used == 1 and max(uses.values()) <= MOST_USES
    return parts | {"reward": float(earned), "used": used}


def _runs(text: str, keywords: Sequence[str], match: Match) -> list[list[Hit]]:
    """Keywords that follow each other with nothing but punctuation and "and" between them."""
    found = sorted(
        (hit.start(), hit.end(), word)
        for word in set(keywords)
        for hit in _pattern(word, match).finditer(text)
    )
    runs: list[list[Hit]] = []
    for hit in found:
        if runs and _ONLY_PUNCTUATION.fullmatch(text[runs[-1][-1][1] : hit[0]]):
            runs[-1].append(hit)
        else:
            runs.append([hit])
    return runs


def _is_list(text: str, run: Sequence[Hit]) -> bool:
    if len(run) != 2:
        return len(run) > 2
    (start, first_end, _), (second_start, end, _) = run
    around = text[:start][-1:], text[end:][:1]
    quoted = all(side and side in QUOTES for side in around)
    return quoted or any(mark in f",:{QUOTES}" for mark in text[first_end:second_start])


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
    """A built-in reward: reads the row's keywords and, if it has one, its match."""
    if "keywords" not in row:
        raise ValueError("this reward needs rows with a field keywords, a list of words")
    parts = score(response, row["keywords"], row.get("match", "word"))
    return parts | {"listed": float(lists(response, row["keywords"]))}


REWARDS = {"inclusion": partial(_graded, inclusion), "use": partial(_graded, use)}


@lru_cache(maxsize=4096)
def _pattern(word: str, match: Match) -> re.Pattern[str]:
    if match not in ("word", "substring"):
        raise ValueError(f"match must be word or substring, got {match!r}")
    bare = re.escape(plain(word))
    return re.compile(bare if match == "substring" else rf"(?<!\w){bare}(?!\w)")


def plain(text: str) -> str:
    return unicodedata.normalize("NFC", text).casefold()
