"""A run: the loop, its directory, validation and checkpoints, from the first step or a later one.

What is written at step k is on the disk before the checkpoint of step k, which records how long
each file is; a resumed run cuts them back to that and goes on, so that it leaves what an
uninterrupted one leaves.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from burnish.config import Recipe
from burnish.errors import BurnishError
from burnish.learner.learner import Learner, State
from burnish.loops.sync import Step
from burnish.rollout.choice import Choice
from burnish.runs import checkpoint, rollouts, tensorboard
from burnish.runs.directory import RunDirectory
from burnish.runs.metrics import Row
from burnish.runs.plots import draw_run
from burnish.runs.report import write_report
from burnish.runs.summary import summarise
from burnish.runs.timers import Timers
from burnish.types import Group, IntArray

EVALUATED = 64
"""Responses of an evaluation that are kept whole."""


class Parts(NamedTuple):
    """What a recipe is made of, built: a run goes round the circle, or learns from pairs."""

    recipe: Recipe
    """With its number of steps, which the rows of a supervised one say."""
    learner: Learner
    choice: Choice | None
    """Of prompts; None where there are pairs."""
    train: Callable[[Timers, int], Iterator[Step]]
    """The steps from the given one on."""
    validate: Callable[[], tuple[list[Group], Row]]
    """Graded responses and figures of what the policy, as last published, does held out."""
    publish: Callable[[], None]
    """Hands the policy as it is to what samples."""
    decode: Callable[[IntArray], list[str]]
    """Token ids as one text each."""
    close: Callable[[], None]


class Progress(NamedTuple):
    """What a display shows after each step."""

    step: int
    total: int
    metrics: Row
    timings: Row


def run(
    directory: RunDirectory,
    parts: Parts,
    *,
    start: int = 0,
    show: Callable[[Progress], None] = lambda progress: None,
    stop: Callable[[], bool] = lambda: False,
) -> int:
    """Runs from step ``start`` to the end, or until ``stop`` says so; returns the steps done.

    A step that has begun is finished, and saved, before ``stop`` is asked.
    """
    recipe, writer = parts.recipe, _Writer(directory, parts)
    done = start
    with writer.timers("evaluate"):
        if start == 0:
            parts.publish()
            writer.validate(0)
    writer.begin(start)
    version = parts.learner.version
    try:
        for step in parts.train(writer.timers, start):
            last = step.number == recipe.train.steps
            stopping = stop()
            if step.number % recipe.validation.every == 0 or last:
                with writer.timers("evaluate"):
                    writer.validate(step.number)
            progress = writer.write(step)
            done, version = step.number, parts.learner.version
            if done % recipe.checkpoint.every == 0 or last or stopping:
                with writer.timers("checkpoint"):
                    writer.save(done)
            show(progress)
            if stopping:
                break
    except BurnishError:
        # A step that halted before it learned anything leaves the state of the step before it.
        if done > start and parts.learner.version == version:
            writer.save(done)
        raise
    if done == recipe.train.steps:
        summary = summarise(directory.path)
        directory.write("summary.json", json.dumps(summary, indent=2) + "\n")
    if done > start and not recipe.is_supervised:
        draw_run(directory.path)
    write_report(directory.path)
    return done


class _Writer:
    """Turns what happened into files."""

    def __init__(self, directory: RunDirectory, parts: Parts) -> None:
        self.recipe, self.directory, self.parts = parts.recipe, directory, parts
        self.timers = Timers()
        self._validation: Row = {}
        self._score: float | None = None
        self._choice: dict[str, Any] | None = None
        """Of prompts, as the last whole step left it: a step that halts has chosen before."""

    def begin(self, start: int) -> None:
        """The row of what was known before the first step."""
        if start == 0 and self._validation:
            self._append(0, self._validation, self.timers.take())
            self._validation = {}

    def validate(self, step: int) -> None:
        groups, self._validation = self.parts.validate()
        self._score = self._validation.get("validation/reward")
        if "validation/loss" in self._validation:
            self._score = -self._validation["validation/loss"]  # the best is the highest
        self._keep("evaluations.jsonl", step, groups, limit=EVALUATED)

    def write(self, step: Step) -> Progress:
        metrics = step.metrics | self._validation
        self._validation = {}
        self._choice = None if self.parts.choice is None else self.parts.choice.state()
        if step.groups:
            self.directory.append(
                "log.txt", rollouts.readable(step.number, step.groups, step.advantages)
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
        return Progress(step.number, self.recipe.train.steps, metrics, timings)

    def save(self, step: int) -> None:
        learner = self.parts.learner
        state: State = learner.state()
        numbers = {"step": step, "incarnation": learner.incarnation, "learner": state.numbers}
        if self._choice is not None:
            numbers["choice"] = self._choice
        checkpoint.save(
            self.directory.path,
            step,
            state.tensors,
            numbers | {"positions": self.directory.positions()},
            score=self._score,
            keep=self.recipe.checkpoint.keep,
        )
        self._score = None

    def _append(self, step: int, metrics: Row, timings: Row) -> None:
        self.directory.append_row("metrics.jsonl", {"step": step} | metrics)
        self.directory.append_row("timings.jsonl", {"step": step} | timings)
        if self.recipe.log.tensorboard:
            scalars = metrics | timings
            tensorboard.append_scalars(self.directory, step, scalars, wall_time=time.time())

    def _keep(self, file: str, step: int, groups: list[Group], **how: Any) -> None:
        for row in rollouts.rows(step, groups, decode=self.parts.decode, **how):
            self.directory.append_row(file, row)
