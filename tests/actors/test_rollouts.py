"""Generators of a free run go on while the run does something else: on a simulated clock."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest

from burnish.actors.rollouts import RemoteRollouts
from burnish.actors.transport import WeightsHandle
from burnish.actors.workers import GeneratorWorker
from burnish.engine.protocol import Request
from tests.actors import simulated
from tests.actors.simulated import Run, SlowLearner, simulate

FREE: dict[str, Any] = {
    "rollout.group_size": 2,
    "rollout.batch": 4,
    "train.batch": 4,
    "train.steps": 6,
    "objective.proximal": "behavior",
    "runtime.generators": 2,
    "loop": "free",
    "train.epochs": 1,
    "loop.max_lag": 3,
    "loop.on_update": "keep",
}
LONG = 10.0
"""Simulated seconds."""


class Watched:
    """The simulated moments of generators' calls, and of other work."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[float] = []
        self.windows: list[tuple[float, float]] = []
        real = GeneratorWorker.advance

        def advance(generator: GeneratorWorker, *given: Any) -> Any:
            self.calls.append(generator.engine._ray.local)  # type: ignore[attr-defined]
            return real(generator, *given)

        monkeypatch.setattr(GeneratorWorker, "advance", advance)
        monkeypatch.setattr(simulated, "TOKEN", 2.0)  # generators are never done

    def take_long(self, ray: Any) -> None:
        """Work that takes long begins now."""
        self.windows.append((ray.local, ray.local + LONG))
        ray.local += LONG

    def calls_inside(self) -> list[int]:
        """The calls that began in each window."""
        return [sum(begin < at < end for at in self.calls) for begin, end in self.windows]


def test_generators_go_on_while_weights_are_published(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, real = Watched(monkeypatch), SlowLearner.weights

    def weights(learner: SlowLearner, incarnation: int, in_use: Sequence[str]) -> WeightsHandle:
        seen.take_long(learner._ray)
        return real(learner, incarnation, in_use)

    monkeypatch.setattr(SlowLearner, "weights", weights)
    found = simulate(FREE, 0, [], monkeypatch)
    assert not found.verdict.problems, found.verdict
    first, *steps, last = seen.calls_inside()
    assert (first, last) == (0, 0)  # the loop has not begun, or is over
    assert len(steps) == 5
    assert sum(steps) > 20, steps  # of 25 that each of two generators has time for


def test_a_generator_that_has_evaluated_goes_on_while_others_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen, real = Watched(monkeypatch), GeneratorWorker.evaluate

    def evaluate(
        generator: Any, handle: WeightsHandle, data: Any, requests: Sequence[Request]
    ) -> Any:
        if any(request.group == 0 for request in requests):
            seen.take_long(generator.engine._ray)
        return real(generator, handle, data, requests)

    monkeypatch.setattr(GeneratorWorker, "evaluate", evaluate)
    found = simulate(FREE, 0, [], monkeypatch, validate=2)
    assert not found.verdict.problems, found.verdict
    *steps, _ = seen.calls_inside()
    assert len(steps) == 2
    assert min(steps) >= 2, steps


def test_generators_go_on_while_a_checkpoint_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is written once generators were called three times more."""
    seen, real = Watched(monkeypatch), Run._validate
    during: list[int] = []

    def validate(run: Run) -> None:
        before = len(seen.calls)

        def write() -> None:
            end = time.monotonic() + 20
            while is_going and len(seen.calls) < before + 3 and time.monotonic() < end:
                time.sleep(0.001)

        is_going = run.rollouts.on_wait is not None
        run.rollouts.run_in_background(write)
        during.append(len(seen.calls) - before)
        real(run)

    monkeypatch.setattr(Run, "_validate", validate)
    found = simulate(FREE, 0, [], monkeypatch, validate=2)
    assert not found.verdict.problems, found.verdict
    *steps, last = during
    assert len(steps) == 2
    assert min(steps) >= 3, during
    assert last == 0


def test_work_beside_generators_raises_its_error() -> None:
    def fail() -> None:
        raise OSError("the disk is full")

    rollouts = RemoteRollouts(None, [], size=1, params=None, replace=None)  # type: ignore[arg-type]
    for meanwhile in (None, lambda: False):
        rollouts.on_wait = meanwhile
        with pytest.raises(OSError, match="the disk is full"):
            rollouts.run_in_background(fail)
