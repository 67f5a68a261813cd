"""Who worked when, and who waited for whom: ``timeline.jsonl`` has a row for each call of an actor.

Its times are seconds since 1970 by the clock of the actor's machine. A resumed run goes on in the
same file, under another incarnation.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

from burnish.runs.metrics import iterate_rows

FILE = "timeline.jsonl"
ROWS = 3_000
"""Calls, the last ones, whose seconds are added up."""
SHOWN = 300
"""Calls that a picture shows at most: the last ones."""
SPAN = ("actor", "what", "begin", "end", "version")
OTHERS = {"evaluate": "an evaluation", "state": "a checkpoint"}
"""Calls that are no part of a step, and hold up everybody who has no work."""
CAUSES = {
    "generator": {"learner": "weights", "scorer": "grades", "generator": "other generators"},
    "scorer": {"generator": "samples", "learner": "weights"},
    "learner": {"scorer": "grades", "generator": "samples"},
}
"""The things that each kind of actor waits for, by the kind that makes them; the nearest first."""


def describe(run: Path) -> dict[str, Any]:
    """The data of a picture: the last calls, as ``SPAN``, and each actor's seconds."""
    rows = deque(iterate_rows(run / FILE), ROWS)
    spans = [[row[name] for name in SPAN] for row in list(rows)[-SHOWN:]]
    return {"spans": spans, "seconds": dict(sorted(account(rows).items()))}


def account(rows: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """The seconds of each actor: of its calls, by "" and, while it had none, by the thing that it
    waited for.

    It waited for the thing that an actor was making meanwhile, and for "the driver" if no actor
    worked that could have held it up. The time between two incarnations is nobody's.
    """
    found: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for _, part in groupby(rows, lambda row: row["incarnation"]):
        own = list(part)
        actors = {row["actor"] for row in own}
        for seconds, working in _stretches(own):
            for actor in actors:
                found[actor][_cause(actor, working)] += seconds
    return found


def _stretches(rows: Iterable[Mapping[str, Any]]) -> Iterator[tuple[float, dict[str, str]]]:
    """The seconds between two events, and the call of each actor that worked then."""
    whole = [row for row in rows if row["end"] > row["begin"]]
    begins = [(row["begin"], row["actor"], row["what"]) for row in whole]
    ends = [(row["end"], row["actor"], "") for row in whole]
    working: dict[str, str] = {}
    for (now, actor, what), (after, *_) in pairwise(sorted(ends + begins, key=lambda e: e[0])):
        working[actor] = what  # of one moment, ends were put before begins
        if after > now:
            yield after - now, {name: call for name, call in working.items() if call}


def _cause(actor: str, working: Mapping[str, str]) -> str:
    if actor in working:
        return ""
    makers = {what if what in OTHERS else name.partition("-")[0] for name, what in working.items()}
    things = OTHERS | CAUSES.get(actor.partition("-")[0], {})
    return next((thing for maker, thing in things.items() if maker in makers), "the driver")
