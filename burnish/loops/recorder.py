"""Records a run: its steps, validation, files and checkpoints, from the first step or a later one.

All that step k writes is on the disk before the checkpoint of step k, which holds the length of
each file. A resumed run cuts the files back to these lengths and goes on, so that it leaves the
same files as a run that was never interrupted.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from burnish.errors import BurnishError, RunError
from burnish.learner.learner import Learner
from burnish.loops.sync import Step
from burnish.progress import Progress, Show, current_show, showing
from burnish.runs import checkpoints, responses, status
from burnish.runs.directory import RunDirectory
from burnish.runs.metrics import Metrics
from burnish.runs.report import write_report
from burnish.runs.summary import summarise
from burnish.runs.timers import Timers
from burnish.schema import Recipe
from burnish.tasks.stream import PromptStream
from burnish.types import Group, IntArray

EVALUATED = 64
"""Responses of an evaluation that are kept whole."""
RECENT = 10
"""Steps, and evaluations, whose mean says how long the next ones take."""


class Parts(NamedTuple):
    """The parts of a run, which goes round the circle or learns from pairs."""

    recipe: Recipe
    """It has the number of steps, which follows from the rows of a supervised recipe."""
    learner: Learner
    train: Callable[..., Iterator[Step]]
    """The steps from ``start`` on, with ``timers``."""
    validate: Callable[..., tuple[list[Group], Metrics]]
    """Graded responses and figures of the published policy on held-out prompts; the text says when
    they are measured, such as "after step 10"."""
    prompts: PromptStream | None = None
    """None if nothing is sampled."""
    publish: Callable[[], None] = lambda: None
    """Hands the policy as it is to the engine, if there is one."""
    decode: Callable[[IntArray], list[str]] = lambda ids: []
    """Token ids as one text each."""
    close: Callable[[], None] = lambda: None


def record(
    directory: RunDirectory,
    parts: Parts,
    *,
    start: int = 0,
    stop: Callable[[], bool] = lambda: False,
) -> None:
    """Runs from step ``start`` to the end, or until ``stop`` says so.

    A step that has begun is finished, and saved, before ``stop`` is asked. Every phase and, in
    phase "step", every finished step is shown; status.json says the same.
    """
    state: status.State = "failed"
    tell = _Teller(directory.path, parts.recipe, start, current_show())
    try:
        with showing(tell):
            _run(directory, parts, tell, stop)
        state = "finished" if tell.done == parts.recipe.train.steps else "stopped"
    except KeyboardInterrupt:
        state = "stopped"
        raise
    finally:
        tell.write(state)


def _run(directory: RunDirectory, parts: Parts, tell: _Teller, stop: Callable[[], bool]) -> None:
    recorder = _Recorder(directory, parts, tell)
    if tell.done == 0:
        recorder.write_start()
    try:
        for step in parts.train(timers=recorder.timers, start=tell.done):
            stopping = stop()
            recorder.write(step, stopping)
            if stopping:
                break
    except BurnishError:
        recorder.save_halted()
        raise
    tell(Progress("report", "writing the report"))
    if tell.done == parts.recipe.train.steps:
        summary = summarise(directory.path)
        directory.write("summary.json", json.dumps(summary, indent=2) + "\n")
    write_report(directory.path)


@dataclass
class _Teller:
    """Adds the step and the time left to each report, shows it, and keeps status.json."""

    path: Path
    recipe: Recipe
    done: int
    """Steps."""
    show: Show
    _steps: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    _evaluations: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    _end: float | None = None
    """When the run will end; None before its first step."""

    def __post_init__(self) -> None:
        self._started = time.time()
        steps = self.recipe.train.steps
        self._now = Progress("load", "starting", step=self.done, steps=steps)
        self.write("running")

    def __call__(self, progress: Progress) -> None:
        now, before = time.time(), self._now.doing
        left = None if self._end is None else max(0.0, self._end - now)
        steps = self.recipe.train.steps
        self._now = replace(progress, step=self.done, steps=steps, seconds_left=left)
        if progress.doing != before or now - self._written >= 1.0:
            self.write("running")
        self.show(self._now)

    def measure(self, timings: Metrics, *, is_step: bool = True) -> None:
        """Estimates the run's end anew from the seconds of a step or of the first evaluation."""
        seconds = timings.get("time/evaluate", 0.0)
        if seconds:
            self._evaluations.append(seconds)
        if is_step:
            self._steps.append(timings["time/step"] - seconds)
            left = seconds_left(self.recipe, self.done, self._steps, self._evaluations)
            self._end = time.time() + left

    def write(self, state: status.State) -> None:
        self._written = time.time()
        with suppress(RunError):  # a full disk stops the run where a file matters
            times = {"started": self._started, "updated": self._written}
            status.write(self.path, state, self._now, **times)


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


class _Recorder:
    """Turns steps into files."""

    def __init__(self, directory: RunDirectory, parts: Parts, tell: _Teller) -> None:
        self.directory, self.parts, self.tell = directory, parts, tell
        self.timers = Timers()
        self._has_events = find_spec("tensorboard") is not None
        self._saved = tell.done
        """The step of the checkpoint that the run began from or saved last."""
        self._score: float | None = None
        """Of the last step, if it was validated."""
        self._note_state()

    def write_start(self) -> None:
        """Validates before the first step."""
        with self.timers("evaluate"):
            self.parts.publish()
            metrics = self._validate(0)
        if metrics:
            timings = self.timers.take()
            self._append(0, metrics, timings)
            self.tell.measure(timings, is_step=False)

    def write(self, step: Step, stopping: bool) -> None:
        """Validates and saves a checkpoint if it is time, and writes the step's files."""
        recipe, number, metrics = self.parts.recipe, step.number, step.metrics
        is_last, self.tell.done, self._score = number == recipe.train.steps, number, None
        self._note_state()
        if number % recipe.validation.every == 0 or is_last:
            with self.timers("evaluate"):
                metrics = metrics | self._validate(number)
        if step.groups:
            log = responses.readable(number, step.groups, step.advantages)
            self.directory.append("log.txt", log)
        kept = {"advantages": step.advantages, "learner_logprobs": step.learner_logprobs}
        self._keep("rollouts.jsonl", number, step.groups, limit=recipe.log.rollouts, **kept)
        timings = self.timers.take()
        if "time/generate" in timings:
            sampled = metrics["rollout/length"] * metrics["rollout/responses"]
            timings["speed/tokens_per_second"] = sampled / timings["time/generate"]
        self._append(number, metrics, timings)
        planned = number % recipe.checkpoint.every == 0 or is_last
        if planned or stopping:
            with self.timers("checkpoint"):
                self.save(planned=planned)
        self.tell.measure(timings)
        self.tell(Progress("step", f"step {number} is done", metrics=metrics, timings=timings))

    def save_halted(self) -> None:
        """Saves the last step, if the step that halted after it has not learned anything yet."""
        if self.tell.done > self._saved and self.parts.learner.version == self._version:
            self.save(planned=False)

    def save(self, *, planned: bool) -> None:
        """planned: the recipe's cadence asks for this checkpoint, and not a stop or a halt."""
        step, learner = self.tell.done, self.parts.learner
        self.tell(Progress("checkpoint", f"saving a checkpoint of step {step}"))
        state = learner.state()
        numbers = {
            "step": step,
            "incarnation": learner.incarnation,
            "learner": state.numbers,
            "prompts": self._prompts,
            "positions": self.directory.positions(),
        }
        checkpoints.save(
            self.directory.path,
            step,
            state.tensors,
            numbers,
            score=self._score,
            keep=self.parts.recipe.checkpoint.keep,
            planned=planned,
        )
        self._saved = step

    def _note_state(self) -> None:
        """Keeps the version and the place in the prompts after a step: a step that halts later has
        taken prompts already."""
        prompts = self.parts.prompts
        self._version = self.parts.learner.version
        self._prompts = None if prompts is None else prompts.state()

    def _validate(self, step: int) -> Metrics:
        when = f"after step {step}" if step else "before the first step"
        groups, metrics = self.parts.validate(when)
        self._score = metrics.get("validation/reward")
        if "validation/loss" in metrics:
            self._score = -metrics["validation/loss"]  # the best is the highest
        self._keep("evaluations.jsonl", step, groups, limit=EVALUATED)
        return metrics

    def _append(self, step: int, metrics: Metrics, timings: Metrics) -> None:
        self.directory.append_row("metrics.jsonl", {"step": step} | metrics)
        self.directory.append_row("timings.jsonl", {"step": step} | timings)
        if self._has_events:
            self.directory.append_scalars(step, metrics | timings)

    def _keep(self, file: str, step: int, groups: Sequence[Group], **how: Any) -> None:
        for row in responses.rows(step, groups, decode=self.parts.decode, **how):
            self.directory.append_row(file, row)
