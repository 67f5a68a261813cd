"""Text from a model: prompts in, answers out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from burnish.draws import Stream
from burnish.engine.protocol import Engine, Request
from burnish.model.tokenizer import Tokenizer
from burnish.progress import Report, unheard
from burnish.rollout.rollout import complete
from burnish.tasks.text import encode
from burnish.types import SamplingParams


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


def generate(
    engine: Engine,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    *,
    n: int = 1,
    params: SamplingParams = SamplingParams(),
    chat: bool = True,
    report: Report = unheard,
) -> list[Answer]:
    """n answers to each prompt, in the prompts' order.

    ``chat`` puts a prompt through the model's chat template where there is one.
    """
    chat = chat and tokenizer.chat_template is not None
    asked = [encode(tokenizer, text, chat=chat)[1] for text in prompts]
    requests = [Request(str(i), ids, n, params, i, Stream.GENERATE) for i, ids in enumerate(asked)]
    done = complete(engine, requests, report=report)
    return [
        Answer(
            prompt=text,
            sample=response.sample_index,
            text=response.text,
            finish=str(response.finish),
            token_ids=response.token_ids.tolist(),
            logprobs=[float(x) for x in response.logprobs],
        )
        for text, responses in zip(prompts, done, strict=True)
        for response in responses
    ]
