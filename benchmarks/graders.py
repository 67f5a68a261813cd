"""Grades per second of ``MathGrader`` on one core, and of math-verify on the same answers.

    python benchmarks/graders.py [COUNT]

Easy answers (all different, each after 1,200 characters of thinking) are decided in the calling
process; algebra goes to one worker. math-verify's parse and verify run in this process, on the
answers alone, in its documented way ("$...$", LaTeX only, without time-outs), a hundredth as often.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable

from math_verify import LatexExtractionConfig, parse, verify

from burnish.graders.answers import MathGrader
from burnish.graders.pool import GraderLimits

THINKING = "Let us go through this step by step: first one thing, then the other. " * 17

EASY: dict[str, Callable[[int], tuple[str, str]]] = {
    "integers": lambda i: (str(i), str(i)),
    "wrong integers": lambda i: (str(i + 1), str(i)),
    "money": lambda i: (f"${i:,}.50", f"{i}.5"),
    "fractions": lambda i: (rf"\frac{{{2 * i}}}{{4}}", f"{i}/2"),
    "units": lambda i: (rf"{i}\text{{ cm}}", f"{i}"),
    "percent": lambda i: (rf"{i}\%", f"{i}/100"),
    "text": lambda i: (rf"\text{{Team {i} wins}}", f"team {i} wins"),
}
ALGEBRA = {"algebra": lambda i: (rf"(x+{i})^2", f"x^2+{2 * i}x+{i * i}")}


def burnish_rate(pairs: list[tuple[str, str]]) -> float:
    grader = MathGrader("r1_zero", GraderLimits(workers=1))
    grader.check([("x+1", "1+x")])  # the worker starts
    items = [(f"{THINKING}</think> <answer>{a}</answer>", {"answer": gold}) for a, gold in pairs]
    began = time.perf_counter()
    grades = grader.grade(items)
    spent = time.perf_counter() - began
    grader.close()
    assert len({grade.reward for grade in grades}) == 1
    return len(pairs) / spent


def peer_rate(pairs: list[tuple[str, str]]) -> float:
    config = [LatexExtractionConfig()]
    began = time.perf_counter()
    for answer, gold in pairs:
        left, right = (parse(f"${text}$", config, parsing_timeout=None) for text in (gold, answer))
        verify(left, right, timeout_seconds=None)
    return len(pairs) / (time.perf_counter() - began)


def main() -> None:
    logging.disable()
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 20_000
    peer_rate([("1", "1")] * 10)
    print(f"{'':16}{'burnish':>12}{'math-verify':>14}{'ratio':>8}   grades per second")
    for name, make in (EASY | ALGEBRA).items():
        pairs = [make(i + 1) for i in range(count if name in EASY else count // 100)]
        own, peer = burnish_rate(pairs), peer_rate(pairs[: max(1, count // 100)])
        print(f"{name:16}{own:12,.0f}{peer:14,.0f}{own / peer:8,.0f}")


if __name__ == "__main__":
    main()
