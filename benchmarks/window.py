"""The effect of the free loop's window on length and speed, on a clock that is only counted.

The loop is the real one. Generators, scorer and learner are stand-ins: a group takes a second per
100 tokens of its response, whose length is drawn from a wide distribution; a step takes a second.

python benchmarks/window.py            windows of 1, 2, 4 and 8 rollouts, two bounds on lag
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from burnish.actors.remote_learner import RemoteLearner
from burnish.actors.rollouts import RemoteRollouts
from burnish.actors.supervisor import Call
from burnish.actors.transport import WeightsHandle
from burnish.launch.settings import rollout_settings
from burnish.learner.protocol import Step
from burnish.loops import free
from burnish.recipe.load import load_recipe
from burnish.rollout.rollout import ignore
from burnish.runs.metrics import Timers
from burnish.tasks.stream import PromptStream
from burnish.types import Completion, Finish, Grade, Group, Prompt, SamplingParams

BATCH, LEARNING, SPEED = 8, 1.0, 100.0
"""Groups of a step; seconds of a step; tokens per second of a response."""
SEEDS, FIRST = 5, (1, 2, 4, 8)
"""Draws of lengths, and numbers of first steps, over which lengths are averaged."""


def length(group: int, seed: int) -> int:
    """The tokens of a group's responses: 200 in the median, a tenth of them above 720."""
    return 1 + int(np.random.default_rng([seed, group]).lognormal(np.log(200), 1.0))


@dataclass
class Clock:
    """A supervisor whose actors take the seconds that they should, and whose clock jumps."""

    seed: int
    now: float = 0.0
    due: dict[Call, float] = field(default_factory=dict)
    sampling: dict[str, tuple[float, int]] = field(default_factory=dict)
    """When the response to each request in flight ends, and the version that it began with."""
    learned: int = 0
    loaded: int = 0
    """The versions of the learner and of the generator."""
    note: Any = ignore

    def call(self, name: str, method: str, *args: Any, retry_args: Any = None) -> Call:
        call = Call(name, method, args)
        call.answer, self.due[call] = getattr(self, method)(*args)
        return call

    def advance(self, handle: Any, data: Any, requests: Sequence[Any], seconds: float) -> Any:
        self.loaded = self.loaded if handle is None else handle.version
        for request in requests:
            end = self.now + length(request.group, self.seed) / SPEED
            self.sampling[request.request_id] = end, self.loaded
        end = min([end for end, _ in self.sampling.values()] + [self.now + seconds])
        done = [name for name, (ready, _) in self.sampling.items() if ready <= end]
        found = {name: (self.completion(name),) for name in done}
        return found, max(end, self.now)

    def completion(self, name: str) -> Completion:
        tokens = np.zeros(length(int(name.removeprefix("group-")), self.seed), dtype=np.int32)
        versions = tokens + self.sampling.pop(name)[1]
        streams = tokens, tokens.astype(np.float32), versions, np.ones_like(tokens, dtype=np.bool_)
        return Completion(name, 0, *streams, SamplingParams(), Finish.STOP, None, "")

    def forget(self) -> Any:
        return None, self.now

    def grade(self, asked: Any, responses: Any) -> Any:
        pairs = zip(asked, responses, strict=True)
        return [Group(index, p, own, (Grade(1.0),)) for (index, p), own in pairs], self.now

    def learn(self, number: int, groups: list[Group]) -> Any:
        self.learned = number
        return Step(number, {"train/version": number}), self.now + LEARNING

    def weights(self, incarnation: int, in_use: Any) -> Any:
        return WeightsHandle(self.learned, incarnation, (), "none"), self.now

    def poll(self, calls: Sequence[Call], seconds: float) -> list[Call]:
        self.now = max(self.now, min(self.due[call] for call in calls))
        for call in calls:
            call.is_done = self.due[call] <= self.now
        return [call for call in calls if call.is_done]

    def buffer_ref(self, name: str, buffer: str) -> None:
        """The bytes of weights; there are none."""

    def call_and_wait(self, name: str, method: str) -> None:
        self.call(name, method)

    def pending(self, name: str) -> list[Call]:
        return []

    def process_number(self, name: str) -> int:
        return 1


def measure(window: int, max_lag: int, steps: int, seed: int) -> tuple[list[float], float]:
    """The mean length of each step's responses, and the seconds of all steps."""
    loop = {"name": "free", "window": window, "max_lag": max_lag, "on_update": "keep"}
    sizes = {"rollout.batch": 2 * BATCH, "rollout.group_size": 2, "train.batch": 2 * BATCH}
    more = {"train.epochs": 1, "train.steps": steps, "objective.proximal": "behavior"}
    more["objective.advantage"] = "raw"  # groups of one response have no baseline
    recipe = load_recipe("sort", [{"runtime": "ray", "loop": loop, **sizes, **more}])
    clock, prompt = Clock(seed), Prompt("p", "", np.ones(1, dtype=np.int32), "sort")
    fleet = RemoteRollouts(clock, ["generator-0"], size=1, params=SamplingParams())  # type: ignore[arg-type]
    stream = PromptStream(SimpleNamespace(prompt=lambda number: prompt))  # type: ignore[arg-type]
    learner = RemoteLearner(fleet, "", "store")
    taken = free.train_free(
        rollout_settings(recipe),
        recipe.train.steps,
        loop=recipe.loop,
        gradient_steps=recipe.gradient_steps_per_rollout,
        prompts=stream,
        fleet=fleet,
        learner=learner,
        timers=Timers(),
    )
    return [step.metrics["rollout/length"] for step in taken], clock.now


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=30)
    steps = parser.parse_args().steps
    firsts = [*FIRST, steps]
    print("bound  window  seconds/step  mean length of the first", *firsts, "steps")
    for max_lag in (8, 32):
        for times in (1, 2, 4, 8):
            runs = [measure(times * BATCH, max_lag, steps, seed) for seed in range(SEEDS)]
            lengths, seconds = np.array([run[0] for run in runs]), np.mean([run[1] for run in runs])
            means = "".join(f"{lengths[:, :first].mean():6.0f}" for first in firsts)
            print(f"{max_lag:5}  {times * BATCH:6}  {seconds / steps:12.2f}  {means}")


if __name__ == "__main__":
    main()
