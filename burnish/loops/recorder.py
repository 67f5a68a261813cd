"""Runs the loop of a run and records it: steps, validation, files and checkpoints.

Everything that step k writes is on the disk before the checkpoint of step k, which stores the
length of each file. A resumed run truncates the files to these lengths and continues, so it leaves
the same files as a run that was never interrupted.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from burnish.console.progress import Progress, current_show, showing, tell
from burnish.errors import ActorDied, ActorError, BurnishError, MismatchError
from burnish.learner.protocol import Checkpointable, LearnerState, Step
from burnish.loops.callbacks import (
    CallbackRecord,
    Callbacks,
    CheckpointRecord,
    StepRecord,
    ValidationRecord,
)
from burnish.model.shards import Shards
from burnish.rollout.buffer import Buffer
from burnish.rollout.rollout import Note
from burnish.rollout.saved_groups import HELD, load_held, save_held
from burnish.runs import checkpoints, report, responses
from burnish.runs.directory import RunDirectory
from burnish.runs.early_stopping import Stall, Target
from burnish.runs.ledger import Ledger
from burnish.runs.metrics import Metrics, Timers, iterate_rows
from burnish.runs.run import summarise
from burnish.runs.trackers.trackers import Trackers, TrackerSettings
from burnish.tasks.stream import PromptStream
from burnish.types import Group, IntArray

EVALUATED = 64
"""Maximum number of responses of an evaluation that are stored."""
LIVES = 5
"""Number of consecutive deaths of the learner, without a new finished step between them, after
which the run ends with an error."""
RECENT = 10
"""Number of recent steps whose mean duration predicts the remaining time."""


class RunSettings(NamedTuple):
    """Number of steps of a run, and how often it validates, saves checkpoints and logs."""

    steps: int
    validate_every: int
    """Steps between two validations."""
    checkpoint_every: int
    """Steps between two checkpoints."""
    checkpoint_keep: int
    """Number of recent checkpoints that are kept, besides the best one."""
    log_rollouts: int
    """Maximum number of responses per step that are stored in rollouts.jsonl."""
    target: Target | None
    """The validation metric that selects the best checkpoint and ends the run early; None if there
    is none, because responses have no reward."""
    trackers: TrackerSettings
    max_errors: float
    """Largest accepted share of errors among the grades before the first step."""


class RunComponents(NamedTuple):
    """The components of a run of any loop, in this process or in actors."""

    settings: RunSettings
    learner: Checkpointable
    train: Callable[..., Iterator[Step]]
    """Runs the loop and yields each step; takes ``start`` (number of finished steps) and
    ``timers``."""
    validate: Callable[[str, float | None], tuple[list[Group], Metrics]]
    """Evaluates the published policy on held-out prompts; returns graded responses and metrics. The
    first argument is displayed, such as "after step 10"; the second is the largest accepted share
    of errors, None for any."""
    prompts: PromptStream | None = None
    """The prompt stream; None if nothing is sampled."""
    in_flight: Callable[[], Sequence[Callable[[], list[Group]]]] = lambda: ()
    """Returns one function per rollout in flight; the function waits for the rollout's groups."""
    restore: Callable[[Sequence[list[Group]]], None] = lambda rollouts: None
    """Replaces the rollouts in flight by the graded rollouts of a checkpoint."""
    buffer: Buffer | None = None
    """The replay buffer; None if no group is replayed."""
    publish: Callable[[], None] = lambda: None
    """Loads the current policy into the engine, if there is one."""
    decode: Callable[[IntArray], list[str]] = lambda ids: []
    """Converts token ids to one text per token."""
    close: Callable[[], None] = lambda: None
    """Ends the other processes of the run: engine, graders, actors and ranks."""
    listen: Callable[[Note], None] | None = None
    """Registers the callback for ledger events; None if the run keeps no ledger because each of its
    steps learns from its own rollout."""
    places: Callable[[], dict[str, Any]] = dict
    """Returns the machine and the process of each actor, by the actor's name, for actors.json."""
    waited: Callable[[], float] | None = None
    """Returns the seconds for which this process has waited for environments so far; None if it has
    no environments."""
    in_background: Callable[[Callable[[], object]], object] = lambda work: work()
    """Runs a function that uses no component of the run, while generators continue sampling, and
    returns its result."""
    shards: Callable[[Path], None] | None = None
    """Makes ranks write their shards of the learner's state into a directory; None if one process
    learns and ``learner.state()`` has the tensors."""
    revive: Callable[[], None] = lambda: None
    """Restarts a dead learner in its initial state."""


def record(
    directory: RunDirectory,
    parts: RunComponents,
    *,
    start: int = 0,
    stop: Callable[[], bool] = lambda: False,
    callbacks: Callbacks = Callbacks(),
) -> None:
    """Run the training loop after ``start`` finished steps to the end, or until ``stop`` returns
    True, and write its results to the run's directory.

    ``stop`` is checked after each step, and a checkpoint is saved before the run stops. If the
    learner dies, it is restarted, and the run continues from its last checkpoint; if it dies after
    a stop was requested, or `LIVES` times without progress, an ActorError is raised. A new
    run is validated before its first step. Progress is displayed and written to status.json.
    """
    log = partial(directory.append, "log.txt")
    with closing(Trackers(directory.path, parts.settings.trackers, log)) as trackers:
        _record_all(directory, parts, trackers, callbacks, start, stop)


def _record_all(
    directory: RunDirectory,
    parts: RunComponents,
    trackers: Trackers,
    callbacks: Callbacks,
    start: int,
    stop: Callable[[], bool],
) -> None:
    died, furthest, deaths = False, start, 0
    while True:
        recorder = None
        try:
            if died:  # a learner may die again while it recovers
                parts.revive()
                start = go_back(directory, parts, checkpoints.latest(directory.path))
            recorder = _Recorder(directory, parts, trackers, callbacks, start)
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
                    f"{error}; it died {deaths} times without progress beyond step {furthest}; "
                    "find the cause, such as too little memory, and continue with `burnish resume`"
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


def go_back(directory: RunDirectory, parts: RunComponents, chosen: Path | None) -> int:
    """Restore a run's components and files to the checkpoint ``chosen``; return the checkpoint's
    step. Later checkpoints are deleted, append-only files are truncated, and the restart is counted
    in the run's directory.

    If ``chosen`` is None, the run starts again at step 0; its learner must then be new, because
    this function does not reset it. Raise a RunError if a file is shorter than at the checkpoint.
    """
    step, positions = 0, {}
    if chosen is not None:
        tell("load", f"loading the checkpoint {chosen.name}")
        tensors, state = checkpoints.load_checkpoint(chosen)
        step, positions = state["step"], state["positions"]
        _load_components(parts, tensors, state)
    elif parts.prompts is not None:
        parts.prompts.load_state(PromptStream.BEGINNING)
        if parts.buffer is not None:
            parts.buffer.restore([], [])
    directory.cut_back(positions)  # it checks all files before anything is deleted
    if chosen is not None:
        keep, every = parts.settings.checkpoint_keep, parts.settings.checkpoint_every
        checkpoints.return_to(directory.path, chosen, keep=keep, every=every)
    parts.learner.incarnation = directory.restart(step)
    return step


def _load_components(
    parts: RunComponents, tensors: Mapping[str, Tensor], state: dict[str, Any]
) -> None:
    """Load the learner, the prompt stream, the rollouts in flight and the buffer from the tensors
    and the state of a checkpoint."""
    learned = tensors
    if not isinstance(tensors, Shards):
        learned = {name: tensor for name, tensor in tensors.items() if not name.startswith(HELD)}
    parts.learner.load_state(LearnerState(learned, state["learner"]))
    if parts.prompts is None:
        return
    parts.prompts.load_state(state["prompts"])
    kept, *in_flight = load_held(tensors, state["groups"], parts.prompts.prompt)
    parts.restore(in_flight)
    if parts.buffer is not None:
        parts.buffer.restore(kept, state["uses"])


class _Recorder:
    """Runs the training steps of a run, writes their results to files, validates and saves
    checkpoints when they are due, and reports progress."""

    def __init__(
        self,
        directory: RunDirectory,
        parts: RunComponents,
        trackers: Trackers,
        callbacks: Callbacks,
        done: int,
    ) -> None:
        self.directory, self.parts, self.settings = directory, parts, parts.settings
        self.show = current_show()
        self.done = self._saved = done
        """Number of finished steps, and the step of the last checkpoint."""
        self._is_recorded = True
        """Whether all files have the results of step ``done``."""
        self.timers = Timers(waited=parts.waited)
        self._trackers, self._callbacks = trackers, callbacks
        self._validation: ValidationRecord | None = None
        """The validation of the last step; None if that step was not validated."""
        self._is_stopping = False
        """Whether a callback has returned True."""
        self._score: float | None = None
        """Validation score of the last step; None if that step was not validated."""
        self._stall = self._find_stall()
        self._times: deque[float] = deque(maxlen=RECENT + 1)
        """Start time of the first step and end times of the last steps."""
        self._now = Progress("load", "starting", step=done, steps=self.settings.steps)
        self.write_status("running")
        self._ledger: Ledger | None = None
        if parts.listen is not None:
            self._ledger = Ledger(directory.path, parts.learner.incarnation, done)
            parts.listen(self._ledger.write)
        self._note_state()

    @property
    def is_done(self) -> bool:
        return self.done == self.settings.steps or self._stall is not None

    def _find_stall(self) -> Stall | None:
        """Return why the run ends early; None if it continues."""
        target = self.settings.target
        if target is None or target.patience is None:
            return None
        return target.stall(iterate_rows(self.directory.path / "metrics.jsonl"))

    def run(self, stop: Callable[[], bool]) -> None:
        if self.done == 0:
            self._write_start()
        self._times.append(time.time())
        try:
            if self._stall is None and not self._is_stopping:
                self._train(stop)
        except ActorDied:
            raise  # the state of the learner is lost, so nothing can be saved
        except BurnishError as error:
            # Save only if the failed step has not changed the model; otherwise the previous state
            # is gone.
            is_unchanged = self.parts.learner.version == self._version
            if self._is_recorded and self.done > self._saved and is_unchanged:
                try:
                    self._save()
                except Exception as second:  # the first error is more informative
                    error.add_note(f"no checkpoint of step {self.done} could be saved: {second}")
            if isinstance(error, MismatchError):
                error.decode = self.parts.decode
            raise
        self.tell(Progress("report", "writing the report"))
        if self._stall is not None:
            tell("note", f"the run ends early: {self._stall}")
        if self.is_done:
            summary = summarise(self.directory.path, is_over=True)
            if self._stall is not None:
                summary["ended_early"] = str(self._stall)
            self.directory.write("summary.json", json.dumps(summary, indent=2) + "\n")
        report.write_report(self.directory.path)

    def _train(self, stop: Callable[[], bool]) -> None:
        for step in self.parts.train(timers=self.timers, start=self.done):
            self._is_stopping = stop()
            self._write(step)
            if self._is_stopping or self._stall is not None:
                break

    def tell(self, progress: Progress) -> None:
        """Display a progress report with the step and the remaining time added, and write it to
        status.json: immediately if the work has changed, otherwise at most once per second."""
        now, before, left = time.time(), self._now.doing, None
        if progress.phase == "actors":
            progress = replace(self._now, actors=progress.doing)
        elif progress.doing == before:
            progress = replace(progress, actors=self._now.actors)
        steps = self.settings.steps
        if len(self._times) > 1:
            pace = (self._times[-1] - self._times[0]) / (len(self._times) - 1)
            left = max(0.0, self._times[-1] + pace * (steps - self.done) - now)
        self._now = replace(progress, step=self.done, steps=steps, seconds_left=left)
        if progress.doing != before or now - self._written >= 1.0:
            self.write_status("running")
        self.show(self._now)

    def write_status(self, state: report.State) -> None:
        self._written = time.time()
        with suppress(OSError):  # on a full disk, writing a more important file fails the run
            note = "" if self._stall is None else f"ended early: {self._stall}"
            report.write_status(self.directory.path, state, self._now, now=self._written, note=note)

    def _write_start(self) -> None:
        """Publish the initial policy, validate it before the first step, and write the metrics as
        step 0."""
        with self.timers("evaluate"):
            self.parts.publish()
            metrics = self._validate(0)
        if self.settings.target is not None:
            self.settings.target.check(metrics)
        if metrics:
            self._append(0, metrics, self.timers.take())
        self._call_back(self._validation)

    def _write(self, step: Step) -> None:
        """Validate if this is due; append a finished step's responses, metrics, timings and ledger
        events to files; call the callbacks; then save a checkpoint if this is due."""
        settings, number, metrics = self.settings, step.number, step.metrics
        self.done, self._score, self._validation = number, None, None
        self._is_recorded = False
        self._note_state()
        if number % settings.validate_every == 0 or self.is_done:
            with self.timers("evaluate"):
                metrics = metrics | self._validate(number)
        kept = {"advantages": step.advantages, "learner_logprobs": step.learner_logprobs}
        limit = settings.log_rollouts
        rows = self._keep("rollouts.jsonl", number, step.groups, limit=limit, **kept)
        rows += self._keep("rollouts.jsonl", number, step.failed, limit=limit)
        if rows:
            self.directory.append("log.txt", responses.format_log(rows))
        timings = self.timers.take()
        if "time/generate" in timings and "time/wait" not in timings:
            sampled = metrics["rollout/tokens_sampled"]
            timings["speed/tokens_per_second"] = sampled / timings["time/generate"]
        self._append(number, metrics, timings)
        self._stall = self._find_stall()
        for row in [] if self.parts.prompts is None else self.parts.prompts.versions(number):
            self.directory.append_row("rubrics.jsonl", row)
        if self._ledger is not None:
            oldest = min((group.oldest_version for group in step.groups), default=0)
            version = oldest + int(metrics.get("train/lag", 0))
            groups = [group.index for group in step.groups]
            self._ledger.learned(number, groups, oldest=oldest, version=version)
        if places := self.parts.places():
            self.directory.write("actors.json", json.dumps(places, indent=2) + "\n")
        self._is_recorded = True
        self._call_back(self._validation, StepRecord(number, metrics, timings, step.groups))
        if number % settings.checkpoint_every == 0 or self.is_done or self._is_stopping:
            with self.timers("checkpoint"):
                path = self._save()
            self._call_back(CheckpointRecord(number, path, self._score))
        self._times.append(time.time())
        self.tell(Progress("step", f"step {number} is done", metrics=metrics, timings=timings))

    def _call_back(self, *records: CallbackRecord | None) -> None:
        """Call the callback for each record, after the record's results were written; None is
        skipped. If a callback returns True, the run stops after this step."""
        for record in records:
            if record is not None:
                asked = self._callbacks.ask_to_stop(record)
                self._is_stopping = self._is_stopping or asked

    def _save(self) -> Path:
        """Save a checkpoint of the last step; return its path."""
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
        keep, every = self.settings.checkpoint_keep, self.settings.checkpoint_every
        path, score = self.directory.path, self._score
        saved, write = {**tensors, **held}, self.parts.shards
        save = partial(
            checkpoints.save_checkpoint,
            path,
            step,
            saved,
            state,
            score=score,
            keep=keep,
            every=every,
            ends=self.is_done,
        )
        if write is None:
            self.parts.in_background(save)
        else:  # writing the shards calls the learner, so it can't run in the background
            save(write=write)
        self._saved = step
        return path / "checkpoints" / f"step-{step:08d}"

    def _note_state(self) -> None:
        """Remember the version, the prompt stream's state, the rollouts in flight and the buffer
        after a finished step, for a later checkpoint of that step: if the next step fails, it has
        already taken prompts from the stream."""
        prompts = self.parts.prompts
        self._version = self.parts.learner.version
        self._prompts = None if prompts is None else prompts.state()
        self._in_flight, buffer = self.parts.in_flight(), self.parts.buffer
        self._kept = [] if buffer is None else [(one.group, one.uses) for one in buffer.kept]

    def _validate(self, step: int) -> Metrics:
        """Validate the policy after ``step`` finished steps, append some responses to
        evaluations.jsonl, and remember the score and the record; return the metrics."""
        when = f"after step {step}" if step else "before the first step"
        # Later, a failure would lose the finished step; the next rollout meets the same limit.
        groups, metrics = self.parts.validate(when, None if step else self.settings.max_errors)
        # Without a reward (pure distillation) there is no score, and the last checkpoint is used.
        target = self.settings.target
        self._score = None if target is None else target.score(metrics)
        self._validation = ValidationRecord(step, metrics, groups) if metrics else None
        self._keep("evaluations.jsonl", step, groups, limit=EVALUATED)
        return metrics

    def _append(self, step: int, metrics: Metrics, timings: Metrics) -> None:
        self.directory.append_row("metrics.jsonl", {"step": step} | metrics)
        self.directory.append_row("timings.jsonl", {"step": step} | timings)
        self._trackers.log(step, metrics | timings)

    def _keep(
        self, file: str, step: int, groups: Sequence[Group], **how: Any
    ) -> list[responses.ResponseRow]:
        """Append a step's responses to ``file`` and return their rows. ``how``: keyword arguments
        of `burnish.runs.responses.rows`, such as the maximum number of rows."""
        rows = list(responses.rows(step, groups, decode=self.parts.decode, **how))
        for row in rows:
            self.directory.append_row(file, row)
        for row in responses.turn_times(file, rows, groups):
            self.directory.append_row(responses.TURN_TIMES, row)
        return rows
