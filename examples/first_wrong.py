"""Checks whether VinePPO gives the lowest advantage to the first wrong line of a response.

    python examples/first_wrong.py easy-sums --write
    burnish sft sums-sft --data easy-sums --out runs/easy-sft \\
        --set task.epochs=600 --set model.layers=2 --set model.width=64 --set model.d_ff=172
    burnish train sums --set model.name=runs/easy-sft --out runs/easy \\
        --set task.train=easy-sums/train.jsonl --set task.validation=easy-sums/validation.jsonl \\
        --set objective.advantage=vine --set rollout.temperature=2 --set train.steps=1 \\
        --set rollout.batch=128 --set train.batch=128 --set log.rollouts=128
    python examples/first_wrong.py runs/easy

The first command writes 64 easy sums, which a model of 100,000 weights can memorise; at
temperature 2 it sometimes makes a mistake. The last command reads the responses that the run
recorded. The first wrong line of a wrong response is the first line that differs from the worked
answer. The script counts how often the step with the lowest advantage is that line. Responses in
which several steps share the lowest advantage are left out. An advantage per response, such as
GRPO's, is the same for all lines and can't identify a wrong line.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from burnish.tasks.sums import sum_row, work_sum


class Case(NamedTuple):
    lines: list[str]
    gains: list[float]
    """The advantage of each line."""
    wrong: int
    """Index of the first wrong line."""


def cases(rows: list[dict[str, Any]]) -> Iterator[Case]:
    """Yield a case for each wrong response of several lines that differs from the worked answer and
    whose steps are its lines."""
    for row in rows:
        starts, values = zip(*row["steps"], strict=True)
        ends = [*starts[1:], len(row["tokens"])]
        gains = [b - a for a, b in zip(values, [*values[1:], row["reward"]], strict=True)]
        texts = ["".join(row["tokens"][a:b]) for a, b in zip(starts, ends, strict=True)]
        lines, right = row["response"].strip().split("\n"), work_sum(row["asked"]).split("\n")
        wrong = next((i for i, (a, b) in enumerate(zip(lines, right)) if a != b), None)  # noqa: B905
        if row["reward"] < 1 and len(texts) == len(lines) > 1 and wrong is not None:
            yield Case(lines, gains, wrong)


def write(folder: Path) -> None:
    """Write train.jsonl with all sums of three numbers from 1 to 4, and validation.jsonl with a
    tenth of them."""
    folder.mkdir(parents=True)
    sums = [" + ".join(terms) + " =" for terms in product("1234", repeat=3)]
    for name, some in (("train", sums), ("validation", sums[::10])):
        text = "".join(json.dumps(sum_row(one)) + "\n" for one in some)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")


def main() -> None:
    """Write rows, or print the statistics of a run."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("run", type=Path, help="a run with advantage = 'vine'")
    parser.add_argument("--write", action="store_true", help="write rows to a new directory")
    parser.add_argument("--show", type=int, default=3, help="cases to print (default: 3)")
    args = parser.parse_args()
    (write if args.write else partial(tell, show=args.show))(args.run)


def tell(run: Path, show: int) -> None:
    text = (run / "rollouts.jsonl").read_text(encoding="utf-8")
    found = list(cases([json.loads(line) for line in text.splitlines()]))
    if not found:
        raise SystemExit("no wrong response has several lines; sample more, or from a weaker model")
    for case in found[:show]:
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
