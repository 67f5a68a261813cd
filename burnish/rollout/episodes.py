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

from burnish.console.progress import tell_turn
from burnish.console.text import counted
from burnish.engine.protocol import Capabilities, Engine, Probed, Request
from burnish.environments.pool import EnvironmentPool
from burnish.environments.protocol import Observation
from burnish.model.conversation import ConversationFormat
from burnish.model.tokenizer import Tokenizer
from burnish.types import Completion, Finish, SamplingParams, Turn, Weights

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
                first = replace(request, episode=None, params=self._turn_params(request, 0))
                self._engine.submit(first)
                self._plays |= {(request.request_id, play.sample): play for play in own}
                continue
            for play in own:
                if play.name not in failed:
                    self._submit(play, None)
        self._environments.end(failed)
        self._tell_turn()
        return [
            self._finished(play, _nothing(play), Finish.STOP, failed[play.name])
            for play in plays
            if play.name in failed
        ]

    def _advance(self) -> list[Completion]:
        """Step the environments of all episodes, whose turns are complete; submit the next turns.
        Return the episodes that have ended."""
        plays, self._plays = list(self._plays.values()), {}
        done, playing = [], []
        for play in plays:
            turn = play.turn
            assert turn is not None
            if turn.finish is Finish.ABORT or self._is_full(play.request, len(turn.token_ids)):
                is_aborted = turn.finish is Finish.ABORT
                if not is_aborted:
                    play.turns.append(self._read(play, turn))
                done.append(self._finished(play, turn, turn.finish))
            else:
                play.turns.append(self._read(play, turn))
                playing.append(play)
        messages = [{"role": "assistant", "content": play.turns[-1].text} for play in playing]
        named = [play.name for play in playing]
        actions = list(zip(named, messages, strict=True))
        if actions:
            self._tell_turn(playing, f", waiting for {counted(len(actions), 'environment')}")
        observations = self._environments.step(actions) if actions else []
        for play, found in zip(playing, observations, strict=True):
            turn = play.turn
            assert turn is not None
            play.turns[-1] = self._answered(play.turns[-1], found)
            if found.error is not None or found.done:
                done.append(self._finished(play, turn, Finish.STOP))
                continue
            begun = self._extended(turn, play.turns[-1].messages)
            if len(play.turns) >= self._limits.turns or self._is_full(
                play.request, len(begun.token_ids)
            ):
                done.append(self._finished(play, turn, Finish.LENGTH))
            else:
                self._submit(play, begun)
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

    def _submit(self, play: _Play, begun: Completion | None) -> None:
        """Submit the next turn of an episode, which continues ``begun``, or its first turn."""
        length = 0 if begun is None else len(begun.token_ids)
        request = replace(
            play.request,
            request_id=play.name,
            n=1,
            params=self._turn_params(play.request, length),
            episode=None,
            begun=begun,
            first=play.request.first + play.sample,
        )
        self._engine.submit(request)
        play.turn = None
        self._plays[request.request_id, 0] = play

    def _turn_params(self, request: Request, length: int) -> SamplingParams:
        """Return the sampling parameters of a turn that begins after ``length`` tokens."""
        params, most = request.params, self._limits.turn_tokens
        if most is None:
            return params
        return replace(params, max_tokens=min(params.max_tokens, length + most))

    def _is_full(self, request: Request, length: int) -> bool:
        """Return whether a response of ``length`` tokens has no room for another one."""
        context = self._limits.context - len(request.prompt)
        return length >= min(request.params.max_tokens, context)

    def _read(self, play: _Play, turn: Completion) -> Turn:
        """Return the current turn of an episode, without the environment's answer."""
        before = play.turns[-1].end if play.turns else 0
        start = before + int(np.argmax(turn.sampled[before:]))
        text = self._tokenizer.decode(turn.token_ids[start:], skip_special=True)
        return Turn(start, len(turn.token_ids), text, (), None, {}, None)

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
        """Return a response that continues after the environment's messages. The end token is
        inserted before them if the policy did not end its turn with it."""
        inserted = self._conversation.between(messages)
        if turn.token_ids[-1] != self._conversation.end_id:
            inserted = np.concatenate([[np.int32(self._conversation.end_id)], inserted])
        count = len(inserted)
        return replace(
            turn,
            token_ids=np.concatenate([turn.token_ids, inserted]).astype(np.int32),
            logprobs=np.append(turn.logprobs, np.zeros(count, np.float32)),
            versions=np.append(turn.versions, np.repeat(turn.versions[-1:], count)),
            sampled=np.append(turn.sampled, np.zeros(count, np.bool_)),
        )

    def _finished(
        self, play: _Play, turn: Completion, finish: Finish, error: str | None = None
    ) -> Completion:
        """Build the completion of an episode. ``error`` tells why its environment did not start."""
        if error is not None:
            play.turns.append(Turn(0, 0, "", (), None, {}, error))
        request = play.request
        return replace(
            turn,
            request_id=request.request_id,
            sample_index=play.sample,
            params=request.params,
            finish=finish,
            turns=tuple(play.turns),
        )


def _nothing(play: _Play) -> Completion:
    """Return a response without tokens."""
    ids, name = np.zeros(0, np.int32), play.name
    nothing = np.zeros(0, np.float32), ids, np.zeros(0, np.bool_)
    return Completion(name, 0, ids, *nothing, play.request.params, Finish.STOP, None, "")
