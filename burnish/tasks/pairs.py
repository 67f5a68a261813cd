"""Data of a supervised run: prompts with the answers that the model should learn.

A row is an object with a "prompt" (text or chat messages) and a text "answer"; GSM8K's rows call
the prompt "question". Without an answer, the last of the prompt's messages is the answer if it is
the assistant's. A row without a prompt may have "messages", a whole conversation of which all of
the assistant's messages are learned, and "tools", the JSON schemas of the functions that it calls.
A row of preference data, from which a reward model learns, has two texts instead of the answer:
"chosen", the better response, and "rejected".
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import chain, groupby
from typing import Any

import numpy as np

from burnish.errors import DataError, ModelError
from burnish.model.conversation import ConversationFormat
from burnish.model.tokenizer import Tokenizer
from burnish.recipe.tasks import PairsTask, PreferencesTask
from burnish.tasks.rows import (
    MARKS,
    ROLES,
    DataRow,
    check_prompt,
    check_text,
    check_trainable,
    counted_rows,
    load_rows,
    shuffled,
    tell_split,
)
from burnish.tasks.text import TODAY, check_system, render_prompt, surely_fits, template_of
from burnish.types import Completion, Finish, Grade, Group, IntArray, Prompt, SamplingParams

SIDES = ("chosen", "rejected")


@dataclass(frozen=True)
class Pairs:
    """Data of a supervised run. Each row is a ``Group``, like the groups of sampled responses: its
    prompt with one answer, or with a chosen and a rejected response."""

    rows: Sequence[Group]
    validation: Sequence[Group]
    epochs: float
    seed: int

    def steps(self, batch: int) -> int:
        """Return the number of steps over all epochs, with ``batch`` rows per step."""
        return math.ceil(self._seen / batch)

    def batch(self, number: int, size: int) -> list[Group]:
        """Return the groups of step ``number``, counted from 0: ``size`` groups, or fewer in the
        last step. Each epoch has every row once, in a new order."""
        indices = range(number * size, min((number + 1) * size, self._seen))
        return [self.rows[shuffled(index, len(self.rows), seed=self.seed)] for index in indices]

    @property
    def _seen(self) -> int:
        return max(1, round(self.epochs * len(self.rows)))


def make_pairs(
    config: PairsTask | PreferencesTask,
    *,
    tokenizer: Tokenizer,
    seed: int,
    context: int,
    together: int | None = None,
) -> Pairs:
    """Read and check the rows of a supervised recipe. Training rows are encoded when they are used.

    ``context`` is the limit in tokens for a prompt with one response, ``together`` the limit for a
    prompt with all its responses; None if there is no such limit. Raise a DataError if a row is
    invalid or too long, or if no row is left to train on.
    """
    if not tokenizer.end_ids:
        raise DataError("the model's tokenizer names no end token, so no response could end")
    check_system(tokenizer, config.system)
    loaded = load_rows(config, seed=seed, check=CHECKS[config.name])
    check_trainable(*loaded)
    tell_split(*loaded, config.validation_rows)
    write = partial(
        write_pair, config=config, tokenizer=tokenizer, context=context, together=together
    )
    train, validation = (EncodedRows(rows, write) for rows in loaded)
    bound = context if together is None else min(context, together)
    total = sum(map(len, loaded))
    for row in counted_rows(chain(*loaded), total, "load", "measuring the rows"):
        if _is_conversation(row):
            write(row)
            continue
        prompt, _, texts = _render(row, config, tokenizer)
        if not all(surely_fits(text, bound // (1 + len(texts))) for text in (prompt, *texts)):
            write(row)
    return Pairs(train, list(validation), config.epochs, seed)


class EncodedRows(Sequence[Group]):
    """Rows of a supervised run as groups, each encoded when it is used."""

    def __init__(self, rows: Sequence[DataRow], write: Callable[[DataRow], Group]) -> None:
        self._rows, self._write = rows, write

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        return self._write(self._rows[index])


def write_pair(
    row: DataRow,
    config: PairsTask | PreferencesTask,
    tokenizer: Tokenizer,
    context: int,
    together: int | None = None,
) -> Group:
    """Encode a row as a group: its prompt and its responses, the best one first with reward 1, the
    other with 0.

    ``context`` and ``together`` are limits as in `make_pairs`; raise a DataError if the row exceeds
    one.
    """
    if _is_conversation(row):
        text, prompt, answers = _write_conversation(row, config, tokenizer)
        sides: tuple[Completion, ...] = (answers,)
    else:
        text, has_special, texts = _render(row, config, tokenizer)
        prompt = tokenizer.encode(text, add_special=has_special)
        text = tokenizer.unmask(text)
        sides = tuple(written(row.where, i, side, tokenizer) for i, side in enumerate(texts))
    lengths = [len(side.token_ids) for side in sides]
    for which, length, bound, setting in (
        ("its longest response", max(lengths), context, "the model's context"),
        ("all its responses", sum(lengths), together, "train.micro_tokens"),
    ):
        if bound is not None and len(prompt) + length > bound:
            raise DataError(
                f"{row.where}: the prompt and {which} are {len(prompt) + length} tokens, and "
                f"{setting} is {bound}; shorten the row or leave it out"
            )
    grades = tuple(Grade(float(i == 0)) for i in range(len(sides)))
    return Group(0, Prompt(row.where, text, prompt, config.name), sides, grades)


def _render(
    row: DataRow, config: PairsTask | PreferencesTask, tokenizer: Tokenizer
) -> tuple[str, bool, list[str]]:
    """Return a row's prompt as the model's input, whether the tokenizer adds its special tokens to
    it, and the texts of the responses. Special tokens of rows are masked in all of them."""
    mask: Callable[[str], str] = str if config.special_tokens == "control" else tokenizer.mask
    content, texts = row["prompt"], [mask(row[side]) for side in SIDES if side in row]
    if isinstance(config, PairsTask):
        if isinstance(content, str):
            content = config.prompt.replace("{prompt}", content)
        texts = [config.answer.replace("{answer}", mask(MARKS.sub("", row["answer"])))]
    text, has_special = render_prompt(
        tokenizer,
        content,
        chat=config.chat,
        system=config.system,
        template=template_of(config),
    )
    return text, has_special, texts


def _write_conversation(
    row: DataRow, config: PairsTask | PreferencesTask, tokenizer: Tokenizer
) -> tuple[str, IntArray, Completion]:
    """Encode a conversation. Return the text and the token ids before the assistant's first
    message, and everything after them as one response, in which the other messages are tokens that
    were not sampled."""
    if isinstance(config, PairsTask) and (config.prompt, config.answer) != ("{prompt}", "{answer}"):
        raise DataError(
            f"{row.where}: a row with messages is used as it is, and task.prompt or task.answer is "
            "set; remove them"
        )
    before = [] if config.system is None else [{"role": "system", "content": config.system}]
    try:
        conversation = _conversation(tokenizer, json.dumps(row["tools"]))
        prompt = conversation.open([*before, *row["prompt"]])
        parts = [
            conversation.turn(messages[0]) if is_turn else conversation.between(messages)
            for is_turn, messages in _turns(row["messages"][len(row["prompt"]) :])
        ]
    except ModelError as error:
        raise DataError(f"{row.where}: {error}") from error
    ids, sampled = np.concatenate(parts), np.arange(len(parts)) % 2 == 0
    response = written(row.where, 0, "", tokenizer)
    response = replace(
        response,
        token_ids=ids,
        logprobs=np.zeros(len(ids), np.float32),
        versions=np.full(len(ids), -1, np.int32),
        sampled=np.repeat(sampled, [len(part) for part in parts]),
        stop=int(ids[-1]),
        text=tokenizer.decode(ids, skip_special=True),
    )
    return tokenizer.decode(prompt), prompt, response


@lru_cache(maxsize=16)
def _conversation(tokenizer: Tokenizer, tools: str) -> ConversationFormat:
    return ConversationFormat(tokenizer, json.loads(tools), now=TODAY)


def _turns(messages: Sequence[Mapping[str, Any]]) -> list[tuple[bool, list[Mapping[str, Any]]]]:
    """Split messages into the assistant's and the runs of others between them; the first of each
    pair tells whether they are the assistant's."""
    runs = groupby(messages, key=lambda message: bool(message["role"] == "assistant"))
    return [(is_turn, list(run)) for is_turn, run in runs]


def written(where: str, number: int, text: str, tokenizer: Tokenizer) -> Completion:
    """Encode a text and an end token as a completion that no policy sampled: its log-probabilities
    are 0, and its versions −1.

    ``where`` is its request id, and ``number`` its index among the responses to its prompt.
    """
    tokens = tokenizer.encode(text, add_special=False)
    ids = np.append(tokens, np.int32(tokenizer.end_ids[0]))
    return Completion(
        request_id=where,
        sample_index=number,
        token_ids=ids,
        logprobs=np.zeros(len(ids), np.float32),
        versions=np.full(len(ids), -1, np.int32),  # no version of the policy sampled it
        sampled=np.ones(len(ids), bool),
        params=SamplingParams(),
        finish=Finish.STOP,
        stop=int(ids[-1]),
        text=tokenizer.unmask(text),
    )


def check_pair(row: Any, where: str) -> DataRow:
    """Check a row with a prompt and an answer; return it with "prompt" and a text "answer", or
    raise a DataError. ``where`` describes the row's place. A conversation is returned with
    "prompt", the messages before the assistant's first, "messages" and "tools"."""
    if isinstance(row, Mapping) and "messages" in row and not {"prompt", "question"} & row.keys():
        return _check_conversation(row, where)
    if isinstance(row, Mapping) and "question" in row and "prompt" not in row:
        row = {**row, "prompt": row["question"]}
    if isinstance(row, Mapping) and row.get("answer") is None and _is_answered(row.get("prompt")):
        *prompt, answer = row["prompt"]
        row = {**row, "prompt": prompt, "answer": answer["content"]}
    return _with_texts(row, where, ["answer"])


def _check_conversation(row: Mapping[str, Any], where: str) -> DataRow:
    messages, tools = row["messages"], row.get("tools")
    if not isinstance(messages, list) or not all(isinstance(m, Mapping) for m in messages):
        raise DataError(f"{where}: messages must be a list of objects, got {str(messages)[:80]!r}")
    messages = [_check_message(message, where) for message in messages]
    runs = _turns(messages)
    if len(runs) < 2 or runs[0][0] or not runs[-1][0]:
        roles = ", ".join(message["role"] for message in messages) or "none"
        raise DataError(
            f"{where}: messages must begin with another role and end with the assistant's message, "
            f"got {roles[:80]}; leave out what the model should not learn"
        )
    if any(is_turn and len(run) > 1 for is_turn, run in runs):
        raise DataError(f"{where}: two messages of the assistant follow each other; join them")
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except ValueError as error:
            raise DataError(f"{where}: tools must be a list or its JSON text, {error}") from None
    tools = tools or []
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise DataError(f"{where}: tools must be a list of JSON schemas, got {str(tools)[:80]!r}")
    own = {key: value for key, value in row.items() if key != "answer"}
    own |= {"prompt": runs[0][1], "messages": messages, "tools": tools}
    # Conversations may begin alike, as games do, so they are held out as a whole.
    return DataRow(check_prompt(own, where), where, json.dumps(messages, sort_keys=True))


def _is_conversation(row: DataRow) -> bool:
    """Return whether a checked row is a conversation; all others have an answer or two sides."""
    return not {"answer", *SIDES} & row.keys()


def _check_message(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Check a message of a conversation; return it with a text "content"."""
    calls = message.get("tool_calls")
    checked = dict(message)
    if calls and message.get("content") is None:
        checked["content"] = ""
    content, role = checked.get("content"), message.get("role")
    if not isinstance(content, str) or not isinstance(role, str):
        raise DataError(
            f'{where}: a message is an object {{"role": …, "content": …}}, got '
            f"{str(message)[:80]!r}"
        )
    if role == "assistant" and not calls and not content.strip():
        raise DataError(f"{where}: a message of the assistant is empty; leave the row out")
    if role in ROLES:
        check_text(content, where)  # a long conversation pays for each general check
    else:
        check_prompt({"prompt": [{"role": role, "content": content}]}, where)
    for call in calls or ():
        function = call.get("function", call) if isinstance(call, Mapping) else {}
        arguments = function.get("arguments", {})
        try:
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        except ValueError:
            arguments = None
        if not isinstance(function.get("name"), str) or not isinstance(arguments, Mapping):
            raise DataError(
                f'{where}: a tool call is {{"function": {{"name": …, "arguments": …}}}}, whose '
                f"arguments are an object or its JSON text, got {str(call)[:80]!r}"
            )
    return checked


def _is_answered(prompt: Any) -> bool:
    """Return whether a prompt is a list of chat messages that ends with the assistant's answer."""
    last = prompt[-1] if isinstance(prompt, list) and len(prompt) > 1 else None
    return isinstance(last, Mapping) and last.get("role") == "assistant" and "content" in last


def check_preference(row: Any, where: str) -> DataRow:
    """Check a row with a prompt and two different texts, "chosen" and "rejected"; return it or
    raise a DataError. ``where`` describes the row's place."""
    checked = _with_texts(row, where, SIDES)
    if checked["chosen"] == checked["rejected"]:
        raise DataError(f"{where}: chosen and rejected are the same text; leave the row out")
    return checked


def _with_texts(row: Any, where: str, names: Sequence[str]) -> DataRow:
    checked = check_prompt(row, where)
    for name in names:
        text = checked.get(name)
        if name not in checked:
            listed = ", ".join(map(repr, checked))
            raise DataError(
                f"{where}: no field {name!r}, only {listed}; if another field holds it, set "
                f"task.columns.{name} to its name"
            )
        if not isinstance(text, str) or not text.strip():
            got = "none" if text is None else repr(text)[:80]
            raise DataError(
                f"{where}: a row to learn from needs a text {name!r} that is not empty, got {got}; "
                "write one, or leave the row out"
            )
        check_text(text, where)
    return checked


CHECKS = {"pairs": check_pair, "preferences": check_preference}
"""Functions that check a row, by the task's name."""
