"""Full batches on prompts whose rewards are known: which prompts are asked, when, and what for."""

import dataclasses
import math
from itertools import count
from pathlib import Path

import numpy as np
import pytest

from burnish.engine.protocol import completed
from burnish.errors import ConfigError, DataError, GraderError, RunError
from burnish.launch.settings import rollout_settings
from burnish.loops import lagged
from burnish.recipe.load import load_recipe
from burnish.recipe.objective.objective import ObjectiveConfig
from burnish.recipe.plan import make_plan
from burnish.rollout.dead_groups import fill, find_judge, sample_actively
from burnish.rollout.rollout import describe
from burnish.types import Finish, Grade, Prompt, Status, Turn
from tests.conftest import make_group

SMALL = ["rollout.group_size=2", "rollout.batch=6", "train.batch=6"]


def recipe_of(dead_groups, *more):
    return load_recipe("sort", [*SMALL, f"selection.dead_groups={dead_groups}", *more])


def third(number):
    """Every third prompt is dead: 0, 3, 6, …"""
    return [0.0, 0.0] if number % 3 == 0 else [0.0, 1.0]


def graded(number, rewards=third):
    return make_group(number, [number], [[1], [1, 1]], rewards(number))


def filled(recipe, rewards=third):
    """Rollouts one after the other, over prompts 0, 1, 2, …; and the sizes of their rounds."""
    numbers, rounds = count(), []

    def ask(some):
        rounds.append(some)
        return [graded(next(numbers), rewards) for _ in range(some)]

    while True:
        yield fill(rollout_settings(recipe), ask(3), ask), rounds
        rounds.clear()


def indices(groups):
    return [group.index for group in groups]


def test_dead_groups_leave_and_the_batch_gets_smaller():
    (result, rounds) = next(filled(recipe_of("drop")))
    assert indices(result.sampled) == [0, 1, 2]
    assert indices(result.groups) == [1, 2]
    assert result.dropped == {0: "dead"}
    assert rounds == [3]
    assert result.figures["rollout/asked_per_used"] == 3 / 2
    kept, _ = next(filled(recipe_of("keep")))
    assert indices(kept.groups) == [0, 1, 2]
    assert kept.figures["rollout/asked_per_used"] == 1


def test_dynamic_sampling_asks_until_the_batch_is_full():
    rollouts = filled(recipe_of("dynamic"))
    # 0, 1, 2: one is missing; 3 is dead; 4 fills the batch
    result, rounds = next(rollouts)
    assert rounds == [3, 1, 1]
    assert indices(result.groups) == [1, 2, 4]
    assert result.dropped == {0: "dead", 3: "dead"}
    assert result.figures["rollout/asked_per_used"] == 5 / 3
    # five groups with responses of 1 and 2 tokens each
    assert describe(result.sampled)["rollout/tokens_sampled"] == 15
    assert result.figures["rollout/dead_groups"] == pytest.approx(2 / 5)
    # 5, 6, 7: 6 is dead; 8 fills the batch
    result, rounds = next(rollouts)
    assert rounds == [3, 1]
    assert indices(result.groups) == [5, 7, 8]


def rare(number):
    """Prompts 1 and 9 have variance."""
    return [0.0, 1.0] if number in (1, 9) else [1.0, 1.0]


def test_past_the_bound_a_run_ends_clearly_or_learns_from_fewer():
    # at most 3 × 2 groups: 0, 1, 2, then two are missing: 3, 4, then one more: 5
    with pytest.raises(RunError, match=r"1 of 6 groups .* needs 3 and selection.max_asked = 2 "):
        next(filled(recipe_of("dynamic", "selection.max_asked=2"), rare))
    some = recipe_of("dynamic", "selection.max_asked=2", "selection.on_bound=learn")
    result, rounds = next(filled(some, rare))
    assert rounds == [3, 2, 1]
    assert indices(result.groups) == [1]
    assert result.figures["rollout/asked_per_used"] == 6
    none, _ = next(filled(some, lambda number: [1.0, 1.0]))
    assert none.groups == []
    assert "rollout/asked_per_used" not in none.figures


def broken(group):
    error = Grade(math.nan, status=Status.ERROR, message="boom")
    return dataclasses.replace(group, grades=(error, group.grades[1]))


def test_a_group_that_lost_its_samples_to_errors_is_replaced_too():
    recipe = recipe_of("dynamic", "rollout.max_errors=0.2")
    sampled = [graded(1), broken(graded(2)), graded(4)]
    result = fill(rollout_settings(recipe), sampled, lambda some: [graded(5)][:some])
    assert indices(result.groups) == [1, 4, 5]
    assert result.dropped == {2: "error"}
    with pytest.raises(GraderError):
        fill(
            rollout_settings(recipe_of("dynamic", "rollout.max_errors=0.1")),
            sampled,
            lambda some: [],
        )


class Slow:
    """An engine whose groups take a known number of steps; the second sample is one step late."""

    def __init__(self, steps):
        self._steps, self.sampled, self.now, self._left = steps, 0, 0, {}
        self.submitted, self.unfinished = [], 0

    def submit(self, request):
        self.submitted.append((self.now, request.group))
        for i in range(request.n):
            self._left[request.group, i] = (self.now + self._steps[request.group] + i, request)
        self.unfinished = len(self._left)

    def step(self):
        self.now += 1
        done = [name for name, (end, _) in self._left.items() if end <= self.now]
        self.sampled += len(self._left)
        found = []
        for name in done:
            _, request = self._left.pop(name)
            recorded = ([1], [-0.5], [0])
            found.append(completed(request, name[1], recorded, (Finish.STOP, None, "1")))
        self.unfinished = len(self._left)
        return found


class Thirds:
    """Grades prompt n by a function; says which prompts were graded together."""

    def __init__(self, rewards=third):
        self.rewards, self.calls = rewards, []

    def grade_all(self, pairs):
        self.calls.append(sorted({int(prompt.prompt_id) for prompt, _ in pairs}))
        return [Grade(self.rewards(int(p.prompt_id))[c.sample_index]) for p, c in pairs]


def prompts():
    numbers = count()

    def take(some):
        found = [next(numbers) for _ in range(some)]
        return [(n, Prompt(str(n), "", np.array([n], dtype=np.int32), "t")) for n in found]

    return take


STEPS = {0: 1, 1: 6, 2: 1, 3: 1, 4: 9}


def test_active_sampling_asks_while_other_groups_decode():
    engine, task, take = Slow(STEPS), Thirds(), prompts()
    groups = sample_actively(rollout_settings(recipe_of("active")), engine, task, take(3), take)
    # 0 and 2 are whole at step 2, and 0 is dead: 3 begins. It is whole at step 4, and dead: 4
    # begins, while 1 is whole at step 7 alone. Groups come by number.
    assert engine.submitted == [(0, 0), (0, 1), (0, 2), (2, 3), (4, 4)]
    assert task.calls == [[0, 2], [3], [1], [4]]
    assert indices(groups) == [0, 1, 2, 3, 4]
    result = fill(
        rollout_settings(recipe_of("active")), groups, lambda some: pytest.fail("it is full")
    )
    assert indices(result.groups) == [1, 2, 4]


def test_active_sampling_keeps_the_bound():
    recipe = recipe_of("active", "selection.max_asked=2")
    engine, take = Slow(dict.fromkeys(range(9), 1)), prompts()
    groups = sample_actively(rollout_settings(recipe), engine, Thirds(rare), take(3), take)
    assert indices(groups) == [0, 1, 2, 3, 4, 5]
    with pytest.raises(RunError, match=r"1 of 6 groups"):
        fill(rollout_settings(recipe), groups, lambda some: pytest.fail("the bound is reached"))


def test_active_sampling_halts_at_the_first_groups_of_a_grader_that_fails():
    """It must not ask up to the bound. Group 0 is whole first: 2 of the 6 responses asked for."""
    engine, take = Slow({0: 1, 1: 6, 2: 6}), prompts()
    task = Thirds()
    task.grade_all = lambda pairs: [Grade(math.nan, status=Status.ERROR) for _ in pairs]
    halts = recipe_of("active", "rollout.max_errors=0.3")
    with pytest.raises(GraderError, match="2 of 2 responses"):
        sample_actively(rollout_settings(halts), engine, task, take(3), take)
    assert len(engine.submitted) == 3


def test_a_rollout_in_flight_is_filled_when_it_is_learned_from():
    """Groups 3, 4, 5 of the next rollout are in flight when the first asks for another."""
    recipe = recipe_of("dynamic")
    take, engine = prompts(), Slow(dict.fromkeys(range(20), 1))
    rollouts = lagged.LocalRollouts(rollout_settings(recipe), Thirds(), engine)
    rollouts.issue(take(3))
    rollouts.issue(take(3))

    def ask(some):
        rollouts.issue(take(some), first=True)
        return rollouts.collect()

    assert indices(fill(rollout_settings(recipe), rollouts.collect(), ask).groups) == [
        1,
        2,
        7,
    ]  # 6 was dead
    assert indices(rollouts.in_flight()[0]()) == [3, 4, 5]


def test_a_plan_says_what_is_selected_and_the_most_that_it_costs():
    recipe = recipe_of("dynamic", "selection.max_asked=4", "selection.target=0.8")
    assert dict(make_plan(recipe, Path("runs/x")))["selection"] == [
        ("a group is dead if", "all its advantages are 0"),
        (
            "dead groups",
            "further prompts are sampled, in further rounds, until 3 groups are not dead",
        ),
        (
            "sampled at most",
            "12 groups (24 responses) per step; if they are too few, the run stops",
        ),
        ("curriculum",
         "a prompt with solve rate s is sampled with probability max(0.1, 1 − |s − 0.8| / 0.8)"),
    ]  # fmt: skip
    assert "selection" not in dict(make_plan(load_recipe("sort"), Path("runs/x")))


def right_and_wrong(number):
    """0: all equal, none right; 1: all right, rewards unequal by a penalty; 2: one right."""
    return [[0.5, 0.5], [1.0, 0.8], [1.0, 0.0]][number % 3]


def test_dead_by_correct_ignores_what_a_penalty_made_of_the_rewards():
    def graded_apart(number):
        group = graded(number, right_and_wrong)
        grades = [dataclasses.replace(g, correct=g.reward >= 0.8) for g in group.grades]
        return dataclasses.replace(group, grades=tuple(grades))

    sampled = [graded_apart(number) for number in range(3)]
    by_advantage = fill(rollout_settings(recipe_of("drop")), sampled, lambda some: [])
    assert by_advantage.dropped == {0: "dead"}
    by_answers = fill(
        rollout_settings(recipe_of("drop", "selection.dead_by=correct")), sampled, lambda some: []
    )
    assert by_answers.dropped == {0: "dead", 1: "dead"}
    assert by_answers.figures["rollout/dead_groups"] == pytest.approx(2 / 3)
    unsaid = [dataclasses.replace(sampled[0], grades=(Grade(1.0), Grade(0.0)))]
    with pytest.raises(DataError, match="needs grades that say whether a response is correct"):
        fill(
            rollout_settings(recipe_of("drop", "selection.dead_by=correct")),
            unsaid,
            lambda some: [],
        )


def judged(advantage, rewards, parts=None, values=None, **more):
    """Whether the estimator finds a group dead; ``values``: before the responses' first tokens."""
    recipe = load_recipe("sort", [{"objective": {"advantage": advantage}}, *more.get("set", ())])
    group = make_group(0, [1], [[1], [1, 1], [1] * 3][: len(rewards)], rewards)
    if parts is not None:
        grades = [Grade(r, p) for r, p in zip(rewards, parts, strict=True)]
        group = dataclasses.replace(group, grades=tuple(grades))
    if values is not None:
        completions = [
            dataclasses.replace(c, values=np.float32([v] + [np.nan] * (len(c.token_ids) - 1)))
            for c, v in zip(group.completions, values, strict=True)
        ]
        group = dataclasses.replace(group, completions=tuple(completions))
    return rollout_settings(recipe).is_dead(group)


def test_the_estimator_decides_which_groups_teach_nothing():
    gdpo = {"name": "gdpo", "parts": {"a": 1.0, "b": 1.0}}
    # The rewards are equal, and the parts are not: z-scores of ±0.87 for weights 1 and 0.5.
    assert not judged(gdpo, [1.0] * 3, [{"a": 1, "b": 0}, {"a": 0, "b": 1}, {"a": 1, "b": 0.0}])
    assert judged(gdpo, [0.0, 1.0], [{"a": 1, "b": 0}, {"a": 1, "b": 0}])
    assert judged("raw", [0.0, 0.0])
    assert not judged("raw", [1.0, 1.0])
    assert judged("best_of_group", [0.0, 0.0])
    assert not judged("best_of_group", [1.0, 1.0])
    assert judged({"name": "best_of_group", "centered": True}, [1.0, 1.0])
    assert not judged("remax", [1.0, 1.0], [{"greedy": 0.0}] * 2)
    assert judged("remax", [1.0, 1.0], [{"greedy": 1.0}] * 2)
    assert judged("group_zscore", [0.1, 0.1, 0.1])
    assert judged("reinforce_plus_plus_baseline", [0.1, 0.1, 0.1])
    # Of three responses two are right: any two hold a right one, so that pass@2 can't rise.
    assert judged({"name": "pass_at_k", "k": 2}, [1.0, 0.0, 1.0])
    assert not judged({"name": "pass_at_k", "k": 1}, [1.0, 0.0, 1.0])
    assert judged({"name": "max_at_k", "k": 2}, [1.0, 1.0, 1.0])


def test_a_step_that_was_valued_otherwise_than_its_response_teaches():
    keywords = ["task=keywords", "model=smollm2-135m"]
    assert judged("vine", [1.0, 1.0], values=[1.0, 1.0], set=keywords)
    assert not judged("vine", [1.0, 1.0], values=[0.5, 1.0], set=keywords)


@pytest.mark.parametrize(
    ("turns", "is_dead"),
    [
        (([0.5, 0.5], [0.5, 0.5]), True),
        (([1.0, 0.0], [0.0, 1.0]), False),  # the same reward, in another turn
        (([1.0], [0.0, 1.0]), True),  # only one episode reached the second turn
        (([1.0], [0.5, 1.0]), False),
    ],
)
def test_turns_decide_whether_a_group_teaches(turns, is_dead):
    group = make_group(0, [1], [[1] * len(own) for own in turns], [sum(own) for own in turns])
    completions = tuple(
        dataclasses.replace(
            c, turns=tuple(Turn(i, i + 1, "", (), r, {}, None) for i, r in enumerate(own))
        )
        for c, own in zip(group.completions, turns, strict=True)
    )
    group = dataclasses.replace(group, completions=completions)
    objective = ObjectiveConfig(advantage="turn_mean")
    assert find_judge("advantage", objective)(group) == is_dead


def test_a_function_that_compares_groups_finds_none_dead():
    def within(rewards, groups):
        return rewards - rewards.new_tensor([rewards[groups == g].mean() for g in groups])

    def across(rewards, groups):
        return rewards - rewards.mean()

    assert judged({"name": "own", "function": within}, [1.0, 1.0])
    assert not judged({"name": "own", "function": within}, [1.0, 0.0])
    assert not judged({"name": "own", "function": across}, [1.0, 1.0])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["rollout.group_size=1", "selection.dead_groups=drop", "objective.advantage=raw",
          "selection.dead_by=correct"],
         "selection.dead_by = 'correct' needs rollout.group_size of at least 2, got 1"),
        (["selection.dead_groups=drop", "objective.advantage=reinforce_plus_plus"],
         "selection.dead_groups = 'drop' has no effect with objective.advantage = 'reinforce_plus"),
        (["selection.dead_groups=drop", "objective.kl=k3", "objective.kl.where=reward"],
         "selection.dead_groups = 'drop' has no effect with objective.kl.where = 'reward'"),
        (["selection.max_asked=4"], 'no effect with selection.dead_groups = "keep"; remove it'),
        (["selection.dead_groups=drop", "selection.on_bound=learn"], "on_bound has no effect"),
        (["selection.dead_groups=dynamic", "selection.max_asked=1"], "greater than or equal to 2"),
    ],
)  # fmt: skip
def test_refused(settings, message):
    with pytest.raises(ConfigError) as caught:
        load_recipe("sort", settings)
    assert message in str(caught.value)


@pytest.mark.parametrize("dead_groups", ["dynamic", "active"])
def test_every_loop_fills_its_rollouts(dead_groups):
    recipe = recipe_of(dead_groups, "loop=free", "runtime=ray", "objective.proximal=behavior")
    assert recipe.selection.fills
    told = dict(dict(make_plan(recipe, Path("runs/x")))["selection"])["dead groups"]
    assert "whenever a group is dead" in told, "the free loop has no rounds"
    assert recipe_of(dead_groups, "runtime=ray").selection.fills
