"""Rows with sums whose answers are worked term by term, for the warm starts of two recipes.

The recipe ``arithmetic`` starts from sums of the kind that it asks for; ``sums`` starts from all
sums of one-digit numbers. `burnish data` writes both.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from itertools import accumulate, product

from burnish.errors import DataError
from burnish.recipe.tasks import GymTask

PATIENCE = 10_000
"""Give up after this many consecutive draws of a question that was drawn before."""


def work_sum(question: str) -> str:
    """Return the worked answer of a question, one step per line.

    "14 - 29 + 32 =" begins with "29 - 10 = 19", "19 - 4 = 15" and "14 - 29 = -15". Tens and ones
    are separate steps, and the smaller number is subtracted from the larger one before the sign is
    set, because a small model rarely does two of these things in one step.
    """
    first, *rest = re.findall(r"([-+]?) ?([0-9]+)(?= *[-+=])", question)
    total, lines = int(first[1]), list[str]()
    for sign, term in rest:
        before, number = total, int(term)
        total += int(sign + term)
        crosses_zero = (before < 0 and sign == "+") or total < 0 <= before
        if crosses_zero and max(abs(before), number) > 9:
            small, large = sorted((abs(before), number))
            lines += _by_places(large, "-", small)
            lines.append(f"{before} {sign} {term} = {total}")
        else:
            lines += _by_places(before, sign, number)
    return "\n".join(lines)


def _by_places(before: int, sign: str, number: int) -> Iterator[str]:
    places = [int(digit) * 10**k for k, digit in enumerate(reversed(str(number)))]
    for part in [part for part in reversed(places) if part] or [0]:
        after = before + int(f"{sign}{part}")
        yield f"{before} {sign} {part} = {after}"
        before = after


def sum_row(question: str) -> dict[str, str]:
    """Return the row of a question: its worked answer, and the sum alone as expected answer."""
    answer = work_sum(question)
    return {
        "prompt": question,
        "question": question,
        "answer": answer,
        "expected_answer": answer.rpartition(" ")[2],
    }


def draw_sums(task: GymTask, count: int, seed: int) -> list[dict[str, str]]:
    """Return rows for ``count`` different training questions of a task, in the order of its
    prompts. None of them is a question that the task holds out.

    Raise a DataError if the task's generator has fewer different questions.
    """
    from burnish.model.tokenizer import Tokenizer
    from burnish.tasks.gym import make_gym

    endless = task.model_copy(update={"train_prompts": None})
    tokenizer = Tokenizer.of_bytes()  # any tokenizer: only texts are read
    drawn = make_gym(endless, tokenizer=tokenizer, seed=seed)
    found: dict[str, None] = {}
    last = index = 0
    while len(found) < count:
        question = drawn.prompt(index).reference["entry"]["question"]
        last = last if question in found else index
        found[question] = None
        index += 1
        if index - last > PATIENCE:
            raise DataError(
                f"{count} rows were requested, but there are only {len(found)} different "
                f"questions; use --rows {len(found)}"
            )
    return [sum_row(question) for question in found]


def small_sums(seed: int) -> list[dict[str, str]]:
    """Return rows for all sums of two to four numbers from 1 to 9, shuffled; the answer to "3+4+9="
    has the lines "07" and "16"."""
    every = [terms for n in (2, 3, 4) for terms in product(range(1, 10), repeat=n)]
    random.Random(seed).shuffle(every)
    return [
        {
            "prompt": (asked := "+".join(map(str, terms)) + "="),
            "question": asked,
            "answer": "\n".join(f"{total:02d}" for total in list(accumulate(terms))[1:]),
            "expected_answer": str(sum(terms)),
        }
        for terms in every
    ]
