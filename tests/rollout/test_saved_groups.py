"""Groups that a checkpoint holds come back as they were."""

from __future__ import annotations

import json
import math
import pickle
from dataclasses import fields, replace
from itertools import chain
from typing import Any

import numpy as np
import pytest

from burnish.rollout.packing import pack
from burnish.rollout.saved_groups import load_held, save_held
from burnish.types import (
    Completion,
    Finish,
    FloatArray,
    Grade,
    Group,
    Limit,
    Prompt,
    SamplingParams,
    SequenceStart,
    Status,
    Turn,
)


def prompt(index: int) -> Prompt:
    return Prompt(f"p{index}", "text", np.arange(3, dtype=np.int32), "task")


def no_values(length: int) -> None:
    return None


def some_values(length: int) -> FloatArray:
    return np.where(np.arange(length) % 2, np.nan, 0.1).astype(np.float32)


def made(index: int, lengths: list[int], values: Any) -> Group:
    params = SamplingParams(
        max_tokens=7, stop=("\r\n",), stop_ids=(2,), turn_temperatures=(1.5, 0.1)
    )
    completions = tuple(
        Completion(
            f"group-{index}",
            k,
            np.arange(length, dtype=np.int32),
            np.linspace(-1, -0.1, length, dtype=np.float32),
            np.full(length, index, dtype=np.int32),
            np.ones(length, dtype=np.bool_),
            params,
            Finish.STOP if length else Finish.ABORT,
            2 if k else None,
            "a\ud7ff text",
            values=values(length),
            continued=index * k,
            continuations=2 * k,
            continuation_errors=("it failed",) * k,
        )
        for k, length in enumerate(lengths)
    )
    good = Grade(0.1, {"format": 1.0}, turn_weight=0.5)
    bad = Grade(math.nan, status=Status.ERROR, message="it failed")
    return Group(index, prompt(index), completions, (good, bad))


@pytest.mark.parametrize("values", [no_values, some_values])
def test_groups_come_back_bit_for_bit(values: Any) -> None:
    held = [[], [made(7, [3, 0], values), made(9, [1, 4], values)], [made(10, [2, 2], values)]]
    tensors, rows = save_held(held)
    found = load_held(tensors, json.loads(json.dumps(rows)), prompt)
    assert [len(groups) for groups in found] == [0, 2, 1]
    for before, after in zip(chain(*held), chain(*found), strict=True):
        assert (before.index, before.prompt.prompt_id) == (after.index, after.prompt.prompt_id)
        assert repr(before.grades) == repr(after.grades)
        for one, other in zip(before.completions, after.completions, strict=True):
            for field in fields(Completion):
                np.testing.assert_array_equal(getattr(one, field.name), getattr(other, field.name))


def test_episodes_come_back() -> None:
    first = ({"role": "user", "content": "go"},)
    turns = (
        Turn(0, 2, "one", ({"role": "tool", "content": "1"},), 0.5, {"heard": 3.0}, None),
        Turn(2, 3, "two", (), None, {}, "it failed"),
    )
    sequences = SequenceStart(0, np.arange(3)), SequenceStart(2, np.arange(5))
    episode = {"turns": turns, "limit": Limit.TURNS, "sequences": sequences}
    group = made(7, [3, 3], no_values)
    completions = (
        replace(group.completions[0], **episode, first_messages=first),
        replace(group.completions[1], turns=turns[:1]),
    )
    tensors, rows = save_held([[replace(group, completions=completions)]])
    ((found,),) = load_held(tensors, json.loads(json.dumps(rows)), prompt)
    for before, after in zip(completions, found.completions, strict=True):
        assert (after.turns, after.limit) == (before.turns, before.limit)
        assert after.first_messages == before.first_messages
        assert [one.start for one in after.sequences] == [one.start for one in before.sequences]
        for one, other in zip(before.sequences, after.sequences, strict=True):
            np.testing.assert_array_equal(one.prompt, other.prompt)


def test_groups_of_a_checkpoint_from_before_a_setting_have_its_default() -> None:
    tensors, rows = save_held([[made(7, [3, 2], no_values)]])
    for row in rows[0]:
        del row["params"]["min_p"], row["params"]["repetition_penalty"]
    ((group,),) = load_held(tensors, rows, prompt)
    assert group.completions[0].params == made(7, [3, 2], no_values).completions[0].params


def test_groups_of_a_checkpoint_from_before_credit_per_turn_are_read() -> None:
    """Both of its forms: JSON of a checkpoint, and pickles that actors exchange."""
    turns = (Turn(0, 3, "one", (), 0.5, {}, None),)
    group = made(7, [3, 2], no_values)
    sequences = (SequenceStart(1, np.arange(4, dtype=np.int32)),)
    first, other = group.completions
    first = replace(first, turns=turns, sequences=sequences)
    group = replace(group, completions=(first, other))
    tensors, rows = save_held([[group]])
    (row,) = json.loads(json.dumps(rows))[0]
    for grade in row["grades"]:
        del grade["turn_weight"]
    for completion in row["completions"]:
        del completion["continuations"], completion["continuation_errors"]
    row["completions"][0]["episode"]["sequences"] = [[1, [0, 1, 2, 3]]]
    del row["params"]["turn_temperatures"]
    ((found,),) = load_held(tensors, [[row]], prompt)
    pickled = pickle.loads(pickle.dumps(group))
    for record, names in (
        *((grade, ["turn_weight"]) for grade in pickled.grades),
        *((c, ["continuations", "continuation_errors"]) for c in pickled.completions),
    ):
        for name in names:
            del record.__dict__[name]
    for old in (found, pickle.loads(pickle.dumps(pickled))):
        assert [grade.turn_weight for grade in old.grades] == [1.0, 1.0]
        assert [(c.continuations, c.continuation_errors) for c in old.completions] == [(0, ())] * 2
        assert old.completions[0].turns == turns
        assert repr(old.completions[0].sequences) == repr(sequences)
        batch = pack([replace(old, grades=(old.grades[0],) * 2)])
        assert batch.turn_rewards is not None
        assert batch.turn_rewards.nansum() == pytest.approx(0.2)
        save_held([[old]])


def test_nothing_is_saved_of_no_groups() -> None:
    assert load_held(*save_held([[]]), prompt) == [[]]
