"""The timeline of actors: when each one worked, and what it waited for otherwise.

``timeline.jsonl`` has one row per actor call. Times are seconds since 1970 by the clock of the
actor's machine. A resumed run appends to the same file with another incarnation number.
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
"""Number of most recent calls whose seconds are summed."""
SHOWN = 300
"""Number of most recent calls in the chart."""
SPAN = ("actor", "what", "begin", "end", "version")
"""Keys of a call's row that the chart needs."""
OTHERS = {"evaluate": "an evaluation", "state": "a checkpoint"}
"""Calls outside of training steps, and the names under which other actors wait for them."""
CAUSES = {
    "generator": {"learner": "weights", "scorer": "grades", "generator": "other generators"},
    "scorer": {"generator": "samples", "learner": "weights"},
    "learner": {"scorer": "grades", "generator": "samples"},
}
"""What each kind of actor waits for, by the kind of actor that produces it, most direct first."""


def timeline_data(run: Path) -> dict[str, Any]:
    """Return the data of the timeline chart: for each of the last `SHOWN` calls the values of
    ``SPAN``, and each actor's seconds of work and of waiting, as `account` returns them, in the
    last `ROWS` calls."""
    rows = deque(iterate_rows(run / FILE), ROWS)
    spans = [[row[name] for name in SPAN] for row in list(rows)[-SHOWN:]]
    return {"spans": spans, "seconds": dict(sorted(account(rows).items()))}


def account(rows: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Return for each actor its seconds of work, under the key "", and of waiting, under the name
    of what it waited for.

    ``rows`` are rows of timeline.jsonl. An idle actor waits for the output of an actor that is
    working, and for "the driver" if none of the actors that it depends on is working. Time between
    two incarnations is not counted.
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
    """Split the time at the beginning and end of each call. Yield the seconds of each interval, and
    the method that each working actor runs in it."""
    whole = [row for row in rows if row["end"] > row["begin"]]
    begins = [(row["begin"], row["actor"], row["what"]) for row in whole]
    ends = [(row["end"], row["actor"], "") for row in whole]
    working: dict[str, str] = {}
    for (now, actor, what), (after, *_) in pairwise(sorted(ends + begins, key=lambda e: e[0])):
        working[actor] = what  # at equal times, ends come before begins
        if after > now:
            yield after - now, {name: call for name, call in working.items() if call}


def _cause(actor: str, working: Mapping[str, str]) -> str:
    if actor in working:
        return ""
    makers = {what if what in OTHERS else name.partition("-")[0] for name, what in working.items()}
    things = OTHERS | CAUSES.get(actor.partition("-")[0], {})
    return next((thing for maker, thing in things.items() if maker in makers), "the driver")
