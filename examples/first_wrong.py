"""Looks where VinePPO puts the blame: at the line that went wrong?

    burnish train sums --set objective.advantage=vine --set train.steps=1 --set log.rollouts=128
    python examples/first_wrong.py runs/sums-1

Reads the responses that a run kept, to sums worked line by line. The first wrong line of a wrong
response is the first that differs from the worked answer. The script counts how often the step with
the lowest advantage is that line. An advantage per response, such as GRPO's, is the same for all
lines, and points at the right one as often as a guess does.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from write_sums import worked


class Case(NamedTuple):
    lines: list[str]
    gains: list[float]
    """The advantage of each line."""
    wrong: int
    """The first wrong line."""


def cases(rows: list[dict[str, Any]]) -> Iterator[Case]:
    """Wrong responses of several lines, each line a step, that leave the worked answer."""
    for row in rows:
        starts, values = zip(*row["steps"], strict=True)
        ends = [*starts[1:], len(row["tokens"])]
        gains = [b - a for a, b in zip(values, [*values[1:], row["reward"]], strict=True)]
        texts = ["".join(row["tokens"][a:b]) for a, b in zip(starts, ends, strict=True)]
        lines, right = row["response"].strip().split("\n"), worked(row["asked"]).split("\n")
        wrong = next((i for i, (a, b) in enumerate(zip(lines, right)) if a != b), None)  # noqa: B905
        if row["reward"] < 1 and len(texts) == len(lines) > 1 and wrong is not None:
            yield Case(lines, gains, wrong)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("run", type=Path, help="the directory of a run with advantage = 'vine'")
    parser.add_argument("--show", type=int, default=3, help="cases to print (default: 3)")
    args = parser.parse_args()
    text = (args.run / "rollouts.jsonl").read_text(encoding="utf-8")
    found = list(cases([json.loads(line) for line in text.splitlines()]))
    if not found:
        raise SystemExit("no wrong response has several lines; sample more, or from a weaker model")
    for case in found[: args.show]:
        for place, (line, gain) in enumerate(zip(case.lines, case.gains, strict=True)):
            print(f"{gain:+.2f}  {line}{'   <- first wrong line' * (place == case.wrong)}")
        print()
    hits = sum(min(case.gains) == case.gains[case.wrong] for case in found)
    guess = sum(1 / len(case.lines) for case in found)
    print(f"the step with the lowest advantage is the first wrong line: {hits} of {len(found)}")
    print(f"a guess, or an advantage that is the same for all lines: {guess:.1f} of {len(found)}")


if __name__ == "__main__":
    main()
