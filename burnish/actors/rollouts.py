"""Generators and a scorer in processes of their own, and the rollouts that they work on.

Groups go to generators by number, and every call carries the weights that it samples with. So a
rollout's bits depend on its groups, its weights and the number of generators, and on nothing else;
a generator that dies is started again and samples the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from burnish.actors.supervisor import PULSE, Call, Supervisor
from burnish.actors.transport import Parcel
from burnish.draws import Stream
from burnish.engine.protocol import Request
from burnish.errors import GraderError
from burnish.rollout.filling import Replacing
from burnish.rollout.rollout import Asked, Note, ignore, requests_of
from burnish.types import Completion, Group, SamplingParams

Published = tuple[Parcel | None, Any]
"""Weights that were published: their parcel, and a reference to its bytes."""


@dataclass
class _Rollout:
    asked: Asked
    samples: list[Call]
    grading: Call | None = None
    shares: list[_Share] = field(default_factory=list)
    """Empty unless dead groups are replaced at once."""

    @property
    def is_sampled(self) -> bool:
        return all(share.is_done for share in self.shares)


@dataclass
class _Share:
    """A generator's share of a rollout whose dead groups are replaced at once. The generator has
    no other work meanwhile, and waits while groups are graded, so that the share's bits depend on
    its prompts and its weights alone."""

    generator: str
    asked: Asked
    spare: Asked
    weights: Published
    replacing: Replacing
    life: int = 0
    """The process of the generator that has the requests; 0 if it was not called yet."""
    sampling: Call | None = None
    grading: Call | None = None
    failure: GraderError | None = None
    """Why it ended early; None if it did not."""

    @property
    def is_done(self) -> bool:
        return self.failure is not None or self.replacing.is_done


class Fleet:
    """Samples and grades rollouts, oldest first. It is a ``Server`` too, for evaluations."""

    def __init__(
        self,
        supervisor: Supervisor,
        generators: Sequence[str],
        *,
        size: int,
        params: SamplingParams,
        tell: Callable[[str], None] = lambda text: None,
        replace: Callable[[Asked, Asked], Replacing] | None = None,
    ) -> None:
        """``size``: samples of a group. ``tell`` is given a line for every new version.
        ``replace`` begins to replace dead groups of prompts by spare ones; None if they are not
        replaced at once."""
        self._replace = replace
        self.tell, self._versions = tell, dict.fromkeys(generators, -1)
        self.supervisor, self.generators = supervisor, generators
        self._size, self._params = size, params
        self.version = 0
        self.weights: Published = None, None
        """The weights that were published last."""
        self.note: Note = ignore
        """Is told of groups and of actors' work."""
        self.meanwhile: Callable[..., bool] | None = None
        """Is called while the run waits for something else: it has generators go on, and waits a
        little for them and for the calls that it is given. It returns False if there is no call to
        wait for. None if the rollouts in flight are all there is to do."""
        self._rollouts: deque[_Rollout] = deque()
        self._waiting: list[Request] = []
        self._evaluating: list[Call] = []

    def listen(self, note: Note) -> None:
        self.note = self.supervisor.note = note

    def publish(self, parcel: Parcel, data: Any) -> None:
        """From now on the requests are sampled with these weights."""
        self.tell(f"learner publishes version {parcel.version}")
        self.version = parcel.version
        self.weights = parcel, data

    def in_use(self) -> list[str]:
        """The spaces of weights that were published last, or that a call in flight names."""
        calls = [call for name in self.generators for call in self.supervisor.open(name)]
        given = [*self.weights, *(arg for call in calls for arg in call.args)]
        given += [share.weights[0] for share in self._unfinished()]
        return [one.space for one in given if isinstance(one, Parcel)]

    def requests(self, asked: Asked) -> list[Request]:
        return requests_of(asked, self._size, self._params, Stream.TRAIN)

    def issue(self, asked: Asked, spare: Asked = (), *, first: bool = False) -> None:
        """Begins a rollout with the weights that were published last; ``first``: it is collected
        next. ``spare``: prompts that are asked in the place of dead groups as soon as those are
        found."""
        if self._replace is None:
            begun = _Rollout(asked, self._call("sample", self.requests(asked)))
        else:
            begun = _Rollout(asked, [], shares=self._shares(asked, spare))
        (self._rollouts.appendleft if first else self._rollouts.append)(begun)
        self._go_on()

    def _shares(self, asked: Asked, spare: Asked) -> list[_Share]:
        assert self._replace is not None
        shares = []
        for place, name in enumerate(self.generators):
            own, more = (
                [one for one in given if one[0] % len(self.generators) == place]
                for given in (asked, spare)
            )
            if own:
                shares.append(_Share(name, own, more, self.weights, self._replace(own, more)))
        return shares

    def collect(self) -> list[Group]:
        """Waits for the oldest rollout, and removes it."""
        groups = self._graded(self._rollouts[0])
        self._rollouts.popleft()
        return groups

    def in_flight(self) -> list[Callable[[], list[Group]]]:
        """A function for each rollout in flight, oldest first, that waits for its groups."""
        return [partial(self._graded, rollout) for rollout in self._rollouts]

    def _graded(self, rollout: _Rollout) -> list[Group]:
        if rollout.shares:
            while not rollout.is_sampled:
                self._pump()
            for failure in (share.failure for share in rollout.shares):
                if failure is not None:
                    raise failure
            groups = [group for share in rollout.shares for group in share.replacing.groups]
            return sorted(groups, key=lambda group: group.index)
        while rollout.grading is None or not rollout.grading.is_done:
            self._pump()
        answer: list[Group] = rollout.grading.answer
        return answer

    def forget(self) -> None:
        """Gives up all rollouts and evaluations, and ends the samples that generators have in
        flight. Whoever has called them forgets the calls."""
        self.meanwhile = None
        self.restore([])
        calls = [self.supervisor.call(name, "forget") for name in self.generators]
        while waiting := [call for call in calls if not call.is_done]:
            self.supervisor.poll(waiting, PULSE)

    def restore(self, rollouts: Sequence[list[Group]]) -> None:
        """Puts rollouts in flight that are graded already: a checkpoint held them."""
        self._rollouts.clear()
        self._waiting, self._evaluating = [], []
        for groups in rollouts:
            done = Call("checkpoint", "grade", (), answer=groups, is_done=True)
            self._rollouts.append(_Rollout([], [], done))

    def wait(self, call: Call) -> Any:
        """The answer of another call; rollouts go on meanwhile."""
        while not call.is_done:
            (self.meanwhile or self._pump)(call)
        return call.answer

    def beside(self, work: Callable[[], object]) -> object:
        """Does work that calls no actor; generators go on meanwhile."""
        if self.meanwhile is None:
            return work()
        with ThreadPoolExecutor(1) as pool:
            doing = pool.submit(work)
            while not doing.done():
                if not self.meanwhile():
                    wait([doing], timeout=PULSE)
            return doing.result()

    def ask(self, name: str, method: str, *args: Any) -> Any:
        """Makes a call, and waits for its answer; rollouts go on meanwhile."""
        return self.wait(self.supervisor.call(name, method, *args))

    def _call(self, method: str, requests: Sequence[Request]) -> list[Call]:
        shares: dict[str, list[Request]] = {}
        for request in requests:
            name = self.generators[request.group % len(self.generators)]
            shares.setdefault(name, []).append(request)
        call = self.supervisor.call
        return [call(name, method, *self.weights, share) for name, share in shares.items()]

    def _pump(self, *others: Call) -> None:
        """Waits a little, and sends what was sampled to be graded: a rollout once it is whole, or
        each group at once if dead ones are replaced."""
        calls = [*others]
        for share in self._unfinished():
            calls += [call for call in (share.sampling, share.grading) if call is not None]
        whole = [rollout for rollout in self._rollouts if not rollout.shares]
        for rollout in whole:
            calls += rollout.samples if rollout.grading is None else [rollout.grading]
        self.supervisor.poll([call for call in calls if not call.is_done], PULSE)
        for rollout in whole:
            if rollout.grading is None and all(call.is_done for call in rollout.samples):
                found = {name: cs for call in rollout.samples for name, cs in call.answer.items()}
                responses = [found[f"group-{index}"] for index, _ in rollout.asked]
                for call in rollout.samples:
                    self.sampled_by(call)
                rollout.grading = self.supervisor.call("scorer", "grade", rollout.asked, responses)
        self._go_on()

    def _go_on(self) -> None:
        """Has each generator go on with the share that it has begun, or begin its next one."""
        for name in self.generators:
            own = [share for share in self._unfinished() if share.generator == name]
            for share in sorted(own, key=lambda share: share.life == 0):  # begun ones first
                self._advance(share)
                if not share.is_done:
                    break

    def _unfinished(self) -> list[_Share]:
        shares = [share for rollout in self._rollouts for share in rollout.shares]
        return [share for share in shares if not share.is_done]

    def _advance(self, share: _Share) -> None:
        """Makes the next call of a share if its last one is answered."""
        if share.sampling is not None and share.sampling.is_done:
            self.sampled_by(share.sampling)
            answers, share.sampling = share.sampling.answer, None
            numbers = [int(name.removeprefix("group-")) for name in answers]
            asked = [(number, share.replacing.prompts[number]) for number in numbers]
            responses = list(answers.values())
            share.grading = self.supervisor.call("scorer", "grade", asked, responses)
        elif share.grading is not None and share.grading.is_done:
            graded, share.grading = share.grading.answer, None
            try:
                further = share.replacing.replace(graded)
            except GraderError as error:  # whoever collects the rollout is told
                share.failure = error
            if not share.is_done:
                self._sample(share, further)
        elif share.life == 0:
            self._sample(share, share.asked)

    def _sample(self, share: _Share, asked: Asked) -> None:
        """Calls the generator of a share with further prompts."""
        args = *share.weights, self.requests(asked)
        if share.life not in (0, self.supervisor.life(share.generator)):
            args = self._anew(share)
        share.life = self.supervisor.life(share.generator)
        share.sampling = self.supervisor.call(
            share.generator, "sample_some", *args, renew=partial(self._anew, share)
        )

    def _anew(self, share: _Share) -> tuple[Any, ...]:
        """What a generator's new process is called with: it has lost all samples of the share, and
        samples the same again."""
        assert self._replace is not None
        share.life = self.supervisor.life(share.generator)
        share.replacing = self._replace(share.asked, share.spare)
        return *share.weights, self.requests(share.asked)

    def sampled_by(self, call: Call) -> None:
        """Notes the groups that a generator has answered."""
        for name, completions in call.answer.items():
            versions = np.concatenate([c.versions for c in completions])
            newest = int(versions.max(initial=0))
            if newest > self._versions[call.actor]:
                self._versions[call.actor] = newest
                self.tell(f"{call.actor} samples with version {newest}")
            self.note(
                "sampled",
                group=int(name.removeprefix("group-")),
                by=call.actor,
                oldest=int(versions.min(initial=self.version)),
                newest=newest,
            )

    # Evaluations: requests are submitted, and answered by all generators.

    @property
    def unfinished(self) -> int:
        requests = [request for call in self._evaluating for request in call.args[2]]
        return sum(request.n for request in [*self._waiting, *requests])

    @property
    def sampled(self) -> int:
        pulses = [self.supervisor.pulse(name) for name in self.generators]
        return sum(pulse.sampled for pulse in pulses if pulse is not None)

    def submit(self, request: Request) -> None:
        self._waiting.append(request)

    def step(self) -> list[Completion]:
        while any(not rollout.is_sampled for rollout in self._rollouts):
            self._pump()  # an evaluation would change the batches of a share, and its weights
        if self._waiting:
            self._evaluating += self._call("evaluate", self._waiting)
            self._waiting = []
        if self.meanwhile is not None:
            self.meanwhile(*self._evaluating)
        else:
            self.supervisor.poll(self._evaluating, PULSE)
        done = [call for call in self._evaluating if call.is_done]
        self._evaluating = [call for call in self._evaluating if not call.is_done]
        found: list[Completion] = []
        for call in done:
            found += [completion for own in call.answer.values() for completion in own]
        return found
