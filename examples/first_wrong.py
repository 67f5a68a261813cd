"""Looks where VinePPO puts the blame: at the line that went wrong?

    python examples/first_wrong.py easy-sums --write
    burnish sft sums-sft --data easy-sums --out runs/easy-sft \\
        --set task.epochs=600 --set model.layers=2 --set model.width=64 --set model.d_ff=172
    burnish train sums --set model.name=runs/easy-sft --out runs/easy \\
        --set task.train=easy-sums/train.jsonl --set task.validation=easy-sums/validation.jsonl \\
        --set objective.advantage=vine --set rollout.temperature=2 --set train.steps=1 \\
        --set rollout.batch=128 --set train.batch=128 --set log.rollouts=128
    python examples/first_wrong.py runs/easy

The first command writes 64 easy sums, which a model of 100,000 weights can learn by heart; at
temperature 2 it slips now and then. The last command reads the responses that the run kept. The
first wrong line of a wrong response is the first that differs from the worked answer. The script
counts how often the step with the lowest advantage is that line. Responses without a single lowest
step are left out: no continuation earned more than another. An advantage per response, such as
GRPO's, is the same for all lines and points at none.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from write_sums import row as worked_row
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


def write(folder: Path) -> None:
    """All sums of three numbers from 1 to 4; a tenth of them are asked in validations."""
    folder.mkdir(parents=True)
    sums = [" + ".join(terms) + " =" for terms in product("1234", repeat=3)]
    for name, some in (("train", sums), ("validation", sums[::10])):
        text = "".join(json.dumps(worked_row(one)) + "\n" for one in some)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")


def main() -> None:
    """Writes rows, or tells about a run."""
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
