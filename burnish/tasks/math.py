r"""Math with answers that can be checked: GSM8K, MATH, and rows that are laid out like theirs.

A row has its question in "question" or "problem", and its answer in "expected_answer", in "answer"
(GSM8K ends it with "#### N") or, boxed, in "solution".
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from burnish.draws import Purpose, Stream, uniforms
from burnish.errors import DataError
from burnish.graders import extract
from burnish.graders.answers import MathGrader, gold_texts, readable
from burnish.schema.tasks import MathTask
from burnish.tasks import rows
from burnish.tasks.rows import MARKS, DataRow, check_text
from burnish.tasks.text import Question, TextTask, ask, ask_rows, ask_shuffled, limits_of

_PERCENT = re.compile(
    r"\b(?:what|which|how many)\b(?:\W+\w+){0,4}?\W+percent|\bas an? percent", re.IGNORECASE
)
_NUMBER = re.compile(r"([-+]?\d[\d,]*(?:\.\d+)?)\s*(?:\\?%)?")
_RESULT = re.compile(r"####|\\boxed\b")
_BREAK = re.compile(r"=|\n")


def ask_hinted(rows: Sequence[DataRow], hints: float, seed: int, number: int) -> Question:
    """A row's question. A share of the questions, ``hints``, goes on with the beginning of the
    row's worked answer, up to a break that is drawn: the rest is easier, and its reward says more
    (reverse curriculum, https://arxiv.org/abs/2402.05808)."""
    whole = ask_shuffled(rows, seed, number)
    begun = beginnings(whole.row["solution"])
    drawn, place = uniforms(seed, Stream.TASK, number, Purpose.HINT, [0, 1])
    if not begun or drawn >= hints:
        return replace(whole, part="whole")
    cut = int(place * len(begun))
    return replace(whole, name=f"{whole.name}/{cut}", hint=begun[cut], part="hinted")


def make_math(config: MathTask, *, seed: int, **how: Any) -> TextTask:
    """The task of a recipe's section."""
    train, validation = rows_of(config, seed=seed)
    for row in (*train, *validation):
        row["prompt"] = config.template.replace("{question}", row["question"])
    if config.hints:
        if not any(beginnings(row["solution"]) for row in train):
            raise DataError(
                f"task.hints = {config.hints:g} needs worked answers, lines or equations before "
                f"#### or a box, and no row of {config.train} has one; leave it at 0"
            )
        how |= {"question": partial(ask_hinted, train, config.hints, seed), "longest": _longest}
    grader = MathGrader(config.answer_format, limits_of(config))
    return ask_rows(config, (train, validation), grader, seed=seed, **how)


def _longest(row: DataRow) -> Question:
    """The row's question with its longest hint."""
    return replace(ask(row), hint=["", *beginnings(row["solution"])][-1])


def beginnings(solution: Any) -> list[str]:
    """A worked answer up to each equality sign and each end of a line, before its result is said;
    none of a text that does not say its result after #### or in a box."""
    result = _RESULT.search(solution) if isinstance(solution, str) else None
    if result is None:
        return []
    worked = MARKS.sub("", solution[: result.start()]).strip()
    return [worked[: found.end()] for found in _BREAK.finditer(worked)]


def rows_of(config: MathTask, *, seed: int) -> tuple[list[DataRow], list[DataRow]]:
    """Train and validation rows. Questions that are held out leave the training rows, white space
    and case aside."""
    train, validation = rows.rows_of(config, seed=seed, check=check_row)
    held_out = {_plain(row["question"]) for row in validation}
    kept = [row for row in train if _plain(row["question"]) not in held_out]
    if not kept:
        raise DataError("no row is left to train on; give others, or hold out fewer")
    return kept, validation


def _plain(question: str) -> str:
    return " ".join(question.casefold().split())


def check_row(row: Any, where: str) -> DataRow:
    """The row with "question", "answer" (a list of right answers) and "solution" (the worked answer
    if the row has one)."""
    fields = row if isinstance(row, dict) else {}
    question = fields.get("question", fields.get("problem"))
    if not isinstance(question, str) or not question.strip():
        known = ", ".join(map(repr, fields)) or "none"
        raise DataError(f"{where}: no text 'question' or 'problem', only {known}")
    worked = fields.get("solution", fields.get("answer"))
    for text in (question, worked):
        check_text(str(text), where)
    answer = golds(fields, question)
    if not answer or not all(map(readable, answer)):
        said = ", ".join(answer)[:40] or "none"
        raise DataError(
            f"{where}: the row needs an answer that can be parsed, got {said!r}; correct the row "
            "or leave it out"
        )
    return DataRow(fields | {"question": question, "answer": answer, "solution": worked}, where)


def golds(row: Mapping[str, Any], question: str) -> list[str]:
    """The right answers: the row's own, and for a question about a percentage both N and N%.

    (The grader itself takes a percentage for its hundredth, and 50 for something else than 50%.)
    """
    given = [row[f] for f in ("expected_answer", "answer", "solution") if row.get(f) is not None]
    solved = given == [row.get("solution")]  # then an answer that is not boxed is none
    found = [_gold(text, solved) for text in gold_texts(given[0])] if given else []
    right = [gold for gold in found if gold]
    if not _PERCENT.search(question):
        return right
    numbers = [number[1] for gold in right if (number := _NUMBER.fullmatch(gold))]
    return list(dict.fromkeys([*right, *numbers, *(f"{number}%" for number in numbers)]))


def _gold(text: str, solved: bool) -> str | None:
    if "####" in text:
        marked = extract.hashes(text) or ""
        return marked.replace(",", "") if _NUMBER.fullmatch(marked) else marked
    return extract.boxed(text) or (None if solved else text.strip())
