"""Processes and output of an episode: nothing outlives it, and no output fills memory or disk."""

import os
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from burnish.environments.pool import LOG_BYTES, EnvironmentPool
from tests.environments.conftest import GAMES, QUICK, alive, gone, processes_of, supervisor_of

PATIENT = replace(QUICK, wall_seconds=20.0)

pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.fixture
def pool():
    with closing(EnvironmentPool(f"{GAMES}:Echo", PATIENT)) as pool:
        pool.reset([(name, {}, 0) for name in "ab"])
        yield pool


def step(pool, name, text):
    (found,) = pool.step([(name, {"role": "assistant", "content": text})])
    return found


def log_size(pool):
    return os.fstat(pool._supervisor.process._log.fileno()).st_size


def test_forks_end_with_their_episode(pool):
    assert step(pool, "a", "fork 5").messages
    assert len(processes_of(pool)) == 2 + 5
    pool.end(["a"])
    assert len(processes_of(pool)) == 1


def test_a_fork_that_returns_does_not_answer(pool):
    assert step(pool, "a", "fork_and_return").messages[0]["content"] == "both"
    assert step(pool, "a", "next").messages[0]["content"] == "2 next"


@pytest.mark.parametrize("way", ["escape", "detach"])
@pytest.mark.parametrize("end", ["end", "timeout", "exit", "close", "kill"])
def test_a_process_that_left_the_session_ends_with_its_episode(pool, tmp_path, way, end):
    file = tmp_path / "pid"
    assert step(pool, "a", f"{way} {file}").messages
    escaped = int(file.read_text())
    assert step(pool, "b", "exit 3").error
    assert alive(escaped)  # the end of another episode does not end it
    if end == "end":
        pool.end(["a"])
    elif end == "close":
        pool.close()
    elif end == "kill":
        os.kill(supervisor_of(pool), 9)
    else:
        assert step(pool, "a", {"timeout": "burn", "exit": "exit 3"}[end]).error
    if end == "kill":
        assert gone(escaped)
    else:
        assert not alive(escaped)


def test_a_process_that_left_its_session_in_the_failing_call(pool, tmp_path):
    found = step(pool, "a", f"fail_detached {tmp_path / 'pid'}")
    assert found.error == "the environment's process exited with 7 during step"
    assert not alive(int((tmp_path / "pid").read_text()))


def test_much_output_fills_neither_memory_nor_disk(pool):
    memory = Path(f"/proc/{supervisor_of(pool)}/statm")
    before = int(memory.read_text().split()[0])
    began = time.monotonic()
    found = step(pool, "a", "print 200")
    assert found.messages[0]["content"] == "printed", found
    assert time.monotonic() - began < 10
    assert log_size(pool) < 20_000
    tail = "\n".join(pool._supervisor.process.tail())
    assert "a line of output" in tail
    assert tail.endswith("[the other output of this episode is discarded]")
    assert (int(memory.read_text().split()[0]) - before) * os.sysconf("SC_PAGE_SIZE") < 64 << 20


def test_the_log_of_many_episodes_is_bounded(pool):
    for i in range(25):
        pool.reset([(f"e{i}{k}", {"reset": "print 1"}, 0) for k in range(3)])
        pool.end([f"e{i}{k}" for k in range(3)])
    assert log_size(pool) < LOG_BYTES + 4 * 20_000


def test_output_of_loading_is_bounded(tmp_path):
    (tmp_path / "loud.py").write_text(
        "import os, time\n"
        "for _ in range(50):\n"
        "    os.write(1, b'x' * (1 << 20))\n"
        "    time.sleep(0.01)\n"
        "class Game:\n"
        "    def reset(self, row, seed): return 'begin'\n"
        "    def step(self, message): return 'next'\n"
    )
    with closing(EnvironmentPool(f"{tmp_path}/loud.py:Game", QUICK)) as pool:
        pool.start()
        assert pool.reset([("a", {}, 0)])[0].messages
        assert log_size(pool) <= LOG_BYTES


def test_an_idle_episode_that_dies_is_reported_at_its_next_step(pool):
    step(pool, "a", "value __import__('threading').Timer(0.1, os._exit, [6]).start() or 'soon'")
    time.sleep(0.8)
    found = step(pool, "a", "next")
    assert found.error == "the environment's process exited with 6 before step"
    assert step(pool, "b", "next").messages
