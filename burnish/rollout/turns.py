"""Turns of conversations as parts of completions: their text, and what is inserted after them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from burnish.model.conversation import ConversationFormat
from burnish.model.tokenizer import Tokenizer
from burnish.types import Completion, Finish, IntArray, SamplingParams


def turn_text(tokenizer: Tokenizer, ids: IntArray, stop: str | int | None) -> str:
    """Return the text of a turn, up to the end of the stop string that its last token has
    completed."""
    if not isinstance(stop, str):
        return tokenizer.decode(ids, skip_special=True)
    read, text, fresh = tokenizer.stream(), "", ""
    for token in ids.tolist():
        fresh = read(token) or ""
        text += fresh
    at = text.find(stop, max(0, len(text) - len(fresh) - len(stop) + 1))
    return text[: at + len(stop)]


def inserted_after(
    last: int, conversation: ConversationFormat, messages: Sequence[Mapping[str, Any]]
) -> IntArray:
    """Return the token ids of the messages that follow a turn, whose last token is ``last``. If the
    policy did not end its turn with the template's end token, they begin with that token."""
    inserted = [] if last == conversation.end_id else [conversation.inserted_end]
    inserted.append(conversation.between(messages))
    return np.concatenate(inserted).astype(np.int32)


def extended(turn: Completion, ids: IntArray) -> Completion:
    """Return a response that continues after inserted tokens."""
    count = len(ids)
    return replace(
        turn,
        token_ids=np.concatenate([turn.token_ids, ids]).astype(np.int32),
        logprobs=np.append(turn.logprobs, np.zeros(count, np.float32)),
        versions=np.append(turn.versions, np.repeat(turn.versions[-1:], count)),
        sampled=np.append(turn.sampled, np.zeros(count, np.bool_)),
    )


def without_tokens(request_id: str, sample: int, params: SamplingParams) -> Completion:
    """Return the completion of an episode without tokens."""
    nothing = np.zeros(0, np.int32)
    return Completion(
        request_id,
        sample,
        token_ids=nothing,
        logprobs=np.zeros(0, np.float32),
        versions=nothing,
        sampled=np.zeros(0, np.bool_),
        params=params,
        finish=Finish.STOP,
        stop=None,
        text="",
    )
