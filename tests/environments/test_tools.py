"""Calls of tools in episodes: results, errors that the model reads, and limits."""

import dataclasses
import json
import os
import pickle
import time
from contextlib import closing
from pathlib import Path

import pytest

from burnish.environments import prompts
from burnish.environments.pool import EnvironmentLimits, EnvironmentPool
from burnish.environments.sandbox import PythonSource
from burnish.environments.search import SearchSource
from burnish.environments.tools import (
    LONGEST_RESULT,
    MOST_CALLS,
    ToolSettings,
    call_function,
    load_tools,
)
from burnish.errors import DataError
from tests.environments.conftest import processes_of
from tests.environments.test_sandbox import needs_sandbox

KIT = Path(__file__).with_name("toolkit.py")
PROMPTS = f"{prompts.__file__}:Prompts"
COUNTER = f"{KIT}:Counter"
NAMES = ("add", "note", "later", "fail", "odd")
ALL = (*(f"{KIT}:{name}" for name in NAMES), "calculator")
LIMITS = EnvironmentLimits(wall_seconds=20.0, cpu_seconds=2.0, memory_bytes=1 << 28)
ROW = {"prompt": "begin"}

pytestmark = pytest.mark.usefixtures("nothing_left")


def opened(spec=PROMPTS, sources=ALL, limits=LIMITS, **settings):
    settings = {"call_seconds": 1.0, **settings}
    return closing(EnvironmentPool(spec, limits, ToolSettings(sources, **settings)))


@pytest.fixture
def pool():
    with opened() as pool:
        pool.reset([("a", ROW, 0)])
        yield pool


def call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def step(pool, text, name="a"):
    (found,) = pool.step([(name, {"role": "assistant", "content": text})])
    return found


def results(pool, text):
    found = step(pool, text)
    assert found.error is None
    assert not found.done
    assert found.reward is None
    assert {message["role"] for message in found.messages} == {"tool"}
    return [message["content"] for message in found.messages]


def test_the_schemas_reach_the_pool(pool):
    assert [schema["function"]["name"] for schema in pool.schemas] == [*NAMES, "calculator"]
    assert not pool.deterministic
    with opened(sources=(ALL[0], "calculator")) as other:
        assert other.start().deterministic
        copy = pickle.loads(pickle.dumps(other))
        assert len(copy.start().schemas) == 2
        copy.close()
    with closing(EnvironmentPool(PROMPTS, LIMITS)) as without:
        assert without.start().schemas == ()


def test_an_episode_ends_with_a_message_that_calls_nothing(pool):
    (found,) = pool.reset([("a", ROW, 0)])
    assert found.messages == [{"role": "user", "content": "begin"}]
    assert results(pool, f"I add. {call('add', a=1, b=2)}") == ["3"]
    last = step(pool, "It is 3.")
    assert (last.done, last.messages, last.reward) == (True, [], None)


def test_parallel_calls_and_counts(pool):
    text = "\n".join([call("add", a=1), call("nothing"), call("later", text="x"), call("add", a=5)])
    found = step(pool, text)
    assert [message["content"] for message in found.messages] == [
        "2",
        "error: there is no tool 'nothing'; the tools are add, note, later, fail, odd, calculator",
        "x",
        "6",
    ]
    assert found.metrics == {"tool_calls": 4, "tool_errors": 1}
    assert step(pool, call("add")).metrics == {"tool_calls": 5, "tool_errors": 2}
    assert step(pool, call("add", a=1)).metrics == {"tool_calls": 6, "tool_errors": 2}


def test_a_message_has_a_largest_number_of_calls(pool):
    found = step(pool, call("note", text="x") * (MOST_CALLS + 3))
    assert len(found.messages) == MOST_CALLS
    assert found.messages[-1]["content"].endswith(
        f"error: a message may have at most {MOST_CALLS} calls; the others were not run"
    )
    assert found.metrics == {"tool_calls": MOST_CALLS + 3, "tool_errors": 3}
    assert len(json.loads(results(pool, call("note", text="y"))[0])) == MOST_CALLS + 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("<tool_call>{</tool_call>", "error: the JSON object is invalid: Expecting property name"),
        (call("add"), "error: add: the argument a is missing"),
        (call("add", a=1, c=2), 'error: add: unknown argument "c"; it takes a, b'),
        (call("add", a="1"), 'error: add: argument a must be of type integer, got "1"'),
        (call("fail", how="a\nb"), "error: ValueError: a\nb"),
        (call("fail", how="odd"), "error: Odd: its text can't be read"),
        (call("fail", how="exit"), "error: SystemExit: 3"),
        (call("fail", how="system"), "error: KeyboardInterrupt"),
        (call("fail", how="long"), f"error: ValueError: {'x' * 1000} …"),
        (call("calculator", expression="1/0"), "error: division by zero"),
        (call("odd", how="memory"), "error: MemoryError"),
        (call("odd", how="recursion"), "error: RecursionError: maximum recursion depth exceeded"),
        (call("odd", how="hang"), "error: odd took more than 1 s"),
        (call("odd", how="burn"), "error: odd took more than 1 s"),
        (call("odd", how="swallow"), "error: odd took more than 1 s"),
        (call("later", text="x", seconds=60), "error: later took more than 1 s"),
        (call("\ud800"), "error: the JSON object is invalid: a text contains half of a surrogate"),
        (call("add", a=1, **{"\ud800": 2}), "error: the JSON object is invalid: a text contains"),
        (
            call("add", a="?").replace('"?"', "[" * 500 + "]" * 500),
            "error: the JSON object is invalid: it has more than 100 levels of objects and lists",
        ),
    ],
)
def test_a_failed_call_is_shown_to_the_model(pool, text, said):
    (first, second) = results(pool, text + call("add", a=1))
    assert first.startswith(said)
    assert "Traceback" not in first
    assert len(first) < 1100
    assert second == "2"
    assert step(pool, call("add", a=1)).metrics == {"tool_calls": 3, "tool_errors": 1}


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("long", f"{'é' * LONGEST_RESULT} … [cut]"),
        ("object", "{'a': [1, None, <class 'object'>]}"),
        ("lone", "a?b"),
        ("none", "null"),
        ("nan", "NaN"),
        ("print", "printed"),
        ("fork", "parent"),
        ("child", "started"),
    ],
)
def test_odd_results(pool, how, said):
    limits = dataclasses.replace(LIMITS)
    with opened(limits=limits, call_seconds=15.0) as pool:
        pool.reset([("a", ROW, 0)])
        assert results(pool, call("odd", how=how)) == [said]
        assert results(pool, call("add", a=1)) == ["2"]
        pool.end(["a"])
        assert not processes_of(pool)


def test_a_function_that_cannot_be_interrupted_ends_its_episode():
    limits = dataclasses.replace(LIMITS, wall_seconds=2.0)
    with opened(limits=limits, call_seconds=0.5) as pool:
        pool.reset([(name, ROW, 0) for name in "abc"])
        texts = [call("odd", how="stubborn"), call("odd", how="exit"), call("add", a=1)]
        found = pool.step(
            [(n, {"role": "assistant", "content": t}) for n, t in zip("abc", texts, strict=True)]
        )
        assert [one.error for one in found] == [
            "step took more than 2 s (wall_seconds)",
            "the environment's process exited with 3 during step",
            None,
        ]


@pytest.mark.slow
def test_tools_that_misbehave_at_the_same_time_fail_alone():
    """They hang, leave processes in other sessions, exhaust memory and print a gigabyte; the
    episode beside them goes on."""
    limits = dataclasses.replace(LIMITS, wall_seconds=20.0, cpu_seconds=15.0)
    hows = {"a": "stubborn", "b": "escape", "c": "grow", "d": "print"}
    with opened(limits=limits, call_seconds=15.0) as pool:
        pool.reset([(name, ROW, 0) for name in [*hows, "good"]])
        texts = {name: call("odd", how=how) for name, how in hows.items()}
        texts["good"] = call("add", a=1)
        found = pool.step([(n, {"role": "assistant", "content": t}) for n, t in texts.items()])
        said = [one.error or one.messages[0]["content"] for one in found]
        assert said[0] == "step took more than 20 s (wall_seconds)"
        assert said[1] == "escaped"
        assert "MemoryError" in said[2] or "of memory (memory_bytes)" in said[2]
        assert said[3:] == ["printed", "2"]
        assert step(pool, call("add", a=3), "good").messages[0]["content"] == "4"
        pool.end([*hows])
        assert len(processes_of(pool)) == 1


def test_the_calls_of_a_message_share_a_limit():
    with opened(call_seconds=0.6, step_seconds=1.0) as pool:
        pool.reset([("a", ROW, 0)])
        began = time.monotonic()
        found = results(pool, call("odd", how="hang") * 3 + call("add", a=1))
        assert time.monotonic() - began < 5
        assert found[0] == "error: odd took more than 0.6 s"
        assert found[1].startswith("error: odd took more than 0.")
        assert found[2:] == [
            f"error: {name} was not run: the earlier calls of this message took 1 s"
            for name in ("odd", "add")
        ]


def test_each_episode_has_its_own_state(pool):
    pool.reset([("b", ROW, 0)])
    assert results(pool, call("note", text="x")) == ['["x"]']
    found = step(pool, call("note", text="y"), "b")
    assert found.messages[0]["content"] == '["y"]'


def test_an_environment_receives_messages_without_calls():
    """Its file and that of its tools are one module."""
    with opened(COUNTER) as pool:
        (first,) = pool.reset([("a", {"n": 3}, 0)])
        assert first.messages[0]["content"] == "3"
        assert results(pool, call("add", a=1)) == ["2"]
        assert step(pool, "one").messages == [{"role": "user", "content": "1"}]
        assert results(pool, call("note", text="x")) == ['["one", "x"]']
        last = step(pool, "two")
        assert (last.done, last.reward) == (True, 1.0)


@pytest.mark.parametrize("calls", ["llama", "plain"])
def test_other_formats(calls):
    text = {"llama": '{"name": "add", "parameters": {"a": 1}}', "plain": 'call add {"a": 1}'}[calls]
    with opened(calls=calls) as pool:
        pool.reset([("a", ROW, 0)])
        assert results(pool, text) == ["2"]
        assert step(pool, call("add", a=1)).done


def test_a_killed_episode_is_replayed_with_its_calls():
    with opened(sources=(ALL[0], "calculator")) as pool:
        pool.reset([("a", ROW, 0)])
        assert results(pool, call("add", a=1)) == ["2"]
        (pid,) = processes_of(pool)
        os.kill(pid, 9)
        assert step(pool, call("add", a=4)).metrics == {"tool_calls": 2, "tool_errors": 0}


@needs_sandbox
def test_programs_of_two_episodes_share_nothing():
    code = (
        "import os; print(os.listdir(), os.path.exists('/tmp/x')); "
        "open('/tmp/x', 'w'); open('y', 'w')"
    )
    with opened(sources=(PythonSource(),), call_seconds=10.0) as pool:
        pool.reset([("a", ROW, 0), ("b", ROW, 0)])
        for name in "aba":
            found = step(pool, call("python", code=code), name)
            assert found.messages[0]["content"] == "['main.py'] False\n"
        secret = call("python", code="import gc; print(open('/proc/1/environ').read())")
        assert "FileNotFoundError" in step(pool, secret).messages[0]["content"]


@needs_sandbox
def test_a_program_that_hangs_is_ended():
    with opened(sources=(PythonSource(),)) as pool:
        pool.reset([("a", ROW, 0)])
        hang = call("python", code="while True: pass")
        found = step(pool, hang * 2)
        said = "error: python took more than 1 s"
        assert [message["content"] for message in found.messages] == [said, said]
        deadline = time.monotonic() + 5
        while len(processes_of(pool)) > 1 and time.monotonic() < deadline:
            time.sleep(0.02)
        assert len(processes_of(pool)) == 1


def test_search_in_episodes(tmp_path):
    (tmp_path / "ulm.txt").write_text("Its tower is 161.53 m tall.\n")
    with opened(sources=(SearchSource(str(tmp_path)),)) as pool:
        pool.reset([(name, ROW, 0) for name in "ab"])
        for name in "ab":
            found = step(
                pool, call("search", query="tower") + call("open_document", document="x"), name
            )
            assert [message["content"] for message in found.messages] == [
                "[1] ulm.txt, line 1: Its tower is 161.53 m tall.",
                "error: there is no document 'x'; some are ulm.txt",
            ]
        assert pool.deterministic


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("kit", r"tool must be FILE\.py:NAME, got 'kit'"),
        ("none.py:f", "tool none.py:f: there is no file"),
        (f"{KIT}:nothing", "toolkit.py defines .*add.*, but not 'nothing'"),
        (f"{KIT}:untyped", "parameter a of untyped: has no type hint; write, for example, a: str"),
        (f"{KIT}:NUMBER", "must be a function, got an object of type int; name a function"),
        (f"{KIT}:Counter", "must be a function, got an object of type type"),
        (SearchSource("none"), "tool search: there is no folder none"),
    ],
)
def test_tools_that_cannot_be_loaded(source, said):
    with opened(sources=(source,)) as pool, pytest.raises(DataError, match=said):
        pool.start()


def test_two_tools_of_one_name():
    with pytest.raises(DataError, match="there are two tools with the name add; rename one"):
        load_tools(ToolSettings((ALL[0], ALL[0])))


def test_an_alarm_after_the_end_of_a_call_is_ignored():
    """Also if it is delivered while the call's result is returned."""
    for seconds in (0.001, 0.002, 0.003):
        for _ in range(30):
            found = call_function(lambda s=seconds: str(time.sleep(s)), "nap", seconds)
            assert found.text in ("None", f"error: nap took more than {seconds:g} s")
    time.sleep(0.02)
