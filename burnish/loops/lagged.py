"""The overlapping loop: rollouts are sampled while older ones are learned from.

Rollout n, counted from 0, is sampled with the weights after step max(0, n − lag):

    for step = 1 … steps:
        issue the rollouts up to number step − 1 + lag, with the weights published last
        wait for the oldest rollout; ask others if groups are dead      wait
        take its gradient steps                                         learn
        publish the new weights                                         publish

With lag 0 this is the synchronous loop. The order of rollouts is fixed, so results do not depend on
who is fast: they repeat for a given number of generators, and a killed run resumes bit for bit,
because a checkpoint holds the rollouts in flight. The last checkpoint of a run holds them, too,
although the run does not learn from them: a run that is given more steps later goes on as if it had
had them from the start.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

from burnish.draws import Stream
from burnish.engine.protocol import Engine
from burnish.errors import DataError
from burnish.learner.learner import Learner
from burnish.loops.sync import Step, learn
from burnish.progress import begin
from burnish.rollout.branches import Steps
from burnish.rollout.buffer import Buffer
from burnish.rollout.filling import Filled, fill, sample_actively, taking
from burnish.rollout.length import shaping
from burnish.rollout.rollout import Asked, Note, describe, grade, ignore, sample, sampling
from burnish.runs.metrics import Timers
from burnish.schema.recipe import Recipe
from burnish.strategy import LaggedLoop
from burnish.tasks.stream import PromptStream
from burnish.tasks.task import Task
from burnish.types import Group


class Rollouts(Protocol):
    """Whoever samples and grades rollouts, oldest first."""

    note: Note
    """Is told of groups that are sampled and dropped."""

    def issue(self, asked: Asked, spare: Asked = (), *, first: bool = False) -> None:
        """Begins a rollout with the weights that were published last; ``first``: it is collected
        next. ``spare``: prompts that are asked in the place of dead groups as soon as those are
        found."""

    def collect(self) -> list[Group]:
        """The groups of the oldest rollout, which is then no longer in flight."""

    def in_flight(self) -> list[Callable[[], list[Group]]]:
        """A function for each rollout in flight, oldest first, that waits for its groups."""

    def restore(self, rollouts: Sequence[list[Group]]) -> None:
        """Puts these rollouts in flight."""


class LocalRollouts:
    """Samples in this process: a rollout is finished as soon as it is issued.

    The overlapping loop over these rollouts gives the same results as over Ray's, without the
    overlap; so it is the test's oracle, and measures the effect of lag on a machine without Ray.
    """

    def __init__(self, recipe: Recipe, task: Task, engine: Engine, steps: Steps = None) -> None:
        self._recipe, self._task, self._engine, self._steps = recipe, task, engine, steps
        self._done: deque[list[Group]] = deque()
        self.note: Note = ignore

    def listen(self, note: Note) -> None:
        self.note = note

    def issue(self, asked: Asked, spare: Asked = (), *, first: bool = False) -> None:
        recipe, task, engine = self._recipe, self._task, self._engine
        params, size = sampling(recipe), recipe.rollout.group_size
        total = size * len(asked)
        report = begin("generate", f"sampling {total} responses", total=total, unit="responses")
        if spare:
            groups = sample_actively(recipe, engine, task, asked, taking(spare), report)
        else:
            responses = sample(engine, asked, size, params, Stream.TRAIN, report, self._steps)
            groups = grade(task, asked, responses, shaping(recipe))
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


class LocalLearner:
    """A learner of this process, which hands its weights to an engine of this process."""

    def __init__(self, recipe: Recipe, learner: Learner, engine: Engine) -> None:
        self._recipe, self._learner, self._engine = recipe, learner, engine

    def learn(self, number: int, groups: list[Group]) -> Step:
        self._learner.begin(number - 1)
        return learn(self._recipe, self._learner, number, groups, Timers())

    @property
    def version(self) -> int:
        return self._learner.version

    def publish(self) -> None:
        self._engine.load(self._learner.weights())


def train(
    recipe: Recipe,
    *,
    prompts: PromptStream,
    rollouts: Rollouts,
    learner: Any,
    buffer: Buffer | None = None,
    timers: Timers,
    start: int = 0,
) -> Iterator[Step]:
    """Runs the loop from step ``start`` on, yielding after each step.

    ``learner`` has ``learn`` (a step's number and groups -> a ``Step``), ``publish`` and
    ``version``. ``buffer`` is None if a step learns from its own rollout alone.
    """
    assert isinstance(recipe.loop, LaggedLoop)
    lag, chosen, batch = recipe.loop.lag, recipe.selection, recipe.prompts_per_rollout
    is_active = chosen.dead_groups == "active"

    def issue() -> None:
        asked = prompts.take(batch)
        spare = prompts.reserve(batch * (chosen.max_asked - 1)) if is_active else ()
        rollouts.issue(asked, spare)

    def collect() -> list[Group]:
        groups = rollouts.collect()
        if is_active:
            prompts.release({group.index for group in groups})
        return groups

    def ask(count: int) -> list[Group]:
        """Further groups for the oldest rollout, with the weights that were published last."""
        rollouts.issue(prompts.take(count), first=True)
        return rollouts.collect()

    issued = start + len(rollouts.in_flight())
    learner.publish()
    for number in range(start, recipe.train.steps):
        skipped = prompts.skipped
        with timers("generate"):
            while issued < number + lag + 1:
                try:
                    issue()
                except DataError:
                    if issued < recipe.train.steps:
                        raise
                    break  # a longer run would end here
                issued += 1
        with timers("wait"):
            begin("generate", f"waiting for rollout {number + 1}")
            filled = fill(recipe, collect(), ask)
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
            begin("publish", "handing the new weights to the generators")
            learner.publish()
        rollout = describe(filled.sampled, prompts.skipped - skipped) | filled.figures
        rollout |= prompts.note(filled.sampled)
        yield step._replace(metrics=rollout | step.metrics)


def replay(
    buffer: Buffer, fresh: list[Group], step: int, version: int, note: Note
) -> tuple[list[Group], list[int]]:
    """Puts fresh groups into the buffer -> the groups that the step learns from, as many as were
    put in, and the indices of groups that nobody will learn from again."""
    before = [*(kept.group.index for kept in buffer.kept), *(group.index for group in fresh)]
    for kept in [*buffer.put(fresh), *buffer.age(version)]:
        if not kept.uses:
            note("dropped", step=step, group=kept.group.index, why="aged")
    chosen = buffer.take(len(fresh), step, version)
    stay = {kept.group.index for kept in buffer.kept}
    return chosen, [index for index in before if index not in stay]


def note_dropped(note: Note, step: int, filled: Filled) -> None:
    """Notes the groups that nobody will learn from."""
    for index, why in sorted(filled.dropped.items()):
        note("dropped", step=step, group=index, why=why)
