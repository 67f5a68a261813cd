"""``burnish chat``: a conversation with a model in the terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option, echo

from burnish.api import progress_display
from burnish.cli.serve import open_named_model
from burnish.console.text import printable
from burnish.errors import EngineError
from burnish.randomness import Stream
from burnish.types import Completion, Finish, SamplingParams

if TYPE_CHECKING:
    from burnish.engine.native.engine import NativeEngine
    from burnish.model.tokenizer import Tokenizer

RESET = "/reset"
UNFINISHED = "\ufffd"
"""Replaces the bytes of a character that is not complete yet."""


class Conversation:
    """The messages exchanged with a model so far. Every turn draws its own random numbers."""

    def __init__(
        self,
        engine: NativeEngine,
        tokenizer: Tokenizer,
        params: SamplingParams,
        system: str | None = None,
    ) -> None:
        """``system`` is a message that precedes all others; None if there is none."""
        self._engine, self._tokenizer, self._params = engine, tokenizer, params
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self.turns = 0
        """The number of messages sent so far, also those that are forgotten."""
        self.is_cut = False
        """Whether the last answer ended at the limit on its tokens."""
        self.reset()

    def reset(self) -> None:
        """Forget all messages but the system's."""
        self.messages = list(self._system)

    def answer(self, text: str) -> Iterator[str]:
        """Yield the answer to a message in pieces, as they are sampled. Message and answer become a
        part of the conversation only when all pieces have been taken.

        Raise an EngineError, and forget the message, if the conversation is too long or if the
        model's log-probabilities are not finite.
        """
        from burnish.engine.protocol import Request
        from burnish.tasks.text import encode_chat

        asked = [*self.messages, {"role": "user", "content": text}]
        prompt, self.turns = encode_chat(self._tokenizer, asked), self.turns + 1
        request = Request(
            f"turn-{self.turns}",
            prompt,
            params=self._params,
            group=self.turns - 1,
            stream=Stream.GENERATE,
        )
        self._engine.submit(request)
        done, shown = list[Completion](), ""
        while not done:
            done = self._engine.step()
            tokens = self._engine.response_of(request.request_id)
            whole = self._tokenizer.decode(tokens, skip_special=True).rstrip(UNFINISHED)
            if whole.startswith(shown) and len(whole) > len(shown):
                yield whole[len(shown) :]
                shown = whole
        yield done[0].text[len(shown) :]
        if done[0].finish is Finish.ABORT:
            raise EngineError("the model's log-probabilities were not finite, so the answer ended")
        self.messages = [*asked, {"role": "assistant", "content": done[0].text}]
        self.is_cut = done[0].finish is Finish.LENGTH


def chat_command(
    model: Annotated[str, Argument(help="a name, a directory, hf:ORG/NAME or a run")],
    temperature: Annotated[float, Option(min=0, help="0 is greedy")] = 1.0,
    max_tokens: Annotated[int, Option(min=1, help="per answer")] = 256,
    system: Annotated[str | None, Option(help="a message that precedes all others")] = None,
    seed: Annotated[int, Option(help="seed of the sampling")] = 0,
) -> None:
    """Talk to a model: each line is a message. /reset forgets the messages; Ctrl-D or Ctrl-C ends.

    Without a chat template, the model continues the text of all messages, one after the other.
    """
    with progress_display(None, model):
        engine, tokenizer = open_named_model(model)
    params = SamplingParams(temperature, max_tokens=max_tokens, seed=seed)
    conversation = Conversation(engine, tokenizer, params, system)
    try:
        for line in read_lines():
            if line == RESET:
                conversation.reset()
            elif line.startswith("/"):
                name = line.split()[0]
                _say(
                    f"there is no command {name!r}, only {RESET}; a message can begin with a space"
                )
            elif line.strip():
                _answer(conversation, line)
    except KeyboardInterrupt:
        echo()


def read_lines() -> Iterator[str]:
    """Yield the lines that a user types, or the lines of a file or a pipe. Invalid UTF-8 is
    replaced."""
    is_typed = sys.stdin.isatty()
    if is_typed:
        with suppress(ImportError):
            import readline  # noqa: F401  # input() uses it to edit lines
    else:
        sys.stdin.reconfigure(errors="replace")  # type: ignore[union-attr]
    try:
        while True:
            yield input("> " if is_typed else "").encode(errors="replace").decode()
    except EOFError:
        if is_typed:
            echo()


def _answer(conversation: Conversation, line: str) -> None:
    """Print the answer to a line as it is sampled. A blank line separates it from the last answer
    if the lines are not typed, because then no prompt does."""
    if conversation.turns and not sys.stdin.isatty():
        echo()
    try:
        for piece in conversation.answer(line):
            echo(printable(piece), nl=False)
        echo()
        if conversation.is_cut:
            _say("the answer was cut at its limit of tokens (--max-tokens, or the model's context)")
    except EngineError as error:
        echo()
        _say(f"{error}; shorten the message, or enter {RESET}")


def _say(text: str) -> None:
    echo(f"[{printable(text)}]", err=True)
