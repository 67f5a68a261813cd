"""Who waited for whom, on timelines whose answers are known."""

import json

import pytest

from burnish.runs.timeline import FILE, SHOWN, account, timeline_data


def row(actor, what, begin, end, incarnation=0):
    told = {"actor": actor, "what": what, "begin": begin, "end": end}
    return {"event": "worked", "incarnation": incarnation, "version": 3} | told


STEP = [
    row("generator-0", "sample", 0, 4),
    row("generator-1", "sample", 0, 3),
    row("scorer", "grade", 4.5, 5),
    row("learner", "learn", 5, 7),
    row("learner", "weights", 7, 8),
]
"""One synchronous step; for half a second nobody works."""


def test_each_second_of_an_actor_has_a_cause():
    assert account(STEP) == {
        "generator-0": {"": 4, "the driver": 0.5, "grades": 0.5, "weights": 3},
        "generator-1": {
            "": 3,
            "other generators": 1,
            "the driver": 0.5,
            "grades": 0.5,
            "weights": 3,
        },
        "scorer": {"": 0.5, "samples": 4, "the driver": 0.5, "weights": 3},
        "learner": {"": 3, "samples": 4, "the driver": 0.5, "grades": 0.5},
    }


def test_evaluations_and_checkpoints_are_causes_of_their_own():
    rows = [
        row("generator-0", "evaluate", 0, 4),
        row("learner", "state", 4, 5),
        row("scorer", "grade", 5, 5),  # took no time that the clock shows
    ]
    assert account(rows) == {
        "generator-0": {"": 4, "a checkpoint": 1},
        "learner": {"an evaluation": 4, "": 1},
        "scorer": {"an evaluation": 4, "a checkpoint": 1},
    }


def test_the_night_between_two_incarnations_is_nobodys():
    later = [row(r["actor"], r["what"], r["begin"] + 1e5, r["end"] + 1e5, 1) for r in STEP]
    once, twice = account(STEP), account(STEP + later)
    assert {name: {k: 2 * v for k, v in own.items()} for name, own in once.items()} == twice


def test_calls_that_follow_each_other_at_once_leave_no_gap():
    rows = [row("learner", "learn", 0, 1), row("learner", "weights", 1, 2)]
    assert account(rows) == {"learner": {"": 2}}


def test_the_picture_has_the_last_calls(tmp_path):
    assert timeline_data(tmp_path) == {"spans": [], "seconds": {}}
    rows = [row("learner", "learn", k, k + 0.5) for k in range(SHOWN + 100)]
    (tmp_path / FILE).write_text("".join(json.dumps(row) + "\n" for row in rows))
    told = timeline_data(tmp_path)
    assert told["spans"][0] == ["learner", "learn", 100, 100.5, 3]
    assert len(told["spans"]) == SHOWN
    assert told["seconds"] == {"learner": pytest.approx({"": 200, "the driver": 199.5})}
