"""Writes sums whose worked answers are followed by no check, one check or two checks.

    python examples/write_checked.py checked-sums
    burnish sft sums-sft --data checked-sums --set model.layers=2 --set model.width=64 \
        --set model.d_ff=172 --set task.epochs=8 --out runs/checked-sft
    burnish sweep experiments/shorter.toml

A row asks "3+4+2+5=" and answers "07 09 14,07 09 14=14": running totals, here with one check, and
the result. A check repeats the running totals. Checks make a response longer but not better, so
that a policy can learn to leave them out. Rows for the warm start are in train.jsonl, other rows
for reinforcement learning in questions.jsonl, and held-out rows in validation.jsonl.
"""

from __future__ import annotations

import argparse
import json
import random
from itertools import accumulate, product
from pathlib import Path

CUTS = {"validation": (0, 256), "train": (256, 4256), "questions": (4256, 6561)}


def row(terms: tuple[int, ...], checks: int) -> dict[str, str]:
    question = "+".join(map(str, terms)) + "="
    worked = " ".join(f"{total:02d}" for total in list(accumulate(terms))[1:])
    answer = f"{','.join([worked] * (1 + checks))}={sum(terms):02d}"
    result = str(sum(terms))
    return {"prompt": question, "question": question, "answer": answer, "expected_answer": result}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path, help="a new directory")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.out.mkdir(parents=True)
    every = list(product(range(1, 10), repeat=4))
    random.Random(args.seed).shuffle(every)
    rows = [row(terms, checks=number % 3) for number, terms in enumerate(every)]
    for name, (first, end) in CUTS.items():
        text = "".join(json.dumps(one) + "\n" for one in rows[first:end])
        (args.out / f"{name}.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
