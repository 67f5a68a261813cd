"""Whether a response holds the words it was asked for."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal

Match = Literal["word", "substring"]


def inclusion(response: str, keywords: Sequence[str], match: Match = "word") -> dict[str, float]:
    """inclusion = 1 if every keyword appears, case aside; fraction: how many of them do.

    match: "word" wants whole words ("red" is not in "reduced"), "substring" takes any place.
    """
    if isinstance(keywords, str) or not keywords or not all(keywords):
        raise ValueError(f"keywords must be a list of at least one word, got {keywords!r}")
    found = len(found_at(response, keywords, match))
    every, fraction = float(found == len(keywords)), found / len(keywords)
    return {"reward": every, "inclusion": every, "fraction": fraction}


def found_at(response: str, keywords: Sequence[str], match: Match = "word") -> list[int]:
    """Where each keyword that appears first ends, in rising order: characters of ``plain`` text."""
    text = plain(response)
    matches = [_pattern(word, match).search(text) for word in keywords]
    return sorted(found.end() for found in matches if found is not None)


def reward(response: str, row: Mapping[str, Any]) -> dict[str, float]:
    """The built-in reward "keywords": reads the row's keywords and, where it has them, the rest."""
    if "keywords" not in row:
        raise ValueError("the reward 'keywords' needs rows with a field keywords, a list of words")
    return inclusion(response, row["keywords"], row.get("match", "word"))


@lru_cache(maxsize=4096)
def _pattern(word: str, match: Match) -> re.Pattern[str]:
    if match not in ("word", "substring"):
        raise ValueError(f"match must be word or substring, got {match!r}")
    bare = re.escape(plain(word))
    return re.compile(bare if match == "substring" else rf"(?<!\w){bare}(?!\w)")


def plain(text: str) -> str:
    return unicodedata.normalize("NFC", text).casefold()
