"""Whether a response holds the words it was asked for."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal

Match = Literal["word", "substring"]


def inclusion(
    response: str, keywords: Sequence[str], match: Match = "word", partial: float = 0.0
) -> dict[str, float]:
    """inclusion = 1 if every keyword appears, case aside; fraction: how many of them do.

    match: "word" wants whole words ("red" is not in "reduced"), "substring" takes any place.
    partial: how much of the reward is for the fraction; the rest, by default all, is for inclusion.
    """
    if isinstance(keywords, str) or not keywords or not all(keywords):
        raise ValueError(f"keywords must be a list of at least one word, got {keywords!r}")
    text = _plain(response)
    found = sum(_pattern(word, match).search(text) is not None for word in keywords)
    every, fraction = float(found == len(keywords)), found / len(keywords)
    earned = every + partial * (fraction - every)
    return {"reward": earned, "inclusion": every, "fraction": fraction}


def reward(response: str, row: Mapping[str, Any]) -> dict[str, float]:
    """The built-in reward "keywords": reads the row's keywords and, where it has them, the rest."""
    if "keywords" not in row:
        raise ValueError("the reward 'keywords' needs rows with a field keywords, a list of words")
    return inclusion(response, row["keywords"], row.get("match", "word"), row.get("partial", 0.0))


@lru_cache(maxsize=4096)
def _pattern(word: str, match: Match) -> re.Pattern[str]:
    if match not in ("word", "substring"):
        raise ValueError(f"match must be word or substring, got {match!r}")
    bare = re.escape(_plain(word))
    return re.compile(bare if match == "substring" else rf"(?<!\w){bare}(?!\w)")


def _plain(text: str) -> str:
    return unicodedata.normalize("NFC", text).casefold()
