"""Writes the 200 sums and differences of two digits, and preference pairs made from them.

    python examples/write_digits.py digits
    burnish sft sums-sft --data digits --set task.epochs=40 --set train.learning_rate=5e-3
    burnish reward --data digits/pairs --set model.name=runs/sums-sft-1 --set task.chat=false

train.jsonl holds all 200 questions; validation.jsonl has 40 of them. The recipe ``sums`` does not
train on these 40 (`--set task.train=digits/train.jsonl`), but a warm start does. A pair has the
right result as the chosen response, and one that is off by five, ten or twenty as the rejected one;
a sixth of the pairs is held out.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterable
from pathlib import Path

HELD_OUT = 40
OFF = (-20, -10, -5, 5, 10, 20)


def write(path: Path, rows: Iterable[dict[str, str]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path, help="a directory")
    args = parser.parse_args()
    draw = random.Random(0)
    sums = [(f"{a} {sign} {b} =", a + b if sign == "+" else a - b)
            for a in range(10) for b in range(10) for sign in "+-"]  # fmt: skip
    draw.shuffle(sums)
    rows = [{"prompt": q, "question": q, "answer": str(n), "expected_answer": str(n)}
            for q, n in sums]  # fmt: skip
    write(args.out / "train.jsonl", rows)
    write(args.out / "validation.jsonl", rows[:HELD_OUT])
    pairs = [{"prompt": f"{q}\n", "chosen": str(n), "rejected": str(n + off)}
             for q, n in sums for off in OFF]  # fmt: skip
    draw.shuffle(pairs)
    write(args.out / "pairs" / "validation.jsonl", pairs[: len(sums)])
    write(args.out / "pairs" / "train.jsonl", pairs[len(sums) :])


if __name__ == "__main__":
    main()
