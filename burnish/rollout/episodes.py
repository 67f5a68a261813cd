"""Multi-turn episodes: an engine whose samples are conversations with an environment.

An ``EpisodeEngine`` wraps another engine. A sample that it returns is a whole episode: the tokens
of all turns that the policy sampled, with the environment's messages between them as inserted
tokens. To all other code it is an engine like any other, so every loop can use it.

If the episode follows a chat template that writes earlier turns differently after a message, the
next turn begins a new token sequence of the same sample, whose prompt is the template's text. Each
sampled token thus stays in the context in which it was sampled.

Episodes proceed in lockstep: all unfinished episodes take a turn, then all of their environments
step. The engine therefore computes the same batches whenever the run is repeated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from burnish.console.progress import tell_turn
from burnish.console.text import counted
from burnish.engine.protocol import Capabilities, Engine, Probed, Request
from burnish.environments.pool import EnvironmentPool
from burnish.environments.protocol import Observation
from burnish.model.conversation import ConversationFormat
from burnish.model.tokenizer import Tokenizer
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
    """The current sequence so far, if its current turn is complete; None while the engine samples
    it."""
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
        *,
        follows: bool = False,
    ) -> None:
        """``follows``: whether turns are sampled after the chat template's text of all messages, so
        that a template that rewrites earlier turns begins a new sequence. Otherwise an episode is
        one sequence, to which messages are appended."""
        self._engine, self._environments, self._limits = engine, environments, limits
        self._tokenizer, self._conversation, self._follows = tokenizer, conversation, follows
        self._submitted: list[Request] = []
        """Requests whose environments the next step resets."""
        self._plays: dict[tuple[str, int], _Play] = {}
        """Unfinished episodes, by the request and sample of the engine for their current turn."""
        self._failures: list[Completion] = []
        """Episodes that have failed to start, which the next step returns."""

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
        outside = len(self._failures) + sum(r.n for r in self._submitted)
        return self._engine.unfinished + waiting + outside

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
        self._start()
        done, self._failures = self._failures, []
        for completion in self._engine.step():
            play = self._plays.get((completion.request_id, completion.sample_index))
            if play is None:
                done.append(completion)
            else:
                play.turn = completion
        if not self._plays or any(play.turn is None for play in self._plays.values()):
            return done
        return done + self._advance()

    def _start(self) -> None:
        """Reset the environments of new requests and submit the first turns."""
        requests, self._submitted = self._submitted, []
        if not requests:
            return
        plays = [_play(request, i) for request in requests for i in range(request.n)]
        starts = [play.request.episode for play in plays]
        observations = self._environments.reset(
            [(p.name, s.row, s.seed) for p, s in zip(plays, starts, strict=True) if s is not None]
        )
        plays = [self._opened(*pair) for pair in zip(plays, observations, strict=True)]
        failed = {
            play.name: error
            for play, found in zip(plays, observations, strict=True)
            if (error := found.error or self._opening_error(play))
        }
        for request in requests:
            own = [play for play in plays if play.request is request]
            if not any(play.name in failed or play.sequences for play in own):
                first = replace(request, episode=None, params=self._turn_params(own[0], 0))
                self._engine.submit(first)
                self._plays |= {(request.request_id, play.sample): play for play in own}
                continue
            for play in own:
                if play.name not in failed:
                    self._submit(play, None)
        self._environments.end(failed)
        self._failures += [self._failed(p, failed[p.name]) for p in plays if p.name in failed]
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
            is_cut = turn.finish is Finish.LENGTH
            limit = self._reached(play, len(turn.token_ids)) if is_cut else None
            if limit is not None:
                done.append(self._finished(play, Finish.LENGTH, limit))
            else:
                playing.append(play)
        messages = [{"role": "assistant", "content": play.turns[-1].text} for play in playing]
        named = [play.name for play in playing]
        actions = list(zip(named, messages, strict=True))
        if actions:
            self._tell_turn(playing, f", waiting for {counted(len(actions), 'environment')}")
        observations = self._environments.step(actions) if actions else []
        for play, found in zip(playing, observations, strict=True):
            play.turns[-1] = self._answered(play.turns[-1], found)
            play.seconds += found.seconds
            if found.error is not None or found.done:
                done.append(self._finished(play, Finish.STOP))
            elif limit := self._go_on(play):
                done.append(self._finished(play, Finish.LENGTH, limit))
        self._environments.end(f"{c.request_id}/{c.sample_index}" for c in done)
        self._tell_turn()
        return done

    def turns_of(self, request_id: str) -> tuple[Turn, ...]:
        """Return the complete turns of an unfinished episode, the first one of a request."""
        plays = (play for play in self._plays.values() if play.request.request_id == request_id)
        return tuple(play.turns) if (play := next(plays, None)) else ()

    def _tell_turn(self, answered: Sequence[_Play] = (), doing: str = "") -> None:
        """Display the turn of the episodes: the one that the policy takes, or that the environments
        of ``answered`` answer."""
        numbers = [len(play.turns) for play in answered]
        numbers += [len(play.turns) + 1 for play in self._plays.values()]
        if numbers:
            first, last = min(numbers), max(numbers)
            own = f"turn {last}" if first == last else f"turns {first} to {last}"
            tell_turn(f"{own} of {self._limits.turns}{doing}")

    def _go_on(self, play: _Play) -> Limit | None:
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
            begun = self._extended(turn, messages)
        else:
            prompt = self._conversation.open(following.messages)
            following = following.in_new_sequence(prompt)
        limit = self._reached(following, 0 if begun is None else len(begun.token_ids))
        if limit is None:
            self._submit(following, begun)
        return limit

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
            first=play.request.first + play.sample,
            turn=play.start,
            position=play.position,
        )
        self._engine.submit(request)
        play.turn = None
        self._plays[request.request_id, 0] = play

    def _turn_params(self, play: _Play, start: int) -> SamplingParams:
        """Return the sampling parameters of a turn that begins after ``start`` tokens of its
        sequence."""
        params, limits = play.request.params, self._limits
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
        text = self._text(turn.token_ids[play.start :], turn.stop)
        start, end = play.position + play.start, play.position + len(turn.token_ids)
        return Turn(start, end, text, (), None, {}, None)

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
        parts = [*play.earlier, play.turn]
        streams: dict[str, Any] = {
            name: np.concatenate([getattr(c, name) for c in parts]) for name in STREAMS
        }
        return replace(
            play.turn,
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


def _play(request: Request, sample: int) -> _Play:
    assert request.episode is not None
    return _Play(request, sample, request.prompt, request.episode.opening)
