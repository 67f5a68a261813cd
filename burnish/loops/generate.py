"""Text from a model: prompts in, samples streamed in order, what was sampled kept as JSONL."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from burnish.draws import Stream
from burnish.engine.protocol import Engine, Event, Request, TextEvent
from burnish.errors import DataError
from burnish.model.tokenizer import Tokenizer
from burnish.progress import Report, unheard
from burnish.rollout.rollout import complete
from burnish.tasks.rows import check_text
from burnish.types import Completion, SamplingParams
from burnish.wording import printable


@dataclass(frozen=True)
class Speed:
    samples: int
    tokens: int
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    def __str__(self) -> str:
        return (
            f"{self.samples} samples, {self.tokens} tokens in {self.seconds:.1f} s: "
            f"{self.tokens_per_second:.0f} tokens per second"
        )


@dataclass(frozen=True)
class Answer:
    """A text that a model wrote."""

    prompt: str
    sample: int
    """Its number among the answers to the prompt."""
    text: str
    finish: str
    """stop (the model ended it, or a stop text did), length, or abort (the model overflowed)."""
    token_ids: list[int] = field(repr=False)
    logprobs: list[float] = field(repr=False)
    """Of each token, by the model at the sampling temperature."""

    @property
    def logprob(self) -> float:
        """Of the whole text."""
        return sum(self.logprobs)

    def __str__(self) -> str:
        return self.text


def read_prompts(path: Path) -> list[str]:
    """One prompt a line; in a .jsonl file the "prompt" of each object."""
    try:
        lines = [line for line in path.read_text().splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} can't be read: {error}") from error
    if not lines:
        raise DataError(f"{path} must hold at least one prompt, got none")
    if path.suffix != ".jsonl":
        return lines
    return [_prompt_of(line, f"{path}:{number}") for number, line in enumerate(lines, 1)]


def _prompt_of(line: str, where: str) -> str:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise DataError(f"{where} is not JSON: {error}") from error
    if not isinstance(row, dict) or not isinstance(row.get("prompt"), str):
        raise DataError(f'{where} must be an object with a text "prompt", got {line[:80]}')
    text: str = row["prompt"]
    check_text(text, where)
    return text


def generate(
    engine: Engine,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    *,
    n: int = 1,
    params: SamplingParams = SamplingParams(),
    chat: bool = True,
    write: Callable[[str], object] = lambda text: None,
    jsonl: Path | None = None,
    report: Report = unheard,
    clock: Callable[[], float] = time.perf_counter,
) -> Speed:
    """Sample n responses to each prompt; `write` gets text that is safe for a terminal.

    All samples run together; they are written one after another, the first of them as it is made.
    chat: put a prompt through the model's chat template where there is one.
    """
    start = clock()
    keys = [(str(index), sample) for index in range(len(prompts)) for sample in range(n)]
    screen = _Screen(keys, write)
    done = sample(
        engine, tokenizer, prompts, n=n, params=params, chat=chat, see=screen.see, report=report
    )
    seconds = clock() - start
    if jsonl is not None:
        _save(jsonl, prompts, done)
    return Speed(len(done), sum(len(c.token_ids) for c in done), seconds)


def sample(
    engine: Engine,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    *,
    n: int = 1,
    params: SamplingParams = SamplingParams(),
    chat: bool = True,
    see: Callable[[Event], None] = lambda event: None,
    report: Report = unheard,
) -> list[Completion]:
    """n responses to each prompt, in the prompts' order; ``see`` gets tokens as they are made."""
    requests = [
        Request(str(i), encode(tokenizer, text, chat=chat), n, params, i, Stream.GENERATE)
        for i, text in enumerate(prompts)
    ]
    done = complete(engine, requests, see=see, report=report)
    return [completion for group in done for completion in group]


def answer(prompts: Sequence[str], done: Completion) -> Answer:
    """A response of ``sample`` as a record for scripts."""
    return Answer(
        prompt=prompts[int(done.request_id)],
        sample=done.sample_index,
        text=done.text,
        finish=str(done.finish),
        token_ids=done.token_ids.tolist(),
        logprobs=[float(x) for x in done.logprobs],
    )


def encode(tokenizer: Tokenizer, prompt: str, *, chat: bool) -> np.ndarray[Any, Any]:
    if chat and tokenizer.chat_template is not None:
        text = tokenizer.chat([{"role": "user", "content": prompt}])
        return tokenizer.encode(text, add_special=False)
    return tokenizer.encode(prompt)


@dataclass
class _Screen:
    """Writes samples in order: the current one live, later ones when their turn comes."""

    keys: list[tuple[str, int]]
    write: Callable[[str], object]
    _texts: dict[tuple[str, int], list[str]] = field(default_factory=dict)
    _ended: set[tuple[str, int]] = field(default_factory=set)
    _current: int = -1

    def __post_init__(self) -> None:
        self._turn()

    def see(self, event: Event) -> None:
        if isinstance(event, TextEvent):
            self.text(event.request_id, event.sample_index, event.text)
        else:
            self.end(event)

    def text(self, request_id: str, sample: int, text: str) -> None:
        key = (request_id, sample)
        if key == self.keys[self._current]:
            self.write(printable(text))
        else:
            self._texts.setdefault(key, []).append(text)

    def end(self, completion: Completion) -> None:
        self._ended.add((completion.request_id, completion.sample_index))
        while self._current < len(self.keys) and self.keys[self._current] in self._ended:
            self.write("\n")
            self._turn()

    def _turn(self) -> None:
        self._current += 1
        if self._current < len(self.keys):
            key = self.keys[self._current]
            if len(self.keys) > 1:
                self.write(f"── prompt {int(key[0]) + 1}, sample {key[1] + 1} ──\n")
            self.write(printable("".join(self._texts.pop(key, []))))


def _save(path: Path, prompts: Sequence[str], done: Sequence[Completion]) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_text("".join(line + "\n" for line in _rows(prompts, done)))
    os.replace(partial, path)


def _rows(prompts: Sequence[str], done: Sequence[Completion]) -> Iterator[str]:
    for c in done:
        row = asdict(answer(prompts, c)) | {"stop": c.stop, "params": asdict(c.params)}
        yield json.dumps(row, ensure_ascii=False)
