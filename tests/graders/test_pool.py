"""The pool with real processes: whatever a reward does, every item gets its grade, in order."""

import contextlib
import dataclasses
import math
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest

from burnish.console.progress import begin, showing
from burnish.errors import DataError, GraderError
from burnish.graders import pool as pools
from burnish.graders.keywords import REWARDS as BUILT_IN
from burnish.graders.pool import GraderLimits, GraderPool, InProcess, grade_pairs, make_grader
from burnish.graders.rewards import AT_ONCE, Source
from burnish.graders.tally import limiting_errors
from burnish.types import Finish, Status
from tests.conftest import make_group

REWARDS = Path(__file__).with_name("rewards_for_tests.py")
OBEDIENT = Source(f"{REWARDS}:obedient")
QUICK = GraderLimits(workers=1, cpu_seconds=0.2, wall_seconds=1.5, memory_bytes=1 << 28)
ERROR, TIMEOUT, SCORED, UNPARSED = Status.ERROR, Status.TIMEOUT, Status.SCORED, Status.UNPARSED


@pytest.fixture(scope="module")
def pool():
    with closing(GraderPool(OBEDIENT, QUICK).start()) as pool:
        yield pool


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(") ")[1][0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def gone(pid, within=10.0):
    """Whether the process ends within that time."""
    deadline = time.monotonic() + within
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not alive(pid)


@pytest.mark.parametrize(
    ("response", "status", "reward", "message"),
    [
        ("burn", ERROR, None, "took more than 0.2 s of CPU time (task.cpu_seconds)"),
        ("burn in python", ERROR, None, "took more than 0.2 s of CPU time"),
        ("sleep", ERROR, None, "took more than 1.5 s (task.wall_seconds)"),
        ("allocate", ERROR, None, "took more than 256 MB of memory (task.memory_mb)"),
        ("raise", ERROR, None, "ZeroDivisionError: division by zero (rewards_for_tests.py, line"),
        (
            "raise in colour",
            ERROR,
            None,
            r"ValueError: \x1b[31mred\x07 (rewards_for_tests.py",
        ),
        ("exit", ERROR, None, "the worker exited with 3"),
        ("exit quietly", ERROR, None, "the worker exited with 0"),
        ("sys.exit", ERROR, None, "SystemExit"),
        ("nan", ERROR, None, "reward must be one finite number, got float nan"),
        ("inf", ERROR, None, "reward must be one finite number, got float -inf"),
        ("string", ERROR, None, "reward must be one finite number, got str '1.0'"),
        ("none", ERROR, None, "reward must be one finite number, got NoneType None"),
        ("list", ERROR, None, "reward must be one finite number, got list [1.0, 2.0]"),
        ("no reward", ERROR, None, "the reward's dict has no 'reward', only score"),
        ("bad part", ERROR, None, "format must be one finite number, got str 'good'"),
        ("not a number", ERROR, None, "could not convert string to float"),
        ("unparsed", UNPARSED, 0, None),
        ("unparsed but paid", ERROR, None, "unparsed with reward 0"),
        ("print", SCORED, 1, None),
        ("read", SCORED, 1, None),
        ("input", ERROR, None, "EOFError"),
        ("fork", SCORED, 1, None),
        ("fork and hang", ERROR, None, "the worker exited with 4"),
        ("\ud800 lone surrogate", ERROR, None, "could not convert"),
    ],
)
def test_whatever_a_reward_does_the_others_go_on(pool, response, status, reward, message):
    before, middle, after = pool.grade([("1", {}), (response, {}), ("2", {})])
    assert (before.reward, after.reward) == (1, 2)
    assert middle.status is status
    assert math.isnan(middle.reward) if reward is None else middle.reward == reward
    assert (message or "") in (middle.message or "")
    assert (middle.message is None) == (message is None)


def test_numbers_and_parts(pool):
    parts, row = pool.grade([("parts", {}), ("row", {"value": 2})])
    assert (parts.reward, parts.parts) == (1.0, {"format": 1.0, "answer": 0.5})
    assert (row.reward, row.parts, row.status, row.message) == (2.0, {}, SCORED, None)


def test_nothing_is_graded_to_nothing(pool):
    assert pool.grade([]) == []


def test_a_worker_loads_no_torch_and_no_numpy(pool):
    assert pool.grade([("modules", {})])[0].reward == 0


def test_every_worker_has_the_same_order_of_sets(pool):
    (here,) = pool.grade([("hash", {})])
    with closing(GraderPool(OBEDIENT).start()) as other:
        (there, _, later) = other.grade([("hash", {}), ("exit", {}), ("hash", {})])
    assert here.reward == there.reward == later.reward


def test_order_is_kept_and_killed_workers_are_replaced():
    responses = [str(i) for i in range(600)]
    for place in (0, 200, 201, 599):
        responses[place] = "exit"
    responses[300] = "burn"
    with closing(GraderPool(OBEDIENT, GraderLimits(workers=2, cpu_seconds=0.2)).start()) as pool:
        grades = pool.grade([(response, {}) for response in responses])
    for i, (response, grade) in enumerate(zip(responses, grades, strict=True)):
        expected = ERROR if response in ("exit", "burn") else SCORED
        assert grade.status is expected
        assert expected is not SCORED or grade.reward == i


def test_a_reward_that_leaks_gets_fresh_workers_and_no_zero():
    """4 MB a call under a bound of 64 MB: some 15 grades, then an error and another worker."""
    limits = GraderLimits(workers=1, memory_bytes=64 << 20)
    with closing(GraderPool(Source(f"{REWARDS}:leaking"), limits).start()) as pool:
        grades = pool.grade([("", {})] * 60)
        errors = [grade for grade in grades if grade.status is ERROR]
        assert {grade.message for grade in errors} == {
            "took more than 64 MB of memory (task.memory_mb)"
        }
        assert 2 <= len(errors) <= 6
        assert [grade.reward for grade in grades if grade.status is not ERROR] == (
            [1.0] * (60 - len(errors))
        )


def test_a_comparison_of_answers_scores_0_for_too_much():
    expected = {
        "1": (SCORED, 1.0),
        "burn": (TIMEOUT, 0.0),
        "raise": (ERROR, None),
        "print": (SCORED, 1.0),
        "fork": (SCORED, 1.0),
        "allocate": (TIMEOUT, 0.0),
        "2": (SCORED, 2.0),
    }
    limits = GraderLimits(workers=1, cpu_seconds=0.2, memory_bytes=1 << 28)
    with closing(GraderPool(Source(OBEDIENT.spec, compares_answers=True), limits).start()) as pool:
        asked = ["pid", *expected, "burn", "pid"]
        first, *grades, late, last = pool.grade([(response, {}) for response in asked])
        for grade, (status, reward) in zip(grades, expected.values(), strict=True):
            assert grade.status is status
            assert math.isnan(grade.reward) if reward is None else grade.reward == reward
        assert late.message == "took more than 0.2 s of CPU time (task.cpu_seconds)"
        assert grades[5].message == "took more than 256 MB of memory (task.memory_mb)"
        workers = [int(grade.reward) for grade in (first, last)]
    assert workers[0] != workers[1]
    assert all(map(gone, workers))


@pytest.mark.parametrize(("response", "code"), [("exit", 3), ("exit quietly", 0)])
def test_a_comparison_that_exits_by_itself_is_an_error_and_not_late(response, code):
    limits = GraderLimits(workers=1, wall_seconds=60)
    with closing(GraderPool(Source(OBEDIENT.spec, compares_answers=True), limits).start()) as pool:
        before, exited, after = pool.grade([("1", {}), (response, {}), ("2", {})])
        assert (before.reward, after.reward) == (1, 2)
        assert (exited.status, exited.message) == (ERROR, f"the worker exited with {code}")


def test_a_comparison_of_answers_that_sleeps_scores_0():
    with closing(GraderPool(Source(OBEDIENT.spec, compares_answers=True), QUICK).start()) as pool:
        (grade,) = pool.grade([("sleep", {})])
        assert (grade.status, grade.reward) == (TIMEOUT, 0)
        assert grade.message == "took more than 1.5 s (task.wall_seconds)"


def test_a_worker_that_dies_between_two_calls_is_nobodys_fault(pool):
    (grade,) = pool.grade([("pid", {})])
    os.kill(int(grade.reward), signal.SIGKILL)
    assert gone(int(grade.reward))
    assert [g.reward for g in pool.grade([("7", {}), ("8", {})])] == [7, 8]


def test_the_cpu_deadline_is_each_items_own():
    with closing(GraderPool(OBEDIENT, GraderLimits(workers=1, cpu_seconds=0.1)).start()) as pool:
        grades = pool.grade([("burn a while", {})] * 4)  # 0.05 s each
        assert all(grade.status is SCORED for grade in grades)


def test_closing_leaves_no_process_and_no_descriptor():
    descriptors = len(os.listdir("/proc/self/fd"))
    pool = GraderPool(OBEDIENT, GraderLimits(workers=2, cpu_seconds=0.2))
    answers = pool.grade([("pid", {}), ("exit", {}), ("leave a process", {}), ("pid", {})] * 3)
    pids = [int(grade.reward) for grade in answers if grade.status is SCORED]
    pool.close()
    pool.close()
    assert all(map(gone, pids))
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_a_pool_that_was_closed_or_is_a_parents_starts_other_workers(monkeypatch):
    def worker():
        return pool.grade([("pid", {})])[0].reward

    with closing(GraderPool(OBEDIENT, QUICK).start()) as pool:
        first = worker()
        assert worker() == first
        pool.close()
        second = worker()
        monkeypatch.setattr(pool, "_owner", -1)  # as after a fork
        assert len({first, second, worker()}) == 3


def test_a_forgotten_pool_ends_its_workers():
    pool = GraderPool(OBEDIENT, QUICK)
    pid = int(pool.grade([("pid", {})])[0].reward)
    del pool
    assert gone(pid)


def test_any_thread_may_grade():
    answers = {}
    with closing(GraderPool(OBEDIENT, GraderLimits(workers=2)).start()) as pool:

        def grade(thread):
            answers[thread] = pool.grade([(f"{thread}{i}", {}) for i in range(300)])

        threads = [threading.Thread(target=grade, args=(n,)) for n in range(1, 4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
    for n in range(1, 4):
        assert [grade.reward for grade in answers[n]] == [float(f"{n}{i}") for i in range(300)]


def test_what_does_not_load_is_said_at_once(tmp_path):
    broken = tmp_path / "broken.py"
    broken.write_text("import nothing_of_that_name as f\n")
    other = tmp_path / "other.py"
    other.write_text("def right(response, row):\n    return 1\n")
    for spec, message in [
        (f"{tmp_path}/none.py:f", "there is no file"),
        (f"{broken}:f", "can't be loaded: ModuleNotFoundError: No module named 'nothing_of"),
        (f"{other}:wrong", r"other.py has \['right'\], no function 'wrong'"),
    ]:
        with pytest.raises(DataError, match=message):
            GraderPool(Source(spec), QUICK).start()


def test_a_reward_that_never_loads_or_dies_loading(tmp_path):
    file = tmp_path / "slow.py"
    file.write_text("import time as f\nf.sleep(600)\n")
    limits = GraderLimits(workers=1, start_seconds=0.3)
    with pytest.raises(GraderError, match=r"do not start: took more than 0.3 s \(to load it\)"):
        GraderPool(Source(f"{file}:f"), limits).start()
    file.write_text("import os as f\nf._exit(5)\n")
    with pytest.raises(GraderError, match="do not start: the worker exited with 5"):
        GraderPool(Source(f"{file}:f"), QUICK).start()


def test_a_killed_supervisor_is_said(tmp_path):
    with closing(GraderPool(OBEDIENT, QUICK).start()) as pool:
        worker = int(pool.grade([("pid", {})])[0].reward)
        # As Ray does with the children of an actor that died.
        os.kill(pool._supervisors[0].process.pid, signal.SIGKILL)
        assert gone(worker)
        with pytest.raises(GraderError, match=r"the grader of .*:obedient was killed by SIGKILL"):
            pool.grade([("1", {})])
        assert pool.grade([("1", {})])[0].reward == 1  # others have started


def test_a_supervisor_that_does_not_respond_is_named(monkeypatch):
    monkeypatch.setattr(pools, "SLACK", 0.2)
    limits = GraderLimits(workers=1, wall_seconds=0.1, start_seconds=30)
    with closing(GraderPool(OBEDIENT, limits).start()) as pool:
        worker = int(pool.grade([("pid", {})])[0].reward)
        pool.limits = GraderLimits(workers=1, wall_seconds=0.1, start_seconds=0.1)
        os.kill(pool._supervisors[0].process.pid, signal.SIGSTOP)
        with pytest.raises(GraderError, match=r"obedient did not respond within 0\.4 s"):
            pool.grade([("1", {})])
        assert gone(worker)


def test_the_log_of_a_built_in_reward_is_quoted_and_made_printable(monkeypatch):
    source = Source(OBEDIENT.spec, module="burnish.of_a_test")
    with closing(GraderPool(source, QUICK).start()) as pool:
        pool.grade([("warn in colour", {})])
        os.kill(pool._supervisors[0].process.pid, signal.SIGKILL)
        with pytest.raises(GraderError, match=r"SIGKILL; the end of its output:\n  \\x1b\[31mred"):
            pool.grade([("1", {})])


def test_a_reward_imports_its_neighbours(tmp_path):
    (tmp_path / "neighbour.py").write_text("VALUE = 3\n")
    (tmp_path / "mine.py").write_text("import neighbour\ndef f(r, row): return neighbour.VALUE\n")
    with closing(GraderPool(Source(f"{tmp_path}/mine.py:f"), QUICK).start()) as pool:
        assert pool.grade([("", {})])[0].reward == 3


def script(tmp_path, text, *, wait=True):
    file = tmp_path / "script.py"
    file.write_text(textwrap.dedent(text))
    process = subprocess.Popen(
        [sys.executable, file], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if not wait:
        return process
    return process.communicate(timeout=120)[0]


def test_a_plain_script_without_a_main_guard(tmp_path):
    output = script(
        tmp_path,
        """
        from burnish.graders.pool import make_grader
        from burnish.graders.pool import GraderLimits
        print("begins")
        BEST = 5
        def reward(response, row):
            if response == "hang":
                while True: pass
            return {"reward": BEST, "row": row["n"]}
        grader = make_grader(reward, GraderLimits(cpu_seconds=0.2))
        for grade in grader.grade([("hang", {"n": 1}), ("fine", {"n": 2})]):
            print(type(grader).__name__, grade.status, grade.reward, grade.parts)
        """,
    )
    assert output.splitlines() == [
        "begins",
        "GraderPool error nan {}",
        "GraderPool scored 5.0 {'row': 2.0}",
    ]


def test_a_file_that_starts_graders_is_not_run_again_and_again(tmp_path):
    output = script(
        tmp_path,
        """
        from burnish.graders.pool import GraderPool
        from burnish.graders.rewards import Source
        def reward(response, row): return 1
        GraderPool(Source(f"{__file__}:reward")).start()
        """,
    )
    assert "a file that starts graders was loaded by a grader" in output


def test_workers_end_with_a_killed_parent(tmp_path):
    parent = script(
        tmp_path,
        f"""
        from burnish.graders.pool import GraderPool, GraderLimits
        from burnish.graders.rewards import Source
        pool = GraderPool(Source({OBEDIENT.spec!r}), GraderLimits(workers=1))
        print(int(pool.grade([("pid", {{}})])[0].reward), flush=True)
        pool.grade([("sleep", {{}})])
        """,
        wait=False,
    )
    worker = int(parent.stdout.readline())
    time.sleep(0.2)
    parent.kill()
    parent.wait(timeout=10)
    parent.stdout.close()
    assert gone(worker)


def cpu_seconds(group):
    """What the processes of a group have spent so far."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            fields = stat.read_text().rsplit(") ", 1)[1].split()
            ticks += (int(fields[11]) + int(fields[12])) * (int(fields[2]) == group)
    return ticks / os.sysconf("SC_CLK_TCK")


def test_throughput():
    """Workers cost a few times the reward itself: measured beside it, so that a busy machine
    slows both."""
    text = "The quick brown apple jumped over the red fence and slept in the barn. " * 3
    row = {"prompt": "Write a sentence.", "keywords": ["apple", "red", "barn"]}
    items = [(f"{text}{i}", row) for i in range(3_000)]
    own = time.process_time()
    assert all(BUILT_IN["inclusion"](text, row)["reward"] == 1 for text, row in items)
    direct = time.process_time() - own
    with closing(GraderPool(Source("inclusion"), GraderLimits(workers=1)).start()) as pool:
        group = pool._supervisors[0].process.pid
        began, own = cpu_seconds(group), time.process_time()
        assert all(grade.reward == 1 for grade in pool.grade(items))
        cpu = cpu_seconds(group) - began + time.process_time() - own
    print(
        f"{len(items) / cpu:,.0f} grades per CPU second, {len(items) / direct:,.0f} without workers"
    )
    assert cpu < 10 * direct


def length(response, row):
    return {"reward": len(response), "part": row[0]}


def test_a_function_of_a_file_runs_in_workers_and_a_lambda_here():
    items = [("ab", [1]), ("abc", [2])]
    here = make_grader(lambda response, row: length(response, row))
    assert isinstance(here, InProcess)
    there = make_grader(f"{REWARDS}:length", GraderLimits(workers=1))
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


def messages(grades):
    return [grade.message for grade in grades]


def test_a_batched_reward_gets_each_workers_share_in_one_call():
    items = [(str(k), {}) for k in range(5)]
    with closing(GraderPool(Source(f"{REWARDS}:in_batch"), GraderLimits(workers=2))) as pool:
        # Worker 0 has items 0, 2 and 4, worker 1 the others; a reward is the place in the share.
        assert [grade.reward for grade in pool.grade(items)] == [0, 0, 1, 1, 2]
        assert pool.grade([]) == []
        rows = [("1", {"n": 7}), ("nan", {}), ("2", {}), ("3", {})]
        first, second, third, fourth = pool.grade(rows)
        assert (first.reward, third.reward, fourth.reward) == (7, 1, 1)
        assert second.message == "reward must be one finite number, got float nan"
    with closing(GraderPool(Source(f"{REWARDS}:in_async_batch"), QUICK)) as pool:
        assert [grade.reward for grade in pool.grade(items)] == [5] * 5


@pytest.mark.parametrize(
    ("response", "message"),
    [
        ("sleep", "took more than 1.5 s (task.wall_seconds, for a batch of 3)"),
        ("raise", "ZeroDivisionError: division by zero (rewards_for_tests.py, line"),
        ("exit", "the worker exited with 3"),
        ("short", "a batched reward must return a list of 3 results, one per response, got 2"),
        ("dict", "a batched reward must return a list of 3 results, one per response, got dict"),
    ],
)
def test_a_batched_call_fails_as_a_whole_and_the_next_one_works(response, message):
    with closing(GraderPool(Source(f"{REWARDS}:in_batch"), QUICK)) as pool:
        grades = pool.grade([("1", {}), (response, {}), ("2", {})])
        assert [grade.status for grade in grades] == [ERROR] * 3
        assert all(message in said for said in messages(grades)), messages(grades)
        assert [grade.reward for grade in pool.grade([("1", {}), ("2", {})])] == [0, 1]


def test_async_calls_run_at_the_same_time_and_fail_alone():
    """Each call takes 0.05 s, one sleeps until its limit: in all little more than that limit."""
    responses = [*map(str, range(150)), "sleep", "raise"]
    began = time.monotonic()
    with closing(GraderPool(Source(f"{REWARDS}:concurrently"), QUICK)) as pool:
        *good, slept, raised = pool.grade([(response, {}) for response in responses])
        assert time.monotonic() - began < 10  # one after the other: 150 × 0.05 s + 1.5 s
    assert [grade.reward for grade in good] == list(range(150))
    assert max(grade.parts["most"] for grade in good) == AT_ONCE
    assert slept.message == "took more than 1.5 s (task.wall_seconds)"
    assert raised.message.startswith("ValueError: no (rewards_for_tests.py, line")


@pytest.mark.parametrize(("response", "message"), [("block", "must not block"), ("exit", "with 3")])
def test_an_async_call_that_ends_its_worker_fails_the_calls_that_have_begun(response, message):
    responses = [response, *map(str, range(AT_ONCE + 5))]
    with closing(GraderPool(Source(f"{REWARDS}:concurrently"), QUICK)) as pool:
        grades = pool.grade([(one, {}) for one in responses])
    failed = [grade for grade in grades if grade.status is ERROR]
    assert len(failed) == AT_ONCE
    assert all(message in grade.message for grade in failed)
    assert [grade.reward for grade in grades[AT_ONCE:]] == list(range(AT_ONCE - 1, AT_ONCE + 5))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("async_generator", "but it is an async generator because it contains yield; write return"),
        ("generator", "but it is a generator because it contains yield; write return"),
        ("one_argument", r"must take two arguments, response and row, but .* write def one_argu"),
        ("trl", r"defined as trl\(completions, \*\*kwargs\) .*; write def trl\(response, row\)"),
        ("trl", r"as TRL's are, needs @burnish\.batched and is def trl\(responses, rows\)"),
        ("NOT_A_FUNCTION", "must be a function, got int; name a function"),
    ],
)
def test_a_reward_that_can_not_be_called_is_refused_when_it_is_loaded(name, message):
    with pytest.raises(DataError, match=message):
        GraderPool(Source(f"{REWARDS}:{name}"), QUICK).start()


def test_failures_are_displayed_as_they_happen_and_too_many_stop_the_grading():
    told = []
    items = [("1", {}), ("raise", {"n": 1}), *[("sleep", {"n": 2})] * 9]
    with closing(GraderPool(OBEDIENT, QUICK)) as pool:
        pool.start()
        began = time.monotonic()
        with showing(lambda progress: told.append(progress.grading)), limiting_errors(0.1, 11):
            begin("grade", "grading")
            with pytest.raises(
                GraderError, match="2 of 11 responses have no grade so far"
            ) as caught:
                pool.grade(items)
        assert time.monotonic() - began < 9  # one sleep, not nine
        assert "response 1 ('raise', row {'n': 1}): ZeroDivisionError" in str(caught.value)
        assert "response 2 ('sleep', row {'n': 2}): took more than 1.5 s" in str(caught.value)
        assert told == ["", "2 of 11 graded, 1 not graded", "3 of 11 graded, 2 not graded"]
        with limiting_errors(0.5, 2):  # the pool has closed, and starts again
            assert pool.grade([("1", {}), ("raise", {})])[0].reward == 1
