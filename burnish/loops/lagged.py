"""The overlapping loop: it samples rollouts while it learns from older ones.

Rollout n, counted from 0, is sampled with the weights after step max(0, n − lag):

    for step = 1 … steps:
        issue the rollouts up to number step − 1 + lag, with the weights published last
        wait for the oldest rollout; replace dead groups                wait
        take its gradient steps                                         learn
        publish the new weights                                         publish

With lag 0 this is the synchronous loop. The order of rollouts is fixed, so results do not depend on
the speed of workers: they are reproducible for a given number of generators. A killed run resumes
bit for bit, because a checkpoint holds the rollouts in flight. The last checkpoint of a run holds
them, too, although the run does not learn from them. So a run that is extended by further steps
later equals a run that had these steps from the start.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Protocol

from burnish.console.progress import begin
from burnish.engine.protocol import Engine
from burnish.errors import DataError
from burnish.learner.protocol import Learner, Step, StepRunner
from burnish.loops.sync import StepSettings, train_step
from burnish.randomness import Stream
from burnish.rollout.buffer import Buffer
from burnish.rollout.dead_groups import Filled, fill, sample_actively, taking
from burnish.rollout.rollout import (
    Note,
    NumberedPrompts,
    describe,
    grade,
    ignore,
    sample,
    ungraded,
)
from burnish.rollout.settings import RolloutSettings
from burnish.rollout.step_values import Steps
from burnish.runs.metrics import Timers
from burnish.tasks.stream import PromptStream
from burnish.tasks.task import Task
from burnish.types import Group


class Rollouts(Protocol):
    """Samples and grades rollouts, of which several can be in flight, and returns them in order."""

    note: Note
    """Callback for ledger events: groups that were sampled or dropped."""

    def issue(
        self, numbered: NumberedPrompts, spare: NumberedPrompts = (), *, first: bool = False
    ) -> None:
        """Start a rollout of the prompts ``numbered``, with the weights that were published last.
        ``spare``: reserve prompts, which replace dead groups as soon as these are found. ``first``:
        put the rollout before all others in flight, so that `collect` returns it next."""

    def collect(self) -> list[Group]:
        """Wait for the first rollout in flight, remove it, and return its graded groups, including
        dead ones."""

    def in_flight(self) -> list[Callable[[], list[Group]]]:
        """Return one function per rollout in flight, in the order in which `collect` returns them.
        The function waits for the rollout's graded groups and returns them; the rollout stays in
        flight."""

    def restore(self, rollouts: Sequence[list[Group]]) -> None:
        """Replace the rollouts in flight by the graded rollouts of a checkpoint."""


class LocalRollouts:
    """Samples and grades rollouts in this process (see `Rollouts`): `issue` returns when the
    rollout is finished.

    The overlapping loop then gives the same results as with Ray, but sampling and learning do not
    overlap. Tests use it as the expected result, and it measures the effect of lag without Ray.
    """

    def __init__(
        self, settings: RolloutSettings, task: Task, engine: Engine, steps: Steps = None
    ) -> None:
        self._settings, self._task, self._engine, self._steps = settings, task, engine, steps
        self._done: deque[list[Group]] = deque()
        self.note: Note = ignore

    def listen(self, note: Note) -> None:
        """Set the callback for ledger events."""
        self.note = note

    def issue(
        self, numbered: NumberedPrompts, spare: NumberedPrompts = (), *, first: bool = False
    ) -> None:
        settings, task, engine = self._settings, self._task, self._engine
        params, size = settings.params, settings.group_size
        total = size * len(numbered)
        report = begin("generate", f"sampling {total} responses", total=total, unit="responses")
        if spare:
            groups = sample_actively(settings, engine, task, numbered, taking(spare), report)
        else:
            responses = sample(engine, numbered, size, params, Stream.TRAIN, report, self._steps)
            groups = grade(task, numbered, responses, settings.penalize)
        for group in groups:
            version = group.oldest_version
            self.note("sampled", group=group.index, by="local", oldest=version, newest=version)
        (self._done.appendleft if first else self._done.append)(groups)

    def collect(self) -> list[Group]:
        return self._done.popleft()

    def in_flight(self) -> list[Callable[[], list[Group]]]:
        return [partial(list, groups) for groups in self._done]

    def restore(self, rollouts: Sequence[list[Group]]) -> None:
        self._done = deque(rollouts)


class LocalStepRunner:
    """Runs steps with a learner of this process and loads its weights into an engine of this
    process (see `burnish.learner.protocol.StepRunner`)."""

    def __init__(self, training: StepSettings, learner: Learner, engine: Engine) -> None:
        self._training, self._learner, self._engine = training, learner, engine

    def learn(self, number: int, groups: list[Group]) -> Step:
        return train_step(self._training, self._learner, number, groups, Timers())

    @property
    def version(self) -> int:
        return self._learner.version

    def publish(self) -> None:
        self._engine.load(self._learner.weights())


def train_lagged(
    settings: RolloutSettings,
    total: int,
    *,
    lag: int,
    prompts: PromptStream,
    rollouts: Rollouts,
    learner: StepRunner,
    buffer: Buffer | None = None,
    timers: Timers,
    start: int = 0,
) -> Iterator[Step]:
    """Run the overlapping loop after ``start`` finished steps until ``total`` steps are done, and
    yield each step, with the metrics of its rollout, after its weights are published.

    ``lag`` is the number of rollouts that are sampled ahead of the learner. ``buffer`` is the
    replay buffer; None if each step learns only from its own rollout. Rollouts that are in flight
    at the start, restored from a checkpoint, are used first and are not issued again.
    """
    chosen, batch = settings.selection, settings.prompts
    is_active = chosen.dead_groups == "active"

    def issue() -> None:
        numbered = prompts.take(batch)
        spare = prompts.reserve(batch * (chosen.max_asked - 1)) if is_active else ()
        rollouts.issue(numbered, spare)

    def collect() -> list[Group]:
        groups = rollouts.collect()
        if is_active:
            prompts.release({group.index for group in groups})
        return groups

    def ask(count: int) -> list[Group]:
        """Sample and grade ``count`` further groups for the oldest rollout, with the weights that
        were published last, and return them."""
        rollouts.issue(prompts.take(count), first=True)
        return rollouts.collect()

    issued = start + len(rollouts.in_flight())
    learner.publish()
    for number in range(start, total):
        skipped = prompts.skipped
        with timers("generate"):
            while issued < number + lag + 1:
                try:
                    issue()
                except DataError:
                    if issued < total:
                        raise
                    break  # the prompts are used up, but this run needs no more of them
                issued += 1
        with timers("wait"):
            begin("generate", f"waiting for rollout {number + 1}")
            filled = fill(settings, collect(), ask)
            note_dropped(rollouts.note, number + 1, filled)
        groups, gone = filled.groups, [group.index for group in filled.sampled]
        if buffer is not None:
            groups, gone = replay(buffer, groups, number + 1, learner.version, rollouts.note)
            gone += filled.dropped
        with timers("learn"):
            begin("learn", f"learning from rollout {number + 1}")
            step = learner.learn(number + 1, groups)
        prompts.close(gone)
        with timers("publish"):
            begin("publish", "publishing the new weights to the generators")
            learner.publish()
        rollout = describe(filled.sampled, prompts.skipped - skipped) | filled.figures
        rollout |= prompts.note(filled.sampled)
        failed = ungraded(filled.sampled)
        yield step._replace(metrics=rollout | step.metrics, failed=failed)


def replay(
    buffer: Buffer, fresh: list[Group], step: int, version: int, note: Note
) -> tuple[list[Group], list[int]]:
    """Put the groups ``fresh`` into the buffer, remove groups that exceed its capacity or are too
    old for a learner at ``version``, and choose the groups that the step learns from: as many as
    there are fresh ones, or fewer if the buffer has fewer.

    Return the chosen groups, and the indices of all groups that have left the buffer, which no
    later step will use. Removed groups that no step has used are reported to ``note``.
    """
    before = [*(kept.group.index for kept in buffer.kept), *(group.index for group in fresh)]
    for kept in [*buffer.put(fresh), *buffer.age(version)]:
        if not kept.uses:
            note("dropped", step=step, group=kept.group.index, why="aged")
    chosen = buffer.take(len(fresh), step, version)
    stay = {kept.group.index for kept in buffer.kept}
    return chosen, [index for index in before if index not in stay]


def note_dropped(note: Note, step: int, filled: Filled) -> None:
    """Report a "dropped" event with the reason to ``note``, which writes it to the ledger, for each
    group of a rollout that was dropped, so that no step will learn from it."""
    for index, why in sorted(filled.dropped.items()):
        note("dropped", step=step, group=index, why=why)
