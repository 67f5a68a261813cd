"""Asks a model for sentences with given words and keeps those that have them, as rows to learn.

    python examples/write_keywords.py sentences --recipe keywords-scratch --rows 1600
    burnish sft keywords-scratch-sft --data sentences

Each prompt is one of the recipe's. The first answer that earns the recipe's reward is kept. A fifth
of the rows, with words that the recipe holds out, goes to validation.jsonl.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import burnish
from burnish import config
from burnish.draws import Purpose
from burnish.graders.keywords import REWARDS
from burnish.schema.tasks import KeywordsTask
from burnish.tasks.keywords import HELD_OUT_SEED, ask, instruction, split_words

AT_ONCE = 128
"""Prompts that are asked together, at least."""
PATIENCE = 200
"""Prompts for each row before the model is given up."""


def rows_of(
    task: KeywordsTask, count: int, args: argparse.Namespace, *, validation: bool
) -> list[dict[str, Any]]:
    """So many rows, each with a prompt, an answer that has the words, and the words."""
    words = split_words(task)[validation]
    seed = HELD_OUT_SEED if validation else args.seed
    purpose = Purpose.VALIDATION if validation else Purpose.TRAIN
    kept: list[dict[str, Any]] = []
    asked = 0
    while len(kept) < count:
        if asked >= PATIENCE * count:
            raise SystemExit(
                f"only {len(kept)} of {count} rows after {asked} prompts: the model hardly ever "
                "has the words; sample more answers, or ask a better model"
            )
        more = range(asked, asked + max(AT_ONCE, count - len(kept)))
        drawn = [ask(task, words, seed, purpose, i).row["keywords"] for i in more]
        kept += good(task, drawn, args, seed=asked)
        asked = more.stop
        print(f"{min(len(kept), count)} of {count} rows after {asked} prompts")
    return kept[:count]


def good(
    task: KeywordsTask, words: list[list[str]], args: argparse.Namespace, *, seed: int
) -> Iterator[dict[str, Any]]:
    """A row for each prompt that an answer earned the reward for."""
    answers = burnish.generate(
        [instruction(some) for some in words],
        model=args.model,
        n=args.samples,
        temperature=args.temperature,
        max_tokens=args.max_tokens,
        seed=args.seed + seed,
        chat=task.chat,
    )
    reward = REWARDS[task.reward]
    for i, some in enumerate(words):
        for answer in answers[i * args.samples : (i + 1) * args.samples]:
            has_ended = answer.finish == "stop" or not task.must_end
            if has_ended and reward(answer.text, {"keywords": some})["reward"] > 0:
                text = answer.text.strip()
                yield {"prompt": answer.prompt, "answer": text, "keywords": some}
                break


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path, help="a new directory")
    parser.add_argument("--rows", type=int, default=500, help="in all (default: 500)")
    parser.add_argument("--recipe", default="keywords", help="whose words are asked for")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--samples", type=int, default=8, help="answers to a prompt (default: 8)")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--max-tokens", type=int, default=48, help="of an answer (default: 48)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    task = config.load(args.recipe).task
    assert isinstance(task, KeywordsTask), "the recipe asks for words"
    args.out.mkdir(parents=True)
    held_out = max(1, round(0.2 * args.rows))
    found = {
        "train": rows_of(task, args.rows - held_out, args, validation=False),
        "validation": rows_of(task, held_out, args, validation=True),
    }
    for name, rows in found.items():
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (args.out / f"{name}.jsonl").write_text(text, encoding="utf-8")
    print(f"learn them with: burnish sft --data {args.out}")


if __name__ == "__main__":
    main()
