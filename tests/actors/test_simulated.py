"""Random schedules of faults on simulated actors: nothing hangs, and no bound is violated.

The seed of a failing schedule is printed; `schedule` makes the same recipe and faults from it.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from burnish.actors.supervisor import Supervisor
from burnish.errors import ActorError
from burnish.rollout.pace import Pace
from tests.actors.simulated import Result, simulate

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


def check(seed: int, monkeypatch: pytest.MonkeyPatch) -> Result:
    settings, faults = schedule(seed)
    print(f"seed {seed}: {settings} {faults}")
    found = simulate(settings, seed, faults, monkeypatch, validate=1 + seed % 3)
    assert not found.verdict.problems, found.verdict
    assert [number for number, _ in found.steps] == list(range(1, STEPS + 1))
    return found


def check_all(seeds: Iterable[int], monkeypatch: pytest.MonkeyPatch) -> list[Result]:
    return [check(seed, monkeypatch) for seed in seeds]


def test_random_schedules(monkeypatch: pytest.MonkeyPatch) -> None:
    found = check_all(range(QUICK), monkeypatch)
    killed = Counter(name.partition("-")[0] for one in found for name in one.ray.killed)
    assert min(killed["generator"], killed["scorer"], killed["learner"]) > QUICK / 2
    assert sum(one.verdict.dropped > 0 for one in found) > QUICK / 10


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_a_thousand_random_schedules(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    check_all(range(QUICK + part, QUICK + ALL, 10), monkeypatch)


def test_a_window_that_keeps_the_places_of_dropped_groups_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The schedules find the fault that once let the driver spin: a group that is dropped as stale
    must not keep its place, or a window of B places never has B open groups again."""
    monkeypatch.setattr(Pace, "withdraw", lambda pace, number: pace.learn([number]))
    with pytest.raises(ActorError, match=r"step \d+ waits for \d+ graded groups, and no actor"):
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


def test_a_lagged_run_learns_the_same_whoever_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = 0
    for seed in range(QUICK):
        settings, faults = schedule(seed)
        if settings.get("loop") != "free":
            whole = simulate(settings, seed, [], monkeypatch)
            found = simulate(settings, seed, faults, monkeypatch)
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
