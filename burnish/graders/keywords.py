"""Keyword rewards: "inclusion" requires that all keywords appear, "use" that sentences use them."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

QUOTES = "\"'`“”„‟‘’‚‛«»"
MOST_USES = 2
"""Maximum number of times that one keyword may appear in a response, for the reward "use"."""
_PUNCTUATION = r"(?:[\W_]+(?:and[\W_]+)*)?"
"""Pattern of optional spaces and punctuation, with any number of "and" between them."""


def inclusion(response: str, keywords: Sequence[str]) -> dict[str, float]:
    """Return reward = inclusion = 1 if every keyword appears in the response, otherwise 0, and
    fraction, the share of the keywords that appear.

    Case is ignored, and only whole words count: "red" is not in "reduced". Raise ValueError unless
    ``keywords`` is a list of at least one word.
    """
    if isinstance(keywords, str) or not keywords or not all(keywords):
        raise ValueError(f"keywords must be a list of at least one word, got {keywords!r}")
    text = plain(response)
    found = sum(re.search(_pattern(word), text) is not None for word in keywords)
    every, fraction = float(found == len(keywords)), found / len(keywords)
    return {"reward": every, "inclusion": every, "fraction": fraction}


def use(response: str, keywords: Sequence[str]) -> dict[str, float]:
    """Return reward = 1 if every keyword is used and none appears more than twice, otherwise 0; and
    used, the share of the keywords that are used, beside the parts of ``inclusion``.

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
    """Find the sequences of keywords with only spaces, punctuation and "and" between them; yield
    the match of each sequence and its keywords."""
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
    """Return whether keywords stand side by side as in a list: a metric that no reward uses.

    It reads the text word by word and is stricter than the reward "use": "or", and any punctuation
    between two keywords, also make a list.
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
    """Score a response by the row's keywords, with ``inclusion`` or ``use``; add the part "listed",
    which is 1 if ``lists`` finds a list."""
    if "keywords" not in row:
        raise ValueError("this reward needs rows with a field keywords, a list of words")
    parts = score(response, row["keywords"])
    return parts | {"listed": float(lists(response, row["keywords"]))}


REWARDS = {"inclusion": partial(_graded, inclusion), "use": partial(_graded, use)}


def _pattern(word: str) -> str:
    return rf"(?<!\w){re.escape(plain(word))}(?!\w)"


def plain(text: str) -> str:
    """Return a text as it is compared: casefolded, with characters in their composed form (NFC)."""
    return unicodedata.normalize("NFC", text).casefold()
