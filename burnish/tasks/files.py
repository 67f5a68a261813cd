"""Prompts from rows: a JSONL file, or what a script passes; graded by the user's own reward.

A row is any JSON object with a "prompt": text, or chat messages. The reward sees the whole row.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

from burnish.config import FilesTask, Graded, MathTask, Rows
from burnish.draws import Stream, permutation
from burnish.errors import ConfigError, DataError
from burnish.graders.grader import Grader, grade_pairs, make_grader
from burnish.graders.pool import Limits
from burnish.graders.rewards import Reward
from burnish.model.tokenizer import Tokenizer
from burnish.plan import Room
from burnish.sections import nearest
from burnish.types import Completion, Grade, IntArray, Prompt

Row = dict[str, Any]
Check = Callable[[Any, str], Row]
"""A row as it was read, and words for where -> a row that is as it should be."""
TODAY = datetime(2026, 1, 1)
"""What chat templates that write a date are told: a run resumed tomorrow reads the same prompts."""
EPOCH, SPLIT = 0, 1
"""What a shuffle is for; they share no draws."""
ROLES = ("system", "user", "assistant", "tool")
"""Who may have written a chat message."""


class Files:
    """Rows as a task: a seeded shuffle for each epoch, and a validation set apart."""

    def __init__(
        self,
        rows: Sequence[Row],
        validation: Sequence[Row],
        config: FilesTask | MathTask,
        *,
        tokenizer: Tokenizer,
        grader: Grader,
        seed: int,
    ) -> None:
        """config: how prompts are written and responses scored; its files were read before."""
        self.rows = rows
        self.validation_rows = validation
        self.config = config
        self._tokenizer = tokenizer
        self._grader = grader
        self._seed = seed
        self._order = lru_cache(maxsize=2)(
            lambda epoch: permutation(seed, Stream.TASK, epoch, EPOCH, len(rows))
        )

    def prompt(self, index: int) -> Prompt:
        """The prompt of the run's group number ``index``: every row once in each epoch."""
        epoch, place = divmod(index, len(self.rows))
        row = int(self._order(epoch)[place])
        return self._prompt(f"{self.config.name}/train/{row}", self.rows[row])

    @property
    def validation(self) -> list[Prompt]:
        prefix = f"{self.config.name}/validation"
        return [self._prompt(f"{prefix}/{i}", row) for i, row in enumerate(self.validation_rows)]

    def grade_all(self, pairs: Sequence[tuple[Prompt, Completion]]) -> list[Grade]:
        return grade_pairs(self._grader, pairs, must_end=self.config.must_end)

    def answer(self, prompt: Prompt, response: str) -> str | None:
        """The whole text: nobody but the reward knows what counts in it."""
        return response.strip()

    def close(self) -> None:
        self._grader.close()

    def _prompt(self, prompt_id: str, row: Row) -> Prompt:
        text, ids = encode(self._tokenizer, row["prompt"], chat=self.config.chat)
        meta = {"asked": asked(row["prompt"])}
        return Prompt(prompt_id, text, ids, self.config.name, reference=row, meta=meta)


def make_files(
    config: FilesTask,
    *,
    tokenizer: Tokenizer,
    seed: int,
    prompts: Iterable[str | Mapping[str, Any]] | None = None,
    reward: Reward | str | None = None,
    room: Room | None = None,
) -> Files:
    """The task that a recipe's section describes; a script's prompts and reward come before it.

    room: for the longest prompt; None if no model bounds it.
    """
    chosen = reward_of(config, reward)
    rows, validation = rows_of(config, seed=seed, prompts=prompts)
    if room is not None:
        check_prompts_fit(config, [*rows, *validation], room, tokenizer=tokenizer)
    grader = make_grader(chosen, limits_of(config))
    return Files(rows, validation, config, tokenizer=tokenizer, grader=grader, seed=seed)


def reward_of(config: FilesTask, reward: Reward | str | None) -> Reward | str:
    """A script's reward, or the recipe's."""
    chosen = config.reward if reward is None else reward
    if chosen is None:
        raise ConfigError("there is no reward; give --reward FILE.py:NAME or set task.reward")
    return chosen


def limits_of(config: Graded) -> Limits:
    return Limits(
        workers=config.workers,
        cpu_seconds=config.cpu_seconds,
        wall_seconds=config.wall_seconds,
        memory_bytes=config.memory_mb * 2**20,
        characters=config.characters,
    )


def rows_of(
    config: Rows,
    *,
    seed: int,
    prompts: Iterable[str | Mapping[str, Any]] | None = None,
    check: Check | None = None,
) -> tuple[list[Row], list[Row]]:
    """Train and validation rows: a script's or a file's, split by the seed if need be."""
    if prompts is not None:
        rows = rows_from(prompts, check)
    elif config.train is not None:
        rows = read_rows(Path(config.train), check)
    else:
        raise ConfigError("there are no prompts; give --data FILE.jsonl or set task.train")
    if config.validation is not None:
        return rows, read_rows(Path(config.validation), check)
    share = 0.1 if config.validation_share is None else config.validation_share
    return split(rows, share, seed=seed)


def split(rows: Sequence[Row], held_out: float, *, seed: int) -> tuple[list[Row], list[Row]]:
    """Train and validation rows, each in the file's order.

    held_out: how many rows validate, or what share of them; a share above 0 is at least one row.
    """
    share = isinstance(held_out, float)
    count = int(max(1, round(held_out * len(rows))) if share and held_out else held_out)
    if count >= len(rows):
        raise DataError(
            f"{len(rows)} rows do not split: {count} for validation leave none to train on; give "
            "more rows, hold out fewer, or give a validation file of their own"
        )
    chosen = set(permutation(seed, Stream.TASK, 0, SPLIT, len(rows))[:count].tolist())
    train = [row for i, row in enumerate(rows) if i not in chosen]
    return train, [row for i, row in enumerate(rows) if i in chosen]


def read_rows(path: Path, check: Check | None = None) -> list[Row]:
    """The rows of a JSONL file, as ``check`` returns them; what is wrong is said with the line."""
    try:
        lines = path.read_bytes().removeprefix(b"\xef\xbb\xbf").removesuffix(b"\n").split(b"\n")
    except OSError as error:
        raise DataError(f"{path} can't be read: {error.strerror}") from error
    if lines == [b""]:
        raise DataError(f"{path} holds no rows")
    check = check or check_row
    return [_row(line, f"{path}, line {number}", check) for number, line in enumerate(lines, 1)]


def _row(line: bytes, where: str, check: Check) -> Row:
    if not line.strip():
        raise DataError(f"{where}: empty; every line must be a JSON object with a prompt")
    try:
        row = json.loads(line)
    except ValueError as error:  # UnicodeDecodeError is one as well
        raise DataError(f"{where}: not JSON: {error}") from error
    return check(row, where)


def rows_from(prompts: Iterable[str | Mapping[str, Any]], check: Check | None = None) -> list[Row]:
    """Rows that a script passes: objects with a prompt, or prompts alone."""
    given = [{"prompt": p} if isinstance(p, str) else p for p in prompts]
    if not given:
        raise DataError("prompts is empty; give at least one")
    check = check or check_row
    return [check(row, f"prompts[{i}]") for i, row in enumerate(given)]


def check_prompts_fit(
    config: FilesTask | MathTask,
    rows: Sequence[Row],
    room: Room,
    *,
    tokenizer: Tokenizer,
    check: Check | None = None,
    ending: Callable[[Row], str] = lambda row: "",
) -> None:
    """Raises where a prompt is too long, with the file and the line of the first.

    ``ending`` is the longest text that may follow a row's prompt; ``check`` read the rows.
    """
    lengths = []
    for row in rows:
        text, ids = encode(tokenizer, row["prompt"], chat=config.chat)
        if more := ending(row):
            ids = tokenizer.encode(text + more, add_special=not config.chat)
        lengths.append(len(ids))
    long = [i for i, length in enumerate(lengths) if length > room.tokens]
    if long:
        first = rows[long[0]]
        others = f" (and {len(long) - 1} others are too long)" if long[1:] else ""
        raise DataError(
            f"{place(config, first, check)}: the prompt has {lengths[long[0]]:,} tokens, and "
            f"{room.why} leaves {room.tokens:,}{others}; shorten it or leave the row out, or make "
            "room"
        )


def place(config: Rows | MathTask, row: Row, check: Check | None = None) -> str:
    """Words for where a row came from: its file and line, found by reading again."""
    for source in (config.train, config.validation):
        if source is not None and not source.startswith("hf:"):
            for number, other in enumerate(read_rows(Path(source), check), 1):
                if other.items() <= row.items():
                    return f"{source}, line {number}"
    return f"the row with the prompt {str(row['prompt'])[:80]!r}"


def check_row(row: Any, where: str) -> Row:
    if not isinstance(row, Mapping):
        raise DataError(f"{where}: must be an object with a prompt, got {type(row).__name__}")
    if "prompt" not in row:
        raise DataError(f"{where}: no field 'prompt', only {', '.join(map(repr, row)) or 'none'}")
    prompt = row["prompt"]
    if isinstance(prompt, str) and prompt:
        check_text(prompt, where)
        return dict(row)
    if not isinstance(prompt, list) or not prompt or not all(map(_is_message, prompt)):
        raise DataError(
            f"{where}: prompt must be a text that is not empty, or a list of messages "
            f'{{"role": …, "content": …}}, got {str(prompt)[:80]!r}'
        )
    for message in prompt:
        if message["role"] not in ROLES:
            near = nearest(message["role"], ROLES)
            known = ", ".join(ROLES)
            raise DataError(
                f"{where}: a role must be one of {known}, got {message['role']!r}{near}"
            )
        check_text(message["content"], where)
    return dict(row)


def check_text(text: str, where: str) -> None:
    """Raises where a text has half of a character, such as "\\ud83d" alone in JSON."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where}: a text must be whole characters, got the lone surrogate "
            f"{text[error.start]!r} after {text[: error.start][-20:]!r}; remove it"
        ) from None


def _is_message(message: Any) -> bool:
    return isinstance(message, Mapping) and all(
        isinstance(message.get(key), str) for key in ("role", "content")
    )


def asked(prompt: str | Sequence[Mapping[str, Any]]) -> str:
    """A prompt as its writer wrote it; of several messages, each after its role."""
    if isinstance(prompt, str):
        return prompt
    texts = [str(message["content"]) for message in prompt]
    if len(texts) == 1:
        return texts[0]
    return "\n\n".join(f"{m['role']}: {text}" for m, text in zip(prompt, texts, strict=True))


def encode(
    tokenizer: Tokenizer, prompt: str | Sequence[Mapping[str, Any]], *, chat: bool
) -> tuple[str, IntArray]:
    """What the model reads, as text and ids; chat: a text goes in as one user's message."""
    if isinstance(prompt, str) and not chat:
        return prompt, tokenizer.encode(prompt)
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    text = tokenizer.chat(messages, add_generation_prompt=True, now=TODAY)
    return text, tokenizer.encode(text, add_special=False)
