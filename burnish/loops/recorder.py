"""Records a run: its steps, validation, files and checkpoints, from the first step or a later one.

All that step k writes is on the disk before the checkpoint of step k, which holds the length of
each file. A resumed run cuts the files back to these lengths and goes on, so that it leaves the
same files as a run that was never interrupted.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from burnish.errors import ActorDied, ActorError, BurnishError, MismatchError
from burnish.learner.learner import Learner, State
from burnish.loops.sync import Step
from burnish.progress import Progress, current_show, showing, tell
from burnish.rollout.buffer import Buffer
from burnish.rollout.rollout import Note
from burnish.rollout.saved import HELD, load_held, save_held
from burnish.runs import checkpoints, report, responses
from burnish.runs.directory import RunDirectory
from burnish.runs.ledger import Ledger
from burnish.runs.metrics import Metrics, Timers
from burnish.runs.run import summarise
from burnish.runs.shards import Shards
from burnish.schema.recipe import Recipe
from burnish.tasks.stream import PromptStream
from burnish.types import Group, IntArray

EVALUATED = 64
"""Responses of an evaluation that are kept whole."""
LIVES = 5
"""Deaths of the learner that end a run, if no new step is finished between them."""
RECENT = 10
"""Steps whose mean time says how long the next ones take."""


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
    in_flight: Callable[[], Sequence[Callable[[], list[Group]]]] = lambda: ()
    """A function for each rollout that was begun and not learned from, which waits for it."""
    restore: Callable[[Sequence[list[Group]]], None] = lambda rollouts: None
    """Takes over the rollouts in flight of a checkpoint."""
    buffer: Buffer | None = None
    """None if nothing is replayed."""
    publish: Callable[[], None] = lambda: None
    """Hands the policy as it is to the engine, if there is one."""
    decode: Callable[[IntArray], list[str]] = lambda ids: []
    """Token ids as one text each."""
    close: Callable[[], None] = lambda: None
    listen: Callable[[Note], None] | None = None
    """Takes the function that is told of events for the ledger; None if the run keeps no ledger:
    each of its steps learns from its own rollout."""
    places: Callable[[], dict[str, Any]] = dict
    """The machine and the process of each actor, by its name."""
    beside: Callable[[Callable[[], object]], object] = lambda work: work()
    """Does work that needs no part of the run, while generators go on."""
    shards: Callable[[Path], None] | None = None
    """Has ranks write their parts of the learner's state into a directory, in the place of the
    tensors of its `state`; None if one process learns."""
    revive: Callable[[], None] = lambda: None
    """Starts a learner that died again, as it was before the first step."""


def record(
    directory: RunDirectory,
    parts: Parts,
    *,
    start: int = 0,
    stop: Callable[[], bool] = lambda: False,
) -> None:
    """Runs from step ``start`` to the end, or until ``stop`` says so.

    A step that has begun is finished, and saved, before ``stop`` is asked. If the learner dies
    after ``stop`` has said so, the last checkpoint is all there is to save, and its death is
    raised. Every phase and, in phase "step", every finished step is shown; status.json says the
    same.
    """
    died, furthest, deaths = False, start, 0
    while True:
        recorder = None
        try:
            if died:  # a learner may die again while it recovers
                parts.revive()
                start = go_back(directory, parts, checkpoints.latest(directory.path))
            recorder = _Recorder(directory, parts, start)
            _record(recorder, stop)
            return
        except ActorDied as error:
            if stop():
                raise
            if recorder is not None and recorder.done > furthest:
                furthest, deaths = recorder.done, 0
            died, deaths = True, deaths + 1
            if deaths >= LIVES:
                raise ActorError(
                    f"{error}; it died {deaths} times and the run has not come beyond step "
                    f"{furthest}; find the cause, such as too little memory, and continue with "
                    "`burnish resume`"
                ) from error
            tell("note", f"{error}; the run goes back to its last checkpoint")


def _record(recorder: _Recorder, stop: Callable[[], bool]) -> None:
    state: report.State = "failed"
    try:
        with showing(recorder.tell):
            recorder.run(stop)
        state = "finished" if recorder.is_done else "stopped"
    except KeyboardInterrupt:
        state = "stopped"
        raise
    finally:
        recorder.write_status(state)


def go_back(directory: RunDirectory, parts: Parts, chosen: Path | None) -> int:
    """Sets a run, its parts and its files, to a checkpoint, and returns the step.

    Without a checkpoint the parts must be new, and the run begins again.
    """
    step, positions = 0, {}
    if chosen is not None:
        tell("load", f"loading the checkpoint {chosen.name}")
        tensors, state = checkpoints.load(chosen)
        step, positions = state["step"], state["positions"]
        _load_position(parts, tensors, state)
    elif parts.prompts is not None:
        parts.prompts.load_state(PromptStream.BEGINNING)
        if parts.buffer is not None:
            parts.buffer.restore([], [])
    directory.cut_back(positions)  # it checks all before it cuts, and before more is deleted
    if chosen is not None:
        checkpoints.return_to(directory.path, chosen, **parts.recipe.checkpoint.model_dump())
    parts.learner.incarnation = directory.restart(step)
    return step


def _load_position(parts: Parts, tensors: Mapping[str, Tensor], state: dict[str, Any]) -> None:
    learned = tensors
    if not isinstance(tensors, Shards):
        learned = {name: tensor for name, tensor in tensors.items() if not name.startswith(HELD)}
    parts.learner.load_state(State(learned, state["learner"]))
    if parts.prompts is None:
        return
    parts.prompts.load_state(state["prompts"])
    kept, *in_flight = load_held(tensors, state["groups"], parts.prompts.prompt)
    parts.restore(in_flight)
    if parts.buffer is not None:
        parts.buffer.restore(kept, state["uses"])


class _Recorder:
    """Turns steps into files, and tells how far the run is."""

    def __init__(self, directory: RunDirectory, parts: Parts, done: int) -> None:
        self.directory, self.parts, self.recipe = directory, parts, parts.recipe
        self.show = current_show()
        self.done = self._saved = done
        """The last finished step, and the step of the last checkpoint."""
        self.timers = Timers()
        self._has_events = find_spec("tensorboard") is not None
        self._score: float | None = None
        """Validation score of the last step; None if that step was not validated."""
        self._times: deque[float] = deque(maxlen=RECENT + 1)
        """When the first step began and when the last steps were finished."""
        self._now = Progress("load", "starting", step=done, steps=self.recipe.train.steps)
        self.write_status("running")
        self._ledger: Ledger | None = None
        if parts.listen is not None:
            self._ledger = Ledger(directory.path, parts.learner.incarnation, done)
            parts.listen(self._ledger.write)
        self._note_state()

    @property
    def is_done(self) -> bool:
        return self.done == self.recipe.train.steps

    def run(self, stop: Callable[[], bool]) -> None:
        if self.done == 0:
            self._write_start()
        self._times.append(time.time())
        try:
            for step in self.parts.train(timers=self.timers, start=self.done):
                stopping = stop()
                self._write(step, stopping)
                if stopping:
                    break
        except ActorDied:
            raise  # the learner is gone, and with it all that a checkpoint would hold
        except BurnishError as error:
            # A step that halted after it changed the model leaves nothing of the step before it.
            if self.done > self._saved and self.parts.learner.version == self._version:
                with suppress(ActorError):  # the first error says more
                    self._save()
            if isinstance(error, MismatchError):
                error.decode = self.parts.decode
                self.directory.append("log.txt", f"{error}\n")
            raise
        self.tell(Progress("report", "writing the report"))
        if self.is_done:
            summary = summarise(self.directory.path)
            self.directory.write("summary.json", json.dumps(summary, indent=2) + "\n")
        report.write_report(self.directory.path)

    def tell(self, progress: Progress) -> None:
        """Shows progress with the step and the time left, and keeps status.json: a new phase is
        written at once, the rest once a second."""
        now, before, left = time.time(), self._now.doing, None
        if progress.phase == "actors":
            progress = replace(self._now, actors=progress.doing)
        elif progress.doing == before:
            progress = replace(progress, actors=self._now.actors)
        steps = self.recipe.train.steps
        if len(self._times) > 1:
            pace = (self._times[-1] - self._times[0]) / (len(self._times) - 1)
            left = max(0.0, self._times[-1] + pace * (steps - self.done) - now)
        self._now = replace(progress, step=self.done, steps=steps, seconds_left=left)
        if progress.doing != before or now - self._written >= 1.0:
            self.write_status("running")
        self.show(self._now)

    def write_status(self, state: report.State) -> None:
        self._written = time.time()
        with suppress(OSError):  # a full disk stops the run where a file matters
            report.write_status(self.directory.path, state, self._now, now=self._written)

    def _write_start(self) -> None:
        """Validates before the first step."""
        with self.timers("evaluate"):
            self.parts.publish()
            metrics = self._validate(0)
        if metrics:
            self._append(0, metrics, self.timers.take())

    def _write(self, step: Step, stopping: bool) -> None:
        """Validates and saves a checkpoint if it is time, and writes the step's files."""
        recipe, number, metrics = self.recipe, step.number, step.metrics
        self.done, self._score = number, None
        self._note_state()
        if number % recipe.validation.every == 0 or self.is_done:
            with self.timers("evaluate"):
                metrics = metrics | self._validate(number)
        kept = {"advantages": step.advantages, "learner_logprobs": step.learner_logprobs}
        limit = recipe.log.rollouts
        if rows := self._keep("rollouts.jsonl", number, step.groups, limit=limit, **kept):
            self.directory.append("log.txt", responses.readable(rows))
        timings = self.timers.take()
        if "time/generate" in timings and "time/wait" not in timings:
            sampled = metrics["rollout/tokens_sampled"]
            timings["speed/tokens_per_second"] = sampled / timings["time/generate"]
        self._append(number, metrics, timings)
        for row in [] if self.parts.prompts is None else self.parts.prompts.versions(number):
            self.directory.append_row("rubrics.jsonl", row)
        if self._ledger is not None:
            oldest = min((group.oldest_version for group in step.groups), default=0)
            version = oldest + int(metrics.get("train/lag", 0))
            groups = [group.index for group in step.groups]
            self._ledger.learned(number, groups, oldest=oldest, version=version)
        if places := self.parts.places():
            self.directory.write("actors.json", json.dumps(places, indent=2) + "\n")
        if number % recipe.checkpoint.every == 0 or self.is_done or stopping:
            with self.timers("checkpoint"):
                self._save()
        self._times.append(time.time())
        self.tell(Progress("step", f"step {number} is done", metrics=metrics, timings=timings))

    def _save(self) -> None:
        step, learner = self.done, self.parts.learner
        self.tell(Progress("checkpoint", f"saving a checkpoint of step {step}"))
        tensors, counters = learner.state()
        kept = [group for group, _ in self._kept]
        held, groups = save_held([kept, *(waiting() for waiting in self._in_flight)])
        state = {
            "step": step,
            "incarnation": learner.incarnation,
            "learner": counters,
            "prompts": self._prompts,
            "groups": groups,
            "uses": [uses for _, uses in self._kept],
            "positions": self.directory.positions(),
        }
        cadence = self.recipe.checkpoint.model_dump()
        path, score = self.directory.path, self._score
        saved, write = {**tensors, **held}, self.parts.shards
        save = partial(checkpoints.save, path, step, saved, state, score=score, **cadence)
        if write is None:
            self.parts.beside(save)
        else:  # it calls an actor
            save(write=write)
        self._saved = step

    def _note_state(self) -> None:
        """Keeps the version and the place in the prompts after a step: a step that halts later has
        taken prompts already."""
        prompts = self.parts.prompts
        self._version = self.parts.learner.version
        self._prompts = None if prompts is None else prompts.state()
        self._in_flight, buffer = self.parts.in_flight(), self.parts.buffer
        self._kept = [] if buffer is None else [(one.group, one.uses) for one in buffer.kept]

    def _validate(self, step: int) -> Metrics:
        when = f"after step {step}" if step else "before the first step"
        groups, metrics = self.parts.validate(when)
        # Without a reward (distillation alone) there is no score, and the last checkpoint is taken.
        self._score = metrics.get("validation/reward") if self.recipe.is_rewarded else None
        if "validation/loss" in metrics:
            self._score = -metrics["validation/loss"]  # the best is the highest
        self._keep("evaluations.jsonl", step, groups, limit=EVALUATED)
        return metrics

    def _append(self, step: int, metrics: Metrics, timings: Metrics) -> None:
        self.directory.append_row("metrics.jsonl", {"step": step} | metrics)
        self.directory.append_row("timings.jsonl", {"step": step} | timings)
        if self._has_events:
            self.directory.append_scalars(step, metrics | timings)

    def _keep(
        self, file: str, step: int, groups: Sequence[Group], **how: Any
    ) -> list[responses.ResponseRow]:
        """Writes a step's responses to a file and returns their rows."""
        rows = list(responses.rows(step, groups, decode=self.parts.decode, **how))
        for row in rows:
            self.directory.append_row(file, row)
        return rows
