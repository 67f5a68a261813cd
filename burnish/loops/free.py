"""The free-running loop: generators continue while the learner works, and lag is bounded.

The learner takes graded groups in the order in which they began, from a window of the oldest ones,
so that fast (short) responses do not crowd out slow ones. `burnish.rollout.lag_bound` decides which
groups may begin; docs/architecture.md tabulates which component waits for which.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from burnish.actors.remote_learner import RemoteLearner
from burnish.actors.rollouts import RemoteRollouts
from burnish.actors.supervisor import POLL_SECONDS, Call
from burnish.console.progress import begin
from burnish.errors import ActorError
from burnish.learner.protocol import Step
from burnish.loops.lagged import note_dropped
from burnish.recipe.runtime import FreeLoop
from burnish.rollout.dead_groups import fill, is_lost
from burnish.rollout.lag_bound import Pace
from burnish.rollout.rollout import check_errors, describe, ungraded
from burnish.rollout.settings import RolloutSettings
from burnish.runs.metrics import Timers
from burnish.tasks.stream import PromptStream
from burnish.types import Group, Prompt

SLICE = 0.5
"""Seconds for which a generator samples before it checks for new requests and weights."""


@dataclass
class _Worker:
    """The driver's record of a generator: its weights, its groups and its pending call."""

    name: str
    life: int = 0
    """Number of the generator's process (a restart starts another one) that received weights and
    groups last; 0 if there was none."""
    version: int = -1
    """Version of the weights that were sent last."""
    holds: dict[int, Prompt] = field(default_factory=dict)
    """Prompts of the groups that it is sampling, by group number."""
    call: Call | None = None
    """The call that has not returned; None if the generator is idle."""


class FreeRun:
    """Drives the groups of a free-running loop from the prompt stream to the learner: it gives
    prompts and weights to generators, sends completions to the scorer, drops groups that are too
    old, and holds graded groups until a step learns from them."""

    def __init__(
        self,
        settings: RolloutSettings,
        loop: FreeLoop,
        gradient_steps: int,
        *,
        prompts: PromptStream,
        rollouts: RemoteRollouts,
        learner: RemoteLearner,
    ) -> None:
        """``gradient_steps``: number of gradient steps per rollout."""
        self.loop, self.prompts, self.rollouts, self.learner = loop, prompts, rollouts, learner
        self._settings, batch = settings, settings.prompts
        self.pace = Pace(batch, loop.window or batch, gradient_steps, loop.max_lag)
        self.workers = [_Worker(name) for name in rollouts.generators]
        self.again = {index: prompts.prompt(index) for index in prompts.open}
        """Prompts of groups that already have a number and still have to be sampled: open groups of
        a checkpoint, and replacements of groups that were dropped as too old."""
        self.grading: dict[Call, None] = {}
        self.graded: dict[int, Group] = {}
        self.dead: dict[int, Group] = {}
        """Dead groups since the last step, each replaced by another prompt; the next step closes
        and counts them."""
        self.learning: Call | None = None
        self.dropped = 0
        self.step = 0
        """Number of the step that the loop waits for or runs."""

    def advance(self) -> None:
        """Do one round of the loop (see `go_on`), which waits at most about a second. Raise an
        ActorError if no actor has work, because the loop would then wait forever."""
        if not self.go_on():
            raise ActorError(self._stuck())

    def go_on(self, *others: Call) -> bool:
        """Give work to idle generators, wait at most `POLL_SECONDS` for a result of any actor or of
        one of the calls ``others``, and process the results: send completions to the scorer, and
        accept graded groups. Results of the learner and of ``others`` are left to the caller.
        Return False if there was no call to wait for."""
        for worker in self.workers:
            if worker.call is None:
                self._feed(worker)
        calls = [*others, *(worker.call for worker in self.workers), *self.grading, self.learning]
        waiting = [call for call in calls if call is not None and not call.is_done]
        if waiting:
            self.rollouts.supervisor.poll(waiting, POLL_SECONDS)
        for worker in self.workers:
            if worker.call is not None and worker.call.is_done:
                self._take(worker)
        for call in [call for call in self.grading if call.is_done]:
            del self.grading[call]
            for group in call.answer:
                self._accept(group)
        return bool(waiting)

    def _accept(self, group: Group) -> None:
        """Make a graded group available to the next step. If it is dead (or has too few samples)
        and the recipe replaces dead groups, withdraw it instead, so that another prompt can take
        its place; raise if too many grades are errors."""
        number, settings = group.index, self._settings
        if not (settings.selection.fills and is_lost(group, settings)):
            self.graded[number] = group
            self.pace.know(number, group.oldest_version)
            return
        self.pace.withdraw(number)
        self.dead[number] = group
        known = [*self.dead.values(), *self.graded.values()]
        check_errors(known, limit=settings.max_errors, requested=settings.responses)

    def _stuck(self) -> str:
        """Return the error message of a loop that waits although no actor has work."""
        return (
            f"step {self.step} waits for {self.pace.batch} graded groups, but no actor has work: "
            f"the open groups are {reprlib.repr(list(self.pace.loaded))}, of which "
            f"{reprlib.repr(sorted(self.graded))} are graded, {len(self.again)} more have not "
            "begun, and none may begin; this is a bug in burnish: please report it, and "
            "continue with `burnish resume`"
        )

    def next_rollout(self) -> list[Group] | None:
        """Return the groups of the next step, sorted by number, including dead ones; None if the
        step has to wait for more groups. The groups stay in the loop's state until `close`.

        Graded groups that are too old are dropped first, and their prompts are sampled again under
        new numbers. If the step has sampled as many groups as ``selection.max_asked`` allows, all
        graded groups are returned, although they are fewer than a batch."""
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
        """Return whether the next step has sampled as many groups as ``selection.max_asked``
        allows, and still has fewer than a batch of groups that are not dead."""
        alive, batch = len(self.graded), self.pace.batch
        most = batch * self._settings.selection.max_asked
        return alive < batch and len(self.dead) + alive >= most

    def close(self, groups: list[Group]) -> None:
        """Remove the groups of a step (see `next_rollout`) from the loop's state, because the
        learner takes them, and close them in the prompt stream."""
        numbers = [group.index for group in groups if group.index in self.graded]
        if len(numbers) == self.pace.batch:
            self.pace.learn(numbers)
        else:  # the lag bound assumes complete batches
            for number in numbers:
                self.pace.withdraw(number)
        for number in numbers:
            del self.graded[number]
        self.dead.clear()
        self.prompts.close(group.index for group in groups)

    def _drop(self, number: int) -> None:
        """Drop a graded group that is too old, record this in the ledger, and queue its prompt to
        be sampled again under a new number."""
        self.pace.withdraw(number)
        del self.graded[number]
        self.rollouts.note("dropped", step=self.step, group=number, why="stale")
        self.again.update([self.prompts.ask_again(number)])
        self.dropped += 1

    def _feed(self, worker: _Worker) -> None:
        """Start the next call of an idle generator, with new requests and, if a newer version was
        published, new weights. Do nothing if the generator has no groups to sample."""
        fresh = self._fresh(worker)
        worker.holds |= fresh
        if not worker.holds:
            return
        weights: tuple[Any, Any] = None, None
        if worker.life != self.rollouts.supervisor.process_number(worker.name):
            args = self._anew(worker)
        else:
            if worker.version != self.rollouts.version:
                weights, worker.version = self.rollouts.weights, self.rollouts.version
            args = *weights, self.rollouts.requests(list(fresh.items())), SLICE
        retry_args = partial(self._anew, worker)
        worker.call = self.rollouts.supervisor.call(
            worker.name, "advance", *args, retry_args=retry_args
        )

    def _anew(self, worker: _Worker) -> tuple[Any, ...]:
        """Return the arguments of the first call to a restarted generator: the weights that were
        published last (the learner may already have newer ones), and requests for all of its
        groups, under their numbers. Record that these groups begin again with those weights."""
        worker.life = self.rollouts.supervisor.process_number(worker.name)
        worker.version = self.rollouts.version
        for number in worker.holds:
            self.pace.know(number, worker.version)
        return *self.rollouts.weights, self.rollouts.requests(list(worker.holds.items())), SLICE

    def _fresh(self, worker: _Worker) -> dict[int, Prompt]:
        """Begin new groups for a generator, as many as the lag bound and its share of the work
        allow; return their prompts by group number. They begin with the newest published weights,
        which are sent with them."""
        found, version = dict[int, Prompt](), self.rollouts.version
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
        """Number of groups that the learner could use within the lag bound if all of them began
        now."""
        return (1 + self.loop.max_lag // self.pace.gradient_steps) * self.pace.batch

    def _may_begin(self, loaded: int) -> bool:
        """Return whether another group may begin with version ``loaded`` of the weights. If groups
        that become too old are dropped, only the number of open groups is limited."""
        if self.loop.on_stale == "drop":
            return len(self.pace.loaded) < self._useful
        coming = self.pace.gradient_steps if self.learning is not None else 0
        return self.pace.may_begin(loaded, self.learner.version + coming)

    def _take(self, worker: _Worker) -> None:
        """Take the completed groups from a generator's finished call and send them to the
        scorer."""
        assert worker.call is not None
        self.rollouts.record_samples(worker.call)
        answers, worker.call = worker.call.answer, None
        numbers = sorted(int(name.removeprefix("group-")) for name in answers)
        numbered = [(number, worker.holds.pop(number)) for number in numbers]
        if numbered:
            responses = [answers[f"group-{number}"] for number, _ in numbered]
            call = self.rollouts.supervisor.call("scorer", "grade", numbered, responses)
            self.grading[call] = None


def train_free(
    settings: RolloutSettings,
    total: int,
    *,
    loop: FreeLoop,
    gradient_steps: int,
    prompts: PromptStream,
    rollouts: RemoteRollouts,
    learner: RemoteLearner,
    timers: Timers,
    start: int = 0,
) -> Iterator[Step]:
    """Run the free-running loop after ``start`` finished steps until ``total`` steps are done, and
    yield each step, with the metrics of its rollout, after its weights are published.

    ``gradient_steps``: number of gradient steps per rollout. While the caller handles a yielded
    step, generators continue whenever it waits through ``rollouts`` (see `RemoteRollouts.on_wait`).
    """
    rollouts.on_wait = None
    learner.publish()
    parts: Any = {"prompts": prompts, "rollouts": rollouts, "learner": learner}
    run = FreeRun(settings, loop, gradient_steps, **parts)
    for number in range(start, total):
        run.step, skipped = number + 1, prompts.skipped
        with timers("wait"):
            begin("generate", f"waiting for the groups of step {number + 1}")
            while (sampled := run.next_rollout()) is None:
                run.advance()
            filled = fill(settings, sampled, lambda count: [])
            note_dropped(rollouts.note, number + 1, filled)
        with timers("learn"):
            begin("learn", f"step {number + 1} is being learned")
            run.close(sampled)
            run.learning = learner.start_step(number + 1, filled.groups)
            while not run.learning.is_done:
                run.advance()
            step = learner.finish_step(run.learning)
            run.learning = None
        # Generators continue while weights are published, and between two steps.
        rollouts.on_wait = run.go_on if number + 1 < total else None
        with timers("publish"):
            learner.publish()
        filled.figures["rollout/stale_groups"] = float(run.dropped)
        metrics = describe(sampled, prompts.skipped - skipped) | filled.figures
        metrics |= prompts.note(sampled)
        run.dropped = 0
        failed = ungraded(sampled)
        yield step._replace(metrics=metrics | step.metrics, failed=failed)
