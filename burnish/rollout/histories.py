"""The conversations of one episode as token sequences, recorded while an agent has them.

An agent sends the whole history of a conversation with each request. A history is compared with the
recorded ones message by message: role, content, name, the arguments of tool calls as JSON values,
and the tools. The longest recorded history that it continues decides after which tokens the answer
is sampled:

    kind        the history                                     the answer is sampled after
    first       has no message of the assistant                 the template's text of all messages
    continued   continues a recorded answer                     the recorded and the new tokens
    branched    continues an answer that another request        the same tokens, as the prompt of a
                has continued already                           new sequence
    rewritten   has another message of the assistant            the template's text of all messages
    template    continues an answer, but the template writes    the template's text of all messages
                earlier turns differently, and
                rollout.history = "template"

All kinds but "continued" begin a new sequence.
Sampled tokens are thus never tokenized again, and each of them is in exactly one sequence, in the
context in which the engine has sampled it: the engine's request has that context as token ids.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any, Literal, NamedTuple

import numpy as np

from burnish.errors import ModelError
from burnish.model.conversation import ConversationFormat
from burnish.rollout.turns import extended, inserted_after, without_tokens
from burnish.types import (
    Completion,
    Finish,
    IntArray,
    Limit,
    SamplingParams,
    SequenceStart,
    Turn,
)

Message = Mapping[str, Any]
Kind = Literal["first", "continued", "branched", "rewritten", "template", "text"]
"""How a request relates to the recorded conversations; "text" is a request without messages."""
STRIDE = 1 << 32
"""Distance of the sequences of an episode in the positions of its random draws, which is more than
the tokens of any sequence."""


class History(NamedTuple):
    """The messages of a request, the tools that the model may call, and the name that separates
    conversations which must not be matched with each other."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    trace: str | None = None


@dataclass(eq=False)
class RecordedSequence:
    """A token sequence of an episode: a prompt, answers, and the messages between them."""

    number: int
    """Number of the sequence in the episode, in the order in which they began."""
    prompt: IntArray
    messages: tuple[Message, ...]
    """The messages in the prompt; empty for a prompt without messages."""
    params: SamplingParams
    trace: str | None = None
    response: Completion | None = None
    """The response up to the end of its last answer; None before the first one."""
    turns: list[Turn] = field(default_factory=list)
    """The answers, with indices in this response."""
    is_extended: bool = False
    """Whether a request that is not answered yet extends the response."""

    @property
    def length(self) -> int:
        """Number of tokens of the response."""
        return 0 if self.response is None else len(self.response.token_ids)


class _Answered(NamedTuple):
    """The end of a recorded answer: a sequence, and the number of tokens of its response up to
    there."""

    sequence: RecordedSequence
    length: int


@dataclass(eq=False)
class Draft:
    """A place in the record for an answer that is not sampled yet."""

    sequence: RecordedSequence
    begun: Completion | None
    """The response that the answer continues, with the new messages as inserted tokens; None if
    the answer begins a sequence."""
    kind: Kind
    digest: bytes | None
    """Hash of the request's history; None for a request without messages."""
    following: tuple[Message, ...] = ()
    """The new messages of a request that continues a sequence."""

    @property
    def start(self) -> int:
        """Index in the sequence's response at which the answer begins."""
        return 0 if self.begun is None else len(self.begun.token_ids)

    @property
    def length(self) -> int:
        """Number of tokens of the sequence before the answer, with its prompt."""
        return len(self.sequence.prompt) + self.start

    @property
    def added(self) -> int:
        """Number of tokens that the episode has more because of the request, without the answer:
        the prompt of a new sequence, or the inserted tokens."""
        return self.length if self.begun is None else self.start - self.sequence.length

    @property
    def position(self) -> int:
        """Position of the first token of the sequence's response in the random draws."""
        return self.sequence.number * STRIDE


class EpisodeRecord:
    """The conversations of one episode."""

    def __init__(self, params: SamplingParams, *, follows: bool = False) -> None:
        """``follows``: whether a history that the template rewrites begins a new sequence, as
        rollout.history = "template" says."""
        self._params, self._follows = params, follows
        self.sequences: list[RecordedSequence] = []
        self._answers: dict[bytes, list[_Answered]] = {}
        """The recorded answers, by the hash of their history."""
        self.kinds: dict[Kind, int] = {}
        """Number of the answers of each kind."""

    @property
    def has_answers(self) -> bool:
        """Whether an answer was recorded."""
        return bool(self.kinds)

    def draft(self, history: History, conversation: ConversationFormat) -> Draft:
        """Find the recorded conversation that a history continues, and return the place of the
        answer. `record` or `discard` must follow. Raise a ModelError if the chat template rejects
        the messages."""
        digests = _digests(history)
        found = self._continued(history, digests, conversation)
        if found is not None:
            return found
        messages, kind = history.messages, self._kind(history, digests)
        prompt = conversation.open(messages)
        sequence = self._begin(prompt, messages, history.trace)
        return Draft(sequence, None, kind, digests[-1])

    def draft_text(self, prompt: IntArray, trace: str | None = None) -> Draft:
        """Return the place of a continuation of a prompt without messages."""
        return Draft(self._begin(prompt, (), trace), None, "text", None)

    def _begin(
        self, prompt: IntArray, messages: tuple[Message, ...], trace: str | None
    ) -> RecordedSequence:
        number = len(self.sequences)
        sequence = RecordedSequence(number, prompt, messages, self._params, trace)
        sequence.is_extended = True
        self.sequences.append(sequence)
        return sequence

    def _match(self, history: History, digests: Sequence[bytes]) -> tuple[int, list[_Answered]]:
        """Return the number of messages of the longest recorded history that this one continues
        without another message of the assistant, and its answers; 0 if there is none."""
        messages = history.messages
        last = max((i for i, m in enumerate(messages, 1) if m["role"] == "assistant"), default=0)
        if not last or last == len(messages):
            return 0, []
        return last, self._answers.get(digests[last], [])

    def _kind(self, history: History, digests: Sequence[bytes]) -> Kind:
        if not any(message["role"] == "assistant" for message in history.messages):
            return "first"
        is_known = self._follows and self._match(history, digests)[1]
        return "template" if is_known else "rewritten"

    def _continued(
        self, history: History, digests: Sequence[bytes], conversation: ConversationFormat
    ) -> Draft | None:
        count, answers = self._match(history, digests)
        if not answers:
            return None
        before, following = history.messages[:count], history.messages[count:]
        if self._follows and not conversation.appends(before, following):
            return None
        free = (one for one in answers if _is_free(one))
        sequence, length = answer = next(free, answers[0])
        assert sequence.response is not None
        try:
            last = int(sequence.response.token_ids[length - 1])
            inserted = inserted_after(last, conversation, following)
        except ModelError:  # for example, roles that may not follow each other
            return None
        if _is_free(answer):
            sequence.is_extended = True
            begun = extended(sequence.response, inserted)
            return Draft(sequence, begun, "continued", digests[-1], following)
        given = [sequence.prompt, sequence.response.token_ids[:length], inserted]
        prompt = np.concatenate(given).astype(np.int32)
        branch = self._begin(prompt, history.messages, history.trace)
        return Draft(branch, None, "branched", digests[-1])

    def record(self, draft: Draft, completion: Completion, text: str, message: Message) -> None:
        """Record the answer to a request: the completion of its sequence so far, and the answer's
        text and message."""
        sequence, start = draft.sequence, draft.start
        if draft.following:
            sequence.turns[-1] = sequence.turns[-1]._replace(messages=_shown(draft.following))
        sequence.response, sequence.is_extended = completion, False
        end = len(completion.token_ids)
        sequence.turns.append(Turn(start, end, text, (), None, {}, None))
        self.kinds[draft.kind] = self.kinds.get(draft.kind, 0) + 1
        if draft.digest is not None:
            digest = _extend(draft.digest, message)
            self._answers.setdefault(digest, []).append(_Answered(sequence, end))

    def discard(self, draft: Draft) -> None:
        """Forget a place whose answer was not sampled."""
        draft.sequence.is_extended = False
        if draft.sequence is self.sequences[-1] and draft.sequence.response is None:
            self.sequences.pop()

    def completion(
        self, request_id: str, sample: int, last: Turn, unlearned: Iterable[str] = ()
    ) -> Completion:
        """Return the episode as a completion, whose sequences follow each other in the order in
        which they began. ``last`` has the reward, the metrics or the error of the episode, for its
        last turn. Sequences of the traces ``unlearned`` are left out."""
        skipped = set(unlearned)
        kept = [s for s in self.sequences if s.response is not None and s.trace not in skipped]
        whole = without_tokens(request_id, sample, self._params)
        if not kept:
            return replace(whole, turns=(last._replace(start=0, end=0),))
        turns, starts, offset = list[Turn](), list[SequenceStart](), 0
        for sequence in kept:
            starts.append(SequenceStart(offset, sequence.prompt, _shown(sequence.messages)))
            turns += [
                turn._replace(start=turn.start + offset, end=turn.end + offset)
                for turn in sequence.turns
            ]
            offset += sequence.length
        turns[-1] = turns[-1]._replace(
            reward=last.reward, metrics=last.metrics, error=last.error, seconds=last.seconds
        )
        responses = [s.response for s in kept if s.response is not None]
        names = ("token_ids", "logprobs", "versions", "sampled")
        streams: dict[str, Any] = {
            name: np.concatenate([getattr(c, name) for c in responses]) for name in names
        }
        text = "".join(response.text for response in responses)
        return replace(whole, **streams, text=text, turns=tuple(turns), sequences=tuple(starts))


def ended(completion: Completion, finish: Finish, limit: Limit | None) -> Completion:
    """Return the completion of an episode with the reason for its end."""
    return replace(completion, finish=finish, limit=limit)


def _is_free(answer: _Answered) -> bool:
    """Return whether a request may extend the sequence after this answer."""
    sequence, length = answer
    return length == sequence.length and not sequence.is_extended


def _digests(history: History) -> list[bytes]:
    """Return the hashes of the first 0, 1, 2, … messages of a history, with its tools."""
    start = json.dumps([history.trace, history.tools], sort_keys=True, default=str)
    digests = [blake2b(start.encode(errors="surrogatepass"), digest_size=16).digest()]
    for message in history.messages:
        digests.append(_extend(digests[-1], message))
    return digests


def _extend(digest: bytes, message: Message) -> bytes:
    content = canonical(message).encode(errors="surrogatepass")
    return blake2b(digest + content, digest_size=16).digest()


def canonical(message: Message) -> str:
    """Return a message as a text that is equal for equal messages: without fields that are null,
    with the arguments of tool calls as JSON values, and without the ids of an assistant's calls,
    which the policy did not sample."""
    fields = {key: value for key, value in message.items() if value is not None}
    fields["content"] = fields.get("content") or ""
    if calls := fields.pop("tool_calls", None):
        functions = [call.get("function", call) for call in calls]
        fields["calls"] = [[f["name"], _arguments(f.get("arguments"))] for f in functions]
    return json.dumps(fields, sort_keys=True)


def _arguments(given: Any) -> Any:
    if not isinstance(given, str):
        return given
    try:
        return json.loads(given)
    except ValueError:
        return given


def _shown(messages: Iterable[Message]) -> tuple[dict[str, str], ...]:
    """Return messages for display: their role and their text, with calls of tools as JSON."""
    return tuple(map(_shown_message, messages))


def _shown_message(message: Message) -> dict[str, str]:
    calls = message.get("tool_calls") or ()
    parts = [message.get("content") or "", *(json.dumps(call.get("function")) for call in calls)]
    return {"role": str(message["role"]), "content": "\n".join(filter(None, parts))}
