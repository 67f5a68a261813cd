"""A run: the loop, its directory, validation and checkpoints, from the first step or a later one.

What is written at step k is on the disk before the checkpoint of step k, which records how long
each file is; a resumed run cuts them back to that and goes on, so that it leaves what an
uninterrupted one leaves.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from types import TracebackType
from typing import Any, NamedTuple, Self

from burnish.config import Recipe
from burnish.errors import BurnishError, RunError
from burnish.learner.learner import Learner, State
from burnish.loops.sync import Step
from burnish.progress import Progress, Show, showing_compiles, silent
from burnish.runs import checkpoints, responses, status
from burnish.runs.directory import RunDirectory
from burnish.runs.metrics import Metrics
from burnish.runs.report import write_report
from burnish.runs.summary import summarise
from burnish.runs.timers import Timers
from burnish.types import Group, IntArray

EVALUATED = 64
"""Responses of an evaluation that are kept whole."""
RECENT = 10
"""Steps, and evaluations, whose mean says how long the next ones take."""


class Parts(NamedTuple):
    """What a recipe is made of, built: a run goes round the circle, or learns from pairs."""

    recipe: Recipe
    """With its number of steps, which the rows of a supervised one say."""
    learner: Learner
    train: Callable[..., Iterator[Step]]
    """The steps from ``start`` on, with ``timers`` and ``show``."""
    validate: Callable[..., tuple[list[Group], Metrics]]
    """Graded responses and figures of what the policy, as last published, does held out; the text
    says when, such as "after step 10"."""
    publish: Callable[[], None] = lambda: None
    """Hands the policy as it is to the engine, where there is one."""
    decode: Callable[[IntArray], list[str]] = lambda ids: []
    """Token ids as one text each."""
    close: Callable[[], None] = lambda: None


def run(
    directory: RunDirectory,
    parts: Parts,
    *,
    start: int = 0,
    show: Show = silent,
    stop: Callable[[], bool] = lambda: False,
    clock: Callable[[], float] = time.time,
) -> int:
    """Runs from step ``start`` to the end, or until ``stop`` says so; returns the steps done.

    A step that has begun is finished, and saved, before ``stop`` is asked. ``show`` is told of
    every phase and, in phase "step", of every finished step; status.json says the same.
    """
    with _Teller(directory, parts.recipe, start, show, clock) as tell, showing_compiles(tell):
        return _run(directory, parts, tell, start, stop)


def _run(
    directory: RunDirectory, parts: Parts, tell: _Teller, start: int, stop: Callable[[], bool]
) -> int:
    recipe, writer = parts.recipe, _Writer(directory, parts, tell)
    done = start
    with writer.timers("evaluate"):
        if start == 0:
            parts.publish()
            writer.validate(0)
    writer.begin(start)
    version = parts.learner.version
    try:
        for step in parts.train(timers=writer.timers, start=start, show=tell):
            last = step.number == recipe.train.steps
            stopping = stop()
            tell.done = step.number
            if step.number % recipe.validation.every == 0 or last:
                with writer.timers("evaluate"):
                    writer.validate(step.number)
            progress = writer.write(step)
            done, version = step.number, parts.learner.version
            planned = done % recipe.checkpoint.every == 0 or last
            if planned or stopping:
                with writer.timers("checkpoint"):
                    writer.save(done, planned=planned)
            tell.finished(progress)
            if stopping:
                break
    except BurnishError:
        # A step that halted before it learned anything leaves the state of the step before it.
        if done > max(start, writer.saved) and parts.learner.version == version:
            writer.save(done, planned=False)
        raise
    tell(Progress("report", "writing the report"))
    if done == recipe.train.steps:
        summary = summarise(directory.path)
        directory.write("summary.json", json.dumps(summary, indent=2) + "\n")
    write_report(directory.path)
    return done


class _Teller:
    """Adds the step and the time left to what phases report, shows it, and keeps status.json."""

    def __init__(
        self,
        directory: RunDirectory,
        recipe: Recipe,
        start: int,
        show: Show,
        clock: Callable[[], float],
    ) -> None:
        self.done = start
        self._directory, self._recipe, self._show, self._clock = directory, recipe, show, clock
        self._started = self._estimated = clock()
        self._written: tuple[str, float] = ("", 0.0)
        self._now = Progress("load", "starting", step=start, steps=recipe.train.steps)
        self._steps: deque[float] = deque(maxlen=RECENT)
        self._evaluations: deque[float] = deque(maxlen=RECENT)
        self._left: float | None = None

    def __call__(self, progress: Progress) -> None:
        left = self._left
        if left is not None:
            left = max(0.0, left - (self._clock() - self._estimated))
        self._now = replace(
            progress, step=self.done, steps=self._recipe.train.steps, seconds_left=left
        )
        doing, written = self._written
        if progress.doing != doing or self._clock() - written >= 1.0:
            self._write("running")
        self._show(self._now)

    def evaluated(self, timings: Mapping[str, float]) -> float:
        """Keeps the seconds of an evaluation, if there was one, and returns them."""
        seconds = timings.get("time/evaluate", 0.0)
        if seconds:
            self._evaluations.append(seconds)
        return seconds

    def finished(self, progress: Progress) -> None:
        """A step is done: the time left is estimated anew."""
        timings = progress.timings
        self._steps.append(timings["time/step"] - self.evaluated(timings))
        self._left = seconds_left(self._recipe, self.done, self._steps, self._evaluations)
        self._estimated = self._clock()
        self(progress)

    def __enter__(self) -> Self:
        self._write("running")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            is_whole = self.done == self._recipe.train.steps
            return self._write("finished" if is_whole else "stopped")
        return self._write("stopped" if isinstance(error, KeyboardInterrupt) else "failed")

    def _write(self, state: status.State) -> None:
        now = self._clock()
        self._written = self._now.doing, now
        with suppress(RunError):  # a full disk stops the run where a file matters
            path = self._directory.path
            status.write(path, state, self._now, started=self._started, updated=now)


def seconds_left(
    recipe: Recipe, done: int, steps: Sequence[float], evaluations: Sequence[float]
) -> float:
    """The steps left times the mean of recent ones, and the evaluations left likewise.

    ``steps`` and ``evaluations`` are seconds; those of a step leave its evaluation out.
    """
    last, every = recipe.train.steps, recipe.validation.every
    ahead = last // every - done // every + (done < last and last % every > 0)
    total = (last - done) * sum(steps) / len(steps)
    return total + (ahead * sum(evaluations) / len(evaluations) if evaluations else 0.0)


class _Writer:
    """Turns what happened into files."""

    def __init__(self, directory: RunDirectory, parts: Parts, tell: _Teller) -> None:
        self.recipe, self.directory, self.parts = parts.recipe, directory, parts
        self.tell = tell
        self.timers = Timers()
        self.saved = 0
        """The step of the last checkpoint that was saved here."""
        wanted = parts.recipe.log.tensorboard
        self._has_events = find_spec("tensorboard") is not None if wanted is None else wanted
        self._validation: Metrics = {}
        self._scores: dict[int, float | None] = {}
        """Of the step that was validated last."""

    def begin(self, start: int) -> None:
        """The row of what was known before the first step."""
        if start == 0 and self._validation:
            timings = self.timers.take()
            self._append(0, self._validation, timings)
            self.tell.evaluated(timings)
            self._validation = {}

    def validate(self, step: int) -> None:
        when = f"after step {step}" if step else "before the first step"
        groups, self._validation = self.parts.validate(show=self.tell, when=when)
        score = self._validation.get("validation/reward")
        if "validation/loss" in self._validation:
            score = -self._validation["validation/loss"]  # the best is the highest
        self._scores = {step: score}
        self._keep("evaluations.jsonl", step, groups, limit=EVALUATED)

    def write(self, step: Step) -> Progress:
        metrics = step.metrics | self._validation
        self._validation = {}
        if step.groups:
            self.directory.append(
                "log.txt", responses.readable(step.number, step.groups, step.advantages)
            )
        self._keep(
            "rollouts.jsonl",
            step.number,
            step.groups,
            advantages=step.advantages,
            learner_logprobs=step.learner_logprobs,
            limit=self.recipe.log.rollouts,
        )
        timings = self.timers.take()
        if "time/generate" in timings:
            sampled = metrics["rollout/length"] * metrics["rollout/responses"]
            timings["speed/tokens_per_second"] = sampled / timings["time/generate"]
        self._append(step.number, metrics, timings)
        doing = f"step {step.number} is done"
        return Progress("step", doing, metrics=metrics, timings=timings)

    def save(self, step: int, *, planned: bool) -> None:
        """planned: the recipe's cadence asks for this checkpoint, and not a stop or a halt."""
        self.tell(Progress("checkpoint", f"saving a checkpoint of step {step}"))
        learner = self.parts.learner
        state: State = learner.state()
        numbers = {"step": step, "incarnation": learner.incarnation, "learner": state.numbers}
        checkpoints.save(
            self.directory.path,
            step,
            state.tensors,
            numbers | {"positions": self.directory.positions()},
            score=self._scores.get(step),
            keep=self.recipe.checkpoint.keep,
            planned=planned,
        )
        self.saved = step

    def _append(self, step: int, metrics: Metrics, timings: Metrics) -> None:
        self.directory.append_row("metrics.jsonl", {"step": step} | metrics)
        self.directory.append_row("timings.jsonl", {"step": step} | timings)
        if self._has_events:
            self.directory.append_scalars(step, metrics | timings)

    def _keep(self, file: str, step: int, groups: list[Group], **how: Any) -> None:
        for row in responses.rows(step, groups, decode=self.parts.decode, **how):
            self.directory.append_row(file, row)
