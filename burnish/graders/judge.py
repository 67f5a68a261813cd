"""A judge: a language model behind an OpenAI-compatible endpoint that answers in a fixed format.

    failure                                   reaction
    no connection, a status other than 200    retry after a pause
    an answer in another format               retry; the request quotes the answer and the error
    the last retry fails, or a timeout        an error, never a score

The API key is read from the environment for each request and is not stored.
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

from burnish.console.text import printable
from burnish.errors import GraderError
from burnish.graders import rubric
from burnish.graders.rewards import FULL
from burnish.graders.tally import Items, Tally
from burnish.recipe.judge import JudgeConfig
from burnish.types import Grade, Status

PAUSE = 0.25
"""Seconds before the first retry; each further pause is twice as long."""
FAILURES = (OSError, HTTPException, ValueError)
"""Exceptions that lead to a retry: of the connection, of the HTTP reply and of its format."""
LARGEST, QUOTED = 1_000_000, 200
"""Size in bytes at which reading a reply ends, and characters of it that an error quotes."""


class Reply(NamedTuple):
    """A judge's answer to a question, or the reason why there is none."""

    answer: Any
    """The parsed answer; None if the judge failed."""
    problem: str | None
    """Description of the failure; None if the judge answered."""
    cost: dict[str, float]
    """The numbers of "calls", "tokens" and "retries"."""


class Judge:
    """A ``Grader`` that asks a judge whether each response meets the criteria of its rubric.

    A row has "rubric" (criteria by name) and "asked" (the prompt's text), as `check_judged` returns
    it. ``config.parallel`` responses are graded at the same time. If the judge fails, the grade's
    status is ERROR.
    """

    def __init__(self, config: JudgeConfig) -> None:
        self.config = config

    def grade(self, items: Items) -> list[Grade]:
        tally, grades = Tally(items), list[Grade]()
        with ThreadPoolExecutor(self.config.parallel) as threads:
            try:
                for index, grade in enumerate(threads.map(self._grade, items)):
                    tally.add(index, grade.status, grade.message)
                    grades.append(grade)
            except BaseException:
                threads.shutdown(wait=False, cancel_futures=True)
                raise
        return grades

    def close(self) -> None:
        """Do nothing: there are no processes to end."""

    def check(self) -> None:
        """Send a test request, whose answer may have any format.

        Raise a GraderError if the environment variable of the API key is not set, or if the judge
        does not answer.
        """
        config, name = self.config, self.config.key
        if name is not None and not os.environ.get(name):
            raise GraderError(f"task.judge.key = {name!r} is not set in the environment; export it")
        try:
            self._chat([{"role": "user", "content": "Answer with [1]."}], config.seconds, 1)
        except OSError as error:
            raise GraderError(
                f"the judge {config.model} at task.judge.url = {config.url!r} does not answer "
                f"({error}); start it, as with `burnish serve`, or name another"
            ) from None
        except FAILURES as error:
            raise GraderError(
                f"the judge {config.model} at task.judge.url = {config.url!r} gives no chat "
                f"completion ({error}); the URL ends before /chat/completions, usually with /v1, "
                "and task.judge.model is a model of this server"
            ) from None

    def ask(self, messages: rubric.Messages, read: Callable[[str], Any]) -> Reply:
        """Send ``messages`` to the judge until ``read`` accepts the answer; return what ``read``
        returns in a `Reply`.

        ``read`` parses the text of an answer, without its thinking, and raises ValueError for a
        wrong format. After ``config.tries`` requests, or ``config.seconds`` in total, return a
        `Reply` with the last problem instead: a failing judge raises no exception.
        """
        end, problem = time.monotonic() + self.config.seconds, ""
        cost = {"calls": 0.0, "tokens": 0.0, "retries": 0.0}
        for number in range(self.config.tries):
            text, left = None, end - time.monotonic()
            if left <= 0:
                problem += f"; {self.config.seconds:g} s (task.judge.seconds) are over"
                break
            cost["calls"], cost["retries"] = number + 1.0, float(number)
            try:
                limit = self.config.max_tokens + self.config.think_tokens
                text, tokens = self._chat(messages, left, limit)
                cost["tokens"] += tokens
                text = rubric.without_thinking(text)
                return Reply(read(text), None, cost)
            except FAILURES as error:
                problem = f"{type(error).__name__}: {error}"
            if text is not None:
                problem += f", got {text[:QUOTED]!r}"
                again = [("assistant", text), ("user", f"{problem}; answer with the list alone.")]
                messages = messages + [{"role": role, "content": said} for role, said in again]
            elif number + 1 < self.config.tries:
                time.sleep(max(0.0, min(PAUSE * 2**number, end - time.monotonic())))
        return Reply(None, printable(f"the judge at {self.config.url} failed: {problem}"), cost)

    def _grade(self, item: tuple[str, Mapping[str, Any]]) -> Grade:
        """Grade one (response, row) pair; the row holds the rubric and the prompt's text, "asked".

        The reward is the weighted share of the criteria that are met, and each criterion is a part
        of the grade. If the judge fails, the grade is an error.
        """
        response, row = item
        messages = rubric.ask_scores(row["rubric"], row["asked"], response)
        reply = self.ask(messages, partial(rubric.read_scores, count=len(row["rubric"])))
        if reply.answer is None:
            return Grade(math.nan, {}, Status.ERROR, reply.problem, reply.cost)
        parts = dict(zip(row["rubric"], map(float, reply.answer), strict=True))
        share = rubric.share(row["rubric"], reply.answer)
        return Grade(share, parts, cost=reply.cost, correct=share >= FULL)

    def _chat(self, messages: rubric.Messages, seconds: float, max_tokens: int) -> tuple[str, int]:
        """Send one request; return the answer's text, and the total number of tokens of request and
        answer that the endpoint reports, or 0 if it reports none.

        Raises one of ``FAILURES`` if there is no such answer within ``seconds``.
        """
        config, end = self.config, time.monotonic() + seconds
        sent = {"model": config.model, "messages": messages, "temperature": config.temperature or 0}
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
