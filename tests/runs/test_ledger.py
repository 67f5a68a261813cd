"""The ledger's verdict: every group once, after whatever died."""

from __future__ import annotations

from pathlib import Path

from burnish.runs.ledger import FILE, Ledger, judge, lags
from burnish.runs.metrics import iterate_rows


def run(path: Path, *, lost: bool = False, twice: bool = False) -> Path:
    ledger = Ledger(path, 0, 0)
    for number in range(6):
        ledger.write("sampled", group=number, by="generator-0", oldest=0, newest=0)
    ledger.learned(1, [0, 1], oldest=0, version=0)
    ledger.learned(2, [2, 3], oldest=0, version=1)
    ledger = Ledger(path, 1, 1)  # the learner died, and the run went back to step 1
    ledger.write("sampled", group=2, by="generator-0", oldest=1, newest=1)
    ledger.learned(2, [2] if lost else [2, 3], oldest=0, version=1)
    ledger.learned(3, [2, 4] if twice else [4, 5], oldest=0, version=2)
    return path


def test_a_run_that_went_back_learned_from_each_group_once(tmp_path: Path) -> None:
    verdict = judge(run(tmp_path), batch=2, window=2, max_lag=2)
    assert not verdict.problems
    assert (verdict.steps, verdict.groups, verdict.restarts, verdict.reissued) == (3, 6, 1, 1)
    assert verdict.lag == 2
    assert "every group is accounted for" in str(verdict)


def test_a_lost_group_is_named(tmp_path: Path) -> None:
    problems = judge(run(tmp_path, lost=True), batch=2, window=2).problems
    assert any("neither learned from nor dropped: [3]" in problem for problem in problems)


def test_a_group_that_teaches_twice_is_named(tmp_path: Path) -> None:
    problems = judge(run(tmp_path, twice=True), batch=2, window=2).problems
    assert any("more than 1 times: [2]" in problem for problem in problems)


def test_a_lag_beyond_the_bound_is_named(tmp_path: Path) -> None:
    problems = judge(run(tmp_path), batch=2, window=2, max_lag=1).problems
    assert any("largest lag is 2" in problem for problem in problems)


def test_groups_by_lag_are_those_of_the_steps_that_stand(tmp_path: Path) -> None:
    """Group 2 was sampled again with version 1, and learned from by version 1."""
    rows = iterate_rows(run(tmp_path) / FILE)
    assert lags(rows) == {0: 3, 1: 1, 2: 2}
