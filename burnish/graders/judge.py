"""A judge: a language model behind an OpenAI-compatible endpoint that answers in a fixed form.

    fails                                     then
    no connection, a status other than 200    asked again after a pause
    an answer in another form                 asked again, with the answer and the form it must have
    the last of its tries, or the deadline    an error, never a score

The key is read from the environment when it is sent, and is stored nowhere.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from burnish.errors import ConfigError, GraderError
from burnish.graders import rubric
from burnish.graders.pool import Items
from burnish.graders.rewards import FULL
from burnish.schema.judged import JudgeConfig
from burnish.types import Grade, Status
from burnish.wording import printable

PAUSE = 0.25
"""Seconds before the second try; each further pause is twice as long."""
FAILURES = (OSError, HTTPException, ValueError)
"""Errors of the connection, of the reply and of its form."""
LARGEST, QUOTED = 1_000_000, 200
"""Bytes of a reply that are read, and characters of it that a message quotes."""


class Reply(NamedTuple):
    """The end of a question to a judge, and its cost: calls, tokens and retries."""

    answer: Any
    """None if the judge failed."""
    problem: str | None
    """None if the judge answered."""
    cost: dict[str, float]


class Judge:
    """Asks questions, some at a time, and grades responses by a rubric."""

    def __init__(self, config: JudgeConfig) -> None:
        self.config = config

    def grade(self, items: Items) -> list[Grade]:
        with ThreadPoolExecutor(self.config.parallel) as threads:
            return list(threads.map(self._grade, items))

    def close(self) -> None:
        """Nothing to end."""

    def check(self) -> None:
        """Raises if the judge does not answer at all; the form of its answer does not matter."""
        config, name = self.config, self.config.key
        if name is not None and not os.environ.get(name):
            raise ConfigError(f"task.judge.key = {name!r} is not set in the environment; export it")
        try:
            self._chat([{"role": "user", "content": "Answer with [1]."}], config.seconds, 1)
        except FAILURES as error:
            raise GraderError(
                f"the judge {config.model} at task.judge.url = {config.url!r} does not answer "
                f"({error}); start it, as with `burnish serve`, or name another"
            ) from None

    def ask(self, messages: rubric.Messages, read: Callable[[str], Any]) -> Reply:
        """The judge's answer as ``read`` reads it, which raises a ValueError at another form."""
        end, problem = time.monotonic() + self.config.seconds, ""
        cost = {"calls": 0.0, "tokens": 0.0, "retries": 0.0}
        for number in range(self.config.tries):
            text, left = None, end - time.monotonic()
            if left <= 0:
                problem += f"; {self.config.seconds:g} s (task.judge.seconds) are over"
                break
            cost["calls"], cost["retries"] = number + 1.0, float(number)
            try:
                text, tokens = self._chat(messages, left, self.config.max_tokens)
                cost["tokens"] += tokens
                return Reply(read(text), None, cost)
            except FAILURES as error:
                problem = f"{type(error).__name__}: {error}"
            if text is not None:
                problem += f", got {text[:QUOTED]!r}"
                again = [("assistant", text), ("user", f"{problem}; answer with the list alone.")]
                messages = messages + [{"role": role, "content": said} for role, said in again]
            elif number + 1 < self.config.tries:
                time.sleep(max(0.0, min(PAUSE * 2**number, end - time.monotonic())))
        return Reply(None, printable(f"the judge failed: {problem}"), cost)

    def _grade(self, item: tuple[str, Mapping[str, Any]]) -> Grade:
        """The row has the rubric, and the prompt as the judge sees it."""
        response, row = item
        asked = rubric.ask_scores(row["rubric"], row["asked"], response)
        reply = self.ask(asked, partial(rubric.read_scores, count=len(row["rubric"])))
        if reply.answer is None:
            return Grade(math.nan, {}, Status.ERROR, reply.problem, reply.cost)
        parts = dict(zip(row["rubric"], map(float, reply.answer), strict=True))
        share = rubric.share(row["rubric"], reply.answer)
        return Grade(share, parts, cost=reply.cost, correct=share >= FULL)

    def _chat(self, messages: rubric.Messages, seconds: float, max_tokens: int) -> tuple[str, int]:
        """An answer's text, and the tokens that the endpoint counted: 0 if it counts none."""
        config, end = self.config, time.monotonic() + seconds
        sent = {"model": config.model, "messages": messages, "temperature": 0}
        headers = {"Content-Type": "application/json"}
        if config.key is not None:
            headers["Authorization"] = f"Bearer {os.environ.get(config.key, '')}"
        url, content = urlsplit(config.url), b""
        kind = HTTPSConnection if url.scheme == "https" else HTTPConnection
        with closing(kind(url.netloc, timeout=seconds)) as connection:
            body = json.dumps(sent | {"max_tokens": max_tokens}).encode()
            path = f"{url.path.rstrip('/')}/chat/completions"
            connection.request("POST", path, body, headers)
            socket, reply = connection.sock, connection.getresponse()
            while not reply.isclosed() and len(content) <= LARGEST:
                socket.settimeout(max(end - time.monotonic(), 0.001))
                if not (chunk := reply.read1(LARGEST)):
                    break
                content += chunk
        if reply.status != 200:
            raise ValueError(f"status {reply.status}: {content[:QUOTED]!r}")
        try:
            found = json.loads(content)
            tokens = (found.get("usage") or {}).get("total_tokens") or 0
            return str(found["choices"][0]["message"]["content"]), int(tokens)
        except (LookupError, TypeError, ValueError, AttributeError, RecursionError):
            raise ValueError(f"no chat completion: {content[:QUOTED]!r}") from None
