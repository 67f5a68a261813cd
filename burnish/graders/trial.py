"""Calls a reward once before a run, so that a reward that fails is found before a model is loaded.

There is no response yet. The reward is called in a worker, as in the run, with made-up responses
and the first row: a sentence and, if that raises or returns no number, an answer in tags and an
answer alone. A reward that grades one of them passes. A reward that exceeds a limit fails at once.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from reprlib import Repr
from typing import Any

from burnish.console.progress import tell
from burnish.errors import DataError
from burnish.graders.in_process import InProcess, can_interrupt
from burnish.graders.pool import GraderLimits, GraderPool, make_grader
from burnish.graders.rewards import BUILT_IN, Outcome, Reward, late
from burnish.graders.tally import Tally

SENTENCE = "Let me think about it. The answer is 42."
TRIED_NEXT = ("exception", "value")
"""Failures that may be due to the response: the next response is tried."""
NUMBER = "return one finite number, or a dict of numbers with the key 'reward'"
UNREADABLE = "for a response that it can't read, return {'reward': 0.0, 'status': 'unparsed'}"
REMEDIES = {
    "exception": f"correct it; {UNREADABLE}",
    "value": f"{NUMBER}; {UNREADABLE}",
    "wall": "make it faster, or raise task.wall_seconds",
    "cpu": "make it faster, or raise task.cpu_seconds",
    "memory": "let it use less, or raise task.memory_mb",
    "exit": "remove the call that ends the process",
}
IN_PROCESS = (
    "; it runs in this process, which can't always end such a call, because it is a lambda, a "
    "closure or not defined in a file: define it at the top level of a file"
)
_SHORT = Repr()
_SHORT.maxstring = 80


def try_reward(
    reward: str | Reward, limits: GraderLimits, row: Mapping[str, Any], max_errors: float
) -> None:
    """Call a reward with the responses of `made_up_responses` until it grades one.

    Raise a DataError if it grades none, exceeds a limit or ends its worker; raise a GraderError if
    its worker does not start. A failure is only displayed as a note if another response is graded,
    or if ``max_errors`` (rollout.max_errors) is 1. A built-in reward is not called.
    """
    if isinstance(reward, str) and reward in BUILT_IN:
        return
    name = reward if isinstance(reward, str) else getattr(reward, "__name__", repr(reward))
    tell("check", f"checking the reward {name}")
    failed: list[tuple[str, Outcome]] = []
    with closing(make_grader(reward, replace(limits, workers=1))) as grader:
        for text in made_up_responses(row):
            outcome = _call(grader, text, row, limits.wall_seconds)
            if outcome.status != "error":
                break
            failed.append((text, outcome))
            if outcome.cause not in TRIED_NEXT:
                break
    if not failed:
        return
    text, outcome = failed[0] if outcome.cause in TRIED_NEXT else failed[-1]
    remedy = REMEDIES[outcome.cause or "exception"]
    remedy += IN_PROCESS * (isinstance(grader, InProcess) and outcome.cause == "wall")
    said = (
        f"reward {name} fails: {outcome.message}. It was called before the run with the made-up "
        f"response {text!r} and the first row, {_SHORT.repr(dict(row))}; {remedy}"
    )
    is_graded = outcome.cause in TRIED_NEXT and len(failed) < len(made_up_responses(row))
    if is_graded or max_errors >= 1:
        more = "; it grades other made-up responses" if is_graded else ""
        tell("note", f"note: {said}{more}")
        return
    raise DataError(f"{said}. rollout.max_errors = 1 makes this a note")


def made_up_responses(row: Mapping[str, Any]) -> list[str]:
    """Return responses of the kinds that rewards read: a sentence, an answer in tags, an answer
    alone.

    The answer in the latter two is the row's "answer" if that is a text or a number, otherwise 42.
    """
    answer = row.get("answer")
    text = str(answer) if isinstance(answer, str | int | float) else "42"
    return [SENTENCE, f"<think>Let me think.</think> <answer>{text}</answer>", text]


def _call(
    grader: GraderPool | InProcess, text: str, row: Mapping[str, Any], seconds: float
) -> Outcome:
    """Grade one response; in another thread if a call in this thread could not be interrupted."""
    items, found = [(text, row)], list[Outcome]()

    def grade() -> None:
        found.extend(grader.outcomes(items, Tally(items)))

    if isinstance(grader, GraderPool) or can_interrupt():
        grade()
    else:
        thread = threading.Thread(target=grade, daemon=True)
        thread.start()
        thread.join(seconds)
    return found[0] if found else late(seconds)
