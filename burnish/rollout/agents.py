"""Episodes of agents: an engine whose samples are runs of a user's function that calls the policy
through an OpenAI-compatible server.

    agent's process ──HTTP──► server's process ──► AgentEngine ──► the engine that samples
         ▲                                              │
         └── EnvironmentPool (limits, result) ──────────┘

A sample that an ``AgentEngine`` returns is a whole episode: all token sequences of all of its
conversations (`burnish.rollout.histories`). To all other code it is an engine like any other.

In lockstep, requests wait until every live episode has one or has ended, and no queued episode may
begin. They are then sampled together, in the order of the episodes. Freely, each request is sampled
as soon as it arrives.

    state of an episode           ends when
    queued                        fewer than `AgentLimits.live` episodes are live
    its process begins            the process is ready
    its agent works               it sends a request, or returns, raises or exceeds a limit
    its requests wait             lockstep: all live episodes have one; free: at once
    the engine samples answers    they are complete; the agent works again

If the server dies, the live episodes are begun again, with the same random draws. So is an episode
whose process was killed by someone else. An episode that is lost twice is an error.
"""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import wait
from typing import Any, Literal

import numpy as np

from burnish.console.progress import tell, tell_turn
from burnish.console.text import counted
from burnish.engine.protocol import Capabilities, Engine, Probed, Request
from burnish.environments.agent import unlearned_traces
from burnish.environments.pool import UNREPLAYED, EnvironmentPool
from burnish.environments.protocol import Observation
from burnish.errors import EngineError, ModelError
from burnish.machine.process import TAIL_LINES
from burnish.rollout.agent_answers import AgentAnswers, AnsweredChoice
from burnish.rollout.agent_server import AgentServer
from burnish.rollout.histories import Draft, EpisodeRecord, Kind, ended
from burnish.types import (
    Completion,
    Finish,
    Limit,
    SamplingParams,
    Turn,
    Weights,
)

Pace = Literal["lockstep", "free"]
"""Whether requests wait until every live episode has one."""
WAIT_SECONDS = 0.2
"""Longest time that a step waits for agents if the engine has no work."""
TOO_LONG = "context_length_exceeded"
"""Error code of a request that a limit of the episode leaves no room for."""
FOLLOWING: tuple[Kind, ...] = ("continued", "branched", "rewritten", "template")
"""Kinds of requests that have a message of the assistant."""
JUDGED = 16
"""Number of such requests after which a note may say that an agent rewrites its history."""
NO_REQUEST = "the agent ended without an answered request to the model"
LOST_TWICE = "the server's process was killed twice during the episode"


@dataclass(frozen=True)
class AgentLimits:
    """Limits of an episode, beside the maximum number of tokens of its responses."""

    context: int
    """Maximum number of tokens of a sequence: its prompt and response together."""
    total: int | None = None
    """Maximum number of tokens of all sequences of an episode together, with their prompts; None:
    unlimited."""
    turns: int = 64
    """Maximum number of requests of an episode that are accepted: they are answered, or being
    answered. Repeated and refused ones do not count."""
    turn_tokens: int | None = None
    """Maximum number of tokens of an answer; None: no own limit."""
    seconds: float = 300.0
    """Maximum time for which an agent works, without the time in which it waits for answers."""
    live: int = 64
    """Maximum number of episodes that run at the same time; the others are queued."""


@dataclass(eq=False)
class _Play:
    """An unfinished episode."""

    request: Request
    """The request for episodes that this one belongs to."""
    sample: int
    """Index of the episode in its request."""
    record: EpisodeRecord
    session: str = ""
    """Name of the episode's session at the server, and of its process."""
    starts: int = 0
    """How often the agent has been started."""
    asked: list[_Asked] = field(default_factory=list)
    """Requests that are not answered, in the order of their arrival."""
    answered: dict[str, _Asked] = field(default_factory=dict)
    """The last request with each body, which a repeated request is answered from."""
    requests: int = 0
    """Number of requests, without repeated ones."""
    accepted: int = 0
    """Number of requests whose answer is sampled, or was."""
    repeated: int = 0
    """Number of repeated requests, which were answered from the record."""
    used: int = 0
    """Number of tokens of all sequences, with their prompts."""
    responded: int = 0
    """Number of tokens of all responses."""
    reserved: int = 0
    """Number of tokens of responses that the answers which are being sampled may add."""
    reserved_used: int = 0
    """The same number with the prompts of their sequences."""
    is_blocked: bool = False
    """Whether the next request waits for the length of an answer that is being sampled."""
    sampling: int = 0
    """Number of answers that are being sampled."""
    result: Observation | None = None
    """The agent's result; None while it runs."""
    limit: Limit | None = None
    """The limit because of which a request was refused; None if none was."""
    is_aborted: bool = False
    worked: float = 0.0
    """Seconds for which the agent has worked, up to ``working_since``."""
    working_since: float | None = None
    """Time since which the agent works; None while it waits for an answer."""

    @property
    def is_over(self) -> bool:
        """Whether the agent has ended, so that no request is accepted any more."""
        return self.result is not None or self.is_aborted


@dataclass(eq=False)
class _Asked:
    """A request of an agent."""

    play: _Play
    fields: Mapping[str, Any]
    """The request as the server has sent it."""
    recipients: list[tuple[int, int]]
    """Calls that await the answer: the number of the server, and of the call."""
    waiting: deque[int]
    """Choices that are not sampled yet."""
    choices: dict[int, AnsweredChoice] = field(default_factory=dict)
    reply: Mapping[str, Any] | None = None
    """The answer; None before it is complete."""
    is_accepted: bool = False
    """Whether it counts in ``task.turns``: a choice is sampled, or was."""


@dataclass(eq=False)
class _Sampling:
    """A choice that the engine samples."""

    asked: _Asked
    choice: int
    draft: Draft
    responds: int
    """Number of tokens of responses that the answer may add, with inserted tokens."""
    uses: int
    """The same number with the prompt of a new sequence."""
    cut: Limit | None
    """The limit of the episode that the answer reaches if it has its maximum length; None if its
    own limits are not larger."""


class AgentEngine:
    """An engine whose samples are episodes of an agent. Requests without an episode are passed
    through."""

    def __init__(
        self,
        engine: Engine,
        agents: EnvironmentPool,
        server: AgentServer,
        answers: AgentAnswers,
        limits: AgentLimits,
        pace: Pace = "lockstep",
        *,
        follows: bool = False,
    ) -> None:
        """``agents``: the processes of the agents. ``answers`` renders their messages.
        ``follows``: whether a history that the chat template rewrites begins a new sequence."""
        self.engine = engine
        """The engine that samples the answers."""
        self._agents, self.server, self._answers = agents, server, answers
        self._limits, self._follows = limits, follows
        self._is_free = pace == "free"
        self._queue: deque[_Play] = deque()
        self._live: dict[str, _Play] = {}
        """Episodes that have a process, by their session, in the order in which they began."""
        self._sampling: dict[tuple[str, int], _Sampling] = {}
        """Choices that the engine samples, by its request and sample."""
        self._discarded: set[tuple[str, int]] = set()
        """Samples of the engine that belong to no episode any more."""
        self._undelivered: list[Completion] = []
        self._number = 0
        self._overridden: set[str] = set()
        """Sampling settings of requests that a note has named."""
        self._followed = self._rewritten = 0
        """Numbers of the answers, up to the note about them, to histories with an answer before,
        and of those whose earlier answers the agent has changed."""
        self._is_noted = False

    @property
    def capabilities(self) -> Capabilities:
        return self.engine.capabilities

    @property
    def version(self) -> int:
        return self.engine.version

    @property
    def sampled(self) -> int:
        return self.engine.sampled

    @property
    def unfinished(self) -> int:
        own = len(self._sampling) + len(self._discarded)
        episodes = len(self._live) + len(self._queue) + len(self._undelivered)
        return self.engine.unfinished - own + episodes

    def load(self, weights: Weights) -> None:
        self.engine.load(weights)

    def probe(self) -> Probed:
        return self.engine.probe()

    def submit(self, request: Request) -> None:
        if request.episode is None:
            self.engine.submit(request)
            return
        self._queue += [_Play(request, i, self._record(request)) for i in range(request.n)]

    def _record(self, request: Request) -> EpisodeRecord:
        return EpisodeRecord(request.params, follows=self._follows)

    def abort(self, request_id: str) -> None:
        self.engine.abort(request_id)  # a request that was passed through
        for play in [p for p in self._queue if p.request.request_id == request_id]:
            self._queue.remove(play)
            play.is_aborted = True
            self._deliver(play)
        plays = [p for p in self._live.values() if p.request.request_id == request_id]
        for play in plays:
            play.is_aborted = True
        for play in plays:
            self._stop_sampling(play)
        self._finish()

    def step(self) -> list[Completion]:
        """Advance the answers that are being sampled, begin queued episodes, take requests and
        results of agents, and submit requests. If the engine has no work, wait for an agent."""
        passed = self._advance()
        self._begin()
        if self._live:
            is_busy = bool(passed or self._undelivered or self.engine.unfinished)
            is_busy |= not self._is_free and self._is_round_complete()
            self._listen(0.0 if is_busy else WAIT_SECONDS)
            self._finish()
            self._begin()  # in lockstep, the next round has the requests of these episodes, too
            self._submit()
        done, self._undelivered = self._undelivered, []
        return passed + done

    def _advance(self) -> list[Completion]:
        """Step the engine, and record the answers that are complete; return the completions of
        requests without an episode. If the engine fails, no episode can go on."""
        if not self.engine.unfinished:
            return []
        passed = []
        try:
            completions = self.engine.step()
        except Exception:
            self._agents.end(self._live)
            raise
        for completion in completions:
            key = completion.request_id, completion.sample_index
            if key in self._sampling:
                self._record_answer(self._sampling.pop(key), completion)
            elif key in self._discarded:
                self._discarded.remove(key)
            else:
                passed.append(completion)
        return passed

    def _begin(self) -> None:
        """Begin queued episodes, as many as may be live."""
        count = min(len(self._queue), self._limits.live - len(self._live))
        self._start([self._queue.popleft() for _ in range(count)])

    def _start(self, plays: Sequence[_Play]) -> None:
        """Start the processes of episodes, each under a session that nobody can guess."""
        if not plays:
            return
        self.server.start()
        for play in plays:
            name = play.request.request_id
            play.session = f"{name}.{play.sample}-{secrets.token_hex(12)}"
            play.starts += 1
            play.working_since = time.monotonic()
        self._live |= {play.session: play for play in plays}
        episodes = [(play, play.request.episode) for play in plays]
        self._agents.begin_reset([(p.session, e.row, e.seed) for p, e in episodes if e is not None])

    def _listen(self, seconds: float) -> None:
        """Take the requests and the results that have arrived; if there is none, wait for the first
        one, up to ``seconds``."""
        if seconds:
            tell_turn(f"waiting for {counted(len(self._live), 'agent')}")
            began = time.perf_counter()
            wait([*self.server.readable, *self._agents.readable], seconds)
            self._agents.waited += time.perf_counter() - began
        found = self.server.receive()
        if found is None:
            self._lose_server()
        for fields in found or ():
            self._take(fields)
        lost = dict[_Play, Observation]()
        for session, observation in self._agents.poll(0.0).items():
            play = self._live[session]
            if play.result is not None:  # it has ended because of a limit
                continue
            if observation.error is None and not observation.done:  # its process has begun
                play.working_since = time.monotonic()
                message = {"role": "assistant", "content": self.server.base_url(session)}
                self._agents.begin_step([(session, message)])
            elif observation.was_killed and not play.is_over:
                error = f"the agent's process was lost twice: {observation.error}"
                lost[play] = replace(observation, error=error)
            else:
                play.result = observation
                self._stop_sampling(play)
        if lost:
            what = f"the processes of {counted(len(lost), 'agent')} were killed"
            self._begin_again(lost, what)
        self._expire(time.monotonic())

    def _expire(self, now: float) -> None:
        """End the episodes whose agents have worked for too long."""
        seconds = self._limits.seconds
        for play in self._live.values():
            since = play.working_since
            if not play.is_over and since is not None and play.worked + now - since > seconds:
                late = f"the agent took more than {seconds:g} s of its own (task.wall_seconds)"
                play.result = Observation([], None, True, {}, late)
                self._stop_sampling(play)

    def _lose_server(self) -> None:
        """Begin the live episodes again, because their agents may have lost an answer."""
        twice = Observation([], None, True, {}, LOST_TWICE)
        plays = [play for play in self._live.values() if not play.is_over]
        self._begin_again(dict.fromkeys(plays, twice), "the server of agents died")

    def _begin_again(self, lost: Mapping[_Play, Observation], what: str) -> None:
        """Begin episodes again that have lost their process or their server: each of them once.
        ``lost`` has the results of those that had begun again before; ``what`` has happened."""
        count = sum(play.starts == 1 for play in lost)
        tell("note", f"note: {what}; {counted(count, 'episode')} restart")
        self._agents.end([play.session for play in lost], waits=False)
        for play, result in lost.items():
            play.result = result
        again = []
        for play in lost:
            self._stop_sampling(play)
            if play.starts > 1:
                continue
            for key in [k for k, one in self._sampling.items() if one.asked.play is play]:
                del self._sampling[key]
                self._discarded.add(key)
            del self._live[play.session]
            record = self._record(play.request)
            again.append(_Play(play.request, play.sample, record, starts=play.starts))
        self._start(again)

    def _stop_sampling(self, play: _Play) -> None:
        """Refuse the requests of an episode that are not sampled, and abort the others; the engine
        returns what it has sampled."""
        for asked in list(play.asked):  # a refused request is removed
            asked.waiting.clear()
            if not any(one.asked is asked for one in self._sampling.values()):
                self._refuse(asked, 403, "the episode has ended")
        for name in {name for (name, _), one in self._sampling.items() if one.asked.play is play}:
            # Episodes of one group may share a request of the engine.
            if all(one.asked.play.is_over for (n, _), one in self._sampling.items() if n == name):
                self.engine.abort(name)

    def _take(self, fields: Mapping[str, Any]) -> None:
        """Take a message of the server: a request of an agent, or the end of its connection, which
        changes nothing, because what was sampled is learned."""
        if "gone" in fields:
            return
        call = self.server.generation, int(fields["call"])
        play = self._live.get(fields.get("session") or "")
        if play is None or play.is_over:
            message = "this episode has ended, or there is none with this base URL"
            self.server.answer(*call, _error(403, message))
            return
        body = self._answers.body_key(fields)
        earlier = play.answered.get(body) if fields.get("retry") else None
        if earlier is not None:
            play.repeated += 1
            if earlier.reply is None:
                earlier.recipients.append(call)
            else:
                self.server.answer(*call, earlier.reply)
            return
        play.requests += 1
        asked = _Asked(play, fields, [call], deque(range(self._answers.choices(fields))))
        play.answered[body] = asked
        play.asked.append(asked)
        if play.working_since is not None:
            # This process may have done something else since the request arrived at the server.
            arrived = float(fields.get("arrived") or time.monotonic())
            play.worked += max(0.0, arrived - play.working_since)
            play.working_since = None
        self._note_overrides(fields)

    def _note_overrides(self, fields: Mapping[str, Any]) -> None:
        """Print a note, once per setting, that the recipe overrides a request's setting."""
        given = {name for name in self._answers.overridden(fields) if name not in self._overridden}
        if given:
            self._overridden |= given
            tell(
                "note",
                f"note: requests of the agent set {', '.join(sorted(given))}; the recipe's "
                "[rollout] settings hold instead",
            )

    def _is_round_complete(self) -> bool:
        """Return whether no answer is being sampled, and every live episode has a request or has
        ended."""
        plays = self._live.values()
        return not self._sampling and all(play.asked or play.is_over for play in plays)

    def _submit(self) -> None:
        """Submit the requests that wait: in lockstep, if the round is complete. Episodes that have
        ended are delivered first, because the caller may then submit further ones, which belong to
        the round."""
        if not self._is_free and (self._undelivered or not self._is_round_complete()):
            return
        plays = list(self._live.values())
        whole: list[tuple[_Play, Request, _Sampling]] = []
        for play in plays:
            for asked in list(play.asked):
                while asked.waiting and not play.is_blocked:
                    ready = self._prepare(play, asked)
                    if ready is None:
                        break
                    whole.append(ready)
        for run in self._runs(whole):
            self._submit_run(run)

    def _prepare(self, play: _Play, asked: _Asked) -> tuple[_Play, Request, _Sampling] | None:
        """Return the engine's request for the next choice of an agent's request; None if it was
        refused, or waits for answers that are being sampled."""
        choice, most = asked.waiting[0], play.request.params.max_tokens
        if not asked.is_accepted and play.accepted >= self._limits.turns:
            self._reach(asked, Limit.TURNS, f"{self._limits.turns} requests (task.turns)")
            return None
        try:
            draft = self._answers.draft(play.record, asked.fields, choice)
        except ModelError as error:
            self._refuse(asked, 400, str(error))
            return None
        limits, added = self._limits, draft.added
        inserted = added if draft.begun is not None else 0
        room = limits.context - draft.length
        left = most - play.responded - inserted
        free = left - play.reserved
        if limits.total is not None:
            free = min(free, limits.total - play.used - added - play.reserved_used)
        if room < 1 or free < 1:
            play.record.discard(draft)
            if room >= 1 and play.sampling:  # an answer may be shorter than it may be
                play.is_blocked = True
                return None
            limit, full = Limit.TOKENS, f"{limits.total} tokens (train.micro_tokens)"
            if room < 1:
                limit, full = Limit.CONTEXT, f"{limits.context} tokens (the model's context)"
            elif left < 1:
                full = f"{most} tokens of responses (rollout.max_tokens)"
            self._reach(asked, limit, full)
            return None
        share = max(1, free // len(asked.waiting))
        cut: Limit | None = Limit.TOKENS if share < room else Limit.CONTEXT
        longest = min(room, share)
        for own in (limits.turn_tokens, self._answers.most_tokens(asked.fields)):
            if own is not None and own <= longest:
                longest, cut = own, None
        asked.waiting.popleft()
        if not asked.is_accepted:
            asked.is_accepted = True
            play.accepted += 1
        play.reserved += longest + inserted
        play.reserved_used += longest + added
        play.sampling += 1
        request = replace(
            play.request,
            request_id=self._name(play),
            prompt=draft.sequence.prompt,
            n=1,
            params=self._params(play, asked, draft, longest),
            episode=None,
            begun=draft.begun,
            continues=True,
            first=play.request.first + play.sample,
            turn=draft.start,
            position=draft.position,
        )
        responds, uses = longest + inserted, longest + added
        return play, request, _Sampling(asked, choice, draft, responds, uses, cut)

    def _params(self, play: _Play, asked: _Asked, draft: Draft, longest: int) -> SamplingParams:
        """Return the sampling parameters of an answer of at most ``longest`` tokens."""
        params = play.request.params
        think = params.think_tokens
        if think is not None and think >= longest:  # no room for an answer
            think = None
        return replace(
            params,
            max_tokens=draft.start + longest,
            min_tokens=min(params.min_tokens, longest),
            think_tokens=think,
            stop=self._answers.stops(params.stop, asked.fields),
        )

    def _name(self, play: _Play) -> str:
        self._number += 1
        return f"{play.request.request_id}/{play.sample}/{self._number}"

    def _runs(
        self, whole: Sequence[tuple[_Play, Request, _Sampling]]
    ) -> Iterable[list[tuple[_Play, Request, _Sampling]]]:
        """Yield the requests that the engine samples together: those of consecutive episodes of one
        group with the same prompt, so that decoding reads it once."""
        run: list[tuple[_Play, Request, _Sampling]] = []
        for one in whole:
            if run and not _is_same(run[-1], one):
                yield run
                run = []
            run.append(one)
        if run:
            yield run

    def _submit_run(self, run: Sequence[tuple[_Play, Request, _Sampling]]) -> None:
        request = replace(run[0][1], n=len(run))
        try:
            self.engine.submit(request)
        except EngineError as error:  # it concerns this request alone
            for play, _, sampling in run:
                self._release(play, sampling)
                play.record.discard(sampling.draft)
                self._refuse(sampling.asked, 400, str(error))
            return
        for i, (_, _, sampling) in enumerate(run):
            self._sampling[request.request_id, i] = sampling

    def _release(self, play: _Play, sampling: _Sampling) -> None:
        play.reserved -= sampling.responds
        play.reserved_used -= sampling.uses
        play.sampling -= 1
        play.is_blocked = False

    def _record_answer(self, sampling: _Sampling, completion: Completion) -> None:
        """Record an answer that the engine has sampled, and reply to its request if it is the last
        choice."""
        asked, draft = sampling.asked, sampling.draft
        play = asked.play
        self._release(play, sampling)
        if completion.finish is Finish.ABORT and not play.is_over:
            play.is_aborted = True  # its log-probabilities were not finite
        if len(completion.token_ids) == draft.start:
            play.record.discard(draft)
        else:
            found = self._answers.choice(draft, completion, asked.fields, sampling.choice)
            added = len(completion.token_ids) - draft.start
            play.used += draft.added + added
            play.responded += added + (0 if draft.begun is None else draft.added)
            play.record.record(draft, completion, found.raw, found.message)
            asked.choices[sampling.choice] = found
            if completion.finish is Finish.LENGTH:
                play.limit = play.limit or sampling.cut
        if play.is_over:
            self._stop_sampling(play)
        elif asked.reply is None and self._is_complete(asked):
            self._reply(asked, self._answers.reply(list(_sorted(asked.choices))))

    def _reach(self, asked: _Asked, limit: Limit, full: str) -> None:
        """Refuse a request because of a limit of its episode. Choices that were sampled before are
        the answer, and the others are empty."""
        asked.play.limit = asked.play.limit or limit
        if asked.choices:
            while asked.waiting:
                asked.choices[asked.waiting.popleft()] = self._answers.no_choice()
            if self._is_complete(asked):
                self._reply(asked, self._answers.reply(list(_sorted(asked.choices))))
            return
        self._refuse(asked, 400, f"the episode has no room left: it may have {full}", TOO_LONG)

    def _is_complete(self, asked: _Asked) -> bool:
        """Return whether a request has all of its choices."""
        return len(asked.choices) == self._answers.choices(asked.fields)

    def _refuse(self, asked: _Asked, status: int, message: str, code: str | None = None) -> None:
        asked.waiting.clear()
        if asked.reply is not None:  # because of another choice
            return
        if asked.is_accepted:
            asked.is_accepted = False
            asked.play.accepted -= 1
        self._reply(asked, _error(status, message, code))

    def _reply(self, asked: _Asked, reply: Mapping[str, Any]) -> None:
        """Send the answer to a request to all calls that await it."""
        asked.reply = reply
        if asked in asked.play.asked:
            asked.play.asked.remove(asked)
        if not asked.play.asked:
            asked.play.working_since = time.monotonic()
        for call in asked.recipients:
            self.server.answer(*call, reply)

    def _finish(self) -> None:
        """Deliver the episodes that have ended and of which no answer is being sampled, and end
        their processes."""
        for play in [p for p in self._live.values() if p.is_over and not p.sampling]:
            del self._live[play.session]
            self._agents.end([play.session], waits=False)
            self._deliver(play)

    def _deliver(self, play: _Play) -> None:
        """Deliver the completion of an episode."""
        self._note_rewriting(play.record.kinds)
        result = play.result or Observation([], None, True, {})
        traces = unlearned_traces(result.messages) if result.error is None else []
        error = result.error and _of_agent(result.error, result.output)
        finish, limit = Finish.STOP, None
        if play.is_aborted:
            finish = Finish.ABORT
        elif play.limit is not None:
            finish, limit = Finish.LENGTH, play.limit
            if result.was_raised and play.record.has_answers:
                error = None  # the agent could not go on without an answer
        turn = Turn(0, 0, "", (), result.reward, self._metrics(play, result), error, result.seconds)
        sample = play.request.request_id, play.sample
        completion = play.record.completion(*sample, turn, traces)
        if not len(completion.token_ids) and error is None and not play.is_aborted:
            # Never a reward of 0 for an agent that did not ask.
            last = turn._replace(error=NO_REQUEST, reward=None)
            completion = play.record.completion(*sample, last, traces)
        self._undelivered.append(ended(completion, finish, limit))

    def _note_rewriting(self, kinds: Mapping[Kind, int]) -> None:
        """Print a note, once, if the histories of agents seldom continue the recorded answers.
        ``kinds`` counts the answers of an episode that has ended."""
        if self._is_noted:
            return
        self._followed += sum(kinds.get(kind, 0) for kind in FOLLOWING)
        self._rewritten += kinds.get("rewritten", 0)
        if self._followed >= JUDGED and 2 * self._rewritten > self._followed:
            self._is_noted = True
            tell(
                "note",
                f"note: the agent rewrites its history: {self._rewritten} of {self._followed} "
                "requests that have messages of the assistant do not continue a recorded answer, "
                "so each of them begins a new sequence, and its prompt is computed again; send "
                "all earlier messages back unchanged, with the same tools, and append new ones",
            )

    def _metrics(self, play: _Play, result: Observation) -> dict[str, float]:
        """Return the metrics of an episode: the agent's own, and how it used the endpoint."""
        kinds = play.record.kinds
        own = {
            "requests": play.requests,
            "repeated_requests": play.repeated,
            "sequences": sum(s.response is not None for s in play.record.sequences),
            "rewritten": kinds.get("rewritten", 0),
            "restarts": play.starts - 1 if play.starts else 0,
        }
        return {name: float(value) for name, value in own.items()} | result.metrics


def _is_same(
    before: tuple[_Play, Request, _Sampling], after: tuple[_Play, Request, _Sampling]
) -> bool:
    """Return whether two requests may be samples of one request of the engine."""
    (a, one, _), (b, two, _) = before, after
    return (
        a.request is b.request
        and a.sample + 1 == b.sample
        and one.begun is None
        and two.begun is None
        and one.position == two.position
        and one.params == two.params
        and np.array_equal(one.prompt, two.prompt)
    )


def _sorted(choices: Mapping[int, AnsweredChoice]) -> Iterable[AnsweredChoice]:
    return (choices[index] for index in sorted(choices))


def _error(status: int, message: str, code: str | None = None) -> dict[str, Any]:
    return {"error": {"status": status, "message": message, "code": code}}


def _of_agent(error: str, output: str) -> str:
    """Return an error of an agent's process in the words of agents, with the end of its output."""
    said = (
        error.replace("the environment's process", "the agent's process")
        .replace("step took", "the agent took")
        .replace("during step", "while the agent ran")
        .replace(UNREPLAYED, "")
    )
    lines = output.splitlines()[-TAIL_LINES:]
    return "\n".join(
        [f"{said}; the end of its output:", *(f"  {x}" for x in lines)] if lines else [said]
    )
