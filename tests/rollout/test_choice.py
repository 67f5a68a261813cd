"""Prompts in turn, and what becomes of those that teach nothing."""

from dataclasses import replace

import pytest

from burnish.rollout.choice import Choice
from burnish.types import Grade, Status
from tests.conftest import make_group

ROWS = 200


class Task:
    """Rows in the same order in every epoch."""

    def prompt(self, index):
        return make_group(index % ROWS, [1], [[2]], [0.0]).prompt


def graded(prompts, rewards):
    """A group of the same rewards for each prompt."""
    groups = [make_group(0, [1], [[2]] * len(rewards), rewards) for _ in prompts]
    return [replace(group, prompt=prompt) for group, prompt in zip(groups, prompts, strict=True)]


def test_prompts_come_in_turn():
    choice, task = Choice(1.0, seed=0), Task()
    for first in (0, 150, 300):
        prompts, told = choice.take(task, 150)
        assert [p.prompt_id for p in prompts] == [f"p{(first + i) % ROWS}" for i in range(150)]
        assert told == {}
        choice.record(graded(prompts, [0.0, 0.0]))
    assert choice.state() == {"turn": 450, "settled": []}


@pytest.mark.parametrize("reward", [0.0, 1.0])
def test_what_taught_nothing_comes_again_by_chance(reward):
    choice, task = Choice(0.25, seed=0), Task()
    prompts, told = choice.take(task, ROWS)
    assert told == {"rollout/passed_over": 0.0}
    live = prompts[::4]
    choice.record(graded(prompts, [reward, reward]))
    choice.record(graded(live, [0.0, 1.0]))
    again, told = choice.take(task, 80)
    ids = [p.prompt_id for p in again]
    turns = int(told["rollout/passed_over"]) + 80
    assert {p.prompt_id for p in live[: turns // 4]} <= set(ids)
    others = len(ids) - len({p.prompt_id for p in live} & set(ids))
    assert others / (turns * 3 / 4) == pytest.approx(0.25, abs=0.08)
    assert ids != [p.prompt_id for p in choice.take(task, 80)[0]]


def test_errors_say_nothing_of_a_prompt():
    choice, task = Choice(0.01, seed=0), Task()
    prompts, _ = choice.take(task, 3)
    groups = graded(prompts, [0.0, 1.0])
    failed = Grade(0.0, status=Status.ERROR)
    choice.record([replace(group, grades=(failed, group.grades[0])) for group in groups[:1]])
    choice.record([replace(group, grades=(failed, failed)) for group in groups[1:2]])
    choice.record(groups[2:])
    assert choice.state()["settled"] == ["p0"]


def test_a_choice_goes_on_where_it_was():
    one, other, task = Choice(0.5, seed=3), Choice(0.5, seed=3), Task()
    prompts, _ = one.take(task, ROWS)
    one.record(graded(prompts, [0.0, 0.0]))
    other.load_state(one.state())
    assert [p.prompt_id for p in one.take(task, 50)[0]] == [
        p.prompt_id for p in other.take(task, 50)[0]
    ]
    assert one.state() == other.state()
