"""Random schedules of faults on simulated actors: nothing hangs, and no bound is violated.

The seed of a failing schedule is printed; `schedule` makes the same recipe and faults from it.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from burnish.actors.supervisor import Supervisor
from burnish.errors import ActorError, GraderError, RunError
from burnish.launch.settings import rollout_settings
from burnish.learner.protocol import Step
from burnish.loops import lagged
from burnish.loops.lagged import LocalRollouts
from burnish.recipe.load import load_recipe
from burnish.rollout.lag_bound import Pace
from burnish.runs.metrics import Timers
from burnish.types import Grade, Status, Weights
from tests.actors.simulated import (
    Result,
    SimulatedRay,
    SlowEngine,
    SlowLearner,
    Task,
    simulate,
    stream,
)

QUICK, ALL = 150, 1000
"""Schedules of `make test` and of `make proofs`."""
STEPS = 8


def schedule(seed: int) -> tuple[dict[str, Any], list[tuple[float, str, str]]]:
    """A recipe for one of the loops, and faults: deaths of all kinds of actor, some of them two in
    a row, of the same actor or of two, and during recovery."""
    chance = random.Random(seed)
    batch, generators = chance.choice([1, 2, 3, 4]), chance.choice([1, 2, 3])
    steps = chance.choice([1, 2])
    settings: dict[str, Any] = {
        "rollout.group_size": 2,
        "rollout.batch": 2 * batch * steps,
        "train.batch": 2 * batch,
        "train.epochs": chance.choice([1, 2]),
        "train.steps": STEPS,
        "objective.proximal": "behavior",
        "runtime.generators": generators,
    }
    if chance.random() < 0.75:
        lag = chance.choice([0, 1, 2, 4, 8])
        window = batch * steps * chance.choice([1, 1, 1, 2, 4]) + chance.choice([0, 0, 1])
        settings |= {"loop": "free", "loop.max_lag": lag, "loop.window": window}
        settings["loop.on_stale"] = chance.choice(["wait", "drop", "drop"])
        settings["loop.on_update"] = chance.choice(["wait", "recompute", "keep"])
    else:
        settings["loop.lag"] = chance.choice([0, 1, 2])
        if chance.random() < 0.5:
            capacity = batch * steps * chance.choice([1, 2, 4])
            settings |= {"buffer.capacity": capacity, "buffer.order": "uniform"}
            settings["buffer.max_uses"] = chance.choice([1, 2])
    if chance.random() < 0.5:
        settings["selection.dead_groups"] = chance.choice(["drop", "dynamic", "active", "active"])
        if settings["selection.dead_groups"] != "drop":
            settings["selection.max_asked"] = chance.choice([2, 4])
            settings["selection.on_bound"] = "learn"
    names = ["scorer", "learner", *(f"generator-{number}" for number in range(generators))]
    faults, time = list[tuple[float, str, str]](), 0.0
    for _ in range(chance.randint(1, 6)):
        time += chance.uniform(0.0, 8.0)
        first = chance.choice([*names, *names[2:]])
        kind = chance.choice(["kill", "kill", "rekill"])
        faults.append((time, kind, first))
        if chance.random() < 0.4:  # another one dies with it, or while it recovers
            faults.append(
                (time + chance.choice([0.0, 0.2, 1.0, 2.5]), "kill", chance.choice(names))
            )
    for name in names[2:]:
        if chance.random() < 0.5:
            faults.append((chance.choice([0.05, 0.3, 1.0]), "evaluation", name))
    return settings, faults


def dead(seed: int) -> float:
    """The share of dead groups."""
    return 0.0 if seed % 3 == 0 else 0.4 if seed % 3 == 1 else 0.7


def check(seed: int, monkeypatch: pytest.MonkeyPatch) -> Result:
    settings, faults = schedule(seed)
    print(f"seed {seed}: {settings} {faults}")
    found = simulate(settings, seed, faults, monkeypatch, validate=1 + seed % 3, dead=dead(seed))
    assert not found.verdict.problems, found.verdict
    assert [number for number, _ in found.steps] == list(range(1, STEPS + 1))
    return found


def check_all(seeds: Iterable[int], monkeypatch: pytest.MonkeyPatch) -> list[Result]:
    return [check(seed, monkeypatch) for seed in seeds]


@pytest.mark.slow
def test_random_schedules(monkeypatch: pytest.MonkeyPatch) -> None:
    found = check_all(range(QUICK), monkeypatch)
    killed = Counter(name.partition("-")[0] for one in found for name in one.ray.killed)
    assert min(killed["generator"], killed["scorer"], killed["learner"]) > QUICK / 2
    assert sum(one.verdict.dropped > 0 for one in found) > QUICK / 10


@pytest.mark.slow
@pytest.mark.parametrize(
    "part", [pytest.param(n, marks=[pytest.mark.extra] * (n > 2)) for n in range(10)]
)
def test_a_thousand_random_schedules(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    check_all(range(QUICK + part, QUICK + ALL, 10), monkeypatch)


def test_a_window_that_keeps_the_places_of_dropped_groups_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The schedules find the fault that once let the driver spin: a group that is dropped as stale
    must not keep its place, or a window of B places never has B open groups again."""
    monkeypatch.setattr(Pace, "withdraw", lambda pace, number: pace.learn([number]))
    with pytest.raises(ActorError, match=r"step \d+ waits for \d+ graded groups, but no actor"):
        check_all(range(QUICK), monkeypatch)


def test_calls_that_outlive_their_incarnation_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The schedules find the fault that once let a generator which died after the learner get the
    groups of the incarnation before, too."""

    def restart(self: Supervisor, name: str, others: Sequence[str] = ()) -> None:
        kept = {actor.name: list(actor.calls) for actor in self._actors.values()}
        whole(self, name, others)
        for actor in self._actors.values():
            actor.calls += kept[actor.name] if actor.name != "learner" else []

    whole = Supervisor.restart
    monkeypatch.setattr(Supervisor, "restart", restart)
    with pytest.raises((ActorError, KeyError), match=r"group-\d+ is in flight|^\d+$"):
        check_all(range(QUICK), monkeypatch)


@pytest.mark.slow
def test_a_lagged_run_learns_the_same_whoever_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = 0
    for seed in range(QUICK):
        settings, faults = schedule(seed)
        if settings.get("loop") != "free":
            whole = simulate(settings, seed, [], monkeypatch, dead=dead(seed))
            found = simulate(settings, seed, faults, monkeypatch, dead=dead(seed))
            assert found.steps == whole.steps, seed
            assert found.metrics == whole.metrics, seed
            tried += 1
    assert tried > 20


def test_a_frozen_actor_ends_in_an_error_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others that go on answering do not keep the run from seeing that one is silent."""
    told = list[bool]()
    for seed in range(40):
        settings, faults = schedule(seed)
        time, _, name = faults[0]
        try:
            found = simulate(settings, seed, [(time, "freeze", name)], monkeypatch)
            assert found.ray.now < time + 60, f"{seed}: it ended before anybody could tell"
        except ActorError as error:
            told.append(f"for {name} to answer" in str(error))
    assert all(told)
    assert len(told) > 20


class Own:
    """A learner of this process, which counts versions as `SlowLearner` does."""

    def __init__(self, learner: SlowLearner, engine: SlowEngine) -> None:
        self._learner, self._engine = learner, engine
        self.learn = learner.learn

    @property
    def version(self) -> int:
        return self._learner.version

    def publish(self) -> None:
        self._engine.load(Weights(self.version, 0, {}))


def local(settings: dict[str, Any], seed: int, dead: float) -> list[Step]:
    """The steps of the same run in one process."""
    recipe = load_recipe("sort", [{"runtime": "ray", **settings}])
    ray = SimulatedRay(seed)
    engine, task = SlowEngine(ray, seed), Task(ray, seed, dead)
    learner: Any = Own(SlowLearner(ray, seed, recipe), engine)
    rollouts = LocalRollouts(rollout_settings(recipe), task, engine)  # type: ignore[arg-type]
    parts: dict[str, Any] = {"prompts": stream(recipe, task), "learner": learner}
    return list(
        lagged.train_lagged(
            rollout_settings(recipe),
            recipe.train.steps,
            lag=recipe.loop.lag,
            rollouts=rollouts,
            timers=Timers(),
            **parts,
        )
    )


ACTIVE = {
    "rollout.group_size": 2,
    "rollout.batch": 8,
    "train.batch": 8,
    "train.epochs": 1,
    "train.steps": STEPS,
    "objective.proximal": "behavior",
    "selection.dead_groups": "active",
    "selection.on_bound": "learn",
    "task.prompts": 30,
}


@pytest.mark.slow
@pytest.mark.parametrize("lag", [0, 1, 2])
@pytest.mark.parametrize("more", [{}, {"selection.leave_at": 0.5, "selection.target": 0.3}])
def test_active_sampling_by_one_generator_is_the_same_as_in_one_process(
    lag: int, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ACTIVE | more | {"loop.lag": lag}
    for seed in range(4):
        expected = local(settings, seed, 0.5)
        faults = [(2.0, "kill", "generator-0"), (5.0, "rekill", "generator-0")]
        for deaths in ([], faults, [*faults, (6.0, "kill", "scorer"), (7.0, "kill", "learner")]):
            found = simulate(settings, seed, deaths, monkeypatch, dead=0.5)
            assert found.steps == [
                (step.number, [group.index for group in step.groups]) for step in expected
            ]
            assert found.metrics == [{"step": step.number} | step.metrics for step in expected]
        assert not found.verdict.problems
        assert sum(row["event"] == "dropped" for row in found.rows) > 0


def test_active_sampling_by_two_generators_repeats_whoever_dies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = ACTIVE | {"loop.lag": 1, "runtime.generators": 2}
    for seed in range(4):
        whole = simulate(settings, seed, [], monkeypatch, dead=0.5)
        _, faults = schedule(seed)
        names = {"generator-0", "generator-1", "scorer", "learner"}
        faults = [one for one in faults if one[2] in names]
        found = simulate(settings, seed, faults, monkeypatch, dead=0.5)
        assert found.steps == whole.steps
        assert found.metrics == whole.metrics


def test_active_and_dynamic_sampling_fill_the_steps_of_a_free_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop = {"loop": "free", "loop.max_lag": 2, "loop.on_update": "keep"}
    for kind in ("dynamic", "active"):
        settings = ACTIVE | loop | {"selection.dead_groups": kind, "selection.max_asked": 10}
        found = simulate(settings, 1, [(3.0, "kill", "generator-0")], monkeypatch, dead=0.5)
        assert not found.verdict.problems, found.verdict
        assert [len(groups) for _, groups in found.steps] == [4] * STEPS
        rates = [step["rollout/asked_per_used"] for step in found.metrics]
        assert 1.5 < sum(rates) / len(rates) < 2.5, "half of the groups are dead"
        dropped = [row for row in found.rows if row["event"] == "dropped"]
        assert {row["why"] for row in dropped} == {"dead"}
        learned = {number for _, groups in found.steps for number in groups}
        assert not learned & {row["group"] for row in dropped}


def test_a_free_run_ends_or_learns_from_fewer_past_max_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop = {"loop": "free", "loop.max_lag": 2, "selection.max_asked": 2}
    for on_stale in ("wait", "drop"):
        settings = ACTIVE | loop | {"loop.on_stale": on_stale}
        found = simulate(settings, 1, [], monkeypatch, dead=0.8)
        assert not found.verdict.problems, found.verdict
        sizes = [len(groups) for _, groups in found.steps]
        assert min(sizes) < 4
        assert max(sizes) <= 4
        with pytest.raises(RunError, match=r"needs 4 and selection.max_asked = 2 "):
            simulate(settings | {"selection.on_bound": "stop"}, 1, [], monkeypatch, dead=0.8)


@pytest.mark.parametrize(
    "loop", [{"loop.lag": 0}, {"loop.lag": 1}, {"loop": "free", "loop.max_lag": 2}]
)
def test_a_grader_that_fails_ends_the_run_before_it_has_asked_up_to_the_bound(
    loop: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    graded = list[str]()

    def fail(task: Task, prompt: Any, completion: Any) -> Grade:
        graded.append(prompt.prompt_id)
        return Grade(math.nan, status=Status.ERROR, message="boom")

    monkeypatch.setattr(Task, "_grade", fail)
    with pytest.raises(GraderError, match="boom"):
        simulate(ACTIVE | loop, 0, [(1.0, "kill", "generator-0")], monkeypatch)
    assert len(graded) < 40, "four groups of two responses, up to ten times as many"
