from dataclasses import replace

import numpy as np
import pytest

from burnish.recipe.load import load_recipe, recipe_to_toml
from burnish.runs import responses
from burnish.runs.directory import RunDirectory
from burnish.runs.metrics import iterate_rows
from burnish.runs.responses import format_log
from tests.conftest import make_group

RECIPE = recipe_to_toml(load_recipe("sort"))


def read(groups, advantages):
    decode = lambda ids: [str(i) for i in ids]  # noqa: E731
    return format_log(list(responses.rows(4, groups, decode=decode, advantages=advantages)))


def test_readable_counts_equal_responses_and_escapes_text():
    group = make_group(0, [1], [[2], [2], [3]], [1.0, 1.0, 0.0])
    assert read([group], [0.5, 0.5, -1.0]).splitlines() == [
        "step 4",
        "  prompt '1'",
        "      2 × '2'  reward 1, advantage 0.5",
        "      1 × '3'  reward 0, advantage -1",
    ]


def test_the_readable_log_has_what_was_asked():
    group = make_group(0, [1], [[2]], [1.0])
    asked = replace(group.prompt, text="<|user|>Sort it<|end|>", question="Sort it")
    assert read([replace(group, prompt=asked)], [0.0]).splitlines()[1] == "  prompt 'Sort it'"


def test_the_readable_log_has_no_negative_zero_and_no_grade_that_is_missing():
    text = read([make_group(0, [1], [[2], [3]], [-0.0, float("nan")])], [-0.0, 0.5])
    assert "'2'  reward 0, advantage 0\n" in text
    assert "'3'  advantage 0.5\n" in text


@pytest.mark.parametrize(
    ("versions", "ranges"),
    [
        ([3], [[3, 1]]),
        ([3, 3, 5, 6, 6, 6], [[3, 2], [5, 1], [6, 3]]),
        ([3, 4, 3], [[3, 1], [4, 1], [3, 1]]),
        ([], []),
    ],
)
def test_rows_have_the_version_of_every_token(versions, ranges):
    """Weights may come while a response is sampled."""
    group = make_group(0, [1], [list(range(len(versions)))], [1.0])
    changed = replace(group.completions[0], versions=np.array(versions, np.int64))
    group = replace(group, completions=(changed,))
    (row,) = responses.rows(1, [group], decode=lambda ids: [str(i) for i in ids])
    assert row["versions"] == ranges
    assert row["version"] == (versions[0] if versions else None)


def test_rows_say_what_a_response_was(tmp_path):
    groups = [
        make_group(4, [1], [[2, 3], [2]], [1.0, float("nan")], version=7),
        make_group(5, [6], [[], [8]], [0.5, 0.0]),
    ]

    def decode(ids):
        return [f"<{i}>" for i in ids]

    advantages = [0.25, float("nan"), 0.0, -1.0]
    learner = [np.array(x, dtype=np.float32) for x in ([-0.1, -0.30004], [-np.inf], [], [-2])]
    written = list(
        responses.rows(3, groups, decode=decode, advantages=advantages, learner_logprobs=learner)
    )
    assert written[0] == {
        "step": 3,
        "group": 4,
        "prompt_id": "p4",
        "prompt": "1",
        "asked": "1",
        "sample": 0,
        "response": "2 3",
        "tokens": ["<2>", "<3>"],
        "logprobs": [-0.1, -0.2],
        "learner_logprobs": [-0.1, -0.3],
        "forced": [],
        "reward": 1.0,
        "parts": {},
        "status": "scored",
        "correct": True,
        "advantage": 0.25,
        "finish": "stop",
        "version": 7,
        "versions": [[7, 2]],
    }
    assert (written[1]["reward"], written[1]["advantage"]) == (None, None)
    assert written[1]["learner_logprobs"] == [None]
    assert (written[2]["tokens"], written[2]["version"], written[2]["versions"]) == ([], None, [])
    assert [row["advantage"] for row in responses.rows(0, groups, decode=decode)] == [None] * 4

    with RunDirectory(tmp_path / "run", RECIPE) as run:
        for row in written:
            run.append_row("rollouts.jsonl", row)
    assert list(iterate_rows(tmp_path / "run" / "rollouts.jsonl")) == written
    assert list(iterate_rows(tmp_path / "none.jsonl")) == []


def test_a_limit_takes_every_groups_first_response_first():
    groups = [make_group(g, [1], [[1], [2], [3]], [0, 0, 0]) for g in range(3)]

    def kept(limit):
        some = responses.rows(0, groups, decode=lambda ids: [str(i) for i in ids], limit=limit)
        return [(row["group"], row["sample"]) for row in some]

    assert kept(0) == []
    assert kept(2) == [(0, 0), (1, 0)]
    assert kept(4) == [(0, 0), (0, 1), (1, 0), (2, 0)]
    assert len(kept(100)) == len(kept(None)) == 9
