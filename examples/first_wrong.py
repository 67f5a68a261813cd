"""Looks where VinePPO puts the blame: at the line that went wrong?

    burnish train sums --set objective.advantage=vine --set train.steps=1 --set log.rollouts=128
    python examples/first_wrong.py runs/sums-1

Reads the responses that a run kept, to sums worked line by line. The first wrong line of a wrong
response is the first that differs from the worked answer. The script counts how often the step with
the lowest advantage is that line. Responses without a single lowest step are left out: no
continuation earned more than another, because the question is too hard or the response was lost
from the beginning. An advantage per response, such as GRPO's, is the same for all lines and points
at none.
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
    clear = [case for case in found if case.gains.count(min(case.gains)) == 1]
    hits = sum(case.gains[case.wrong] == min(case.gains) for case in clear)
    guess = sum(1 / len(case.lines) for case in clear)
    print(f"{len(found)} wrong responses of several lines, {len(clear)} with one lowest advantage")
    print(f"the lowest advantage is that of the first wrong line: {hits} of {len(clear)}")
    print(f"a guess among the lines: {guess:.1f} of {len(clear)}")
    for name, own in {
        "lines before it": [gain for case in found for gain in case.gains[: case.wrong]],
        "the first wrong line": [case.gains[case.wrong] for case in found],
        "lines after it": [gain for case in found for gain in case.gains[case.wrong + 1 :]],
    }.items():
        print(f"mean advantage of {name}: {sum(own) / max(1, len(own)):+.3f} ({len(own)} lines)")


if __name__ == "__main__":
    main()
