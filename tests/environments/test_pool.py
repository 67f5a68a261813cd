"""The pool with real processes: whatever one environment does, the others go on, in order."""

import dataclasses
import os
import pickle
import resource
import signal
import threading
import time
from contextlib import closing

import pytest

from burnish.environments import pool as pools
from burnish.environments.episode import EnvironmentLimits
from burnish.environments.pool import EnvironmentPool
from burnish.errors import DataError
from tests.environments.conftest import (
    GAMES,
    QUICK,
    alive,
    descendants,
    gone,
    processes_of,
    supervisor_of,
)

pytestmark = pytest.mark.usefixtures("nothing_left")


def say(text):
    return {"role": "assistant", "content": text}


def texts(observations):
    return [one.error or one.messages[0]["content"] for one in observations]


def one(pool, name, text):
    (found,) = pool.step([(name, say(text))])
    return found


def pid_of(pool, name):
    return int(one(pool, name, "pid").metrics["pid"])


def kill(pid):
    os.kill(pid, signal.SIGKILL)
    assert gone(pid)


@pytest.fixture
def pool():
    with closing(EnvironmentPool(f"{GAMES}:Echo", QUICK)) as pool:
        yield pool


@pytest.fixture
def chance():
    with closing(EnvironmentPool(f"{GAMES}:Chance", QUICK)) as pool:
        yield pool


def test_results_are_in_the_order_of_the_arguments(pool):
    names = [f"e{i}" for i in range(12)]
    found = pool.reset([(name, {"n": i}, 7) for i, name in enumerate(names)])
    assert texts(found) == [f"begin {i} 7" for i in range(12)]
    found = pool.step([(name, say(f"to {name}")) for name in reversed(names)])
    assert texts(found) == [f"1 to {name}" for name in reversed(names)]
    assert texts(pool.step([("e3", say("again"))])) == ["2 again"]
    assert pool.step([]) == pool.reset([]) == []
    assert pool.deterministic


def test_episodes_begin_with_messages_that_are_replayed(pool):
    """Beside others; all observations can be read. A fault in a replay ends its episode alone."""
    starts = [(name, {"n": 3}, 7) for name in ("plain", "replayed", "broken")]
    spoken = {"replayed": [say("a"), say("b")], "broken": [say("value 1 / 0"), say("b")]}
    plain, replayed, broken = pool.reset(starts, spoken)
    assert texts([plain, replayed]) == ["begin 3 7", "2 b"]
    assert texts(pool.observed("replayed")) == ["begin 3 7", "1 a", "2 b"]
    assert "ZeroDivisionError" in broken.error
    assert texts(pool.step([("replayed", say("c")), ("plain", say("c"))])) == ["3 c", "1 c"]
    pool.begin_reset(starts[:2], spoken)
    found = {}
    while len(found) < 2:
        found |= pool.poll(5.0)
    assert texts([found["plain"], found["replayed"]]) == ["begin 3 7", "2 b"]


def test_calls_run_at_the_same_time_and_report_their_duration(pool):
    names = [f"e{i}" for i in range(8)]
    pool.reset([(name, {}, 0) for name in names])
    began = time.monotonic()
    found = pool.step([(name, say("sleep 0.5")) for name in names])
    assert time.monotonic() - began < 3.5  # one after the other: 4 s
    assert all(0.5 <= one.seconds < 1.5 for one in found)


FAULTS = [
    ("sleep 60", "step took more than 1.5 s (wall_seconds)"),
    ("burn", "step took more than 0.5 s of CPU time (cpu_seconds)"),
    ("allocate", "step took more than 256 MB of memory (memory_bytes)"),
    ("exit 3", "the environment's process exited with 3 during step"),
    ("exit 0", "the environment's process exited with 0 during step"),
    ("crash 11", "the environment's process was killed by SIGSEGV during step"),
    ("crash 40", "the environment's process was killed by signal 40 during step"),
    ("value 1 / 0", "ZeroDivisionError: division by zero (games.py, line 34)"),
    ("value int('x')", "ValueError: invalid literal for int()"),
    ("value exit(2)", "SystemExit: 2 (games.py, line"),
    ("value {'reward': float('nan')}", "step returned no messages although"),
    ("value {'messages': 'a', 'reward': float('nan')}", "one finite number, got float nan"),
    ("value '\\ud800'", "the text of step must be valid Unicode"),
    ("value None", "step must return a dict"),
    ("value sys.stdout.write('\\x1b[31m') and 1 / 0", "ZeroDivisionError"),
    ("value open('\\x1b[31m')", r"'\x1b[31m'"),
    ("long 17", "the result of step must be at most 16 MB, got 17.0 MB; shorten messages"),
    ("garbage", "the environment's process sent an invalid reply"),
    ("forge", "the environment's process sent an invalid reply"),
]


RAISED = ("1 / 0", "int('x')", "exit(2)", "open(")
"""Faults that are exceptions of the environment itself."""


def test_a_fault_ends_its_episode_alone(pool):
    """All faults at once, beside an episode that works."""
    names = [f"e{i}" for i in range(len(FAULTS))]
    pool.reset([(name, {}, 0) for name in ["good", *names]])
    said = [say(text) for text, _ in FAULTS]
    began = time.monotonic()
    *faults, good = pool.step([*zip(names, said, strict=True), ("good", say("fine"))])
    assert time.monotonic() - began < 20
    assert texts([good]) == ["1 fine"]
    for found, (text, message) in zip(faults, FAULTS, strict=True):
        assert message in (found.error or ""), text
        assert (found.messages, found.reward, found.metrics) == ([], None, {})
        assert not found.was_killed
        assert found.was_raised == any(words in text for words in RAISED), text
    assert len(processes_of(pool)) == 1
    again = pool.step([(name, say("more")) for name in [*names, "good"]])
    assert [one.error for one in again[:-1]] == [one.error for one in faults]
    assert texts(again[-1:]) == ["2 more"]


def test_a_fault_in_reset(pool):
    rows = [{"reset": text} for text in ("exit 3", "value 1 / 0", "value []", "sleep 60", "burn")]
    found = pool.reset([(f"e{i}", row, 0) for i, row in enumerate(rows)])
    assert [one.error for one in found] == [
        "the environment's process exited with 3 during reset",
        "ZeroDivisionError: division by zero (games.py, line 34)",
        "reset must return at least one message, got none",
        "reset took more than 1.5 s (wall_seconds)",
        "reset took more than 0.5 s of CPU time (cpu_seconds)",
    ]
    assert one(pool, "e0", "more") == found[0]
    assert texts(pool.reset([("e0", {}, 1)])) == ["begin 0 1"]  # a new episode of the same name
    assert texts([one(pool, "e0", "more")]) == ["1 more"]


def test_large_messages_pass_in_both_directions(pool):
    pool.reset([("a", {"n": "x" * (8 << 20)}, 0), ("b", {}, 0)])
    large = "y" * (9 << 20)
    found = pool.step([("a", say(large)), ("b", say("long 15"))])
    assert [len(text) for text in texts(found)] == [len(large) + 2, 15 << 20]


def test_async_environments():
    with closing(EnvironmentPool(f"{GAMES}:Later", QUICK)) as pool:
        (first,) = pool.reset([("a", {}, 0)])
        assert [message["role"] for message in first.messages] == ["system", "user"]
        assert not pool.deterministic
        found = one(pool, "a", "hello")
        assert (found.messages, found.reward) == ([{"role": "tool", "content": "hello"}], 1.0)
        assert texts([one(pool, "a", "2"), one(pool, "a", "3")]) == ["2", "3"]
        assert one(pool, "a", "raise").error.startswith("ValueError: no (games.py, line ")


def test_workers_load_only_the_standard_library(pool):
    pool.reset([("a", {}, 0)])
    assert texts([one(pool, "a", "modules")]) == ["[]"]


def test_global_randomness_begins_with_the_seed(pool):
    pool.reset([("a", {}, 1), ("b", {}, 1), ("c", {}, 2)])
    a, b, c = texts(pool.step([(name, say("draw")) for name in "abc"]))
    assert a == b != c


def test_episodes_inherit_no_files_of_other_episodes(pool):
    names = [f"e{i}" for i in range(6)]
    pool.reset([(name, {}, 0) for name in names])
    counts = texts(pool.step([(name, say("descriptors")) for name in names]))
    assert len(set(counts)) == 1


def test_end_calls_close_and_ignores_unknown_names(tmp_path):
    with closing(EnvironmentPool(f"{GAMES}:Closing", QUICK)) as pool:
        files = [tmp_path / name for name in "abcd"]
        rows = [{"file": str(file), "hangs": file.name == "b"} for file in files]
        pool.reset([(file.name, row, 0) for file, row in zip(files, rows, strict=True)])
        pids = [pid_of(pool, name) for name in "abc"]
        began = time.monotonic()
        pool.end(["a", "b", "unknown", "a"])
        assert time.monotonic() - began < 8  # b's close hangs until its limit
        assert files[0].read_text() == files[1].read_text() == "closed"
        assert gone(pids[0])
        assert gone(pids[1])
        assert not files[2].exists()
        with pytest.raises(ValueError, match="reset before its first step, but 'a' was not, or ha"):
            one(pool, "a", "more")
        kill(pids[2])
        pool.end(["c"])
        assert texts([one(pool, "d", "more")]) == ["1 more"]
    assert files[3].read_text() == "closed"  # by the pool's close


def test_an_episode_that_can_not_be_started_fails_alone(pool):
    """The supervisor has too few open files for all episodes."""
    pool.start()
    previous = resource.prlimit(supervisor_of(pool), resource.RLIMIT_NOFILE)
    resource.prlimit(supervisor_of(pool), resource.RLIMIT_NOFILE, (20, previous[1]))
    names = [f"e{i}" for i in range(12)]
    found = pool.reset([(name, {}, 0) for name in names])
    failed = [name for name, one in zip(names, found, strict=True) if one.error]
    assert 0 < len(failed) < 12
    assert "process can't be started: [Errno 24]" in found[-1].error
    resource.prlimit(supervisor_of(pool), resource.RLIMIT_NOFILE, previous)
    assert texts(pool.reset([(name, {}, 0) for name in failed])) == ["begin 0 0"] * len(failed)


def test_wrong_names(pool):
    with pytest.raises(ValueError, match="may have one call at a time, but 'a' has several"):
        pool.reset([("a", {}, 0), ("b", {}, 0), ("a", {}, 0)])
    pool.reset([("a", {}, 0)])
    with pytest.raises(ValueError, match="but 'a' has several"):
        pool.step([("a", say("1")), ("a", say("2"))])
    with pytest.raises(ValueError, match="but 'b' was not, or has ended"):
        pool.step([("a", say("1")), ("b", say("1"))])
    assert texts([one(pool, "a", "1")]) == ["1 1"]


def test_a_killed_deterministic_episode_is_replayed_once(pool):
    pool.reset([("a", {"n": 3}, 5), ("b", {}, 0)])
    assert texts([one(pool, "a", "one"), one(pool, "a", "two")]) == ["1 one", "2 two"]
    episodes = sorted(descendants(pool._supervisor.process.pid))[1:]
    for pid in episodes:
        kill(pid)
    found = pool.step([("a", say("three")), ("b", say("one"))])
    assert texts(found) == ["3 three", "1 one"]
    kill(processes_of(pool)[0])
    found = pool.step([("a", say("four")), ("b", say("two"))])
    failed = [one.error for one in found if one.error]
    assert len(failed) == 1
    assert failed[0].endswith(
        "was killed by SIGKILL before step, and had been replayed once before"
    )
    assert pool.step([("a", say("x")), ("b", say("x"))])[found.index(found[0])]


def test_an_episode_that_is_killed_during_its_call_is_replayed(pool):
    pool.reset([("a", {}, 0)])
    one(pool, "a", "one")
    episode = processes_of(pool)[0]
    threading.Timer(0.3, os.kill, [episode, signal.SIGKILL]).start()
    found = one(pool, "a", "sleep 1")
    assert texts([found, one(pool, "a", "three")]) == ["slept", "3 three"]


def test_an_episode_that_kills_itself_dies_twice(pool):
    pool.reset([("a", {}, 0)])
    assert one(pool, "a", "crash 9").error == (
        "the environment's process was killed by SIGKILL during step, and had been replayed once "
        "before"
    )


def test_a_killed_episode_that_is_not_deterministic_fails(chance):
    chance.reset([("a", {}, 0), ("b", {}, 0)])
    kill(pid_of(chance, "a"))
    found = chance.step([("a", say("x")), ("b", say("x"))])
    assert found[0].error == (
        "the environment's process was killed by SIGKILL before step; only a deterministic "
        "environment can be replayed"
    )
    assert texts(found[1:]) == ["1 x"]
    assert one(chance, "a", "y") == found[0]


def test_a_replay_that_differs_is_an_error():
    with closing(EnvironmentPool(f"{GAMES}:Forgetful", QUICK)) as pool:
        pool.reset([("a", {}, 0)])
        one(pool, "a", "draw")
        episode = processes_of(pool)[0]
        kill(episode)
        found = one(pool, "a", "x")
        assert "replayed, but the observation of step 1 differs; use the seed" in found.error
        assert not processes_of(pool)
        assert one(pool, "a", "y") == found


def test_two_faults_in_a_row(pool):
    """A timeout, then a kill of another episode, then a kill of the supervisor."""
    pool.reset([(name, {}, 0) for name in "abc"])
    assert "1.5 s (wall_seconds)" in one(pool, "a", "sleep 60").error
    kill(processes_of(pool)[0])
    assert texts(pool.step([("b", say("1")), ("c", say("1"))])) == ["1 1", "1 1"]
    kill(supervisor_of(pool))
    b, c = pool.step([("b", say("2")), ("c", say("2"))])
    assert sum("replayed once before" in (found.error or "") for found in (b, c)) == 1
    assert "1.5 s (wall_seconds)" in one(pool, "a", "x").error


@pytest.mark.parametrize("victim", ["guardian", "supervisor"])
def test_a_killed_supervisor_is_replaced_and_its_episodes_replayed(pool, victim, tmp_path):
    pool.reset([("a", {}, 3), ("b", {}, 4)])
    one(pool, "a", "one")
    one(pool, "b", f"escape {tmp_path / 'pid'}")
    guardian = pool._supervisor.process.pid
    supervisor, episodes = supervisor_of(pool), processes_of(pool)
    (tmp_path / "pid").unlink()
    kill(guardian if victim == "guardian" else supervisor)
    assert all(map(gone, [guardian, supervisor, *episodes]))
    assert texts(pool.step([("b", say("two")), ("a", say("two"))])) == ["2 two", "2 two"]
    kill(pool._supervisor.process.pid)
    found = pool.step([("a", say("three"))])
    assert "the supervisor of" in found[0].error
    assert "was killed by SIGKILL, and had been replayed once before" in found[0].error
    assert texts(pool.reset([("c", {}, 0)])) == ["begin 0 0"]


def test_a_killed_supervisor_fails_episodes_that_are_not_deterministic(chance):
    chance.reset([("a", {}, 0), ("b", {}, 0)])
    threading.Timer(0.5, os.kill, [supervisor_of(chance), signal.SIGKILL]).start()
    done, lost = chance.step([("a", say("x")), ("b", say("sleep 1.4"))])
    assert texts([done]) == ["1 x"]  # it had answered before
    assert "was killed by SIGKILL; only a deterministic environment can be replayed" in lost.error
    assert "was killed by SIGKILL" in one(chance, "a", "y").error
    assert texts(chance.reset([("a", {}, 0)])) == ["begin 0 0"]


def test_a_supervisor_that_does_not_respond_is_replaced(pool, monkeypatch):
    pool.reset([("a", {}, 0)])
    stopped = descendants(pool._supervisor.process.pid)
    monkeypatch.setattr(pools, "SLACK", -1.0)
    os.kill(supervisor_of(pool), signal.SIGSTOP)
    began = time.monotonic()
    threading.Timer(0.5, monkeypatch.setattr, [pools, "SLACK", 60.0]).start()
    assert texts([one(pool, "a", "one")]) == ["1 one"]
    assert time.monotonic() - began < 15
    assert all(map(gone, stopped))


def test_a_limit_that_is_exceeded_in_a_replay(pool):
    """The kill is not the environment's fault, but the timeout of the replay is."""
    pool.reset([("a", {}, 0)])
    one(pool, "a", "one")
    kill(processes_of(pool)[0])
    assert one(pool, "a", "sleep 60").error == "step took more than 1.5 s (wall_seconds)"


def test_pickling(pool):
    pool.start()
    copy = pickle.loads(pickle.dumps(pool))
    assert (copy.spec, copy.limits) == (pool.spec, pool.limits)
    with closing(copy):
        assert texts(copy.reset([("a", {}, 0)])) == ["begin 0 0"]


def test_a_closed_pool_starts_again_without_its_episodes(pool):
    pool.reset([("a", {}, 0)])
    pool.close()
    pool.close()
    with pytest.raises(ValueError, match="but 'a' was not, or has ended"):
        one(pool, "a", "x")
    assert texts(pool.reset([("a", {}, 0)])) == ["begin 0 0"]


def test_a_forgotten_pool_ends_its_processes():
    pool = EnvironmentPool(f"{GAMES}:Echo", QUICK)
    pool.reset([("a", {}, 0)])
    processes = [pool._supervisor.process.pid, *descendants(pool._supervisor.process.pid)]
    del pool
    assert all(map(gone, processes))


def test_in_a_fork_the_episodes_are_the_parents(pool, monkeypatch):
    pool.reset([("a", {}, 0)])
    parent = pool._supervisor
    monkeypatch.setattr(pool, "_owner", -1)
    with pytest.raises(ValueError, match="but 'a' was not, or has ended"):
        one(pool, "a", "x")
    assert pool._supervisor is not parent
    parent.connection.close()
    parent.process.close(10)


def test_any_thread_may_call(pool):
    found = {}

    def play(thread):
        found[thread] = texts(pool.reset([(thread, {}, 0)]))
        found[thread] += [texts([one(pool, thread, f"{i}")])[0] for i in range(20)]

    threads = [threading.Thread(target=play, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert all(found[name] == ["begin 0 0", *(f"{i + 1} {i}" for i in range(20))] for name in "abc")


def test_an_interrupted_call_is_not_answered_by_the_next_one(pool, monkeypatch):
    pool.reset([("a", {}, 0)])

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(pool, "_receive", interrupt)
        with pytest.raises(KeyboardInterrupt):
            one(pool, "a", "one")
    pool.end(["a"])
    assert texts(pool.reset([("a", {}, 1)])) == ["begin 0 1"]
    assert texts([one(pool, "a", "one")]) == ["1 one"]


@pytest.fixture
def patient():
    limits = dataclasses.replace(QUICK, wall_seconds=60.0)
    with closing(EnvironmentPool(f"{GAMES}:Echo", limits)) as pool:
        yield pool


def polled(pool, count, seconds=20.0):
    """The next observations of ``count`` episodes, in the order in which they arrive."""
    found, end = {}, time.monotonic() + seconds
    while len(found) < count:
        found |= pool.poll(1.0)
        assert time.monotonic() < end
    return {name: one.error or texts([one])[0] for name, one in found.items()}


def test_calls_without_waiting_do_not_wait_for_each_other(patient):
    pool, names = patient, "abcd"
    pool.begin_reset([(name, {"n": name}, 1) for name in names])
    assert polled(pool, 4) == {name: f"begin {name} 1" for name in names}
    pool.begin_step([("a", say("sleep 4"))])
    pool.begin_step([("b", say("one"))])
    assert polled(pool, 1) == {"b": "1 one"}
    assert pool.poll() == {}
    with pytest.raises(ValueError, match="'a' has not answered the last one"):
        pool.begin_step([("a", say("x"))])
    assert texts(pool.step([("c", say("one")), ("d", say("one"))])) == ["1 one", "1 one"]
    pool.begin_step([("b", say("exit 3")), ("c", say("two"))])
    assert polled(pool, 2) == {
        "b": "the environment's process exited with 3 during step",
        "c": "2 two",
    }
    assert polled(pool, 1) == {"a": "slept"}
    assert pool.poll(0.1) == {}
    pool.begin_step([("b", say("y"))])
    assert "exited with 3" in polled(pool, 1)["b"]


@pytest.mark.parametrize("victim", ["process", "supervisor"])
def test_calls_without_waiting_are_replayed(pool, victim):
    pool.begin_reset([("a", {}, 3), ("b", {}, 4)])
    assert len(polled(pool, 2)) == 2
    pool.begin_step([("a", say("one")), ("b", say("one"))])
    assert len(polled(pool, 2)) == 2
    pool.begin_step([("a", say("sleep 0.7")), ("b", say("two"))])
    assert polled(pool, 1) == {"b": "2 two"}
    kill(processes_of(pool)[0] if victim == "process" else supervisor_of(pool))
    assert polled(pool, 1) == {"a": "slept"}
    pool.begin_step([("b", say("three")), ("a", say("three"))])
    assert polled(pool, 2) == {"a": "3 three", "b": "3 three"}


@pytest.mark.parametrize("waits", [True, False])
def test_an_episode_that_is_ended_during_its_call(patient, waits):
    pool = patient
    pool.begin_reset([("a", {}, 3), ("b", {}, 4)])
    assert len(polled(pool, 2)) == 2
    (first, second), began = processes_of(pool), time.monotonic()
    pool.begin_step([("a", say("sleep 60")), ("b", say("one"))])
    pool.end(["a"], waits=waits)
    assert gone(first)
    assert time.monotonic() - began < 30
    assert alive(second)
    assert polled(pool, 1) == {"b": "1 one"}
    pool.begin_reset([("a", {}, 5)])
    assert polled(pool, 1) == {"a": "begin 0 5"}
    pool.end("ab", waits=waits)
    assert gone(second)
    assert pool.poll(0.1) == {}


def test_long_calls_and_replies_at_the_same_time():
    """Neither side waits for the other to read."""
    names = [f"{number}" for number in range(6)]
    limits = dataclasses.replace(QUICK, wall_seconds=20.0, cpu_seconds=20.0, memory_bytes=1 << 30)
    with closing(EnvironmentPool(f"{GAMES}:Echo", limits)) as pool:
        pool.begin_reset([(name, {"reset": "long 8"}, 1) for name in names[:3]])
        time.sleep(1.0)
        row = {"reset": "long 1", "ballast": "x" * (1 << 22)}
        pool.begin_reset([(name, row, 1) for name in names[3:]])
        found = {name: len(text) for name, text in polled(pool, 6, 60).items()}
        assert found == {name: (8 if name < "3" else 1) << 20 for name in names}


def test_the_defaults_of_the_limits():
    defaults = dataclasses.asdict(EnvironmentLimits())
    assert defaults == {
        "wall_seconds": 20.0,
        "cpu_seconds": 2.0,
        "start_seconds": 120.0,
        "memory_bytes": 1 << 30,
    }
    with pytest.raises(DataError, match="there is no file"):
        EnvironmentPool("/nowhere/game.py:Game").start()
