"""Prompts chosen by what a run has learned about them: exact sequences, limits and resumption."""

import json
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest

from burnish.errors import ConfigError, DataError
from burnish.launch.settings import rollout_settings
from burnish.learner.protocol import Step
from burnish.loops import lagged
from burnish.randomness import Purpose, Stream, uniforms
from burnish.recipe.load import load_recipe
from burnish.recipe.selection import SelectionConfig
from burnish.recipe.tasks import KeywordsTask
from burnish.runs.metrics import Timers
from burnish.tasks.keywords import make_keywords
from burnish.tasks.solve_rates import History
from burnish.tasks.stream import PromptStream
from burnish.types import Finish, Grade, Group, Prompt, Status
from tests.conftest import byte_tokenizer, make_group


def stream_of(count, seed=0, **chosen):
    """Prompts p0, p1, …, which come again and again in this order."""
    made = [Prompt(f"p{i}", "", np.array([i], dtype=np.int32), "t") for i in range(count)]
    task = SimpleNamespace(prompt=lambda number: made[number % count])
    return PromptStream(task, None, History(SelectionConfig(**chosen), seed))


def result(name, *rewards, status=Status.SCORED):
    group = make_group(0, [0], [[1]] * len(rewards), rewards)
    grades = tuple(replace(grade, status=status) for grade in group.grades)
    return replace(group, prompt=replace(group.prompt, prompt_id=name), grades=grades)


def names(asked):
    return [prompt.prompt_id for _, prompt in asked]


def test_a_prompt_that_is_solved_leaves_for_good():
    stream = stream_of(4, leave_at=0.75)
    assert names(stream.take(4)) == ["p0", "p1", "p2", "p3"]
    # rates: 3/4, 1/2 (a reward of 0.9 is not right), 1, and none (an error does not count)
    told = stream.note([
        result("p0", 1, 1, 1, 0), result("p1", 1, 0.9), result("p2", 1, 1),
        result("p3", float("nan"), status=Status.ERROR),
    ])  # fmt: skip
    assert told == {"rollout/passed_prompts": 0, "rollout/left_prompts": 2}
    assert names(stream.take(5)) == ["p1", "p3", "p1", "p3", "p1"]
    # p0, p2, p0, p2, p0 were passed over; a group of p0 was in flight when p0 left
    told = stream.note([result("p0", 0, 0)])
    assert told == {"rollout/passed_prompts": 5, "rollout/left_prompts": 2}
    assert names(stream.take(2)) == ["p3", "p1"]
    stream.note([result("p1", 1, 1), result("p3", 1, 1)])
    with pytest.raises(DataError, match=r"all 4 prompts .* selection\.leave_at = 0\.75 or more"):
        stream.take(1)


def test_a_run_that_goes_back_forgets_whom_it_passed_over():
    """The process goes on, as after the death of a learner on Ray."""
    stream = stream_of(3, leave_at=0.75)
    stream.take(3)
    stream.note([result("p0", 1, 1)])
    saved = stream.state()
    assert names(stream.take(2)) == ["p1", "p2"]
    stream.load_state(saved)
    assert names(stream.take(2)) == ["p1", "p2"]
    assert stream.note([])["rollout/passed_prompts"] == 1


def test_only_the_task_says_what_is_solved():
    """A length penalty does not make an answer wrong, and a learned reward makes none right."""
    stream = stream_of(3, leave_at=0.75)
    stream.take(3)
    penalised = replace(result("p0", 0.7), grades=(Grade(0.7, {"length": -0.3}, correct=True),))
    learned = replace(result("p1", 4.0), grades=(Grade(4.0, {"learned": 4.0}, correct=False),))
    unsaid = replace(result("p2", 4.0), grades=(Grade(4.0, {"learned": 4.0}),))
    assert stream.note([penalised, learned, unsaid])["rollout/left_prompts"] == 1
    assert names(stream.take(2)) == ["p1", "p2"]


@pytest.mark.parametrize(("drops", "left"), [(False, 0), (True, 1)])
def test_truncated_responses_that_are_dropped_count_in_no_solve_rate(drops, left):
    group = result("p0", 1, 1, 0)
    *own, last = group.completions
    group = replace(group, completions=(*own, replace(last, finish=Finish.LENGTH)))
    history = History(SelectionConfig(leave_at=0.9), 0, drops_truncated=drops)
    assert history.note([group])["rollout/left_prompts"] == left
    assert history.rates == {"p0": pytest.approx(1.0 if drops else 2 / 3)}


@pytest.mark.parametrize(
    ("target", "rates", "chances"),
    [
        # 1 − |s − 0.5| / 0.5, at least 0.1
        (0.5, [0, 0.25, 0.5, 0.875, 1], [0.1, 0.5, 1, 0.25, 0.1]),
        # 1 − |s − 0.8| / 0.8
        (0.8, [0, 0.4, 0.8, 1], [0.1, 0.5, 1, 0.75]),
        (0.0, [0, 0.75, 1], [1, 0.25, 0.1]),
    ],
)
def test_the_chance_of_a_prompt_falls_with_its_distance_from_the_target(target, rates, chances):
    history = History(SelectionConfig(target=target), seed=0)
    history.load({f"p{i}": rate for i, rate in enumerate(rates)})
    assert [history.chance(f"p{i}") for i in range(len(rates))] == pytest.approx(chances)
    assert history.chance("never asked") == 1


def test_a_curriculum_draws_by_the_place_in_the_order():
    stream = stream_of(3, seed=5, target=0.5)
    stream.note([result("p0", 1, 1), result("p1", 1, 0)])  # chances 0.1 and 1; p2 has no rate
    drawn = uniforms(5, Stream.TASK, np.arange(3000), Purpose.CURRICULUM, 0)
    expected = [f"p{n % 3}" for n in range(3000) if n % 3 or drawn[n] < 0.1]
    asked = names(stream.take(len(expected)))
    assert asked == expected
    # 1000 turns with a chance of 0.1: 100 ± 9.5
    assert abs(asked.count("p0") - 100) < 40
    assert asked.count("p1") == asked.count("p2") == 1000


def test_a_stream_with_a_history_goes_on_where_it_was_saved():
    whole, other = (stream_of(5, target=0.5, leave_at=0.9) for _ in range(2))
    whole.take(7)
    whole.note([result("p0", 1, 1), result("p1", 1, 0, 0), result("p3", 0, 0)])
    other.load_state(json.loads(json.dumps(whole.state())))
    assert whole.take(20) == other.take(20)
    assert whole.note([]) == other.note([])
    other.load_state(PromptStream.BEGINNING)
    assert names(other.take(5)) == [f"p{i}" for i in range(5)]


class Solved:
    """Rollouts of one group each, all right; says which prompts were asked."""

    def __init__(self):
        self.asked, self._waiting = [], []

    def note(self, event, **told):
        pass

    def issue(self, asked, spare=(), *, first=False):
        self.asked += names(asked)
        ((index, prompt),) = asked
        group = make_group(index, prompt.token_ids, [[1], [1]], [1.0, 1.0])
        self._waiting.append([Group(index, prompt, group.completions, group.grades)])

    def collect(self):
        return self._waiting.pop(0)

    def in_flight(self):
        return self._waiting


@pytest.mark.parametrize(("lag", "asked"), [(0, [0, 1, 2, 3]), (1, [0, 1, 2, 3, 3])])
def test_a_rollout_sees_the_results_of_the_steps_that_were_learned_when_it_began(lag, asked):
    """With lag 1, rollout 4 begins when rollouts 0, 1 and 2 are learned: it asks p3 again."""
    sizes = {"rollout": {"batch": 2, "group_size": 2}, "train": {"batch": 2, "steps": 9}}
    recipe = load_recipe("sort", [sizes, f"loop.lag={lag}", "objective.proximal=behavior"])
    rollouts, stream = Solved(), stream_of(4, leave_at=1.0)
    learner = SimpleNamespace(
        publish=lambda: None, version=0, learn=lambda number, groups: Step(number, {}, groups)
    )
    steps = lagged.train_lagged(
        rollout_settings(recipe),
        recipe.train.steps,
        lag=recipe.loop.lag,
        prompts=stream,
        rollouts=rollouts,
        learner=learner,
        timers=Timers(),
    )
    left = [next(steps).metrics["rollout/left_prompts"] for _ in range(4)]
    assert left == [1, 2, 3, 4]
    with pytest.raises(DataError, match="all 4 prompts"):
        next(steps)
    assert rollouts.asked == [f"p{i}" for i in asked]


def test_a_preset_leaves_the_history_out_where_prompts_never_come_again():
    rates = {name: load_recipe(name, ["preset=scalerl"]).selection.leave_at
             for name in ("gsm8k", "arithmetic", "keywords")}  # fmt: skip
    assert rates == {"gsm8k": 0.9, "arithmetic": 0.9, "keywords": None}


def test_a_finite_set_of_prompts_comes_again_in_another_order():
    def asked(train_prompts, count=24):
        config = KeywordsTask(train_prompts=train_prompts)
        task = make_keywords(config, tokenizer=byte_tokenizer(), seed=3)
        return [task.prompt(number).prompt_id for number in range(count)]

    finite, endless = asked(8), asked(None)
    assert len(set(endless)) == 24
    assert finite[:8] == endless[:8]
    passes = [finite[i : i + 8] for i in (0, 8, 16)]
    assert all(set(own) == set(endless[:8]) for own in passes)
    assert all(one != other for one, other in pairwise(passes))


@pytest.mark.parametrize(
    ("recipe", "settings", "message"),
    [
        ("keywords", ["selection.leave_at=0.9"],
         "selection.leave_at has no effect with task.train_prompts = null; remove it"),
        ("sort", ["selection.floor=0.2"], "selection.floor has no effect with selection.target"),
        ("sort", ["selection.target=1.5"], "selection.target must be less than or equal to 1"),
        ("sort", ["selection.leave_at=0"], "selection.leave_at must be greater than 0"),
    ],
)  # fmt: skip
def test_refused(recipe, settings, message):
    with pytest.raises(ConfigError) as caught:
        load_recipe(recipe, settings)
    assert message in str(caught.value)
