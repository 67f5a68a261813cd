"""Multi-turn episodes: an engine whose samples are conversations with an environment.

An ``EpisodeEngine`` wraps another engine. A sample that it returns is a whole episode: the tokens
of all turns that the policy sampled, with the environment's messages between them as inserted
tokens. To all other code it is an engine like any other, so every loop can use it.

If the episode follows a chat template that writes earlier turns differently after a message, the
next turn begins a new token sequence of the same sample, whose prompt is the template's text. Each
sampled token thus stays in the context in which it was sampled.

Episodes proceed in lockstep or freely (`Pace`). In lockstep, all live episodes take a turn, then
all of their environments step, so the engine computes the same batches whenever the run is
repeated. Freely, an episode's environment steps as soon as its turn is complete, while the engine
samples the turns of other episodes.

    state of an episode          ends when
    queued                       fewer than `EpisodeLimits.live` episodes are live
    its environment is called    the environment answers, or its process fails
    the engine samples a turn    the turn is complete
    its turn is complete         the turns of all live episodes are (lockstep), or at once (free)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, Literal

import numpy as np

from burnish.console.progress import tell_turn
from burnish.console.text import counted
from burnish.engine.protocol import Capabilities, Engine, Probed, Request
from burnish.environments.pool import EnvironmentPool
from burnish.environments.protocol import Observation
from burnish.model.conversation import ConversationFormat
from burnish.model.tokenizer import Tokenizer
from burnish.rollout.turns import extended, inserted_after, turn_text, without_tokens
from burnish.types import (
    Completion,
    Finish,
    IntArray,
    Limit,
    SamplingParams,
    SequenceStart,
    Turn,
    Weights,
)

Pace = Literal["lockstep", "free"]
"""Whether episodes wait for each other after each turn."""
WAIT_SECONDS = 0.2
"""Longest time that a step waits for environments, if the engine has no work and episodes proceed
freely."""
STREAMS = ("token_ids", "logprobs", "versions", "sampled")
"""Fields of a completion with one value per token."""
CUT = " … [cut]"
"""Marker at the end of a message that was truncated at ``task.observation_tokens``."""


@dataclass(frozen=True)
class EpisodeLimits:
    """Limits of an episode, beside the maximum number of tokens of its response."""

    context: int
    """Maximum number of tokens of a sequence: its prompt and response together."""
    total: int | None = None
    """Maximum number of tokens of all sequences of an episode together, with their prompts; None:
    unlimited."""
    turns: int = 16
    turn_tokens: int | None = None
    """Maximum number of tokens that the policy samples in one turn; None: no own limit."""
    observation_tokens: int | None = None
    """Maximum number of tokens of each message of the environment; None: unlimited."""
    seconds: float | None = None
    """Maximum time of all calls of the environment together; None: no own limit."""
    live: int = 256
    """Maximum number of episodes that run at the same time; the others are queued."""


@dataclass(eq=False)
class _Play:
    """An unfinished episode."""

    request: Request
    """The request for episodes that this one belongs to."""
    sample: int
    """Index of the episode in its request."""
    prompt: IntArray
    """Prompt of the current sequence."""
    messages: list[Mapping[str, str]]
    """All messages before the current turn."""
    turns: list[Turn] = field(default_factory=list)
    turn: Completion | None = None
    """The current sequence up to the end of its last complete turn; None before the first one is
    complete, and while the engine samples the next one."""
    start: int = 0
    """Index in the current sequence at which the current turn begins."""
    seconds: float = 0.0
    """Time of all calls of the environment."""
    earlier: tuple[Completion, ...] = ()
    """The sequences before the current one."""
    position: int = 0
    """Number of response tokens of the sequences before the current one."""
    used: int = 0
    """Number of all tokens of the sequences before the current one."""
    sequences: tuple[SequenceStart, ...] = ()
    """Sequences that do not follow the prompt of the request."""
    first_messages: tuple[Mapping[str, str], ...] | None = None
    """First messages, if they differ from those in the prompt of the request."""

    @property
    def name(self) -> str:
        """Name of the environment, and of the engine's requests after the first turn."""
        return f"{self.request.request_id}/{self.sample}"

    def in_new_sequence(self, prompt: IntArray) -> _Play:
        """Return the episode with its next turn in a new sequence, which has its own prompt."""
        ended = [] if self.turn is None else [self.turn]
        position = self.position + sum(len(c.token_ids) for c in ended)
        return replace(
            self,
            prompt=prompt,
            turn=None,
            earlier=(*self.earlier, *ended),
            position=position,
            used=self.used + sum(len(self.prompt) + len(c.token_ids) for c in ended),
            sequences=(*self.sequences, SequenceStart(position, prompt)),
        )


class EpisodeEngine:
    """An engine whose samples are episodes. Requests without an episode are passed through."""

    def __init__(
        self,
        engine: Engine,
        environments: EnvironmentPool,
        tokenizer: Tokenizer,
        conversation: ConversationFormat,
        limits: EpisodeLimits,
        pace: Pace = "lockstep",
        *,
        follows: bool = False,
    ) -> None:
        """``follows``: whether turns are sampled after the chat template's text of all messages, so
        that a template that rewrites earlier turns begins a new sequence. Otherwise an episode is
        one sequence, to which messages are appended."""
        self._is_free = pace == "free"
        self.engine = engine
        """The engine that samples the turns."""
        self._environments, self._limits = environments, limits
        self._tokenizer, self._conversation, self._follows = tokenizer, conversation, follows
        self._queue: deque[_Play] = deque()
        """Episodes that have not begun."""
        self._live: dict[str, _Play] = {}
        """Episodes that have an environment, by its name, in the order in which they began."""
        self._sampling: dict[tuple[str, int], _Play] = {}
        """The live episodes whose turn the engine samples, by its request and sample."""
        self._undelivered: list[Completion] = []
        """Episodes that have ended since the last step."""
        self._left: list[str] = []
        """Names of environments whose episodes have ended; they are ended together."""

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
        elsewhere = len(self._live) - len(self._sampling)
        return self.engine.unfinished + elsewhere + len(self._queue) + len(self._undelivered)

    def load(self, weights: Weights) -> None:
        self.engine.load(weights)

    def probe(self) -> Probed:
        return self.engine.probe()

    def submit(self, request: Request) -> None:
        if request.episode is None:
            self.engine.submit(request)
        else:
            self._queue += [_play(request, i) for i in range(request.n)]

    def abort(self, request_id: str) -> None:
        for name in {request_id, *self._names_of(request_id)}:
            self.engine.abort(name)  # the engine returns what it has sampled
        queued = [play for play in self._queue if play.request.request_id == request_id]
        sampling = set(self._sampling.values())
        for play in [*queued, *self._live.values()]:
            if play.request.request_id == request_id and play not in sampling:
                self._end(play, Finish.ABORT)
        self._queue = deque(play for play in self._queue if play not in queued)
        self._end_environments()

    def step(self) -> list[Completion]:
        """Begin queued episodes, let the engine advance the turns, and let environments answer
        those that are complete: in lockstep when all are, otherwise without waiting, unless the
        engine has no work."""
        self._begin()
        passed: list[Completion] = []
        complete: list[_Play] = []
        if self.engine.unfinished:
            for completion in self._step_engine():
                key = completion.request_id, completion.sample_index
                if key not in self._sampling:
                    passed.append(completion)
                    continue
                play = self._sampling.pop(key)
                play.turn = completion
                if not self._end_turn(play, completion):
                    complete.append(play)
        if self._is_free:
            self._exchange(complete, 0.0 if passed or self.engine.unfinished else WAIT_SECONDS)
        elif not self._sampling:
            self._answer(list(self._live.values()))
        self._end_environments()
        done, self._undelivered = self._undelivered, []
        return passed + done

    def _step_engine(self) -> list[Completion]:
        """Step the engine; if it fails, no episode can go on, and all environments end."""
        try:
            return self.engine.step()
        except Exception:
            self._environments.end(self._live)
            raise

    def _begin(self) -> None:
        """Reset the environments of queued episodes, as many as may be live, and submit their first
        turns."""
        while self._queue and len(self._live) < self._limits.live:
            count = min(len(self._queue), self._limits.live - len(self._live))
            plays = [self._queue.popleft() for _ in range(count)]
            self._live |= {play.name: play for play in plays}
            starts = list(map(_start_of, plays))
            if self._is_free:
                self._environments.begin_reset(starts)
            else:
                self._start(zip(plays, self._environments.reset(starts), strict=True))

    def _start(self, found: Iterable[tuple[_Play, Observation]]) -> None:
        """Submit the first turns of episodes whose environments were reset, and end those that
        can't begin."""
        started = []
        for unopened, observation in found:
            play = self._live[unopened.name] = self._opened(unopened, observation)
            error = observation.error or self._opening_error(play)
            if error is None:
                started.append(play)
            else:
                self._leave(play, self._failed(play, error))
        self._submit_first(started)
        self._tell_turn()

    def _opened(self, play: _Play, found: Observation) -> _Play:
        """Return an episode whose environment was reset. If its first messages are not those in its
        request's prompt, it gets a prompt of its own."""
        play, episode = replace(play, seconds=found.seconds), play.request.episode
        assert episode is not None
        if found.error is not None or tuple(found.messages) == episode.messages:
            return play
        episode = episode._replace(messages=tuple(found.messages))
        play = replace(play, messages=episode.opening, first_messages=episode.messages)
        return play.in_new_sequence(self._conversation.open(play.messages))

    def _opening_error(self, play: _Play) -> str | None:
        """Return why an episode with a prompt of its own can't begin; None if it can."""
        if not play.sequences:
            return None
        if self._environments.deterministic:
            return (
                "reset returned other messages than before for the same row and seed; draw all "
                "random choices from the seed, or set deterministic = False"
            )
        if self._reached(play, 0):
            return (
                f"the first messages have {len(play.prompt)} tokens, which leaves no room for a "
                f"turn in the model's context of {self._limits.context}; shorten them"
            )
        return None

    def _submit_first(self, plays: Iterable[_Play]) -> None:
        """Submit the first turns of episodes: those of consecutive samples as one request, so that
        decoding reads their prompt once. An episode with a prompt of its own has its own
        request."""
        numbered = enumerate(plays)
        for _, run in groupby(numbered, lambda one: (one[1].request, one[1].sample - one[0])):
            own = [play for _, play in run]
            request, first, count = own[0].request, own[0].sample, len(own)
            if count == 1 < request.n or any(play.sequences for play in own):
                for play in own:
                    self._submit(play, None)
                continue
            name = request.request_id
            if count < request.n:
                name += f"/{first}-{first + count - 1}"
            params = self._turn_params(own[0], 0)
            whole = replace(request, episode=None, params=params, continues=True)
            number = request.first + first
            self.engine.submit(replace(whole, request_id=name, n=count, first=number))
            self._sampling |= {(name, i): play for i, play in enumerate(own)}

    def _answer(self, plays: Sequence[_Play]) -> None:
        """Step the environments of episodes whose turns are complete, and submit the next turns of
        those that go on."""
        if not plays:
            return
        self._tell_turn(f", waiting for {counted(len(plays), 'environment')}")
        observations = self._environments.step([(play.name, _action(play)) for play in plays])
        for play, found in zip(plays, observations, strict=True):
            self._go_on(play, found)
        self._tell_turn()

    def _exchange(self, plays: Sequence[_Play], seconds: float) -> None:
        """Begin to step the environments of episodes whose turns are complete, and process the
        answers of all environments that have arrived. If there is none, wait up to ``seconds`` for
        the first one."""
        if plays:
            self._environments.begin_step([(play.name, _action(play)) for play in plays])
        found = [(self._live[name], o) for name, o in self._environments.poll(seconds).items()]
        self._start((play, answer) for play, answer in found if not play.turns)
        for play, answer in found:
            if play.turn is not None:
                self._go_on(play, answer)
        if found:
            self._tell_turn()

    def _end_turn(self, play: _Play, turn: Completion) -> bool:
        """Read the turn that an episode has completed; end the episode if it was aborted or cut off
        by a limit of the episode. Return whether the episode has ended."""
        if turn.finish is Finish.ABORT:
            self._end(play, Finish.ABORT)
            return True
        play.turns.append(self._read(play, turn))
        # A turn that ended by itself counts also if the next one has no room.
        is_cut = turn.finish is Finish.LENGTH
        limit = self._reached(play, len(turn.token_ids)) if is_cut else None
        if limit is not None:
            self._end(play, Finish.LENGTH, limit)
        return limit is not None

    def _go_on(self, play: _Play, found: Observation) -> None:
        """Record the environment's answer to a turn, and submit the next turn or end the
        episode."""
        play.turns[-1] = self._answered(play.turns[-1], found)
        play.seconds += found.seconds
        if found.error is not None or found.done:
            self._end(play, Finish.STOP)
        elif limit := self._next_turn(play):
            self._end(play, Finish.LENGTH, limit)

    def _next_turn(self, play: _Play) -> Limit | None:
        """Submit the next turn of an episode, or return the limit that prevents it."""
        turn, seconds = play.turn, self._limits.seconds
        assert turn is not None
        if len(play.turns) >= self._limits.turns:
            return Limit.TURNS
        if seconds is not None and play.seconds >= seconds:
            return Limit.TIME
        messages = play.turns[-1].messages
        spoken = [*play.messages, {"role": "assistant", "content": play.turns[-1].text}]
        following = replace(play, messages=[*spoken, *messages])
        begun = None
        if not self._follows or self._conversation.appends(spoken, messages):
            last = int(turn.token_ids[-1])
            begun = extended(turn, inserted_after(last, self._conversation, messages))
        else:
            prompt = self._conversation.open(following.messages)
            following = following.in_new_sequence(prompt)
        limit = self._reached(following, 0 if begun is None else len(begun.token_ids))
        if limit is None:
            self._live[following.name] = following
            self._submit(following, begun)
        return limit

    def _end(self, play: _Play, finish: Finish, limit: Limit | None = None) -> None:
        """End an episode with what it has sampled. ``limit`` has truncated it."""
        self._leave(play, self._finished(play, finish, limit))

    def _leave(self, play: _Play, completion: Completion) -> None:
        """Deliver the completion of an episode that has ended, and end its environment."""
        if self._live.pop(play.name, None) is not None:
            self._left.append(play.name)
        self._undelivered.append(completion)

    def _end_environments(self) -> None:
        """End the environments of episodes that have ended."""
        names, self._left = self._left, []
        if names:
            self._environments.end(names, waits=not self._is_free)

    def _names_of(self, request_id: str) -> set[str]:
        """Return the names of the engine's requests for turns of a request's episodes."""
        return {key[0] for key, p in self._sampling.items() if p.request.request_id == request_id}

    def turns_of(self, request_id: str) -> tuple[Turn, ...]:
        """Return the turns of an unfinished episode, the first one of a request, that its
        environment has answered."""
        plays = (play for play in self._live.values() if play.request.request_id == request_id)
        play = next(plays, None)
        if play is None:
            return ()
        return tuple(play.turns if play.turn is None else play.turns[:-1])

    def _tell_turn(self, doing: str = "") -> None:
        """Display the turns that live episodes take, and ``doing``, what the policy waits for."""
        numbers = [len(play.turns) + (play.turn is None) for play in self._live.values()]
        if numbers:
            first, last = min(numbers), max(numbers)
            own = f"turn {last}" if first == last else f"turns {first} to {last}"
            tell_turn(f"{own} of {self._limits.turns}{doing}")

    def _submit(self, play: _Play, begun: Completion | None) -> None:
        """Submit the next turn of an episode, which continues ``begun``, or the first turn of a
        sequence."""
        play.start = 0 if begun is None else len(begun.token_ids)
        request = replace(
            play.request,
            request_id=play.name,
            prompt=play.prompt,
            n=1,
            params=self._turn_params(play, play.start),
            episode=None,
            begun=begun,
            continues=True,
            first=play.request.first + play.sample,
            turn=play.start,
            position=play.position,
        )
        self.engine.submit(request)
        play.turn = None
        self._sampling[request.request_id, 0] = play

    def _turn_params(self, play: _Play, start: int) -> SamplingParams:
        """Return the sampling parameters of the next turn of an episode, which begins after
        ``start`` tokens of its sequence."""
        params, limits = play.request.params, self._limits
        heat = params.temperature_of(len(play.turns))
        params = replace(params, temperature=heat, turn_temperatures=())
        most = params.max_tokens - play.position
        if limits.turn_tokens is not None:
            most = min(most, start + limits.turn_tokens)
        if limits.total is not None:
            most = min(most, limits.total - play.used - len(play.prompt))
        think = params.think_tokens
        if think is not None and think >= most - start:  # no room for an answer
            think = None
        fewest = min(params.min_tokens, most - start)
        return replace(params, max_tokens=most, min_tokens=fewest, think_tokens=think)

    def _reached(self, play: _Play, length: int) -> Limit | None:
        """Return the limit that leaves no room for another token after ``length`` tokens of the
        current sequence; None if there is room."""
        if play.position + length >= play.request.params.max_tokens:
            return Limit.TOKENS
        length += len(play.prompt)
        if length >= self._limits.context:
            return Limit.CONTEXT
        total = self._limits.total
        return Limit.TOKENS if total is not None and play.used + length >= total else None

    def _read(self, play: _Play, turn: Completion) -> Turn:
        """Return the current turn of an episode, without the environment's answer."""
        text = turn_text(self._tokenizer, turn.token_ids[play.start :], turn.stop)
        start, end = play.position + play.start, play.position + len(turn.token_ids)
        return Turn(start, end, text, (), None, {}, None)

    def _answered(self, turn: Turn, found: Observation) -> Turn:
        """Return a turn with the environment's answer, whose long messages are truncated."""
        messages = tuple({**m, "content": self._cut(m["content"])} for m in found.messages)
        return turn._replace(
            messages=messages,
            reward=found.reward,
            metrics=found.metrics,
            error=found.error,
            seconds=found.seconds,
        )

    def _cut(self, text: str) -> str:
        most = self._limits.observation_tokens
        if most is None or len(text) <= most:  # a token has at least one character
            return text
        ids = self._tokenizer.encode(self._tokenizer.mask(text), add_special=False)
        return text if len(ids) <= most else self._tokenizer.decode(ids[:most]) + CUT

    def _finished(self, play: _Play, finish: Finish, limit: Limit | None = None) -> Completion:
        """Build the completion of an episode. ``limit`` has truncated it."""
        last = play.turn or _nothing(play)
        parts = [*play.earlier, last]
        streams: dict[str, Any] = {
            name: np.concatenate([getattr(c, name) for c in parts]) for name in STREAMS
        }
        return replace(
            last,
            **streams,
            request_id=play.request.request_id,
            sample_index=play.sample,
            params=play.request.params,
            finish=finish,
            text="".join(c.text for c in parts),
            turns=tuple(play.turns),
            limit=limit,
            sequences=tuple(play.sequences),
            first_messages=play.first_messages,
        )

    def _failed(self, play: _Play, error: str) -> Completion:
        """Build the completion of an episode whose environment did not start."""
        return replace(_nothing(play), turns=(Turn(0, 0, "", (), None, {}, error),))


def _nothing(play: _Play) -> Completion:
    """Return the completion of an episode without tokens."""
    return without_tokens(play.request.request_id, play.sample, play.request.params)


def _play(request: Request, sample: int) -> _Play:
    assert request.episode is not None
    return _Play(request, sample, request.prompt, request.episode.opening)


def _start_of(play: _Play) -> tuple[str, Mapping[str, Any], int]:
    """Return the name of an episode's environment, and what it is reset with."""
    start = play.request.episode
    assert start is not None
    return play.name, start.row, start.seed


def _action(play: _Play) -> dict[str, str]:
    """Return the message of an episode's last turn."""
    return {"role": "assistant", "content": play.turns[-1].text}
