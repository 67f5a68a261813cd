"""The ledger: every group that was sampled, learned from or dropped, in the order of events.

A resumed run does not cut it back. Its rows prove afterwards that each group was learned from as
often as the strategy says, whatever died on the way.
"""

from __future__ import annotations

import json
import reprlib
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from burnish.runs import timeline
from burnish.runs.metrics import iterate_rows

FILE = "ledger.jsonl"
Row = Mapping[str, Any]


class Ledger:
    """Appends events; a row is handed to the operating system at once."""

    def __init__(self, run: Path, incarnation: int, step: int) -> None:
        """An incarnation of the run begins from ``step``."""
        self._run, self._incarnation = run, incarnation
        self.write("start", step=step)

    def write(self, event: str, **told: Any) -> None:
        """The work of an actor is a row of the timeline, every other event one of the ledger."""
        row = {"event": event, "incarnation": self._incarnation, **told, "time": time.time()}
        name = timeline.FILE if event == "worked" else FILE
        with (self._run / name).open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def learned(self, step: int, groups: Sequence[int], *, oldest: int, version: int) -> None:
        """``oldest`` is the version of the oldest token, ``version`` the learner's before it."""
        self.write("learned", step=step, groups=groups, oldest=oldest, version=version)


class Verdict(NamedTuple):
    steps: int
    groups: int
    """Groups that were learned from."""
    dropped: int
    """Groups that were closed without being learned from."""
    reissued: int
    """Groups that were sampled more than once."""
    restarts: int
    lag: int
    """The largest, in versions."""
    problems: tuple[str, ...]

    def __str__(self) -> str:
        told = (
            f"{self.steps} steps learned from {self.groups} groups; {self.dropped} were dropped, "
            f"{self.reissued} sampled again, after {self.restarts} restarts; the largest lag was "
            f"{self.lag} versions"
        )
        return "\n".join([told, *(self.problems or ["every group is accounted for"])])


def judge(
    run: Path, *, batch: int, window: int, max_uses: int = 1, max_lag: int | None = None
) -> Verdict:
    """The verdict on a run whose steps learn from ``batch`` groups each, out of ``window``.

    ``max_lag`` is None if the strategy has no bound in versions.
    """
    rows = list(iterate_rows(run / FILE))
    return judge_rows(rows, batch=batch, window=window, max_uses=max_uses, max_lag=max_lag)


def judge_rows(
    rows: Sequence[Row], *, batch: int, window: int, max_uses: int = 1, max_lag: int | None = None
) -> Verdict:
    """As `judge`, of the rows of a ledger."""
    learned, dropped = standing(rows)
    uses = Counter(group for row in learned for group in row["groups"])
    gone = {row["group"] for row in dropped}
    steps = [row["step"] for row in learned]
    lag = max((row["version"] - row["oldest"] for row in learned if row["groups"]), default=0)
    last = max([*uses, *gone], default=-1)
    missing = [n for n in range(last) if n not in uses and n not in gone]
    if len(missing) <= window - batch:  # the end of a run leaves so many open
        missing = []
    found = {
        "steps are missing or repeated": _wrong_steps(steps),
        f"groups were learned from more than {max_uses} times": _over(uses, max_uses),
        "groups were dropped and learned from": sorted(gone & set(uses)),
        "steps have another number of groups": _odd_steps(learned, dropped, batch),
        "groups were neither learned from nor dropped": missing,
    }
    problems = [f"{what}: {reprlib.repr(numbers)}" for what, numbers in found.items() if numbers]
    if max_lag is not None and lag > max_lag:
        problems.append(f"the largest lag is {lag} versions, and the bound is {max_lag}")
    sampled = Counter(row["group"] for row in rows if row["event"] == "sampled")
    return Verdict(
        steps=len(set(steps)),
        groups=len(uses),
        dropped=len(gone),
        reissued=sum(count > 1 for count in sampled.values()),
        restarts=sum(row["event"] == "start" for row in rows) - 1,
        lag=lag,
        problems=tuple(problems),
    )


def standing(rows: Iterable[Row]) -> tuple[list[Row], list[Row]]:
    """The rows of steps and of dropped groups that still hold: an incarnation that begins from a
    step undoes all later steps."""
    kept: dict[str, list[Row]] = {"learned": [], "dropped": []}
    for row in rows:
        if row["event"] == "start":
            for event, before in kept.items():
                kept[event] = [one for one in before if one["step"] <= row["step"]]
        elif row["event"] in kept:
            kept[row["event"]].append(row)
    return kept["learned"], kept["dropped"]


def lags(rows: Iterable[Row]) -> Counter[int]:
    """Groups that were learned from, by the lag of their oldest token in versions; a group that
    was learned from twice counts twice."""
    rows = list(rows)
    oldest = {row["group"]: row["oldest"] for row in rows if row["event"] == "sampled"}
    learned = [(row, group) for row in standing(rows)[0] for group in row["groups"]]
    return Counter(row["version"] - oldest.get(group, row["oldest"]) for row, group in learned)


def _wrong_steps(steps: Sequence[int]) -> list[int]:
    wanted = Counter(range(1, max(steps, default=0) + 1))
    return sorted((Counter(steps) - wanted) + (wanted - Counter(steps)))


def _over(uses: Mapping[int, int], limit: int) -> list[int]:
    return sorted(group for group, count in uses.items() if count > limit)


def _odd_steps(learned: Sequence[Row], dropped: Sequence[Row], batch: int) -> list[int]:
    """Steps that have more than ``batch`` groups, or fewer and too few were dropped."""
    lost = Counter(
        row["step"] for row in dropped if row.get("why") in ("error", "overlong", "dead")
    )
    sizes = {row["step"]: len(row["groups"]) for row in learned}
    return [step for step, size in sizes.items() if not size <= batch <= size + lost[step]]
