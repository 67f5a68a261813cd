"""Rewards that only this process has: closures, with a limit where Python can be interrupted."""

import asyncio
import signal
import threading
import time

import pytest

from burnish.errors import DataError
from burnish.graders.in_process import InProcess, can_interrupt
from burnish.graders.pool import GraderLimits, make_grader
from burnish.graders.rewards import batched
from burnish.types import Status

LATE = "took more than 0.2 s (task.wall_seconds)"


def make(reward):
    grader = make_grader(reward, GraderLimits(wall_seconds=0.2))
    assert isinstance(grader, InProcess)
    return grader


def test_a_closure_that_hangs_is_interrupted_and_the_next_response_is_graded():
    def hang(response, row):
        while response == "spin":
            try:
                time.sleep(0.001)
            except Exception:
                return 5.0
        if response == "sleep":
            time.sleep(60)
        return 1.0

    grades = make(hang).grade([("1", {}), ("spin", {}), ("sleep", {}), ("2", {})])
    assert [grade.message for grade in grades] == [None, LATE, LATE, None]
    assert signal.getsignal(signal.SIGALRM) is signal.SIG_DFL
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)


def test_async_and_batched_closures_also_inside_of_an_event_loop():
    async def one(response, row):
        await asyncio.sleep(60 if response == "sleep" else 0)
        return float(response)

    @batched
    def several(responses, rows):
        return [float(len(responses))] * len(responses)

    async def in_a_notebook():
        return make(one).grade([("1", {}), ("sleep", {}), ("3", {})])

    for grades in (
        make(one).grade([("1", {}), ("sleep", {}), ("3", {})]),
        asyncio.run(in_a_notebook()),
    ):
        assert [grade.message for grade in grades] == [None, LATE, None]
        assert (grades[0].reward, grades[2].reward) == (1, 3)
    assert [grade.reward for grade in make(several).grade([("", {})] * 3)] == [3, 3, 3]
    assert make(several).grade([]) == []


def test_a_batched_coroutine_that_hangs_inside_of_an_event_loop_is_left():
    @batched
    async def hang(responses, rows):
        await asyncio.sleep(60)

    async def in_a_notebook():
        began = time.monotonic()
        return make(hang).grade([("1", {})]), time.monotonic() - began

    (grade,), seconds = asyncio.run(in_a_notebook())
    assert grade.message == LATE
    assert seconds < 10


def test_a_coroutine_that_is_not_awaited_is_an_error():
    async def one(response, row):
        return 1.0

    (grade,) = make(lambda response, row: one(response, row)).grade([("", {})])
    assert grade.message == "reward must be one finite number, got a coroutine; write async def"


def test_without_a_limit_in_threads_and_beside_other_uses_of_the_alarm(monkeypatch):
    found = []
    thread = threading.Thread(target=lambda: found.append(can_interrupt()))
    thread.start()
    thread.join()
    assert found == [False]
    assert can_interrupt()
    before = signal.signal(signal.SIGALRM, lambda number, frame: None)
    assert not can_interrupt()
    (grade,) = make(lambda response, row: 1.0).grade([("", {})])
    assert grade.status is Status.SCORED
    signal.signal(signal.SIGALRM, before)


def test_a_closure_with_other_parameters_is_refused():
    with pytest.raises(DataError, match=r"reward <lambda>: .* as lambda response \(too"):
        make_grader(lambda response: 1.0)
