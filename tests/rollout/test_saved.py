"""Groups that a checkpoint holds come back as they were."""

from __future__ import annotations

import json
import math
from dataclasses import fields

import numpy as np

from burnish.rollout.saved import load_groups, save_groups
from burnish.types import Completion, Finish, Grade, Group, Prompt, SamplingParams, Status


def prompt(index: int) -> Prompt:
    return Prompt(f"p{index}", "text", np.arange(3, dtype=np.int32), "task")


def made(index: int, lengths: list[int]) -> Group:
    params = SamplingParams(max_tokens=7, stop=("\r\n",), stop_ids=(2,))
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
        )
        for k, length in enumerate(lengths)
    )
    good = Grade(0.1, {"format": 1.0})
    bad = Grade(math.nan, status=Status.ERROR, message="it failed")
    return Group(index, prompt(index), completions, (good, bad))


def test_groups_come_back_bit_for_bit() -> None:
    groups = [made(7, [3, 0]), made(9, [1, 4])]
    arrays, rows = save_groups(groups)
    found = load_groups(arrays, json.loads(json.dumps(rows)), prompt)
    for before, after in zip(groups, found, strict=True):
        assert (before.index, before.prompt.prompt_id) == (after.index, after.prompt.prompt_id)
        assert repr(before.grades) == repr(after.grades)
        for one, other in zip(before.completions, after.completions, strict=True):
            for field in fields(Completion):
                np.testing.assert_array_equal(getattr(one, field.name), getattr(other, field.name))


def test_nothing_is_saved_of_no_groups() -> None:
    assert load_groups(*save_groups([]), prompt) == []
