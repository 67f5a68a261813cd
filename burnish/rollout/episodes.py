"""Multi-turn episodes: an engine whose samples are conversations with an environment.

An ``EpisodeEngine`` wraps another engine. A sample that it returns is a whole episode: the tokens
of all turns that the policy sampled, with the environment's messages between them as inserted
tokens. To all other code it is an engine like any other, so every loop can use it.

Episodes proceed in lockstep: all unfinished episodes take a turn, then all of their environments
step. The engine therefore computes the same batches whenever the run is repeated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from burnish.engine.protocol import Capabilities, Engine, Probed, Request
from burnish.environments.pool import EnvironmentPool
from burnish.environments.protocol import Observation
from burnish.model.conversation import ConversationFormat
from burnish.model.tokenizer import Tokenizer
from burnish.types import Completion, Finish, IntArray, Limit, SamplingParams, Turn, Weights

CUT = " … [cut]"
"""Marker at the end of a message that was truncated at ``task.observation_tokens``."""


@dataclass(frozen=True)
class EpisodeLimits:
    """Limits of an episode, beside the maximum number of tokens of its response."""

    context: int
    """Maximum number of tokens of prompt and response together."""
    turns: int = 16
    turn_tokens: int | None = None
    """Maximum number of tokens that the policy samples in one turn; None: no own limit."""
    observation_tokens: int | None = None
    """Maximum number of tokens of each message of the environment; None: unlimited."""
    seconds: float | None = None
    """Maximum time of all calls of the environment together; None: no own limit."""


@dataclass(eq=False)
class _Play:
    """An unfinished episode."""

    request: Request
    """The request for episodes that this one belongs to."""
    sample: int
    """Index of the episode in its request."""
    turns: list[Turn] = field(default_factory=list)
    turn: Completion | None = None
    """The response so far, if its current turn is complete; None while the engine samples it."""
    start: int = 0
    """Index in the response at which the current turn begins."""
    seconds: float = 0.0
    """Time of all calls of the environment."""

    @property
    def name(self) -> str:
        """Name of the environment, and of the engine's requests after the first turn."""
        return f"{self.request.request_id}/{self.sample}"


class EpisodeEngine:
    """An engine whose samples are episodes. Requests without an episode are passed through."""

    def __init__(
        self,
        engine: Engine,
        environments: EnvironmentPool,
        tokenizer: Tokenizer,
        conversation: ConversationFormat,
        limits: EpisodeLimits,
    ) -> None:
        self._engine, self._environments, self._limits = engine, environments, limits
        self._tokenizer, self._conversation = tokenizer, conversation
        self._submitted: list[Request] = []
        """Requests whose environments the next step resets."""
        self._plays: dict[tuple[str, int], _Play] = {}
        """Unfinished episodes, by the request and sample of the engine for their current turn."""

    @property
    def capabilities(self) -> Capabilities:
        return self._engine.capabilities

    @property
    def version(self) -> int:
        return self._engine.version

    @property
    def sampled(self) -> int:
        return self._engine.sampled

    @property
    def unfinished(self) -> int:
        waiting = sum(play.turn is not None for play in self._plays.values())
        return self._engine.unfinished + waiting + sum(r.n for r in self._submitted)

    def load(self, weights: Weights) -> None:
        self._engine.load(weights)

    def probe(self) -> Probed:
        return self._engine.probe()

    def submit(self, request: Request) -> None:
        if request.episode is None:
            self._engine.submit(request)
        else:
            self._submitted.append(request)

    def abort(self, request_id: str) -> None:
        self._start()
        self._engine.abort(request_id)
        for key, play in self._plays.items():
            if play.request.request_id != request_id:
                continue
            if play.turn is None:
                self._engine.abort(key[0])
            else:
                play.turn = replace(play.turn, finish=Finish.ABORT)

    def step(self) -> list[Completion]:
        done = self._start()
        for completion in self._engine.step():
            play = self._plays.get((completion.request_id, completion.sample_index))
            if play is None:
                done.append(completion)
            else:
                play.turn = completion
        if not self._plays or any(play.turn is None for play in self._plays.values()):
            return done
        return done + self._advance()

    def _start(self) -> list[Completion]:
        """Reset the environments of new requests and submit the first turns. Return the completions
        of episodes whose environment failed."""
        requests, self._submitted = self._submitted, []
        if not requests:
            return []
        plays = [_Play(request, i) for request in requests for i in range(request.n)]
        starts = [play.request.episode for play in plays]
        observations = self._environments.reset(
            [(p.name, s.row, s.seed) for p, s in zip(plays, starts, strict=True) if s is not None]
        )
        failed: dict[str, str] = {}
        for play, start, found in zip(plays, starts, observations, strict=True):
            assert start is not None
            play.seconds = found.seconds
            if found.error is not None:
                failed[play.name] = found.error
            elif tuple(found.messages) != start.messages:
                failed[play.name] = (
                    "reset returned other messages than before for the same row and seed; draw all "
                    "random choices from the seed"
                )
        for request in requests:
            own = [play for play in plays if play.request is request]
            if not any(play.name in failed for play in own):
                params = self._turn_params(request.params, 0)
                self._engine.submit(replace(request, episode=None, params=params))
                self._plays |= {(request.request_id, play.sample): play for play in own}
                continue
            for play in own:
                if play.name not in failed:
                    self._submit(play, None)
        self._environments.end(failed)
        return [self._failed(play, failed[play.name]) for play in plays if play.name in failed]

    def _advance(self) -> list[Completion]:
        """Step the environments of all episodes, whose turns are complete; submit the next turns.
        Return the episodes that have ended."""
        plays, self._plays = list(self._plays.values()), {}
        done, playing = [], []
        for play in plays:
            turn = play.turn
            assert turn is not None
            if turn.finish is Finish.ABORT:
                done.append(self._finished(play, Finish.ABORT))
                continue
            play.turns.append(self._read(play, turn))
            # A turn that ended by itself counts also if the next one has no room.
            limit = self._reached(play, turn) if turn.finish is Finish.LENGTH else None
            if limit is not None:
                done.append(self._finished(play, Finish.LENGTH, limit))
            else:
                playing.append(play)
        messages = [{"role": "assistant", "content": play.turns[-1].text} for play in playing]
        named = [play.name for play in playing]
        actions = list(zip(named, messages, strict=True))
        observations = self._environments.step(actions) if actions else []
        for play, found in zip(playing, observations, strict=True):
            play.turns[-1] = self._answered(play.turns[-1], found)
            play.seconds += found.seconds
            if found.error is not None or found.done:
                done.append(self._finished(play, Finish.STOP))
            elif limit := self._go_on(play):
                done.append(self._finished(play, Finish.LENGTH, limit))
        self._environments.end(f"{c.request_id}/{c.sample_index}" for c in done)
        return done

    def _go_on(self, play: _Play) -> Limit | None:
        """Submit the next turn of an episode, or return the limit that prevents it."""
        turn, seconds = play.turn, self._limits.seconds
        assert turn is not None
        if len(play.turns) >= self._limits.turns:
            return Limit.TURNS
        if seconds is not None and play.seconds >= seconds:
            return Limit.TIME
        begun = self._extended(turn, play.turns[-1].messages)
        if limit := self._reached(play, begun):
            return limit
        self._submit(play, begun)
        return None

    def _submit(self, play: _Play, begun: Completion | None) -> None:
        """Submit the next turn of an episode, which continues ``begun``, or its first turn."""
        play.start = 0 if begun is None else len(begun.token_ids)
        request = replace(
            play.request,
            request_id=play.name,
            n=1,
            params=self._turn_params(play.request.params, play.start),
            episode=None,
            begun=begun,
            first=play.request.first + play.sample,
            turn=play.start,
        )
        self._engine.submit(request)
        play.turn = None
        self._plays[request.request_id, 0] = play

    def _turn_params(self, params: SamplingParams, start: int) -> SamplingParams:
        """Return the sampling parameters of a turn that begins after ``start`` tokens."""
        own = self._limits.turn_tokens
        most = params.max_tokens if own is None else min(params.max_tokens, start + own)
        return replace(params, max_tokens=most)

    def _reached(self, play: _Play, response: Completion) -> Limit | None:
        """Return the limit that leaves no room for another token after a response; None if there is
        room."""
        length, request = len(response.token_ids), play.request
        if length >= request.params.max_tokens:
            return Limit.TOKENS
        if len(request.prompt) + length >= self._limits.context:
            return Limit.CONTEXT
        return None

    def _read(self, play: _Play, turn: Completion) -> Turn:
        """Return the current turn of an episode, without the environment's answer."""
        text = self._text(turn.token_ids[play.start :], turn.stop)
        return Turn(play.start, len(turn.token_ids), text, (), None, {}, None)

    def _text(self, ids: IntArray, stop: str | int | None) -> str:
        """Return the text of a turn, up to the end of the stop string that its last token has
        completed."""
        if not isinstance(stop, str):
            return self._tokenizer.decode(ids, skip_special=True)
        read, text, fresh = self._tokenizer.stream(), "", ""
        for token in ids.tolist():
            fresh = read(token) or ""
            text += fresh
        at = text.find(stop, max(0, len(text) - len(fresh) - len(stop) + 1))
        return text[: at + len(stop)]

    def _answered(self, turn: Turn, found: Observation) -> Turn:
        """Return a turn with the environment's answer, whose long messages are truncated."""
        messages = tuple({**m, "content": self._cut(m["content"])} for m in found.messages)
        return turn._replace(
            messages=messages, reward=found.reward, metrics=found.metrics, error=found.error
        )

    def _cut(self, text: str) -> str:
        most = self._limits.observation_tokens
        if most is None or len(text) <= most:  # a token has at least one character
            return text
        ids = self._tokenizer.encode(text, add_special=False)
        return text if len(ids) <= most else self._tokenizer.decode(ids[:most]) + CUT

    def _extended(self, turn: Completion, messages: Sequence[Mapping[str, str]]) -> Completion:
        """Return a response that continues after the environment's messages. If the policy did not
        end its turn with the template's end token, that token is inserted before them."""
        ended = turn.token_ids[-1] == self._conversation.end_id
        inserted = [] if ended else [self._conversation.inserted_end]
        inserted.append(self._conversation.between(messages))
        ids = np.concatenate(inserted)
        count = len(ids)
        return replace(
            turn,
            token_ids=np.concatenate([turn.token_ids, ids]).astype(np.int32),
            logprobs=np.append(turn.logprobs, np.zeros(count, np.float32)),
            versions=np.append(turn.versions, np.repeat(turn.versions[-1:], count)),
            sampled=np.append(turn.sampled, np.zeros(count, np.bool_)),
        )

    def _finished(self, play: _Play, finish: Finish, limit: Limit | None = None) -> Completion:
        """Build the completion of an episode. ``limit`` has truncated it."""
        assert play.turn is not None
        return replace(
            play.turn,
            request_id=play.request.request_id,
            sample_index=play.sample,
            params=play.request.params,
            finish=finish,
            turns=tuple(play.turns),
            limit=limit,
        )

    def _failed(self, play: _Play, error: str) -> Completion:
        """Build the completion of an episode whose environment did not start."""
        request, nothing = play.request, np.zeros(0, np.int32)
        return Completion(
            request.request_id,
            play.sample,
            token_ids=nothing,
            logprobs=np.zeros(0, np.float32),
            versions=nothing,
            sampled=np.zeros(0, np.bool_),
            params=request.params,
            finish=Finish.STOP,
            stop=None,
            text="",
            turns=(Turn(0, 0, "", (), None, {}, error),),
        )
