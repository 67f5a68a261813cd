"""Overlap, shown with stand-ins of known durations: two cores would let real parts compete."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from burnish.launch.settings import rollout_settings
from burnish.recipe.load import load_recipe
from burnish.types import Completion, Finish, Grade, Group, Prompt, SamplingParams

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("cluster")]

SAMPLING, LEARNING, STEPS = 2.0, 1.5, 5
"""So long that what Ray adds to a step, up to half a second on busy cores, is small beside them."""


class Sampler:
    sampled = 0

    def sample(self, handle: Any, data: Any, requests: Sequence[Any]) -> dict[str, Any]:
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
        from burnish.learner.protocol import Step

        time.sleep(LEARNING)
        return Step(number, {"train/version": number, "train/lag": 0})

    def weights(self, incarnation: int, in_use: Any) -> Any:
        from burnish.actors.transport import WeightsHandle

        return WeightsHandle(0, incarnation, (), "")

    def data(self, space: str) -> None:
        """The bytes of the weights; there are none."""


Rows = list[dict[str, Any]]


def run(lag: int) -> tuple[float, Rows]:
    """How long the steps take, without the start of the actors, and the timeline."""
    from burnish.actors.remote_learner import RemoteLearner
    from burnish.actors.rollouts import RemoteRollouts
    from burnish.actors.supervisor import Supervisor
    from burnish.loops import lagged
    from burnish.runs.metrics import Timers
    from burnish.tasks.stream import PromptStream

    stale = {"objective.proximal": "behavior"} if lag else {}
    recipe = load_recipe("sort", [{"loop.lag": lag, "train.steps": STEPS + 1, **stale}])
    supervisor = Supervisor(60.0)
    for name, part in (("generator-0", Sampler), ("scorer", Scorer), ("learner", Learner)):
        supervisor.start(name, part, num_cpus=0)
    rollouts = RemoteRollouts(supervisor, ["generator-0"], size=2, params=SamplingParams())
    rows: Rows = []
    rollouts.listen(lambda event, **told: rows.append(told) if event == "worked" else None)
    prompt = Prompt("p", "", np.ones(1, dtype=np.int32), "sort")
    stream = PromptStream(SimpleNamespace(prompt=lambda number: prompt))  # type: ignore[arg-type]
    parts: dict[str, Any] = {"prompts": stream, "rollouts": rollouts, "timers": Timers()}
    steps = lagged.train_lagged(
        rollout_settings(recipe),
        recipe.train.steps,
        lag=recipe.loop.lag,
        learner=RemoteLearner(rollouts, "", "shared"),
        **parts,
    )
    next(steps)
    began = time.monotonic()
    assert sum(1 for _ in steps) == STEPS
    took = time.monotonic() - began
    supervisor.stop()
    return took, rows


def both(rows: Rows) -> float:
    """The seconds in which the generator samples and the learner learns."""
    first, second = ([r for r in rows if r["what"] == what] for what in ("sample", "learn"))
    spans = [(max(a["begin"], b["begin"]), min(a["end"], b["end"])) for a in first for b in second]
    return sum(max(0.0, end - begin) for begin, end in spans)


def test_one_rollout_ahead_takes_the_longer_of_the_two() -> None:
    """The quickest of up to three runs counts: other programs only add time."""
    apart, alone = run(lag=0)
    assert apart >= STEPS * (SAMPLING + LEARNING)
    bound = 1.25 * STEPS * max(SAMPLING, LEARNING)  # one after the other takes 1.75 times as long
    for _ in range(3):
        together, overlap = run(lag=1)
        if together <= bound:
            break
    assert together <= bound, (apart, together)
    assert both(alone) == 0
    assert both(overlap) > 0.8 * STEPS * LEARNING
    for rows in (alone, overlap):
        assert {row["actor"] for row in rows} == {"generator-0", "scorer", "learner"}
        work = [r["end"] - r["begin"] for r in rows if r["what"] == "learn"]
        assert min(work) >= LEARNING
        assert len(work) == STEPS + 1


class Slow:
    version = 7

    def work(self) -> None:
        from burnish.console.progress import begin

        report = begin("learn", "learning", total=5, unit="packs")
        for done in range(5):
            report(done)
            time.sleep(1.0)


def test_the_work_of_an_actor_is_shown_while_somebody_waits() -> None:
    from burnish.actors.supervisor import Supervisor

    shown: list[str] = []
    supervisor = Supervisor(60.0, show=shown.append)
    supervisor.start("learner", Slow, num_cpus=0)
    supervisor.call_and_wait("learner", "work")
    supervisor.stop()
    assert (
        len({text for text in shown if re.fullmatch(r"learner: learning, \d of 5 packs", text)}) > 1
    )


def test_an_actor_that_was_idle_is_not_taken_for_silent() -> None:
    from burnish.actors.supervisor import HEARTBEAT_TIMEOUT, Supervisor

    idle = [0.0]
    supervisor = Supervisor(600.0, clock=lambda: time.monotonic() + sum(idle))
    supervisor.start("learner", Slow, num_cpus=0)
    supervisor.call_and_wait("learner", "__init__")
    idle.append(2 * HEARTBEAT_TIMEOUT)
    supervisor.call_and_wait("learner", "work")
    supervisor.stop()
