"""Overlap, shown with stand-ins of known durations: two cores would let real parts compete."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from burnish import config
from burnish.types import Completion, Finish, Grade, Group, Prompt, SamplingParams

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("cluster")]

SAMPLING, LEARNING, STEPS = 0.4, 0.3, 20


class Sampler:
    sampled = 0

    def sample(self, parcel: Any, requests: Sequence[Any]) -> dict[str, Any]:
        time.sleep(SAMPLING)
        one = np.ones(1, dtype=np.int32)
        rest = one.astype(np.float32), one * 0, one.astype(np.bool_), SamplingParams(), Finish.STOP
        return {
            r.request_id: tuple(
                Completion(r.request_id, k, one, *rest, None, "") for k in range(r.n)
            )
            for r in requests
        }


class Scorer:
    def grade(self, asked: Any, responses: Any) -> list[Group]:
        return [
            Group(index, prompt, own, (Grade(1.0),) * len(own))
            for (index, prompt), own in zip(asked, responses, strict=True)
        ]


class Learner:
    def learn(self, number: int, groups: list[Group]) -> Any:
        from burnish.loops.sync import Step

        time.sleep(LEARNING)
        return Step(number, {"train/version": number, "train/lag": 0})

    def weights(self, incarnation: int, in_use: Any) -> Any:
        from burnish.actors.transport import Parcel

        return Parcel(0, incarnation, (), data=np.zeros(0, dtype=np.uint8))


def seconds(lag: int) -> float:
    """How long the steps take, without the start of the actors."""
    from burnish.actors.fleet import Fleet
    from burnish.actors.learner import RemoteLearner
    from burnish.actors.supervisor import Supervisor
    from burnish.loops import asynchronous
    from burnish.runs.metrics import Timers
    from burnish.tasks.stream import PromptStream

    stale = {"objective.proximal": "behavior"} if lag else {}
    recipe = config.load("sort", [{"loop.lag": lag, "train.steps": STEPS + 1, **stale}])
    supervisor = Supervisor(60.0)
    for name, part in (("generator-0", Sampler), ("scorer", Scorer), ("learner", Learner)):
        supervisor.start(name, part, num_cpus=0)
    fleet = Fleet(supervisor, ["generator-0"], size=2, params=SamplingParams())
    prompt = Prompt("p", "", np.ones(1, dtype=np.int32), "sort")
    stream = PromptStream(SimpleNamespace(prompt=lambda number: prompt))  # type: ignore[arg-type]
    parts: dict[str, Any] = {"prompts": stream, "rollouts": fleet, "timers": Timers()}
    steps = asynchronous.train(recipe, learner=RemoteLearner(fleet, "", "store"), **parts)
    next(steps)
    began = time.monotonic()
    assert sum(1 for _ in steps) == STEPS
    took = time.monotonic() - began
    supervisor.stop()
    return took


def test_one_rollout_ahead_takes_the_longer_of_the_two() -> None:
    apart, together = seconds(lag=0), seconds(lag=1)
    assert apart >= STEPS * (SAMPLING + LEARNING)
    assert together <= 1.1 * STEPS * max(SAMPLING, LEARNING), (apart, together)
