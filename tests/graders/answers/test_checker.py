"""Grades through the public entries, with real workers."""

import importlib.util
import math
import os
import resource
import subprocess
import sys
import textwrap
import threading
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from burnish import grpo
from burnish.errors import DataError, MissingExtra
from burnish.graders.answers import MathGrader, Verdict, compare
from burnish.graders.answers import checker as checkers
from burnish.graders.answers.comparison import decide
from burnish.graders.pool import GraderLimits
from burnish.types import Status
from tests.graders.answers.hostile import hostile_strings

SLOW = r"\binom{1000000000000}{500000000000}"
"""Takes sympy for ever."""


def tagged(text):
    return f"Let me see. </think> <answer>{text}</answer>"


@pytest.fixture(scope="module")
def grader(checker):
    grader = MathGrader("r1_zero")
    grader.pool = checker.pool
    return grader


@pytest.fixture(scope="module")
def quick():
    limits = GraderLimits(workers=1, cpu_seconds=0.2, memory_bytes=1 << 29)
    grader = MathGrader("r1_zero", limits)
    yield grader
    grader.close()


@pytest.fixture(autouse=True)
def one_pool(checker, monkeypatch):
    """The plain functions use the tests' pool."""
    monkeypatch.setattr(checkers, "shared", lambda: checker)


@pytest.mark.parametrize(
    ("response", "truth", "rewards"),
    [
        (tagged("4"), "4", (1, 1, 1)),
        (tagged("4"), 4, (1, 1, 1)),
        (tagged("0.5"), 0.5, (1, 1, 1)),
        (tagged("1/3"), Fraction(1, 3), (1, 1, 1)),
        (tagged("1.5"), Decimal("1.50"), (1, 1, 1)),
        (tagged("4"), np.int64(4), (1, 1, 1)),
        (tagged("100000"), 1e5, (1, 1, 1)),
        (tagged("5"), "4", (0, 1, 0)),
        (tagged("5"), ["4", "5"], (1, 1, 1)),
        (tagged("5"), [4, 6.0], (0, 1, 0)),
        (tagged(r"\sqrt{8}"), r"2\sqrt{2}", (1, 1, 1)),
        (tagged(r"\sqrt{8}"), ["3", r"2\sqrt{2}"], (1, 1, 1)),
        (tagged(r"$\boxed{4}$"), "4", (1, 1, 1)),
        ("4 </think> <answer>4</answer> thanks", "4", (0, 0, 0)),
        ("4", "4", (0, 0, 0)),
        (tagged("0.333"), "1/3", (0, 1, 0)),
        (tagged("4"), ["", "4"], (1, 1, 1)),
    ],
)
def test_r1_zero(response, truth, rewards):
    found = grpo.r1_zero_reward_fn(response, truth)
    assert found == dict(zip(("reward", "format_reward", "answer_reward"), rewards, strict=True))


@pytest.mark.parametrize(
    ("response", "rewards"),
    [
        (r"so \boxed{5}, no: $\boxed{x+1}$.", (1, 1, 1)),
        (r"\boxed{x+1}, no: \boxed{5}", (0, 1, 0)),
        ("x+1", (0, 0, 0)),
        (r"\boxed{x+1", (0, 0, 0)),
    ],
)
def test_question_only(response, rewards):
    found = grpo.question_only_reward_fn(response, "1+x")
    assert found == dict(zip(("reward", "format_reward", "answer_reward"), rewards, strict=True))


ENDLESS: list[object] = []
ENDLESS += [ENDLESS, ENDLESS]


@pytest.mark.parametrize(
    "truth",
    [
        ENDLESS,
        *(None, "", [], {}, math.nan, math.inf, 1j, [""], "x^{", Decimal("NaN")),
    ],
)
def test_a_ground_truth_that_cannot_be_parsed_is_said(truth):
    for response in (tagged("4"), "no format"):
        with pytest.raises(DataError, match=r"a gold answer must be .* got .*; correct the row"):
            grpo.r1_zero_reward_fn(response, truth)


def test_the_door(quick, monkeypatch):
    monkeypatch.setattr(checkers, "shared", lambda: quick)
    assert compare("x + 1", "1 + x") is Verdict.EQUAL
    assert compare("A", ["(A)", "(B)"]) is Verdict.EQUAL
    assert compare("0", "1e-9") is Verdict.DIFFERENT
    assert compare("x +", "x + 1") is Verdict.UNREADABLE
    assert compare("x", "x^") is Verdict.BAD_GOLD
    assert compare(SLOW, "x + 1") is Verdict.UNDECIDED


def test_statuses_parts_counts_and_order(quick):
    items = [
        (tagged("4"), "4", Status.SCORED, 1, {"format": 1, "answer": 1}),
        (tagged(SLOW), "x + 1", Status.TIMEOUT, 0, {"format": 1, "answer": 0}),
        ("hm", "4", Status.UNPARSED, 0, {"format": 0, "answer": 0}),
        (tagged("x + 2"), "2 + x", Status.SCORED, 1, {"format": 1, "answer": 1}),
        (tagged("x +"), "2 + x", Status.UNPARSED, 0, {"format": 1, "answer": 0}),
        (tagged("4"), "x^", Status.ERROR, None, {}),
        (tagged("x"), SLOW, Status.TIMEOUT, 0, {"format": 1, "answer": 0}),
        (tagged("5"), "4", Status.SCORED, 0, {"format": 1, "answer": 0}),
        (tagged("4" * 200_000), "4", Status.UNPARSED, 0, {"format": 1, "answer": 0}),
        (tagged("x + 3"), "2 + x", Status.SCORED, 0, {"format": 1, "answer": 0}),
    ]
    grades = quick.grade([(response, {"answer": gold}) for response, gold, *_ in items])
    for grade, (_, _, status, reward, parts) in zip(grades, items, strict=True):
        assert grade.status is status, grade
        assert math.isnan(grade.reward) if reward is None else grade.reward == reward
        assert grade.parts == parts
    assert "took more than 0.2 s of CPU time" in grades[1].message


@pytest.mark.parametrize(
    ("format", "response"),
    [
        ("boxed", r"\boxed{7}"),
        ("hash", "#### 7"),
        ("last_number", "It is 7."),
        ("r1_zero", tagged(7)),
    ],
)
def test_formats(format, response):
    right, wrong = MathGrader(format).grade(
        [(response, {"answer": "7"}), ("none", {"answer": "7"})]
    )
    assert (right.reward, right.parts["format"]) == (1, 1)
    assert (wrong.reward, wrong.parts["format"], wrong.status) == (0, 0, Status.UNPARSED)


def test_any_thread_may_grade(grader):
    answers = {}

    def grade(n):
        answers[n] = grader.grade([(tagged(f"x + {n}"), {"answer": f"{n} + x"})] * 3)

    threads = [threading.Thread(target=grade, args=(n,)) for n in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert [[g.reward for g in answers[n]] for n in range(1, 5)] == [[1.0] * 3] * 4


def test_a_plain_script_without_a_main_guard(tmp_path):
    """The worker of a user's own reward has no workers itself, but a deadline."""
    file = tmp_path / "script.py"
    file.write_text(
        textwrap.dedent(
            r"""
            from contextlib import closing
            from burnish.graders.answers.checker import question_only_reward_fn
            from burnish.graders.pool import make_grader
            from burnish.graders.pool import GraderLimits
            print("begins")
            def mine(response, row):
                return question_only_reward_fn(response, row["gold"])
            with closing(make_grader(mine, GraderLimits(workers=1))) as grader:
                for grade in grader.grade([(r"\boxed{x+1}", {"gold": "1+x"})] * 2):
                    print(grade.status, grade.reward, grade.message)
            """
        )
    )
    command = [sys.executable, str(file)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    said = ["begins", "scored 1.0 None", "scored 1.0 None"]
    assert run.stdout.splitlines() == said, run.stderr
    assert run.stderr == ""


def test_without_the_library_the_extra_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    checker = MathGrader()
    assert checker.check([("42", "42.0")])[0].reward == 1
    with pytest.raises(MissingExtra, match=r"burnish\[math\]"):
        checker.check([("x + 1", "1 + x")])


def zombies():
    """Children of this process, and theirs, that nobody waited for."""
    states = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            pid, rest = stat.read_text().split(" (", 1)
        except (FileNotFoundError, ProcessLookupError):
            continue
        state, parent = rest.rsplit(") ", 1)[1].split()[:2]
        states[int(pid)] = (state, int(parent))
    ours = {os.getpid()}
    for _ in range(3):
        ours |= {pid for pid, (_, parent) in states.items() if parent in ours}
    return [pid for pid in ours if states.get(pid, ("", 0))[0] == "Z"]


GOLDS = [r"x + 2\sqrt{2}", "42", "(1, 2)", r"\{x, y\}", "x > 3"]


def withstand(grader, count, canary):
    """All return and nothing is run; the deadline is 0.2 s."""
    strings, others = hostile_strings(canary, count), zombies()
    grades = grader.grade(
        [(tagged(text), {"answer": GOLDS[k % 5]}) for k, text in enumerate(strings)]
    )
    assert len(grades) == count
    for grade in grades:
        assert grade.reward == 0
        assert grade.status is not Status.ERROR, grade
    assert {grade.status for grade in grades} == {Status.SCORED, Status.UNPARSED, Status.TIMEOUT}
    assert not {*zombies()} - {*others}  # another test may have left some
    for worker in grader.pool._supervisors:
        status = Path(f"/proc/{worker.process.pid}/status").read_text()
        assert int(status.split("VmRSS:")[1].split()[0]) < 1 << 20  # kB
    assert not canary.exists()
    return strings


def test_hostile_strings(quick, tmp_path):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    strings = withstand(quick, 180, tmp_path / "canary")
    for text in strings:  # as gold answers, as far as this process goes
        decide("42", [text])
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # kB


@pytest.mark.slow  # kills more than thirty forks by their deadline
def test_a_thousand_hostile_strings_leave_nothing(tmp_path):
    descriptors = len(os.listdir("/proc/self/fd"))
    limits = GraderLimits(workers=1, cpu_seconds=0.2, memory_bytes=1 << 29)
    grader = MathGrader("r1_zero", limits)
    withstand(grader, 1000, tmp_path / "canary")
    workers = [worker.process.pid for worker in grader.pool._supervisors]
    grader.close()
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers)
    assert len(os.listdir("/proc/self/fd")) == descriptors
