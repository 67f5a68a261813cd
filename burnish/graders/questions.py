"""Rewards of questions with one right answer: "number", and "citations" for answers from documents.

"citations" is a rubric whose criteria are checked by rules. Grader workers import this file, so it
imports only the standard library.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from burnish.graders.rubric import share

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_CITATION = re.compile(r"\[([^\[\]\s]+)\]")
RIGHT, CITED, OTHER = 2.0, 1.0, -1.0
"""Weights of the criteria of the reward "citations"."""


def number(response: str, row: Mapping[str, Any]) -> dict[str, float]:
    """Return reward = 1 if the last number of the response is the row's "answer", otherwise 0."""
    found = _NUMBER.findall(response)
    return {"reward": float(bool(found) and found[-1].replace(",", "") == str(row["answer"]))}


def citations(response: str, row: Mapping[str, Any]) -> dict[str, float]:
    """Grade an answer with citations such as "1874 [mill.md] [anna-berg.md]" by a rubric.

    The criteria are: the text without citations is the row's "answer" (weight 2), each document of
    the row's "cites" is cited (weight 1 each), and another one is cited (weight −1). A citation
    counts only if the document's name occurs in a result of a tool. The reward is the share of
    `rubric.share`; an answer is correct if it meets all criteria but the last.
    """
    read = [m["content"] for m in row.get("messages", ()) if m["role"] in ("tool", "user")][1:]
    cited = set(_CITATION.findall(response))
    text = " ".join(_CITATION.sub(" ", response).split()).rstrip(" .").casefold()
    scores = {"right": text == str(row["answer"]).casefold()}
    for place, name in enumerate(row["cites"], 1):
        scores[f"cited_{place}"] = name in cited and any(name in result for result in read)
    scores["cited_other"] = bool(cited.difference(row["cites"]))
    weights = [RIGHT, *[CITED] * len(row["cites"]), OTHER]
    rubric = {name: (name, weight) for name, weight in zip(scores, weights, strict=True)}
    reward = share(rubric, list(map(int, scores.values())))
    parts = {name: float(value) for name, value in scores.items()}
    return {"reward": reward, **parts, "correct": reward == 1}


QUESTION_REWARDS = {"number": number, "citations": citations}
