"""ReMax: a greedy response to each prompt is sampled, graded, counted, and never learned from."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from burnish import api
from burnish.errors import ConfigError, DataError
from burnish.launch import local
from burnish.launch.resolve import resolve
from burnish.launch.settings import rollout_settings
from burnish.randomness import Stream
from burnish.recipe.load import load_recipe
from burnish.recipe.plan import make_plan
from burnish.rollout.greedy_baseline import Greedy, set_apart
from burnish.rollout.packing import pack
from burnish.rollout.rollout import costs, describe, grade, sample
from burnish.runs.metrics import Timers
from burnish.types import Grade, Scores, Status
from tests.conftest import make_group
from tests.loops.test_recorder import fingerprint, stopper

REMAX = ["objective.advantage=remax", "train.steps=4", "train.epochs=2"]


def with_greedy(reward, *, grade=None):
    """Responses of 2 and 1 tokens with rewards 1 and 4, and a greedy one of 3 tokens."""
    group = make_group(3, [5, 6], [[7, 8], [9], [1, 2, 3]], [1.0, 4.0, reward])
    *own, last = group.completions
    last = replace(last, params=replace(last.params, temperature=0.0))
    grades = group.grades if grade is None else (*group.grades[:-1], grade)
    return replace(group, completions=(*own, last), grades=grades)


def test_the_greedy_response_leaves_its_reward_and_its_cost():
    group = set_apart(with_greedy(2.5))
    assert [grade.parts for grade in group.grades] == [{"greedy": 2.5}] * 2
    assert [grade.reward for grade in group.grades] == [1.0, 4.0]
    assert [c.continued for c in group.completions] == [3, 0]
    figures = describe([group])
    assert figures["rollout/reward"] == figures["rollout/part_greedy"] == 2.5
    assert figures["rollout/responses"] == 2
    assert figures["rollout/continuation_tokens"] == 3
    assert figures["rollout/tokens_sampled"] == 6
    program = local.compile(load_recipe("sort", REMAX).objective)
    batch = pack([group], program.graded)
    # 1 − 2.5 on two tokens, 4 − 2.5 on one.
    found = program.advantages(batch, Scores())[batch.is_action]
    torch.testing.assert_close(found, torch.tensor([-1.5, -1.5, 1.5]))


@pytest.mark.parametrize("scale", [0.5, 2.0])
def test_the_greedy_reward_is_scaled_as_the_others_are(scale):
    group = set_apart(with_greedy(2.5))
    group = replace(group, prompt=replace(group.prompt, scale=scale))
    program = local.compile(load_recipe("sort", REMAX).objective)
    batch = pack([group], program.graded)
    found = program.advantages(batch, Scores())[batch.is_action]
    torch.testing.assert_close(found, scale * torch.tensor([-1.5, -1.5, 1.5]))


def test_the_greedy_response_pays_a_penalty_and_counts_in_no_statistics():
    # Of the others one in two is right; the greedy one is right, too: p = 1/2, not 2/3.
    keywords = ["task=keywords", "model=smollm2-135m", "rollout.max_tokens=10"]
    recipe = load_recipe("sort", [*keywords, "length=solve_rate", "length.coefficient=1"])
    group = with_greedy(1.0)
    group = replace(group, grades=(Grade(1.0, correct=True), Grade(0.0, correct=False),
                                   Grade(1.0, correct=True)))  # fmt: skip
    shaped = set_apart(rollout_settings(recipe).penalize(group))
    lost = [0.5 * 2 / 10, 0.5 * 1 / 10]
    assert shaped.rewards.tolist() == pytest.approx([1 - lost[0], -lost[1]])
    assert shaped.grades[0].parts["greedy"] == pytest.approx(1 - 0.5 * 3 / 10)


def test_a_greedy_response_without_a_grade_takes_its_group_along():
    error = Grade(float("nan"), status=Status.ERROR, message="the judge is asleep")
    group = set_apart(with_greedy(0.0, grade=error))
    told = "the greedy response has no grade: the judge is asleep"
    assert [(g.is_error, g.message) for g in group.grades] == [(True, told)] * 2


@pytest.mark.parametrize("status", [Status.SCORED, Status.ERROR])
def test_what_the_judge_of_a_greedy_response_cost_is_counted(status):
    own = with_greedy(0.0)
    grades = [replace(g, cost={"calls": n + 1.0}) for n, g in enumerate(own.grades)]
    grades[-1] = replace(grades[-1], status=status)
    assert costs([set_apart(replace(own, grades=tuple(grades)))]) == {"judge/calls": 1 + 2 + 3}


def test_groups_that_are_all_greedy_or_not_at_all_stay():
    whole = with_greedy(1.0)
    for kept in ([0, 1], [2]):
        group = replace(
            whole,
            completions=tuple(whole.completions[i] for i in kept),
            grades=tuple(whole.grades[i] for i in kept),
        )
        assert set_apart(group) is group


def test_it_is_the_likeliest_response_and_does_not_touch_the_others():
    recipe = load_recipe("sort", REMAX)
    task, engine, _ = local.build_sampler(resolve(recipe))
    asked, params = list(enumerate(task.prompts)), rollout_settings(recipe).params
    plain = sample(engine, asked, 4, params)
    found = sample(engine, asked, 4, params, steps=Greedy())
    for own, more in zip(plain, found, strict=True):
        assert len(more) == 5
        for a, b in zip(own, more[:4], strict=True):
            assert np.array_equal(a.token_ids, b.token_ids)
    tokens = torch.tensor(np.stack([prompt.token_ids for _, prompt in asked])).long()
    likeliest = engine.model(tokens).argmax(-1)
    assert [more[-1].token_ids.tolist() for more in found] == likeliest.tolist()
    groups = grade(task, asked, found)
    pairs = [(prompt, own[-1]) for (_, prompt), own in zip(asked, found, strict=True)]
    expected = [g.reward for g in task.grade_all(pairs)]
    assert [group.grades[0].parts["greedy"] for group in groups] == expected
    held_out = sample(engine, asked, 4, params, Stream.EVALUATION, steps=Greedy())
    assert {len(own) for own in held_out} == {4}


def test_a_run_in_both_loops_repeats_and_resumes(tmp_path):
    lag = [*REMAX, "loop.lag=1", "objective.proximal=behavior", "checkpoint.every=1"]
    whole = api.train("sort", overrides=lag, out=tmp_path / "whole")
    path = api.train("sort", overrides=lag, out=tmp_path / "run", stop=stopper(2))
    api.resume(path)
    assert fingerprint(path) == fingerprint(whole)
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    assert rows[1]["rollout/continuation_tokens"] == 3 * 3  # of three prompts, three numbers each
    assert rows[1]["rollout/tokens_sampled"] == 33 * 3
    assert 0 <= rows[1]["rollout/part_greedy"] <= 5
    recipe = load_recipe("sort", REMAX)
    parts = local.build_local(resolve(recipe))
    steps = list(parts.train(timers=Timers()))
    assert {len(step.advantages) for step in steps} == {30}


def test_bad_input_and_the_plan(tmp_path):
    lines = dict(dict(make_plan(load_recipe("sort", REMAX), tmp_path))["batches"])
    assert lines["greedy responses"].startswith("3 more per rollout, one per prompt")
    free = ["loop=free", "runtime=ray", "objective.proximal=behavior"]
    with pytest.raises(ConfigError, match=r"'remax' .* use loop\.name = 'lagged', got 'free'$"):
        load_recipe("sort", [*REMAX, *free])
    with pytest.raises(ConfigError, match=r"use selection\.dead_groups = 'dynamic', got 'active'$"):
        load_recipe("sort", [*REMAX, "selection.dead_groups=active"])
    with pytest.raises(DataError, match="reads the part 'greedy'"):
        pack([make_group(0, [1], [[2]], [0.0])], ("greedy",))
