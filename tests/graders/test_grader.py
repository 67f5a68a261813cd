import dataclasses
import math
from contextlib import closing
from pathlib import Path

from burnish.graders.pool import GraderPool, InProcess, Limits, grade_pairs, make_grader
from burnish.types import Finish, Status
from tests.conftest import make_group

REWARDS = Path(__file__).with_name("rewards_for_tests.py")


def length(response, row):
    return {"reward": len(response), "part": row[0]}


def test_a_function_of_a_file_runs_in_workers_and_a_lambda_here():
    items = [("ab", [1]), ("abc", [2])]
    here = make_grader(lambda response, row: length(response, row))
    assert isinstance(here, InProcess)
    there = make_grader(f"{REWARDS}:length", Limits(workers=1))
    assert isinstance(there, GraderPool)
    with closing(there):
        rewards = [grade.reward for grade in there.grade(items)]
    grades = here.grade(items)
    assert [grade.reward for grade in grades] == rewards == [2, 3]
    assert grades[1].parts == {"part": 2.0}
    here.close()


def test_the_same_statuses_here():
    def reward(response, row):
        return {"error": 1 / 0} if response == "raise" else response

    good, raised, text = InProcess(lambda r, row: 1.0 if r == "good" else reward(r, row)).grade(
        [("good", {}), ("raise", {}), ("text", {})]
    )
    assert (good.status, raised.status, text.status) == (
        Status.SCORED,
        Status.ERROR,
        Status.ERROR,
    )
    assert math.isnan(raised.reward)
    assert "ZeroDivisionError" in raised.message
    assert "got str 'text'" in text.message


def test_a_response_that_must_end():
    group = make_group(0, [1], [[1], [2], [3]], [0, 0, 0])
    ended, cut, bad = group.completions
    cut = dataclasses.replace(cut, finish=Finish.LENGTH)
    bad = dataclasses.replace(bad, text="bad")
    grader = InProcess(lambda response, row: {"reward": float(response), "seen": 1})
    pairs = [(group.prompt, c) for c in (ended, cut, bad)]
    free = grade_pairs(grader, pairs, must_end=False)
    strict = grade_pairs(grader, pairs, must_end=True)
    assert [grade.reward for grade in free[:2]] == [1, 2]
    assert [grade.reward for grade in strict[:2]] == [1, 0]
    assert [grade.parts for grade in strict] == [
        {"seen": 1, "ended": 1},
        {"seen": 1, "ended": 0},
        {},
    ]
    assert strict[2].status is Status.ERROR
