"""The free-running loop: generators go on while the learner works, and lag is bounded.

Every group has a number, and the learner takes groups by number inside a window, so that fast
(short) answers do not crowd out slow ones. `burnish.rollout.pace` says which groups may begin;
docs/architecture.md says who waits for whom.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from burnish.actors.fleet import Fleet
from burnish.actors.supervisor import PULSE, Call
from burnish.errors import ActorError
from burnish.loops.asynchronous import note_dropped
from burnish.loops.sync import Step
from burnish.progress import begin
from burnish.rollout.filling import fill, is_lost, judge_of
from burnish.rollout.pace import Pace
from burnish.rollout.rollout import check_errors, describe
from burnish.runs.metrics import Timers
from burnish.schema.recipe import Recipe
from burnish.strategy import FreeLoop
from burnish.tasks.stream import PromptStream
from burnish.types import Group, Prompt

SLICE = 0.5
"""Seconds for which a generator samples before it looks for new requests and weights."""


@dataclass
class _Worker:
    """The driver's view of a generator."""

    name: str
    life: int = 0
    """The process that was given weights and groups last; 0 if none was."""
    version: int = -1
    """Of the weights that it was given last."""
    holds: dict[int, Prompt] = field(default_factory=dict)
    """Groups that it is sampling."""
    call: Call | None = None


class FreeRun:
    """The state of a free-running loop: groups on their way from the prompts to the learner."""

    def __init__(
        self, recipe: Recipe, *, prompts: PromptStream, fleet: Fleet, learner: Any
    ) -> None:
        loop = recipe.loop
        assert isinstance(loop, FreeLoop)
        self.loop, self.prompts, self.fleet, self.learner = loop, prompts, fleet, learner
        self._recipe, self._is_dead = recipe, judge_of(recipe)
        batch = recipe.prompts_per_rollout
        self.pace = Pace(
            batch, loop.window or batch, recipe.gradient_steps_per_rollout, loop.max_lag
        )
        self.workers = [_Worker(name) for name in fleet.generators]
        self.again = {index: prompts.prompt(index) for index in prompts.open}
        """Groups to begin under numbers that they have already."""
        self.grading: dict[Call, None] = {}
        self.graded: dict[int, Group] = {}
        self.dead: dict[int, Group] = {}
        """Groups for which other prompts were asked; the next step closes and counts them."""
        self.learning: Call | None = None
        self.dropped = 0
        self.step = 0
        """The step that is waited for or learned."""

    def advance(self) -> None:
        """Gives everybody work, and waits a little for an answer; raises if nobody works."""
        if not self.go_on():
            raise ActorError(self._stuck())

    def go_on(self, *others: Call) -> bool:
        """Gives everybody work, and waits a little for an answer, or for one of other calls.
        Returns False if there is no call to wait for."""
        for worker in self.workers:
            if worker.call is None:
                self._feed(worker)
        calls = [*others, *(worker.call for worker in self.workers), *self.grading, self.learning]
        waiting = [call for call in calls if call is not None and not call.is_done]
        if waiting:
            self.fleet.supervisor.poll(waiting, PULSE)
        for worker in self.workers:
            if worker.call is not None and worker.call.is_done:
                self._take(worker)
        for call in [call for call in self.grading if call.is_done]:
            del self.grading[call]
            for group in call.answer:
                self._accept(group)
        return bool(waiting)

    def _accept(self, group: Group) -> None:
        """Takes a graded group; if it is dead, and the recipe fills rollouts, its place is free for
        another prompt at once."""
        number, recipe = group.index, self._recipe
        if not (recipe.selection.fills and is_lost(group, recipe, self._is_dead)):
            self.graded[number] = group
            self.pace.know(number, group.oldest_version)
            return
        self.pace.withdraw(number)
        self.dead[number] = group
        known = [*self.dead.values(), *self.graded.values()]
        responses = recipe.rollout.batch
        check_errors(known, limit=recipe.rollout.max_errors, asked=responses)

    def _stuck(self) -> str:
        """The error of a loop that waits although no actor works for it."""
        return (
            f"step {self.step} waits for {self.pace.batch} graded groups, and no actor has a call: "
            f"the open groups are {reprlib.repr(list(self.pace.loaded))}, of which "
            f"{reprlib.repr(sorted(self.graded))} are graded, {len(self.again)} more have not "
            "begun, and none may begin; this is a defect of burnish: please report it, and "
            "continue with `burnish resume`"
        )

    def next_rollout(self) -> list[Group] | None:
        """The groups of the next step by their numbers, dead ones included; None if they are not
        all there.

        Groups that are too old leave, and their prompts get new numbers. A step that has asked for
        as many groups as ``selection.max_asked`` allows has the groups that are there."""
        limit = self.learner.version - self.loop.max_lag
        for number, group in list(self.graded.items()):
            if group.oldest_version < limit:
                self._drop(number)
        numbers = self.pace.ready(self.graded)
        if not numbers and not self._is_bound():
            return None
        numbers = numbers or list(self.graded)
        groups = [*self.dead.values(), *(self.graded[number] for number in numbers)]
        return sorted(groups, key=lambda group: group.index)

    def _is_bound(self) -> bool:
        """Whether a step has asked for all groups that it may ask for, and lacks some."""
        alive, batch = len(self.graded), self.pace.batch
        most = batch * self._recipe.selection.max_asked
        return alive < batch and len(self.dead) + alive >= most

    def close(self, groups: list[Group]) -> None:
        """The groups were learned from, or are dead."""
        numbers = [group.index for group in groups if group.index in self.graded]
        if len(numbers) == self.pace.batch:
            self.pace.learn(numbers)
        else:  # their rollout is smaller than the bound counts with
            for number in numbers:
                self.pace.withdraw(number)
        for number in numbers:
            del self.graded[number]
        self.dead.clear()
        self.prompts.close(group.index for group in groups)

    def _drop(self, number: int) -> None:
        """Closes a group that is too old; its prompt is asked again under a new number."""
        self.pace.withdraw(number)
        del self.graded[number]
        self.fleet.note("dropped", step=self.step, group=number, why="stale")
        self.again.update([self.prompts.ask_again(number)])
        self.dropped += 1

    def _feed(self, worker: _Worker) -> None:
        """Calls a generator with new weights and requests, if it has anything to do."""
        fresh = self._fresh(worker)
        worker.holds |= fresh
        if not worker.holds:
            return
        weights: tuple[Any, Any] = None, None
        if worker.life != self.fleet.supervisor.life(worker.name):
            args = self._anew(worker)
        else:
            if worker.version != self.fleet.version:
                weights, worker.version = self.fleet.weights, self.fleet.version
            args = *weights, self.fleet.requests(list(fresh.items())), SLICE
        renew = partial(self._anew, worker)
        worker.call = self.fleet.supervisor.call(worker.name, "advance", *args, renew=renew)

    def _anew(self, worker: _Worker) -> tuple[Any, ...]:
        """What a new process is called with: it has no groups, and gets all of them under their
        numbers, with the weights that were published last. The learner may be ahead of them."""
        worker.life = self.fleet.supervisor.life(worker.name)
        worker.version = self.fleet.version
        for number in worker.holds:
            self.pace.know(number, worker.version)
        return *self.fleet.weights, self.fleet.requests(list(worker.holds.items())), SLICE

    def _fresh(self, worker: _Worker) -> dict[int, Prompt]:
        """New groups for a generator, as many as the bound and its share of the work allow. They
        begin with the newest weights, which it is given with them."""
        found, version = dict[int, Prompt](), self.fleet.version
        share = -(-self._useful // len(self.workers))  # groups that a generator samples at once
        while len(worker.holds) + len(found) < share:
            if not self._may_begin(version):
                break
            if self.again:
                number = min(self.again)
                prompt = self.again.pop(number)
            else:
                ((number, prompt),) = self.prompts.take(1)
            self.pace.begin(number, version)
            found[number] = prompt
        return found

    @property
    def _useful(self) -> int:
        """Groups that can be learned from within the bound, if all were begun now."""
        return (1 + self.loop.max_lag // self.pace.gradient_steps) * self.pace.batch

    def _may_begin(self, loaded: int) -> bool:
        if self.loop.on_stale == "drop":
            return len(self.pace.loaded) < self._useful
        coming = self.pace.gradient_steps if self.learning is not None else 0
        return self.pace.may_begin(loaded, self.learner.version + coming)

    def _take(self, worker: _Worker) -> None:
        """Sends a generator's answers to be graded."""
        assert worker.call is not None
        self.fleet.sampled_by(worker.call)
        answers, worker.call = worker.call.answer, None
        numbers = sorted(int(name.removeprefix("group-")) for name in answers)
        asked = [(number, worker.holds.pop(number)) for number in numbers]
        if asked:
            responses = [answers[f"group-{number}"] for number, _ in asked]
            call = self.fleet.supervisor.call("scorer", "grade", asked, responses)
            self.grading[call] = None


def train(
    recipe: Recipe,
    *,
    prompts: PromptStream,
    fleet: Fleet,
    learner: Any,
    timers: Timers,
    start: int = 0,
) -> Iterator[Step]:
    """Runs the loop from step ``start`` on, yielding after each step."""
    fleet.meanwhile = None
    learner.publish()
    run = FreeRun(recipe, prompts=prompts, fleet=fleet, learner=learner)
    for number in range(start, recipe.train.steps):
        run.step, skipped = number + 1, prompts.skipped
        with timers("wait"):
            begin("generate", f"waiting for the groups of step {number + 1}")
            while (sampled := run.next_rollout()) is None:
                run.advance()
            filled = fill(recipe, sampled, lambda count: [])
            note_dropped(fleet.note, number + 1, filled)
        with timers("learn"):
            begin("learn", f"step {number + 1} is being learned")
            run.close(sampled)
            run.learning = learner.begin(number + 1, filled.groups)
            while not run.learning.is_done:
                run.advance()
            step = learner.take(run.learning)
            run.learning = None
        # Generators go on while weights are published, and between two steps.
        fleet.meanwhile = run.go_on if number + 1 < recipe.train.steps else None
        with timers("publish"):
            learner.publish()
        filled.figures["rollout/stale_groups"] = float(run.dropped)
        metrics = describe(sampled, prompts.skipped - skipped) | filled.figures
        metrics |= prompts.note(sampled)
        run.dropped = 0
        yield step._replace(metrics=metrics | step.metrics)
