"""Rollouts that remote generators sample and a remote scorer grades.

A rollout consists of groups; a group is the samples of one prompt. A group is dead if nothing can
be learned from it, for example because all of its rewards are equal.

A group's number decides which generator samples it, and every call carries the weights that it
samples with. A rollout's bits therefore depend only on its groups, its weights and the number of
generators. A generator that dies is restarted and samples the same completions again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from burnish.actors.supervisor import POLL_SECONDS, Call, Supervisor
from burnish.actors.transport import WeightsHandle
from burnish.engine.protocol import Request
from burnish.errors import GraderError
from burnish.randomness import Stream
from burnish.rollout.dead_groups import Replacing
from burnish.rollout.rollout import Note, NumberedPrompts, ignore, requests_of
from burnish.types import Completion, Group, SamplingParams

Published = tuple[WeightsHandle | None, Any]
"""Published weights: their handle and a reference to their bytes; (None, None) before the first
version is published."""


@dataclass
class _Rollout:
    """A rollout in flight. Its groups are graded when all are sampled. If dead groups are replaced
    at once, each generator's share of the groups is sampled and graded separately."""

    numbered: NumberedPrompts
    samples: list[Call]
    grading: Call | None = None
    shares: list[_Share] = field(default_factory=list)
    """The generators' shares; empty unless dead groups are replaced at once."""

    @property
    def is_sampled(self) -> bool:
        return all(share.is_done for share in self.shares)


@dataclass
class _Share:
    """A generator's share of a rollout whose dead groups are replaced at once.

    Until the share is complete, the generator samples nothing else, and it waits while groups are
    graded. The share's bits therefore depend only on its prompts and its weights."""

    generator: str
    numbered: NumberedPrompts
    spare: NumberedPrompts
    weights: Published
    replacing: Replacing
    process: int = 0
    """Number of the generator's process that has the requests; 0 if it was not called yet."""
    sampling: Call | None = None
    grading: Call | None = None
    failure: GraderError | None = None
    """The error that ended the share early; None if there was none."""

    @property
    def is_done(self) -> bool:
        return self.failure is not None or self.replacing.is_done


class RemoteRollouts:
    """Samples rollouts with the generators and grades them with the scorer. Rollouts are collected
    in the order in which they were issued (see `burnish.loops.lagged.Rollouts`). It is also the
    ``Sampler`` of evaluations."""

    def __init__(
        self,
        supervisor: Supervisor,
        generators: Sequence[str],
        *,
        size: int,
        params: SamplingParams,
        log: Callable[[str], None] = lambda text: None,
        replace: Callable[[NumberedPrompts, NumberedPrompts], Replacing] | None = None,
    ) -> None:
        """``generators``: names of the generator actors. ``size``: samples per group. ``log``:
        callback that receives a line when weights are published and when a generator first samples
        with a newer version. ``replace``: factory that is called for each generator's share of a
        rollout, with the prompts that the share starts with and its spare prompts; it returns the
        `Replacing` that replaces the share's dead groups during the rollout. If it is None, dead
        groups are not replaced here; the training loop may still replace them."""
        self._replace = replace
        self.log, self._versions = log, dict.fromkeys(generators, -1)
        self.supervisor, self.generators = supervisor, generators
        self._size, self._params = size, params
        self.version = 0
        self.weights: Published = None, None
        """The weights that were published last."""
        self.note: Note = ignore
        """Callback that records groups in the ledger and actors' calls in the timeline."""
        self.on_wait: Callable[..., bool] | None = None
        """Callback that runs repeatedly while the driver waits for something else. It gives idle
        generators work, waits briefly for them or for the calls that it receives as arguments, and
        returns False if there is no call to wait for. None if only the rollouts in flight have to
        continue."""
        self._rollouts: deque[_Rollout] = deque()
        self._waiting: list[Request] = []
        """Requests of an evaluation that were not sent yet."""
        self._evaluating: list[Call] = []

    def listen(self, note: Note) -> None:
        """Set the callback for events of the ledger and rows of the timeline."""
        self.note = self.supervisor.note = note

    def publish(self, handle: WeightsHandle, data: Any) -> None:
        """Sample all later requests with these weights, which generators load with the next call
        that they get. ``data`` is a Ray reference to the weights' bytes."""
        self.log(f"learner publishes version {handle.version}")
        self.version = handle.version
        self.weights = handle, data

    def buffers_in_use(self) -> list[str]:
        """Return the names of the buffers with the weights that were published last or that a call
        in flight needs; a sender must not overwrite them."""
        calls = [call for name in self.generators for call in self.supervisor.pending(name)]
        values = [*self.weights, *(arg for call in calls for arg in call.args)]
        values += [share.weights[0] for share in self._unfinished()]
        return [value.buffer for value in values if isinstance(value, WeightsHandle)]

    def requests(self, numbered: NumberedPrompts) -> list[Request]:
        """Return one request per prompt, for a training group."""
        return requests_of(numbered, self._size, self._params, Stream.TRAIN)

    def issue(
        self, numbered: NumberedPrompts, spare: NumberedPrompts = (), *, first: bool = False
    ) -> None:
        """Start a rollout of the prompts ``numbered`` with the weights that were published last;
        return without waiting. ``spare``: reserve prompts, which replace dead groups as soon as
        these are found; not used without the factory ``replace``. ``first``: put the rollout
        before all others in flight, so that `collect` returns it next."""
        if self._replace is None:
            rollout = _Rollout(numbered, self._call_generators("sample", self.requests(numbered)))
        else:
            rollout = _Rollout(numbered, [], shares=self._shares(numbered, spare))
        (self._rollouts.appendleft if first else self._rollouts.append)(rollout)
        self._continue_shares()

    def _shares(self, numbered: NumberedPrompts, spare: NumberedPrompts) -> list[_Share]:
        assert self._replace is not None
        shares = []
        for place, name in enumerate(self.generators):
            own, more = (
                [one for one in given if one[0] % len(self.generators) == place]
                for given in (numbered, spare)
            )
            if own:
                shares.append(_Share(name, own, more, self.weights, self._replace(own, more)))
        return shares

    def collect(self) -> list[Group]:
        """Wait for the oldest rollout, remove it from the rollouts in flight, and return its
        groups, dead ones included. If dead groups are replaced here, raise a GraderError if too
        many grades are errors."""
        groups = self._graded(self._rollouts[0])
        self._rollouts.popleft()
        return groups

    def in_flight(self) -> list[Callable[[], list[Group]]]:
        """Return one function per rollout in flight, oldest first, that waits until the rollout is
        graded and returns its groups."""
        return [partial(self._graded, rollout) for rollout in self._rollouts]

    def _graded(self, rollout: _Rollout) -> list[Group]:
        if rollout.shares:
            while not rollout.is_sampled:
                self._poll()
            for failure in (share.failure for share in rollout.shares):
                if failure is not None:
                    raise failure
            groups = [group for share in rollout.shares for group in share.replacing.groups]
            return sorted(groups, key=lambda group: group.index)
        while rollout.grading is None or not rollout.grading.is_done:
            self._poll()
        answer: list[Group] = rollout.grading.answer
        return answer

    def discard_all(self) -> None:
        """Discard all rollouts and evaluations, unset ``on_wait``, make the generators abort their
        samples in flight, and wait until they have. The caller must not wait for calls that it made
        before."""
        self.on_wait = None
        self.restore([])
        calls = [self.supervisor.call(name, "forget") for name in self.generators]
        while waiting := [call for call in calls if not call.is_done]:
            self.supervisor.poll(waiting, POLL_SECONDS)

    def restore(self, rollouts: Sequence[list[Group]]) -> None:
        """Replace the rollouts in flight by the graded rollouts of a checkpoint, and discard
        evaluations."""
        self._rollouts.clear()
        self._waiting, self._evaluating = [], []
        for groups in rollouts:
            done = Call("checkpoint", "grade", (), answer=groups, is_done=True)
            self._rollouts.append(_Rollout([], [], done))

    def wait(self, call: Call) -> Any:
        """Wait for the result of a call, such as a call of the learner, and return the result.
        Rollouts in flight continue in the meantime."""
        while not call.is_done:
            (self.on_wait or self._poll)(call)
        return call.answer

    def run_in_background(self, work: Callable[[], object]) -> object:
        """Run a function that calls no actor, wait for it, and return its result. If ``on_wait`` is
        set, the function runs in another thread while this thread keeps the generators busy."""
        if self.on_wait is None:
            return work()
        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(work)
            while not future.done():
                if not self.on_wait():
                    wait([future], timeout=POLL_SECONDS)
            return future.result()

    def call_and_wait(self, name: str, method: str, *args: Any) -> Any:
        """Call an actor's method, wait for its result, and return it. Rollouts continue in the
        meantime."""
        return self.wait(self.supervisor.call(name, method, *args))

    def _call_generators(self, method: str, requests: Sequence[Request]) -> list[Call]:
        shares: dict[str, list[Request]] = {}
        for request in requests:
            name = self.generators[request.group % len(self.generators)]
            shares.setdefault(name, []).append(request)
        call = self.supervisor.call
        return [call(name, method, *self.weights, share) for name, share in shares.items()]

    def _poll(self, *others: Call) -> None:
        """Wait at most `POLL_SECONDS` for a call of a rollout in flight or one of ``others``, and
        send samples to the scorer: a rollout when all of its groups are sampled, or each group at
        once if dead groups are replaced."""
        calls = [*others]
        for share in self._unfinished():
            calls += [call for call in (share.sampling, share.grading) if call is not None]
        whole = [rollout for rollout in self._rollouts if not rollout.shares]
        for rollout in whole:
            calls += rollout.samples if rollout.grading is None else [rollout.grading]
        self.supervisor.poll([call for call in calls if not call.is_done], POLL_SECONDS)
        for rollout in whole:
            if rollout.grading is None and all(call.is_done for call in rollout.samples):
                found = {name: cs for call in rollout.samples for name, cs in call.answer.items()}
                responses = [found[f"group-{index}"] for index, _ in rollout.numbered]
                for call in rollout.samples:
                    self.record_samples(call)
                rollout.grading = self.supervisor.call(
                    "scorer", "grade", rollout.numbered, responses
                )
        self._continue_shares()

    def _continue_shares(self) -> None:
        """Make the next call of the share that each generator has begun, or of its next share."""
        for name in self.generators:
            own = [share for share in self._unfinished() if share.generator == name]
            for share in sorted(own, key=lambda share: share.process == 0):  # begun shares first
                self._advance(share)
                if not share.is_done:
                    break

    def _unfinished(self) -> list[_Share]:
        shares = [share for rollout in self._rollouts for share in rollout.shares]
        return [share for share in shares if not share.is_done]

    def _advance(self, share: _Share) -> None:
        """If the last call of a share has returned, make the next one: grade the groups that were
        sampled, or sample the prompts that replace dead groups."""
        if share.sampling is not None and share.sampling.is_done:
            self.record_samples(share.sampling)
            answers, share.sampling = share.sampling.answer, None
            numbers = [int(name.removeprefix("group-")) for name in answers]
            numbered = [(number, share.replacing.prompts[number]) for number in numbers]
            responses = list(answers.values())
            share.grading = self.supervisor.call("scorer", "grade", numbered, responses)
        elif share.grading is not None and share.grading.is_done:
            graded, share.grading = share.grading.answer, None
            try:
                further = share.replacing.replace(graded)
            except GraderError as error:  # raised when the rollout is collected
                share.failure = error
            if not share.is_done:
                self._sample(share, further)
        elif share.process == 0:
            self._sample(share, share.numbered)

    def _sample(self, share: _Share, numbered: NumberedPrompts) -> None:
        """Make the generator of a share sample further prompts. If the generator was restarted, it
        samples the whole share again."""
        args = *share.weights, self.requests(numbered)
        if share.process not in (0, self.supervisor.process_number(share.generator)):
            args = self._restart_share(share)
        share.process = self.supervisor.process_number(share.generator)
        restart = partial(self._restart_share, share)
        share.sampling = self.supervisor.call(
            share.generator, "sample_some", *args, retry_args=restart
        )

    def _restart_share(self, share: _Share) -> tuple[Any, ...]:
        """Reset a share whose generator was restarted and has lost all of its samples. Return the
        arguments of the call that samples the share again."""
        assert self._replace is not None
        share.process = self.supervisor.process_number(share.generator)
        share.replacing = self._replace(share.numbered, share.spare)
        return *share.weights, self.requests(share.numbered)

    def record_samples(self, call: Call) -> None:
        """Record each group that a generator's call has completed in the ledger, and log the first
        use of a new weight version."""
        for name, completions in call.answer.items():
            versions = np.concatenate([c.versions for c in completions])
            newest = int(versions.max(initial=0))
            if newest > self._versions[call.actor]:
                self._versions[call.actor] = newest
                self.log(f"{call.actor} samples with version {newest}")
            self.note(
                "sampled",
                group=int(name.removeprefix("group-")),
                by=call.actor,
                oldest=int(versions.min(initial=self.version)),
                newest=newest,
            )

    # The interface of `Sampler`, for evaluations: all generators share the requests.

    @property
    def unfinished(self) -> int:
        requests = [request for call in self._evaluating for request in call.args[2]]
        return sum(request.n for request in [*self._waiting, *requests])

    @property
    def sampled(self) -> int:
        statuses = [self.supervisor.status(name) for name in self.generators]
        return sum(status.sampled for status in statuses if status is not None)

    def submit(self, request: Request) -> None:
        self._waiting.append(request)

    def step(self) -> list[Completion]:
        """Send the submitted requests of an evaluation to the generators, wait briefly, and return
        the completions that have arrived, which may be none. Evaluations begin only after rollouts
        whose dead groups are replaced at once are sampled."""
        while any(not rollout.is_sampled for rollout in self._rollouts):
            self._poll()  # an evaluation would change the batches and the weights of a share
        if self._waiting:
            self._evaluating += self._call_generators("evaluate", self._waiting)
            self._waiting = []
        if self.on_wait is not None:
            self.on_wait(*self._evaluating)
        else:
            self.supervisor.poll(self._evaluating, POLL_SECONDS)
        done = [call for call in self._evaluating if call.is_done]
        self._evaluating = [call for call in self._evaluating if not call.is_done]
        found: list[Completion] = []
        for call in done:
            found += [completion for own in call.answer.values() for completion in own]
        return found
