"""Results of environments are checked strictly, and each error names rule, value and remedy."""

import math

import pytest

from burnish.environments.protocol import Observation, failed_observation, read_observation

USER = {"role": "user", "content": "hello"}


def test_a_text_is_one_user_message():
    assert read_observation("hello", "reset") == Observation([USER], None, False, {})
    assert read_observation("hello", "step") == Observation([USER], None, False, {})
    assert read_observation({"messages": "hello"}, "step").messages == [USER]


def test_reset_may_return_a_system_message():
    system = {"role": "system", "content": "be brief"}
    assert read_observation([system, USER], "reset").messages == [system, USER]
    assert read_observation((USER,), "reset").messages == [USER]


def test_all_keys_of_a_step():
    tool = {"role": "tool", "content": ""}
    found = read_observation(
        {"messages": [tool], "reward": True, "done": True, "metrics": {"a": 2}}, "step"
    )
    assert found == Observation([tool], 1.0, True, {"a": 2.0})
    assert isinstance(found.reward, float)


def test_messages_may_be_missing_only_if_the_episode_is_done():
    assert read_observation({"done": True}, "step") == Observation([], None, True, {})
    assert read_observation({"done": True, "messages": "bye"}, "step").messages


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "step must return a dict with keys from messages, reward, done, metrics, or a text"),
        ([USER], "or a text, got list"),
        ({"rewards": 1}, "unknown key str 'rewards'; the known keys are messages, reward, done"),
        ({}, 'returned no messages although .* return a message .* or "done": True'),
        ({"messages": []}, "returned no messages although"),
        ({"messages": 3}, "messages of step must be a list of messages or a text, got int 3"),
        ({"messages": USER}, "messages of step must be a list of messages or a text, got dict"),
        ({"messages": ["hello"]}, "message 0 of step must be a dict with role and content, got st"),
        ({"messages": [USER, {"role": "user"}]}, "message 1 of step has no content; write both"),
        ({"messages": [{"content": "a"}]}, "message 0 of step has no role"),
        ({"messages": [USER | {"name": 1}]}, "unknown key str 'name'; the known keys are role, c"),
        ({"messages": [USER | {"role": "assistant"}]}, "one of user, tool, system, got str 'assi"),
        ({"messages": [USER | {"role": []}]}, "must be one of user, tool, system, got list"),
        ({"messages": [USER | {"role": "system"}]}, "must be user or tool, got 'system'; only re"),
        ({"messages": [USER | {"content": None}]}, "must be a text, got NoneType None; write str"),
        ({"messages": [USER | {"content": "a\udc80"}]}, "character 1 is the lone surrogate '.udc"),
        ({"messages": "\ud800"}, "the text of step must be valid Unicode, but character 0"),
        ({"messages": "a", "reward": math.nan}, "reward must be one finite number, got float nan"),
        ({"messages": "a", "reward": -math.inf}, "one finite number, got float -inf"),
        ({"messages": "a", "reward": "1"}, "reward must be one finite number, got str '1'"),
        ({"messages": "a", "reward": 1j}, "one finite number, got complex"),
        ({"messages": "a", "reward": 10**400}, "one finite number, got int 1000"),
        ({"messages": "a", "reward": 10**5000}, "one finite number, got int$"),
        ({"messages": "a", "done": 1}, r"done must be True or False, got int 1; write bool\(...\)"),
        ({"messages": "a", "done": None}, "done must be True or False, got NoneType"),
        ({"messages": "a", "metrics": [1]}, "metrics must be a dict of numbers, got list"),
        ({"messages": "a", "metrics": {1: 1}}, "names of metrics must be texts, got int 1"),
        ({"messages": "a", "metrics": {"\ud800": 1}}, "a name of metrics must be valid Unicode"),
        ({"messages": "a", "metrics": {"x": "y"}}, "metric 'x' must be one finite number, got str"),
        ({"messages": "a", "metrics": {"x": math.nan}}, "metric 'x' must be one finite number"),
        ({"messages": "a", "reward": "x" * 1000}, "got str 'xxx.*x…$"),
    ],
)
def test_a_step_against_the_rules(value, message):
    with pytest.raises(ValueError, match=message):
        read_observation(value, "step")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "reset must return a list of messages or a text, got NoneType None"),
        ({"messages": "hello"}, "reset must return a list of messages or a text, got dict"),
        ([], "reset must return at least one message, got none"),
        ([USER | {"role": "model"}], "role of message 0 of reset must be one of"),
        ("\udfff", "the text of reset must be valid Unicode"),
    ],
)
def test_a_reset_against_the_rules(value, message):
    with pytest.raises(ValueError, match=message):
        read_observation(value, "reset")


def test_a_failure_has_nothing_but_its_error():
    assert failed_observation("no") == Observation([], None, False, {}, error="no")
