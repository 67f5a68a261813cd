"""Text from a model: prompts in, answers out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from burnish.draws import Stream
from burnish.engine.protocol import Engine, Event, Request, TextEvent
from burnish.errors import DataError
from burnish.model.tokenizer import Tokenizer
from burnish.progress import Report, unheard
from burnish.rollout.rollout import complete
from burnish.tasks.rows import read_rows
from burnish.tasks.text import Messages, encode, shown
from burnish.types import Completion, SamplingParams


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


def read_prompts(path: Path) -> Sequence[str | Messages]:
    """One prompt a line; in a .jsonl file the "prompt" of each object."""
    if path.suffix == ".jsonl":
        return [row["prompt"] for row in read_rows(path)]
    try:
        lines = [line for line in path.read_text().splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} can't be read: {error}") from error
    if not lines:
        raise DataError(f"{path} must hold at least one prompt, got none")
    return lines


def generate(
    engine: Engine,
    tokenizer: Tokenizer,
    prompts: Sequence[str | Messages],
    *,
    n: int = 1,
    params: SamplingParams = SamplingParams(),
    chat: bool = True,
    write: Callable[[str], object] = lambda text: None,
    report: Report = unheard,
) -> list[Answer]:
    """n answers to each prompt, in the prompts' order; all of them are sampled together.

    chat: put a prompt through the model's chat template where there is one. ``write`` gets the
    text of the first answer, piece by piece, as it is made.
    """
    is_chat = chat and tokenizer.chat_template is not None
    requests = [
        Request(str(i), encode(tokenizer, text, chat=is_chat)[1], n, params, i, Stream.GENERATE)
        for i, text in enumerate(prompts)
    ]

    def see(event: Event) -> None:
        if isinstance(event, TextEvent) and (event.request_id, event.sample_index) == ("0", 0):
            write(event.text)

    done = complete(engine, requests, see=see, report=report)
    return [_answer(shown(prompts[i]), c) for i, group in enumerate(done) for c in group]


def _answer(prompt: str, done: Completion) -> Answer:
    return Answer(
        prompt=prompt,
        sample=done.sample_index,
        text=done.text,
        finish=str(done.finish),
        token_ids=done.token_ids.tolist(),
        logprobs=[float(x) for x in done.logprobs],
    )
