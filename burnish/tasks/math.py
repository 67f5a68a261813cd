r"""The math task: questions whose answers can be checked, from GSM8K, MATH or rows with the same
fields.

A row has its question in "question" or "problem", and its answer in "expected_answer", in "answer"
(in GSM8K, this field ends with "#### N") or, boxed, in "solution".
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from burnish.errors import DataError
from burnish.graders import extract
from burnish.graders.answers import MathGrader, gold_texts, readable
from burnish.randomness import Purpose, Stream, uniforms
from burnish.recipe.tasks import MathTask
from burnish.tasks.rows import MARKS, DataRow, Rows, check_text, load_rows
from burnish.tasks.text import (
    Question,
    TextTask,
    limits_of,
    make_rows_task,
    row_question,
    shuffled_question,
)

_PERCENT = re.compile(
    r"\b(?:what|which|how many)\b(?:\W+\w+){0,4}?\W+percent|\bas an? percent", re.IGNORECASE
)
_NUMBER = re.compile(r"([-+]?\d[\d,]*(?:\.\d+)?)\s*(?:\\?%)?")
_RESULT = re.compile(r"####|\\boxed\b")
_BREAK = re.compile(r"=|\n")


def hinted_question(rows: Sequence[DataRow], hints: float, seed: int, number: int) -> Question:
    """Return the training question at index ``number``, with probability ``hints`` extended by a
    hint: the beginning of the row's worked answer, up to a random equals sign or line end.

    With a hint, the rest of the answer is easier to find, and its reward is more informative
    (reverse curriculum, https://arxiv.org/abs/2402.05808). The question's ``part`` is "hinted" or
    "whole"; a row without a worked answer is always "whole".
    """
    whole = shuffled_question(rows, seed, number)
    candidates = beginnings(whole.row["solution"])
    drawn, position = uniforms(seed, Stream.TASK, number, Purpose.HINT, [0, 1])
    if not candidates or drawn >= hints:
        return replace(whole, part="whole")
    cut = int(position * len(candidates))
    return replace(whole, name=f"{whole.name}/{cut}", hint=candidates[cut], part="hinted")


def make_math(config: MathTask, *, seed: int, **how: Any) -> TextTask:
    """Build the math task of a recipe: load its rows, insert each question into the prompt
    template, and grade responses by their answers.

    ``how`` is passed to ``make_rows_task``. Raise a DataError if hints are set and no row has a
    worked answer.
    """
    train, validation = load_math_rows(config, seed=seed)
    if config.hints:
        if not any(beginnings(row["solution"]) for row in train):
            raise DataError(
                f"task.hints = {config.hints:g} needs worked answers (lines or equations before "
                f"#### or a box), and no row of {config.train} has one; leave it at 0"
            )
        how |= {
            "question": partial(hinted_question, train, config.hints, seed),
            "longest": _longest,
        }
    grader = MathGrader(config.answer_format, limits_of(config))
    return make_rows_task(config, (train, validation), grader, seed=seed, **how)


def _longest(row: DataRow) -> Question:
    """Return the row's question with the longest hint that it may get."""
    return replace(row_question(row), hint=["", *beginnings(row["solution"])][-1])


def beginnings(solution: Any) -> list[str]:
    """Return the beginnings of a worked answer, shortest first: one up to each equals sign and each
    line end before the result, without GSM8K's calculator annotations.

    The list is empty if ``solution`` is not a text with a result, which "####" or a box marks.
    """
    result = _RESULT.search(solution) if isinstance(solution, str) else None
    if result is None:
        return []
    worked = MARKS.sub("", solution[: result.start()]).strip()
    return [worked[: found.end()] for found in _BREAK.finditer(worked)]


def load_math_rows(config: MathTask, *, seed: int) -> tuple[Rows, Rows]:
    """Read and check the rows; return training and validation rows, each with "prompt", the
    question in the task's prompt template."""
    return load_rows(config, seed=seed, check=partial(_check_prompted, config))


def _check_prompted(config: MathTask, row: Any, where: str) -> DataRow:
    """Check a row; return it with "prompt", the question in the task's prompt template."""
    checked = check_row(row, where, is_mapped="answer" in config.columns)
    prompt = config.template.replace("{question}", checked["question"])
    return DataRow({**checked, "prompt": prompt}, where)


def check_row(row: Any, where: str, *, is_mapped: bool = False) -> DataRow:
    """Return the row with "question", "answer" (a list of right answers) and "solution" (the worked
    answer; None if the row has none), or raise a DataError.

    ``where`` describes the row's place for the error. ``is_mapped``: task.columns names the column
    of "answer", which then precedes "expected_answer".
    """
    fields = row if isinstance(row, dict) else {}
    question = fields.get("question", fields.get("problem"))
    if not isinstance(question, str) or not question.strip():
        known = ", ".join(map(repr, fields)) or "none"
        raise DataError(
            f"{where}: no text 'question' or 'problem', only {known}; if another field holds the "
            "question, set task.columns.question to its name"
        )
    worked = fields.get("solution", fields.get("answer"))
    for text in (question, worked):
        check_text(str(text), where)
    unread = ("expected_answer",) if is_mapped else ()
    answer = golds({key: fields[key] for key in fields if key not in unread}, question)
    if not answer or not all(map(readable, answer)):
        given = ", ".join(answer)[:40] or "none"
        raise DataError(
            f"{where}: the row needs an answer that can be parsed, got {given!r}; correct the row "
            "or leave it out"
        )
    return DataRow(fields | {"question": question, "answer": answer, "solution": worked}, where)


def golds(row: Mapping[str, Any], question: str) -> list[str]:
    """Return the right answers of a row with the question ``question``; an empty list if the row
    has none.

    For a question about a percentage both N and N% are right, although the grader reads 50% as 0.5,
    which differs from 50.
    """
    given = [row[f] for f in ("expected_answer", "answer", "solution") if row.get(f) is not None]
    solved = given == [row.get("solution")]  # only a boxed answer counts in a solution
    found = [_gold(text, solved) for text in gold_texts(given[0])] if given else []
    right = [gold for gold in found if gold]
    if not _PERCENT.search(question):
        return right
    numbers = [number[1] for gold in right if (number := _NUMBER.fullmatch(gold))]
    return list(dict.fromkeys([*right, *numbers, *(f"{number}%" for number in numbers)]))


def _gold(text: str, solved: bool) -> str | None:
    if "####" in text:
        marked = extract.hash_answer(text) or ""
        return marked.replace(",", "") if _NUMBER.fullmatch(marked) else marked
    return extract.boxed(text) or (None if solved else text.strip())
