"""Metrics of episodes: as the groups of a rollout and as the rows of its file they are the same."""

import math
from dataclasses import replace

import numpy as np
import pytest

from burnish.rollout.episode_metrics import lone_turns
from burnish.rollout.rollout import averages, describe
from burnish.runs import responses
from burnish.types import Episode, Grade, Status, Turn
from tests.conftest import make_group


def turn(start, end, *roles, metrics=None, error=None):
    messages = tuple({"role": role, "content": "x"} for role in roles)
    return Turn(start, end, "text", messages, None, metrics or {}, error, seconds=0.5)


def group_of(*episodes):
    """A group of episodes of six tokens, of which the third and the fourth were inserted."""
    count = len(episodes)
    mask = [[True, True, False, False, True, True]] * count
    group = make_group(0, [1], [[1, 2, 3, 4, 5, 6]] * count, [0.5] * count, sampled=mask)
    prompt = replace(group.prompt, episode=Episode({}, 0, ({"role": "user", "content": "go"},)))
    pairs = zip(group.completions, episodes, strict=True)
    completions = tuple(replace(completion, turns=own) for completion, own in pairs)
    return replace(group, prompt=prompt, completions=completions)


def both(group):
    """The metrics of a group and, but for their prefix, of its rows."""
    of_group = describe([group])
    rows = list(responses.rows(1, [group], decode=lambda ids: [str(i) for i in ids]))
    of_rows = averages(rows)
    names = ("turns", "tool_calls", "tool_errors", "observation_tokens")
    found = {name: of_group[f"rollout/{name}"] for name in names if f"rollout/{name}" in of_group}
    assert found == {name: of_rows[name] for name in names if name in of_rows}
    return found


def test_turns_and_tokens_of_observations_are_counted():
    group = group_of((turn(0, 2, "user"), turn(4, 6)), (turn(0, 6),))
    assert both(group) == {"turns": 1.5, "observation_tokens": 2.0}


def test_tool_calls_are_messages_of_tools_or_what_the_environment_counts():
    found = both(group_of((turn(0, 2, "tool", "tool"), turn(4, 6, "tool")), (turn(0, 6, "user"),)))
    assert found["tool_calls"] == 1.5
    assert "tool_errors" not in found
    first = turn(0, 2, "tool", metrics={"tool_calls": 2.0, "tool_errors": 0.0})
    last = turn(4, 6, "tool", metrics={"tool_calls": 3.0, "tool_errors": 1.0})  # so far
    group = group_of((first, last), (turn(0, 6, "tool"),))
    grades = tuple(replace(grade, parts={"tool_calls": 3.0, "n": 1.0}) for grade in group.grades)
    group = replace(group, grades=grades)
    found = both(group)
    assert (found["tool_calls"], found["tool_errors"]) == (1.5, 0.5)
    assert describe([group])["rollout/part_n"] == 1
    assert "rollout/part_tool_calls" not in describe([group])
    none = both(group_of((turn(0, 2, metrics={"tool_calls": 0.0}), turn(4, 6))))
    assert none["tool_calls"] == 0
    assert "tool_errors" not in none


def test_an_environment_that_did_not_start_has_no_turn():
    failed = Turn(0, 0, "", (), None, {}, "reset: no")
    assert both(group_of((failed,), (turn(0, 2), turn(4, 6))))["turns"] == 1.0


def test_other_responses_have_no_such_metrics():
    assert both(make_group(0, [1], [[2, 3]], [1.0])) == {}


def test_rows_of_episodes_have_their_turns(tmp_path):
    """The seconds are in a file of their own, because they differ whenever a run is repeated."""
    group = group_of((turn(0, 2, "tool"), turn(4, 6, error="step: no")))
    rows = list(responses.rows(3, [group], decode=lambda ids: [str(i) for i in ids]))
    (row,) = rows
    assert row["first_messages"] == [{"role": "user", "content": "go"}]
    assert row["turns"][0] == {
        "start": 0,
        "end": 2,
        "text": "text",
        "messages": ({"role": "tool", "content": "x"},),
        "reward": None,
        "metrics": {},
        "error": None,
    }
    assert row["turns"][1]["error"] == "step: no"
    (times,) = responses.turn_times("rollouts.jsonl", rows, [group])
    assert times == {
        "file": "rollouts.jsonl",
        "step": 3,
        "group": 0,
        "sample": 0,
        "seconds": [0.5, 0.5],
    }
    system = group.prompt.episode._replace(system="Be brief.")
    told = replace(group, prompt=replace(group.prompt, episode=system))
    (row,) = responses.rows(3, [told], decode=lambda ids: [str(i) for i in ids])
    assert [message["role"] for message in row["first_messages"]] == ["system", "user"]
    assert responses.final_text(row) == "text"


@pytest.mark.parametrize("turns", [(), (turn(0, 0),)])
def test_an_episode_without_turns_is_recorded(turns):
    group = group_of(turns)
    (row,) = responses.rows(3, [group], decode=lambda ids: [str(i) for i in ids])
    assert len(row["turns"]) == len(turns)
    assert np.isfinite(list(describe([group]).values())).all()
    assert not list(responses.turn_times("x", [row], [group])) or turns


def test_turns_that_no_other_episode_of_the_group_reached():
    """3, 1 and an error; 2 and 2: of 8 turns, the second and third of the first episode."""

    def group(*counts):
        made = make_group(0, [1], [[1] * 4] * len(counts), [0.0] * len(counts))
        completions = tuple(
            replace(c, turns=(Turn(0, 1, "", (), None, {}, None),) * count)
            for c, count in zip(made.completions, counts, strict=True)
        )
        return replace(made, completions=completions)

    failed = group(3, 1, 4)
    error = Grade(math.nan, status=Status.ERROR)
    failed = replace(failed, grades=(*failed.grades[:2], error))
    assert lone_turns([failed, group(2, 2)]) == {"lone_turns": 0.25}
    assert lone_turns([group(2)]) == {"lone_turns": 1.0}
    assert lone_turns([group(0, 0)]) == {}
