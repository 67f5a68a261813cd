"""Writes sums with answers worked term by term: a warm start for the recipe ``arithmetic``.

    python examples/write_sums.py sums
    burnish sft arithmetic-sft --data sums

The questions are those that the recipe trains on. No question comes twice, and none is one that the
recipe holds out. A fifth of the rows goes to validation.jsonl.

    python examples/write_sums.py small-sums --small
    burnish sft sums-sft

writes sums of one-digit numbers for a small model of one's own, with their running totals as
answers: rows for its warm start in train.jsonl, others for the recipe ``sums`` in questions.jsonl,
and held-out ones in validation.jsonl.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Iterator
from itertools import accumulate, islice, product
from pathlib import Path

from burnish import config
from burnish.model.tokenizer import Tokenizer
from burnish.tasks.gym import make_gym

TRIES = 200
"""Questions that are looked at for each row, before there are too few different ones."""


def worked(question: str) -> str:
    """The steps of "… 14 - 29 + 32 =", a line each: "29 - 10 = 19", "19 - 4 = 15", "14 - 29 = -15".

    Tens and ones come one after the other, and the smaller number is taken from the larger before
    the sign is set: a small model hardly ever does two of these things at once.
    """
    first, *rest = re.findall(r"([-+]?) ?([0-9]+)(?= *[-+=])", question)
    total, lines = int(first[1]), list[str]()
    for sign, term in rest:
        before, number = total, int(term)
        total += int(sign + term)
        crosses_zero = (before < 0 and sign == "+") or total < 0 <= before
        if crosses_zero and max(abs(before), number) > 9:
            small, large = sorted((abs(before), number))
            lines += by_places(large, "-", small)
            lines.append(f"{before} {sign} {term} = {total}")
        else:
            lines += by_places(before, sign, number)
    return "\n".join(lines)


def by_places(before: int, sign: str, number: int) -> Iterator[str]:
    places = [int(digit) * 10**k for k, digit in enumerate(reversed(str(number)))]
    for part in [part for part in reversed(places) if part] or [0]:
        after = before + int(f"{sign}{part}")
        yield f"{before} {sign} {part} = {after}"
        before = after


def questions(count: int, seed: int) -> list[str]:
    """Different questions of the recipe, in the order of its training prompts."""
    recipe = config.load("arithmetic", {"seed": seed})
    tokenizer = Tokenizer.of_bytes()  # any tokenizer: only texts are read
    endless = recipe.task.model_copy(update={"train_prompts": None})
    task = make_gym(endless, tokenizer=tokenizer, seed=recipe.seed)
    found: dict[str, None] = {}
    for index in range(TRIES * count):
        found[task.prompt(index).reference["entry"]["question"]] = None
        if len(found) == count:
            return list(found)
    raise SystemExit(f"only {len(found)} questions differ; ask for fewer rows")


def small_rows(seed: int) -> list[dict[str, str]]:
    """All sums of two to four numbers from 1 to 9, shuffled: "3+4+9=", worked as "07", "16"."""
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


def row(question: str) -> dict[str, str]:
    answer = worked(question)
    return {
        "prompt": question,
        "question": question,
        "answer": answer,
        "expected_answer": answer.rpartition(" ")[2],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path, help="a new directory")
    parser.add_argument("--rows", type=int, default=4000, help="in all (default: 4000)")
    parser.add_argument("--small", action="store_true", help="bare sums of one-digit numbers")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.out.mkdir(parents=True)
    if args.small:
        made = small_rows(args.seed)
        cuts = {"validation": 256, "train": 4000, "questions": len(made) - 4256}
    else:
        made = [row(question) for question in questions(args.rows, args.seed)]
        held_out = max(1, round(0.2 * args.rows))
        cuts = {"validation": held_out, "train": args.rows - held_out}
    rest = iter(made)
    for name, count in cuts.items():
        text = "".join(json.dumps(one) + "\n" for one in islice(rest, count))
        (args.out / f"{name}.jsonl").write_text(text, encoding="utf-8")
    recipe = "sums-sft" if args.small else "arithmetic-sft"
    print(f"learn them with: burnish sft {recipe} --data {args.out}")


if __name__ == "__main__":
    main()
